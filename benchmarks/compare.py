"""Time and memory of updates in several variants, on the same pairs.

    python -m benchmarks.compare model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR \\
        loss=dpo loss.beta=0.1 batch_size=16 gradient_accumulation_steps=4
    python -m benchmarks.compare --trl VENV/bin/python --updates 4 --only "ours;trl" ...
    python -m benchmarks.compare --row=lora=none --row="lora=lora lora.reference=base" ...
    python -m benchmarks.compare --row=world_size=1 --row="trainer=FSDPTrainer world_size=2" ...

Takes the overrides of train.py (W&B is off; all weights are float32). Each row trains on the same batches in
fresh processes, after one warm-up update, and is also printed relative to the first row.

- `fed` is the number of token positions that the policy computes, including padding; `needed` is the number with shared
  prefixes and without padding.
- FLOPs are those of matrix products and attention in policy and reference, computed from the shapes (`count_flops`).
  `of peak` compares their speed with that of a matrix product in the same dtype, measured in the same call.
- `peak GB` is the memory of the largest process, `grown GB` the part that models and updates added to it.
- Rows in bfloat16 are left out on a CPU without instructions for it.
- Other work on the machine changes the CPU seconds less than the seconds on the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from benchmarks.harness import COMMON, Failed, compose, make_trainer, measure_afresh, print_row, run_python
from dpo.data.examples import Example, iterate_examples, read_examples
from dpo.data.preflight import load_data
from dpo.models.layouts import SharedPrefix
from dpo.models.packing import Packed
from dpo.settings.plan import resolve
from dpo.system.host import resident_memory
from trainers import peak_memory_gb

EAGER = ("model.attn_implementation=eager",)  # as in the reference code
SDPA = ("model.attn_implementation=sdpa",)
CACHED = ("cache_reference_logps=all",)
BFLOAT16 = ("model.autocast=bfloat16",)
ROWS = {
    "padded": ("layout=padded", *EAGER),
    "padded, sdpa": ("layout=padded", *SDPA),
    "ours, eager": EAGER,
    "ours": SDPA,
    "ours, reference cached": (*SDPA, *CACHED),
    "padded, bfloat16": ("layout=padded", *EAGER, *BFLOAT16),
    "ours, compiled": (*SDPA, "compile=true"),
    "ours, bfloat16": (*SDPA, *BFLOAT16),
    "ours, bfloat16, reference cached": (*SDPA, *BFLOAT16, *CACHED),
}
TRL = {  # the rows that --trl adds, and their options of DPOConfig
    "trl": {},
    "trl, reference precomputed": {"precompute_ref_log_probs": True},
    "trl, bfloat16": {"bf16": True},
}


# --- one row, in its own processes -----------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Sizes that determine the FLOPs."""

    matrices: int  # parameters that every token is multiplied with: all matrices but embeddings and head
    head: int  # parameters of the head
    attention: int  # layers * heads * size of a head

    def count(self, tokens: int, attended: int, scored: int, *, with_reference: bool) -> int:
        """Count the FLOPs of an update, in policy and reference.

        A forward pass has 2 per parameter and token, and 4 per token, column that it attends to, layer and feature; the
        head counts only for scored positions. A backward pass has twice the FLOPs. Recomputation to save memory is not
        counted.
        """
        body = 2 * tokens * self.matrices
        attention = 4 * attended * self.attention
        head = 2 * scored * self.head
        n_passes = 4 if with_reference else 3  # a backward pass costs two forward passes
        return n_passes * (body + attention + head)


def read_shape(model: Any) -> Shape:
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    embeddings = {model.get_input_embeddings().weight, head}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p not in embeddings)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim
    return Shape(matrices, head.numel(), attention)


def count_flops(shape: Shape, inputs: Packed, *, with_reference: bool) -> int:
    """Count the FLOPs of a microbatch as it is computed, with its padding."""
    rows, length = inputs.input_ids.shape
    tokens = rows * length
    scored = tokens
    attended = tokens * length  # pairs of a token and a column of its row, also if masked
    if inputs.padding_mask is None:
        scored = len(inputs.scored)
        if inputs.segments is not None:
            queries = inputs.segments.queries.diff().long()
            keys = inputs.segments.keys.diff()
            attended = int((queries * keys).sum())
    return shape.count(tokens, attended, scored, with_reference=with_reference)


