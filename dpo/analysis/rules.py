"""The report's rules.

A rule's condition is a function of a run. It returns the numbers that the report shows, as text, or "" if the condition
does not hold; its docstring states the condition.
"""

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpo.analysis.runs import LoggedRun, number, read_run
from dpo.analysis.verdict import describe_result, find_changes_per_token
from dpo.numbers import count, figure, percent, signed
from dpo.settings.keys import HELD_OUT_SCORE

NOTE = "note"  # worth knowing, but often no fault
COLLAPSE_ADVICE = "it seldom recovers: start again with a tenth of lr, more warmup_steps or a larger batch_size"
FEWEST_UPDATES = 20  # after fewer, the metrics of training or of an evaluation say too little

# The kinds of data are the keys of TRAINS_ON, and "online".
RANKED = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = RANKED | {"labels", "targets"}  # these examples are a dataset's; an online run's change with the policy
ANY = FIXED | {"online"}


def find_skipped_updates(run: LoggedRun) -> str:
    """An update's loss or gradient norm was NaN or infinite, and not just because of float16's loss scale."""
    losses = run.train["loss/train"]
    # In float16 a gradient may overflow although its loss is finite; then the next update has a smaller loss scale.
    has_overflowed = np.isfinite(losses) & (run.train["loss_scale"] > 1)
    # A sum of loss and norm is finite only if both are.
    is_skipped = ~np.isfinite(losses + run.train["grad_norm"]) & ~has_overflowed
    skipped = list(run.train["updates"][is_skipped])
    if run.state == "aborted":  # the update that it aborted on was not logged
        skipped.append(run.last_nonfinite)
    return f"{len(skipped):,} of {count(run.updates, 'update')}, the first {skipped[0]:,.0f}" if skipped else ""


def find_collapse(run: LoggedRun) -> str:
    """The loss has risen by more than 4 times its first absolute value and by more than 2, and margins have not grown.

    The loss and margin now are the median and the mean of the last 16 updates. The first ones are from the evaluation
    before training, if there is one, else from the first update.
    """
    is_finite = np.isfinite(run.train["loss/train"])
    losses = run.train["loss/train"][is_finite]
    margins = run.train["rewards_train/margins"][is_finite]
    # `needs_squares` is true only with loss.wpo, whose weights change with the policy: a higher loss means nothing.
    if len(losses) < 16 or run.objective.needs_squares:
        return ""
    first_loss = losses[0]
    first_margin = margins[0]
    if run.eval.has("loss/eval") and run.eval["examples"][0] == 0:  # means over more examples than an update has
        first_loss = run.eval["loss/eval"][0]
        first_margin = run.eval["rewards_eval/margins"][0]
    loss_now = np.median(losses[-16:])
    margin_grows = margins[-16:].mean() > first_margin  # false for NaN, which margins are if there are no pairs
    if margin_grows or loss_now <= first_loss + 4 * max(abs(first_loss), 0.5):
        return ""
    return f"loss/train {figure(loss_now)} now, {figure(first_loss)} at the start"


def find_chosen_fall(run: LoggedRun) -> str:
    """Chosen responses lost more than half a nat per token, or more than 0.1 and more than the margin grew."""
    changes, _ = find_changes_per_token(run)
    if len(changes) < 2 or not run.objective.margin_only:  # only a loss of the margin alone lets both fall freely
        return ""
    chosen = changes["chosen"]
    rejected = changes["rejected"]
    if -chosen <= min(0.5, max(0.1, chosen - rejected)):
        return ""
    return f"change of held-out log-probabilities per token: chosen {signed(chosen)}, rejected {signed(rejected)}"


