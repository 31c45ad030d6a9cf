"""Point 6: many microbatches, each of another shape: what a new shape costs, with cuDNN's attention off and on."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from layouts import SharedPrefix
from scripts.gpu_checks.common import Outcome, Setting, prepare_torch, seconds_of
from scripts.gpu_checks.models import build, describe, random_pairs
from scripts.gpu_checks.table import NEW_SHAPE_MS


def check(setting: Setting) -> Outcome:
    prepare_torch()
    layers, hidden, heads = setting.pick((12, 768, 12), (12, 768, 12), (2, 64, 4))
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    model = build(describe("llama", layers, hidden, heads), dtype=dtype, attention="sdpa", device=setting.device)
    inputs = [microbatch.to(setting.device).inputs for microbatch in microbatches(setting)]
    shapes = {tuple(each.input_ids.shape) for each in inputs}
    run(setting, model, inputs[:1])  # starts what starts once
    off = churn(setting, model, inputs[1:])
    on = None
    if setting.gpu:
        torch.backends.cuda.enable_cudnn_sdp(True)
        on = churn(setting, model, inputs[1:])
    limit = NEW_SHAPE_MS[setting.device]
    figure = f"{off['new_ms']:.1f} ms more for a new shape (of {limit:g}) among {len(shapes)}"
    if on:
        figure += f", {on['new_ms']:.1f} with cuDNN's attention; {off['retries']} retries of the allocator (of 0)"
    passed = off["new_ms"] <= limit and off["retries"] == 0
    return Outcome(passed, figure, {"shapes": sorted(shapes), "without_cudnn": off, "with_cudnn": on})


def microbatches(setting: Setting) -> list[Any]:
    """41 on a GPU, of 1 to 8 pairs and texts of many lengths."""
    layout = SharedPrefix({"full_attention": None}, max_length=1024)
    n, longest = setting.pick(41, 21, 5), setting.pick(500, 500, 40)
    found = []
    for i in range(n):
        most = longest * (i + 1) // n + 8
        batch = random_pairs(1 + i % 8, prompt=(most // 2, most), response=(most // 4, most // 2 + 1), seed=i)
        found += layout.split(batch, 1)
    return found


def churn(setting: Setting, model: Any, inputs: list[Any]) -> dict[str, Any]:
    """Milliseconds that the first time takes beyond the third, in the median; the allocator's retries meanwhile."""
    before = retries(setting)
    first = run(setting, model, inputs)
    run(setting, model, inputs)
    third = run(setting, model, inputs)
    more = [1000 * (a - b) for a, b in zip(first, third, strict=True)]
    return {"new_ms": median(more), "most_ms": max(more), "known_ms": 1000 * median(third),
            "retries": retries(setting) - before}  # fmt: skip


def run(setting: Setting, model: Any, inputs: list[Any]) -> list[float]:
    layout = SharedPrefix({"full_attention": None}, max_length=1024)

    def update(each: Any) -> None:
        sum(layout.forward(model, each)).sum().backward()
        model.zero_grad(set_to_none=True)

    return [seconds_of(setting.device, lambda each=each: update(each)) for each in inputs]


def retries(setting: Setting) -> int:
    """How often the allocator had to give back what it kept to find room."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if setting.gpu else 0
