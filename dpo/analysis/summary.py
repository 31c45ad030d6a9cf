"""Content of the report's page, apart from curves and findings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dpo.analysis.measures import Cost
from dpo.analysis.runs import Run, rank_answers
from dpo.analysis.verdict import describe_result
from dpo.losses import LOSSES
from dpo.numbers import count, duration, figure, hours, large, percent, shortened, signed
from dpo.settings.files import dotted, load_defaults
from dpo.system.redaction import redact

ABSENT = "\N{EN DASH}"
MOST_SAMPLES = 32
MOST_DRAWN = 4  # prompts


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    detail: str


class Row(NamedTuple):
    """A row of a table with a column for each run."""

    name: str
    values: list[str]


def describe_run(run: Run) -> str:
    """Loss, adapter, model and data in a line."""
    beta, datasets, model = run.setting("loss.beta"), run.setting("datasets"), run.setting("model.name_or_path")
    facts = [f"loss={run.loss}" + (f" with beta {beta}" if beta is not None else "")]
    if not run.has_margins:
        facts.append(f"trains on {run.trains_on}, so accuracy and margins do not apply")
    adapter = str(run.setting("lora.name") or "none")
    if adapter != "none":
        kind = {"lora": "LoRA", "qlora": "QLoRA"}.get(adapter, adapter)
        reference = f", reference {run.setting('lora.reference')}" if run.has_reference else ""
        facts.append(f"{kind} with r {run.setting('lora.r')}, alpha {run.setting('lora.alpha')}{reference}")
    if run.online:
        facts.append(f"online, {run.setting('online.n_samples')} answers scored by {run.setting('online.scorer')}")
    if model:
        facts.append(f"model {model}")
    if isinstance(datasets, list) and datasets:
        facts.append(f"data {', '.join(map(str, datasets))}")
    return " \N{MIDDLE DOT} ".join(facts)


def give_verdict(run: Run, n_warnings: int) -> str:
    """Sum up a run in a few short sentences."""
    is_judged = len(run.train) or len(run.eval)
    warnings = f"{count(n_warnings, 'warning') if n_warnings else 'No warnings'}." if is_judged else ""
    return f"{describe_result(run)} {run.state.text.capitalize()}. {warnings}".strip()


def make_tiles(run: Run, cost: Cost) -> list[Tile]:
    """Make tiles with the numbers that readers look for first."""
    tiles = [*_make_held_out_tiles(run), *_make_online_tiles(run), *_make_evaluation_tiles(run)]
    return [*tiles, *_make_cost_tiles(run, cost)]


def _make_online_tiles(run: Run) -> list[Tile]:
    """Make tiles of the answers that the last updates drew."""
    score, nats = run.tail("train", "online/score"), run.tail("train", "online/kl")
    tiles = []
    if math.isfinite(score):
        first = figure(run.train.first("online/score"))
        tiles.append(Tile("Score of answers", figure(score), f"now, {first} at first"))
    if math.isfinite(nats):
        tiles.append(Tile("KL to the reference", figure(nats), "nats, estimated from the answers"))
    return tiles


def _make_held_out_tiles(run: Run) -> list[Tile]:
    """Make tiles of answers to held-out prompts, with standard errors."""
    score, score_error = run.eval.last("online_eval/score"), run.eval.last("online_eval/score_se")
    win_rate, win_rate_error = run.eval.last("online_eval/win_rate"), run.eval.last("online_eval/win_rate_se")
    reference = run.eval.last("online_eval/reference_score")
    tiles = []
    if math.isfinite(score):
        details = [f"standard error {figure(score_error)}"] if math.isfinite(score_error) else []
        if math.isfinite(reference):
            details.append(f"the reference has {figure(reference)}")
        tiles.append(Tile("Held-out score", figure(score), ", ".join(details)))
    if math.isfinite(win_rate):
        error = f"standard error {percent(win_rate_error)}, " if math.isfinite(win_rate_error) else ""
        tiles.append(Tile("Win rate", percent(win_rate), f"{error}against the reference"))
    return tiles


def _make_evaluation_tiles(run: Run) -> list[Tile]:
    if not len(run.eval):
        loss = run.tail("train", "loss/train")
        return [Tile("Training loss", figure(loss), "no evaluation yet")] if math.isfinite(loss) else []
    tiles = []
    accuracy = run.eval.last("rewards_eval/accuracies")
    if math.isfinite(accuracy):
        detail = _describe_best(run, "rewards_eval/accuracies", sign=+1, format_value=percent)
        tiles.append(Tile("Held-out accuracy", percent(accuracy), detail))
    margin, chosen, rejected = (run.eval.last(f"rewards_eval/{name}") for name in ("margins", "chosen", "rejected"))
    if math.isfinite(margin):
        detail = f"chosen {signed(chosen)}, rejected {signed(rejected)}"
        tiles.append(Tile("Held-out margin", figure(margin), detail))
    loss = run.eval.last("loss/eval")
    if math.isfinite(loss):
        detail = _describe_best(run, "loss/eval", sign=-1, format_value=figure)
        tiles.append(Tile("Held-out loss", figure(loss), detail))
    return tiles


def _describe_best(run: Run, name: str, *, sign: int, format_value: Callable[[float], str]) -> str:
    """Compare a metric's last evaluation with its best one.

    `sign` is +1 if higher is better, -1 if lower is.
    """
    examples, values = run.eval.points(name)
    if len(values) == 1:
        return "the first evaluation"
    best_index = int((sign * values).argmax())
    extreme = "highest" if sign > 0 else "lowest"
    if values[best_index] != values[-1]:
        return f"{extreme} {format_value(values[best_index])} at {count(examples[best_index], 'example')}"
    is_all_ties = sign > 0 and values[0] == 0 and examples[0] == 0  # while policy and reference are still equal
    return f"{extreme}; at the start {'all tied' if is_all_ties else format_value(values[0])}"


def _make_cost_tiles(run: Run, cost: Cost) -> list[Tile]:
    """Make tiles of examples, time, parameters and tokens."""
    total, examples_per_epoch = run.total_updates, run.count("epoch")
    detail = f"{run.updates:,} of {count(total, 'update')}" if total else count(run.updates, "update")
    if examples_per_epoch > 0:  # false for NaN
        n_epochs = run.examples / examples_per_epoch
        detail += f", {figure(n_epochs)} epoch{'' if n_epochs == 1 else 's'}"
    tiles = [Tile("Examples", f"{run.examples:,}", detail)]
    if cost.secs > 0:
        details = ["in updates alone"] if cost.updates_alone else []
        if math.isfinite(cost.devices):
            details.append(f"{hours(cost.device_hours)} {cost.kind}-hours")
        tiles.append(Tile("Time", duration(cost.secs), ", ".join(details)))
    n_trainable, n_parameters = run.parameters
    if n_trainable < n_parameters:  # false for NaN
        share = f"{figure(100 * n_trainable / n_parameters)} % of {large(n_parameters)}"
        tiles.append(Tile("Trainable parameters", large(n_trainable), share))
    if math.isfinite(cost.tokens):
        speed = cost.tokens / cost.updating_secs if cost.updating_secs > 0 else math.nan
        tiles.append(Tile("Tokens", large(cost.tokens), f"{figure(speed)} per second"))
    return tiles


class Text(NamedTuple):
    """A text of a model."""

    label: str
    role: str  # policy or reference; for drawn answers chosen, rejected or other
    text: str


class Prompted(NamedTuple):
    """A prompt and the texts written after it."""

    prompt: str
    texts: list[Text]
    added: str = ""  # what a chat template put before or between the turns


def collect_samples(run: Run) -> list[Prompted]:
    """Collect a run's newest samples.

    Beside each is the reference's or, without a reference, the policy's earliest sample.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    cards = []
    for i, sample in enumerate(newest[:MOST_SAMPLES]):
        texts = [_label_policy_sample(sample, "policy")]
        if sample["reference"] is not None:
            label = f"Reference{_mark_cut_off(sample, 'reference')}"
            texts.append(Text(label, "reference", shortened(sample["reference"])))
        elif earliest != newest and i < len(earliest) and earliest[i]["prompt"] == sample["prompt"]:
            texts.append(_label_policy_sample(earliest[i], "reference"))
        cards.append(Prompted(_shorten_prompt(sample), texts, added=str(sample.get("added") or "")))
    return cards


