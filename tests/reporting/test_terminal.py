"""A bar on a terminal, lines in a log, no long silence."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from dpo.reporting import terminal
from dpo.reporting.events import Evaluation, Update
from dpo.reporting.terminal import Progress
from dpo.settings.plan import make_plan

DPO = {
    "loss/train": 0.689123456,
    "rewards_train/accuracies": 0.96875,
    "rewards_train/margins": 0.0081234,
    "logps_train/chosen": -59.6,
    "examples_per_second": 165.4,
}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(terminal, "time", clock)
    monkeypatch.setattr("tqdm.std.time", clock.monotonic)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_progress(*, interval: float, silent: bool = False, batch_size: int = 1, loss: str = "dpo") -> Progress:
    plan = make_plan({"minimum_log_interval_secs": interval, "batch_size": batch_size, "loss.name": loss})
    return Progress(plan, silent=silent)


def log(progress: Progress, number: int, metrics: dict[str, float] = DPO) -> None:
    progress.on_update(Update(number, 0, [], {}, metrics))


def test_an_update_is_one_line_with_totals_and_time_left(clock, printed):
    progress = make_progress(interval=0.0, batch_size=32)
    for update in progress.track_updates([1, 2, 3], total=64, done=0):
        clock.now += 2.0
        log(progress, update)

    lines = printed().splitlines()
    assert lines[0] == "update 1/64, 32/2,048 examples  loss 0.6891  acc 0.97  margin 0.00812  165 ex/s, 02:06 left"
    assert lines[2] == "update 3/64, 96/2,048 examples  loss 0.6891  acc 0.97  margin 0.00812  165 ex/s, 02:02 left"


def test_a_run_that_continues_counts_from_where_it_was(clock, printed):
    progress = make_progress(interval=0.0, batch_size=4)
    for _ in progress.track_updates([1], total=10, done=8):
        clock.now += 5.0
        log(progress, 9, {"loss/train": 123456.7, "online/score": -12.25, "examples_per_second": 999.6})
    line = "update 9/10, 36/40 examples  loss 123,457  score -12.2  1,000 ex/s, 00:05 left\n"
    assert printed() == line  # no exponents, and no accuracy where there is none


def test_in_a_log_file_updates_are_lines_at_most_every_interval(clock, capsys):
    progress = make_progress(interval=1.0, batch_size=4)
    for update in progress.track_updates([1, 2, 3, 4, 5], total=5, done=0):
        clock.now += 0.4
        log(progress, update)
    progress.line("saved")

    captured = capsys.readouterr()
    assert [line.split()[1] for line in captured.out.splitlines()[:-1]] == ["1/5,", "4/5,"]
    assert captured.out.endswith("\nsaved\n")
    assert "\r" not in captured.out + captured.err


def test_in_a_log_file_a_long_task_says_every_ten_seconds_how_far_it_is(clock, printed):
    progress = make_progress(interval=1.0)
    for _ in progress.track([1, 2], total=2, what="sample"):
        for token in range(60):
            progress.show_token(token, 60)
            clock.now += 0.5
    for _ in progress.track([1, 2], total=2, what="evaluate"):
        clock.now += 1.0

    assert printed().splitlines() == [
        "sample 0/2, token 20/60, ? left",
        "sample 0/2, token 40/60, ? left",
        "sample 1/2, 00:30 left",
        "sample 1/2, token 20/60, 00:40 left",
        "sample 1/2, token 40/60, 00:50 left",
    ]


@pytest.mark.parametrize(("loss", "ties"), [("dpo", True), ("simpo", False), ("bradley_terry", False)])
def test_an_accuracy_of_0_before_training_is_explained_by_ties_only_where_there_is_a_reference(loss, ties, printed):
    make_progress(interval=1.0, loss=loss).on_evaluation(Evaluation(0, 0, {"rewards_eval/accuracies": 0.0}))
    assert ("policy and reference are equal" in printed()) == ties


def test_on_a_terminal_of_80_columns_the_bar_says_the_same(clock, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (80, 40))
    progress = make_progress(interval=1000.0, batch_size=32)
    for update in progress.track_updates([1, 2], total=64, done=0):
        for _ in progress.track([1, 2], total=2, what="sample"):
            clock.now += 1.0
            progress.show_token(128, 256)
        log(progress, update)
    progress.line("saved")
    progress.close()

    shown = screen.getvalue()
    assert re.search(r" 50% 00:02 left \|.+\| sample 1/2, token 128/256", shown)
    # The evaluation before the first update took 2 s, which say nothing of updates.
    assert re.search(r"  2% \? left \|.+\| update 1/64, loss 0.6891  acc 0.97  margin 0.00812", shown)
    assert max(map(len, re.split("[\r\n]|\x1b\\[A", shown))) <= 80
    assert "saved\n" in shown
    assert shown.endswith("\n")  # further output appears below


def test_ranks_other_than_0_are_silent(capsys):
    progress = make_progress(interval=0.0, silent=True)
    for item in progress.track_updates([4], total=1, done=0):
        assert list(progress.track([item], total=1, what="evaluate")) == [4]
        log(progress, 1)
    progress.line("saved")
    assert capsys.readouterr() == ("", "")
