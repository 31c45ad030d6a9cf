"""What pytest offers, in the words of these tests."""

import subprocess
from collections.abc import Iterable
from typing import Any

import pytest

from dpo.errors import InputError


def refused(sentence: str) -> Any:
    """Expect that an input is refused with such a sentence, a regular expression."""
    return pytest.raises(InputError, match=sentence)


def slow(*values: object) -> Any:
    """A set of parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(cases: Iterable[Iterable], every: int) -> list[Any]:
    """Sets of parameters, of which `make test` takes one in so many."""
    return [pytest.param(*case) if i % every == 0 else slow(*case) for i, case in enumerate(cases)]


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result
