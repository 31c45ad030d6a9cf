"""Online pairs: the best and the worst answer to a prompt.

The policy writes the answers, and a scorer ranks them (online DPO, arXiv 2402.04792). Up to rounding, an answer depends
only on the weights, the config's seed, and the index of the answer in the run. It depends neither on other prompts nor
on the number of processes, so checkpoints need no state of the sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from dpo.data.examples import Example, TextExample, list_examples, text_digest
from dpo.data.preflight import TrainingData
from dpo.data.table import Prompt
from dpo.data.tokenization import append_eos, truncate
from dpo.errors import InputError
from dpo.models.answers import Answer, Drawn, Sampling, answer
from dpo.models.generation import before_each_forward
from dpo.models.scoring import Scorer, ScorerFailed, load_scorer, seeded_generators
from dpo.parallel.mesh import from_rank_0
from dpo.parallel.sharding import gathered_weights
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Objective
from dpo.training.stop import StopRequest

AnsweredPrompt = tuple[Prompt, list[Answer]]
Item = TypeVar("Item")
N_CHECKED_PROMPTS = 400  # training prompts that the scorer checks at the start
# mixed into the seed of a random generator, so that the generators of an update draw different numbers
OFFLINE_STREAM, SCORING_STREAM = 1, 2


class ScorerState:
    """The part of a checkpoint that identifies the scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def state_dict(self) -> dict[str, str]:
        return {"scorer": self.scorer.digest}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Check the scorer. Raises InputError if it has changed."""
        if state["scorer"] != self.scorer.digest:
            raise InputError(f"{self.scorer.name} has changed since the checkpoint: restore it, or start a new run")


class OnlineBatches(Batches):
    """Batches of a run whose training pairs are drawn from the policy.

    `train` yields the prompts of each batch. If any process was asked to stop, `make_batch` raises Stopped within a few
    tokens.
    """

    def __init__(
        self,
        plan: Plan,
        data: TrainingData,
        objective: Objective,
        stop: StopRequest,
        progress: Progress,
        *,
        seed: int,
    ) -> None:
        mesh = objective.mesh
        super().__init__(plan, data, objective.layout, seed=seed, rank=mesh.data_rank, size=mesh.data_size)
        self.objective, self.mesh, self.stop, self.progress = objective, mesh, stop, progress
        self.scorer = load_scorer(plan, objective.device, rows=plan.prompts_at_a_time)
        for prompt in some_prompts(data):
            self.scorer.check(prompt)
        for note in self.scorer.notes:
            progress.line(note)
        self.states = {"online": ScorerState(self.scorer)}
        online = plan.online
        self.n_samples, self.missing_eos_penalty = online.n_samples, online.missing_eos_penalty
        self.keeps_ties = online.ties == "keep"
        self.sampling = Sampling(
            online.max_new_tokens, online.temperature, online.top_p, seed, plan.model.cache_implementation
        )
        self.n_offline = plan.n_offline

    def train(self, *, skip: int = 0) -> Iterator[list[Prompt]]:
        """Iterate over the prompts of each training batch.

        The first `skip` batches are left out. An epoch visits each prompt once, as if it had one example.
        """
        return self._iterate_train(self.read_prompts, [1] * len(self.data.train), skip=skip)

    def make_batch(self, item: Sequence[Prompt], *, update: int) -> Batch:
        """Make the pairs of an update, one per prompt, on every process.

        `n_offline` prompts get a pair from the data. The policy answers all other prompts, and the best and the worst
        answer are the pair. Raises ScorerFailed on every process.
        """
        prompts = item
        # prompts, examples and answers of the batch go by the prompt's index in the batch
        offline_pairs = self._choose_offline_pairs(prompts, update)
        examples = dict(zip(offline_pairs, self.encode(list(offline_pairs.values())), strict=True))
        encoded_prompts = {
            index: encode_prompt(prompt, self.data, self.plan)
            for index, prompt in enumerate(prompts)
            if index not in offline_pairs
        }
        sampling_start = time.perf_counter()
        answers = self._answer(encoded_prompts, update)
        scoring_start = time.perf_counter()
        scores = self._score([(prompts[index], answers[index]) for index in encoded_prompts], update)
        drawn, weights = {}, [1.0] * len(prompts)
        for (index, encoded_prompt), prompt_scores in zip(encoded_prompts.items(), scores, strict=True):
            drawn[index] = _choose_pair(prompts[index], answers[index], prompt_scores)
            # a tie stays in the batch, with weight 0, so that every process has as many forwards as without ties
            weights[index] = float(self.keeps_ties or not drawn[index].is_tie)
            examples[index] = _add_pair(encoded_prompt, drawn[index])
        in_order = [examples[index] for index in range(len(prompts))]
        microbatches = self.split(in_order, self.plan.data.gradient_accumulation_steps)
        return Batch(
            in_order,
            weights,
            microbatches,
            cache_rows=(),  # the reference's log-probabilities are not cached: the same pairs hardly come again
            drawn=drawn,
            metrics=_compute_metrics(list(drawn.values())),
            seconds={"sampling": scoring_start - sampling_start, "scoring": time.perf_counter() - scoring_start},
        )

    def _choose_offline_pairs(self, prompts: Sequence[Prompt], update: int) -> dict[int, TextExample]:
        """Choose `n_offline` random prompts, and a random pair of each.

        Returns the pairs by the prompt's index in the batch.
        """
        rng = np.random.default_rng([self.seed, update, OFFLINE_STREAM])
        chosen_pairs = {}
        for index in sorted(rng.choice(len(prompts), self.n_offline, replace=False).tolist()):
            pairs = list_examples(prompts[index])
            chosen_pairs[index] = pairs[rng.integers(len(pairs))]
        return chosen_pairs

    def _answer(self, encoded_prompts: Mapping[int, Example], update: int) -> dict[int, list[Answer]]:
        """Sample `n_samples` answers per prompt.

        Prompts and answers go by the prompt's index in the batch. Every process gets all answers. Prompts are sorted by
        length and dealt out in turn, so each process has about as many, and about as long ones.
        """
        by_length = sorted(encoded_prompts, key=lambda index: len(encoded_prompts[index].prompt))
        own_indices = by_length[self.rank :: self.size]
        max_per_process = math.ceil(len(by_length) / self.size)
        # all processes take part in every forward, so a process with one prompt less repeats the longest
        repeated_indices = by_length[-1:] * (max_per_process - len(own_indices))
        batches = _group(own_indices + repeated_indices, self.plan.prompts_at_a_time)
        answers: list[tuple[int, list[Answer]]] = []  # (index of the prompt, its answers)
        policy = self.objective.policy.eval()
        with gathered_weights(policy):  # once for all tokens, where memory allows
            for indices in self.progress.over(batches, total=len(batches), what="sample"):
                answers += zip(indices, self._answer_batch(policy, encoded_prompts, indices, update), strict=True)
        return dict(self.mesh.gather_list(answers[: len(own_indices)]))  # without answers to the repeated prompt

    def _answer_batch(
        self, policy: Any, encoded_prompts: Mapping[int, Example], indices: Sequence[int], update: int
    ) -> list[list[Answer]]:
        """Sample `n_samples` answers to each of these prompts."""
        n_samples, max_new_tokens = self.n_samples, self.sampling.max_new_tokens
        n_prompts_before = update * self.plan.data.batch_size
        prompts, answer_numbers = [], []
        for index in indices:
            first_number = (n_prompts_before + index) * n_samples
            prompts += [encoded_prompts[index].prompt] * n_samples
            # the number of an answer in the run seeds its sampling, whichever process and batch it is in
            answer_numbers += range(first_number, first_number + n_samples)

        def before_token(token_index: int) -> None:
            self.stop.raise_before_token(token_index)
            self.progress.part(token_index, max_new_tokens, "token")

        autocast = self.objective.autocast
        with (
            before_each_forward(policy, before_token),
            torch.autocast(self.objective.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            # in step, as each forward may gather shards from all processes
            answers = answer(
                policy,
                self.data.tokenizer,
                prompts,
                answer_numbers,
                self.sampling,
                in_step=self.mesh.world_size > 1,
            )
        return _group(answers, n_samples)

    def _score(self, answered: Sequence[AnsweredPrompt], update: int) -> list[list[float]]:
        """Score all answers, on every process; returns a list per prompt.

        `missing_eos_penalty` is subtracted from the score of an answer that was cut off.
        """
        if self.scorer.in_parallel:
            own_indices = np.array_split(np.arange(len(answered)), self.mesh.world_size)[self.mesh.rank]
            outcomes = self.mesh.gather_all(self._score_or_explain([answered[i] for i in own_indices], update))
        else:  # rank 0 alone has loaded the user's function
            outcome = self._score_or_explain(answered, update) if self.mesh.rank == 0 else None
            outcomes = [from_rank_0(outcome)]
        for outcome in outcomes:
            if isinstance(outcome, str):  # errors are exchanged like scores, so that all processes raise together
                raise ScorerFailed(outcome)
        scores = [score for outcome in outcomes for score in outcome]
        answers = [answer for _, prompt_answers in answered for answer in prompt_answers]
        penalized = [
            score - self.missing_eos_penalty * (not answer.ended) for score, answer in zip(scores, answers, strict=True)
        ]
        return _group(penalized, self.n_samples)

    def _score_or_explain(self, answered: Sequence[AnsweredPrompt], update: int) -> list[float] | str:
        """Score answers; return the scorer's error message if it fails.

        Random generators are seeded by the update, so that a resumed run draws the same numbers.
        """
        prompts = [prompt for prompt, answers in answered for _ in answers]  # one for each answer
        answers = [answer for _, answers in answered for answer in answers]
        try:
            with seeded_generators(self.seed, update, SCORING_STREAM):
                return self.scorer(prompts, answers)
        except ScorerFailed as error:
            return str(error)


def _group(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split items into lists of `size`; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def some_prompts(data: TrainingData) -> list[Prompt]:
    """About N_CHECKED_PROMPTS evenly spaced training prompts, or all if fewer."""
    return data.train[:: max(1, len(data.train) // N_CHECKED_PROMPTS)]


def encode_prompt(prompt: Prompt, data: TrainingData, plan: Plan) -> Example:
    """Tokenize a prompt to an example without responses.

    The prompt is truncated if it and `max_new_tokens` do not fit into `max_length`.
    """
    token_ids = data.encode([prompt.text])
    untruncated, _ = append_eos(prompt.text, [], token_ids, data.tokenizer, rendered=prompt.rendered)
    longest_answer = [0] * plan.online.max_new_tokens  # only its length matters
    limits = plan.data.max_length, plan.data.max_prompt_length
    truncated, _ = truncate(untruncated, [longest_answer], prompt.truncation_mode, *limits)
    return Example(
        tuple(truncated), (), id=(prompt.index_in_split, 0), dataset=prompt.dataset, truncated=truncated != untruncated
    )


def _choose_pair(prompt: Prompt, answers: Sequence[Answer], scores: Sequence[float]) -> Drawn:
    """Choose the best and the worst of a prompt's answers.

    Among equal scores, the first is the best and the last the worst: a tie is a pair of two answers too.
    """
    scored = [answer._replace(score=score) for answer, score in zip(answers, scores, strict=True)]
    first_best = int(np.argmax(scores))
    last_worst = len(scores) - 1 - int(np.argmin(scores[::-1]))
    return Drawn(prompt.text, scored, first_best, last_worst)


def _add_pair(encoded_prompt: Example, drawn: Drawn) -> Example:
    """Add the pair drawn for a prompt to its example."""
    texts = {role: answer.text for role, answer in zip(encoded_prompt.roles, drawn.pair, strict=True)}
    return encoded_prompt._replace(
        responses=tuple(answer.tokens for answer in drawn.pair),
        digest=text_digest(drawn.prompt, texts),
        truncated=encoded_prompt.truncated or not all(answer.ended for answer in drawn.pair),
    )


def _compute_metrics(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Metrics of the answers drawn for a batch's prompts (docs/metrics.md)."""
    answers = [answer for prompt_drawn in drawn for answer in prompt_drawn.answers]
    best, worst = zip(*(prompt_drawn.pair for prompt_drawn in drawn), strict=True)
    return {
        "online/score": fmean(answer.score for answer in answers),
        "online/score_best": fmean(answer.score for answer in best),
        "online/score_worst": fmean(answer.score for answer in worst),
        "online/length": fmean(len(answer.tokens) for answer in answers),
        "online/eos": fmean(answer.ended for answer in answers),
        "online/ties": fmean(prompt_drawn.is_tie for prompt_drawn in drawn),
    }
