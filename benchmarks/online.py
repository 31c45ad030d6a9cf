"""Time in which online DPO draws answers, against plain `model.generate`.

    python -m benchmarks.online model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR batch_size=8 ...
    python -m benchmarks.online --rounds 5 model=demo datasets=[demo] ...

Takes the overrides of train.py. Defaults are `online=online online.scorer=shorter`, `loss=simpo` (which needs no
reference) and no W&B. In a round both ways ("ours" and "bare") answer the prompts of one update, in the same batches of
rows and with the same `online.max_new_tokens`. The order of the ways alternates, and a first round does not count.
Prints each round, medians and their ratio; also the number of forward passes, which is lower where all answers end
early.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.harness import compose, make_trainer, measure_in_turns
from dpo.data.collation import collate_prompts
from dpo.data.examples import Example
from dpo.models.generation import before_each_forward
from dpo.settings.plan import Plan
from dpo.training.online import OnlineBatches, encode_prompt

DEFAULTS = ("online=online", "online.scorer=shorter", "loss=simpo", "self_test=false")


def generate_bare(model: Any, tokenizer: Any, prompts: Sequence[Example], plan: Plan) -> None:
    """Sample with plain `model.generate` from all tokens (no top-k)."""
    online, batch_size = plan.online, plan.data.eval_batch_size
    by_length = sorted(prompts, key=lambda prompt: len(prompt.prompt))
    for start in range(0, len(by_length), batch_size):
        rows = [prompt for prompt in by_length[start : start + batch_size] for _ in range(online.n_samples)]
        batch = collate_prompts(rows, tokenizer)
        model.generate(
            batch["prompt_input_ids"].to(model.device),
            attention_mask=batch["prompt_attention_mask"].to(model.device),
            max_new_tokens=online.max_new_tokens,
            do_sample=True,
            temperature=online.temperature,
            top_p=online.top_p,
            top_k=0,
            pad_token_id=tokenizer.pad_token_id,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        overridden_keys = {override.partition("=")[0] for override in overrides}
        defaults = [default for default in DEFAULTS if default.partition("=")[0] not in overridden_keys]
        config = compose([f"local_run_dir={folder}", *defaults, *overrides])
        trainer = make_trainer(config)
        batches: OnlineBatches = trainer.batches
        plan, model = batches.plan, batches.objective.policy
        prompts = [  # of each round, by their index in the batch
            {i: encode_prompt(prompt, trainer.data, plan) for i, prompt in enumerate(batch)}
            for batch in itertools.islice(itertools.cycle(batches.train()), options.rounds + 1)
        ]
        ways = {
            "ours": lambda number: batches._answer(prompts[number], number),
            "bare": lambda number: generate_bare(model, trainer.data.tokenizer, [*prompts[number].values()], plan),
        }
        # on a CPU, seconds of all threads, without other work on the machine
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time

        def measure(name: str, number: int) -> tuple[float, int]:
            forwards: list[int] = []
            with before_each_forward(model, forwards.append):
                start = clock()
                ways[name](number)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds = clock() - start
            note = "" if number else " (not counted)"
            print(f"round {number}: {name} {seconds:.2f} s in {len(forwards)} forwards{note}", flush=True)
            return seconds, len(forwards)

        results = measure_in_turns({name: partial(measure, name) for name in ways}, options.rounds)
    n_rows = min(config.batch_size, config.eval_batch_size) * config.online.n_samples
    seconds = {name: median(secs for secs, _ in rounds) for name, rounds in results.items()}
    ms_per_forward = {name: median(1000 * secs / n for secs, n in rounds) for name, rounds in results.items()}
    medians = ", ".join(f"{name} {seconds[name]:.2f} s ({ms_per_forward[name]:.1f} ms per forward)" for name in ways)
    print(f"\n{options.rounds} rounds, {n_rows} rows in a batch, medians: {medians}")
    ratio_per_forward = ms_per_forward["ours"] / ms_per_forward["bare"]
    print(f"ours / bare: {seconds['ours'] / seconds['bare']:.3f}; per forward {ratio_per_forward:.3f}")


if __name__ == "__main__":
    main()
