"""Findings on chosen and rejected responses, and on lengths: rules as in `findings.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpo.analysis.findings import NOTE, WARNING, Finding
from dpo.analysis.margin import Change, MarginParts, find_change, margin_parts
from dpo.analysis.noise import binomial_tail, mean_and_bound
from dpo.analysis.runs import Run, number
from dpo.losses import LOSSES
from dpo.wording import count, figure, percent, signed

LENGTH_SHARE = 0.5  # share of the margin due to length
LONGER = 1.5  # ratio of the policy's words to the reference's, in samples
FEW_SAMPLES = 8
EMPTY = 0.05  # of the samples
NEARLY_ALIKE = 0.2  # ratio of the margin to the smaller move of the two sides
LENGTH_TELLS = 0.8  # share of pairs in which the same side is longer


def margin_story(run: Run) -> Iterator[Finding]:
    """The side that moved, and why chosen responses may have become less likely."""
    parts = margin_parts(run)
    if parts is None:
        return
    per_token = run.objective is None or run.objective.per_token  # then sums over unequal lengths would mislead
    change = None if per_token else find_change(run)
    chosen, margin = (parts.chosen, parts.margin) if change is None else (change.chosen, change.margin)
    if chosen >= 0 or parts.margin <= 0:
        yield Finding(NOTE, "Where the margin comes from", _margin_value(parts), _sides(parts))
        return
    runs_off = chosen < -margin  # both fall by more than they part
    beta = "" if parts.since_start else "a larger loss.beta, "
    if not _sees_the_difference_alone(run):
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
        WARNING if runs_off and mechanism else NOTE,
        "Chosen responses become less likely while margins grow",
        f"{_change_value(change)}; {_margin_value(parts)}" if change else _margin_value(parts),
        f"{_sides(parts)} {mechanism}The probability goes to texts that are in neither. {advice}",
    )


def _sees_the_difference_alone(run: Run) -> bool:
    """Whether nothing in the loss holds chosen responses where they are."""
    if run.objective is None:
        return False
    weights = run.setting("loss.weights", {})
    parts = [LOSSES[name] for name, weight in weights.items() if weight] or [run.objective]
    return all(part.pairwise and part.margin_only for part in parts) and not number(run.setting("loss.sft_weight")) > 0


def _change_value(change: Change) -> str:
    before, after = figure(change.chosen_before, 4), figure(change.chosen_after, 4)
    return f"{change.stem}_{change.split}/chosen {before}, then {after} ({signed(change.chosen)})"


def _margin_value(parts: MarginParts) -> str:
    margin = f"margin {signed(parts.margin)} since the start" if parts.since_start else f"margin {figure(parts.margin)}"
    return f"{margin} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"


def _sides(parts: MarginParts) -> str:
    """Sentence on the share of the margin that each side gives."""
    chosen, rejected = parts.chosen, parts.rejected
    since = "Since the start" if parts.since_start else "Against the reference"
    if parts.margin <= 0:
        return f"{since}, rejected responses did at least as well as chosen ones: the margin has not grown."
    if parts.margin < NEARLY_ALIKE * min(abs(chosen), abs(rejected)):
        return f"{since}, both moved by nearly as much: the margin is the little by which they differ."
    rising, falling = percent(abs(chosen) / parts.margin), percent(abs(rejected) / parts.margin)
    if chosen >= 0 and rejected <= 0:
        return (
            f"{since}, chosen responses became more likely and rejected ones less: {rising} of the margin is chosen "
            f"rising, {falling} is rejected falling."
        )
    if chosen < 0:
        return (
            f"{since}, both became less likely: rejected falling gives {falling} of the margin, and chosen falling "
            f"takes {rising} away."
        )
    return (
        f"{since}, both became more likely: chosen rising gives {rising} of the margin, and rejected rising takes "
        f"{falling} away."
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
    by_pair = math.isfinite(parts.length_by_pair)
    how = (
        "It was worked out in each pair of the ledger."
        if by_pair
        else "It comes from means alone; with ledger=true a run records it pair by pair."
    )
    hacked = share >= LENGTH_SHARE
    yield Finding(
        WARNING if hacked else NOTE,
        "Much of the margin is length" if hacked else "What length gives",
        f"{gives} of the margin {figure(parts.margin)} ({percent(share)}); mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected",
        f"This is what the margin would {'lose' if share >= 0 else 'gain'} if both sides were equally long, at the "
        f"same mean change per token. {how}"
        + (
            " The policy may have learned to prefer a length instead of what makes a response better." if hacked else ""
        ),
    )


def lengths_in_data(run: Run) -> Iterator[Finding]:
    """Pairs whose length alone predicts the preference."""
    longer = run.count("train.chosen_longer")
    if run.has_pairs and (longer >= LENGTH_TELLS or longer <= 1 - LENGTH_TELLS):
        side = "longer" if longer > 0.5 else "shorter or as long"
        yield Finding(
            NOTE,
            "Length predicts the preference in the data",
            f"chosen is {side} in {percent(max(longer, 1 - longer))} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            f"{'the reference' if run.has_reference else 'its first ones'}.",
        )


class SamplePairs(NamedTuple):
    """The policy's newest samples, each with another sample for the same prompt to compare with."""

    texts: list[tuple[str, str]]  # (policy, other)
    whose: str  # source of the others


