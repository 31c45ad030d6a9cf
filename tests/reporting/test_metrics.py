"""Metrics are means over examples, written where nothing is lost, and never the reason why a run stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.runs import ROOT, run_script, train
from support.wandb_server import WandbServer

from dpo.models.adapters import ParameterCount
from dpo.reporting.events import Callback, Callbacks, Evaluation, RunContext, Sample, Update
from dpo.reporting.files import FileLogger
from dpo.reporting.wandb import WandbLogger
from dpo.settings.plan import make_plan, resolve
from dpo.training.metrics import peak_memory_gb, reduce_metrics


def test_metrics_are_means_over_the_examples_of_all_microbatches_and_processes_in_one_collective():
    first = {"loss": torch.tensor([1.0, 2.0, 3.0]), "accuracy": torch.tensor([1.0, 0.0, 1.0])}
    ours = [
        (torch.tensor([4, 0, 2]), first),
        (torch.tensor([3]), {"loss": torch.tensor([10.0]), "accuracy": torch.tensor([0.0])}),  # a smaller microbatch
    ]
    added = []

    def add(values: torch.Tensor) -> torch.Tensor:
        added.append(values.clone())
        values[2:4] += torch.tensor([4.0, 1.0])  # another process has example 1
        return values

    reduced = reduce_metrics(ours, 5, add, scalars={"grad_norm": torch.tensor(7.0)})
    assert reduced.examples["loss"].tolist() == [2, 4, 3, 10, 1]  # in the order of the examples
    assert reduced.examples["accuracy"].tolist() == [0, 1, 1, 0, 1]
    means = reduced.means()

    assert means == {"loss": (2 + 4 + 3 + 10 + 1) / 5, "accuracy": 3 / 5, "grad_norm": 7.0}
    assert list(means) == ["loss", "accuracy", "grad_norm"]
    assert all(type(value) is float for value in means.values())
    assert len(added) == 1


def test_of_processes_that_see_the_same_rows_one_counts_and_the_scalars_of_all_are_summed():
    part = [(torch.tensor([0]), {"loss": torch.tensor([3.0])})]
    peer = reduce_metrics(part, 1, lambda values: values, counts=False, scalars={"stop": torch.tensor(1.0)})
    assert peer.examples["loss"].tolist() == [0]
    assert peer.scalars == {"stop": 1}


def test_many_equal_values_have_that_value_as_their_mean():
    tenth = torch.full((100_000,), 0.1)  # a float32 running sum would have drifted
    means = reduce_metrics([(torch.arange(100_000), {"x": tenth})], 100_000, lambda values: values).means()
    assert means["x"] == pytest.approx(tenth[0].item(), rel=1e-12)


def files_in(run_dir: Path, state: Mapping[str, Any] = MappingProxyType({})) -> FileLogger:
    logger = FileLogger(RunContext(make_plan({}), run_dir, 0, None, print))
    logger.load_state_dict(state)
    logger.on_start()
    return logger


def test_what_is_trained_and_when_it_ended_are_in_the_record(tmp_path):
    (tmp_path / "env.json").write_text('{"started": "2026-11-22T07:00:00+00:00"}')
    logger = FileLogger(RunContext(make_plan({}), tmp_path, 0, None, print, ParameterCount(12, 345)))
    logger.on_start()
    logger.on_end()
    record = json.loads((tmp_path / "env.json").read_text())
    assert record["parameters"] == {"trainable": 12, "total": 345}
    assert record["started"] < record["ended"]


def update(number: int, metrics: dict[str, float]) -> Update:
    return Update(number, 4 * number, [], {}, metrics)


def evaluation(number: int, metrics: dict[str, float], samples: Sequence[Sample] = ()) -> Evaluation:
    return Evaluation(number, 4 * number, metrics, samples)


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = files_in(tmp_path)
    for n in (1, 2):
        logger.on_update(update(n, {"loss/train": 0.5 / n, "lr": 5e-7}))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == n
    logger.on_evaluation(evaluation(2, {"loss/eval": 0.1}))

    files_in(tmp_path, logger.state_dict()).on_evaluation(evaluation(2, {"loss/eval": 0.2}))  # another one appends

    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"split": "train", "examples": 4, "updates": 1, "loss/train": 0.5, "lr": 5e-7},
        {"split": "train", "examples": 8, "updates": 2, "loss/train": 0.25, "lr": 5e-7},
        {"split": "eval", "examples": 8, "updates": 2, "loss/eval": 0.1},
        {"split": "eval", "examples": 8, "updates": 2, "loss/eval": 0.2},
    ]


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_line_that_was_cut_is_removed_and_the_next_is_whole(cut, tmp_path, capsys):
    logger, path = files_in(tmp_path), tmp_path / "metrics.jsonl"
    for updates in (1, 2):
        logger.on_update(update(updates, {"loss/train": 0.5}))
    content = path.read_bytes()
    first, second = content.splitlines(keepends=True)
    path.write_bytes(first + second[:cut])

    logger.on_update(update(3, {"loss/train": 0.25}))

    assert [json.loads(line)["updates"] for line in path.read_text().splitlines()] == [1, 3]
    assert "ended with an incomplete line, which was removed" in capsys.readouterr().out


def test_what_is_no_finite_number_is_null(tmp_path):
    files_in(tmp_path).on_update(update(1, {"a": float("nan"), "b": float("inf"), "c": 1.5}))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"split": "train", "examples": 4, "updates": 1, "a": null, "b": null, "c": 1.5}\n'


@pytest.mark.parametrize(
    ("variable", "value"), [pytest.param("WANDB_MODE", "foo", marks=pytest.mark.slow), ("WANDB_BASE_URL", "nowhere")]
)
def test_settings_that_wandb_refuses_are_one_sentence(variable, value, tmp_path):
    overrides = ("model.name_or_path=tests/golden/tiny-llama", "dataset_sources.hh=tests/golden/words", "batch_size=4",
                 "model.block_name=null", "eval_batch_size=4", "n_eval_examples=4", "loss=sft", "exp_name=x",
                 "wandb.enabled=true", f"local_run_dir={tmp_path}/run")  # fmt: skip
    result = run_script("train.py", *overrides, **{variable: value})
    assert result.returncode == 2, result.stderr
    assert re.search(r"^error: W&B cannot start: .*; fix this, or set wandb.enabled=false$", result.stderr, re.M)


def test_samples_are_kept_for_programs_and_for_eyes(tmp_path):
    samples = [
        Sample("\n\nHuman: Où?\n\nAssistant:", " Là,\nsur la table.", " Non."),
        Sample("\n\nHuman: Hi\n\nAssistant:", " Hello.", None),  # SFT has no reference
    ]
    files_in(tmp_path).on_evaluation(evaluation(8, {}, samples))

    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"examples": 32, **s._asdict()} for s in samples]
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8").splitlines() == [
        f"{'=' * 30} after 32 examples {'=' * 30}",
        *("Human: Où?", "", "Assistant:", "--- policy ---", "Là,", "sur la table.", "--- reference ---", "Non.", ""),
        f"{'=' * 30} after 32 examples {'=' * 30}",
        *("Human: Hi", "", "Assistant:", "--- policy ---", "Hello.", ""),
    ]


def test_all_callbacks_are_told_and_their_states_kept_by_name(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    callbacks = Callbacks({folder.name: files_in(folder) for folder in folders})
    callbacks.emit("evaluation", evaluation(0, {"loss/eval": 1.0}, [Sample("p", "x", None)]))
    callbacks.emit("end")

    for folder in folders:
        assert {file.name for file in folder.iterdir()} == {"metrics.jsonl", "samples.jsonl", "samples.txt"}
    state = callbacks.state_dict()
    assert state["a"] == state["b"] == {"log_bytes": {f.name: f.stat().st_size for f in folders[0].iterdir()}}


def test_a_state_that_a_checkpoint_would_not_give_back_is_refused_when_it_is_saved():
    class Odd(Callback):
        def state_dict(self):
            return {"seen": {1, 2}}

    callbacks = Callbacks({"odd": Odd(RunContext(make_plan({}), Path(), 0, None, print))})
    with pytest.raises(TypeError, match=r"odd\.state_dict\(\)\['seen'\] is a set: a checkpoint holds tensors"):
        callbacks.state_dict()


WANDB_LOGGER = """
import os, signal, sys, time
from pathlib import Path
from omegaconf import OmegaConf
from dpo.reporting import wandb
from dpo.reporting.events import Evaluation, RunContext, Sample, Update
from dpo.settings.plan import resolve
config = OmegaConf.create({"exp_name": "n", "minimum_log_interval_secs": 0, "loss": {"name": "sft"}, "wandb": {
    "project": "p", "entity": None, "group": None, "tags": [], "notes": None, "artifacts": True}})
