"""Answers drawn by all processes of a run together, and online pairs of them (arXiv 2402.04792).

Up to rounding, an answer depends only on the weights, the seed and its number in the run, so checkpoints need no state
of the sampling.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from dpo.data.examples import Example, encode_examples, iterate_once, list_examples, text_digest
from dpo.data.preflight import TrainingData
from dpo.data.table import Prompt
from dpo.errors import InputError, RunError, SamplingFailed, one_sentence
from dpo.losses import TRAINS_ON
from dpo.models.answers import Answer, Drawn, Sampling, Tokens, answer, choose_sampling, write_turns
from dpo.models.scoring import ScorerFailed, load_scorer, seeded_generators
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.system.waiting import all_arrive
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Objective
from dpo.training.stop import StopRequest

PATIENCE_SECS = 10  # of a process that cannot sample, for the others to fail too: more than a token takes
# mixed into the seed of a random generator, so that the generators of an update draw different numbers
OFFLINE_STREAM, SCORING_STREAM, HELD_OUT_STREAM, LABEL_STREAM = 1, 2, 3, 4
FIRST_HELD_OUT = 2**62  # the number of the first answer to a held-out prompt; training does not count that far
POLICY, REFERENCE = 0, 1  # part of the number of an answer to a held-out prompt, and of the seed of its score


@dataclass
class Drawing:
    """Draws answers; methods raise Stopped within a few tokens if any process was asked to stop."""

    tokenizer: Any
    objective: Objective
    progress: Progress
    stop: StopRequest

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
                in_step = self.objective.mesh.world_size > 1
                return answer(model, self.tokenizer, prompts, numbers, sampling, in_step=in_step)
        finally:
            hook.remove()

    def draw(
        self,
        model: Any,
        examples: Sequence[Example],
        numbers: Sequence[int],
        sampling: Sampling,
        *,
        rows: int,
        may_fail: bool = False,
    ) -> list[Answer]:
        """Answer examples' prompts on all processes together, `rows` at a time; every process gets all answers.

        If it `may_fail`, any error becomes SamplingFailed on every process, or RunError if the others go on.
        """
        mesh = self.objective.mesh
        by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt))
        own = by_length[mesh.data_rank :: mesh.data_size]
        # all processes take part in every forward, so a process with one prompt less repeats the longest
        repeated = by_length[-1:] * (math.ceil(len(examples) / mesh.data_size) - len(own))
        outcome = {}
        try:
            with gathered_weights(model):  # once for all tokens, where memory allows
                parts = group(own + repeated, rows)
                for part in self.progress.over(parts, total=len(parts), what="sample"):
                    some, their_numbers = [examples[i].prompt for i in part], [numbers[i] for i in part]
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
        answers = {}
        for found in mesh.gather_all(outcome):
            if isinstance(found, str):  # errors are exchanged like answers, so that all processes raise together
                raise SamplingFailed(found)
            answers |= found
        return [answers[i] for i in range(len(examples))]


class OnlineBatches(Batches):
    """Batches of a run whose training pairs are drawn from the policy (`Drawing`)."""

    def __init__(self, plan: Plan, data: TrainingData, objective: Objective, stop: StopRequest, progress: Progress):
        mesh = objective.mesh
        super().__init__(plan, data, objective.layout, rank=mesh.data_rank, size=mesh.data_size)
        self.objective, self.mesh = objective, mesh
        self.scorer = load_scorer(plan, objective.device, rows=plan.prompts_at_a_time)
        once = iterate_once([1] * len(data.test), batch_size=1, n_examples=plan.data.n_eval_examples, seed=self.seed)
        self.held_out = [data.test[index] for [(index, _)] in once]
        self._encoded = [encode_prompt(prompt, data, plan) for prompt in self.held_out]
        for prompt in (*some_prompts(data), *self.held_out):
            self.scorer.check(prompt)
        for note in self.scorer.notes:
            progress.line(note)
        self.states = {"online": self}
        self.online = online = plan.online
        self.drawing = Drawing(data.tokenizer, objective, progress, stop)
        self.sampling = choose_sampling(
            objective.policy,
            data.tokenizer,
            {"temperature": online.temperature, "top_p": online.top_p, "top_k": 0},
            max_new_tokens=online.max_new_tokens,
            seed=(self.seed,),
            cache_implementation=plan.model.cache_implementation,
        )
        self._reference_answers = []  # to the held-out prompts, once they are drawn

    def state_dict(self) -> dict[str, str]:
        return {"scorer": self.scorer.digest}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        if state["scorer"] != self.scorer.digest:
            raise InputError(
                f"{self.scorer.name} has changed since the checkpoint: restore the scorer, or start a new run"
            )

    def train(self, *, skip: int = 0) -> Iterator[list[Prompt]]:
        """The prompts of each batch after the first `skip`; an epoch visits each prompt once."""

        def prepare(example_ids: Sequence[tuple[int, int]]) -> list[Prompt]:
            return [self.data.train[index] for index, _ in example_ids]

        return self._iterate_train(prepare, [1] * len(self.data.train), skip=skip)

    def make_batch(self, prompts: Sequence[Prompt], *, update: int) -> Batch:
        """Make the pairs of an update: `n_offline` from the data, others the best and worst of the policy's answers.

        Raises ScorerFailed on every process.
        """
        n_samples = self.online.n_samples
        # pairs, examples and answers are keyed by the prompt's index in the batch
        rng, offline = np.random.default_rng([self.seed, update, OFFLINE_STREAM]), {}
        for index in sorted(rng.choice(len(prompts), self.plan.n_offline, replace=False).tolist()):
            pairs = list_examples(prompts[index])
            offline[index] = pairs[rng.integers(len(pairs))]
        asked = {i: encode_prompt(prompt, self.data, self.plan) for i, prompt in enumerate(prompts) if i not in offline}
        repeated = [i for i in asked for _ in range(n_samples)]  # once for each answer
        first = update * self.plan.data.batch_size * n_samples
        numbers = [first + i * n_samples + k for i in asked for k in range(n_samples)]
        rows = self.plan.prompts_at_a_time * n_samples

        started = time.perf_counter()
        policy = self.objective.policy.eval()
        answers = self.drawing.draw(policy, [asked[i] for i in repeated], numbers, self.sampling, rows=rows)
        sampled = time.perf_counter()
        answers = self._score([prompts[i] for i in repeated], answers, seed=(self.seed, update, SCORING_STREAM))
        scored = time.perf_counter()

        examples, drawn = dict(zip(offline, self.encode(list(offline.values())), strict=True)), {}
        for i, answers_to_one in zip(asked, group(answers, n_samples), strict=True):
            pair = choose_pair(prompts[i], answers_to_one)
            if self.online.labels == "bradley_terry":
                pair = draw_label(pair, (self.seed, update, LABEL_STREAM, prompts[i].index_in_split))
            drawn[i] = pair = pair._replace(turns=write_turns(prompts[i], pair.prompt, self.data.tokenizer))
            examples[i] = asked[i]._replace(
                responses=tuple(answer.tokens for answer in pair.pair),
                digest=text_digest(pair.prompt, dict(zip(asked[i].roles, (a.text for a in pair.pair), strict=True))),
                response_is_cut=not all(answer.ended for answer in pair.pair),
            )
        # a tie stays in the batch, so that every process has as many forwards as without ties
        ties = set() if self.online.ties == "keep" else {i for i, pair in drawn.items() if pair.is_tie}
        in_order = [examples[i] for i in range(len(prompts))]
        return Batch(
            in_order,
            [float(i not in ties) for i in range(len(prompts))],
            self.split(in_order, self.plan.data.gradient_accumulation_steps),
            cache_rows=(),  # the reference's log-probabilities are not cached: the same pairs hardly come again
            drawn=drawn,
            metrics=_compute_metrics(list(drawn.values()), may_flip=self.online.labels != "hard"),
            seconds={"sampling": sampled - started, "scoring": scored - sampled},
        )

    def evaluate(self) -> dict[str, float]:
        """Metrics of answers to held-out prompts (docs/metrics.md), with the same random numbers at every evaluation.

        Raises ScorerFailed on every process.
        """
        objective, reference = self.objective, self.objective.reference
        answers = self._answer_held_out(objective.policy, POLICY)
        columns = _list_measures(answers)
        if reference is not None:
            # a frozen reference is asked once: it would give the same answers again
            if not self._reference_answers or objective.follow_every:
                with reference.in_use():
                    self._reference_answers = self._answer_held_out(reference.model, REFERENCE)
            of_reference = _list_measures(self._reference_answers)
            scores = zip(columns["score"], of_reference["score"], strict=True)
            columns["win_rate"] = [0.5 if ours == theirs else float(ours > theirs) for ours, theirs in scores]
            columns["kl"] = self._find_log_ratios(answers)
            columns |= {f"reference_{name}": values for name, values in of_reference.items()}
        metrics = {}
        with np.errstate(invalid="ignore"):  # values of a policy that has diverged may be NaN or infinite
            for name, values in columns.items():
                metrics[f"online_eval/{name}"] = float(np.mean(values))
                if len(values) > 1:
                    metrics[f"online_eval/{name}_se"] = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return metrics

    def held_out_examples(self) -> list[list[Example]]:
        placeholders = [add_placeholders(encoded, n_tokens=2) for encoded in self._encoded]
        return group(placeholders, self.plan.data.eval_batch_size)

    def _answer_held_out(self, model: Any, who: int) -> list[Answer]:
        """Draw and score an answer of POLICY or REFERENCE to each held-out prompt."""
        # other numbers for the reference: with the policy's numbers, the win rate would compare correlated answers
        numbers = [FIRST_HELD_OUT + 2 * prompt.index_in_split + who for prompt in self.held_out]
        rows = self.plan.prompts_at_a_time
        answers = self.drawing.draw(model.eval(), self._encoded, numbers, self.sampling, rows=rows)
        release_gathered(model)
        return self._score(self.held_out, answers, seed=(self.seed, who, HELD_OUT_STREAM))

    def _find_log_ratios(self, answers: Sequence[Answer]) -> list[float]:
        examples = [
            encoded._replace(responses=(answer.tokens,), roles=("chosen",))
            for encoded, answer in zip(self._encoded, answers, strict=True)
        ]
        columns = self.objective.score_all(
            Batch(some, [1.0] * len(some), self.split(some, 1), cache_rows=())
            for some in group(examples, self.plan.data.eval_batch_size)
        )
        self.objective.release()
        return (columns["chosen"] - columns["reference_chosen"]).tolist()

    def _score(self, prompts: Sequence[Prompt], answers: Sequence[Answer], *, seed: Sequence[int]) -> list[Answer]:
        # a reward model is on every process, a user's function on rank 0 alone
        parts = np.array_split(np.arange(len(answers)), self.mesh.world_size if self.scorer.in_parallel else 1)
        own = parts[self.mesh.rank] if self.mesh.rank < len(parts) else ()
        outcome = []
        try:
            if len(own):
                with seeded_generators(*seed):  # so that a resumed run draws the same numbers
                    outcome = self.scorer([prompts[i] for i in own], [answers[i] for i in own])
        except ScorerFailed as error:
            outcome = str(error)
        scores = []
        for found in self.mesh.gather_all(outcome):
            if isinstance(found, str):  # errors are exchanged like scores, so that all processes raise together
                raise ScorerFailed(found)
            scores += found
        penalty = self.online.missing_eos_penalty
        return [
            answer._replace(score=score if answer.ended else score - penalty)
            for answer, score in zip(answers, scores, strict=True)
        ]


def some_prompts(data: TrainingData) -> list[Prompt]:
    """About 400 evenly spaced training prompts, or all if fewer."""
    return data.train[:: max(1, len(data.train) // 400)]


def add_placeholders(encoded_prompt: Example, n_tokens: int) -> Example:
    """Add two answers of `n_tokens` to a prompt's example; they differ, as equal answers are packed once."""
    return encoded_prompt._replace(responses=((0,) * n_tokens, (1,) * n_tokens), roles=TRAINS_ON["pairs"])


