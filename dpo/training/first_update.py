"""The work before the first update, announced with its size.

Also decides whether sampling is postponed to the second evaluation. Everything is counted from config and data, not
measured, so every process and every restart decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpo.data.preflight import TrainingData
from dpo.numbers import count
from dpo.settings.plan import Plan

# cost of a sampled token in trained tokens: measured between 1 (SmolLM2-135M) and 4 (the tests' tiny-llama) on one CPU
# core (docs/metrics.md)
SAMPLED_COST = 3
MOST_SAMPLING = 0.1  # largest share of a run's time for samples before its first update, unless they are asked for


class FirstUpdate(NamedTuple):
    """The work of a run before its first update."""

    tested: int  # examples in the self-test
    draws_samples: bool
    messages: list[str]  # the items, each with its size and the keys that change it

    @classmethod
    def of(cls, plan: Plan, data: TrainingData, sizes: Sequence[int]) -> FirstUpdate:
        """Count the work, given the sizes of the evaluation batches."""
        parts, warnings, evaluation, draws_samples = [], [], plan.evaluation, False
        n_trained = data.report.updates * plan.data.batch_size
        tested = min(2 * plan.dims.data_size, sizes[0]) if plan.training.self_test else 0
        if tested:
            parts.append(f"self-test on {count(tested, 'example')} (self_test=false leaves it out)")
        if plan.caches_reference_first:
            n_scored = sum(sizes) + min(data.report.epoch, n_trained)
            parts.append(
                f"the reference scores up to {count(n_scored, 'example')} (cache_reference_logps=as_needed scores each "
                f"when it is needed)"
            )
        if evaluation.do_first_eval and sizes:
            parts.append(
                f"evaluation of {count(sum(sizes), 'example')} in {count(len(sizes), 'batch', 'batches')} "
                f"(n_eval_examples; do_first_eval=false leaves it out)"
            )
            if evaluation.sample_during_eval and evaluation.do_first_sampling is not False:
                draws_samples, message = _decide_on_samples(plan, data, sizes, n_trained)
                (parts if draws_samples else warnings).append(message)
        announced = ["\n".join(["before the first update:", *(f"  {part}" for part in parts)])] if parts else []
        return cls(tested, draws_samples, announced + warnings)


def _decide_on_samples(plan: Plan, data: TrainingData, sizes: Sequence[int], n_trained: int) -> tuple[bool, str]:
    """Decide whether samples are drawn before the first update.

    Returns the decision and a message: the item to announce, or why there are no samples.
    """
    n_prompts, n_models, n_sampled = _count_samples(plan, data, sizes)
    cost, n_tokens = SAMPLED_COST * n_sampled, _count_trained(plan, data)
    if plan.evaluation.do_first_sampling or cost <= MOST_SAMPLING * n_tokens:
        return True, (
            f"samples of {'policy and reference' if n_models > 1 else 'the policy'} for "
            f"{count(n_prompts, 'prompt')}, up to {count(n_sampled, 'token')} (n_eval_model_samples, "
            f"n_eval_tokens; do_first_sampling=false leaves them out)"
        )
    return False, (
        f"warning: no samples before the first update; the first come with the evaluation after "
        f"{count(min(plan.eval_interval, n_trained), 'example')}. Sampling up to "
        f"{count(n_sampled, 'token')} could take as long as training on {cost:,}, and the whole run "
        f"trains on {n_tokens:,}: more than a tenth. do_first_sampling=true samples now; "
        f"n_eval_model_samples and n_eval_tokens make the samples fewer and shorter"
    )


def _count_samples(plan: Plan, data: TrainingData, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Upper bounds on sampled prompts, models and tokens of an evaluation."""
    n_batches = max(1, plan.evaluation.n_eval_model_samples // plan.data.eval_batch_size)
    n_prompts = sum(sizes[:n_batches])
    frees_reference = plan.reference == "model" and plan.caches_reference_first
    n_models = 1 if plan.reference is None or frees_reference else 2
    # sampling ends when a batch's longest prompt reaches max_length; that prompt is at least as long as the mean
    room = plan.data.max_length - int(data.report.test.mean_prompt_tokens)
    return n_prompts, n_models, n_models * n_prompts * min(room, plan.evaluation.n_eval_tokens or room)


def _count_trained(plan: Plan, data: TrainingData) -> int:
    """Tokens that a run trains on, with the cost of online samples.

    A prompt counts once, however many responses it has.
    """
    train = data.report.train
    per_example = train.mean_prompt_tokens + train.mean_chosen_tokens + (train.mean_rejected_tokens or 0)
    if plan.online:
        drawn = plan.online.n_samples * plan.online.max_new_tokens
        per_example = train.mean_prompt_tokens + 2 * plan.online.max_new_tokens + SAMPLED_COST * drawn
    return round(data.report.updates * plan.data.batch_size * per_example)