def _label_policy_sample(sample: Mapping[str, Any], role: str) -> Text:
    """Label a policy's sample with the examples that it had trained on."""
    n_examples = sample["examples"]
    is_untrained = role == "reference" and n_examples == 0
    when = "before training" if is_untrained else f"after {count(n_examples, 'example')}"
    return Text(f"Policy {when}{_mark_cut_off(sample, 'policy')}", role, shortened(sample["policy"]))


def _mark_cut_off(sample: Mapping[str, Any], model: str) -> str:
    return ", cut off" if sample.get(f"{model}_ended") is False else ""


# how the page shows a drawn answer, by its rank
DRAWN_ROLES = {"best": "chosen", "worst": "rejected", "best, rejected": "rejected", "worst, chosen": "chosen"}


def collect_drawn(run: Run) -> list[Prompted]:
    """Collect some prompts with the answers that the last update drew."""
    newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
    cards = []
    for record in newest[:MOST_DRAWN]:
        texts = []
        for rank, answer in rank_answers(record):
            label = f"{rank}: score {figure(answer['score'])}, {count(answer['tokens'], 'token')}"
            if not answer["ended"]:
                label += ", cut off"
            texts.append(Text(label, DRAWN_ROLES.get(rank, "other"), shortened(answer["text"])))
        cards.append(Prompted(_shorten_prompt(record), texts))
    return cards


