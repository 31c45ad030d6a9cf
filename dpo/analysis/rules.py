"""The report's rules: what is wrong, and what to change.

A rule has a condition, which returns the numbers that it is about, or None if it does not hold. The table is at the
end; docs/metrics.md has it in words.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from dpo.analysis.measures import (
    BEYOND_CHANCE,
    EVAL_ACCURACY,
    UPDATES_AT_START,
    is_collapsed,
    mean_and_bound,
    n_effective,
    n_evaluated,
    share_interval,
)
from dpo.analysis.runs import Run, number
from dpo.analysis.verdict import SMALL_CHANGE, compare_answers, find_changes_per_token
from dpo.data.sources import HUB_IDS
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"  # a note is worth knowing, and often no fault
FEWEST_UPDATES = 20  # fewer say too little

# kinds of data: those of TRAINS_ON, and online
ONLINE = frozenset({"online"})
PAIRS = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = PAIRS | {"labels", "targets"}  # examples of datasets; those of an online run change with the policy
ANY = FIXED | ONLINE

# counts of the preflight, and the number that each is a part of
CUT = {"truncated_prompts": "tokenized", "truncated_responses": "tokenized", "identical_pairs": "tokenized"}
LEAKED = {"prompts_like_train": "prompts", "answers_in_train": "examples"}
FAULTS = dict.fromkeys(("contradictory_pairs", "contradictory_labels", "empty_responses", "joined_words"), "examples")

# --- training ---------------------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> str | None:
    # a loss or norm that was not finite is logged as null; an absent one says nothing
    skipped = [
        line["updates"]
        for line in run.train.lines
        if not all(math.isfinite(number(line[name])) for name in ("loss/train", "grad_norm") if name in line)
    ]
    if run.state.word == "aborted":
        skipped.append(run.nonfinite[-1])
    return f"{len(skipped):,} of {count(run.updates, 'update')}, the first {skipped[0]:,}" if skipped else None


def collapsed(run: Run) -> str | None:
    """What the terminal warns of while a run trains, in the last updates; here for losses without pairs too."""
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    is_finite = np.isfinite(losses)
    losses, margins = losses[is_finite], margins[is_finite]
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if not len(losses) or run.objective.needs_squares:
        return None
    at_start = slice(1 if run.objective.reference else UPDATES_AT_START)
    start, start_margin = float(losses[at_start].mean()), float(margins[at_start].mean())
    if len(run.eval) and run.eval.updates[0] == 0:
        start, start_margin = (float(run.eval[name][0]) for name in ("loss/eval", "rewards_eval/margins"))
    if not is_collapsed(start, start_margin, losses.tolist(), margins.tolist()):
        return None
    return f"loss/train {figure(run.now('loss/train'))} now, {figure(start)} at the start"


def describe_changes(changes: Mapping[str, float]) -> str:
    shown = ", ".join(f"{side} {signed(change)}" for side, change in changes.items())
    return f"change of held-out log-probabilities per token: {shown}"


def chosen_falls(run: Run) -> str | None:
    """Chosen responses that lost more than the margin grew, and a tenth of a nat a token, or half a nat."""
    changes, _ = find_changes_per_token(run)
    if len(changes) < 2 or not run.objective.margin_only:
        return None
    fall, margin = -changes["chosen"], changes["chosen"] - changes["rejected"]
    return describe_changes(changes) if fall > 0.5 or fall > max(0.1, margin) else None


def no_better_than_chance(run: Run) -> str | None:
    accuracy = run.eval.last(EVAL_ACCURACY)
    if run.updates < FEWEST_UPDATES or not math.isfinite(accuracy):
        return None
    low, high = share_interval(accuracy, n_effective(run))
    pairs, interval = count(n_evaluated(run), "pair"), f"95 % interval {figure(low)} to {figure(high)}"
    return f"{EVAL_ACCURACY} {figure(accuracy)} on {pairs}, {interval}" if high < 0.55 else None


def overfitted(run: Run) -> str | None:
    """A held-out loss that rose while the training loss fell."""
    examples, losses = run.eval.points("loss/eval")
    trained, train_losses = run.train.points("loss/train")
    if len(losses) < 2 or len(train_losses) < FEWEST_UPDATES:
        return None
    best, (first_losses, last_losses) = int(losses.argmin()), run.ends("loss/train")
    # of an example's loss, from the tenth of the run where batches differ most: later they may be learned by heart
    deviation = max(float(part.std(ddof=1)) for part in np.array_split(train_losses, 10))
    deviation *= math.sqrt(number(run.setting("batch_size", 1)))
    bound = BEYOND_CHANCE * deviation * math.sqrt(2 / n_effective(run))  # as if both evaluations had other examples
    until_best = train_losses[trained <= examples[best]][-len(last_losses) :]
    before, after = (until_best if len(until_best) else first_losses).mean(), last_losses.mean()
    if losses[-1] - losses[best] <= max(0.05 * abs(losses[best]), 0.005, bound) or after >= before:
        return None
    held_out = f"loss/eval {figure(losses[best])} at {count(examples[best], 'example')}, {figure(losses[-1])} at last"
    return f"{held_out}; loss/train {figure(before)}, then {figure(after)}"


def best_is_earlier(run: Run) -> str | None:
    name, sign = run.best_metric
    examples, values = run.eval.points(name)
    at_best = values[examples == run.best]  # two, if a resumed run evaluated again there
    if not len(at_best) or sign * (at_best[-1] - values[-1]) <= 0:
        return None
    return f"{name} {figure(at_best[-1])} at {count(run.best or 0, 'example')}, {figure(values[-1])} at last"


def without_effect(run: Run) -> str | None:
    """A learning rate that was never reached, or changed little."""
    if run.state.word != "complete":
        return None
    peak, largest = number(run.setting("lr")), float(np.max(run.train.points("lr")[1], initial=0))
    is_scaled = run.setting("lr_scaling", "none") != "none"  # by a factor that is not recorded
    if 0 < largest < 0.999 * peak and not is_scaled:
        return f"lr {largest:.3g} at most, of {peak:.3g}, in {count(run.updates, 'update')}"
    changes, _ = find_changes_per_token(run)
    has_effect = compare_answers(run)[0] > 0 or max(map(abs, changes.values()), default=math.inf) >= SMALL_CHANGE
    return None if has_effect else describe_changes(changes)


# --- samples ----------------------------------------------------------------------------------------------------------


def pair_samples(run: Run) -> list[tuple[str, str | None]]:
    """Pair the policy's newest samples with the reference's or, without one, with its first to the same prompts."""
    newest, first = run.samples_at(-1), {}
    if newest != run.samples_at(0):
        first = {sample["prompt"]: sample["policy"] for sample in run.samples_at(0)}
    return [
        (sample["policy"], first.get(sample["prompt"]) if sample["reference"] is None else sample["reference"])
        for sample in newest
    ]


def is_broken(text: str) -> bool:
    """Return whether a text is empty or repeats itself.

    English compresses to half its size, a repeated sentence to a fifth.
    """
    content = text.strip().encode("utf-8", "replace")
    return not content or (len(content) >= 200 and len(zlib.compress(content)) < 0.25 * len(content))


def broken_samples(run: Run) -> str | None:
    """All samples, or more than 5 % and more than of those that they are compared with."""
    broken = [(is_broken(policy), other is not None and is_broken(other)) for policy, other in pair_samples(run)]
    n_policy, n_other = (sum(side) for side in zip(*broken, strict=True)) if broken else (0, 0)
    n_alone = broken.count((True, False))
    n_differ = n_alone + broken.count((False, True))
    is_more = n_differ > 0 and share_interval(n_alone / n_differ, n_differ)[0] > 0.5
    if n_policy <= 0.05 * len(broken) or not (is_more or n_policy == len(broken)):
        return None
    return f"{n_policy} of {count(len(broken), 'sample')}; of the reference or at first {n_other}"


def sample_lengths(run: Run) -> str | None:
    """Samples much longer or shorter than others to the same prompts."""
    n_words = [(len(policy.split()), len((other or "").split())) for policy, other in pair_samples(run)]
    n_words = [pair for pair in n_words if min(pair) > 0]
    if len(n_words) < 8:
        return None
    policy, other = np.array(n_words, dtype=float).T  # (pairs,) each
    before, after = other.mean(), policy.mean()
    change, bound = mean_and_bound(np.log(policy / other))  # one very long sample moves the means, but not this
    if max(after / before, before / after) < 1.5 or abs(after - before) < 5 or abs(change) <= bound:
        return None
    return f"{figure(after)} words on average, of the reference or at first {figure(before)}"


# --- data -------------------------------------------------------------------------------------------------------------


def list_counts(run: Run, split: str, totals: Mapping[str, str]) -> str | None:
    """List the preflight's counts that reach 1 % of their totals."""
    counts = [(name, run.count(f"{split}.{name}"), run.count(f"{split}.{total}")) for name, total in totals.items()]
    shown = [
        f"{name} {n:,.0f} of {total:,.0f} ({percent(n / total)})"
        for name, n, total in counts
        if n and n >= 0.01 * total
    ]
    return "; ".join(shown) or None


