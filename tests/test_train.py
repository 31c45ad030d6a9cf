"""The command line: what it accepts, how it refuses, and what a run leaves behind.

`train` and `run_python` are subprocesses; `main` is the same script in this process, for what does not need its own.
"""

from __future__ import annotations

import glob
import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from support.runs import GOLDEN, ROOT, compose, read_metrics, run_python, train, write_rows

import train as train_script
from dpo.losses import LOSSES
from dpo.settings.command_line import check_command_line
from dpo.system.signals import SIGNALS

SCRIPT = str(ROOT / "train.py")
TINY = (
    f"model.name_or_path={GOLDEN / 'tiny-llama'}",
    "model.reference_dtype=float32",
    "exp_name=test",
    "eval_batch_size=4",
    "n_eval_examples=4",
    "n_eval_model_samples=4",
    "max_length=48",
    "max_prompt_length=32",
)
DPO = ("loss=dpo", "loss.beta=0.1")


def hh_rows(n: int) -> list[dict[str, str]]:
    prompts = [f"\n\nHuman: Where is the key number {i}?\n\nAssistant:" for i in range(n)]
    return [{"chosen": f"{p} On the desk.", "rejected": f"{p} Go away{'!' * (i % 4)}"} for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """16 training pairs and 4 test pairs in HH's format."""
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "train.jsonl", hh_rows(20)[:16])
    write_rows(folder / "test.jsonl", hh_rows(20)[16:])
    return folder


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def main(monkeypatch, capsys):
    """`python train.py OVERRIDES` in this process, on the tiny Llama, W&B off."""

    def call(*overrides: str, tiny: tuple[str, ...] = TINY) -> Result:
        options = [o for o in overrides if o == "-m"]  # Hydra wants them first
        rest = [o for o in overrides if o != "-m"]
        monkeypatch.setattr(sys, "argv", [SCRIPT, *options, *tiny, "wandb.enabled=false", *rest])
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        capsys.readouterr()
        status, handlers = 0, {number: signal.getsignal(number) for number in SIGNALS}
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture
def trained(main, data, tmp_path):
    """The directory of a finished run on `data` with a few overrides, and what it printed."""

    def call(*overrides: str, run: str = "run") -> tuple[Path, str]:
        silent = ("sample_during_eval=false", "self_test=false", "do_first_eval=false")
        result = main(f"dataset_sources.hh={data}", f"local_run_dir={tmp_path / run}", *silent, *overrides)
        assert result.returncode == 0, result.stderr
        return tmp_path / run, result.stdout

    return call


# --- without training ----------------------------------------------------------------------------------------------


FSDP = (
    "gradient_accumulation_steps=2 batch_size=64 eval_batch_size=32 trainer=FSDPTrainer sample_during_eval=false "
    "model.fsdp_policy_mp=bfloat16"
)


@pytest.mark.parametrize(
    "command",
    [
        f"model=pythia28 datasets=[hh] loss=sft exp_name=anthropic_dpo_pythia28 {FSDP}",
        f"model=pythia28 datasets=[hh] loss=dpo loss.beta=0.1 exp_name=anthropic_dpo_pythia28 {FSDP} "
        "model.archive=/path/LATEST/policy.pt",
        "model=blank_model model.name_or_path=/path/to/llama model.block_name=LlamaDecoderLayer datasets=[hh,shp] "
        "loss=sft exp_name=x trainer=FSDPTrainer",
        "model=pythia69 exp_name=x loss=ipo loss.beta=0.1",
        "model=gptj exp_name=x loss=dpo loss.beta=0.1 loss.label_smoothing=0.1",
        "model=llama7b exp_name=x datasets=[mine] dataset_sources.mine=/data",
        "-m model=gpt2-xl exp_name=x loss=dpo,ipo loss.beta=0.05,0.1,0.5",
    ],
)
def test_the_commands_people_type_are_accepted(command):
    overrides = check_command_line(command.split())

    if "-m" not in overrides:
        config = compose(*overrides)
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            if key not in ("model", "loss"):
                got = OmegaConf.select(config, key)
                assert str(got).replace("'", "").replace(", ", ",").lower() == value.lower()
        if "FSDP" not in command:
            assert train_script.find_config_problems(config) == []


