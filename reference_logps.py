"""Log-probabilities of the frozen reference, kept by content: a response is scored once, whatever asks for it again.

A file of them serves another run with the same reference and data: another beta, another loss.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batches import GlobalBatch
from packing import KEY_BYTES
from utils import InputError

CACHING = ("as_needed", "all")
TOLERANCE = 1e-2  # relative, of a stored log-probability: rounding in half precision, not another model


def model_digest(model: Any, dtype: str) -> str:
    """A digest of all that a model's log-probabilities depend on but tokens: weights, architecture, compute dtype."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps([dtype, config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def read_logps(path: Path) -> dict[bytes, float]:
    """What `ReferenceLogps.save` wrote. Raises InputError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            keys, logps = file["keys"].reshape(-1, KEY_BYTES), file["logps"]
        return dict(zip((key.tobytes() for key in keys), logps.tolist(), strict=True))
    except MemoryError:
        raise
    except Exception as error:  # reading bytes that were damaged or made up can raise anything
        raise InputError(f"{path} is not a file of reference log-probabilities ({error}): remove it") from error


class ReferenceLogps:
    """What is known of the reference so far, by `content_key`."""

    def __init__(self) -> None:
        self._known: dict[bytes, float] = {}

    def add(self, keys: Sequence[tuple[bytes, ...]], values: torch.Tensor) -> None:
        """A table of keys, (B, 2), and its log-probabilities."""
        for row, logps in zip(keys, values.tolist(), strict=True):
            self._known.update((key, logp) for key, logp in zip(row, logps, strict=True) if math.isfinite(logp))

    def find(self, keys: Sequence[tuple[bytes, ...]]) -> torch.Tensor | None:
        """The log-probabilities of a table of keys, (B, 2) float64; None unless all are known."""
        if not keys or not all(key in self._known for row in keys for key in row):
            return None
        return torch.tensor([[self._known[key] for key in row] for row in keys], dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that is known, (n, KEY_BYTES) bytes and (n,) values, for a checkpoint."""
        keys = torch.frombuffer(bytearray(b"".join(self._known)), dtype=torch.uint8) if self._known else torch.empty(0)
        return {
            "keys": keys.reshape(-1, KEY_BYTES),
            "logps": torch.tensor([*self._known.values()], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Know what a checkpoint knew."""
        keys = (key.tobytes() for key in state["keys"].numpy())
        self._known = dict(zip(keys, state["logps"].tolist(), strict=True))

    def save(self, path: Path) -> None:
        """Write all that is known, whole or not at all."""
        keys = np.frombuffer(b"".join(self._known), dtype=np.uint8).reshape(-1, KEY_BYTES)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        with beside.open("wb") as file:
            np.savez(file, keys=keys, logps=np.fromiter(self._known.values(), dtype=np.float64))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def score_all(
        self,
        batches: Iterable[GlobalBatch],
        score: Callable[[GlobalBatch], torch.Tensor],
        read: Mapping[bytes, float],
        *,
        seed: int,
    ) -> int:
        """Know all pairs of the batches, from what was `read` in a file, else from `score`; how many were scored.

        What the file knows of a batch that is scored, and of one more drawn by `seed`, is compared: raises InputError
        if it differs.
        """
        self._known = {**read, **self._known}
        n_scored = n_known = 0
        drawn, draw = None, random.Random(seed)
        for batch in batches:
            if self.find(batch.keys) is None:
                values = score(batch)
                _compare(batch.keys, values, read)
                self.add(batch.keys, values)
                n_scored += len(batch.keys)
            elif all(key in read for row in batch.keys for key in row):
                n_known += 1
                drawn = batch if draw.randrange(n_known) == 0 else drawn
        if drawn is not None:
            _compare(drawn.keys, score(drawn), read)
        return n_scored


def _compare(keys: Sequence[tuple[bytes, ...]], values: torch.Tensor, read: Mapping[bytes, float]) -> None:
    """Raises InputError if what was read is not what the reference gives now."""
    pairs = [
        (read[key], value)
        for row, logps in zip(keys, values.tolist(), strict=True)
        for key, value in zip(row, logps, strict=True)
        if key in read
    ]
    if any(abs(was - now) > TOLERANCE * max(1.0, abs(now)) for was, now in pairs):
        worst = max(abs(was - now) for was, now in pairs)
        raise InputError(f"stored reference log-probabilities are off by up to {worst:.3g}: remove their file")
