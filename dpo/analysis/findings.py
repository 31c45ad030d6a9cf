"""Findings on how a run trained, each by a rule.

A finding has a title, the values that it is about, and what they mean. A finding that looks like a fault is a warning,
any other a note. docs/metrics.md has every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.instability import WHAT_TO_TRY, InstabilityDetector, Means
from dpo.analysis.loss_shapes import find_loss_shape
from dpo.analysis.measures import (
    SIDES,
    USEFUL,
    Z_98,
    MarginParts,
    accuracy_error,
    best_of_many_quantile,
    binomial_tail,
    change_and_bound,
    compare_evaluations,
    evaluated_pairs,
    evaluation_loss_error,
    find_change,
    find_start,
    is_above,
    is_below,
    is_inconclusive,
    margin_parts,
    mean_and_bound,
    mean_error,
    mean_near,
    n_evaluated,
    student_quantile,
    update_seconds,
    wilson_interval,
)
from dpo.analysis.runs import Run, last_tenth, number
from dpo.losses import LOSSES
from dpo.numbers import count, figure, percent, signed

WARNING, NOTE = "warning", "note"
TRAIN_ACCURACY, EVAL_ACCURACY = "rewards_train/accuracies", "rewards_eval/accuracies"
SATURATED, NEARLY_SATURATED = 0.99, 0.95  # training accuracy; its interval's lower end
BLOCK = 50  # updates
FAST_FALL = 0.5  # nats a token between two blocks
GROWN_NORM = 5.0  # times the median of grad_norm after the warmup
LEAKED, MUCH_LEAKED = 0.01, 0.1  # of the test prompts
SPENT = 0.1  # a smaller fraction of the first gradients is nearly nothing
WAYS_TO_HOLD_CHOSEN_UP = "what holds chosen responses up: loss.sft_weight, loss=dpop, loss=apo_zero."


class Finding(NamedTuple):
    level: str  # WARNING or NOTE
    title: str
    value: str  # of the metrics it is about
    text: str


def warning(title: str, value: str, text: str) -> Finding:
    return Finding(WARNING, title, value, text)


def note(title: str, value: str, text: str) -> Finding:
    return Finding(NOTE, title, value, text)


# --- NaN, spikes, collapse --------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> Iterator[Finding]:
    folders = _list_first([f"nonfinite-{update}" for update in run.nonfinite], 3)
    skipped = []
    for line in run.train.lines:
        if any(name in line and math.isnan(number(line[name])) for name in ("loss/train", "grad_norm")):
            skipped.append(f"{number(line.get('updates')):,.0f}")
    if skipped:
        where_examples_are = f" Their examples are in {folders}." if run.nonfinite else ""
        yield warning(
            "Updates were skipped: loss or gradient was not a number",
            f"{len(skipped)} of {count(len(run.train), 'update')}: {_list_first(skipped, 6)}",
            "These updates did not change the weights. One such batch may be bad data; several mean that training is "
            f"unstable: lower lr, or look at the examples.{where_examples_are}",
        )
    if run.state.word == "aborted":
        yield warning(
            "The run ended on a loss or gradient that was not a number",
            f"update {run.nonfinite[-1]:,}",
            f"That update was not applied. Its examples are in {folders}, as a dataset that can be replayed.",
        )


def _list_first(names: list[str], n: int) -> str:
    return ", ".join(names[:n]) + (", ..." if len(names) > n else "")


def spikes(run: Run) -> Iterator[Finding]:
    for name, title in (("grad_norm", "Gradient spikes"), ("loss/train", "Loss spikes")):
        detector = InstabilityDetector(number(run.setting("batch_size", 1)), find_start(run))
        values = run.train[name].tolist()
        ratios = [detector.find_spike(name, value) or 0.0 for value in values]  # 0: no spike
        if not any(ratios):
            continue
        largest = max(ratios)
        row = ratios.index(largest)
        limit = run.setting("max_grad_norm") if name == "grad_norm" else None
        clipping = f" Gradients are clipped to {limit}, so no step was that large." if limit else ""
        n_spikes = sum(ratio > 0 for ratio in ratios)
        yield warning(
            title,
            f"{name} {figure(values[row])} at update {run.train.updates[row]:,.0f}, "
            f"{figure(largest, 2)} times its median before; {count(n_spikes, 'spike')} in all",
            f"One batch was far from what the model had seen just before.{clipping} If the loss does not come back "
            "after a spike, lower lr or lengthen the warmup.",
        )


def collapse(run: Run) -> Iterator[Finding]:
    start = find_start(run)
    if start is None or run.setting("loss.wpo"):  # weights of wpo move with the policy
        return
    detector = InstabilityDetector(number(run.setting("batch_size", 1)), start)
    value = _describe_training_collapse(run, detector, start)
    if value is None and not run.online:  # an online run follows its scorer, which held-out labels may contradict
        value = _describe_evaluation_collapse(run, detector, start)
    if value is not None:
        yield warning("The run has collapsed", value, WHAT_TO_TRY)


def _describe_training_collapse(run: Run, detector: InstabilityDetector, start: Means) -> str | None:
    """Describe the first updates that show a collapse; None without one."""
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    for update, loss, margin in zip(run.train.updates, losses.tolist(), margins.tolist(), strict=True):
        collapsed = detector.find_collapse(loss, margin)
        if collapsed is None:
            continue
        means, n_updates = collapsed
        finite_losses = losses[np.isfinite(losses) & np.isfinite(margins)]
        last_mean = finite_losses[-n_updates:].mean()
        window = f"over the {n_updates} updates up to {update:,.0f}"
        return (
            f"loss/train {figure(means.loss)} {window}, {figure(last_mean)} over the last {n_updates}, "
            f"{figure(start.loss)} at the start; rewards_train/margins {figure(means.margin)} {window}, "
            f"{_format_start_margin(start)} at the start"
        )
    return None


def _describe_evaluation_collapse(run: Run, detector: InstabilityDetector, start: Means) -> str | None:
    """Describe the first evaluation that shows a collapse; None without one."""
    losses, margins = run.eval["loss/eval"], run.eval["rewards_eval/margins"]
    for examples, loss, margin in zip(run.eval.examples, losses.tolist(), margins.tolist(), strict=True):
        if examples > 0 and detector.is_collapsed(Means(loss, margin)):
            return (
                f"loss/eval {figure(loss)} at {count(examples, 'example')}, {figure(run.eval.last('loss/eval'))} at "
                f"the last evaluation, {figure(start.loss)} at the start; rewards_eval/margins {figure(margin)}, "
                f"{_format_start_margin(start)} at the start"
            )
    return None


def _format_start_margin(start: Means) -> str:
    """Format the margin at the start, without rounding errors."""
    return figure(round(start.margin, 3) + 0.0)  # -0.0 + 0.0 is 0.0


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def best_checkpoint(run: Run) -> Iterator[Finding]:
    if run.best is None or run.best_metric is None:
        return
    name, sign = run.best_metric
    examples, values = run.eval.points(name)
    values_at_best = values[examples == run.best]  # `run.best`: examples trained on at the checkpoint BEST
    if not len(values_at_best):
        return
    best, last = values_at_best[-1], values[-1]  # a resumed run may have evaluated twice there
    if sign * (best - last) > 0:
        yield note(
            "BEST is better than the last evaluation",
            f"{name} {figure(best)} at {count(run.best, 'example')}, {figure(last)} at the last",
            f"The link BEST names step-{run.best}. On few held-out examples the best of many evaluations is in part "
            "luck.",
        )


def worse_than_reference(run: Run) -> Iterator[Finding]:
    examples, losses = run.eval.points("loss/eval")
    start = find_start(run)
    if not run.has_reference or start is None or not len(losses) or examples[-1] <= 0:
        return
    excess, bound = _bound_excess_loss(run, float(losses[-1]), start)
    if not excess > bound:  # false for NaN
        return
    yield warning(
        "By its own loss the policy is worse than the reference",
        f"loss/eval {figure(losses[-1])}, {figure(start.loss)} before training; the difference on "
        f"{count(n_evaluated(run), 'pair')} is {signed(excess)}, 98 % interval {signed(excess - bound)} to "
        f"{signed(excess + bound)}",
        "On held-out pairs this loss was lower before the first update: the policy is surer of its wrong rankings than "
        "its right ones make up for. Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger "
        "loss.beta. If accuracy is what matters, compare checkpoints by it.",
    )


def _bound_excess_loss(run: Run, last_loss: float, start: Means) -> tuple[float, float]:
    """Held-out loss above the start's, and its bound; NaN if unknown.

    The ledger gives both pair by pair. Without it, the loss must be a function of the margin: then it is the same for
    all pairs where policy and reference are equal, and its deviation follows from the mean loss and margin.
    """
    n, first, last = n_evaluated(run), run.eval.updates[0], run.eval.updates[-1]
    by_pair = compare_evaluations(run, "loss", first, last) if first == 0 else None
    if n < 2:
        return math.nan, math.nan
    if by_pair is not None:
        excess, error = by_pair
        return excess, student_quantile(int(n) - 1) * error
    shape = find_loss_shape(run.setting("loss"))
    if shape is None or shape.of_margin is None or not len(run.eval.points("rewards_eval/margins")[1]):
        return math.nan, math.nan
    # margins may have longer tails than normal ones
    deviation = 1.2 * shape.estimate_deviation(last_loss, run.eval.last("rewards_eval/margins"))
    return last_loss - start.loss, student_quantile(int(n) - 1) * deviation / math.sqrt(n)


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    examples, accuracies = run.train.points(TRAIN_ACCURACY)
    _, last_accuracies = run.ends(TRAIN_ACCURACY)
    if len(accuracies) < 5 or not last_accuracies.mean() >= SATURATED:
        return
    # accuracies of single batches jump, so saturation begins where a mean over `n` updates first shows it
    n = len(last_accuracies)
    n_pairs = n * number(run.setting("batch_size", 1))
    if not is_above(float(last_accuracies.mean()), NEARLY_SATURATED, n_pairs):
        return
    running_means = np.convolve(accuracies, np.ones(n) / n, mode="valid")
    since = examples[int(np.argmax(running_means >= SATURATED))]
    held_out_accuracy = run.tail("eval", EVAL_ACCURACY)
    held_out = f", {percent(held_out_accuracy)} of the held-out ones" if math.isfinite(held_out_accuracy) else ""
    left, how = _measure_gradient_left(run)
    value = (
        f"{TRAIN_ACCURACY} {figure(last_accuracies.mean())} over the last {n} updates; rewards_train/margins "
        f"{figure(run.tail('train', 'rewards_train/margins'))}{how}"
    )
    text = (
        f"Nearly every training pair is ranked right{held_out}, from about {count(since, 'example')} on: accuracy can "
        "tell nothing more. "
    )
    if left < SPENT:
        text += (
            "The loss has nearly no gradient left either: more updates change little. Stop earlier, use harder pairs "
            f"or, if {'rewards' if run.trains_reward_model else 'margins'} are larger than needed, a larger "
            f"{'loss.centering' if run.trains_reward_model else 'loss.beta'}."
        )
        yield warning("Accuracy and loss are saturated", value, text)
    else:
        text += "Updates still move the policy: go" if left >= SPENT else "Go"
        yield note("Accuracy is saturated", value, f"{text} by margins and samples.")


def _measure_gradient_left(run: Run) -> tuple[float, str]:
    """Measure which fraction of the first gradients is left, and say how.

    It is that of the loss by the mean rewards of an update, or else that of `grad_norm`. NaN if unknown.
    """
    first, last = ([run.ends(f"rewards_train/{side}")[end] for side in SIDES] for end in (0, 1))
    shape = find_loss_shape(run.setting("loss"))
    if shape is not None and min(map(len, last)) > 0 and len(last[0]) == len(last[1]):
        equal = np.zeros(1)  # rewards where policy and reference are equal
        before = shape.gradient(equal, equal) if run.has_reference else shape.gradient(first[0][:1], first[1][:1])
        left = float(shape.gradient(*last).mean() / before.mean())
        return left, f"; by the formula of loss={run.loss} a pair has {percent(left)} of its first gradient left"
    first_norms, last_norms = run.ends("grad_norm")
    if not len(first_norms):
        return math.nan, ""
    before, after = float(first_norms.mean()), float(last_norms.mean())
    first_updates = count(len(first_norms), "update")
    return after / before, f"; grad_norm {figure(before)} over the first {first_updates}, {figure(after)} now"


def reward_accuracy(run: Run) -> Iterator[Finding]:
    """Held-out accuracy of a reward model, with its interval."""
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not run.trains_reward_model or not len(values) or examples[-1] <= 0:
        return
    accuracy, n = float(values[-1]), n_evaluated(run)
    low, high = wilson_interval(accuracy, n)
    yield note(
        "How often the reward model agrees with held-out preferences",
        f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, 95 % interval {figure(low)} to {figure(high)}; "
        f"rewards_eval/margins {figure(run.eval.last('rewards_eval/margins'))}",
        "A policy that is trained on these rewards learns what the model learned of the preferences, with its errors. "
        "Only differences of rewards of the same prompt have a meaning.",
    )


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not len(values) or examples[-1] <= 0 or run.updates < 20:
        return
    accuracy, n = float(values[-1]), n_evaluated(run)
    low, high = wilson_interval(accuracy, n)
    value = f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, 95 % interval {figure(low)} to {figure(high)}"
    if low > 0.5 and high < USEFUL:
        yield note(
            "Held-out pairs are ranked little better than by chance",
            value,
            f"That is above chance, but by less than {figure(USEFUL - 0.5)}: what was learned carries over, but is "
            "little.",
        )
    elif high < USEFUL:
        yield warning(
            "Held-out pairs are ranked no better than by chance",
            value,
            "The policy has not learned a preference that carries over: lr may be too low, the run too short, or the "
            "preferences noise.",
        )
    elif is_inconclusive(accuracy, n):
        enough_pairs = 400  # 0.60 is then four standard errors above chance
        text = f"{count(n, 'pair')} cannot tell whether anything was learned."
        if n < enough_pairs:
            text += f" To tell an accuracy of 0.60 from chance takes about {enough_pairs}: {_advise_more_pairs(run)}."
        else:
            text += " If anything was, it is little."
        yield note("Held-out accuracy cannot be told from chance", value, text)


def new_training_pairs(run: Run) -> Iterator[Finding]:
    """Accuracy on new training pairs, if held-out pairs are too few."""
    examples, held_out = run.eval.points(EVAL_ACCURACY)
    is_open = len(held_out) > 0 and examples[-1] > 0 and is_inconclusive(float(held_out[-1]), n_evaluated(run))
    examples, accuracies = run.train.points(TRAIN_ACCURACY)
    accuracies = accuracies[examples <= run.count("epoch")]  # none if the count is lost
    late = accuracies[len(accuracies) // 2 :]
    if not is_open or len(late) < 20:
        return
    accuracy, bound = float(late.mean()), student_quantile(len(late) - 1) * mean_error(late)
    if accuracy - bound > 0.5:
        yield note(
            "New training pairs are ranked better than by chance",
            f"{TRAIN_ACCURACY} {figure(accuracy)} over the second half of the first epoch, 98 % interval "
            f"{figure(accuracy - bound)} to {figure(accuracy + bound)}",
            "An update ranks its pairs before it trains on them, so in a first epoch they are as new as held-out ones, "
            "of which there are too few to tell: something was learned that carries over.",
        )


def _advise_more_pairs(run: Run) -> str:
    available = run.count("test.examples")
    if not available > 0:
        return "raise n_eval_examples, if the test split has them"
    if n_evaluated(run) < available:
        return f"raise n_eval_examples, for the test split has {available:,.0f}"
    return f"the test split has only these {available:,.0f}, so put more pairs into it"


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that get worse while training gets better."""
    # under KTO all losses of an evaluation share its estimate of the KL, whose error is unknown
    if not len(run.eval.points("kto/kl/eval")[0]):
        yield from _find_turn(run, "loss", "loss/eval", "loss/train", sign=-1)
    yield from _find_turn(run, "accuracy", EVAL_ACCURACY, TRAIN_ACCURACY, sign=+1)


