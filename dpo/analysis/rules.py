"""The report's rules; a condition returns the numbers that it is about, or "" if it does not hold."""

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from dpo.analysis.runs import Run, number
from dpo.analysis.verdict import (
    EVAL_ACCURACY,
    SMALL_CHANGE,
    compare_answers,
    find_changes_per_token,
    n_effective,
    n_evaluated,
    share_interval,
)
from dpo.numbers import count, figure, percent, signed
from dpo.settings.keys import HELD_OUT_SCORE, STEPS_OF_LR

WARNING, NOTE = "warning", "note"  # a note is worth knowing, and often no fault
FEWEST_UPDATES = 20  # fewer say too little

# kinds of data: those of TRAINS_ON, and online
ONLINE = frozenset({"online"})
PAIRS = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = PAIRS | {"labels", "targets"}  # examples of datasets; those of an online run change with the policy
ANY = FIXED | ONLINE

FAULTS = ("contradictory_pairs", "contradictory_labels", "empty_responses")  # counts of the preflight


def skipped_updates(run: Run) -> str:
    has_overflowed = np.isfinite(run.train["loss/train"]) & (run.train["loss_scale"] > 1)  # float16's, as it may
    is_skipped = ~np.isfinite(run.train["loss/train"] + run.train["grad_norm"]) & ~has_overflowed
    skipped = [*run.train.updates[is_skipped], *(run.nonfinite[-1:] if run.state == "aborted" else ())]
    return f"{len(skipped):,} of {count(run.updates, 'update')}, the first {skipped[0]:,.0f}" if skipped else ""


def collapsed(run: Run) -> str:
    """Half of the last 16 losses are 5 times the first (at least 0.5), and margins do not grow."""
    is_finite = np.isfinite(run.train["loss/train"])
    losses, margins = (run.train[name][is_finite] for name in ("loss/train", "rewards_train/margins"))
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if len(losses) < 16 or run.objective.needs_squares:
        return ""
    first, first_margin, now = losses[0], margins[0], np.median(losses[-16:])
    if run.eval.has("loss/eval") and run.eval.examples[0] == 0:
        first, first_margin = run.eval["loss/eval"][0], run.eval["rewards_eval/margins"][0]
    grows = margins[-16:].mean() > first_margin  # false without pairs
    is_high = now > first + 4 * max(abs(first), 0.5)
    return f"loss/train {figure(now)} now, {figure(first)} at the start" if is_high and not grows else ""


def describe_changes(changes: Mapping[str, float]) -> str:
    shown = ", ".join(f"{side} {signed(change)}" for side, change in changes.items())
    return f"change of held-out log-probabilities per token: {shown}"


def chosen_falls(run: Run) -> str:
    """Chosen responses that lost more than the margin grew, and a tenth of a nat a token, or half a nat."""
    changes, _ = find_changes_per_token(run)
    if len(changes) < 2 or not run.objective.margin_only:
        return ""
    fall, margin = -changes["chosen"], changes["chosen"] - changes["rejected"]
    return describe_changes(changes) if fall > 0.5 or fall > max(0.1, margin) else ""


def no_better_than_chance(run: Run) -> str:
    accuracy = run.eval.last(EVAL_ACCURACY)
    if run.updates < FEWEST_UPDATES or not math.isfinite(accuracy):
        return ""
    low, high = share_interval(accuracy, n_effective(run))
    pairs, interval = count(n_evaluated(run), "pair"), f"95 % interval {figure(low)} to {figure(high)}"
    return f"{EVAL_ACCURACY} {figure(accuracy)} on {pairs}, {interval}" if high < 0.55 else ""


def overfitted(run: Run) -> str:
    examples, losses = run.eval.points("loss/eval")
    before, now = run.ends("loss/train")
    if len(losses) < 2 or run.updates < FEWEST_UPDATES or now >= before:
        return ""
    best = losses.argmin()
    if losses[-1] - losses[best] <= max(0.1 * abs(losses[best]), 0.02):
        return ""
    held_out = f"loss/eval {figure(losses[best])} at {count(examples[best], 'example')}, {figure(losses[-1])} at last"
    return f"{held_out}; loss/train {figure(before)} at first, {figure(now)} now"


