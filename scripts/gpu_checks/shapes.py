"""Check 6: many microbatches of different shapes: the cost of a new shape, with cuDNN's attention off and on."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from dpo.models.layouts import Layout, layout_by_rules
from scripts.gpu_checks.common import Outcome, Setting, measure_seconds, prepare_torch
from scripts.gpu_checks.models import build, describe, random_pairs
from scripts.gpu_checks.table import NEW_SHAPE_MS


def check(setting: Setting) -> Outcome:
    prepare_torch()
    layers, hidden, heads = setting.pick((12, 768, 12), (12, 768, 12), (2, 64, 4))
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    model = build(describe("llama", layers, hidden, heads), dtype=dtype, attention="sdpa", device=setting.device)
    layout, _ = layout_by_rules("shared_prefix", model, max_length=1024)
    starter, *inputs = [microbatch.to(setting.device).inputs for microbatch in microbatches(setting, layout)]
    run(setting, model, layout, [starter])  # warm-up
    off = churn(setting, model, layout, inputs)
    details = {"shapes": [tuple(each.input_ids.shape) for each in inputs], "without_cudnn": off}
    if not setting.gpu:
        return Outcome(None, f"needs a GPU; on this CPU {off['new_ms']:.1f} ms more when a shape is new", details)
    details["with_cudnn"] = on = with_cudnn(setting, model, layout, inputs)
    cudnn = f"{on['new_ms']:.1f} ms" if "new_ms" in on else on["error"]
    figure = (
        f"{off['new_ms']:.1f} ms more when a shape is new (of {NEW_SHAPE_MS:g}), with cuDNN's attention {cudnn}; "
        f"{len(inputs)} shapes, {off['retries']} retries of the allocator (of 0)"
    )
    return Outcome(off["new_ms"] <= NEW_SHAPE_MS and off["retries"] == 0, figure, details)


def microbatches(setting: Setting, layout: Layout) -> list[Any]:
    """41 on a GPU, all of different shapes: 1 to 8 pairs, texts of many lengths."""
    wanted, longest = setting.pick((41, 500), (21, 500), (5, 40))
    found: dict[tuple[int, ...], Any] = {}
    for seed in range(20 * wanted):
        most = 8 + (longest * seed * 7 // wanted) % longest
        pairs = random_pairs(1 + seed % 8, prompt=(most // 2, most), response=(most // 4 + 1, most // 2 + 2), seed=seed)
        [microbatch] = layout.split(pairs, 1)
        found.setdefault(tuple(microbatch.inputs.input_ids.shape), microbatch)
        if len(found) == wanted:
            break
    return list(found.values())


def with_cudnn(setting: Setting, model: Any, layout: Layout, inputs: list[Any]) -> dict[str, Any]:
    """The same with cuDNN's attention, which training disables: only for comparison, so it may fail."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        return churn(setting, model, layout, inputs)
    except RuntimeError as error:
        return {"error": str(error)[:300]}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def churn(setting: Setting, model: Any, layout: Layout, inputs: list[Any]) -> dict[str, Any]:
    """The median of how many milliseconds the first pass over a shape takes longer than the third; allocator
    retries."""
    before = retries(setting)
    first = run(setting, model, layout, inputs)
    run(setting, model, layout, inputs)
    third = run(setting, model, layout, inputs)
    more = [1000 * (a - b) for a, b in zip(first, third, strict=True)]
    return {"new_ms": median(more), "most_ms": max(more), "known_ms": 1000 * median(third),
            "retries": retries(setting) - before}  # fmt: skip


def run(setting: Setting, model: Any, layout: Layout, inputs: list[Any]) -> list[float]:
    """Seconds of a forward and backward of each."""

    def update(each: Any) -> None:
        layout.forward(model, each).logps.sum().backward()
        model.zero_grad(set_to_none=True)

    return [measure_seconds(setting.device, lambda each=each: update(each)) for each in inputs]


def retries(setting: Setting) -> int:
    """How often the allocator had to release its cache to find room."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if setting.gpu else 0
