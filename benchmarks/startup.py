"""Time until train.py answers or makes its first update; memory of data.

    python -m benchmarks.startup --answers [--checkout DIR ...] [--repeats 5]
    python -m benchmarks.startup model.name_or_path=DIR [--pairs 160800] [overrides of train.py ...]

`--answers` prints the median times that a user waits for a refused config, `--help`, `--cfg job` and completion; with
`--checkout` also for other checkouts of this project, in turns.

Without `--answers` synthetic pairs are written in HH's format and lengths (dialogues of one to four turns, log-normal
numbers of words). train.py runs on a thousandth of the pairs, then on all, each twice and for a few updates; the second
run finds the table that the first built. The difference of the peaks is the memory of the data, with the pages of the
data's files.
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
from statistics import median

from benchmarks.harness import ROOT, print_row, run_python

LETTERS = "etaoinshrdlucmfwypvbgk"
FIXED = (
    "exp_name=startup",
    "loss=dpo",
    "loss.beta=0.1",
    "wandb.enabled=false",
    "debug=true",
    "do_first_eval=false",
    "n_eval_examples=16",
    "n_examples=16",
    "datasets=[hh]",
    "sample_during_eval=false",
)
COMPLETED = "python train.py loss="
ANSWERS = {
    "refused config": ("exp_name=x", "lr=-1"),
    "--help": ("--help",),
    "--cfg job": ("--cfg", "job"),
    "completion": ("-sc", "query=bash"),
}


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


def print_answers(checkouts: list[Path], repeats: int) -> None:
    """Print median times, a row per answer and a column per checkout."""
    completion = {"COMP_LINE": COMPLETED, "COMP_POINT": str(len(COMPLETED))}  # as bash sets them
    for name, arguments in ANSWERS.items():
        seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
        for round_number in range(repeats + 1):
            for checkout in checkouts:
                start = time.perf_counter()
                command = [sys.executable, str(checkout / "train.py"), *arguments]
                subprocess.run(command, env={**os.environ, **completion}, capture_output=True, check=False)
                if round_number > 0:  # the first warms up
                    seconds[checkout].append(time.perf_counter() - start)
        cells = [f"{median(of):.2f} [{min(of):.2f}, {max(of):.2f}] s" for of in seconds.values()]
        print_row(name, cells, first=28, width=24)


def measure_run(data: Path, overrides: list[str], folder: Path, run: str) -> tuple[float, float]:
    """Measure seconds to the first update, and peak memory in GB."""
    log = folder / f"{run}_{data.name}" / "metrics.jsonl"
    secs_to_update, peak = None, 0
    start = time.perf_counter()

    def watch(pid: int) -> None:
        nonlocal secs_to_update, peak
        if secs_to_update is None and log.exists():
            secs_to_update = time.perf_counter() - start
        with contextlib.suppress(OSError, IndexError):  # the process has just ended
            status = Path(f"/proc/{pid}/status").read_text()
            peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) * 1024)

    paths = (f"dataset_sources.hh={data}", f"local_run_dir={log.parent}", f"local_dirs=[{folder}]")
    run_python(str(ROOT / "train.py"), *FIXED, *paths, *overrides, watch=watch)
    return secs_to_update or time.perf_counter() - start, peak / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=160_800)
    parser.add_argument("--answers", action="store_true", help="only time refusals, --help, --cfg job and completion")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    options, overrides = parser.parse_known_args()
    if options.answers:
        print_answers([*options.checkout, ROOT], options.repeats)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for n in (max(64, options.pairs // 1000), options.pairs):
            data = folder / str(n)
            write_pairs(data / "train.jsonl.gz", n, seed=0)
            write_pairs(data / "test.jsonl.gz", 64, seed=1)
            for run in ("first", "second"):
                seconds, peak = measure_run(data, overrides, folder, run)
                print(f"{n:8,} pairs, {run} run: first update after {seconds:.1f} s, peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
