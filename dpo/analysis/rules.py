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
    mean_error,
    n_effective,
    n_evaluated,
    share_interval,
)
from dpo.analysis.runs import Run, number
from dpo.analysis.verdict import SMALL_CHANGE, compare_answers, find_changes_per_token
from dpo.data.asking import DATASETS_IN_HH_FORMAT
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"  # a note is worth knowing, and often no fault
FEWEST_UPDATES = 20  # fewer say too little

# kinds of data (`Run.kind`)
ONLINE = frozenset({"online"})
PAIRS = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = PAIRS | {"labels", "targets"}  # examples of datasets; those of an online run change with the policy
ANY = FIXED | ONLINE

# --- training ---------------------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> str | None:
    skipped = []
    for update, line in zip(run.train.updates, run.train.lines, strict=True):
        # a loss or norm that was not finite is logged as null; an absent one says nothing
        if not all(math.isfinite(number(line[name])) for name in ("loss/train", "grad_norm") if name in line):
            skipped.append(update)
    if run.state.word == "aborted":
        skipped.append(run.nonfinite[-1])
    shown = ", ".join(f"{update:,.0f}" for update in skipped[:6]) + (", ..." if len(skipped) > 6 else "")
    return f"{len(skipped):,} of {count(run.updates, 'update')}: {shown}" if skipped else None


def collapsed(run: Run) -> str | None:
    """What the terminal warns of while a run trains, in the last updates; here for losses without pairs too."""
    losses, margins = (run.train[name] for name in ("loss/train", "rewards_train/margins"))
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if not len(losses) or run.setting("loss.wpo"):
        return None
    at_start = slice(1 if run.has_reference else UPDATES_AT_START)
    start, start_margin = float(losses[at_start].mean()), float(margins[at_start].mean())
    if len(run.eval) and run.eval.updates[0] == 0:
        start, start_margin = (float(run.eval[name][0]) for name in ("loss/eval", "rewards_eval/margins"))
    finite = np.isfinite(losses)
    if not is_collapsed(start, start_margin, losses[finite].tolist(), margins[finite].tolist()):
        return None
    return f"loss/train {figure(run.tail('train', 'loss/train'))} now, {figure(start)} at the start"


def chosen_falls(run: Run) -> str | None:
    """Chosen responses that lost more than the margin grew, and a tenth of a nat a token, or half a nat."""
    changes, _ = find_changes_per_token(run)
    if len(changes) < 2 or run.objective is None or not run.objective.margin_only:
        return None
    fall, margin = -changes["chosen"], changes["chosen"] - changes["rejected"]
    return describe_changes(changes) if fall > 0.5 or fall > max(0.1, margin) else None


def describe_changes(changes: Mapping[str, float]) -> str:
    shown = ", ".join(f"{side} {signed(change)}" for side, change in changes.items())
    return f"change of held-out log-probabilities per token: {shown}"


def no_better_than_chance(run: Run) -> str | None:
    accuracy = run.eval.last(EVAL_ACCURACY)
    if run.updates < FEWEST_UPDATES or not math.isfinite(accuracy):
        return None
    low, high = share_interval(accuracy, n_effective(run))
    interval = f"95 % interval {figure(low)} to {figure(high)}"
    shown = f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n_evaluated(run), 'pair')}, {interval}"
    return shown if high < 0.55 else None  # nothing useful was learned


