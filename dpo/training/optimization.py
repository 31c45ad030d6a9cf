"""Optimizers by name, and the learning rate over the updates."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from dpo.errors import InputError, one_sentence
from dpo.numbers import count
from dpo.settings.keys import Optimizer
from dpo.settings.plan import TrainingPlan

OPTIMIZERS = {name: getattr(torch.optim, name) for name in get_args(Optimizer)}
SCHEDULES = {  # fraction of the decay still to come, once a fraction `done` of the updates after the warm-up is over
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
LR_SCALINGS = {  # factor of the learning rate, by the number of processes that see different examples
    "none": lambda processes: 1,
    "linear": lambda processes: processes,
    "sqrt": math.sqrt,
}


def make_optimizer(training: TrainingPlan, parameters: Iterable[torch.nn.Parameter], **options: Any) -> Any:
    """Make the plan's optimizer; raise InputError for arguments that its class does not take."""
    optimizer_class, arguments = OPTIMIZERS[training.optimizer], training.optimizer_args or {}
    try:
        return optimizer_class(parameters, **{"lr": training.lr, **options, **arguments})
    except Exception as error:  # of torch, for the user's arguments
        accepted = [name for name in inspect.signature(optimizer_class).parameters if name not in ("params", "lr")]
        raise InputError(
            f"optimizer_args={json.dumps(dict(arguments))} do not suit optimizer={training.optimizer}, which takes "
            f"{', '.join(accepted)}: {one_sentence(error)}"
        ) from error


def check_optimizer(training: TrainingPlan) -> None:
    """Raise InputError for arguments that the optimizer does not take."""
    if "lr" in training.optimizer_args:
        raise InputError(
            f"optimizer_args has lr={training.optimizer_args['lr']}: give lr={training.optimizer_args['lr']}"
        )
    make_optimizer(training, [torch.nn.Parameter(torch.zeros(1))])


def count_states(training: TrainingPlan) -> int:
    """The number of values that the optimizer keeps for each weight."""
    n_values = {"Adafactor": 0, "SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1}.get(training.optimizer, 2)
    return n_values + sum(bool(training.optimizer_args.get(name)) for name in ("momentum", "amsgrad", "centered"))


def notes_on_scaling(training: TrainingPlan, size: int) -> list[str]:
    """A message on the initial learning rate, if it is scaled for the processes that see different examples."""
    lr, scaling = training.lr, training.lr_scaling
    if scaling == "none":
        return []
    scaled_lr = lr * LR_SCALINGS[scaling](size)
    return [f"learning rate {scaled_lr:.6g}: lr={lr}, scaled for {size} processes by lr_scaling={scaling}"]


def find_warmup_warnings(training: TrainingPlan, updates: int) -> list[str]:
    """A warning if the warm-up does not suit the number of updates."""
    warmup, run_length = training.warmup_steps, count(updates, "update")
    if not warmup:  # null fits every run
        return []
    if warmup >= updates:
        problem = f"is too long for the {run_length} of this run, which would never reach lr={training.lr}"
    elif training.schedule != "constant" and warmup >= updates - 1:
        problem = f"leaves none of the {run_length} for schedule={training.schedule}"
    elif warmup > updates / 2:
        problem = f"takes most of the {run_length} of this run"
    else:
        return []
    tenth = updates // 10
    if tenth:
        advice = f"warmup_steps={tenth} would be a tenth of the updates"
    else:
        advice = "set warmup_steps=0, as the run is too short for a warm-up"
    return [f"warning: warmup_steps={warmup} {problem}; {advice}"]


def choose_warmup(training: TrainingPlan, updates: int) -> int:
    """The wanted warm-up, or one that fits the run."""
    return min(150, updates // 10) if training.warmup_steps is None else training.warmup_steps


class Schedule(LambdaLR):
    """Learning rate by update: linear warm-up, then constant or decaying.

    After `updates` it has decayed to `min_ratio` times the base rate. `notes` are messages to log at the start.

    The rate depends only on how many updates were applied, so a resumed run has the rates of one that was never
    stopped. If the length of the run was changed, the rate continues on the curve of the new length. The base rate
    and the warm-up stay those that the run began with, even if `lr_scaling` gives another rate for the present number
    of processes.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, warmup_steps: int, updates: int, kind: str, min_ratio: float
    ) -> None:
        self.updates, self.warmup_steps = updates, warmup_steps  # saved in checkpoints, unlike `kind` and `notes`
        self.kind = kind
        self.notes: list[str] = []

        def factor(update: int) -> float:
            warmup_steps = self.warmup_steps
            if update <= warmup_steps:  # as in the reference code: the first update, 0, has a rate above 0
                return (update + 1) / (warmup_steps + 1)
            done = min(1.0, (update - warmup_steps) / max(1, updates - warmup_steps))
            return min_ratio + (1.0 - min_ratio) * SCHEDULES[kind](done)

        super().__init__(optimizer, factor)

    @classmethod
    def of(cls, training: TrainingPlan, optimizer: torch.optim.Optimizer, *, updates: int, size: int) -> Schedule:
        """Scale the optimizer's rate for `size` processes, and make the schedule of a run of so many updates."""
        for group in optimizer.param_groups:
            group["lr"] *= LR_SCALINGS[training.lr_scaling](size)
        schedule = cls(
            optimizer,
            warmup_steps=choose_warmup(training, updates),
            updates=updates,
            kind=training.schedule,
            min_ratio=training.min_lr_ratio,
        )
        schedule.notes = notes_on_scaling(training, size)
        return schedule

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name not in ("kind", "notes")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on the curve of this run's length.

        The base rates stay the saved ones. `notes` say so if this run's config gives another base rate or length.
        """
        config_base_lrs, state_keys = self.base_lrs, self.state_dict().keys()
        # unknown keys are dropped: torch would make attributes of them
        saved = {key: value for key, value in state.items() if key in state_keys}
        super().load_state_dict({**saved, "updates": self.updates})  # this run's length, not the saved one
        if self.base_lrs != config_base_lrs:
            self.notes = [
                f"learning rate {self.base_lrs[0]:.6g}, with which the run began; this config would begin a run with "
                f"{config_base_lrs[0]:.6g}"
            ]

        saved_lrs = self._last_lr  # of the next update, on the curve of the saved length
        lrs = [base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        self._last_lr = lrs
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

        if self.kind != "constant" and saved["updates"] != self.updates:
            new_lr, saved_lr = f"{lrs[0]:.4g}", f"{saved_lrs[0]:.4g}"
            change = f", not {saved_lr}" if new_lr != saved_lr else ", as before"
            self.notes.append(
                f"schedule={self.kind} now ends after {count(self.updates, 'update')}, not {saved['updates']:,}: the "
                f"next update has learning rate {new_lr}{change}"
            )