logger = wandb.WandbLogger(RunContext(resolve(config), Path(sys.argv[1]), 0, None, print))
"""

WANDB_RUN = """
logger.on_start()
logger.on_update(Update(1, 4, [], {}, {"loss/train": 0.5}))
logger.on_evaluation(Evaluation(1, 4, {"loss/eval": 0.5}, [Sample("p", "x", "y")]))
logger.on_end()
print("the run went on")
"""


def test_wandb_without_key_and_terminal_goes_offline_and_says_how_to_upload(tmp_path):
    result = run_script(
        "-c",
        WANDB_LOGGER + WANDB_RUN,
        str(tmp_path),
        PYTHONPATH=str(ROOT),
        HOME=str(tmp_path),
        NETRC=str(tmp_path / "netrc"),
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "the run went on"
    folder = re.search(r"logging offline; upload with: wandb sync (\S+)", result.stdout)[1]
    assert folder.startswith(str(tmp_path / "wandb" / "offline-run-"))
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
def test_a_wandb_server_that_does_not_answer_is_no_reason_not_to_train(tmp_path):
    key = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:1"}
    result = run_script("-c", WANDB_LOGGER + WANDB_RUN, str(tmp_path), PYTHONPATH=str(ROOT), HOME=str(tmp_path), **key)

    assert result.returncode == 0, result.stderr
    assert "so logging offline; upload with: wandb sync" in result.stdout
    assert "the run went on" in result.stdout


def test_wandb_gets_training_metrics_at_most_every_interval_and_every_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    clock = iter([100.0, 100.5, 101.0, 101.9, 102.0])
    monkeypatch.setattr("dpo.reporting.wandb.time", SimpleNamespace(monotonic=lambda: next(clock)))
    project = {"project": "p", "entity": None, "group": None, "tags": [], "notes": None, "artifacts": True}
    settings = {"exp_name": "n", "minimum_log_interval_secs": 1.0, "loss": {"name": "sft"}, "wandb": project}
    config = OmegaConf.create(settings)
    logger = WandbLogger(RunContext(resolve(config), tmp_path, 0, None, print))
    logger.on_start()
    logged = []
    monkeypatch.setattr(logger.run, "log", logged.append)

    for i, split in enumerate(["train", "train", "eval", "train", "train", "train"]):
        tell = logger.on_update if split == "train" else logger.on_evaluation
        tell((update if split == "train" else evaluation)(i, {f"loss/{split}": 0.5}))
    logger.on_end()

    assert [(m["counters/examples"], m["counters/updates"]) for m in logged] == [(0, 0), (8, 2), (12, 3), (20, 5)]
    assert logged[1] == {"loss/eval": 0.5, "counters/examples": 8, "counters/updates": 2}


WANDB_LOST = """
wandb.FINISH_SECS = 3
logger.on_start()
for examples in range(4, 44, 4):
    if examples == 20:
        if sys.argv[2] == "service":  # W&B's own process on this machine
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            [service] = [c for c in children if b"wandb" in Path(f"/proc/{c}/cmdline").read_bytes()]
            os.kill(int(service), signal.SIGKILL)
        else:
            print("now", flush=True)
            input()
    logger.on_evaluation(Evaluation(1, examples, {"loss/eval": 0.5}, []))
    time.sleep(0.05)
