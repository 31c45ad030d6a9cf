"""The tokenizer of a model."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
import transformers

from dpo.errors import InputError, one_sentence


@contextlib.contextmanager
def explaining_load_errors(what: str, name: str):
    """Context in which the many errors of loading become one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, (InputError, torch.cuda.OutOfMemoryError)):
            raise
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{what} {name!r} contains Python code, which is not run by default: read it, then set "
                f"model.trust_remote_code=true, or --trust-remote-code for a script"
            ) from error
        reason = one_sentence(error)
        raise InputError(f"{what} {name!r} cannot be loaded: give a local directory or a Hub id: {reason}") from error


def load_tokenizer(name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer; without a pad token it pads with EOS.

    Raises InputError if it has no EOS token.
    """
    with explaining_load_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=trust_remote_code
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {name!r} has no EOS token, which ends every response; set one in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def identify_tokenizer(tokenizer: Any) -> str | None:
    """A digest that changes with what a tokenizer and its template do.

    None if that is not known: a tokenizer in Python may do anything, and a template may write today's date.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    if not tokenizer.is_fast or "strftime_now" in template:
        return None
    marks = repr((transformers.__version__, tokenizer.eos_token, tokenizer.special_tokens_map, template))
    return hashlib.sha256((marks + tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()


def find_bos_warnings(tokenizer: Any, prompt: str) -> list[str]:
    """A warning if prompts lack the BOS that the tokenizer adds."""
    bos = tokenizer.bos_token
    if not bos or tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id] or prompt.startswith(bos):
        return []
    return [f"the tokenizer begins texts with {bos!r}, and prompts do not, as none is added: see docs/faq.md"]
