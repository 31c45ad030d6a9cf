"""Check 9: launchers and signals with FSDPTrainer through the command line, all at the same time."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.gpu_checks.common import ROOT, TINY, Outcome, Process, Run, Setting, few_words
from scripts.gpu_checks.table import STOP_SECONDS
from scripts.probes import ChildError, ask

COMMON = (f"model.name_or_path={TINY}", "model.block_name=LlamaDecoderLayer", "loss=dpo", "loss.beta=0.1",
          "model.reference_dtype=float32", "datasets=[hh]", "n_eval_examples=4", "eval_batch_size=4",
          "do_first_eval=false", "sample_during_eval=false", "max_length=96", "max_prompt_length=64", "n_epochs=null",
          "batch_size=4", "warmup_steps=2")  # fmt: skip
FSDP = ("trainer=FSDPTrainer", "world_size=1")


def check(setting: Setting) -> Outcome:
    common = (*COMMON, f"dataset_sources.hh={few_words(setting, 40)}")
    training = Run(setting, "training", *common, *FSDP, "n_examples=1000000", "eval_every=1000000")
    loading = Run(setting, "loading", *common, *setting.pick(FSDP, FSDP, ()), "n_examples=8")
    torchrun, slurm = start_torchrun(setting, common), start_slurm(setting, common)

    found = {"SIGTERM while loading": stop(loading, loading.directory / "preflight.json")}
    updating = wait_for(lambda: training.records(split="train") or training.status is not None)
    held = contexts(training) if setting.gpu and training.status is None else None
    found["SIGTERM while training"] = stop(training, None) if updating else f"no update: {training.last_line()}"
    if not (found["SIGTERM while training"] or (training.directory / "LATEST").exists()):
        found["SIGTERM while training"] = "nothing was saved"
    found["torchrun"] = ended([torchrun])
    found["Slurm"] = ended(slurm)
    if held:
        found["one context"] = None if held == 1 else f"{held} contexts of a run with one worker"
    faults = [f"{name}: {fault}" for name, fault in found.items() if fault]
    figure = "; ".join(faults) or f"correct: {', '.join(found)}"
    if not held:
        figure += f"; contexts not counted: {'nvidia-smi does not list the run' if setting.gpu else 'needs a GPU'}"
    return Outcome(not faults, figure, {"found": found, "contexts": held})


def start_torchrun(setting: Setting, common: tuple[str, ...]) -> Process:
    name = "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
               str(ROOT / "train.py"), *common, "trainer=FSDPTrainer", "n_examples=8", "wandb.enabled=false",
               f"exp_name={name}", f"local_run_dir={setting.folder}/{name}",
               f"local_dirs=[{setting.folder}]"]  # fmt: skip
    return Process(setting, name, command)


def start_slurm(setting: Setting, common: tuple[str, ...]) -> list[Run]:
    """Two tasks on the CPU: NCCL does not allow two on one GPU."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    place = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    own = (*common, "trainer=FSDPTrainer", "n_examples=8", f"local_run_dir={setting.folder}/slurm")
    seats = [{**place, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return [Run(setting, f"slurm-{rank}", *own, **rank_env) for rank, rank_env in enumerate(seats)]


def ended(runs: list[Any]) -> str | None:
    """What went wrong in the first run that failed."""
    statuses = [run.wait(120) for run in runs]
    wrong = [f"status {s}: {run.last_line()}" for s, run in zip(statuses, runs, strict=True) if s != 0]
    return wrong[0] if wrong else None


def stop(run: Run, sign: Any) -> str | None:
    """Send SIGTERM once the file `sign` exists. Returns what was wrong with the exit; None if it was 143 and in
    time."""
    if sign is not None and not wait_for(lambda: sign.exists() or run.status is not None):
        return "it never started"
    if run.status is not None:
        return f"exited with status {run.status} before the signal: {run.last_line()}"
    run.signal(signal.SIGTERM)
    start = time.monotonic()
    status = run.wait(STOP_SECONDS)
    if status is None:
        return f"did not exit within {STOP_SECONDS:g} s"
    return None if status == 143 else f"status {status} after {time.monotonic() - start:.0f} s: {run.last_line()}"


def wait_for(there: Callable[[], Any], limit: float = 60) -> bool:
    deadline = time.monotonic() + limit
    while not there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def contexts(run: Process) -> int | None:
    """The number of CUDA contexts of a run's processes; None without nvidia-smi, or if a container hides the
    processes."""
    try:
        lines = ask("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader").splitlines()
        parent = run.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except (ChildError, OSError):
        return None
    return sum(line.strip() in {str(parent), *children} for line in lines) or None
