"""The command of `make demo`: SFT, then DPO, on synthetic dialogues.

    python -m scripts.demo

Writes `.cache/demo/{sft,dpo}` and a page about the latter, `.cache/demo/report/report.html`. A completed stage is not
run again; `make clean-demo` removes all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dpo.data.demo import judge

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / ".cache" / "demo"
# samples before training are what the page compares with; `resume=auto` goes on with an interrupted demo
COMMON = (
    *("model=demo", "datasets=[demo]", "max_length=96", "max_prompt_length=72", "batch_size=32", "eval_batch_size=64"),
    *("n_eval_examples=256", "do_first_sampling=true", "schedule=cosine", "wandb.enabled=false", "resume=auto"),
)
STAGES = {
    "sft": (
        *("loss=sft", "optimizer=AdamW", "lr=3e-3", "warmup_steps=50", "n_epochs=4", "eval_every=8192"),
        "n_eval_model_samples=64",
    ),
    # with SGD, as other optimizers move all weights about equally far, even those unrelated to manners
    "dpo": (
        *("loss=dpo", "loss.beta=0.5", "optimizer=SGD", "lr=0.2", "warmup_steps=10", "n_examples=1024"),
        *("eval_every=512", "n_eval_model_samples=256"),
    ),
}


def run_stage(name: str) -> None:
    run_dir = DEMO / name
    if (run_dir / "LATEST").exists():
        print(f"{os.path.relpath(run_dir)} already exists; `make clean-demo` removes it")
        return
    command = [*STAGES[name], *COMMON, f"exp_name=demo_{name}", f"local_run_dir={run_dir}"]
    if name == "dpo":
        command.append(f"model.archive={DEMO / 'sft' / 'LATEST'}")
    print(f"\n$ python train.py {' '.join(command)}\n", flush=True)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # with a model this small, threads mostly wait for each other
    if subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, env=one_thread, check=False).returncode:
        sys.exit(f"the {name} stage failed; see its output above")


def read_samples(stage: str, evaluation: int) -> list[tuple[str, str]]:
    """Read prompts and responses of the first (0) or last (-1) evaluation."""
    samples = [json.loads(line) for line in (DEMO / stage / "samples.jsonl").read_text("utf-8").splitlines()]
    n_examples = sorted({sample["examples"] for sample in samples})[evaluation]
    return [(sample["prompt"], sample["policy"]) for sample in samples if sample["examples"] == n_examples]


def main() -> int:
    for stage in STAGES:
        run_stage(stage)
    print("answers to held-out prompts   courteous     curt   broken   another thing")
    for name, stage, evaluation in (("untrained", "sft", 0), ("after SFT", "dpo", 0), ("after DPO", "dpo", -1)):
        shares = judge(read_samples(stage, evaluation))
        print(
            f"{name:<27} {shares.courteous:>11.1%} {shares.curt:>8.1%} {shares.broken:>8.1%} {shares.mistaken:>15.1%}"
        )
    print("\nBroken: a sentence that cannot be in the data. Another thing: a sentence about something not asked for.")
    from dpo.analysis.page import write_report  # matplotlib takes a second to import

    page = write_report([DEMO / "dpo"], DEMO / "report")
    print(f"Checkpoints, metrics.jsonl and samples.txt of the runs are in {os.path.relpath(DEMO)}.")
    print(f"\nNow open {os.path.relpath(page)} in a browser: it also shows answers before and after DPO.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