def imported_by(*overrides: str, **environment: str) -> set[str]:
    """The modules that a command imports."""
    result = run_python("-X", "importtime", SCRIPT, *overrides, **environment)
    return set(re.findall(r"\| +(\S+)$", result.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("--cfg", "job"),
        ("-sc", "query=bash"),
        ("exp_name=x", "lr=-1", "trainer=FSDPTrainer"),
        ("exp_name=x", "optimizer=AdmW", "model=nothing"),
    ],
)
def test_what_runs_nothing_imports_no_torch(command):
    if glob.glob("/dev/nvidia*"):
        pytest.skip("torch counts the GPUs")
    imported = imported_by(*command, COMP_LINE="python train.py loss=", COMP_POINT="21")
    assert "hydra" in imported
    assert not {"torch", "numpy", "transformers", "datasets", "wandb"} & imported


@pytest.mark.slow
def test_a_run_imports_only_what_it_uses(data, tmp_path):
    imported = imported_by(
        *TINY,
        *DPO,
        f"dataset_sources.hh={data}",
        "n_examples=4",
        "wandb.enabled=false",
        f"local_run_dir={tmp_path}/run",
    )
    assert "transformers.modeling_layers" in imported
    assert not {"datasets", "pandas", "pyarrow", "bs4", "multiprocess", "wandb", "torchvision"} & imported


def test_help_lists_every_key_within_3_seconds():
    start = time.monotonic()
    result = run_python(SCRIPT, "--help")
    assert time.monotonic() - start < 3

    assert result.returncode == 0
    keys = yaml.safe_load((ROOT / "config" / "config.yaml").read_text()).keys() - {"defaults", "hydra"}
    assert [key for key in keys if f"{key}:" not in result.stdout] == []
    assert "model: blank_model, blank_model_bfloat16, demo, " in result.stdout


def test_the_composed_config_can_be_shown_before_it_is_complete():
    result = run_python(SCRIPT, "--cfg", "job", "loss=ipo", "lr=1e-6")

    assert result.returncode == 0, result.stderr
    shown = yaml.safe_load(result.stdout)
    assert list(shown["loss"].items())[:2] == [("name", "ipo"), ("beta", "???")]
    assert (float(shown["lr"]), shown["exp_name"]) == (1e-6, "???")


def test_the_shell_completes_group_options_and_keys():
    def completions(line: str) -> list[str]:
        result = run_python(SCRIPT, "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    assert completions("python train.py loss=") == [f"loss={name}" for name in sorted(LOSSES)]
    assert "warmup_steps=" in completions("python train.py warm")


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_bad_command_line_gets_every_problem_at_once_and_status_2(tmp_path):
    result = train("exp_nam=x", "model=pythia2", "lrr=1", "optimizer=AdmW", "loss=dpo", "lr=-1", cwd=tmp_path)

    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "bad configuration:"
    for line, start in zip(
        lines[1:],
        [
            "model=pythia2 is not there: did you mean pythia28, ",
            "unknown key exp_nam: did you mean exp_name?",
            "unknown key lrr: did you mean lr?",
            "exp_name is not set",
            "lr=-1 must be a number above 0",
            "optimizer=AdmW is not one of ASGD, Adadelta",
            "loss.beta is not set",
        ],
        strict=True,
    ):
        assert line.startswith(f"  - {start}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer=Trainer",), "trainer=Trainer is not one of BasicTrainer"),
        (("loss=dpoo",), "loss=dpoo is not there: did you mean dpo"),
        (("model.policy_dtype=fp32",), "model.policy_dtype=fp32 is not one of bfloat16, float16, float32"),
        (("loss=dpo", "loss.beta=0.1,0.5"), "loss.beta"),  # a sweep without -m
        (("lr==1",), "lr==1"),
        (("~lr",), "lr"),
        (("exp_name=${NAME}",), "exp_name"),
        (("trainer=[BasicTrainer]",), "trainer=['BasicTrainer'] must be a name"),
    ],
)
def test_one_bad_override_gets_one_problem_and_status_2(overrides, message, main):
    result = main("datasets=[demo]", "debug=true", *overrides)

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    title, problem = result.stderr.splitlines()
    assert title == "bad configuration:"
    assert message in problem


