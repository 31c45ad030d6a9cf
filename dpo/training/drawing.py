"""Answers drawn by all processes of a run together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dpo.errors import RunError, SamplingFailed, one_sentence
from dpo.models.answers import Answer, Sampling, Tokens, answer
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.reporting.terminal import Progress
from dpo.system.waiting import all_arrive
from dpo.training.objective import Objective
from dpo.training.stop import StopRequest

Item = TypeVar("Item")
PATIENCE_SECS = 10  # of a process that cannot sample, for the others to fail too: more than a token takes


class Drawing:
    """Draws answers with the stop signals, the progress bar and the precision of a run.

    Methods raise Stopped within a few tokens if any process was asked to stop.
    """

    def __init__(self, tokenizer: Any, objective: Objective, progress: Progress, stop: StopRequest) -> None:
        self.tokenizer, self.objective, self.progress, self.stop = tokenizer, objective, progress, stop
        self.mesh = objective.mesh

    def answer(self, model: Any, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answer]:
        """Answer prompts of this process, while all others answer theirs."""
        tokens = itertools.count()

        def before_token(*_: Any) -> None:
            index = next(tokens)
            self.stop.raise_before_token(index)
            self.progress.part(index, sampling.max_new_tokens, "token")

        # prepended, so that it is called before FSDP's hook gathers weights
        hook = model.register_forward_pre_hook(before_token, prepend=True)
        device, dtype = self.objective.device, self.objective.autocast
        try:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                # in step, as each forward may gather shards from all processes
                in_step = self.mesh.world_size > 1
                return answer(model, self.tokenizer, prompts, numbers, sampling, in_step=in_step)
        finally:
            hook.remove()

    def draw(
        self,
        model: Any,
        prompts: Sequence[Tokens],
        numbers: Sequence[int],
        sampling: Sampling,
        *,
        rows: int,
        may_fail: bool = False,
    ) -> list[Answer]:
        """Answer prompts on all processes together, `rows` at a time; every process gets all answers.

        If it `may_fail`, any error becomes SamplingFailed on every process, or RunError if other processes go on, as
        their next collective would wait for this one.
        """
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        own = by_length[self.mesh.data_rank :: self.mesh.data_size]
        # all processes take part in every forward, so a process with one prompt less repeats the longest
        repeated = by_length[-1:] * (math.ceil(len(prompts) / self.mesh.data_size) - len(own))
        outcome: dict[int, Answer] | str = {}
        try:
            with gathered_weights(model):  # once for all tokens, where memory allows
                parts = group(own + repeated, rows)
                for part in self.progress.over(parts, total=len(parts), what="sample"):
                    some, their_numbers = [prompts[i] for i in part], [numbers[i] for i in part]
                    outcome |= zip(part, self.answer(model, some, their_numbers, sampling), strict=True)
        except Exception as error:  # `generate`, and a model's own code, may raise anything
            if not may_fail:
                raise
            release_gathered(model)  # the forward pass may not have ended
            outcome = f"{type(error).__name__} {one_sentence(error)}"
        has_failed = isinstance(outcome, str)
        if may_fail and not all_arrive("the end of sampling", patience_secs=PATIENCE_SECS if has_failed else 0):
            raise RunError(
                f"samples could not be drawn by this process alone, for which the others would wait: {outcome}; "
                f"resume=auto continues, and sample_during_eval=false draws none"
            )
        answers: dict[int, Answer] = {}
        for found in self.mesh.gather_all(outcome):
            if isinstance(found, str):  # errors are exchanged like answers, so that all processes raise together
                raise SamplingFailed(found)
            answers |= found
        return [answers[i] for i in range(len(prompts))]


def group(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split items into lists of `size`; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
