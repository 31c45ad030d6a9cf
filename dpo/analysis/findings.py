"""Findings on how a run trained: rules that yield them.

A finding gives a fact, the metric's value, and its meaning. A warning is a finding that looks like a fault.
docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.course import WHAT_TO_TRY, Course, Means
from dpo.analysis.measures import (
    USEFUL,
    MarginParts,
    accuracy_error,
    binomial_tail,
    difference_error,
    evaluation_loss_error,
    find_change,
    find_start,
    is_inconclusive,
    margin_parts,
    mean_and_bound,
    mean_near,
    n_evaluated,
    update_seconds,
    wilson_interval,
)
from dpo.analysis.runs import Run, number
from dpo.losses import LOSSES
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"
TRAIN_ACCURACY, EVAL_ACCURACY = "rewards_train/accuracies", "rewards_eval/accuracies"
SATURATED = 0.99
HOLDS_UP = "what holds chosen responses up: loss.sft_weight, loss=dpop, loss=apo_zero."


class Finding(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    value: str  # of the metrics it is about
    text: str


def warning(title: str, value: str, text: str) -> Finding:
    return Finding(WARNING, title, value, text)


def note(title: str, value: str, text: str) -> Finding:
    return Finding(NOTE, title, value, text)


# --- NaN, spikes, collapse --------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> Iterator[Finding]:
    folders = _list_first([f"nonfinite-{n}" for n in run.nonfinite], 3)
    skipped = [
        f"{number(line.get('updates')):,.0f}"
        for line in run.train.lines
        if any(name in line and math.isnan(number(line[name])) for name in ("loss/train", "grad_norm"))
    ]
    if skipped:
        kept = f" Their examples are in {folders}." if run.nonfinite else ""
        yield warning(
            "Updates were skipped: loss or gradient was not a number",
            f"{len(skipped)} of {count(len(run.train), 'update')}: {_list_first(skipped, 6)}",
            "These updates did not change the weights. One such batch may be bad data; several mean that training is "
            f"unstable: lower lr, or look at the examples.{kept}",
        )
    if run.state.word == "aborted":
        yield warning(
            "The run ended on a loss or gradient that was not a number",
            f"update {run.nonfinite[-1]:,}",
            f"That update was not applied. Its examples are in {folders}, as a dataset that can be replayed.",
        )


def _list_first(names: list[str], n: int) -> str:
    return ", ".join(names[:n]) + (", ..." if len(names) > n else "")


def spikes(run: Run) -> Iterator[Finding]:
    for name, what in (("grad_norm", "Gradient"), ("loss/train", "Loss")):
        course = Course(number(run.setting("batch_size", 1)), find_start(run))
        ratios = [course.find_spike(name, value) or 0.0 for value in run.train[name].tolist()]  # 0: no spike
        if not any(ratios):
            continue
        largest = max(ratios)
        row = ratios.index(largest)
        limit = run.setting("max_grad_norm") if name == "grad_norm" else None
        clipped = f" Gradients are clipped to {limit}, so no step was that large." if limit else ""
        n_spikes = sum(ratio > 0 for ratio in ratios)
        yield warning(
            f"{what} spikes",
            f"{name} {figure(float(run.train[name][row]))} at update {run.train.updates[row]:,.0f}, "
            f"{figure(largest, 2)} times its median before; {count(n_spikes, 'spike')} in all",
            f"One batch was far from what the model had seen just before.{clipped} If the loss does not come back "
            "after a spike, lower lr or lengthen the warmup.",
        )


def collapse(run: Run) -> Iterator[Finding]:
    start = find_start(run)
    if start is None or run.setting("loss.wpo"):  # weights of wpo move with the policy
        return
    course = Course(number(run.setting("batch_size", 1)), start)
    value = _describe_training_collapse(run, course, start)
    if value is None and not run.online:  # an online run follows its scorer, which held-out labels may contradict
        value = _describe_evaluation_collapse(run, course, start)
    if value is not None:
        yield warning("The run has collapsed", value, WHAT_TO_TRY)


def _describe_training_collapse(run: Run, course: Course, start: Means) -> str | None:
    """Metrics at the first update that shows a collapse, if any."""
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    for update, loss, margin in zip(run.train.updates, losses.tolist(), margins.tolist(), strict=True):
        collapsed = course.find_collapse(loss, margin)
        if collapsed is None:
            continue
        means, n = collapsed
        finite_losses = losses[np.isfinite(losses) & np.isfinite(margins)]
        window = f"over the {n} updates up to {update:,.0f}"
        return (
            f"loss/train {figure(means.loss)} {window}, {figure(finite_losses[-n:].mean())} over the last {n}, "
            f"{figure(start.loss)} at the start; rewards_train/margins {figure(means.margin)} {window}, "
            f"{_format_start_margin(start)} at the start"
        )
    return None


def _describe_evaluation_collapse(run: Run, course: Course, start: Means) -> str | None:
    """Metrics of the first evaluation that shows a collapse, if any."""
    losses, margins = run.eval["loss/eval"], run.eval["rewards_eval/margins"]
    for examples, loss, margin in zip(run.eval.examples, losses.tolist(), margins.tolist(), strict=True):
        if examples > 0 and course.is_collapsed(Means(loss, margin)):
            return (
                f"loss/eval {figure(loss)} at {count(examples, 'example')}, {figure(run.eval.last('loss/eval'))} at "
                f"the last evaluation, {figure(start.loss)} at the start; rewards_eval/margins {figure(margin)}, "
                f"{_format_start_margin(start)} at the start"
            )
    return None


def _format_start_margin(start: Means) -> str:
    """The margin at the start, without rounding errors."""
    return figure(round(start.margin, 3) + 0.0)  # -0.0 + 0.0 is 0.0


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def best_checkpoint(run: Run) -> Iterator[Finding]:
    if run.best is None or run.objective is None:
        return
    name, sign = run.objective.best  # the metric by which checkpoints are ranked; +1: higher is better
    examples, values = run.eval.points(name)
    at_best = values[examples == run.best]  # `run.best` is the checkpoint that BEST names
    if len(at_best) and sign * (at_best[-1] - values[-1]) > 0:
        yield note(
            "BEST is better than the last evaluation",
            f"{name} {figure(at_best[-1])} at {count(run.best, 'example')}, {figure(values[-1])} at the last",
            f"The link BEST names step-{run.best}. On few held-out examples the best of many evaluations is in part "
            "luck.",
        )


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    examples, values = run.train.points(TRAIN_ACCURACY)
    last_values, held_out = run.ends(TRAIN_ACCURACY)[1], run.tail("eval", EVAL_ACCURACY)
    if len(values) < 5 or not last_values.mean() >= SATURATED:
        return
    # accuracies of single batches jump, so saturation begins where a mean over as many updates first shows it
    n = len(last_values)
    means = np.convolve(values, np.ones(n) / n, mode="valid")
    since = examples[int(np.argmax(means >= SATURATED))]
    held = f", {percent(held_out)} of the held-out ones" if math.isfinite(held_out) else ""
    text = (
        f"Nearly every training pair is ranked right{held}, from about {count(since, 'example')} on: accuracy can "
        "tell nothing more. "
    )
    first, last = run.ends("grad_norm")
    if len(first):
        before, after = float(first.mean()), float(last.mean())
        norm = f"grad_norm was {figure(before)} over the first {count(len(first), 'update')} and is {figure(after)} now"
        if after >= 0.1 * before:
            text += f"But {norm}, so updates still move the policy: go by margins and samples."
        else:
            text += f"And {norm}: more updates mostly widen margins. Stop earlier, or use harder pairs."
    value = f"{TRAIN_ACCURACY} {figure(last_values.mean())} over the last {n} updates"
    yield warning("Accuracy is saturated", value, text)


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not len(values) or examples[-1] <= 0 or run.updates < 20:
        return
    accuracy, n = float(values[-1]), n_evaluated(run)
    enough = 400  # pairs: 0.60 is then four standard errors above chance
    low, high = wilson_interval(accuracy, n)
    value = f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, 95 % interval {figure(low)} to {figure(high)}"
    if low > 0.5 and high < USEFUL:
        yield note(
            "Held-out pairs are ranked little better than by chance",
            value,
            f"That is above chance, but by less than {figure(USEFUL - 0.5)}: what was learned carries over, but is "
            "little.",
        )
    elif high < USEFUL:
        yield warning(
            "Held-out pairs are ranked no better than by chance",
            value,
            "The policy has not learned a preference that carries over: lr may be too low, the run too short, or the "
            "preferences noise.",
        )
    elif is_inconclusive(accuracy, n):
        text = f"{count(n, 'pair')} cannot tell whether anything was learned."
        if n < enough:
            text += f" To tell an accuracy of 0.60 from chance takes about {enough}: {_advise_more_pairs(run)}."
        else:
            text += " If anything was, it is little."
        yield note("Held-out accuracy cannot be told from chance", value, text)


def _advise_more_pairs(run: Run) -> str:
    available = run.count("test.examples")
    if not available > 0:
        return "raise n_eval_examples, if the test split has them"
    if n_evaluated(run) < available:
        return f"raise n_eval_examples, for the test split has {available:,.0f}"
    return f"the test split has no more than these {available:,.0f}, so put more pairs into it"


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that get worse while training gets better."""
    for what, stem, sign in (("loss", "loss/{}", -1), ("accuracy", "rewards_{}/accuracies", +1)):
        on_eval, on_train = stem.format("eval"), stem.format("train")
        examples, values = run.eval.points(on_eval)
        if len(values) < 2:
            continue
        best_at = int(np.argmax(sign * values))
        best, last = float(values[best_at]), float(values[-1])
        train_at_best, train_at_last = (mean_near(run, on_train, n) for n in (examples[best_at], examples[-1]))
        if what == "loss":
            tolerated = max(0.05 * abs(best), 0.005, evaluation_loss_error(run))
            # where training loss is above its start, the run has failed rather than overfitted
            start = find_start(run)
            learned = train_at_last < (start.loss if start is not None else run.train.first("loss/train"))
        else:
            tolerated, learned = max(0.02, accuracy_error(best, n_evaluated(run))), True
        turned = sign * (best - last) > tolerated
        if not (turned and sign * (train_at_last - train_at_best) > 0 and learned):
            continue
        value = (
            f"{on_eval} {figure(best)} at {count(examples[best_at], 'example')}, {figure(last)} at "
            f"{examples[-1]:,.0f}; {on_train} {figure(train_at_best)}, then {figure(train_at_last)}"
        )
        if what == "loss" and _accuracy_did_not_fall(run, since=examples[best_at]):
            yield note(
                "Evaluation loss rose while accuracy did not fall",
                value,
                "Accuracy did not fall meanwhile: the policy became surer of pairs that it ranks wrong, the usual "
                "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier.",
            )
            continue
        advice = "Train with a smaller lr, or"
        if examples[best_at] > 0:  # before the first update there is no checkpoint
            is_best = run.loss in LOSSES and LOSSES[run.loss].best[0] == on_eval
            advice = f"Take the checkpoint of that evaluation{' (BEST)' if is_best else ''}, or train"
        yield warning(
            f"Evaluation {what} turned while training {what} improved",
            value,
            "From there on the policy learned its training examples rather than what they have in common. "
            f"{advice} for fewer epochs.",
        )


