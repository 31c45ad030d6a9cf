"""The frozen reference, and a cache of its log-probabilities by content, so that each response is scored once.

A file of the cache serves other runs with the same reference and data, for another beta or loss.
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from dpo.data.examples import KEY_BYTES
from dpo.errors import InputError, RunError
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import local_tensor
from dpo.system.plain_files import check_readable, replacing
from dpo.training.batches import Batch

KEY = np.dtype(f"S{KEY_BYTES}")  # compares byte by byte; only its printed form drops trailing zeros
TOLERANCE = 1e-2  # relative error of a stored log-probability: allows half-precision rounding, not another model


def read_logps(path: Path) -> LogpTable:
    """Read a file written by `ReferenceLogps.save`. Raises InputError for any other file."""
    try:
        check_readable(path)
        with np.load(path, allow_pickle=False) as file:
            return LogpTable.of(file["keys"].reshape(-1, KEY_BYTES), file["logps"])
    except MemoryError:
        raise
    except Exception as error:  # reading damaged or forged bytes can raise anything
        raise InputError(f"{path} is not a file of reference log-probabilities ({error}): remove it") from error


class LogpTable:
    """Log-probabilities by key: sorted arrays of 24 bytes per entry, and a dictionary of the most recent entries.

    The dictionary is merged into the arrays when it exceeds 2**14 entries and a thirty-second of theirs.
    """

    def __init__(self) -> None:
        self._keys, self._logps = np.empty(0, KEY), np.empty(0)  # sorted by key
        self._recent: dict[bytes, float] = {}

    @classmethod
    def of(cls, keys: np.ndarray, logps: np.ndarray) -> LogpTable:
        """Make a table of (n, KEY_BYTES) bytes and (n,) values, in any order. Raises ValueError for other shapes."""
        if keys.dtype != np.uint8 or keys.shape[1:] != (KEY_BYTES,) or logps.shape != keys.shape[:1]:
            raise ValueError(f"keys are {keys.dtype} {keys.shape}, log-probabilities {logps.shape}")
        table = cls()
        table._merge(np.ascontiguousarray(keys).reshape(-1).view(KEY), logps.astype(np.float64))
        return table

    def add(self, entries: Mapping[bytes, float]) -> None:
        """Add entries, replacing those with equal keys. Values are finite."""
        self._recent.update(entries)
        if len(self._recent) > max(2**14, len(self._keys) // 32):
            self._merge_recent()

    def merge(self, other: LogpTable) -> None:
        """Add all entries of another table."""
        self._merge_recent()
        self._merge(*other.arrays())

    def find(self, keys: Sequence[bytes]) -> np.ndarray | None:
        """The values of `keys`, (n,); None unless all are present."""
        values = np.array([self._recent.get(key, np.nan) for key in keys])
        [old] = np.isnan(values).nonzero()  # values are finite
        if len(old) == 0:
            return values
        wanted = np.frombuffer(b"".join(keys), KEY)[old]
        places = np.searchsorted(self._keys, wanted)
        if len(self._keys) == 0 or (self._keys[np.minimum(places, len(self._keys) - 1)] != wanted).any():
            return None
        values[old] = self._logps[places]
        return values

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys, sorted, and their values."""
        self._merge_recent()
        return self._keys, self._logps

    def _merge_recent(self) -> None:
        if self._recent:
            keys = np.frombuffer(b"".join(self._recent), KEY)
            self._merge(keys, np.fromiter(self._recent.values(), np.float64))
            self._recent = {}

    def _merge(self, keys: np.ndarray, logps: np.ndarray) -> None:
        """Merge entries into the arrays; the last of equal keys wins."""
        keys, last = np.unique(keys[::-1], return_index=True)
        logps = logps[::-1][last]
        places = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), bool)
        inside = places < len(self._keys)
        known[inside] = self._keys[places[inside]] == keys[inside]
        self._logps[places[known]] = logps[known]
        self._keys = np.insert(self._keys, places[~known], keys[~known])
        self._logps = np.insert(self._logps, places[~known], logps[~known])

    def __getitem__(self, key: bytes) -> float:
        found = self.find([key])
        if found is None:
            raise KeyError(key)
        return float(found[0])

    def __contains__(self, key: bytes) -> bool:
        return self.find([key]) is not None

    def __len__(self) -> int:
        return len(self.arrays()[0])


