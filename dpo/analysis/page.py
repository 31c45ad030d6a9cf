"""The report, one file whose texts are escaped and that runs no code, as samples and settings come from others.

A run starts `python -m dpo.analysis.page RUN OUT` at its end; people use `dpo report`.
"""

import base64
import json
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis.curves import SOFTWARE, draw, plan_charts
from dpo.analysis.rules import WARNING, find_all
from dpo.analysis.runs import Run, describe_answers, number, read_runs
from dpo.analysis.verdict import EVAL_ACCURACY, describe_result
from dpo.errors import InputError
from dpo.numbers import count, figure, percent, signed
from dpo.settings.keys import dotted, load_defaults
from dpo.system.plain_files import write_file
from dpo.system.run_directory import REPORT

TITLE_END = "· training report</title>".encode()  # in each page, which is known by it
PICTURES = {"Loss": "loss.png", "Rewards": "rewards.png"}  # the files of charts, by title, for those who want no page
ABSENT = "\N{EN DASH}"
MOST_SAMPLES, MOST_DRAWN = 16, 4  # prompts; samples.txt has all
NEXT = ("report {} OTHER_RUN", "export {} MY_MODEL", "sample {}", "evaluate {} --judge human")  # commands
HELD_OUT = {  # results by what they are: the metric, +1 (higher is better) or -1, and how it is written
    "Held-out score": ("online_eval/score", +1, figure),
    "Win rate": ("online_eval/win_rate", +1, percent),
    "Held-out accuracy": (EVAL_ACCURACY, +1, percent),
    "Held-out margin": ("rewards_eval/margins", +1, signed),
    "Held-out loss": ("loss/eval", -1, figure),
}


def write_report(runs: Sequence[Path], out: Path, *, ended: bool = False) -> Path:
    """Raises InputError for what is no run, and if `out` cannot be written or has another file of the page's name."""
    html, pictures = render_page(runs, ended=ended)
    files = {REPORT.name: html}
    for title, png in pictures:
        if title in PICTURES:
            files[PICTURES[title]] = png
    try:
        out.mkdir(parents=True, exist_ok=True)
        marks = dict.fromkeys(PICTURES.values(), SOFTWARE.encode()) | {REPORT.name: TITLE_END}
        for name, mark in marks.items():
            path = out / name
            if os.path.lexists(path) and not (path.is_file() and mark in path.read_bytes()):
                raise InputError(f"{path} is no report of a run: give another directory with --out")
        for name in PICTURES.values():  # those of an earlier report, which this one may lack
            (out / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_file(out / name, content)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}; choose another directory with --out") from error
    return out / REPORT.name