def _accuracy_did_not_fall(run: Run, *, since: float) -> bool:
    """Return whether held-out accuracy is no lower than at `since` examples.

    False without pairs, and if `since` is 0, where all pairs tie.
    """
    examples, values = run.eval.points(EVAL_ACCURACY)
    earlier = values[(examples == since) & (examples > 0)]
    return bool(len(earlier)) and bool(values[-1] >= earlier[0])


def accuracy_gap(run: Run) -> Iterator[Finding]:
    train, held_out = run.tail("train", TRAIN_ACCURACY), run.tail("eval", EVAL_ACCURACY)
    examples, _ = run.eval.points(EVAL_ACCURACY)
    is_trained = len(examples) > 0 and examples[-1] > 0  # before the first update all pairs tie
    if is_trained and train - held_out > max(0.15, accuracy_error(held_out, n_evaluated(run))):
        yield note(
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. More epochs would widen this.",
        )


# --- chosen and rejected, lengths -------------------------------------------------------------------------------------


def margin_sides(run: Run) -> Iterator[Finding]:
    """The side that moved, and why chosen responses became less likely."""
    parts = margin_parts(run)
    if parts is None:
        return
    margin = f"margin {signed(parts.margin)} since the start" if parts.since_start else f"margin {figure(parts.margin)}"
    value = f"{margin} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"
    # the change of logps, which are sums over tokens, unless rewards are per token: lengths would then mislead
    change = parts if run.is_per_token else find_change(run) or parts
    if change.chosen >= 0 or parts.margin <= 0:
        yield note("Where the margin comes from", value, _describe_sides(parts))
        return
    if not isinstance(change, MarginParts):
        before, after = figure(change.chosen_before, 4), figure(change.chosen_after, 4)
        value = f"logps_{change.split}/chosen {before}, then {after} ({signed(change.chosen)}); {value}"
    runs_off = change.chosen < -change.margin  # chosen falls by more than the distance between both sides grew
    sees_difference = _sees_the_difference_alone(run)
    mechanism, advice = "", "By itself that is no fault: read the samples, and compare them with earlier ones."
    if sees_difference:
        mechanism = (
            "The loss sees only the difference of the two sides: lowering rejected responses also lowers what chosen "
            "ones share with them, and nothing holds chosen ones up. "
        )
        beta = "" if parts.since_start else "a larger loss.beta, "
        advice = (
            "Here both fall by more than they part, which often shows in the samples: read them, and consider "
            f"{beta}a smaller lr, fewer epochs, or {HOLDS_UP}"
            if runs_off
            else "By itself this is usual, and no fault as long as the samples stay good."
        )
    yield Finding(
        WARNING if runs_off and sees_difference else NOTE,
        "Chosen responses become less likely while margins grow",
        value,
        f"{_describe_sides(parts)} {mechanism}The probability goes to texts that are in neither. {advice}",
    )


