"""Answers drawn by all processes of a run together, online pairs of them (arXiv 2402.04792), and stops of all.

Each answer of a run has a number, which seeds its random generator together with the run's seed. So an answer depends,
up to rounding, only on the weights and these two, and checkpoints need no state of the sampling.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from dpo.data.examples import Example, encode_examples, iterate_once, list_examples, text_digest
from dpo.data.preflight import TrainingData
from dpo.data.schema import Prompt
from dpo.errors import InputError, RunError, SamplingFailed, one_sentence
from dpo.losses import TRAINS_ON
from dpo.models.answers import Answer, OnlinePair, Sampling, TokenIds, choose_sampling, generate
from dpo.models.scoring import ScorerFailed, load_scorer, seeded_generators
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.system.signals import Stopped
from dpo.system.waiting import all_arrive, gather_all, meet_rank_0
from dpo.training.batches import Batch, Batches
from dpo.training.objective import Objective

TOKENS_BETWEEN_CHECKS = 8  # with several processes, as each check for a stop is a collective that waits for the device
PATIENCE_SECS = 10  # how long a process that cannot sample waits for the others to fail too: more than a token takes
# These are mixed into the seeds of random generators, so that the generators of an update draw different numbers.
OFFLINE_STREAM = 1
SCORING_STREAM = 2
HELD_OUT_STREAM = 3
LABEL_STREAM = 4
FIRST_HELD_OUT = 2**62  # the number of the first answer to a held-out prompt; training does not count that far
# One of these is added to the number of an answer to a held-out prompt, and is in the seed of its score. If the
# reference had the policy's numbers, the win rate would compare correlated answers.
POLICY_STREAM = 0
REFERENCE_STREAM = 1


@dataclass
class StopRequest:
    """The signals that this process has received, and whether the processes have agreed to stop."""

    mesh: Mesh
    signals: list[int] = field(default_factory=list)  # signal numbers, in the order received
    is_agreed: bool = False  # whether every process knows that one has received a signal; set by `train_step`

    def raise_if_agreed(self) -> None:
        """Raise Stopped if all processes have agreed; one that runs alone needs no agreement."""
        if self.is_agreed or (self.mesh.world_size == 1 and self.signals):
            raise Stopped(*self.signals[:1])  # a process without a signal of its own raises Stopped with its default

    def raise_if_any(self) -> None:
        """Raise Stopped on every process if any has received a signal; with several processes, a collective."""
        if self.mesh.any(bool(self.signals)):
            raise Stopped(*self.signals[:1])

    def raise_before_token(self, index: int) -> None:
        """Call `raise_if_any` before the token at `index` of an answer; with several processes, only before some."""
        if self.mesh.world_size == 1 or index % TOKENS_BETWEEN_CHECKS == 0:
            self.raise_if_any()


def gather_results(result: Any, failure: str | None, error_class: type[Exception]) -> list:
    """Return the results of all processes, by rank; if any has a `failure`, a message, all raise `error_class` with it.

    Every process must call it.
    """
    results = []
    for rank_result, rank_failure in gather_all((result, failure)):
        if rank_failure:
            raise error_class(rank_failure)
        results.append(rank_result)
    return results


@dataclass
class Sampler:
    """Draws answers; methods raise Stopped within a few tokens if any process was asked to stop."""

    tokenizer: Any
    objective: Objective
    progress: Progress
    stop: StopRequest
    rows: int  # prompts that a process answers at a time

    def answer(
        self, model: Any, prompts: Sequence[TokenIds], numbers: Sequence[int], sampling: Sampling
    ) -> list[Answer]:
        """Answer prompts, given as token ids; every process must call this at the same time, with prompts of its own.

        `numbers` has each answer's number in the run, which seeds its random generator together with `sampling.seed`.
        """
        token_indices = itertools.count()

        def before_token(*_: Any) -> None:
            """Stop if that was asked for, and show progress; each forward pass makes one token of every answer."""
            index = next(token_indices)
            self.stop.raise_before_token(index)
            self.progress.show_token(index, sampling.max_new_tokens)

        # A forward pass may gather shards from all processes, so all must run equally many.
        synced = self.objective.mesh.world_size > 1
        hook: Any = before_token
        autocasting = self.objective.autocasting()
        if sampling.cache_implementation:
            # A static cache has one dtype for keys and values, which would differ under autocast. On a GPU,
            # transformers compiles the model with its hooks, and this one would be compiled again for every token.
            autocasting = nullcontext()
            hook = torch.compiler.disable(before_token)
        # The hook is prepended, so that it is called before FSDP's hook gathers weights.
        with model.register_forward_pre_hook(hook, prepend=True), autocasting:
            return generate(model, self.tokenizer, prompts, numbers, sampling, synced=synced)

    def draw(
        self,
        model: Any,
        examples: Sequence[Example],
        numbers: Sequence[int],
        sampling: Sampling,
        *,
        n_each: int = 1,
        may_fail: bool = False,
    ) -> list[Answer]:
        """Answer the prompts of examples, which are divided among the processes; all return all answers, in order.

        `examples` has each prompt `n_each` times. If sampling `may_fail`, any error becomes SamplingFailed on every
        process, or RunError on this one if the others do not fail too.
        """
        mesh = self.objective.mesh
        by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt))
        own = by_length[mesh.data_rank :: mesh.data_size]  # indices of the examples that this process answers
        if len(own) < math.ceil(len(examples) / mesh.data_size):
            own.append(by_length[-1])  # answered by another process too: all must run equally many forward passes
        drawn = {}
        failure = None
        try:
            with gathered_weights(model):  # once for all tokens, where memory allows
                parts = group(own, self.rows * n_each)
                for part in self.progress.track(parts, total=len(parts), what="sample"):
                    prompts = [examples[i].prompt for i in part]
                    answers = self.answer(model, prompts, [numbers[i] for i in part], sampling)
                    drawn |= zip(part, answers, strict=True)
        except Exception as error:  # `generate`, and a model's own code, may raise anything
            if not may_fail:
                raise
            release_gathered(model)  # the error may have interrupted a forward pass, and left weights gathered
            failure = f"{type(error).__name__} {one_sentence(error)}"
        # A process without a failure waits in `gather_results`.
        if may_fail and not all_arrive("the end of sampling", patience_secs=PATIENCE_SECS if failure else 0):
            raise RunError(
                f"this process alone could not draw samples: {failure}; resume=auto continues, and "
                f"sample_during_eval=false draws none"
            )
        for rank_answers in gather_results(drawn, failure, SamplingFailed):
            drawn |= rank_answers
        return [drawn[i] for i in range(len(examples))]


class OnlineBatches(Batches):
    """Batches of a run whose training pairs are the policy's answers, drawn when an update is due."""

    def __init__(self, plan: Plan, data: TrainingData, sampler: Sampler):
        self.sampler = sampler
        self.objective = objective = sampler.objective
        self.mesh = objective.mesh
        super().__init__(plan, data, objective.layout, rank=self.mesh.data_rank)
        self.online = plan.online
        self.scorer = load_scorer(plan, objective.device, rows=sampler.rows)
        self.states = {"online": self}
        self.counts = [1] * len(data.train)  # an epoch visits each prompt once
        # The ids come in batches of one.
        ids = iterate_once([1] * len(data.test), batch_size=1, n_examples=plan.data.n_eval_examples, seed=self.seed)
        self.held_out = [data.test[index] for [(index, _)] in ids]
        self._encoded_held_out = [make_prompt_example(prompt, data, plan) for prompt in self.held_out]
        for prompt in (*pick_training_prompts(data), *self.held_out):
            self.scorer.check(prompt)
        for note in self.scorer.notes:
            sampler.progress.line(note)
        self.sampling = choose_sampling(
            objective.policy,
            data.tokenizer,
            {"temperature": plan.online.temperature, "top_p": plan.online.top_p, "top_k": 0},
            max_new_tokens=plan.online.max_new_tokens,
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

    def prepare(self, example_ids: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Return a batch's prompts; they are answered only when the update is due, as the policy changes until then."""
        return [self.data.train[index] for index, _ in example_ids]

    def make_batch(self, prompts: Sequence[Prompt], *, update: int) -> Batch:
        """Make the batch of an update that is due, with a pair for each prompt; `update` others came before it.

        For `n_offline` prompts it is a pair of the data, for others the best and worst of the policy's answers. Raises
        ScorerFailed on every process.
        """
        n_samples = self.online.n_samples
        # The keys of `examples`, `to_answer` and `drawn` are indices of prompts in the batch.
        examples = self._choose_offline(prompts, update)
        to_answer = {}
        repeated = []  # indices of prompts, once for each answer
        numbers = []
        for i, prompt in enumerate(prompts):
            if i not in examples:
                to_answer[i] = make_prompt_example(prompt, self.data, self.plan)
                repeated += [i] * n_samples
                # An answer's number counts the answers of all earlier prompts of the run, drawn or not.
                first = (update * self.plan.data.batch_size + i) * n_samples
                numbers += range(first, first + n_samples)

        start = time.perf_counter()
        policy = self.objective.policy.eval()
        answers = self.sampler.draw(policy, [to_answer[i] for i in repeated], numbers, self.sampling, n_each=n_samples)
        sampling_end = time.perf_counter()
        answers = self._score([prompts[i] for i in repeated], answers, seed=(self.seed, update, SCORING_STREAM))
        scoring_end = time.perf_counter()

        drawn = {}
        weights = [1.0] * len(prompts)
        for i, prompt_answers in zip(to_answer, group(answers, n_samples), strict=True):
            pair = choose_pair(prompts[i], prompt_answers)
            if self.online.labels == "bradley_terry":
                pair = draw_label(pair, (self.seed, update, LABEL_STREAM, prompts[i].index_in_split))
            drawn[i] = pair
            chosen, rejected = pair.pair
            examples[i] = to_answer[i]._replace(
                responses=(chosen.tokens, rejected.tokens),
                digest=text_digest(pair.prompt, {"chosen": chosen.text, "rejected": rejected.text}),
                response_is_truncated=not (chosen.ended and rejected.ended),
            )
            if pair.is_tie and self.online.ties == "skip":
                weights[i] = 0.0  # it stays in the batch, so that all processes run equally many forward passes
        in_order = [examples[i] for i in range(len(prompts))]
        # The reference's log-probabilities are not cached: the same pairs hardly come again.
        return self.lay_out(in_order, self.plan.n_microbatches)._replace(
            weights=weights,
            drawn=drawn,
            metrics=_compute_metrics(list(drawn.values()), may_flip=self.online.labels != "hard"),
            seconds={"sampling": sampling_end - start, "scoring": scoring_end - sampling_end},
        )

    def _choose_offline(self, prompts: Sequence[Prompt], update: int) -> dict[int, Example]:
        """Choose `n_offline` prompts at random, and a pair of the data for each; return pairs by index in `prompts`."""
        rng = np.random.default_rng([self.seed, update, OFFLINE_STREAM])
        texts = {}
        for index in sorted(rng.choice(len(prompts), self.plan.n_offline, replace=False).tolist()):
            pairs = list_examples(prompts[index])
            texts[index] = pairs[rng.integers(len(pairs))]
        return dict(zip(texts, self.encode(list(texts.values())), strict=True))

    def evaluate(self) -> dict[str, float]:
        """Return metrics `online_eval/...` of answers to held-out prompts, and their standard errors (docs/metrics.md).

        The answers are drawn and scored with the same random numbers at every evaluation. Raises ScorerFailed on every
        process.
        """
        reference = self.objective.reference
        answers = self._answer_held_out(self.objective.policy, POLICY_STREAM)
        columns = _measure(answers)
        if reference:
            # A frozen reference is asked once: it would give the same answers again.
            if not self._reference_answers or self.objective.follow_every:
                with reference.in_use():
                    self._reference_answers = self._answer_held_out(reference.model, REFERENCE_STREAM)
            reference_columns = _measure(self._reference_answers)
            difference = np.subtract(columns["score"], reference_columns["score"])
            columns["win_rate"] = (np.sign(difference) + 1) / 2
            examples = [
                encoded._replace(responses=(answer.tokens,), roles=("chosen",))
                for encoded, answer in zip(self._encoded_held_out, answers, strict=True)
            ]
            parts = group(examples, self.plan.data.eval_batch_size)
            logps = self.objective.score_all(self.lay_out(part, self.plan.n_eval_microbatches) for part in parts)
            self.objective.release()
            columns["kl"] = (logps["chosen"] - logps["reference_chosen"]).tolist()
            columns |= {f"reference_{name}": values for name, values in reference_columns.items()}
        metrics = {}
        with np.errstate(invalid="ignore"):  # values of a policy that has diverged may be NaN or infinite
            for name, values in columns.items():
                metrics[f"online_eval/{name}"] = float(np.mean(values))
                if len(values) > 1:
                    metrics[f"online_eval/{name}_se"] = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return metrics

    def held_out_examples(self) -> list[list[Example]]:
        placeholders = [add_placeholders(encoded, n_tokens=2) for encoded in self._encoded_held_out]
        return group(placeholders, self.plan.data.eval_batch_size)

    def _answer_held_out(self, model: Any, stream: int) -> list[Answer]:
        """Draw and score an answer to each held-out prompt.

        `stream`, POLICY_STREAM or REFERENCE_STREAM, says which model this is, as the two draw different random numbers.
        """
        # An answer's number seeds its sampling. Counted from FIRST_HELD_OUT, which is beyond all numbers of training,
        # prompt i has number 2i for the policy and 2i + 1 for the reference. The seeds do not depend on the update, so
        # all evaluations draw the same random numbers.
        numbers = [FIRST_HELD_OUT + 2 * prompt.index_in_split + stream for prompt in self.held_out]
        answers = self.sampler.draw(model.eval(), self._encoded_held_out, numbers, self.sampling)
        release_gathered(model)
        return self._score(self.held_out, answers, seed=(self.seed, stream, HELD_OUT_STREAM))

    def _score(self, prompts: Sequence[Prompt], answers: Sequence[Answer], *, seed: Sequence[int]) -> list[Answer]:
        """Return the answers with scores, on every process; an answer that did not end loses `missing_eos_penalty`.

        `prompts` has the prompt of each answer. `seed` is that of the random numbers that a scorer may draw. Raises
        ScorerFailed on every process.
        """
        own: Any = np.arange(len(answers))  # indices of the answers that this process scores
        if self.scorer.in_parallel:  # a reward model is on every process, a user's function on rank 0 alone
            own = np.array_split(own, self.mesh.world_size)[self.mesh.rank]
        elif self.mesh.rank != 0:
            own = own[:0]
        scores = []
        failure = None
        if len(own):
            try:
                with seeded_generators(*seed):  # so that a resumed run draws the same numbers
                    scores = self.scorer([prompts[i] for i in own], [answers[i] for i in own])
            except ScorerFailed as error:
                failure = str(error)
        if not self.scorer.in_parallel:
            meet_rank_0("the scores of a user's function")  # which may take longer than a collective waits
        by_rank = gather_results(scores, failure, ScorerFailed)
        scored = []
        for answer, score in zip(answers, itertools.chain(*by_rank), strict=True):
            if not answer.ended:
                score -= self.online.missing_eos_penalty
            scored.append(answer._replace(score=score))
        return scored


def pick_training_prompts(data: TrainingData) -> list[Prompt]:
    """Return 400 to 800 evenly spaced training prompts for checks and estimates, or all if there are fewer."""
    return data.train[:: max(1, len(data.train) // 400)]


def add_placeholders(encoded_prompt: Example, n_tokens: int) -> Example:
    """Add a pair of answers of `n_tokens` to a prompt's example, in place of answers that are not drawn yet.

    The two answers differ, as a layout packs equal answers only once.
    """
    return encoded_prompt._replace(responses=((0,) * n_tokens, (1,) * n_tokens), roles=TRAINS_ON["pairs"])


def make_prompt_example(prompt: Prompt, data: TrainingData, plan: Plan) -> Example:
    """Return a pair's example without responses, whose prompt is truncated so that `max_new_tokens` fit after it."""
    [example] = encode_examples(
        [(prompt._replace(examples=[]), 0)],  # without the data's responses
        data.encode,
        max_length=plan.data.max_length - plan.online.max_new_tokens,
        max_prompt_length=plan.data.max_prompt_length,
    )
    return example._replace(roles=TRAINS_ON["pairs"])


def choose_pair(prompt: Prompt, answers: Sequence[Answer]) -> OnlinePair:
    """Choose the best of a prompt's scored answers, and the worst of those whose tokens differ from the best one's.

    If all answers have the same tokens, it is the worst of the others.
    """
    # Among equal scores the first is the best and the last is the worst, so that even a tie has two answers.
    scores = [answer.score for answer in answers]
    best = scores.index(max(scores))
    others = [i for i in range(len(answers)) if i != best]
    different = [i for i in others if answers[i].tokens != answers[best].tokens]
    worst = min(reversed(different or others), key=scores.__getitem__)
    return OnlinePair(prompt.text, answers, best, worst)


def draw_label(drawn: OnlinePair, seed: Sequence[int]) -> OnlinePair:
    """Draw which answer of a pair is the chosen one: the best, with the probability of the Bradley-Terry model."""
    best, worst = drawn.pair
    probability_of_best = 1 / (1 + math.exp(worst.score - best.score))
    return drawn._replace(is_flipped=bool(np.random.default_rng(seed).random() >= probability_of_best))


def _measure(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return columns with a value for each answer, by the last part of a metric's name."""
    return {
        "score": [answer.score for answer in answers],
        "length": [len(answer.tokens) for answer in answers],
        "eos": [answer.ended for answer in answers],
    }


def _compute_metrics(drawn: Sequence[OnlinePair], *, may_flip: bool) -> dict[str, float]:
    """Return the means `online/...` over an update's pairs and their answers; `may_flip`: labels are drawn."""
    columns = _measure([answer for pair in drawn for answer in pair.answers])
    columns["score_best"] = [pair.answers[pair.best].score for pair in drawn]
    columns["score_worst"] = [pair.answers[pair.worst].score for pair in drawn]
    columns["ties"] = [pair.is_tie for pair in drawn]
    if may_flip:
        columns["flipped"] = [pair.is_flipped for pair in drawn]
    return {f"online/{name}": fmean(values) for name, values in columns.items()}


def group(items: Sequence, size: int) -> list[list]:
    """Return lists of `size` items each, the last maybe of fewer."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