def leaks(run: Run) -> str | None:
    # whoever uses published splits, or the demo, can do nothing about what they share
    is_published = {*map(str, run.setting("datasets", []))} <= {*HUB_IDS, "demo"}
    return None if is_published else list_counts(run, "test", LEAKED)


def length_in_data(run: Run) -> str | None:
    share = run.count("train.chosen_longer")
    return f"chosen is longer in {percent(share)} of the training pairs" if abs(share - 0.5) >= 0.3 else None


def uneven_weights(run: Run) -> str | None:
    """Few examples, or labels of one kind, that outweigh the others."""
    effective, examples = run.count("train.effective_examples"), run.count("train.examples")
    if effective < examples / 2:
        return f"effective_examples {figure(effective)} of {examples:,.0f}"
    weights = []
    for side in ("desirable", "undesirable"):
        weights.append(number(run.setting(f"loss.{side}_weight")) * run.count(f"train.{side}"))
    if math.isnan(effective) and min(weights) > 0 and not 0.99 <= weights[0] / weights[1] <= 1.01 * 4 / 3:
        return f"desirable responses weigh {figure(weights[0] / weights[1])} times as much as undesirable ones"
    return None


# --- answers drawn online ---------------------------------------------------------------------------------------------


def answers_no_better(run: Run) -> str | None:
    """Answers that lose to the reference's, or whose scores do not rise by a tenth of best minus worst."""
    rate, error = (run.eval.last(f"online_eval/win_rate{suffix}") for suffix in ("", "_se"))
    n = n_evaluated(run, "prompts")
    if n >= 8 and rate + BEYOND_CHANCE * error < 0.5:  # the error of a few prompts is too uncertain
        return f"online_eval/win_rate {figure(rate)}, standard error {figure(error)}, on {count(n, 'held-out prompt')}"
    if len(run.train.points("online/score")[1]) < FEWEST_UPDATES:
        return None
    (before, bound_before), (after, bound_after) = map(mean_and_bound, run.ends("online/score"))
    change, bound = after - before, math.hypot(bound_before, bound_after)
    gap = run.now("online/score_best") - run.now("online/score_worst")
    if change >= -bound and change + bound >= 0.1 * gap:
        return None
    return f"online/score {figure(before)} at first, {figure(after)} now, give or take {figure(bound)}"


