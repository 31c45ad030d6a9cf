"""The frozen reference, and a cache of its log-probabilities for runs with the same reference, data and lengths."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.parallel.sharding import gather_part_like, local_tensor, release_gathered
from dpo.system.plain_files import check_readable, replacing


def read_logps(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read a table that `ReferenceLogps.save` wrote; raise InputError for another file, or another shape."""
    problem = f"{path} is not a file of reference log-probabilities"
    check_readable(path)
    with explaining_library(lambda error: InputError(f"{problem} ({one_sentence(error)}): remove it")):
        logps = np.load(path, allow_pickle=False)["logps"].astype(np.float64)
    if logps.shape != shape:
        raise InputError(f"{problem} of shape {shape}: remove it")
    return logps


class ReferenceLogps:
    """The reference's log-probabilities, a row per example; NaN where unknown. Columns are `Loss.reference_columns`.

    `identity` names the data and length limits, on which token ids depend.
    """

    def __init__(self, n_examples: int, n_columns: int, identity: str = ""):
        self.table = np.full((n_examples, n_columns), np.nan)
        self.identity = identity

    def store(self, rows: Sequence[int], logps: Tensor) -> None:
        """Write values, (B, columns) on the host, into these rows; values that are not finite become NaN."""
        self.table[rows] = logps.double().where(logps.isfinite(), np.nan).numpy()

    def find(self, rows: Sequence[int]) -> Tensor | None:
        """Return the values of these rows, (B, columns) in float64; None if any is unknown, or without rows."""
        values = self.table[rows]
        return torch.from_numpy(values) if len(rows) and not np.isnan(values).any() else None

    def state_dict(self) -> dict:
        return {"logps": torch.from_numpy(self.table.copy()), "identity": self.identity}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the table of a checkpoint; one of other data or length limits is ignored."""
        logps = state["logps"].numpy()
        if state["identity"] == self.identity and logps.shape == self.table.shape:
            self.table = logps.astype(np.float64)

    def find_path(self, folder: str, reference: str) -> Path:
        """Return the path of the file for these examples and the reference that a text describes; it may not exist."""
        facts = repr((reference, self.identity, self.table.shape))
        name = hashlib.sha256(facts.encode()).hexdigest()
        return Path(folder) / "reference_logps" / f"{name}.npz"

    def save(self, path: Path) -> None:
        """Write the table to an .npz file, which is complete or not there; `read_logps` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, logps=self.table)
            file.flush()
            os.fsync(file.fileno())


@dataclass(eq=False)
class Reference:
    """The frozen reference: a model and the cache of its log-probabilities.

    The model is None once it was freed, as all examples are cached. It may be the policy's own module, which is the
    reference only inside `in_use()`, where it has another adapter or none.
    """

    model: nn.Module | None
    digest: str | None  # see `model_digest`, without the config; on rank 0 only
    logps: ReferenceLogps
    in_use: Callable[[], AbstractContextManager] = nullcontext

    @torch.no_grad()
    def follow(self, policy: nn.Module) -> None:
        """Copy the policy's weights into the separate reference model, and empty the cache."""
        release_gathered(policy)  # so that parameters are shards, on every process
        release_gathered(self.model)
        for reference_weight, policy_weight in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_tensor(reference_weight).copy_(gather_part_like(policy_weight, reference_weight))
        self.logps.table.fill(np.nan)
