"""The runs of `experiments.hh`: a method trained on all folds but one.

Pairs are scored in float32 by the checkpoints of a run. Scores of forward passes in bfloat16, in which the runs train,
have errors of two thirds of the margins' standard deviation early in a run (docs/language.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.preference_scores import pair_logps
from dpo.data.examples import Example
from dpo.data.tokenizer import load_tokenizer
from dpo.data.truncation import truncate
from dpo.errors import InputError
from dpo.models.adapters import switch
from dpo.models.answers import Sampling
from dpo.models.side_by_side import Side
from experiments import language
from experiments.hh.pairs import Pair, split_folds
from experiments.runs import (
    Job,
    Row,
    import_all,
    iterate_rows,
    keep_settings,
    read_rows,
    select_jobs,
    write_records,
    write_rows,
)

ROLES = ("chosen", "rejected")
REFERENCE = "reference"  # method of the reference's rows
COURSE = 3  # parts of a run; the policy is evaluated after each
MAX_LENGTH, MAX_PROMPT = 1024, 512
N_FOLDS = 5
KL_SEED = 7


class Method(NamedTuple):
    """A kind of run: a loss with its beta."""

    label: str
    overrides: tuple[str, ...]
    examples_per_pair: int = 1


METHODS = {  # the most informative first
    "dpo-0.1": Method("DPO, beta 0.1", ("loss=dpo", "loss.beta=0.1")),
    "ipo-0.1": Method("IPO, beta 0.1", ("loss=ipo", "loss.beta=0.1")),
    "dpo-0.5": Method("DPO, beta 0.5", ("loss=dpo", "loss.beta=0.5")),
    "kto-0.1": Method("KTO, beta 0.1", ("loss=kto", "loss.beta=0.1", "unpair=true"), 2),
    "dpo-0.05": Method("DPO, beta 0.05", ("loss=dpo", "loss.beta=0.05")),
}


class Size(NamedTuple):
    """Size of the experiment."""

    folds: int  # number of the N_FOLDS folds that runs hold out
    pairs: int | None  # number of pairs used; None: all
    batch: int  # pairs of an update
    kl_prompts: int  # held-out prompts of a fold whose answers estimate KL
    kl_tokens: int  # of an answer


@dataclass(frozen=True)
class Sweep:
    """Runs from one model, with their directory and common overrides."""

    root: Path
    model: Path
    pairs: Sequence[Pair]
    size: Size
    overrides: Sequence[str]

    @cached_property
    def folds(self) -> np.ndarray:
        return split_folds([pair.first_turn for pair in self.pairs], N_FOLDS)

    def prepare(self) -> list[Row]:
        """Write the folds' datasets, and score their pairs with the reference.

        Returns a row for each fold that is held out: the numbers of its pairs, and log ref of each by role. Raises
        InputError if the directory has runs of other settings or pairs.
        """
        if len({*self.folds}) < N_FOLDS:
            raise InputError(f"{len(self.pairs)} pairs do not fill {N_FOLDS} folds: give more")
        settings = {"model": str(self.model), **self.size._asdict(), "overrides": [*self.overrides]}
        digest = hashlib.sha256(json.dumps(self.pairs).encode()).hexdigest()
        keep_settings(self.root, {**settings, "pairs": digest})
        import_all("experiments.language")
        for fold in range(self.size.folds):
            train = [self.pairs[i].record for i in np.flatnonzero(self.folds != fold).tolist()]
            test = [self.pairs[i].record for i in np.flatnonzero(self.folds == fold).tolist()]
            write_records(self.root / "data" / str(fold), train=train, test=test)
        jobs = {self.make_reference_job(fold): fold for fold in range(self.size.folds)}

        def score(job: Job) -> None:
            examples = [self.encode(number) for number in self.list_pairs(jobs[job])]
            row = {"method": REFERENCE, "fold": jobs[job], "pairs": self.list_pairs(jobs[job])}
            logps = score_pairs(language.load_reference(self.model), examples)
            write_rows(job.result, [row | dict(zip(ROLES, logps, strict=True))])

        def describe(job: Job, rows: list[Row]) -> str:
            return f"{len(rows[0]['chosen'])} pairs scored"

        return [row for _, rows in iterate_rows([*jobs], score, describe, name=REFERENCE) for row in rows]

    def make_reference_job(self, fold: int) -> Job:
        """Make the job that scores a fold's pairs with the reference."""
        return Job(self.root / "runs" / f"{REFERENCE}-fold-{fold}")

    def list_pairs(self, fold: int) -> list[int]:
        """List the numbers of a fold's pairs."""
        return np.flatnonzero(self.folds == fold).tolist()

    def encode(self, number: int) -> Example:
        """Tokenize a pair as for training."""
        pair, eos = self.pairs[number], self.tokenizer.eos_token_id
        texts = [pair.prompt, pair.chosen, pair.rejected]
        prompt, *responses = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        responses = [[*tokens, eos] for tokens in responses]
        prompt, responses = truncate(prompt, responses, "keep_end", MAX_LENGTH, MAX_PROMPT)
        return Example(tuple(prompt), tuple(map(tuple, responses)))

    def list_course(self, fold: int) -> list[int]:
        """List how many pairs are trained on before each evaluation."""
        n_updates = int((self.folds != fold).sum()) // self.size.batch
        if n_updates < COURSE:
            raise InputError(f"{len(self.pairs)} pairs are too few for {COURSE} updates: give more")
        return [n_updates // COURSE * self.size.batch * part for part in range(1, COURSE + 1)]

    def make_job(self, method: str, fold: int) -> Job:
        course, per_pair = self.list_course(fold), METHODS[method].examples_per_pair
        overrides = (
            *language.list_overrides(self.model, self.root),
            "datasets=[hh]", f"dataset_sources.hh={self.root / 'data' / str(fold)}",
            f"max_length={MAX_LENGTH}", f"max_prompt_length={MAX_PROMPT}", "lr=2e-4",
            f"batch_size={self.size.batch * per_pair}", f"n_examples={course[-1] * per_pair}",
            f"save_every={course[0] * per_pair}", "eval_every=1000000000", f"n_eval_examples={8 * per_pair}",
            f"eval_batch_size={8 * per_pair}",
            "cache_reference_logps=all", "gradient_accumulation_steps=2",
            *METHODS[method].overrides, *self.overrides,
        )  # fmt: skip
        return Job(self.root / "runs" / f"{method}-fold-{fold}", overrides)

    def train_all(self, methods: Sequence[str]) -> Iterator[list[Row]]:
        """Train methods for each fold; yield the rows of each run.

        The rows of other methods' runs that were finished before are yielded too.
        """
        runs = {self.make_job(method, fold): (method, fold) for method in METHODS for fold in range(self.size.folds)}

        def finish(job: Job) -> None:
            write_rows(job.result, self.make_rows(job, *runs[job]))

        def describe(job: Job, rows: list[Row]) -> str:
            gaps = np.subtract(rows[-1]["chosen"], rows[-1]["rejected"])
            return f"{(gaps > 0).mean():.2f} of {len(gaps)} pairs right at KL {np.mean(rows[-1]['kl']):.2f}"

        for _, rows in iterate_rows(select_jobs(runs, methods), finish, describe, name="hh"):
            yield rows

    # --- rows ---------------------------------------------------------------------------------------------------------

    def make_rows(self, job: Job, method: str, fold: int) -> list[Row]:
        """Make a row for the policy after each part of the run.

        A row's `pairs` are the numbers of the fold's pairs; its lists by role have a value for each pair.
        """
        pairs, [reference], rows = self.list_pairs(fold), read_rows(self.make_reference_job(fold).result), []
        examples = [self.encode(pair) for pair in pairs]
        for part, n_pairs in enumerate(self.list_course(fold), start=1):
            n_examples = n_pairs * METHODS[method].examples_per_pair
            sides = language.load_policy(job.directory / f"step-{n_examples}")
            kls, lengths, ended = self.sample_kls(*sides, pairs)
            row: Row = {"method": method, "fold": fold, "share": part / COURSE, "pairs": pairs}
            for role, logps in zip(ROLES, score_pairs(sides[0], examples), strict=True):
                row[role] = np.subtract(logps, reference[role]).round(4).tolist()  # log-ratios
            rows.append({**row, "kl": kls, "length": lengths, "ended": ended})
        return rows

    def sample_kls(self, policy: Side, reference: Side, pairs: Sequence[int]) -> tuple[list[float], float, float]:
        """Estimate KL from answers to the first prompts of the fold.

        Returns the estimates, the mean number of tokens, and the share of answers that ended.
        """
        texts = [*dict.fromkeys(self.pairs[pair].prompt for pair in pairs)][: self.size.kl_prompts]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = [tuple(tokens[-MAX_PROMPT:]) for tokens in encoded]
        sampling = Sampling(self.size.kl_tokens, seed=KL_SEED)
        answers = [answer for [answer] in language.sample(policy, self.tokenizer, prompts, sampling)]
        kls = [round(kl, 4) for kl in language.sum_kls(policy, reference, prompts, answers)]
        return kls, float(np.mean([len(a.tokens) for a in answers])), float(np.mean([a.ended for a in answers]))

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.model))


def score_pairs(side: Side, examples: Sequence[Example]) -> list[list[float]]:
    """Log-probabilities of chosen and of rejected responses, (2, pairs)."""
    with switch(side.model, side.adapter)():
        by_pair = pair_logps(side.model, examples, max_length=MAX_LENGTH)
    return np.transpose(by_pair).round(4).tolist()
