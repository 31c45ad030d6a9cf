"""Names that keys accept as values: trainers, optimizers, dtypes and others.

Imports no torch. The tables that map these names to code are where that code is; tests check that the names agree.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import NamedTuple

FEW, NEAR = 12, 5  # most names that are listed in full; most that are suggested
RELATIVES = {"kto": ("bco", "apo_zero")}  # nearest names to a missing one (docs/losses.md)


def explain_unknown(key: str, value: str, names: Collection[str]) -> str:
    """A sentence on an unknown value, with the nearest names.

    It lists all names if they are few, and otherwise the command that does.
    """
    by_small_letters = {name.lower(): name for name in sorted(names)}
    lower = value.lower()
    near = [lower] if lower in by_small_letters else difflib.get_close_matches(lower, by_small_letters, n=NEAR)
    near = near or [name for name in RELATIVES.get(lower, ()) if name in by_small_letters]
    *others, last = [by_small_letters[name] for name in near] or [""]
    question = f": did you mean {', '.join(others)}{' or ' * bool(others)}{last}?" if near else ""
    if len(names) <= FEW:
        return f"{key}={value} is not one of {', '.join(sorted({*names}))}{question}"
    command = f"`ls config/{key.removesuffix('.name')}` shows all {len(names)}"
    return f"{key}={value} is not there{question or ';'} {command}"


class TrainerSpec(NamedTuple):
    """Abilities of a trainer; `trainers.py` has its class under the same name."""

    name: str
    multi_process: bool = False  # several processes share a run, joined by a process group
    cuts_layers: bool = False  # tensor_parallel_size and tensor_parallel.backend apply


BASIC = TrainerSpec("BasicTrainer")
FSDP = TrainerSpec("FSDPTrainer", multi_process=True)
TENSOR_PARALLEL = TrainerSpec("TensorParallelTrainer", multi_process=True, cuts_layers=True)
PACKAGE = TrainerSpec("PackageTensorParallelTrainer", cuts_layers=True)

TRAINERS = {spec.name: spec for spec in (BASIC, FSDP, TENSOR_PARALLEL)}
TENSOR_PARALLEL_BACKENDS = {"dtensor": TENSOR_PARALLEL, "tensor_parallel": PACKAGE}

OPTIMIZERS = (  # classes of torch.optim
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
NEED_WHOLE_TENSORS = ("Adafactor", "Rprop")  # in torch 2.13 these fail on sharded tensors
STEPS_OF_LR = ("Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop")  # steps are about lr, whatever the gradient
DTYPES = ("float32", "bfloat16", "float16")
AUTOCAST_DTYPES = ("bfloat16",)
REDUCE_DTYPES = ("float32", "bfloat16")
FROZEN_WEIGHTS = ("whole", "sharded")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
LAYOUTS = ("padded", "shared_prefix")
CACHING = ("as_needed", "all")
LORA = ("none", "lora", "qlora")
ADAPTED = ("lora", "qlora")  # with an adapter
QUANTIZED = ("qlora",)  # over a 4-bit base
REFERENCES = ("base", "adapter", "model")  # sources of the reference's log-probabilities under an adapter
ONLINE = ("none", "online")
SCORERS = ("reward_model", "function", "keyword", "shorter")
TIES = ("skip", "keep")
SCHEDULES = ("constant", "linear", "cosine")
LR_SCALINGS = ("none", "linear", "sqrt")
NAN_POLICIES = ("raise", "skip")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
# our names for the columns of own data: what a loss trains on, and the forms in which records may have it
PAIRS, TARGETS, CHATS = ("prompt", "chosen", "rejected"), ("prompt", "completion"), ("messages",)
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {"pairs": (PAIRS,), "targets": (PAIRS, TARGETS, CHATS)}
COLUMNS = tuple(dict.fromkeys(column for forms in FORMS.values() for form in forms for column in form))
