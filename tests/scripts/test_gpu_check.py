"""The acceptance run: its small form passes here; a check that goes wrong is found out, ended, and alone."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.runs import ROOT, assert_gone, run_script

from scripts.gpu_check import as_text, run_checks
from scripts.gpu_checks import compiling, demo, layouts, processes, speed, syncs, table, two_ranks
from scripts.gpu_checks.common import CheckFailed, Process, Setting
from scripts.gpu_checks.table import CHECKS, Check


@pytest.fixture
def setting(tmp_path) -> Setting:
    return Setting(gpu=False, quick=False, folder=str(tmp_path))


@pytest.mark.slow  # `make test` makes one check that passes and one that is skipped
@pytest.mark.timeout(900)
def test_without_a_gpu_what_a_cpu_can_show_passes_and_the_rest_says_that_it_needs_one():
    command = [sys.executable, "-m", "scripts.gpu_check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}

    assert list(found) == list(CHECKS)
    assert [check["number"] for check in report["checks"]] == list(range(1, 12))
    told = {name: (check["figure"], check["log"]) for name, check in found.items() if check["state"] == "failed"}
    assert told == {}
    assert done.returncode == 0
    assert {name for name, check in found.items() if check["state"] == "skipped"} == {"shapes", "speed"}
    for name in ("layouts", "fsdp", "compile", "shapes", "processes", "speed"):
        assert "needs a GPU" in found[name]["figure"] or "need a GPU" in found[name]["figure"]
    assert (report["passed"], report["failed"], report["skipped"]) == (9, 0, 2)
    assert report["torch"] == torch.__version__


def test_only_some_and_as_text():
    done = run_script("-m", "scripts.gpu_check", "--only", "syncs,shapes")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r" \d", line)]
    assert [line.split()[:3] for line in lines] == [["4", "syncs", "passed"], ["6", "shapes", "skipped"]]
    assert done.stdout.splitlines()[-2:] == [
        "1 passed, 0 failed, 1 skipped",
        "torch sees no GPU: checks that passed on this CPU say little about one",
    ]
    refused = run_script("-m", "scripts.gpu_check", "--only", "shapes,sped")
    assert refused.returncode == 2
    assert "--only: unknown checks sped; the checks are layouts, demo," in refused.stderr


FAULTS = {
    "finds_a_fault": ("failed", "3 of 2"),
    "raises": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "gives_up": ("failed", "the run ended with status 1"),
    "crashes": ("failed", "its process was killed by SIGKILL and gave no result"),
    "leaves": ("failed", "SystemExit: 0"),
    "hangs": ("failed", "not finished within 3 s"),
    "needs_more": ("skipped", "not possible: there is one device"),
    "passes": ("passed", "as it should be"),
}


@pytest.mark.parametrize(
    "gpu", [pytest.param(False, id="forked"), pytest.param(True, marks=pytest.mark.slow, id="fresh")]
)
def test_what_happens_to_a_check_stays_with_it(gpu, setting, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    checks = {name: Check(f"support.gpu_faults:{name}", name, 3 if name == "hangs" else 60) for name in FAULTS}

    results = {result.name: result for result in run_checks(checks, setting._replace(gpu=gpu), at_once=2)}

    assert {name: (result.state, result.figure) for name, result in results.items()} == FAULTS
    assert results["passes"].details == {"number": 1, "lines": ["a line"]}
    assert "what its run said last" in results["gives_up"].log
    assert "Traceback" in results["raises"].log
    assert results["passes"].log == results["finds_a_fault"].log == ""
    assert_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
    assert 3 <= results["hangs"].seconds < 30
    assert as_text(results["passes"]).splitlines()[1:] == ["    a line"]


def test_a_failed_check_is_exit_status_1_and_the_time_for_all_is_limited(setting, monkeypatch, capsys):
    import scripts.gpu_check as runner

    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    monkeypatch.setattr(runner, "CHECKS", {"bad": Check("support.gpu_faults:raises", "bad", 60)})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json"])
    monkeypatch.setattr(os, "environ", {**os.environ})
    assert runner.main() == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["failed"], report["checks"][0]["figure"][:23]) == (1, "RuntimeError: CUDA erro")

    checks = {"late": Check("support.gpu_faults:passes", "late", 60)}
    [late] = run_checks(checks, setting, budget=0)
    assert (late.state, late.figure) == ("failed", "not run: the time for all checks is used up")


# --- what each of them finds -----------------------------------------------------------------------------------------


def test_a_read_of_a_result_is_counted_with_its_place_and_its_copy_for_the_host_once():
    places: list[str] = []
    logps = torch.rand(4)
    with syncs.reads_on_cpu(lambda: places.append(syncs.place_of_ours())):
        assert torch.arange(3).sum().item() == 3  # data is on the host anyway
        assert torch.ones(2, dtype=torch.long).tolist() == [1, 1]
        assert places == []
        float(logps.sum())
        bool((logps > 0).all())
        logps.tolist()
        on_host = logps.cpu()
        on_host.tolist(), on_host.double().mean().item(), on_host.unbind(0)[0].item()
    assert len(places) == 4
    assert all(place.startswith("tests/scripts/test_gpu_check.py:") for place in places)


def test_a_wait_that_torch_warns_of_is_counted_and_other_warnings_are_not(monkeypatch):
    modes, waits = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with syncs.waits_on_gpu(lambda: waits.append(1)):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert (len(waits), modes) == (2, ["warn", "default"])


def test_reads_within_an_update_are_told_from_those_after_it():
    update = Counter(
        {(syncs.WITHIN, "dpo/models/pretrained.py:1 (f)"): 2, (syncs.AFTER, "dpo/reporting/metrics.py:1 (g)"): 1}
    )
    assert syncs.n_within(update) == 2


def test_blocks_that_run_uncompiled_new_graphs_and_complaints_fail(setting, tmp_path):
    good = [{"runs": 6, "graphs": 0, "blocks": 6, "graphs in all": 5, "seconds": 1.0}] * 6
    assert compiling.judge(setting, {"compiled": good}).passed
    uncompiled = [*good[:-1], {**good[0], "runs": 3}]
    assert not compiling.judge(setting, {"compiled": uncompiled}).passed
    assert not compiling.judge(setting, {"compiled": [*good[:-1], {**good[0], "graphs": 1}]}).passed
    (tmp_path / "log").write_text("W1121 21:48:31.774000 10586 torch._dynamo hit config.recompile_limit (8)\nfine\n")
    outcome = compiling.judge(setting, {"compiled": good})
    assert not outcome.passed
    assert "torch._dynamo hit config.recompile_limit (8)" in outcome.figure


@pytest.mark.slow
def test_a_difference_between_the_layouts_and_a_wrong_kernel_fail(setting, monkeypatch):
    monkeypatch.setattr(layouts, "FAMILIES", ("llama",))
    monkeypatch.setattr(layouts, "PRECISIONS", ("bfloat16",))
    monkeypatch.setitem(table.GOOD_SDPA, "cpu", {"another"})
    outcome = layouts.check(setting)
    assert not outcome.passed
    assert "llama bfloat16 sdpa: attention ran as ours" in outcome.figure

    monkeypatch.setitem(table.LAYOUT_TOLERANCE, "bfloat16", 0.0)
    assert "kept and correct in 0 of 2" in layouts.check(setting).figure
    names = ("efficient_attention", "cudnn_attention", "attention_math", "efficient_attention_backward")
    kernels = [layouts.sdpa_kernel(f"aten::_scaled_dot_product_{name}") for name in names]
    assert kernels == ["efficient", "cudnn", "math", None]


def test_distances_are_those_of_the_golden_tests():
    assert demo.distance(2.0, 1.0, "loss/train") == 1.0
    assert demo.distance(-0.3, -0.1, "rewards_train/chosen") == pytest.approx(0.2)
    assert demo.distance(0.5, 0.5, "rewards_train/accuracies") == 0
    assert demo.distance(0.5, 0.75, "rewards_train/accuracies") == math.inf


def test_a_run_that_ignores_sigterm_or_ends_otherwise_is_found(setting, monkeypatch):
    monkeypatch.setattr(processes, "STOP_SECONDS", 1.0)
    deaf = Process(setting, "deaf", ["sh", "-c", "trap '' TERM; echo begun; while true; do sleep 0.1; done"])
    assert processes.wait_for(lambda: "begun" in deaf.text())
    assert processes.stop(deaf, None) == "did not exit within 1 s"
    assert deaf.process.wait() == -signal.SIGKILL

    killed = Process(setting, "killed", ["sleep", "60"])
    assert processes.stop(killed, None).startswith(f"status {-signal.SIGTERM} after")
    early = Process(setting, "early", ["sh", "-c", "echo no such model; exit 2"])
    early.wait()
    assert processes.stop(early, None) == "exited with status 2 before the signal: no such model"
    with pytest.raises(CheckFailed, match="early ended with status 2: no such model"):
        early.done()


def test_a_hang_must_end_the_other_rank_and_be_named(setting, monkeypatch):
    def pair(script: str) -> list[Process]:
        return [Process(setting, "waits", ["sh", "-c", script]), Process(setting, "hangs", ["sleep", "60"])]

    seconds, blame = two_ranks.end_of_hang(pair("echo because rank 1 did not answer within 15; exit 3"))
    assert blame is None
    assert seconds < 10
    assert "named no rank: no idea" in two_ranks.end_of_hang(pair("echo no idea; exit 3"))[1]
    monkeypatch.setattr(two_ranks, "HANG_SECONDS", 0.5)
    assert two_ranks.end_of_hang(pair("exec sleep 60"))[1] == "the other rank still waited after 0.5 s"


def test_updates_that_are_missing_or_far_are_far():
    one = {"loss/train": 1.0, "grad_norm": 2.0, "lr": 1.0, "rewards_train/accuracies": 0.5}
    assert two_ranks.farthest([one], [{**one, "lr": 9.0, "grad_norm": 1.0}]) == 1.0
    assert two_ranks.farthest([one], [one, one]) == math.inf


def test_shapes_of_published_models_are_cut_to_the_gpus_memory_and_say_so(monkeypatch):
    properties = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    settings, said = speed.cut_to_memory("llama-3-8b")
    assert (settings["num_hidden_layers"], said) == (18, "18 of 32 layers, to fit the GPU's memory")
    assert speed.cut_to_memory("pythia-2.8b")[1] == "all 32 layers"
    assert speed.count_parameters(speed.SHAPES["llama-3-8b"]) == 8_030_261_248
    assert speed.count_parameters(speed.SHAPES["pythia-2.8b"]) == 2_775_208_960


def test_a_slow_or_wrong_layout_fails_on_a_gpu(setting):
    summary = {"ours": {"share": 0.1, "losses": [0.7]}, "padded": {"losses": [0.6]}, "times": 1.0}
    faults = speed.find_faults(summary, setting._replace(gpu=True))
    assert [fault.split(" ")[0] for fault in faults] == ["losses", "less", "less"]
    assert len(speed.find_faults(summary, setting)) == 1