def _describe_sides(parts: MarginParts) -> str:
    """Sentence on the share of the margin that each side gives."""
    chosen, rejected, margin = parts.chosen, parts.rejected, parts.margin
    since = "Since the start" if parts.since_start else "Against the reference"
    if margin <= 0:
        return f"{since}, rejected responses did at least as well as chosen ones: the margin has not grown."
    if margin < 0.2 * min(abs(chosen), abs(rejected)):
        return f"{since}, both moved by nearly as much: the margin is the little by which they differ."
    by_chosen, by_rejected = percent(abs(chosen) / margin), percent(abs(rejected) / margin)
    if chosen >= 0 and rejected <= 0:
        return (
            f"{since}, chosen responses became more likely and rejected ones less: {by_chosen} of the margin is "
            f"chosen rising, {by_rejected} is rejected falling."
        )
    if chosen < 0:
        return (
            f"{since}, both became less likely: rejected falling gives {by_rejected} of the margin, and chosen "
            f"falling takes {by_chosen} away."
        )
    return (
        f"{since}, both became more likely: chosen rising gives {by_chosen} of the margin, and rejected rising "
        f"takes {by_rejected} away."
    )


def _sees_the_difference_alone(run: Run) -> bool:
    """Return whether nothing in the loss holds chosen responses where they are."""
    if run.objective is None:
        return False
    weights = run.setting("loss.weights", {})
    mixed = [LOSSES[name] for name, weight in weights.items() if weight]
    return (
        all(loss.trains_on == "pairs" and loss.margin_only for loss in mixed or [run.objective])
        and not number(run.setting("loss.sft_weight")) > 0
    )


