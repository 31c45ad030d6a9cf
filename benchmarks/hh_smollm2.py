"""SFT, DPO and IPO of a real model, ours and TRL's.

    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR
    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR --trl VENV/bin/python --only "TRL dpo 0.1"
    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR --quick

SMOLLM2 is SmolLM2-135M or another model of transformers, HH a directory with train and test in the format of hh-rlhf.
Each run is a command, which is printed, and writes to DIR/NAME. A second call continues runs that were stopped, and
skips complete ones. Other arguments are overrides of train.py for all of our runs, such as `model.autocast=null`. DIR
gets results.json, table.md, hh.png and hh-dark.png; samples are in DIR/NAME/scores.json.

Every policy is scored in float32 by this project's code on all test rows (`preference_scores.py`). Intervals are 95 %,
from resampling test prompts; they do not include variation over seeds of training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.harness import ROOT, compose, read_pairs
from benchmarks.preference_scores import Interval, balance_over_length, bootstrap, by_prompt, draw, pair_logps
from dpo.analysis.curves import DARK, LIGHT
from dpo.data.examples import encode_examples
from dpo.models.answers import Sampling
from dpo.settings.plan import resolve
from preference_datasets import load_data

LENGTHS = ("max_length=1024", "max_prompt_length=512")  # no row of HH's harmless-base is truncated
COMMON = (
    "datasets=[hh]", "wandb.enabled=false", "batch_size=16", "gradient_accumulation_steps=4", "eval_batch_size=16",
    "n_eval_examples=64", "sample_during_eval=false", *LENGTHS, "eval_every=100000", "save_every=320",
    "keep_checkpoints=2", "warmup_steps=10", "model.autocast=bfloat16", "model.reference_dtype=float32", "ledger=true",
    "seed=0", "resume=auto",
)  # fmt: skip
QUICK = (
    "batch_size=8", "gradient_accumulation_steps=1", "eval_batch_size=8", "n_eval_examples=8", "n_examples=32",
    "save_every=null", "warmup_steps=1",
)  # fmt: skip
LR = 5e-6  # of DPO and IPO
PREFERENCES = (f"lr={LR}", "cache_reference_logps=all")
IPO = ("loss=ipo", "loss.beta=0.1", *PREFERENCES)
SFT = "sft"
OURS = {
    SFT: ("loss=sft", "lr=1e-5"),
    **{f"dpo {beta}": ("loss=dpo", f"loss.beta={beta}", *PREFERENCES) for beta in (0.05, 0.1, 0.5)},
    "ipo 0.1": IPO,
    "ipo 0.1 per token": (*IPO, "loss.average=true"),  # like TRL's IPO
}
TRL = {
    **{f"TRL dpo {beta}": {"loss_type": ["sigmoid"], "beta": beta} for beta in (0.1, 0.05, 0.5)},
    "TRL ipo 0.1 per token": {"loss_type": ["ipo"], "beta": 0.1},
}
# key of a result, and key of the samples' values of which the result is the mean over prompts
SAMPLE_MEANS = {"kl": "kl", "kl_by_log_ratio": "log_ratio", "length": "tokens", "ended": "ended", "empty": "empty"}
Result = dict[str, Any]  # the numbers of a policy (docs/metrics.md); None where a number does not apply


def find_folder(out: Path, name: str) -> Path:
    return out / name.replace(" ", "-")


def find_policy(out: Path, name: str) -> Path:
    """Path of the trained policy, as a model of transformers."""
    return find_folder(out, name) / ("hf" if name in TRL else "LATEST/hf")


# --- training ------------------------------------------------------------------------------------------------------


def train_ours(out: Path, name: str, model: str, overrides: Sequence[str]) -> None:
    """Train with this project; all runs but SFT start from SFT's policy."""
    folder = find_folder(out, name)
    start = model if name == SFT else find_policy(out, SFT)
    paths = (f"model.name_or_path={start}", f"local_run_dir={folder}", f"local_dirs=[{out / 'cache'}]")
    command = [sys.executable, "train.py", *COMMON, *OURS[name], f"exp_name={folder.name}", *paths, *overrides]
    run(command, find_policy(out, name))


