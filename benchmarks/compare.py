"""Time and memory of updates in several variants, on the same pairs.

    python -m benchmarks.compare model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR \\
        loss=dpo loss.beta=0.1 batch_size=16 gradient_accumulation_steps=4
    python -m benchmarks.compare --trl VENV/bin/python --updates 4 --only "ours;trl" ...
    python -m benchmarks.compare --table adapters ...
    python -m benchmarks.compare --table processes ...

Takes the overrides of train.py (W&B is off; all weights are float32). Each row of a table trains on the same batches in
fresh processes, after one warm-up update, and is also printed relative to the first row.

- `fed` is the number of token positions that the policy computes, including padding; `needed` is the number with shared
  prefixes and without padding.
- FLOPs are those of matrix products and attention in policy and reference, computed from the shapes (`count_flops`).
  `of peak` compares their speed with that of a matrix product in the same dtype, measured in the same call.
- `peak GB` is the memory of the largest process, `grown GB` the part that models and updates added to it, `host GB` the
  memory of all processes together.
- Other work on the machine changes the CPU seconds less than the seconds on the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from benchmarks.harness import (
    COMMON,
    ROOT,
    Failed,
    compose,
    make_trainer,
    measure_afresh,
    print_row,
    read_pairs,
    run_python,
)
from dpo.data.examples import Example
from dpo.models.layouts import SharedPrefix
from dpo.models.packing import Packed
from dpo.system.host import resident_memory
from dpo.training.metrics import peak_memory_gb

EAGER = ("model.attn_implementation=eager",)  # as in the reference code
SDPA = ("model.attn_implementation=sdpa",)
CACHED = ("cache_reference_logps=all",)
BFLOAT16 = ("model.autocast=bfloat16",)
TWO_PROCESSES = ("trainer=FSDPTrainer", "world_size=2")
ADAPTERS = {
    "lora=none": ("lora=none",),
    "lora.reference=model": ("lora=lora", "lora.reference=model"),
    "lora.reference=base": ("lora=lora", "lora.reference=base"),
    "lora=qlora": ("lora=qlora", "lora.reference=base"),
    "lora.reference=adapter": ("lora=lora", "lora.reference=adapter", "model.archive={adapter}"),
}
TABLES = {
    "layouts": {
        "padded": ("layout=padded", *EAGER),
        "padded, sdpa": ("layout=padded", *SDPA),
        "ours, eager": EAGER,
        "ours": SDPA,
        "ours, reference cached": (*SDPA, *CACHED),
        "padded, bfloat16": ("layout=padded", *EAGER, *BFLOAT16),
        "ours, compiled": (*SDPA, "compile=true"),
        "ours, bfloat16": (*SDPA, *BFLOAT16),
        "ours, bfloat16, reference cached": (*SDPA, *BFLOAT16, *CACHED),
    },
    "adapters": ADAPTERS
    | {f"{name}, 2 processes": (*overrides, *TWO_PROCESSES) for name, overrides in ADAPTERS.items()},
    "processes": {
        "one process": (),
        "FSDPTrainer, 1 process": ("trainer=FSDPTrainer", "world_size=1"),
        "FSDPTrainer, 2 processes": TWO_PROCESSES,
        "TensorParallelTrainer, 2 processes": ("trainer=TensorParallelTrainer", "world_size=2"),
    },
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


def read_shape(model: Any) -> Shape:
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    embeddings = {model.get_input_embeddings().weight, head}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p not in embeddings)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim
    return Shape(matrices, head.numel(), attention)


def count_flops(shape: Shape, inputs: Any, *, with_reference: bool) -> float:
    """Count the FLOPs of a microbatch in policy and reference.

    A forward pass has 2 FLOPs per parameter and token; attention has 4 per token, column, layer and feature; the head
    counts only for scored positions. A backward pass has twice the FLOPs. Recomputation to save memory is not counted.
    """
    rows, length = inputs.input_ids.shape
    n_scored = len(inputs.scored) if isinstance(inputs, Packed) else rows * length
    n_attended = rows * length * length  # pairs of a token and a column of its row, also if masked
    if isinstance(inputs, Packed) and inputs.segments is not None:
        n_attended = int((inputs.segments.queries.diff().long() * inputs.segments.keys.diff()).sum())
    body = rows * length * 2 * shape.matrices + 4 * n_attended * shape.attention
    head = n_scored * 2 * shape.head
    return (body + head) * (4 if with_reference else 3)  # a backward pass costs two forward passes


def count_useful_flops(shape: Shape, examples: Sequence[Example], *, with_reference: bool) -> float:
    """Count the FLOPs that a global batch needs: the numerator of MFU.

    A prompt counts once for all its responses, a token attends only to itself and earlier tokens of its own text, and
    padding does not count.
    """
    flops = 0
    for example in examples:
        n_prompt, lengths = len(example.prompt), [len(tokens) for tokens in example.responses]
        n_tokens = n_prompt + sum(lengths)
        n_keys = n_prompt * (n_prompt + 1) // 2 + sum(n * n_prompt + n * (n + 1) // 2 for n in lengths)
        flops += 2 * n_tokens * shape.matrices + 4 * n_keys * shape.attention + 2 * sum(lengths) * shape.head
    return flops * (4 if with_reference else 3)  # as in `count_flops`


def measure(rank: int, world_size: int, config: Any, updates: int) -> dict[str, Any]:
    """Train in this process, and measure each update but the first."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as train.work does
    memory_before = 0 if torch.cuda.is_available() else resident_memory() / 1e9
    config.n_examples = (updates + 2) * config.batch_size  # one update warms up, and `count_collectives` needs one
    trainer = make_trainer(config, rank, world_size)
    shape = read_shape(trainer.policy)
    trainer.check_and_score_reference()
    batches = iter(trainer.train_iterator)
    _, *rows = [measure_update(trainer, batch, shape) for batch in itertools.islice(batches, updates + 1)]
    memory = peak_memory_gb()
    result = {
        "rows": rows,
        "pairs": config.batch_size,
        "memory_gb": memory,
        "grown_gb": memory - memory_before,
    }
    if torch.distributed.is_initialized():
        result |= count_collectives(trainer, next(batches))
    return result