def best_is_earlier(run: Run) -> str:
    name, sign = (HELD_OUT_SCORE, +1) if run.eval.has(HELD_OUT_SCORE) else run.objective.best
    examples, values = run.eval.points(name)
    at_best = values[examples == run.best]  # two, if a resumed run evaluated again there
    if not len(at_best) or sign * (at_best[-1] - values[-1]) <= 0:
        return ""
    return f"{name} {figure(at_best[-1])} at {count(run.best or 0, 'example')}, {figure(values[-1])} at last"


def without_effect(run: Run) -> str:
    if run.state != "complete":
        return ""
    peak, largest = number(run.setting("lr")), np.max(run.train.points("lr")[1], initial=0)
    is_scaled = run.setting("lr_scaling", "none") != "none"  # by a factor that is not recorded
    if 0 < largest < 0.999 * peak and not is_scaled:
        return f"lr {largest:.3g} at most, of {peak:.3g}, in {count(run.updates, 'update')}"
    changes, _ = find_changes_per_token(run)
    has_effect = compare_answers(run)[0] > 0 or max(map(abs, changes.values()), default=math.inf) >= SMALL_CHANGE
    return "" if has_effect else describe_changes(changes)


def clipped(run: Run) -> str:
    """Clipping matters only to optimizers whose steps grow with the gradient."""
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    if run.setting("optimizer") in STEPS_OF_LR:
        return ""
    share = (norms > limit).mean() if len(norms) >= FEWEST_UPDATES else 0.0
    return f"grad_norm above {figure(limit)} in {percent(share)} of the updates" if share >= 0.9 else ""


def is_broken(text: str) -> bool:
    """Empty, or repeating itself: English compresses to half its size, a repeated sentence to a fifth."""
    content = text.strip().encode("utf-8", "replace")
    return not content or (len(content) >= 200 and len(zlib.compress(content)) < 0.25 * len(content))


def broken_samples(run: Run) -> str:
    """A tenth of the samples, and twice as many as of those that they are compared with; or all."""
    samples = run.compared_samples()
    n_policy = sum(is_broken(sample["policy"]) for sample, _, _ in samples)
    n_other = sum(other is not None and is_broken(other) for _, _, other in samples)
    if not n_policy or n_policy < (len(samples) if 2 * n_other > n_policy else 0.1 * len(samples)):
        return ""
    return f"{n_policy} of {count(len(samples), 'sample')}; of the reference or at first {n_other}"


def sample_lengths(run: Run) -> str:
    """Samples that are longer, or shorter, than others to the same prompts, by half and by more than chance."""
    n_words = [(len(s["policy"].split()), len((other or "").split())) for s, _, other in run.compared_samples()]
    n_words = np.array([pair for pair in n_words if min(pair) > 0], dtype=float).reshape(-1, 2)
    if not len(n_words):
        return ""
    (after, before), longer = n_words.mean(axis=0), np.sign(n_words[:, 0] - n_words[:, 1]).sum()
    by_chance = 2 * math.sqrt(len(n_words))  # two standard errors of a sign test
    if max(after, before) < max(1.5 * min(after, before), min(after, before) + 5) or abs(longer) < by_chance:
        return ""
    return f"{figure(after)} words on average, of the reference or at first {figure(before)}"


def faulty_examples(run: Run) -> str:
    examples = run.count("train.examples")
    counts = {name: n for name in FAULTS if (n := run.count(f"train.{name}")) >= 0.01 * examples > 0}
    return ", ".join(f"{name} {n:,.0f} ({percent(n / examples)})" for name, n in counts.items())


def length_in_data(run: Run) -> str:
    share = run.count("train.chosen_longer")
    return f"chosen is longer in {percent(share)} of the training pairs" if abs(share - 0.5) >= 0.3 else ""


def uneven_labels(run: Run) -> str:
    desirable, undesirable = (
        number(run.setting(f"loss.{side}_weight")) * run.count(f"train.{side}") for side in ("desirable", "undesirable")
    )
    if not min(desirable, undesirable) > 0 or 0.99 <= desirable / undesirable <= 1.35:
        return ""
    return f"desirable responses weigh {figure(desirable / undesirable)} times as much as undesirable ones"


def answers_worse(run: Run) -> str:
    n, rate = n_evaluated(run, "prompts"), run.eval.last("online_eval/win_rate")
    if not math.isfinite(rate) or share_interval(rate, n)[1] >= 0.5:
        return ""
    return f"online_eval/win_rate {figure(rate)} on {count(n, 'held-out prompt')}"


