"""The report's rules: what is wrong, and what to change.

A rule has a condition, which returns the numbers that it is about, or None if it does not hold. The table is at the
end; docs/metrics.md has it in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from dpo.analysis.measures import (
    BEYOND_CHANCE,
    EVAL_ACCURACY,
    binomial_tail,
    evaluation_loss_error,
    find_start_loss,
    is_broken,
    mean_error,
    mean_near,
    multiply_start_loss,
    n_answered,
    n_effective,
    n_evaluated,
    pair_samples,
    wilson_interval,
)
from dpo.analysis.runs import Run, number
from dpo.analysis.verdict import SMALL_CHANGE, compare_answers, find_changes_per_token
from dpo.data.asking import DATASETS_IN_HH_FORMAT
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"  # a note is worth knowing, and often no fault
USEFUL = 0.55  # below this accuracy nothing useful was learned
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
    if not skipped:
        return None
    shown = ", ".join(f"{update:,.0f}" for update in skipped[:6]) + (", ..." if len(skipped) > 6 else "")
    return f"{len(skipped):,} of {count(run.updates, 'update')}: {shown}"


def diverged(run: Run) -> str | None:
    """A training loss that is now twice that of the start."""
    start, losses = find_start_loss(run), run.ends("loss/train")[1]
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if len(losses) < 10 or run.setting("loss.wpo"):
        return None
    if losses.mean() - BEYOND_CHANCE * mean_error(losses) > multiply_start_loss(start, 2):
        return f"loss/train {figure(losses.mean())} over the last {len(losses)} updates, {figure(start)} at the start"
    return None


def chosen_falls(run: Run) -> str | None:
    """Chosen responses that lost more than the margin grew, or much.

    That is a tenth of a nat a token, or half a nat.
    """
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
    low, high = wilson_interval(accuracy, n_effective(run))
    if high >= USEFUL:
        return None
    interval = f"95 % interval {figure(low)} to {figure(high)}"
    return f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n_evaluated(run), 'pair')}, {interval}"


def overfitted(run: Run) -> str | None:
    """A held-out loss that rose while the training loss fell."""
    examples, losses = run.eval.points("loss/eval")
    if len(losses) < 2 or run.updates < FEWEST_UPDATES:
        return None
    best = int(losses.argmin())
    # as if both evaluations had other examples
    tolerated = max(0.05 * abs(losses[best]), 0.005, BEYOND_CHANCE * math.sqrt(2) * evaluation_loss_error(run))
    train_before, train_after = (mean_near(run, "loss/train", at) for at in (examples[best], examples[-1]))
    if losses[-1] - losses[best] > tolerated and train_after < train_before:
        return (
            f"loss/eval {figure(losses[best])} at {count(examples[best], 'example')}, {figure(losses[-1])} at the "
            f"last; loss/train {figure(train_before)}, then {figure(train_after)}"
        )
    return None


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
        return (
            f"lr {largest:.3g} at most, of {peak:.3g}; warmup_steps {figure(run.warmup_steps)}, "
            f"{count(run.updates, 'update')}"
        )
    changes, _ = find_changes_per_token(run)
    n_differ, _ = compare_answers(run)
    if n_differ == 0 and changes and max(map(abs, changes.values())) < SMALL_CHANGE:
        return describe_changes(changes)
    return None


def clipped(run: Run) -> str | None:
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    if len(norms) < FEWEST_UPDATES or (norms > limit).mean() < 0.9:
        return None
    share, median = percent((norms > limit).mean()), figure(float(np.median(norms)))
    return f"grad_norm above {figure(limit)} in {share} of the updates; its median {median}"


# --- samples ----------------------------------------------------------------------------------------------------------


def broken_samples(run: Run) -> str | None:
    """More broken samples than of the reference, by a sign test."""
    broken = [is_broken(sample["policy"]) for sample in run.samples_at(-1)]
    if sum(broken) <= 0.05 * len(broken):
        return None
    pairs, whose = pair_samples(run)
    both = [(is_broken(policy), is_broken(other)) for policy, other in pairs]
    alone, others_alone = both.count((True, False)), both.count((False, True))
    if not pairs:
        alone = sum(broken)
    if not all(broken) and binomial_tail(alone, alone + others_alone) > 0.05:
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
    """Held-out data that is in the training data, of one's own."""
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
    """Answers that lose to the reference's, or whose scores do not rise.

    A useful rise is a tenth of the distance between the best and the worst answer.
    """
    rate, error = (run.eval.last(f"online_eval/win_rate{suffix}") for suffix in ("", "_se"))
    n = n_evaluated(run, "prompts")
    if n >= 8 and rate + BEYOND_CHANCE * error < 0.5:  # the error of a few prompts is too uncertain
        return f"online_eval/win_rate {figure(rate)}, standard error {figure(error)}, on {count(n, 'held-out prompt')}"
    first, last = run.ends("online/score")
    if len(run.train.points("online/score")[1]) < FEWEST_UPDATES:  # so few that `first` and `last` overlap
        return None
    change, bound = last.mean() - first.mean(), BEYOND_CHANCE * math.hypot(mean_error(first), mean_error(last))
    gap = run.tail("train", "online/score_best") - run.tail("train", "online/score_worst")
    if change < -bound or change + bound < 0.1 * gap:
        between = f"{signed(change - bound)} to {signed(change + bound)}"
        return f"online/score {figure(first.mean())} at first, {figure(last.mean())} now, a change of {between}"
    return None


