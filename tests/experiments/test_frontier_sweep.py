"""`experiments.frontier` as it is run: its rows and its runs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.models import plain_logps
from support.runs import ROOT, make_environment, run_script

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models.pretrained import load_model
from experiments.frontier import __main__ as frontier
from experiments.frontier import sweep as sweeps
from experiments.frontier.methods import METHODS, RM_BETAS, RM_DRAWS, SCALES
from experiments.frontier.task import NONE, Task

pytestmark = pytest.mark.slow

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=13, for_tuning=4)  # and 64 to train on
SIZE = sweeps.Size(pairs=64, sft_epochs=4, seeds=(0,), course=True)
OVERRIDES = ("model.attn_implementation=eager",)
NOISE = 0.3  # not the command's
SWEPT = {"dpo": 0.3, "online_dpo": 0.1, "cdpo_noisy": 0.1}  # by train.py, each with one beta
PLAIN = {"unlikelihood": 0.1, "exact_rl": 0.1, "rm_tokens": None}
KEYS = {"method", "beta", "seed", "reward", "kl", "most_reward"}
PNG = b"\x89PNG"


class Sweep(NamedTuple):
    out: Path
    rows: list[dict]
    printed: str

    @property
    def root(self) -> Path:
        return self.out / "frontier-runs" / "fixed-0"

    def list_rows(self, method: str) -> list[dict]:
        return [row for row in self.rows if row["method"] == method and "share" not in row]

    def row(self, method: str) -> dict:
        [found] = self.list_rows(method)
        return found

    def run_of(self, method: str) -> Path:
        [found] = self.root.glob(f"runs/{method}-*")
        return found


def prepare(patch):
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):  # which the command sets
        patch.setenv(name, {"CUDA_VISIBLE_DEVICES": ""}.get(name, "1"))
    methods = {name: METHODS[name]._replace(betas=(beta,), between=()) for name, beta in (SWEPT | PLAIN).items()}
    patch.setattr(sweeps, "METHODS", methods)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """One beta of six methods; the policies of train.py are kept."""
    out, finish, printed = tmp_path_factory.mktemp("sweep"), sweeps.Sweep.finish, io.StringIO()

    def keep_and_finish(self, job, run):
        if job.overrides:
            shutil.copy(job.directory / "LATEST" / "policy.pt", job.directory)
        finish(self, job, run)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        prepare(patch)
        patch.setattr(sweeps.Sweep, "finish", keep_and_finish)
        frontier.run_sweeps(out, [TASK], SIZE, OVERRIDES, noise=NOISE)
    return Sweep(out, json.loads((out / "frontier.json").read_text()), printed.getvalue())


def logps_of(sweep, archive):
    """Every response to every held-out prompt, by the trainer's plain path."""
    model = load_model(str(sweep.root / "model"), dtype=torch.float32, archive=str(archive), random_init=True).eval()
    examples = []
    for prompt in TASK.test_prompts.tolist():
        for leaf in TASK.leaves.tolist():
            examples.append(Example(tuple(prompt), (tuple(leaf),)))
    with torch.no_grad():
        (found,) = plain_logps(model, examples)
    return found.double().numpy().reshape(len(TASK.test_prompts), len(TASK.leaves))


@pytest.fixture(scope="module")
def reference(sweep):
    return logps_of(sweep, sweep.root / "reference.pt")


@pytest.fixture(scope="module")
def rewards():
    return np.array([[float(TASK.reward(prompt, leaf)) for leaf in TASK.leaves] for prompt in TASK.test_prompts])


def assert_is_a_frontier(rows):
    """All keys, distinct rows, and no point above pi*."""
    assert all(set(row) >= KEYS for row in rows)
    keys = ("task", "fixed_length", "method", "beta", "seed", "share", "n")
    assert len({tuple(row.get(key) for key in keys) for row in rows}) == len(rows)
    optima = {}  # by task
    for row in rows:
        if row["method"] == "pi_star":
            optima.setdefault((row.get("task"), row.get("fixed_length")), []).append(row)
    assert min(map(len, optima.values())) > 10
    for row in rows:
        assert row["kl"] >= -1e-6
        assert row["reward"] <= row["most_reward"] + 1e-6
        # the same by what the rows alone say: pi* of beta maximizes reward - beta KL
        for optimum in optima[row.get("task"), row.get("fixed_length")]:
            beta = optimum["beta"]
            assert row["reward"] - beta * row["kl"] <= optimum["reward"] - beta * optimum["kl"] + 1e-6


# --- a small sweep ----------------------------------------------------------------------------------------------------


