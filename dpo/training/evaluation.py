"""Evaluation of a policy, and samples from it and the reference."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, NamedTuple

from dpo.data.examples import Example
from dpo.data.preflight import TrainingData
from dpo.models.adapters import trained_parameters
from dpo.models.answers import Answer, Sampling, choose_sampling, find_added, show_fed, write_turns
from dpo.models.loading import notes_on_base
from dpo.models.pretrained import remarks
from dpo.numbers import count
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.reporting.events import Sample
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.drawing import Drawing, group
from dpo.training.metrics import Reduced
from dpo.training.objective import Objective
from dpo.training.optimization import count_states, find_warmup_warnings
from dpo.training.stop import StopRequest

EVAL_EVERY, FEWEST = 20_000, 8  # examples between evaluations, but about so many evaluations in a shorter run
N_ASKED, N_ANSWER_TOKENS = 8, 32  # held-out prompts that are answered before and after training, and how long


class Interval(NamedTuple):
    """When a run evaluates, and what it keeps of that."""

    n_examples: int  # between evaluations, in whole batches
    keep: int | None  # newest checkpoints to keep; None: all
    sampled: Collection[int] | None  # numbers of examples after which samples are drawn; None: at each evaluation

    @classmethod
    def of(cls, plan: Plan, updates: int) -> Interval:
        """Find the interval of a run of so many updates."""
        batch_size, keep, eval_every = plan.data.batch_size, plan.run.keep_checkpoints, plan.evaluation.eval_every
        if eval_every is not None or updates * batch_size >= FEWEST * EVAL_EVERY:
            wanted = EVAL_EVERY if eval_every is None else eval_every
            return cls(max(batch_size, wanted - wanted % batch_size), keep, None)
        per_interval = max(1, round(updates / FEWEST))  # updates
        middle = max(1, round(updates / per_interval / 2)) * per_interval
        sampled = {n * batch_size for n in (0, per_interval, middle, updates)}
        return cls(per_interval * batch_size, 2 if keep is None and plan.run.save_every is None else keep, sampled)


def notes_on_disk(plan: Plan, interval: Interval, updates: int, policy: Any) -> list[str]:
    """The disk that a run's checkpoints and its export need."""
    if plan.run.debug:
        return []
    n_saves = math.ceil(updates * plan.data.batch_size / (plan.run.save_every or interval.n_examples))
    n_kept = n_saves if interval.keep is None else min(n_saves, interval.keep + 1)  # and BEST
    weights = sum(parameter.nbytes for parameter in trained_parameters(policy))
    n_bytes = n_kept * weights * (1 + count_states(plan.training)) + plan.run.export * weights
    free = shutil.disk_usage(plan.run.local_run_dir).free
    parts = [f"{count(n_kept, 'checkpoint')} (keep_checkpoints)", *["LATEST/hf (export)"] * plan.run.export]
    return [
        f"{'warning: ' * (n_bytes > free)}the run's files take about {n_bytes / 1e9:.3g} GB on disk, where "
        f"{free / 1e9:.3g} GB are free: {' and '.join(parts)}"
    ]


def notes_on_first_work(plan: Plan, data: TrainingData) -> list[str]:
    """A line about the work before the first update, with its keys."""
    evaluation, test, n_most = plan.evaluation, data.report.test, plan.data.n_eval_examples
    tasks = {
        "self-test (self_test)": plan.training.self_test,
        "the reference scores all examples (cache_reference_logps)": plan.caches_reference_first,
        f"evaluation of {count(min(n_most, test.examples), 'example')} (do_first_eval, n_eval_examples)": (
            evaluation.do_first_eval and test.examples > 0
        ),
        f"answers to {count(min(n_most, test.prompts), 'held-out prompt')} (do_first_eval, n_eval_examples)": (
            evaluation.do_first_eval and plan.online is not None
        ),
        f"{count(min(N_ASKED, n_most, test.prompts), 'answer')} for comparison at the end (sample_during_eval)": (
            evaluation.sample_during_eval
        ),
        f"{count(evaluation.n_eval_model_samples, 'sample')} (do_first_sampling, n_eval_model_samples)": (
            evaluation.do_first_eval and evaluation.sample_during_eval and evaluation.do_first_sampling
        ),
    }
    wanted = [task for task, is_wanted in tasks.items() if is_wanted]
    return [f"before the first update: {', '.join(wanted)}"] if wanted else []


