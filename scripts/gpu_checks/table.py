"""The checks, the most valuable first, their time limits, and all thresholds."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    run: str  # module:function
    title: str
    limit: float  # seconds, after which it is killed
    alone: bool = False  # runs alone on a GPU, because it measures time or memory


HERE = __package__
CHECKS = {
    "layouts": Check(
        f"{HERE}.layouts:check", "shared prefixes are kept, and give the log-probabilities of padded rows", 120
    ),
    "demo": Check(f"{HERE}.demo:check", "SFT, then DPO; the golden runs of the published reference", 75),
    "fsdp": Check(f"{HERE}.fsdp:check", "FSDPTrainer in one process: train, evaluate, sample, save, resume", 75),
    "syncs": Check(f"{HERE}.syncs:check", "an update waits for the device only after its backward", 60),
    "compile": Check(
        f"{HERE}.compiling:check", "compile=true and flex_attention stay compiled after sampling", 150, alone=True
    ),
    "shapes": Check(f"{HERE}.shapes:check", "new shapes of microbatches cost nothing", 60, alone=True),
    "memory": Check(f"{HERE}.memory:check", "memory as predicted; the reference's is given back", 90, alone=True),
    "repeats": Check(f"{HERE}.repeats:check", "deterministic=true repeats bit for bit, stopped and continued too", 75),
    "processes": Check(f"{HERE}.processes:check", "torchrun, Slurm, SIGTERM, one context for each process", 150),
    "two-ranks": Check(f"{HERE}.two_ranks:check", "two ranks on one device: FSDP, tensor parallelism, a hang", 120),
    "speed": Check(f"{HERE}.speed:check", "share of the measured peak, and times faster than padded", 180, alone=True),
}
BUDGET = 600.0  # seconds for all checks on a GPU; those that have not run by then have failed

# layouts
LAYOUT_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.02, "autocast": 0.02}  # relative; float32 with TF32's products
GOOD_SDPA = {
    "cuda": {"efficient", "flash"},
    "cpu": {"flash_attention_for_cpu", "ours"},
}  # not cuDNN's, not the plain one
# demo: of tests/runs/test_golden.py; log-probabilities, losses and norms relative, rewards absolute below 1
FIRST_LOSS_TOLERANCE = 1e-4  # of ln 2
GOLDEN_FIRST, GOLDEN, GOLDEN_IPO = 3e-5, 5e-4, 1e-3
# fsdp: bfloat16 against float32, as in tests/runs/test_golden.py
BFLOAT16_BAND = {"logps": 5e-3, "loss": 0.1, "grad_norm": 0.1, "rewards": 0.2}
# syncs
MOST_READS = 1  # reads of the device by the host per update
# compile
TIMES_FASTER_COMPILED = 0.9  # than eager: not slower, with a margin for noise
# shapes
NEW_SHAPE_MS = 5.0  # of the host's time; cuDNN's plans take 23 to 37
# memory
PREDICTION = {"cuda": 0.15, "cpu": 0.3}  # relative; on a CPU libraries take most of the memory of so small a run
GIVEN_BACK = 0.95  # of the reference's bytes
# processes
STOP_SECONDS = 60.0
# two-ranks
RANKS_TOLERANCE = 1e-3  # of float32 metrics, relative, rewards absolute below 1
HANG_SECONDS = 75.0  # from the start, for a timeout of 15
# speed
SHARE_OF_PEAK = 0.25  # a guess: set without a GPU
LOSS_TOLERANCE = 0.02  # relative, between the layouts
TIMES_FASTER = 1.2
