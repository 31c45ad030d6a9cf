"""Models and data of the checks: architectures with random weights, pairs of random tokens."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from scripts.gpu_checks.common import TINY, Setting

VOCABULARY = 1024  # of the tokenizer in tests/golden/tiny-llama
SHAPES = {  # of published models, without their weights
    "pythia-2.8b": {
        "model_type": "gpt_neox", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 10240, "vocab_size": 50304, "max_position_embeddings": 2048, "use_parallel_residual": True,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                          "partial_rotary_factor": 0.25},
    },
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip


def describe(family: str, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The config of a small model of a family (`llama` or `gpt_neox`), with the vocabulary of the golden runs."""
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden if family == "gpt_neox" else 8 * hidden // 3 // 8 * 8,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip


def as_config(settings: dict[str, Any]) -> Any:
    import transformers

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.AutoConfig.for_model(**{**special, **settings})


def write_model(setting: Setting, family: str, layers: int, hidden: int, heads: int) -> Path:
    """The directory of a small model without weights, with the golden runs' tokenizer."""
    return write_settings(Path(setting.folder) / family, describe(family, layers, hidden, heads))


def write_settings(directory: Path, settings: dict[str, Any]) -> Path:
    """A model's directory with `config.json` and the golden runs' tokenizer, without weights."""
    directory.mkdir(exist_ok=True)
    as_config(settings).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    kind = {"llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM"}[settings["model_type"]]
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TINY / file, directory)
    return directory


def build(settings: dict[str, Any], *, dtype: Any, attention: str, device: str) -> Any:
    """The model with random weights, the same at every call, created on the device; without dropout."""
    import torch
    import transformers

    from dpo.models.pretrained import disable_dropout

    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            as_config(settings), dtype=dtype, attn_implementation=attention
        )
    disable_dropout(model)
    return model.train()


def random_pairs(n: int, *, prompt: tuple[int, int], response: tuple[int, int], seed: int = 0) -> list[Any]:
    """`n` pairs of random tokens, with prompt and response lengths in these ranges."""
    from dpo.data.examples import Example

    draw = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(least, most)))

    return [Example(tokens(*prompt), (tokens(*response), tokens(*response))) for _ in range(n)]