def list_notes(
    plan: Plan, data: TrainingData, evaluator: Evaluator, scheduler: Any, *, is_first: bool
) -> Iterator[str]:
    """What a run says before it trains, `is_first` if it has not trained yet."""
    policy, interval, eval_every = evaluator.objective.policy, evaluator.interval, plan.evaluation.eval_every
    yield from remarks(policy, attention=plan.model.attn_implementation, max_length=plan.data.max_length)
    if eval_every not in (None, interval.n_examples):
        yield (
            f"warning: eval_every={eval_every} is not a multiple of batch_size={plan.data.batch_size}; evaluating "
            f"every {interval.n_examples} examples"
        )
    if plan.evaluation.sample_during_eval:
        yield f"samples are drawn with {evaluator.sampling} (sample_temperature, sample_top_p, sample_top_k)"
    yield from notes_on_base(plan)
    yield from scheduler.notes
    yield from find_warmup_warnings(plan.training, data.report.updates)
    if evaluator.mesh.rank == 0:
        yield from notes_on_disk(plan, interval, data.report.updates, policy)
    if is_first:
        yield from notes_on_first_work(plan, data)


def limit_new_tokens(plan: Plan, n_prompt_tokens: int) -> int:
    """The most tokens that an evaluation samples after a prompt."""
    n_left = plan.data.max_length - n_prompt_tokens
    return min(n_left, plan.evaluation.n_eval_tokens or n_left)


class Evaluator:
    """Metrics of the evaluation batches, and continuations of prompts.

    Methods raise Stopped before a batch or a sampled token if any process was asked to stop.
    """

    def __init__(
        self,
        plan: Plan,
        data: TrainingData,
        objective: Objective,
        batches: Batches,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self.plan, self.data, self.objective, self.mesh = plan, data, objective, objective.mesh
        self.progress, self.stop, self.seed = progress, stop, plan.run.seed
        self.interval = Interval.of(plan, data.report.updates)
        self.batches = list(batches.test())  # prepared once, as every evaluation uses all of them
        # an online run may have no evaluation batches: samples are then of held-out prompts
        self.prompts = [batch.examples for batch in self.batches] or batches.held_out_examples()
        self.n_examples = sum(map(len, self.prompts))
        self.drawing = Drawing(data.tokenizer, objective, progress, stop)

    @cached_property
    def sampling(self) -> Sampling:
        """How samples are drawn, but for their length and seed."""
        plan = self.plan.evaluation
        wanted = {"temperature": plan.sample_temperature, "top_p": plan.sample_top_p, "top_k": plan.sample_top_k}
        prompts = [self.data.test[example.id[0]] for examples in self._choose_prompts() for example in examples]
        return choose_sampling(
            self.objective.policy,
            self.data.tokenizer,
            wanted,
            chat=all(prompt.rendered for prompt in prompts),
            cache_implementation=self.plan.model.cache_implementation,
        )

    def draws_samples(self, n_examples: int) -> bool:
        """Return whether an evaluation after so many examples draws samples."""
        plan, sampled = self.plan.evaluation, self.interval.sampled
        is_wanted = plan.do_first_sampling if n_examples == 0 else sampled is None or n_examples in sampled
        return plan.sample_during_eval and is_wanted

    def metrics(self) -> Reduced:
        """Evaluate the policy on all evaluation batches, if there are any."""
        if not self.batches:
            return Reduced({}, {})
        objective = self.objective
        objective.policy.eval()
        mismatched = [batch.mismatched for batch in self.batches if batch.mismatched is not None]
        weights = [weight for batch in self.batches for weight in batch.weights]
        metrics = objective.evaluate(self._iterate(self.batches), self._iterate(mismatched), weights=weights)
        release_gathered(objective.policy)
        if objective.reference is not None:
            release_gathered(objective.reference.model)
        return metrics

    def _iterate(self, batches: list[Batch]) -> Iterator[Batch]:
        """Yield the batches, with a progress bar; check for stop signals."""
        n_examples = sum(len(batch.examples) for batch in batches)
        for batch in self.progress.over(batches, total=len(batches), what="evaluate", examples=n_examples):
            self.stop.raise_if_any()
            yield batch

    def samples(self, *, n_examples: int) -> list[Sample]:
        """Sample continuations of the first `n_eval_model_samples` prompts, in whole batches.

        `n_examples`, the number of examples the policy was trained on, is part of the random seed. Raises
        SamplingFailed on every process.
        """
        batches = self._choose_prompts()
        sampling = self.sampling._replace(seed=(self.seed, n_examples))
        with closing(self.sampled_models()) as models:
            by_model = [self._answer(model, batches, sampling) for model in models]
        samples = []
        for i, example in enumerate(example for examples in batches for example in examples):
            prompt = self.data.test[example.id[0]]
            fed = show_fed(example, prompt, self.data.tokenizer)
            policy, *reference = (answers[i] for answers in by_model)
            samples.append(
                Sample(
                    fed,
                    policy.text,
                    reference[0].text if reference else None,
                    policy_ended=policy.ended,
                    reference_ended=reference[0].ended if reference else None,
                    turns=write_turns(prompt, fed, self.data.tokenizer),
                    added=find_added(prompt, self.data.tokenizer),
                )
            )
        return samples

    def answers(self) -> dict[str, str]:
        """Answer the first N_ASKED held-out prompts, each token the most probable, or raise SamplingFailed."""
        # several examples may have one prompt
        by_prompt = {example.prompt: example for examples in self.prompts for example in examples}
        asked = [*by_prompt.values()][:N_ASKED]
        batches = group(asked, self.plan.data.eval_batch_size)
        answers = self._answer(
            self.objective.policy, batches, self.sampling._replace(temperature=0), most=N_ANSWER_TOKENS
        )
        texts = (show_fed(example, self.data.test[example.id[0]], self.data.tokenizer) for example in asked)
        return {text: answer.text for text, answer in zip(texts, answers, strict=True)}

    def _choose_prompts(self) -> Sequence[Sequence[Example]]:
        n_batches = max(1, self.plan.evaluation.n_eval_model_samples // self.plan.data.eval_batch_size)
        return self.prompts[:n_batches]

    def sampled_models(self) -> Generator[Any, None, None]:
        """Yield the policy, then the reference if there is one, in use until the generator is closed."""
        yield self.objective.policy
        reference = self.objective.reference
        if reference is not None and reference.model is not None:
            with reference.in_use():
                yield reference.model

    def _answer(
        self, model: Any, batches: Sequence[Sequence[Example]], sampling: Sampling, *, most: int | None = None
    ) -> list[Answer]:
        """Answer the prompts of all batches on all processes together, each with at most `most` tokens."""
        self.objective.policy.eval()
        n_prompts, rows = sum(map(len, batches)), self.plan.prompts_at_a_time

        def draw() -> dict[int, Answer]:
            answers: dict[int, Answer] = {}
            first = 0
            with gathered_weights(model):  # once for all tokens, where memory allows
                for examples in batches:
                    prompts = [example.prompt for example in examples]
                    limit = limit_new_tokens(self.plan, max(map(len, prompts)))
                    settings = sampling._replace(max_new_tokens=min(limit, most or limit))
                    numbers = range(first, first + len(prompts))
                    share = self.drawing.answer_share(model, prompts, numbers, settings, rows=rows)
                    answers |= {first + i: answer for i, answer in share.items()}
                    first += len(prompts)
            return answers

        answers = self.drawing.gather_or_fail(model, draw)
        return [answers[i] for i in range(n_prompts)]

    def continuations(self, model: Any, batch: Any, *, n_examples: int) -> list[str]:
        """Continue the prompts of this process's collated batch."""
        ids, mask = batch["prompt_input_ids"], batch["prompt_attention_mask"].bool()
        prompts = [tuple(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True)]
        sampling = self.sampling._replace(
            max_new_tokens=limit_new_tokens(self.plan, ids.shape[1]), seed=(self.seed, n_examples, self.mesh.data_rank)
        )
        return [answer.text for answer in self.drawing.answer(model, prompts, range(len(prompts)), sampling)]
