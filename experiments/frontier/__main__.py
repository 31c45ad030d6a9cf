"""The frontier of reward against KL, as in figure 2 (left) of the DPO paper, on a task whose optimum is known exactly.

    python -m experiments.frontier [--quick] [--out DIR] [OVERRIDES OF train.py ...]

SFT, then every method of `methods.py` over its betas and three seeds, by train.py; expected true reward
and KL(policy || reference) of each policy by enumeration, beside pi* and best-of-N. Writes `frontier.json` (a row for
each method, beta and seed), `frontier.png` and `frontier-dark.png` to DIR (.cache/frontier), and prints a table.
--quick is smaller: one seed, two betas, a third of the pairs. `trainer=FSDPTrainer world_size=2` runs it on two
processes.
docs/frontier.md describes the task and the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
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
OPTIMAL_BETAS = np.geomspace(50, 0.05, 61)  # close together, as the curve is interpolated between them
DRAWS = tuple(2**k for k in range(1, 13))  # best-of-N
TUNED_ON = 100  # the seed of --tune, used by no other run
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

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in (self.method, self.beta, self.seed, self.lr) if part is not None)


# --- the runs ---------------------------------------------------------------------------------------------------------


def train_reference(root: Path, task: Task, size: Size, extra: Sequence[str]) -> exact.Limit:
    """Run SFT on a demonstrator's texts; its policy is the start and the reference of every method."""
    rng = np.random.default_rng([task.seed, 5])

    def demonstrations(prompts: np.ndarray) -> Pairs:  # SFT reads the chosen ones alone
        return Pairs(prompts, task.demonstrate(prompts, rng), task.demonstrate(prompts, rng))

    runs.write_model(root / "model", task)
    runs.write_pairs(root / "data" / "sft", task, demonstrations(task.train_prompts), demonstrations(task.test_prompts))
    common = runs.list_overrides(root, task, data="sft")
    job = Job(root / "runs" / "sft", (*common, *SFT, f"n_epochs={size.sft_epochs}", *extra))
    for _ in runs.run_all([job], functools.partial(keep_policy, root), at_once=1):
        pass
    reference = exact.leaf_logps(runs.load_policy(root, root / "reference.pt"), task, task.test_prompts)
    return exact.Limit(reference, task.reward(task.test_prompts[:, None], task.leaves[None]))


def keep_policy(root: Path, job: Job) -> None:
    shutil.copy(job.directory / "LATEST" / "policy.pt", root / "reference.pt")


def write_preferences(root: Path, task: Task, size: Size, seeds: Sequence[int], noises: Sequence[float]) -> None:
    """Write labelled pairs of the reference's responses for each seed, the same pairs for each noise."""
    model = runs.load_policy(root, root / "reference.pt")
    for seed in seeds:
        for noise in noises:
            rng = np.random.default_rng([task.seed, 6, seed])
            write = functools.partial(exact.draw, model, task, rng=rng)
            train, test = (
                draw_pairs(task, prompts, write, rng, noise=noise)
                for prompts in (task.train_prompts[: size.pairs], task.test_prompts)
            )
            runs.write_pairs(root / "data" / data_name(seed, noise), task, train, test)


def data_name(seed: int, noise: float) -> str:
    return f"pairs_{seed}" + f"_noise_{noise:g}".replace(".", "_") * (noise > 0)


