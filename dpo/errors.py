"""Errors that a user reads as one sentence."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from a user: one sentence with the value and the fix.

    `train.py` prints it without a traceback and exits with status 2; every other exception is a bug of ours.
    """


class RunError(RuntimeError):
    """A failure of a run that is not a bug of ours: one sentence with the cause and the fix. Exit status 1."""
