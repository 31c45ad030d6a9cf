"""Findings on how a run trained: rules, pure functions of a `Run` that yield findings.

A finding gives a fact, the metric's value, and what it means. A warning is a finding that looks like a fault.
docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dpo.analysis.collapse import (
    FEW,
    WHAT_TO_TRY,
    Means,
    count_window,
    find_collapse,
    is_collapsed,
    updates_at_start,
)
from dpo.analysis.noise import wilson_interval
from dpo.analysis.runs import Run, number
from dpo.losses import LOSSES
from dpo.wording import count, figure, percent

WARNING, NOTE = "warning", "note"

SATURATED = 0.99  # accuracy of training pairs
SPENT = 0.1  # of the first gradients' norm
TELL_60 = 400  # pairs: an accuracy of 0.60 is then four standard errors above chance
USEFUL = 0.55  # below this accuracy nothing useful was learned
TURNED = 0.05  # rise of the evaluation loss, as a fraction of its best value
LOST = 0.02  # accuracy lost by an evaluation, unless chance explains more
SPIKE = 10.0  # times the median of up to 100 values before; at least 20 are needed
FAINT = 0.01  # of the mean of the first 20 values: a value below that is not a spike
GAP = 0.15  # between accuracy on training and evaluation pairs
SLOWER = 0.7  # of the speed of the first quarter of the updates
CLIPPED = 0.5  # of the updates


class Finding(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    value: str  # of the metrics it is about
    text: str


def find_start(run: Run) -> Means | None:
    """Loss and margin before the first update, else, without an evaluation then, of the first updates."""
    for split, log, n in (("eval", run.eval, 1), ("train", run.train, updates_at_start(run.has_reference))):
        values = np.stack([log[f"loss/{split}"], log[f"rewards_{split}/margins"]])[:, :n]
        first = log.updates[:n]
        if len(first) == n and first[-1] == (0 if split == "eval" else n) and np.isfinite(values).all():
            return Means(*map(float, values.mean(1)))
    return None


def chance(accuracy: float, n: float) -> float:
    """Two standard errors of an accuracy measured on n examples."""
    return 2 * math.sqrt(max(accuracy * (1 - accuracy), 0.0) / n) if n > 0 else 0.0


def is_untold(accuracy: float, n: float) -> bool:
    """Whether n pairs cannot tell a useful accuracy from chance."""
    low, high = wilson_interval(accuracy, n)
    return low <= 0.5 and high >= USEFUL


def n_evaluated(run: Run) -> float:
    """Number of different examples in an evaluation, at most those of the test split."""
    n, there = number(run.setting("n_eval_examples", 256)), run.count("test.examples")
    n = n if n > 0 else 256.0
    return min(n, there) if there > 0 else n


# --- NaN, and spikes --------------------------------------------------------------------------------------------------


def nan_skips(run: Run) -> Iterator[Finding]:
    """Skipped updates, and an update that ended the run."""
    odd = [
        line
        for line in run.train.lines
        if any(name in line and math.isnan(number(line[name])) for name in ("loss/train", "grad_norm"))
    ]
    if odd:
        numbers = [f"{number(line.get('updates')):,.0f}" for line in odd]
        shown = ", ".join(numbers[:6]) + (", ..." if len(numbers) > 6 else "")
        kept = f" Their examples are in {_folders(run)}." if run.nonfinite else ""
        yield Finding(
            WARNING,
            "Updates were skipped: loss or gradient was not a number",
            f"{len(odd)} of {count(len(run.train), 'update')}: {shown}",
            "The weights were not changed by them. One such batch may be bad data; several mean that training is "
            f"unstable: lower lr, or look at the examples.{kept}",
        )
    if run.state.word == "aborted":
        yield Finding(
            WARNING,
            "The run ended on a loss or gradient that was not a number",
            f"update {run.nonfinite[-1]:,}",
            f"That update was not applied. Its examples are in {_folders(run)}, as a dataset that can be replayed.",
        )


def _folders(run: Run) -> str:
    return ", ".join(f"nonfinite-{n}" for n in run.nonfinite[:3]) + (", ..." if len(run.nonfinite) > 3 else "")


def find_spikes(values: np.ndarray) -> list[tuple[int, float]]:
    """Find spikes: (index, ratio to the median of the 100 numbers before) for ratios above SPIKE.

    Values below FAINT of the mean of the first 20 do not count: where hardly any gradient is left, an outlier is
    harmless."""
    places = np.flatnonzero(np.isfinite(values))
    there = values[places]
    if len(there) <= 20:
        return []
    # no median is below the least
    after = np.flatnonzero((there > SPIKE * there.min()) & (there > FAINT * there[:20].mean()))
    after = after[after >= 20]
    usual = np.array([np.median(there[:i]) for i in after[after < 100]])
    if len(there) > 100:
        before = sliding_window_view(there, 100)
        for part in np.array_split(after[after >= 100], 1 + len(after) // 10_000):  # of limited size in memory
            usual = np.concatenate([usual, np.median(before[part - 100], axis=1)])
    times = there[after] / np.where(usual > 0, usual, np.inf)
    return [(int(places[i]), float(by)) for i, by in zip(after, times, strict=True) if by > SPIKE]


def spikes(run: Run) -> Iterator[Finding]:
    """Gradient norms and losses far above the values just before."""
    for name, what in (("grad_norm", "Gradient"), ("loss/train", "Loss")):
        values = run.train[name]
        found = find_spikes(values)
        if name == "loss/train" and (start := find_start(run)):
            # where nearly all pairs are learned, one that is not learned stands out
            found = [(place, times) for place, times in found if values[place] > start.loss]
        if not found:
            continue
        place, times = max(found, key=lambda spike: spike[1])
        clipped = run.setting("max_grad_norm")
        note = (
            f" Gradients are clipped to {clipped}, so no step was that large." if what == "Gradient" and clipped else ""
        )
        yield Finding(
            WARNING,
            f"{what} spikes",
            f"{name} {figure(float(values[place]))} at update {run.train.updates[place]:,.0f}, "
            f"{figure(times, 2)} times its median before; {count(len(found), 'spike')} in all",
            f"One batch was far from what the model had seen just before.{note} If the loss does not come back after a "
            "spike, lower lr or lengthen the warmup.",
        )


def collapse(run: Run) -> Iterator[Finding]:
    """A loss far above its start, with margins that show no preference."""
    start, width = find_start(run), count_window(number(run.setting("batch_size", 1)))
    if start is None or run.setting("loss.wpo"):  # weights of wpo move with the policy
        return
    columns = np.stack([run.train[name] for name in ("loss/train", "rewards_train/margins")])
    there = np.isfinite(columns).all(0)
    (losses, margins), updates = columns[:, there], run.train.updates[there]
    title, margin_at_start = "The run has collapsed", figure(round(start.margin, 3) + 0.0)  # without rounding errors
    for end in range(FEW, len(losses) + 1, max(1, len(losses) // 1000)):
        before = slice(max(0, end - width), end)
        found = find_collapse(losses[before], margins[before], start, width)
        if found:
            then = f"over the {count(found.updates, 'update')} up to {updates[end - 1]:,.0f}"
            now = f"{figure(losses[-found.updates :].mean())} over the last {found.updates}"
            yield Finding(
                WARNING,
                title,
                f"loss/train {figure(found.loss)} {then}, {now}, {figure(start.loss)} at the start; "
                f"rewards_train/margins {figure(found.margin)} {then}, {margin_at_start} at the start",
                WHAT_TO_TRY,
            )
            return
    if run.online:  # follows its scorer, which held-out labels may contradict
        return
    for k, examples in enumerate(run.eval.examples):
        at = Means(*(float(run.eval[name][k]) for name in ("loss/eval", "rewards_eval/margins")))
        if examples > 0 and is_collapsed(at, start):
            yield Finding(
                WARNING,
                title,
                f"loss/eval {figure(at.loss)} at {count(examples, 'example')}, {figure(run.eval.last('loss/eval'))} at "
                f"the last evaluation, {figure(start.loss)} at the start; rewards_eval/margins {figure(at.margin)}, "
                f"{margin_at_start} at the start",
                WHAT_TO_TRY,
            )
            return


def find_evaluation_error(run: Run) -> float:
    """Two standard errors of `loss/eval`; NaN after fewer than 20 updates.

    From the widest spread of an example's loss during training, estimated from batches: by now, training examples may
    be learned.
    """
    losses = run.train.points("loss/train")[1]
    if len(losses) < 20:
        return math.nan
    batch = max(1.0, number(run.setting("batch_size", 1)))
    spread = max(float(part.std(ddof=1)) for part in np.array_split(losses, 10)) * math.sqrt(batch)
    return 2 * spread / math.sqrt(n_evaluated(run))


def best_checkpoint(run: Run) -> Iterator[Finding]:
    """A checkpoint better than the last one."""
    if run.best is None or run.objective is None:
        return
    name, sign = run.objective.best
    examples, values = run.eval.points(name)
    at_best = values[examples == run.best]
    if len(at_best) and sign * (at_best[-1] - values[-1]) > 0:
        yield Finding(
            NOTE,
            "BEST is better than the last evaluation",
            f"{name} {figure(at_best[-1])} at {count(run.best, 'example')}, {figure(values[-1])} at the last",
            f"The link BEST names step-{run.best}. On few held-out examples the best of many evaluations is in part "
            "luck.",
        )


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    accuracy, held_out = run.tail("train", "rewards_train/accuracies"), run.tail("eval", "rewards_eval/accuracies")
    if not accuracy >= SATURATED or len(run.train.points("rewards_train/accuracies")[0]) < 5:
        return
    values = run.train.points("rewards_train/accuracies")[1]
    length = max(10, len(values) // 10)
    means = np.convolve(values, np.ones(min(length, len(values))) / min(length, len(values)), mode="valid")
    since = run.train.points("rewards_train/accuracies")[0][int(np.argmax(means >= SATURATED))]
    held = f", {percent(held_out)} of the held-out ones" if math.isfinite(held_out) else ""
    yield Finding(
        WARNING,
        "Accuracy is saturated",
        f"rewards_train/accuracies {figure(accuracy)} over the last {min(length, len(values))} updates",
        f"Nearly every training pair is ranked right{held}, from about {count(since, 'example')} on: accuracy can "
        f"tell nothing more. {_what_is_left(run)}",
    )


def _what_is_left(run: Run) -> str:
    """Sentence on how much is left to learn, by the gradient norm at first and now."""
    norms = run.train.points("grad_norm")[1]
    if not len(norms):
        return ""
    length = max(10, len(norms) // 10)
    first, now = float(np.mean(norms[:length])), float(np.mean(norms[-length:]))
    what = f"grad_norm was {figure(first)} over the first {count(length, 'update')} and is {figure(now)} now"
    if now >= SPENT * first:
        return f"But {what}, so updates still move the policy: go by margins and samples."
    return f"And {what}: more updates mostly widen margins. Stop earlier, or use harder pairs."


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    """Held-out pairs ranked as by chance, or too few of them to tell."""
    examples, values = run.eval.points("rewards_eval/accuracies")
    if not len(values) or examples[-1] <= 0 or run.updates < 20:
        return
    accuracy, n = float(values[-1]), n_evaluated(run)
    low, high = wilson_interval(accuracy, n)
    interval = f"95 % interval {figure(low)} to {figure(high)}"
    value = f"rewards_eval/accuracies {figure(accuracy)} on {count(n, 'pair')}, {interval}"
    if low > 0.5 and high < USEFUL:
        yield Finding(
            NOTE,
            "Held-out pairs are ranked little better than by chance",
            value,
            f"That is above chance, but by less than {figure(USEFUL - 0.5)}: what was learned carries over, but is "
            "little.",
        )
    elif high < USEFUL:
        yield Finding(
            WARNING,
            "Held-out pairs are ranked no better than by chance",
            value,
            "The policy has not learned a preference that carries over: lr may be too low, the run too short, or the "
            "preferences noise.",
        )
    elif is_untold(accuracy, n):
        yield Finding(
            NOTE,
            "Held-out accuracy cannot be told from chance",
            value,
            f"{count(n, 'pair')} cannot tell whether anything was learned."
            + (
                f" To tell an accuracy of 0.60 from chance takes about {TELL_60}: {_how_to_evaluate_more(run)}."
                if n < TELL_60
                else " If so, it is little."
            ),
        )


def _how_to_evaluate_more(run: Run) -> str:
    there = run.count("test.examples")
    if not there > 0:
        return "raise n_eval_examples, if the test split has them"
    if n_evaluated(run) < there:
        return f"raise n_eval_examples, for the test split has {there:,.0f}"
    return f"the test split has no more than these {there:,.0f}, so put more pairs into it"


def near(run: Run, name: str, examples: float) -> float:
    """Mean of a training metric near a number of examples: over a tenth of the updates, at least 10, up to it."""
    places, values = run.train.points(name)
    length = max(10, len(values) // 10)
    up_to = values[places <= examples][-length:]
    up_to = up_to if len(up_to) else values[:length]
    return float(up_to.mean()) if len(up_to) else math.nan


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that get worse while training gets better."""
    for stem, sign in (("loss/{}", -1), ("rewards_{}/accuracies", +1)):
        examples, values = run.eval.points(stem.format("eval"))
        if len(values) < 2:
            continue
        place = int(np.argmax(sign * values))
        best, last = float(values[place]), float(values[-1])
        worse = sign * (best - last)
        error = find_evaluation_error(run)
        least = (
            max(TURNED * abs(best), 0.005, *([error] if error > 0 else []))
            if sign < 0
            else max(LOST, chance(best, n_evaluated(run)))
        )
        then, now = near(run, stem.format("train"), examples[place]), near(run, stem.format("train"), examples[-1])
        start = find_start(run)
        learned = sign > 0 or now < (start.loss if start is not None else run.train.first("loss/train"))
        if worse > least and sign * (now - then) > 0 and learned:
            name = "loss" if sign < 0 else "accuracy"
            value = (
                f"{stem.format('eval')} {figure(best)} at {count(examples[place], 'example')}, {figure(last)} at "
                f"{examples[-1]:,.0f}; {stem.format('train')} {figure(then)}, then {figure(now)}"
            )
            if sign < 0 and _accuracy_rose(run, examples[place]):
                text = (
                    "Accuracy did not fall meanwhile: the policy became surer of pairs that it ranks wrong, the usual "
                    "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier."
                )
                yield Finding(NOTE, "Evaluation loss rose while accuracy did not fall", value, text)
                continue
            take = ""
            if examples[place] > 0:  # before the first update there is no checkpoint
                ranked = run.loss in LOSSES and LOSSES[run.loss].best[0] == stem.format("eval")
                take = f"Take the checkpoint of that evaluation{' (BEST)' if ranked else ''}, or train"
            yield Finding(
                WARNING,
                f"Evaluation {name} turned while training {name} improved",
                value,
                "From there on the policy learned its training examples rather than what they have in common. "
                f"{take or 'Train with a smaller lr, or'} for fewer epochs.",
            )


