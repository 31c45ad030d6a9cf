"""The report's rules: what is wrong, and what to change.

A rule has a condition, which returns the numbers that it is about, or None if it does not hold. The table is at the
end. *Now* is the last evaluation, or the mean of the last tenth of the updates, at least ten.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from dpo.analysis.measures import EVAL_ACCURACY, n_effective, n_evaluated, share_interval
from dpo.analysis.runs import Run, number
from dpo.analysis.verdict import SMALL_CHANGE, compare_answers, find_changes_per_token
from dpo.data.sources import HUB_IDS
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"  # a note is worth knowing, and often no fault
FEWEST_UPDATES = 20  # fewer say too little
BEYOND_CHANCE = 3.0  # standard errors, for small samples and the best of some evaluations too
UPDATES_AT_START = 10  # updates averaged as the start of a loss without a reference: a single one says too little
COLLAPSED = ((50, 3.0), (16, 5.0))  # last updates, and the multiple of the start's loss that is too high

# kinds of data: those of TRAINS_ON, and online
ONLINE = frozenset({"online"})
PAIRS = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = PAIRS | {"labels", "targets"}  # examples of datasets; those of an online run change with the policy
ANY = FIXED | ONLINE

# counts of the preflight, and the number that each is a part of
CUT = {"truncated_prompts": "tokenized", "truncated_responses": "tokenized", "identical_pairs": "tokenized"}
LEAKED = {"prompts_like_train": "prompts", "answers_in_train": "examples"}
FAULTS = dict.fromkeys(("contradictory_pairs", "contradictory_labels", "empty_responses"), "examples")

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
    """Half of the last losses are a multiple of the start's, which counts as at least 0.5, and margins do not grow."""
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    is_finite = np.isfinite(losses)
    losses, margins = losses[is_finite], margins[is_finite]
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if not len(losses) or run.objective.needs_squares:
        return None
    at_start = slice(1 if run.objective.reference else UPDATES_AT_START)
    start, start_margin = float(losses[at_start].mean()), float(margins[at_start].mean())
    examples, evaluated = run.eval.points("loss/eval")
    if len(examples) and examples[0] == 0:
        start, start_margin = float(evaluated[0]), float(run.eval["rewards_eval/margins"][0])
    for n, factor in COLLAPSED:
        limit = start + (factor - 1) * max(abs(start), 0.5)
        grows = margins[-n:].mean() > start_margin  # false without pairs
        if len(losses) >= n and np.median(losses[-n:]) > limit and not grows:
            return f"loss/train {figure(np.median(losses[-n:]))} now, {figure(start)} at the start"
    return None


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
    """A held-out loss that rose beyond chance, while the training loss fell."""
    examples, losses = run.eval.points("loss/eval")
    trained, train_losses = run.train.points("loss/train")
    if len(losses) < 2 or len(train_losses) < FEWEST_UPDATES:
        return None
    best = int(losses.argmin())
    # the deviation of an example's loss, from the differences of successive batches, which have no trend
    deviation = float(np.diff(train_losses).std()) * math.sqrt(number(run.setting("batch_size", 1)) / 2)
    bound = BEYOND_CHANCE * deviation * math.sqrt(2 / n_effective(run))  # as if both evaluations had other examples
    n_until_best = max(int((trained <= examples[best]).sum()), 10)
    before, after = float(train_losses[n_until_best - 10 : n_until_best].mean()), run.now("loss/train")
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


def clipped(run: Run) -> str | None:
    limit, (_, norms) = number(run.setting("max_grad_norm")), run.train.points("grad_norm")
    if len(norms) < FEWEST_UPDATES or (norms > limit).mean() < 0.9:
        return None
    return f"grad_norm above {figure(limit)} in {percent((norms > limit).mean())} of the updates"


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


def is_more_often(pairs: Iterable[tuple[float, float]]) -> bool:
    """Return whether the first value of a pair is the larger one more often than the second, by a sign test."""
    signs = [first > second for first, second in pairs if first != second]
    return bool(signs) and share_interval(sum(signs) / len(signs), len(signs))[0] > 0.5


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
    if n_policy <= 0.05 * len(broken) or not (n_policy == len(broken) or is_more_often(broken)):
        return None
    return f"{n_policy} of {count(len(broken), 'sample')}; of the reference or at first {n_other}"


