"""Findings on how a run trained, each by a rule.

A finding has a title, the values that it is about, and what they mean. A finding that looks like a fault is a warning,
any other a note. docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.instability import WHAT_TO_TRY, InstabilityDetector, Means
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
SATURATED = 0.99  # training accuracy
WAYS_TO_HOLD_CHOSEN_UP = "what holds chosen responses up: loss.sft_weight, loss=dpop, loss=apo_zero."


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
    folders = _list_first([f"nonfinite-{update}" for update in run.nonfinite], 3)
    skipped = []
    for line in run.train.lines:
        if any(name in line and math.isnan(number(line[name])) for name in ("loss/train", "grad_norm")):
            skipped.append(f"{number(line.get('updates')):,.0f}")
    if skipped:
        where_examples_are = f" Their examples are in {folders}." if run.nonfinite else ""
        yield warning(
            "Updates were skipped: loss or gradient was not a number",
            f"{len(skipped)} of {count(len(run.train), 'update')}: {_list_first(skipped, 6)}",
            "These updates did not change the weights. One such batch may be bad data; several mean that training is "
            f"unstable: lower lr, or look at the examples.{where_examples_are}",
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
    for name, title in (("grad_norm", "Gradient spikes"), ("loss/train", "Loss spikes")):
        detector = InstabilityDetector(number(run.setting("batch_size", 1)), find_start(run))
        values = run.train[name].tolist()
        ratios = [detector.find_spike(name, value) or 0.0 for value in values]  # 0: no spike
        if not any(ratios):
            continue
        largest = max(ratios)
        row = ratios.index(largest)
        limit = run.setting("max_grad_norm") if name == "grad_norm" else None
        clipping = f" Gradients are clipped to {limit}, so no step was that large." if limit else ""
        n_spikes = sum(ratio > 0 for ratio in ratios)
        yield warning(
            title,
            f"{name} {figure(values[row])} at update {run.train.updates[row]:,.0f}, "
            f"{figure(largest, 2)} times its median before; {count(n_spikes, 'spike')} in all",
            f"One batch was far from what the model had seen just before.{clipping} If the loss does not come back "
            "after a spike, lower lr or lengthen the warmup.",
        )


def collapse(run: Run) -> Iterator[Finding]:
    start = find_start(run)
    if start is None or run.setting("loss.wpo"):  # weights of wpo move with the policy
        return
    detector = InstabilityDetector(number(run.setting("batch_size", 1)), start)
    value = _describe_training_collapse(run, detector, start)
    if value is None and not run.online:  # an online run follows its scorer, which held-out labels may contradict
        value = _describe_evaluation_collapse(run, detector, start)
    if value is not None:
        yield warning("The run has collapsed", value, WHAT_TO_TRY)


def _describe_training_collapse(run: Run, detector: InstabilityDetector, start: Means) -> str | None:
    """Describe the first updates that show a collapse; None without one."""
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    for update, loss, margin in zip(run.train.updates, losses.tolist(), margins.tolist(), strict=True):
        collapsed = detector.find_collapse(loss, margin)
        if collapsed is None:
            continue
        means, n_updates = collapsed
        finite_losses = losses[np.isfinite(losses) & np.isfinite(margins)]
        last_mean = finite_losses[-n_updates:].mean()
        window = f"over the {n_updates} updates up to {update:,.0f}"
        return (
            f"loss/train {figure(means.loss)} {window}, {figure(last_mean)} over the last {n_updates}, "
            f"{figure(start.loss)} at the start; rewards_train/margins {figure(means.margin)} {window}, "
            f"{_format_start_margin(start)} at the start"
        )
    return None


def _describe_evaluation_collapse(run: Run, detector: InstabilityDetector, start: Means) -> str | None:
    """Describe the first evaluation that shows a collapse; None without one."""
    losses, margins = run.eval["loss/eval"], run.eval["rewards_eval/margins"]
    for examples, loss, margin in zip(run.eval.examples, losses.tolist(), margins.tolist(), strict=True):
        if examples > 0 and detector.is_collapsed(Means(loss, margin)):
            return (
                f"loss/eval {figure(loss)} at {count(examples, 'example')}, {figure(run.eval.last('loss/eval'))} at "
                f"the last evaluation, {figure(start.loss)} at the start; rewards_eval/margins {figure(margin)}, "
                f"{_format_start_margin(start)} at the start"
            )
    return None


def _format_start_margin(start: Means) -> str:
    """Format the margin at the start, without rounding errors."""
    return figure(round(start.margin, 3) + 0.0)  # -0.0 + 0.0 is 0.0


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def best_checkpoint(run: Run) -> Iterator[Finding]:
    if run.best is None or run.best_metric is None:
        return
    name, sign = run.best_metric
    examples, values = run.eval.points(name)
    values_at_best = values[examples == run.best]  # `run.best`: examples trained on at the checkpoint BEST
    if not len(values_at_best):
        return
    best, last = values_at_best[-1], values[-1]  # a resumed run may have evaluated twice there
    if sign * (best - last) > 0:
        yield note(
            "BEST is better than the last evaluation",
            f"{name} {figure(best)} at {count(run.best, 'example')}, {figure(last)} at the last",
            f"The link BEST names step-{run.best}. On few held-out examples the best of many evaluations is in part "
            "luck.",
        )


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    examples, accuracies = run.train.points(TRAIN_ACCURACY)
    _, last_accuracies = run.ends(TRAIN_ACCURACY)
    if len(accuracies) < 5 or not last_accuracies.mean() >= SATURATED:
        return
    # accuracies of single batches jump, so saturation begins where a mean over `n` updates first shows it
    n = len(last_accuracies)
    running_means = np.convolve(accuracies, np.ones(n) / n, mode="valid")
    since = examples[int(np.argmax(running_means >= SATURATED))]
    held_out_accuracy = run.tail("eval", EVAL_ACCURACY)
    held_out = f", {percent(held_out_accuracy)} of the held-out ones" if math.isfinite(held_out_accuracy) else ""
    text = (
        f"Nearly every training pair is ranked right{held_out}, from about {count(since, 'example')} on: accuracy can "
        "tell nothing more. "
    )
    first_norms, last_norms = run.ends("grad_norm")
    if len(first_norms):
        before, after = float(first_norms.mean()), float(last_norms.mean())
        first_updates = count(len(first_norms), "update")
        norm = f"grad_norm was {figure(before)} over the first {first_updates} and is {figure(after)} now"
        if after >= 0.1 * before:
            text += f"But {norm}, so updates still move the policy: go by margins and samples."
        else:
            text += f"And {norm}: more updates mostly widen margins. Stop earlier, or use harder pairs."
    value = f"{TRAIN_ACCURACY} {figure(last_accuracies.mean())} over the last {n} updates"
    yield warning("Accuracy is saturated", value, text)


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not len(values) or examples[-1] <= 0 or run.updates < 20:
        return
    accuracy, n = float(values[-1]), n_evaluated(run)
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
        enough_pairs = 400  # 0.60 is then four standard errors above chance
        text = f"{count(n, 'pair')} cannot tell whether anything was learned."
        if n < enough_pairs:
            text += f" To tell an accuracy of 0.60 from chance takes about {enough_pairs}: {_advise_more_pairs(run)}."
        else:
            text += " If anything was, it is little."
        yield note("Held-out accuracy cannot be told from chance", value, text)


def _advise_more_pairs(run: Run) -> str:
    available = run.count("test.examples")
    if not available > 0:
        return "raise n_eval_examples, if the test split has them"
    if n_evaluated(run) < available:
        return f"raise n_eval_examples, for the test split has {available:,.0f}"
    return f"the test split has only these {available:,.0f}, so put more pairs into it"


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that get worse while training gets better."""
    yield from _find_turn(run, "loss", "loss/eval", "loss/train", sign=-1)
    yield from _find_turn(run, "accuracy", EVAL_ACCURACY, TRAIN_ACCURACY, sign=+1)