def _accuracy_rose(run: Run, since: float) -> bool:
    """Whether held-out accuracy is at least that at `since`; false without pairs or before the first update."""
    examples, values = run.eval.points("rewards_eval/accuracies")
    then = values[(examples == since) & (examples > 0)]  # equal models have an accuracy of 0
    return bool(len(then)) and bool(values[-1] >= then[0])


def gap(run: Run) -> Iterator[Finding]:
    """Training pairs ranked much better than held-out ones."""
    train, held_out = run.tail("train", "rewards_train/accuracies"), run.tail("eval", "rewards_eval/accuracies")
    if run.eval.points("rewards_eval/accuracies")[0][-1:].sum() > 0 and train - held_out > max(
        GAP, chance(held_out, n_evaluated(run))
    ):
        yield Finding(
            NOTE,
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. More epochs would widen this.",
        )


# --- the run itself ---------------------------------------------------------------------------------------------------


def learning_rate(run: Run) -> Iterator[Finding]:
    """A warmup that did not end. Scaled rates are skipped: their factor is not recorded."""
    if run.setting("lr_scaling", "none") != "none":
        return
    wanted, rates = number(run.setting("lr")), run.train.points("lr")[1]
    if run.state.word == "complete" and len(rates) and rates.max() < 0.999 * wanted:
        yield Finding(
            WARNING,
            "The learning rate never reached its value",
            f"lr {rates.max():.3g} at most, of {wanted:.3g}",
            f"The warmup takes {run.setting('warmup_steps')} updates, and the run has {count(run.updates, 'update')}.",
        )


