"""The page's content beside curves and findings: verdict, tiles, tables, samples side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpo.analysis.findings import WARNING, Finding
from dpo.analysis.measures import Cost, MarginParts, first_tenth, is_inconclusive, n_evaluated
from dpo.analysis.runs import Run, number, rank_answers
from dpo.losses import LOSSES
from dpo.numbers import count, duration, figure, hours, large, percent, shortened, signed
from dpo.settings.files import dotted, load_defaults
from dpo.system.redaction import redact

ABSENT = "\N{EN DASH}"
BLANK_LINES = re.compile(r"\n\s*\n")  # between the turns of a dialogue
MOST_SAMPLES = 32
MOST_DRAWN = 4  # prompts of each run
REFERENCE = ("model.name_or_path", "model.archive", "model.random_init", "lora.reference")  # settings that define it


class Tile(NamedTuple):
    label: str
    value: str
    detail: str
    worth: float = math.nan  # higher is better; NaN: cannot be ranked
    scale: tuple[str, ...] = ()  # settings that must be equal in runs compared by it


class Row(NamedTuple):
    """A row of a table with a column for each run."""

    name: str
    values: list[str]


# --- verdict and tiles ------------------------------------------------------------------------------------------------


def about(run: Run) -> str:
    """Loss, adapter, model and data in a line."""
    beta, datasets = run.setting("loss.beta"), run.setting("datasets")
    told = [
        f"loss={run.loss}{f' with beta {beta}' if beta is not None else ''}",
        _adapter(run),
        f"online, {run.setting('online.n_samples')} answers scored by {run.setting('online.scorer')}"
        if run.online
        else "",
        f"model {run.setting('model.name_or_path')}" if run.setting("model.name_or_path") else "",
        f"data {', '.join(map(str, datasets))}" if isinstance(datasets, list) else "",
    ]
    return " \N{MIDDLE DOT} ".join(filter(None, told))


def _adapter(run: Run) -> str:
    """The adapter, and the source of the reference if the loss has one; empty without an adapter."""
    name = str(run.setting("lora.name") or "none")
    if name == "none":
        return ""
    loss = LOSSES.get(run.loss)
    reference = f", reference {run.setting('lora.reference')}" if loss is not None and loss.reference else ""
    kind = {"lora": "LoRA", "qlora": "QLoRA"}.get(name, name)
    return f"{kind} with r {run.setting('lora.r')}, alpha {run.setting('lora.alpha')}{reference}"


def verdict(run: Run, findings: list[Finding]) -> str:
    """The run in a few short sentences."""
    n = sum(finding.level == WARNING for finding in findings)
    accuracy = run.eval.last("rewards_eval/accuracies")
    untold = math.isfinite(accuracy) and is_inconclusive(accuracy, n_evaluated(run))
    looks = f"{count(n, 'warning')} below." if n else "No warnings." if untold else "Nothing looks wrong."
    return " ".join([f"{run.state.text.capitalize()}.", _result(run), looks if len(run.train) or len(run.eval) else ""])


def _result(run: Run) -> str:
    """Result on held-out examples, or, online, the scores of answers."""
    if len(scores := first_tenth(run.train.points("online/score")[1])):
        now, nats = run.tail("train", "online/score"), run.tail("train", "online/kl")
        cost = f", at online/kl {figure(nats)}" if math.isfinite(nats) else ""
        return f"The mean score of its answers was {figure(scores.mean())} at first and is {figure(now)} now{cost}."
    examples, losses = run.eval.points("loss/eval")
    accuracy = run.eval.last("rewards_eval/accuracies")
    if not len(losses) or examples[-1] == 0:
        return "It was not evaluated after an update yet."
    moved = "stayed at" if len(losses) == 1 else "fell from" if losses[-1] < losses[0] else "rose from"
    loss = figure(losses[-1]) if len(losses) == 1 else f"{figure(losses[0])} to {figure(losses[-1])}"
    if math.isfinite(accuracy):
        margin = run.eval.last("rewards_eval/margins")
        n = n_evaluated(run)
        few = ", too few to tell from chance," if is_inconclusive(accuracy, n) else ""
        right = f"{percent(accuracy)} of {count(n, 'held-out pair')} are ranked right"
        return f"{right}{few} by a mean reward margin of {figure(margin)}."
    return f"The held-out loss {moved} {loss}."


def tiles(run: Run, cost: Cost) -> list[Tile]:
    """Tiles with the numbers that readers look for first."""
    return [*_drawn(run), *_quality(run), *_extent(run, cost)]


def _drawn(run: Run) -> list[Tile]:
    """Tiles of an online run: scores of drawn answers, and KL to the reference."""
    score, nats = run.tail("train", "online/score"), run.tail("train", "online/kl")
    found = []
    if math.isfinite(score):
        first = figure(run.train.first("online/score"))
        found.append(Tile("Score of answers", figure(score), f"now, {first} at first", score, ("online",)))
    if math.isfinite(nats):
        found.append(Tile("KL to the reference", figure(nats), _estimator(run)))
    return found


def _estimator(run: Run) -> str:
    """Return whether online/kl estimates the policy's KL without bias, in words."""
    if number(run.setting("online.n_samples")) > 2:
        return "nats, biased: of best and worst"
    if any(number(run.setting(f"online.{key}", 1)) != 1 for key in ("temperature", "top_p")):
        return "nats, biased by temperature or top_p"
    return "nats, estimated from the answers"


