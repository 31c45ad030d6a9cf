"""Optimizers by name, and the learning rate over the updates."""

import inspect
import json
import math
from collections.abc import Mapping
from typing import get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from dpo import plugins
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.adapters import trained_parameters
from dpo.parallel.sharding import local_parameters
from dpo.settings.keys import Optimizer, TrainingPlan

OPTIMIZERS = {name: getattr(torch.optim, name) for name in get_args(Optimizer)}
SCHEDULES = {  # the share of the decay still to come, by the share `done` of the updates after the warm-up
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
LR_SCALINGS = {  # factor of the learning rate, by the number of processes that see different examples
    "none": lambda processes: 1,
    "linear": lambda processes: processes,
    "sqrt": math.sqrt,
}


def make_optimizer(training: TrainingPlan, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a model's trained weights; raise InputError for arguments that its class does not take."""
    optimizer_class = (OPTIMIZERS | plugins.OPTIMIZERS)[training.optimizer]
    arguments = training.optimizer_args
    try:
        return optimizer_class(local_parameters(trained_parameters(model)), lr=training.lr, **arguments)
    except Exception as error:  # torch raises many types for wrong arguments
        accepted = [name for name in inspect.signature(optimizer_class).parameters if name not in ("params", "lr")]
        raise InputError(
            f"optimizer_args={json.dumps(arguments)} do not suit optimizer={training.optimizer}, which takes "
            f"{', '.join(accepted)}: {one_sentence(error)}"
        ) from error


def check_optimizer(training: TrainingPlan) -> None:
    """Raise InputError for an optimizer that cannot be made, or cannot take a step."""
    layer = torch.nn.Linear(1, 1)
    optimizer = make_optimizer(training, layer)
    layer(torch.ones(1)).sum().backward()
    with explaining_library(
        lambda error: InputError(
            f"optimizer={training.optimizer} with optimizer_args={training.optimizer_args} cannot take a step: "
            f"{one_sentence(error)}"
        )
    ):
        optimizer.step()


def count_states(training: TrainingPlan) -> int:
    """Count the values that the optimizer keeps for each weight: 2 as Adam does, unless it is known to keep fewer.

    Each of the options below adds one.
    """
    n_values = {"Adafactor": 0, "SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1}.get(training.optimizer, 2)
    return n_values + sum(bool(training.optimizer_args.get(name)) for name in ("momentum", "amsgrad", "centered"))


INITIAL_SCALE = 2.0**16
GOOD_UPDATES = 2000  # updates without overflow, after which the scale is doubled


class LossScale:
    """The factor of a loss whose gradient is computed in float16, where small values would be 0.

    It is adapted as by torch.amp.GradScaler, but an overflow is found in the gradient's norm, which is the same on all
    processes.
    """

    def __init__(self, *, is_adapted: bool = False):
        self.is_adapted = is_adapted
        self.value = INITIAL_SCALE if is_adapted else 1.0
        self.n_good = 0  # updates since the value was changed, all without overflow

    def adapt(self, grad_norm: float) -> bool:
        """Halve the scale if an update's gradient has overflowed, and double it after GOOD_UPDATES without overflow.

        Returns whether the gradient may be used.
        """
        if not self.is_adapted:
            return True
        has_overflowed = not math.isfinite(grad_norm)
        self.n_good += 1
        if has_overflowed or self.n_good == GOOD_UPDATES:
            self.value = max(1.0, self.value / 2) if has_overflowed else self.value * 2
            self.n_good = 0
        return not has_overflowed

    def state_dict(self) -> dict:
        return {"value": self.value, "n_good": self.n_good}

    def load_state_dict(self, state: Mapping) -> None:
        self.value = state["value"]
        self.n_good = state["n_good"]


class Schedule(LambdaLR):
    """Learning rate by update: linear warm-up, then constant or decaying to `min_ratio` times the base rate.

    A run that is made longer continues on the curve of its new length, with the base rate and warm-up of its start.
    `updates` is the length of the run; `data_size`, the number of processes that see different examples, scales the
    base rate (`lr_scaling`).
    """

    def __init__(self, training: TrainingPlan, optimizer: torch.optim.Optimizer, *, updates: int, data_size: int):
        min_ratio = training.min_lr_ratio
        # LambdaLR saves its attributes in checkpoints, so a run that is made longer keeps its warm-up.
        self.warmup_steps = min(150, updates // 10) if training.warmup_steps is None else training.warmup_steps
        for group in optimizer.param_groups:
            group["lr"] *= LR_SCALINGS[training.lr_scaling](data_size)

        def factor(update: int) -> float:
            """Return the factor of the base rate for the update after `update` others."""
            warmup_steps = self.warmup_steps
            if update <= warmup_steps:  # as in the reference code: the first update, 0, has a rate above 0
                return (update + 1) / (warmup_steps + 1)
            done = min(1.0, (update - warmup_steps) / max(1, updates - warmup_steps))
            return min_ratio + (1.0 - min_ratio) * SCHEDULES[training.schedule](done)

        super().__init__(optimizer, factor)

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the schedule, and set the optimizer's learning rates to those of the next update."""
        # Unknown keys are dropped: torch would make attributes of them.
        super().load_state_dict({key: value for key, value in state.items() if key in self.state_dict()})
        # They are on the curve of this run's length, which may differ from that of the saved one.
        factor = self.lr_lambdas[0](self.last_epoch)
        self._last_lr = [base * factor for base in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr
