"""Evaluation of a policy, and samples from it and the reference."""

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from dpo.data.examples import Example
from dpo.models.answers import Answer, Sampling, choose_sampling, show_fed, write_turns
from dpo.reporting.events import Sample
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Objective, Reduced
from dpo.training.online import Drawing, group
from dpo.training.stop import StopRequest

EVAL_EVERY, FEWEST = 20_000, 8  # examples between evaluations, but about so many evaluations in a shorter run
N_ASKED, N_ANSWER_TOKENS = 8, 32  # held-out prompts that are answered before and after training, and how long


class Interval(NamedTuple):
    """When a run evaluates, and what it keeps."""

    n_examples: int  # between evaluations, in whole batches
    keep: int | None  # newest checkpoints to keep; None: all
    sampled: Collection[int] | None  # numbers of examples after which samples are drawn; None: at each evaluation

    @classmethod
    def of(cls, plan: Plan, updates: int) -> "Interval":
        batch_size, keep, eval_every = plan.data.batch_size, plan.run.keep_checkpoints, plan.evaluation.eval_every
        if eval_every is not None or updates * batch_size >= FEWEST * EVAL_EVERY:
            wanted = EVAL_EVERY if eval_every is None else eval_every
            return cls(max(batch_size, wanted - wanted % batch_size), keep, None)
        per_interval = max(1, round(updates / FEWEST))  # updates
        middle = max(1, round(updates / per_interval / 2)) * per_interval
        sampled = {n * batch_size for n in (0, per_interval, middle, updates)}
        return cls(per_interval * batch_size, 2 if keep is None and plan.run.save_every is None else keep, sampled)


class Evaluator:
    """Metrics of the evaluation batches, and answers to prompts; Stopped is raised before a batch or a token."""

    def __init__(self, objective: Objective, batches: Batches, progress: Progress, stop: StopRequest):
        self.plan, self.data, self.objective = batches.plan, batches.data, objective
        self.progress, self.stop = progress, stop
        self.interval = Interval.of(self.plan, self.data.report.updates)
        self.batches = list(batches.test())  # prepared once, as every evaluation uses all of them
        # an online run may have no evaluation batches: samples are then of held-out prompts
        self.prompts = [batch.examples for batch in self.batches] or batches.held_out_examples()
        self.n_examples = sum(map(len, self.prompts))
        n_sampled_batches = max(1, self.plan.evaluation.n_eval_model_samples // self.plan.data.eval_batch_size)
        self.sampled = self.prompts[:n_sampled_batches]  # prompts of samples, in whole batches
        self.drawing = Drawing(self.data.tokenizer, objective, progress, stop)

    @cached_property
    def sampling(self) -> Sampling:
        """How samples are drawn, but for their length and seed."""
        plan = self.plan.evaluation
        return choose_sampling(
            self.objective.policy,
            self.data.tokenizer,
            {"temperature": plan.sample_temperature, "top_p": plan.sample_top_p, "top_k": plan.sample_top_k},
            chat=all(self.data.test[example.id[0]].rendered for example in chain(*self.sampled)),
            cache_implementation=self.plan.model.cache_implementation,
        )

    def draws_samples(self, n_examples: int) -> bool:
        plan, sampled = self.plan.evaluation, self.interval.sampled
        is_wanted = plan.do_first_sampling if n_examples == 0 else sampled is None or n_examples in sampled
        return plan.sample_during_eval and is_wanted

    def metrics(self) -> Reduced:
        if not self.batches:
            return Reduced({}, {})
        return self.objective.evaluate(self.batches, self._iterate)

    def _iterate(self, batches: list[Batch]) -> Iterator[Batch]:
        for batch in self.progress.over(batches, total=len(batches), what="evaluate"):
            self.stop.raise_if_any()
            yield batch

    def samples(self, *, n_examples: int) -> list[Sample]:
        """Continuations by policy and reference, or SamplingFailed on all processes."""
        sampling = self.sampling._replace(seed=(self.plan.run.seed, n_examples))
        with closing(self.sampled_models()) as models:
            by_model = [self._answer(model, self.sampled, sampling) for model in models]
        samples, tokenizer = [], self.data.tokenizer
        for example, policy, *others in zip(chain(*self.sampled), *by_model, strict=True):
            prompt = self.data.test[example.id[0]]
            fed = show_fed(example, prompt, tokenizer)
            reference, ended = (others[0].text, others[0].ended) if others else (None, None)
            samples.append(
                Sample(fed, policy.text, reference, policy.ended, ended, write_turns(prompt, fed, tokenizer))
            )
        return samples

    def answers(self) -> dict[str, str]:
        """Answer the first N_ASKED held-out prompts, each token the most probable, or raise SamplingFailed."""
        # several examples may have one prompt
        by_prompt = {example.prompt: example for example in chain(*self.prompts)}
        asked = [*by_prompt.values()][:N_ASKED]
        batches = group(asked, self.plan.data.eval_batch_size)
        greedy = self.sampling._replace(temperature=0, max_new_tokens=N_ANSWER_TOKENS)
        answers = self._answer(self.objective.policy, batches, greedy)
        texts = (show_fed(example, self.data.test[example.id[0]], self.data.tokenizer) for example in asked)
        return {text: answer.text for text, answer in zip(texts, answers, strict=True)}

    def sampled_models(self) -> Generator[Any, None, None]:
        """The policy, then the reference if there is one, in use until the generator is closed."""
        yield self.objective.policy
        reference = self.objective.reference
        if reference is not None and reference.model is not None:
            with reference.in_use():
                yield reference.model

    def _answer(self, model: Any, batches: Sequence[Sequence[Example]], sampling: Sampling) -> list[Answer]:
        self.objective.policy.eval()
        answers = []
        for examples in batches:
            limit = self._limit_new_tokens(max(len(example.prompt) for example in examples))
            # 0: as many as fit
            settings = sampling._replace(max_new_tokens=min(limit, sampling.max_new_tokens or limit))
            numbers, rows = range(len(answers), len(answers) + len(examples)), self.plan.prompts_at_a_time
            answers += self.drawing.draw(model, examples, numbers, settings, rows=rows, may_fail=True)
        return answers

    def _limit_new_tokens(self, n_prompt_tokens: int) -> int:
        n_left = self.plan.data.max_length - n_prompt_tokens
        return min(n_left, self.plan.evaluation.n_eval_tokens or n_left)

    def continuations(self, model: Any, batch: Any, *, n_examples: int) -> list[str]:
        """Continue the prompts of this process's collated batch."""
        ids, mask = batch["prompt_input_ids"], batch["prompt_attention_mask"].bool()
        prompts = [tuple(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True)]
        seed = (self.plan.run.seed, n_examples, self.objective.mesh.data_rank)
        sampling = self.sampling._replace(max_new_tokens=self._limit_new_tokens(ids.shape[1]), seed=seed)
        return [answer.text for answer in self.drawing.answer(model, prompts, range(len(prompts)), sampling)]
