"""The rank that torchrun or Slurm assigned to this process. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from dpo.errors import InputError


class RankEnv(NamedTuple):
    """A process's rank in a run, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int  # within its machine: the index of its GPU
    address: str
    port: int
    hosts: bool = False  # whether it serves the rendezvous store


def find_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """The rank that torchrun or Slurm (several tasks of one `srun`) assigned; None without such a launcher.

    Raises InputError for variables that are missing or not numbers.
    """
    environ = os.environ if environ is None else environ  # not a default argument: `datasets` replaces it with a copy
    number = partial(read_number, environ=environ)
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        rank = number("RANK")
        hosts = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = environ.get("MASTER_ADDR", "localhost"), number("MASTER_PORT", 29500)
        return RankEnv(rank, number("WORLD_SIZE"), number("LOCAL_RANK", rank), address, port, hosts)
    if number("SLURM_STEP_NUM_TASKS", 1) > 1:  # not SLURM_NTASKS, which a batch script has too
        rank, local_rank = number("SLURM_PROCID"), number("SLURM_LOCALID")
        port = number("MASTER_PORT", 20_000 + number("SLURM_JOB_ID") % 20_000)
        address = environ.get("MASTER_ADDR") or _first_node(environ)
        return RankEnv(rank, number("SLURM_STEP_NUM_TASKS"), local_rank, address, port, hosts=rank == 0)
    return None


def is_rank_0() -> bool:
    """Return whether this is the first of the processes that a launcher started; true without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def read_number(name: str, default: int | None = None, *, environ: Mapping[str, str]) -> int:
    """Read an integer environment variable. Raises InputError for another value, or a missing one without default."""
    if name not in environ and default is None:
        raise InputError(f"a launcher set some of its variables but not {name}: unset them, or launch again")
    text = environ.get(name, str(default))
    if not text.isdigit():
        raise InputError(f"{name}={text} in the environment is not a number")
    return int(text)


def _first_node(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)  # "node[03-05,9]" begins with node03
    if first is None:
        raise InputError(f"SLURM_STEP_NODELIST={nodes} names no node: set MASTER_ADDR to the first node")
    return first[1] + (first[2] or "")
