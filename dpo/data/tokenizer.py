"""Loading and checking of a model's tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from pathlib import Path
from typing import Any

import transformers

from dpo.errors import InputError, explaining_library, one_sentence


@contextlib.contextmanager
def explaining_load_errors(what: str, name: str):
    """Context that turns an error of loading `name` into an InputError.

    `what` says what is loaded, such as "tokenizer".
    """

    def explain(error: Exception) -> InputError:
        if "trust_remote_code" in str(error):
            return InputError(
                f"{what} {name!r} contains Python code, which is not run by default: read it, then set "
                f"model.trust_remote_code=true, or --trust-remote-code for a script"
            )
        why = one_sentence(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's message would advise to run the code in the file
            why = "a file of weights has code besides data, which is not run, or is damaged"
        directory, fix = Path(name).expanduser(), "give a local directory or a Hub id"
        if (exported := directory / "LATEST" / "hf").is_dir():
            fix = f"it is a run, whose model is {exported}"
        elif (directory / "config.json").is_file():
            fix = "its files may be damaged or incomplete: compare them with their source, or fetch them again"
        return InputError(f"{what} {name!r} cannot be loaded; {fix}: {why}")

    with explaining_library(explain):
        yield


def load_tokenizer(name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer, which pads with EOS.

    A published pad token may lack an embedding; masks tell padding from text. Raises InputError for a tokenizer
    without EOS.
    """
    with explaining_load_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=trust_remote_code
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {name!r} has no EOS token, which ends every response; set one in its files")
    tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def find_pad_token(tokenizer: Any, n_embeddings: int) -> int | None:
    """A token with an embedding that ends no text, or None.

    A model with a scalar head reads the reward at the last token that is not padding, so EOS and words cannot pad. It
    is the tokenizer's own pad token, another with "pad" in its name, or BOS, if that is a special token.
    """
    added = tokenizer.added_tokens_decoder
    named_pad = [id for id, token in added.items() if "pad" in token.content.lower()]
    for id in (tokenizer.pad_token_id, *named_pad, tokenizer.bos_token_id):
        if id in added and added[id].special and id != tokenizer.eos_token_id and id < n_embeddings:
            return id
    return None


def identify_tokenizer(tokenizer: Any) -> str | None:
    """Make a digest of what a tokenizer and its chat template do.

    None if no digest can tell: a tokenizer in Python may do anything, and a template may write today's date.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    if not tokenizer.is_fast or "strftime_now" in template:
        return None
    settings = repr((transformers.__version__, tokenizer.eos_token, tokenizer.special_tokens_map, template))
    return hashlib.sha256((settings + tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()


def find_bos_warnings(tokenizer: Any, prompt: str) -> list[str]:
    """Return a warning if prompts lack the BOS of the tokenizer.

    `prompt` is one of the prompts.
    """
    bos = tokenizer.bos_token
    adds_bos = bool(bos) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if not adds_bos or prompt.startswith(bos):
        return []
    return [
        f"this tokenizer would begin every text with {bos!r}, but training adds no special tokens, so prompts lack it: "
        f"write it into the prompts, as docs/faq.md says"
    ]
