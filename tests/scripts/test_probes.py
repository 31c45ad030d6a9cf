"""Child processes of the doctor: killed when they hang, their failure told in a sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from scripts import probes
from scripts.doctor import check_all_reduce
from scripts.probes import ChildError, Gpu

SECRET = "0123456789abcdef" * 3


SHORT = "probes.WORK_LIMIT = 1\n"
WORK = "probes.work(*sys.argv[1:])"  # what the real worker does


def replace_workers(monkeypatch, code: str) -> None:
    """Run `code` instead of a worker, with `rank` and `probes` at hand."""
    start = "import sys, time; from scripts import probes; rank = int(sys.argv[2])\n"
    monkeypatch.setattr(probes, "WORKER", (sys.executable, "-c", start + code))


def test_a_worker_that_hangs_is_killed(monkeypatch, tmp_path):
    replace_workers(monkeypatch, f"import os; open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(100)")
    monkeypatch.setattr(probes, "START_LIMIT", 0.5)
    monkeypatch.setattr(probes, "WORK_LIMIT", 1)
    start = time.monotonic()

    with pytest.raises(ChildError, match=r"no answer within 1\.5 s"):
        probes.run_workers("gloo", 2)

    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert time.monotonic() - start < 10
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_the_cause_is_reported_and_not_the_wait_for_it(monkeypatch):
    # rank 0 is the real worker, waiting for a rank 1 that has failed; its alarm ends it after a second
    replace_workers(monkeypatch, f"{SHORT}{WORK} if rank == 0 else sys.exit('SystemError: no /dev/shm')")
    [finding] = check_all_reduce()

    assert finding.level == "problem"
    assert finding.text == "gloo over 2 processes failed: SystemError: no /dev/shm"


@pytest.mark.slow
def test_a_rank_that_never_comes_is_given_up(monkeypatch):
    replace_workers(monkeypatch, f"{SHORT}{WORK} if rank == 0 else print('{{}}')")

    with pytest.raises(ChildError, match="not finished within"):
        probes.run_workers("gloo", 2)


def test_what_a_child_says_is_shown_without_credentials():
    with pytest.raises(ChildError, match=r"^OSError: no route to http://REDACTED@proxy$"):
        probes.ask(sys.executable, "-c", f"raise OSError('no route to http://user:{SECRET}@proxy')")
    with pytest.raises(ChildError, match="no-such-command cannot be run"):
        probes.ask("no-such-command")


def test_a_wrong_sum_is_a_problem(monkeypatch):
    forget_to_reduce = "import torch.distributed as dist; dist.all_reduce = lambda values: None\n"
    replace_workers(monkeypatch, forget_to_reduce + WORK)
    [finding] = check_all_reduce()

    assert finding.level == "problem"
    assert "the sum is wrong in 20000000 elements on rank 0, 20000000 elements on rank 1" in finding.text
    assert "/etc/hosts" in finding.fix


def test_matmul_error_finds_wrong_products(monkeypatch):
    assert probes.matmul_error("cpu", torch.float32) is probes.matmul_error("cpu", torch.bfloat16) is None
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor * 1.02)
    assert probes.matmul_error("cpu", torch.float32) == "a torch.float32 product is off by 2.0%"
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor * float("nan"))
    assert probes.matmul_error("cpu", torch.bfloat16) is not None


def test_products_are_measured_in_both_dtypes_within_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)  # which would end the tests
    start = time.monotonic()
    products = probes.probe_products(0, 1, str(tmp_path))
    assert time.monotonic() - start < 5  # 1 s on a machine with nothing else to do
    assert all(1e9 < rate < 1e15 for rate in products)


def test_a_sick_gpu_does_not_hide_the_others(monkeypatch, tmp_path):
    def multiply(device: str, dtype: torch.dtype) -> None:
        if device == "cuda:1":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore about it")

    for name, stand_in in {
        "device_count": lambda: 3,
        "can_device_access_peer": lambda here, there: {here, there} == {0, 1},
        "device": lambda i: contextlib.nullcontext(),
        "mem_get_info": lambda: (10, 20),
        "is_bf16_supported": lambda including_emulation: True,
        "get_device_properties": lambda i: SimpleNamespace(name=f"GPU {i}", total_memory=20),
    }.items():
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probes, "matmul_error", multiply)

    first, second, third = probes.probe_devices(0, 1, str(tmp_path))

    assert first == Gpu("GPU 0", 20, 10, True, [1])
    assert (second.error, second.free, third.error, third.peers) == ("CUDA out of memory.", 10, None, [])