def length_in_margin(run: Run) -> Iterator[Finding]:
    parts = margin_parts(run)
    if parts is None or not math.isfinite(parts.length) or parts.margin <= 0:
        return
    share = parts.length / parts.margin
    gives = signed(parts.length) if abs(share) >= 0.001 else "nearly nothing"
    value = (
        f"{gives} of the margin {figure(parts.margin)} ({percent(share)}); mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
    )
    how = (
        "It was worked out in each pair of the ledger."
        if parts.by_pair
        else "It comes from means alone; with ledger=true a run records it pair by pair."
    )
    text = (
        f"This is what the margin would {'lose' if share >= 0 else 'gain'} if both sides were equally long, at the "
        f"same mean change per token. {how}"
    )
    if share < 0.5:
        yield note("What length gives", value, text)
    else:
        text += " The policy may have learned to prefer a length instead of what makes a response better."
        yield warning("Much of the margin is length", value, text)


def lengths_in_data(run: Run) -> Iterator[Finding]:
    """Pairs whose length alone predicts the preference."""
    longer = run.count("train.chosen_longer")
    share = max(longer, 1 - longer)
    if run.has_pairs and share >= 0.8:
        yield note(
            "Length predicts the preference in the data",
            f"chosen is {'longer' if longer > 0.5 else 'shorter or as long'} in {percent(share)} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            f"{'the reference' if run.has_reference else 'its first ones'}.",
        )


