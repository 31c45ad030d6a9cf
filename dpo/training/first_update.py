"""The work before the first update, announced with its size.

Also decides whether the first samples wait for the second evaluation. The decision rests on config and data, not on
measured time, so that every process and every restart decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpo.data.preflight import TrainingData
from dpo.numbers import count
from dpo.settings.plan import Plan
from dpo.training.evaluation import Interval, limit_new_tokens

# sampling a token takes as long as training on this many tokens; on one CPU core between 1 (SmolLM2-135M) and 4 (the
# tests' tiny-llama) were measured, see docs/metrics.md
SAMPLED_COST = 3
# samples before the first update may cost this share of the run's training, unless do_first_sampling=true
MAX_SAMPLING_SHARE = 0.1


class FirstUpdate(NamedTuple):
    """The work of a run before its first update."""

    n_tested: int  # examples in the self-test
    draws_samples: bool
    messages: list[str]  # the tasks, with their sizes and the keys that change them; then warnings

    @classmethod
    def of(cls, plan: Plan, data: TrainingData, sizes: Sequence[int]) -> FirstUpdate:
        """Count the work, given the sizes of the evaluation batches."""
        evaluation, draws_samples = plan.evaluation, False
        tasks, warnings = [], []
        n_trained = data.report.updates * plan.data.batch_size
        n_held_out = min(plan.data.n_eval_examples, data.report.test.prompts) if plan.online else 0
        # an online run may have no evaluation batches: it samples held-out prompts, `eval_batch_size` at a time
        size = plan.data.eval_batch_size
        sampled_sizes = sizes or [min(size, n_held_out - start) for start in range(0, n_held_out, size)]
        n_tested = min(2 * plan.dims.data_size, sampled_sizes[0]) if plan.training.self_test else 0
        if n_tested:
            tasks.append(f"self-test on {count(n_tested, 'example')} (self_test=false leaves it out)")
        if plan.caches_reference_first:
            n_scored = sum(sizes) + min(data.report.examples_per_epoch, n_trained)
            if plan.loss.mismatched:
                n_scored *= 2
            tasks.append(
                f"the reference scores up to {count(n_scored, 'example')} (cache_reference_logps=as_needed scores each "
                f"when it is needed)"
            )
        if evaluation.do_first_eval and sizes:
            tasks.append(
                f"evaluation of {count(sum(sizes), 'example')} in {count(len(sizes), 'batch', 'batches')} "
                f"(n_eval_examples; do_first_eval=false leaves it out)"
            )
        if evaluation.do_first_eval and plan.online:
            models, n_tokens = "the policy", n_held_out * plan.online.max_new_tokens
            if plan.reference is not None:
                models, n_tokens = "policy and reference", 2 * n_tokens
            tasks.append(
                f"answers of {models} to {count(n_held_out, 'held-out prompt')}, up to {count(n_tokens, 'token')} "
                f"(n_eval_examples; do_first_eval=false leaves them out)"
            )
        may_sample_now = evaluation.sample_during_eval and evaluation.do_first_sampling is not False
        if evaluation.do_first_eval and sampled_sizes and may_sample_now:
            draws_samples, message = _decide_on_samples(plan, data, sampled_sizes, n_trained)
            if draws_samples:
                tasks.append(message)
            else:
                warnings.append(message)
        if not tasks:
            return cls(n_tested, draws_samples, warnings)
        announcement = "\n".join(["before the first update:", *(f"  {task}" for task in tasks)])
        return cls(n_tested, draws_samples, [announcement, *warnings])


def _decide_on_samples(plan: Plan, data: TrainingData, sizes: Sequence[int], n_trained: int) -> tuple[bool, str]:
    """Decide whether samples are drawn before the first update.

    Returns the decision and a message: the task to announce, or a warning why there are no samples. `sizes` are the
    sizes of the batches to sample, `n_trained` is the number of examples that the run trains on.
    """
    n_batches = max(1, plan.evaluation.n_eval_model_samples // plan.data.eval_batch_size)
    n_prompts = sum(sizes[:n_batches])
    frees_reference = plan.reference == "model" and plan.caches_reference_first
    n_models = 1 if plan.reference is None or frees_reference else 2
    # sampling ends when a batch's longest prompt reaches max_length; that prompt is at least as long as the mean
    n_sampled_tokens = n_models * n_prompts * limit_new_tokens(plan, int(data.report.test.mean_prompt_tokens))
    cost, run_cost = SAMPLED_COST * n_sampled_tokens, _count_trained_tokens(plan, data)
    if plan.evaluation.do_first_sampling or cost <= MAX_SAMPLING_SHARE * run_cost:
        return True, (
            f"samples of {'policy and reference' if n_models > 1 else 'the policy'} for "
            f"{count(n_prompts, 'prompt')}, up to {count(n_sampled_tokens, 'token')} (n_eval_model_samples, "
            f"n_eval_tokens; do_first_sampling=false leaves them out)"
        )
    return False, (
        f"warning: no samples before the first update; the first samples come with the evaluation after "
        f"{count(min(Interval.of(plan, data.report.updates).n_examples, n_trained), 'example')}. Now they could take "
        f"{cost / max(run_cost, 1):,.0%} of the time of all updates (up to {count(n_sampled_tokens, 'token')}). "
        f"do_first_sampling=true samples now all the same; lower n_eval_model_samples or n_eval_tokens for fewer or "
        f"shorter samples"
    )


def _count_trained_tokens(plan: Plan, data: TrainingData) -> int:
    """Count the tokens that a run trains on, plus its sampling.

    A prompt counts once, however many responses it has. Only online training draws samples; a sampled token
    counts SAMPLED_COST times.
    """
    train = data.report.train
    if plan.online:
        n_drawn_tokens = plan.online.n_samples * plan.online.max_new_tokens
        per_example = train.mean_prompt_tokens + 2 * plan.online.max_new_tokens + SAMPLED_COST * n_drawn_tokens
    else:
        chosen, rejected = train.mean_chosen_tokens, train.mean_rejected_tokens or 0
        if plan.loss.trains_on == "labels":  # an example has one of the two responses
            chosen *= (train.desirable or 0) / train.examples
            rejected *= (train.undesirable or 0) / train.examples
        n_between = (train.mean_responses or 2) - 2  # other responses of a ranked list
        between = n_between * (chosen + rejected) / 2
        per_example = train.mean_prompt_tokens + chosen + rejected + between
    return round(data.report.updates * plan.data.batch_size * per_example)
