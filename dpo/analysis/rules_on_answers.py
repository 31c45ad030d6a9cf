"""Rules on samples of evaluations, and on answers drawn online."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.measures import (
    Z_98,
    binomial_tail,
    change_and_bound,
    is_above,
    is_below,
    mean_and_bound,
    n_evaluated,
    update_seconds,
)
from dpo.analysis.rules import (
    EVAL_ACCURACY,
    NOTE,
    TRAIN_ACCURACY,
    WARNING,
    WAYS_TO_HOLD_CHOSEN_UP,
    Finding,
    note,
    warning,
)
from dpo.analysis.runs import Run, number
from dpo.numbers import count, figure, percent, signed

# --- samples ----------------------------------------------------------------------------------------------------------


class Continuation(NamedTuple):
    """A text written after a prompt."""

    text: str
    is_ended: bool | None  # by an end token; None if that was not recorded


def _pair_samples(run: Run) -> tuple[list[tuple[Continuation, Continuation]], str]:
    """Pair the policy's newest samples with samples to compare them with.

    The latter are the reference's for the same prompts or, without a reference, the policy's earliest; the second value
    says which.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    with_reference = [(_read(new), _read(new, "reference")) for new in newest if new["reference"] is not None]
    if with_reference or earliest == newest:
        return with_reference, "the reference's"
    pairs = zip(newest, earliest, strict=False)
    return [(_read(new), _read(old)) for new, old in pairs if new["prompt"] == old["prompt"]], "its first"


def _read(sample: Mapping[str, Any], model: str = "policy") -> Continuation:
    return Continuation(sample[model], sample.get(f"{model}_ended"))


class Flawed(NamedTuple):
    """The policy's samples with a flaw, against others of the same prompts."""

    value: str  # of the finding: how many samples have the flaw
    all_flawed: bool  # all of the policy's samples
    share_of_others: float  # share of the others that have the flaw; NaN without others
    probability: float  # that chance alone gives as many or more


def _count_flawed(run: Run, is_flawed: Callable[[Continuation], bool | None]) -> Flawed | None:
    """Count the policy's newest flawed samples; None for 5 % or fewer.

    The probability is from a sign test on the pairs in which just one sample has the flaw: by chance this is the
    policy's in half of them. Without others, or if all the others have the flaw, each of the policy's flawed samples
    counts as such a pair. `is_flawed` returns None if it is not known whether a sample has the flaw.
    """
    all_flaws = [is_flawed(_read(sample)) for sample in run.samples_at(-1)]
    flaws = [flaw for flaw in all_flaws if flaw is not None]
    n_flawed = sum(flaws)
    if n_flawed <= 0.05 * len(flaws):
        return None
    value, share_of_others = f"{n_flawed} of {count(len(flaws), 'sample')}", math.nan
    pairs, source = _pair_samples(run)
    all_paired_flaws = [(is_flawed(policy), is_flawed(other)) for policy, other in pairs]
    paired_flaws = [(policy, other) for policy, other in all_paired_flaws if policy is not None and other is not None]
    if paired_flaws:
        n_others = sum(other for _, other in paired_flaws)
        share_of_others = n_others / len(paired_flaws)
        value += f", {source} {n_others} of {len(paired_flaws)}"
    if share_of_others < 1:  # false without others
        n_policy_alone = paired_flaws.count((True, False))
        n_other_alone = paired_flaws.count((False, True))
    else:
        n_policy_alone, n_other_alone = n_flawed, 0
    probability = binomial_tail(n_policy_alone, n_policy_alone + n_other_alone)
    return Flawed(value, n_flawed == len(flaws), share_of_others, probability)


def empty_samples(run: Run) -> Iterator[Finding]:
    empty = _count_flawed(run, lambda continuation: not continuation.text.strip())
    if empty is None or (empty.probability > 0.1 and not empty.all_flawed):
        return
    if empty.all_flawed and empty.share_of_others == 1:
        why = (
            "The samples beside these are empty too: the model says nothing after these prompts whatever it is trained "
            "on. Look at the data and the archive that the run started from."
        )
    elif run.has_pairs:
        why = (
            "Probability that training takes from rejected responses often goes to empty answers: take an earlier "
            f"checkpoint, or train with a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
        )
    else:
        why = "Look for empty targets in the data, and take an earlier checkpoint."
    yield Finding(
        WARNING if empty.probability <= 0.05 else NOTE,
        "The policy says nothing" if empty.all_flawed else "Some of the policy's samples are empty",
        empty.value,
        f"An empty sample has no text: the policy ends it at once, or writes only white space. {why}",
    )


