"""The doctor: what it says about this machine, and about machines made up here; nothing hangs, nothing leaks."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from support.runs import assert_gone, run_python, run_script

from scripts import doctor
from scripts.advice import Gpu, recommend
from scripts.doctor import ChildError, Finding

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
        assert "recommended: trainer=BasicTrainer, float32, model=demo" in lines
        assert "model.autocast=bfloat16" in result.stdout


@pytest.mark.slow
def test_json_report_of_this_machine(tmp_path):
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")

    result = run_script("-m", "scripts.doctor", "--json", "--model", "llama7b", NETRC=str(tmp_path / "netrc"))
    report = json.loads(result.stdout, parse_constant=pytest.fail)

    assert result.stderr == ""
    assert SECRET not in result.stdout
    assert list(report) == ["findings", "recommendation"]
    assert {tuple(finding) for finding in report["findings"]} == {("check", "level", "text", "fix")}
    assert all((f["fix"] is None) == (f["level"] == "ok") for f in report["findings"])
    wandb = next(f for f in report["findings"] if f["check"] == "wandb")
    assert wandb["text"] == f"an API key for api.wandb.ai is in {tmp_path / 'netrc'}"
    assert list(report["recommendation"]) == ["trainer", "model", "dtype", "examples_per_gpu", "command", "reasons"]
    assert result.returncode == any(f["level"] == "problem" for f in report["findings"])


def test_it_reports_where_torch_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")

    result = run_python("-m", "scripts.doctor", "--json", PYTHONPATH=str(tmp_path))
    report = {f["check"]: f for f in json.loads(result.stdout)["findings"]}

    assert result.returncode == 1
    assert "libcudart.so.13 is missing" in report["gpu"]["text"]
    assert {report[name]["level"] for name in ("gpu", "all-reduce")} == {"problem"}
    assert "problem" not in {report[name]["level"] for name in ("software", "host")}


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on():
    def check_the_moon() -> list[Finding]:
        raise ZeroDivisionError("no moon")

    broken, host = doctor.examine({"moon": check_the_moon, "host": doctor.check_host})

    assert broken[:3] == ("moon", "problem", "could not be checked: ZeroDivisionError: no moon")
    assert host.check == "host"


# --- made-up machines ------------------------------------------------------------------------------------------------


def test_eight_good_gpus_are_ok():
    findings = doctor.gpu_findings([H100] * 8)

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
    bad = [finding for finding in doctor.gpu_findings(gpus) if finding.level != "ok"]
    assert [finding[:3] for finding in bad] == [(check, level, text)]
    assert fix in bad[0].fix


def test_no_gpu_is_fine_without_a_driver_and_not_with_one():
    assert doctor.no_gpu_finding(None, None, None).level == "ok"
    assert doctor.no_gpu_finding("580.65", "13.0", "").level == "warning"
    assert doctor.no_gpu_finding("580.65", "13.0", None).level == "problem"
    unused = doctor.no_gpu_finding("580.65", None, "0,1")
    assert unused[1:3] == ("problem", "driver 580.65, but torch, built for the CPU, sees no GPU")
    assert doctor.no_gpu_finding("580.65", "13.0", None, "no answer within 70 s").text.endswith("70 s")


@pytest.mark.parametrize(
    ("limits", "level"), [((1024, 65536), "ok"), ((1024, -1), "ok"), ((1024, 2048), "warning"), ((256, 256), "problem")]
)
def test_the_hard_limit_of_open_files_counts(limits, level, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: limits)
    [finding] = doctor.check_open_files()
    assert finding.level == level
    assert level == "ok" or "too many open files" in finding.fix


@pytest.mark.parametrize(("free", "level"), [(60e9, "ok"), (49e9, "warning"), (1e9, "problem")])
def test_disk_where_runs_go(free, level, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # has no .cache yet
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    [finding] = doctor.check_disk()
    assert finding.level == level
    if not any(map(os.path.exists, ("/scr-ssd", "/scr"))):
        assert finding.text.startswith(f"{free / 1e9:.1f} GB free for runs and caches in {tmp_path}; a real run needs")


def test_a_disk_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)
    [finding] = doctor.check_disk()
    assert finding.level == "problem"
    assert finding.text.endswith("is not writable")


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


@pytest.mark.parametrize(
    ("netrc", "environment", "level", "text"),
    [
        (None, {}, "warning", "no API key: without a terminal to ask for one, runs log offline"),
        (None, {"WANDB_API_KEY": SECRET}, "ok", "an API key is in the environment"),
        (None, {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}, "ok", "WANDB_MODE=offline"),
        (f"machine api.wandb.ai login user password {SECRET}", {}, "ok", "an API key for api.wandb.ai is in NETRC"),
        (f"machine example.org login user password {SECRET}", {}, "warning", "no API key"),
        (f"machine {SECRET} {SECRET}", {}, "warning", "NETRC cannot be read: runs log offline"),
        (
            f"machine wandb.example.org:8080 login user password {SECRET}",
            {"WANDB_BASE_URL": f"https://user:{SECRET}@wandb.example.org:8080"},
            "ok",
            "an API key for wandb.example.org:8080 is in NETRC",
        ),
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


def test_a_hub_that_is_silent_is_given_up(monkeypatch, online):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(doctor, "HUB_LIMIT", 1)
        start = time.monotonic()
        assert doctor.check_hub()[0][1:3] == ("warning", "127.0.0.1: no answer within 1 s")
        assert time.monotonic() - start < 3


def test_no_hub_is_asked_when_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert doctor.check_hub()[0].level == "ok"


def install(folder: Path, code: str, monkeypatch) -> None:
    """A made-up tensor_parallel 2.0.0 on the path of this process and its children."""
    (folder / "tensor_parallel").mkdir()
    (folder / "tensor_parallel" / "__init__.py").write_text(code)
    (folder / "tensor_parallel-2.0.0.dist-info").mkdir()
    (folder / "tensor_parallel-2.0.0.dist-info" / "METADATA").write_text("Name: tensor_parallel\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("code", "level", "text"),
    [
        pytest.param(
            "",
            "ok",
            "2.0.0 can be imported; used by tensor_parallel.backend=tensor_parallel",
            marks=pytest.mark.slow,
        ),
        (
            "import pkg_resrc",
            "warning",
            "2.0.0 cannot be imported: ModuleNotFoundError: No module named 'pkg_resrc'",
        ),
        pytest.param("import os; os.abort()", "warning", "2.0.0 cannot be imported: status -6", marks=pytest.mark.slow),
    ],
)
def test_an_optional_package_that_is_there_is_imported(code, level, text, monkeypatch, tmp_path):
    install(tmp_path, code, monkeypatch)
    finding = next(f for f in doctor.check_backends() if f.check == "tensor_parallel")
    assert finding[1:3] == (level, text)
    assert level == "ok" or "pip install tensor_parallel==2.0.0 'setuptools>=77,<82'" in finding.fix


def test_an_optional_package_that_is_absent_is_fine(monkeypatch):
    monkeypatch.setattr(doctor, "BACKENDS", {"no_such_package": ("nobody", "pip install it")})
    assert doctor.check_backends()[-1] == Finding(
        "no_such_package", "ok", "not installed; only nobody needs it (pip install it)"
    )


def test_the_slowest_rank_of_an_all_reduce_counts():
    result = {"bytes": 256e6, "wrong": 0}
    finding = doctor.reduce_finding([{**result, "seconds": 0.002}, *[{**result, "seconds": 0.001}] * 3], "nccl")
    assert finding[:3] == ("all-reduce", "ok", "nccl over 4 processes: correct, 256 MB in 2.0 ms: 128.0 GB/s")


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_fits_100_columns_and_counts():
    findings = [Finding("peer access", "warning", "word " * 60, "fix " * 60), Finding("gpu", "problem", "a" * 74, "b")]

    lines = doctor.as_text(findings, recommend([V100] * 8, memory=1e12, model="llama7b")).splitlines()

    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("warning  peer access      word word")
    assert lines[-1] == "1 problem, 1 warning"
    command = " ".join("\n".join(lines).split("python train.py")[1].split("\n\n")[0].replace("\\\n", "").split())
    assert f"python train.py {command}" == recommend([V100] * 8, memory=1e12, model="llama7b").command


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


def replace_all_reduce(monkeypatch, folder: Path, code: str) -> None:
    """Run `code` on each rank, of which it knows its `rank`, before the all-reduce."""
    (folder / "broken.py").write_text(
        f"from scripts import doctor\n\ndef reduce(rank, *rest):\n    {code}\n    doctor.all_reduce(rank, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    ask, probe = doctor.ask, "from scripts.doctor import *;"

    def ask_broken(*command: str, limit: float) -> str:
        *python, call = command
        setup = "import broken, scripts.doctor;"
        patched = call.replace(probe, f"{probe} {setup} probe_all_reduce.__globals__['all_reduce'] = broken.reduce;")
        return ask(*python, patched, limit=limit)

    monkeypatch.setattr(doctor, "ask", ask_broken)


@pytest.mark.slow
def test_the_cause_is_reported_and_not_the_wait_for_it(monkeypatch, tmp_path):
    replace_all_reduce(monkeypatch, tmp_path, "if rank == 1: raise SystemError('no /dev/shm')")
    [finding] = doctor.check_all_reduce()
    assert finding.level == "problem"
    assert finding.text == "gloo over 2 processes failed: SystemError: no /dev/shm"


@pytest.mark.slow
def test_a_wrong_sum_is_a_problem(monkeypatch, tmp_path):
    replace_all_reduce(monkeypatch, tmp_path, "import torch.distributed as dist; dist.all_reduce = lambda values: None")
    [finding] = doctor.check_all_reduce()
    assert finding.level == "problem"
    assert "the sum is wrong in 20000000 elements on rank 0, 20000000 elements on rank 1" in finding.text
    assert "/etc/hosts" in finding.fix


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
