"""Check 1: both layouts on random models in every precision and attention: whether shared prefixes are kept and equal
to padded rows, time and memory."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dpo.models.layouts import Padded, SharedPrefix, choose_layout
from scripts.gpu_checks.common import Outcome, Setting, measure_seconds, prepare_torch
from scripts.gpu_checks.models import build, describe, random_pairs
from scripts.gpu_checks.table import GOOD_SDPA, LAYOUT_TOLERANCE

FAMILIES = ("llama", "gpt_neox")
PRECISIONS = ("float32", "bfloat16", "autocast")
MAX_LENGTH = 1024


def check(setting: Setting) -> Outcome:
    prepare_torch(compiles=setting.gpu)
    rows = []
    for family, precision, attention in combinations(setting):
        row = {"family": family, "precision": precision, "attention": attention}
        try:
            rows.append(row | examine(setting, family, precision, attention))
        except Exception as error:  # in one combination: the others still run
            rows.append(row | {"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        if setting.gpu:
            torch.cuda.empty_cache()
            torch._dynamo.reset()  # the recompile limit of flex_attention counts over all models of a process
    faults = [f"{name_of(row)}: {row['fault']}" for row in rows if row["fault"]]
    differences = {p: max((r["difference"] for r in rows if r["precision"] == p and "difference" in r), default=None)
                   for p in PRECISIONS}  # fmt: skip
    sound = [row for row in rows if "times" in row]
    figure = f"kept and correct in {len(rows) - len(faults)} of {len(rows)}; worst difference " + ", ".join(
        f"{p} {d:.1e} (of {LAYOUT_TOLERANCE[p]:g})" for p, d in differences.items() if d is not None
    )
    if sound:
        figure += f"; {min(r['times'] for r in sound):.1f} to {max(r['times'] for r in sound):.1f} times as fast"
    figure += "" if setting.gpu else "; flex_attention needs a GPU"
    return Outcome(not faults, "; ".join([figure, *faults]), {"rows": rows, "lines": [as_line(row) for row in rows]})


def combinations(setting: Setting) -> list[tuple[str, str, str]]:
    """The combinations to try; flex_attention compiles for each, so it is tried in a few only."""
    found = list(itertools.product(FAMILIES, PRECISIONS, ("eager", "sdpa")))
    flex = [("llama", p, "flex_attention") for p in PRECISIONS] + [("gpt_neox", "bfloat16", "flex_attention")]
    return found + setting.pick(flex, flex[1:2], [])


def name_of(row: dict[str, Any]) -> str:
    return f"{row['family']} {row['precision']} {row['attention']}"


def as_line(row: dict[str, Any]) -> str:
    if "times" not in row:
        return f"{name_of(row):34} failed"
    memory = f", {row['memory_gb']:.2f} GB against {row['padded_memory_gb']:.2f}" if "memory_gb" in row else ""
    kernels = f", {'+'.join(row['sdpa'])}" if row["sdpa"] else ""
    return (
        f"{name_of(row):34} {row['ms']:8.1f} ms against {row['padded_ms']:8.1f}{memory}, "
        f"off by {row['difference']:.1e}{kernels}"
    )


def examine(setting: Setting, family: str, precision: str, attention: str) -> dict[str, Any]:
    """One model: whether it supports the layout, and a forward and backward of the same pairs both ways."""
    layers, hidden, heads = setting.pick((12, 768, 12), (12, 768, 12), (3, 64, 4))
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = build(describe(family, layers, hidden, heads), dtype=dtype, attention=attention, device=setting.device)
    autocast = torch.autocast(setting.device, dtype=torch.bfloat16, enabled=precision == "autocast")
    with autocast:
        compute_dtype = torch.bfloat16 if precision == "autocast" else dtype
        layout, note = choose_layout("shared_prefix", model, max_length=MAX_LENGTH, compute_dtype=compute_dtype)
    if not isinstance(layout, SharedPrefix):
        return {"fault": note or "not kept"}
    batch = random_pairs(setting.pick(8, 8, 2), prompt=setting.pick((200, 400), (200, 400), (20, 40)),
                         response=setting.pick((50, 200), (50, 200), (5, 20)))  # fmt: skip
    ours, plain = (measure(setting, model, way, batch, autocast) for way in (layout, Padded()))
    sdpa = sorted(find_kernels(setting, model, layout, batch, autocast)) if attention == "sdpa" else []
    difference = ((plain["logps"] - ours["logps"]).abs() / plain["logps"].abs()).max().item()
    row = {"ms": ours["ms"], "padded_ms": plain["ms"], "times": plain["ms"] / ours["ms"], "difference": difference,
           "sdpa": sdpa, "fault": None}  # fmt: skip
    if setting.gpu:
        row |= {"memory_gb": ours["memory_gb"], "padded_memory_gb": plain["memory_gb"]}
    if not difference <= LAYOUT_TOLERANCE[precision]:
        row["fault"] = f"off by {difference:.1e}"
    elif attention == "sdpa" and not (sdpa and set(sdpa) <= GOOD_SDPA[setting.device]):
        row["fault"] = f"attention ran as {'+'.join(sdpa) or 'no kernel known to the profiler'}"
    return row


def measure(setting: Setting, model: Any, way: Any, pairs: list[Any], autocast: Any) -> dict[str, Any]:
    """Log-probabilities, milliseconds of the second forward and backward, and peak memory."""
    [microbatch] = way.split(pairs, 1)
    inputs = microbatch.to(setting.device).inputs
    found: dict[str, Any] = {}

    def update() -> None:
        with autocast:
            logps = way.forward(model, inputs).logps.sum(-1)
        logps.sum().backward()
        model.zero_grad(set_to_none=True)
        found["logps"] = logps.detach().float().cpu()

    update()
    if setting.gpu:
        torch.cuda.reset_peak_memory_stats()
    found["ms"] = 1000 * measure_seconds(setting.device, update)
    if setting.gpu:
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def find_kernels(setting: Setting, model: Any, way: Any, pairs: list[Any], autocast: Any) -> set[str]:
    """The implementations of `scaled_dot_product_attention` that a forward used."""
    [microbatch] = way.split(pairs, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, autocast:
        way.forward(model, microbatch.to(setting.device).inputs)
    return {kernel for event in profile.key_averages() if (kernel := sdpa_kernel(event.key))}


def sdpa_kernel(operator: str) -> str | None:
    """The SDPA implementation that an operator stands for; None for other operators."""
    if operator == "dpo::masked_attention":  # `dpo/models/cpu_attention.py`, which replaces SDPA
        return "ours"
    prefix = "aten::_scaled_dot_product_"
    if not operator.startswith(prefix) or operator.endswith("_backward"):
        return None
    name = operator.removeprefix(prefix).removesuffix("_attention")
    return "math" if name == "attention_math" else name