def cut_off_samples(run: Run) -> Iterator[Finding]:
    cut_off = _count_flawed(run, lambda sample: None if sample.is_ended is None else not sample.is_ended)
    if cut_off is None:
        return
    if cut_off.share_of_others < 1 and cut_off.probability <= 0.1:
        yield Finding(
            WARNING if cut_off.probability <= 0.05 else NOTE,
            "The policy's samples are cut off more often",
            cut_off.value,
            "The policy writes longer answers, or answers without an end. Read these samples: if they are good as far "
            "as they go, raise n_eval_tokens; if they repeat themselves or ramble, take an earlier checkpoint, or "
            "train with a smaller lr or fewer epochs.",
        )
    elif cut_off.all_flawed:
        yield note(
            "All samples are cut off",
            cut_off.value,
            f"No sample of the policy ends within n_eval_tokens={run.setting('n_eval_tokens')} and max_length. Raise "
            "these keys or, if answers never end, start from a model that SFT (loss=sft) taught to end them.",
        )


def sample_lengths(run: Run) -> Iterator[Finding]:
    """Policy's samples much longer or shorter than others of the same prompts.

    Empty samples do not count. One very long sample alone moves the means, so lengths must also differ prompt by
    prompt, by more than chance.
    """
    pairs, source = _pair_samples(run)
    n_words = [(len(policy.text.split()), len(other.text.split())) for policy, other in pairs]
    not_empty = [pair for pair in n_words if min(pair) > 0]
    if len(not_empty) < 8:  # too few for an interval
        return
    policy_words, other_words = np.array(not_empty, dtype=float).T  # (pairs,) each
    policy_mean, other_mean = policy_words.mean(), other_words.mean()
    ratio = policy_mean / other_mean
    if max(ratio, 1 / ratio) < 1.5 or abs(policy_mean - other_mean) < 5:
        return
    mean_log_ratio, half_width = mean_and_bound(np.log(policy_words / other_words))
    low, high = mean_log_ratio - half_width, mean_log_ratio + half_width
    is_beyond_chance = (low > 0) if ratio > 1 else (high < 0)
    if not is_beyond_chance:
        return
    least, typical, most = (figure(math.exp(log_ratio), 2) for log_ratio in (low, mean_log_ratio, high))
    value = (
        f"{figure(policy_mean)} word{'' if policy_mean == 1 else 's'} on average, {source} {figure(other_mean)} "
        f"({count(len(not_empty), 'sample')}); after the same prompt {typical} times as many words, "
        f"98 % interval {least} to {most}"
    )
    if ratio > 1:
        yield warning(
            "The policy's samples have become long",
            value,
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length.",
        )
    else:
        yield warning(
            "The policy's samples have become short",
            value,
            "Read the samples: if they break off or give up early, take an earlier checkpoint, or train with a smaller "
            "lr.",
        )


# --- pairs drawn from the policy --------------------------------------------------------------------------------------


def accuracies_online(run: Run) -> Iterator[Finding]:
    accuracies = {TRAIN_ACCURACY: run.tail("train", TRAIN_ACCURACY), EVAL_ACCURACY: run.eval.last(EVAL_ACCURACY)}
    values = [f"{name} {figure(value)}" for name, value in accuracies.items() if math.isfinite(value)]
    if values:
        draws_labels = run.setting("online.labels") == "bradley_terry"
        labels = "the labels drawn from the scores" if draws_labels else "the scorer"
        offline_share = number(run.setting("online.mix_offline"))
        mixed = f", but for the {percent(offline_share)} from the datasets" if offline_share > 0 else ""
        yield note(
            "What accuracies mean here",
            "; ".join(values),
            f"Training pairs are new answers of the policy{mixed}: their accuracy says how often its implicit rewards "
            f"agree with {labels} on answers that the policy was not yet trained on. This accuracy need not rise. "
            "Evaluation pairs have labels of the datasets, which the scorer does not know. Go by "
            "online_eval/score and online_eval/win_rate, on held-out prompts; BEST goes by the score.",
        )


def win_rate(run: Run) -> Iterator[Finding]:
    """Held-out answers that lose against the reference's."""
    rate, error = (run.eval.last(f"online_eval/win_rate{suffix}") for suffix in ("", "_se"))
    n = n_evaluated(run, "prompts")
    if n >= 8 and rate + Z_98 * error < 0.5:  # with 7 prompts, chance alone does this in 6 % of the evaluations
        yield warning(
            "The reference's answers are better",
            f"online_eval/win_rate {figure(rate)}, standard error {figure(error)}, on {count(n, 'held-out prompt')}",
            "By the scorer, the policy's answers to held-out prompts are worse than the reference's. Take an earlier "
            "checkpoint (BEST has the highest online_eval/score), or train with a smaller lr or a larger loss.beta.",
        )


def unfinished_answers(run: Run) -> Iterator[Finding]:
    share_ended, limit = run.tail("train", "online/eos"), run.setting("online.max_new_tokens")
    n = _count_drawn_in_tail(run, "online/eos")
    if is_below(share_ended, 0.9, n):
        has_penalty = number(run.setting("online.missing_eos_penalty")) > 0
        penalty = "" if has_penalty else "set online.missing_eos_penalty, "
        most_are_cut_off = is_below(share_ended, 0.5, n)
        yield Finding(
            WARNING if most_are_cut_off else NOTE,
            "Most answers are cut off" if most_are_cut_off else "Some answers are cut off",
            f"online/eos {figure(share_ended)}: this share of answers ends within online.max_new_tokens={limit}",
            "The scorer rates answers without an end, and the policy does not learn where to stop. Raise "
            f"online.max_new_tokens, {penalty}or start from a model that SFT (loss=sft) taught to end its answers.",
        )


