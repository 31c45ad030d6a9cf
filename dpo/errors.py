"""Errors that a user reads as one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Errors = type[Exception] | tuple[type[Exception], ...]
LONGEST = 300  # characters of a library's message


class InputError(ValueError):
    """Bad input from a user, in a sentence with value and fix; exit status 2. Others but RunError are bugs of ours."""


class RunError(RuntimeError):
    """A failure that is not a bug, with its cause and fix; exit status 1."""


class NonFinite(RunError):
    """A NaN or infinite loss or gradient, which every process raises at the same update."""


class ScorerFailed(RunError):
    """An error of a scorer of online answers, or an invalid score, which every process raises together."""


class SamplingFailed(Exception):
    """Sampling failed on at least one process; every process raises it, and training goes on."""


def one_sentence(error: BaseException) -> str:
    """An error's message on one readable line without lone surrogates; its class if it has none."""
    is_value_alone = isinstance(error, LookupError) or not str(error).strip()  # as in KeyError: 'missing'
    words = [type(error).__name__] * is_value_alone + str(error).split()
    return " ".join(words)[:LONGEST].encode(errors="backslashreplace").decode()


@contextmanager
def explaining(errors: Errors, make: Callable[[str], Exception]) -> Iterator[None]:
    """Context that replaces `errors` by what `make` returns for their message."""
    try:
        yield
    except errors as error:
        raise make(one_sentence(error)) from error


@contextmanager
def explaining_library(make: Callable[[Exception], Exception]) -> Iterator[None]:
    """Context that replaces whatever a library raises by what `make` returns.

    It is for a library's call that reads what is not ours: damaged or foreign content can make it raise anything, also
    a MemoryError for a length that no file has. Errors that are explained already pass, and those of torch that are no
    fault of the content: too little memory of a GPU, or another process that has failed.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or is_lost_contact(error):
            raise
        raise make(error) from error


def is_lost_contact(error: BaseException) -> bool:
    """Return whether it is an error of a collective or the store, probably because another process failed.

    Gloo's errors have no class of their own, but their text begins with the path of its source.
    """
    classes = {base.__name__ for base in type(error).__mro__}  # torch's take seconds to import
    return "DistError" in classes or "/gloo/" in str(error)