def encode_prompt(prompt: Prompt, data: TrainingData, plan: Plan) -> Example:
    """An example without responses, truncated so that `max_new_tokens` fit into `max_length`."""
    [example] = encode_examples(
        [(prompt._replace(examples=[]), 0)],
        data.encode,
        max_length=plan.data.max_length - plan.online.max_new_tokens,
        max_prompt_length=plan.data.max_prompt_length,
    )
    return example._replace(roles=TRAINS_ON["pairs"])


def choose_pair(prompt: Prompt, answers: Sequence[Answer]) -> Drawn:
    """Choose the best of a prompt's scored answers, and the worst of those that differ from it, if any do."""
    # of equal scores the first is the best and the last is the worst, so that even a tie has two answers
    best = max(range(len(answers)), key=lambda i: answers[i].score)
    others = [i for i in range(len(answers)) if i != best]
    different = [i for i in others if answers[i].tokens != answers[best].tokens]
    worst = min(reversed(different or others), key=lambda i: answers[i].score)
    return Drawn(prompt.text, answers, best, worst)


def draw_label(drawn: Drawn, seed: Sequence[int]) -> Drawn:
    """Draw which answer of a pair is chosen, by the Bradley-Terry model."""
    best, worst = drawn.answers[drawn.best], drawn.answers[drawn.worst]
    probability_of_best = 1 / (1 + math.exp(worst.score - best.score))
    return drawn._replace(is_flipped=bool(np.random.default_rng(seed).random() >= probability_of_best))


def _list_measures(answers: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        "score": [answer.score for answer in answers],
        "length": [float(len(answer.tokens)) for answer in answers],
        "eos": [float(answer.ended) for answer in answers],
    }


def _compute_metrics(drawn: Sequence[Drawn], *, may_flip: bool) -> dict[str, float]:
    answers = [answer for one in drawn for answer in one.answers]
    metrics = {
        **{name: fmean(values) for name, values in _list_measures(answers).items()},
        "score_best": fmean(one.answers[one.best].score for one in drawn),
        "score_worst": fmean(one.answers[one.worst].score for one in drawn),
        "ties": fmean(one.is_tie for one in drawn),
        **({"flipped": fmean(one.is_flipped for one in drawn)} if may_flip else {}),
    }
    return {f"online/{name}": value for name, value in metrics.items()}


def group(items: Sequence, size: int) -> list[list]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
