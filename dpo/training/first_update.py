"""The work before the first update: its size, printed before it begins, and whether sampling is put off.

Everything is counted from config and data, nothing is measured: every process and every start decides alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dpo.data.preflight import TrainingData
from dpo.numbers import count
from dpo.settings.plan import Plan

# trained tokens that take as long as one sampled token: between 1 (SmolLM2-135M) and 4 (the tests' tiny-llama), both
# measured on one CPU core (docs/metrics.md)
SAMPLED_COST = 3
MOST = 0.1  # largest share of a run for samples before its first update, unless they are asked for


class Samples(NamedTuple):
    """Upper bounds on the samples of an evaluation."""

    prompts: int
    models: int  # models that continue the prompts
    tokens: int  # of all samples together


class FirstUpdate(NamedTuple):
    """The work of a run before its first update."""

    tested: int  # examples in the self-test
    scored: int | None  # pairs that the reference scores, unless it finds them scored
    evaluated: Sequence[int]  # number of examples of each evaluation batch; empty without an evaluation
    samples: Samples | None  # None if none are wanted
    trained: int  # tokens that the run trains on
    samples_wait: bool
    next_evaluation: int  # number of examples before the next evaluation

    @classmethod
    def of(cls, plan: Plan, data: TrainingData, sizes: Sequence[int]) -> FirstUpdate:
        """Count the work, given the sizes of the evaluation batches."""
        report, examples = data.report, data.report.updates * plan.data.batch_size
        scores = plan.caches_reference_first
        evaluated = sizes if plan.evaluation.do_first_eval else ()
        wanted = evaluated and plan.evaluation.sample_during_eval and plan.evaluation.do_first_sampling is not False
        samples = _count_samples(plan, data, sizes) if wanted else None
        trained = _count_trained(plan, data)
        too_much = samples is not None and SAMPLED_COST * samples.tokens > MOST * trained
        return cls(
            tested=min(2 * plan.dims.data_size, sizes[0]) if plan.training.self_test else 0,
            scored=sum(sizes) + min(report.epoch, examples) if scores else None,
            evaluated=evaluated,
            samples=samples,
            trained=trained,
            samples_wait=too_much and plan.evaluation.do_first_sampling is None,
            next_evaluation=min(plan.eval_interval, examples),
        )

    @property
    def draws_samples(self) -> bool:
        return self.samples is not None and not self.samples_wait

    def tell(self) -> Iterator[str]:
        """The messages to print at the start: each item with its size and the keys that change it."""
        parts = [*self._tell_parts()]
        if parts:
            yield "\n".join(["before the first update:", *(f"  {part}" for part in parts)])
        if self.samples_wait:
            assert self.samples is not None
            yield (
                f"warning: no samples before the first update; the first come with the evaluation after "
                f"{count(self.next_evaluation, 'example')}. Sampling up to {count(self.samples.tokens, 'token')} could "
                f"take as long as training on {SAMPLED_COST * self.samples.tokens:,}, and the whole run trains on "
                f"{self.trained:,}: more than a tenth. do_first_sampling=true samples now; n_eval_model_samples and "
                f"n_eval_tokens make the samples fewer and shorter"
            )

    def _tell_parts(self) -> Iterator[str]:
        if self.tested:
            yield f"self-test on {count(self.tested, 'example')} (self_test=false leaves it out)"
        if self.scored is not None:
            yield (
                f"the reference scores up to {count(self.scored, 'pair')} (cache_reference_logps=as_needed scores each "
                f"when it is needed)"
            )
        if self.evaluated:
            yield (
                f"evaluation of {count(sum(self.evaluated), 'example')} in "
                f"{count(len(self.evaluated), 'batch', 'batches')} (n_eval_examples; do_first_eval=false leaves it out)"
            )
        if self.samples is not None and not self.samples_wait:
            prompts, models, tokens = self.samples
            who = "policy and reference" if models > 1 else "the policy"
            yield (
                f"samples of {who} for {count(prompts, 'prompt')}, up to {count(tokens, 'token')} "
                f"(n_eval_model_samples, n_eval_tokens; do_first_sampling=false leaves them out)"
            )


def _count_samples(plan: Plan, data: TrainingData, sizes: Sequence[int]) -> Samples:
    n_batches = max(1, plan.evaluation.n_eval_model_samples // plan.data.eval_batch_size)
    prompts = sum(sizes[:n_batches])
    frees_reference = plan.reference == "model" and plan.caches_reference_first
    models = 1 if plan.reference is None or frees_reference else 2
    # sampling ends when a batch's longest prompt reaches max_length; that prompt is at least as long as the mean
    longest = plan.data.max_length - int(data.report.test.mean_prompt_tokens)
    return Samples(prompts, models, models * prompts * min(longest, plan.evaluation.n_eval_tokens or longest))


def _count_trained(plan: Plan, data: TrainingData) -> int:
    """Tokens that a run trains on, each prompt counted once for its responses, and the cost of online samples."""
    train = data.report.train
    of_example = train.mean_prompt_tokens + train.mean_chosen_tokens + (train.mean_rejected_tokens or 0)
    if plan.online:
        drawn = plan.online.n_samples * plan.online.max_new_tokens
        of_example = train.mean_prompt_tokens + 2 * plan.online.max_new_tokens + SAMPLED_COST * drawn
    return round(data.report.updates * plan.data.batch_size * of_example)
