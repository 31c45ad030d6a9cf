"""The time to a run's first update, and the memory its data takes, with as many pairs as Anthropic's HH has.

    python -m benchmarks.startup model.name_or_path=DIR [--pairs 160800] [overrides of train.py ...]

Writes synthetic pairs in HH's format and lengths (dialogues of one to four turns, log-normal numbers of words), then
runs the command line on all of them and on a thousandth of them, in fresh processes, for a few updates. The difference
in resident memory is what the data takes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dpo.settings.files import CONFIG_DIR

LETTERS = "etaoinshrdlucmfwypvbgk"
FIXED = (
    "exp_name=startup", "loss=dpo", "loss.beta=0.1", "wandb.enabled=false", "debug=true", "do_first_eval=false",
    "n_eval_examples=16", "n_examples=16", "datasets=[hh]", "sample_during_eval=false",
)  # fmt: skip


def make_text(draw: random.Random) -> list[str]:
    """A million words of a synthetic language."""
    words = ["".join(draw.choices(LETTERS, range(len(LETTERS), 0, -1), k=draw.randint(2, 9))) for _ in range(5000)]
    return draw.choices(words, [1 / (rank + 2) for rank in range(len(words))], k=1_000_000)  # Zipf's law


def write_pairs(path: Path, n: int, seed: int) -> None:
    """Write `n` records of `chosen` and `rejected`, about 1,100 characters each, as compressed JSON lines."""
    draw = random.Random(seed)
    text = make_text(draw)

    def say(mean_words: float) -> str:
        start, n_words = draw.randrange(990_000), int(draw.lognormvariate(0, 0.8) * mean_words) + 1
        return " ".join(text[start : start + min(n_words, 600)]).capitalize() + "."

    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        for _ in range(n):
            turns = [f"\n\nHuman: {say(20)}\n\nAssistant: {say(30)}" for _ in range(draw.randint(0, 3))]
            prompt = "".join(turns) + f"\n\nHuman: {say(20)}\n\nAssistant:"
            file.write(json.dumps({"chosen": f"{prompt} {say(40)}", "rejected": f"{prompt} {say(40)}"}) + "\n")


def measure(data: Path, overrides: list[str], folder: Path) -> tuple[float, float]:
    """Seconds to the first line of `metrics.jsonl`, and the peak of resident memory in GB."""
    run_dir = folder / f"run_{data.name}"
    command = [sys.executable, str(CONFIG_DIR.parent / "train.py"), *FIXED, f"dataset_sources.hh={data}",
               f"local_run_dir={run_dir}", *overrides]  # fmt: skip
    start = time.perf_counter()
    with (folder / f"{data.name}.log").open("w") as log:
        # its own cache: datasets would reuse what an earlier run has parsed
        environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / f"cache_{data.name}")}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    first = None
    peak = 0
    while process.poll() is None:
        if first is None and (run_dir / "metrics.jsonl").exists():
            first = time.perf_counter() - start
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            break
        peak = max(peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
        time.sleep(0.05)
    if process.wait():
        sys.exit((folder / f"{data.name}.log").read_text()[-2000:])
    return first or time.perf_counter() - start, peak * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=160_800)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {}
        for n in (max(64, arguments.pairs // 1000), arguments.pairs):
            data = folder / str(n)
            data.mkdir()
            write_pairs(data / "train.jsonl.gz", n, seed=0)
            write_pairs(data / "test.jsonl.gz", 64, seed=1)
            results[n] = measure(data, overrides, folder)
            print(f"{n:8,} pairs: first update after {results[n][0]:.1f} s, peak memory {results[n][1]:.2f} GB")
        few, many = results.values()
        print(f"the data takes {many[0] - few[0]:.1f} s and {many[1] - few[1]:.2f} GB")


if __name__ == "__main__":
    main()
