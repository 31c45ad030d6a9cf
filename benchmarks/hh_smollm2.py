"""SFT, then DPO and IPO of a real model on real preferences, by this project and by TRL: held-out pairs, KL, samples.

    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR
    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR --trl VENV/bin/python --only "TRL dpo 0.1"
    python -m benchmarks.hh_smollm2 --model SMOLLM2 --data HH --out DIR --quick

MODEL is SmolLM2-135M (any model of transformers), HH a directory with train and test in the format of hh-rlhf. Each run
is a command of train.py, printed, in DIR/NAME; a second call continues what was stopped and skips what is complete.
Other arguments are overrides of train.py for all of our runs (`model.autocast=null`). DIR gets results.json, table.md,
hh.png, hh-dark.png and samples.txt.

Every policy is scored in float32 by this project's code on all test rows. Intervals are 95 %, from resampling test
prompts; they do not have the chance that another seed of training would show.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers

from benchmarks.harness import compose
from benchmarks.hh_results import Result, draw_picture, tables
from benchmarks.preference_scores import Interval, balance_over_length, bootstrap, by_prompt, draw, pair_logps
from dpo.data.examples import encode_examples, iterate_examples, read_examples
from dpo.models.answers import Sampling
from dpo.settings.files import CONFIG_DIR
from dpo.settings.plan import resolve
from preference_datasets import load_data

LENGTHS = ("max_length=1024", "max_prompt_length=512")  # these truncate no row of HH's harmless-base
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
LR = {"sft": 1e-5, "preferences": 5e-6}


class Method(NamedTuple):
    """A run: the name of its directory and row, and its settings."""

    name: str
    loss: str  # sft, dpo, ipo
    beta: float | None = None
    average: bool = False  # IPO on means over tokens, as TRL has it
    trl: bool = False


SFT = Method("sft", "sft")
METHODS = {
    method.name: method
    for method in (
        SFT,
        *(Method(f"dpo {beta}", "dpo", beta) for beta in (0.05, 0.1, 0.5)),
        Method("ipo 0.1", "ipo", 0.1),
        Method("ipo 0.1 per token", "ipo", 0.1, average=True),
        *(Method(f"TRL dpo {beta}", "dpo", beta, trl=True) for beta in (0.1, 0.05, 0.5)),
        Method("TRL ipo 0.1 per token", "ipo", 0.1, average=True, trl=True),
    )
}


def find_folder(out: Path, method: Method) -> Path:
    return out / method.name.replace(" ", "-")


def find_policy(out: Path, method: Method) -> Path:
    """Path of the trained policy, as a model of transformers."""
    return find_folder(out, method) / ("hf" if method.trl else "LATEST/hf")


# --- training ------------------------------------------------------------------------------------------------------


def train_ours(out: Path, method: Method, model: str, overrides: Sequence[str]) -> None:
    """Train with train.py."""
    special = [f"loss.beta={method.beta}", "cache_reference_logps=all"] if method.loss != "sft" else []
    special += ["loss.average=true"] if method.average else []
    lr = LR.get(method.loss, LR["preferences"])
    start = model if method.loss == "sft" else find_policy(out, SFT)
    folder = find_folder(out, method)
    command = [
        sys.executable, "train.py", *COMMON, f"loss={method.loss}", *special, f"lr={lr}", f"exp_name={folder.name}",
        f"model.name_or_path={start}", f"local_run_dir={folder}", f"local_dirs=[{out / 'cache'}]", *overrides,
    ]  # fmt: skip
    run(command, find_policy(out, method))


def train_with_trl(out: Path, method: Method, python: str, overrides: Sequence[str]) -> None:
    """Train with TRL, with the same rows, order, learning rates and batches."""
    config = compose_for(out, overrides)
    data = load_data(resolve(config), silent=True)
    shuffled = {"n_epochs": config.n_epochs, "n_examples": config.n_examples, "seed": config.seed}
    batches = iterate_examples(data.train.counts.tolist(), batch_size=config.batch_size, shuffle=True, **shuffled)
    pairs = (pair for batch in batches for pair in read_examples(data.train, batch))
    train = [{"prompt": prompt.text, **texts} for prompt, _, texts in pairs]
    test = [{"prompt": prompt.text, **texts} for prompt, _, texts in test_pairs(config, data)]
    folder = find_folder(out, method)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": str(find_policy(out, SFT)),
        "loss": {"dpo": "sigmoid", "ipo": "ipo"}[method.loss],
        "beta": method.beta,
        "lr": LR["preferences"],
        "bf16": config.model.autocast == "bfloat16",
        "save_every": 20,  # updates
        **{key: config[key] for key in ("batch_size", "warmup_steps", "max_length")},
    }
    for name, content in (("settings", settings), ("train", train), ("test", test)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    run([python, "-m", "benchmarks.trl_hh", str(folder)], folder / "trl.json")


def run(command: list[str], made: Path) -> None:
    """Run a command unless its result `made` exists; if it fails, exit with its status."""
    if made.exists():
        print(f"{made} is there", flush=True)
        return
    print(shlex.join(command), flush=True)
    if status := subprocess.run(command, check=False, cwd=CONFIG_DIR.parent).returncode:
        sys.exit(status)


# --- scores --------------------------------------------------------------------------------------------------------


def compose_for(out: Path, overrides: Sequence[str]) -> Any:
    """Compose the config of a DPO run, for its data."""
    start = f"model.name_or_path={find_policy(out, SFT)}"
    return compose([*COMMON, "loss=dpo", "loss.beta=0.1", start, f"local_run_dir={out / 'cache'}", *overrides])


def test_pairs(config: Any, data: Any) -> list[Any]:
    counts, n = data.test.counts.tolist(), config.n_eval_examples
    batches = iterate_examples(counts, batch_size=1, shuffle=False, n_epochs=1, n_examples=n, seed=0)
    return read_examples(data.test, [place for [place] in batches])


def load(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # only EOS of it applies, as in scripts.sample: samples are draws from the policy itself
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model


def score(out: Path, methods: Sequence[Method], config: Any, data: Any, n_samples: int, max_new_tokens: int) -> None:
    """Write DIR/NAME/scores.json of every policy without one, or with one of other settings or an older policy."""
    lengths = {"max_length": config.max_length, "max_prompt_length": config.max_prompt_length}
    pairs = encode_examples(test_pairs(config, data), data.encode, **lengths)
    settings = {"pairs": [pair.digest for pair in pairs], "n_samples": n_samples, "max_new_tokens": max_new_tokens}
    reference = None
    for method in methods:
        path, file = find_policy(out, method), find_folder(out, method) / "scores.json"
        fresh = file.exists() and file.stat().st_mtime > (path / "config.json").stat().st_mtime
        if fresh and json.loads(file.read_text())["settings"] == settings:
            continue
        print(f"scoring {method.name}", flush=True)
        reference = reference or load(find_policy(out, SFT))
        policy = reference if method == SFT else load(path)
        sampling = Sampling(max_new_tokens)
        drawn = draw(policy, reference, data.tokenizer, [pair.prompt for pair in pairs], n_samples, sampling)
        found = {
            "settings": settings,
            "tokens": [[len(response) for response in pair.responses] for pair in pairs],
            "logps": pair_logps(policy, pairs, max_length=config.max_length),
            "samples": [one._asdict() for one in drawn],
        }
        file.write_text(json.dumps(found), encoding="utf-8")


# --- results -------------------------------------------------------------------------------------------------------


def list_scores(out: Path, method: Method) -> dict[str, Any]:
    return json.loads((find_folder(out, method) / "scores.json").read_text(encoding="utf-8"))


def log_ratios(out: Path, method: Method) -> np.ndarray:
    """Log-ratios log pi - log ref of chosen and rejected responses of the test pairs, (n, 2)."""
    return np.array(list_scores(out, method)["logps"]) - np.array(list_scores(out, SFT)["logps"])


class OnlinePairs(NamedTuple):
    """Training pairs in order, each measured before its update."""

    gaps: np.ndarray  # (n,): log-ratio of chosen minus that of rejected
    longer: np.ndarray  # (n,): tokens of chosen minus those of rejected


def online_pairs(folder: Path, method: Method) -> OnlinePairs:
    """Read the training pairs from a run's ledger, or from TRL's logs.

    The gaps of TRL's per-token IPO are sums too: its rewards are beta times log-ratios, whatever the loss.
    """
    if method.trl:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
        rows = json.loads((folder / "train.json").read_text(encoding="utf-8"))
        lengths = [[len(tokenizer.encode(row[side])) for row in rows] for side in ("chosen", "rejected")]
        margins = np.array(json.loads((folder / "trl.json").read_text())["margins"])
        return OnlinePairs(margins / method.beta, np.subtract(*lengths))
    rows = pq.read_table(folder / "ledger.parquet", filters=[("split", "=", "train")])
    column = {name: np.asarray(rows[name]) for name in rows.column_names}
    chosen, rejected = (column[f"policy_{side}"] - column[f"reference_{side}"] for side in ("chosen", "rejected"))
    lengths = (column[f"{side}_tokens"].astype(int) for side in ("chosen", "rejected"))
    return OnlinePairs(chosen - rejected, np.subtract(*lengths))


def seconds_per_pair(folder: Path, method: Method) -> float:
    """Seconds per pair, the median over updates."""
    if method.trl:
        found = json.loads((folder / "trl.json").read_text())
        return float(np.median(found["seconds"])) * len(found["seconds"]) / len(found["margins"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return 1 / float(np.median([line["examples_per_second"] for line in lines if line["split"] == "train"]))


def make_result(out: Path, method: Method) -> Result:
    folder = find_folder(out, method)
    own, ratios = list_scores(out, method), log_ratios(out, method)
    longer = -np.diff(own["tokens"])[:, 0]  # tokens of chosen minus those of rejected
    gaps = ratios[:, 0] - ratios[:, 1]

    def accuracy(of: np.ndarray) -> Interval | None:
        """Accuracy on the pairs `of`; None for SFT, whose policy is the reference, and without such pairs."""
        return None if method == SFT or not of.any() else bootstrap(gaps[of] > 0)

    drawn = [{**sample, "empty": not sample["text"].strip()} for sample in own["samples"]]
    samples = {key: by_prompt(drawn, key) for key in ("kl", "log_ratio", "tokens", "ended", "empty")}
    half = None  # the second half of the training pairs, each measured before its update
    if method != SFT:
        half = OnlinePairs(*(values[len(values) // 2 :] for values in online_pairs(folder, method)))
    return Result(
        name=method.name,
        beta=method.beta,
        n_pairs=len(gaps),
        accuracy=accuracy(np.ones_like(gaps, dtype=bool)),
        accuracy_if_shorter=accuracy(longer < 0),
        accuracy_if_longer=accuracy(longer > 0),
        balanced=None if method == SFT else balance_over_length(gaps > 0, longer),
        length_correlation=None if method == SFT else float(np.corrcoef(gaps, longer)[0, 1]),
        gap=bootstrap(gaps),
        chosen_logp=bootstrap([chosen for chosen, _ in own["logps"]]),
        rejected_logp=bootstrap([rejected for _, rejected in own["logps"]]),
        chosen_change=bootstrap(ratios[:, 0]),
        rejected_change=bootstrap(ratios[:, 1]),
        kl=bootstrap(samples["kl"]),
        kl_by_log_ratio=bootstrap(samples["log_ratio"]),
        length=bootstrap(samples["tokens"]),
        ended=bootstrap(samples["ended"]),
        empty=bootstrap(samples["empty"]),
        online_accuracy=None if half is None else bootstrap(half.gaps > 0),
        online_balanced=None if half is None else balance_over_length(half.gaps > 0, half.longer),
        online_shorter=None if half is None else float((half.longer < 0).mean() + (half.longer == 0).mean() / 2),
        seconds_per_pair=seconds_per_pair(folder, method),
        trl_evaluation=json.loads((folder / "trl.json").read_text())["evaluation"] if method.trl else None,
    )


def side_by_side(out: Path, methods: Sequence[Method]) -> list[str]:
    """Lines that compare the rankings of each TRL policy and our counterpart, if there is one, on test pairs."""
    lines = []
    for method in methods:
        twin = METHODS[method.name.removeprefix("TRL ")]
        if method.trl and twin in methods:
            theirs, ours = (-np.diff(log_ratios(out, m))[:, 0] for m in (method, twin))
            alike = ((theirs > 0) == (ours > 0)).sum()
            lines.append(
                f"{method.name} - {twin.name}: gap {bootstrap(theirs - ours):+.2f} nats; {alike} of {len(ours)} pairs "
                f"ranked alike; correlation of gaps {np.corrcoef(theirs, ours)[0, 1]:.3f}"
            )
    return lines


def write_samples(out: Path, methods: Sequence[Method], config: Any, data: Any) -> None:
    """Write the first sample of each policy for each prompt, to be read side by side."""
    samples = {method.name: list_scores(out, method)["samples"] for method in methods}
    lines = []
    for number, (prompt, _, texts) in enumerate(test_pairs(config, data)):
        lines += [f"{'=' * 30} prompt {number}", prompt.text]
        lines += [f"--- {side}:{text}" for side, text in texts.items()]
        for name, drawn in samples.items():
            lines.append(f"--- {name}:{next(one['text'] for one in drawn if one['prompt'] == number)}")
    (out / "samples.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="DIR_OR_HUB_ID", help="what SFT starts from")
    parser.add_argument("--data", required=True, metavar="DIR_OR_HUB_ID", help="rows in the format of hh-rlhf")
    parser.add_argument("--out", required=True, type=Path, help="directory of runs and results")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment with TRL")
    parser.add_argument("--only", help=f"names of rows, separated by semicolons, of: {'; '.join(METHODS)}")
    parser.add_argument("--samples", type=int, default=2, help="samples per test prompt (default: 2)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sample at most (default: 128)")
    parser.add_argument("--quick", action="store_true", help="32 rows to train on and 8 to test on: whether it runs")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked, overrides = parse(arguments)
    out = asked.out.resolve()
    overrides = [*(QUICK if asked.quick else ()), f"dataset_sources.hh={asked.data}", *overrides]
    names = asked.only.split(";") if asked.only else [m.name for m in METHODS.values() if asked.trl or not m.trl]
    if unknown := set(names) - METHODS.keys():
        sys.exit(f"--only: unknown rows {', '.join(sorted(unknown))}; the rows are {'; '.join(METHODS)}")
    methods = [SFT, *(METHODS[name] for name in names if name != SFT.name)]
    if not asked.trl and any(m.trl and not find_policy(out, m).exists() for m in methods):
        sys.exit("rows of TRL need --trl PYTHON")
    for method in methods:
        if method.trl:
            train_with_trl(out, method, asked.trl, overrides)
        else:
            train_ours(out, method, asked.model, overrides)
    config = compose_for(out, overrides)
    data = load_data(resolve(config), silent=True)
    score(out, methods, config, data, asked.samples, asked.tokens)
    write_samples(out, methods, config, data)
    results = [make_result(out, method) for method in methods]
    (out / "results.json").write_text(json.dumps([r._asdict() for r in results], indent=1), encoding="utf-8")
    text = "\n".join([tables(results), *side_by_side(out, methods)])
    (out / "table.md").write_text(text, encoding="utf-8")
    for name, dark in (("hh.png", False), ("hh-dark.png", True)):
        draw_picture(results, out / name, dark=dark)
    print(text)


if __name__ == "__main__":
    main()