logger.on_end()
print("the run went on", flush=True)
"""


def test_wandbs_record_of_the_terminal_has_the_preflight(command, tmp_path):
    overrides = ("n_examples=4", "wandb.enabled=true")
    result = train(*command("run", *overrides), WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    [record] = (tmp_path / "run" / "wandb").glob("offline-run-*/files/output.log")
    text = record.read_text()
    order = ["train: 22 examples of 11 prompts", "1 update of 4 examples will run", "evaluation after 0 examples"]
    assert [text.index(line) for line in order] == sorted(text.index(line) for line in order)


def lose_wandb(server: WandbServer, kind: str, tmp_path) -> str:
    """What a run says from which W&B is taken away."""
    process = subprocess.Popen(
        [sys.executable, "-c", WANDB_LOGGER + WANDB_LOST, str(tmp_path), kind],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("WANDB")},
            **{"PYTHONPATH": str(ROOT), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)},
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = ""
    if kind == "server":
        while not said.endswith("now\n"):
            said += process.stdout.readline()
        server.close()
    said += process.communicate("\n", timeout=100)[0]
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_a_run_outlives_the_wandb_server(tmp_path):
    server = WandbServer()
    started = time.monotonic()
    said = lose_wandb(server, "server", tmp_path)

    assert any(path.endswith("file_stream") for path in server.requests)  # it had been there
    assert "the run went on" in said
    assert time.monotonic() - started < 60
    assert list((tmp_path / "wandb").glob("run-*/run-*.wandb"))  # for wandb sync


def test_a_run_outlives_the_wandb_service(tmp_path):
    server = WandbServer()
    said = lose_wandb(server, "service", tmp_path)
    server.close()

    assert said.count("warning: W&B logging disabled after an error") == 1
    assert "the run went on" in said


def test_peak_memory_is_in_units_of_1e9_bytes():
    assert 0.1 < peak_memory_gb() < 500  # a process that has imported torch