def scores_with_length(run: Run) -> str:
    lengths, scores = run.ends("online/length"), run.ends("online/score")
    if not (lengths[1] >= 1.5 * lengths[0] and scores[1] > scores[0]):
        return ""
    before, after = (f"{figure(n)} tokens, score {figure(x)}" for n, x in zip(lengths, scores, strict=True))
    return f"{before} at first; {after} now"


def is_outside(run: Run, name: str, *, low: float = -math.inf, high: float = math.inf) -> str:
    value = run.now(name)
    return f"{name} {figure(value)}" if value < low or value > high else ""


class Rule(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    condition: Callable[[Run], str]  # returns the numbers that it is about
    advice: str
    kinds: frozenset[str] = ANY  # of data


RULES = (  # in the order of the page
    Rule(WARNING, "Loss or gradient was not a number", skipped_updates,
         "Look at the examples in nonfinite-UPDATE; if they are sound, lower lr, or replace float16 by bfloat16."),
    Rule(WARNING, "The run has collapsed", collapsed,
         "It seldom recovers: start again with a tenth of lr, more warmup_steps or a larger batch_size."),
    Rule(WARNING, "Chosen responses become much less likely", chosen_falls,
         "Read the samples; try a larger loss.beta, a smaller lr, fewer epochs, loss.sft_weight or loss=dpop.", PAIRS),
    Rule(WARNING, "Held-out pairs are ranked no better than by chance", no_better_than_chance,
         "If training pairs are ranked right, more data is needed; if not, a larger lr or more updates.", PAIRS),
    Rule(WARNING, "The held-out loss rises while the training loss falls", overfitted,
         "Take the checkpoint of the lowest value, or train for fewer epochs.",
         FIXED),
    Rule(WARNING, "The learning rate had little effect", without_effect,
         "Raise lr, shorten warmup_steps, or train for more updates."),
    Rule(WARNING, "Samples are empty or repeat themselves", broken_samples,
         "Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta; if the first "
         "samples were so too, look at the prompts."),
    Rule(WARNING, "Samples have changed in length", sample_lengths,
         "Balance the lengths of the pairs, raise loss.beta, or try loss=simpo or loss=dpo_norm.",
         PAIRS | ONLINE),
    Rule(WARNING, "The answers are worse than the reference's", answers_worse,
         "Use a smaller lr or a larger loss.beta, and read the answers with the highest scores.", ONLINE),
    Rule(WARNING, "Scores and lengths grow together", scores_with_length,
         "If answers only say the same in more words, change the scorer, or lower online.max_new_tokens.", ONLINE),
    Rule(WARNING, "Most prompts give a tie", partial(is_outside, name="online/ties", high=0.5),
         "See whether the scorer is constant; raise online.temperature and online.n_samples.", ONLINE),
    Rule(NOTE, "An earlier checkpoint is better", best_is_earlier,
         "Use the checkpoint that the link BEST names; on few held-out examples the best of many is in part luck."),
    Rule(NOTE, "Nearly all gradients are clipped", clipped,
         "If this is not meant, raise max_grad_norm."),
    Rule(NOTE, "Length predicts the preference in the data", length_in_data,
         "Such pairs can be ranked by length alone: compare the lengths of samples.", PAIRS),
    Rule(NOTE, "Some examples contradict each other or are faulty", faulty_examples,
         "data_problems.jsonl lists them: correct or remove them."),
    Rule(NOTE, "One label has most of the weight", uneven_labels,
         "Set loss.desirable_weight and loss.undesirable_weight: KTO's paper advises a ratio of 1 to 4/3.", FIXED),
    Rule(NOTE, "Drawn answers are cut off", partial(is_outside, name="online/eos", low=0.9),
         "Raise online.max_new_tokens, set online.missing_eos_penalty, or begin with SFT.", ONLINE),
    Rule(NOTE, "The policy has gone far from the reference",  # answers are e^10 times as likely as before
         partial(is_outside, name="online/kl", high=10.0),
         "It may exploit errors of the scorer: read what was drawn; try a larger loss.beta or a smaller lr.", ONLINE),
)  # fmt: skip


def find_all(run: Run) -> list[tuple[Rule, str]]:
    kind = "online" if run.online else run.objective.trains_on
    return [(rule, value) for rule in RULES if kind in rule.kinds and (value := rule.condition(run))]