def _find_turn(run: Run, kind: str, eval_name: str, train_name: str, *, sign: int) -> Iterator[Finding]:
    """Find whether a metric's evaluation turned while training improved.

    `sign` is +1 if a higher value is better, -1 if a lower one is.
    """
    examples, values = run.eval.points(eval_name)
    updates = run.eval.updates[np.isfinite(run.eval[eval_name])]
    if len(values) < 2:
        return
    best_index = int(np.argmax(sign * values))
    best, last = float(values[best_index]), float(values[-1])
    examples_at_best, examples_at_last = examples[best_index], examples[-1]
    train_at_best = mean_near(run, train_name, examples_at_best)
    train_at_last = mean_near(run, train_name, examples_at_last)
    if kind == "loss":
        error = math.sqrt(2) * evaluation_loss_error(run)
        # where training loss is above its start, the run has failed rather than overfitted
        start = find_start(run)
        has_learned = train_at_last < (start.loss if start is not None else run.train.first(train_name))
    else:
        error, has_learned = math.sqrt(2) * accuracy_error(best, n_evaluated(run)), True
    by_pair = compare_evaluations(run, "loss" if kind == "loss" else "right", updates[best_index], updates[-1])
    if by_pair is not None:
        _, error = by_pair
    by_chance = best_of_many_quantile(len(values) - 1) * error
    tolerated = max(0.05 * abs(best), 0.005, by_chance) if kind == "loss" else max(0.02, by_chance)
    got_worse = sign * (best - last) > tolerated
    training_got_better = sign * (train_at_last - train_at_best) > 0
    if not (got_worse and training_got_better and has_learned):
        return
    value = (
        f"{eval_name} {figure(best)} at {count(examples_at_best, 'example')}, {figure(last)} at "
        f"{examples_at_last:,.0f}; {train_name} {figure(train_at_best)}, then {figure(train_at_last)}; a change of "
        f"{kind} up to {figure(tolerated)} may be chance"
    )
    if kind == "loss" and _accuracy_did_not_fall(run, since=examples_at_best):
        yield note(
            "Evaluation loss rose while accuracy did not fall",
            value,
            "Accuracy did not fall beyond chance: the policy became surer of pairs that it ranks wrong, the usual "
            "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier.",
        )
        return
    advice = "Train with a smaller lr, or"
    if examples_at_best > 0:  # before the first update there is no checkpoint
        ranks_checkpoints = run.objective is not None and run.objective.best[0] == eval_name
        advice = f"Take the checkpoint of that evaluation{' (BEST)' if ranks_checkpoints else ''}, or train"
    yield warning(
        f"Evaluation {kind} turned while training {kind} improved",
        value,
        "From there on the policy learned its training examples rather than what they have in common. "
        f"{advice} for fewer epochs.",
    )


