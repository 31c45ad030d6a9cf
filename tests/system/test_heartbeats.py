"""Machines that go silent are noticed, and those that have ended are not missed."""

import re
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from dpo.system.waiting import watching_machines

TIMEOUT_SECS = 0.6


@pytest.fixture
def watch():
    """A machine of two, whose reasons to give up are in a list."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def watch(machine: int, reasons: list[str], n_machines: int = 2, *, writes: bool = True) -> Any:
        options = {"writes": writes, "timeout_secs": TIMEOUT_SECS, "give_up": reasons.append}
        return watching_machines(store, machine, n_machines, **options)

    return watch


def test_a_machine_that_has_ended_is_not_missed(watch):
    reasons = []
    with watch(0, reasons):
        with watch(1, []):
            time.sleep(TIMEOUT_SECS)
        time.sleep(3 * TIMEOUT_SECS)  # as rank 0 may upload for long
    assert reasons == []


def test_a_machine_that_fails_without_a_word_is_named(watch):
    reasons = []
    with watch(0, reasons):
        with suppress(ArithmeticError), watch(1, []):
            time.sleep(TIMEOUT_SECS)
            raise ArithmeticError
        time.sleep(3 * TIMEOUT_SECS)
    assert set(reasons) == {"no heartbeat of machine 1 for 0.6 s (heartbeat_timeout_secs)"}


def test_a_process_names_its_own_machine_if_the_one_that_writes_its_heartbeats_hangs(watch):
    reasons = []
    with watch(0, reasons, writes=False):
        with suppress(ArithmeticError), watch(0, []):
            time.sleep(TIMEOUT_SECS)
            raise ArithmeticError
        time.sleep(3 * TIMEOUT_SECS)
    assert set(reasons) == {"no heartbeat of machine 0 for 0.6 s (heartbeat_timeout_secs)"}


@pytest.mark.parametrize("writes", [True, False])
def test_a_store_that_does_not_answer_is_named(writes, watch, monkeypatch):
    reasons = []
    answers = threading.Event()
    with watch(0, reasons, writes=writes):
        time.sleep(TIMEOUT_SECS / 2)
        monkeypatch.setattr(dist.TCPStore, "add", lambda *_: answers.wait())
        time.sleep(3 * TIMEOUT_SECS)
    n_before = threading.active_count()
    answers.set()
    while threading.active_count() == n_before:  # the thread that asks ends
        time.sleep(0.01)
    own = "no heartbeat of machine 0 for 0.6 s (heartbeat_timeout_secs)"  # on a busy machine it may be late too
    assert {*reasons} - {own} == {"the store, through which the processes meet, has not answered for 0.6 s"}


def test_a_process_that_did_not_run_knows_that_the_others_have_gone_on(watch, monkeypatch):
    reasons = []
    with watch(0, reasons), watch(1, []):
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 1000)
        time.sleep(TIMEOUT_SECS)
    assert re.match(r"for 1\d\d\d s it did not run, or C code held the GIL", reasons[0])


def test_a_machine_alone_is_not_watched(watch):
    before = threading.active_count()
    with watch(0, [], n_machines=1):
        assert threading.active_count() == before
    with watch(0, []):
        assert threading.active_count() == before + 2