def measure_update(trainer: Any, batch: Any, shape: Shape) -> dict[str, float]:
    with_reference = trainer.reference_model is not None
    # the pairs with shared prefixes, for `needed`; positions of padding are in no tree
    packed = SharedPrefix({}, max_length=trainer.config.max_length).split(batch.examples, 1)
    start, cpu = time.perf_counter(), time.process_time()
    metrics = trainer.train_step(batch).metrics
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "fed": sum(microbatch.n_tokens for microbatch in batch.microbatches),
        "needed": sum(int((microbatch.inputs.tree >= 0).sum()) for microbatch in packed),
        "flops": sum(
            count_flops(shape, microbatch.inputs, with_reference=with_reference) for microbatch in batch.microbatches
        ),
        "useful": count_useful_flops(shape, batch.examples, with_reference=with_reference),
        "loss": metrics["loss/train"],
    }


def count_collectives(trainer: Any, batch: Any) -> dict[str, float]:
    """Count an update's collectives, their elements, and seconds including waiting."""
    with torch.profiler.profile(record_shapes=True) as profile:
        trainer.train_step(batch)
    events = [event for event in profile.events() if event.name.startswith(("gloo:", "nccl:"))]
    return {
        "collectives": len(events),
        "sent": sum(math.prod(event.input_shapes[0]) for event in events if event.input_shapes),
        "seconds_in_them": sum(event.cpu_time_total for event in events) / 1e6,
    }


# --- all rows --------------------------------------------------------------------------------------------------------


