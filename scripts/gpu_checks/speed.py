"""Check 11: pairs per second, share of the measured peak and memory for the shapes of published models, random weights.

`python -m scripts.gpu_checks.speed SETTINGS` (JSON) is one measurement, in its own process.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scripts.gpu_checks.common import Outcome, Process, Setting, prepare_torch
from scripts.gpu_checks.models import SHAPES, build, describe, write_settings
from scripts.gpu_checks.table import LOSS_TOLERANCE, SHARE_OF_PEAK, TIMES_FASTER

PART_OF_MEMORY = 0.5  # for weights, gradients and optimizer state; the rest is for activations
BYTES = 8  # per parameter in bfloat16: policy, gradient, RMSprop's state, reference
WORDS_SHORTER = 2.5 / 4.3  # `write_pairs` assumes 2.5 tokens per word; with the golden runs' tokenizer it is 4.3
LAYOUTS = {"padded": "padded", "ours": "shared_prefix"}


def check(setting: Setting) -> Outcome:
    from benchmarks.growth import write_pairs

    names = setting.pick((*SHAPES,), ("pythia-2.8b",), ("tiny",))
    batch, length, updates = setting.pick((16, 512, 3), (16, 512, 2), (8, 128, 2))
    data = Path(setting.folder) / "made"
    data.mkdir()
    for split, n in (("train", (updates + 1) * batch), ("test", 8)):
        write_pairs(data / f"{split}.jsonl", n, tokens=int(length * WORDS_SHORTER), pairs_per_prompt=1)
    common = ["loss=dpo", "loss.beta=0.1", "datasets=[made]", f"dataset_sources.made={data}", f"max_length={length}",
              f"max_prompt_length={length // 2}", f"batch_size={batch}", f"gradient_accumulation_steps={batch // 4}",
              *(("model.policy_dtype=bfloat16", "model.reference_dtype=bfloat16") if setting.gpu else ())]  # fmt: skip
    peak = measure_peak(setting)
    results, lines, faults = {}, [], []
    for name in names:
        settings, layers = cut_to_memory(name)
        model = write_settings(Path(setting.folder) / name, settings)
        overrides = [*common, f"model.name_or_path={model}"]
        results[name] = {way: measured(setting, f"{name}-{way}", settings, updates, [*overrides, f"layout={layout}"])
                         for way, layout in LAYOUTS.items()}  # fmt: skip
        summary = summarize(results[name], peak)
        lines += [f"{name}, {layers}:", *(as_line(way, summary[way]) for way in LAYOUTS)]
        faults += [f"{name}: {fault}" for fault in find_faults(summary, setting)]
        results[name] |= {"summary": summary, "layers": layers}
    best = [f"{n}: {r['summary']['ours']['share']:.0%} of the peak, {r['summary']['times']:.2f} times padded"
            for n, r in results.items()]  # fmt: skip
    figure = "; ".join([*best, f"peak {peak / 1e12:,.3g} TFLOP/s", *faults])
    if not setting.gpu and not faults:
        return Outcome(None, f"needs a GPU; on this CPU {figure}", {"peak": peak, "results": results, "lines": lines})
    return Outcome(not faults, figure, {"peak": peak, "results": results, "lines": lines})


def cut_to_memory(name: str) -> tuple[dict[str, Any], str]:
    """The model's config with as many layers as fit the GPU's memory, and a phrase that says how many."""
    import torch

    if name not in SHAPES:
        return describe("llama", 3, 128, 4), "3 layers"
    shape = SHAPES[name]
    whole = shape["num_hidden_layers"]
    sizes = [count_parameters({**shape, "num_hidden_layers": n}) for n in (1, 2)]
    room = PART_OF_MEMORY * torch.cuda.get_device_properties(0).total_memory / BYTES
    layers = min(whole, max(1, int((room - sizes[0]) / (sizes[1] - sizes[0])) + 1))
    said = f"all {whole} layers" if layers == whole else f"{layers} of {whole} layers, to fit the GPU's memory"
    return {**shape, "num_hidden_layers": layers}, said


def count_parameters(settings: dict[str, Any]) -> int:
    import torch

    return sum(p.numel() for p in build(settings, dtype=torch.bfloat16, attention="sdpa", device="meta").parameters())


def measure_peak(setting: Setting) -> float:
    """FLOP/s of matrix products in the dtype of the run."""
    import torch

    from benchmarks import compare

    return compare.measure_peak(torch.bfloat16 if setting.gpu else torch.float32)


def measured(setting: Setting, name: str, settings: dict, updates: int, overrides: list[str]) -> dict[str, Any]:
    """The measurement of `benchmarks.compare`, in its own process."""
    asked = {"settings": settings, "updates": updates, "overrides": overrides, "device": setting.device}
    command = [sys.executable, "-m", "scripts.gpu_checks.speed", json.dumps(asked)]
    process = Process(setting, name, command, work=partial(measure, asked)).done()
    return json.loads(process.text().splitlines()[-1])


def measure(asked: dict[str, Any]) -> None:
    """Print the measurement of `benchmarks.compare` for models with random weights, created on the device."""
    from benchmarks import compare
    from dpo.models import loading

    def load_model(name: str, *, dtype: Any, attn_implementation: str, **_: Any) -> Any:
        return build(asked["settings"], dtype=dtype, attention=attn_implementation, device=asked["device"])

    loading.load_model = load_model
    prepare_torch()
    print(json.dumps(compare.measure(asked["overrides"], asked["updates"])), flush=True)


def summarize(results: dict[str, dict], peak: float) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for way, result in results.items():
        rows = result["rows"]
        seconds = median(row["seconds"] for row in rows)
        rate = sum(row["flops"] for row in rows) / sum(row["seconds"] for row in rows)
        summary[way] = {
            "pairs_per_second": result["pairs"] / seconds,
            "tokens_per_pair": sum(row["fed"] for row in rows) / len(rows) / result["pairs"],
            "share": rate / peak,
            "memory_gb": result["memory_gb"],
            "losses": [row["loss"] for row in rows],
        }
    summary["times"] = summary["ours"]["pairs_per_second"] / summary["padded"]["pairs_per_second"]
    return summary


def as_line(way: str, row: dict[str, Any]) -> str:
    return (
        f"  {way:8} {row['pairs_per_second']:8.1f} pairs/s, {row['share']:4.0%} of the peak, "
        f"{row['memory_gb']:6.2f} GB, {row['tokens_per_pair']:.0f} tokens per pair"
    )


def find_faults(summary: dict[str, Any], setting: Setting) -> list[str]:
    """What is below its threshold; without a GPU only whether the losses agree."""
    losses = zip(summary["ours"]["losses"], summary["padded"]["losses"], strict=True)
    apart = max(abs(ours - padded) / abs(padded) for ours, padded in losses)
    faults = [f"losses differ by {apart:.1e} (of {LOSS_TOLERANCE:g})"] if apart > LOSS_TOLERANCE else []
    if setting.gpu and summary["ours"]["share"] < SHARE_OF_PEAK:
        faults.append(f"less than {SHARE_OF_PEAK:.0%} of the peak")
    if setting.gpu and summary["times"] < TIMES_FASTER:
        faults.append(f"less than {TIMES_FASTER:g} times padded")
    return faults


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