def _shorten_prompt(record: Mapping[str, Any]) -> str:
    prompt = str(record.get("turns") or record["prompt"])
    return re.sub(r"\n\s*\n", "\n", shortened(prompt))  # no blank lines between the turns of a dialogue


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """List settings that differ: between runs, or one run's from the defaults."""
    columns = [dict(dotted(run.config)) for run in runs]
    compared = columns
    if len(runs) == 1:
        defaults = load_defaults(runs[0].loss if runs[0].loss in LOSSES else None)
        compared = [*columns, dict(dotted(defaults))]
    missing = object()  # unlike any setting
    first, *others = compared
    return [
        Row(name, [_as_text(column[name]) if name in column else ABSENT for column in columns])
        for name in dict.fromkeys(name for column in columns for name in column)  # each once, in order
        if any(column.get(name, missing) != first.get(name, missing) for column in others)
    ]


def all_settings(run: Run) -> list[Row]:
    return [Row(name, [_as_text(value)]) for name, value in dotted(run.config)]


def machine_rows(run: Run, cost: Cost) -> list[Row]:
    """List hardware, versions, time and cost."""
    return [Row(name, [value]) for name, value in _describe_machine(run, cost).items() if value]


def _describe_machine(run: Run, cost: Cost) -> dict[str, str]:
    """Describe hardware, versions, time and cost; "" where unknown."""
    env = run.env
    packages = env.get("packages")
    if not isinstance(packages, Mapping):
        packages = {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    commit = str(env.get("git_commit") or "")[:12]
    memory = run.train.last("memory/peak_gb")
    return {
        "devices": _describe_devices(env.get("gpus"), cost),
        "time from start to end or now, without pauses": _duration_or_nothing(cost.elapsed_secs),
        "time in updates": _duration_or_nothing(cost.updating_secs),
        f"{cost.kind}-hours": _describe_device_hours(cost),
        "peak memory of rank 0": f"{figure(memory)} GB" if math.isfinite(memory) else "",
        "processes": _as_text(env.get("processes", "")),
        "versions": ", ".join([f"Python {env.get('python')}", *versions]) if "python" in env else "",
        "platform": _as_text(env.get("platform") or ""),
        "git commit": f"{commit}{', with uncommitted changes' if env.get('git_uncommitted_changes') else ''}",
        "started (the last time)": _as_text(env.get("started") or ""),
        "directory": redact(str(run.path)),
    }


def _duration_or_nothing(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else ""


def _describe_devices(gpus: Any, cost: Cost) -> str:
    if isinstance(gpus, list) and gpus:
        return ", ".join(f"{n} \N{MULTIPLICATION SIGN} {name}" for name, n in Counter(map(str, gpus)).items())
    return f"{figure(cost.devices)} CPU cores, no GPU" if math.isfinite(cost.devices) else ""


def _describe_device_hours(cost: Cost) -> str:
    if not (math.isfinite(cost.devices) and cost.secs > 0):
        return ""
    devices = f"{figure(cost.devices)} {cost.kind}{'' if cost.devices == 1 else 's'}"
    return f"{hours(cost.device_hours)} ({devices}{', updates alone' if cost.updates_alone else ''})"
