"""LoRA adapters over several processes give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import WITH_PLAN, build, list_examples, plain_logps
from support.warm import launch
from torch.distributed.tensor import DTensor

from dpo.errors import InputError
from dpo.models.adapters import (
    POLICY,
    REFERENCE,
    adapter_weights,
    add_adapter,
    seed_dropout,
    switch,
    trained_parameters,
)
from dpo.models.layouts import Padded, SharedPrefix
from dpo.models.pretrained import checkpoint_activations
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute
from dpo.parallel.state import full_tensor
from dpo.parallel.tensor_parallel import find_plan
from dpo.settings.plan import ParallelDims

MESHES = {
    "sharded": (2, {}),
    "cut": (2, {"tensor_size": 2}),
    "cut and sharded": (4, {"tensor_size": 2}),
    "hybrid": (4, {"shard_size": 2}),
}


def adapted(
    family: str, *, on_meta: bool = False, targets: str | list[str] = "auto", dropout: float = 0.0, **options: Any
) -> Any:
    """A model with adapters of policy and reference, neither of them zero."""
    model = build(family, on_meta=on_meta, **options)
    for name in (REFERENCE, POLICY):
        add_adapter(model, 3, 6, targets, name=name, dropout=dropout if name == POLICY else 0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in (REFERENCE, POLICY):
            for key, weight in adapter_weights(model, name).items():
                if ".lora_B." in key and not on_meta:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def compare_with_one_process(
    family: str, mesh: Mesh, *, checkpointing: bool = False, frozen_whole: bool = False, dropout: float = 0.0
) -> None:
    examples, whole = list_examples(rows=4), adapted(family, dropout=dropout)
    frozen = {name: logps_of(whole, examples, name) for name in (None, REFERENCE)}
    [microbatch] = Padded().split(examples, 1)
    seed_dropout(0)
    chosen, rejected = Padded().forward(whole, microbatch.inputs).logps.sum(-1)
    expected = (chosen - 0.5 * rejected).mean()
    expected.backward()

    model = adapted(family, on_meta=mesh.rank != 0, dropout=dropout)
    if checkpointing:
        checkpoint_activations(model)
    model = distribute(model, mesh, block_name=None, compute_dtype=torch.float32, frozen_whole=frozen_whole)
    is_sharded = {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}
    assert is_sharded == {
        name: not frozen_whole or mesh.tensor_size > 1 or f".{POLICY}." in name for name in is_sharded
    }
    shared = [] if dropout else [SharedPrefix({"full_attention": None}, max_length=32)]  # whose masks are others
    for layout in (Padded(), *shared):
        [microbatch] = layout.split(examples, 1, rank=mesh.data_rank, size=mesh.data_size)
        model.zero_grad()
        for name, logps in frozen.items():
            with switch(model, name)(), torch.no_grad():
                ours = layout.forward(model, microbatch.inputs).logps.sum(-1)
            assert torch.allclose(ours, logps[:, microbatch.indices], rtol=1e-5, atol=1e-5), (family, name)
        seed_dropout(0)
        chosen, rejected = layout.forward(model, microbatch.inputs).logps.sum(-1)
        loss = (chosen - 0.5 * rejected).sum() / len(examples)
        (loss * mesh.data_size).backward()
        assert torch.allclose(mesh.add(loss.detach()[None] * mesh.counts)[0], expected, rtol=1e-6), family
        for name, parameter in model.named_parameters():
            theirs = whole.get_parameter(name)
            assert torch.equal(full_tensor(parameter.detach()), theirs), f"{family} {name}"
            if f".{POLICY}." not in name:
                assert parameter.grad is None, f"{family}: {name} has a gradient"
                continue
            off = (full_tensor(parameter.grad) - theirs.grad).norm() / theirs.grad.norm()
            assert off < 1e-5, f"{family}, {type(layout).__name__}: gradient of {name} is off by {off:.1g}"


def hold_shards_alone(mesh: Mesh) -> None:
    """Frozen weights are sharded, without gradient and optimizer state."""
    model = adapted("llama", on_meta=mesh.rank != 0)
    model = distribute(model, mesh, block_name=None, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-3)
    logps_of(model, list_examples(rows=4), None)
    plain_logps(model, list_examples(rows=4))[0].sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_trained = f".{POLICY}." in name
        assert (parameter.grad is not None) == (parameter in optimizer.state) == is_trained, name
        is_cut = parameter.ndim == 2 and any(placement.is_shard() for placement in parameter.placements)
        for tensor in (parameter, *([optimizer.state[parameter]["exp_avg"]] if is_trained else [])):
            held, whole = tensor.to_local().untyped_storage().nbytes(), tensor.numel() * 4
            assert held <= whole * (0.7 if is_cut else 1), f"{name} holds {held} of {whole} bytes"  # 2 of A's 3 rows
        assert is_cut or parameter.ndim == 1 or ".lora_" in name, name  # beside a W that is cut, A or B is not


def logps_of(model: Any, examples: Any, name: str | None) -> torch.Tensor:
    with switch(model, name)(), torch.no_grad():
        return plain_logps(model, examples)


def compare_families(rank: int, world_size: int, sizes: dict, families: list[str], frozen_whole: bool) -> None:
    mesh = Mesh(rank, ParallelDims.of(world_size, **sizes))
    for family in families:
        for dropout in (0.0, 0.25) if mesh.data_size == 1 else (0.0,):  # other processes' examples have other masks
            compare_with_one_process(
                family, mesh, checkpointing=family == families[0], frozen_whole=frozen_whole, dropout=dropout
            )
    if not frozen_whole:
        hold_shards_alone(mesh)


CASES = [
    ("cut", False, ["llama"]),
    *(pytest.param(mesh, whole, WITH_PLAN, marks=pytest.mark.slow) for mesh in MESHES for whole in (False, True)),
]


@pytest.mark.parametrize(("mesh", "frozen_whole", "families"), CASES)
def test_logps_and_gradients_are_those_of_one_process_to_1e5_and_none_is_of_the_base(mesh, frozen_whole, families):
    processes, sizes = MESHES[mesh]
    launch(compare_families, processes, sizes, families, frozen_whole, process_group=True)


def test_a_plan_that_forgets_an_adapted_layer_which_sees_slices_is_refused():
    model = adapted("llama")
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if not name.endswith("k_proj")}
    with pytest.raises(InputError, match=r"does not say how to shard model\.layers\.0\.self_attn\.k_proj; use trainer"):
        find_plan(model)