def find_overfitting(run: LoggedRun) -> str:
    """The held-out loss is more than a tenth and more than 0.02 above its lowest value, but the training loss fell."""
    examples, losses = run.eval.points("loss/eval")
    before, now = run.means_at_ends("loss/train")
    if len(losses) < 2 or run.updates < FEWEST_UPDATES or now >= before:
        return ""
    best = losses.argmin()
    if losses[-1] - losses[best] <= max(0.1 * abs(losses[best]), 0.02):
        return ""
    held_out = f"loss/eval {figure(losses[best])} at {count(examples[best], 'example')}, {figure(losses[-1])} at last"
    return f"{held_out}; loss/train {figure(before)} at first, {figure(now)} now"


def find_better_checkpoint(run: LoggedRun) -> str:
    """The metric that ranks checkpoints was better at the checkpoint BEST than at the last evaluation."""
    metric, sign = run.objective.best  # sign: +1 if higher is better, else -1
    if run.eval.has(HELD_OUT_SCORE):
        metric, sign = HELD_OUT_SCORE, +1
    examples, values = run.eval.points(metric)
    at_best = values[examples == run.best_at]  # several values if a resumed run evaluated there again
    if not len(at_best) or sign * at_best[-1] <= sign * values[-1]:
        return ""
    return f"{metric} {figure(at_best[-1])} at {count(run.best_at or 0, 'example')}, {figure(values[-1])} at last"


def is_broken(text: str) -> bool:
    """Whether a text is empty or repeats itself: prose compresses to half its size, a repeated sentence to a fifth."""
    content = text.strip().encode("utf-8", "replace")
    return not content or (len(content) >= 200 and len(zlib.compress(content)) < 0.25 * len(content))


def find_broken_samples(run: LoggedRun) -> str:
    """All newest samples are broken, or a tenth of them and twice as many as of the reference's, if there are any."""
    samples = run.newest_samples()
    n_policy = sum(is_broken(sample["policy"]) for sample in samples)
    # a missing answer of the reference counts as broken
    n_reference = sum(is_broken(sample["reference"] or "") for sample in samples)
    is_usual = n_policy < 0.1 * len(samples) or n_policy < 2 * n_reference
    if not n_policy or (is_usual and n_policy < len(samples)):
        return ""
    return f"{n_policy} of {count(len(samples), 'sample')}"


def find_length_change(run: LoggedRun) -> str:
    """Newest samples and the reference's differ in mean length by half and by 5 words, and in a sign test."""
    lengths = []  # (words of a sample, words of the reference's)
    for sample in run.newest_samples():
        n_words = [len(text.split()) for text in (sample["policy"], sample["reference"] or "")]
        if min(n_words) > 0:
            lengths.append(n_words)
    if not lengths:
        return ""
    n_sample, n_reference = np.transpose(lengths)
    shorter, longer = sorted([n_sample.mean(), n_reference.mean()])
    surplus = np.sign(n_sample - n_reference).sum()  # how many samples are longer, minus how many are shorter
    by_chance = 2 * math.sqrt(len(lengths))  # two standard errors of a sign test
    if longer < max(1.5 * shorter, shorter + 5) or abs(surplus) < by_chance:
        return ""
    return f"{figure(n_sample.mean())} words on average, of the reference {figure(n_reference.mean())}"


def find_length_bias(run: LoggedRun) -> str:
    """The chosen response is the longer one in at least four fifths of the training pairs, or in at most one fifth."""
    share = run.counted("train.chosen_longer")  # NaN if not recorded, for which the comparison is false
    return f"chosen is longer in {percent(share)} of the training pairs" if abs(share - 0.5) >= 0.3 else ""


def find_uneven_labels(run: LoggedRun) -> str:
    """The total weight of desirable training responses is not 1 to 4/3 times the total weight of undesirable ones.

    KTO's paper advises such a ratio; one that is slightly outside is accepted.
    """
    desirable = number(run.setting("loss.desirable_weight")) * run.counted("train.desirable")
    undesirable = number(run.setting("loss.undesirable_weight")) * run.counted("train.undesirable")
    # `not ... > 0` is true for NaN too, the value of a number that was not recorded
    if not min(desirable, undesirable) > 0 or 0.99 <= desirable / undesirable <= 1.35:
        return ""
    return f"desirable responses weigh {figure(desirable / undesirable)} times as much as undesirable ones"


