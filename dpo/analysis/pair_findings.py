"""What the metrics say of chosen and rejected responses, and of lengths: rules as in `findings.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from dpo.analysis.findings import NOTE, WARNING, Finding
from dpo.analysis.margin import Change, MarginParts, change_of, margin_parts
from dpo.analysis.runs import Run
from dpo.wording import count, figure, percent, signed

LENGTH_SHARE = 0.5  # of the margin, that comes from length
LONGER = 1.5  # times the reference's words, in samples of the policy
FEW_SAMPLES = 8
LENGTH_TELLS = 0.8  # of the pairs, in which one side is the longer


def margin_story(run: Run) -> Iterator[Finding]:
    """Which side moved, and why chosen responses may have become less likely."""
    parts, change = margin_parts(run), change_of(run)
    if parts is None:
        return
    falls = change is not None and change.chosen < 0
    if not falls or parts.margin <= 0:
        yield Finding(NOTE, "Where the margin comes from", _margin_value(parts), _sides(parts))
        return
    runs_off = change.chosen < -change.margin  # both fall by more than they part
    advice = (
        "Here both fall by more than they part, which often shows in the samples: read them, and consider a larger "
        "loss.beta, a smaller lr or fewer epochs."
        if runs_off
        else "By itself this is usual, and no fault as long as the samples stay good."
    )
    yield Finding(
        WARNING if runs_off else NOTE,
        "Chosen responses become less likely while margins grow",
        f"{_change_value(change)}; {_margin_value(parts)}",
        f"{_sides(parts)} The loss sees only the difference of the two sides: lowering rejected responses also lowers "
        "what chosen ones share with them, and nothing holds chosen ones up. The probability goes to texts that are in "
        f"neither. {advice}",
    )


def _change_value(change: Change) -> str:
    return f"{change.name} {figure(change.before, 4)}, then {figure(change.after, 4)} ({signed(change.chosen)})"


def _margin_value(parts: MarginParts) -> str:
    return f"margin {figure(parts.margin)} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"


def _sides(parts: MarginParts) -> str:
    """What share of the margin each side gives."""
    chosen, rejected = parts.chosen, parts.rejected
    if parts.margin <= 0:
        return "Rejected responses gained at least as much as chosen ones over the reference: there is no margin."
    rising, falling = percent(abs(chosen) / parts.margin), percent(abs(rejected) / parts.margin)
    if chosen >= 0 and rejected <= 0:
        return (
            f"Against the reference, chosen responses became more likely and rejected ones less: {rising} of the "
            f"margin is chosen rising, {falling} is rejected falling."
        )
    if chosen < 0:
        return (
            f"Against the reference, both became less likely: rejected falling gives {falling} of the margin, and "
            f"chosen falling takes {rising} away."
        )
    return (
        f"Against the reference, both became more likely: chosen rising gives {rising} of the margin, and rejected "
        f"rising takes {falling} away."
    )


def length_in_margin(run: Run) -> Iterator[Finding]:
    """How much of the margin there is because one side is longer."""
    parts = margin_parts(run)
    if parts is None or parts.margin <= 0:
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
    """Pairs of which length alone tells the better one."""
    longer = run.count("train.chosen_longer")
    if run.has_pairs and (longer >= LENGTH_TELLS or longer <= 1 - LENGTH_TELLS):
        side = "longer" if longer > 0.5 else "shorter or as long"
        yield Finding(
            NOTE,
            "Length predicts the preference in the data",
            f"chosen is {side} in {percent(max(longer, 1 - longer))} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            "the reference.",
        )


class SampleLengths(NamedTuple):
    """Mean words of the newest samples, and of what they are compared with."""

    n: int
    policy: float
    other: float
    whose: str


def sample_lengths(run: Run) -> SampleLengths | None:
    """Of the policy against the reference, or, without its samples, against the policy's first."""
    if not run.samples:
        return None
    times = [sample["examples"] for sample in run.samples]
    newest = [sample for sample in run.samples if sample["examples"] == times[-1]]
    policy = fmean(len(sample["policy"].split()) for sample in newest)
    by_reference = [sample["reference"] for sample in newest if sample["reference"] is not None]
    if by_reference:
        return SampleLengths(len(newest), policy, fmean(len(text.split()) for text in by_reference), "the reference's")
    first = [sample["policy"] for sample in run.samples if sample["examples"] == times[0]]
    if times[0] == times[-1]:
        return None
    return SampleLengths(len(newest), policy, fmean(len(text.split()) for text in first), "its first")


def lengths_of_samples(run: Run) -> Iterator[Finding]:
    """A policy that answers at much greater or smaller length."""
    found = sample_lengths(run)
    if not run.has_pairs or found is None or found.n < FEW_SAMPLES or not found.other or not found.policy:
        return
    ratio = found.policy / found.other
    value = f"{figure(found.policy)} words on average, {found.whose} {figure(found.other)} ({count(found.n, 'sample')})"
    if ratio >= LONGER and found.policy - found.other >= 5:
        yield Finding(
            WARNING,
            "The policy's samples have become long",
            value,
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length.",
        )
    elif ratio <= 1 / LONGER and found.other - found.policy >= 5:
        yield Finding(
            WARNING,
            "The policy's samples have become short",
            value,
            "Read them: answers may break off or give up early.",
        )