def _find_turn(run: Run, kind: str, eval_name: str, train_name: str, *, sign: int) -> Iterator[Finding]:
    """Find whether a metric's evaluation turned while training improved.

    `sign` is +1 if a higher value is better, -1 if a lower one is.
    """
    examples, values = run.eval.points(eval_name)
    if len(values) < 2:
        return
    best_index = int(np.argmax(sign * values))
    best, last = float(values[best_index]), float(values[-1])
    examples_at_best, examples_at_last = examples[best_index], examples[-1]
    train_at_best = mean_near(run, train_name, examples_at_best)
    train_at_last = mean_near(run, train_name, examples_at_last)
    if kind == "loss":
        tolerated = max(0.05 * abs(best), 0.005, evaluation_loss_error(run))
        # where training loss is above its start, the run has failed rather than overfitted
        start = find_start(run)
        has_learned = train_at_last < (start.loss if start is not None else run.train.first(train_name))
    else:
        tolerated, has_learned = max(0.02, accuracy_error(best, n_evaluated(run))), True
    got_worse = sign * (best - last) > tolerated
    training_got_better = sign * (train_at_last - train_at_best) > 0
    if not (got_worse and training_got_better and has_learned):
        return
    value = (
        f"{eval_name} {figure(best)} at {count(examples_at_best, 'example')}, {figure(last)} at "
        f"{examples_at_last:,.0f}; {train_name} {figure(train_at_best)}, then {figure(train_at_last)}"
    )
    if kind == "loss" and _accuracy_did_not_fall(run, since=examples_at_best):
        yield note(
            "Evaluation loss rose while accuracy did not fall",
            value,
            "Accuracy did not fall meanwhile: the policy became surer of pairs that it ranks wrong, the usual "
            "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier.",
        )
        return
    advice = "Train with a smaller lr, or"
    if examples_at_best > 0:  # before the first update there is no checkpoint
        ranks_checkpoints = run.objective is not None and run.objective.best[0] == eval_name
        advice = f"Take the checkpoint of that evaluation{' (BEST)' if ranks_checkpoints else ''}, or train"
    yield warning(
        f"Evaluation {kind} turned while training {kind} improved",
        value,
        "From there on the policy learned its training examples rather than what they have in common. "
        f"{advice} for fewer epochs.",
    )


