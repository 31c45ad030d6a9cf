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
import os
import random
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
from benchmarks.harness import measure_afresh
from benchmarks.startup import make_text
from dpo.data.collation import padded_batch
from dpo.data.examples import iterate_examples, read_examples
from dpo.settings.plan import resolve

SETTINGS = ("datasets=[se]", "loss=dpo", "loss.beta=0.1", "trainer=FSDPTrainer", "n_examples=1000000")
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


def load(rank: int, world_size: int, config: DictConfig, folder: str, batches: int) -> dict[str, float]:
    """Load the data in one process, as from the Hub's cache, and build some batches."""
    datasets.disable_progress_bars()
    datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_parquet(
        f"{folder}/train.parquet", cache_dir=os.environ["HF_DATASETS_CACHE"]
    )
    before, start = memory(), time.perf_counter()
    data = preference_datasets.load_data(resolve(config, world_size=world_size), silent=True)
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
    return found | {"peak": peak * 1024 - sum(before.values()), "seconds": seconds}


def _batches(config: DictConfig, data: Any) -> Any:
    return iterate_examples(
        data.train.counts.tolist(), batch_size=64, shuffle=True, n_epochs=None, n_examples=10**9, seed=config.seed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--processes", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=50, help="batches of 64 pairs built after loading")
    parser.add_argument("--folder", type=Path, help="directory in which to write and keep the questions")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        if not (folder / "train.parquet").exists():
            write_questions(folder / "train.parquet", arguments.questions)
        print(f"{'processes':>9} {'rank':>4} {'loaded after s':>14} {'own GB':>7} {'shared GB':>9} {'peak GB':>8}")
        for processes in arguments.processes:
            settings = [*SETTINGS, f"world_size={processes}", "++dataset_sources.se=made/up", *overrides]
            command = ("harness:measure_on_ranks", "stack_exchange:load", settings, str(folder), arguments.batches)
            # a separate cache: datasets would reuse an earlier run's parsed data
            found = measure_afresh(*command, HF_DATASETS_CACHE=str(Path(name) / f"datasets{processes}"))
            for rank, one in enumerate(found):
                shared, own = one["Pss_Shmem"] + one["Pss_File"], one["Pss_Anon"]
                cells = f"{one['seconds']:14.1f} {own / 1e9:7.2f} {shared / 1e9:9.2f} {one['peak'] / 1e9:8.2f}"
                print(f"{processes:9} {rank:4} {cells}", flush=True)


if __name__ == "__main__":
    main()