def interval_now(run: Run, name: str) -> tuple[float, float]:
    """The interval of a share of the last updates' answers; (nan, nan) without any.

    Prompts with a pair from the datasets do not count. The answers to one prompt count as one: they may be alike.
    """
    share_drawn = 1 - number(run.setting("online.mix_offline", 0))
    n = len(run.ends(name)[1]) * number(run.setting("batch_size", 1)) * share_drawn
    return share_interval(run.now(name), n) if n > 0 else (math.nan, math.nan)


def ties(run: Run) -> str | None:
    return f"online/ties {figure(run.now('online/ties'))}" if interval_now(run, "online/ties")[0] > 0.5 else None


def unfinished_answers(run: Run) -> str | None:
    return f"online/eos {figure(run.now('online/eos'))}" if interval_now(run, "online/eos")[1] < 0.9 else None


def far_from_reference(run: Run) -> str | None:
    nats = run.now("online/kl")
    return f"online/kl {figure(nats)} nats" if nats > 10 else None  # answers e^10 times as likely as before


# --- the table --------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A rule, for runs on these kinds of data."""

    level: str  # WARNING or NOTE
    title: str
    condition: Callable[[Run], str | None]  # returns the numbers that it is about
    advice: str
    kinds: frozenset[str] = ANY


RULES = (  # in the order of the page
    Rule(WARNING, "Loss or gradient was not a number", skipped_updates,
         "Look at the examples in nonfinite-UPDATE; if they are sound, lower lr, or replace float16 by bfloat16."),
    Rule(WARNING, "The run has collapsed", collapsed,
         "It seldom recovers: start again with a tenth of lr, more warmup_steps or a larger batch_size."),
    Rule(WARNING, "Chosen responses become much less likely", chosen_falls,
         "The loss sees only the difference, so nothing holds them up. Read the samples; try a larger loss.beta, a "
         "smaller lr, fewer epochs, or loss.sft_weight, loss=dpop or loss=apo_zero.", PAIRS),
    Rule(WARNING, "Held-out pairs are ranked no better than by chance", no_better_than_chance,
         "If training pairs are ranked right, more data is needed; if not, a larger lr or more updates, unless the "
         "preferences are noise.", PAIRS),
    Rule(WARNING, "The held-out loss rises while the training loss falls", overfitted,
         "Take the checkpoint of the lowest value, or train for fewer epochs; if ranking is all, go by accuracy.",
         FIXED),
    Rule(WARNING, "The learning rate had little effect", without_effect,
         "Raise lr, shorten warmup_steps, or train for more updates."),
    Rule(WARNING, "Samples are empty or repeat themselves", broken_samples,
         "Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta. If samples were "
         "so before training, look at the prompts and at the model that the run began with."),
    Rule(WARNING, "Samples have changed in length", sample_lengths,
         "If they say the same in more words, or break off, balance the lengths of the pairs, raise loss.beta, or try "
         "loss=simpo or loss=dpo_norm.", PAIRS | ONLINE),
    Rule(WARNING, "Training examples are cut", partial(list_counts, split="train", totals=CUT),
         "The policy does not learn how they end: raise max_length and max_prompt_length, or choose truncation."),
    Rule(WARNING, "Held-out prompts or answers are in the training data", leaks,
         "Held-out numbers are too good: put what belongs together into one split, or give a test file of its own."),
    Rule(WARNING, "The answers have not become better", answers_no_better,
         "If scores fell, use a smaller lr or a larger loss.beta; if they stay, a larger lr, a smaller loss.beta or "
         "more updates, unless most pairs are ties.", ONLINE),
    Rule(WARNING, "Most prompts give a tie", ties,
         "See whether the scorer is constant; raise online.temperature and online.n_samples.", ONLINE),
    Rule(NOTE, "An earlier checkpoint is better", best_is_earlier,
         "Use the checkpoint that the link BEST names; on few held-out examples the best of many is in part luck."),
    Rule(NOTE, "Length predicts the preference in the data", length_in_data,
         "A policy can rank such pairs right by learning a length: compare the lengths of its samples.", PAIRS),
    Rule(NOTE, "Some examples contradict each other or are faulty", partial(list_counts, split="train", totals=FAULTS),
         "data_problems.jsonl lists them: correct or remove them. Joined words lack a space after the prompt."),
    Rule(NOTE, "Few examples or one label have most of the weight", uneven_weights,
         "Even out the weights, or loss.desirable_weight and loss.undesirable_weight: KTO's paper advises 1 to 4/3.",
         FIXED),
    Rule(NOTE, "Drawn answers are cut off", unfinished_answers,
         "The policy does not learn where to stop: raise online.max_new_tokens, set online.missing_eos_penalty, or "
         "begin with SFT.", ONLINE),
    Rule(NOTE, "The policy has gone far from the reference", far_from_reference,
         "It may exploit errors of the scorer: read what was drawn; try a larger loss.beta or a smaller lr.", ONLINE),
)  # fmt: skip


def find_all(run: Run) -> list[tuple[Rule, str]]:
    """Find the rules that hold for a run, each with its numbers, warnings first."""
    kind = "online" if run.online else run.objective.trains_on
    values = ((rule, rule.condition(run)) for rule in RULES if kind in rule.kinds)
    return [(rule, value) for rule, value in values if value is not None]
