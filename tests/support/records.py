"""Run directories made by hand, with numbers that a test chooses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dpo.reporting.events import RunContext
from dpo.settings.keys import compose_config, dotted
from dpo.settings.plan import Plan, make_plan
from support.runs import write_rows

CONFIG = {
    "exp_name": "made",
    "datasets": ["hh"],
    "batch_size": 4,
    "lr": 1e-6,
    "max_grad_norm": 10.0,
    "n_eval_examples": 256,
    "warmup_steps": 0,
    "loss": {"name": "dpo", "beta": 0.1},
    "model": {"name_or_path": "tiny"},
}
ENV = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
    "gpus": [],
    "cpus": 2,
    "processes": 1,
    "started": "2026-11-22T07:00:00+00:00",
    "git_commit": "0123456789abcdef",
}
TOKENS = {"mean_chosen_tokens": 20.0, "mean_rejected_tokens": 20.0}
PREFLIGHT = {
    "train": {"examples": 400, "prompts": 400, "tokenized": 400, **TOKENS},
    "test": {"examples": 256, "prompts": 256, "tokenized": 256, **TOKENS},
}


def update(number: int, **metrics: Any) -> dict[str, Any]:
    """A line of training, of 4 examples in 2 seconds."""
    usual = {"grad_norm": 1.0, "lr": 1e-6, "examples_per_second": 2.0, "tokens_per_second": 100.0}
    usual["memory/peak_gb"] = 1.5
    return {"split": "train", "examples": 4 * number, "updates": number, "loss/train": 0.6, **usual, **metrics}


def evaluation(number: int, loss: float, **metrics: Any) -> dict[str, Any]:
    return {"split": "eval", "examples": 4 * number, "updates": number, "loss/eval": loss, **metrics}


def rewards(split: str, chosen: float, rejected: float, accuracy: float = 0.7) -> dict[str, float]:
    """The metrics of pairs."""
    return {
        f"rewards_{split}/chosen": chosen,
        f"rewards_{split}/rejected": rejected,
        f"rewards_{split}/margins": chosen - rejected,
        f"rewards_{split}/accuracies": accuracy,
    }


def sample(
    examples: int, policy: str, reference: str | None = None, prompt: str = "\n\nHuman: Hi\n\nAssistant:"
) -> dict:
    return {"examples": examples, "prompt": prompt, "policy": policy, "reference": reference}


def write_run(
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    *,
    samples: Sequence[Mapping[str, Any]] = (),
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    updates: int | None = None,
    preflight: Mapping[str, Any] | None = None,
) -> Path:
    """Write the directory of a run with these lines of metrics.

    `updates`: in the whole run; None: as many as the lines have.
    """
    total = max((line["updates"] for line in lines), default=0) if updates is None else updates
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "metrics.jsonl", list(lines))
    write_rows(folder / "samples.jsonl", list(samples))
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **(config or {})}))
    (folder / "env.json").write_text(json.dumps({**ENV, **(env or {})}))
    (folder / "preflight.json").write_text(
        json.dumps({**PREFLIGHT, **(preflight or {}), "updates": total}), encoding="utf-8"
    )
    return folder


def context_in(run_dir: Path, *, rank: int = 0, data: Any = None, policy: Any = None, **values: Any) -> RunContext:
    """The context of a run in a directory, with these values of its config."""
    return RunContext(make_plan(values), run_dir, rank, data, print, policy)


def start(callback: Any, state: Mapping[str, Any] | None = None) -> Any:
    """Start a callback, as a run does that continues from a state."""
    callback.load_state_dict(state or {})
    callback.on_start()
    return callback


def plan_of_data(folder: Path, sources: Mapping[str, str], *, loss: str = "dpo", **values: Any) -> Plan:
    """The plan of a run on these datasets, whose table is in `folder`."""
    own = {"datasets": list(sources), "dataset_sources": sources, "local_dirs": [str(folder)]}
    limits = {"max_length": 64, "max_prompt_length": 32, "batch_size": 1, "n_epochs": 2}
    return make_plan({**dict(dotted(compose_config(loss=loss))), **limits, **own, **values})