def _accuracy_did_not_fall(run: Run, *, since: float) -> bool:
    """Return whether held-out accuracy is not clearly lower than at `since` examples.

    Before training all pairs tie, so if `since` is 0, the first evaluation after it counts. False without two.
    """
    examples, accuracies = run.eval.points(EVAL_ACCURACY)
    earlier_accuracies = accuracies[(examples >= since) & (examples > 0)][:-1]
    if not len(earlier_accuracies):
        return False
    fall = float(earlier_accuracies[0] - accuracies[-1])
    # an evaluation with the best loss has a lucky accuracy too
    errors = best_of_many_quantile(len(accuracies) - 1) * math.sqrt(2)
    return fall <= errors * accuracy_error(float(accuracies[-1]), n_evaluated(run))


def accuracy_gap(run: Run) -> Iterator[Finding]:
    train, held_out = run.tail("train", TRAIN_ACCURACY), run.tail("eval", EVAL_ACCURACY)
    examples, _ = run.eval.points(EVAL_ACCURACY)
    is_evaluated_after_training = len(examples) > 0 and examples[-1] > 0  # before the first update all pairs tie
    tolerated = max(0.15, 2 * accuracy_error(held_out, n_evaluated(run)))
    if is_evaluated_after_training and train - held_out > tolerated:
        yield note(
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. More epochs would widen this.",
        )


