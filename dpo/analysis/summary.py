"""The page's content beside curves and findings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpo.analysis.findings import WARNING, Finding
from dpo.analysis.measures import Cost, MarginParts, is_inconclusive, n_evaluated
from dpo.analysis.runs import Run, number, rank_answers
from dpo.losses import LOSSES
from dpo.numbers import count, duration, figure, hours, large, percent, shortened, signed
from dpo.settings.files import dotted, load_defaults
from dpo.system.redaction import redact

ABSENT = "\N{EN DASH}"
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


def describe_run(run: Run) -> str:
    """Loss, adapter, model and data in a line."""
    beta, datasets, model = run.setting("loss.beta"), run.setting("datasets"), run.setting("model.name_or_path")
    facts = [f"loss={run.loss}" + (f" with beta {beta}" if beta is not None else "")]
    adapter = str(run.setting("lora.name") or "none")
    if adapter != "none":
        kind = {"lora": "LoRA", "qlora": "QLoRA"}.get(adapter, adapter)
        has_reference = run.loss in LOSSES and LOSSES[run.loss].reference
        reference = f", reference {run.setting('lora.reference')}" if has_reference else ""
        facts.append(f"{kind} with r {run.setting('lora.r')}, alpha {run.setting('lora.alpha')}{reference}")
    if run.online:
        facts.append(f"online, {run.setting('online.n_samples')} answers scored by {run.setting('online.scorer')}")
    if model:
        facts.append(f"model {model}")
    if isinstance(datasets, list) and datasets:
        facts.append(f"data {', '.join(map(str, datasets))}")
    return " \N{MIDDLE DOT} ".join(facts)


def give_verdict(run: Run, findings: Sequence[Finding]) -> str:
    """The run in a few short sentences."""
    n = sum(finding.level == WARNING for finding in findings)
    accuracy = run.eval.last("rewards_eval/accuracies")
    is_unclear = math.isfinite(accuracy) and is_inconclusive(accuracy, n_evaluated(run))
    if not len(run.train) and not len(run.eval):
        looks = ""
    elif n:
        looks = f"{count(n, 'warning')} below."
    else:
        looks = "No warnings." if is_unclear else "Nothing looks wrong."
    return " ".join([f"{run.state.text.capitalize()}.", _describe_result(run), looks])


def _describe_result(run: Run) -> str:
    """Sentence on held-out examples or, online, on the scores of answers."""
    (first, last), nats = run.ends("online/score"), run.tail("train", "online/kl")
    if len(first):
        kl = f", at online/kl {figure(nats)}" if math.isfinite(nats) else ""
        return (
            f"The mean score of its answers was {figure(first.mean())} at first and is {figure(last.mean())} now{kl}."
        )
    examples, losses = run.eval.points("loss/eval")
    accuracy, margin = (run.eval.last(f"rewards_eval/{name}") for name in ("accuracies", "margins"))
    if not len(losses) or examples[-1] == 0:
        return "It was not evaluated after an update yet."
    if math.isfinite(accuracy):
        n = n_evaluated(run)
        few = ", too few to tell from chance," if is_inconclusive(accuracy, n) else ""
        right = f"{percent(accuracy)} of {count(n, 'held-out pair')} are ranked right"
        return f"{right}{few} by a mean reward margin of {figure(margin)}."
    if len(losses) == 1:
        return f"The held-out loss stayed at {figure(losses[0])}."
    moved = "fell" if losses[-1] < losses[0] else "rose"
    return f"The held-out loss {moved} from {figure(losses[0])} to {figure(losses[-1])}."


def make_tiles(run: Run, cost: Cost) -> list[Tile]:
    """Make tiles with the numbers that readers look for first."""
    return [*_drawn_tiles(run), *_quality_tiles(run), *_extent_tiles(run, cost)]


def _drawn_tiles(run: Run) -> list[Tile]:
    """Tiles of an online run."""
    score, nats = run.tail("train", "online/score"), run.tail("train", "online/kl")
    found = []
    if math.isfinite(score):
        first = figure(run.train.first("online/score"))
        found.append(Tile("Score of answers", figure(score), f"now, {first} at first", score, ("online",)))
    if math.isfinite(nats):
        if number(run.setting("online.n_samples")) > 2:
            bias = "biased: of best and worst"
        elif any(number(run.setting(f"online.{key}", 1)) != 1 for key in ("temperature", "top_p")):
            bias = "biased by temperature or top_p"
        else:
            bias = "estimated from the answers"
        found.append(Tile("KL to the reference", figure(nats), f"nats, {bias}"))
    return found


def _quality_tiles(run: Run) -> list[Tile]:
    if not len(run.eval):
        loss = run.tail("train", "loss/train")
        return [Tile("Training loss", figure(loss), "no evaluation yet")] if math.isfinite(loss) else []
    found = []
    for label, name, sign, say in (  # sign: +1 if higher is better, -1 if lower is, 0 if neither
        ("Held-out accuracy", "rewards_eval/accuracies", +1, percent),
        ("Held-out margin", "rewards_eval/margins", 0, figure),
        ("Held-out loss", "loss/eval", -1, figure),
    ):
        examples, values = run.eval.points(name)
        if not len(values):
            continue
        best_at, extreme = int((sign * values).argmax()), "highest" if sign > 0 else "lowest"
        if sign == 0:
            chosen, rejected = (run.eval.last(f"rewards_eval/{side}") for side in ("chosen", "rejected"))
            detail = f"chosen {signed(chosen)}, rejected {signed(rejected)}"
        elif len(values) == 1:
            detail = "the first evaluation"
        elif values[best_at] == values[-1]:
            all_tied = sign > 0 and values[0] == 0 and examples[0] == 0
            so_far = "" if run.state.word == "complete" else " so far"
            detail = f"{extreme}{so_far}; at the start {'all tied' if all_tied else say(values[0])}"
        else:
            detail = f"{extreme} {say(values[best_at])} at {count(examples[best_at], 'example')}"
        last = float(values[-1])
        # a loss depends on its options, as DPO's does on beta; rewards depend on the reference
        scale = (*(("loss",) if name == "loss/eval" else ()), *(REFERENCE if run.has_reference else ()))
        found.append(Tile(label, say(last), detail, sign * last if sign else math.nan, scale))
    return found


def _extent_tiles(run: Run, cost: Cost) -> list[Tile]:
    total = run.total_updates
    updates = f"{run.updates:,} of {count(total, 'update')}" if total else count(run.updates, "update")
    epochs = run.examples / run.count("train.examples")
    passes = f", {figure(epochs)} epoch{'' if epochs == 1 else 's'}" if math.isfinite(epochs) else ""
    found = [Tile("Examples", f"{run.examples:,}", f"{updates}{passes}")]
    if cost.secs > 0:
        details = ["in updates alone"] if cost.updates_alone else []
        if math.isfinite(cost.devices):
            details.append(f"{hours(cost.device_hours)} {cost.kind}-hours")
        found.append(Tile("Time", duration(cost.secs), ", ".join(details)))
    trainable, everything = run.parameters
    if trainable < everything:  # false for NaN
        part = f"{_share(trainable, everything)} of {large(everything)}"
        found.append(Tile("Trainable parameters", large(trainable), part))
    if math.isfinite(cost.tokens):
        speed = cost.tokens / cost.updating_secs if cost.updating_secs > 0 else math.nan
        found.append(Tile("Tokens", large(cost.tokens), f"{figure(speed)} per second"))
    return found


def list_margin_parts(parts: MarginParts | None) -> list[tuple[str, float, str]]:
    """(label, value, kind) of each part of a margin, to be drawn."""
    if parts is None:
        return []
    found = [
        ("chosen rising" if parts.chosen >= 0 else "chosen falling", parts.chosen, "chosen"),
        ("rejected falling" if parts.rejected <= 0 else "rejected rising", -parts.rejected, "rejected"),
        ("the margin's change" if parts.since_start else "the margin", parts.margin, "margin"),
    ]
    if math.isfinite(parts.length):
        tiny = abs(parts.length) < 0.001 * abs(parts.margin)
        found.append(("of which by length", 0.0 if tiny else parts.length, "length"))
    return found


class Text(NamedTuple):
    """A text of a model."""

    label: str
    role: str  # policy or reference; for drawn answers chosen, rejected or other
    text: str


class Prompted(NamedTuple):
    """A prompt and the texts written after it."""

    prompt: str
    texts: list[Text]


def collect_samples(runs: Sequence[Run]) -> list[Prompted]:
    """Newest samples by prompt, beside the reference's or the earliest."""
    cards: dict[tuple[str, int], Prompted] = {}
    several = len(runs) > 1
    for run in runs:
        first, newest = run.samples_at(0), run.samples_at(-1)
        seen: Counter[str] = Counter()
        for i, sample in enumerate(newest):
            prompt = sample["prompt"]
            seen[prompt] += 1  # a prompt of several pairs is sampled for each
            card = cards.setdefault((prompt, seen[prompt]), Prompted(_shorten_prompt(prompt), []))
            whose = f"{run.name}, after" if several else "Policy after"
            when = count(sample["examples"], "example")
            card.texts.append(Text(f"{whose} {when}", "policy", shortened(sample["policy"])))
            if sample["reference"] is not None:
                other = Text("Reference", "reference", shortened(sample["reference"]))
            elif first != newest and i < len(first) and first[i]["prompt"] == prompt:
                before = first[i]["examples"]
                when = "before training" if before == 0 else f"after {count(before, 'example')}"
                whose = f"{run.name}, " if several else "Policy "
                other = Text(f"{whose}{when}", "reference", shortened(first[i]["policy"]))
            else:
                continue
            # compared runs may share a reference: its text is shown once
            if not any(text.role == "reference" and text.text == other.text for text in card.texts):
                card.texts.append(other)
    return list(cards.values())[:MOST_SAMPLES]


