"""The report of runs: `report.html`, and its curves as PNG files.

The page is a single file that needs no network and runs no code: every text is escaped, and its content policy forbids
scripts and requests, because samples and settings come from models and users. The template is `page.html.jinja`.

    python -m dpo.analysis.page RUN OUT [--ended]

is what a run starts for itself (`report=true`); people use `scripts.report`. `--ended`: the run has ended, though it
may still hold its lock.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis.curves import COLORS, LIGHT, Picture, draw_all
from dpo.analysis.measures import EVAL_ACCURACY
from dpo.analysis.rules import WARNING, find_all
from dpo.analysis.runs import Run, look_up, number, rank_answers, read_runs
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError
from dpo.numbers import count, duration, figure, large, percent, shortened, signed
from dpo.settings.files import dotted, load_defaults
from dpo.system.plain_files import make_directory, replacing
from dpo.system.redaction import redact
from dpo.system.run_directory import REPORT

TITLE_END = "· training report</title>".encode()  # in each page, which is known by it
ABSENT = "\N{EN DASH}"
MOST_SAMPLES, MOST_DRAWN = 16, 4  # prompts; samples.txt has all
HELD_OUT = {  # results by what they are: the metric, +1 (higher is better) or -1, and how it is written
    "Held-out score": ("online_eval/score", +1, figure),
    "Win rate": ("online_eval/win_rate", +1, percent),
    "Held-out accuracy": (EVAL_ACCURACY, +1, percent),
    "Held-out margin": ("rewards_eval/margins", +1, signed),
    "Held-out loss": ("loss/eval", -1, figure),
}


def write_report(runs: Sequence[Path], out: Path, *, ended: bool = False) -> Path:
    """Write the report of some run directories into `out`.

    Returns the page's path. `ended` says that the runs have ended, though they may still hold their locks.

    Raises InputError for a path that is not a run's, and if `out` cannot be written or has other files of these names.
    """
    contents = read_runs(runs, ended=ended)
    page = out / REPORT.name
    try:
        make_directory(out)
        pictures = list(draw_all(contents))
        files = {f"{picture.name}.png": picture.png for picture in pictures}
        taken = [name for name in (page.name, *files) if os.path.lexists(out / name)]
        is_ours = page.is_file() and TITLE_END in page.read_bytes()
        if taken and not is_ours:
            raise InputError(f"{out} has {', '.join(taken)}, not of a report: give another directory with --out")
        html = render(contents, pictures).encode("utf-8", "replace")
        # the page first, as it says whose the other files are
        for name, content in {page.name: html, **files}.items():
            with replacing(out / name) as unfinished:
                unfinished.write_bytes(content)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}; choose another directory with --out") from error
    return page


def render(runs: Sequence[Run], pictures: Sequence[Picture]) -> str:
    """Render the page of a run, or of several compared, as HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["svg_uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    costs = [measure_cost(run) for run in runs]
    results = [list_results(run, cost) for run, cost in zip(runs, costs, strict=True)]
    context: dict[str, Any] = {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "runs": runs,
        "several": len(runs) > 1,
        "run_colors": [f"--plot-{i % len(LIGHT.colors)}" for i in range(len(runs))],  # of the curves, as CSS variables
        "results": results,
        "columns": dict.fromkeys(label for result in results for label in result),
        "colors": COLORS,
        "pictures": pictures,
        "settings": list_settings(runs),
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    if len(runs) == 1:
        [run], findings = runs, find_all(runs[0])
        n_warnings = len(run.warnings) + sum(rule.level == WARNING for rule, _ in findings)
        warnings = f"{count(n_warnings, 'warning') if n_warnings else 'No warnings'}."
        context |= {
            "about": describe_run(run),
            "verdict": f"{describe_result(run)} {run.state.text.capitalize()}. {warnings}".strip(),
            "findings": findings,
            "cards": [*collect_drawn(run), *collect_samples(run)],
            "all_settings": [(name, [_as_text(value)]) for name, value in dotted(run.config)],
            "machine": [(name, [value]) for name, value in describe_machine(run, costs[0]).items() if value],
        }
    return jinja.get_template("page.html.jinja").render(context)


def describe_run(run: Run) -> str:
    """The settings that say what was trained, in a line."""
    keys = ("loss.name", "loss.beta", "lora.name", "online.name", "model.name_or_path", "datasets")
    settings = {key: run.setting(key) for key in keys}
    return " \N{MIDDLE DOT} ".join(f"{key}={_as_text(v)}" for key, v in settings.items() if v not in (None, "none"))


# --- results and cost -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Time, tokens and devices of a run; NaN where unknown."""

    secs: float  # from start to end or until now, without pauses between; of a crashed run, in updates alone
    updating_secs: float  # in updates alone, without loading, evaluating, sampling and saving
    tokens: float
    devices: float
    kind: str  # GPU or CPU


def measure_cost(run: Run) -> Cost:
    gpus, processes = run.env.get("gpus"), number(run.env.get("processes"))
    # a single process uses all GPUs that it sees
    devices = (processes if processes > 1 else float(len(gpus))) if gpus else number(run.env.get("cpus"))
    examples, speed = np.diff(run.train.examples, prepend=0.0), run.train["examples_per_second"]
    seconds = np.divide(examples, speed, out=np.full_like(speed, np.nan), where=speed > 0)  # of each update
    secs = updating = float(np.nansum(seconds))
    times = [run.env.get("started"), str(datetime.now(UTC)) if run.state.word == "training" else run.env.get("ended")]
    with suppress(ValueError, TypeError):  # no times, or times without a zone
        started, ended = (datetime.fromisoformat(str(time)) for time in times)
        elapsed = (ended - started).total_seconds() + number(run.env.get("seconds_before", 0))  # before the last resume
        secs = max(updating, elapsed)  # the run may have ended in order earlier, and crashed since
    tokens = float(np.nansum(seconds * run.train["tokens_per_second"]))
    return Cost(secs, updating, tokens, devices, "GPU" if gpus else "CPU")


def list_results(run: Run, cost: Cost) -> dict[str, tuple[str, str]]:
    """List the numbers that readers look for first, each with a detail, by what it is."""
    results = {}
    for label, (name, sign, form) in HELD_OUT.items():
        examples, values = run.eval.points(name)
        if len(values):
            best = int((sign * values).argmax())
            results[label] = form(values[-1]), f"best {form(values[best])} at {count(examples[best], 'example')}"
    for label, name in (("Score of answers", "online/score"), ("KL to the reference", "online/kl")):
        _, values = run.train.points(name)
        if len(values):
            results[label] = figure(run.now(name)), f"now, {figure(values[0])} at first"
    total, per_epoch = run.total_updates, run.count("examples_per_epoch")
    detail = f"{run.updates:,} of {count(total, 'update')}" if total else count(run.updates, "update")
    if per_epoch > 0:  # false for NaN
        detail += f", {figure(run.examples / per_epoch)} epochs"
    results["Examples"] = f"{run.examples:,}", detail
    if cost.secs > 0:
        results["Time"] = duration(cost.secs), "in updates alone" if cost.secs == cost.updating_secs else ""
        if cost.devices > 0:
            results[f"{cost.kind}-hours"] = figure(cost.secs * cost.devices / 3600), count(cost.devices, cost.kind)
    return results


def describe_machine(run: Run, cost: Cost) -> dict[str, str]:
    """Describe hardware, versions, time and cost; "" where unknown."""
    env, memory = run.env, run.train.last("memory/peak_gb")
    gpus = ", ".join(
        f"{n} \N{MULTIPLICATION SIGN} {name}" for name, n in Counter(map(str, env.get("gpus", ()))).items()
    )
    versions = [f"{name} {look_up(env, f'packages.{name}')}" for name in ("torch", "transformers")]
    trainable, total = (number(look_up(env, f"parameters.{name}")) for name in ("trainable", "total"))
    changed = ", with uncommitted changes" if env.get("git_uncommitted_changes") else ""
    return {
        "devices": gpus or f"{figure(cost.devices)} CPU cores, no GPU",
        "processes": _as_text(env.get("processes", "")),
        "time": duration(cost.secs),
        "time in updates": duration(cost.updating_secs),
        "tokens": large(cost.tokens),
        "trainable parameters": f"{large(trainable)} of {large(total)}" if total > 0 else "",
        "peak memory of rank 0": f"{figure(memory)} GB",
        "versions": ", ".join([f"Python {env.get('python')}", *versions]),
        "platform": _as_text(env.get("platform", "")),
        "git commit": f"{str(env.get('git_commit') or '')[:12]}{changed}",
        "started (the last time)": _as_text(env.get("started", "")),
        "directory": redact(str(run.path)),
    }


# --- samples ----------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text of a model."""

    label: str
    role: str  # policy or reference; for drawn answers chosen, rejected or other
    text: str


class Card(NamedTuple):
    """A prompt and the texts written after it."""

    prompt: str
    texts: list[Text]

    @classmethod
    def of(cls, record: Mapping[str, Any], texts: list[Text]) -> Card:
        prompt = shortened(str(record.get("turns") or record["prompt"]))
        # no blank lines between the turns of a dialogue
        return cls(re.sub(r"\n\s*\n", "\n", prompt), texts)


def collect_samples(run: Run) -> list[Card]:
    """Collect a run's newest samples.

    Beside each is the reference's or, without a reference, the policy's earliest sample.
    """

    def make_text(sample: Mapping[str, Any], model: str, role: str) -> Text:
        n_examples = sample["examples"]
        when = f" after {count(n_examples, 'example')}" if n_examples else " before training"
        cut_off = ", cut off" if sample.get(f"{model}_ended") is False else ""
        label = f"{model.capitalize()}{when if model == 'policy' else ''}{cut_off}"
        return Text(label, role, shortened(sample[model]))

    earliest = {sample["prompt"]: sample for sample in run.samples_at(0)}
    cards = []
    for sample in run.samples_at(-1)[:MOST_SAMPLES]:
        texts, first = [make_text(sample, "policy", "policy")], earliest.get(sample["prompt"], sample)
        if sample["reference"] is not None:
            texts.append(make_text(sample, "reference", "reference"))
        elif first["examples"] < sample["examples"]:
            texts.append(make_text(first, "policy", "reference"))
        cards.append(Card.of(sample, texts))
    return cards


def collect_drawn(run: Run) -> list[Card]:
    """Collect some prompts with the answers that the last update of an online run drew."""
    newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
    cards = []
    for record in newest[:MOST_DRAWN]:
        texts = []
        for rank, answer in rank_answers(record):
            label = f"{rank}: score {figure(answer['score'])}, {count(answer['tokens'], 'token')}"
            role = {"best": "chosen", "worst": "rejected"}.get(rank, rank.partition(", ")[2] or "other")
            texts.append(Text(label + ("" if answer["ended"] else ", cut off"), role, shortened(answer["text"])))
        cards.append(Card.of(record, texts))
    return cards


# --- settings ---------------------------------------------------------------------------------------------------------


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def list_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List settings that differ: between runs, or one run's from the defaults."""
    columns = [{name: _as_text(value) for name, value in dotted(run.config)} for run in runs]
    compared = columns
    if len(runs) == 1:
        defaults = dotted(load_defaults(runs[0].objective.name))
        compared = [*columns, {name: _as_text(value) for name, value in defaults}]
    return [
        (name, [column.get(name, ABSENT) for column in columns])
        for name in dict.fromkeys(name for column in columns for name in column)  # each once, in order
        if len({column.get(name) for column in compared}) > 1
    ]


if __name__ == "__main__":
    os.nice(10)  # the run has priority
    try:
        write_report([Path(sys.argv[1])], Path(sys.argv[2]), ended="--ended" in sys.argv)
    except InputError as error:
        sys.exit(f"{error}")