def find_length_growth(run: LoggedRun) -> str:
    """Drawn answers are at least 1.5 times as long as at first, and score higher."""
    length, length_now = run.means_at_ends("online/length")
    score, score_now = run.means_at_ends("online/score")
    if not (length_now >= 1.5 * length and score_now > score):
        return ""
    before = f"{figure(length)} tokens, score {figure(score)} at first"
    return f"{before}; {figure(length_now)} tokens, score {figure(score_now)} now"


def find_cut_off(run: LoggedRun) -> str:
    """Over the last tenth of the updates, less than 0.9 of the drawn answers ended before the limit."""
    _, share = run.means_at_ends("online/eos")
    return f"online/eos {figure(share)}" if share < 0.9 else ""


class Rule(NamedTuple):
    title: str
    condition: Callable[[LoggedRun], str]  # returns the numbers to show, or "" if it does not hold
    advice: str
    kinds: frozenset[str] = ANY  # the kinds of data that the rule applies to
    level: str = "warning"


RULES = (  # in the order of the page
    Rule("Loss or gradient was not a number", find_skipped_updates,
         "Look at the examples in nonfinite-UPDATE; if they are sound, lower lr, or replace float16 by bfloat16."),
    Rule("The run has collapsed", find_collapse,
         f"{COLLAPSE_ADVICE.capitalize()}."),
    Rule("Chosen responses become much less likely", find_chosen_fall,
         "Read the samples; try a larger loss.beta, a smaller lr, fewer epochs, loss.sft_weight or loss=dpop.", RANKED),
    Rule("The held-out loss rises while the training loss falls", find_overfitting,
         "Take the checkpoint of the lowest value, or train for fewer epochs.",
         FIXED),
    Rule("Samples are empty or repeat themselves", find_broken_samples,
         "Train with a smaller lr, fewer epochs or a larger loss.beta; if the first samples were so too, look at the "
         "prompts."),
    Rule("Samples have changed in length", find_length_change,
         "Balance the lengths of the pairs, raise loss.beta, or try loss=simpo or loss=dpo_norm.",
         RANKED | {"online"}),
    Rule("Scores and lengths grow together", find_length_growth,
         "If answers only say the same in more words, change the scorer, or lower online.max_new_tokens."),
    Rule("An earlier checkpoint is better", find_better_checkpoint,
         "Use the checkpoint BEST; on few held-out examples the best of many is in part luck.",
         level=NOTE),
    Rule("Length predicts the preference in the data", find_length_bias,
         "Such pairs can be ranked by length alone: compare the lengths of samples.", RANKED, NOTE),
    Rule("One label has most of the weight", find_uneven_labels,
         "Set loss.desirable_weight and loss.undesirable_weight: KTO's paper advises a ratio of 1 to 4/3.",
         level=NOTE),
    Rule("Drawn answers are cut off", find_cut_off,
         "Raise online.max_new_tokens, set online.missing_eos_penalty, or begin with SFT.", level=NOTE),
)  # fmt: skip


def find_all(run: LoggedRun) -> list[tuple[Rule, str]]:
    """Return the rules whose conditions hold for a run, each with its numbers as text."""
    kind = "online" if run.train.has("online/score") else run.objective.trains_on
    findings = []
    for rule in RULES:
        if kind in rule.kinds and (numbers := rule.condition(run)):
            findings.append((rule, numbers))
    return findings


def print_result(run_dir: Path) -> None:
    """Print the directory and the verdict of a run, and whether BEST is better than its last checkpoint."""
    run = read_run(run_dir)
    print(f"run directory: {run_dir}")
    print(describe_result(run), flush=True)
    if comparison := find_better_checkpoint(run):
        print(f"BEST is better than LATEST: {comparison}")