# --- samples ----------------------------------------------------------------------------------------------------------


def _pair_samples(run: Run) -> tuple[list[tuple[str, str]], str]:
    """Pairs of samples for the same prompt, and the second one's source.

    The first is the policy's newest. The second is the reference's or, if it has none, the policy's earliest.
    """
    first, newest = run.samples_at(0), run.samples_at(-1)
    with_reference = [(s["policy"], s["reference"]) for s in newest if s["reference"] is not None]
    if with_reference or first == newest:
        return with_reference, "the reference's"
    with_first = [(s["policy"], f["policy"]) for s, f in zip(newest, first, strict=False) if s["prompt"] == f["prompt"]]
    return with_first, "its first"


def empty_samples(run: Run) -> Iterator[Finding]:
    newest = run.samples_at(-1)
    empty = sum(not sample["policy"].strip() for sample in newest)
    if not newest or empty / len(newest) <= 0.05:
        return
    pairs, source = _pair_samples(run)
    others = sum(not other.strip() for _, other in pairs)
    value = f"{empty} of {count(len(newest), 'sample')}"
    if pairs:
        is_twice_as_often = empty >= 2 * len(newest) * others / len(pairs)
        if empty < len(newest) and not is_twice_as_often:
            return
        value = f"{value}, {source} {others} of {len(pairs)}"
    heads = tosses = empty
    if pairs and others < len(pairs):
        # prompts where one sample of the two is empty: by chance, half of those are the policy's
        one_empty = [not policy.strip() for policy, other in pairs if bool(policy.strip()) != bool(other.strip())]
        heads, tosses = sum(one_empty), len(one_empty)
    if others == empty == len(newest):
        why = (
            "So do the samples beside them: the model says nothing after these prompts whatever it is trained on. Look "
            "at the data and the archive that it started from."
        )
    elif run.has_pairs:
        why = (
            "Probability that training takes from rejected responses often goes there: take an earlier checkpoint, or "
            f"train with a smaller lr, fewer epochs, or {HOLDS_UP}"
        )
    else:
        why = "Look for empty targets in the data, and take an earlier checkpoint."
    yield Finding(
        WARNING if binomial_tail(heads, tosses) <= 0.05 else NOTE,
        "The policy says nothing" if empty == len(newest) else "Some of the policy's samples are empty",
        value,
        f"There the policy ends its answer at once. {why}",
    )


