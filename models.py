"""Loading tokenizer and models, log-probabilities of a batch, sampling. Knows no config and no process group."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers

from checkpoint import load_archive
from losses import _get_batch_logps
from tokenization import Batch, concatenated_inputs
from utils import InputError, disable_dropout

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextlib.contextmanager
def _explaining(what: str, name: str):
    """Turn the many ways in which a hub or a directory lacks something into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, (InputError, torch.cuda.OutOfMemoryError)):
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{what} {name!r} cannot be loaded; give a local directory or a Hub id: {reason}") from error


def load_tokenizer(name: str, *, cache_dir: str | None = None) -> Any:
    """The tokenizer; its pad token is EOS if it has none. Raises InputError if it has no EOS."""
    with _explaining("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, cache_dir=cache_dir)
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {name!r} has no EOS token, which ends every response; set one in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def load_config(name: str, *, cache_dir: str | None = None) -> transformers.PretrainedConfig:
    """A model's config. Raises InputError if it is not there."""
    with _explaining("model", name):
        return transformers.AutoConfig.from_pretrained(name, cache_dir=cache_dir)


def load_structure(
    name: str, *, dtype: torch.dtype, attn_implementation: str = "eager", cache_dir: str | None = None
) -> transformers.PreTrainedModel:
    """The model of `load_model` without its weights, on the meta device: no memory, to be filled by another process."""
    config = load_config(name, cache_dir=cache_dir)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    disable_dropout(model)
    return model


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    archive: str | None = None,
    attn_implementation: str = "eager",
    random_init: bool = False,
    seed: int = 0,
    device_map: str | dict | None = None,
    cache_dir: str | None = None,
) -> transformers.PreTrainedModel:
    """A causal language model in `dtype` with dropout off, its weights from `archive` (a `policy.pt`) if given.

    `random_init` builds the architecture from its config alone, the same weights for the same seed.
    Raises InputError for a model that is not there, lacks weights, or does not fit the archive.
    """
    with _explaining("model", name):
        if random_init:
            config = load_config(name, cache_dir=cache_dir)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation=attn_implementation
                ).to(dtype)
            model.to(device_map[""] if isinstance(device_map, dict) else "cuda" if device_map else "cpu")
        else:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                attn_implementation=attn_implementation,
                device_map=device_map,
                cache_dir=cache_dir,
                output_loading_info=True,
            )
            if loading["missing_keys"]:  # transformers would leave these random and go on
                missing = ", ".join(sorted(loading["missing_keys"])[:5])
                raise InputError(f"model {name!r} has no weights for {missing}; were they saved with another class?")
    disable_dropout(model)
    if archive is not None:
        load_archive(model, archive)
    return model


def check_positions(model: Any, max_length: int) -> None:
    """Raises InputError if the model has learned positions (GPT-2) and too few of them: it would end in an IndexError.

    Rotary positions have no end, and pass.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not model.get_input_embeddings())
    if limit is not None and max_length > limit and any(table.num_embeddings == limit for table in tables):
        raise InputError(f"max_length={max_length} is more than the {limit} positions that {type(model).__name__} has")


def sequence_logps(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Summed log-probabilities of the labelled tokens, (B,), softmax in float32 at least, for (B, T) inputs."""
    logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits  # (B, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _get_batch_logps(logits, labels.to(logits.device))


def chosen_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probabilities of the chosen responses (SFT: of the targets), (B,)."""
    return sequence_logps(model, batch["chosen_input_ids"], batch["chosen_attention_mask"], batch["chosen_labels"])


def concatenated_forward(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, rejected) log-probabilities, each (B,), from one forward over both: FSDP gathers weights once."""
    rows = concatenated_inputs(batch)
    logps = sequence_logps(
        model, rows["concatenated_input_ids"], rows["concatenated_attention_mask"], rows["concatenated_labels"]
    )
    chosen, rejected = logps.chunk(2)
    return chosen, rejected


@torch.no_grad()
def sample(model: Any, batch: Batch, tokenizer: Any, *, max_length: int, seed: int, in_step: bool = False) -> list[str]:
    """One sampled continuation per prompt, up to `max_length` tokens with the prompt. Leaves the random state alone.

    `in_step`: several processes share the model's shards, so each goes on until the last has finished its rows.
    """
    prompt_ids = batch["prompt_input_ids"]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        ids = model.generate(
            prompt_ids,
            attention_mask=batch["prompt_attention_mask"],
            max_new_tokens=max_length - prompt_ids.shape[1],  # over what the model's generation config may say
            do_sample=True,
            synced_gpus=in_step,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.batch_decode(ids[:, prompt_ids.shape[1] :], skip_special_tokens=True)
