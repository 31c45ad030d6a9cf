"""Places of runs, models and datasets on this machine."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from datetime import datetime


def get_local_dir(prefixes: Sequence[str]) -> str:
    """`PREFIX/USER` for the first prefix that exists, else for the last.

    Creates nothing, unlike the reference implementation.
    """
    prefix = next((p for p in prefixes if os.path.exists(p)), prefixes[-1])
    return os.path.join(prefix, getpass.getuser())


def get_cache_dir(local_dirs: Sequence[str]) -> str | None:
    """The cache directory of models and datasets: `LOCAL_DIR/USER`.

    None, the libraries' default, if the environment sets `XDG_CACHE_HOME` or `HF_HOME`.
    """
    return None if {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys() else get_local_dir(local_dirs)


def get_local_run_dir(exp_name: str, local_dirs: Sequence[str]) -> str:
    """`LOCAL_DIR/EXP_NAME_TIMESTAMP`, to the microsecond so that quick sweeps don't collide. Creates nothing."""
    return os.path.join(get_local_dir(local_dirs), f"{exp_name}_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")