def _quality(run: Run) -> list[Tile]:
    if not len(run.eval):
        loss = run.tail("train", "loss/train")
        return [Tile("Training loss", figure(loss), "no evaluation yet")] if math.isfinite(loss) else []
    found = []
    for label, name, sign, say in (
        ("Held-out accuracy", "rewards_eval/accuracies", +1, percent),
        ("Held-out margin", "rewards_eval/margins", 0, figure),
        ("Held-out loss", "loss/eval", -1, figure),
    ):
        examples, values = run.eval.points(name)
        if not len(values):
            continue
        place, extreme = int((sign * values).argmax()), "highest" if sign > 0 else "lowest"
        if not sign:
            sides = [run.eval.last(f"rewards_eval/{side}") for side in ("chosen", "rejected")]
            detail = f"chosen {signed(sides[0])}, rejected {signed(sides[1])}"
        elif values[place] == values[-1]:
            before = "all tied" if values[0] == 0 and examples[0] == 0 and sign > 0 else say(values[0])
            so_far = " so far" * (run.state.word != "complete")
            detail = f"{extreme}{so_far}; at the start {before}" if len(values) > 1 else "the first evaluation"
        else:
            detail = f"{extreme} {say(values[place])} at {count(examples[place], 'example')}"
        last = float(values[-1])
        # a loss depends on its options, as DPO's does on beta; rewards depend on the reference
        scale = ("loss",) * (name == "loss/eval") + REFERENCE * run.has_reference
        found.append(Tile(label, say(last), detail, sign * last if sign else math.nan, scale))
    return found


def _extent(run: Run, cost: Cost) -> list[Tile]:
    total = run.total_updates
    updates = f"{run.updates:,} of {count(total, 'update')}" if total else count(run.updates, "update")
    epochs = run.examples / run.count("train.examples")
    passes = f", {figure(epochs)} epoch{'' if epochs == 1 else 's'}" if math.isfinite(epochs) else ""
    speed = cost.tokens / cost.updating_secs if cost.updating_secs > 0 else math.nan
    found = [Tile("Examples", f"{run.examples:,}", f"{updates}{passes}")]
    if cost.secs > 0:
        spent = f"{hours(cost.device_hours)} {cost.kind}-hours" if math.isfinite(cost.devices) else ""
        alone = "in updates alone" if cost.updates_alone else ""
        found.append(Tile("Time", duration(cost.secs), ", ".join(filter(None, (alone, spent)))))
    trainable, everything = run.parameters
    if trainable < everything:  # false for NaN
        part = f"{_share(trainable, everything)} of {large(everything)}"
        found.append(Tile("Trainable parameters", large(trainable), part))
    if math.isfinite(cost.tokens):
        found.append(Tile("Tokens", large(cost.tokens), f"{figure(speed)} per second"))
    return found


# --- the parts of the margin ------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A bar from 0 to a value; `left` and `width` in percent of the drawing."""

    label: str
    value: str
    kind: str  # chosen, rejected, margin, length
    left: float
    width: float


class Bars(NamedTuple):
    zero: float  # where 0 is, in percent
    bars: list[Bar]
    text: str


