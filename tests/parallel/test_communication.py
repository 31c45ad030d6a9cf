"""What FSDP gathers and reduces in an update, on a group of processes that exists in name alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import runs
from support.models import list_examples
from support.runs import small_run
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dpo.models.adapters import switch
from dpo.models.layouts import SharedPrefix
from dpo.models.loading import find_structure, load_policy, load_reference
from dpo.models.pretrained import DTYPES
from dpo.parallel import mesh as mesh_module
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import accumulate, distribute, release_gathered
from dpo.settings.plan import Plan, resolve

SIZE = 4
BLOCKS = 3  # of the tiny Llama
STEPS = 2
LORA = "lora=lora lora.r=4"


KINDS = {"_allgather_base_": "gathered", "_reduce_scatter_base_": "reduced"}


class Collectives(TorchDispatchMode):
    """The number of FSDP's collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind := KINDS.get(function.overloadpacket.__name__):
            self.number[kind] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def group(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(mesh_module, "_set_pg_timeout", lambda *_: None)  # a fake group has none
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def plan_of(rows, tmp_path):
    def make(settings: str) -> Plan:
        shared = ("trainer=FSDPTrainer", f"batch_size={4 * SIZE}", f"gradient_accumulation_steps={STEPS}")
        half = ("model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16")
        overrides = (*shared, *half, *settings.split())
        return resolve(runs.compose(*small_run(rows, tmp_path / "run", *overrides)), world_size=SIZE)

    return make


def place(plan: Plan, mesh: Mesh, model: Any, dtype: str) -> Any:
    return distribute(
        model,
        mesh,
        block_name=None,
        compute_dtype=DTYPES[dtype],
        reduce_dtype=DTYPES[plan.fsdp.reduce_dtype],
        reshard_after_forward=plan.fsdp.reshard_after_forward,
        frozen_whole=plan.fsdp.frozen_weights == "whole",
    )


def run_update(plan: Plan) -> Collectives:
    """The collectives of an update's passes; the numbers are meaningless."""
    mesh = Mesh(0, plan.dims)
    source = find_structure(plan, "float32").to_empty(device="cpu")
    policy = place(plan, mesh, load_policy(source, plan, rank=1, resume_from=None)[0], plan.compute_dtype)
    reference, in_use = policy, switch(policy, None)
    if plan.reference == "model":
        source = find_structure(plan, plan.reference_dtype).to_empty(device="cpu")
        reference = place(plan, mesh, load_reference(source, plan, rank=1)[0], plan.reference_dtype)
    layout = SharedPrefix({"full_attention": None}, max_length=32)
    with Collectives() as collectives:
        for i, microbatch in enumerate(layout.split(list_examples(4 * SIZE), STEPS, size=SIZE)):
            accumulate(policy, last=i == STEPS - 1, reduce_once=plan.fsdp.reduce_once)
            with torch.no_grad(), in_use():
                layout.forward(reference, microbatch.inputs)
            layout.forward(policy, microbatch.inputs).logps.sum().backward()
        release_gathered(reference if reference is not policy else None)
    return collectives


@pytest.mark.parametrize(
    ("settings", "gathers", "reductions"),
    [
        # the policy's root once and its blocks twice per microbatch, the reference's once
        ("", (1 + BLOCKS * 2 * STEPS) + (1 + BLOCKS * STEPS), (1 + BLOCKS) * STEPS),
        ("fsdp_frozen_weights=whole", 1 + BLOCKS * 2 * STEPS, (1 + BLOCKS) * STEPS),
        ("fsdp_frozen_weights=whole fsdp_reshard_after_forward=false", 1 + BLOCKS * STEPS, (1 + BLOCKS) * STEPS),
        ("fsdp_frozen_weights=whole fsdp_reduce_once=true", 1 + BLOCKS * 2 * STEPS, 1 + BLOCKS),
        # a base is gathered for the reference too; the root has no adapter
        (LORA, 1 + BLOCKS * 3 * STEPS, BLOCKS * STEPS),
        # after the first block's backward pass FSDP prefetches once more, a block of the reference's forward pass
        (f"{LORA} fsdp_frozen_weights=whole", (BLOCKS * 3 + 1) * STEPS, BLOCKS * STEPS),
        (f"{LORA} fsdp_frozen_weights=whole fsdp_reduce_once=true", (BLOCKS * 3 + 1) * STEPS, BLOCKS),
    ],
)
def test_an_update_gathers_and_reduces_each_unit_as_often_as_its_settings_say(
    settings, gathers, reductions, plan_of, group
):
    assert run_update(plan_of(settings)).number == {"gathered": gathers, "reduced": reductions}


def test_a_reference_that_stays_sharded_does_not_keep_a_list_of_all_its_forwards(plan_of, group):
    plan = plan_of("")
    source = find_structure(plan, "float32").to_empty(device="cpu")
    reference = place(plan, Mesh(0, plan.dims), load_reference(source, plan, rank=1)[0], "float32")
    layout = SharedPrefix({"full_attention": None}, max_length=32)
    [microbatch] = layout.split(list_examples(4), 1)
    for _ in range(2):
        with torch.no_grad():
            layout.forward(reference, microbatch.inputs)
        order = reference._get_fsdp_state()._comm_ctx.post_forward_order
        assert len(order) == 1 + BLOCKS
        release_gathered(reference)
        assert len(order) == 0
