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
import time
from pathlib import Path

from dpo.data.demo import judge
from dpo.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / ".cache" / "demo"
COMMON = [
    "model=demo",
    "datasets=[demo]",
    "max_length=96",
    "max_prompt_length=72",
    "batch_size=32",
    "eval_batch_size=64",
    "do_first_sampling=true",  # the page compares with these samples
    "n_eval_examples=256",
    "schedule=cosine",
    "wandb.enabled=false",
    "resume=auto",  # goes on with an interrupted demo
]
STAGES = {
    "sft": [
        "loss=sft",
        "optimizer=AdamW",
        "lr=3e-3",
        "warmup_steps=50",
        "n_epochs=4",
        "eval_every=8192",
        "n_eval_model_samples=64",
    ],
    "dpo": [
        "loss=dpo",
        "loss.beta=0.5",
        "optimizer=SGD",  # other optimizers move all weights about equally far, even those unrelated to manners
        "lr=0.2",
        "warmup_steps=10",
        "n_examples=1024",
        "eval_every=512",
        "n_eval_model_samples=256",
    ],
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
    start = time.perf_counter()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # with a model this small, threads mostly wait for each other
    if subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, env=one_thread, check=False).returncode:
        sys.exit(f"the {name} stage failed; see its output above")
    print(f"\n{name} took {time.perf_counter() - start:.0f} s", flush=True)


def read_lines(stage: str, file: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / stage / file).read_text(encoding="utf-8").splitlines()]


def read_samples(stage: str, evaluation: int) -> list[tuple[str, str]]:
    """Read prompts and responses of the first (0) or last (-1) evaluation."""
    samples = read_lines(stage, "samples.jsonl")
    n_examples = sorted({sample["examples"] for sample in samples})[evaluation]
    return [(sample["prompt"], sample["policy"]) for sample in samples if sample["examples"] == n_examples]


def print_table() -> None:
    losses, accuracies = (
        [f"{line[metric]:.{digits}f}" for line in read_lines(stage, "metrics.jsonl") if line["split"] == "eval"]
        for stage, metric, digits in (("sft", "loss/eval", 1), ("dpo", "rewards_eval/accuracies", 2))
    )
    print("held out     SFT loss   reward accuracy   courteous     curt   broken   another thing")
    for name, loss, accuracy, samples in (
        ("untrained", losses[0], "", read_samples("sft", 0)),
        ("after SFT", losses[-1], accuracies[0], read_samples("dpo", 0)),
        ("after DPO", "", accuracies[-1], read_samples("dpo", -1)),
    ):
        shares = judge(samples)
        print(
            f"{name:<12} {loss:>8}   {accuracy:>15}   {shares.courteous:>9.1%} {shares.curt:>8.1%} "
            f"{shares.broken:>8.1%} {shares.mistaken:>15.1%}"
        )
    print("\nBroken: a sentence that cannot be in the data. Another thing: a sentence about something not asked for.")
    print("Reward accuracy after SFT is 0: policy and reference are still the same model, and a tie counts as 0.")


def main() -> int:
    for stage in STAGES:
        run_stage(stage)
    print_table()
    from dpo.analysis.page import write_report  # matplotlib takes a second to import

    try:
        page = write_report([DEMO / "dpo"], DEMO / "report")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Checkpoints, metrics.jsonl and samples.txt of the runs are in {os.path.relpath(DEMO)}.")
    print(f"\nNow open {os.path.relpath(page)} in a browser: it also shows answers before and after DPO.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
