"""Errors that a user reads as one sentence, and lines that warn."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dpo.redaction import redact

MAX_MESSAGE = 300  # characters of a library's message
ADVICE_BY_WORDS = {  # what to do about errors of the system and of NCCL, by words in their messages
    "codec can't decode": "save it as UTF-8, in a spreadsheet as CSV UTF-8",
    "Too many open files": "raise the hard limit of open files (ulimit -Hn shows it), or use fewer processes",
    "NCCL": "NCCL_DEBUG=INFO shows the cause: often the network (NCCL_SOCKET_IFNAME) or a small /dev/shm",
}


class InputError(ValueError):
    """Bad input, explained in one sentence with the value and the fix. Commands then exit with status 2.

    An error that reaches the user, and is neither an InputError nor a RunError, is a bug of ours.
    """


class RunError(RuntimeError):
    """A failure that is not a bug, explained with cause and fix. Commands then exit with status 1."""


class NonFinite(RunError):
    """The loss is NaN or infinite; every process raises it at the same update."""


class ScorerFailed(RunError):
    """An error of a scorer of online answers, or an invalid score; every process raises it."""


class SamplingFailed(Exception):
    """Samples could not be drawn. If one process fails, every process raises this error, and training goes on."""


class WarningLine(str):
    """A line that begins with `warning: `. A run's log recognizes the class, and records the warnings printed."""

    message: str  # without `warning: `

    def __new__(cls, text: str) -> "WarningLine":
        line = super().__new__(cls, f"warning: {text}")
        line.message = text
        return line

    def __str__(self) -> str:
        """Return this object, not a plain `str`, so that `print` hands a WarningLine to the log."""
        return self


def one_sentence(error: BaseException) -> str:
    """Return an error's message as one line, and what to do about it if we know.

    Secrets are redacted, lone surrogates escaped, and long messages cut. An empty message becomes the error's class.
    """
    if is_disk_full(error):
        return "the disk is full"
    words = str(error).split()
    if isinstance(error, LookupError) or not words:  # the message of a KeyError is only the key
        words.insert(0, type(error).__name__)
    text = redact(" ".join(words))[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
    advice = find_advice(error)
    return f"{text} ({advice})" if advice else text


def suggest(typed: str, names: Iterable[str]) -> str:
    """Return ": did you mean NAME?" if one of `names` is similar to what was typed, else ""."""
    by_lowercase = {name.lower(): name for name in names}
    typed = typed.lower()
    swapped = [name for name in by_lowercase if sorted(name) == sorted(typed)]  # such as dpo for dop
    similar = swapped + difflib.get_close_matches(typed, by_lowercase, n=1)
    suggestions = [by_lowercase[name] for name in dict.fromkeys(similar)]  # each once
    return f": did you mean {' or '.join(suggestions)}?" if suggestions else ""


def find_advice(error: BaseException) -> str | None:
    """Return what a user can do about an error of the system or of NCCL; None if we know nothing."""
    for words, advice in ADVICE_BY_WORDS.items():
        if words in str(error):
            return advice
    return None


@contextmanager
def explaining(errors: Any, make: Callable[[str], Exception]) -> Iterator:
    """Replace an error inside the context, of the class or classes `errors`, by the exception `make(message)`."""
    try:
        yield
    except errors as error:
        raise make(one_sentence(error)) from error


def needing(package: str) -> AbstractContextManager:
    """Raise an InputError that says how to install `package` if a module imported inside the context is missing."""
    return explaining(ModuleNotFoundError, lambda why: InputError(f"{why}: pip install {package}"))


@contextmanager
def explaining_library(make: Callable[[Exception], Exception]) -> Iterator:
    """Replace an error that a library raises inside the context by the exception `make(error)`.

    Errors that are already explained, a lack of memory and the failure of another process pass unchanged, as callers
    handle them.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        if is_memory_error(error) or is_lost_contact(error):
            raise
        raise make(error) from error


def is_memory_error(error: BaseException) -> bool:
    """Whether memory ran out, in torch, cuBLAS, cuDNN or NCCL: most of them raise a plain RuntimeError that says so."""
    signs = ("out of memory", "_STATUS_ALLOC_FAILED", "t allocate memory")  # the last comes after "can'" or "couldn'"
    is_torchs = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return isinstance(error, MemoryError) or is_torchs


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not grow: the disk is full, or a quota or the limit of a file's size is reached."""
    # The codes are 27 for the limit of a file's size (EFBIG), 28 for a full disk (ENOSPC) and 122 for a quota (EDQUOT).
    # Python writes them as "[Errno 28]", and Rust, in which safetensors is written, as "(os error 28)". The message of
    # torch.save has no code, but "unexpected pos".
    return bool(re.search(r"(\[Errno |\(os error )(27|28|122)[\])]|unexpected pos", str(error)))


@contextmanager
def explaining_full_disk() -> Iterator:
    """Replace an OSError inside the context that says that the disk is full by a RunError that names the file."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise RunError(f"the disk is full: {error.filename or 'a file'} could not be written") from error


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective or torch's store failed, probably because another process did."""
    classes = {base.__name__ for base in type(error).__mro__}  # by name, as importing torch takes seconds
    return "DistError" in classes or "/gloo/" in str(error)  # gloo's errors have no class, but a path of its source
