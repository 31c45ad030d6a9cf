"""Time in which online DPO draws answers, beside a bare `model.generate`.

    python -m benchmarks.online model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR batch_size=8 ...
    python -m benchmarks.online --rounds 5 model=demo datasets=[demo] ...

Takes the overrides of train.py, with `online=online online.scorer=shorter`, `loss=simpo` (which needs no reference) and
W&B off unless they say otherwise. A round is the prompts of one update. Both answer them in the same batches of rows,
with the same `online.max_new_tokens`, alternating, after a first round that does not count. Prints each round, medians,
and their ratio; and forwards, of which an early end of all answers leaves some out.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
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
    online, size = plan.online, plan.data.eval_batch_size
    by_length = sorted(prompts, key=lambda prompt: len(prompt.prompt))
    for start in range(0, len(by_length), size):
        rows = [prompt for prompt in by_length[start : start + size] for _ in range(online.n_samples)]
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
        given = {override.partition("=")[0] for override in overrides}
        defaults = [override for override in DEFAULTS if override.partition("=")[0] not in given]
        config = compose([f"local_run_dir={folder}", *defaults, *overrides])
        trainer = make_trainer(config)
        batches: OnlineBatches = trainer.batches
        plan, model = batches.plan, batches.objective.policy
        prompts = [
            {place: encode_prompt(prompt, trainer.data, plan) for place, prompt in enumerate(drawn)}
            for drawn in itertools.islice(itertools.cycle(batches.train()), options.rounds + 1)
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
            counted = "" if number else " (not counted)"
            print(f"round {number}: {name} {seconds:.2f} s in {len(forwards)} forwards{counted}", flush=True)
            return seconds, len(forwards)

        measures = {name: lambda number, name=name: measure(name, number) for name in ways}
        found = measure_in_turns(measures, options.rounds, warm_up=True)
    rows = min(config.batch_size, config.eval_batch_size) * config.online.n_samples
    seconds = {name: median(seconds for seconds, _ in each) for name, each in found.items()}
    step = {name: median(1000 * seconds / n for seconds, n in each) for name, each in found.items()}
    said = ", ".join(f"{name} {seconds[name]:.2f} s ({step[name]:.1f} ms per forward)" for name in ways)
    print(f"\n{options.rounds} rounds, {rows} rows in a batch, medians: {said}")
    print(f"ours / bare: {seconds['ours'] / seconds['bare']:.3f}; per forward {step['ours'] / step['bare']:.3f}")


if __name__ == "__main__":
    main()
