"""Time until train.py answers or makes its first update; memory of data.

    python -m benchmarks.startup --answers [--checkout DIR ...] [--repeats 5]
    python -m benchmarks.startup model.name_or_path=DIR [--pairs 160800] [overrides of train.py ...]
    python -m benchmarks.startup model.name_or_path=DIR --processes 2,4 [--pairs 160800] [overrides of train.py ...]

`--answers` prints the median times that a user waits for a refused config, `--help`, `--cfg job` and completion; with
`--checkout` also for other checkouts of this project, in turns.

Without `--answers` synthetic pairs are written in HH's format and lengths (dialogues of one to four turns, log-normal
numbers of words). train.py runs on a thousandth of the pairs, then on all, each twice and for a few updates; the second
run finds the table that the first built. The difference of the peaks is the memory of the data, with the pages of the
data's files. With `--processes` all pairs are only loaded in each of these numbers of processes, also twice, and each
process's growth is printed: its own memory (anonymous), its share of shared memory, and its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import preference_datasets
from benchmarks.harness import ROOT, add_range, measure_afresh, measure_in_turns, print_row, run_python
from dpo.settings.plan import resolve
from dpo.system.host import release_freed_memory

LETTERS = "etaoinshrdlucmfwypvbgk"
FIXED = (
    "exp_name=startup", "loss=dpo", "loss.beta=0.1", "wandb.enabled=false", "debug=true", "do_first_eval=false",
    "n_eval_examples=16", "n_examples=16", "datasets=[hh]", "sample_during_eval=false",
)  # fmt: skip


# --- synthetic data --------------------------------------------------------------------------------------------------


def make_text(draw: random.Random) -> list[str]:
    """Make a text of a million words in a synthetic language."""
    letter_weights = range(len(LETTERS), 0, -1)  # earlier letters are more frequent
    words = ["".join(draw.choices(LETTERS, letter_weights, k=draw.randint(2, 9))) for _ in range(5000)]
    word_weights = [1 / (rank + 2) for rank in range(len(words))]  # Zipf's law
    return draw.choices(words, word_weights, k=1_000_000)


def write_pairs(path: Path, n: int, seed: int) -> None:
    """Write records in HH's format, of about 1,100 characters each."""
    rng = random.Random(seed)
    text = make_text(rng)

    def draw_sentence(typical_words: float) -> str:
        start = rng.randrange(990_000)
        n_words = int(rng.lognormvariate(0, 0.8) * typical_words) + 1
        return " ".join(text[start : start + min(n_words, 600)]).capitalize() + "."

    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        for _ in range(n):
            prompt = ""
            for _ in range(rng.randint(0, 3)):
                prompt += f"\n\nHuman: {draw_sentence(20)}\n\nAssistant: {draw_sentence(30)}"
            prompt += f"\n\nHuman: {draw_sentence(20)}\n\nAssistant:"
            pair = {"chosen": f"{prompt} {draw_sentence(40)}", "rejected": f"{prompt} {draw_sentence(40)}"}
            file.write(json.dumps(pair) + "\n")


# --- until an answer -------------------------------------------------------------------------------------------------

COMPLETED = "python train.py loss="
ANSWERS = {
    "refused config": ("exp_name=x", "lr=-1"),
    "--help": ("--help",),
    "--cfg job": ("--cfg", "job"),
    "completion": ("-sc", "query=bash"),
}


def seconds_to_answer(checkout: Path, name: str) -> float:
    """Time until train.py of a checkout has answered."""
    completion = {"COMP_LINE": COMPLETED, "COMP_POINT": str(len(COMPLETED))}  # as bash sets them
    command = [sys.executable, str(checkout / "train.py"), *ANSWERS[name]]
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, **completion}, capture_output=True, check=False)
    return time.perf_counter() - start


def measure_answers(checkouts: list[Path], repeats: int) -> None:
    """Print median times, a row per answer and a column per checkout."""
    measures = {
        (name, checkout): lambda _, name=name, checkout=checkout: seconds_to_answer(checkout, name)
        for name in ANSWERS
        for checkout in checkouts
    }
    seconds = measure_in_turns(measures, repeats)
    for name in ANSWERS:
        print_row(name, [f"{add_range(seconds[name, checkout])} s" for checkout in checkouts], first=28, width=24)


