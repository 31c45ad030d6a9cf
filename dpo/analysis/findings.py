"""Findings on how a run trained: rules, each a function of a `Run` that yields findings.

A finding gives a fact, the metric's value, and what it means. A warning is a finding that looks like a fault.
docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.measures import (
    FEW,
    USEFUL,
    WHAT_TO_TRY,
    Means,
    accuracy_error,
    binomial_tail,
    count_window,
    difference_error,
    evaluation_loss_error,
    find_change,
    find_collapse,
    find_spikes,
    find_start,
    first_tenth,
    is_collapsed,
    is_inconclusive,
    last_tenth,
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


class Finding(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    value: str  # of the metrics it is about
    text: str


# --- NaN, spikes, collapse --------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> Iterator[Finding]:
    """Skipped updates, and an update that ended the run."""
    folders = ", ".join(f"nonfinite-{n}" for n in run.nonfinite[:3]) + (", ..." if len(run.nonfinite) > 3 else "")
    odd = [
        f"{number(line.get('updates')):,.0f}"
        for line in run.train.lines
        if any(name in line and math.isnan(number(line[name])) for name in ("loss/train", "grad_norm"))
    ]
    if odd:
        shown = ", ".join(odd[:6]) + (", ..." if len(odd) > 6 else "")
        kept = f" Their examples are in {folders}." if run.nonfinite else ""
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
            f"That update was not applied. Its examples are in {folders}, as a dataset that can be replayed.",
        )


def spikes(run: Run) -> Iterator[Finding]:
    """Gradient norms and losses far above the values just before."""
    for name, what in (("grad_norm", "Gradient"), ("loss/train", "Loss")):
        values = run.train[name]
        found = find_spikes(values)
        if what == "Loss" and (start := find_start(run)):
            # where nearly all pairs are learned, one that is not learned stands out
            found = [(place, times) for place, times in found if values[place] > start.loss]
        if not found:
            continue
        place, times = max(found, key=lambda spike: spike[1])
        limit = run.setting("max_grad_norm") if what == "Gradient" else None
        clipped = f" Gradients are clipped to {limit}, so no step was that large." if limit else ""
        yield Finding(
            WARNING,
            f"{what} spikes",
            f"{name} {figure(float(values[place]))} at update {run.train.updates[place]:,.0f}, "
            f"{figure(times, 2)} times its median before; {count(len(found), 'spike')} in all",
            f"One batch was far from what the model had seen just before.{clipped} If the loss does not come back "
            "after a spike, lower lr or lengthen the warmup.",
        )


def collapse(run: Run) -> Iterator[Finding]:
    """A loss far above its start, with margins that show no preference."""
    start, width = find_start(run), count_window(number(run.setting("batch_size", 1)))
    if start is None or run.setting("loss.wpo"):  # weights of wpo move with the policy
        return
    columns = np.stack([run.train[name] for name in ("loss/train", "rewards_train/margins")])
    known = np.isfinite(columns).all(0)
    (losses, margins), updates = columns[:, known], run.train.updates[known]
    title, margin_at_start = "The run has collapsed", figure(round(start.margin, 3) + 0.0)  # without rounding errors
    for end in range(FEW, len(losses) + 1, max(1, len(losses) // 1000)):
        before = slice(max(0, end - width), end)
        if found := find_collapse(losses[before], margins[before], start, width):
            then = f"over the {count(found.updates, 'update')} up to {updates[end - 1]:,.0f}"
            now = f"{figure(losses[-found.updates :].mean())} over the last {found.updates}"
            value = (
                f"loss/train {figure(found.loss)} {then}, {now}, {figure(start.loss)} at the start; "
                f"rewards_train/margins {figure(found.margin)} {then}, {margin_at_start} at the start"
            )
            yield Finding(WARNING, title, value, WHAT_TO_TRY)
            return
    if run.online:  # follows its scorer, which held-out labels may contradict
        return
    for examples, *means in zip(
        run.eval.examples, run.eval["loss/eval"], run.eval["rewards_eval/margins"], strict=True
    ):
        if examples > 0 and is_collapsed(at := Means(*map(float, means)), start):
            value = (
                f"loss/eval {figure(at.loss)} at {count(examples, 'example')}, {figure(run.eval.last('loss/eval'))} at "
                f"the last evaluation, {figure(start.loss)} at the start; rewards_eval/margins {figure(at.margin)}, "
                f"{margin_at_start} at the start"
            )
            yield Finding(WARNING, title, value, WHAT_TO_TRY)
            return


# --- accuracy and loss ------------------------------------------------------------------------------------------------


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


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    saturated = 0.99
    examples, values = run.train.points(TRAIN_ACCURACY)
    now, held_out = last_tenth(values), run.tail("eval", EVAL_ACCURACY)
    if len(values) < 5 or not now.mean() >= saturated:
        return
    means = np.convolve(values, np.ones(len(now)) / len(now), mode="valid")
    since = examples[int(np.argmax(means >= saturated))]
    held = f", {percent(held_out)} of the held-out ones" if math.isfinite(held_out) else ""
    yield Finding(
        WARNING,
        "Accuracy is saturated",
        f"{TRAIN_ACCURACY} {figure(now.mean())} over the last {len(now)} updates",
        f"Nearly every training pair is ranked right{held}, from about {count(since, 'example')} on: accuracy can "
        f"tell nothing more. {_describe_gradients_left(run)}",
    )


def _describe_gradients_left(run: Run) -> str:
    """Sentence on how much is left to learn, by gradient norms."""
    norms = run.train.points("grad_norm")[1]
    if not len(norms):
        return ""
    first, now = float(first_tenth(norms).mean()), float(last_tenth(norms).mean())
    updates = count(max(10, len(norms) // 10), "update")
    norm = f"grad_norm was {figure(first)} over the first {updates} and is {figure(now)} now"
    if now >= 0.1 * first:
        return f"But {norm}, so updates still move the policy: go by margins and samples."
    return f"And {norm}: more updates mostly widen margins. Stop earlier, or use harder pairs."


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    """Held-out pairs ranked as by chance, or too few of them to tell."""
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not len(values) or examples[-1] <= 0 or run.updates < 20:
        return
    accuracy, n, enough = float(values[-1]), n_evaluated(run), 400  # 0.60 is then four standard errors above chance
    low, high = wilson_interval(accuracy, n)
    interval = f"95 % interval {figure(low)} to {figure(high)}"
    value = f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, {interval}"
    if low > 0.5 and high < USEFUL:
        title = "Held-out pairs are ranked little better than by chance"
        less = f"by less than {figure(USEFUL - 0.5)}"
        text = f"That is above chance, but {less}: what was learned carries over, but is little."
        yield Finding(NOTE, title, value, text)
    elif high < USEFUL:
        yield Finding(
            WARNING,
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
            text += " If so, it is little."
        yield Finding(NOTE, "Held-out accuracy cannot be told from chance", value, text)


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
        place = int(np.argmax(sign * values))
        best, last = float(values[place]), float(values[-1])
        then, now = (mean_near(run, on_train, n) for n in (examples[place], examples[-1]))
        if what == "loss":
            tolerated = max(0.05 * abs(best), 0.005, evaluation_loss_error(run))
            start = find_start(run)
            learned = now < (start.loss if start is not None else run.train.first("loss/train"))
        else:
            tolerated, learned = max(0.02, accuracy_error(best, n_evaluated(run))), True
        if not (sign * (best - last) > tolerated and sign * (now - then) > 0 and learned):
            continue
        value = (
            f"{on_eval} {figure(best)} at {count(examples[place], 'example')}, {figure(last)} at "
            f"{examples[-1]:,.0f}; {on_train} {figure(then)}, then {figure(now)}"
        )
        if what == "loss" and _accuracy_rose(run, examples[place]):
            yield Finding(
                NOTE,
                "Evaluation loss rose while accuracy did not fall",
                value,
                "Accuracy did not fall meanwhile: the policy became surer of pairs that it ranks wrong, the usual "
                "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier.",
            )
            continue
        advice = "Train with a smaller lr, or"
        if examples[place] > 0:  # before the first update there is no checkpoint
            is_best = run.loss in LOSSES and LOSSES[run.loss].best[0] == on_eval
            advice = f"Take the checkpoint of that evaluation{' (BEST)' if is_best else ''}, or train"
        yield Finding(
            WARNING,
            f"Evaluation {what} turned while training {what} improved",
            value,
            "From there on the policy learned its training examples rather than what they have in common. "
            f"{advice} for fewer epochs.",
        )


def _accuracy_rose(run: Run, since: float) -> bool:
    """Return whether held-out accuracy is at least that at `since`.

    False without pairs, and before the first update."""
    examples, values = run.eval.points(EVAL_ACCURACY)
    then = values[(examples == since) & (examples > 0)]  # equal models have an accuracy of 0
    return bool(len(then)) and bool(values[-1] >= then[0])


def accuracy_gap(run: Run) -> Iterator[Finding]:
    """Training pairs ranked much better than held-out ones."""
    train, held_out = run.tail("train", TRAIN_ACCURACY), run.tail("eval", EVAL_ACCURACY)
    is_trained = run.eval.points(EVAL_ACCURACY)[0][-1:].sum() > 0
    if is_trained and train - held_out > max(0.15, accuracy_error(held_out, n_evaluated(run))):
        yield Finding(
            NOTE,
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. More epochs would widen this.",
        )


# --- chosen and rejected, lengths -------------------------------------------------------------------------------------


def margin_sides(run: Run) -> Iterator[Finding]:
    """The side that moved, and why chosen responses may have become less likely."""
    parts = margin_parts(run)
    if parts is None:
        return
    per_token = run.objective is None or run.objective.per_token  # then sums over unequal lengths would mislead
    change = None if per_token else find_change(run)
    chosen, margin = (parts.chosen, parts.margin) if change is None else (change.chosen, change.margin)
    value, sides = parts.describe_margin(), parts.describe_sides()
    if chosen >= 0 or parts.margin <= 0:
        yield Finding(NOTE, "Where the margin comes from", value, sides)
        return
    runs_off = chosen < -margin  # both fall by more than they part
    beta = "" if parts.since_start else "a larger loss.beta, "
    sees_difference = _sees_the_difference_alone(run)
    if not sees_difference:
        mechanism, advice = "", "By itself that is no fault: read the samples, and compare them with earlier ones."
    else:
        mechanism = (
            "The loss sees only the difference of the two sides: lowering rejected responses also lowers what chosen "
            "ones share with them, and nothing holds chosen ones up. "
        )
        advice = (
            "Here both fall by more than they part, which often shows in the samples: read them, and consider "
            f"{beta}a smaller lr, fewer epochs, or what holds chosen responses up: loss.sft_weight, loss=dpop, "
            "loss=apo_zero."
            if runs_off
            else "By itself this is usual, and no fault as long as the samples stay good."
        )
    yield Finding(
        WARNING if runs_off and sees_difference else NOTE,
        "Chosen responses become less likely while margins grow",
        f"{change.describe()}; {value}" if change else value,
        f"{sides} {mechanism}The probability goes to texts that are in neither. {advice}",
    )


def _sees_the_difference_alone(run: Run) -> bool:
    """Return whether nothing in the loss holds chosen responses where they are."""
    if run.objective is None:
        return False
    weights = run.setting("loss.weights", {})
    parts = [LOSSES[name] for name, weight in weights.items() if weight] or [run.objective]
    return (
        all(part.trains_on == "pairs" and part.margin_only for part in parts)
        and not number(run.setting("loss.sft_weight")) > 0
    )


def length_in_margin(run: Run) -> Iterator[Finding]:
    """Part of the margin due to length; nothing where rewards are per token."""
    parts = margin_parts(run)
    if run.objective is None or run.objective.per_token or parts is None or parts.margin <= 0:
        return
    if not math.isfinite(parts.length):
        yield Finding(
            NOTE,
            "What length gives cannot be told",
            f"margin {figure(parts.margin)}",
            "preflight.json has no lengths of responses; with ledger=true a run records them pair by pair.",
        )
        return
    share = parts.length / parts.margin
    gives = signed(parts.length) if abs(share) >= 0.001 else "nearly nothing"
    value = (
        f"{gives} of the margin {figure(parts.margin)} ({percent(share)}); mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
    )
    how = (
        "It was worked out in each pair of the ledger."
        if math.isfinite(parts.length_by_pair)
        else "It comes from means alone; with ledger=true a run records it pair by pair."
    )
    text = (
        f"This is what the margin would {'lose' if share >= 0 else 'gain'} if both sides were equally long, at the "
        f"same mean change per token. {how}"
    )
    if share < 0.5:
        yield Finding(NOTE, "What length gives", value, text)
        return
    text += " The policy may have learned to prefer a length instead of what makes a response better."
    yield Finding(WARNING, "Much of the margin is length", value, text)


def lengths_in_data(run: Run) -> Iterator[Finding]:
    """Pairs whose length alone predicts the preference."""
    longer = run.count("train.chosen_longer")
    share = max(longer, 1 - longer)
    if run.has_pairs and share >= 0.8:
        yield Finding(
            NOTE,
            "Length predicts the preference in the data",
            f"chosen is {'longer' if longer > 0.5 else 'shorter or as long'} in {percent(share)} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            f"{'the reference' if run.has_reference else 'its first ones'}.",
        )


# --- samples ----------------------------------------------------------------------------------------------------------


class SamplePairs(NamedTuple):
    """The policy's newest samples, each with another for the same prompt."""

    texts: list[tuple[str, str]]  # (policy, other)
    whose: str  # source of the others


