"""The files of a checkpoint: written whole or not at all, and the published reference's archives read back.

A checkpoint is a directory of `policy.pt`, `optimizer.pt` and `scheduler.pt`, each
`{"step_idx": examples, "state": state_dict, "metrics": evaluation means or None}`.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed import full_tensor
from utils import InputError

# buffers that transformers stored in 2023 and computes today
OBSOLETE_BUFFER = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|embed_positions)$|\.rotary_emb\.\w+$")
RENAMED = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's head


def full_state(state: Any) -> Any:
    """A state dict with every sharded tensor gathered, on the CPU; every process must call it.

    One tensor at a time, so that no device holds the whole model; ranks other than 0 drop what they gathered.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(state, torch.Tensor):
        gathered = full_tensor(state)
        return gathered.detach().cpu() if keep else None
    if isinstance(state, Mapping):
        return {key: full_state(value) for key, value in state.items()}
    return state


def write_checkpoint(
    directory: Path, states: Iterable[tuple[str, Any]], *, step_idx: int, metrics: Mapping | None
) -> None:
    """Write `NAME.pt` for each (name, state), all under a temporary name that is renamed to `directory` at the end.

    Each state is freed before the next is asked for.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left behind by a killed run
    temporary.mkdir(parents=True)
    try:
        for name, state in states:
            with (temporary / f"{name}.pt").open("wb") as file:
                torch.save({"step_idx": step_idx, "state": state, "metrics": metrics}, file)
                file.flush()
                os.fsync(file.fileno())
            del state
        former = directory.with_name(f".{directory.name}.former")
        if directory.exists():  # saved again at the same step: a rename cannot replace a full directory
            directory.rename(former)
        temporary.rename(directory)
        shutil.rmtree(former, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a disk that is full should not stay so
        raise


def point(link: Path, target: Path) -> None:
    """Make `link` (LATEST, BEST) a symbolic link to `target`, a directory beside it, in one atomic step."""
    temporary = link.with_name(f".{link.name}.tmp")
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


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    """The state dict inside a `policy.pt`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"model.archive={path} is not a policy.pt: it is damaged, or holds objects other than tensors "
            f"(which were not loaded: an archive is data, never code)"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise InputError(f"model.archive={path} cannot be read as weights: {reason}") from error
    state = content.get("state") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise InputError(f"model.archive={path} is not a policy.pt: it holds no 'state' of named tensors")
    return dict(state)


def load_archive(model: torch.nn.Module, archive: str) -> None:
    """Load a `policy.pt`, ours or the published reference's, strictly; the file is read as data, never executed.

    Raises InputError if it is missing, not such a file, or of another architecture.
    """
    path = find_archive(archive)
    state = _read_state(path)
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