def _count_drawn_in_tail(run: Run, name: str) -> float:
    """Number of prompts behind `run.tail` of a metric of drawn answers.

    Prompts with a pair from the datasets do not count. The answers to one prompt count as one: they may be alike.
    """
    _, last_values = run.ends(name)
    share_drawn = 1 - number(run.setting("online.mix_offline", 0))
    return len(last_values) * number(run.setting("batch_size", 1)) * share_drawn


def ties(run: Run) -> Iterator[Finding]:
    share = run.tail("train", "online/ties")
    if not is_above(share, 0.5, _count_drawn_in_tail(run, "online/ties")):
        return
    skips = run.setting("online.ties") == "skip"
    if skips:
        effect = "online.ties=skip leaves ties out, so the gradient comes from few pairs, or from none."
    else:
        effect = (
            "online.ties=keep trains on ties, with either answer as the chosen one: on average this pulls the "
            "log-ratios of both answers together, and teaches nothing about better answers."
        )
    keys_to_raise = "online.temperature"
    if run.setting("online.labels") != "bradley_terry":  # DPO on drawn labels needs exactly two answers
        keys_to_raise = f"online.n_samples or {keys_to_raise}"
    yield Finding(
        WARNING if skips else NOTE,
        "Most prompts give a tie",
        f"online/ties {figure(share)}; online.n_samples {run.setting('online.n_samples')}",
        f"The best and the worst answer to a prompt had the same score, or were the same text. {effect} To get fewer "
        f"ties, raise {keys_to_raise}, or use a scorer with finer scores. Late in a run, ties may mean "
        "that all answers have the highest score, or that the policy always gives the same one.",
    )


def scores(run: Run) -> Iterator[Finding]:
    first, last = run.ends("online/score")
    if len(run.train.points("online/score")[1]) < 20:  # so few that `first` and `last` overlap
        return
    change, bound = change_and_bound(first, last)
    gap = run.tail("train", "online/score_best") - run.tail("train", "online/score_worst")
    value = (
        f"online/score {figure(first.mean())} over the first {count(len(first), 'update')}, {figure(last.mean())} over "
        f"the last; change {signed(change)}, 98 % interval {signed(change - bound)} to {signed(change + bound)}"
    )
    if change > bound:
        yield note(
            "Scores rise",
            value,
            "Answers drawn later score higher. Read some: the policy may exploit errors of the scorer.",
        )
    elif change < -bound:
        yield warning(
            "Scores have fallen",
            value,
            "The policy gives worse answers by its own scorer: use a smaller lr or a larger loss.beta.",
        )
    elif change + bound < 0.1 * gap:
        yield warning(
            "Scores have not risen",
            f"{value}; best minus worst answer {figure(gap)}",
            "Any rise of scores is less than a tenth of the difference between the best and the worst answer to a "
            "prompt. The policy has not learned what the scorer rewards: lr may be too low, loss.beta too high, the "
            "run too short, or most pairs ties.",
        )
    else:
        yield note(
            "No clear change in scores",
            value,
            "The updates are too few, or their scores vary too much, to see whether answers get better. Compare "
            "online_eval/score, which has the same prompts each time, or train for more updates.",
        )


def scores_with_length(run: Run) -> Iterator[Finding]:
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
        if len(first) < 2:  # too few for an error
            continue
        change, bound = change_and_bound(first, last)
        if change < -bound:
            fallen_metrics += f"; {name} {figure(first.mean())} at first, {figure(last.mean())} now"
    advice = ", and consider a larger loss.beta, a smaller lr or fewer updates" if fallen_metrics else ""
    yield Finding(
        WARNING if fallen_metrics else NOTE,
        "The policy has gone far from the reference",
        f"online/kl {figure(nats)} nats{per_token}{fallen_metrics}",
        f"The pairs' answers are, by the geometric mean, e^{figure(nats)} times as likely under the policy as under "
        "the reference. Long answers reach that easily, but a policy so far away often exploits errors of the scorer: "
        f"read what was drawn{advice}.",
    )


def time_to_draw(run: Run) -> Iterator[Finding]:
    seconds = update_seconds(run)
    is_known = np.isfinite(seconds) & np.isfinite(run.train["online/sampling_share"])
    if not is_known.any():
        return
    shares = []
    for name in ("sampling", "scoring"):
        seconds_spent = (run.train[f"online/{name}_share"] * seconds)[is_known]
        shares.append(f"{name} {percent(float(np.nansum(seconds_spent) / seconds[is_known].sum()))}")
    yield note(
        "Time for drawing pairs",
        f"{', '.join(shares)} of the time in updates",
        "The rest is the time that an update on given pairs takes. To make sampling shorter, lower online.n_samples or "
        "online.max_new_tokens, or raise online.batch_size, the number of prompts that are answered at a time.",
    )
