"""Small random models of many families, and a batch for them."""

import copy
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from dpo.data.examples import Example
from dpo.models.layouts import Padded
from dpo.models.paths import ModelPath
from dpo.models.pretrained import disable_dropout, load_model
from support.runs import TINY

nearly = partial(pytest.approx, rel=1e-4, abs=1e-5)
IDS = torch.arange(20).view(2, 10)
VOCABULARY = 101  # a prime: no number of processes divides it
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 60,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2, tied, with biases": lambda: transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3, norms per head": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "gpt-neox, sequential residual": lambda: transformers.GPTNeoXConfig(**COMMON, use_parallel_residual=False),
    "mistral": lambda: transformers.MistralConfig(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8),
    "gemma3, norms per head": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8),
    "phi3, fused projections": lambda: transformers.Phi3Config(**GROUPED),
    "olmo2, norms over all heads": lambda: transformers.Olmo2Config(**GROUPED),
    "gpt2, tied": lambda: transformers.GPT2Config(**GPT),
    "gpt-j": lambda: transformers.GPTJConfig(**GPT, rotary_dim=4),
}


def move_weights(model: torch.nn.Module, by: float) -> None:
    """Add random numbers to all weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)


def build(
    family: str | Callable[[], Any],
    *,
    on_meta: bool = False,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
) -> transformers.PreTrainedModel:
    """A small model with the same weights at every call.

    `family`: a name of FAMILIES, or a function that makes a config. On the meta device there are no weights.
    """
    config = FAMILIES[family]() if isinstance(family, str) else family()
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    disable_dropout(model)
    move_weights(model, 0.05)  # biases and norms begin as zeros and ones, which hides mistakes
    return model.train()


def list_examples(rows: int, length: int = 12, *, shared: bool = False) -> list[Example]:
    """Random pairs with prompts of 5 tokens, every second pair with short responses.

    `shared`: some pairs have texts in common.
    """
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCABULARY, (n,), generator=generator).tolist())

    pairs = [Example(draw(5), (draw(n), draw(n))) for n in ((3 if i % 2 else length - 5) for i in range(rows))]
    if shared:
        pairs[3] = Example(pairs[0].prompt, (pairs[0].responses[0], pairs[3].responses[1]))
        pairs[5] = pairs[5]._replace(prompt=pairs[0].prompt)
    return pairs


def plain_logps(model: Any, examples: list[Example]) -> torch.Tensor:
    """Log-probabilities of the responses, by one padded forward pass.

    Shape (2, B): chosen and rejected; (1, B) for SFT targets.
    """
    [microbatch] = Padded().split(examples, 1)
    return Padded().forward(model, microbatch.inputs).logps.sum(-1)


def load_tiny(archive: Any = None, **options: Any) -> Any:
    """The tiny Llama of the golden runs in float32; with an `archive`, as a run has trained it."""
    return load_model(ModelPath(str(TINY), archive), dtype=torch.float32, attn_implementation="sdpa", **options)


def publish(folder: Path, model: Any) -> Path:
    """Write a model beside the tiny tokenizer; return its directory."""
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def save_adapter(
    folder: Path, family: str = "llama", base: Path | str = "", **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Save an adapter with PEFT; returns the logits of `IDS` with it, and those of PEFT's merge."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False} | settings
    torch.manual_seed(1)
    model = peft.get_peft_model(build(family), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits, model.merge_and_unload()(IDS).logits


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 44, "num_attention_heads": 4}
ENCODER = {**SMALL, "max_position_embeddings": 40, "pad_token_id": 0}
REWARD_MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, pad_token_id=None),
    "gpt2": lambda: transformers.GPT2Config(pad_token_id=None, n_embd=32, n_layer=2, n_head=4, n_positions=40),
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "roberta": lambda: transformers.RobertaConfig(**ENCODER),
    "deberta": lambda: transformers.DebertaV2Config(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"]),
}


def save_reward_model(
    folder: Path, family: str, tokenizer: Any, *, template: str | None = CHAT, **settings: Any
) -> str:
    """Write a random sequence classification model with a tokenizer.

    `settings` go into the model's config.
    """
    config = REWARD_MODELS[family]()
    config.update({"vocab_size": len(tokenizer), "num_labels": 1, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    move_weights(model, 0.1)
    model.save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


logging.getLogger("transformers").setLevel(logging.ERROR)  # no warnings about token ids that a tiny vocabulary lacks


# This bounds the errors of weights after an update in float64 that is computed in another order. Optimizers divide a
# gradient by its size, down to eps, which is 1e-10 at least: a sum of 1,000 terms is off by about sqrt(1000) * 1.1e-16,
# for a gradient of norm 1, and an update at lr=1e-3 by 1e-3 * 3.5e-15 / 1e-10 = 3.5e-8. In float32 that is 19, whatever
# one machine has shown.
ROUNDING = 1e-6


def keep_float64(patch: pytest.MonkeyPatch) -> None:
    """Models cast to float32 in norms and softmax, whatever their dtype: let float64 stay float64."""
    softmax, to = torch.nn.functional.softmax, torch.Tensor.to

    def keep(x, *args, **kwargs):
        return x if x.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values()) else to(x, *args, **kwargs)

    patch.setattr(torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim=dim))
    patch.setattr(torch.Tensor, "to", keep)
    patch.setattr(torch.Tensor, "float", lambda x: keep(x, torch.float32))


def make_weights(trained: int, frozen: int) -> torch.nn.Module:
    """A module of so many weights, as a callback sees it."""
    return torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(n), requires_grad=n == trained) for n in (trained, frozen)
    )