def measure_row(overrides: Sequence[str], updates: int) -> dict[str, Any]:
    """Measure a row in fresh processes.

    Memory and CPU seconds are those of the rank with the most, `host_gb` is that of all ranks together, and other
    values are those of rank 0.
    """
    host_memory = [0]  # bytes, at several moments

    def watch(pid: int) -> None:
        host_memory.append(measure_tree_memory(pid))

    # only every 0.2 s, as the kernel stops a process while counting its pages
    ranks = measure_afresh("compare:measure", [*COMMON, *overrides], updates, watch=watch, every=0.2)
    return {
        **ranks[0],
        "memory_gb": max(rank["memory_gb"] for rank in ranks),
        "grown_gb": max(rank["grown_gb"] for rank in ranks),
        "cpu": max(median(row["cpu"] for row in rank["rows"]) for rank in ranks),
        "host_gb": max(host_memory) / 1e9,
    }


def measure_tree_memory(pid: int) -> int:
    """Memory of a process and its descendants, in bytes (PSS)."""
    try:
        _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()  # the first is a header
        kilobytes = int(dict(line.split(":") for line in lines)["Pss"].split()[0])
        children = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    except OSError:  # the process has just ended
        return 0
    return 1024 * kilobytes + sum(measure_tree_memory(child) for child in children)


