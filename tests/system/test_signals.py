"""A signal is acknowledged once and acted on."""

import os
import signal

import pytest

from dpo.system.signals import handling_signals, on_stop_signals


@pytest.fixture(autouse=True)
def nothing_is_ignored():
    """Wherever the tests run."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    former = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def hear(*numbers: int) -> list[int]:
    """The signals that are acted on, of those sent."""
    heard = []

    def act(number: int) -> str:
        heard.append(number)
        return "stopping after saving"

    with on_stop_signals(act):
        for number in numbers:
            os.kill(os.getpid(), number)
    return heard


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "Ctrl-C: stopping after saving; press Ctrl-C again to exit immediately without saving\n"),
        (signal.SIGHUP, "SIGHUP: stopping after saving\n"),
    ],
)
def test_a_signal_is_acknowledged_in_one_line_and_acted_on(number, said, capfd):
    assert hear(number) == [number]
    assert capfd.readouterr() == (said, "")


def test_ctrl_c_that_a_launcher_passes_on_too_counts_once(capfd):
    assert hear(signal.SIGINT, signal.SIGINT) == [signal.SIGINT]
    assert capfd.readouterr().out.count("\n") == 1


def test_only_rank_0_acknowledges_a_signal(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    assert hear(signal.SIGTERM) == [signal.SIGTERM]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_as_in_a_background_job_or_under_nohup_stays_ignored(number):
    with handling_signals(signal.SIG_IGN, number):
        assert hear(number) == []
        assert signal.getsignal(number) is signal.SIG_IGN
    assert hear(number) == [number]