def ties(run: Run) -> str | None:
    share, n = run.tail("train", "online/ties"), n_answered(run, "online/ties")
    return f"online/ties {figure(share)}" if n > 0 and wilson_interval(share, n)[0] > 0.5 else None


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
    share, n = run.tail("train", "online/eos"), n_answered(run, "online/eos")
    if n > 0 and wilson_interval(share, n)[1] < 0.9:
        return f"online/eos {figure(share)} end within online.max_new_tokens={run.setting('online.max_new_tokens')}"
    return None


def far_from_reference(run: Run) -> str | None:
    nats = run.tail("train", "online/kl")
    return f"online/kl {figure(nats)} nats" if nats > 10 else None  # answers e^10 times as likely as before


# --- the table --------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A rule that holds for a run."""

    level: str  # WARNING or NOTE
    title: str
    value: str  # the numbers it is about
    text: str  # what they mean, and what to do


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
        "These updates changed no weights. Look at their examples in nonfinite-UPDATE; if they are sound, lower lr, or "
        "use bfloat16 in place of float16.",
    ),
    Rule(
        WARNING, "The run has diverged", diverged,
        "By its own loss the policy is worse than before training, and seldom recovers: start again with a tenth of "
        "lr, more warmup_steps or a larger batch_size.",
    ),
    Rule(
        WARNING, "Chosen responses become much less likely", chosen_falls,
        "The loss sees only the difference of both sides, and nothing holds chosen responses up: their probability "
        "goes to other texts. Read the samples, and try a larger loss.beta, a smaller lr, fewer epochs, or "
        "loss.sft_weight, loss=dpop or loss=apo_zero.",
        PAIRS,
    ),
    Rule(
        WARNING, "Held-out pairs are ranked no better than by chance", no_better_than_chance,
        "No useful preference was learned that carries over. If training pairs are ranked right, more data is needed; "
        "if not, a larger lr or more updates, unless the preferences are noise.",
        PAIRS,
    ),
    Rule(
        WARNING, "The held-out loss rises while the training loss falls", overfitted,
        "From its lowest value on, the policy learned its training examples rather than what they have in common. Take "
        "the checkpoint of that evaluation, or train for fewer epochs; if only the ranking matters, go by accuracy.",
        FIXED,
    ),
    Rule(
        WARNING, "The learning rate had little effect", without_effect,
        "Raise lr, shorten warmup_steps, or train for more updates. Skipped updates do not count for the warm-up.",
    ),
    Rule(
        WARNING, "Samples are empty or repeat themselves", broken_samples,
        "Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta. If samples were "
        "so before training, look at the prompts, and at the model that the run began with.",
    ),
    Rule(
        WARNING, "Samples have changed in length", sample_lengths,
        "Summed log-probabilities can be won by length. Read the samples: if they say the same in more words, or break "
        "off, balance the lengths of the pairs, raise loss.beta, or try loss=simpo or loss=dpo_norm.",
        PAIRS | ONLINE,
    ),
    Rule(
        WARNING, "Training examples are cut", partial(list_counts, split="train", totals=CUT),
        "A cut response has lost its end, so the policy does not learn to stop, and identical sides teach nothing: "
        "raise max_length and max_prompt_length, or choose truncation.",
    ),
    Rule(
        WARNING, "Held-out prompts or answers are in the training data",
        leaks,
        "Held-out numbers are too good. Put what belongs together into one split, or give a test file of its own.",
    ),
    Rule(
        WARNING, "The answers have not become better", answers_no_better,
        "By its scorer the policy learned nothing or lost. If scores fell, use a smaller lr or a larger loss.beta; if "
        "they stay, a larger lr, a smaller loss.beta or more updates, unless most pairs are ties.",
        ONLINE,
    ),
    Rule(
        WARNING, "Most prompts give a tie", ties,
        "The best and the worst answer have one score, so there is nothing to learn: see whether the scorer is "
        "constant, and raise online.temperature or online.n_samples.",
        ONLINE,
    ),
    Rule(
        WARNING, "Scores and lengths grow together", scores_with_length,
        "The scorer may reward length, and the policy exploit it. Read what was drawn: if answers only say the same in "
        "more words, correct the scorer, lower online.max_new_tokens or raise loss.beta.",
        ONLINE,
    ),
    Rule(
        NOTE, "An earlier checkpoint is better", best_is_earlier,
        "Use the checkpoint that the link BEST names; on few held-out examples the best of many is in part luck.",
    ),
    Rule(
        NOTE, "Nearly all gradients are clipped", clipped,
        "Every clipped gradient has the same norm, whatever its size. If that is not meant, raise max_grad_norm; with "
        "SGD, which then takes larger steps, lower lr too.",
    ),
    Rule(
        NOTE, "Length predicts the preference in the data", length_in_data,
        "A policy can rank such pairs right by learning a length: compare the lengths of its samples.",
        PAIRS,
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
        "start from a model that SFT taught to end its answers.",
        ONLINE,
    ),
    Rule(
        NOTE, "The policy has gone far from the reference", far_from_reference,
        "Long answers reach that easily, but a policy so far away often exploits errors of the scorer: read what was "
        "drawn, and consider a larger loss.beta, a smaller lr or fewer updates.",
        ONLINE,
    ),
)  # fmt: skip


def find_all(run: Run) -> list[Finding]:
    """Find everything that the rules tell about a run, warnings first."""
    values = ((rule, rule.condition(run)) for rule in RULES if run.kind in rule.kinds)
    return [Finding(rule.level, rule.title, value, rule.text) for rule, value in values if value is not None]