def _accuracy_did_not_fall(run: Run, *, since: float) -> bool:
    """Return whether held-out accuracy is no lower than at `since` examples.

    False without accuracies, and if `since` is 0: before training all pairs tie.
    """
    examples, accuracies = run.eval.points(EVAL_ACCURACY)
    earlier_accuracies = accuracies[(examples == since) & (examples > 0)]
    return len(earlier_accuracies) > 0 and bool(accuracies[-1] >= earlier_accuracies[0])


def accuracy_gap(run: Run) -> Iterator[Finding]:
    train, held_out = run.tail("train", TRAIN_ACCURACY), run.tail("eval", EVAL_ACCURACY)
    examples, _ = run.eval.points(EVAL_ACCURACY)
    is_evaluated_after_training = len(examples) > 0 and examples[-1] > 0  # before the first update all pairs tie
    tolerated = max(0.15, accuracy_error(held_out, n_evaluated(run)))
    if is_evaluated_after_training and train - held_out > tolerated:
        yield note(
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. More epochs would widen this.",
        )


# --- chosen and rejected, lengths -------------------------------------------------------------------------------------


def margin_sides(run: Run) -> Iterator[Finding]:
    """Say where the margin comes from, and why chosen responses fall."""
    parts = margin_parts(run)
    if parts is None:
        return
    margin = f"margin {signed(parts.margin)} since the start" if parts.since_start else f"margin {figure(parts.margin)}"
    value = f"{margin} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"
    # sums over tokens show directly whether chosen responses fell; rewards per token stand for themselves, because
    # their sums would mix in lengths
    logps_change = None if run.is_per_token else find_change(run)
    change = logps_change or parts
    if change.chosen >= 0 or parts.margin <= 0:
        yield note("Where the margin comes from", value, _describe_sides(parts))
        return
    if logps_change is not None:
        before, after = figure(logps_change.chosen_before, 4), figure(logps_change.chosen_after, 4)
        value = f"logps_{logps_change.split}/chosen {before}, then {after} ({signed(logps_change.chosen)}); {value}"
    falls_beyond_margin = change.chosen < -change.margin  # chosen falls by more than the two sides moved apart
    only_difference_counts = _loss_sees_only_differences(run)
    if not only_difference_counts:
        mechanism, advice = "", "By itself that is no fault: read the samples, and compare them with earlier ones."
    else:
        mechanism = (
            "The loss sees only the difference of the two sides: lowering rejected responses also lowers what chosen "
            "ones share with them, and nothing holds chosen ones up. "
        )
        advice = "By itself this is usual, and no fault as long as the samples stay good."
        if falls_beyond_margin:
            beta = "" if parts.since_start else "a larger loss.beta, "
            advice = (
                "Here chosen responses fall by more than the margin grows, which often shows in the samples: read "
                f"them, and consider {beta}a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
            )
    yield Finding(
        WARNING if falls_beyond_margin and only_difference_counts else NOTE,
        "Chosen responses become less likely while margins grow",
        value,
        f"{_describe_sides(parts)} {mechanism}The probability goes to texts that are in neither. {advice}",
    )