def margin_bars(parts: MarginParts | None) -> Bars | None:
    """The parts of a margin drawn to scale."""
    if parts is None:
        return None
    values = [
        ("chosen rising" if parts.chosen >= 0 else "chosen falling", parts.chosen, "chosen"),
        ("rejected falling" if parts.rejected <= 0 else "rejected rising", -parts.rejected, "rejected"),
        ("the margin's change" if parts.since_start else "the margin", parts.margin, "margin"),
    ]
    if math.isfinite(parts.length):
        tiny = abs(parts.length) < 0.001 * abs(parts.margin)
        values.append(("of which by length", 0.0 if tiny else parts.length, "length"))
    low, high = min(0.0, *(v for _, v, _ in values)), max(0.0, *(v for _, v, _ in values))
    span = (high - low) or 1.0
    bars = [
        Bar(label, signed(value), kind, round(100 * (min(value, 0) - low) / span, 2), round(100 * abs(value) / span, 2))
        for label, value, kind in values
    ]
    text = f"Mean rewards, {'since the start' if parts.since_start else 'relative to the reference'}."
    if math.isfinite(parts.length):
        tokens = f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
        text += f" Mean tokens: {tokens}."
    return Bars(round(-100 * low / span, 2), bars, text)


# --- samples ----------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text of a model; `role` is policy or reference, or, for drawn answers, chosen, rejected or other."""

    label: str
    role: str
    text: str


@dataclass
class Prompted:
    """A prompt and the texts written after it."""

    prompt: str
    texts: list[Text]


def collect_samples(runs: Sequence[Run]) -> list[Prompted]:
    """Newest samples of all runs by prompt, beside the reference's or, without those, the policy's first."""
    cards: dict[tuple[str, int], Prompted] = {}
    for run in runs:
        times = [sample["examples"] for sample in run.samples]
        newest = [sample for sample in run.samples if sample["examples"] == times[-1]]
        first = [sample for sample in run.samples if sample["examples"] == times[0]] if times[:1] != times[-1:] else []
        seen: dict[str, int] = {}
        for i, sample in enumerate(newest):
            prompt = sample["prompt"]
            seen[prompt] = seen.get(prompt, 0) + 1  # a prompt of several pairs is sampled for each
            card = cards.setdefault((prompt, seen[prompt]), Prompted(BLANK_LINES.sub("\n", shortened(prompt)), []))
            whose = f"{run.name}, after" if len(runs) > 1 else "Policy after"
            card.texts.append(Text(f"{whose} {count(times[-1], 'example')}", "policy", shortened(sample["policy"])))
            if sample["reference"] is not None:
                _add(card, Text("Reference", "reference", shortened(sample["reference"])))
            elif i < len(first) and first[i]["prompt"] == prompt:
                before = f"{run.name}, " if len(runs) > 1 else "Policy "
                label = f"{before}before training" if times[0] == 0 else f"{before}after {count(times[0], 'example')}"
                _add(card, Text(label, "reference", shortened(first[i]["policy"])))
    return list(cards.values())[:MOST_SAMPLES]


def _add(card: Prompted, text: Text) -> None:
    """Add a reference's text, unless another run has given it."""
    if not any(text.role == other.role and text.text == other.text for other in card.texts):
        card.texts.append(text)


def collect_drawn(runs: Sequence[Run]) -> list[Prompted]:
    """Some prompts of each run with the answers of its last draw, the best first and the worst last."""
    cards = []
    for run in runs:
        newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
        for record in newest[:MOST_DRAWN]:
            whose = f"{run.name}, " if len(runs) > 1 else ""
            texts = []
            for name, answer in rank_answers(record):
                tokens = f"{count(answer['tokens'], 'token')}{'' if answer['ended'] else ', cut off'}"
                role = {"best": "chosen", "worst": "rejected"}.get(name, "other")
                label = f"{whose}{name}: score {figure(answer['score'])}, {tokens}"
                texts.append(Text(label, role, shortened(answer["text"])))
            cards.append(Prompted(BLANK_LINES.sub("\n", shortened(record["prompt"])), texts))
    return cards


# --- tables -----------------------------------------------------------------------------------------------------------


MISSING = object()
DATA_COUNTS = {
    "examples": "examples",
    "prompts": "prompts",
    "mean_chosen_tokens": "mean tokens, chosen",
    "mean_rejected_tokens": "mean tokens, rejected",
    "chosen_longer": "pairs with chosen longer",
    "truncated_prompts": "with a truncated prompt",
    "truncated_responses": "with a truncated response",
    "duplicated_pairs": "duplicated pairs",
    "contradictory_pairs": "contradictory pairs",
    "identical_pairs": "identical pairs",
    "empty_responses": "with an empty response",
    "joined_words": "without a space after the prompt",
}