def overfitted(run: Run) -> str | None:
    """A held-out loss that rose while the training loss fell."""
    examples, losses = run.eval.points("loss/eval")
    trained, train_losses = run.train.points("loss/train")
    if len(losses) < 2 or len(train_losses) < FEWEST_UPDATES:
        return None
    best, tenth = int(losses.argmin()), max(10, len(train_losses) // 10)
    # of an example's loss, from the tenth of the run where batches differ most: later they may be learned by heart
    deviation = max(float(part.std(ddof=1)) for part in np.array_split(train_losses, 10))
    deviation *= math.sqrt(max(1.0, number(run.setting("batch_size", 1))))
    error = deviation * math.sqrt(2 / n_effective(run))  # as if both evaluations had other examples
    until_best = train_losses[trained <= examples[best]]
    before = float((until_best[-tenth:] if len(until_best) else train_losses[:tenth]).mean())
    after = float(train_losses[-tenth:].mean())
    rise = losses[-1] - losses[best]
    if rise <= max(0.05 * abs(losses[best]), 0.005, BEYOND_CHANCE * error) or after >= before:
        return None
    return (
        f"loss/eval {figure(losses[best])} at {count(examples[best], 'example')}, {figure(losses[-1])} at the last; "
        f"loss/train {figure(before)}, then {figure(after)}"
    )


def best_is_earlier(run: Run) -> str | None:
    if run.best is None or run.best_metric is None:
        return None
    name, sign = run.best_metric
    examples, values = run.eval.points(name)
    at_best = values[examples == run.best]  # two, if a resumed run evaluated again there
    if len(at_best) and sign * (at_best[-1] - values[-1]) > 0:
        return f"{name} {figure(at_best[-1])} at {count(run.best, 'example')}, {figure(values[-1])} at the last"
    return None


def without_effect(run: Run) -> str | None:
    """A learning rate that was never reached, or changed little."""
    if run.state.word != "complete":
        return None
    peak, largest = number(run.setting("lr")), float(np.max(run.train.points("lr")[1], initial=0))
    is_scaled = run.setting("lr_scaling", "none") != "none"  # by a factor that is not recorded
    if 0 < largest < 0.999 * peak and not is_scaled:
        n_updates = count(run.updates, "update")
        return f"lr {largest:.3g} at most, of {peak:.3g}; warmup_steps {figure(run.warmup_steps)}, {n_updates}"
    changes, _ = find_changes_per_token(run)
    n_differ, _ = compare_answers(run)
    has_effect = n_differ > 0 or max(map(abs, changes.values()), default=math.inf) >= SMALL_CHANGE
    return None if has_effect else describe_changes(changes)


def clipped(run: Run) -> str | None:
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    if len(norms) < FEWEST_UPDATES or (norms > limit).mean() < 0.9:
        return None
    share, median = percent((norms > limit).mean()), figure(float(np.median(norms)))
    return f"grad_norm above {figure(limit)} in {share} of the updates; its median {median}"


# --- samples ----------------------------------------------------------------------------------------------------------


def pair_samples(run: Run) -> tuple[list[tuple[str, str]], str]:
    """Pair the policy's newest samples with others of the same prompts.

    The others are the reference's or, without a reference, the policy's earliest; the text says whose.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    pairs = [(new["policy"], new["reference"]) for new in newest if new["reference"] is not None]
    if pairs or earliest == newest:
        return pairs, "the reference's"
    both = zip(newest, earliest, strict=False)
    return [(new["policy"], old["policy"]) for new, old in both if new["prompt"] == old["prompt"]], "its first"


def is_broken(text: str) -> bool:
    """Return whether a text is empty or repeats itself.

    English compresses to half its size, a repeated sentence to a fifth.
    """
    content = text.strip().encode("utf-8", "replace")
    return not content or (len(content) >= 200 and len(zlib.compress(content)) < 0.25 * len(content))


def broken_samples(run: Run) -> str | None:
    """More broken samples than of the reference, by a sign test."""
    broken = [is_broken(sample["policy"]) for sample in run.samples_at(-1)]
    if sum(broken) <= 0.05 * len(broken):
        return None
    pairs, whose = pair_samples(run)
    both = [(is_broken(policy), is_broken(other)) for policy, other in pairs]
    alone, others_alone = both.count((True, False)) if pairs else sum(broken), both.count((False, True))
    n = alone + others_alone
    # the chance of as many heads or more in n tosses of a coin
    if not all(broken) and sum(math.comb(n, k) for k in range(alone, n + 1)) / 2**n > 0.05:
        return None
    compared = f", {whose} {sum(other for _, other in both)} of {len(both)}" if both else ""
    return f"{sum(broken)} of {count(len(broken), 'sample')}{compared}"


def sample_lengths(run: Run) -> str | None:
    """Samples much longer or shorter than others of the same prompts."""
    pairs, whose = pair_samples(run)
    n_words = [(len(policy.split()), len(other.split())) for policy, other in pairs]
    n_words = [pair for pair in n_words if min(pair) > 0]
    if len(n_words) < 8:
        return None
    policy, other = np.array(n_words, dtype=float).T  # (pairs,) each
    ratio = policy.mean() / other.mean()
    # one very long sample moves the means, so lengths must also differ prompt by prompt
    log_ratios = np.log(policy / other) * (1 if ratio > 1 else -1)
    bound = BEYOND_CHANCE * log_ratios.std(ddof=1) / math.sqrt(len(log_ratios))
    if max(ratio, 1 / ratio) < 1.5 or abs(policy.mean() - other.mean()) < 5 or log_ratios.mean() <= bound:
        return None
    return f"{figure(policy.mean())} words on average, {whose} {figure(other.mean())}, in {len(n_words)} samples"


# --- data -------------------------------------------------------------------------------------------------------------

CUT = {"truncated_prompts": "tokenized", "truncated_responses": "tokenized", "identical_pairs": "tokenized"}
LEAKED = {"prompts_like_train": "prompts", "answers_in_train": "examples"}
FAULTS = dict.fromkeys(("contradictory_pairs", "contradictory_labels", "empty_responses", "joined_words"), "examples")


def list_counts(run: Run, split: str, totals: Mapping[str, str]) -> str | None:
    """List the preflight's counts that reach 1 % of their totals."""
    shown = []
    for name, total_name in totals.items():
        n, total = run.count(f"{split}.{name}"), run.count(f"{split}.{total_name}")
        if n > 0 and total > 0 and n >= 0.01 * total:
            shown.append(f"{name} {n:,.0f} of {total:,.0f} ({percent(n / total)})")
    return "; ".join(shown) or None


def leaks(run: Run) -> str | None:
    # whoever uses published splits, or the demo, can do nothing about what they share
    datasets = run.setting("datasets")
    is_published = isinstance(datasets, list) and DATASETS_IN_HH_FORMAT.issuperset(map(str, datasets))
    return None if is_published else list_counts(run, "test", LEAKED)


def length_in_data(run: Run) -> str | None:
    share = run.count("train.chosen_longer")
    if not max(share, 1 - share) >= 0.8:  # also for NaN
        return None
    compared = "longer" if share > 0.5 else "shorter or as long"
    return f"chosen is {compared} in {percent(max(share, 1 - share))} of the training pairs"


def uneven_weights(run: Run) -> str | None:
    """Few examples, or labels of one kind, that outweigh the others."""
    effective, examples = run.count("train.effective_examples"), run.count("train.examples")
    if effective < examples / 2:
        return f"effective_examples {figure(effective)} of {examples:,.0f}"
    sides = ("desirable", "undesirable")
    counts = [run.count(f"train.{side}_weights") for side in sides]
    if not all(n > 0 for n in counts):  # data without weights
        counts = [run.count(f"train.{side}") for side in sides]
    desirable, undesirable = (number(run.setting(f"loss.{s}_weight")) * n for s, n in zip(sides, counts, strict=True))
    if min(desirable, undesirable) > 0 and not 0.99 <= desirable / undesirable <= 1.01 * 4 / 3:
        return f"desirable responses weigh {figure(desirable / undesirable)} times as much as undesirable ones"
    return None


# --- answers drawn online ---------------------------------------------------------------------------------------------


def answers_no_better(run: Run) -> str | None:
    """Answers that lose to the reference's, or whose scores do not rise by a tenth of best minus worst."""
    rate, error = (run.eval.last(f"online_eval/win_rate{suffix}") for suffix in ("", "_se"))
    n = n_evaluated(run, "prompts")
    if n >= 8 and rate + BEYOND_CHANCE * error < 0.5:  # the error of a few prompts is too uncertain
        return f"online_eval/win_rate {figure(rate)}, standard error {figure(error)}, on {count(n, 'held-out prompt')}"
    first, last = run.ends("online/score")
    if len(run.train.points("online/score")[1]) < FEWEST_UPDATES:  # so few that `first` and `last` overlap
        return None
    change, bound = last.mean() - first.mean(), BEYOND_CHANCE * math.hypot(mean_error(first), mean_error(last))
    gap = run.tail("train", "online/score_best") - run.tail("train", "online/score_worst")
    if change >= -bound and change + bound >= 0.1 * gap:
        return None
    between = f"{signed(change - bound)} to {signed(change + bound)}"
    return f"online/score {figure(first.mean())} at first, {figure(last.mean())} now, a change of {between}"


def interval_now(run: Run, name: str) -> tuple[float, float]:
    """The interval of a share of the last updates' answers; (nan, nan) without any.

    Prompts with a pair from the datasets do not count. The answers to one prompt count as one: they may be alike.
    """
    share_drawn = 1 - number(run.setting("online.mix_offline", 0))
    n = len(run.ends(name)[1]) * number(run.setting("batch_size", 1)) * share_drawn
    return share_interval(run.tail("train", name), n) if n > 0 else (math.nan, math.nan)


def ties(run: Run) -> str | None:
    return (
        f"online/ties {figure(run.tail('train', 'online/ties'))}" if interval_now(run, "online/ties")[0] > 0.5 else None
    )


def scores_with_length(run: Run) -> str | None:
    scores, lengths = run.train["online/score"], run.train["online/length"]
    has_both = np.isfinite(scores) & np.isfinite(lengths)
    scores, lengths = scores[has_both], lengths[has_both]
    if len(scores) < FEWEST_UPDATES or scores.std() == 0 or lengths.std() == 0:
        return None
    correlation = float(np.corrcoef(scores, lengths)[0, 1])
    before, after = (float(tenth.mean()) for tenth in run.ends("online/length"))
    if after < 1.5 * before or correlation < 0.5:
        return None
    tokens = f"online/length {figure(before)} tokens at first, {figure(after)} now"
    return f"{tokens}; correlation with online/score {figure(correlation, 2)}"


def unfinished_answers(run: Run) -> str | None:
    if not interval_now(run, "online/eos")[1] < 0.9:
        return None
    share = figure(run.tail("train", "online/eos"))
    return f"online/eos {share} end within online.max_new_tokens={run.setting('online.max_new_tokens')}"


def far_from_reference(run: Run) -> str | None:
    nats = run.tail("train", "online/kl")
    return f"online/kl {figure(nats)} nats" if nats > 10 else None  # answers e^10 times as likely as before


# --- the table --------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A rule that holds for a run."""

    level: str  # WARNING or NOTE
    title: str
    value: str  # the numbers it is about
    text: str  # what to do


class Rule(NamedTuple):
    """A rule, for runs on these kinds of data."""

    level: str
    title: str
    condition: Callable[[Run], str | None]  # the numbers of a finding
    text: str
    kinds: frozenset[str] = ANY


RULES = (  # in the order of the page
    Rule(
        WARNING, "Loss or gradient was not a number", skipped_updates,
        "Look at the examples in nonfinite-UPDATE; if they are sound, lower lr, or use bfloat16 in place of float16.",
    ),
    Rule(
        WARNING, "The run has collapsed", collapsed,
        "It seldom recovers: start again with a tenth of lr, more warmup_steps or a larger batch_size.",
    ),
    Rule(
        WARNING, "Chosen responses become much less likely", chosen_falls,
        "The loss sees only the difference, so nothing holds them up. Read the samples; try a larger loss.beta, a "
        "smaller lr, fewer epochs, or loss.sft_weight, loss=dpop or loss=apo_zero.", PAIRS,
    ),
    Rule(
        WARNING, "Held-out pairs are ranked no better than by chance", no_better_than_chance,
        "If training pairs are ranked right, more data is needed; if not, a larger lr or more updates, unless the "
        "preferences are noise.", PAIRS,
    ),
    Rule(
        WARNING, "The held-out loss rises while the training loss falls", overfitted,
        "Take the checkpoint of the lowest value, or train for fewer epochs; if ranking is all, go by accuracy.",
        FIXED,
    ),
    Rule(
        WARNING, "The learning rate had little effect", without_effect,
        "Raise lr, shorten warmup_steps, or train for more updates.",
    ),
    Rule(
        WARNING, "Samples are empty or repeat themselves", broken_samples,
        "Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta. If samples were "
        "so before training, look at the prompts and at the model that the run began with.",
    ),
    Rule(
        WARNING, "Samples have changed in length", sample_lengths,
        "If they say the same in more words, or break off, balance the lengths of the pairs, raise loss.beta, or try "
        "loss=simpo or loss=dpo_norm.", PAIRS | ONLINE,
    ),
    Rule(
        WARNING, "Training examples are cut", partial(list_counts, split="train", totals=CUT),
        "The policy does not learn how they end: raise max_length and max_prompt_length, or choose truncation.",
    ),
    Rule(
        WARNING, "Held-out prompts or answers are in the training data", leaks,
        "Held-out numbers are too good: put what belongs together into one split, or give a test file of its own.",
    ),
    Rule(
        WARNING, "The answers have not become better", answers_no_better,
        "If scores fell, use a smaller lr or a larger loss.beta; if they stay, a larger lr, a smaller loss.beta or "
        "more updates, unless most pairs are ties.", ONLINE,
    ),
    Rule(
        WARNING, "Most prompts give a tie", ties,
        "See whether the scorer is constant; raise online.temperature and online.n_samples.", ONLINE,
    ),
    Rule(
        WARNING, "Scores and lengths grow together", scores_with_length,
        "If answers say the same in more words, correct the scorer, lower online.max_new_tokens or raise loss.beta.",
        ONLINE,
    ),
    Rule(
        NOTE, "An earlier checkpoint is better", best_is_earlier,
        "Use the checkpoint that the link BEST names; on few held-out examples the best of many is in part luck.",
    ),
    Rule(
        NOTE, "Nearly all gradients are clipped", clipped,
        "If that is not meant, raise max_grad_norm; with SGD, which then takes larger steps, lower lr too.",
    ),
    Rule(
        NOTE, "Length predicts the preference in the data", length_in_data,
        "A policy can rank such pairs right by learning a length: compare the lengths of its samples.", PAIRS,
    ),
    Rule(
        NOTE, "Some examples contradict each other or are faulty", partial(list_counts, split="train", totals=FAULTS),
        "data_problems.jsonl lists them: correct them, or leave them out. Joined words lack a space after the prompt.",
    ),
    Rule(
        NOTE, "Few examples or one label have most of the weight", uneven_weights,
        "Even out the weights, or loss.desirable_weight and loss.undesirable_weight: KTO's paper advises 1 to 4/3.",
        FIXED,
    ),
    Rule(
        NOTE, "Drawn answers are cut off", unfinished_answers,
        "The policy does not learn where to stop: raise online.max_new_tokens, set online.missing_eos_penalty, or "
        "begin with SFT.", ONLINE,
    ),
    Rule(
        NOTE, "The policy has gone far from the reference", far_from_reference,
        "It may exploit errors of the scorer: read what was drawn; try a larger loss.beta or a smaller lr.",
        ONLINE,
    ),
)  # fmt: skip


def find_all(run: Run) -> list[Finding]:
    """Find everything that the rules tell about a run, warnings first."""
    values = ((rule, rule.condition(run)) for rule in RULES if run.kind in rule.kinds)
    return [Finding(rule.level, rule.title, value, rule.text) for rule, value in values if value is not None]