def sample_lengths(run: Run) -> Iterator[Finding]:
    """Samples much longer or shorter than the reference's, empty ones aside.

    One very long sample alone moves the means, so lengths must also differ prompt by prompt, by more than chance.
    """
    pairs, source = _pair_samples(run)
    words = np.array([(len(policy.split()), len(other.split())) for policy, other in pairs], dtype=float).reshape(-1, 2)
    words = words[(words > 0).all(1)]
    if not run.has_pairs or len(words) < 8:  # too few for an interval
        return
    policy_mean, other_mean = words.mean(0)
    ratio = policy_mean / other_mean
    log_ratio, by_chance = mean_and_bound(np.log(words[:, 0] / words[:, 1]))  # prompt by prompt
    is_large = max(ratio, 1 / ratio) >= 1.5 and abs(policy_mean - other_mean) >= 5  # words
    is_certain = abs(log_ratio) > by_chance and (log_ratio > 0) == (ratio > 1)
    if not (is_large and is_certain):
        return
    low, typical, high = (figure(math.exp(log_ratio + change), 2) for change in (-by_chance, 0, by_chance))
    value = (
        f"{figure(policy_mean)} word{'' if policy_mean == 1 else 's'} on average, {source} {figure(other_mean)} "
        f"({count(len(words), 'sample')}); after the same prompt {typical} times as many words, "
        f"98 % interval {low} to {high}"
    )
    if ratio > 1:
        text = (
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length."
        )
        yield warning("The policy's samples have become long", value, text)
    else:
        text = "Read them: answers may break off or give up early."
        yield warning("The policy's samples have become short", value, text)


# --- the run itself ---------------------------------------------------------------------------------------------------


def learning_rate(run: Run) -> Iterator[Finding]:
    """A warmup that did not end."""
    if run.setting("lr_scaling", "none") != "none":  # by a factor that is not recorded
        return
    wanted, rates = number(run.setting("lr")), run.train.points("lr")[1]
    if run.state.word == "complete" and len(rates) and rates.max() < 0.999 * wanted:
        yield warning(
            "The learning rate never reached its value",
            f"lr {rates.max():.3g} at most, of {wanted:.3g}",
            f"The warmup takes {run.setting('warmup_steps')} updates, and the run has {count(run.updates, 'update')}.",
        )


def clipping(run: Run) -> Iterator[Finding]:
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    share = float((norms > limit).mean()) if len(norms) else 0.0
    if share >= 0.5:
        yield note(
            "Most gradients are clipped",
            f"grad_norm above {figure(limit)} in {percent(share)} of the updates; its median {figure(median(norms))}",
            "Every clipped gradient has the same norm, so batches count alike, whatever their gradients' size.",
        )


def slowing(run: Run) -> Iterator[Finding]:
    speed = run.train.points("tokens_per_second")[1]
    if len(speed) < 40:
        return
    quarter = len(speed) // 4
    first, last = float(np.median(speed[:quarter])), float(np.median(speed[-quarter:]))
    if last < 0.7 * first:
        yield note(
            "Updates became slower",
            f"tokens_per_second {figure(first)} in the first quarter, {figure(last)} in the last",
            "The count is the same in every layout, so the machine was slower or shared, or memory ran short.",
        )


class DataCount(NamedTuple):
    """A count of the preflight, and how it is told."""

    key: str
    whole: str  # the count that it is a share of
    least_share: float  # from which it is told
    singular: str
    plural: str


DATA_COUNTS = (
    DataCount(
        "joined_words", "examples", 0.0,
        "response follows its prompt without a space", "responses follow their prompt without a space",
    ),
    DataCount(
        "contradictory_pairs", "examples", 0.01,
        "pair contradicts an earlier one of the same prompt", "pairs contradict an earlier one of the same prompt",
    ),
    DataCount(
        "identical_pairs", "tokenized", 0.01,
        "pair is identical after truncation, without a gradient",
        "pairs are identical after truncation, without a gradient",
    ),
    DataCount(
        "empty_responses", "examples", 0.01,
        "example has an empty response", "examples have an empty response",
    ),
    DataCount(
        "truncated_responses", "tokenized", 0.1,
        "example has a response that lost its end", "examples have a response that lost its end",
    ),
)  # fmt: skip


