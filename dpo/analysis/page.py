"""The report of runs: `report.html`.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis.curves import draw_all
from dpo.analysis.measures import EVAL_ACCURACY
from dpo.analysis.rules import WARNING, find_all
from dpo.analysis.runs import Run, describe_answers, number, read_runs
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError
from dpo.numbers import count, figure, percent, shortened, signed
from dpo.settings.keys import dotted, load_defaults
from dpo.system.plain_files import replacing
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
Card = tuple[str, list[tuple[str, str, str]]]  # a prompt, and (role, label, text) of each text written after it


def write_report(runs: Sequence[Path], out: Path, *, ended: bool = False) -> Path:
    """Write the report of some run directories into `out`, and return the page's path.

    `ended` says that the runs have ended, though they may still hold their locks.

    Raises InputError for a path that is not a run's, and if `out` cannot be written or has a file of the page's name.
    """
    contents = read_runs(runs, ended=ended)
    page = out / REPORT.name
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(page) and not (page.is_file() and TITLE_END in page.read_bytes()):
            raise InputError(f"{out} has {page.name}, not of a report: give another directory with --out")
        html = render(contents, draw_all(contents))
        with replacing(page) as unfinished:
            unfinished.write_bytes(html.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}; choose another directory with --out") from error
    return page


def render(runs: Sequence[Run], pictures: Sequence[tuple[str, bytes]]) -> str:
    """Render the page of a run, or of several compared, as HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["as_data"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    several, warnings = len(runs) > 1, []
    for run in runs:
        found = [f"{text} ({n} times)" if n > 1 else text for text, n in run.warnings.items()]
        found += [f"left out: {problem}" for problem in run.problems]
        warnings += [f"{run.name}: {text}" if several else text for text in found]
    context: dict[str, Any] = {
        "several": several,
        "names": [run.name for run in runs],
        "warnings": warnings,
        "pictures": pictures,
        "settings": list_settings(runs),
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    if several:
        results = [{"State": (run.state.word, ""), **list_results(run)} for run in runs]
        columns = list(dict.fromkeys(label for result in results for label in result))
        rows = [[" ".join(result.get(label, (ABSENT,))) for label in columns] for result in results]
        context |= {"title": f"{len(runs)} runs compared", "columns": columns}
        context["results"] = [(run.name, row) for run, row in zip(runs, rows, strict=True)]
    else:
        [run] = runs
        findings = find_all(run)
        n_warnings = len(run.warnings) + sum(rule.level == WARNING for rule, _ in findings)
        verdict = f"{describe_result(run)} {run.state.text.capitalize()}."
        context |= {
            "title": run.name,
            "about": describe_run(run),
            "verdict": f"{verdict} {count(n_warnings, 'warning') if n_warnings else 'No warnings'}.".strip(),
            "tiles": list_results(run).items(),
            "findings": findings,
            "cards": [*collect_drawn(run), *collect_samples(run)],
            "machine": [("directory", [redact(str(run.path))]), *((k, [_as_text(v)]) for k, v in dotted(run.env))],
        }
    return jinja.get_template("page.html.jinja").render(context)


def describe_run(run: Run) -> str:
    """The settings that say what was trained, in a line."""
    keys = ("loss.name", "loss.beta", "lora.name", "online.name", "model.name_or_path", "datasets")
    settings = {key: run.setting(key) for key in keys}
    return " \N{MIDDLE DOT} ".join(f"{key}={_as_text(v)}" for key, v in settings.items() if v not in (None, "none"))


# --- results and cost -------------------------------------------------------------------------------------------------


def measure_seconds(run: Run) -> tuple[float, float]:
    """Measure (seconds of a run, seconds in updates), the first without pauses between resumes.

    Of a run whose end is not known, as after a crash, only the seconds in updates are known.
    """
    examples, speed = np.diff(run.train.examples, prepend=0.0), run.train["examples_per_second"]
    updating = float(np.nansum(np.divide(examples, speed, out=np.full_like(speed, np.nan), where=speed > 0)))
    times = [run.env.get("started"), str(datetime.now(UTC)) if run.state.word == "training" else run.env.get("ended")]
    with suppress(ValueError, TypeError):  # no times, or times without a zone
        started, ended = (datetime.fromisoformat(str(time)) for time in times)
        elapsed = (ended - started).total_seconds() + number(run.env.get("seconds_before", 0))  # before the last resume
        return max(updating, elapsed), updating  # the run may have ended in order earlier, and crashed since
    return updating, updating


def count_devices(run: Run) -> tuple[str, float]:
    """Count GPUs or, without any, CPU cores; a single process uses all GPUs that it sees."""
    gpus, processes = run.env.get("gpus"), number(run.env.get("processes"))
    if gpus:
        return "GPU", processes if processes > 1 else float(len(gpus))
    return "CPU", number(run.env.get("cpus"))


def list_results(run: Run) -> dict[str, tuple[str, str]]:
    """List the numbers that readers look for first, each with a detail, by what it is."""
    results = {}
    for label, (name, sign, form) in HELD_OUT.items():
        examples, values = run.eval.points(name)
        if len(values):
            best = int((sign * values).argmax())
            results[label] = form(values[-1]), f"best {form(values[best])} at {count(examples[best], 'example')}"
    for label, name in (("Score of answers", "online/score"), ("KL to the reference", "online/kl")):
        if run.train.has(name):
            before, now = map(figure, run.ends(name))
            results[label] = now, f"{before} at first"
    detail = f"{run.updates:,} of {count(run.total_updates or run.updates, 'update')}"
    results["Examples"] = f"{run.examples:,}", detail
    (secs, updating), (device, n_devices) = measure_seconds(run), count_devices(run)
    if secs > 0:
        results["Time"] = str(timedelta(seconds=round(secs))), "in updates alone" if secs == updating else ""
        if n_devices > 0:  # they are known
            results[f"{device}-hours"] = figure(secs * n_devices / 3600), count(n_devices, device)
    return results


# --- samples ----------------------------------------------------------------------------------------------------------


def collect_samples(run: Run) -> list[Card]:
    """Collect a run's newest samples.

    Beside each is the reference's or, without a reference, the policy's earliest sample.
    """

    def describe(sample: Mapping[str, Any], model: str, role: str) -> tuple[str, str, str]:
        n_examples, label = sample["examples"], model.capitalize()
        if model == "policy":
            label += f" after {count(n_examples, 'example')}" if n_examples else " before training"
        cut_off = ", cut off" if sample.get(f"{model}_ended") is False else ""
        return role, label + cut_off, shortened(sample[model])

    earliest = {sample["prompt"]: sample for sample in run.samples_at(0)}
    cards = []
    for sample in run.samples_at(-1)[:MOST_SAMPLES]:
        texts, first = [describe(sample, "policy", "policy")], earliest.get(sample["prompt"], sample)
        if sample["reference"] is not None:
            texts.append(describe(sample, "reference", "reference"))
        elif first["examples"] < sample["examples"]:
            texts.append(describe(first, "policy", "reference"))
        cards.append((_show_prompt(sample), texts))
    return cards


def collect_drawn(run: Run) -> list[Card]:
    """Collect some prompts with the answers that the last update of an online run drew."""
    newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
    return [
        (_show_prompt(record), [(role, label, shortened(text)) for role, label, text in describe_answers(record)])
        for record in newest[:MOST_DRAWN]
    ]


def _show_prompt(record: Mapping[str, Any]) -> str:
    """A prompt as turns where they are known, without blank lines between the turns."""
    return re.sub(r"\n\s*\n", "\n", shortened(str(record.get("turns") or record["prompt"])))


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
