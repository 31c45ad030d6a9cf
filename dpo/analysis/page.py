"""The report, an HTML page in one file.

Samples and settings may be written by others, so all texts are escaped, and the page has no scripts.
"""

import base64
import json
import math
import shlex
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis.curves import SOFTWARE, draw_charts
from dpo.analysis.rules import find_all
from dpo.analysis.runs import LoggedRun, number, read_runs
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError
from dpo.numbers import count, figure, percent, signed
from dpo.settings.keys import compose_config, dotted
from dpo.system.plain_files import check_own, write_file
from dpo.system.run_directory import REPORT

PICTURES = {"Loss": "loss.png", "Rewards": "rewards.png"}  # files beside the page, by title of the chart
ABSENT = "\N{EN DASH}"  # shown for a result or setting that a run lacks
NEXT_COMMANDS = ("report {} OTHER_RUN", "export {} MY_MODEL", "sample {}", "evaluate {} --judge human")  # {}: the run
HELD_OUT = {  # by label of a result: (metric, function that formats its values)
    "Held-out score": ("online_eval/score", figure),
    "Win rate": ("online_eval/win_rate", percent),
    "Held-out accuracy": ("rewards_eval/accuracies", percent),
    "Held-out margin": ("rewards_eval/margins", signed),
    "Held-out loss": ("loss/eval", figure),
}


def write_report(runs: list[Path], out: Path) -> Path:
    """Write the page, and the pictures of some charts, to the directory `out`, and return the page's path.

    Raises InputError if a path in `runs` is not a run, if `out` cannot be written to, or if a file there that is not
    from a report has the name of one to be written.
    """
    logged_runs = read_runs(runs)
    pictures = draw_charts(logged_runs)
    html = render(logged_runs, pictures)
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_own(out / REPORT.name, ".*· training report</title>")
        pngs = dict(pictures)
        for title, name in PICTURES.items():
            check_own(out / name, f".*{SOFTWARE}")
            (out / name).unlink(missing_ok=True)  # from an earlier report; this one may lack the chart
            if title in pngs:
                write_file(out / name, pngs[title])
        write_file(out / REPORT.name, html)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}; choose another directory with --out") from error
    return out / REPORT.name


def render(runs: list[LoggedRun], pictures: list[tuple], links: list[tuple[str, str]] = ()) -> bytes:
    """Return the page of one run, or of several that it compares, as HTML in UTF-8.

    `pictures` are (title, PNG) of charts, and `links` are (name, address) of other pages.
    """
    several = len(runs) > 1
    warnings = []
    for run in runs:
        texts = [f"{text} ({n} times)" if n > 1 else text for text, n in run.warnings.items()]
        texts += [f"left out: {problem}" for problem in run.problems]
        warnings += [f"{run.name}: {text}" if several else text for text in texts]
    results = [list_results(run) for run in runs]
    labels = [*dict.fromkeys(chain(*results))]  # each once, in order
    rows = [(label, [value]) for label, value in results[0].items()]
    if several:
        rows = [
            (run.name, [result.get(label, ABSENT) for label in labels])
            for run, result in zip(runs, results, strict=True)
        ]
    context = {
        "title": f"{len(runs)} runs compared" if several else runs[0].name,
        "names": [run.name for run in runs] if several else [],
        "links": links,
        "labels": labels if several else [],
        "results": rows,
        "warnings": warnings,
        "pictures": [(title, base64.b64encode(png).decode()) for title, png in pictures],
        "settings": list_settings(runs),
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    if not several:  # what only the page of a single run has
        [run] = runs
        # Scalar heads give rewards, but no answers.
        commands = NEXT_COMMANDS[:2] if run.objective.scalar_head else NEXT_COMMANDS
        if not (run.path / "LATEST").exists():
            commands = NEXT_COMMANDS[:1]
        context |= {
            "verdict": describe_result(run),
            "findings": find_all(run),
            "groups": list_cards(run),
            "commands": [f"dpo {command.format(shlex.quote(str(run.path)))}" for command in commands],
        }
    return fill_template("analysis/page.html.jinja", context)


def fill_template(name: str, context: dict) -> bytes:
    """Fill in a template with the variables in `context`, whose texts are escaped, and return the page in UTF-8.

    `name` is the template's path in the package `dpo`, as are the names of files that it includes.
    """
    loader = FileSystemLoader(Path(__file__).parents[1])
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template(name).render(context).encode("utf-8", "replace")


def list_results(run: LoggedRun) -> dict[str, str]:
    """Return the results of a run as texts, by label."""
    total = run.counted("updates")
    progress = f"{run.updates:,} of {count(total, 'update')}" if total > 0 else count(run.updates, "update")
    results = {"State": f"{run.state}, {progress}"}
    for label, (name, format_value) in HELD_OUT.items():
        value = run.eval.last(name)
        if math.isfinite(value):
            results[label] = format_value(value)
    results["Examples"] = f"{max(0, run.train.last('examples')):,.0f}"  # 0 also for NaN: no update yet
    speeds = run.train["examples_per_second"]
    # This sums batch_size / speed, the time of each update.
    seconds = float((number(run.setting("batch_size")) / speeds[speeds > 0]).sum())
    if seconds > 0:
        results["Time of updates"] = str(timedelta(seconds=round(seconds)))
        device = "CPU"
        n_devices = number(run.env.get("cpus"))
        gpus = run.env.get("gpus")
        if isinstance(gpus, list) and gpus:
            device = "GPU"
            n_devices = max(number(run.env.get("processes")), len(gpus))  # a single process uses all GPUs that it sees
        if n_devices > 0:  # false for NaN, if env.json is missing
            results[f"{device}-hours"] = f"{figure(seconds * n_devices / 3600)} ({count(n_devices, device)})"
    return results


def list_cards(run: LoggedRun) -> dict[str, list[tuple]]:
    """Return the page's cards, by the heading of their group.

    A card is (prompt, responses), and a response is (role, label, text), where the role decides the color. A prompt is
    shown without control tokens if the run recorded this form (`turns`) too.
    """
    answers = [
        (prompt, [("policy", "Policy now", now), ("reference", "Before", before)])
        for prompt, before, now in run.compared_answers()
    ]
    samples = []
    for sample in run.newest_samples()[:16]:  # samples.txt has all
        responses = [("policy", f"Policy after {count(sample['examples'], 'example')}", sample["policy"])]
        if sample["reference"] is not None:
            responses.append(("reference", "Reference", sample["reference"]))
        samples.append((sample.get("turns") or sample["prompt"], responses))
    examples = []
    for example in run.first_examples:
        responses = [(role, role, str(text)) for role, text in example.items() if role != "prompt"]
        examples.append((example["prompt"], responses))
    return {
        "Most probable answers, before and after training": answers,
        "Samples of the newest evaluation": samples,
        "Data: the first examples, as the model sees them": examples,
    }


def list_settings(runs: list[LoggedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, the runs' values as texts) for each setting that differs between runs.

    For a single run, these are the settings that differ from the defaults of its loss.
    """
    configs = [dict(dotted(run.config)) for run in runs]
    compared = configs
    if len(runs) == 1:
        compared = [*configs, dict(dotted(compose_config(loss=runs[0].objective.name)))]
    settings = []
    for key in dict.fromkeys(chain(*configs)):
        texts = [_as_text(config.get(key, ABSENT)) for config in compared]
        if len(set(texts)) > 1:
            settings.append((key, texts[: len(runs)]))
    return settings


def _as_text(value: Any) -> str:
    """Return a setting's value as the page shows it: a text without quotes, any other value as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)
