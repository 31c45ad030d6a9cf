"""Optimizers by name, and the learning rate over the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from dpo.numbers import count
from dpo.settings import choices
from dpo.settings.plan import TrainingPlan

OPTIMIZERS = {name: getattr(torch.optim, name) for name in choices.OPTIMIZERS}
SCHEDULES = {  # fraction of the decay that remains, by the fraction of the updates that is `done`
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
LR_SCALINGS = {"none": lambda processes: 1, "linear": lambda processes: processes, "sqrt": math.sqrt}


def notes_on_scaling(training: TrainingPlan, size: int) -> list[str]:
    """A message on the initial learning rate, if it is scaled.

    `size` is the number of processes that see different examples.
    """
    lr, scaling = training.lr, training.lr_scaling
    if scaling == "none":
        return []
    return [f"learning rate {lr * LR_SCALINGS[scaling](size):.6g}: lr={lr} for {size} processes, lr_scaling={scaling}"]


def find_warmup_warnings(training: TrainingPlan, updates: int) -> list[str]:
    """A warning if the warm-up does not suit the number of updates."""
    warmup, run = training.warmup_steps, count(updates, "update")
    if warmup == 0:
        return []
    if warmup >= updates:
        fault = f"is too long for the {run} of this run, which would never reach lr={training.lr}"
    elif training.schedule != "constant" and warmup >= updates - 1:
        fault = f"leaves none of the {run} for {training.schedule}"
    elif warmup > updates / 2:
        fault = f"takes most of the {run} of this run"
    else:
        return []
    tenth = updates // 10
    fits = f"warmup_steps={tenth} fits, a tenth of them" if tenth else "no warm-up fits so short a run: warmup_steps=0"
    return [f"warmup_steps={warmup} {fault}; {fits}"]


class Schedule(LambdaLR):
    """Learning rate by update: linear warm-up, then constant or decaying.

    It decays to `min_ratio` after `updates`. `notes` are messages to log at the start.

    The rate depends only on how many updates were applied. So a resumed run has the rates of one that was never
    stopped; if its length has changed, it has the rates of a run of the new length from there on. The base rate stays
    the one it began with, whatever the number of processes.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, warmup_steps: int, updates: int, kind: str, min_ratio: float
    ) -> None:
        self.updates = updates  # saved in the checkpoint, unlike the next two
        self.kind = kind
        self.notes: list[str] = []

        def factor(update: int) -> float:
            if update <= warmup_steps:  # as in the reference: the first update has a rate above 0
                return (update + 1) / (warmup_steps + 1)
            done = min(1.0, (update - warmup_steps) / max(1, updates - warmup_steps))
            return min_ratio + (1.0 - min_ratio) * SCHEDULES[kind](done)

        super().__init__(optimizer, factor)

    @classmethod
    def of(cls, training: TrainingPlan, optimizer: torch.optim.Optimizer, *, updates: int, size: int) -> Schedule:
        """Make the schedule of a run of `updates`.

        Scales the optimizer's rate for the `size` processes that see different examples.
        """
        for group in optimizer.param_groups:
            group["lr"] *= LR_SCALINGS[training.lr_scaling](size)
        curve = {"kind": training.schedule, "min_ratio": training.min_lr_ratio, "warmup_steps": training.warmup_steps}
        schedule = cls(optimizer, updates=updates, **curve)
        schedule.notes = notes_on_scaling(training, size)
        return schedule

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name not in ("kind", "notes")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on the curve of this run's length.

        The base rates stay the saved ones. `notes` tell where this run's settings would give others.
        """
        own_base_lrs, own_keys = self.base_lrs, self.state_dict().keys()
        saved = {key: value for key, value in state.items() if key in own_keys}  # torch sets any key as an attribute
        super().load_state_dict({**saved, "updates": self.updates})  # all but the length
        if self.base_lrs != own_base_lrs:
            began, new = (f"{lrs[0]:.6g}" for lrs in (self.base_lrs, own_base_lrs))
            self.notes = [f"learning rate {began}, as the run began; a new one would have {new}"]

        # the saved rate of the next update lies on the curve of the former length
        former_lrs = self._last_lr
        lrs = [base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        self._last_lr = lrs
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

        if self.kind != "constant" and saved["updates"] != self.updates:
            new, former = f"{lrs[0]:.4g}", f"{former_lrs[0]:.4g}"
            change = f", not {former}" if new != former else ", as before"
            self.notes.append(
                f"schedule={self.kind} now ends after {count(self.updates, 'update')}, not {saved['updates']:,}: the "
                f"next update has learning rate {new}{change}"
            )
