"""Cost of the ledger: appending an update, and writing the Parquet file.

    python -m benchmarks.ledger [--batch-size 64] [--updates 2000]

Passes updates of random pairs to the ledger's callback, as a run does. There is no model: compare the milliseconds with
those of a real update. Times are CPU times of all threads together.
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

COLUMNS = ("logps_train/chosen", "logps_train/rejected", "reference/chosen", "reference/rejected", "loss/train",
           "rewards_train/margins")  # fmt: skip


def make_update(number: int, n: int) -> Update:
    """Make an update of pairs of typical lengths."""
    digests = (hashlib.blake2b(f"{number} {i}".encode(), digest_size=16).hexdigest() for i in range(n))
    examples = [
        Example((1,) * 100, ((2,) * 80, (3,) * 70), id=(0, 0), dataset="hh", digest=digest) for digest in digests
    ]
    return Update(number, number * n, examples, {name: torch.randn(n) for name in COLUMNS}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2000)
    options = parser.parse_args()
    n, append_secs = options.batch_size, []
    train = SimpleNamespace(largest_weight=None, largest_margin=None)  # stands for the counts of a run's data
    data: Any = SimpleNamespace(report=SimpleNamespace(train=train, test=train, examples_per_epoch=n * options.updates))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(RunContext(make_plan({"batch_size": n}), Path(folder), 0, data, print))
        ledger.on_start()
        for number in range(1, options.updates + 1):
            update = make_update(number, n)
            start = time.process_time()
            ledger.on_update(update)
            append_secs.append(time.process_time() - start)
        peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        ledger.on_end()  # writes the Parquet file
        write_secs, n_rows = time.process_time() - start, ledger.rows
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) / 1024
        sizes = [f"{file.name} {file.stat().st_size / n_rows:.0f}" for file in Path(folder).iterdir()]
    n_digests = 10_000
    start = time.process_time()
    for _ in range(n_digests):
        text_digest("x" * 800, {"chosen": "y" * 400, "rejected": "z" * 350})
    digest_secs = (time.process_time() - start) / n_digests
    percentile_95 = sorted(append_secs)[len(append_secs) * 95 // 100]
    print(f"appending {n} pairs: {1e3 * median(append_secs):.3f} ms (95th percentile: {1e3 * percentile_95:.3f})")
    secs_per_row = write_secs / n_rows
    print(f"writing {n_rows:,} rows: {write_secs:.3f} s, {1e6 * secs_per_row:.2f} us per row, {grown_mib:.0f} MiB")
    print(f"a digest, in the background: {1e6 * digest_secs:.2f} us")
    print(f"bytes per row: {', '.join(sizes)}")


if __name__ == "__main__":
    main()
