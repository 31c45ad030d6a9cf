"""Profiles an update: where its time goes, by kind of operation, after one warm-up update.

    python -m benchmarks.profile_update model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR \\
        loss=dpo loss.beta=0.1 batch_size=16 gradient_accumulation_steps=4 model.autocast=bfloat16

Takes the overrides of train.py, as `benchmarks.compare` does. Times are self times, without the operations they call;
whatever an attention operation calls counts as attention. If other work runs on the machine, set OMP_NUM_THREADS=1:
threads that wait for each other count as computing.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import COMMON, compose, make_trainer
from dpo.system.host import keep_freed_memory

ATTENTION = re.compile("attention", re.IGNORECASE)
KINDS = {  # the first pattern that matches an operation's name counts
    "matrix products": re.compile(r"aten::(mm|addmm|bmm|baddbmm)$"),
    "casts and copies": re.compile(r"aten::copy_$"),
    "log-softmax of logits": re.compile(r"aten::(_log_softmax|exp_)$"),
    "zeros": re.compile(r"aten::(fill_|zero_)$"),
    "elementwise, sums": re.compile(
        r"aten::(add|mul|div|sub|neg|pow|mean|rsqrt|cat|silu|gelu|sum|sqrt|addc|_softmax|linalg)"
    ),
}


def classify_operator(event: Any) -> str:
    ancestor = event
    while ancestor is not None:
        if ATTENTION.search(ancestor.name):
            return "attention"
        ancestor = ancestor.cpu_parent
    return next((kind for kind, name in KINDS.items() if name.match(event.name)), "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    _, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*COMMON, f"local_run_dir={folder}", f"local_dirs=[{folder}]", *overrides])
        config.n_examples = 2 * config.batch_size
        keep_freed_memory()
        trainer = make_trainer(config)
        first, second = trainer.train_iterator
        trainer.train_step(first)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            trainer.train_step(second)
    seconds: Counter[str] = Counter()
    for event in recorded.events():
        seconds[classify_operator(event)] += event.self_cpu_time_total / 1e6
    for kind, spent in seconds.most_common():
        print(f"{kind:24}{spent:8.2f} s{spent / seconds.total():7.1%}")
    print(f"{'total':24}{seconds.total():8.2f} s, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