def data_counts(run: Run) -> Iterator[Finding]:
    for counted in DATA_COUNTS:
        n_found, total = run.count(f"train.{counted.key}"), run.count(f"train.{counted.whole}")
        if n_found > 0 and total > 0 and n_found / total >= counted.least_share:
            value = f"{counted.key} {n_found:,.0f} of {total:,.0f} ({percent(n_found / total)})"
            text = f"In the training split, {count(n_found, counted.singular, counted.plural)}."
            yield note("Worth a look in the data", value, text)


# --- pairs drawn from the policy --------------------------------------------------------------------------------------


def online_accuracies(run: Run) -> Iterator[Finding]:
    both = {TRAIN_ACCURACY: run.tail("train", TRAIN_ACCURACY), EVAL_ACCURACY: run.eval.last(EVAL_ACCURACY)}
    values = [f"{name} {figure(value)}" for name, value in both.items() if math.isfinite(value)]
    if values:
        share = number(run.setting("online.mix_offline"))
        mixed = f", but for the {percent(share)} from the datasets" if share > 0 else ""
        yield note(
            "What accuracies mean here",
            "; ".join(values),
            f"Training pairs are new answers of the policy{mixed}: their accuracy says how often its implicit rewards "
            "agree with the scorer about answers that it was not trained on, and need not rise. Evaluation pairs are "
            "those of the datasets, whose labels the scorer does not know; BEST goes by them. What is learned shows "
            "in online/score.",
        )


def unfinished_answers(run: Run) -> Iterator[Finding]:
    ended, most = run.tail("train", "online/eos"), run.setting("online.max_new_tokens")
    if ended < 0.9:
        has_penalty = number(run.setting("online.missing_eos_penalty")) > 0
        penalty = "" if has_penalty else "set online.missing_eos_penalty, "
        yield Finding(
            WARNING if ended < 0.5 else NOTE,
            "Most answers are cut off" if ended < 0.5 else "Some answers are cut off",
            f"online/eos {figure(ended)}: so many end within online.max_new_tokens={most}",
            "The scorer rates answers without an end, and the policy does not learn where to stop. Raise "
            f"online.max_new_tokens, {penalty}or start from a model that SFT (loss=sft) taught to end its answers.",
        )


def ties(run: Run) -> Iterator[Finding]:
    share = run.tail("train", "online/ties")
    if share >= 0.5:
        cost = (
            "Ties are trained on (online.ties=keep), with the answer that was drawn first as chosen"
            if run.setting("online.ties") == "keep"
            else "Ties are not trained on (online.ties=skip), so the gradient comes from few pairs, or from none"
        )
        yield warning(
            "Most prompts give a tie",
            f"online/ties {figure(share)}; online.n_samples {run.setting('online.n_samples')}",
            f"The best and the worst answer to a prompt had the same score, or were the same text. {cost}. To get "
            "fewer ties, raise online.n_samples or online.temperature, or use a scorer with finer scores. Late in a "
            "run, ties may mean that all answers have the highest score, or that the policy always gives the same one.",
        )


def scores(run: Run) -> Iterator[Finding]:
    first, last = run.ends("online/score")
    if len(run.train.points("online/score")[1]) < 20:
        return
    before, after, error = float(first.mean()), float(last.mean()), difference_error(first, last)
    value = f"online/score {figure(before)} over the first {count(len(first), 'update')}, {figure(after)} over the last"
    if after > before + error:
        yield note("Scores rise", value, "Answers that are drawn later have higher scores.")
    else:
        yield warning(
            "Scores have not risen",
            f"{value}; two standard errors {figure(error)}",
            "The policy has not learned what the scorer rewards: lr may be too low, loss.beta too high, the run too "
            "short, or most pairs ties.",
        )


