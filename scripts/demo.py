"""The command of `make demo`: SFT, then DPO, on synthetic dialogues.

    python -m scripts.demo [--seed N | --seeds K] [--picture FILE.png]

Writes `.cache/demo/{sft,dpo}` (for a seed other than 0: `.cache/demo/seed-N/{sft,dpo}`) and a page about them,
`.cache/demo/report/report.html`. A completed stage is not run again (`make clean-demo` removes all stages).
`--picture` also writes the picture at the top of the page: FILE.png and, for dark pages, FILE-dark.png. For the README:

    python -m scripts.demo --seeds 3 --picture docs/demo.png
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpo.data.demo import Shares, judge
from dpo.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / ".cache" / "demo"
COMMON = [
    "model=demo",
    "datasets=[demo]",
    "max_length=96",
    "max_prompt_length=72",
    "eval_batch_size=64",
    "do_first_sampling=true",  # the page compares with these samples
    "n_eval_examples=256",
    "schedule=cosine",
    "wandb.enabled=false",
]
STAGES = {
    "sft": [
        "loss=sft",
        "optimizer=AdamW",
        "lr=3e-3",
        "warmup_steps=50",
        "batch_size=32",
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
        "batch_size=32",
        "n_examples=1024",
        "eval_every=512",
        "n_eval_model_samples=256",
    ],
}


class Outcome(NamedTuple):
    """Results of a seed's runs on held-out prompts."""

    seed: int
    untrained: Shares
    before: Shares  # after SFT, before DPO
    after: Shares
    losses: tuple[float, float]  # at SFT's first and last evaluation
    accuracies: tuple[float, float]  # reward accuracy at DPO's first and last evaluation


def find_directory(seed: int) -> Path:
    return DEMO if seed == 0 else DEMO / f"seed-{seed}"


def run_stage(name: str, seed: int) -> None:
    run_dir = find_directory(seed) / name
    if (run_dir / "LATEST").exists():
        print(f"{os.path.relpath(run_dir)} already exists; `make clean-demo` removes it")
        return
    exp_name = f"demo_{name}" + (f"_{seed}" if seed else "")
    place = (f"local_run_dir={run_dir}", "resume=auto")  # goes on with an interrupted demo
    command = [*STAGES[name], *COMMON, f"seed={seed}", f"exp_name={exp_name}", *place]
    if name == "dpo":
        command.append(f"model.archive={run_dir.parent / 'sft' / 'LATEST'}")
    print(f"\n$ python train.py {' '.join(command)}\n", flush=True)
    start = time.perf_counter()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # with a model this small, threads mostly wait for each other
    if subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, env=one_thread, check=False).returncode:
        sys.exit(f"the {name} stage failed; see its output above")
    print(f"\n{name} took {time.perf_counter() - start:.0f} s", flush=True)


def read_lines(run_dir: Path, file: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / file).read_text(encoding="utf-8").splitlines()]


def read_samples(run_dir: Path, evaluation: int) -> list[tuple[str, str]]:
    """Read prompts and responses of the first (0) or last (-1) evaluation."""
    samples = read_lines(run_dir, "samples.jsonl")
    n_examples = sorted({sample["examples"] for sample in samples})[evaluation]
    return [(sample["prompt"], sample["policy"]) for sample in samples if sample["examples"] == n_examples]


def read_evaluations(run_dir: Path) -> list[dict]:
    return [line for line in read_lines(run_dir, "metrics.jsonl") if line["split"] == "eval"]


def read_outcome(seed: int) -> Outcome:
    sft, dpo = (find_directory(seed) / stage for stage in STAGES)
    losses = [line["loss/eval"] for line in read_evaluations(sft)]
    accuracies = [line["rewards_eval/accuracies"] for line in read_evaluations(dpo)]
    return Outcome(
        seed,
        untrained=judge(read_samples(sft, 0)),
        before=judge(read_samples(dpo, 0)),
        after=judge(read_samples(dpo, -1)),
        losses=(losses[0], losses[-1]),
        accuracies=(accuracies[0], accuracies[-1]),
    )


