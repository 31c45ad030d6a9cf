"""The runs of all methods from one reference, and their rows.

A sweep can be killed at any time: what is complete in its directory is not made again.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier import exact, runs
from experiments.frontier.jobs import Job, Row, import_all, iterate_rows, keep_settings, run_all, write_whole
from experiments.frontier.methods import (
    BATCH,
    METHODS,
    REWARD_MODELS,
    REWEIGHTED_BETA,
    RM_BETAS,
    RM_DRAWS,
    SCALES,
    Method,
)
from experiments.frontier.task import Pairs, Task, draw_pairs

SFT = ("loss=sft", "lr=3e-3", "batch_size=32", "warmup_steps=50")
DRAWS = tuple(2**k for k in range(1, 13))  # the N of best-of-N
EVALUATED = 16  # pairs that the trainer evaluates at the end of a run
COURSE = 3  # parts of a run; a policy along the run is measured after each part but the last


class Size(NamedTuple):
    """Size of the experiment."""

    pairs: int
    sft_epochs: int
    seeds: tuple[int, ...]
    tasks: tuple[int, ...] = (0,)
    core: bool = False  # only the methods of the paper's comparison
    most_passes: int = 64
    course: bool = False  # policies along the runs of the first seed are measured too


class Run(NamedTuple):
    """A policy or reward model to train."""

    method: str
    beta: float | None  # or the value of the method's other knob
    seed: int
    lr: float
    passes: int
    label_noise: float = 0.0  # share of flipped labels
    course: bool = False  # policies along the run are measured too

    @property
    def name(self) -> str:
        parts = (self.method, self.beta, self.seed, self.lr, self.passes, self.label_noise or None)
        return "-".join(str(part) for part in parts if part is not None)

    @property
    def data(self) -> str:
        """Name of the dataset of its pairs."""
        noise = f"_noise_{self.label_noise:g}".replace(".", "_") if self.label_noise else ""
        return f"pairs_{self.seed}{noise}"

    @property
    def batch(self) -> int:
        """Pairs or prompts of an update."""
        method = METHODS[self.method]
        if method.fresh:  # as many updates as `passes` over the pairs make, each with fewer prompts
            return max(1, method.pairs // self.passes)
        return method.pairs


@dataclass(frozen=True)
class Sweep:
    """Runs from one reference, with their directory and common overrides.

    Policies are measured on the held-out prompts, or on those for `tuning`.
    """

    root: Path
    task: Task
    size: Size
    overrides: Sequence[str]
    tuning: bool = False

    # --- the reference and the data -----------------------------------------------------------------------------------

    def train_reference(self) -> None:
        """Train all methods' reference by SFT on a demonstrator's texts.

        Raises InputError if the directory has runs of other settings.
        """
        root, task = self.root, self.task
        rng = np.random.default_rng([task.seed, 5])
        settings = {"task": dataclasses.asdict(task), "pairs": self.size.pairs, "sft_epochs": self.size.sft_epochs}
        keep_settings(root, {**settings, "overrides": [*self.overrides], "tuning": self.tuning})
        import_all()
        if (root / "reference.pt").exists():
            return
        runs.write_model(root / "model", task)

        def demonstrate(prompts: np.ndarray) -> Pairs:  # SFT trains on the chosen responses alone
            return Pairs(prompts, task.demonstrate(prompts, rng), task.demonstrate(prompts, rng))

        train, test = demonstrate(task.train_prompts), demonstrate(task.test_prompts[:EVALUATED])
        runs.write_pairs(root / "data" / "sft", task, train, test)
        common = runs.list_overrides(root, task, data="sft")
        job = Job(root / "runs" / "sft", (*common, *SFT, f"n_epochs={self.size.sft_epochs}", *self.overrides))

        def keep_policy(job: Job) -> None:
            shutil.copy(job.directory / "LATEST" / "policy.pt", root / "reference.part")
            (root / "reference.part").replace(root / "reference.pt")

        list(run_all([job], keep_policy, at_once=1))

    @cached_property
    def reference(self) -> Any:
        """The model after SFT."""
        return runs.load_policy(self.root, self.root / "reference.pt")

    @property
    def prompts(self) -> np.ndarray:
        """Prompts on which policies are measured."""
        return self.task.tuning_prompts if self.tuning else self.task.test_prompts

    @cached_property
    def limit(self) -> exact.Limit:
        """The reference's log-probabilities, and the true rewards."""
        rewards = self.task.reward(self.prompts[:, None], self.task.leaves[None])
        return exact.Limit(exact.leaf_logps(self.reference, self.task, self.prompts), rewards)

    def write_preferences(self, wanted: Sequence[Run]) -> None:
        """Write the datasets of labelled pairs that the runs train on.

        Datasets of one seed have the same responses, and differ in the share of flipped labels.
        """
        run_by_data = {run.data: run for run in wanted}
        for run in run_by_data.values():
            rng = np.random.default_rng([self.task.seed, 6, run.seed])
            write = partial(exact.draw, self.reference, self.task, rng=rng)
            train, test = (
                draw_pairs(self.task, prompts, write, rng, noise=run.label_noise)
                for prompts in (self.task.train_prompts[: self.size.pairs], self.task.test_prompts[:EVALUATED])
            )
            runs.write_pairs(self.root / "data" / run.data, self.task, train, test)

    # --- the runs -----------------------------------------------------------------------------------------------------

    def make_job(self, run: Run) -> Job:
        """Make a run's job, without overrides if `plain.py` trains it."""
        method, directory = METHODS[run.method], self.root / "runs" / run.name
        if not method.overrides:
            return Job(directory)
        scorer = runs.write_scorer(self.root, self.task, run.seed)
        longest = self.task.response_length
        batch_size = run.batch * method.examples_per_pair
        overrides = [
            *runs.list_overrides(self.root, self.task, data=run.data),
            *method.list_overrides(beta=run.beta, noise=run.label_noise, scorer=scorer, longest=longest),
            f"seed={run.seed}", f"lr={run.lr}", f"model.archive={self.root / 'reference.pt'}",
            f"n_epochs={1 if method.fresh else run.passes}", f"batch_size={batch_size}", "warmup_steps=10",
        ]  # fmt: skip
        course = self.list_course(run)
        if course:
            overrides.append(f"save_every={course[0] * batch_size}")
        return Job(directory, (*overrides, *self.overrides))

    def count_updates(self, run: Run) -> int:
        return self.size.pairs // BATCH * run.passes

    def list_course(self, run: Run) -> list[int]:
        """List the updates after which a policy along the run is measured."""
        part = self.count_updates(run) // COURSE
        return [part * i for i in range(1, COURSE)] if run.course and part else []

    def finish(self, job: Job, run: Run) -> None:
        """Train by `plain.py` if train.py did not, measure, and write rows."""
        method, n_updates, course = METHODS[run.method], self.count_updates(run), self.list_course(run)
        rows: list[Row] = []

        def measure_along(update: int, model: Any) -> None:
            if update in course:
                logps = exact.leaf_logps(model, self.task, self.prompts)
                rows.append(self.make_row(run.method, run, logps, share=update / n_updates))

        if method.overrides:
            for update in course:
                checkpoint = job.directory / f"step-{update * run.batch * method.examples_per_pair}"
                measure_along(update, runs.load_policy(self.root, checkpoint / "policy.pt"))
            model = runs.load_policy(self.root, job.directory / "LATEST" / "policy.pt")
        else:
            model = self._train_plainly(run, measure_along)
        if run.method in REWARD_MODELS:
            rows += self._measure_reward_model(run, model.leaf_scores(self.task, self.prompts))
        else:
            logps = exact.leaf_logps(model, self.task, self.prompts)
            rows.append(self.make_row(run.method, run, logps, **_read_ties(job)))
            if (run.method, run.beta) == ("dpo", REWEIGHTED_BETA):
                rows += self._measure_reweighted(run, logps)
        write_whole(job.result, json.dumps(rows))

    def _train_plainly(self, run: Run, watch: Callable[[int, Any], None]) -> Any:
        from experiments.frontier import plain

        pairs = runs.read_pairs(self.root / "data" / run.data / "train.jsonl", self.task)
        setting = plain.Setting(run.method, run.beta, run.seed, run.lr, self.count_updates(run), run.batch)
        return plain.train(self.reference, self.task, pairs, setting, watch)

    def _measure_reweighted(self, run: Run, logps: np.ndarray) -> Iterator[Row]:
        for scale in SCALES:
            reweighted = exact.reweight(scale, logps, self.limit.reference)
            # if both policies were optimal, training with beta / scale would give `scale` times the log-ratio
            yield self.make_row("dpo_reweighted", run, reweighted, beta=REWEIGHTED_BETA / scale, scale=scale)

    def _measure_reward_model(self, run: Run, scores: np.ndarray) -> Iterator[Row]:
        """Measure a reward model's optimum for each beta, and best of N."""
        for beta in RM_BETAS:
            yield self.make_row(run.method, run, exact.optimum(beta, self.limit.reference, scores), beta=beta)
        for n in RM_DRAWS:
            best = exact.best_of_n(n, self.limit.reference, scores)
            yield self.make_row(f"best_by_{run.method}", run, best, beta=n, n=n)

    def train_all(self, wanted: Sequence[Run]) -> list[Row]:
        """Train all runs, and return their rows in the order of `wanted`."""
        run_of_job = {self.make_job(run): run for run in wanted}

        def finish(job: Job) -> None:
            self.finish(job, run_of_job[job])

        def describe(job: Job, rows: list[Row]) -> str:
            return f"reward {rows[-1]['reward']:.3f} at KL {rows[-1]['kl']:.3f}"

        # `finish` runs in the job's process, so that policies are measured on all cores
        done = iterate_rows([*run_of_job], finish, describe, name=self.task.name)
        rows_of_run = {run_of_job[job]: rows for job, rows in done}
        return [row for run in wanted for row in rows_of_run[run]]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def make_row(self, method: str, run: Run | None, logps: np.ndarray, **others: Any) -> Row:
        """Make the row of a policy; `run`, if any, trained the policy."""
        row = {
            "task": self.task.seed,
            "fixed_length": self.task.fixed_length,
            "method": method,
            "beta": None if run is None else run.beta,
            "seed": None if run is None else run.seed,
            **self.limit.measure(logps, self.task, optimal=method == "pi_star"),
        }
        if run is not None:
            row |= {"label_noise": run.label_noise, "lr": run.lr, "passes": run.passes}
        return row | others

    def list_known(self) -> list[Row]:
        """List the rows of policies that are known without a run."""
        reference, rewards = self.limit.reference, self.limit.rewards
        betas = map(float, exact.OPTIMAL_BETAS)
        return [
            self.make_row("sft", None, reference),
            *(self.make_row("pi_star", None, exact.optimum(beta, reference, rewards), beta=beta) for beta in betas),
            *(self.make_row(f"best_of_{n}", None, exact.best_of_n(n, reference, rewards), n=n) for n in DRAWS),
        ]