def epoch_step(run: Run) -> Iterator[Finding]:
    """A training loss that falls at an epoch's start, unlike the evaluation's."""
    losses = run.train["loss/train"]
    batch_size, epoch = number(run.setting("batch_size", 1)), run.count("epoch")
    if not (epoch >= batch_size > 0):
        return
    updates_per_epoch = int(epoch // batch_size)
    n = updates_per_epoch // 5  # updates compared, on either side of an epoch's end
    for end in range(updates_per_epoch, len(losses) - n + 1, updates_per_epoch):
        earlier, before, after = (losses[end + shift : end + shift + n] for shift in (-2 * n, -n, 0))
        if n < 10 or not np.isfinite(losses[end - 2 * n : end + n]).all():
            continue
        # a loss that falls steadily falls as much from `earlier` to `before` as from `before` to `after`
        steady_fall = max(float(earlier.mean() - before.mean()), 0.0)
        step = float(before.mean() - after.mean()) - steady_fall
        bound = student_quantile(n - 1) * math.hypot(mean_error(earlier), 2 * mean_error(before), mean_error(after))
        held_out_before, held_out_after = _find_evaluations_around(run, end)
        if step > max(bound, 0.05 * abs(before.mean())) and held_out_before - held_out_after < step / 2:
            yield note(
                "Training loss fell by a step as an epoch began",
                f"loss/train {figure(before.mean())} over the {n} updates before update {end + 1:,}, "
                f"{figure(after.mean())} over the {n} from it on; loss/eval {figure(held_out_before)} before, "
                f"{figure(held_out_after)} after",
                "From there on the run sees its pairs again, and remembers them: their loss falls at once, and that of "
                "held-out pairs does not follow. Judge by held-out pairs alone, and train for fewer epochs if their "
                "loss rises.",
            )
            return


def _find_evaluations_around(run: Run, n_updates: float) -> tuple[float, float]:
    """`loss/eval` up to `n_updates`, and at the end; NaN if unknown."""
    losses = run.eval["loss/eval"]
    before, after = losses[run.eval.updates <= n_updates], losses[run.eval.updates > n_updates]
    return _last(before), _last(after)


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else math.nan


# --- chosen and rejected, lengths -------------------------------------------------------------------------------------


def margin_sides(run: Run) -> Iterator[Finding]:
    """Say where the margin comes from, and why chosen responses fall."""
    parts = margin_parts(run)
    if parts is None:
        return
    margin = f"margin {signed(parts.margin)} since the start" if parts.since_start else f"margin {figure(parts.margin)}"
    value = f"{margin} = chosen {signed(parts.chosen)} minus rejected {signed(parts.rejected)}"
    # sums over tokens show directly whether chosen responses fell; rewards per token stand for themselves, because
    # their sums would mix in lengths
    logps_change = None if run.is_per_token else find_change(run)
    change = logps_change or parts
    if change.chosen >= 0 or parts.margin <= 0:
        yield note("Where the margin comes from", value, _describe_sides(parts))
        return
    if logps_change is not None:
        before, after = figure(logps_change.chosen_before, 4), figure(logps_change.chosen_after, 4)
        value = f"logps_{logps_change.split}/chosen {before}, then {after} ({signed(logps_change.chosen)}); {value}"
    # chosen falls by more than the two sides moved apart
    falls_beyond_margin = change.chosen + change.margin < -_bound_fall(run, in_nats=logps_change is not None)
    only_difference_counts = _loss_sees_only_differences(run)
    if not only_difference_counts:
        mechanism, advice = "", "By itself that is no fault: read the samples, and compare them with earlier ones."
    else:
        mechanism = (
            "The loss sees only the difference of the two sides: lowering rejected responses also lowers what chosen "
            "ones share with them, and nothing holds chosen ones up. "
        )
        advice = "By itself this is usual, and no fault as long as the samples stay good."
        if falls_beyond_margin:
            beta = "" if parts.since_start else "a larger loss.beta, "
            advice = (
                "Here chosen responses fall by more than the margin grows, which often shows in the samples: read "
                f"them, and consider {beta}a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
            )
    yield Finding(
        WARNING if falls_beyond_margin and only_difference_counts else NOTE,
        "Chosen responses become less likely while margins grow",
        value,
        f"{_describe_sides(parts)} {mechanism}The probability goes to texts that are in neither. {advice}",
    )


def _bound_fall(run: Run, *, in_nats: bool) -> float:
    """Bound the mean of chosen rewards plus margins that chance explains.

    The mean is over the held-out pairs. Their standard deviation is that of the last updates; infinite with too few.
    """
    chosen, rejected = (run.train[f"rewards_train/{side}"] for side in SIDES)
    sums = last_tenth((2 * chosen - rejected)[np.isfinite(chosen) & np.isfinite(rejected)])
    scale = number(run.setting("loss.beta")) if in_nats else 1.0
    if len(sums) < 10 or not scale > 0:
        return math.inf
    deviation = float(sums.std(ddof=1)) * math.sqrt(number(run.setting("batch_size", 1)))
    return Z_98 * deviation / math.sqrt(n_evaluated(run)) / scale


def _describe_sides(parts: MarginParts) -> str:
    """Say in a sentence which share of the margin each side gives."""
    chosen, rejected, margin = parts.chosen, parts.rejected, parts.margin
    since = "Since the start" if parts.since_start else "Against the reference"
    if margin <= 0:
        return f"{since}, rejected responses did at least as well as chosen ones: the margin has not grown."
    if margin < 0.2 * min(abs(chosen), abs(rejected)):
        return f"{since}, both moved by nearly as much: the margin is the little by which they differ."
    by_chosen, by_rejected = percent(abs(chosen) / margin), percent(abs(rejected) / margin)
    if chosen >= 0 and rejected <= 0:
        return (
            f"{since}, chosen responses became more likely and rejected ones less: {by_chosen} of the margin is "
            f"chosen rising, {by_rejected} is rejected falling."
        )
    if chosen < 0:
        return (
            f"{since}, both became less likely: rejected falling gives {by_rejected} of the margin, and chosen "
            f"falling takes {by_chosen} away."
        )
    return (
        f"{since}, both became more likely: chosen rising gives {by_chosen} of the margin, and rejected rising "
        f"takes {by_rejected} away."
    )


def _loss_sees_only_differences(run: Run) -> bool:
    """Return whether the loss is a function of chosen minus rejected alone."""
    if run.objective is None:
        return False
    weights = run.setting("loss.weights", {})  # only loss=mix has them
    losses = [LOSSES[name] for name, weight in weights.items() if weight] or [run.objective]
    has_sft_term = number(run.setting("loss.sft_weight")) > 0
    return all(loss.trains_on == "pairs" and loss.margin_only for loss in losses) and not has_sft_term


def length_in_margin(run: Run) -> Iterator[Finding]:
    parts = margin_parts(run)
    if parts is None or not math.isfinite(parts.length) or parts.margin <= 0:
        return
    share = parts.length / parts.margin
    amount = signed(parts.length) if abs(share) >= 0.001 else "nearly nothing"
    value = (
        f"{amount} of the margin {figure(parts.margin)} ({percent(share)}); mean tokens "
        f"{figure(parts.chosen_tokens)} chosen, {figure(parts.rejected_tokens)} rejected"
    )
    source = (
        "It was worked out in each pair of the ledger."
        if parts.by_pair
        else "It comes from means alone; with ledger=true a run records it pair by pair."
    )
    text = (
        f"This is what the margin would {'lose' if share >= 0 else 'gain'} if both sides were equally long, at the "
        f"same mean change per token. {source}"
    )
    if share < 0.5:
        yield note("What length gives", value, text)
    else:  # no warning, as the share of a small margin may be large by chance
        text += " The policy may have learned to prefer a length instead of what makes a response better."
        yield note("Much of the margin is length", value, text)


def lengths_in_data(run: Run) -> Iterator[Finding]:
    """Pairs whose length alone predicts the preference."""
    longer = run.count("train.chosen_longer")
    share = max(longer, 1 - longer)
    if run.has_pairs and share >= 0.8:
        yield note(
            "Length predicts the preference in the data",
            f"chosen is {'longer' if longer > 0.5 else 'shorter or as long'} in {percent(share)} of the training pairs",
            "A policy can rank such pairs right by learning a length. Compare the lengths of its samples with those of "
            f"{'the reference' if run.has_reference else 'its first ones'}.",
        )


def accuracy_by_length(run: Run) -> Iterator[Finding]:
    """Held-out accuracy where chosen is longer, and where it is shorter."""
    pairs = evaluated_pairs(run, run.eval.updates[-1]) if len(run.eval) and run.eval.updates[-1] > 0 else None
    if pairs is None:
        return
    is_right, difference = pairs["margin"] > 0, pairs["chosen_tokens"] - pairs["rejected_tokens"]
    longer, shorter = is_right[difference > 0], is_right[difference < 0]
    if min(len(longer), len(shorter)) < 20:
        return
    right, n = [float(values.mean()) for values in (longer, shorter)], [len(longer), len(shorter)]
    pooled = float(np.concatenate([longer, shorter]).mean())
    bound = Z_98 * math.sqrt(pooled * (1 - pooled) * (1 / n[0] + 1 / n[1]))
    if abs(right[0] - right[1]) <= bound:
        return
    likes_longer = right[0] > right[1]
    worse_right, worse_n = (right[1], n[1]) if likes_longer else (right[0], n[0])
    is_below_chance = is_below(worse_right, 0.5, worse_n)
    yield Finding(
        WARNING if is_below_chance else NOTE,
        "Held-out pairs are ranked by length" if is_below_chance else "Held-out accuracy depends on length",
        f"accuracy {figure(right[0])} where chosen is longer ({count(n[0], 'pair')}), {figure(right[1])} where it is "
        f"shorter ({n[1]:,}); mean of both {figure(sum(right) / 2)}; a difference of up to {figure(bound)} may be "
        "chance",
        f"The policy prefers {'longer' if likes_longer else 'shorter'} responses, also where they are the rejected "
        "ones. Go by the mean of both accuracies, which a preference for length alone leaves at 0.5, and compare the "
        "lengths of samples. Pairs of equal lengths, or loss=simpo or loss=dpo_norm, which have means over tokens, "
        "reward length less.",
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def _pair_samples(run: Run) -> tuple[list[tuple[str, str]], str]:
    """Pair the policy's newest samples with others, and name the others.

    A pair has the same prompt. The other sample is the reference's; without a reference, the policy's earliest.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    with_reference = [(new["policy"], new["reference"]) for new in newest if new["reference"] is not None]
    if with_reference or earliest == newest:
        return with_reference, "the reference's"
    pairs = zip(newest, earliest, strict=False)
    with_earliest = [(new["policy"], old["policy"]) for new, old in pairs if new["prompt"] == old["prompt"]]
    return with_earliest, "its first"


def empty_samples(run: Run) -> Iterator[Finding]:
    newest = run.samples_at(-1)
    n_empty = sum(not sample["policy"].strip() for sample in newest)
    if not newest or n_empty / len(newest) <= 0.05:
        return
    all_empty = n_empty == len(newest)
    pairs, source = _pair_samples(run)
    n_empty_others = sum(not other.strip() for _, other in pairs)
    value = f"{n_empty} of {count(len(newest), 'sample')}"
    if pairs:
        is_twice_as_often = n_empty >= 2 * len(newest) * n_empty_others / len(pairs)
        if not all_empty and not is_twice_as_often:
            return
        value = f"{value}, {source} {n_empty_others} of {len(pairs)}"
    # a sign test: where exactly one sample of a pair is empty, chance makes it the policy's half of the time; nothing
    # to compare with, or only empty samples, count as if each empty sample of the policy were such a pair
    n_only_policy_empty = n_only_one_empty = n_empty
    if pairs and n_empty_others < len(pairs):
        emptiness = [(not policy.strip(), not other.strip()) for policy, other in pairs]
        n_only_policy_empty = sum(policy and not other for policy, other in emptiness)
        n_only_one_empty = sum(policy != other for policy, other in emptiness)
    probability = binomial_tail(n_only_policy_empty, n_only_one_empty)
    if probability > 0.1 and not all_empty:
        return
    why = _explain_empty_samples(run, all_others_too=all_empty and n_empty_others == n_empty)
    yield Finding(
        WARNING if probability <= 0.05 else NOTE,
        "The policy says nothing" if all_empty else "Some of the policy's samples are empty",
        value,
        f"An empty sample is an answer that the policy ends at once. {why}",
    )


def _explain_empty_samples(run: Run, *, all_others_too: bool) -> str:
    if all_others_too:
        return (
            "The samples beside these are empty too: the model says nothing after these prompts whatever it is trained "
            "on. Look at the data and the archive that it started from."
        )
    if run.has_pairs:
        return (
            "Probability that training takes from rejected responses often goes to empty answers: take an earlier "
            f"checkpoint, or train with a smaller lr, fewer epochs, or {WAYS_TO_HOLD_CHOSEN_UP}"
        )
    return "Look for empty targets in the data, and take an earlier checkpoint."


def sample_lengths(run: Run) -> Iterator[Finding]:
    """Samples much longer or shorter than the reference's, empty ones aside.

    One very long sample alone moves the means, so lengths must also differ prompt by prompt, by more than chance.
    """
    pairs, source = _pair_samples(run)
    n_words = [(len(policy.split()), len(other.split())) for policy, other in pairs]
    not_empty = [(policy, other) for policy, other in n_words if policy > 0 and other > 0]
    if not run.has_pairs or len(not_empty) < 8:  # too few for an interval
        return
    policy_words, other_words = np.array(not_empty, dtype=float).T
    policy_mean, other_mean = policy_words.mean(), other_words.mean()
    ratio = policy_mean / other_mean
    mean_log_ratio, half_width = mean_and_bound(np.log(policy_words / other_words))
    is_large = max(ratio, 1 / ratio) >= 1.5 and abs(policy_mean - other_mean) >= 5  # words
    is_beyond_chance = abs(mean_log_ratio) > half_width and (mean_log_ratio > 0) == (ratio > 1)
    if not (is_large and is_beyond_chance):
        return
    low, typical, high = (figure(math.exp(mean_log_ratio + shift), 2) for shift in (-half_width, 0, half_width))
    value = (
        f"{figure(policy_mean)} word{'' if policy_mean == 1 else 's'} on average, {source} {figure(other_mean)} "
        f"({count(len(not_empty), 'sample')}); after the same prompt {typical} times as many words, "
        f"98 % interval {low} to {high}"
    )
    if ratio > 1:
        text = (
            "Rewards of summed log-probabilities can be won by length. Read the samples: if they say the same in more "
            f"words, the {'scorer' if run.online else 'data'} rewards length."
        )
        yield warning("The policy's samples have become long", value, text)
    else:
        text = "Read them: answers may break off or give up early."
        yield warning("The policy's samples have become short", value, text)


# --- the run itself ---------------------------------------------------------------------------------------------------


def learning_rate(run: Run) -> Iterator[Finding]:
    """A warmup that did not end."""
    if run.setting("lr_scaling", "none") != "none":  # by a factor that is not recorded
        return
    peak_lr, logged_lrs = number(run.setting("lr")), run.train.points("lr")[1]
    if run.state.word == "complete" and len(logged_lrs) and logged_lrs.max() < 0.999 * peak_lr:
        yield warning(
            "The learning rate never reached its value",
            f"lr {logged_lrs.max():.3g} at most, of {peak_lr:.3g}",
            f"The warmup takes {run.setting('warmup_steps')} updates, and the run has {count(run.updates, 'update')}.",
        )


def rate_too_high(run: Run) -> Iterator[Finding]:
    """Chosen responses that fall fast, or gradients that grow."""
    evidence = [text for text in (_describe_fast_fall(run), _describe_growing_gradients(run)) if text]
    if evidence:
        yield warning(
            "The learning rate looks too high",
            "; ".join(evidence),
            "Steps this large change more than what the pairs are about. Try a third of lr, or more warmup_steps.",
        )


def _describe_fast_fall(run: Run) -> str | None:
    """Describe the first blocks of updates between which chosen responses fell fast."""
    beta, tokens = number(run.setting("loss.beta")), run.count("train.mean_chosen_tokens")
    scale = beta if run.is_per_token else beta * tokens  # rewards per nat and token
    is_beta_times_log_ratio = run.setting("loss.f_divergence", "reverse_kl") == "reverse_kl"
    updates, rewards = run.train.updates, run.train["rewards_train/chosen"]
    n_blocks = len(rewards) // (BLOCK // 2)
    if not (run.has_pairs and scale > 0 and is_beta_times_log_ratio and n_blocks >= 3):
        return None
    blocks = rewards[: n_blocks * (BLOCK // 2)].reshape(n_blocks, BLOCK // 2) / scale
    means = blocks.mean(axis=1)
    falls = means[:-2] - means[2:]  # within BLOCK updates
    for i in (falls > FAST_FALL).nonzero()[0]:
        if falls[i] > 4 * math.hypot(mean_error(_detrend(blocks[i])), mean_error(_detrend(blocks[i + 2]))):
            return (
                f"log-probabilities of chosen responses fell by {figure(falls[i])} a token within {BLOCK} updates, up "
                f"to update {updates[(i + 3) * (BLOCK // 2) - 1]:,.0f}"
            )
    return None


def _detrend(values: np.ndarray) -> np.ndarray:
    """Subtract a straight line, which is no noise."""
    times = np.arange(len(values)) - (len(values) - 1) / 2
    return values - values.mean() - times * (times @ values) / (times @ times)


def _describe_growing_gradients(run: Run) -> str | None:
    """Describe gradients that grew since the warmup."""
    is_after_warmup = run.train.updates > number(run.setting("warmup_steps", 0))
    norms = run.train["grad_norm"][is_after_warmup]
    norms = norms[np.isfinite(norms)]
    if len(norms) < 4 * BLOCK:
        return None
    first, last = float(np.median(norms[:BLOCK])), float(np.median(norms[-max(BLOCK, len(norms) // 10) :]))
    if not last >= GROWN_NORM * first > 0:
        return None
    first_updates = f"in the first {BLOCK} updates after the warmup"
    return f"the median of grad_norm was {figure(first)} {first_updates}, and is {figure(last)} now"


def clipping(run: Run) -> Iterator[Finding]:
    limit, norms = number(run.setting("max_grad_norm")), run.train.points("grad_norm")[1]
    share = float((norms > limit).mean()) if len(norms) else 0.0
    if share >= 0.5:
        yield note(
            "Most gradients are clipped",
            f"grad_norm above {figure(limit)} in {percent(share)} of the updates; its median {figure(median(norms))}",
            "Every clipped gradient has the same norm, so batches count alike, whatever their gradients' size.",
        )


def slowing(run: Run) -> Iterator[Finding]:
    speed = run.train.points("tokens_per_second")[1]
    if len(speed) < 40:
        return
    quarter = len(speed) // 4
    first, last = float(np.median(speed[:quarter])), float(np.median(speed[-quarter:]))
    if last < 0.7 * first:
        yield note(
            "Updates became slower",
            f"tokens_per_second {figure(first)} in the first quarter, {figure(last)} in the last",
            "The count is the same in every layout, so the machine was slower or shared, or memory ran short.",
        )


class DataCount(NamedTuple):
    """A count of the preflight, and the sentence that reports it."""

    key: str
    total: str  # key of the count that this one is a share of
    least_share: float  # a smaller share is not reported
    singular: str
    plural: str


DATA_COUNTS = (
    DataCount(
        "joined_words", "examples", 0.0,
        "response follows its prompt without a space", "responses follow their prompt without a space",
    ),
    DataCount(
        "contradictory_pairs", "examples", 0.01,
        "pair contradicts an earlier one of the same prompt", "pairs contradict an earlier one of the same prompt",
    ),
    DataCount(
        "identical_pairs", "tokenized", 0.01,
        "pair is identical after truncation, without a gradient",
        "pairs are identical after truncation, without a gradient",
    ),
    DataCount(
        "empty_responses", "examples", 0.01,
        "example has an empty response", "examples have an empty response",
    ),
    DataCount(
        "truncated_responses", "tokenized", 0.1,
        "example has a response that lost its end", "examples have a response that lost its end",
    ),
)  # fmt: skip


def data_counts(run: Run) -> Iterator[Finding]:
    for counted in DATA_COUNTS:
        n_found, total = run.count(f"train.{counted.key}"), run.count(f"train.{counted.total}")
        if n_found > 0 and total > 0 and n_found / total >= counted.least_share:
            value = f"{counted.key} {n_found:,.0f} of {total:,.0f} ({percent(n_found / total)})"
            text = f"In the training split, {count(n_found, counted.singular, counted.plural)}."
            yield note("Worth a look in the data", value, text)


def leakage(run: Run) -> Iterator[Finding]:
    """Test prompts, or their first turns, that are in the training split."""
    n_prompts, n_whole = run.count("test.prompts"), run.count("test.prompts_in_train")
    n_first_turns = run.count("test.first_turns_in_train")
    if not (n_prompts > 0 and max(n_whole, n_first_turns) / n_prompts >= LEAKED):  # false for NaN
        return
    yield Finding(
        WARNING if n_whole / n_prompts >= MUCH_LEAKED else NOTE,
        "Test prompts are in the training split",
        f"of {count(n_prompts, 'test prompt')}, {n_whole:,.0f} ({percent(n_whole / n_prompts)}) are training prompts "
        f"too, and {n_first_turns:,.0f} ({percent(n_first_turns / n_prompts)}) open with the first turn of one",
        "The run has trained on the subjects of these prompts, so held-out numbers are too good for them. Split the "
        "data by first turn, so that no dialogue is in both splits.",
    )


def label_noise(run: Run) -> Iterator[Finding]:
    """Training pairs ranked clearly wrong, more than right labels would explain."""
    if run.ledger is None or not run.has_pairs:
        return
    from dpo.analysis.ledger import count_clearly_wrong  # most runs have no ledger

    counted = count_clearly_wrong(run.ledger)
    if counted is None or counted.right < 0.75:  # a policy that ranks few pairs right knows too little of labels
        return
    excess, error = counted.share - counted.expected, math.sqrt(counted.share * (1 - counted.share) / counted.pairs)
    if excess > max(0.04, Z_98 * error):  # margins with longer tails than the normal ones reach 0.038
        yield note(
            "Some labels may be wrong",
            f"{percent(counted.share)} of {count(counted.pairs, 'training pair')} in the second half of the run are "
            f"ranked wrong by at least a typical margin; with right labels about {percent(counted.expected)} would be",
            "The policy is as sure that these labels are wrong as it is of others that they are right. `python -m "
            "scripts.ledger RUN` lists the worst ones: read them. If labels are swapped, correct them, or train with "
            "loss.label_smoothing or loss=robust.",
        )


# --- pairs drawn from the policy --------------------------------------------------------------------------------------


def online_accuracies(run: Run) -> Iterator[Finding]:
    accuracies = {TRAIN_ACCURACY: run.tail("train", TRAIN_ACCURACY), EVAL_ACCURACY: run.eval.last(EVAL_ACCURACY)}
    values = [f"{name} {figure(value)}" for name, value in accuracies.items() if math.isfinite(value)]
    if values:
        offline_share = number(run.setting("online.mix_offline"))
        mixed = f", but for the {percent(offline_share)} from the datasets" if offline_share > 0 else ""
        yield note(
            "What accuracies mean here",
            "; ".join(values),
            f"Training pairs are new answers of the policy{mixed}: their accuracy says how often its implicit rewards "
            "agree with the scorer about answers that it was not trained on, and need not rise. Evaluation pairs are "
            "those of the datasets, whose labels the scorer does not know. What is learned shows in online_eval/score "
            "and online_eval/win_rate, on held-out prompts; BEST goes by the score.",
        )


def unfinished_answers(run: Run) -> Iterator[Finding]:
    share_ended, limit = run.tail("train", "online/eos"), run.setting("online.max_new_tokens")
    n_answers = _count_prompts_in_tail(run, "online/eos") * number(run.setting("online.n_samples", 2))
    if is_below(share_ended, 0.9, n_answers):
        has_penalty = number(run.setting("online.missing_eos_penalty")) > 0
        penalty = "" if has_penalty else "set online.missing_eos_penalty, "
        are_most = is_below(share_ended, 0.5, n_answers)
        yield Finding(
            WARNING if are_most else NOTE,
            "Most answers are cut off" if are_most else "Some answers are cut off",
            f"online/eos {figure(share_ended)}: this share of answers ends within online.max_new_tokens={limit}",
            "The scorer rates answers without an end, and the policy does not learn where to stop. Raise "
            f"online.max_new_tokens, {penalty}or start from a model that SFT (loss=sft) taught to end its answers.",
        )


def _count_prompts_in_tail(run: Run, name: str) -> float:
    """Count the prompts behind a metric's mean over the last updates."""
    return len(run.ends(name)[1]) * number(run.setting("batch_size", 1))


def ties(run: Run) -> Iterator[Finding]:
    share = run.tail("train", "online/ties")
    if is_above(share, 0.5, _count_prompts_in_tail(run, "online/ties")):
        effect = (
            "Ties are trained on (online.ties=keep), though the scorer prefers neither answer"
            if run.setting("online.ties") == "keep"
            else "Ties are not trained on (online.ties=skip), so the gradient comes from few pairs, or from none"
        )
        yield warning(
            "Most prompts give a tie",
            f"online/ties {figure(share)}; online.n_samples {run.setting('online.n_samples')}",
            f"The best and the worst answer to a prompt had the same score, or were the same text. {effect}. To get "
            "fewer ties, raise online.n_samples or online.temperature, or use a scorer with finer scores. Late in a "
            "run, ties may mean that all answers have the highest score, or that the policy always gives the same one.",
        )


def scores(run: Run) -> Iterator[Finding]:
    first, last = run.ends("online/score")
    if len(run.train.points("online/score")[1]) < 20:
        return
    change, bound = change_and_bound(first, last)
    gap = run.tail("train", "online/score_best") - run.tail("train", "online/score_worst")
    value = (
        f"online/score {figure(first.mean())} over the first {count(len(first), 'update')}, {figure(last.mean())} over "
        f"the last; change {signed(change)}, 98 % interval {signed(change - bound)} to {signed(change + bound)}"
    )
    if change > bound:
        yield note("Scores rise", value, "Answers that are drawn later have higher scores.")
    elif change < -bound:
        yield warning(
            "Scores have fallen",
            value,
            "The policy gives worse answers by its own scorer: lr may be too high, or loss.beta too low.",
        )
    elif change + bound < 0.1 * gap:
        yield warning(
            "Scores have not risen",
            f"{value}; best minus worst answer {figure(gap)}",
            "If scores rose, it was by less than a tenth of what lies between two answers to a prompt. The policy has "
            "not learned what the scorer rewards: lr may be too low, loss.beta too high, the run too short, or most "
            "pairs ties.",
        )
    else:
        yield note(
            "Scores cannot be told from unchanged ones",
            value,
            "The updates are too few, or their scores vary too much, to see whether answers get better.",
        )


def score_length_correlation(run: Run) -> Iterator[Finding]:
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
        change, bound = change_and_bound(first, last) if len(first) > 1 else (0.0, 0.0)
        if change < -bound:
            fallen_metrics += f"; {name} {figure(first.mean())} at first, {figure(last.mean())} now"
    advice = ", and consider a larger loss.beta, a smaller lr or fewer updates" if fallen_metrics else ""
    yield Finding(
        WARNING if fallen_metrics else NOTE,
        "The policy has gone far from the reference",
        f"online/kl {figure(nats)} nats{per_token}{fallen_metrics}",
        f"By the geometric mean, the pairs' answers are e^{figure(nats)} times as likely under the policy as under "
        "the reference; for long answers that is ordinary. That far away scores often rise by what the scorer "
        f"overlooks: read what was drawn{advice}.",
    )


def time_to_draw(run: Run) -> Iterator[Finding]:
    seconds = update_seconds(run)
    is_known = np.isfinite(seconds) & np.isfinite(run.train["online/sampling_share"])
    if not is_known.any():
        return
    shares = []
    for name in ("sampling", "scoring"):
        share_by_update = run.train[f"online/{name}_share"]
        share = np.nansum((share_by_update * seconds)[is_known]) / seconds[is_known].sum()
        shares.append(f"{name} {percent(float(share))}")
    yield note(
        "What drawing the pairs takes",
        f"{', '.join(shares)} of the time in updates",
        "The other time is what an update on given pairs takes. To make sampling shorter, lower online.n_samples or "
        "online.max_new_tokens, or raise online.batch_size, the number of prompts that are answered at a time.",
    )


# --- all of them ------------------------------------------------------------------------------------------------------

Rule = Callable[[Run], Iterator[Finding]]

ANY_RUN: tuple[Rule, ...] = (
    skipped_updates, collapse, best_checkpoint, spikes, empty_samples, sample_lengths, learning_rate,
    clipping, data_counts, leakage,
)  # fmt: skip
# rules that an online run would break: its pairs change with the policy, and its scorer may contradict held-out labels
OFFLINE: tuple[Rule, ...] = (
    worse_than_reference, reward_accuracy, no_better_than_chance, new_training_pairs, rate_too_high, saturation,
    evaluation_turns, epoch_step, margin_sides, length_in_margin, lengths_in_data, accuracy_by_length, accuracy_gap,
    label_noise, slowing,
)  # fmt: skip
ONLINE: tuple[Rule, ...] = (
    online_accuracies, unfinished_answers, ties, scores, score_length_correlation, divergence, time_to_draw,
)  # fmt: skip


def find_all(run: Run) -> list[Finding]:
    """Find everything that the rules tell about a run, warnings first."""
    rules = (*ANY_RUN, *(ONLINE if run.online else OFFLINE))
    findings = [finding for rule in rules for finding in rule(run)]
    return sorted(findings, key=lambda finding: finding.level != WARNING)  # stable: each level keeps the rules' order
