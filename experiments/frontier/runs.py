"""Runs of `experiments.frontier`: model, tokenizer, data, and processes.

A policy is trained by the command line of train.py, or by `plain.py`, in a process that is forked after all imports,
and measured by `exact.py` in the same process.
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

import numpy as np

from dpo.errors import InputError, RunError
from experiments.frontier.task import SYMBOLS, Pairs, Task

EOS = "<eos>"
COLUMNS = ("prompt", "chosen", "rejected")
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
    "dpo.training.memory", "experiments.frontier.plain", "train", "trainers",
)  # fmt: skip
BAD_INPUT = 2  # exit status of train.py
LAST_LINES = 15  # number of lines shown of a failed run's log


class Job(NamedTuple):
    """A run in `directory`: of train.py, unless it has no overrides."""

    directory: Path
    overrides: tuple[str, ...] = ()

    @property
    def result(self) -> Path:
        """The file that `finish` writes last; then the job is done."""
        return self.directory / "rows.json"


def import_all() -> None:
    """Import the runs' modules before they are forked from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is so small that threads only wait for each other
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it is no faster on a GPU
    os.environ["HF_HUB_OFFLINE"] = "1"
    from dpo.system.host import silence_bitsandbytes

    silence_bitsandbytes()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


# --- model and data ---------------------------------------------------------------------------------------------------


def write_model(directory: Path, task: Task) -> None:
    """Write a small Llama without weights, and its tokenizer.

    If all responses have the same length, the model has no EOS: the trainer truncates the EOS of the texts.
    """
    import tokenizers
    import transformers

    letters = SYMBOLS[: task.symbols]
    vocabulary = {token: i for i, token in enumerate((*letters, EOS))}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=EOS))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")  # a token per letter
    splitter.decoder = tokenizers.decoders.Fuse()  # joins them without spaces
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(directory)
    end = None if task.fixed_length else vocabulary[EOS]
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    config = transformers.LlamaConfig(**MODEL, **special, vocab_size=task.symbols + (not task.fixed_length))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def write_pairs(directory: Path, task: Task, train: Pairs, test: Pairs) -> None:
    """Write a dataset in a form that train.py reads."""
    directory.mkdir(parents=True, exist_ok=True)  # it is half written if the sweep was killed
    for split, pairs in (("train", train), ("test", test)):
        with (directory / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for pair in zip(pairs.prompts, pairs.chosen, pairs.rejected, strict=True):
                file.write(json.dumps(dict(zip(COLUMNS, map(task.text, pair), strict=True))) + "\n")


def read_pairs(file: Path, task: Task) -> Pairs:
    """Read a dataset that `write_pairs` wrote."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lengths = task.prompt_length, task.response_length, task.response_length
    return Pairs(
        *(
            np.stack([task.read(row[column], length) for row in rows])
            for column, length in zip(COLUMNS, lengths, strict=True)
        )
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or absent after a kill."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def write_scorer(root: Path, task: Task, seed: int) -> str:
    """Write a file for `online.function`, and return its name."""
    file = root / "scorers" / f"seed_{seed}.py"
    file.parent.mkdir(exist_ok=True)
    code = f"from experiments.frontier.task import Task, noisy_scorer\n\nscore = noisy_scorer({task}, seed={seed})\n"
    file.write_text(code, encoding="utf-8")
    return f"{file}:score"


def list_overrides(root: Path, task: Task, *, data: str) -> tuple[str, ...]:
    """List the overrides common to all runs on the dataset `data`."""
    length = task.prompt_length + task.response_length
    # without EOS there is no token to pad with, and `padded` rows of one length need none
    layout = ("layout=padded",) if task.fixed_length else ()
    return (
        *(f"model.name_or_path={root / 'model'}", "model.block_name=LlamaDecoderLayer", "model.random_init=true"),
        *(f"datasets=[{data}]", f"dataset_sources.{data}={root / 'data' / data}", f"local_dirs=[{root}]"),
        *(f"max_length={length}", f"max_prompt_length={task.prompt_length}", *COMMON, *layout),
    )


# --- runs -------------------------------------------------------------------------------------------------------------


def load_policy(root: Path, archive: Path) -> Any:
    """Load the model with the weights of a `policy.pt`, to measure it."""
    import torch

    from dpo.models.pretrained import load_model

    # root/model has a config and no weights: all of them are the archive's
    return load_model(str(root / "model"), dtype=torch.float32, archive=str(archive), random_init=True).eval()


def run_all(jobs: Sequence[Job], finish: Callable[[Job], None], *, at_once: int) -> Iterator[Job]:
    """Run jobs, `at_once` at a time, and yield each when done.

    Those that were done before come first. `finish` is called in the process that trained, and writes `job.result`.

    Raises InputError if train.py refuses its input, RunError if a run fails for another reason.
    """
    yield from (job for job in jobs if job.result.exists())
    waiting = [job for job in jobs if not job.result.exists()]
    running = {}  # (job, process) by the process's sentinel
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
                    raise _make_error(job, process.exitcode)
                yield job
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _make_error(job: Job, status: int) -> Exception:
    lines = (job.directory / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    text = "\n".join([f"{job.directory.name} ended with status {status}:", *lines[-LAST_LINES:]])
    return InputError(text) if status == BAD_INPUT else RunError(text)


def _work(job: Job, finish: Callable[[Job], None]) -> None:
    """Run a job in this process, with its output in `log.txt`."""
    shutil.rmtree(job.directory, ignore_errors=True)  # of a run that was killed
    job.directory.mkdir(parents=True)
    with (job.directory / "log.txt").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.overrides:
        train_py = str(Path(__file__).resolve().parents[2] / "train.py")
        sys.argv = [train_py, *job.overrides, f"local_run_dir={job.directory}", f"exp_name={job.directory.name}"]
        runpy.run_path(train_py, run_name="__main__")
    finish(job)
    for checkpoint in job.directory.glob("step-*"):  # only the records of the run are kept
        shutil.rmtree(checkpoint)
