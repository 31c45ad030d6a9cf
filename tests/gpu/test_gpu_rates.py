"""Rates of a GPU are written in the form that `dpo estimate --rates` reads."""

import json
from collections.abc import Callable

import pytest
import torch
from support.gpu import DEVICE, GPU, limit, pick
from support.runs import ROOT
from torch.utils.benchmark import Timer

from dpo.commands.estimate import read_rates
from dpo.system.arithmetic import set_up_torch
from dpo.training.estimate import RATES

FILE = ROOT / ".cache" / "gpu-rates.json"


def measure_seconds(function: Callable[[], object]) -> float:
    return Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=pick(1, 0.2, 0.01)).median


@pytest.mark.gpu
@pytest.mark.slow
@limit(60)
def test_rates_of_this_gpu_are_written_for_dpo_estimate(tmp_path, record):
    """Rates between GPUs are not measured: they stay the assumed ones of this GPU's kind, or of an H100."""
    set_up_torch(deterministic=False, compiles=False)
    device_name = torch.cuda.get_device_name() if GPU else "cpu"
    name = next((kind for kind in RATES if kind in device_name.lower()), "this")
    size = pick(8192, 8192, 128)
    tflops = {}
    for dtype in ("bfloat16", "float16", "float32"):
        matrix = torch.randn(size, size, device=DEVICE, dtype=getattr(torch, dtype))
        tflops[dtype] = 2 * size**3 / measure_seconds(lambda: matrix @ matrix) / 1e12  # noqa: B023
    values = torch.ones(pick(2**30, 2**30, 2**20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(values)
    copied = 2 * values.nbytes / measure_seconds(lambda: target.copy_(values)) / 1e9  # read and written
    total = torch.cuda.get_device_properties(0).total_memory / 1e9 if GPU else 1.0
    measured = {"memory_gb": total, "tflops": tflops, "memory_gb_per_s": copied}
    file = FILE if GPU else tmp_path / FILE.name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({name: {**RATES.get(name, RATES["h100"])._asdict(), **measured}}, indent=1))
    assert read_rates(file)[name].tflops == tflops
    words = f"{device_name}: {tflops} TFLOP/s, memory {copied:.0f} GB/s; written to {file}, with assumed rates of links"
    record(words, **tflops, copied=copied)
