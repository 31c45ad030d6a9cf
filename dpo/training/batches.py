"""Global batches of a run, prepared ahead of time in background threads."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dpo.data.examples import Example, TextExample, encode_examples, iterate_examples, iterate_once, read_examples
from dpo.data.preflight import TrainingData
from dpo.data.table import Prompt
from dpo.models.answers import Drawn
from dpo.models.layouts import Layout, Microbatch
from dpo.settings.plan import Plan

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batch(NamedTuple):
    """B examples of an update or evaluation, and this process's microbatches.

    Examples, weights and numbers are the same on every process.
    """

    examples: list[Example]
    weights: Sequence[float]  # per example, in the means of loss and metrics; 0 for a tie
    microbatches: list[Microbatch]
    numbers: Sequence[int]  # of the examples, by which the reference caches them; empty: they are not cached
    # these three are for online pairs
    drawn: Mapping[int, Drawn] = MappingProxyType({})  # the policy's answers, by place in the batch
    metrics: Mapping[str, float] = MappingProxyType({})
    seconds: Mapping[str, float] = MappingProxyType({})  # spent on sampling and on scoring


def prefetch(
    items: Iterable[Item], prepare: Callable[[Item], Result], *, workers: int, ahead: int = 2
) -> Iterator[Result]:
    """Yield `prepare(item)` for each item in order, prepared ahead.

    Up to `ahead` results are prepared early, in `workers` threads; with 0 workers each is prepared when it is due.
    Tokenizers and tensor operations release Python's lock. An error in `prepare` is raised where its result is due.
    """
    if not workers:
        yield from map(prepare, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(prepare, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # also when the consumer stops early: the pool would otherwise finish what is queued
            for future in waiting:
                future.cancel()


class Batches:
    """The batches of a run, prepared for one process.

    The process is number `rank` of the `size` processes that see different examples.
    """

    def __init__(
        self, plan: Plan, data: TrainingData, layout: Layout, *, seed: int, rank: int = 0, size: int = 1
    ) -> None:
        self.plan, self.data, self.layout, self.seed = plan, data, layout, seed
        self.rank, self.size = rank, size
        self.loss = plan.loss
        self.states: dict[str, Any] = {}  # saved in checkpoints
        # examples are numbered through both splits, train first; here is the number of each prompt's first example
        counts = np.concatenate([data.train.counts, data.test.counts])
        first_numbers = np.cumsum(counts) - counts
        self._first_train_numbers, self._first_test_numbers = np.split(first_numbers, [len(data.train.counts)])

    def train(self, *, skip: int = 0) -> Iterator[Any]:
        """Iterate over training batches in the reference's order.

        Ends by the reference's stop rule. The first `skip` batches are not prepared: a resumed run has trained on them.
        """
        n_microbatches = self.plan.data.gradient_accumulation_steps
        prepare = partial(self._prepare, self.data.train, self._first_train_numbers, n_microbatches=n_microbatches)
        return self._iterate_train(prepare, self.data.train.counts.tolist(), skip=skip)

    def make_batch(self, item: Any, *, update: int) -> Batch:
        """Make the batch of an update from an item of `train`.

        Here the item is the batch.
        """
        return item

    def _iterate_train(self, prepare: Callable[..., Result], counts: Sequence[int], *, skip: int) -> Iterator[Result]:
        plan = self.plan
        batches = iterate_examples(
            counts,
            batch_size=plan.data.batch_size,
            shuffle=True,
            n_epochs=plan.data.n_epochs,
            n_examples=plan.data.n_examples,
            seed=self.seed,
        )
        return prefetch(itertools.islice(batches, skip, None), prepare, workers=plan.data.num_workers)

    def test(self) -> Iterator[Batch]:
        """Iterate over evaluation batches, one microbatch per process.

        Each example comes once, and the last batch may be partial.
        """
        return self._iterate_test(partial(self._prepare, self.data.test, self._first_test_numbers, n_microbatches=1))

    def test_sizes(self) -> list[int]:
        """The number of examples in each evaluation batch, without preparing them."""
        return [*self._iterate_test(len)]

    def _iterate_test(self, prepare: Callable[..., Result]) -> Iterator[Result]:
        plan = self.plan
        batches = iterate_once(
            self.data.test.counts.tolist(),
            batch_size=plan.data.eval_batch_size,
            n_examples=plan.data.n_eval_examples,
            seed=self.seed,
        )
        return prefetch(batches, prepare, workers=plan.data.num_workers)

    def read_prompts(self, places: Sequence[tuple[int, int]]) -> list[Prompt]:
        return [self.data.train[number] for number, _ in places]

    def encode(self, texts: Sequence[TextExample]) -> list[Example]:
        """Tokenize and truncate examples."""
        lengths = {"max_length": self.plan.data.max_length, "max_prompt_length": self.plan.data.max_prompt_length}
        return encode_examples(texts, self.data.encode, **lengths)

    def split(self, examples: list[Example], n_microbatches: int) -> list[Microbatch]:
        """Split a global batch into microbatches; return this process's."""
        microbatches = self.layout.split(examples, n_microbatches, rank=self.rank, size=self.size)
        if torch.cuda.is_available():  # copies from pinned memory are asynchronous
            microbatches = [microbatch.pin_memory() for microbatch in microbatches]
        return microbatches

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        first_numbers: np.ndarray,
        places: Sequence[tuple[int, int]],
        *,
        n_microbatches: int,
    ) -> Batch:
        examples = self.encode(read_examples(prompts, places))
        numbers = [int(first_numbers[prompt]) + index for prompt, index in places]
        return Batch(examples, [1.0] * len(examples), self.split(examples, n_microbatches), numbers)
