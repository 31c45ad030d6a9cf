"""The doctor, on this machine and on machines made up here."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from support.runs import assert_gone, run_python

from scripts import doctor
from scripts.doctor import ChildError, Finding, Gpu

SECRET = "0123456789abcdef" * 3


def gpu(name: str = "NVIDIA H100", total: float = 85e9, **changes) -> Gpu:
    values = {"free": total - 0.6e9, "bf16": True, "error": None, **changes}
    return Gpu(name, int(total), **values)


H100 = gpu()
V100 = gpu("Tesla V100", 34e9, bf16=False)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


# --- this machine ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_text_report_of_this_machine(tmp_path):
    result = run_python("-m", "scripts.doctor", HF_TOKEN=SECRET, NETRC=str(tmp_path / "none"))

    lines = result.stdout.splitlines()
    findings = {line[9:26].strip(): line.split()[0] for line in lines if line.startswith(("ok", "warning", "problem "))}
    assert result.stderr == ""
    assert max(map(len, lines)) <= 100
    assert SECRET not in result.stdout
    assert findings["software"] == findings["all-reduce"] == "ok"
    assert findings["wandb"] == "warning"
    assert result.returncode == ("problem" in findings.values())  # a warning is none
    assert lines[-1].startswith(f"{list(findings.values()).count('problem')} problem")
    if not torch.cuda.is_available():
        assert "gloo over 2 processes: correct, 16 MB in" in result.stdout


def test_it_reports_where_torch_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")

    environment = {"PYTHONPATH": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    result = run_python("-m", "scripts.doctor", "--json", **environment)
    report = json.loads(result.stdout, parse_constant=pytest.fail)
    findings = {f["check"]: f for f in report["findings"]}

    assert (result.returncode, result.stderr, SECRET in result.stdout) == (1, "", False)
    assert "libcudart.so.13 is missing" in findings["gpu"]["text"]
    assert {findings[name]["level"] for name in ("gpu", "all-reduce")} == {"problem"}
    assert "problem" not in {findings[name]["level"] for name in ("software", "host")}
    assert all((f["fix"] is None) == (f["level"] == "ok") for f in report["findings"])
    assert findings["wandb"]["text"] == f"an API key for api.wandb.ai is in {tmp_path / 'netrc'}"


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on():
    def check_the_moon() -> list[Finding]:
        raise ZeroDivisionError("no moon")

    broken, host = doctor.examine({"moon": check_the_moon, "host": doctor.check_host})

    assert broken[:3] == ("moon", "problem", "could not be checked: ZeroDivisionError: no moon")
    assert host.check == "host"


# --- made-up machines ------------------------------------------------------------------------------------------------


def test_eight_good_gpus_are_ok():
    findings = doctor.judge_gpus([H100] * 8)

    assert findings[7] == Finding("gpu", "ok", "7: NVIDIA H100, 84.4 GB of 85.0 GB free")
    assert levels(findings) == dict.fromkeys(["gpu", "matmul", "bfloat16"], "ok")


@pytest.mark.parametrize(
    ("gpus", "check", "level", "text", "fix"),
    [
        ([H100, gpu(free=60e9)], "gpu", "warning", "1: NVIDIA H100, 60.0 GB of 85.0 GB free", "out of memory"),
        ([H100, gpu(free=1e9)], "gpu", "problem", "1: NVIDIA H100, 1.0 GB of 85.0 GB free", "nvidia-smi"),
        ([V100, H100, V100], "bfloat16", "warning", "not supported by GPU 0, 2", "unset"),
        ([H100, gpu(error="CUDA error: ECC")], "matmul", "problem", "GPU 1: CUDA error: ECC", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_wrong_with_gpus(gpus, check, level, text, fix):
    bad = [finding for finding in doctor.judge_gpus(gpus) if finding.level != "ok"]
    assert [finding[:3] for finding in bad] == [(check, level, text)]
    assert fix in bad[0].fix


def test_no_gpu_is_fine_without_a_driver_and_not_with_one():
    assert doctor.judge_no_gpu(None, None, None).level == "ok"
    assert doctor.judge_no_gpu("580.65", "13.0", "").level == "warning"
    assert doctor.judge_no_gpu("580.65", "13.0", None).level == "problem"
    unused = doctor.judge_no_gpu("580.65", None, "0,1")
    assert unused[1:3] == ("problem", "driver 580.65, but torch, built for the CPU, sees no GPU")
    assert doctor.judge_no_gpu("580.65", "13.0", None, "no answer within 70 s").text.endswith("70 s")


@pytest.mark.parametrize(
    ("limits", "level"), [((1024, 65536), "ok"), ((1024, -1), "ok"), ((1024, 2048), "warning"), ((256, 256), "problem")]
)
def test_the_hard_limit_of_open_files_counts(limits, level, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: limits)
    [finding] = doctor.check_open_files()
    assert finding.level == level
    assert level == "ok" or "too many open files" in finding.fix


@pytest.mark.parametrize(
    ("free", "writable", "level"),
    [(60e9, True, "ok"), (49e9, True, "warning"), (1e9, True, "problem"), (60e9, False, "problem")],
)
def test_disk_where_runs_go(free, writable, level, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # has no .cache yet
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: writable)
    [finding] = doctor.check_disk()
    assert finding.level == level
    assert ("is not writable" in finding.text) == (not writable)
    if writable and not any(map(os.path.exists, ("/scr-ssd", "/scr"))):
        assert finding.text.startswith(f"{free / 1e9:.1f} GB free for runs and caches in {tmp_path}; a real run needs")


def test_packages_are_held_against_the_requirements(tmp_path):
    requirements = tmp_path / "requirements.txt"

    def judged(text: str) -> tuple[str, str]:
        requirements.write_text(text)
        [finding] = doctor.check_software(requirements)
        return finding.level, finding.text

    assert judged(f"torch=={torch.__version__}\n")[0] == "ok"
    assert judged("torch==0.4.1  # of old\n")[0] == "warning"
    assert judged("torch==0.4.1\nno-such-package==1.0\n") == ("problem", "not installed: no-such-package")


# --- W&B, the Hub, optional packages ---------------------------------------------------------------------------------


KEY = f"login user password {SECRET}"
SERVER = {"WANDB_BASE_URL": f"https://user:{SECRET}@wandb.example.org:8080"}


@pytest.mark.parametrize(
    ("netrc", "environment", "level", "text"),
    [
        (None, {}, "warning", "no API key: without a terminal to ask for one, runs log offline"),
        (None, {"WANDB_API_KEY": SECRET}, "ok", "an API key is in the environment"),
        (None, {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}, "ok", "WANDB_MODE=offline"),
        (f"machine api.wandb.ai {KEY}", {}, "ok", "an API key for api.wandb.ai is in NETRC"),
        (f"machine example.org {KEY}", {}, "warning", "no API key"),
        (f"machine {SECRET} {SECRET}", {}, "warning", "NETRC cannot be read: runs log offline"),
        (f"machine wandb.example.org:8080 {KEY}", SERVER, "ok", "an API key for wandb.example.org:8080 is in NETRC"),
    ],
)
def test_wandb_key_is_looked_for_and_not_shown(netrc, environment, level, text, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    file = tmp_path / "netrc"
    for name, value in {"NETRC": str(file), **environment}.items():
        monkeypatch.setenv(name, value)
    if netrc:
        file.write_text(netrc + "\n")
    [finding] = doctor.check_wandb()
    assert (finding.level, SECRET in str(finding)) == (level, False)
    assert finding.text.replace(str(file), "NETRC").startswith(text)


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path.startswith("/well/api/models") else 503)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "*")


def test_the_hub_answers_or_does_not(monkeypatch, online):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://user:{SECRET}@127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}/well")
        assert doctor.check_hub() == [Finding("hub", "ok", "127.0.0.1 answers")]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}/ill")
        assert doctor.check_hub()[0][1:3] == ("warning", "127.0.0.1: HTTP Error 503: Service Unavailable")
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert SECRET not in str(doctor.check_hub())
        server.shutdown()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert doctor.check_hub()[0][1:3] == ("warning", "127.0.0.1: [Errno 111] Connection refused")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert doctor.check_hub()[0].level == "ok"  # it is not asked


def test_a_hub_that_is_silent_is_given_up(monkeypatch, online):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(doctor, "HUB_LIMIT", 1)
        start = time.monotonic()
        assert doctor.check_hub()[0][1:3] == ("warning", "127.0.0.1: no answer within 1 s")
        assert time.monotonic() - start < 3


def test_an_optional_package_is_imported_if_it_is_there(monkeypatch, tmp_path):
    (tmp_path / "tensor_parallel").mkdir()
    (tmp_path / "tensor_parallel" / "__init__.py").write_text("import pkg_resrc")
    (tmp_path / "tensor_parallel-2.0.0.dist-info").mkdir()
    (tmp_path / "tensor_parallel-2.0.0.dist-info" / "METADATA").write_text("Name: tensor_parallel\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    absent = {"no_such_package": ("nobody", "pip install it")}
    monkeypatch.setattr(doctor, "BACKENDS", {"tensor_parallel": doctor.BACKENDS["tensor_parallel"], **absent})

    broken, missing = doctor.check_backends()

    why = "2.0.0 cannot be imported: ModuleNotFoundError: No module named 'pkg_resrc'"
    assert broken[:3] == ("tensor_parallel", "warning", why)
    assert "pip install tensor_parallel==2.0.0 'setuptools>=77,<82'" in broken.fix
    assert missing[1:] == ("ok", "not installed; only nobody needs it (pip install it)", None)


def test_every_rank_of_an_all_reduce_counts():
    result = {"bytes": 256e6, "wrong": 0, "seconds": 0.001}
    finding = doctor.judge_all_reduce([{**result, "seconds": 0.002}, *[result] * 3], "nccl")
    assert finding[:3] == ("all-reduce", "ok", "nccl over 4 processes: correct, 256 MB in 2.0 ms: 128.0 GB/s")
    finding = doctor.judge_all_reduce([result, {**result, "wrong": 20}], "gloo")
    assert finding[1:3] == ("problem", "gloo over 2 processes: the sum is wrong in 20 elements on rank 1")
    assert "/etc/hosts" in finding.fix


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_fits_100_columns_and_counts():
    findings = [Finding("peer access", "warning", "word " * 60, "fix " * 60), Finding("gpu", "problem", "a" * 74, "b")]

    lines = doctor.format_report(findings).splitlines()

    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("warning  peer access      word word")
    assert lines[-1] == "1 problem, 1 warning"


# --- probes ----------------------------------------------------------------------------------------------------------


def test_a_probe_that_hangs_is_killed_with_its_children(monkeypatch, tmp_path):
    code = """if True:
        import os, subprocess, sys
        child = subprocess.Popen(["sleep", "100"])
        print(os.getpid(), child.pid, file=open(sys.argv[1], "w"), flush=True)
        child.wait()"""
    start = time.monotonic()
    with pytest.raises(ChildError, match=r"no answer within 1\.5 s"):
        doctor.ask(sys.executable, "-c", code, str(tmp_path / "pids"), limit=1.5)
    assert time.monotonic() - start < 10
    assert_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_what_a_child_says_is_shown_without_credentials():
    with pytest.raises(ChildError, match=r"^OSError: no route to http://REDACTED@proxy$"):
        doctor.ask(sys.executable, "-c", f"raise OSError('no route to http://user:{SECRET}@proxy')")
    with pytest.raises(ChildError, match="no-such-command cannot be run"):
        doctor.ask("no-such-command")


def test_matmul_error_finds_wrong_products(monkeypatch):
    assert doctor.find_matmul_error("cpu", torch.float32) is doctor.find_matmul_error("cpu", torch.bfloat16) is None
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor * 1.02)
    assert doctor.find_matmul_error("cpu", torch.float32) == "a torch.float32 product is off by 2.0%"
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor * float("nan"))
    assert doctor.find_matmul_error("cpu", torch.bfloat16) is not None


def test_a_sick_gpu_does_not_hide_the_others(monkeypatch):
    def multiply(device: str, dtype: torch.dtype) -> None:
        if device == "cuda:1":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore about it")

    for name, stand_in in {
        "device_count": lambda: 3,
        "device": lambda i: contextlib.nullcontext(),
        "mem_get_info": lambda: (10, 20),
        "is_bf16_supported": lambda including_emulation: True,
        "get_device_properties": lambda i: SimpleNamespace(name=f"GPU {i}", total_memory=20),
    }.items():
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(doctor, "find_matmul_error", multiply)

    first, second, third = doctor.probe_devices()

    assert first == Gpu("GPU 0", 20, 10, True)
    assert (second.error, second.free, third.error) == ("CUDA out of memory.", 10, None)
