"""W&B shows a run as its users expect, and never stops it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import records
from support.models import make_weights
from support.pytests import refused, succeeded
from support.records import context_in
from support.runs import train
from support.wandb_server import WandbServer

from dpo.reporting.events import Evaluation, Update
from dpo.reporting.trackers import REPORT, WandbLogger


class Stub:
    """Stands for a W&B run, and keeps the calls: (name, *arguments) and named arguments."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.given = given
        self.told: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.id, self.dir, self.summary = "id", str(folder), {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.told.append(((name, *arguments), named))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A logger of a run under W&B's stub."""

    def start(loss: str = "dpo", state: dict[str, Any] | None = None, interval: float = 0) -> WandbLogger:
        monkeypatch.setattr(WandbLogger, "_start", staticmethod(lambda _, given: Stub(tmp_path / "[files]", given)))
        values = {"minimum_log_interval_secs": interval, "loss.name": loss}
        return records.start(WandbLogger(context_in(tmp_path, policy=make_weights(12, 333), **values)), state)

    return start


def evaluation(updates: int, accuracy: float, loss: float) -> Evaluation:
    return Evaluation(updates, 4 * updates, {"loss/eval": loss, "rewards_eval/accuracies": accuracy})


@pytest.mark.parametrize(("loss", "best"), [("dpo", 2), ("sft", 3)])
def test_the_summary_has_the_last_evaluation_and_the_best_one_also_after_a_resume(loss, best, start):
    """A loss that ranks pairs goes by accuracy, SFT by the loss; before the first update nothing is best."""
    logger, evaluations = start(loss), [(0, 0.9, 0.1), (1, 0.6, 0.6), (2, 0.8, 0.7), (3, 0.7, 0.5), (4, 0.5, 0.9)]
    for number, accuracy, value in evaluations:
        logger.on_evaluation(evaluation(number, accuracy, value))
        if number == 2:
            summary, state = logger.run.summary, logger.state_dict()
            logger = start(loss, state)
            logger.run.summary.update(summary)
    last, values = logger.run.summary, {number: value for number, _, value in evaluations}
    assert (last["last/updates"], last["last/rewards_eval/accuracies"], last["last/loss/eval"]) == (4, 0.5, 0.9)
    assert (last["best/updates"], last["best/examples"], last["best/loss/eval"]) == (best, 4 * best, values[best])


def test_it_gets_training_metrics_at_most_every_interval_and_every_evaluation(start, monkeypatch):
    clock = iter([100.0, 100.5, 101.0, 101.9, 102.0])
    monkeypatch.setattr("dpo.reporting.trackers.time", SimpleNamespace(monotonic=lambda: next(clock)))
    logger = start(interval=1.0)
    for i, split in enumerate(["train", "train", "eval", "train", "train", "train"]):
        if split == "train":
            logger.on_update(Update(i, 4 * i, [], {}, {"loss/train": 0.5}))
        else:
            logger.on_evaluation(Evaluation(i, 4 * i, {"loss/eval": 0.5}))

    logged = [told[1] for told, _ in logger.run.told if told[0] == "log"]
    assert [(m["counters/examples"], m["counters/updates"]) for m in logged] == [(0, 0), (8, 2), (12, 3), (20, 5)]


def test_a_resumed_run_continues_its_wandb_run_and_another_run_does_not(start):
    state = start().state_dict()
    resumed = start(state=state)
    assert resumed.run.given["id"] == "id"
    assert resumed.state_dict() == state
    assert start(state=state | {"run_dir": "/elsewhere"}).run.given["id"] is None


def test_an_error_of_wandb_is_one_warning_and_the_run_goes_on(start, printed):
    logger = start()

    def log(values: dict) -> None:
        raise OSError("the service is gone")

    logger.run.log = log
    for number in (1, 2):
        logger.on_evaluation(evaluation(number, 0.5, 0.5))
    logger.on_end()
    assert printed().count("warning: W&B logging disabled after an error (OSError: the service") == 1


def test_an_aborted_run_uploads_its_report_and_is_an_alert_without_secrets_that_has_failed(
    start, monkeypatch, tmp_path
):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    (tmp_path / REPORT).parent.mkdir()
    (tmp_path / REPORT).write_text("<html>")
    logger = start()
    logger.on_abort("update 3 has loss nan; its examples are in /tok-0123456789/nonfinite-3")
    logger.on_end()
    text = "update 3 has loss nan; its examples are in /REDACTED/nonfinite-3"
    told = [arguments for arguments, _ in logger.run.told[-3:]]
    assert told == [
        ("alert", "run aborted", text, "ERROR"),
        ("save", str(tmp_path / REPORT), str(tmp_path), "now"),
        ("finish", 1),
    ]


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
    begun = {(it["groupName"], it["name"]): (it["tags"], it["notes"]) for it in asked if it.get("groupName")}
    assert (len(begun), len({group for group, _ in begun})) == (2, 1)
    assert next(iter(begun.values())) == (["dpo", "first"], "what for")
    assert sum("preflight.json" in it.get("files", ()) for it in asked) == 2
    [alert] = [it for it in asked if "severity" in it]
    assert alert["text"].startswith("update 2 has loss")
    ended = [body for body in server.bodies if body.get("complete")]
    assert [body["exitcode"] for body in ended] == [0, 1]
    [summary] = [body["files"]["wandb-summary.json"]["content"] for body in ended[:1]]
    assert {"last/loss/eval", "best/rewards_eval/accuracies"} <= json.loads(summary[-1]).keys()


# --- W&B itself -------------------------------------------------------------------------------------------------------


def test_settings_that_wandb_refuses_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "foo")
    logger = WandbLogger(context_in(tmp_path))
    with refused(r"^W&B cannot start: .*; fix this, or set wandb.enabled=false$"):
        logger.on_start()


@pytest.mark.parametrize("mode", [None, "online", "offline", "disabled"])
@pytest.mark.parametrize("has_key", [True, False])
def test_a_terminal_is_never_asked_for_a_key(mode, has_key, tmp_path, monkeypatch, printed):
    asked, given = [], []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    wandb = SimpleNamespace(
        Settings=lambda **_: None,
        Error=OSError,
        login=lambda prompt: asked.append(prompt) or has_key,
        init=lambda mode=None, **_: given.append(mode) or Stub(tmp_path, {}),
    )
    WandbLogger._start(wandb, {})
    needs_key = mode in (None, "online")
    assert asked == [False] * needs_key
    assert given == ["offline" if needs_key and not has_key else None]
    assert printed().count("W&B: no API key") == (needs_key and not has_key)


@pytest.mark.slow
def test_without_key_it_goes_offline_says_how_to_upload_and_keeps_what_is_printed(command, run_dir, tmp_path):
    nobody = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    result = succeeded(train(*command("run", "n_examples=4", "wandb.enabled=true"), **nobody))

    folder = Path(re.search(r"so offline in .*: wandb sync (\S+),", result.stdout)[1])
    assert folder.parent == run_dir / "wandb"
    assert list(folder.glob("run-*.wandb"))
    text = (folder / "files" / "output.log").read_text()
    order = ["self-test passed", "evaluation after 0 examples", "evaluation after 4 examples"]
    assert [text.index(line) for line in order] == sorted(text.index(line) for line in order)
