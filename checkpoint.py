"""The files of a checkpoint: written whole or not at all, and the published reference's archives read back.

A checkpoint is a directory of `policy.pt`, `optimizer.pt` and `scheduler.pt`, each
`{"step_idx": examples, "state": state_dict, "metrics": evaluation means or None}`.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from utils import InputError

# buffers that transformers stored in 2023 and computes today
OBSOLETE_BUFFER = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|embed_positions)$|\.rotary_emb\.\w+$")
RENAMED = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's head


def write_checkpoint(directory: Path, states: Mapping[str, Any], *, step_idx: int, metrics: Mapping | None) -> None:
    """Write `NAME.pt` for each state, all under a temporary name that is renamed to `directory` at the end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left behind by a killed process with our pid
    temporary.mkdir()
    for name, state in states.items():
        with (temporary / f"{name}.pt").open("wb") as file:
            torch.save({"step_idx": step_idx, "state": state, "metrics": metrics}, file)
            file.flush()
            os.fsync(file.fileno())
    if directory.exists():  # saved again at the same step: a rename cannot replace a full directory
        shutil.rmtree(directory)
    temporary.rename(directory)


def point(link: Path, target: Path) -> None:
    """Make `link` (LATEST, BEST) a symbolic link to `target`, a directory beside it, in one atomic step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name, target_is_directory=True)
    temporary.replace(link)


def find_archive(archive: str) -> Path:
    """The `policy.pt` that `model.archive` means: the file, its directory, or a run's directory (its LATEST)."""
    path = Path(archive).expanduser()
    candidates = [path, path / "policy.pt", path / "LATEST" / "policy.pt"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError(f"model.archive={archive} is neither a policy.pt nor a directory that holds one")


def load_archive(model: torch.nn.Module, archive: str) -> None:
    """Load a `policy.pt`, ours or the published reference's, strictly; the file is read as data, never executed.

    Raises InputError if it is missing, not such a file, or of another architecture.
    """
    path = find_archive(archive)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state = content["state"]
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise InputError(f"model.archive={path} is not a policy.pt ({type(error).__name__}: {reason})") from error

    expected = model.state_dict()
    state = {RENAMED[k] if k in RENAMED and RENAMED[k] in expected else k: v for k, v in state.items()}
    state = {k: v for k, v in state.items() if k in expected or not OBSOLETE_BUFFER.search(k)}
    unknown = sorted(state.keys() - expected.keys())
    shared = {expected[k].data_ptr() for k in state if k in expected}  # tied weights may be stored under one name
    missing = sorted(k for k in expected.keys() - state.keys() if expected[k].data_ptr() not in shared)
    reshaped = [
        f"{k} is {tuple(state[k].shape)} there and {tuple(expected[k].shape)} here"
        for k in state
        if k in expected and state[k].shape != expected[k].shape
    ]
    if unknown or missing or reshaped:
        details = [f"unknown: {', '.join(unknown[:3])}"] * bool(unknown)
        details += [f"missing: {', '.join(missing[:3])}"] * bool(missing) + reshaped[:2]
        raise InputError(
            f"model.archive={path} is of another architecture than the model "
            f"({type(model).__name__}): {'; '.join(details)}"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            expected[name].copy_(tensor)  # casts to the model's dtype
