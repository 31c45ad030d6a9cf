"""What commit 540d4ef0 wrote, before `sft_loss` became `loss.average`, is continued and read.

`tests/data/540d4ef0` has its runs of SFT and of DPO after it, two updates each, and the metrics of `continued`, the
same runs two updates later. The commands were, with SETTINGS,

    python train.py loss=sft sft_loss=mean n_examples=8 local_run_dir=sft
    python train.py loss=dpo loss.beta=0.1 ledger=true model.archive=sft n_examples=8 local_run_dir=dpo
"""

import io
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pytests import refused
from support.runs import ROOT, TINY, assert_same_metrics, run_here

from dpo.analysis.runs import read_run
from dpo.checkpoint.files import read_state
from dpo.commands import main
from dpo.settings.validation import read_plan
from dpo.system.plain_files import read_yaml

SETTINGS = """
exp_name=old model.name_or_path=model datasets=[mine] dataset_sources.mine=pairs.jsonl holdout=4 wandb.enabled=false
local_dirs=[.] batch_size=4 eval_batch_size=4 n_epochs=null n_eval_examples=4 n_eval_model_samples=2 n_eval_tokens=8
max_length=48 max_prompt_length=32 optimizer=SGD warmup_steps=0 lr=0.1 eval_every=8 export=false
"""
OPTIONS = {"sft": ("loss.average=mean",), "dpo": ("loss.beta=0.1", "ledger=true", "model.archive=sft")}


@pytest.fixture(autouse=True)
def copied_runs(tmp_path, monkeypatch):
    shutil.copytree(TINY, tmp_path / "model")  # for its tokenizer; the weights are others
    shutil.copytree(ROOT / "tests" / "data" / "540d4ef0", tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def continue_run(loss: str, *options: str) -> None:
    run_here([*SETTINGS.split(), f"loss={loss}", f"local_run_dir={loss}", *options, "n_examples=16", "resume=auto"])


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_former_run_continues_as_its_own_commit_continued_it(loss):
    continue_run(loss, *OPTIONS[loss])
    assert_same_metrics(Path(loss), Path("continued", loss))


def test_a_former_key_is_read_by_its_present_name():
    assert read_run(Path("sft")).setting("loss.average") == "mean"
    assert read_plan(Path("sft", "config.yaml"), prefixes=("loss",)).loss.options == {"average": "mean"}
    with refused("loss.average=sum .was mean."):
        continue_run("sft")
    continue_run("sft", *OPTIONS["sft"])
    assert read_yaml(Path("sft", "config.yaml"))["loss"] == {"name": "sft", "average": "mean"}


@pytest.mark.parametrize("run", ["sft", "dpo"])
def test_the_commands_read_a_former_run(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is number 3?\n"))
    Path("judge.py").write_text("def score(prompts, answers):\n    return [len(answer) for answer in answers]\n")
    short = ["--max-new-tokens", "4"]

    assert main(["verify", run]) == 0
    assert main(["export", run, "exported"]) == 0
    assert main(["sample", run, *short]) == 0
    assert main(["evaluate", run, "--judge", "function:judge.py:score", *short]) == 0
    assert main(["report", run]) == 0

    state = read_state(Path(run, "step-8", "policy.pt"))
    exported = load_file("exported/model.safetensors")
    assert all(torch.equal(state[name], weight) for name, weight in exported.items())
    assert "--- policy ---" in capsys.readouterr().out
    assert Path(run, "evaluation", "evaluation-function.json").exists()
    page = Path(run, "report", "report.html").read_text()
    assert ("loss per token fell from 6.92 to 6.47" in page) == (run == "sft")