def print_samples(seed: int) -> None:
    run_dir = find_directory(seed) / "dpo"
    print("\nResponses to prompts that the model was not trained on:\n")
    after_sft, after_dpo = read_samples(run_dir, 0), read_samples(run_dir, -1)
    for (prompt, sft_response), (_, dpo_response) in zip(after_sft[:4], after_dpo[:4], strict=True):
        question = prompt.split("Human:")[-1].split("Assistant:")[0]
        print(f"  asked      {question.strip()}")
        print(f"  after SFT  {sft_response.strip()}")
        print(f"  after DPO  {dpo_response.strip()}\n")


def print_table(outcomes: Sequence[Outcome]) -> None:
    print("held out          SFT loss   reward accuracy   courteous     curt   broken   another thing")
    for outcome in outcomes:
        seed = f", seed {outcome.seed}" if len(outcomes) > 1 else ""
        first_loss, last_loss = (f"{loss:.1f}" for loss in outcome.losses)
        first_accuracy, last_accuracy = (f"{accuracy:.2f}" for accuracy in outcome.accuracies)
        for name, loss, accuracy, shares in (
            ("untrained", first_loss, "", outcome.untrained),
            ("after SFT", last_loss, first_accuracy, outcome.before),
            ("after DPO", "", last_accuracy, outcome.after),
        ):
            print(
                f"{name + seed:<17} {loss:>8}   {accuracy:>15}   {shares.courteous:>9.1%} {shares.curt:>8.1%} "
                f"{shares.broken:>8.1%} {shares.mistaken:>15.1%}"
            )
    print("\nBroken: a sentence that cannot be in the data. Another thing: a sentence about something not asked for.")
    print("Reward accuracy after SFT is 0: policy and reference are still the same model, and a tie counts as 0.")


def name_pictures(file: Path) -> tuple[Path, Path]:
    """The files of the light and the dark picture."""
    return file, file.with_stem(f"{file.stem}-dark")


def write_page(outcomes: Sequence[Outcome], picture_file: Path | None) -> Path:
    """Write the report of all runs, with the demo's picture on top."""
    from dpo.analysis.page import Lead, write_report  # matplotlib takes a second to import
    from scripts.demo_picture import ALT, describe, draw

    changes = [(outcome.before, outcome.after) for outcome in outcomes]
    light, dark = draw(changes, dark=False), draw(changes, dark=True)
    if picture_file is not None:
        for file, picture in zip(name_pictures(picture_file), (light, dark), strict=True):
            file.write_bytes(picture)
    lead = Lead("What DPO changed", light, dark, ALT, describe(changes))
    runs = [find_directory(outcome.seed) / stage for outcome in outcomes for stage in STAGES]
    seed = outcomes[0].seed if len(outcomes) == 1 else 0  # several seeds have one report, in the place of seed 0's
    return write_report(runs, find_directory(seed) / "report", lead=lead)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__.split("\n")[0])
    seed_options = parser.add_mutually_exclusive_group()
    seed_options.add_argument("--seed", type=int, default=0, metavar="N", help="seed of both runs (default: 0)")
    seed_options.add_argument("--seeds", type=int, metavar="K", help="run seeds 0 to K-1, one after the other")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="also write the page's picture to this file")
    options = parser.parse_args(arguments)
    if options.seed < 0 or (options.seeds is not None and options.seeds < 1):
        parser.error("--seed must be at least 0, --seeds at least 1")
    if options.picture is not None and (options.picture.suffix != ".png" or not options.picture.parent.is_dir()):
        parser.error(f"--picture {options.picture} must end in .png and be in a directory that exists")
    if options.picture is not None and any(map(os.path.lexists, name_pictures(options.picture))):
        parser.error(f"--picture {options.picture} exists, itself or its dark variant: remove both, or give another")
    seeds = [options.seed] if options.seeds is None else range(options.seeds)
    for seed in seeds:
        for stage in STAGES:
            run_stage(stage, seed)
    outcomes = [read_outcome(seed) for seed in seeds]
    print_samples(seeds[0])
    print_table(outcomes)
    try:
        page = write_page(outcomes, options.picture)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Checkpoints, metrics.jsonl and samples.txt of the runs are in {os.path.relpath(DEMO)}.")
    print(f"\nNow open {os.path.relpath(page)} in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