def test_a_small_sweep_is_a_frontier(sweep):
    assert_is_a_frontier(sweep.rows)
    derived = {"dpo_reweighted", "best_by_rm_tokens"}
    assert {row["method"] for row in sweep.rows if row["seed"] == 0} == {*SWEPT, *PLAIN, *derived}
    policies = (*SWEPT, "unlikelihood", "exact_rl")
    assert min(sweep.row(method)["kl"] for method in policies) > 1e-3  # they were trained
    assert all((sweep.out / name).read_bytes().startswith(PNG) for name in ("frontier.png", "frontier-dark.png"))
    assert "| online_dpo | 0.1 |" in sweep.printed
    assert "| online_dpo - dpo_reweighted | fixed |" in sweep.printed


def test_rows_without_a_run_of_their_own_are_of_every_scale_beta_and_n(sweep):
    reweighted = sweep.list_rows("dpo_reweighted")
    assert [row["scale"] for row in reweighted] == [*SCALES]
    assert reweighted[SCALES.index(1.0)]["kl"] == pytest.approx(sweep.row("dpo")["kl"])
    assert [row["beta"] for row in sweep.list_rows("rm_tokens")] == [*RM_BETAS]
    assert [row["n"] for row in sweep.list_rows("best_by_rm_tokens")] == [*RM_DRAWS]


def test_policies_along_a_run_are_measured_after_each_third(sweep):
    """4 updates: after 1, 2, and at the end."""
    for method in (*SWEPT, "exact_rl"):
        along = [row for row in sweep.rows if row["method"] == method and "share" in row]
        assert [row["share"] for row in along] == [0.25, 0.5]
        assert len({row["kl"] for row in [*along, sweep.row(method)]}) == 3


def test_a_sweep_continues_where_it_was_stopped(sweep, monkeypatch, capsys):
    prepare(monkeypatch)
    again = sweeps.Sweep(sweep.root, TASK, SIZE, OVERRIDES)
    wanted = sweeps.list_runs(SIZE, TASK, NOISE)
    stopped = again.make_job(next(run for run in wanted if run.method == "rm_tokens"))
    rows = json.loads(stopped.result.read_text())
    stopped.result.unlink()
    again.train_reference()
    found = again.train_all(wanted)
    assert found == [row for row in sweep.rows if row["seed"] == 0]
    assert json.loads(stopped.result.read_text()) == rows
    said = capsys.readouterr().out
    assert "fixed-0: 5 of 6 runs were done before" in said
    assert said.count("rm_tokens") == said.count("s left") == 1

    other = sweeps.Sweep(sweep.root, TASK, SIZE._replace(sft_epochs=5), OVERRIDES)
    with pytest.raises(InputError, match="has runs with other settings"):
        other.train_reference()


def test_tuning_measures_on_prompts_of_its_own(sweep):
    """The limit of `tuning` is that of other prompts, from the same reference."""
    tuning = sweeps.Sweep(sweep.root, TASK, SIZE, OVERRIDES, tuning=True)
    assert tuning.prompts.tolist() == TASK.tuning_prompts.tolist()
    assert tuning.limit.rewards == pytest.approx(TASK.reward(TASK.tuning_prompts[:, None], TASK.leaves[None]))
    trials = {name: set() for name in METHODS if not METHODS[name].noisy}
    for run in sweeps.list_tuning_runs(SIZE, frontier.RATES, frontier.PASSES):
        base = run.passes // int(run.beta) if METHODS[run.method].knob == "passes" else run.passes
        trials[run.method].add((run.lr, base))
    assert {len(own) for own in trials.values()} == {len(frontier.RATES) * len(frontier.PASSES)}


@pytest.mark.parametrize("method", ["sft", "online_dpo"])
def test_a_row_is_where_its_policy_is(method, sweep, reference, rewards):
    logps = reference if method == "sft" else logps_of(sweep, sweep.run_of(method) / "policy.pt")
    found = {"reward": 0.0, "kl": 0.0, "length": 0.0}
    for i, j in np.ndindex(logps.shape):
        share = math.exp(logps[i, j]) / len(TASK.test_prompts)
        found["reward"] += share * rewards[i, j]
        found["kl"] += share * (logps[i, j] - reference[i, j])
        found["length"] += share * sum(symbol != NONE for symbol in TASK.leaves[j])
    row = sweep.row(method)
    assert {key: row[key] for key in found} == pytest.approx(found, abs=1e-4)
    assert row["empty"] == 0
    assert ("ties" in row) == (method == "online_dpo")


def test_the_most_reward_is_the_least_of_what_the_dual_allows(sweep, reference, rewards):
    """Lagrange's bound: min over beta of beta (KL + mean log Z)."""
    betas = np.geomspace(1e-5, 1e4, 2001)
    log_z = np.array([np.logaddexp.reduce(reference + rewards / beta, axis=-1).mean() for beta in betas])
    for row in sweep.rows:
        assert row["most_reward"] == pytest.approx((betas * (row["kl"] + log_z)).min(), abs=5e-4)


