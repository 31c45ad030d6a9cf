"""Numbers going wrong: updates that must not happen, their batches kept for replay, spikes."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch

from dpo.errors import RunError
from dpo.parallel.mesh import Mesh
from dpo.training.batches import GlobalBatch

SPIKE = 10.0
MAX_SKIPPED = 10  # updates that a run leaves out before it gives up


class NonFinite(RunError):
    """Loss or gradient is no number; raised by every process of a run at the same update."""


class Guard:
    """Stands between the gradient and the optimizer."""

    def __init__(self, run_dir: Path, mesh: Mesh, *, policy: str, log: Callable[[str], None]) -> None:
        self.run_dir, self.mesh, self.policy, self.log = run_dir, mesh, policy, log
        self.skipped = 0
        self._before: dict[str, deque[float]] = {name: deque(maxlen=100) for name in ("loss/train", "grad_norm")}

    def allows(self, batch: GlobalBatch, values: Mapping[str, torch.Tensor], grad_norm: float, *, update: int) -> bool:
        """Whether losses and gradient are finite. If not, the batch is written down with its `values` (B,) each.

        Every process must be given the same. Raises NonFinite then, unless the policy is to skip the update and few
        were skipped.
        """
        if math.isfinite(grad_norm) and values["loss/train"].isfinite().all():
            return True
        folder = self.run_dir / f"nonfinite-{update}"
        if self.mesh.rank == 0:
            self._write(folder, batch, values)
        self.skipped += 1
        loss = values["loss/train"].mean()
        what = f"update {update} has loss {loss:.4g} and gradient norm {grad_norm:.4g}; its examples are in {folder}"
        if self.policy == "raise":
            raise NonFinite(f"{what}; it was not made; nan_policy=skip would go on without it")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{what}; {MAX_SKIPPED} updates were skipped before")
        self.log(f"warning: {what}; it was skipped")
        return False

    def watch(self, metrics: Mapping[str, float], *, update: int) -> None:
        """Warn of a loss or gradient norm above `SPIKE` times its median before, once there were 20."""
        for name, before in self._before.items():
            value, usual = metrics[name], median(before) if len(before) >= 20 else float("inf")
            if value > SPIKE * usual > 0:
                self.log(f"warning: update {update}: {name} {value:.4g} is {value / usual:.0f} times its median before")
            if math.isfinite(value):
                before.append(value)

    def _write(self, folder: Path, batch: GlobalBatch, values: Mapping[str, torch.Tensor]) -> None:
        """The examples with their prompts' places in the data and their metrics, as `dataset_sources` reads them."""
        columns = {name: column.tolist() for name, column in values.items()}
        lines = []
        for number, (prompt, texts) in enumerate(batch.rows):
            line = {"prompt": prompt.text, "rejected": "", **texts, "prompt_number": prompt.number}
            lines.append(json.dumps(line | {name: column[number] for name, column in columns.items()}) + "\n")
        folder.mkdir(exist_ok=True)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
