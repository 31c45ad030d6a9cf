"""Answers drawn by all processes of a run together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dpo.errors import RunError, SamplingFailed, one_sentence
from dpo.models.answers import Answer, Sampling, Tokens, answer, before_each_forward
from dpo.parallel.sharding import release_gathered
from dpo.reporting.terminal import Progress
from dpo.system.waiting import all_arrive
from dpo.training.objective import Objective
from dpo.training.stop import StopRequest

Item = TypeVar("Item")
PATIENCE_SECS = 10  # of a process that cannot sample, for the others to fail too: more than a token takes


class Drawing:
    """Draws answers with the stop signals, the progress bar and the precision of a run."""

    def __init__(self, tokenizer: Any, objective: Objective, progress: Progress, stop: StopRequest) -> None:
        self.tokenizer, self.objective, self.progress, self.stop = tokenizer, objective, progress, stop
        self.mesh = objective.mesh

    def answer(self, model: Any, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answer]:
        """Answer prompts of this process, while all others answer theirs.

        Raises Stopped within a few tokens if any process was asked to stop.
        """

        def before_token(index: int) -> None:
            self.stop.raise_before_token(index)
            self.progress.part(index, sampling.max_new_tokens, "token")

        autocast = self.objective.autocast
        with (
            before_each_forward(model, before_token),
            torch.autocast(self.objective.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            # in step, as each forward may gather shards from all processes
            in_step = self.mesh.world_size > 1
            return answer(model, self.tokenizer, prompts, numbers, sampling, in_step=in_step)

    def answer_share(
        self, model: Any, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling, *, rows: int
    ) -> dict[int, Answer]:
        """Answer this process's share of all prompts, `rows` at a time; by the prompt's index.

        Prompts are sorted by length and dealt out in turn, so that all processes have about equally many, of about
        equal lengths.
        """
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        own = by_length[self.mesh.data_rank :: self.mesh.data_size]
        # all processes take part in every forward, so a process with one prompt less repeats the longest
        repeated = by_length[-1:] * (math.ceil(len(prompts) / self.mesh.data_size) - len(own))
        answers: list[Answer] = []
        parts = group(own + repeated, rows)
        for part in self.progress.over(parts, total=len(parts), what="sample"):
            answers += self.answer(model, [prompts[i] for i in part], [numbers[i] for i in part], sampling)
        return dict(zip(own, answers, strict=False))

    def gather_or_fail(self, model: Any, draw: Callable[[], dict[int, Answer]]) -> dict[int, Answer]:
        """What all processes draw, on every process.

        Raises SamplingFailed on every process if an error is raised on all; RunError if others go on, as their next
        collective would wait for this process.
        """
        try:
            outcome: dict[int, Answer] | str = draw()
        except Exception as error:  # `generate`, and a model's own code, may raise anything
            release_gathered(model)  # the forward pass may not have ended
            outcome = f"{type(error).__name__} {one_sentence(error)}"
        has_failed = isinstance(outcome, str)
        if not all_arrive("the end of sampling", patience_secs=PATIENCE_SECS if has_failed else 0):
            raise RunError(
                f"samples could not be drawn by this process alone, for which the others would wait: {outcome}; "
                f"resume=auto continues, and sample_during_eval=false draws none"
            )
        answers: dict[int, Answer] = {}
        for found in self.mesh.gather_all(outcome):
            if isinstance(found, str):  # errors are exchanged like answers, so that all processes raise together
                raise SamplingFailed(found)
            answers |= found
        return answers


def group(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split items into lists of `size`; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
