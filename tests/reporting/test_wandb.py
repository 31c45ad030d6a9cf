"""W&B shows a run as its users expect: grouped, labelled, with its best and last evaluation, and an alert on NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from support.runs import train
from support.wandb_server import WandbServer

from dpo.errors import RunError
from dpo.models.adapters import ParameterCount
from dpo.reporting.events import Evaluation, RunContext
from dpo.reporting.wandb import REPORT, WandbLogger
from dpo.settings.plan import resolve

WANDB = {"project": "p", "entity": None, "group": None, "tags": [], "notes": None, "artifacts": True}


class Stub:
    """Stands for a W&B run, and keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self.summary: dict[str, Any] = {}
        self.told: list[tuple[Any, ...]] = []
        self.id, self.dir = "id", str(folder)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.told.append((name, *arguments))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A logger of a run under W&B's stub."""

    def start(loss: str = "dpo", state: dict[str, Any] | None = None, **settings: Any) -> WandbLogger:
        monkeypatch.setattr(WandbLogger, "_start", staticmethod(lambda wandb, settings: Stub(tmp_path / "[files]")))
        config = {"exp_name": "n", "minimum_log_interval_secs": 0, "loss": {"name": loss}, "wandb": WANDB | settings}
        logger = WandbLogger(RunContext(resolve(OmegaConf.create(config)), tmp_path, 0, None, print))
        logger.load_state_dict(state or {})
        logger.on_start()
        return logger

    return start


def evaluation(updates: int, accuracy: float, loss: float) -> Evaluation:
    return Evaluation(updates, 4 * updates, {"loss/eval": loss, "rewards_eval/accuracies": accuracy}, [])


def test_the_summary_has_the_last_evaluation_and_the_best_after_the_first_update(start):
    logger = start()
    for values in ((0, 0.9, 0.1), (2, 0.5, 0.7), (4, 0.75, 0.6), (6, 0.75, 0.5), (8, float("nan"), 0.4)):
        logger.on_evaluation(evaluation(*values))

    summary = logger.run.summary
    assert {name: value for name, value in summary.items() if name.startswith("best/")} == {
        "best/examples": 16,  # of equal ones the first, as the link BEST
        "best/updates": 4,
        "best/loss/eval": 0.6,
        "best/rewards_eval/accuracies": 0.75,
    }
    assert (summary["last/examples"], summary["last/updates"], summary["last/loss/eval"]) == (32, 8, 0.4)


def test_how_many_parameters_are_trained_is_in_the_config(tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(
        WandbLogger, "_start", staticmethod(lambda wandb, settings: began.append(settings) or Stub(tmp_path))
    )
    config = OmegaConf.create({"exp_name": "n", "wandb": WANDB, "lora": {"name": "lora", "r": 16}})
    WandbLogger(RunContext(resolve(config), tmp_path, 0, None, print, ParameterCount(12, 345))).on_start()
    assert began[0]["config"]["parameters"] == {"trainable": 12, "total": 345}
    assert began[0]["config"]["lora"] == {"name": "lora", "r": 16}


def test_under_sft_the_lowest_loss_is_the_best(start):
    logger = start("sft")
    for examples, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        logger.on_evaluation(Evaluation(examples, examples, {"loss/eval": loss}, []))
    assert (logger.run.summary["best/examples"], logger.run.summary["best/loss/eval"]) == (2, 0.25)


def test_a_resumed_run_knows_its_best(start):
    first = start()
    first.on_evaluation(evaluation(2, 0.75, 0.5))
    again = start(state=first.state_dict())
    again.on_evaluation(evaluation(4, 0.5, 0.5))
    assert "best/examples" not in again.run.summary  # W&B has it
    again.on_evaluation(evaluation(6, 0.8, 0.5))
    assert again.run.summary["best/examples"] == 24

    elsewhere = start(state=first.state_dict() | {"run_dir": "/elsewhere"})  # a W&B run of its own
    elsewhere.on_evaluation(evaluation(4, 0.5, 0.5))
    assert elsewhere.run.summary["best/examples"] == 16


@pytest.mark.parametrize("wanted", [True, False])
def test_preflight_and_report_are_uploaded_if_they_are_there_and_wanted(wanted, start, tmp_path):
    (tmp_path / "preflight.json").write_text("{}")
    logger = start(artifacts=wanted)
    (tmp_path / REPORT).parent.mkdir()
    (tmp_path / REPORT).write_text("<html>")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "policy.pt").touch()
    logger.on_end()
    saved = [told[1] for told in logger.run.told if told[0] == "save"]
    assert saved == ([f"{tmp_path}/[[]files]/{name}" for name in ("preflight.json", REPORT)] if wanted else [])
    assert {file.name for file in (tmp_path / "[files]").rglob("*.*")} == (
        {"preflight.json", "report.html"} if wanted else set()
    )
    assert logger.run.told[-1] == ("finish", 0)


