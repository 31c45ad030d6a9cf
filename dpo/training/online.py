"""Online pairs: the best and the worst answer to a prompt.

The policy writes the answers, and a scorer ranks them (online DPO, arXiv 2402.04792). At each evaluation the policy
also answers held-out prompts. Up to rounding, an answer depends only on the weights, the config's seed, and the number
of the answer in the run; other prompts and the number of processes do not change it. So checkpoints need no state of
the sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from dpo.data.examples import Example, TextExample, iterate_once, list_examples, text_digest, tokenize
from dpo.data.preflight import TrainingData
from dpo.data.table import Prompt
from dpo.data.tokenization import unescape
from dpo.data.truncation import truncate_example
from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.models.answers import Answer, Drawn, Sampling, Tokens, answer
from dpo.models.generation import before_each_forward, write_turns
from dpo.models.scoring import Scorer, ScorerFailed, load_scorer, seeded_generators
from dpo.parallel.mesh import from_rank_0
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Objective
from dpo.training.stop import StopRequest

AnsweredPrompt = tuple[Prompt, list[Answer]]
Item = TypeVar("Item")
N_CHECKED_PROMPTS = 400  # training prompts that the scorer checks at the start
# mixed into the seed of a random generator, so that the generators of an update draw different numbers
OFFLINE_STREAM, SCORING_STREAM, HELD_OUT_STREAM, LABEL_STREAM = 1, 2, 3, 4
FIRST_HELD_OUT = 2**62  # the number of the first answer to a held-out prompt; training does not count that far
POLICY, REFERENCE = 0, 1  # part of the number of an answer to a held-out prompt, and of the seed of its score


class ScorerState:
    """The part of a checkpoint that identifies the scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def state_dict(self) -> dict[str, str]:
        return {"scorer": self.scorer.digest}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Check the scorer. Raises InputError if it has changed."""
        if state["scorer"] != self.scorer.digest:
            raise InputError(
                f"{self.scorer.name} has changed since the checkpoint: restore the scorer, or start a new run"
            )


class OnlineBatches(Batches):
    """Batches of a run whose training pairs are drawn from the policy.

    `train` yields the prompts of each batch. If any process was asked to stop, `make_batch` and `evaluate` raise
    Stopped within a few tokens.
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
        self.held_out = {prompt.index_in_split: prompt for prompt in list_held_out(plan, data)}
        self._encoded = {index: encode_prompt(prompt, data, plan) for index, prompt in self.held_out.items()}
        for prompt in (*some_prompts(data), *self.held_out.values()):
            self.scorer.check(prompt)
        for note in self.scorer.notes:
            progress.line(note)
        self.states = {"online": ScorerState(self.scorer)}
        self.online = online = plan.online
        self.sampling = Sampling(
            online.max_new_tokens, online.temperature, online.top_p, seed, plan.model.cache_implementation
        )
        self._reference_answers: list[Answer] = []  # to the held-out prompts, once they are drawn

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
        # examples and answers are keyed by the prompt's index in the batch
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
        answered = [(prompts[index], answers[index]) for index in encoded_prompts]
        scored = self._score(answered, seed=(self.seed, update, SCORING_STREAM))
        drawn, weights = {}, [1.0] * len(prompts)
        for (index, encoded_prompt), prompt_answers in zip(encoded_prompts.items(), scored, strict=True):
            pair = choose_pair(prompts[index], prompt_answers)
            drawn[index] = pair._replace(turns=write_turns(prompts[index], pair.prompt, self.data.tokenizer))
            if self.online.labels == "bradley_terry":
                seed = (self.seed, update, LABEL_STREAM, prompts[index].index_in_split)
                drawn[index] = draw_label(drawn[index], seed)
            if drawn[index].is_tie and self.online.ties != "keep":
                # a tie stays in the batch, so that every process has as many forwards as without ties
                weights[index] = 0.0
            examples[index] = _add_pair(encoded_prompt, drawn[index])
        in_order = [examples[index] for index in range(len(prompts))]
        microbatches = self.split(in_order, self.plan.data.gradient_accumulation_steps)
        return Batch(
            in_order,
            weights,
            microbatches,
            cache_rows=(),  # the reference's log-probabilities are not cached: the same pairs hardly come again
            drawn=drawn,
            metrics=_compute_metrics(list(drawn.values()), may_flip=self.online.labels != "hard"),
            seconds={"sampling": scoring_start - sampling_start, "scoring": time.perf_counter() - scoring_start},
        )

    def evaluate(self) -> dict[str, float]:
        """Evaluate the policy's answers to held-out prompts (docs/metrics.md).

        Policy and reference give one answer to each prompt. Random numbers depend only on the seed, the prompt, and the
        model, so every evaluation draws the same numbers. Raises ScorerFailed on every process.
        """
        objective, reference = self.objective, self.objective.reference
        answers = self._answer_held_out(objective.policy, POLICY)
        columns = _list_measures(answers)
        if reference is None:
            return _average(columns)
        # a frozen reference is asked once: it would give the same answers again
        if not self._reference_answers or objective.follow_every:
            with reference.in_use():
                self._reference_answers = self._answer_held_out(reference.model, REFERENCE)
        reference_columns = _list_measures(self._reference_answers)
        scores = zip(columns["score"], reference_columns["score"], strict=True)
        columns["win_rate"] = [
            0.5 if policy_score == reference_score else float(policy_score > reference_score)
            for policy_score, reference_score in scores
        ]
        columns["kl"] = self._find_log_ratios(answers)
        columns |= {f"reference_{name}": values for name, values in reference_columns.items()}
        return _average(columns)

    def held_out_examples(self) -> list[list[Example]]:
        placeholders = [add_placeholders(encoded, n_tokens=2, n_answers=2) for encoded in self._encoded.values()]
        return _group(placeholders, self.plan.data.eval_batch_size)

    def _answer_held_out(self, model: Any, who: int) -> list[Answer]:
        """Sample and score an answer of a model to each held-out prompt.

        `who` is POLICY or REFERENCE.
        """
        # other numbers for the reference: with the policy's numbers, the win rate would compare correlated answers
        numbers = {index: FIRST_HELD_OUT + 2 * index + who for index in self.held_out}
        answers = self._sample(model, self._encoded, numbers, n_samples=1)
        release_gathered(model)
        answered = [(prompt, answers[index]) for index, prompt in self.held_out.items()]
        return [answer for [answer] in self._score(answered, seed=(self.seed, who, HELD_OUT_STREAM))]

    def _find_log_ratios(self, answers: Sequence[Answer]) -> list[float]:
        """Log-ratios of policy and reference on held-out answers."""
        examples = [
            encoded._replace(responses=(answer.tokens,), roles=("chosen",))
            for encoded, answer in zip(self._encoded.values(), answers, strict=True)
        ]
        groups = _group(examples, self.plan.data.eval_batch_size)
        batches = (Batch(group, [1.0] * len(group), self.split(group, 1), cache_rows=()) for group in groups)
        log_ratios = self.objective.find_log_ratios(self._stopping_between(batches))
        for model in (self.objective.policy, self.objective.reference.model):
            release_gathered(model)
        return log_ratios

    def _stopping_between(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.stop.raise_if_any()
            yield batch

    def _choose_offline_pairs(self, prompts: Sequence[Prompt], update: int) -> dict[int, TextExample]:
        """Choose `n_offline` random prompts, and a random pair of each.

        Returns the pairs by the prompt's index in the batch.
        """
        rng = np.random.default_rng([self.seed, update, OFFLINE_STREAM])
        chosen_pairs = {}
        for index in sorted(rng.choice(len(prompts), self.plan.n_offline, replace=False).tolist()):
            pairs = list_examples(prompts[index])
            chosen_pairs[index] = pairs[rng.integers(len(pairs))]
        return chosen_pairs

    def _answer(self, encoded_prompts: Mapping[int, Example], update: int) -> dict[int, list[Answer]]:
        """Sample `n_samples` answers of the policy per prompt.

        Prompts and answers are keyed by the prompt's index in the batch.
        """
        n_before, n_samples = update * self.plan.data.batch_size, self.online.n_samples
        numbers = {index: (n_before + index) * n_samples for index in encoded_prompts}
        return self._sample(self.objective.policy, encoded_prompts, numbers, n_samples=n_samples)

    def _sample(
        self, model: Any, encoded_prompts: Mapping[int, Example], numbers: Mapping[int, int], *, n_samples: int
    ) -> dict[int, list[Answer]]:
        """Sample a model's answers to prompts; every process gets all.

        `numbers` has the number of each prompt's first answer in the run. Prompts are sorted by length and dealt out in
        turn, so that all processes have about equally many prompts, of about equal lengths.
        """
        by_length = sorted(encoded_prompts, key=lambda index: len(encoded_prompts[index].prompt))
        own_indices = by_length[self.rank :: self.size]
        max_per_process = math.ceil(len(by_length) / self.size)
        # all processes take part in every forward, so a process with one prompt less repeats the longest
        repeated_indices = by_length[-1:] * (max_per_process - len(own_indices))
        batches = _group(own_indices + repeated_indices, self.plan.prompts_at_a_time)
        answers: list[tuple[int, list[Answer]]] = []  # (index of the prompt, its answers)
        model = model.eval()
        with gathered_weights(model):  # once for all tokens, where memory allows
            for indices in self.progress.over(batches, total=len(batches), what="sample"):
                prompts = [encoded_prompts[index].prompt for index in indices]
                first_numbers = [numbers[index] for index in indices]
                answers += zip(indices, self._answer_batch(model, prompts, first_numbers, n_samples), strict=True)
        return dict(self.mesh.gather_list(answers[: len(own_indices)]))  # without answers to the repeated prompt

    def _answer_batch(
        self, model: Any, prompts: Sequence[Tokens], first_numbers: Sequence[int], n_samples: int
    ) -> list[list[Answer]]:
        """Sample `n_samples` answers to each of these prompts.

        The number of an answer seeds its sampling, whichever process and batch it is in.
        """
        max_new_tokens, autocast = self.sampling.max_new_tokens, self.objective.autocast

        def before_token(token_index: int) -> None:
            self.stop.raise_before_token(token_index)
            self.progress.part(token_index, max_new_tokens, "token")

        with (
            before_each_forward(model, before_token),
            torch.autocast(self.objective.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            # in step, as each forward may gather shards from all processes
            answers = answer(
                model,
                self.data.tokenizer,
                [prompt for prompt in prompts for _ in range(n_samples)],
                [first + i for first in first_numbers for i in range(n_samples)],
                self.sampling,
                in_step=self.mesh.world_size > 1,
            )
        return _group(answers, n_samples)

    def _score(self, answered: Sequence[AnsweredPrompt], *, seed: Sequence[int]) -> list[list[Answer]]:
        """Score all answers; return them by prompt, on every process.

        `missing_eos_penalty` is subtracted from the score of an answer that was cut off.
        """
        if self.scorer.in_parallel:
            own_indices = np.array_split(np.arange(len(answered)), self.mesh.world_size)[self.mesh.rank]
            outcomes = self.mesh.gather_all(self._score_or_explain([answered[i] for i in own_indices], seed))
        else:  # rank 0 alone has loaded the user's function
            outcome = self._score_or_explain(answered, seed) if self.mesh.rank == 0 else None
            outcomes = [from_rank_0(outcome)]
        for outcome in outcomes:
            if isinstance(outcome, str):  # errors are exchanged like scores, so that all processes raise together
                raise ScorerFailed(outcome)
        scores = iter([score for outcome in outcomes for score in outcome])  # of all prompts' answers, in order

        def add_score(answer: Answer) -> Answer:
            penalty = 0.0 if answer.ended else self.online.missing_eos_penalty
            return answer._replace(score=next(scores) - penalty)

        return [[add_score(answer) for answer in answers] for _, answers in answered]

    def _score_or_explain(self, answered: Sequence[AnsweredPrompt], seed: Sequence[int]) -> list[float] | str:
        """Score answers; return the scorer's error message if it fails.

        Random generators are seeded, so that a resumed run draws the same numbers.
        """
        prompts = [prompt for prompt, answers in answered for _ in answers]  # one for each answer
        answers = [answer for _, answers in answered for answer in answers]
        try:
            with seeded_generators(*seed):
                return self.scorer(prompts, answers)
        except ScorerFailed as error:
            return str(error)


def _group(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split items into lists of `size`; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def some_prompts(data: TrainingData) -> list[Prompt]:
    """About N_CHECKED_PROMPTS evenly spaced training prompts, or all if fewer."""
    return data.train[:: max(1, len(data.train) // N_CHECKED_PROMPTS)]


def list_held_out(plan: Plan, data: TrainingData) -> list[Prompt]:
    """The first `n_eval_examples` test prompts, in the order of `seed`."""
    counts, n_prompts = [1] * len(data.test), plan.data.n_eval_examples
    batches = iterate_once(counts, batch_size=1, n_examples=n_prompts, seed=plan.run.seed)
    return [data.test[index] for [(index, _)] in batches]


def add_placeholders(encoded_prompt: Example, n_tokens: int, n_answers: int) -> Example:
    """Add answers of `n_tokens` to a prompt's example.

    The answers differ, as the shared-prefix layout would pack equal answers only once.
    """
    answers = tuple((token,) * n_tokens for token in range(n_answers))
    return encoded_prompt._replace(responses=answers, roles=TRAINS_ON["pairs"][:n_answers])


def encode_prompt(prompt: Prompt, data: TrainingData, plan: Plan) -> Example:
    """Tokenize a prompt to an example without responses.

    The prompt is truncated if it and `max_new_tokens` do not fit into `max_length`.
    """
    example = TextExample(prompt, 0, {}, [])
    [tokens] = tokenize([example], data.encode)
    limits = {"max_length": plan.data.max_length, "max_prompt_length": plan.data.max_prompt_length}
    fed, _, is_cut, _ = truncate_example(
        prompt, [], tokens, data.encode, new_tokens=plan.online.max_new_tokens, **limits
    )
    ids = (prompt.index_in_split, 0)
    return Example(tuple(fed), (), id=ids, dataset=prompt.dataset, truncated=is_cut, prompt_is_cut=is_cut)


def choose_pair(prompt: Prompt, answers: Sequence[Answer]) -> Drawn:
    """Choose the best and the worst of a prompt's scored answers.

    The worst is chosen among the answers that differ from the best, if there are any. Among equal scores the first is
    the best and the last is the worst, so that even a tie has two answers.
    """
    best = max(range(len(answers)), key=lambda i: answers[i].score)  # the first of equal scores
    others = [i for i in range(len(answers)) if i != best]
    different = [i for i in others if answers[i].tokens != answers[best].tokens]
    worst = min(reversed(different or others), key=lambda i: answers[i].score)  # the last of equal scores
    return Drawn(unescape(prompt.text), answers, best, worst)


def draw_label(drawn: Drawn, seed: Sequence[int]) -> Drawn:
    """Draw which answer of a pair is chosen, by the Bradley-Terry model."""
    best, worst = drawn.answers[drawn.best], drawn.answers[drawn.worst]
    probability_of_best = 1 / (1 + math.exp(worst.score - best.score))
    return drawn._replace(is_flipped=bool(np.random.default_rng(seed).random() >= probability_of_best))


def _add_pair(encoded_prompt: Example, drawn: Drawn) -> Example:
    """Add the pair drawn for a prompt to its example."""
    texts = {role: answer.text for role, answer in zip(encoded_prompt.roles, drawn.pair, strict=True)}
    return encoded_prompt._replace(
        responses=tuple(answer.tokens for answer in drawn.pair),
        digest=text_digest(drawn.prompt, texts),
        truncated=encoded_prompt.truncated or not all(answer.ended for answer in drawn.pair),
    )


def _list_measures(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """List measures of each answer, by name."""
    return {
        "score": [answer.score for answer in answers],
        "length": [float(len(answer.tokens)) for answer in answers],
        "eos": [float(answer.ended) for answer in answers],
    }


def _average(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Average values over prompts, with standard errors.

    A single prompt has no standard error.
    """
    metrics = {}
    with np.errstate(invalid="ignore"):  # values of a policy that has diverged may be NaN or infinite
        for name, values in columns.items():
            metrics[f"online_eval/{name}"] = float(np.mean(values))
            if len(values) > 1:
                metrics[f"online_eval/{name}_se"] = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return metrics


def _compute_metrics(drawn: Sequence[Drawn], *, may_flip: bool) -> dict[str, float]:
    """Metrics of the answers drawn for a batch's prompts (docs/metrics.md)."""
    answers = [answer for prompt_drawn in drawn for answer in prompt_drawn.answers]
    metrics = {
        "online/score": fmean(answer.score for answer in answers),
        "online/score_best": fmean(prompt_drawn.answers[prompt_drawn.best].score for prompt_drawn in drawn),
        "online/score_worst": fmean(prompt_drawn.answers[prompt_drawn.worst].score for prompt_drawn in drawn),
        "online/length": fmean(len(answer.tokens) for answer in answers),
        "online/eos": fmean(answer.ended for answer in answers),
        "online/ties": fmean(prompt_drawn.is_tie for prompt_drawn in drawn),
    }
    if may_flip:
        metrics["online/flipped"] = fmean(prompt_drawn.is_flipped for prompt_drawn in drawn)
    return metrics