def make_job(root: Path, task: Task, size: Size, run: Run, noise: float, extra: Sequence[str]) -> Job:
    """Make a run's job, with as many labels and updates as the others; online pairs are new, so seen once."""
    method = METHODS[run.method]
    epochs, batch_size = (1, BATCH // size.epochs) if method.once else (size.epochs, BATCH)
    online = {"scorer": runs.write_scorer(root, task, run.seed), "longest": task.response_length}
    overrides = (
        *runs.list_overrides(root, task, data=data_name(run.seed, noise if method.noisy else 0)),
        *method.list_overrides(beta=run.beta, noise=noise, **online),
        *(f"seed={run.seed}", f"lr={run.lr}", f"model.archive={root / 'reference.pt'}"),
        *(f"n_epochs={epochs}", f"batch_size={batch_size}", "warmup_steps=10", *extra),
    )
    return Job(root / "runs" / run.name, overrides)


def judge(root: Path, task: Task, limit: exact.Limit, job: Job) -> None:
    """Write the reward and KL of a run's policy, and the other values of its row, to `point.json`."""
    model = runs.load_policy(root, job.directory / "LATEST" / "policy.pt")
    found = exact.measure(exact.leaf_logps(model, task, task.test_prompts), task, limit)
    metrics = (job.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ties = [line["online/ties"] for line in map(json.loads, metrics) if "online/ties" in line]
    if ties:
        found["ties"] = float(np.mean(ties))  # share of labels spent without effect
    (job.directory / "point.json").write_text(json.dumps(found), encoding="utf-8")


def train_all(
    root: Path, task: Task, size: Size, limit: exact.Limit, wanted: Sequence[Run], noise: float, extra: Sequence[str]
) -> list[dict[str, Any]]:
    """Train all runs. Returns their rows, in the same order."""
    jobs = {make_job(root, task, size, run, noise, extra): run for run in wanted}
    rows, began = {}, time.perf_counter()
    finish = functools.partial(judge, root, task, limit)
    for job in runs.run_all([*jobs], finish, at_once=len(os.sched_getaffinity(0))):
        run = jobs[job]
        point = json.loads((job.directory / "point.json").read_text(encoding="utf-8"))
        rows[run] = make_row(run.method, run.beta, run.seed, **point)
        rows[run] |= {"label_noise": noise if METHODS[run.method].noisy else 0.0, "lr": run.lr}
        left = (time.perf_counter() - began) / len(rows) * (len(wanted) - len(rows))
        print(f"{len(rows)}/{len(wanted)}  {sentence(rows[run])}  {left:.0f} s left", flush=True)
    return [rows[run] for run in wanted]


# --- rows -------------------------------------------------------------------------------------------------------------


def make_row(
    method: str, beta: float | None, seed: int | None, reward: float, kl: float, **more: Any
) -> dict[str, Any]:
    """Make a row. Reward and KL are exact, so their standard errors are 0; rows of seeds show the spread."""
    exactly = {"reward": reward, "reward_se": 0.0, "kl": kl, "kl_se": 0.0}
    return {"method": method, "beta": beta, "seed": seed, **exactly, **more}


def sentence(row: dict[str, Any]) -> str:
    name = row["method"] + "".join(f" {key} {row[key]:g}" for key in ("beta", "seed") if row[key] is not None)
    return f"{name}: reward {row['reward']:.3f} at KL {row['kl']:.3f}"


def known_rows(limit: exact.Limit, task: Task) -> list[dict[str, Any]]:
    """Rows of policies known without a run: the reference, pi*, best-of-N, the law of the chosen responses."""

    def known(method: str, logps: np.ndarray, beta: float | None = None, **more: Any) -> dict[str, Any]:
        return make_row(method, beta, None, **exact.measure(logps, task, limit, optimal=method == "pi_star"), **more)

    return [
        known("sft", limit.reference),
        *(known("pi_star", exact.optimum(beta, *limit), beta) for beta in map(float, OPTIMAL_BETAS)),
        *(known(f"best_of_{n}", exact.best_of(n, *limit), n=n) for n in DRAWS),
        known("chosen", exact.chosen(*limit)),
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def wanted_runs(size: Size, noise: float) -> list[Run]:
    methods = {name: method for name, method in METHODS.items() if noise > 0 or not method.noisy}

    def list_betas(method: Method) -> Sequence[float | None]:
        if size.few_betas:
            return method.betas[1::2] or method.betas
        return (*method.betas, *method.between)

    return [
        Run(name, beta, seed, method.lr)
        for seed in size.seeds
        for name, method in methods.items()
        for beta in list_betas(method)
    ]


def rates_to_try() -> list[Run]:
    """Runs of --tune, the same for each method: every learning rate with every second beta."""
    methods = {name: method for name, method in METHODS.items() if not method.noisy}
    return [
        Run(name, beta, TUNED_ON, lr) for name, method in methods.items() for lr in RATES for beta in method.betas[::2]
    ]


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def start_afresh(out: Path, task: Task, size: Size, extra: Sequence[str]) -> tuple[Path, exact.Limit]:
    """Make an empty directory for runs, and train the reference in it."""
    root = out / "frontier-runs"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    runs.import_all()
    return root, train_reference(root, task, size, extra)


def sweep(out: Path, task: Task, size: Size, noise: float, extra: Sequence[str], *, tune: bool = False) -> None:
    """Run everything, and write the results. Raises InputError and RunError as train.py does."""
    from experiments.frontier.picture import draw
    from experiments.frontier.reading import rates_as_text, tables

    root, limit = start_afresh(out, task, size, extra)
    wanted = rates_to_try() if tune else wanted_runs(size, noise)
    write_preferences(root, task, size, sorted({run.seed for run in wanted}), (0,) if tune or not noise else (0, noise))
    rows = known_rows(limit, task) + train_all(root, task, size, limit, wanted, noise, extra)
    if tune:
        write_json(out / "rates.json", rows)
        print(rates_as_text(rows, BUDGETS))
        return
    write_json(out / "frontier.json", rows)
    for name, dark in (("frontier.png", False), ("frontier-dark.png", True)):
        (out / name).write_bytes(draw(rows, dark=dark))
    print("\n\n".join(tables(rows)))


def run_controls(out: Path, task: Task, size: Size, extra: Sequence[str]) -> None:
    """Run the controls; write and print their rows."""
    from experiments.frontier.controls import run_all
    from experiments.frontier.reading import controls_as_text

    root, _ = start_afresh(out, task, size, extra)
    reference, rows = runs.load_policy(root, root / "reference.pt"), []
    for row in run_all(reference, task, pairs=size.pairs, epochs=size.epochs, seeds=size.seeds):
        rows.append(row)
        settings = (f"{key} {row[key]:g}" for key in ("shortest", "beta", "seed", "scale") if key in row)
        print(row["method"], *settings, f"reward {row['reward']:.3f} at KL {row['kl']:.3f}", flush=True)
    write_json(out / "controls.json", rows)
    print(controls_as_text(rows))


def read_rows(files: Sequence[Path]) -> str:
    """Format the tables of a sweep's file, a controls' file, or both, with reweighted DPO in the sweep's tables."""
    from experiments.frontier.reading import controls_as_text, tables

    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    controls = [row for row in rows if "shortest" in row]
    reweighted = [{**row, "beta": row["beta"] / row["scale"]} for row in controls if "scale" in row]
    found = [controls_as_text(controls)] if controls else []
    if len(rows) > len(controls):
        found += tables([row for row in rows if "shortest" not in row] + reweighted)
    return "\n\n".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.frontier", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller: one seed, two betas, a third of the pairs")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: .cache/frontier; -quick, -tune, -controls)"
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
    asked = parser.parse_intermixed_args(arguments)
    if not 0 <= asked.label_noise < 0.5:
        parser.error(f"--label-noise {asked.label_noise} must be in [0, 0.5): at 0.5 labels say nothing")
    from dpo.settings.command_line import check_command_line

    check_command_line(["exp_name=frontier", "model.name_or_path=MODEL", *asked.overrides])
    default = OUT.with_name(OUT.name + "-quick" * asked.quick + "-tune" * asked.tune + "-controls" * asked.controls)
    out, began = (asked.out or default).expanduser().resolve(), time.perf_counter()
    try:
        if asked.read:
            print(read_rows(asked.read))
            return 0
        out.mkdir(parents=True, exist_ok=True)
        size = QUICK if asked.quick else FULL
        if asked.controls:
            run_controls(out, Task(), size, asked.overrides)
        else:
            sweep(out, Task(), size, asked.label_noise, asked.overrides, tune=asked.tune)
    except (OSError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{time.perf_counter() - began:.0f} s; written to {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