def pair_samples(run: Run) -> SamplePairs | None:
    """Pair samples of policy and reference, or of the policy now and first.

    None without either."""
    times = [sample["examples"] for sample in run.samples]
    newest = [sample for sample in run.samples if sample["examples"] == times[-1]]
    with_reference = [(s["policy"], s["reference"]) for s in newest if s["reference"] is not None]
    if with_reference:
        return SamplePairs(with_reference, "the reference's")
    if times[:1] == times[-1:]:
        return None
    first = [sample for sample in run.samples if sample["examples"] == times[0]]
    same = [(s["policy"], f["policy"]) for s, f in zip(newest, first, strict=False) if s["prompt"] == f["prompt"]]
    return SamplePairs(same, "its first")


def empty_samples(run: Run) -> Iterator[Finding]:
    """Empty samples of the policy."""
    newest = [sample["policy"] for sample in run.samples if sample["examples"] == run.samples[-1]["examples"]]
    empty = sum(not text.strip() for text in newest)
    if not newest or empty / len(newest) <= 0.05:
        return
    pairs, value = pair_samples(run), f"{empty} of {count(len(newest), 'sample')}"
    heads = tosses = empty
    others = 0
    if pairs is not None and pairs.texts:
        others = sum(not other.strip() for _, other in pairs.texts)
        if len(newest) > empty < 2 * len(newest) * others / len(pairs.texts):
            return
        # prompts with one empty sample of two: by chance, half of those are the policy's
        alone = [not policy.strip() for policy, other in pairs.texts if bool(policy.strip()) != bool(other.strip())]
        heads, tosses = (sum(alone), len(alone)) if others < len(pairs.texts) else (empty, empty)
        value = f"{value}, {pairs.whose} {others} of {len(pairs.texts)}"
    if others == empty == len(newest):
        why = (
            "So do the others: the model says nothing after these prompts whatever it is trained on. Look at the data "
            "and the archive that it started from."
        )
    elif run.has_pairs:
        why = (
            "Probability that training takes from rejected responses often goes there: take an earlier checkpoint, or "
            "train with a smaller lr, fewer epochs, or what holds chosen responses up: loss.sft_weight, loss=dpop, "
            "loss=apo_zero."
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
    """Samples much longer or shorter than the others, empty ones aside."""
    pairs = pair_samples(run)
    if not run.has_pairs or pairs is None:
        return
    words = np.array([(len(policy.split()), len(other.split())) for policy, other in pairs.texts], dtype=float)
    words = words.reshape(-1, 2)
    words = words[(words > 0).all(1)]
    if len(words) < 8:
        return
    policy, other = words.mean(0)
    ratio = policy / other
    difference, by_chance = mean_and_bound(np.log(words[:, 0]) - np.log(words[:, 1]))
    differs = max(ratio, 1 / ratio) >= 1.5 and abs(policy - other) >= 5
    if not differs or abs(difference) <= by_chance or difference * (ratio - 1) <= 0:
        return
    low, high = (figure(math.exp(difference + sign * by_chance), 2) for sign in (-1, +1))
    value = (
        f"{figure(policy)} word{'' if policy == 1 else 's'} on average, {pairs.whose} {figure(other)} "
        f"({count(len(words), 'sample')}); after the same prompt {figure(math.exp(difference), 2)} times as many, "
        f"98 % interval {low} to {high}"
    )
    if ratio > 1:
        text = (
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length."
        )
        yield Finding(WARNING, "The policy's samples have become long", value, text)
    else:
        text = "Read them: answers may break off or give up early."
        yield Finding(WARNING, "The policy's samples have become short", value, text)


# --- the run itself ---------------------------------------------------------------------------------------------------


def learning_rate(run: Run) -> Iterator[Finding]:
    """A warmup that did not end; the factor of scaled rates is unknown."""
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
    if share >= 0.5:
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
    if last < 0.7 * first:
        yield Finding(
            NOTE,
            "Updates became slower",
            f"tokens_per_second {figure(first)} in the first quarter, {figure(last)} in the last",
            "The count is the same in every layout, so the machine was slower or shared, or memory ran short.",
        )


def data_counts(run: Run) -> Iterator[Finding]:
    """Preflight counts worth a look."""
    n, tokenized = run.count("train.examples"), run.count("train.tokenized")
    for key, of, least, one, many, text in (
        ("joined_words", n, 0.0, "response follows its", "responses follow their", "prompt without a space"),
        ("contradictory_pairs", n, 0.01, "pair contradicts", "pairs contradict", "an earlier one of the same prompt"),
        ("identical_pairs", tokenized, 0.01, "pair is", "pairs are", "identical after truncation, without a gradient"),
        ("empty_responses", n, 0.01, "example has", "examples have", "an empty response"),
        ("truncated_responses", tokenized, 0.1, "example has", "examples have", "a response that lost its end"),
    ):
        found = run.count(f"train.{key}")
        if found > 0 and of > 0 and found / of >= least:
            value = f"{key} {found:,.0f} of {of:,.0f} ({percent(found / of)})"
            counted = f"{count(found, one, many)} {text}"
            yield Finding(NOTE, "Worth a look in the data", value, f"In the training split, {counted}.")


# --- pairs drawn from the policy --------------------------------------------------------------------------------------


def online_accuracies(run: Run) -> Iterator[Finding]:
    """Meaning of accuracies when pairs are drawn."""
    both = {TRAIN_ACCURACY: run.tail("train", TRAIN_ACCURACY), EVAL_ACCURACY: run.eval.last(EVAL_ACCURACY)}
    values = [f"{name} {figure(value)}" for name, value in both.items() if math.isfinite(value)]
    if values:
        share = number(run.setting("online.mix_offline"))
        mixed = f", but for the {percent(share)} from the datasets" if share > 0 else ""
        yield Finding(
            NOTE,
            "What accuracies mean here",
            "; ".join(values),
            f"Training pairs are new answers of the policy{mixed}: their accuracy says how often its implicit rewards "
            "agree with the scorer about answers that it was not trained on, and need not rise. Evaluation pairs are "
            "those of the datasets, whose labels the scorer does not know; BEST goes by them. What is learned shows "
            "in online/score.",
        )


def unfinished_answers(run: Run) -> Iterator[Finding]:
    """Answers cut off before their end."""
    ended, most = run.tail("train", "online/eos"), run.setting("online.max_new_tokens")
    if ended < 0.9:
        has_penalty = number(run.setting("online.missing_eos_penalty")) > 0
        penalty = "" if has_penalty else "set online.missing_eos_penalty, "
        yield Finding(
            WARNING if ended < 0.5 else NOTE,
            "Most answers are cut off" if ended < 0.5 else "Some answers are cut off",
            f"online/eos {figure(ended)}: so many end within online.max_new_tokens={most}",
            "The scorer sees texts without an end, and the policy does not learn where to stop. Raise "
            f"online.max_new_tokens, {penalty}or begin with a model that was trained (loss=sft) to end its answers.",
        )


def ties(run: Run) -> Iterator[Finding]:
    """Prompts whose answers all tie."""
    share = run.tail("train", "online/ties")
    if share >= 0.5:
        cost = (
            "They count as pairs (online.ties=keep), and teach whichever answer was drawn first"
            if run.setting("online.ties") == "keep"
            else "They do not count (online.ties=skip), so the gradient of an update is of few pairs, or of none"
        )
        yield Finding(
            WARNING,
            "Most prompts give a tie",
            f"online/ties {figure(share)}; online.n_samples {run.setting('online.n_samples')}",
            f"The best and the worst answer had the same score, or were the same. {cost}. More answers "
            "(online.n_samples), a higher online.temperature or a scorer with finer scores tell more apart. Late in a "
            "run it may be that all answers score as high as they can, or that the policy has only one left.",
        )


def scores(run: Run) -> Iterator[Finding]:
    """Scores that rise, or do not."""
    values = run.train.points("online/score")[1]
    if len(values) < 20:
        return
    first, last = first_tenth(values), last_tenth(values)
    before, after, error = float(first.mean()), float(last.mean()), difference_error(first, last)
    value = f"online/score {figure(before)} over the first {count(len(first), 'update')}, {figure(after)} over the last"
    if after > before + error:
        yield Finding(NOTE, "Scores rise", value, "Answers that are drawn later have higher scores.")
        return
    yield Finding(
        WARNING,
        "Scores have not risen",
        f"{value}; two standard errors {figure(error)}",
        "The policy has not learned what the scorer rewards: lr may be too low, loss.beta too high, the run too "
        "short, or most pairs ties.",
    )


def score_length_correlation(run: Run) -> Iterator[Finding]:
    """Scores that rise with the length of answers."""
    by_update = np.stack([run.train[name] for name in ("online/score", "online/length")])
    by_update = by_update[:, np.isfinite(by_update).all(0)]
    if by_update.shape[1] < 20 or not (by_update.std(1) > 0).all():
        return
    lengths, correlation = run.train.points("online/length")[1], float(np.corrcoef(by_update)[0, 1])
    before, after = float(first_tenth(lengths).mean()), float(last_tenth(lengths).mean())
    if after >= 1.5 * before and correlation >= 0.5:
        yield Finding(
            WARNING,
            "Scores and lengths grow together",
            f"online/length {figure(before)} tokens at first, {figure(after)} now; correlation of online/score and "
            f"online/length over the updates {figure(correlation, 2)}",
            "The scorer may reward length, and the policy exploit it. Read what was drawn: if answers only say the "
            "same in more words, correct the scorer, lower online.max_new_tokens or raise loss.beta.",
        )


def divergence(run: Run) -> Iterator[Finding]:
    """A policy far from the reference; a fault if its answers became worse."""
    nats, tokens = run.tail("train", "online/kl"), run.tail("train", "online/length")
    if not nats > 10:  # e^10 is 22,000
        return
    each = f", {figure(nats / tokens)} a token" if tokens > 0 else ""
    fell = ""
    for name in ("online/score", "online/eos"):
        values = run.train.points(name)[1]
        first, last = first_tenth(values), last_tenth(values)
        if len(values) > 1 and last.mean() < first.mean() - difference_error(first, last):
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
    """Share of the time that drawing the pairs takes."""
    seconds = update_seconds(run)
    parts = {name: run.train[f"online/{name}_share"] for name in ("sampling", "scoring")}
    known = np.isfinite(seconds) & np.isfinite(parts["sampling"])
    if not known.any():
        return
    shares = {name: float(np.nansum((part * seconds)[known]) / seconds[known].sum()) for name, part in parts.items()}
    yield Finding(
        NOTE,
        "What drawing the pairs takes",
        ", ".join(f"{name} {percent(share)}" for name, share in shares.items()) + " of the time in updates",
        "The rest is what an update on given pairs takes. Fewer or shorter answers (online.n_samples, "
        "online.max_new_tokens), or a larger eval_batch_size, of which a batch of prompts is sampled at once, make "
        "sampling shorter.",
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
