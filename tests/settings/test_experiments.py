"""Whole experiments, ours and a user's, with any other override."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from support.commands import compose, find_refusals
from support.runs import ROOT, train

from dpo.settings.plan import ParallelDims, resolve
from dpo.settings.validation import find_problems, find_warnings

EXPERIMENTS = sorted(file.stem for file in (ROOT / "config" / "experiment").glob("*.yaml"))
PAPER_SETTINGS = {"batch_size": 64, "eval_batch_size": 32, "trainer": "FSDPTrainer"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_complete(name, tmp_path):
    config = compose(f"experiment={name} model.archive={tmp_path}")  # the run of SFT
    processes = 8 if name.endswith("8gpu") else 4
    dims = ParallelDims.of(processes if config.trainer == "FSDPTrainer" else 1)
    plan = replace(resolve(config), dims=dims, gpus=dims.world_size)
    assert (find_problems(plan), find_warnings(plan)) == ([], [])
    assert config.exp_name == name


@pytest.mark.parametrize("line", ["{} experiment=hh_pythia28_dpo", "+experiment=hh_pythia28_dpo {}"])
def test_every_override_counts_more_than_the_experiment_wherever_it_stands(line):
    others = "model=demo loss=ipo loss.beta=0.3 exp_name=mine lr=1e-3 datasets=[demo] n_epochs=3"
    changed = compose(line.format(others))
    assert (changed.loss.name, changed.loss.beta, changed.model.block_name) == ("ipo", 0.3, "LlamaDecoderLayer")
    assert (changed.exp_name, changed.lr, changed.datasets, changed.n_epochs) == ("mine", 1e-3, ["demo"], 3)
    assert changed.batch_size == PAPER_SETTINGS["batch_size"]


@pytest.mark.parametrize("data", ["hh", "shp", "se"])
@pytest.mark.parametrize(("loss", "beta"), [("sft", None), ("dpo", 0.1)])
def test_the_papers_runs_have_the_settings_of_the_published_command(data, loss, beta):
    config = compose(f"experiment={data}_pythia28_{loss}")
    published = PAPER_SETTINGS | {"lr": 5e-7, "optimizer": "RMSprop", "warmup_steps": 150, "max_length": 512}
    assert {key: config[key] for key in published} == published
    assert config.gradient_accumulation_steps == 1  # theirs has 2: the same gradients, communicated twice
    assert (config.datasets, config.loss.name, config.loss.get("beta")) == ([data], loss, beta)
    assert (config.model.name_or_path, config.model.fsdp_policy_mp) == ("EleutherAI/pythia-2.8b", "bfloat16")


def test_a_run_of_dpo_asks_for_the_run_of_sft_that_it_continues():
    [problem] = find_refusals("experiment=hh_pythia28_dpo")
    assert problem.startswith("model.archive=${RUN_OF_SFT}/LATEST cannot be resolved: give model.archive=")
    assert find_refusals("experiment=hh_pythia28_dpo model.archive=null") == []


# --- of a user -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """A directory with `experiment/mine.yaml`, which builds on one of ours, and `experiment/hh_pythia28_sft.yaml`."""
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - hh_pythia28_sft\n  - _self_\n  - override /model: demo\nlr: 1e-4\n"
    )
    (folder / "hh_pythia28_sft.yaml").write_text("# @package _global_\nlr: 1e-4\n")
    return folder.parent


def test_an_own_experiment_may_build_on_one_of_ours(own):
    result = train(f"--config-dir={own}", "--cfg", "job", "experiment=mine", "batch_size=16")
    assert result.returncode == 0, result.stderr
    composed = yaml.safe_load(result.stdout)
    assert (float(composed["lr"]), composed["batch_size"], composed["eval_batch_size"]) == (1e-4, 16, 32)
    assert composed["model"]["block_name"] == "LlamaDecoderLayer"


def test_an_own_file_with_the_name_of_one_of_ours_is_refused(own):
    [problem, *_] = find_refusals(f"--config-dir={own} experiment=hh_pythia28_sft")
    assert problem.startswith("experiment=hh_pythia28_sft: a file of --config-dir has the name of one of ours")
