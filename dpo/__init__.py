"""Preference training: DPO and its relatives. `dpo.run` trains from Python, the command `dpo` from a shell."""

from importlib import import_module
from typing import Any

__version__ = "1.0.0"


def __getattr__(name: str) -> Any:
    if name in ("run", "Result"):  # not imported before it is used, as each command imports this file
        return getattr(import_module("dpo.api"), name)
    raise AttributeError(f"dpo has no {name}")