def make_rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of a table from its columns, one for each run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, [_as_text(column[name]) if name in column else ABSENT for column in columns]) for name in names]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def list_settings(run: Run) -> dict[str, Any]:
    return {str(key): value for key, value in dotted(run.config)}


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """Settings that differ between the runs or, for one run, from the defaults."""
    columns = [list_settings(run) for run in runs]
    others = [dict(dotted(load_defaults(runs[0].loss if runs[0].loss in LOSSES else None)))] if len(runs) == 1 else []

    def differs(key: str) -> bool:
        first, *rest = (column.get(key, MISSING) for column in [*columns, *others])
        return any(value != first for value in rest)

    return [row for row in make_rows(columns) if differs(row.name)]


def data_rows(runs: Sequence[Run]) -> list[Row]:
    """Preflight counts that are not 0 in all runs."""
    columns: list[dict[str, str]] = []
    for run in runs:
        columns.append({})
        for split in ("train", "test"):
            for key, name in DATA_COUNTS.items():
                say = percent if key == "chosen_longer" else figure if key.startswith("mean") else "{:,.0f}".format
                if math.isfinite(value := run.count(f"{split}.{key}")):
                    columns[-1][f"{split}: {name}"] = say(value)
    return [row for row in make_rows(columns) if not set(row.values) <= {"0", "0 %", ABSENT}]


def machine_rows(runs: Sequence[Run], costs: Sequence[Cost]) -> list[Row]:
    """Hardware, versions, time and cost."""
    columns = [_describe_machine(run, cost) for run, cost in zip(runs, costs, strict=True)]
    return make_rows([{name: value for name, value in column.items() if value} for column in columns])


def _describe_machine(run: Run, cost: Cost) -> dict[str, str]:
    env, known = run.env, math.isfinite(cost.devices)
    found = env.get("packages")
    packages = found if isinstance(found, Mapping) else {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    alone = ", updates alone" if cost.updates_alone else ""
    per_device = f" ({figure(cost.devices)} {cost.kind}{'s' if cost.devices != 1 else ''}{alone})" if known else ""
    commit = str(env.get("git_commit") or "")[:12]
    memory = run.train.last("memory/peak_gb")
    return {
        "trainable parameters": _describe_parameters(run),
        "devices": _devices(env, cost),
        "time from start to end, or now": duration(cost.elapsed_secs) if math.isfinite(cost.elapsed_secs) else "",
        "time in updates": duration(cost.updating_secs) if math.isfinite(cost.updating_secs) else "",
        f"{cost.kind}-hours": f"{hours(cost.device_hours)}{per_device}" if known and cost.secs > 0 else "",
        "tokens": f"{cost.tokens:,.0f}" if math.isfinite(cost.tokens) else "",
        "peak memory of rank 0": f"{figure(memory)} GB" if math.isfinite(memory) else "",
        "processes": _as_text(env.get("processes", "")),
        "versions": ", ".join([f"Python {env.get('python')}", *versions]) if "python" in env else "",
        "platform": _as_text(env.get("platform") or ""),
        "git commit": f"{commit}{', with uncommitted changes' if env.get('git_uncommitted_changes') else ''}",
        "started (the last time)": _as_text(env.get("started") or ""),
        "directory": redact(str(run.path)),
    }


def _describe_parameters(run: Run) -> str:
    trainable, total = run.parameters
    if not trainable <= total:  # NaN too
        return ""
    part = f"{trainable:,.0f} of {total:,.0f} ({_share(trainable, total)})"
    return part if trainable < total else f"{total:,.0f}, all"


def _share(part: float, whole: float) -> str:
    """A share in percent, with significant digits however small it is."""
    return f"{figure(100 * part / whole)} %"


def _devices(env: Mapping[str, Any], cost: Cost) -> str:
    gpus = env.get("gpus")
    if isinstance(gpus, list) and gpus:
        names: Iterable[str] = dict.fromkeys(map(str, gpus))
        return ", ".join(f"{sum(str(gpu) == name for gpu in gpus)} \N{MULTIPLICATION SIGN} {name}" for name in names)
    return f"{figure(cost.devices)} CPU cores, no GPU" if math.isfinite(cost.devices) else ""