def score_length_correlation(run: Run) -> Iterator[Finding]:
    scores, lengths = run.train["online/score"], run.train["online/length"]
    known = np.isfinite(scores) & np.isfinite(lengths)
    scores, lengths = scores[known], lengths[known]
    if len(scores) < 20 or scores.std() == 0 or lengths.std() == 0:
        return
    correlation = float(np.corrcoef(scores, lengths)[0, 1])
    before, after = (float(part.mean()) for part in run.ends("online/length"))
    if after >= 1.5 * before and correlation >= 0.5:
        yield warning(
            "Scores and lengths grow together",
            f"online/length {figure(before)} tokens at first, {figure(after)} now; correlation of online/score and "
            f"online/length over the updates {figure(correlation, 2)}",
            "The scorer may reward length, and the policy exploit it. Read what was drawn: if answers only say the "
            "same in more words, correct the scorer, lower online.max_new_tokens or raise loss.beta.",
        )


def divergence(run: Run) -> Iterator[Finding]:
    """A policy far from the reference, perhaps with worse answers."""
    nats, tokens = run.tail("train", "online/kl"), run.tail("train", "online/length")
    if not nats > 10:  # the answers are then e^10, or 22,000, times as likely as under the reference
        return
    each = f", {figure(nats / tokens)} a token" if tokens > 0 else ""
    fell = ""
    for name in ("online/score", "online/eos"):
        first, last = run.ends(name)
        if len(first) > 1 and last.mean() < first.mean() - difference_error(first, last):
            fell += f"; {name} {figure(first.mean())} at first, {figure(last.mean())} now"
    yield Finding(
        WARNING if fell else NOTE,
        "The policy has gone far from the reference",
        f"online/kl {figure(nats)} nats{each}{fell}",
        f"By the geometric mean, the pairs' answers are e^{figure(nats)} times as likely under the policy as under "
        "the reference; for long answers that is ordinary. That far away scores often rise by what the scorer "
        "overlooks: read what was drawn"
        + (", and consider a larger loss.beta, a smaller lr or fewer updates." if fell else "."),
    )


def time_to_draw(run: Run) -> Iterator[Finding]:
    seconds = update_seconds(run)
    parts = {name: run.train[f"online/{name}_share"] for name in ("sampling", "scoring")}
    known = np.isfinite(seconds) & np.isfinite(parts["sampling"])
    if not known.any():
        return
    shares = {name: float(np.nansum((part * seconds)[known]) / seconds[known].sum()) for name, part in parts.items()}
    yield note(
        "What drawing the pairs takes",
        ", ".join(f"{name} {percent(share)}" for name, share in shares.items()) + " of the time in updates",
        "The other time is what an update on given pairs takes. To make sampling shorter, lower online.n_samples or "
        "online.max_new_tokens, or raise eval_batch_size, the number of prompts that are sampled at once.",
    )


# --- all of them ------------------------------------------------------------------------------------------------------

Rule = Callable[[Run], Iterator[Finding]]

ANY_RUN: tuple[Rule, ...] = (
    *(skipped_updates, collapse, best_checkpoint, spikes, empty_samples, sample_lengths),
    *(learning_rate, clipping, data_counts),
)
OFFLINE: tuple[Rule, ...] = (  # drawn pairs change with the policy, and follow the scorer rather than held-out labels
    *(no_better_than_chance, saturation, evaluation_turns, margin_sides, length_in_margin, lengths_in_data),
    *(accuracy_gap, slowing),
)
ONLINE: tuple[Rule, ...] = (
    *(online_accuracies, unfinished_answers, ties, scores, score_length_correlation, divergence, time_to_draw),
)


def find_all(run: Run) -> list[Finding]:
    """All findings on a run, warnings first."""
    found = [finding for rule in (*ANY_RUN, *(ONLINE if run.online else OFFLINE)) for finding in rule(run)]
    return sorted(found, key=lambda finding: finding.level != WARNING)