def test_a_key_of_another_loss_is_not_suggested_as_itself(main):
    result = main("datasets=[demo]", "loss=sft", "loss.beta=0.1")  # loss=dpo was forgotten

    assert result.returncode == 2
    assert "loss.beta" in result.stderr
    assert "did you mean loss.beta?" not in result.stderr


def bad_input(kind: str, folder: Path) -> tuple[tuple[str, ...], str]:
    """Overrides that ask for something impossible, and a pattern of the message."""
    train_file, test_file = folder / "data" / "train.jsonl", folder / "data" / "test.jsonl"
    write_rows(train_file, hh_rows(8))
    write_rows(test_file, hh_rows(8))
    match kind:
        case "no test split":
            test_file.unlink()
            return (), rf"{folder}/data has no test split: it needs one of .*; it holds train\.jsonl"
        case "row without a field":
            write_rows(train_file, [*hh_rows(8), {"chosen": "x"}])
            return (), rf"record 9 of {folder}/data .*rejected is missing"
        case "empty data":
            train_file.write_text("")
            return (), rf"{train_file} holds no records"
        case "fewer rows than a batch":
            return ("batch_size=16",), r"the train split of hh has 8 examples, too few .*batch_size=16"
        case "no such directory":
            return (f"dataset_sources.hh={folder}/nowhere",), rf"{folder}/nowhere does not exist"
        case "a directory without a model":
            return (f"model.name_or_path={folder}",), rf"'{folder}' cannot be loaded"
        case "no such archive":
            return (f"model.archive={folder}/none.pt",), rf"{folder}/none\.pt"
        case "archive of another architecture":
            state = {"transformer.wte.weight": torch.zeros(2, 2)}
            torch.save({"step_idx": 0, "state": state, "metrics": None}, folder / "policy.pt")
            return (f"model.archive={folder}/policy.pt",), r"policy\.pt.*transformer\.wte\.weight"
        case "a directory that holds a run":
            (folder / "run" / "LATEST").mkdir(parents=True)
            return (), rf"local_run_dir={folder}/run already holds a run \(LATEST\)"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "no test split",
        "row without a field",
        "empty data",
        "fewer rows than a batch",
        "no such directory",
        "a directory without a model",
        "no such archive",
        "archive of another architecture",
        "a directory that holds a run",
    ],
)
def test_what_cannot_be_trained_on_gets_one_message_and_status_2(kind, main, tmp_path):
    overrides, pattern = bad_input(kind, tmp_path)

    result = main(f"dataset_sources.hh={tmp_path / 'data'}", f"local_run_dir={tmp_path / 'run'}", *overrides)

    assert result.returncode == 2
    (message,) = result.stderr.splitlines()
    assert re.search(f"^error: .*{pattern}", message)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_traceback_of_bad_input_is_shown_on_request(tmp_path):
    (tmp_path / "LATEST").mkdir()
    result = train(*TINY, f"local_run_dir={tmp_path}", HYDRA_FULL_ERROR="1")

    assert result.returncode != 0
    assert "Traceback (most recent call last)" in result.stderr
    assert "in create_run_dir" in result.stderr
    assert f"InputError: local_run_dir={tmp_path} already holds a run" in result.stderr


# --- whole runs ----------------------------------------------------------------------------------------------------


