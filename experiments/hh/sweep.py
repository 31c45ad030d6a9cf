"""The runs of `experiments.hh`: a method trained on all folds but one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.ledger_file import read_ledger
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError
from dpo.models.answers import Sampling
from experiments import language
from experiments.hh.pairs import Pair, split_folds
from experiments.runs import Job, Row, import_all, iterate_rows, keep_settings, select_jobs, write_records, write_rows

ROLES = ("chosen", "rejected")
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

    folds: int  # number of the N_FOLDS folds for which policies are trained
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

    def prepare(self) -> None:
        """Write the folds' datasets.

        Raises InputError if the directory has runs of other settings or pairs.
        """
        if len({*self.folds}) < N_FOLDS:
            raise InputError(f"{len(self.pairs)} pairs do not fill {N_FOLDS} folds: give more")
        settings = {"model": str(self.model), **self.size._asdict(), "overrides": [*self.overrides]}
        digests = [pair.digests["chosen"][0] for pair in self.pairs]
        keep_settings(self.root, {**settings, "pairs": digests})
        import_all("experiments.language", "dpo.analysis.ledger_file")
        for fold in range(self.size.folds):
            train = [self.pairs[i].record for i in np.flatnonzero(self.folds != fold).tolist()]
            test = [self.pairs[i].record for i in np.flatnonzero(self.folds == fold).tolist()]
            write_records(self.root / "data" / str(fold), train=train, test=test)

    def list_course(self, fold: int) -> list[int]:
        """List the numbers of pairs after which a policy is evaluated."""
        n_updates = int((self.folds != fold).sum()) // self.size.batch
        if n_updates < COURSE:
            raise InputError(f"{len(self.pairs)} pairs are too few for {COURSE} updates: give more")
        return [n_updates // COURSE * self.size.batch * part for part in range(1, COURSE + 1)]

    def make_job(self, method: str, fold: int) -> Job:
        course, per_pair = self.list_course(fold), METHODS[method].examples_per_pair
        overrides = (
            *language.list_overrides(self.model, self.root),
            "datasets=[hh]", f"dataset_sources.hh={self.root / 'data' / str(fold)}",
            f"max_length={MAX_LENGTH}", f"max_prompt_length={MAX_PROMPT}", "lr=2e-4", "ledger=true",
            f"batch_size={self.size.batch * per_pair}", f"n_examples={course[-1] * per_pair}",
            f"eval_every={course[0] * per_pair}", "n_eval_examples=1000000", f"eval_batch_size={8 * per_pair}",
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
        pairs, rows = np.flatnonzero(self.folds == fold).tolist(), []
        per_pair = METHODS[method].examples_per_pair
        for part, n_pairs in enumerate(self.list_course(fold), start=1):
            n_updates = n_pairs // self.size.batch
            values = read_evaluation(job.directory, n_updates, self.pairs)
            kls, lengths, ended = self.sample_kls(job.directory / f"step-{n_pairs * per_pair}", pairs)
            row: Row = {"method": method, "fold": fold, "share": part / COURSE, "pairs": pairs}
            for role in ROLES:
                found = [values[pair, role] for pair in pairs]
                row[role] = [round(policy - reference, 4) for policy, reference, _ in found]  # log-ratios
                if part == COURSE:
                    row[f"reference_{role}"] = [round(reference, 3) for _, reference, _ in found]
                    row[f"{role}_tokens"] = [tokens for *_, tokens in found]
            rows.append({**row, "kl": kls, "length": lengths, "ended": ended})
        return rows

    def sample_kls(self, checkpoint: Path, pairs: Sequence[int]) -> tuple[list[float], float, float]:
        """Estimate KL from answers to the first prompts of the fold.

        Returns the estimates, the mean number of tokens, and the share of answers that ended.
        """
        policy, reference = language.load_policy(checkpoint)
        texts = [*dict.fromkeys(self.pairs[pair].prompt for pair in pairs)][: self.size.kl_prompts]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = [tuple(tokens[-MAX_PROMPT:]) for tokens in encoded]
        sampling = Sampling(self.size.kl_tokens, seed=KL_SEED)
        answers = [own[0] for own in language.sample(policy, self.tokenizer, prompts, sampling)]
        kls = [round(kl, 4) for kl in language.sum_kls(policy, reference, prompts, answers)]
        return kls, float(np.mean([len(a.tokens) for a in answers])), float(np.mean([a.ended for a in answers]))

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.model))


def read_evaluation(
    run_dir: Path, n_updates: int, pairs: Sequence[Pair]
) -> dict[tuple[int, str], tuple[float, float, int]]:
    """Read an evaluation's log-probabilities from the ledger.

    Returns the policy's and the reference's log-probability and the number of tokens, by (number of the pair, role). An
    example of the ledger is a pair, or under KTO a single response.
    """
    numbers: dict[tuple[str, str], list[int]] = {}  # numbers of pairs, by an example's digest and role
    for number, pair in enumerate(pairs):
        for role, digests in pair.digests.items():
            for digest in digests:
                numbers.setdefault((digest, role), []).append(number)
    ledger = read_ledger(run_dir)
    assert ledger is not None
    values = {}
    for row in ledger.to_pylist():
        if row["split"] != "eval" or row["update"] != n_updates:
            continue
        for role in ROLES:
            if row[f"policy_{role}"] is not None:
                found = row[f"policy_{role}"], row[f"reference_{role}"], row[f"{role}_tokens"]
                for number in numbers[row["example"], role]:
                    values[number, role] = found
    return values
