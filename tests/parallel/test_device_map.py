"""A model spread over two GPUs of one process, with fake tensors.

They have a device and no numbers, and an operation on two devices raises, as on GPUs. (The devices are called cpu:0 and
cpu:1, which autograd accepts on any machine.)
"""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from support.models import build, list_examples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpo.losses import find_loss
from dpo.models import varlen_attention
from dpo.models.layouts import Padded, SharedPrefix
from dpo.models.packing import map_tensors
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import choose_device_map, find_blocks, keep_outputs_where_they_are
from dpo.training.metrics import reduce_metrics
from dpo.training.objective import Objective
from dpo.training.reference import Reference, ReferenceLogps

FIRST, LAST = torch.device("cpu:0"), torch.device("cpu:1")
FAMILIES = ["gpt-neox", "gpt2, tied"]
LAYOUTS = {
    "padded": Padded(),
    "shared_prefix": SharedPrefix({"full_attention": None}, max_length=32),
    "varlen": SharedPrefix({"full_attention": None}, max_length=32, by_segments=True),
}
DPO = {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0, "reference_free": False}


def spread(family: str, monkeypatch: pytest.MonkeyPatch, *, ours: bool = True, attention: str = "sdpa") -> Any:
    """A model of two blocks over two devices, as `device_map="balanced"` does."""
    varlen_attention.register()
    model = build(family, attention=attention)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embeddings.weight
    blocks, device_map = find_blocks(model, None), {}
    within = {part for block in blocks for part in block.modules()} - {*blocks}
    for name, module in model.named_modules():
        if module in blocks or (module not in within and next(module.children(), None) is None):
            on_first = module in (embeddings, blocks[0]) or (module is head and tied) or "wpe" in name
            device_map[name] = FIRST if on_first else LAST
    for name, device in device_map.items():
        _move(model.get_submodule(name), device)
    if tied:
        head.weight = embeddings.weight
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda hook, module: module)  # the tensors are there already
    accelerate.dispatch_model(model, device_map, main_device=FIRST)
    if ours:
        keep_outputs_where_they_are(model)
    return model


def _move(module: torch.nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = tensor.detach().to(device)
                    tensors[name] = torch.nn.Parameter(moved) if isinstance(tensor, torch.nn.Parameter) else moved


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_losses_metrics_and_gradient_norm_are_on_the_first_device(family, layout, monkeypatch):
    [microbatch] = LAYOUTS[layout].split(list_examples(rows=4), 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        attention = "varlen" if layout == "varlen" else "sdpa"
        policy, reference = (spread(family, monkeypatch, attention=attention) for _ in range(2))
        objective = Objective(
            policy, Reference(reference, None, ReferenceLogps(2, 2)), LAYOUTS[layout], Mesh(), find_loss(DPO)
        )
        microbatch = map_tensors(fake.from_tensor, microbatch).to(FIRST)

        losses, metrics = objective.losses(microbatch, split="train")
        losses.sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)

        assert {values.device for values in (losses, norm, *metrics.values())} == {FIRST}
        assert {p.device for p in policy.parameters()} == {FIRST, LAST}
        with pytest.raises(StopIteration):  # where it is summed over processes, and no device has differed
            reduce_metrics([(microbatch.indices, metrics)], 4, _stop_on(FIRST), scalars={"grad_norm": norm})


def _stop_on(device: torch.device) -> Any:
    def add(values: torch.Tensor) -> torch.Tensor:
        assert values.device == device
        raise StopIteration

    return add


class Copies(TorchDispatchMode):
    """The shapes of what is copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and out.device != args[0].device:
            self.shapes.append(tuple(out.shape))
        return out


def shapes_copied(layout: str, monkeypatch: pytest.MonkeyPatch, *, ours: bool) -> list[tuple[int, ...]]:
    [microbatch] = LAYOUTS[layout].split(list_examples(rows=4), 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = spread("gpt-neox", monkeypatch, ours=ours)
        microbatch = map_tensors(fake.from_tensor, microbatch).to(FIRST)
        with Copies() as copies, torch.no_grad():
            LAYOUTS[layout].forward(model, microbatch.inputs)
        return copies.shapes


def test_the_logits_of_all_tokens_stay_on_the_device_of_the_head(monkeypatch):
    logits = (8, 12, 101)  # rows, tokens, vocabulary
    assert logits not in shapes_copied("padded", monkeypatch, ours=True)
    assert logits in shapes_copied("padded", monkeypatch, ours=False)


def test_one_gpu_takes_all_of_a_model_several_share_its_layers():
    assert [choose_device_map(gpus) for gpus in (0, 1, 4)] == [None, {"": 0}, "balanced"]