def test_a_run_writes_all_it_promises_and_another_starts_from_it(main, tmp_path):
    demo = ("model=demo", "datasets=[demo]", *TINY[1:], "max_length=96", "max_prompt_length=88", "lr=1e-4")
    options = ("n_examples=16", "eval_every=8", "warmup_steps=0", "do_first_sampling=true")
    first = train(*demo, *DPO, *options, f"local_run_dir={tmp_path}/a")

    assert first.returncode == 0, first.stderr
    run = tmp_path / "a"
    assert first.stdout.splitlines()[-1] == f"run directory: {run}"
    files = {".lock", "config.yaml", "env.json", "preflight.json", "metrics.jsonl", "samples.jsonl", "samples.txt"}
    assert {p.name for p in run.iterdir()} == files | {"step-8", "step-16", "LATEST", "BEST"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    own = {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}
    assert list(config["loss"].items())[:4] == list(own.items())
    assert config["model"]["name_or_path"] == str(ROOT / "demo")
    env = json.loads((run / "env.json").read_text())
    assert {"torch", "transformers"} <= env["packages"].keys()
    assert env["started"] <= env["ended"]
    assert json.loads((run / "preflight.json").read_text())["updates"] == 4
    assert "4 updates of 4 examples will run" in first.stdout
    assert [m["examples"] for m in read_metrics(run, "train")] == [4, 8, 12, 16]
    assert [m["examples"] for m in read_metrics(run, "eval")] == [0, 8, 16]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [s["examples"] for s in samples] == [0] * 4 + [8] * 4 + [16] * 4
    assert all(s["prompt"] and isinstance(s["policy"], str) and isinstance(s["reference"], str) for s in samples)
    assert os.readlink(run / "LATEST") == "step-16"
    assert os.readlink(run / "BEST") in ("step-8", "step-16")
    policy = torch.load(run / "LATEST" / "policy.pt", weights_only=True)

    second = main(
        *demo[:2], *demo[3:], "n_examples=4", "sample_during_eval=false", f"model.archive={run}",
        "loss=dpo", "loss.beta=0.1", "lr=1e-30", f"local_run_dir={tmp_path}/b", tiny=("model.reference_dtype=float32",),
    )  # fmt: skip

    assert second.returncode == 0, second.stderr
    (before, after) = read_metrics(tmp_path / "b", "eval")
    # the policy starts where the first run ended, and so does its reference
    last = read_metrics(run, "eval")[-1]
    assert before["logps_eval/chosen"] == pytest.approx(last["logps_eval/chosen"], rel=1e-5)
    assert read_metrics(run, "eval")[0]["logps_eval/chosen"] != pytest.approx(last["logps_eval/chosen"], rel=1e-3)
    assert (before["rewards_eval/margins"], after["examples"]) == (0, 4)
    again = torch.load(tmp_path / "b" / "LATEST" / "policy.pt", weights_only=True)
    assert all(torch.allclose(again["state"][name], value) for name, value in policy["state"].items())


@pytest.mark.slow
def test_a_sweep_gives_each_job_its_directory_and_offline_wandb_run(data, tmp_path):
    result = train(
        *("-m", *TINY, "loss=dpo", "loss.beta=0.1,0.5", f"dataset_sources.hh={data}", "n_examples=8"),
        *("wandb.enabled=true", f"local_run_dir={tmp_path / 'sweep'}", f"hydra.sweep.dir={tmp_path / 'hydra'}"),
        HOME=str(tmp_path),  # no ~/.netrc with a key
    )

    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "sweep").glob("*=*")) == ["0_loss.beta=0.1", "1_loss.beta=0.5"]
    offline = []
    for job, beta in enumerate([0.1, 0.5]):
        run = tmp_path / "sweep" / f"{job}_loss.beta={beta}"
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["loss"]["beta"], config["local_run_dir"]) == (beta, str(run))
        assert [m["examples"] for m in read_metrics(run, "train")] == [4, 8]
        assert [m["examples"] for m in read_metrics(run, "eval")] == [0, 8]
        (folder,) = (run / "wandb").glob("offline-run-*")
        assert f"upload with: wandb sync {folder}" in result.stdout
        assert list(folder.glob("run-*.wandb"))
        offline.append(folder.name.rsplit("-", 1)[1])
    assert offline[0] != offline[1]