def count_useful_flops(shape: Shape, examples: Sequence[Example], *, with_reference: bool) -> int:
    """Count the FLOPs that a global batch needs: the numerator of MFU.

    A prompt counts once for all its responses, a token attends only to itself and earlier tokens of its own text, and
    padding does not count.
    """
    tokens = attended = scored = 0
    for example in examples:
        n_prompt = len(example.prompt)
        tokens += n_prompt
        attended += n_prompt * (n_prompt + 1) // 2
        for response in example.responses:
            n = len(response)
            tokens += n
            scored += n
            attended += n * n_prompt + n * (n + 1) // 2
    return shape.count(tokens, attended, scored, with_reference=with_reference)


def measure(rank: int, world_size: int, config: Any, updates: int) -> dict[str, Any]:
    """Train in this process, and measure each update but the first."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as train.work does
    memory_before = 0 if torch.cuda.is_available() else resident_memory() / 1e9
    config.n_examples = (updates + 1) * config.batch_size  # one update warms up
    trainer = make_trainer(config, rank, world_size)
    shape = read_shape(trainer.policy)
    trainer.check_and_score_reference()
    rows = [measure_update(trainer, batch, shape) for batch in trainer.train_iterator]
    memory = peak_memory_gb()
    return {
        "rows": rows[1:],
        "pairs": config.batch_size,
        "memory_gb": memory,
        "grown_gb": memory - memory_before,
    }


def measure_update(trainer: Any, batch: Any, shape: Shape) -> dict[str, float]:
    with_reference = trainer.reference_model is not None
    # the pairs with shared prefixes, for `needed`; positions of padding are in no tree
    packed = SharedPrefix({}, max_length=trainer.config.max_length).split(batch.examples, 1)
    start = time.perf_counter()
    cpu = time.process_time()
    metrics = trainer.train_step(batch).metrics
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu
    fed = flops = needed = 0
    for microbatch in batch.microbatches:
        fed += microbatch.n_tokens
        flops += count_flops(shape, microbatch.inputs, with_reference=with_reference)
    for microbatch in packed:
        needed += int((microbatch.inputs.tree >= 0).sum())
    return {
        "seconds": seconds,
        "cpu": cpu_seconds,
        "fed": fed,
        "needed": needed,
        "flops": flops,
        "useful": count_useful_flops(shape, batch.examples, with_reference=with_reference),
        "loss": metrics["loss/train"],
    }


# --- all rows --------------------------------------------------------------------------------------------------------


def measure_row(overrides: Sequence[str], updates: int) -> dict[str, Any]:
    """Measure a row in fresh processes.

    Memory and CPU seconds are those of the rank with the most, and other values are those of rank 0.
    """
    ranks = measure_afresh("compare:measure", [*COMMON, *overrides], updates)
    return {
        **ranks[0],
        "memory_gb": max(rank["memory_gb"] for rank in ranks),
        "grown_gb": max(rank["grown_gb"] for rank in ranks),
        "cpu": max(median(row["cpu"] for row in rank["rows"]) for rank in ranks),
    }


def measure_trl(python: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure TRL on the pairs in `folder`, in its own Python."""
    (folder / "settings.json").write_text(json.dumps(settings))
    return json.loads(run_python("-m", "benchmarks.trl_runs", str(folder), python=python).splitlines()[-1])


def write_pairs(overrides: Sequence[str], updates: int, folder: Path) -> dict[str, Any]:
    """Write the pairs of our batches in order, and return TRL's settings."""
    config = compose([*COMMON, f"local_run_dir={folder}/run", *overrides])
    config.n_examples = (updates + 1) * config.batch_size
    prompts = load_data(resolve(config), silent=True).train
    batches = iterate_examples(
        prompts.counts.tolist(),
        shuffle=True,
        seed=config.seed,
        batch_size=config.batch_size,
        n_epochs=None,
        n_examples=config.n_examples,
    )
    example_ids = [example_id for batch in batches for example_id in batch]
    rows = []
    for prompt, index in read_examples(prompts, example_ids):
        rows.append({"prompt": prompt.text, **prompt.texts(index)})
    (folder / "train.json").write_text(json.dumps(rows))
    return {
        "model": config.model.name_or_path,
        "per_device_train_batch_size": config.batch_size // config.gradient_accumulation_steps,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "max_length": config.max_length,
        "beta": config.loss.beta,
        "learning_rate": config.lr,
    }


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 is multiplied by instructions of its own.

    Without them a row takes many times as long, and says nothing.
    """
    if torch.cuda.is_available():
        return True
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists():
        return False
    flags = cpu_info.read_text().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def find_dtype(name: str) -> str:
    return "bfloat16" if "bfloat16" in name else "float32"


def measure_peak(dtype: torch.dtype) -> float:
    """Measure FLOP/s of products of square matrices, the best of five."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float32).to(dtype)
    n_products = 3

    def time_products() -> float:
        start = time.perf_counter()
        for _ in range(n_products):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    time_products()  # warms up
    return n_products * 2 * size**3 / min(time_products() for _ in range(5))


