"""The cost of the ledger: appending an update, and writing all rows as Parquet.

    python -m benchmarks.ledger [--batch-size 64] [--updates 2000]

Passes updates of random pairs to the callback, on rank 0's training thread as in a run. No model is involved: compare
the milliseconds with those of an update. Times are CPU times of all threads together.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from dpo.data.examples import Example, text_digest
from dpo.reporting.events import RunContext, Update
from dpo.reporting.ledger import Ledger
from dpo.settings.plan import make_plan

COLUMNS = ("logps_train/chosen", "logps_train/rejected", "reference/chosen", "reference/rejected")


def make_update(number: int, n: int) -> Update:
    """Make an update of pairs of the usual length."""
    names = (hashlib.blake2b(f"{number} {i}".encode(), digest_size=16).hexdigest() for i in range(n))
    examples = [Example((1,) * 100, ((2,) * 80, (3,) * 70), (0, 0), "hh", name) for name in names]
    table = {name: torch.randn(n) for name in (*COLUMNS, "loss/train", "rewards_train/margins")}
    return Update(number, number * n, examples, table, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2000)
    asked = parser.parse_args()
    n = asked.batch_size
    data: Any = SimpleNamespace(report=SimpleNamespace(epoch=n * asked.updates))
    with tempfile.TemporaryDirectory() as folder:
        context = RunContext(make_plan({"batch_size": n}), Path(folder), 0, data, print)
        ledger = Ledger(context)
        ledger.on_start()
        appends = []
        for number in range(1, asked.updates + 1):
            update = make_update(number, n)
            start = time.process_time()
            ledger.on_update(update)
            appends.append(time.process_time() - start)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        ledger.on_end()
        written = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        sizes = {file.name: file.stat().st_size / ledger.rows for file in Path(folder).iterdir()}
    texts = ["x" * 800, "y" * 400, "z" * 350]
    start = time.process_time()
    for _ in range(10_000):
        text_digest(texts[0], texts[1:])
    print(
        f"appending {n} pairs: {1e3 * median(appends):.3f} ms (95 %: {1e3 * sorted(appends)[-len(appends) // 20]:.3f})"
    )
    print(
        f"writing {ledger.rows:,} rows: {written:.3f} s, {1e6 * written / ledger.rows:.2f} us per row, {grown:.0f} MiB"
    )
    print(f"a digest, in the background: {1e2 * (time.process_time() - start):.2f} us")
    print("bytes per row: " + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
