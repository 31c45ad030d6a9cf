"""The time that online DPO takes to draw answers, and that a bare `model.generate` takes for the same prompts.

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
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.step_overhead import compose
from dpo.data.collation import collate_prompts
from dpo.data.examples import Example
from dpo.models.generation import before_each_forward
from dpo.models.loading import model_loaders
from dpo.settings.plan import Plan, resolve
from dpo.training.online import OnlineBatches, encode_prompt
from trainers import TRAINERS

DEFAULTS = ("online=online", "online.scorer=shorter", "loss=simpo", "self_test=false")
Asked = Mapping[int, Example]


def generate_bare(model: Any, tokenizer: Any, batches: Sequence[Sequence[Example]], plan: Plan) -> None:
    """Sample with plain `model.generate`: each batch padded on the left, from all tokens (no top-k)."""
    online = plan.online
    for prompts in batches:
        rows = [prompt for prompt in prompts for _ in range(online.n_samples)]
        batch = {key: value.to(model.device) for key, value in _tensors(collate_prompts(rows, tokenizer)).items()}
        model.generate(
            batch["prompt_input_ids"],
            attention_mask=batch["prompt_attention_mask"],
            max_new_tokens=online.max_new_tokens,
            do_sample=True,
            temperature=online.temperature,
            top_p=online.top_p,
            top_k=0,
            pad_token_id=tokenizer.pad_token_id,
        )


def _tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def timed(model: Any, draw: Callable[[], None]) -> tuple[float, int]:
    """Measure seconds and count forwards; on a CPU, seconds of all threads, without other work on the machine."""
    forwards: list[int] = []
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    with before_each_forward(model, forwards.append):
        start = clock()
        draw()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - start, len(forwards)


def measure(batches: OnlineBatches, asked: Asked, update: int) -> dict[str, tuple[float, int]]:
    """Time both ways to answer the prompts of an update, in an order that alternates between rounds."""
    plan, model = batches.plan, batches.objective.policy
    rows = plan.data.eval_batch_size
    by_length = sorted(asked.values(), key=lambda example: len(example.prompt))
    bare = [by_length[start : start + rows] for start in range(0, len(asked), rows)]
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: batches._answer(asked, update),
        "bare": lambda: generate_bare(model, batches.data.tokenizer, bare, plan),
    }
    order = [*ways] if update % 2 else [*reversed(ways)]
    return {name: timed(model, ways[name]) for name in order}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        given = {override.partition("=")[0] for override in overrides}
        defaults = [override for override in DEFAULTS if override.partition("=")[0] not in given]
        config = compose([f"local_run_dir={folder}", *defaults, *overrides])
        plan = resolve(config)
        policy, reference = model_loaders(plan)
        trainer: Any = TRAINERS[plan.trainer.name](policy, config, config.seed, folder, reference)
        batches: OnlineBatches = trainer.batches
        rounds = []
        prompts = batches.train()
        for update, of_update in enumerate(itertools.islice(itertools.cycle(prompts), options.rounds + 1)):
            asked = {place: encode_prompt(prompt, trainer.data, plan) for place, prompt in enumerate(of_update)}
            found = measure(batches, asked, update)
            said = ", ".join(f"{name} {found[name][0]:.2f} s in {found[name][1]} forwards" for name in ("ours", "bare"))
            print(f"round {update}: {said}{'' if update else ' (not counted)'}", flush=True)
            rounds.append(found)
    report(rounds[1:], rows=min(config.batch_size, config.eval_batch_size) * config.online.n_samples)


def report(rounds: Sequence[Mapping[str, tuple[float, int]]], *, rows: int) -> None:
    seconds, each = (
        {name: median(value(*found[name]) for found in rounds) for name in ("ours", "bare")}
        for value in (lambda seconds, _: seconds, lambda seconds, forwards: 1000 * seconds / forwards)
    )
    print(f"\n{len(rounds)} rounds, {rows} rows in a batch, medians: " + ", ".join(
        f"{name} {seconds[name]:.2f} s ({each[name]:.1f} ms per forward)" for name in seconds
    ))  # fmt: skip
    print(f"ours / bare: {seconds['ours'] / seconds['bare']:.3f}; per forward {each['ours'] / each['bare']:.3f}")


if __name__ == "__main__":
    main()
