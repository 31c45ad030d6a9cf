"""Errors that a user reads as one sentence."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from a user: one sentence with the value and the fix.

    `train.py` prints it without a traceback and exits with status 2; every other exception is a bug of ours.
    """


class RunError(RuntimeError):
    """What ends a run through no fault of ours: one sentence with the cause and the way on. Exit status 1."""