def sample_pairs(run: Run) -> SamplePairs | None:
    """Compare samples of policy and reference, else of the policy now and at first; None without either."""
    times = [sample["examples"] for sample in run.samples]
    newest = [sample for sample in run.samples if sample["examples"] == times[-1]]
    with_reference = [(s["policy"], s["reference"]) for s in newest if s["reference"] is not None]
    if with_reference:
        return SamplePairs(with_reference, "the reference's")
    first = [sample for sample in run.samples if sample["examples"] == times[0]]
    if times[:1] == times[-1:]:
        return None
    same = [(s["policy"], f["policy"]) for s, f in zip(newest, first, strict=False) if s["prompt"] == f["prompt"]]
    return SamplePairs(same, "its first")


def empty_samples(run: Run) -> Iterator[Finding]:
    """Empty samples of the policy."""
    newest = [sample["policy"] for sample in run.samples if sample["examples"] == run.samples[-1]["examples"]]
    empty = sum(not text.strip() for text in newest)
    if not newest or empty / len(newest) <= EMPTY:
        return
    pairs, value = sample_pairs(run), f"{empty} of {count(len(newest), 'sample')}"
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
    cause = "Probability that training takes from rejected responses often goes there: take an earlier checkpoint, or "
    yield Finding(
        WARNING if binomial_tail(heads, tosses) <= 0.05 else NOTE,
        "The policy says nothing" if empty == len(newest) else "Some of the policy's samples are empty",
        value,
        "There the policy ends its answer at once. "
        + (
            "So do the others: the model says nothing after these prompts whatever it is trained on. Look at the data "
            "and the archive that it started from."
            if others == empty == len(newest)
            else f"{cause}train with a smaller lr, fewer epochs, or what holds chosen responses up: loss.sft_weight, "
            "loss=dpop, loss=apo_zero."
            if run.has_pairs
            else "Look for empty targets in the data, and take an earlier checkpoint."
        ),
    )


def lengths_of_samples(run: Run) -> Iterator[Finding]:
    """Samples much longer or shorter than those compared with; empty ones do not count."""
    pairs = sample_pairs(run)
    if not run.has_pairs or pairs is None:
        return
    words = np.array([(len(policy.split()), len(other.split())) for policy, other in pairs.texts], dtype=float)
    words = words.reshape(-1, 2)
    words = words[(words > 0).all(1)]
    if len(words) < FEW_SAMPLES:
        return
    policy, other = words.mean(0)
    difference, by_chance = mean_and_bound(np.log(words[:, 0]) - np.log(words[:, 1]))
    ratio = policy / other
    if max(ratio, 1 / ratio) < LONGER or abs(policy - other) < 5 or difference * (ratio - 1) <= 0:
        return
    if abs(difference) <= by_chance:
        return
    low, high = (figure(math.exp(difference + sign * by_chance), 2) for sign in (-1, +1))
    words_of_policy = f"{figure(policy)} word{'' if policy == 1 else 's'} on average"
    value = (
        f"{words_of_policy}, {pairs.whose} {figure(other)} ({count(len(words), 'sample')}); after the same prompt "
        f"{figure(math.exp(difference), 2)} times as many, 98 % interval {low} to {high}"
    )
    if ratio > 1:
        yield Finding(
            WARNING,
            "The policy's samples have become long",
            value,
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length.",
        )
    else:
        yield Finding(
            WARNING,
            "The policy's samples have become short",
            value,
            "Read them: answers may break off or give up early.",
        )