class ReferenceLogps:
    """The cached log-probabilities of the reference, by `content_key`."""

    def __init__(self) -> None:
        self._known = LogpTable()

    def add(self, keys: Sequence[tuple[bytes, ...]], values: torch.Tensor) -> None:
        """Add the log-probabilities of a table of keys, (B, 2)."""
        flat = zip((key for row in keys for key in row), values.flatten().tolist(), strict=True)
        self._known.add({key: logp for key, logp in flat if math.isfinite(logp)})

    def find(self, keys: Sequence[tuple[bytes, ...]]) -> torch.Tensor | None:
        """The log-probabilities of a table of keys, (B, 2) float64; None unless all are cached."""
        values = self._known.find([key for row in keys for key in row]) if keys else None
        return None if values is None else torch.from_numpy(values).reshape(len(keys), -1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All entries for a checkpoint: (n, KEY_BYTES) bytes and (n,) values."""
        keys, logps = self._known.arrays()
        return {
            "keys": torch.from_numpy(keys.view(np.uint8).reshape(-1, KEY_BYTES).copy()),
            "logps": torch.from_numpy(logps.copy()),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state_dict()`."""
        self._known = LogpTable.of(state["keys"].to(torch.uint8).numpy(), state["logps"].numpy())

    def save(self, path: Path) -> None:
        """Write all entries to a file, atomically."""
        keys, logps = self._known.arrays()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(file, keys=keys.view(np.uint8).reshape(-1, KEY_BYTES), logps=logps)
            file.flush()
            os.fsync(file.fileno())

    def score_all(
        self,
        batches: Iterable[Batch],
        score: Callable[[Batch], torch.Tensor],
        read: LogpTable,
        *,
        seed: int,
    ) -> int:
        """Cache all pairs of the batches and return how many were scored.

        Values come from the entries `read` from a file, else from `score`. The file's entries for the scored batches,
        and for one more batch drawn by `seed`, are compared with the scores: raises InputError if they differ.
        """
        known, self._known = self._known, LogpTable()
        self._known.merge(read)
        self._known.merge(known)
        n_scored = n_known = 0
        drawn, draw = None, random.Random(seed)
        for batch in batches:
            if self.find(batch.keys) is None:
                values = score(batch)
                if not values.isfinite().all():
                    raise RunError(
                        "the reference's log-probabilities are not all finite, so cache_reference_logps=all cannot "
                        "replace it: set model.reference_dtype=bfloat16 or float32"
                    )
                _compare(batch.keys, values, read)
                self.add(batch.keys, values)
                n_scored += len(batch.keys)
            elif read.find([key for row in batch.keys for key in row]) is not None:
                n_known += 1
                drawn = batch if draw.randrange(n_known) == 0 else drawn
        if drawn is not None:
            _compare(drawn.keys, score(drawn), read)
        return n_scored


def _compare(keys: Sequence[tuple[bytes, ...]], values: torch.Tensor, read: LogpTable) -> None:
    """Raises InputError if entries read from a file differ from the reference's current values."""
    pairs = [
        (read[key], value)
        for row, logps in zip(keys, values.tolist(), strict=True)
        for key, value in zip(row, logps, strict=True)
        if key in read
    ]
    if any(abs(was - now) > TOLERANCE * max(1.0, abs(now)) for was, now in pairs):
        worst = max(abs(was - now) for was, now in pairs)
        raise InputError(f"stored reference log-probabilities are off by up to {worst:.3g}: remove their file")


class Reference:
    """The frozen reference: a model and its cached log-probabilities.

    Without a model, all pairs of the run are cached. Inside `in_use()` the model computes as the reference: it may be
    the policy itself, with another adapter or none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        digest: str | None,
        in_use: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model: torch.nn.Module | None = model
        self.digest = digest  # see `model_digest`; on rank 0 only
        self.in_use = in_use
        self.logps = ReferenceLogps()

    @torch.no_grad()
    def follow(self, policy: torch.nn.Module) -> None:
        """Copy the weights of the policy, which is sharded alike, and empty the cache."""
        release_gathered(policy)
        release_gathered(self.model)
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_tensor(ours).copy_(local_tensor(theirs))
        self.logps = ReferenceLogps()

    def free(self) -> None:
        """Free the model's memory, unless the model is the policy itself."""
        if self.in_use is not nullcontext:
            return
        self.model = None
        gc.collect()  # a sharded model is part of reference cycles
        torch.cuda.empty_cache()
