"""Time and memory of an update as batches, texts and prompts grow.

    python -m benchmarks.growth model.name_or_path=DIR [--updates 2] [overrides of train.py ...]

The pairs are synthetic: a prompt has about half of `max_length` tokens, a response about a quarter (log-normal). The
pairs of a prompt have the same chosen response. A microbatch has four pairs. Each printed row is measured in two fresh
processes, as in `benchmarks.compare`: one with `layout=padded`, one with shared prefixes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.compare import TABLES, measure_row
from benchmarks.harness import Failed, print_row
from benchmarks.startup import make_text

SIZES = {  # one size is varied at a time
    "batch_size": (4, 16, 64),
    "max_length": (256, 512, 1024, 2048),
    "pairs per prompt": (1, 2, 4, 8),
}
DEFAULTS = {"batch_size": 16, "max_length": 512, "pairs per prompt": 1}
TOKENS_PER_WORD = 2.5  # of the synthetic language


def write_pairs(path: Path, n: int, *, tokens: int, pairs_per_prompt: int) -> None:
    """Write at least `n` pairs, of `tokens` tokens on average."""
    rng = random.Random(0)
    words = make_text(rng)

    def draw_text(share: float) -> str:
        n_words = (
            int(share * tokens / TOKENS_PER_WORD * rng.lognormvariate(-0.2, 0.6)) + 1
        )  # the random factor has mean 1
        start = rng.randrange(len(words) - n_words)
        return " ".join(words[start : start + n_words])

    with path.open("w", encoding="utf-8") as file:
        for _ in range(math.ceil(n / pairs_per_prompt)):
            prompt, chosen = draw_text(0.5), " " + draw_text(0.25)
            for _ in range(pairs_per_prompt):
                pair = {"prompt": prompt, "chosen": chosen, "rejected": " " + draw_text(0.25)}
                file.write(json.dumps(pair) + "\n")


def measure(sizes: dict[str, int], updates: int, overrides: list[str]) -> list[str]:
    """Measure seconds per pair and memory of both layouts, and their ratios.

    Returns the cells of a row: the numbers, or an error.
    """
    batch_size, max_length, pairs_per_prompt = (sizes[name] for name in SIZES)
    with tempfile.TemporaryDirectory() as data:
        for split, n in (("train", (updates + 1) * batch_size), ("test", 8)):
            write_pairs(Path(data, f"{split}.jsonl"), n, tokens=max_length, pairs_per_prompt=pairs_per_prompt)
        settings = [f"batch_size={batch_size}", f"gradient_accumulation_steps={batch_size // 4}", "loss=dpo",
                    f"max_length={max_length}", f"max_prompt_length={max_length // 2}", "loss.beta=0.1",
                    "datasets=[made]", f"dataset_sources.made={data}", *overrides]  # fmt: skip
        try:
            results = [measure_row([*settings, *TABLES["layouts"][name]], updates) for name in ("padded", "ours")]
        except Failed as error:
            return [str(error)]
    seconds = [median(row["seconds"] for row in result["rows"]) / result["pairs"] for result in results]
    memory = [result["memory_gb"] for result in results]
    cells = [*(f"{s:.3f}" for s in seconds), f"{seconds[0] / seconds[1]:.1f}"]
    return [*cells, *(f"{m:.2f}" for m in memory), f"{memory[1] / memory[0]:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=2, help="number of counted updates")
    parser.add_argument("--only", choices=SIZES, help="vary only this size")
    arguments, overrides = parser.parse_known_args()
    titles = ("s/pair padded", "ours", "speedup", "GB padded", "ours", "of padded")
    for name, values in SIZES.items():
        if arguments.only in (None, name):
            print()
            print_row(name, titles, first=18, width=14)
            for value in values:
                print_row(value, measure({**DEFAULTS, name: value}, arguments.updates, overrides), first=18, width=14)


if __name__ == "__main__":
    main()