def clipping(run: Run) -> Iterator[Finding]:
    """Gradients clipped in most updates."""
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    share = float((norms > limit).mean()) if len(norms) else 0.0
    if share >= CLIPPED:
        yield Finding(
            NOTE,
            "Most gradients are clipped",
            f"grad_norm above {figure(limit)} in {percent(share)} of the updates; its median {figure(median(norms))}",
            "Every clipped gradient has the same norm, so batches count alike, whatever their gradients' size.",
        )


def slowing(run: Run) -> Iterator[Finding]:
    """Updates that take longer and longer."""
    speed = run.train.points("tokens_per_second")[1]
    if len(speed) < 40:
        return
    quarter = len(speed) // 4
    first, last = float(np.median(speed[:quarter])), float(np.median(speed[-quarter:]))
    if last < SLOWER * first:
        yield Finding(
            NOTE,
            "Updates became slower",
            f"tokens_per_second {figure(first)} in the first quarter, {figure(last)} in the last",
            "The count is the same in every layout, so the machine was slower or shared, or memory ran short.",
        )


def data(run: Run) -> Iterator[Finding]:
    """Preflight counts worth a look."""
    n, tokenized = run.count("train.examples"), run.count("train.tokenized")
    kinds = (
        ("joined_words", n, 0.0, "response follows its", "responses follow their", "prompt without a space"),
        ("contradictory_pairs", n, 0.01, "pair contradicts", "pairs contradict", "an earlier one of the same prompt"),
        ("identical_pairs", tokenized, 0.01, "pair is", "pairs are", "identical after truncation, without a gradient"),
        ("empty_responses", n, 0.01, "example has", "examples have", "an empty response"),
        ("truncated_responses", tokenized, 0.1, "example has", "examples have", "a response that lost its end"),
    )
    for key, of, least, one, many, text in kinds:
        found = run.count(f"train.{key}")
        if found > 0 and of > 0 and found / of >= least:
            yield Finding(
                NOTE,
                "Worth a look in the data",
                f"{key} {found:,.0f} of {of:,.0f} ({percent(found / of)})",
                f"In the training split, {count(found, one, many)} {text}.",
            )
