"""Online pairs: best and worst of the policy's answers to a prompt.

A scorer ranks the answers (online DPO, arXiv 2402.04792). Up to rounding, an answer depends only on the weights, the
config's seed and its place in the run: not on other prompts or the number of processes. So no state of it is saved.
"""

from __future__ import annotations

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

Answered = tuple[Prompt, list[Answer]]
Item = TypeVar("Item")
LOOKED_AT = 400  # training prompts that the scorer checks at the start
OFFLINE, SCORING = 1, 2  # mixed into the seeds, so that these random numbers differ from one another


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

    `train` yields the prompts of each batch. `make_batch` raises Stopped before a sampled token if any process was
    asked to stop.
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
        self.scorer = load_scorer(plan, objective.device, rows=max(1, plan.data.eval_batch_size // mesh.data_size))
        for prompt in some_prompts(data):
            self.scorer.check(prompt)
        for note in self.scorer.notes:
            progress.line(note)
        self.states = {"online": ScorerState(self.scorer)}
        online = plan.online
        self.n_samples, self.penalty = online.n_samples, online.missing_eos_penalty
        self.keeps_ties = online.ties == "keep"
        self.sampling = Sampling(online.max_new_tokens, online.temperature, online.top_p, seed)
        self.n_offline = plan.n_offline

    def train(self, *, skip: int = 0) -> Iterator[list[Prompt]]:
        return self._iterate_train(self.read_prompts, [1] * len(self.data.train), skip=skip)

    def make_batch(self, item: Sequence[Prompt], *, update: int) -> Batch:
        """Draw the pairs of an update, one per prompt, on every process.

        `n_offline` prompts get a pair from the data in place of answers. Raises ScorerFailed on every process.
        """
        # all these dicts are by place, the index of a prompt in the batch
        prompts, offline_pairs = item, self._choose_offline_pairs(item, update)
        examples = dict(zip(offline_pairs, self.encode(list(offline_pairs.values())), strict=True))
        asked = {
            place: encode_prompt(prompt, self.data, self.plan)
            for place, prompt in enumerate(prompts)
            if place not in offline_pairs
        }
        start = time.perf_counter()
        answers = self._answer(asked, update)
        sampled = time.perf_counter()
        scores = self._score([(prompts[place], answers[place]) for place in asked], update)
        drawn, weights = {}, [1.0] * len(prompts)
        for (place, example), prompt_scores in zip(asked.items(), scores, strict=True):
            choice = drawn[place] = _choose_pair(prompts[place], answers[place], prompt_scores)
            # a tie stays in the batch without a weight, so that every process has as many forwards as without ties
            weights[place] = float(self.keeps_ties or not choice.is_tie)
            texts = {role: answer.text for role, answer in zip(example.roles, choice.pair, strict=True)}
            examples[place] = example._replace(
                responses=tuple(answer.tokens for answer in choice.pair),
                digest=text_digest(choice.prompt, texts),
                truncated=example.truncated or not all(answer.ended for answer in choice.pair),
            )
        in_order = [examples[place] for place in range(len(prompts))]
        return Batch(
            in_order,
            weights,
            self.split(in_order, self.plan.data.gradient_accumulation_steps),
            numbers=(),  # the reference's log-probabilities are not cached: the same pairs hardly come again
            drawn=drawn,
            metrics=_metrics([*drawn.values()]),
            seconds={"sampling": sampled - start, "scoring": time.perf_counter() - sampled},
        )

    def _choose_offline_pairs(self, prompts: Sequence[Prompt], update: int) -> dict[int, TextExample]:
        """Choose `n_offline` random prompts, and a random pair of each.

        Returns the pairs by the prompt's place in the batch.
        """
        rng = np.random.default_rng([self.seed, update, OFFLINE])
        places = sorted(rng.choice(len(prompts), self.n_offline, replace=False).tolist())
        pairs_by_place = {place: list_examples(prompts[place]) for place in places}
        return {place: pairs[rng.integers(len(pairs))] for place, pairs in pairs_by_place.items()}

    def _answer(self, asked: Mapping[int, Example], update: int) -> dict[int, list[Answer]]:
        """Sample `n_samples` answers per prompt.

        Returns all of them on every process, by the prompt's place. Prompts are sorted by length and dealt out in turn,
        so each process has about as many, and about as long ones.
        """
        by_length = sorted(asked, key=lambda place: len(asked[place].prompt))
        own = by_length[self.rank :: self.size]
        most = -(-len(by_length) // self.size)  # prompts of the process that has most
        # a process with one prompt less repeats the longest, as all processes take part in every forward
        places = own + by_length[-1:] * (most - len(own))
        batches = _in_groups(places, max(1, self.plan.data.eval_batch_size // self.size))
        answers: list[tuple[int, list[Answer]]] = []
        policy = self.objective.policy.eval()
        with gathered_weights(policy):  # once for all tokens, where memory allows
            for batch in self.progress.over(batches, total=len(batches), what="sample"):
                answers += zip(batch, self._answer_batch(policy, asked, batch, update), strict=True)
        return dict(self.mesh.gather_list(answers[: len(own)]))  # without the repeated prompt

    def _answer_batch(
        self, policy: Any, asked: Mapping[int, Example], places: Sequence[int], update: int
    ) -> list[list[Answer]]:
        """Sample answers to the prompts at these places."""
        n = self.n_samples
        first = update * self.plan.data.batch_size
        # an answer's number in the run seeds its sampling, whichever process and batch it is in
        numbers = [(first + place) * n + sample for place in places for sample in range(n)]
        most = self.sampling.max_new_tokens

        def before_token(index: int) -> None:
            self.stop.raise_if_any()
            self.progress.part(index, most, "token")

        prompts = [asked[place].prompt for place in places for _ in range(n)]
        autocast = self.objective.autocast
        with (
            before_each_forward(policy, before_token),
            torch.autocast(self.objective.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            # in step, as each forward gathers shards from all processes
            tokenizer, in_step = self.data.tokenizer, self.mesh.world_size > 1
            return _in_groups(answer(policy, tokenizer, prompts, numbers, self.sampling, in_step=in_step), n)

    def _score(self, answered: Sequence[Answered], update: int) -> list[list[float]]:
        """Score all answers, on every process.

        The penalty is subtracted from the score of an answer without EOS.
        """
        if self.scorer.in_parallel:  # otherwise rank 0 scores all answers: only it has loaded the user's function
            own = np.array_split(np.arange(len(answered)), self.mesh.world_size)[self.mesh.rank]
            outcomes = self.mesh.gather_all(self._outcome([answered[i] for i in own], update))
        else:
            outcomes = [from_rank_0(self._outcome(answered, update) if self.mesh.rank == 0 else None)]
        for outcome in outcomes:
            if isinstance(outcome, str):  # errors are exchanged too, so that all processes fail at the same place
                raise ScorerFailed(outcome)
        scores = [score for outcome in outcomes for score in outcome]
        answers = [answer for _, prompt_answers in answered for answer in prompt_answers]
        penalized = [s - self.penalty * (not answer.ended) for s, answer in zip(scores, answers, strict=True)]
        return _in_groups(penalized, self.n_samples)

    def _outcome(self, answered: Sequence[Answered], update: int) -> list[float] | str:
        """Score answers, or return the error message for the other processes.

        Random generators are seeded by the update, so that a resumed run draws the same numbers.
        """
        prompts = [prompt for prompt, answers in answered for _ in answers]
        try:
            with seeded_generators(self.seed, update, SCORING):
                return self.scorer(prompts, [answer for _, answers in answered for answer in answers])
        except ScorerFailed as error:
            return str(error)


def _in_groups(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split the items into lists of `size`, in order."""
    return [[*items[start : start + size]] for start in range(0, len(items), size)]


def some_prompts(data: TrainingData) -> list[Prompt]:
    """The training prompts, or about LOOKED_AT evenly spaced ones if more."""
    return data.train[:: max(1, len(data.train) // LOOKED_AT)]


def encode_prompt(prompt: Prompt, data: TrainingData, plan: Plan) -> Example:
    """Tokenize a prompt to an example without responses.

    It is truncated to leave room for `max_new_tokens`.
    """
    ids = data.encode([prompt.text])
    whole, _ = append_eos(prompt.text, [], ids, data.tokenizer, rendered=prompt.rendered)
    placeholder = [0] * plan.online.max_new_tokens  # for a response
    cut, _ = truncate(whole, [placeholder], prompt.truncation_mode, plan.data.max_length, plan.data.max_prompt_length)
    return Example(tuple(cut), (), id=(prompt.index_in_split, 0), dataset=prompt.dataset, truncated=cut != whole)


def _choose_pair(prompt: Prompt, answers: Sequence[Answer], scores: Sequence[float]) -> Drawn:
    """Choose the best and the worst of a prompt's answers.

    Among equal scores these are the first best and the last worst, so that a tie has two answers too.
    """
    scored = [answer._replace(score=score) for answer, score in zip(answers, scores, strict=True)]
    first_best, last_worst = int(np.argmax(scores)), len(scores) - 1 - int(np.argmin(scores[::-1]))
    return Drawn(prompt.text, scored, first_best, last_worst)


def _metrics(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Metrics of the drawn answers.

    Means over all answers, over the best and over the worst, and the share of prompts with a tie.
    """
    answers = [answer for choice in drawn for answer in choice.answers]
    best, worst = zip(*(choice.pair for choice in drawn), strict=True)
    return {
        "online/score": fmean(answer.score for answer in answers),
        "online/score_best": fmean(answer.score for answer in best),
        "online/score_worst": fmean(answer.score for answer in worst),
        "online/length": fmean(len(answer.tokens) for answer in answers),
        "online/eos": fmean(answer.ended for answer in answers),
        "online/ties": fmean(choice.is_tie for choice in drawn),
    }
