"""A signal is acknowledged once, in one line, acted on, and remembered; a second Ctrl-C is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from dpo.system import signals
from dpo.system.signals import Stopped, ctrl_c_ignored, on_stop_signals, raise_if_asked, raising_stopped


@pytest.fixture(autouse=True)
def hears_ctrl_c():
    """Wherever the tests run."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def noting(heard: list[int]) -> Callable[[int], str]:
    def act(number: int) -> str:
        heard.append(number)
        return "stopping after saving"

    return act


def swallow_signal(number: int) -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_is_acknowledged_in_one_line_and_acted_on(number, capfd):
    heard = []
    with on_stop_signals(noting(heard)):
        os.kill(os.getpid(), number)
    assert heard == [number]
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    again = "; press Ctrl-C again to exit immediately without saving" if number == signal.SIGINT else ""
    assert capfd.readouterr() == (f"{name}: stopping after saving{again}\n", "")


def test_ctrl_c_that_a_launcher_passes_on_too_counts_once(capfd):
    heard = []
    with on_stop_signals(noting(heard)):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGINT]
    assert capfd.readouterr().out.count("\n") == 1


def test_a_second_ctrl_c_interrupts(monkeypatch):
    monkeypatch.setattr(signals, "SAME_SECS", 0)
    heard = []
    with on_stop_signals(noting(heard)):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGINT]


@pytest.mark.parametrize("rank", [{"RANK": "1"}, {"SLURM_PROCID": "1"}])
def test_of_several_processes_one_acknowledges(rank, monkeypatch, capfd):
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    heard = []
    with on_stop_signals(noting(heard)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert capfd.readouterr().out == ""


def test_ctrl_c_stays_ignored_where_it_is():
    heard = []
    with ctrl_c_ignored(), on_stop_signals(noting(heard)):
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_heard_before_is_heard_again_afterwards():
    with on_stop_signals(noting([])):
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_was_swallowed_is_raised_when_asked_for_and_at_the_end():
    def start() -> None:
        with raising_stopped():
            swallow_signal(signal.SIGUSR1)
            with pytest.raises(Stopped):
                raise_if_asked()

    with pytest.raises(Stopped, match="stopped by SIGUSR1: nothing to save"):
        start()
    raise_if_asked()  # nobody listens any more


def test_an_error_that_a_library_made_of_it_is_still_a_stop():
    def import_library() -> None:
        with raising_stopped():
            swallow_signal(signal.SIGTERM)
            raise ImportError("numpy failed to import")

    with pytest.raises(Stopped):
        import_library()


def test_whoever_listens_later_learns_of_a_signal_that_was_swallowed_before(capfd):
    heard = []

    def start() -> None:
        with raising_stopped():
            swallow_signal(signal.SIGTERM)
            with on_stop_signals(noting(heard)):
                assert heard == [signal.SIGTERM]

    with pytest.raises(Stopped):
        start()
    assert capfd.readouterr().out == "SIGTERM: stopping after saving\n"


def test_the_exit_status_is_the_signals_as_shells_expect():
    assert [Stopped(number).status for number in signals.SIGNALS] == [130, 143, 143]
    assert Stopped().status == 143
