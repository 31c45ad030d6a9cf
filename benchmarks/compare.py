"""Ours against the plain path and optionally TRL: the same pairs, model and batch size, each in its own process.

    python -m benchmarks.compare model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR \\
        loss=dpo loss.beta=0.1 batch_size=16 gradient_accumulation_steps=4
    python -m benchmarks.compare --trl VENV/bin/python --updates 4 --only "ours;trl" ...

Takes the overrides of train.py (W&B is off; all weights are float32). Every row of the table trains on the same batches
through the real loop, after one warm-up update. `fed` is the number of token positions that the policy computes,
including padding; `needed` is that of shared prefixes without padding. FLOPs are those of matrix products and attention
in policy and reference, computed from the shapes (`count_flops`); the peak is that of a matrix product in the same
dtype, measured in the same call.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.harness import COMMON, Failed, compose, make_trainer, measure_afresh, print_row, run_python
from dpo.models.layouts import SharedPrefix
from dpo.models.packing import Packed
from dpo.settings.plan import resolve
from dpo.system.host import keep_freed_memory
from dpo.training.metrics import peak_memory_gb

EAGER = ("model.attn_implementation=eager",)  # the reference's
FAST = ("model.attn_implementation=sdpa",)
CACHED = ("cache_reference_logps=all",)
BFLOAT16 = ("model.autocast=bfloat16",)
VARIANTS = {
    "padded": ("layout=padded", *EAGER),
    "padded, sdpa": ("layout=padded", *FAST),
    "ours, eager": EAGER,
    "ours": FAST,
    "ours, reference cached": (*FAST, *CACHED),
    "padded, bfloat16": ("layout=padded", *EAGER, *BFLOAT16),
    "ours, compiled": (*FAST, "compile=true"),
    "ours, bfloat16": (*FAST, *BFLOAT16),
    "ours, bfloat16, reference cached": (*FAST, *BFLOAT16, *CACHED),
}
TRL = {
    "trl": {},
    "trl, reference precomputed": {"precompute_ref_log_probs": True},
    "trl, bfloat16": {"bf16": True},
}


class Shape(NamedTuple):
    """Sizes that determine the FLOPs."""

    matrices: int  # parameters that a token is multiplied with, without the head's
    head: int  # parameters of the head
    attention: int  # layers * heads * size of a head


def read_shape(model: Any) -> Shape:
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    embeddings = {model.get_input_embeddings().weight, head}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p not in embeddings)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return Shape(matrices, head.numel(), config.num_hidden_layers * width)


def count_flops(shape: Shape, inputs: Any, *, with_reference: bool) -> float:
    """Count the FLOPs of a microbatch: policy forward and backward (twice the forward), reference forward.

    2 per parameter and token; attention 4 per token, column, layer and feature; the head only for scored positions.
    Recomputation to save memory is not counted.
    """
    packed = isinstance(inputs, Packed)
    rows, length = inputs.input_ids.shape
    scored = len(inputs.scored) if packed else rows * length
    body = rows * length * (2 * shape.matrices + 4 * length * shape.attention)
    head = scored * 2 * shape.head
    return (body + head) * (3 + with_reference)


def measure(overrides: list[str], updates: int) -> dict[str, Any]:
    """Train in this process, and measure each update but the first."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*COMMON, f"local_run_dir={folder}", f"local_dirs=[{folder}]", *overrides])
        config.n_examples = (updates + 1) * config.batch_size
        keep_freed_memory()  # like TF32 below, as in train.work
        torch.backends.cuda.matmul.allow_tf32 = True
        trainer = make_trainer(config)
        shape = read_shape(trainer.policy)
        trainer.check_and_score_reference()
        rows = [measure_update(trainer, batch, shape) for batch in trainer.train_iterator][1:]
    return {"rows": rows, "pairs": config.batch_size, "memory_gb": peak_memory_gb()}


def measure_update(trainer: Any, batch: Any, shape: Shape) -> dict[str, float]:
    with_reference = trainer.reference_model is not None
    inputs = [microbatch.inputs for microbatch in batch.microbatches]
    needed = SharedPrefix({}, max_length=trainer.config.max_length).split(batch.examples, 1)
    start = time.perf_counter()
    metrics = trainer.train_step(batch).metrics
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "fed": sum(microbatch.n_tokens for microbatch in batch.microbatches),
        "needed": sum(int((m.inputs.tree >= 0).sum()) for m in needed),
        "flops": sum(count_flops(shape, i, with_reference=with_reference) for i in inputs),
        "loss": metrics["loss/train"],
        "grad_norm": metrics["grad_norm"],
    }