@pytest.mark.slow
def test_a_sweep_without_a_directory_gives_each_job_its_own_under_local_dirs(main, data, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    result = main(
        *("-m", "seed=0,1", "debug=true", f"dataset_sources.hh={data}", "n_examples=4", "sample_during_eval=false"),
        *(f"local_dirs=[{tmp_path}]", f"hydra.sweep.dir={tmp_path / 'hydra'}"),
    )

    assert result.returncode == 0, result.stderr
    runs = sorted((tmp_path / "somebody").glob("test_*"))
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [0, 1]


def test_own_data_is_named_by_its_source(main, tmp_path):
    for split, n in (("train", 8), ("test", 4)):
        rows = [{"prompt": f"What is {i} plus 1?", "chosen": f" It is {i + 1}.", "rejected": " No."} for i in range(n)]
        write_rows(tmp_path / "mine" / f"{split}.jsonl", rows)

    result = main(
        *DPO, "datasets=[mine]", f"dataset_sources.mine={tmp_path / 'mine'}", f"local_run_dir={tmp_path / 'run'}"
    )

    assert result.returncode == 0, result.stderr
    assert [m["examples"] for m in read_metrics(tmp_path / "run", "train")] == [4, 8]
    assert "What is 0 plus 1?" in {
        json.loads(line)["prompt"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    }


# --- keys and what they do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        ((), 4),  # one epoch of 16 examples, 4 a batch
        (("n_epochs=2",), 8),
        (("n_epochs=null", "n_examples=24"), 6),
        (("n_epochs=2", "n_examples=12"), 3),
        (("batch_size=8",), 2),
    ],
)
def test_epochs_and_examples_end_a_run_whichever_comes_first(overrides, updates, trained):
    run, stdout = trained(*overrides, "debug=true")

    assert f"{updates} updates of" in stdout
    assert len(read_metrics(run, "train")) == updates


def test_lr_warmup_clipping_and_optimizer_make_the_step(trained, tiny_llama):
    run, _ = trained("optimizer=SGD", "lr=0.4", "warmup_steps=3", "max_grad_norm=0.5", "n_examples=4")

    (update,) = read_metrics(run, "train")
    assert update["lr"] == pytest.approx(0.1)  # 0.4 * 1 / (3 + 1)
    assert update["grad_norm"] > 0.5  # before clipping
    state = torch.load(run / "LATEST" / "policy.pt", weights_only=True)["state"]
    step = torch.cat([(state[name] - p.detach()).flatten() for name, p in tiny_llama.named_parameters()])
    assert step.double().norm().item() == pytest.approx(0.1 * 0.5, rel=1e-3)
    assert torch.load(run / "LATEST" / "scheduler.pt", weights_only=True)["state"]["last_epoch"] == 1


@pytest.mark.parametrize(
    ("optimizer", "state"), [("RMSprop", {"step", "square_avg"}), ("AdamW", {"step", "exp_avg", "exp_avg_sq"})]
)
def test_the_optimizer_is_the_class_of_that_name(optimizer, state, trained):
    run, _ = trained(f"optimizer={optimizer}", "n_examples=4")
    saved = torch.load(run / "LATEST" / "optimizer.pt", weights_only=True)["state"]
    assert saved["state"][0].keys() == state


def test_the_seed_orders_the_data(trained):
    def losses(seed: int, run: str) -> list[float]:
        directory, _ = trained(f"seed={seed}", "lr=1e-30", "batch_size=1", "debug=true", run=run)
        return [round(update["loss/train"], 3) for update in read_metrics(directory, "train")]

    first, again, other = losses(0, "a"), losses(0, "b"), losses(1, "c")
    assert first == again
    assert first != other
    assert sorted(first) == pytest.approx(sorted(other), abs=2e-3)  # the same examples


def test_the_terminal_gets_training_metrics_at_most_every_interval(trained):
    lines = {}
    for interval in ("0", "1000"):
        run, stdout = trained(f"minimum_log_interval_secs={interval}", "debug=true", run=interval)
        lines[interval] = len(re.findall(r"^update \d/4  \d+/16 examples  loss ", stdout, re.MULTILINE))
        assert len(read_metrics(run, "train")) == 4  # the file gets every one
    assert lines == {"0": 4, "1000": 1}


def test_first_evaluation_self_test_and_sampling_can_be_switched(trained):
    off, silent = trained("n_examples=4", run="off")
    on, told = trained("n_examples=4", "do_first_eval=true", "self_test=true", "sample_during_eval=true", run="on")

    assert [m["examples"] for m in read_metrics(off, "eval")] == [4]
    assert [m["examples"] for m in read_metrics(on, "eval")] == [0, 4]
    assert ("self-test" in silent, "self-test passed" in told) == (False, True)
    assert ((off / "samples.jsonl").exists(), (on / "samples.jsonl").exists()) == (False, True)


def test_debug_writes_no_checkpoints_and_no_wandb(trained):
    run, _ = trained("debug=true", "wandb.enabled=true", "n_examples=4")
    assert {p.name for p in run.iterdir()} == {".lock", "config.yaml", "env.json", "preflight.json", "metrics.jsonl"}