# --- the table -------------------------------------------------------------------------------------------------------

COLUMNS = {  # format of each column; "%" is the ratio to the first row's value
    "s/update": ".2f",
    "of first": "%",
    "s/pair": ".3f",
    "CPU s": ".2f",
    "peak GB": ".2f",
    "peak": "%",
    "grown GB": ".2f",
    "fed/pair": ".0f",
    "needed": ".0f",
    "TFLOP": ".2f",
    "of peak": ".0%",
}


def summarize(name: str, result: dict, peaks: dict[str, float]) -> dict[str, float]:
    """Summarize the updates of a row, by column; TRL's rows lack several."""
    updates = result["rows"]
    pairs = result["pairs"]
    seconds = median(update["seconds"] for update in updates)
    row = {
        "s/update": seconds,
        "of first": seconds,
        "s/pair": seconds / pairs,
        "peak GB": result["memory_gb"],
        "peak": result["memory_gb"],
    }
    if "cpu" in result:
        fed = fmean(update["fed"] for update in updates)
        needed = fmean(update["needed"] for update in updates)
        flops = fmean(update["flops"] for update in updates)
        rate = flops / fmean(update["seconds"] for update in updates)
        row |= {
            "CPU s": result["cpu"],
            "grown GB": result["grown_gb"],
            "fed/pair": fed / pairs,
            "needed": needed / pairs,
            "TFLOP": flops / 1e12,
            "of peak": rate / peaks[find_dtype(name)],
        }
    return row


def format_cell(column: str, row: dict[str, float], first_row: dict[str, float]) -> str:
    if column not in row:
        return ""
    if COLUMNS[column] == "%":
        return f"{row[column] / first_row[column]:.0%}"
    return format(row[column], COLUMNS[column])


def print_table(results: dict[str, dict], peaks: dict[str, float]) -> None:
    """Print the summaries of all rows, and the losses of their updates."""
    print()
    print_row("", COLUMNS, first=38, width=10)
    first_row: dict[str, float] = {}
    for name, result in results.items():
        if "failed" in result:
            print(f"{name:38} failed: {result['failed']}")
            continue
        row = summarize(name, result, peaks)
        first_row = first_row or row
        cells = [format_cell(column, row, first_row) for column in COLUMNS]
        print_row(name, cells, first=38, width=10)
    print("\nlosses of the counted updates, which should agree within a dtype:")
    for name, result in results.items():
        losses = [f"{row['loss']:.6f}" for row in result.get("rows", ())]
        print_row(name, losses, first=38)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=4, help="number of counted updates")
    parser.add_argument("--only", help="names of rows, separated by semicolons")
    parser.add_argument("--row", action="append", default=[], help="overrides of a row, in place of the usual rows")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment with TRL 1.16")
    options, overrides = parser.parse_known_args()
    rows = {text: tuple(text.split()) for text in options.row} or ROWS
    chosen = options.only.split(";") if options.only else [*rows, *TRL]
    if unknown := {*chosen} - {*rows, *TRL}:
        parser.error(f"--only: unknown rows {', '.join(sorted(unknown))}; the rows are {'; '.join((*rows, *TRL))}")
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        measures: dict[str, Callable[[], dict]] = {}
        for name, own in rows.items():
            measures[name] = partial(measure_row, [*overrides, *own], options.updates)
        if options.trl:
            common = write_pairs(overrides, options.updates, Path(folder))
            for name, own in TRL.items():
                measures[name] = partial(measure_trl, options.trl, Path(folder), {**common, **own})
        for name, measure_this in measures.items():
            if name not in chosen:
                continue
            if find_dtype(name) == "bfloat16" and not has_fast_bfloat16():
                print(f"left out {name}: this CPU has no instructions for bfloat16", flush=True)
                continue
            try:
                results[name] = measure_this()
            except Failed as error:
                results[name] = {"failed": str(error)}
            print(f"measured {name}", flush=True)
    peaks = {}
    for dtype in {find_dtype(name) for name in results}:
        peaks[dtype] = measure_peak(getattr(torch, dtype))
    print(", ".join(f"{dtype} peak {peak / 1e9:,.0f} GFLOP/s" for dtype, peak in peaks.items()))
    print_table(results, peaks)


if __name__ == "__main__":
    main()