def collect_drawn(runs: Sequence[Run]) -> list[Prompted]:
    """Some prompts of each run with its last drawn answers."""
    cards = []
    for run in runs:
        newest = [record for record in run.drawn if record["examples"] == run.drawn[-1]["examples"]]
        for record in newest[:MOST_DRAWN]:
            texts = []
            for name, answer in rank_answers(record):
                whose = f"{run.name}, {name}" if len(runs) > 1 else name
                tokens = f"{count(answer['tokens'], 'token')}{'' if answer['ended'] else ', cut off'}"
                role = {"best": "chosen", "worst": "rejected"}.get(name, "other")
                label = f"{whose}: score {figure(answer['score'])}, {tokens}"
                texts.append(Text(label, role, shortened(answer["text"])))
            cards.append(Prompted(_shorten_prompt(record["prompt"]), texts))
    return cards


def _shorten_prompt(prompt: str) -> str:
    return re.sub(r"\n\s*\n", "\n", shortened(prompt))  # no blank lines between the turns of a dialogue


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


def _make_rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Make a table's rows from its columns, one for each run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, [_as_text(column[name]) if name in column else ABSENT for column in columns]) for name in names]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def setting_rows(runs: Sequence[Run], *, different: bool = True) -> list[Row]:
    """Settings that differ between runs, or from the defaults."""
    columns = [dict(dotted(run.config)) for run in runs]
    rows = _make_rows(columns)
    if not different:
        return rows
    if len(runs) == 1:
        columns.append(dict(dotted(load_defaults(runs[0].loss if runs[0].loss in LOSSES else None))))
    missing = object()

    def differs(name: str) -> bool:
        values = [column.get(name, missing) for column in columns]
        return any(value != values[0] for value in values)

    return [row for row in rows if differs(row.name)]