def sample_lengths(run: Run) -> str | None:
    """Samples that are mostly longer, or shorter, than others to the same prompts, by half on average."""
    n_words = [(len(policy.split()), len((other or "").split())) for policy, other in pair_samples(run)]
    n_words = [pair for pair in n_words if min(pair) > 0]
    after, before = np.array(n_words, dtype=float).reshape(-1, 2).sum(axis=0) / max(len(n_words), 1)
    if max(after, before) < 1.5 * min(after, before) or abs(after - before) < 5:
        return None
    if not is_more_often(n_words if after > before else [(other, policy) for policy, other in n_words]):
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
    desirable, undesirable = (
        number(run.setting(f"loss.{side}_weight")) * run.count(f"train.{side}") for side in ("desirable", "undesirable")
    )
    if math.isnan(effective) and min(desirable, undesirable) > 0 and not 0.99 <= desirable / undesirable <= 1.35:
        return f"desirable responses weigh {figure(desirable / undesirable)} times as much as undesirable ones"
    return None


# --- answers drawn online ---------------------------------------------------------------------------------------------


def answers_worse(run: Run) -> str | None:
    n, rate = n_evaluated(run, "prompts"), run.eval.last("online_eval/win_rate")
    if not math.isfinite(rate) or share_interval(rate, n)[1] >= 0.5:
        return None
    return f"online_eval/win_rate {figure(rate)} on {count(n, 'held-out prompt')}"


def scores_with_length(run: Run) -> str | None:
    lengths, scores = run.ends("online/length"), run.ends("online/score")
    if not (lengths[1] >= 1.5 * lengths[0] and scores[1] > scores[0]):
        return None
    before, after = (f"{figure(n)} tokens, score {figure(x)}" for n, x in zip(lengths, scores, strict=True))
    return f"{before} at first; {after} now"


def is_outside(run: Run, name: str, *, low: float = -math.inf, high: float = math.inf) -> str | None:
    value = run.now(name)
    return f"{name} {figure(value)}" if value < low or value > high else None


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
    Rule(WARNING, "The answers are worse than the reference's", answers_worse,
         "Use a smaller lr or a larger loss.beta, and read the answers with the highest scores.", ONLINE),
    Rule(WARNING, "Scores and lengths grow together", scores_with_length,
         "The scorer may reward length. If answers only say the same in more words, change the scorer, or lower "
         "online.max_new_tokens.", ONLINE),
    Rule(WARNING, "Most prompts give a tie", partial(is_outside, name="online/ties", high=0.5),
         "See whether the scorer is constant; raise online.temperature and online.n_samples.", ONLINE),
    Rule(NOTE, "An earlier checkpoint is better", best_is_earlier,
         "Use the checkpoint that the link BEST names; on few held-out examples the best of many is in part luck."),
    Rule(NOTE, "Nearly all gradients are clipped", clipped,
         "They all count the same then, whatever their size: if that is not meant, raise max_grad_norm."),
    Rule(NOTE, "Length predicts the preference in the data", length_in_data,
         "A policy can rank such pairs right by learning a length: compare the lengths of its samples.", PAIRS),
    Rule(NOTE, "Some examples contradict each other or are faulty", partial(list_counts, split="train", totals=FAULTS),
         "data_problems.jsonl lists them: correct or remove them. Joined words lack a space after the prompt."),
    Rule(NOTE, "Few examples or one label have most of the weight", uneven_weights,
         "Even out the weights, or loss.desirable_weight and loss.undesirable_weight: KTO's paper advises 1 to 4/3.",
         FIXED),
    Rule(NOTE, "Drawn answers are cut off", partial(is_outside, name="online/eos", low=0.9),
         "The policy does not learn where to stop: raise online.max_new_tokens, set online.missing_eos_penalty, or "
         "begin with SFT.", ONLINE),
    Rule(NOTE, "The policy has gone far from the reference",
         partial(is_outside, name="online/kl", high=10.0),  # answers e^10 times as likely as before
         "It may exploit errors of the scorer: read what was drawn; try a larger loss.beta or a smaller lr.", ONLINE),
)  # fmt: skip


def find_all(run: Run) -> list[tuple[Rule, str]]:
    """Find the rules that hold for a run, each with its numbers, warnings first."""
    kind = "online" if run.online else run.objective.trains_on
    values = ((rule, rule.condition(run)) for rule in RULES if kind in rule.kinds)
    return [(rule, value) for rule, value in values if value is not None]
