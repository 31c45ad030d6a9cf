"""A signal is acknowledged once, in one line, and acted on; while a run starts it ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from support.runs import run_python

from dpo.system import signals
from dpo.system.signals import Stopped, ctrl_c_ignored, ending_on_stop_signals, on_stop_signals


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


ENDING = """
import os, signal, sys
from dpo.system.signals import before_end, ending_on_stop_signals

class Closing:
    def __del__(self):  # where Python prints an exception and goes on
        os.kill(os.getpid(), int(sys.argv[2]))

before_end.append(lambda: print("table"))
with ending_on_stop_signals(sys.argv[1]):
    try:
        Closing()
    except BaseException:
        pass
    print("goes on")
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_a_run_starts_a_signal_ends_it_wherever_it_comes(number, status, tmp_path):
    ended = run_python("-c", ENDING, str(tmp_path), str(int(number)))
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert (ended.returncode, ended.stdout) == (status, "table\n")
    assert ended.stderr == f"stopped by {name}: nothing to save\n"


def test_who_listens_is_called_instead_and_stopped_learns_of_the_directory(tmp_path):
    heard = []
    (tmp_path / "step-8").mkdir()

    def stop() -> None:
        with ending_on_stop_signals(tmp_path):
            with on_stop_signals(noting(heard)):
                os.kill(os.getpid(), signal.SIGTERM)
            raise Stopped(*heard)

    with pytest.raises(Stopped, match=f"rerun the same command with local_run_dir={tmp_path} resume=auto to continue"):
        stop()


def test_the_exit_status_is_the_signals_as_shells_expect():
    assert [Stopped(number).status for number in signals.SIGNALS] == [130, 143, 143]
    assert Stopped().status == 143
