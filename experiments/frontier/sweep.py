"""The runs of all methods from one reference, and their rows.

A policy is trained by the command line of train.py, or by `plain.py`, and measured by `exact.py`. A sweep can be killed
at any time: what is complete in its directory is not made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier import exact, files
from experiments.frontier.jobs import Job, Row, import_all, run_all
from experiments.frontier.methods import BATCH, METHODS, REWARD_MODELS, RM_BETAS
from experiments.frontier.task import Pairs, Task, draw_pairs

SFT = ("loss=sft", "lr=3e-3", "batch_size=32", "warmup_steps=50")
EVALUATED = 16  # pairs that the trainer evaluates at the end of a run


class Size(NamedTuple):
    """Size of the experiment."""

    pairs: int  # for training, of each seed
    sft_epochs: int
    seeds: tuple[int, ...]
    most_passes: int = 64  # over the pairs, whatever the method's number is


class Run(NamedTuple):
    """A policy or reward model to train."""

    method: str
    beta: float | None  # or the value of the method's other knob
    seed: int
    lr: float
    passes: int

    @property
    def name(self) -> str:
        parts = (self.method, self.beta, self.seed, self.lr, self.passes)
        return "-".join(str(part) for part in parts if part is not None)

    @property
    def batch(self) -> int:
        """Pairs or prompts of an update."""
        method = METHODS[self.method]
        if method.fresh:
            # There are as many updates as `passes` over the pairs make, each with fewer prompts.
            return max(1, method.pairs // self.passes)
        return method.pairs


def list_runs(size: Size) -> list[Run]:
    """List the runs of a sweep, one for each seed, method and beta."""
    wanted = []
    for seed in size.seeds:
        for name, method in METHODS.items():
            for beta in method.betas:
                passes = method.passes
                if method.knob == "passes":
                    passes *= int(beta or 1)  # the knob's value multiplies them
                passes = min(passes, size.most_passes)
                wanted.append(Run(name, beta, seed, method.lr, passes))
    return wanted


@dataclass(frozen=True)
class Sweep:
    """All runs from one reference, and their files."""

    out: Path
    task: Task
    size: Size
    overrides: Sequence[str]  # for train.py in every run

    @cached_property
    def root(self) -> Path:
        """Directory of the sweep's runs, with a digest of the settings in its name: runs of others are not reused."""
        settings = [
            dataclasses.asdict(self.task),
            self.size.pairs,
            self.size.sft_epochs,
            *self.overrides,
        ]
        text = json.dumps(settings)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self.out / "frontier-runs" / f"{self.task.seed}-{digest[:8]}"

    # --- the reference and the data -----------------------------------------------------------------------------------

    def train_reference(self) -> None:
        """Train all methods' reference by SFT on a demonstrator's texts."""
        root = self.root
        task = self.task
        rng = np.random.default_rng([task.seed, 5])
        import_all()
        files.write_model(root / "model", task)

        def demonstrate(prompts: np.ndarray) -> Pairs:
            return Pairs(
                prompts,
                chosen=task.demonstrate(prompts, rng),
                rejected=task.demonstrate(prompts, rng),  # on which SFT does not train
            )

        train = demonstrate(task.train_prompts)
        test = demonstrate(task.test_prompts[:EVALUATED])
        files.write_pairs(root / "data" / "sft", task, train, test)
        overrides = (
            *self._list_common("sft"),
            *SFT,
            f"n_epochs={self.size.sft_epochs}",
            *self.overrides,
        )

        def keep_policy(job: Job) -> list[Row]:
            shutil.copy(job.directory / "LATEST" / "policy.pt", root / "reference.pt")
            return []

        list(run_all([Job(root / "runs" / "sft", overrides)], keep_policy))

    def _list_common(self, data: str) -> tuple[str, ...]:
        """List the overrides common to all runs on the dataset `data`."""
        prompt_length = self.task.prompt_length
        return (
            f"model.name_or_path={self.root / 'model'}",
            "model.block_name=LlamaDecoderLayer",
            "model.random_init=true",
            f"datasets=[{data}]",
            f"dataset_sources.{data}={self.root / 'data' / data}",
            f"local_dirs=[{self.root}]",
            f"max_length={prompt_length + self.task.response_length}",
            f"max_prompt_length={prompt_length}",
            "optimizer=AdamW",
            "schedule=cosine",
            "do_first_eval=false",
            f"n_eval_examples={EVALUATED}",
            f"eval_batch_size={EVALUATED}",
            "eval_every=1000000000",
            "sample_during_eval=false",
            "export=false",
            "wandb.enabled=false",
            "num_workers=0",
            "layout=padded",  # without EOS there is no token to pad with, and rows of one length need none
        )

    @cached_property
    def reference(self) -> Any:
        """The model after SFT."""
        return files.load_policy(self.root / "model", self.root / "reference.pt")

    @cached_property
    def limit(self) -> exact.Limit:
        """The reference's log-probabilities, and the true rewards, of all responses to the held-out prompts."""
        prompts = self.task.test_prompts
        logps = exact.leaf_logps(self.reference, self.task, prompts)
        return exact.Limit(logps, self.task.reward_leaves(prompts))

    def write_preferences(self) -> None:
        """Write the datasets of labelled pairs that the runs of each seed train on."""
        task = self.task
        train_prompts = task.train_prompts[: self.size.pairs]
        test_prompts = task.test_prompts[:EVALUATED]
        for seed in self.size.seeds:
            rng = np.random.default_rng([task.seed, 6, seed])
            write = partial(exact.draw, self.reference, task, rng=rng)
            train = draw_pairs(task, train_prompts, write, rng)
            test = draw_pairs(task, test_prompts, write, rng)
            files.write_pairs(self.root / "data" / f"pairs_{seed}", task, train, test)

    # --- the runs -----------------------------------------------------------------------------------------------------

    def make_job(self, run: Run) -> Job:
        """Make a run's job, without overrides if `plain.py` trains it."""
        method = METHODS[run.method]
        directory = self.root / "runs" / run.name
        if not method.overrides:
            return Job(directory)
        values = {
            "beta": run.beta,
            "scorer": files.write_scorer(self.root, self.task, run.seed),
            "longest": self.task.response_length,
        }
        overrides = (
            *self._list_common(f"pairs_{run.seed}"),
            *(text.format(**values) for text in method.overrides),
            f"seed={run.seed}",
            f"lr={run.lr}",
            f"model.archive={self.root / 'reference.pt'}",
            f"n_epochs={1 if method.fresh else run.passes}",
            f"batch_size={run.batch * method.examples_per_pair}",
            "warmup_steps=10",
            *self.overrides,
        )
        return Job(directory, overrides)

    def finish(self, job: Job, run: Run) -> list[Row]:
        """Train by `plain.py` if train.py did not, measure, and return the run's rows.

        A reward model has a row for each of RM_BETAS, that of its optimal policy; a policy has one.
        """
        task = self.task
        if job.overrides:
            model = files.load_policy(self.root / "model", job.directory / "LATEST" / "policy.pt")
        else:
            from experiments.frontier import plain

            pairs = files.read_pairs(self.root / "data" / f"pairs_{run.seed}" / "train.jsonl", task)
            updates = self.size.pairs // BATCH * run.passes
            model = plain.train(self.reference, task, pairs, run, updates)
        if run.method in REWARD_MODELS:
            compute_scores = partial(model.compute_scores, task)
            scores = exact.leaf_values(compute_scores, task.test_prompts)
            rows = []
            for beta in RM_BETAS:
                logps = exact.optimum(beta, self.limit.reference, scores)
                rows.append(self.make_row(run.method, logps, run, beta=beta))
            return rows
        logps = exact.leaf_logps(model, task, task.test_prompts)
        return [self.make_row(run.method, logps, run, **_read_ties(job))]

    def train_all(self, wanted: Sequence[Run]) -> list[Row]:
        """Train all runs, and return their rows in the order of `wanted`."""
        run_of_job = {self.make_job(run): run for run in wanted}
        # `finish` runs in the job's process, so that policies are measured on all cores
        done = run_all([*run_of_job], lambda job: self.finish(job, run_of_job[job]))
        rows_of_run = {run_of_job[job]: rows for job, rows in done}
        return [row for run in wanted for row in rows_of_run[run]]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def make_row(self, method: str, logps: np.ndarray, run: Run | None = None, **others: Any) -> Row:
        """Make the row of the policy with these `logps`, which `run` trained, if any; `others` are more columns."""
        row = {
            "task": self.task.seed,
            "method": method,
            "beta": None,
            "seed": None,
            **self.limit.measure(logps, optimal=method == "pi_star"),
        }
        if run is not None:
            row |= {
                "beta": run.beta,
                "seed": run.seed,
                "lr": run.lr,
                "passes": run.passes,
            }
        return row | others

    def list_known(self) -> list[Row]:
        """List the rows of policies that are known without a run: the reference and pi*."""
        reference = self.limit.reference
        rows = [self.make_row("sft", reference)]
        for beta in exact.OPTIMAL_BETAS.tolist():
            logps = exact.optimum(beta, reference, self.limit.rewards)
            rows.append(self.make_row("pi_star", logps, beta=beta))
        return rows


def _read_ties(job: Job) -> dict[str, float]:
    """Read the share of an online run's prompts that gave no pair, as the column `ties`; {} of another run."""
    file = job.directory / "metrics.jsonl"
    if not file.exists():
        return {}
    ties = []
    for line in file.read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        if "online/ties" in metrics:
            ties.append(metrics["online/ties"])
    return {"ties": float(np.mean(ties))} if ties else {}
