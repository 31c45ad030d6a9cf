"""Findings on a run that draws its pairs from the policy: rules as in `findings.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dpo.analysis.cost import seconds_of_updates
from dpo.analysis.findings import NOTE, WARNING, Finding
from dpo.analysis.runs import Run, number
from dpo.wording import count, figure, percent

FEWEST = 20  # updates needed to compare the first with the last
ENDED = 0.9  # share of answers that should end
CUT_OFF = 0.5  # a smaller share is a fault
TIED = 0.5  # of the prompts, or more
LONGER = 1.5  # times the length at first
TOGETHER = 0.5  # correlation of score and length
FAR = 10.0  # nats from the reference; e^10 is 22,000


def beginning(run: Run, name: str) -> np.ndarray:
    """Values of the first tenth of the updates, at least 10."""
    values = run.train.points(name)[1]
    return values[: max(10, len(values) // 10)]


def end(run: Run, name: str) -> np.ndarray:
    """Values of the last tenth of the updates, at least 10."""
    values = run.train.points(name)[1]
    return values[-max(10, len(values) // 10) :]


def cut_off(run: Run) -> Iterator[Finding]:
    """Answers cut off before their end."""
    ended = run.tail("train", "online/eos")
    if ended < ENDED:
        most, penalty = run.setting("online.max_new_tokens"), number(run.setting("online.missing_eos_penalty"))
        advice = (
            "Raise online.max_new_tokens, or begin with a model that was trained (loss=sft) to end its answers"
            if penalty > 0
            else "Raise online.max_new_tokens, set online.missing_eos_penalty, or begin with a model that was trained "
            "(loss=sft) to end its answers"
        )
        yield Finding(
            WARNING if ended < CUT_OFF else NOTE,
            "Most answers are cut off" if ended < CUT_OFF else "Some answers are cut off",
            f"online/eos {figure(ended)}: so many end within online.max_new_tokens={most}",
            "The scorer sees texts without an end, and the policy does not learn where to stop. " + advice + ".",
        )


def ties(run: Run) -> Iterator[Finding]:
    """Prompts whose answers all tie."""
    share = run.tail("train", "online/ties")
    if share >= TIED:
        kept = run.setting("online.ties") == "keep"
        cost = (
            "They count as pairs (online.ties=keep), and teach whichever answer was drawn first"
            if kept
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
    first, last = beginning(run, "online/score"), end(run, "online/score")
    if len(run.train.points("online/score")[0]) < FEWEST:
        return
    before, after = float(first.mean()), float(last.mean())
    error = _error(first, last)
    value = f"online/score {figure(before)} over the first {count(len(first), 'update')}, {figure(after)} over the last"
    if after <= before + 2 * error:
        yield Finding(
            WARNING,
            "Scores have not risen",
            f"{value}; two standard errors {figure(2 * error)}",
            "The policy has not learned what the scorer rewards: lr may be too low, loss.beta too high, the run too "
            "short, or most pairs ties.",
        )
    else:
        yield Finding(NOTE, "Scores rise", value, "Answers that are drawn later have higher scores.")


def length_of_scores(run: Run) -> Iterator[Finding]:
    """Scores that rise with the length of answers."""
    by_update = np.stack([run.train[name] for name in ("online/score", "online/length")])
    by_update = by_update[:, np.isfinite(by_update).all(0)]
    if by_update.shape[1] < FEWEST or not (by_update.std(1) > 0).all():
        return
    together = float(np.corrcoef(by_update)[0, 1])
    before, after = float(beginning(run, "online/length").mean()), float(end(run, "online/length").mean())
    if after >= LONGER * before and together >= TOGETHER:
        yield Finding(
            WARNING,
            "Scores and lengths grow together",
            f"online/length {figure(before)} tokens at first, {figure(after)} now; correlation of online/score and "
            f"online/length over the updates {figure(together, 2)}",
            "The scorer may reward length, and the policy exploit it. Read what was drawn: if answers only say the "
            "same in more words, correct the scorer, lower online.max_new_tokens or raise loss.beta.",
        )


def divergence(run: Run) -> Iterator[Finding]:
    """A policy far from the reference; a fault if its answers have become worse on the way."""
    nats, tokens = run.tail("train", "online/kl"), run.tail("train", "online/length")
    if not nats > FAR:
        return
    each = f", {figure(nats / tokens)} a token" if tokens > 0 else ""
    worse = {
        name: (float(first.mean()), float(last.mean()))
        for name in ("online/score", "online/eos")
        if len(first := beginning(run, name)) > 1 and len(last := end(run, name)) > 1 and _has_fallen(first, last)
    }
    fell = "".join(
        f"; {name} {figure(before)} at first, {figure(after)} now" for name, (before, after) in worse.items()
    )
    yield Finding(
        WARNING if worse else NOTE,
        "The policy has gone far from the reference",
        f"online/kl {figure(nats)} nats{each}{fell}",
        f"By the geometric mean, the pairs' answers are e^{figure(nats)} times as likely under the policy as under "
        "the reference; for long answers that is ordinary. That far away scores often rise by what the scorer "
        "overlooks: read what was drawn"
        + (", and consider a larger loss.beta, a smaller lr or fewer updates." if worse else "."),
    )


def _has_fallen(first: np.ndarray, last: np.ndarray) -> bool:
    """Whether the mean fell by more than two standard errors of the difference."""
    return float(last.mean()) < float(first.mean()) - 2 * _error(first, last)


def _error(first: np.ndarray, last: np.ndarray) -> float:
    """Standard error of a difference of means."""
    return math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))


def accuracies(run: Run) -> Iterator[Finding]:
    """Meaning of accuracies when pairs are drawn."""
    train, held_out = run.tail("train", "rewards_train/accuracies"), run.eval.last("rewards_eval/accuracies")
    values = [
        f"{name} {figure(value)}"
        for name, value in (("rewards_train/accuracies", train), ("rewards_eval/accuracies", held_out))
        if math.isfinite(value)
    ]
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


def time_to_draw(run: Run) -> Iterator[Finding]:
    """Share of the time that drawing the pairs takes."""
    seconds = seconds_of_updates(run)
    parts = {name: run.train[f"online/{name}_share"] for name in ("sampling", "scoring")}
    there = np.isfinite(seconds) & np.isfinite(parts["sampling"])
    if not there.any():
        return
    shares = {name: float(np.nansum((part * seconds)[there]) / seconds[there].sum()) for name, part in parts.items()}
    yield Finding(
        NOTE,
        "What drawing the pairs takes",
        ", ".join(f"{name} {percent(share)}" for name, share in shares.items()) + " of the time in updates",
        "The rest is what an update on given pairs takes. Fewer or shorter answers (online.n_samples, "
        "online.max_new_tokens), or a larger eval_batch_size, of which a batch of prompts is sampled at once, make "
        "sampling shorter.",
    )
