"""The frontier of reward against KL, where the optimum is known.

    python -m experiments.frontier [--quick] [--out DIR] [OVERRIDES OF train.py ...]

This is figure 2 (left) of the DPO paper on a task of its own, which docs/frontier.md describes. train.py runs SFT, then
every method of `methods.py` with all its betas and three seeds. Expected true reward and KL(policy || reference) of
each policy are computed by enumeration, and compared with pi* and best-of-N.

Writes `frontier.json` (a row for each method, beta and seed), `frontier.png` and `frontier-dark.png` to DIR
(.cache/frontier), and prints tables. --quick is smaller: one seed, two betas, a third of the pairs.
`trainer=FSDPTrainer world_size=2` runs it on two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.errors import InputError, RunError
from experiments.frontier import exact, runs
from experiments.frontier.methods import METHODS, NOISE, Method
from experiments.frontier.runs import Job
from experiments.frontier.task import Pairs, Task, draw_pairs

OUT = Path(__file__).resolve().parents[2] / ".cache" / "frontier"
SFT = ("loss=sft", "lr=3e-3", "batch_size=32", "warmup_steps=50")
BATCH = 64  # pairs of an update
OPTIMAL_BETAS = np.geomspace(50, 0.05, 61)  # of pi*; close together, as the curve is interpolated between them
DRAWS = tuple(2**k for k in range(1, 13))  # the N of best-of-N
TUNING_SEED = 100  # the seed of --tune, used by no other run
RATES = (1e-3, 2e-3, 4e-3)  # learning rates that --tune tries
BUDGETS = np.linspace(0, 5, 51)  # of KL; --tune averages over them


class Size(NamedTuple):
    """Size of the experiment."""

    pairs: int
    epochs: int
    sft_epochs: int
    seeds: tuple[int, ...]
    few_betas: bool = False


FULL = Size(pairs=3072, epochs=4, sft_epochs=12, seeds=(0, 1, 2))
QUICK = Size(pairs=1024, epochs=2, sft_epochs=4, seeds=(0,), few_betas=True)


class Run(NamedTuple):
    """A policy to train."""

    method: str
    beta: float | None
    seed: int
    lr: float
    label_noise: float = 0.0  # share of flipped labels

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in (self.method, self.beta, self.seed, self.lr) if part is not None)

    @property
    def data(self) -> str:
        """Name of the dataset of its pairs."""
        noise = f"_noise_{self.label_noise:g}".replace(".", "_") if self.label_noise else ""
        return f"pairs_{self.seed}{noise}"


# --- the runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """Runs from one reference, with their directory and common overrides."""

    root: Path
    task: Task
    size: Size
    overrides: Sequence[str]

    def train_reference(self) -> None:
        """Run SFT on a demonstrator's texts, from which all methods start."""
        root, task, rng = self.root, self.task, np.random.default_rng([self.task.seed, 5])
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        runs.import_all()
        runs.write_model(root / "model", task)
        train, test = (  # SFT trains on the chosen responses alone
            Pairs(prompts, task.demonstrate(prompts, rng), task.demonstrate(prompts, rng))
            for prompts in (task.train_prompts, task.test_prompts)
        )
        runs.write_pairs(root / "data" / "sft", task, train, test)
        common = runs.list_overrides(root, task, data="sft")
        job = Job(root / "runs" / "sft", (*common, *SFT, f"n_epochs={self.size.sft_epochs}", *self.overrides))

        def keep_policy(job: Job) -> None:
            shutil.copy(job.directory / "LATEST" / "policy.pt", root / "reference.pt")

        list(runs.run_all([job], keep_policy, at_once=1))

    @cached_property
    def reference(self) -> Any:
        """The model after SFT."""
        return runs.load_policy(self.root, self.root / "reference.pt")

    @cached_property
    def limit(self) -> exact.Limit:
        """The reference's log-probabilities, and the true rewards."""
        prompts = self.task.test_prompts
        rewards = self.task.reward(prompts[:, None], self.task.leaves[None])
        return exact.Limit(exact.leaf_logps(self.reference, self.task, prompts), rewards)

    def write_preferences(self, wanted: Sequence[Run]) -> None:
        """Write the datasets of labelled pairs that the runs train on.

        Datasets of one seed have the same responses, and differ in the share of flipped labels.
        """
        for run in {run.data: run for run in wanted}.values():
            rng = np.random.default_rng([self.task.seed, 6, run.seed])
            write = partial(exact.draw, self.reference, self.task, rng=rng)
            train, test = (
                draw_pairs(self.task, prompts, write, rng, noise=run.label_noise)
                for prompts in (self.task.train_prompts[: self.size.pairs], self.task.test_prompts)
            )
            runs.write_pairs(self.root / "data" / run.data, self.task, train, test)

    def make_job(self, run: Run) -> Job:
        """Make a run's job, with as many labels and updates as others."""
        method = METHODS[run.method]
        epochs, batch_size = self.size.epochs, BATCH
        if method.once:  # as many updates in a single epoch
            epochs, batch_size = 1, BATCH // self.size.epochs
        scorer = runs.write_scorer(self.root, self.task, run.seed)
        longest = self.task.response_length
        overrides = (
            *runs.list_overrides(self.root, self.task, data=run.data),
            *method.list_overrides(beta=run.beta, noise=run.label_noise, scorer=scorer, longest=longest),
            *(f"seed={run.seed}", f"lr={run.lr}", f"model.archive={self.root / 'reference.pt'}"),
            *(f"n_epochs={epochs}", f"batch_size={batch_size}", "warmup_steps=10", *self.overrides),
        )
        return Job(self.root / "runs" / run.name, overrides)

    def judge(self, job: Job) -> None:
        """Measure a trained policy, and write the result to `point.json`."""
        model = runs.load_policy(self.root, job.directory / "LATEST" / "policy.pt")
        point = exact.measure(exact.leaf_logps(model, self.task, self.task.test_prompts), self.task, self.limit)
        lines = (job.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ties = [metrics["online/ties"] for metrics in map(json.loads, lines) if "online/ties" in metrics]
        if ties:
            point["ties"] = float(np.mean(ties))  # share of prompts that gave no pair
        (job.directory / "point.json").write_text(json.dumps(point), encoding="utf-8")

    def train_all(self, wanted: Sequence[Run]) -> list[dict[str, Any]]:
        """Train all runs. Returns their rows, in the same order."""
        run_of_job = {self.make_job(run): run for run in wanted}
        rows, started = {}, time.perf_counter()
        # `judge` runs in the job's process, so that policies are measured on all cores
        for job in runs.run_all([*run_of_job], self.judge, at_once=len(os.sched_getaffinity(0))):
            run, point = run_of_job[job], json.loads((job.directory / "point.json").read_text(encoding="utf-8"))
            row = make_row(run.method, run.beta, run.seed, **point, label_noise=run.label_noise, lr=run.lr)
            rows[run] = row
            secs_left = (time.perf_counter() - started) / len(rows) * (len(wanted) - len(rows))
            settings = (f" {key} {row[key]:g}" for key in ("beta", "seed") if row[key] is not None)
            text = f"{run.method}{''.join(settings)}: reward {row['reward']:.3f} at KL {row['kl']:.3f}"
            print(f"{len(rows)}/{len(wanted)}  {text}  {secs_left:.0f} s left", flush=True)
        return [rows[run] for run in wanted]

    def list_known(self) -> list[dict[str, Any]]:
        """List the rows of policies that are known without a run."""

        def measure(method: str, logps: np.ndarray, beta: float | None = None, **others: Any) -> dict[str, Any]:
            measured = exact.measure(logps, self.task, self.limit, optimal=method == "pi_star")
            return make_row(method, beta, None, **measured, **others)

        return [
            measure("sft", self.limit.reference),
            *(measure("pi_star", exact.optimum(beta, *self.limit), beta) for beta in map(float, OPTIMAL_BETAS)),
            *(measure(f"best_of_{n}", exact.best_of_n(n, *self.limit), n=n) for n in DRAWS),
            measure("chosen", exact.chosen(*self.limit)),
        ]


def make_row(
    method: str, beta: float | None, seed: int | None, reward: float, kl: float, **others: Any
) -> dict[str, Any]:
    """Make a row of exact values, whose standard errors are 0."""
    values = {"reward": reward, "reward_se": 0.0, "kl": kl, "kl_se": 0.0}
    return {"method": method, "beta": beta, "seed": seed, **values, **others}


# --- the command ------------------------------------------------------------------------------------------------------


def list_runs(size: Size, noise: float) -> list[Run]:
    """List a sweep's runs; without `noise`, noisy methods are left out."""

    def list_betas(method: Method) -> Sequence[float | None]:
        if size.few_betas:
            return method.betas[1::2] or method.betas  # SFT on the chosen has a single one, None
        return (*method.betas, *method.between)

    return [
        Run(name, beta, seed, method.lr, noise if method.noisy else 0.0)
        for seed in size.seeds
        for name, method in METHODS.items()
        if noise > 0 or not method.noisy
        for beta in list_betas(method)
    ]


def list_tuning_runs() -> list[Run]:
    """List the runs of --tune: every learning rate with every second beta."""
    return [
        Run(name, beta, TUNING_SEED, lr)
        for name, method in METHODS.items()
        if not method.noisy
        for lr in RATES
        for beta in method.betas[::2]
    ]


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def run_sweep(sweep: Sweep, out: Path, wanted: Sequence[Run], *, tune: bool = False) -> None:
    """Train and measure all runs, and write rows, pictures and tables."""
    from experiments.frontier.picture import draw
    from experiments.frontier.reading import format_rates, tables

    sweep.train_reference()
    sweep.write_preferences(wanted)
    rows = sweep.list_known() + sweep.train_all(wanted)
    if tune:
        write_json(out / "rates.json", rows)
        print(format_rates(rows, BUDGETS))
        return
    write_json(out / "frontier.json", rows)
    for name, dark in (("frontier.png", False), ("frontier-dark.png", True)):
        (out / name).write_bytes(draw(rows, dark=dark))
    print("\n\n".join(tables(rows)))


def run_controls(sweep: Sweep, out: Path) -> None:
    """Train and measure the controls, and write their rows and tables."""
    from experiments.frontier.controls import run_all
    from experiments.frontier.reading import format_controls

    sweep.train_reference()
    rows, size = [], sweep.size
    for row in run_all(sweep.reference, sweep.task, pairs=size.pairs, epochs=size.epochs, seeds=size.seeds):
        rows.append(row)
        settings = (f"{key} {row[key]:g}" for key in ("shortest", "beta", "seed", "scale") if key in row)
        print(row["method"], *settings, f"reward {row['reward']:.3f} at KL {row['kl']:.3f}", flush=True)
    write_json(out / "controls.json", rows)
    print(format_controls(rows))


def read_rows(files: Sequence[Path]) -> str:
    """Format the tables of a sweep's file, a controls' file, or both.

    With both, the sweep's tables also have reweighted DPO.
    """
    from experiments.frontier.reading import format_controls, tables

    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    controls = [row for row in rows if "shortest" in row]
    sweep = [row for row in rows if "shortest" not in row]
    # a log-ratio times `scale` is that of a policy trained with beta / scale, if both were optimal
    reweighted = [{**row, "beta": row["beta"] / row["scale"]} for row in controls if "scale" in row]
    texts = [format_controls(controls)] if controls else []
    if sweep:
        texts += tables(sweep + reweighted)
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.frontier", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller: one seed, two betas, a third of the pairs")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: .cache/frontier, and -quick, -tune, -controls)",
    )
    parser.add_argument(
        "--label-noise",
        type=float,
        default=NOISE,
        metavar="P",
        help=f"the share of labels that is flipped in the noisy runs (default: {NOISE}); 0 leaves these runs out",
    )
    parser.add_argument("--tune", action="store_true", help="only try learning rates, on other pairs: rates.json")
    parser.add_argument("--controls", action="store_true", help="only DPO without short responses, and reweighted DPO")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="only print the tables of written rows")
    parser.add_argument("overrides", nargs="*", help="of train.py, such as trainer=FSDPTrainer world_size=2")
    options = parser.parse_intermixed_args(arguments)
    if not 0 <= options.label_noise < 0.5:
        parser.error(f"--label-noise {options.label_noise} must be in [0, 0.5): at 0.5 labels say nothing")
    from dpo.settings.command_line import check_command_line

    # wrong overrides are refused before the first run
    check_command_line(["exp_name=frontier", "model.name_or_path=MODEL", *options.overrides])
    suffixes = [f"-{name}" for name in ("quick", "tune", "controls") if getattr(options, name)]
    default_out = OUT.with_name(OUT.name + "".join(suffixes))
    out, started = (options.out or default_out).expanduser().resolve(), time.perf_counter()
    try:
        if options.read:
            print(read_rows(options.read))
            return 0
        out.mkdir(parents=True, exist_ok=True)
        sweep = Sweep(out / "frontier-runs", Task(), QUICK if options.quick else FULL, options.overrides)
        if options.controls:
            run_controls(sweep, out)
        else:
            wanted = list_tuning_runs() if options.tune else list_runs(sweep.size, options.label_noise)
            run_sweep(sweep, out, wanted, tune=options.tune)
    except (OSError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{time.perf_counter() - started:.0f} s; written to {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