def data_rows(runs: Sequence[Run]) -> list[Row]:
    """Preflight counts that are not 0 in all runs."""
    columns: list[dict[str, str]] = []
    for run in runs:
        columns.append({})
        for split in ("train", "test"):
            for key, name in DATA_COUNTS.items():
                value = run.count(f"{split}.{key}")
                if not math.isfinite(value):
                    continue
                if key == "chosen_longer":
                    text = percent(value)
                else:
                    text = figure(value) if key.startswith("mean") else f"{value:,.0f}"
                columns[-1][f"{split}: {name}"] = text
    return [row for row in _make_rows(columns) if not set(row.values) <= {"0", "0 %", ABSENT}]


def machine_rows(runs: Sequence[Run], costs: Sequence[Cost]) -> list[Row]:
    """Hardware, versions, time and cost."""
    columns = [_describe_machine(run, cost) for run, cost in zip(runs, costs, strict=True)]
    return _make_rows([{name: value for name, value in column.items() if value} for column in columns])


def _describe_machine(run: Run, cost: Cost) -> dict[str, str]:
    env, known = run.env, math.isfinite(cost.devices)
    found, gpus = env.get("packages"), env.get("gpus")
    packages = found if isinstance(found, Mapping) else {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    if isinstance(gpus, list) and gpus:
        devices = ", ".join(f"{n} \N{MULTIPLICATION SIGN} {name}" for name, n in Counter(map(str, gpus)).items())
    else:
        devices = f"{figure(cost.devices)} CPU cores, no GPU" if known else ""
    alone = ", updates alone" if cost.updates_alone else ""
    per_device = f" ({figure(cost.devices)} {cost.kind}{'s' if cost.devices != 1 else ''}{alone})"
    commit = str(env.get("git_commit") or "")[:12]
    memory = run.train.last("memory/peak_gb")
    trainable, total = run.parameters
    parameters = ""
    if trainable <= total:  # false for NaN
        part = f"{trainable:,.0f} of {total:,.0f} ({_share(trainable, total)})"
        parameters = part if trainable < total else f"{total:,.0f}, all"
    return {
        "trainable parameters": parameters,
        "devices": devices,
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


def _share(part: float, whole: float) -> str:
    """A share in percent, with significant digits however small it is."""
    return f"{figure(100 * part / whole)} %"