def train_with_trl(out: Path, name: str, python: str, config: Any) -> None:
    """Train with TRL, with the same rows, order, learning rates and batches."""
    settings = {
        "model": str(find_policy(out, SFT)),
        **TRL[name],
        "learning_rate": LR,
        "bf16": config.model.autocast == "bfloat16",
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": config.batch_size,
        "warmup_steps": config.warmup_steps,
        "max_length": config.max_length,
        **{"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1},
    }
    rows = {
        split: [{"prompt": prompt.text, **texts} for prompt, _, texts, _ in read_pairs(config, split)]
        for split in ("train", "test")
    }
    folder = find_folder(out, name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {"settings": settings, **rows}.items():
        (folder / f"{file}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    run([python, "-m", "benchmarks.trl_runs", str(folder)], folder / "trl.json")


def run(command: list[str], result: Path) -> None:
    """Run a command unless its result exists; exit if it fails."""
    if result.exists():
        print(f"{result} already exists", flush=True)
        return
    print(shlex.join(command), flush=True)
    if status := subprocess.run(command, check=False, cwd=ROOT).returncode:
        sys.exit(status)


# --- scores --------------------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # as in scripts.sample, samples are draws from the policy itself: of the generation config only EOS applies
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model


def score(out: Path, names: Sequence[str], config: Any, n_samples: int, sampling: Sampling) -> None:
    """Write DIR/NAME/scores.json of every policy, unless it is up to date."""
    data = load_data(resolve(config), silent=True)
    lengths = {"max_length": config.max_length, "max_prompt_length": config.max_prompt_length}
    pairs = encode_examples(read_pairs(config, "test"), data.encode, **lengths)
    settings = {"pairs": [pair.digest for pair in pairs], "n_samples": n_samples, **sampling._asdict()}
    reference = None
    for name in names:
        path, file = find_policy(out, name), find_folder(out, name) / "scores.json"
        is_newer = file.exists() and file.stat().st_mtime > (path / "config.json").stat().st_mtime
        if is_newer and json.loads(file.read_text())["settings"] == settings:
            continue  # the scores are those of this policy
        print(f"scoring {name}", flush=True)
        reference = reference or load(find_policy(out, SFT))
        policy = reference if name == SFT else load(path)
        samples = draw(policy, reference, data.tokenizer, [pair.prompt for pair in pairs], n_samples, sampling)
        scores = {
            "settings": settings,
            "tokens": [[len(response) for response in pair.responses] for pair in pairs],
            "logps": pair_logps(policy, pairs, max_length=config.max_length),
            "samples": [sample._asdict() for sample in samples],
        }
        file.write_text(json.dumps(scores), encoding="utf-8")


def read_scores(out: Path, name: str) -> dict[str, Any]:
    return json.loads((find_folder(out, name) / "scores.json").read_text(encoding="utf-8"))


def log_ratios(out: Path, name: str) -> np.ndarray:
    """Log-ratios of chosen and rejected test responses, (pairs, 2)."""
    return np.array(read_scores(out, name)["logps"]) - np.array(read_scores(out, SFT)["logps"])


def online_pairs(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read gaps and length differences of the training pairs, (n,) each.

    A gap is the log-ratio of chosen minus the log-ratio of rejected; a length difference is the tokens of chosen minus
    the tokens of rejected. Gaps are read from a run's ledger or TRL's logs, where each pair is measured before it is
    trained on. TRL's margins are beta times the gaps under every loss, also under TRL's per-token IPO.
    """
    if name in TRL:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
        rows = json.loads((folder / "train.json").read_text(encoding="utf-8"))
        lengths = [[len(tokenizer.encode(row[side])) for row in rows] for side in ("chosen", "rejected")]
        margins = np.array(json.loads((folder / "trl.json").read_text())["margins"])
        return margins / TRL[name]["beta"], np.subtract(*lengths)
    ledger = pq.read_table(folder / "ledger.parquet", filters=[("split", "=", "train")])
    columns = {column: np.asarray(ledger[column]) for column in ledger.column_names}
    chosen, rejected = (columns[f"policy_{side}"] - columns[f"reference_{side}"] for side in ("chosen", "rejected"))
    lengths = (columns[f"{side}_tokens"].astype(int) for side in ("chosen", "rejected"))
    return chosen - rejected, np.subtract(*lengths)


def seconds_per_pair(folder: Path, name: str) -> float:
    """Seconds per pair, the median over updates."""
    if name in TRL:
        logs = json.loads((folder / "trl.json").read_text())
        n_updates, n_pairs = len(logs["seconds"]), len(logs["margins"])
        return float(np.median(logs["seconds"])) * n_updates / n_pairs
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return 1 / float(np.median([line["examples_per_second"] for line in lines if line["split"] == "train"]))


def make_result(out: Path, name: str) -> Result:
    """Collect the numbers of a policy.

    For SFT the numbers of `rank_pairs` are None, as SFT's gaps are all 0.
    """
    folder = find_folder(out, name)
    scores, ratios = read_scores(out, name), log_ratios(out, name)
    gaps = ratios[:, 0] - ratios[:, 1]
    samples = [{**sample, "empty": not sample["text"].strip()} for sample in scores["samples"]]
    result = {
        "name": name,
        "gap": bootstrap(gaps),
        "chosen_change": bootstrap(ratios[:, 0]),
        "rejected_change": bootstrap(ratios[:, 1]),
        **{key: bootstrap(by_prompt(samples, sample_key)) for key, sample_key in SAMPLE_MEANS.items()},
        "seconds_per_pair": seconds_per_pair(folder, name),
        "trl_evaluation": json.loads((folder / "trl.json").read_text())["evaluation"] if name in TRL else None,
    }
    chosen_tokens, rejected_tokens = np.array(scores["tokens"]).T
    test = rank_pairs(gaps, chosen_tokens - rejected_tokens)
    if name == SFT:
        return result | dict.fromkeys(test) | dict.fromkeys(f"online_{key}" for key in test)
    online_gaps, online_differences = online_pairs(folder, name)
    half = len(online_gaps) // 2  # in the first half the policy has learned little
    online = rank_pairs(online_gaps[half:], online_differences[half:])
    return result | test | {f"online_{key}": value for key, value in online.items()}


def rank_pairs(gaps: np.ndarray, differences: np.ndarray) -> Result:
    """Measure how well gaps rank pairs, alone and given length differences."""
    is_right, is_shorter, is_longer = gaps > 0, differences < 0, differences > 0  # chosen is shorter, or longer
    varies = gaps.std() > 0 and differences.std() > 0
    return {
        "accuracy": bootstrap(is_right),
        "accuracy_if_shorter": bootstrap(is_right[is_shorter]) if is_shorter.any() else None,
        "accuracy_if_longer": bootstrap(is_right[is_longer]) if is_longer.any() else None,
        "balanced": balance_over_length(is_right, differences),
        "length_correlation": float(np.corrcoef(gaps, differences)[0, 1]) if varies else None,
        # the accuracy of always choosing the shorter response
        "shorter": float(is_shorter.mean() + (differences == 0).mean() / 2),
    }


# --- tables and picture --------------------------------------------------------------------------------------------

# cell of a result, by title; `accuracy` is None only for SFT
COLUMNS: dict[str, Callable[[Result], str]] = {
    "": lambda r: r["name"],
    "KL to SFT, nats": lambda r: f"{r['kl']:.2f}" if r["accuracy"] else "",
    "accuracy on pairs not yet trained on, balanced over length": lambda r: (
        f"{r['online_balanced']:.2f}" if r["online_balanced"] else ""
    ),
    "change of log pi, chosen": lambda r: f"{r['chosen_change']:.1f}" if r["accuracy"] else "",
    "rejected": lambda r: f"{r['rejected_change']:.1f}" if r["accuracy"] else "",
    "empty samples": lambda r: f"{100 * r['empty'].mean:.0f} %",
    "tokens of a sample": lambda r: f"{r['length']:.0f}",
}
TEST_COLUMNS: dict[str, Callable[[Result], str]] = {
    "test pairs": lambda r: r["name"],
    "accuracy": lambda r: f"{r['accuracy']:.2f}",
    "balanced over length": lambda r: f"{r['balanced']:.2f}" if r["balanced"] else "",
    "gap, nats": lambda r: f"{r['gap']:.2f}",
}
PANELS = (  # title, position of a line to compare with, keys of a result
    ("held-out accuracy", 0.5, ("accuracy",)),
    ("held-out gap, nats", 0.0, ("gap",)),
    ("change of log pi, chosen ● rejected ○", 0.0, ("chosen_change", "rejected_change")),
    ("KL to SFT, nats", None, ("kl",)),
)


def format_tables(results: Sequence[Result]) -> str:
    """Format the results as two Markdown tables."""
    tables = []
    all_but_sft = [result for result in results if result["accuracy"]]
    for columns, rows in ((COLUMNS, results), (TEST_COLUMNS, all_but_sft)):
        lines = [[*columns], ["---"] * len(columns)]
        lines += [[format_cell(row) for format_cell in columns.values()] for row in rows]
        tables.append("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return "\n".join(tables)


def compare_rankings(out: Path, names: Sequence[str]) -> list[str]:
    """Compare how each TRL policy and its counterpart rank the test pairs."""
    lines = []
    for trl_name in (name for name in names if name in TRL):
        our_name = trl_name.removeprefix("TRL ")
        if our_name not in names:
            continue
        trl_ratios, our_ratios = log_ratios(out, trl_name), log_ratios(out, our_name)
        trl_gaps, our_gaps = trl_ratios[:, 0] - trl_ratios[:, 1], our_ratios[:, 0] - our_ratios[:, 1]
        n_alike = ((trl_gaps > 0) == (our_gaps > 0)).sum()
        lines.append(
            f"{trl_name} - {our_name}: gap {bootstrap(trl_gaps - our_gaps):+.2f} nats; {n_alike} of {len(our_gaps)} "
            f"pairs ranked alike; correlation of gaps {np.corrcoef(trl_gaps, our_gaps)[0, 1]:.3f}"
        )
    return lines


def draw_picture(results: Sequence[Result], file: Path, *, dark: bool) -> None:
    """Draw a row for each policy, with a panel for each number."""
    theme = DARK if dark else LIGHT
    shown = [result for result in results if result["accuracy"]]
    size = (11, 0.9 + 0.36 * len(shown))
    with mpl.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=size, dpi=160, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (title, baseline, keys) in zip(axes, PANELS, strict=True):
            for row, result in enumerate(shown):
                color = theme.colors[1 if result["trl_evaluation"] else 0]
                for i, key in enumerate(keys):  # one value is in the middle of the row, two are above each other
                    value: Interval = result[key]
                    y = row + 0.15 * (2 * i - len(keys) + 1)
                    axis.plot([value.low, value.high], [y, y], color=color, linewidth=1.4)
                    face = color if i == 0 else theme.background
                    axis.plot([value.mean], [y], "o", color=color, markerfacecolor=face, markersize=5)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            if baseline is not None:
                axis.axvline(baseline, color=theme.muted, linewidth=0.8, linestyle=":")
            else:
                axis.set_xlim(left=0)
            axis.set_title(title, fontsize=9, color=theme.ink)
            axis.tick_params(length=0, labelcolor=theme.ink)
            axis.set_facecolor(theme.background)
            axis.grid(axis="x", color=theme.grid)
            axis.set_axisbelow(True)
            axis.spines[:].set_visible(False)
        axes[0].set_yticks(range(len(shown)), [result["name"] for result in shown])
        axes[0].set_ylim(len(shown) - 0.5, -0.5)
        figure.savefig(file, facecolor=theme.background, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].replace("%", "%%"), allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR_OR_HUB_ID", help="model that SFT starts from")
    parser.add_argument("--data", required=True, metavar="DIR_OR_HUB_ID", help="rows in the format of hh-rlhf")
    parser.add_argument("--out", required=True, type=Path, help="directory of runs and results")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment with TRL")
    parser.add_argument("--only", help=f"names of rows, separated by semicolons, of: {'; '.join([*OURS, *TRL])}")
    parser.add_argument("--samples", type=int, default=2, help="samples per test prompt (default: 2)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sample at most (default: 128)")
    parser.add_argument("--quick", action="store_true", help="a trial: 32 rows to train on, 8 to test on")
    options, overrides = parser.parse_known_args(arguments)
    out = options.out.resolve()
    overrides = [*(QUICK if options.quick else ()), f"dataset_sources.hh={options.data}", *overrides]
    names = options.only.split(";") if options.only else [*OURS, *(TRL if options.trl else ())]
    if unknown := set(names) - {*OURS, *TRL}:
        sys.exit(f"--only: unknown rows {', '.join(sorted(unknown))}; the rows are {'; '.join([*OURS, *TRL])}")
    names = [SFT, *(name for name in names if name != SFT)]  # all others start from SFT
    if not options.trl and any(name in TRL and not find_policy(out, name).exists() for name in names):
        sys.exit("rows of TRL need --trl PYTHON")
    train_ours(out, SFT, options.model, overrides)
    # `config` has the rows, their order and the settings that all runs share
    paths = (f"model.name_or_path={find_policy(out, SFT)}", f"local_run_dir={out / 'cache'}")
    config = compose([*COMMON, *OURS["dpo 0.1"], *paths, *overrides])
    for name in names[1:]:
        if name in TRL:
            train_with_trl(out, name, options.trl, config)
        else:
            train_ours(out, name, options.model, overrides)
    score(out, names, config, options.samples, Sampling(options.tokens))
    results = [make_result(out, name) for name in names]
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = "\n".join([format_tables(results), *compare_rankings(out, names)])
    (out / "table.md").write_text(text, encoding="utf-8")
    for file, dark in (("hh.png", False), ("hh-dark.png", True)):
        draw_picture(results, out / file, dark=dark)
    print(text)


if __name__ == "__main__":
    main()