def measure_trl(python: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure TRL on the pairs in `folder`, in its own Python."""
    (folder / "settings.json").write_text(json.dumps(settings))
    return json.loads(run_python("-m", "benchmarks.trl_runs", str(folder), python=python).splitlines()[-1])


def write_pairs(overrides: Sequence[str], updates: int, folder: Path) -> dict[str, Any]:
    """Write the pairs of our batches in order, and return TRL's settings."""
    config = compose([*COMMON, f"local_run_dir={folder}/run", *overrides])
    config.n_examples = (updates + 1) * config.batch_size
    rows = [{"prompt": prompt.text, **texts} for prompt, _, texts, _ in read_pairs(config)]
    (folder / "train.json").write_text(json.dumps(rows))
    return {
        "model": config.model.name_or_path,
        "per_device_train_batch_size": config.batch_size // config.gradient_accumulation_steps,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "max_length": config.max_length,
        "beta": config.loss.beta,
        "learning_rate": config.lr,
    }


def train_adapter(overrides: Sequence[str], folder: Path) -> Path:
    """Train an adapter by one update of SFT, for `lora.reference=adapter`."""
    kept = [override for override in overrides if not override.startswith(("loss", "trainer", "world_size", "lora"))]
    fixed = ("exp_name=sft", "wandb.enabled=false", "do_first_eval=false", "export=false", "loss=sft", "lora=lora")
    one_update = ("n_examples=2", "batch_size=2", "gradient_accumulation_steps=1")
    paths = (f"local_run_dir={folder / 'sft'}", f"local_dirs=[{folder}]")
    run_python(str(ROOT / "train.py"), *COMMON, *kept, *fixed, *paths, *one_update)
    return folder / "sft" / "LATEST"


def list_measures(options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> dict[str, Callable[[], dict]]:
    """List the functions that measure the rows, by the rows' names."""
    measures: dict[str, Callable[[], dict]] = {}
    adapter = train_adapter(overrides, folder) if options.table == "adapters" else None
    for name, row_overrides in TABLES[options.table].items():
        settings = [*overrides, *(override.format(adapter=adapter) for override in row_overrides)]
        measures[name] = partial(measure_row, settings, options.updates)
    if options.trl:
        common = write_pairs(overrides, options.updates, folder)
        for name, trl_options in TRL.items():
            measures[name] = partial(measure_trl, options.trl, folder, {**common, **trl_options})
    names = options.only.split(";") if options.only else measures
    return {name: measure for name, measure in measures.items() if name in names}


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

# format and value of each column; "%" is the ratio to the first row's value
COLUMNS: dict[str, tuple[str, Callable[[dict], float]]] = {
    "s/update": (".2f", lambda row: row["seconds"]),
    "s/pair": (".3f", lambda row: row["seconds"] / row["pairs"]),
    "of first": ("%", lambda row: row["seconds"]),
    "CPU s": (".2f", lambda row: row["cpu"]),
    "CPU": ("%", lambda row: row["cpu"]),
    "peak GB": (".2f", lambda row: row["memory_gb"]),
    "peak": ("%", lambda row: row["memory_gb"]),
    "grown GB": (".2f", lambda row: row["grown_gb"]),
    "grown": ("%", lambda row: row["grown_gb"]),
    "host GB": (".2f", lambda row: row["host_gb"]),
    "host": ("%", lambda row: row["host_gb"]),
    "fed/pair": (".0f", lambda row: row["fed"] / row["pairs"]),
    "needed": (".0f", lambda row: row["needed"] / row["pairs"]),
    "TFLOP": (".2f", lambda row: row["flops"] / 1e12),
    "of peak": (".0%", lambda row: row["rate"] / row["peak"]),
    "calls": (".0f", lambda row: row["collectives"]),
    "sent M": (".1f", lambda row: row["sent"] / 1e6),
    "s in them": (".2f", lambda row: row["seconds_in_them"]),
}
SHOWN = {
    "layouts": ("s/pair", "of first", "peak GB", "peak", "fed/pair", "needed", "TFLOP", "of peak"),
    "adapters": ("s/update", "of first", "CPU s", "CPU", "peak GB", "peak", "grown GB", "grown"),
    "processes": ("s/update", "of first", "calls", "sent M", "s in them", "host GB", "host", "peak GB"),
}


def summarize(name: str, result: dict, peaks: dict[str, float]) -> dict[str, float]:
    """Summarize the updates of a row."""
    updates = result["rows"]
    summary = {key: value for key, value in result.items() if key != "rows"}
    summary["seconds"] = median(update["seconds"] for update in updates)
    if "flops" in updates[0]:  # not measured in TRL
        summary |= {key: fmean(update[key] for update in updates) for key in ("fed", "needed", "flops")}
        summary["rate"] = sum(update["flops"] for update in updates) / sum(update["seconds"] for update in updates)
        summary["peak"] = peaks["bfloat16" if "bfloat16" in name else "float32"]
    return summary


def format_cell(column: str, row: dict[str, float], first_row: dict[str, float]) -> str:
    """Format a cell; empty if the row has no such value.

    TRL's rows lack several values, and rows of one process have no collectives.
    """
    form, get_value = COLUMNS[column]
    try:
        return f"{get_value(row) / get_value(first_row):.0%}" if form == "%" else format(get_value(row), form)
    except KeyError:
        return ""


def print_table(results: dict[str, dict], columns: Sequence[str], peaks: dict[str, float]) -> None:
    """Print the summaries of all rows, and the losses of their updates."""
    print()
    print_row("", columns, first=38, width=10)
    first_row: dict[str, float] = {}
    for name, result in results.items():
        if "failed" in result:
            print(f"{name:38} failed: {result['failed']}")
            continue
        row = summarize(name, result, peaks)
        first_row = first_row or row
        print_row(name, [format_cell(column, row, first_row) for column in columns], first=38, width=10)
    print("\nlosses of the counted updates, which should agree within a dtype:")
    for name, result in results.items():
        print_row(name, [f"{row['loss']:.6f}" for row in result.get("rows", ())], first=38)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--table", choices=TABLES, default="layouts")
    parser.add_argument("--updates", type=int, default=4, help="number of counted updates")
    parser.add_argument("--only", help="names of rows, separated by semicolons")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment with TRL")
    options, overrides = parser.parse_known_args()
    rows = [*TABLES[options.table], *TRL]
    chosen = options.only.split(";") if options.only else []
    if unknown := {*chosen} - {*rows}:
        parser.error(f"--only: unknown rows {', '.join(sorted(unknown))}; the rows are {'; '.join(rows)}")
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure_this_row in list_measures(options, overrides, Path(folder)).items():
            try:
                results[name] = measure_this_row()
            except Failed as error:
                results[name] = {"failed": str(error)}
            print(f"measured {name}", flush=True)
    peaks = {name: measure_peak(getattr(torch, name)) for name in ("float32", "bfloat16")}
    print(", ".join(f"{name} peak {peak / 1e9:,.0f} GFLOP/s" for name, peak in peaks.items()))
    print_table(results, SHOWN[options.table], peaks)


if __name__ == "__main__":
    main()
