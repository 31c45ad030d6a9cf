"""`experiments.frontier` as it is run: its rows and its runs."""

import contextlib
import io
from typing import NamedTuple

import pytest
from support.runs import ROOT, read_json

from experiments.frontier import __main__ as frontier
from experiments.frontier import sweep as sweeps
from experiments.frontier.methods import METHODS, RM_BETAS
from experiments.frontier.task import Task

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=13, for_tuning=4)  # and 64 to train on
SIZE = sweeps.Size(pairs=64, sft_epochs=4, seeds=(0,))
OVERRIDES = ("model.attn_implementation=eager",)
SWEPT = {"dpo": 0.3, "online_dpo": 0.1}  # by train.py, each with one beta
PLAIN = {"unlikelihood": 0.1, "exact_rl": 0.1, "rm_tokens": None}


class Swept(NamedTuple):
    sweep: sweeps.Sweep
    rows: list[dict]
    printed: str

    def row(self, method: str) -> dict:
        [found] = [row for row in self.rows if row["method"] == method]
        return found


def prepare(patch):
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):  # which the command sets
        patch.setenv(name, {"CUDA_VISIBLE_DEVICES": ""}.get(name, "1"))
    methods = {name: METHODS[name]._replace(betas=(beta,)) for name, beta in (SWEPT | PLAIN).items()}
    patch.setattr(sweeps, "METHODS", methods)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One beta of five methods."""
    out, printed = tmp_path_factory.mktemp("sweep"), io.StringIO()
    sweep = sweeps.Sweep(out, TASK, SIZE, OVERRIDES)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        prepare(patch)
        frontier.run_sweep(sweep)
    return Swept(sweep, read_json(out / "frontier.json"), printed.getvalue())


@pytest.mark.slow
def test_a_small_sweep_is_a_frontier(swept):
    optima = [row for row in swept.rows if row["method"] == "pi_star"]
    for row in swept.rows:
        assert row["kl"] >= -1e-6
        assert row["reward"] <= row["most_reward"] + 1e-6
        # The rows alone say the same: pi* of beta maximizes reward - beta KL.
        for optimum in optima:
            beta = optimum["beta"]
            assert row["reward"] - beta * row["kl"] <= optimum["reward"] - beta * optimum["kl"] + 1e-6
    assert [row["method"] for row in swept.rows if row["seed"] == 0][-len(RM_BETAS) :] == ["rm_tokens"] * len(RM_BETAS)
    assert min(swept.row(method)["kl"] for method in (*SWEPT, "unlikelihood", "exact_rl")) > 1e-3  # they were trained
    assert "| online_dpo - dpo |" in swept.printed
    assert (swept.sweep.out / "frontier.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_continues_where_it_was_stopped_and_other_settings_have_a_directory_of_their_own(
    swept, monkeypatch, printed
):
    prepare(monkeypatch)
    wanted = sweeps.list_runs(SIZE)
    stopped = swept.sweep.make_job(next(run for run in wanted if run.method == "rm_tokens"))
    rows = read_json(stopped.result)
    stopped.result.unlink()
    assert swept.sweep.train_all(wanted) == [row for row in swept.rows if row["seed"] == 0]
    assert read_json(stopped.result) == rows
    assert printed().startswith("5/5  rm_tokens-0-")
    other = sweeps.Sweep(swept.sweep.out, TASK, SIZE._replace(sft_epochs=5), OVERRIDES)
    assert not other.root.exists()


def test_the_rows_of_the_document_are_still_read():
    text = frontier.read_tables([ROOT / "docs" / "frontier.json", ROOT / "docs" / "frontier-tasks.json"])
    published = (ROOT / "docs" / "RESULTS.md").read_text()
    cells = "**+0.10 [+0.04, +0.16]** | **+0.13 [+0.03, +0.23]** | - |"
    assert f"| dpo - rm_tokens | {cells}" in text
    assert f"| dpo - rm_tokens | fixed | {cells}" in published
