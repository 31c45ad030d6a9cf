"""Runs of the command line, small settings, a run's metrics."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from dpo.checkpoint.files import MANIFEST, find_checkpoints, hash_manifest, read_state, write_checkpoint
from dpo.system.plain_files import read_json
from support import warm
from support.formats import assistant, call, user
from support.pytests import succeeded
from support.warm import ROOT

PARTS = ("policy", "optimizer", "scheduler", "trainer", "random")  # of a run's checkpoint, each a NAME.pt
WALL_CLOCK = (  # metrics that differ between equal runs
    "examples_per_second", "tokens_per_second", "memory/peak_gb", "online/sampling_share", "online/scoring_share",
    "online/seconds_per_token",
)  # fmt: skip
GOLDEN = ROOT / "tests" / "golden"
BAND = {"logps": 5e-3, "loss": 0.1, "grad_norm": 0.1, "rewards": 0.2}  # in bfloat16; rewards absolute, others relative
TINY = GOLDEN / "tiny-llama"
SHARED = ROOT.parent / "shared"  # real data and more golden runs, on the maintainers' machines only


def make_environment(**more: str) -> dict[str, str]:
    """The environment of a run, without network, W&B key and Hydra settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HYDRA"))}
    return {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def run_script(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` without a terminal, in a forked process."""
    return warm.run(*arguments, cwd=cwd, environment=make_environment(**environment), timeout=200)


def run_python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in a new interpreter, which has imported nothing."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=make_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def train(*overrides: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py OVERRIDES`, with W&B off unless they name it."""
    if not any(o.startswith("wandb.enabled") for o in overrides):
        overrides = (*overrides, "wandb.enabled=false")
    return run_script(str(ROOT / "train.py"), *overrides, cwd=cwd, **environment)


def read_metrics(run_dir: Path, split: str) -> list[dict]:
    return [line for line in read_rows(run_dir / "metrics.jsonl") if line["split"] == split]


def list_updates(run_dir: Path) -> list[int]:
    """How many examples were trained at each update of a run."""
    return [line["examples"] for line in read_metrics(run_dir, "train")]


def assert_documented(run_dir: Path) -> None:
    """docs/metrics.md has all metrics of a run; `/NAME` in a table is another last part of the name before."""
    names, prefix = {"split", "examples", "updates"}, ""
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))):
        prefix = prefix if name.startswith("/") else name.rpartition("/")[0]
        names.add(prefix + name if name.startswith("/") else name)
    lines = [line for split in ("train", "eval") for line in read_metrics(run_dir, split)[-1:]]
    logged = {name.removesuffix("_se") for line in lines for name in line}
    lacking = logged - {name.replace("SPLIT", split) for name in names for split in ("train", "eval")}
    assert lacking == set(), f"docs/metrics.md lacks {lacking}"


def distance(ours: float, theirs: float, metric: str) -> float:
    """The relative difference of two values of a metric.

    Absolute for rewards below 1; 0 or infinite for accuracies.
    """
    if metric.endswith("accuracies"):
        return 0.0 if ours == theirs else float("inf")
    return abs(ours - theirs) / (max(abs(theirs), 1.0) if metric.startswith("rewards") else abs(theirs))


def assert_same_metrics(run_dir: Path, other: Path, tolerance: float = 1e-5) -> None:
    for line, theirs in zip(read_log(run_dir), read_log(other), strict=True):
        assert line.pop("split") == theirs.pop("split")
        assert line == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def assert_alike(run_dir: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Two runs have the same metrics and trained weights."""
    assert_same_metrics(run_dir, other, tolerance)
    weights, theirs = (read_state(folder / "LATEST" / "policy.pt") for folder in (run_dir, other))
    torch.testing.assert_close(weights, theirs, rtol=tolerance, atol=tolerance)


def write_rows(path: Path, rows: list) -> Path:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    """Read one JSON value per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def append_text(file: Path, text: str) -> None:
    with file.open("a") as end:
        end.write(text)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def flip_a_bit(file: Path) -> None:
    """Damage the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def write_steps(run_dir: Path, *steps: int, **facts: Any) -> list[Path]:
    """Write small complete checkpoints after so many examples; return their directories."""
    states = {part: {"a": torch.arange(50.0)} for part in PARTS}
    for step in steps:
        write_checkpoint(run_dir / f"step-{step}", states.items(), step_idx=step, metrics=None, facts=facts)
    return [run_dir / f"step-{step}" for step in steps]


def change_manifest(checkpoint: Path, **changes: Any) -> None:
    """Change a manifest, and its own checksum with it."""
    manifest = read_json(checkpoint / MANIFEST) | changes
    change_json(checkpoint / MANIFEST, **changes | {"sha256": hash_manifest(manifest)})


def change_json(path: Path, **changes: Any) -> None:
    """Change these entries of an object in a file."""
    path.write_text(json.dumps(read_json(path) | changes), encoding="utf-8")


def write_splits(folder: Path, make_row: Callable[[str, int], dict]) -> Path:
    """Write 22 training records and 8 test records, made of the split's name and their number."""
    for split, n in (("train", 22), ("test", 8)):
        write_rows(folder / f"{split}.jsonl", [make_row(split, i) for i in range(n)])
    return folder


def write_prompts(folder: Path) -> Path:
    """Write prompts without responses."""
    return write_splits(folder, lambda split, i: {"prompt": ask(split, i), "id": i})


def ask(split: str, i: int) -> str:
    return f"\n\nHuman: Where is {split} number {i}?\n\nAssistant:"


def write_lists(folder: Path) -> Path:
    """Write ranked lists of 2 to 5 responses."""

    def make_row(split: str, i: int) -> dict:
        responses = [f" It is {'very ' * (i * k % 5)}near number {k}." for k in range(2 + i % 4)]
        scores = [(3 * k + i) % 7 for k in range(len(responses))]
        return {"prompt": ask(split, i), "responses": responses, "scores": scores}

    return write_splits(folder, make_row)


def write_weighted(folder: Path) -> Path:
    """Write pairs with weights and margins."""

    def make_row(split: str, i: int) -> dict:
        chosen, rejected = f" It is {'very ' * (i % 4)}near.", f" Who {'really ' * (i % 3)}knows {i}?"
        numbers = {"weight": 0.5 + i % 3, "margin": (i % 5) / 2}
        return {"prompt": ask(split, i), "chosen": chosen, "rejected": rejected, **numbers}

    return write_splits(folder, make_row)


def write_chats(folder: Path) -> Path:
    """Write pairs of chats with tools."""

    def make_row(split: str, i: int) -> dict:
        tools = [{"type": "function", "function": {"name": name}} for name in ("look", "ask")[: 1 + i % 2]]
        looked = [call({"at": f"{split} {i}"}), {"role": "tool", "content": f"{i} {'stars ' * (i % 3)}"}]
        question = user(f"What is at {i}?")
        good, bad, doubt = (assistant(text) for text in (f"{i} stars.", "Who knows?", "Where?"))
        # Chosen begins with a call, rejected with an answer; in some pairs both have calls.
        chosen, rejected = [*looked, good], [doubt, question, *looked, bad] if i % 3 else [bad]
        return {"prompt": [question], "chosen": chosen, "rejected": rejected, "tools": tools}

    return write_splits(folder, make_row)


def compose(*overrides: str) -> DictConfig:
    """The config of `python train.py OVERRIDES`."""
    import hydra

    import dpo.settings.keys  # noqa: F401  (registers the config's resolvers)

    overrides = tuple(f"++{o}" if o.startswith("dataset_sources.") else o for o in overrides)
    with hydra.initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def run_here(overrides: list[str]) -> None:
    """Run train.py's `run` in this process."""
    import train as entry
    from dpo.settings.validation import find_problems

    plan = entry.resolve(compose(*overrides))
    problems = find_problems(plan)
    assert not problems, problems
    try:
        entry.run(plan)
    finally:
        entry.RUN_LOG.close()  # else later output of this process would be in the run's log


def train_here(overrides: list[str]) -> None:
    """Train in this process, or in others if a trainer is named."""
    if any(override.startswith("trainer=") for override in overrides):
        succeeded(train(*overrides))
    else:
        run_here(overrides)


SMALL = (
    "loss=dpo exp_name=test model.reference_dtype=float32 eval_batch_size=4 n_eval_examples=4 eval_every=8 "
    "n_examples=24 n_epochs=null lr=1e-3 warmup_steps=4 max_length=48 max_prompt_length=32 sample_during_eval=false "
    "wandb.enabled=false export=false"  # an export takes as long as the updates
)


def small_run(rows: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The overrides of a run of 6 updates with 4 evaluations."""
    settings = {
        **dict(setting.split("=", 1) for setting in SMALL.split()),
        "local_run_dir": run_dir,
        "local_dirs": f"[{run_dir.parent}]",
        "model.name_or_path": TINY,
        "dataset_sources.hh": rows / "hh",
        "dataset_sources.more": rows / "more",
    }
    settings |= dict(override.split("=", 1) for override in overrides)
    if settings["loss"] == "dpo":
        settings.setdefault("loss.beta", 0.1)
    return [f"{key}={value}" for key, value in settings.items()]


def golden_command(golden: dict, data: str, run_dir: str) -> list[str]:
    """The overrides that repeat a golden run."""
    settings = {k: v for k, v in golden["config"].items() if k != "loss"}
    loss = dict(golden["config"]["loss"])
    name = loss.pop("name")
    if name == "ipo":  # the reference code reads dpo's other keys for ipo too, and ignores them
        loss = {"beta": loss["beta"]}
    return [
        f"loss={name}",
        *(f"loss.{k}={v}" for k, v in loss.items()),
        *(f"{k}={v}" for k, v in settings.items()),
        f"model.name_or_path={TINY}",
        "model.reference_dtype=float32",
        "datasets=[hh]",
        f"dataset_sources.hh={data}",
        "sample_during_eval=false",
        "exp_name=golden",
        f"local_run_dir={run_dir}",
        f"local_dirs=[{Path(run_dir).parent}]",
    ]


# --- comparing two runs ----------------------------------------------------------------------------------------------


def read_log(run_dir: Path) -> list[dict]:
    """Read the lines of `metrics.jsonl` without values that depend on time."""
    lines = read_rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in lines]


def find_differences(expected: Path, actual: Path) -> list[str]:
    """List the bitwise differences between the directories of two complete runs."""
    differences = [] if read_log(expected) == read_log(actual) else ["metrics.jsonl"]
    for name in ("samples.jsonl", "samples.txt"):
        if _read_text(expected / name) != _read_text(actual / name):
            differences.append(name)
    expected_last, *_ = find_checkpoints(expected)  # newest first
    actual_last, *_ = find_checkpoints(actual)
    if expected_last.name != actual_last.name:
        return [*differences, f"the last checkpoint is {expected_last.name} and {actual_last.name}"]
    for part in sorted(path.name for path in expected_last.glob("*.pt")):
        keys = _find_unequal_keys(read_state(expected_last / part), read_state(actual_last / part))
        differences += [f"{part.removesuffix('.pt')}{key}" for key in keys]
    for link in ("LATEST", "BEST"):
        if os.readlink(expected / link) != os.readlink(actual / link):
            differences.append(link)
    return differences


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _find_unequal_keys(a: Any, b: Any, key: str = "") -> list[str]:
    """Find the dotted keys at which two nested states differ.

    The sizes of logs do not count: they depend on the digits of times.
    """
    if key.endswith(".log_bytes"):
        return []
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return [key]
        both_nan = (a != a) & (b != b)
        return [] if ((a == b) | both_nan).all() else [key]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        names = [*a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        names = [*range(len(a))]
    else:
        return [] if repr(a) == repr(b) else [key]
    return [unequal for name in names for unequal in _find_unequal_keys(a[name], b[name], f"{key}.{name}")]


def read_code(page: Path) -> str:
    """The one block of Python in a document."""
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return code


def run_card(folder: Path) -> dict[str, Any]:
    """The names that the code in an export's model card defines."""
    names: dict[str, Any] = {}
    exec(read_code(folder / "README.md").replace("PATH_OR_HUB_ID", str(folder)), names)
    return names