def _read_ties(job: Job) -> dict[str, float]:
    """Read the share of an online run's prompts that gave no pair."""
    file = job.directory / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    ties = [metrics["online/ties"] for metrics in map(json.loads, lines) if "online/ties" in metrics]
    return {"ties": float(np.mean(ties))} if ties else {}


# --- lists of runs ----------------------------------------------------------------------------------------------------


def list_runs(size: Size, task: Task, noise: float, settings: dict[str, dict[str, Any]] | None = None) -> list[Run]:
    """List a sweep's runs; with `noise` 0, noisy methods are left out.

    `settings` has learning rates and passes by method, as `--tune` wrote them; the default is those of `methods.py`.
    """
    wanted = []
    for seed in size.seeds:
        for name, method in METHODS.items():
            if method.noisy and noise == 0:
                continue
            if not task.fixed_length and not method.control:
                continue
            tuned = (settings or {}).get(name.removesuffix("_noisy"), {})
            betas = method.core if size.core else (*method.betas, *method.between)
            wanted += [make_run(name, method._replace(**tuned), beta, seed, size, noise) for beta in betas]
    return wanted


def make_run(name: str, method: Method, beta: float | None, seed: int, size: Size, noise: float = 0.0) -> Run:
    passes = min(method.count_passes(beta), size.most_passes)
    course = size.course and seed == size.seeds[0] and name not in REWARD_MODELS
    return Run(name, beta, seed, method.lr, passes, noise if method.noisy else 0.0, course)


def list_tuning_runs(size: Size, rates: Sequence[float], passes: Sequence[int]) -> list[Run]:
    """List the runs of --tune, with every second beta."""
    return [
        make_run(name, method._replace(lr=lr, passes=n), beta, seed, size)
        for name, method in METHODS.items()
        if not method.noisy
        for lr in rates
        for n in passes
        for beta in method.betas[::2]
        for seed in size.seeds
    ]