def measure_peak(dtype: torch.dtype) -> float:
    """Measure FLOP/s of products of square matrices, the best of five."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float32).to(dtype)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(3):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return 3 * 2 * size**3 / min(once() for _ in range(5))


def run_all(overrides: list[str], updates: int, only: list[str] | None, trl: str | None) -> Iterator[tuple[str, dict]]:
    measures: dict[str, Callable[[], dict]] = {
        name: lambda own=own: measure_afresh("compare:measure", [*overrides, *own], updates)
        for name, own in VARIANTS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        if trl:
            settings = write_pairs(overrides, updates, Path(folder))
            for name, options in TRL.items():
                measures[name] = lambda options=options: measure_trl(trl, folder, {**settings, "options": options})
        for name, measure_one in measures.items():
            if only is None or name in only:
                try:
                    yield name, measure_one()
                except Failed as error:
                    yield name, {"failed": str(error)}


def measure_trl(python: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    Path(folder, "settings.json").write_text(json.dumps(settings))
    script = str(Path(__file__).with_name("trl_baseline.py"))
    return json.loads(run_python(script, folder, python=python).splitlines()[-1])


def write_pairs(overrides: list[str], updates: int, folder: Path) -> dict[str, Any]:
    """Write the pairs of our batches as records for TRL, in order. Returns the settings."""
    from dpo.data.examples import iterate_examples, read_examples
    from preference_datasets import load_data

    config = compose([*COMMON, f"local_run_dir={folder}/run", *overrides])
    n_pairs = (updates + 1) * config.batch_size
    prompts = load_data(resolve(config), silent=True).train
    batches = iterate_examples(
        prompts.counts.tolist(),
        batch_size=config.batch_size,
        shuffle=True,
        n_epochs=None,
        n_examples=n_pairs,
        seed=config.seed,
    )
    rows = [{"prompt": prompt.text, **texts} for batch in batches for prompt, _, texts in read_examples(prompts, batch)]
    (folder / "pairs.json").write_text(json.dumps(rows))
    return {
        "model": config.model.name_or_path,
        "batch_size": config.batch_size,
        "accumulation": config.gradient_accumulation_steps,
        "max_length": config.max_length,
        "beta": config.loss.beta,
        "lr": config.lr,
    }


def print_table(results: dict[str, dict], peaks: Callable[[str], float]) -> None:
    """Print a line per result, also relative to the first, which is `padded` unless it was left out."""
    first = next((result for result in results.values() if "rows" in result), None)
    titles = ("s/pair", "speedup", "memory GB", "of first", "fed/pair", "needed", "needed/s", "TFLOP/update", "of peak")
    print()
    print_row("", titles)
    for name, result in results.items():
        if "failed" in result:
            print(f"{name:34} failed: {result['failed']}")
            continue
        rows, pairs = result["rows"], result["pairs"]
        seconds = median(r["seconds"] for r in rows)
        cells = [f"{seconds / pairs:.3f}", f"{median(r['seconds'] for r in first['rows']) / seconds:.2f}"]
        cells += [f"{result['memory_gb']:.2f}", f"{result['memory_gb'] / first['memory_gb']:.0%}"]
        if "flops" in rows[0]:
            fed, needed, flops = (sum(r[key] for r in rows) / len(rows) for key in ("fed", "needed", "flops"))
            rate = sum(r["flops"] for r in rows) / sum(r["seconds"] for r in rows)
            cells += [f"{fed / pairs:.0f}", f"{needed / pairs:.0f}", f"{needed / seconds:.0f}", f"{flops / 1e12:.2f}"]
            cells.append(f"{rate / peaks(name):.0%}")
        print_row(name, cells)
    print("\nlosses of the counted updates, which should agree within a dtype:")
    for name, result in results.items():
        if "rows" in result:
            print_row(name, [f"{row['loss']:.6f}" for row in result["rows"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=4, help="number of counted updates")
    parser.add_argument("--only", help="names of rows, separated by semicolons")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment with TRL")
    parser.add_argument("--json", metavar="FILE", help="write the measurements to this file")
    arguments, overrides = parser.parse_known_args()
    results: dict[str, dict] = {}
    only = arguments.only.split(";") if arguments.only else None
    if unknown := set(only or ()) - VARIANTS.keys() - TRL.keys():
        parser.error(f"--only: unknown rows {', '.join(sorted(unknown))}; the rows are {'; '.join([*VARIANTS, *TRL])}")
    for name, result in run_all(overrides, arguments.updates, only, arguments.trl):
        results[name] = result
        print(f"measured {name}", flush=True)
        if arguments.json:  # after every row: the next may fail
            Path(arguments.json).write_text(json.dumps(results, indent=2))
    measured = {dtype: measure_peak(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(", ".join(f"{str(d).removeprefix('torch.')} peak {p / 1e9:,.0f} GFLOP/s" for d, p in measured.items()))
    print_table(results, lambda name: measured[torch.bfloat16 if "bfloat16" in name else torch.float32])


if __name__ == "__main__":
    main()
