"""Evaluation of a policy, and samples from it and the reference."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from dpo.data.examples import Example
from dpo.models.answers import Answer, Sampling, choose_sampling, format_for_readers, mark_truncation
from dpo.reporting.events import Sample
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Reduced
from dpo.training.online import Sampler, group

DEFAULT_EVAL_EVERY = 20_000  # examples
MIN_EVALS_PER_RUN = 8  # a run too short for the default evaluates about this many times
N_VERDICT_PROMPTS = 8  # held-out prompts that are answered before and after training
N_VERDICT_TOKENS = 32  # length of these answers


class Interval(NamedTuple):
    """When a run evaluates, and what it keeps."""

    n_examples: int  # between evaluations, in whole batches
    keep: int | None  # newest checkpoints to keep; None: all
    sampled: Collection[int] | None  # numbers of examples after which samples are drawn; None: at each evaluation

    @classmethod
    def of(cls, plan: Plan, updates: int) -> "Interval":
        """Choose the interval of a run of `updates` updates: `eval_every` or, if it is null, DEFAULT_EVAL_EVERY.

        A run that would then have fewer than MIN_EVALS_PER_RUN evaluations gets a shorter interval. It draws samples
        only before training and at the first, a middle and the last evaluation, and by default keeps two checkpoints.
        """
        batch_size = plan.data.batch_size
        keep = plan.run.keep_checkpoints
        eval_every = plan.evaluation.eval_every
        if eval_every is None and updates * batch_size >= MIN_EVALS_PER_RUN * DEFAULT_EVAL_EVERY:
            eval_every = DEFAULT_EVAL_EVERY
        if eval_every:  # rounded down to whole batches
            return cls(max(batch_size, eval_every - eval_every % batch_size), keep, None)
        n_updates = max(1, round(updates / MIN_EVALS_PER_RUN))  # between evaluations
        middle = n_updates * max(1, round(updates / n_updates / 2))  # updates at the evaluation halfway through the run
        sampled = {n * batch_size for n in (0, n_updates, middle, updates)}
        if keep is None and plan.run.save_every is None:
            keep = 2
        return cls(n_updates * batch_size, keep, sampled)


class Evaluator:
    """Measures metrics of the evaluation batches, and draws answers to their prompts.

    After a stop signal its methods raise Stopped, before the next batch or within a few tokens.
    """

    def __init__(self, batches: Batches, sampler: Sampler):
        self.plan = batches.plan
        self.data = batches.data
        self.sampler = sampler
        self.objective = sampler.objective
        self.interval = Interval.of(self.plan, self.data.updates)
        self.batches = list(batches.test())  # prepared once, as every evaluation uses all of them
        # An online run may have no evaluation batches: samples are then of held-out prompts.
        self.prompts = [batch.examples for batch in self.batches] or batches.held_out_examples()
        self.n_examples = sum(map(len, self.prompts))
        n_sampled = max(1, self.plan.evaluation.n_eval_model_samples // self.plan.data.eval_batch_size)
        self.sampled = self.prompts[:n_sampled]  # batches to whose prompts samples are drawn

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are chosen in all answers of evaluations; each draw sets its own seed."""
        plan = self.plan.evaluation
        return choose_sampling(
            self.objective.policy,
            self.data.tokenizer,
            {"temperature": plan.sample_temperature, "top_p": plan.sample_top_p, "top_k": plan.sample_top_k},
            chat=all(self.data.test[example.id[0]].rendered for example in chain(*self.sampled)),
            max_new_tokens=plan.n_eval_tokens or self.plan.data.max_length,
            cache_implementation=self.plan.model.cache_implementation,
        )

    def draws_samples(self, n_examples: int) -> bool:
        """Return whether samples are due with an evaluation after `n_examples`."""
        plan = self.plan.evaluation
        if not plan.sample_during_eval:
            return False
        if n_examples == 0:
            return plan.do_first_sampling
        return self.interval.sampled is None or n_examples in self.interval.sampled

    def metrics(self) -> Reduced:
        """Evaluate, and return the metrics of each example; none without evaluation batches."""
        if not self.batches:
            return Reduced({})
        return self.objective.evaluate(self.batches, self._iterate)

    def _iterate(self, batches: list[Batch]) -> Iterator[Batch]:
        """Yield batches with a progress bar; raise Stopped if any process was asked to stop."""
        for batch in self.sampler.progress.track(batches, total=len(batches), what="evaluate"):
            self.sampler.stop.raise_if_any()
            yield batch

    def samples(self, *, n_examples: int) -> list[Sample]:
        """Draw the policy's answer to each prompt of `sampled` and, if the reference is in memory, the reference's.

        `n_examples`, the number of examples trained on so far, is a part of the seed. Raises SamplingFailed on all
        processes.
        """
        sampling = self.sampling._replace(seed=(self.plan.run.seed, n_examples))
        by_model = self.apply(lambda model: self._answer(model, self.sampled, sampling))
        tokenizer = self.data.tokenizer
        samples = []
        for example, answer, *reference_answers in zip(chain(*self.sampled), *by_model, strict=True):
            prompt = self.data.test[example.id[0]]
            # The prompt as the models get it, with a mark where text is missing.
            prompt_text = mark_truncation(example, prompt, tokenizer)
            sample = Sample(
                prompt_text, answer.text, None, answer.ended, turns=format_for_readers(prompt, prompt_text, tokenizer)
            )
            for reference_answer in reference_answers:  # one or none
                sample = sample._replace(reference=reference_answer.text, reference_ended=reference_answer.ended)
            samples.append(sample)
        return samples

    def answers(self) -> dict[str, str]:
        """Return the policy's answers to a few held-out prompts, by prompt; each token is the most probable one.

        Raises SamplingFailed on all processes.
        """
        by_prompt = {example.prompt: example for example in chain(*self.prompts)}  # several examples may share one
        examples = list(by_prompt.values())[:N_VERDICT_PROMPTS]
        n_tokens = min(N_VERDICT_TOKENS, self.sampling.max_new_tokens)
        greedy = self.sampling._replace(temperature=0, max_new_tokens=n_tokens)
        answers = self._answer(self.objective.policy, group(examples, self.plan.data.eval_batch_size), greedy)
        return {
            mark_truncation(example, self.data.test[example.id[0]], self.data.tokenizer): answer.text
            for example, answer in zip(examples, answers, strict=True)
        }

    def apply(self, function: Callable[[Any], Any]) -> list:
        """Call a function with the policy and, if there is one in memory, with the reference; return the results."""
        results = [function(self.objective.policy)]
        reference = self.objective.reference
        if reference and reference.model is not None:
            with reference.in_use():
                results.append(function(reference.model))
        return results

    def _answer(self, model: Any, batches: Sequence[Sequence[Example]], sampling: Sampling) -> list[Answer]:
        """Return a model's answers to the examples' prompts, on every process; each batch is divided among them."""
        answers = []
        for examples in batches:
            numbers = range(len(answers), len(answers) + len(examples))
            settings = self._fit(sampling, max(len(example.prompt) for example in examples))
            answers += self.sampler.draw(model.eval(), examples, numbers, settings, may_fail=True)
        return answers

    def _fit(self, sampling: Sampling, n_prompt_tokens: int) -> Sampling:
        """Shorten answers to what `max_length` leaves beside a prompt."""
        n_left = self.plan.data.max_length - n_prompt_tokens
        return sampling._replace(max_new_tokens=min(sampling.max_new_tokens, n_left))

    def continue_batch(self, batch: Any, n_examples: int, model: Any) -> list[str]:
        """Return a model's continuations of a batch's prompts; each process has a batch of its own.

        The batch has the reference code's form. `n_examples`, the number trained on so far, is a part of the seed.
        """
        ids = batch["prompt_input_ids"]
        mask = batch["prompt_attention_mask"].bool()
        prompts = [tuple(row[is_token].tolist()) for row, is_token in zip(ids, mask, strict=True)]
        seed = (self.plan.run.seed, n_examples, self.objective.mesh.data_rank)
        sampling = self._fit(self.sampling._replace(seed=seed), ids.shape[1])
        return [answer.text for answer in self.sampler.answer(model.eval(), prompts, range(len(prompts)), sampling)]
