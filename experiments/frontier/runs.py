"""Runs of `experiments.frontier`: model, tokenizer, data, and processes.

Every policy is trained by the command line of users, in a process forked from one with all imports done, and judged by
`exact.py` in the process that trained it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from dpo.errors import InputError, RunError
from experiments.frontier.task import SYMBOLS, Pairs, Task

EOS = "<eos>"
ROW = ("prompt", "chosen", "rejected")
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.06,
}
COMMON = (
    *("optimizer=AdamW", "schedule=cosine"),
    *("do_first_eval=false", "sample_during_eval=false", "n_eval_examples=16", "eval_batch_size=16"),
    *("eval_every=1000000000", "export=false", "wandb.enabled=false", "num_workers=0"),
)
IMPORTED = (
    "datasets", "hydra", "transformers.models.llama", "transformers.trainer_utils", "dpo.checkpoint.resume",
    "dpo.training.memory", "train", "trainers",
)  # fmt: skip
BAD_INPUT = 2  # status of train.py
LAST_LINES = 15  # of a failed run's log


class Job(NamedTuple):
    """A run of train.py in `directory`."""

    directory: Path
    overrides: tuple[str, ...]


def import_all() -> None:
    """Import the runs' modules before they are forked from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is tiny: threads wait for each other
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # and no faster on a GPU
    os.environ["HF_HUB_OFFLINE"] = "1"
    from dpo.system.host import silence_bitsandbytes

    silence_bitsandbytes()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


# --- model and data ---------------------------------------------------------------------------------------------------


def write_model(directory: Path, task: Task) -> None:
    """Write a small Llama without weights, and its tokenizer."""
    import tokenizers
    import transformers

    letters = SYMBOLS[: task.symbols]
    vocabulary = {token: i for i, token in enumerate((*letters, EOS))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=EOS))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=EOS, pad_token=EOS).save_pretrained(
        directory
    )
    special = {"bos_token_id": None, "eos_token_id": task.symbols, "pad_token_id": task.symbols}
    config = transformers.LlamaConfig(**MODEL, **special, vocab_size=len(vocabulary))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def write_pairs(directory: Path, task: Task, train: Pairs, test: Pairs) -> None:
    """Write a dataset in a form that train.py reads."""
    directory.mkdir(parents=True)
    for split, pairs in (("train", train), ("test", test)):
        rows = [{key: task.text(row) for key, row in zip(ROW, rows, strict=True)} for rows in zip(*pairs, strict=True)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def write_scorer(root: Path, task: Task, seed: int) -> str:
    """Write a file for `online.function`, and return its name."""
    file = root / "scorers" / f"seed_{seed}.py"
    file.parent.mkdir(exist_ok=True)
    made = f"from experiments.frontier.task import Task, noisy_scorer\n\nscore = noisy_scorer({task}, seed={seed})\n"
    file.write_text(made, encoding="utf-8")
    return f"{file}:score"


def list_overrides(root: Path, task: Task, *, data: str) -> tuple[str, ...]:
    """Overrides common to all runs on the dataset `data` of `root`."""
    length = task.prompt_length + task.response_length
    return (
        *(f"model.name_or_path={root / 'model'}", "model.block_name=LlamaDecoderLayer", "model.random_init=true"),
        *(f"datasets=[{data}]", f"dataset_sources.{data}={root / 'data' / data}", f"local_dirs=[{root}]"),
        *(f"max_length={length}", f"max_prompt_length={task.prompt_length}", *COMMON),
    )


# --- runs -------------------------------------------------------------------------------------------------------------


def load_policy(root: Path, archive: Path) -> Any:
    """Load a model with the weights of a `policy.pt`, for evaluation."""
    import torch

    from dpo.models.pretrained import load_model

    return load_model(str(root / "model"), dtype=torch.float32, archive=str(archive), random_init=True).eval()


def run_all(jobs: Sequence[Job], finish: Callable[[Job], None], *, at_once: int) -> Iterator[Job]:
    """Run jobs, and yield each when it is done.

    `finish` is called in the process that trained.

    Raises InputError if train.py refuses its input, RunError if a run fails otherwise.
    """
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                # forked: a fresh interpreter would import for longer than it trains
                process = get_context("fork").Process(target=_work, args=(job, finish))
                process.start()
                running[process.sentinel] = job, process
            for sentinel in wait(running):
                job, process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    lines = (job.directory / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
                    said = [f"{job.directory.name} ended with status {process.exitcode}:", *lines[-LAST_LINES:]]
                    raise (InputError if process.exitcode == BAD_INPUT else RunError)("\n".join(said))
                yield job
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _work(job: Job, finish: Callable[[Job], None]) -> None:
    job.directory.mkdir(parents=True)
    with (job.directory / "log.txt").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    train_py = str(Path(__file__).resolve().parents[2] / "train.py")
    sys.argv = [train_py, *job.overrides, f"local_run_dir={job.directory}", f"exp_name={job.directory.name}"]
    runpy.run_path(train_py, run_name="__main__")
    finish(job)
    for checkpoint in job.directory.glob("step-*"):  # the other files record how it trained
        shutil.rmtree(checkpoint)
