"""From the order of the examples to what an update takes, prepared ahead of time in the background."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from omegaconf import DictConfig

from dpo.data.examples import Row, content_key, encode_rows, find_examples, iterate_rows
from dpo.data.preflight import TrainingData
from dpo.data.prompts import Prompt
from dpo.data.tokenization import Batch
from dpo.losses import LOSSES
from dpo.models.layouts import Layout, Microbatch

Item = TypeVar("Item")
Result = TypeVar("Result")


class GlobalBatch(NamedTuple):
    """One batch of all processes, and this process's part of it."""

    batch: Batch
    rows: Sequence[Row]  # the texts
    keys: list[tuple[bytes, ...]]  # of each example's responses under their prompt, by content
    microbatches: list[Microbatch]


def prefetch(
    items: Iterable[Item], prepare: Callable[[Item], Result], *, workers: int, ahead: int = 2
) -> Iterator[Result]:
    """`prepare(item)` of each item in order, up to `ahead` of them early, in `workers` threads (0: none, in time).

    Tokenizers and tensor operations let other threads run. What `prepare` raises is raised where its result is due.
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
        finally:
            for future in waiting:
                future.cancel()


class Batches:
    """The batches of a run, each prepared for process `rank` of the `size` that see different rows."""

    def __init__(
        self,
        data: TrainingData,
        layout: Layout,
        *,
        rank: int,
        size: int,
        sft_mode: bool,
        seed: int,
        num_workers: int,
        max_length: int,
        max_prompt_length: int,
    ) -> None:
        self.data, self.layout, self.rank, self.size = data, layout, rank, size
        self.sft_mode, self.seed, self.num_workers = sft_mode, seed, num_workers
        self.max_length, self.max_prompt_length = max_length, max_prompt_length

    @classmethod
    def of(cls, config: DictConfig, data: TrainingData, layout: Layout, *, rank: int, size: int, seed: int) -> Batches:
        """Sizes and loss as a config says."""
        return cls(
            data,
            layout,
            rank=rank,
            size=size,
            sft_mode=not LOSSES[config.loss.name].uses_reference,
            seed=seed,
            num_workers=config.num_workers,
            max_length=config.max_length,
            max_prompt_length=config.max_prompt_length,
        )

    def train(
        self, batch_size: int, *, parts: int, n_epochs: int | None, n_examples: int | None, skip: int = 0
    ) -> Iterator[GlobalBatch]:
        """Batches in `parts` microbatches per process, in the reference's order and until its stop rule.

        The first `skip` are not prepared: a run that continues had them.
        """
        return self._iterate(self.data.train, batch_size, parts, n_epochs, n_examples, skip)

    def test(self, batch_size: int, *, n_examples: int) -> Iterator[GlobalBatch]:
        """Batches of one microbatch per process."""
        return self._iterate(self.data.test, batch_size, 1, None, n_examples)

    def _iterate(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        parts: int,
        n_epochs: int | None,
        n_examples: int | None,
        skip: int = 0,
    ) -> Iterator[GlobalBatch]:
        rows = iterate_rows(
            prompts,
            batch_size=batch_size,
            shuffle=True,
            sft_mode=self.sft_mode,
            n_epochs=n_epochs,
            n_examples=n_examples,
            seed=self.seed,
        )
        rows = itertools.islice(rows, skip, None)
        return prefetch(rows, partial(self._prepare, parts=parts), workers=self.num_workers)

    def _prepare(self, rows: Sequence[Row], *, parts: int) -> GlobalBatch:
        batch = encode_rows(
            rows, self.data.encode, max_length=self.max_length, max_prompt_length=self.max_prompt_length
        )
        keys = [tuple(content_key(e.prompt, response) for response in e.responses) for e in find_examples(batch)]
        microbatches = self.layout.split(batch, parts, rank=self.rank, size=self.size)
        if torch.cuda.is_available():  # from pinned memory the copy does not wait
            microbatches = [microbatch.pin_memory() for microbatch in microbatches]
        return GlobalBatch(batch, rows, keys, microbatches)