def _describe_sides(parts: MarginParts) -> str:
    """Say in a sentence which share of the margin each side gives."""
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


def _loss_sees_only_differences(run: Run) -> bool:
    """Return whether the loss is a function of chosen minus rejected alone."""
    if run.objective is None:
        return False
    weights = run.setting("loss.weights", {})  # only loss=mix has them
    losses = [LOSSES[name] for name, weight in weights.items() if weight] or [run.objective]
    has_sft_term = number(run.setting("loss.sft_weight")) > 0
    return all(loss.trains_on == "pairs" and loss.margin_only for loss in losses) and not has_sft_term


def length_in_margin(run: Run) -> Iterator[Finding]:
    parts = margin_parts(run)
    if parts is None or not math.isfinite(parts.length) or parts.margin <= 0:
        return
    share = parts.length / parts.margin
    amount = signed(parts.length) if abs(share) >= 0.001 else "nearly nothing"
    value = (
        f"{amount} of the margin {figure(parts.margin)} ({percent(share)}); mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
    )
    source = (
        "It was worked out in each pair of the ledger."
        if parts.by_pair
        else "It comes from means alone; with ledger=true a run records it pair by pair."
    )
    text = (
        f"This is what the margin would {'lose' if share >= 0 else 'gain'} if both sides were equally long, at the "
        f"same mean change per token. {source}"
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
    """Pair the policy's newest samples with others, and name the others.

    A pair has the same prompt. The other sample is the reference's; without a reference, the policy's earliest.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    with_reference = [(new["policy"], new["reference"]) for new in newest if new["reference"] is not None]
    if with_reference or earliest == newest:
        return with_reference, "the reference's"
    pairs = zip(newest, earliest, strict=False)
    with_earliest = [(new["policy"], old["policy"]) for new, old in pairs if new["prompt"] == old["prompt"]]
    return with_earliest, "its first"


def empty_samples(run: Run) -> Iterator[Finding]:
    newest = run.samples_at(-1)
    n_empty = sum(not sample["policy"].strip() for sample in newest)
    if not newest or n_empty / len(newest) <= 0.05:
        return
    all_empty = n_empty == len(newest)
    pairs, source = _pair_samples(run)
    n_empty_others = sum(not other.strip() for _, other in pairs)
    value = f"{n_empty} of {count(len(newest), 'sample')}"
    if pairs:
        is_twice_as_often = n_empty >= 2 * len(newest) * n_empty_others / len(pairs)
        if not all_empty and not is_twice_as_often:
            return
        value = f"{value}, {source} {n_empty_others} of {len(pairs)}"
    # a sign test: where exactly one sample of a pair is empty, chance makes it the policy's half of the time; nothing
    # to compare with, or only empty samples, count as if each empty sample of the policy were such a pair
    n_only_policy_empty = n_only_one_empty = n_empty
    if pairs and n_empty_others < len(pairs):
        emptiness = [(not policy.strip(), not other.strip()) for policy, other in pairs]
        n_only_policy_empty = sum(policy and not other for policy, other in emptiness)
        n_only_one_empty = sum(policy != other for policy, other in emptiness)
    why = _explain_empty_samples(run, all_others_too=all_empty and n_empty_others == n_empty)
    yield Finding(
        WARNING if binomial_tail(n_only_policy_empty, n_only_one_empty) <= 0.05 else NOTE,
        "The policy says nothing" if all_empty else "Some of the policy's samples are empty",
        value,
        f"An empty sample is an answer that the policy ends at once. {why}",
    )


def _explain_empty_samples(run: Run, *, all_others_too: bool) -> str:
    if all_others_too:
        return (
            "The samples beside these are empty too: the model says nothing after these prompts whatever it is trained "
            "on. Look at the data and the archive that it started from."
        )
    if run.has_pairs:
        return (
            "Probability that training takes from rejected responses often goes to empty answers: take an earlier "
            f"checkpoint, or train with a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
        )
    return "Look for empty targets in the data, and take an earlier checkpoint."


def sample_lengths(run: Run) -> Iterator[Finding]:
    """Samples much longer or shorter than the reference's, empty ones aside.

    One very long sample alone moves the means, so lengths must also differ prompt by prompt, by more than chance.
    """
    pairs, source = _pair_samples(run)
    n_words = [(len(policy.split()), len(other.split())) for policy, other in pairs]
    not_empty = [(policy, other) for policy, other in n_words if policy > 0 and other > 0]
    if not run.has_pairs or len(not_empty) < 8:  # too few for an interval
        return
    policy_words, other_words = np.array(not_empty, dtype=float).T
    policy_mean, other_mean = policy_words.mean(), other_words.mean()
    ratio = policy_mean / other_mean
    mean_log_ratio, half_width = mean_and_bound(np.log(policy_words / other_words))
    is_large = max(ratio, 1 / ratio) >= 1.5 and abs(policy_mean - other_mean) >= 5  # words
    is_beyond_chance = abs(mean_log_ratio) > half_width and (mean_log_ratio > 0) == (ratio > 1)
    if not (is_large and is_beyond_chance):
        return
    low, typical, high = (figure(math.exp(mean_log_ratio + shift), 2) for shift in (-half_width, 0, half_width))
    value = (
        f"{figure(policy_mean)} word{'' if policy_mean == 1 else 's'} on average, {source} {figure(other_mean)} "
        f"({count(len(not_empty), 'sample')}); after the same prompt {typical} times as many words, "
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
    peak_lr, logged_lrs = number(run.setting("lr")), run.train.points("lr")[1]
    if run.state.word == "complete" and len(logged_lrs) and logged_lrs.max() < 0.999 * peak_lr:
        yield warning(
            "The learning rate never reached its value",
            f"lr {logged_lrs.max():.3g} at most, of {peak_lr:.3g}",
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
    """A count of the preflight, and the sentence that reports it."""

    key: str
    total: str  # key of the count that this one is a share of
    least_share: float  # a smaller share is not reported
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
        n_found, total = run.count(f"train.{counted.key}"), run.count(f"train.{counted.total}")
        if n_found > 0 and total > 0 and n_found / total >= counted.least_share:
            value = f"{counted.key} {n_found:,.0f} of {total:,.0f} ({percent(n_found / total)})"
            text = f"In the training split, {count(n_found, counted.singular, counted.plural)}."
            yield note("Worth a look in the data", value, text)


# --- pairs drawn from the policy --------------------------------------------------------------------------------------


def online_accuracies(run: Run) -> Iterator[Finding]:
    accuracies = {TRAIN_ACCURACY: run.tail("train", TRAIN_ACCURACY), EVAL_ACCURACY: run.eval.last(EVAL_ACCURACY)}
    values = [f"{name} {figure(value)}" for name, value in accuracies.items() if math.isfinite(value)]
    if values:
        offline_share = number(run.setting("online.mix_offline"))
        mixed = f", but for the {percent(offline_share)} from the datasets" if offline_share > 0 else ""
        yield note(
            "What accuracies mean here",
            "; ".join(values),
            f"Training pairs are new answers of the policy{mixed}: their accuracy says how often its implicit rewards "
            "agree with the scorer about answers that it was not trained on, and need not rise. Evaluation pairs are "
            "those of the datasets, whose labels the scorer does not know. What is learned shows in online_eval/score "
            "and online_eval/win_rate, on held-out prompts; BEST goes by the score.",
        )


def unfinished_answers(run: Run) -> Iterator[Finding]:
    share_ended, limit = run.tail("train", "online/eos"), run.setting("online.max_new_tokens")
    if share_ended < 0.9:
        has_penalty = number(run.setting("online.missing_eos_penalty")) > 0
        penalty = "" if has_penalty else "set online.missing_eos_penalty, "
        are_most = share_ended < 0.5
        yield Finding(
            WARNING if are_most else NOTE,
            "Most answers are cut off" if are_most else "Some answers are cut off",
            f"online/eos {figure(share_ended)}: this share of answers ends within online.max_new_tokens={limit}",
            "The scorer rates answers without an end, and the policy does not learn where to stop. Raise "
            f"online.max_new_tokens, {penalty}or start from a model that SFT (loss=sft) taught to end its answers.",
        )


def ties(run: Run) -> Iterator[Finding]:
    share = run.tail("train", "online/ties")
    if share >= 0.5:
        effect = (
            "Ties are trained on (online.ties=keep), though the scorer prefers neither answer"
            if run.setting("online.ties") == "keep"
            else "Ties are not trained on (online.ties=skip), so the gradient comes from few pairs, or from none"
        )
        yield warning(
            "Most prompts give a tie",
            f"online/ties {figure(share)}; online.n_samples {run.setting('online.n_samples')}",
            f"The best and the worst answer to a prompt had the same score, or were the same text. {effect}. To get "
            "fewer ties, raise online.n_samples or online.temperature, or use a scorer with finer scores. Late in a "
            "run, ties may mean that all answers have the highest score, or that the policy always gives the same one.",
        )


def scores(run: Run) -> Iterator[Finding]:
    first, last = run.ends("online/score")
    _, all_scores = run.train.points("online/score")
    if len(all_scores) < 20:
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
    has_both = np.isfinite(scores) & np.isfinite(lengths)
    scores, lengths = scores[has_both], lengths[has_both]
    if len(scores) < 20 or scores.std() == 0 or lengths.std() == 0:
        return
    correlation = float(np.corrcoef(scores, lengths)[0, 1])
    before, after = (float(tenth.mean()) for tenth in run.ends("online/length"))
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
    per_token = f", {figure(nats / tokens)} a token" if tokens > 0 else ""
    fallen_metrics = ""
    for name in ("online/score", "online/eos"):
        first, last = run.ends(name)
        if len(first) > 1 and last.mean() < first.mean() - difference_error(first, last):
            fallen_metrics += f"; {name} {figure(first.mean())} at first, {figure(last.mean())} now"
    advice = ", and consider a larger loss.beta, a smaller lr or fewer updates" if fallen_metrics else ""
    yield Finding(
        WARNING if fallen_metrics else NOTE,
        "The policy has gone far from the reference",
        f"online/kl {figure(nats)} nats{per_token}{fallen_metrics}",
        f"By the geometric mean, the pairs' answers are e^{figure(nats)} times as likely under the policy as under "
        "the reference; for long answers that is ordinary. That far away scores often rise by what the scorer "
        f"overlooks: read what was drawn{advice}.",
    )


def time_to_draw(run: Run) -> Iterator[Finding]:
    seconds = update_seconds(run)
    is_known = np.isfinite(seconds) & np.isfinite(run.train["online/sampling_share"])
    if not is_known.any():
        return
    shares = []
    for name in ("sampling", "scoring"):
        share_by_update = run.train[f"online/{name}_share"]
        share = np.nansum((share_by_update * seconds)[is_known]) / seconds[is_known].sum()
        shares.append(f"{name} {percent(float(share))}")
    yield note(
        "What drawing the pairs takes",
        f"{', '.join(shares)} of the time in updates",
        "The other time is what an update on given pairs takes. To make sampling shorter, lower online.n_samples or "
        "online.max_new_tokens, or raise online.batch_size, the number of prompts that are answered at a time.",
    )


# --- all of them ------------------------------------------------------------------------------------------------------

Rule = Callable[[Run], Iterator[Finding]]

ANY_RUN: tuple[Rule, ...] = (
    skipped_updates, collapse, best_checkpoint, spikes, empty_samples, sample_lengths, learning_rate, clipping,
    data_counts,
)  # fmt: skip
# rules that an online run would break: its pairs change with the policy, and its scorer may contradict held-out labels
OFFLINE: tuple[Rule, ...] = (
    no_better_than_chance, saturation, evaluation_turns, margin_sides, length_in_margin, lengths_in_data, accuracy_gap,
    slowing,
)  # fmt: skip
ONLINE: tuple[Rule, ...] = (
    online_accuracies, unfinished_answers, ties, scores, score_length_correlation, divergence, time_to_draw,
)  # fmt: skip


def find_all(run: Run) -> list[Finding]:
    """Find everything that the rules tell about a run, warnings first."""
    rules = (*ANY_RUN, *(ONLINE if run.online else OFFLINE))
    findings = [finding for rule in rules for finding in rule(run)]
    return sorted(findings, key=lambda finding: finding.level != WARNING)  # stable: each level keeps the rules' order