# --- with much data --------------------------------------------------------------------------------------------------


def measure_run(data: Path, overrides: list[str], folder: Path, run: str) -> tuple[float, float]:
    """Measure seconds to the first update, and peak memory in GB."""
    log = folder / f"{run}_{data.name}" / "metrics.jsonl"
    secs_to_update, peak = None, 0
    start = time.perf_counter()

    def watch(pid: int) -> None:
        nonlocal secs_to_update, peak
        if secs_to_update is None and log.exists():
            secs_to_update = time.perf_counter() - start
        with contextlib.suppress(OSError):  # the process has just ended
            peak = max(peak, read_memory(f"/proc/{pid}/status", "VmHWM")["VmHWM"])

    paths = (f"dataset_sources.hh={data}", f"local_run_dir={log.parent}", f"local_dirs=[{folder}]")
    run_python(str(ROOT / "train.py"), *FIXED, *paths, *overrides, watch=watch)
    return secs_to_update or time.perf_counter() - start, peak / 1e9


def read_memory(file: str, *names: str) -> dict[str, int]:
    """Read sizes in bytes from a /proc file; missing sizes are 0."""
    sizes = {}
    for line in Path(file).read_text().splitlines():
        if line.endswith(" kB"):
            name, kilobytes, _ = line.split()
            sizes[name.rstrip(":")] = int(kilobytes) * 1024
    return {name: sizes.get(name, 0) for name in names}


def measure_loading(rank: int, world_size: int, config: Any) -> dict[str, float]:
    """Measure by how many bytes loading the data makes this process grow."""

    def read_pss() -> dict[str, int]:  # shared pages are divided by the number of processes that map them
        return read_memory("/proc/self/smaps_rollup", "Pss_Anon", "Pss_Shmem", "Pss_File")

    before, start = read_pss(), time.perf_counter()
    preference_datasets.load_data(resolve(config, world_size=world_size), silent=True)
    seconds = time.perf_counter() - start
    peak = read_memory("/proc/self/status", "VmHWM")["VmHWM"] - sum(before.values())
    torch.distributed.barrier()  # all processes have mapped the table
    release_freed_memory()
    grown = {name: n_bytes - before[name] for name, n_bytes in read_pss().items()}
    shared = grown["Pss_Shmem"] + grown["Pss_File"]
    return {"seconds": seconds, "own": grown["Pss_Anon"], "shared": shared, "peak": peak}


def print_loading(data: Path, overrides: list[str], local_dir: Path, run: str, processes: int) -> None:
    """Print by how much each process grows while it loads data."""
    paths = (f"dataset_sources.hh={data}", f"local_dirs=[{local_dir}]")
    settings = ("loss=dpo", "loss.beta=0.1", "datasets=[hh]", "trainer=FSDPTrainer", f"world_size={processes}")
    ranks = measure_afresh("startup:measure_loading", [*settings, *paths, *overrides])
    for rank, result in enumerate(ranks):
        sizes = ", ".join(f"{name} {result[name] / 1e9:.2f} GB" for name in ("own", "shared", "peak"))
        print(f"{processes} processes, {run} run, rank {rank}: {sizes}, after {result['seconds']:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=160_800)
    parser.add_argument(
        "--processes",
        type=lambda text: [*map(int, text.split(","))],
        metavar="N,N",
        help="only load the data, with each of these numbers of processes",
    )
    parser.add_argument("--answers", action="store_true", help="only time refusals, --help, --cfg job and completion")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    options, overrides = parser.parse_known_args()
    if options.answers:
        measure_answers([*options.checkout, ROOT], options.repeats)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = [options.pairs] if options.processes else [max(64, options.pairs // 1000), options.pairs]
        for n in sizes:
            data = folder / str(n)
            write_pairs(data / "train.jsonl.gz", n, seed=0)
            write_pairs(data / "test.jsonl.gz", 64, seed=1)
            for run in ("first", "second"):
                if options.processes:
                    for processes in options.processes:
                        print_loading(data, overrides, folder / str(processes), run, processes)
                else:
                    seconds, peak = measure_run(data, overrides, folder, run)
                    print(f"{n:8,} pairs, {run} run: first update after {seconds:.1f} s, peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