def render_page(
    runs: Sequence[Path], *, ended: bool = False, links: Sequence[tuple[str, str]] = ()
) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The page of runs as they are now, and its pictures with their titles; `links` are to other pages."""
    contents = read_runs(runs, ended=ended)
    pictures = [(chart.title, draw(chart, lines)) for chart, lines in plan_charts(contents)]
    return render(contents, pictures, links).encode("utf-8", "replace"), pictures


def render(runs: Sequence[Run], pictures: Sequence[tuple], links: Sequence[tuple[str, str]] = ()) -> str:
    """The page of a run, or of several compared."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    several, warnings = len(runs) > 1, []
    for run in runs:
        found = [f"{text} ({n} times)" if n > 1 else text for text, n in run.warnings.items()]
        found += [f"left out: {problem}" for problem in run.problems]
        warnings += [f"{run.name}: {text}" if several else text for text in found]
    context = {
        "several": several,
        "links": links,
        "names": [run.name for run in runs] if several else (),
        "warnings": warnings,
        "pictures": [(title, base64.b64encode(png).decode()) for title, png in pictures],
        "groups": {} if several else list_cards(runs[0]),
        "settings": list_settings(runs),
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    if several:
        results = [{"State": (run.state, ""), **list_results(run)} for run in runs]
        columns = list(dict.fromkeys(label for result in results for label in result))
        rows = [["\n".join(result.get(label, (ABSENT,))) for label in columns] for result in results]
        context |= {"title": f"{len(runs)} runs compared", "columns": columns}
        context["results"] = [(run.name, row) for run, row in zip(runs, rows, strict=True)]
    else:
        [run] = runs
        findings, state = find_all(run), f"{run.state.capitalize()} after {run.progress}."
        n_warnings = len(run.warnings) + sum(rule.level == WARNING for rule, _ in findings)
        warned = f"{count(n_warnings, 'warning') if n_warnings else 'No warnings'}."
        keys = ("loss.name", "loss.beta", "lora.name", "online.name", "model.name_or_path", "datasets")
        about = [f"{key}={_as_text(run.setting(key))}" for key in keys if run.setting(key) not in (None, "none")]
        context |= {
            "title": run.name,
            "about": " \N{MIDDLE DOT} ".join(about),
            "verdict": f"{describe_result(run)} {state} {warned}",
            "results": list_results(run).items(),
            "columns": (),
            "findings": findings,
            "commands": [f"dpo {command.format(shlex.quote(str(run.path)))}" for command in list_next(run)],
        }
    return jinja.get_template("page.html.jinja").render(context)


def list_next(run: Run) -> tuple[str, ...]:
    return NEXT if (run.path / "LATEST").exists() else NEXT[:1]


def list_results(run: Run) -> dict[str, tuple[str, str]]:
    results = {}
    for label, (name, sign, form) in HELD_OUT.items():
        examples, values = run.eval.points(name)
        if len(values):
            best = (sign * values).argmax()
            results[label] = form(values[-1]), f"best {form(values[best])} at {count(examples[best], 'example')}"
    results["Examples"] = f"{run.train.last('examples'):,.0f}", run.progress
    speeds = run.train["examples_per_second"]
    seconds = float((number(run.setting("batch_size")) / speeds[speeds > 0]).sum())
    if seconds > 0:
        results["Time of updates"] = str(timedelta(seconds=round(seconds))), ""
        gpus, processes = run.env.get("gpus"), number(run.env.get("processes"))
        # a single process uses all GPUs that it sees
        device, n = "CPU", number(run.env.get("cpus"))
        if isinstance(gpus, list) and gpus:
            device, n = "GPU", max(processes, len(gpus))
        results[f"{device}-hours"] = figure(seconds * n / 3600), count(n, device)
    return results


def list_cards(run: Run) -> dict[str, list[tuple]]:
    """By heading (prompt, texts), each text as (role, label, text)."""
    examples = [
        (example["prompt"], [(role, role, str(text)) for role, text in example.items() if role != "prompt"])
        for example in run.shown
    ]
    before = {line["prompt"]: line["answer"] for line in run.answers if line["examples"] == 0}
    answers = [
        (line["prompt"], [("policy", "Policy now", line["answer"]), ("reference", "Before", before[line["prompt"]])])
        for line in run.answers
        if line["examples"] == run.answers[-1]["examples"] > 0 and line["prompt"] in before
    ]
    newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
    drawn = [(record.get("turns") or record["prompt"], describe_answers(record)) for record in newest[:MOST_DRAWN]]
    samples = []
    for sample, label, other in run.compared_samples()[:MOST_SAMPLES]:
        texts = [("policy", f"Policy after {count(sample['examples'], 'example')}", sample["policy"])]
        if other is not None:
            texts.append(("reference", label, other))
        samples.append((sample.get("turns") or sample["prompt"], texts))
    return {
        "Most probable answers, before and after training": answers,
        "Answers that the last update drew": drawn,
        "Samples of the newest evaluation": samples,
        "Data: the first examples, as the model sees them": examples,
    }


def list_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that differ: between runs, or one run's from the defaults."""
    columns = [{name: _as_text(value) for name, value in dotted(run.config)} for run in runs]
    compared = columns
    if len(runs) == 1:
        defaults = dotted(load_defaults(loss=runs[0].objective.name))
        compared = [*columns, {name: _as_text(value) for name, value in defaults}]
    return [
        (name, [column.get(name, ABSENT) for column in columns])
        for name in dict.fromkeys(name for column in columns for name in column)  # each once, in order
        if len({column.get(name) for column in compared}) > 1
    ]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


if __name__ == "__main__":
    try:
        write_report([Path(sys.argv[1])], Path(sys.argv[2]), ended=True)
    except InputError as error:
        sys.exit(f"{error}")