def test_an_aborted_run_is_an_alert_without_secrets_and_has_failed(start, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    logger = start()
    logger.on_abort("update 3 has loss nan; its examples are in /tok-0123456789/nonfinite-3")
    logger.on_end()
    text = "update 3 has loss nan; its examples are in /REDACTED/nonfinite-3"
    assert logger.run.told[-2:] == [("alert", "run aborted", text, "ERROR"), ("finish", 1)]


def test_a_run_that_ends_on_nan_says_so_before_it_ends(run, monkeypatch):
    events = []
    monkeypatch.setattr(WandbLogger, "on_start", lambda self: events.append("start"))
    monkeypatch.setattr(WandbLogger, "on_evaluation", lambda self, evaluation: None)
    monkeypatch.setattr(WandbLogger, "on_update", lambda self, update: None)
    monkeypatch.setattr(WandbLogger, "on_abort", lambda self, reason: events.append(reason))
    monkeypatch.setattr(WandbLogger, "on_end", lambda self: events.append("end"))
    spoilt = ("optimizer=SGD", "lr=1e30", "warmup_steps=0", "max_grad_norm=1e30", "wandb.enabled=true")
    with pytest.raises(RunError) as ended:
        run("run", *spoilt)
    assert events == ["start", str(ended.value), "end"]
    assert events[1].startswith("update 2 has loss")


# --- what W&B's server gets ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweeps_runs_are_one_group_and_one_that_ends_on_nan_is_an_alert(command, tmp_path):
    server = WandbServer()
    settings = ("n_examples=8", "optimizer=SGD", "warmup_steps=0", "max_grad_norm=1e30", "lr=1e-3,1e30")
    labels = ("wandb.enabled=true", "wandb.tags=[dpo,first]", "wandb.notes=what for")
    result = train(
        "-m",
        *command("sweep", *settings, *labels),
        **{"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)},
    )
    server.close()

    assert result.returncode == 1, result.stderr
    assert "W&B logging disabled" not in result.stdout
    asked = [body["variables"] for body in server.bodies if "variables" in body]
    begun = [it for it in asked if it.get("groupName")]
    assert len({it["name"] for it in begun}) == 2
    assert {it["groupName"] for it in begun} == {"sweep"}
    assert [(it["tags"], it["notes"]) for it in begun[:1]] == [(["dpo", "first"], "what for")]
    assert sum("preflight.json" in it.get("files", ()) for it in asked) == 2
    [alert] = [it for it in asked if "severity" in it]
    assert (alert["title"], alert["severity"]) == ("run aborted", "ERROR")
    assert alert["text"].startswith("update 2 has loss")
    ended = [body for body in server.bodies if body.get("complete")]
    assert [body["exitcode"] for body in ended] == [0, 1]
    [summary] = [body["files"]["wandb-summary.json"]["content"] for body in ended[:1]]
    last = json.loads(summary[-1])
    assert last["last/examples"] == last["best/examples"] == 8
    assert last["best/loss/eval"] == last["last/loss/eval"]


def test_a_group_that_is_given_is_the_group(command, tmp_path):
    result = train("-m", *command("sweep", "n_examples=4", "seed=0,1", "wandb.group=mine", "do_first_eval=false"))
    assert result.returncode == 0, result.stderr
    configs = [yaml.safe_load(file.read_text()) for file in (tmp_path / "sweep").glob("*/config.yaml")]
    assert [config["wandb"]["group"] for config in configs] == ["mine", "mine"]
