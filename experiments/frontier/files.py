"""Files of `experiments.frontier`: model, tokenizer, pairs and scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from experiments.frontier.jobs import write_whole
from experiments.frontier.task import SYMBOLS, Pairs, Task

EOS = "<eos>"
COLUMNS = ("prompt", "chosen", "rejected")
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.06,
}


def write_model(directory: Path, task: Task) -> None:
    """Write a small Llama without weights, and its tokenizer.

    The model has no EOS, as all responses have the same length: the trainer truncates the texts' EOS.
    """
    import tokenizers
    import transformers

    letters = SYMBOLS[: task.symbols]
    vocabulary = {token: i for i, token in enumerate((*letters, EOS))}
    words = tokenizers.models.WordLevel(vocabulary, unk_token=EOS)
    splitter = tokenizers.Tokenizer(words)
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")  # a token per letter
    splitter.decoder = tokenizers.decoders.Fuse()  # joins tokens without spaces
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter,
        eos_token=EOS,
        pad_token=EOS,
    )
    tokenizer.save_pretrained(directory)
    config = transformers.LlamaConfig(
        **MODEL,
        vocab_size=task.symbols,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def write_pairs(directory: Path, task: Task, train: Pairs, test: Pairs) -> None:
    """Write a dataset of two splits, a file of JSON lines each, as train.py reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", train), ("test", test)):
        lines = []
        for pair in zip(*pairs, strict=True):
            texts = [task.text(symbols) for symbols in pair]
            record = dict(zip(COLUMNS, texts, strict=True))
            lines.append(json.dumps(record) + "\n")
        write_whole(directory / f"{name}.jsonl", "".join(lines))


def read_pairs(file: Path, task: Task) -> Pairs:
    """Read a dataset that `write_pairs` wrote."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    parts = [task.read([row[column] for row in rows]) for column in COLUMNS]
    return Pairs(*parts)


def write_scorer(root: Path, task: Task, seed: int) -> str:
    """Write a Python file with the scorer of `noisy_scorer`; return the value of `online.function` that names it."""
    file = root / "scorers" / f"seed_{seed}.py"
    file.parent.mkdir(exist_ok=True)
    code = f"from experiments.frontier.task import Task, noisy_scorer\n\nscore = noisy_scorer({task}, seed={seed})\n"
    file.write_text(code, encoding="utf-8")
    return f"{file}:score"


def load_policy(model: Path, archive: Path) -> Any:
    """Load the model whose config is in `model` with the weights of `archive`, a `policy.pt`, to measure it."""
    from dpo.models.paths import ModelPath
    from dpo.models.pretrained import load_model

    # `model` has a config and no weights; the archive has all of them
    return load_model(ModelPath(str(model), archive, random_init=True), dtype=torch.float32).eval()
