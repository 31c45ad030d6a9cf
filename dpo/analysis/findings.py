"""What the metrics say of how a run trained: rules, pure functions of a `Run` that yield findings.

A finding says what is the case with the metric's value, and what it means. A warning is what looks wrong.
docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.runs import Run, number
from dpo.losses import LOSSES
from dpo.wording import count, figure, percent

WARNING, NOTE = "warning", "note"

SATURATED = 0.99  # accuracy of training pairs
WIDE = 2.0  # a mean margin of which the gradient of DPO has 12 %
TURNED = 0.05  # of its best value, that the loss of an evaluation has risen
LOST = 0.02  # accuracy that an evaluation has lost, if chance explains less
SPIKE = 10.0  # times the median of the 100 values before, of which there must be 20
GAP = 0.15  # between accuracy on training and evaluation pairs
SLOWER = 0.7  # of the speed of the first quarter of the updates
CLIPPED = 0.5  # of the updates


class Finding(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    value: str  # of the metrics it is about
    text: str


def chance(accuracy: float, n: float) -> float:
    """Two standard errors of an accuracy that was measured on n examples."""
    return 2 * math.sqrt(max(accuracy * (1 - accuracy), 0.0) / n) if n > 0 else 0.0


def n_evaluated(run: Run) -> float:
    """Examples of an evaluation."""
    n = number(run.setting("n_eval_examples", 256))
    return n if n > 0 else 256.0


# --- numbers that are none, and spikes --------------------------------------------------------------------------------


def nan_skips(run: Run) -> Iterator[Finding]:
    """Updates that were left out, and the one that ended the run."""
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


def spikes_of(values: np.ndarray) -> list[tuple[int, float]]:
    """(index, times the median of the 100 numbers before it) of each value above SPIKE times that median."""
    places = np.flatnonzero(np.isfinite(values))
    there = values[places]
    found = []
    for i in np.flatnonzero(there > SPIKE * there.min()) if len(there) else ():  # no median is below the least
        before = there[max(0, i - 100) : i]
        usual = float(np.median(before)) if len(before) >= 20 else math.inf
        if there[i] > SPIKE * usual > 0:
            found.append((int(places[i]), float(there[i]) / usual))
    return found


def spikes(run: Run) -> Iterator[Finding]:
    """Gradients and losses far above what was usual just before."""
    for name, what in (("grad_norm", "Gradient"), ("loss/train", "Loss")):
        values = run.train[name]
        found = spikes_of(values)
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


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are all ranked right already."""
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
        f"tell nothing more. {_what_is_left(run.tail('train', 'rewards_train/margins'))}",
    )


def _what_is_left(margin: float) -> str:
    """To be learned from pairs with this mean margin, of which DPO's gradient has sigmoid(-margin)."""
    if margin < WIDE:
        return f"The mean margin is {figure(margin)}, so updates still move the policy: go by margins and samples."
    return "Such pairs give little gradient, and more updates mostly widen margins: stop earlier, or use harder pairs."


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    """Pairs that are ranked as a coin would."""
    examples, values = run.eval.points("rewards_eval/accuracies")
    if len(values) and examples[-1] > 0 and run.updates >= 20:
        accuracy = float(values[-1])
        if accuracy <= 0.5 + chance(0.5, n_evaluated(run)):
            yield Finding(
                WARNING,
                "Held-out pairs are ranked no better than by chance",
                f"rewards_eval/accuracies {figure(accuracy)} on {n_evaluated(run):,.0f} pairs",
                "The policy has not learned a preference that carries over: lr may be too low, the run too short, or "
                "the preferences noise.",
            )


def near(run: Run, name: str, examples: float) -> float:
    """Mean of a training metric over a tenth of the updates, at least 10, up to a number of examples."""
    places, values = run.train.points(name)
    length = max(10, len(values) // 10)
    up_to = values[places <= examples][-length:]
    up_to = up_to if len(up_to) else values[:length]
    return float(up_to.mean()) if len(up_to) else math.nan


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that become worse while training becomes better."""
    for stem, sign in (("loss/{}", -1), ("rewards_{}/accuracies", +1)):
        examples, values = run.eval.points(stem.format("eval"))
        if len(values) < 2:
            continue
        place = int(np.argmax(sign * values))
        best, last = float(values[place]), float(values[-1])
        worse = sign * (best - last)
        least = max(TURNED * abs(best), 0.005) if sign < 0 else max(LOST, chance(best, n_evaluated(run)))
        then, now = near(run, stem.format("train"), examples[place]), near(run, stem.format("train"), examples[-1])
        if worse > least and sign * (now - then) > 0:
            name = "loss" if sign < 0 else "accuracy"
            ranked = run.loss in LOSSES and LOSSES[run.loss].best[0] == stem.format("eval")
            yield Finding(
                WARNING,
                f"Evaluation {name} turned while training {name} improved",
                f"{stem.format('eval')} {figure(best)} at {examples[place]:,.0f} examples, {figure(last)} at "
                f"{examples[-1]:,.0f}; {stem.format('train')} {figure(then)}, then {figure(now)}",
                "From there on the policy learned its training examples rather than what they have in common. Take the "
                f"checkpoint of that evaluation{' (BEST)' if ranked else ''}, or train for fewer epochs.",
            )


def gap(run: Run) -> Iterator[Finding]:
    """Training pairs that are ranked much better than held-out ones."""
    train, held_out = run.tail("train", "rewards_train/accuracies"), run.tail("eval", "rewards_eval/accuracies")
    if run.eval.points("rewards_eval/accuracies")[0][-1:].sum() > 0 and train - held_out > GAP:
        yield Finding(
            NOTE,
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. A second epoch would widen this.",
        )


# --- the run itself ---------------------------------------------------------------------------------------------------


def learning_rate(run: Run) -> Iterator[Finding]:
    """A warmup that did not end. A scaled rate is not looked at: what it was scaled by is not on record."""
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
    """Gradients that are clipped as a rule."""
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
    """Counts of the preflight that are worth a look."""
    n, tokenized = run.count("train.examples"), run.count("train.tokenized")
    kinds = (
        ("joined_words", n, 0.0, "responses follow their prompt without a space"),
        ("contradictory_pairs", n, 0.01, "pairs contradict an earlier one of their prompt"),
        ("identical_pairs", tokenized, 0.01, "pairs are identical after truncation, and give no gradient"),
        ("truncated_responses", tokenized, 0.1, "examples have a truncated response, which loses its end"),
    )
    for key, of, least, text in kinds:
        found = run.count(f"train.{key}")
        if found > 0 and of > 0 and found / of >= least:
            yield Finding(
                NOTE,
                "Worth a look in the data",
                f"{key} {found:,.0f} of {of:,.0f} ({percent(found / of)})",
                f"In the training split, {found:,.0f} {text}.",
            )
