"""The frozen reference, and a cache of its log-probabilities.

Each example is scored once. The cache can be saved for other runs with the same reference, data and lengths; their
beta and loss may differ.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpo.errors import InputError, RunError
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import gather_like, local_tensor
from dpo.system.plain_files import check_readable, make_directory, replacing
from dpo.training.batches import Batch

TOLERANCE = 1e-2  # relative error allowed in a stored log-probability, for half-precision rounding


def read_logps(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read a file written by `ReferenceLogps.save`; raise InputError for any other file or shape."""
    try:
        check_readable(path)
        with np.load(path, allow_pickle=False) as file:
            logps = file["logps"].astype(np.float64)
        if logps.shape != shape:
            raise ValueError(f"its shape is {logps.shape}, not {shape}")
    except MemoryError:
        raise
    except Exception as error:  # reading damaged or forged bytes can raise anything
        raise InputError(f"{path} is not a file of reference log-probabilities ({error}): remove it") from error
    return logps


class ReferenceLogps:
    """Cached log-probabilities of the reference, NaN where unknown.

    They are a table with one row per example (`Batch.cache_rows`) and the columns of `Loss.reference_columns`.
    `identity` names the data and the length limits, on which the token ids of the examples depend.
    """

    def __init__(self, n_examples: int, n_columns: int, identity: str = "") -> None:
        self._table, self.identity = np.full((n_examples, n_columns), np.nan), identity

    @property
    def shape(self) -> tuple[int, int]:
        n_examples, n_columns = self._table.shape
        return n_examples, n_columns

    def store(self, rows: Sequence[int], logps: torch.Tensor) -> None:
        """Add log-probabilities, (B, columns) on the host; those that are not finite stay unknown."""
        values = logps.double().numpy()
        self._table[rows] = np.where(np.isfinite(values), values, np.nan)

    def find(self, rows: Sequence[int]) -> torch.Tensor | None:
        """The values of these rows, (B, columns) in float64; None if any is unknown, or without rows."""
        if not len(rows):
            return None
        values = self._table[rows]
        return None if np.isnan(values).any() else torch.from_numpy(values)

    def clear(self) -> None:
        self._table.fill(np.nan)

    def find_path(self, folder: str | Path, reference_digest: str | None) -> Path:
        """The file for these examples and this reference."""
        name = hashlib.sha256(repr((reference_digest, self.identity, self.shape)).encode()).hexdigest()
        return Path(folder) / "reference_logps" / f"{name}.npz"

    def state_dict(self) -> dict[str, Any]:
        return {"logps": torch.from_numpy(self._table.copy()), "identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`, unless its data or lengths differ, as with another test split."""
        logps = state["logps"].numpy()
        if state["identity"] == self.identity and logps.shape == self._table.shape:
            self._table = logps.astype(np.float64)

    def save(self, path: Path) -> None:
        make_directory(path.parent)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, logps=self._table)
            file.flush()
            os.fsync(file.fileno())

    def fill(
        self,
        batches: Iterable[Batch],
        score: Callable[[Batch], torch.Tensor],
        stored: np.ndarray | None,
        *,
        path: Path,
        seed: int,
    ) -> int:
        """Cache all examples of the batches; return how many were scored.

        Values come from `stored`, the table of the file at `path` (None without a file), and all others from `score`.
        Stored values are compared with the scores of batches that the file has in part, and of one random batch that
        the file has completely. Raises InputError if values differ.
        """
        if stored is not None:
            self._table = np.where(np.isnan(self._table), stored, self._table)  # values of this run take precedence
        n_scored_examples = n_stored_batches = 0
        batch_to_check, generator = None, random.Random(seed)
        for batch in batches:
            rows = batch.cache_rows
            if self.find(rows) is None:
                logps = score(batch)
                if not logps.isfinite().all():
                    raise RunError(
                        "the reference's log-probabilities are not all finite, so cache_reference_logps=all cannot "
                        "cache them: set model.reference_dtype=bfloat16 or float32"
                    )
                _check_stored(stored, rows, logps, path)
                self.store(rows, logps)
                n_scored_examples += len(rows)
            elif stored is not None and not np.isnan(stored[rows]).any():
                n_stored_batches += 1
                # reservoir sampling: in the end each of the n stored batches was chosen with probability 1 / n
                if generator.randrange(n_stored_batches) == 0:
                    batch_to_check = batch
        if batch_to_check is not None:
            _check_stored(stored, batch_to_check.cache_rows, score(batch_to_check), path)
        return n_scored_examples


def _check_stored(stored: np.ndarray | None, rows: Sequence[int], logps: torch.Tensor, path: Path) -> None:
    """Raise InputError if stored rows that are known differ from the reference's values."""
    if stored is None:
        return
    expected = logps.double().numpy()
    errors = np.nan_to_num(np.abs(stored[rows] - expected))
    if (errors > TOLERANCE * np.maximum(1.0, np.abs(expected))).any():
        raise InputError(
            f"{path}: stored reference log-probabilities differ by up to {errors.max():.3g} from those of this run's "
            f"reference (other weights, dtype or number of processes): remove this file, and they are computed again"
        )


class Reference:
    """The frozen reference: a model and its cached log-probabilities.

    `model` may be the policy's own module, which then computes as the reference only inside `in_use()`, with another
    adapter or none. It is None once a separate model was freed, when all pairs of the run are cached.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        digest: str | None,
        logps: ReferenceLogps,
        in_use: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model: torch.nn.Module | None = model
        self.digest = digest  # see `model_digest`; on rank 0 only
        self.in_use = in_use
        self.logps = logps

    @torch.no_grad()
    def follow(self, policy: torch.nn.Module) -> None:
        """Copy the policy's weights, and empty the cache."""
        release_gathered(policy)
        release_gathered(self.model)
        for reference_weight, policy_weight in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_tensor(reference_weight).copy_(gather_like(policy_weight, reference_weight))
        self.logps.clear()

    def free(self) -> None:
        """Free the model, unless it is the policy itself."""
        if self.in_use is not nullcontext:  # `in_use` switches adapters of the policy, so the model is the policy
            return
        self.model = None
        gc.collect()  # a sharded model is part of reference cycles
        torch.cuda.empty_cache()
