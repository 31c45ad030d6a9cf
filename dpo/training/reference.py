"""The frozen reference, and a cache of its log-probabilities.

Each example is scored once. A file of the cache serves other runs with the same reference, data and lengths, with
another beta or loss.
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
from dpo.system.plain_files import check_readable, replacing
from dpo.training.batches import Batch

TOLERANCE = 1e-2  # relative error of a stored log-probability: allows half-precision rounding, not another model


def read_logps(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read a file written by `ReferenceLogps.save`, (examples, columns).

    Raises InputError for any other file or shape.
    """
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
    """Cached log-probabilities of the reference, NaN where not known.

    One row per example, numbered as in `Batch.numbers`, with the columns of `Loss.reference_columns`. `identity` names
    the data and lengths, which decide an example's token ids.
    """

    def __init__(self, n_examples: int, n_columns: int, identity: str = "") -> None:
        self._known, self.identity = np.full((n_examples, n_columns), np.nan), identity

    @property
    def shape(self) -> tuple[int, int]:
        n_examples, n_columns = self._known.shape
        return n_examples, n_columns

    def add(self, numbers: Sequence[int], values: torch.Tensor) -> None:
        """Add log-probabilities of these examples, (B, columns), on the host.

        Values that are not finite stay unknown.
        """
        rows = values.double().numpy()
        self._known[numbers] = np.where(np.isfinite(rows), rows, np.nan)

    def find(self, numbers: Sequence[int]) -> torch.Tensor | None:
        """The rows of these examples, in float64.

        None if any is unknown, or if there are no examples.
        """
        rows = self._known[numbers] if len(numbers) else None
        return None if rows is None or np.isnan(rows).any() else torch.from_numpy(rows)

    def clear(self) -> None:
        self._known.fill(np.nan)

    def find_path(self, folder: str | Path, reference_digest: str | None) -> Path:
        """The file for these examples and this reference."""
        name = hashlib.sha256(repr((reference_digest, self.identity, self.shape)).encode()).hexdigest()
        return Path(folder) / "reference_logps" / f"{name}.npz"

    def state_dict(self) -> dict[str, Any]:
        return {"logps": torch.from_numpy(self._known.copy()), "identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`; ignore it if its data or lengths differ.

        Another test split, for example, makes other data.
        """
        logps = state["logps"].numpy()
        if state["identity"] == self.identity and logps.shape == self._known.shape:
            self._known = logps.astype(np.float64)

    def save(self, path: Path) -> None:
        """Write all rows to a file, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(file, logps=self._known)
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

        Rows come from `stored`, the content of the file at `path`, else from `score`. One batch that is stored
        completely, drawn by `seed`, is scored to check the file. Raises InputError if they differ.
        """
        if stored is not None:
            self._known = np.where(np.isnan(self._known), stored, self._known)  # the run's own values come first
        n_scored = n_stored = 0  # examples; batches
        to_check, generator = None, random.Random(seed)
        for batch in batches:
            if self.find(batch.numbers) is None:
                values = score(batch)
                if not values.isfinite().all():
                    raise RunError(
                        "the reference's log-probabilities are not all finite, so cache_reference_logps=all cannot "
                        "replace it: set model.reference_dtype=bfloat16 or float32"
                    )
                _compare(stored, batch.numbers, values, path)
                self.add(batch.numbers, values)
                n_scored += len(batch.numbers)
            elif stored is not None and not np.isnan(stored[batch.numbers]).any():
                n_stored += 1
                if generator.randrange(n_stored) == 0:  # reservoir sampling: every stored batch is equally likely
                    to_check = batch
        if to_check is not None:
            _compare(stored, to_check.numbers, score(to_check), path)
        return n_scored


def _compare(stored: np.ndarray | None, numbers: Sequence[int], values: torch.Tensor, path: Path) -> None:
    """Raise InputError if a file's rows differ from the reference's values."""
    if stored is None:
        return
    now = values.double().numpy()
    errors = np.nan_to_num(np.abs(stored[numbers] - now))
    if (errors > TOLERANCE * np.maximum(1.0, np.abs(now))).any():
        raise InputError(
            f"{path}: stored reference log-probabilities are off by up to {errors.max():.3g} (other weights, dtype or "
            f"number of processes): remove it"
        )


class Reference:
    """The frozen reference: a model and its cached log-probabilities.

    The model is None once all pairs of the run are cached. It may be the policy's own, with another adapter or none:
    so it computes as the reference only inside `in_use()`.
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
        for own_weight, policy_weight in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_tensor(own_weight).copy_(gather_like(policy_weight, own_weight))
        self.logps.clear()

    def free(self) -> None:
        """Free the model, unless it is the policy itself."""
        if self.in_use is not nullcontext:  # then it switches the policy's adapters
            return
        self.model = None
        gc.collect()  # a sharded model is part of reference cycles
        torch.cuda.empty_cache()
