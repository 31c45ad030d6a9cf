"""Silencing of irrelevant log messages of libraries."""

from __future__ import annotations

import logging


def silence_bitsandbytes() -> None:
    """Silence bitsandbytes' request for a kernel package that is not used here.

    Call it before importing PEFT, which imports bitsandbytes if that is installed.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
