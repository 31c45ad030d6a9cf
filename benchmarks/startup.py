"""How long the command line takes to answer, and a run to its first update; the memory that data takes.

    python -m benchmarks.startup --answers [--checkout DIR ...] [--repeats 5]
    python -m benchmarks.startup model.name_or_path=DIR [--pairs 160800] [overrides of train.py ...]

`--answers` prints median times that a user waits: for a refused config, `--help`, `--cfg job`, completion, and the
first update of the golden run `words-dpo`; with `--checkout`, also for other checkouts of this project, in turns.

Without `--answers` it writes synthetic pairs in HH's format and lengths (dialogues of one to four turns, log-normal
numbers of words), then runs the command line on all of them and on a thousandth of them, in fresh processes, twice, for
a few updates: the second run finds the table that the first one has built. The difference in resident memory is the
data's, the pages of its files included.
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
from collections import defaultdict
from pathlib import Path
from statistics import median

from dpo.settings.files import CONFIG_DIR

LETTERS = "etaoinshrdlucmfwypvbgk"
FIXED = (
    "exp_name=startup", "loss=dpo", "loss.beta=0.1", "wandb.enabled=false", "debug=true", "do_first_eval=false",
    "n_eval_examples=16", "n_examples=16", "datasets=[hh]", "sample_during_eval=false",
)  # fmt: skip


def make_text(draw: random.Random) -> list[str]:
    """Make a million words of a synthetic language."""
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


COMPLETED = "python train.py loss="
ANSWERS = {
    "refused config": ("exp_name=x", "lr=-1"),
    "--help": ("--help",),
    "--cfg job": ("--cfg", "job"),
    "completion": ("-sc", "query=bash"),
}
TO_FIRST_UPDATE = "golden run to first update"


def seconds_to_answer(checkout: Path, arguments: tuple[str, ...]) -> float:
    """Seconds from the start of a command to its end."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, str(checkout / "train.py"), *arguments],
        env={**os.environ, "COMP_LINE": COMPLETED, "COMP_POINT": str(len(COMPLETED))},
        capture_output=True,
        check=False,
    )
    return time.perf_counter() - start


def seconds_to_first_update(checkout: Path) -> float:
    """Seconds from the start of the golden run `words-dpo` to the logged line of its first update."""
    golden = checkout / "tests" / "golden"
    settings = json.loads((golden / "words-dpo.json").read_text())["config"]
    loss = settings.pop("loss")
    overrides = [f"{key}={value}" for key, value in settings.items()]
    overrides += [f"loss={loss.pop('name')}", *(f"loss.{key}={value}" for key, value in loss.items())]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "metrics.jsonl"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(checkout / "train.py"), *overrides, "exp_name=startup", "datasets=[hh]",
             f"dataset_sources.hh={golden / 'words'}", f"model.name_or_path={golden / 'tiny-llama'}",
             "model.reference_dtype=float32", "sample_during_eval=false", "wandb.enabled=false",
             f"local_run_dir={log.parent}", f"local_dirs=[{folder}]"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while not (log.exists() and '"train"' in log.read_text()):
            if process.poll():
                sys.exit(f"the golden run of {checkout} failed")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.kill()
        process.wait()
    return seconds


def measure_answers(checkouts: list[Path], repeats: int) -> None:
    """Print medians, a line per answer and a column per checkout; the first round warms the page cache."""
    taken: dict[tuple[str, Path], list[float]] = defaultdict(list)
    for _ in range(repeats + 1):
        for checkout in checkouts:
            for name, arguments in ANSWERS.items():
                taken[name, checkout].append(seconds_to_answer(checkout, arguments))
            taken[TO_FIRST_UPDATE, checkout].append(seconds_to_first_update(checkout))
    for name in (*ANSWERS, TO_FIRST_UPDATE):
        cells = (f"{median(taken[name, checkout][1:]):8.2f} s" for checkout in checkouts)
        print(f"{name:28}{''.join(cells)}")


def measure(data: Path, overrides: list[str], folder: Path, run: str) -> tuple[float, float]:
    """Measure the seconds to the first line of `metrics.jsonl`, and the peak of resident memory in GB."""
    run_dir = folder / f"{run}_{data.name}"
    command = [sys.executable, str(CONFIG_DIR.parent / "train.py"), *FIXED, f"dataset_sources.hh={data}",
               f"local_run_dir={run_dir}", f"local_dirs=[{folder}]", *overrides]  # fmt: skip
    start = time.perf_counter()
    with (folder / f"{data.name}.log").open("w") as log:
        # a separate cache: datasets would reuse an earlier run's parsed data
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
    parser.add_argument("--answers", action="store_true", help="of the command line, and the golden run's first update")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="of this project, to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    arguments, overrides = parser.parse_known_args()
    if arguments.answers:
        measure_answers([*arguments.checkout, CONFIG_DIR.parent], arguments.repeats)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in (max(64, arguments.pairs // 1000), arguments.pairs):
            data = folder / str(n)
            data.mkdir()
            write_pairs(data / "train.jsonl.gz", n, seed=0)
            write_pairs(data / "test.jsonl.gz", 64, seed=1)
            for run in ("first", "second"):
                seconds, peak = measure(data, overrides, folder, run)
                print(f"{n:8,} pairs, {run} run: first update after {seconds:.1f} s, peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
