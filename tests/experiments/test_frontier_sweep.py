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
from dpo.models.pretrained import load_model
from experiments.frontier import __main__ as frontier
from experiments.frontier.methods import METHODS
from experiments.frontier.task import NONE, Task

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=17)
NOISE = 0.3  # not the command's
SWEPT = ("cdpo", "online_dpo", "cdpo_noisy")
KEYS = {"method", "beta", "seed", "reward", "reward_se", "kl", "kl_se"}
PNG = b"\x89PNG"


class Sweep(NamedTuple):
    out: Path
    rows: list[dict]
    printed: str

    @property
    def root(self) -> Path:
        return self.out / "frontier-runs"

    def row(self, method: str) -> dict:
        [found] = [row for row in self.rows if row["method"] == method]
        return found

    def run_of(self, method: str) -> Path:
        [found] = self.root.glob(f"runs/{method}-*")
        return found


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """One beta of three methods, whose policies are kept."""
    out, judge, printed = tmp_path_factory.mktemp("sweep"), frontier.Sweep.judge, io.StringIO()

    def keep_and_judge(self, job):
        shutil.copy(job.directory / "LATEST" / "policy.pt", job.directory)
        judge(self, job)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):  # which the command sets
            patch.setenv(name, {"CUDA_VISIBLE_DEVICES": ""}.get(name, "1"))
        methods = {name: METHODS[name]._replace(betas=(0.1,), between=()) for name in SWEPT}
        patch.setattr(frontier, "METHODS", methods)
        patch.setattr(frontier.Sweep, "judge", keep_and_judge)
        size = frontier.Size(pairs=64, epochs=4, sft_epochs=4, seeds=(0,))
        swept = frontier.Sweep(out / "frontier-runs", TASK, size, ["model.attn_implementation=eager"])
        frontier.run_sweep(swept, out, frontier.list_runs(size, NOISE))
    return Sweep(out, json.loads((out / "frontier.json").read_text()), printed.getvalue())


def logps_of(sweep, archive):
    """Every response to every held-out prompt, by the trainer's plain path."""
    model = load_model(str(sweep.root / "model"), dtype=torch.float32, archive=str(archive), random_init=True).eval()
    eos, examples = TASK.symbols, []
    for prompt in TASK.test_prompts.tolist():
        for leaf in TASK.leaves.tolist():
            response = (*(symbol for symbol in leaf if symbol != NONE), eos)[: TASK.response_length]
            examples.append(Example(tuple(prompt), (response,)))
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
    assert len({(row["method"], row["beta"], row["seed"]) for row in rows}) == len(rows)
    optima = [row for row in rows if row["method"] == "pi_star"]
    assert len(optima) > 10
    for row in rows:
        error = 2 * (row["reward_se"] + row["kl_se"]) + 1e-6
        assert row["kl"] >= -error
        assert row["reward"] <= row["most_reward"] + error
        # the same by what the rows alone say: pi* of beta maximizes reward - beta KL
        for optimum in optima:
            beta = optimum["beta"]
            assert row["reward"] - beta * row["kl"] <= optimum["reward"] - beta * optimum["kl"] + error


# --- a small sweep ----------------------------------------------------------------------------------------------------


def test_a_small_sweep_is_a_frontier(sweep):
    assert_is_a_frontier(sweep.rows)
    assert {row["method"] for row in sweep.rows if row["seed"] == 0} == {*SWEPT}
    assert min(sweep.row(method)["kl"] for method in SWEPT) > 0.01  # they were trained
    assert all((sweep.out / name).read_bytes().startswith(PNG) for name in ("frontier.png", "frontier-dark.png"))
    assert "| online_dpo | 0.1 |" in sweep.printed


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
    assert row["empty"] == pytest.approx(np.exp(logps[:, 0]).mean(), abs=1e-4)
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
    [("cdpo", 0, 0.1, "pairs_0"), ("online_dpo", 0, 0, "pairs_0"), ("cdpo_noisy", NOISE, NOISE, "pairs_0_noise_0_3")],
)
def test_a_run_has_the_labels_and_settings_that_its_row_says(method, noise, smoothing, data, sweep):
    row, config = sweep.row(method), OmegaConf.load(sweep.run_of(method) / "config.yaml")
    assert row["label_noise"] == noise
    assert (config.datasets, config.dataset_sources[data]) == ([data], str(sweep.root / "data" / data))
    assert config.loss.label_smoothing == smoothing
    assert (config.loss.beta, config.seed, config.lr) == (row["beta"], row["seed"], row["lr"])
    assert config.model.attn_implementation == "eager"  # asked on the command line


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
    seeds = {name: {row["seed"] for row in rows if row["method"] == name} for name in METHODS}
    assert list(seeds.values()) == [{0, 1, 2}] * len(METHODS)


def test_the_tables_of_the_document_are_those_of_its_rows():
    files = [ROOT / "docs" / name for name in ("frontier.json", "frontier-controls.json")]
    read = frontier.read_rows(files)
    text = (ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8")
    assert [table for table in read.split("\n\n") if table not in text] == []


def run_for_minutes(*arguments):
    command = [sys.executable, "-m", "experiments.frontier", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=make_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_controls_are_written_and_can_be_read(tmp_path):
    for command in (("--controls", "--quick", "--out", str(tmp_path)), ("--read", str(tmp_path / "controls.json"))):
        printed = run_for_minutes(*command)
        assert "| 5 | 0.01 | " in printed
        assert "| 3.3 | " in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_on_one_process_and_two(tmp_path):
    found = []
    for name, more in (("one", ()), ("two", ("trainer=FSDPTrainer", "world_size=2"))):
        run_for_minutes("--quick", "--out", str(tmp_path / name), *more)
        rows = json.loads((tmp_path / name / "frontier.json").read_text())
        assert_is_a_frontier(rows)
        assert {row["method"] for row in rows} >= METHODS.keys()
        found.append([(row["reward"], row["kl"]) for row in rows])
    assert np.array(found[1]) == pytest.approx(np.array(found[0]), abs=1e-4)
