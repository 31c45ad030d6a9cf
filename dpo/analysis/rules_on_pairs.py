"""Rules on margins, lengths and labels of pairs, and on the data."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dpo.analysis.measures import (
    SIDES,
    Z_98,
    MarginParts,
    accuracy_error,
    evaluated_pairs,
    find_change,
    is_below,
    margin_parts,
    n_effective,
)
from dpo.analysis.rules import NOTE, WARNING, WAYS_TO_HOLD_CHOSEN_UP, Finding, note
from dpo.analysis.runs import Run, last_tenth, number
from dpo.losses import LOSSES
from dpo.numbers import count, figure, percent, signed

LEAKED, MUCH_LEAKED = 0.01, 0.1  # shares of the test prompts

# --- chosen and rejected, lengths -------------------------------------------------------------------------------------


def margin_sides(run: Run) -> Iterator[Finding]:
    """Say where the margin comes from, and why chosen responses fall."""
    parts = margin_parts(run)
    if parts is None:
        return
    margin = f"margin {signed(parts.margin)} since the start" if parts.since_start else f"margin {figure(parts.margin)}"
    value = f"{margin} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"
    # log-probabilities show directly whether chosen responses fell, rewards only relative to the reference; rewards per
    # token are used all the same, as sums of log-probabilities depend on lengths
    logps_change = None if run.is_per_token else find_change(run)
    change = parts if logps_change is None else logps_change
    if change.chosen >= 0 or parts.margin <= 0:
        yield note("Where the margin comes from", value, _describe_sides(parts))
        return
    if logps_change is not None:
        before, after = figure(logps_change.chosen_before, 4), figure(logps_change.chosen_after, 4)
        value = f"logps_{logps_change.split}/chosen {before}, then {after} ({signed(logps_change.chosen)}); {value}"
    extra_fall = -change.chosen - change.margin  # by which chosen fell more than the margin grew
    is_beyond_chance = extra_fall > _bound_extra_fall(run, in_nats=logps_change is not None)
    level, mechanism = NOTE, ""
    advice = "By itself that is no fault: read the samples, and compare them with earlier ones."
    if _loss_sees_only_differences(run):
        mechanism = (
            "The loss sees only the difference of the two sides: lowering rejected responses also lowers what chosen "
            "ones share with them, and nothing holds chosen ones up. "
        )
        advice = "By itself this is usual, and no fault as long as the samples stay good."
        if is_beyond_chance:
            level = WARNING
            beta = "" if parts.since_start else "a larger loss.beta, "
            advice = (
                "Here chosen responses fall by more than the margin grows, which often shows in the samples: read "
                f"them, and consider {beta}a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
            )
    yield Finding(
        level,
        "Chosen responses become less likely while margins grow",
        value,
        f"{_describe_sides(parts)} {mechanism}The probability goes to other texts. {advice}",
    )


def _bound_extra_fall(run: Run, *, in_nats: bool) -> float:
    """Bound the mean extra fall that chance alone explains.

    A pair's extra fall is -chosen - margin, or rejected - 2 chosen. Its standard deviation is taken from the training
    batches of the last updates; the mean is over the held-out pairs. Infinite with too few updates.
    """
    chosen, rejected = (run.train[f"rewards_train/{side}"] for side in SIDES)
    falls = rejected - 2 * chosen  # (updates,)
    falls = last_tenth(falls[np.isfinite(falls)])
    reward_per_nat = number(run.setting("loss.beta")) if in_nats else 1.0
    if len(falls) < 10 or not reward_per_nat > 0:
        return math.inf
    deviation = float(falls.std(ddof=1)) * math.sqrt(number(run.setting("batch_size", 1)))
    return Z_98 * deviation / math.sqrt(n_effective(run)) / reward_per_nat


def _describe_sides(parts: MarginParts) -> str:
    """Say in a sentence which share of the margin each side gives."""
    chosen, rejected, margin = parts.chosen, parts.rejected, parts.margin
    since = "Since the start" if parts.since_start else "Against the reference"
    if margin <= 0:
        return f"{since}, rejected responses did at least as well as chosen ones: the margin has not grown."
    if margin < 0.2 * min(abs(chosen), abs(rejected)):
        return f"{since}, both moved by nearly as much: the margin is the little by which they differ."
    chosen_moved = "more likely, which gives" if chosen >= 0 else "less likely, which takes away"
    rejected_moved = "less likely, which gives" if rejected <= 0 else "more likely, which takes away"
    return (
        f"{since}, chosen responses became {chosen_moved} {percent(abs(chosen / margin))} of the margin, and rejected "
        f"ones {rejected_moved} {percent(abs(rejected / margin))}."
    )


def _loss_sees_only_differences(run: Run) -> bool:
    """Return whether the loss is a function of chosen minus rejected alone."""
    if run.objective is None:
        return False
    if number(run.setting("loss.sft_weight")) > 0:
        return False
    weights = run.setting("loss.weights", {})  # only loss=mix has them
    losses = [LOSSES[name] for name, weight in weights.items() if weight] or [run.objective]
    return all(loss.trains_on == "pairs" and loss.margin_only for loss in losses)


def length_in_margin(run: Run) -> Iterator[Finding]:
    parts = margin_parts(run)
    if parts is None or not math.isfinite(parts.length) or parts.margin <= 0:
        return
    share = parts.length / parts.margin
    value = (
        f"margin {figure(parts.margin)}; with sides of equal length {figure(parts.margin - parts.length)}; mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
    )
    source = "the pairs of the ledger" if parts.by_pair else "means alone; with ledger=true a run records each pair"
    text = (
        f"A longer response has more tokens whose probability can change. The second number leaves this out: it is the "
        f"margin at the same mean change per token, worked out from {source}."
    )
    if abs(share) < 0.05:
        return
    if share < 0.5:
        yield note("How lengths change the margin", value, text)
    else:  # no warning, as the share of a small margin may be large by chance
        text += " The policy may have learned to prefer a length: compare the lengths of samples."
        yield note("Much of the margin is length", value, text)


def lengths_in_data(run: Run) -> Iterator[Finding]:
    """Pairs whose length alone predicts the preference."""
    share_longer = run.count("train.chosen_longer")
    share = max(share_longer, 1 - share_longer)
    if share >= 0.8:
        compared = "longer" if share_longer > 0.5 else "shorter or as long"
        yield note(
            "Length predicts the preference in the data",
            f"chosen is {compared} in {percent(share)} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            f"{'the reference' if run.has_reference else 'its first ones'}.",
        )


def accuracy_by_length(run: Run) -> Iterator[Finding]:
    """Held-out accuracy where chosen is longer, and where it is shorter."""
    pairs = evaluated_pairs(run, run.eval.updates[-1])
    if pairs is None:
        return
    differences = pairs["chosen_tokens"] - pairs["rejected_tokens"]
    longer, shorter = pairs["right"][differences > 0], pairs["right"][differences < 0]
    if min(len(longer), len(shorter)) < 20:
        return
    right_longer, right_shorter = float(longer.mean()), float(shorter.mean())
    pooled = float(np.concatenate([longer, shorter]).mean())
    bound = Z_98 * math.sqrt(pooled * (1 - pooled) * (1 / len(longer) + 1 / len(shorter)))
    if abs(right_longer - right_shorter) <= bound:
        return
    if right_longer > right_shorter:
        preferred, is_below_chance = "longer", is_below(right_shorter, 0.5, len(shorter))
    else:
        preferred, is_below_chance = "shorter", is_below(right_longer, 0.5, len(longer))
    explanation = ", also where they are the rejected ones" if is_below_chance else ", or the other pairs are harder"
    other_losses = "" if run.is_per_token else ", or loss=simpo or loss=dpo_norm, whose rewards are means over tokens,"
    yield Finding(
        WARNING if is_below_chance else NOTE,
        "Held-out pairs are ranked by length" if is_below_chance else "Held-out accuracy depends on length",
        f"accuracy {figure(right_longer)} where chosen is longer ({count(len(longer), 'pair')}), "
        f"{figure(right_shorter)} where it is shorter ({len(shorter):,}); mean of both "
        f"{figure((right_longer + right_shorter) / 2)}; a difference of up to {figure(bound)} may be chance",
        f"The policy prefers {preferred} responses{explanation}. Go by the mean of both accuracies, which a preference "
        "for length alone leaves at 0.5, and compare the lengths of samples. Pairs of equal "
        f"lengths{other_losses} reward length less.",
    )


# --- labels and data --------------------------------------------------------------------------------------------------


def label_noise(run: Run) -> Iterator[Finding]:
    """Training pairs ranked clearly wrong, more than right labels would explain."""
    from dpo.analysis.ledger import count_clearly_wrong  # imported here, as most runs have no ledger

    counted = count_clearly_wrong(run.ledger)
    if counted is None or counted.right < 0.75:  # a policy that ranks few pairs right knows too little of labels
        return
    excess, error = counted.share - counted.expected, accuracy_error(counted.share, counted.pairs)
    if excess > max(0.04, Z_98 * error):  # right labels reach 0.038 if margins have longer tails than normal ones
        yield note(
            "Some labels may be wrong",
            f"{percent(counted.share)} of {count(counted.pairs, 'training pair')} in the second half of the run are "
            f"ranked wrong by at least a typical margin; with right labels about {percent(counted.expected)} would be",
            "The policy contradicts these labels as confidently as it confirms others. `python -m scripts.ledger RUN` "
            "lists the worst pairs: read them. If labels are swapped, correct them, or train with "
            "loss.label_smoothing or loss=robust.",
        )


def leakage(run: Run) -> Iterator[Finding]:
    """Test prompts, or their first turns, that are in the training split."""
    n_prompts, n_whole = run.count("test.prompts"), run.count("test.prompts_in_train")
    n_first_turns = run.count("test.first_turns_in_train")
    if not n_prompts > 0:
        return
    share_whole, share_first_turns = n_whole / n_prompts, n_first_turns / n_prompts
    if not max(share_whole, share_first_turns) >= LEAKED:  # also for NaN
        return
    yield Finding(
        WARNING if share_whole >= MUCH_LEAKED else NOTE,
        "Test prompts are in the training split",
        f"of {count(n_prompts, 'test prompt')}, {n_whole:,.0f} ({percent(share_whole)}) are training prompts "
        f"too, and {n_first_turns:,.0f} ({percent(share_first_turns)}) open with the first turn of a training prompt",
        "The run has trained on the subjects of these prompts, so held-out numbers are too good. Split the data by "
        "first turn, so that no dialogue is in both splits.",
    )


DATA_COUNTS = {  # a count of the preflight: the count to divide it by, the least share to report, title and advice
    "joined_words": (
        "examples", 0.0, "Prompt and response run together", "There is no space between them: add one where they meet.",
    ),
    "contradictory_pairs": (
        "examples", 0.01, "Some pairs contradict each other",
        "An earlier pair of the same prompt says the opposite: leave one of the two out, or use loss.label_smoothing.",
    ),
    "identical_pairs": (
        "tokenized", 0.01, "Some pairs are identical after truncation",
        "Most losses have no gradient where chosen and rejected are the same tokens: raise max_length.",
    ),
    "empty_responses": (
        "examples", 0.01, "Some responses are empty",
        "Leave these examples out, unless the policy should learn to say nothing.",
    ),
    "truncated_responses": (
        "tokenized", 0.1, "Many responses are cut off",
        "They lost their ends, so the policy does not learn where they end: raise max_length.",
    ),
}  # fmt: skip


def data_counts(run: Run) -> Iterator[Finding]:
    for key, (total_key, least_share, title, text) in DATA_COUNTS.items():
        n_found, total = run.count(f"train.{key}"), run.count(f"train.{total_key}")
        if n_found > 0 and total > 0 and n_found / total >= least_share:
            value = f"{key} {n_found:,.0f} of {total:,.0f} ({percent(n_found / total)}) in the training split"
            yield note(title, value, text)
