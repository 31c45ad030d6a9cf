"""Names that keys accept as values: trainers, optimizers, dtypes and others.

Imports no torch. The tables that map the names to code are beside that code; tests check that the names agree.
"""

from __future__ import annotations

from typing import NamedTuple

BUILT_IN = ("hh", "shp", "se", "demo")  # datasets that preference_datasets.py loads


class TrainerSpec(NamedTuple):
    """A trainer and its abilities; `trainers.py` has the class of that name."""

    name: str
    multi_process: bool = False  # whether it runs in several processes, which form a process group
    cuts_layers: bool = False  # whether tensor_parallel_size and tensor_parallel.backend apply


BASIC = TrainerSpec("BasicTrainer")
FSDP = TrainerSpec("FSDPTrainer", multi_process=True)
TENSOR_PARALLEL = TrainerSpec("TensorParallelTrainer", multi_process=True, cuts_layers=True)
PACKAGE = TrainerSpec("PackageTensorParallelTrainer", cuts_layers=True)

TRAINERS = {spec.name: spec for spec in (BASIC, FSDP, TENSOR_PARALLEL)}
TENSOR_PARALLEL_BACKENDS = {"dtensor": TENSOR_PARALLEL, "tensor_parallel": PACKAGE}

NEED_WHOLE_TENSORS = ("Adafactor", "Rprop")  # optimizers that fail on sharded tensors in torch 2.13
STEPS_OF_LR = ("Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop")  # their steps are about as large as lr
VARLEN = "varlen"
ADAPTED = ("lora", "qlora")  # choices of `lora` that train an adapter
QUANTIZED = ("qlora",)  # choices of `lora` with a 4-bit base
HELD_OUT_SCORE = "online_eval/score"  # the metric that ranks the checkpoints of online runs; higher is better
# the forms of custom data: each is the fields of one record
PAIR_FIELDS = ("prompt", "chosen", "rejected")
WHOLE_PAIR_FIELDS = ("chosen", "rejected")  # both begin with the prompt
TARGET_FIELDS = ("prompt", "completion")
CHAT_FIELDS = ("messages",)
PROMPT_FIELDS = ("prompt",)
LABEL_FIELDS = ("prompt", "completion", "label")
LABELLED_CHAT_FIELDS = ("messages", "label")
SCORED_FIELDS = ("prompt", "responses", "scores")
RANKED_FIELDS = ("prompt", "responses")
PAIRS, LISTS = (PAIR_FIELDS, WHOLE_PAIR_FIELDS), (SCORED_FIELDS, RANKED_FIELDS)
# the forms of records from which examples can be made, by what a loss trains on; "prompts" are for online runs
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pairs": (*PAIRS, *LISTS),
    "prompts": (*PAIRS, *LISTS, PROMPT_FIELDS),
    "targets": (*PAIRS, *LISTS, TARGET_FIELDS, CHAT_FIELDS),
    "labels": (LABEL_FIELDS, LABELLED_CHAT_FIELDS, *PAIRS),  # pairs with `unpair`
    "lists": (*LISTS, *PAIRS),
}
# optional fields of records of any form; the config may say that such a field has no column
SYSTEM = "system"  # a system turn
TOOLS = "tools"  # the tools that a chat may call
NUMBER_FIELDS = ("weight", "margin")
OPTIONAL_FIELDS = (SYSTEM, TOOLS, *NUMBER_FIELDS)
FIELDS = (*dict.fromkeys(field for forms in FORMS.values() for form in forms for field in form), *OPTIONAL_FIELDS)
PROMPT_PARTS = ("input", "history")  # parts of a prompt in Alpaca's data, beside the instruction
