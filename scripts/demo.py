"""`make demo`: SFT, then DPO from its checkpoint, on a small model and synthetic dialogues, with the real command line.

    python -m scripts.demo

Writes `.cache/demo/{sft,dpo}`; a completed stage is not run again (`make clean-demo` removes both).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dpo.data.demo import COURTEOUS

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / ".cache" / "demo"
COMMON = [
    "model=demo",
    "datasets=[demo]",
    "batch_size=32",
    "eval_batch_size=32",
    "n_eval_examples=128",
    "n_eval_model_samples=32",
    "warmup_steps=10",
    "eval_every=8192",
    "wandb.enabled=false",
]
STAGES = {
    "sft": ["loss=sft", "optimizer=AdamW", "lr=2e-3", "n_epochs=4"],
    "dpo": ["loss=dpo", "loss.beta=0.1", "lr=1e-5", f"model.archive={DEMO / 'sft' / 'LATEST'}"],
}


def run_stage(name: str) -> None:
    run_dir = DEMO / name
    if (run_dir / "LATEST").exists():
        print(f"{run_dir.relative_to(ROOT)} already exists; `make clean-demo` removes it")
        return
    shutil.rmtree(run_dir, ignore_errors=True)  # an interrupted demo
    command = [*STAGES[name], *COMMON, f"exp_name=demo_{name}", f"local_run_dir={run_dir}"]
    print(f"\n$ python train.py {' '.join(command)}\n", flush=True)
    start = time.perf_counter()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # with a model this small, threads mostly wait for each other
    if subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, env=one_thread, check=False).returncode:
        sys.exit(f"the {name} stage failed; see its output above")
    print(f"\n{name} took {time.perf_counter() - start:.0f} s", flush=True)


def read(run: str, file: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / run / file).read_text(encoding="utf-8").splitlines()]


def courtesy(samples: list[dict]) -> float:
    return sum(s["policy"].strip().startswith(COURTEOUS) for s in samples) / len(samples)


def report() -> None:
    sft = [line for line in read("sft", "metrics.jsonl") if line["split"] == "eval"]
    dpo = [line for line in read("dpo", "metrics.jsonl") if line["split"] == "eval"]
    samples = read("dpo", "samples.jsonl")
    before = [s for s in samples if s["examples"] == 0]
    after = [s for s in samples if s["examples"] == dpo[-1]["examples"]]
    untrained = [s for s in read("sft", "samples.jsonl") if s["examples"] == 0]

    print("\nResponses to prompts that the model was not trained on:\n")
    for old, new in list(zip(before, after, strict=True))[:4]:
        print(f"  asked      {old['prompt'].split('Human:')[-1].split('Assistant:')[0].strip()}")
        print(f"  after SFT  {old['policy'].strip()}")
        print(f"  after DPO  {new['policy'].strip()}\n")

    rows = [
        ("untrained", f"{-sft[0]['logps_eval/chosen']:.1f}", "", courtesy(untrained)),
        (
            "after SFT",
            f"{-sft[-1]['logps_eval/chosen']:.1f}",
            f"{dpo[0]['rewards_eval/accuracies']:.2f}",
            courtesy(before),
        ),
        ("after DPO", "", f"{dpo[-1]['rewards_eval/accuracies']:.2f}", courtesy(after)),
    ]
    print("held out     SFT loss   reward accuracy   courteous samples")
    for name, loss, accuracy, courteous in rows:
        print(f"{name:<12} {loss:>8}   {accuracy:>15}   {courteous:>17.0%}")
    print("\nReward accuracy before DPO is 0: policy and reference are the same model, and a tie counts as 0.")
    print(f"Written to {DEMO.relative_to(ROOT)}/: checkpoints, metrics.jsonl and samples.txt of both runs.")


if __name__ == "__main__":
    for stage in STAGES:
        run_stage(stage)
    report()
