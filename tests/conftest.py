"""What the tests share: the real command line in a subprocess, a run's metrics, small models made on the spot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared"  # real data and more golden runs, on the maintainers' machines only
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


def run_script(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` without network, W&B key or terminal."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HYDRA"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def train(*overrides: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py OVERRIDES`, W&B off unless an override or the environment says otherwise."""
    if not any(o.startswith("wandb.enabled") for o in overrides):
        overrides = (*overrides, "wandb.enabled=false")
    return run_script(str(ROOT / "train.py"), *overrides, cwd=cwd, **environment)


def metrics_of(run_dir: Path, split: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


@pytest.fixture(scope="session")
def tokenizer():
    from models import load_tokenizer

    return load_tokenizer(str(GOLDEN / "tiny-llama"))


@pytest.fixture(scope="session")
def tiny_llama():
    from models import load_model

    return load_model(str(GOLDEN / "tiny-llama"), dtype=torch.float32)


def write_rows(path: Path, rows: list) -> Path:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
