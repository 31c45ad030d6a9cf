"""Sizes, models, data and runs of the tests in `tests/gpu`.

On a GPU the tests measure models of a useful size. Without a GPU the models are small, which only shows that tests run.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.runs import GOLDEN, ROOT, TINY, change_json, make_environment

GPU = torch.cuda.device_count() > 0
DEVICE = "cuda" if GPU else "cpu"
QUICK = "GPU_CHECK_QUICK" in os.environ
WORDS = GOLDEN / "words"
VOCABULARY = 1024  # of the tokenizer in tests/golden/tiny-llama
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # overrides the program's setting in cuBLAS and cuDNN
Choice = TypeVar("Choice")

COMMON = ("loss=dpo", "loss.beta=0.1", "datasets=[hh]", f"model.name_or_path={TINY}", "model.reference_dtype=float32",
          "model.block_name=LlamaDecoderLayer", "n_epochs=null", "n_eval_examples=4", "eval_batch_size=4",
          "do_first_eval=false", "sample_during_eval=false", "max_length=96", "max_prompt_length=64", "batch_size=4",
          "warmup_steps=2")  # fmt: skip
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def limit(seconds: float) -> pytest.MarkDecorator:
    """The time limit of a test, longer without a GPU."""
    return pytest.mark.timeout(seconds if GPU else 4 * seconds)


def pick(full: Choice, quick: Choice, small: Choice) -> Choice:
    """The value for this run's size; `small` is for a CPU."""
    return (quick if QUICK else full) if GPU else small


class HostReads(TorchDispatchMode):
    """Count operations for which the host waits on a GPU."""

    waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.index.Tensor:  # for a boolean index the host waits for the number of True
            self.number += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.number += function in self.waits
        return function(*args, **(kwargs or {}))


# --- models and data -------------------------------------------------------------------------------------------------


def describe(family: str, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The config of a small model of a family, `llama` or `gpt_neox`."""
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden if family == "gpt_neox" else 8 * hidden // 3 // 8 * 8,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip


def as_config(settings: dict[str, Any]) -> Any:
    import transformers

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.AutoConfig.for_model(**{**special, **settings})


def write_model(directory: Path, settings: dict[str, Any]) -> Path:
    """Write `config.json` and the golden runs' tokenizer, without weights."""
    directory.mkdir(exist_ok=True)
    as_config(settings).save_pretrained(directory)
    kind = {"llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM"}[settings["model_type"]]
    change_json(directory / "config.json", architectures=[kind])
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TINY / file, directory)
    return directory


def build(settings: dict[str, Any], *, dtype: torch.dtype, attention: str, device: str = DEVICE) -> Any:
    """A model with random weights, the same at every call."""
    import transformers

    from dpo.models.attention import choose_attention
    from dpo.models.pretrained import disable_dropout

    config = as_config(settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=choose_attention(attention)
        )
    disable_dropout(model)
    return model.train()


def random_pairs(n: int, *, prompt: tuple[int, int], response: tuple[int, int], seed: int = 0) -> list[Any]:
    """`n` pairs of random tokens with lengths in these ranges."""
    from dpo.data.examples import Example

    draw = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(least, most)))

    return [Example(tokens(*prompt), (tokens(*response), tokens(*response))) for _ in range(n)]


def few_words(folder: Path, n: int) -> Path:
    """Write a dataset of the golden runs' first `n` pairs."""
    directory = folder / f"words-{n}"
    directory.mkdir(exist_ok=True)
    for file in ("train.jsonl", "test.jsonl"):
        lines = (WORDS / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (directory / file).write_text("".join(lines[:n]), encoding="utf-8")
    return directory


# --- runs of the command line ----------------------------------------------------------------------------------------


class Run:
    """`python train.py OVERRIDES` into FOLDER/NAME, in the background."""

    def __init__(self, folder: Path, name: str, *overrides: str, **environment: str) -> None:
        self.name, self.directory, self.log = name, folder / name, folder / f"{name}.log"
        fixed = (f"local_run_dir={self.directory}", f"local_dirs=[{folder}]", f"exp_name={name}", "wandb.enabled=false")
        environment = make_environment(**environment)
        if GPU and environment.get("CUDA_VISIBLE_DEVICES") != "":
            environment.pop("OMP_NUM_THREADS")  # as many threads as in training
        command = [sys.executable, "train.py", *fixed, *overrides]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def done(self) -> Self:
        """Wait for the process, which must end well."""
        status = self.process.wait()  # the test's own time limit ends all that it started
        assert status == 0, f"{self.name} ended with status {status}: {self.text[-3000:]}"
        return self

    def records(self, file: str = "metrics.jsonl", split: str | None = None) -> list[dict[str, Any]]:
        """The complete lines of one of the run's logs."""
        path = self.directory / file
        found = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] if path.exists() else []
        return [line for line in found if split in (None, line.get("split"))]


# --- the real loop in this process -----------------------------------------------------------------------------------


def train_here(folder: Path, name: str, *overrides: str) -> None:
    """Run `train.work` in this process, where a test can patch the trainer."""
    import torch
    import torch.distributed as dist

    import train
    from benchmarks.harness import compose
    from dpo.settings.plan import resolve
    from dpo.system.launching import init_distributed

    plan = resolve(compose([f"local_run_dir={folder / name}", f"local_dirs=[{folder}]", *overrides]))
    if plan.trainer.multi_process and not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed(0, 1, backend=backend, store=dist.FileStore(f"{folder / name}.store", 1))
    train.work(0, 1, plan)
