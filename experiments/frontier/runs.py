"""Model, tokenizer, data and overrides of the runs of `experiments.frontier`.

A policy is trained by the command line of train.py, or by `plain.py`, and measured by `exact.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.frontier.jobs import QUIET, write_records
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
COMMON = (*QUIET, "n_eval_examples=16", "eval_batch_size=16", "eval_every=1000000000")

# --- model and data ---------------------------------------------------------------------------------------------------


def write_model(directory: Path, task: Task) -> None:
    """Write a small Llama without weights, and its tokenizer.

    If all responses have the same length, the model has no EOS: the trainer truncates the texts' EOS.
    """
    import tokenizers
    import transformers

    letters = SYMBOLS[: task.symbols]
    vocabulary = {token: i for i, token in enumerate((*letters, EOS))}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=EOS))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")  # a token per letter
    splitter.decoder = tokenizers.decoders.Fuse()  # joins tokens without spaces
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(directory)
    eos_id = None if task.fixed_length else vocabulary[EOS]
    special = {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": eos_id}
    config = transformers.LlamaConfig(**MODEL, **special, vocab_size=task.symbols + (0 if task.fixed_length else 1))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def write_pairs(directory: Path, task: Task, train: Pairs, test: Pairs) -> None:
    """Write a dataset in a form that train.py reads."""

    def make_records(pairs: Pairs) -> list[dict[str, str]]:
        return [dict(zip(COLUMNS, map(task.text, pair), strict=True)) for pair in zip(*pairs, strict=True)]

    write_records(directory, train=make_records(train), test=make_records(test))


def read_pairs(file: Path, task: Task) -> Pairs:
    """Read a dataset that `write_pairs` wrote."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def read(column: str, length: int) -> np.ndarray:
        return np.stack([task.read(row[column], length) for row in rows])

    chosen, rejected = (read(column, task.response_length) for column in ("chosen", "rejected"))
    return Pairs(read("prompt", task.prompt_length), chosen, rejected)


def write_scorer(root: Path, task: Task, seed: int) -> str:
    """Write a scorer's file; return the value of `online.function`."""
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
        f"model.name_or_path={root / 'model'}", "model.block_name=LlamaDecoderLayer", "model.random_init=true",
        f"datasets=[{data}]", f"dataset_sources.{data}={root / 'data' / data}", f"local_dirs=[{root}]",
        f"max_length={length}", f"max_prompt_length={task.prompt_length}", *COMMON, *layout,
    )  # fmt: skip


def load_policy(root: Path, archive: Path) -> Any:
    """Load the model with the weights of a `policy.pt`, to measure it."""
    import torch

    from dpo.models.pretrained import load_model

    # root/model has a config and no weights; the archive has all of them
    return load_model(str(root / "model"), dtype=torch.float32, archive=str(archive), random_init=True).eval()
