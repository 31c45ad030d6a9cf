"""Check 8: the same command twice, and stopped and resumed, bit for bit, with `top_p` in the generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from scripts.gpu_checks.common import TINY, Outcome, Run, Setting, few_words

COMMON = ("loss=dpo", "loss.beta=0.1", "datasets=[hh]", "batch_size=8", "eval_batch_size=2", "n_eval_examples=2",
          "n_eval_model_samples=2", "model.reference_dtype=float32", "max_length=80", "max_prompt_length=64",
          "eval_every=24", "n_epochs=null", "lr=1e-4", "warmup_steps=2", "deterministic=true",
          "do_first_sampling=true")  # fmt: skip
HALF, WHOLE = 24, 48  # examples
CHANGES = ("examples_per_second", "tokens_per_second", "memory/peak_gb")  # differ between any two runs


def check(setting: Setting) -> Outcome:
    model = Path(setting.folder) / "model"
    shutil.copytree(TINY, model)
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True, "top_p": 0.9, "temperature": 1.0}))
    common = (*COMMON, f"model.name_or_path={model}", f"dataset_sources.hh={few_words(setting, 40)}")
    first = Run(setting, "first", *common, f"n_examples={WHOLE}")
    again = Run(setting, "again", *common, f"n_examples={WHOLE}")
    Run(setting, "continued", *common, f"n_examples={HALF}").done()
    continued = Run(setting, "continued", *common, f"n_examples={WHOLE}", "resume=auto").done()
    first.done()
    differences = {run.name: difference(first, run.done()) for run in (again, continued)}
    faults = [f"{name}: {what}" for name, what in differences.items() if what]
    n = len(first.records(split="train"))
    figure = "; ".join(faults) or f"{n} updates twice, and resumed after {HALF // 8}: identical bit for bit"
    return Outcome(not faults and n == WHOLE // 8, figure, {"differences": differences, "updates": n})


def difference(first: Run, other: Run) -> str | None:
    """The first difference between two runs in metrics, samples or weights; None if they are identical."""
    import torch

    for file in ("metrics.jsonl", "samples.jsonl"):
        lines = [[without_times(line) for line in run.records(file)] for run in (first, other)]
        if len(lines[0]) != len(lines[1]) or not lines[0]:
            return f"{len(lines[1])} lines instead of {len(lines[0])} in {file}"
        for number, (one, two) in enumerate(zip(*lines, strict=True), 1):
            if one != two:
                keys = [key for key in one if one[key] != two.get(key)]
                return f"line {number} of {file} differs in {', '.join(keys)}"
    states = [torch.load(run.directory / "LATEST" / "policy.pt", weights_only=True)["state"] for run in (first, other)]
    odd = [key for key, tensor in states[0].items() if not torch.equal(tensor, states[1][key])]
    return f"weights differ: {', '.join(odd[:3])}" if odd else None


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in CHANGES}
