"""Global batches of a run, prepared ahead of time in background threads."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dpo.data.examples import (
    Example,
    TextExample,
    encode_examples,
    iterate_examples,
    iterate_once,
    mismatch_examples,
    read_examples,
)
from dpo.data.preflight import TrainingData
from dpo.data.table import PromptTable
from dpo.models.answers import OnlinePair
from dpo.models.layouts import Layout, Microbatch
from dpo.settings.plan import Plan
from dpo.system.host import count_gpus

AHEAD = 2  # batches that are prepared before they are due


class Batch(NamedTuple):
    """B examples of an update or evaluation, the same on every process, and this process's microbatches."""

    examples: list[Example]
    weights: Sequence[float]  # per example, in the means of loss and metrics; 0 for a tie
    microbatches: list[Microbatch]
    cache_rows: Sequence[int] = ()  # per example, its row in the reference's cache; empty: they are not cached
    mismatched: "Batch | None" = None  # each prompt with a response to another prompt, if the loss needs it
    # The next three are for online pairs.
    drawn: Mapping[int, OnlinePair] = {}  # the policy's answers, by index in `examples`
    metrics: Mapping[str, float] = {}  # `online/...`
    seconds: Mapping[str, float] = {}  # by task: "sampling" and "scoring"


def prefetch(items: Iterable, prepare: Callable, *, workers: int) -> Iterator:
    """Yield `prepare(item)` for each item, in order.

    `workers` threads prepare up to AHEAD results beyond the one that is due; with 0 workers, nothing is prepared
    early. An error of `prepare` is raised when its result is due.
    """
    if not workers:
        yield from map(prepare, items)
        return
    waiting = deque()
    # Threads suffice, as tokenizers and tensor operations release the GIL.
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(prepare, item))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # if the consumer stops early, the pool must not prepare what is still queued
            for future in waiting:
                future.cancel()


class Batches:
    """The batches of a run; `rank` counts the processes that see different examples (`Mesh.data_rank`)."""

    def __init__(self, plan: Plan, data: TrainingData, layout: Layout, *, rank: int = 0):
        self.plan = plan
        self.data = data
        self.layout = layout
        self.seed = plan.run.seed
        self.rank = rank
        self.states = {}  # objects whose states are saved in checkpoints, by name; only online runs have any
        self.counts = data.train.counts.tolist()  # examples per training prompt in an epoch
        # The reference's cache has a row for each training example, then for each test example, then for the mismatched
        # example of each of these.
        n_examples = np.concatenate([data.train.counts, data.test.counts])  # per prompt
        self._first_rows = np.cumsum(n_examples) - n_examples  # per prompt, the row of its first example
        self._first_mismatched_row = n_examples.sum()

    def train(self, *, skip: int = 0) -> Iterator:
        """Yield what `prepare` makes of the training batches after the first `skip`, in the reference code's order."""
        plan = self.plan.data
        batches = iterate_examples(
            self.counts,
            shuffle=True,
            seed=self.seed,
            batch_size=plan.batch_size,
            n_epochs=plan.n_epochs,
            n_examples=plan.n_examples,
        )
        return prefetch(itertools.islice(batches, skip, None), self.prepare, workers=plan.num_workers)

    def prepare(self, example_ids: Sequence[tuple[int, int]]) -> Any:
        """Prepare a training batch of these examples ahead of time; `make_batch` gets the result once it is due.

        An id is a prompt's index in the table, and the index of an example among those of the prompt.
        """
        return self._prepare(self.data.train, self._first_rows, self.plan.n_microbatches, example_ids)

    def make_batch(self, item: Any, *, update: int) -> Batch:
        """Make the batch of an update that is due, from an item that `train` yields; `update` others came before it."""
        return item  # already a batch; in `OnlineBatches` it is only the prompts

    def evaluate(self) -> dict[str, float]:
        """Return metrics that an evaluation has besides those of the `test` batches; only online runs have any."""
        return {}

    def held_out_examples(self) -> list[list[Example]]:
        """Return held-out prompts with placeholder answers, in groups of `eval_batch_size`; [] unless online."""
        return []

    def test(self) -> Iterator[Batch]:
        """Yield evaluation batches; each example comes once."""
        plan = self.plan.data
        batches = iterate_once(
            self.data.test.counts.tolist(),
            batch_size=plan.eval_batch_size,
            n_examples=plan.n_eval_examples,
            seed=self.seed,
        )
        first_rows = self._first_rows[len(self.data.train) :]  # the training prompts come before the test prompts
        prepare = partial(self._prepare, self.data.test, first_rows, self.plan.n_eval_microbatches)
        return prefetch(batches, prepare, workers=plan.num_workers)

    def encode(self, texts: Sequence[TextExample]) -> list[Example]:
        """Return the examples with token ids, truncated to the plan's lengths."""
        plan = self.plan.data
        return encode_examples(
            texts, self.data.encode, max_length=plan.max_length, max_prompt_length=plan.max_prompt_length
        )

    def lay_out(self, examples: list[Example], n_microbatches: int, cache_rows: Sequence[int] = ()) -> Batch:
        """Make a batch of examples, split into `n_microbatches` for each process."""
        microbatches = self.layout.split(examples, n_microbatches, rank=self.rank, size=self.plan.dims.data_size)
        if count_gpus():  # copies from pinned memory are asynchronous
            microbatches = [microbatch.pin_memory() for microbatch in microbatches]
        return Batch(examples, [example.weight for example in examples], microbatches, cache_rows)

    def _prepare(
        self,
        prompts: PromptTable,
        first_rows: Sequence[int],
        n_microbatches: int,
        example_ids: Sequence[tuple[int, int]],
    ) -> Batch:
        """Prepare the batch of these examples of `prompts`, with mismatched ones if the loss needs them.

        `first_rows` has, for each prompt, the row of its first example in the reference's cache.
        """
        texts = read_examples(prompts, example_ids)
        rows = [first_rows[prompt_index] + index for prompt_index, index in example_ids]
        batch = self.lay_out(self.encode(texts), n_microbatches, rows)
        if self.plan.loss.mismatched:
            mismatched = self.encode(mismatch_examples(prompts, texts, seed=self.seed))
            mismatched_rows = [self._first_mismatched_row + row for row in rows]
            batch = batch._replace(mismatched=self.lay_out(mismatched, n_microbatches, mismatched_rows))
        return batch
