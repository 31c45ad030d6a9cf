"""Time and memory of loading data like Stack Exchange's in several processes of one machine.

    python -m benchmarks.stack_exchange model.name_or_path=DIR [--questions 100000] [--processes 1,2,4] [--batches 50]

Writes synthetic questions with 2 to 6 answers in HTML, in the Hub's format, and loads them as `datasets=[se]` in one,
two and four processes of a process group. Each line is a fresh run without cached results. Memory is the increase of a
process's memory by loading: its own (anonymous), and its share of shared memory.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import torch.distributed as dist
from omegaconf import DictConfig

import preference_datasets
from benchmarks.startup import make_text
from benchmarks.step_overhead import compose
from dpo.data.collation import padded_batch
from dpo.data.examples import iterate_examples, read_examples
from dpo.settings.plan import resolve
from dpo.system import launching

SETTINGS = ("datasets=[se]", "loss=dpo", "loss.beta=0.1", "exp_name=stack", "trainer=FSDPTrainer", "n_examples=1000000")
FIELDS = ("Pss_Anon", "Pss_Shmem", "Pss_File")
CHUNK = 20_000  # questions in memory while writing


def write_questions(path: Path, n: int) -> None:
    """Write `n` records of `question` and `answers`, about 500 characters per text, as parquet."""
    draw = random.Random(0)
    text = make_text(draw)

    def say(number: int) -> str:
        start, n_words = draw.randrange(990_000), min(int(draw.lognormvariate(0, 0.8) * 60) + 5, 600)
        words = " ".join(text[start : start + n_words])
        return f"<p>{number} {words}</p>\n\n<pre><code>{words[:80]}</code></pre>\n"

    with pyarrow.parquet.ParquetWriter(path, pyarrow.Table.from_pylist([_row(0, say, draw)]).schema) as file:
        for start in range(0, n, CHUNK):
            rows = [_row(number, say, draw) for number in range(start, min(n, start + CHUNK))]
            file.write_table(pyarrow.Table.from_pylist(rows))


def _row(number: int, say: Any, draw: random.Random) -> dict[str, Any]:
    answers = [{"text": say(number), "pm_score": draw.randint(0, 30)} for _ in range(draw.randint(2, 6))]
    return {"question": say(number), "answers": answers}


def memory() -> dict[str, int]:
    """Memory of this process in bytes by kind; shared pages are divided by the number of processes that map them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {name: found[name] for name in FIELDS}


def load(rank: int, world_size: int, config: DictConfig, folder: Path, batches: int) -> None:
    """Load the data in one process, as from the Hub's cache, and build some batches."""
    datasets.disable_progress_bars()
    datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_parquet(
        str(folder / "train.parquet"), cache_dir=os.environ["HF_DATASETS_CACHE"]
    )
    before, start = memory(), time.perf_counter()
    data = preference_datasets.load_data(resolve(config), silent=True)
    seconds = time.perf_counter() - start
    if dist.is_initialized():
        dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # so that freed memory does not count
    after = memory()
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    for places in itertools.islice(_batches(config, data), batches):
        rows = read_examples(data.train, places)
        padded_batch(rows, data.encode, max_length=config.max_length, max_prompt_length=config.max_prompt_length)
    found = {name: after[name] - before[name] for name in FIELDS}
    found |= {"peak": peak * 1024 - sum(before.values()), "seconds": seconds, "all": time.perf_counter() - start}
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(found))


def _batches(config: DictConfig, data: Any) -> Any:
    return iterate_examples(
        data.train.counts.tolist(), batch_size=64, shuffle=True, n_epochs=None, n_examples=10**9, seed=config.seed
    )


def run(processes: int, folder: Path, batches: int, overrides: list[str]) -> None:
    """Launch the processes that load the data."""
    config = compose([*SETTINGS, f"local_dirs=[{folder}]", "++dataset_sources.se=made/up", *overrides])
    launching.launch(load, processes, config, folder, batches, process_group=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--processes", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=50, help="batches of 64 pairs built after loading")
    parser.add_argument("--folder", type=Path, help="directory in which to write and keep the questions")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)  # for the fresh processes
    arguments, overrides = parser.parse_known_args()
    if arguments.run:
        run(arguments.run, arguments.folder, arguments.batches, overrides)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        if not (folder / "train.parquet").exists():
            write_questions(folder / "train.parquet", arguments.questions)
        print(f"{'processes':>9} {'rank':>4} {'loaded after s':>14} {'own GB':>7} {'shared GB':>9} {'peak GB':>8}")
        for processes in arguments.processes:
            command = ["-m", "benchmarks.stack_exchange", f"--run={processes}", f"--folder={folder}"]
            # a separate cache: datasets would reuse an earlier run's parsed data
            environment = {**os.environ, "HF_DATASETS_CACHE": str(Path(name) / f"datasets{processes}")}
            subprocess.run(
                [sys.executable, *command, f"--batches={arguments.batches}", *overrides], check=True, env=environment
            )
            for rank in range(processes):
                report(processes, rank, json.loads((folder / f"{processes}-{rank}.json").read_text()))


def report(processes: int, rank: int, found: dict[str, float]) -> None:
    shared = found["Pss_Shmem"] + found["Pss_File"]
    cells = [f"{found[name] / 1e9:.2f}" for name in ("Pss_Anon", "peak")]
    print(
        f"{processes:9} {rank:4} {found['seconds']:14.1f} {cells[0]:>7} {shared / 1e9:9.2f} {cells[1]:>8}", flush=True
    )


if __name__ == "__main__":
    main()