def test_noisy_pairs_are_the_clean_ones_of_which_a_share_is_swapped(sweep):
    rows = []
    for name in ("pairs_0", "pairs_0_noise_0_3"):
        texts = [(sweep.root / "data" / name / f"{split}.jsonl").read_text() for split in ("train", "test")]
        rows.append([json.loads(line) for text in texts for line in text.splitlines()])
    changed = [(clean, noisy) for clean, noisy in zip(*rows, strict=True) if clean != noisy]
    for clean, noisy in changed:
        assert noisy == {"prompt": clean["prompt"], "chosen": clean["rejected"], "rejected": clean["chosen"]}
    assert len(changed) / len(rows[0]) == pytest.approx(NOISE, abs=0.2)  # 4 standard errors of 81 labels


@pytest.mark.parametrize(
    ("method", "noise", "smoothing", "data"),
    [("dpo", 0, 0, "pairs_0"), ("online_dpo", 0, 0, "pairs_0"), ("cdpo_noisy", NOISE, NOISE, "pairs_0_noise_0_3")],
)
def test_a_run_has_the_labels_and_settings_that_its_row_says(method, noise, smoothing, data, sweep):
    row, config = sweep.row(method), OmegaConf.load(sweep.run_of(method) / "config.yaml")
    assert row["label_noise"] == noise
    assert (config.datasets, config.dataset_sources[data]) == ([data], str(sweep.root / "data" / data))
    assert config.loss.label_smoothing == smoothing
    assert (config.loss.beta, config.seed, config.lr) == (row["beta"], row["seed"], row["lr"])
    assert config.model.attn_implementation == "eager"  # asked on the command line
    updates = (sweep.run_of(method) / "metrics.jsonl").read_text().count("loss/train")
    assert updates == SIZE.pairs // 64 * row["passes"]


def test_settings_of_tuning_replace_those_of_the_table():
    settings = {"kto": {"lr": 0.5, "passes": 2}, "dpo": {"lr": 0.25, "passes": 1}}
    listed = sweeps.list_runs(SIZE, TASK, NOISE, settings)
    assert {(run.lr, run.passes) for run in listed if run.method in ("dpo", "dpo_noisy")} == {(0.25, 1)}
    [kto, *_] = [run for run in listed if run.method == "kto"]
    assert (kto.lr, kto.passes) == (0.5, 2)


def test_a_batch_of_kto_has_both_responses_of_as_many_pairs(sweep):
    run = next(run for run in sweeps.list_runs(SIZE, TASK, NOISE) if run.method == "kto")
    overrides = sweeps.Sweep(sweep.root, TASK, SIZE, OVERRIDES).make_job(run).overrides
    assert {"loss=kto", "unpair=true", "batch_size=128", "n_epochs=4"} <= {*overrides}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label-noise", "0.5"], "--label-noise 0.5 must be in [0, 0.5)"),
        (["los=dpo"], "los"),
        (["lr=-1"], "lr=-1"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(arguments, said, tmp_path):
    result = run_script("-m", "experiments.frontier", "--out", str(tmp_path / "out"), *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_the_measured_frontier_is_one():
    """The file is that of docs/RESULTS.md."""
    rows = json.loads((ROOT / "docs" / "frontier.json").read_text())
    assert_is_a_frontier(rows)
    seeds = {}
    for row in rows:
        if row["seed"] is not None and "share" not in row:
            seeds.setdefault(row["method"], set()).add((row.get("task", 0), row["seed"]))
    assert len({frozenset(own) for own in seeds.values()}) == 1  # all differences are paired


def run_for_minutes(*arguments):
    command = [sys.executable, "-m", "experiments.frontier", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=make_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.timeout(1800)
def test_quick_on_one_process_and_two(tmp_path):
    found = []
    for name, more in (("one", ()), ("two", ("trainer=FSDPTrainer", "world_size=2"))):
        run_for_minutes("--quick", "--out", str(tmp_path / name), *more)
        rows = json.loads((tmp_path / name / "frontier.json").read_text())
        assert_is_a_frontier(rows)
        assert {row["method"] for row in rows} >= {name for name, method in METHODS.items() if method.core}
        found.append(rows)
    for one, two in zip(*found, strict=True):
        # by rounding another answer may be drawn, or be the best
        is_discrete = one["method"] == "online_dpo" or one["method"].startswith("best_by_")
        tolerance = 0.2 if is_discrete else 1e-4
        assert (two["reward"], two["kl"]) == pytest.approx((one["reward"], one["kl"]), abs=tolerance)
