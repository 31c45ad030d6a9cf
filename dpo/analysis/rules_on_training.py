"""Rules on NaN, spikes, collapse, loss, accuracy and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

import numpy as np

from dpo.analysis.instability import WHAT_TO_TRY, InstabilityDetector, Means
from dpo.analysis.loss_shapes import find_loss_shape
from dpo.analysis.measures import (
    SIDES,
    USEFUL,
    accuracy_error,
    best_of_many_quantile,
    compare_evaluations,
    evaluation_loss_error,
    find_start,
    is_above,
    is_inconclusive,
    mean_error,
    mean_near,
    n_effective,
    n_evaluated,
    student_quantile,
    wilson_interval,
)
from dpo.analysis.rules import EVAL_ACCURACY, TRAIN_ACCURACY, Finding, note, warning
from dpo.analysis.runs import Run, number
from dpo.numbers import count, figure, percent, signed

SATURATED, NEARLY_SATURATED = 0.99, 0.95  # training accuracy; its interval's lower end
SPENT = 0.1  # a smaller fraction of the first gradients is nearly nothing
BLOCK = 50  # updates
FAST_FALL = 0.5  # nats a token between two blocks
GROWN_NORM = 5.0  # times the median of grad_norm after the warmup
ENOUGH_PAIRS = 400  # an accuracy of 0.60 is then four standard errors above chance

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
            f"unstable: look at the examples, and lower lr.{where_examples_are}",
        )
    if run.state.word == "aborted":
        yield warning(
            "The run ended on a loss or gradient that was not a number",
            f"update {run.nonfinite[-1]:,}",
            f"That update was not applied. {folders} has its examples, as a dataset that can be replayed: look at "
            "them and, if they are sound, lower lr.",
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
    value = _describe_collapse(run, start)
    if value is not None:
        yield warning("The run has collapsed", value, WHAT_TO_TRY)


def _describe_collapse(run: Run, start: Means) -> str | None:
    """Describe the first updates, or the first evaluation, that show a collapse."""
    start_margin = figure(round(start.margin, 3) + 0.0)  # without rounding errors: -0.0 + 0.0 is 0.0

    def describe(split: str, means: Means, when: str, last: str) -> str:
        loss = f"loss/{split} {figure(means.loss)} {when}, {last}, {figure(start.loss)} at the start"
        return f"{loss}; rewards_{split}/margins {figure(means.margin)} {when}, {start_margin} at the start"

    detector = InstabilityDetector(number(run.setting("batch_size", 1)), start)
    losses, margins = run.train["loss/train"], run.train["rewards_train/margins"]
    for update, loss, margin in zip(run.train.updates, losses.tolist(), margins.tolist(), strict=True):
        collapsed = detector.find_collapse(loss, margin)
        if collapsed is not None:
            means, n = collapsed
            last = losses[np.isfinite(losses) & np.isfinite(margins)][-n:].mean()
            when = f"over the {n} updates up to {update:,.0f}"
            return describe("train", means, when, f"{figure(last)} over the last {n}")
    if run.online:  # it follows its scorer, which held-out labels may contradict
        return None
    for examples, *values in zip(
        run.eval.examples, run.eval["loss/eval"], run.eval["rewards_eval/margins"], strict=True
    ):
        if examples > 0 and detector.is_collapsed(Means(*values)):
            last = f"{figure(run.eval.last('loss/eval'))} at the last evaluation"
            return describe("eval", Means(*values), f"at {count(examples, 'example')}", last)
    return None


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
            f"Use step-{run.best}, which the link BEST names, rather than the last checkpoint. On few held-out "
            "examples the best of many evaluations is in part luck.",
        )


def worse_than_reference(run: Run) -> Iterator[Finding]:
    start, last_loss = find_start(run), run.eval.last("loss/eval")
    if not run.has_reference or start is None:
        return
    excess, bound = _bound_excess_loss(run, last_loss, start)
    if not excess > bound:  # false for NaN
        return
    yield warning(
        "By its own loss the policy is worse than the reference",
        f"loss/eval {figure(last_loss)}, {figure(start.loss)} before training; the difference on "
        f"{count(n_evaluated(run), 'pair')} is {signed(excess)}, 98 % interval {signed(excess - bound)} to "
        f"{signed(excess + bound)}",
        "On held-out pairs this loss was lower before the first update: what the policy gained on some, it more than "
        "lost on others. Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta. "
        "If accuracy is what matters, compare checkpoints by it.",
    )


def _bound_excess_loss(run: Run, last_loss: float, start: Means) -> tuple[float, float]:
    """Held-out loss above the start's, and its bound; NaN if unknown.

    The ledger gives both pair by pair. Without it, the loss must be a function of the margin: then it is the same for
    all pairs where policy and reference are equal, and its deviation follows from the mean loss and margin.
    """
    n, first, last = n_effective(run), run.eval.updates[0], run.eval.updates[-1]
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
    if not run.trains_reward_model:
        return
    accuracy, n = run.eval.last(EVAL_ACCURACY), n_evaluated(run)
    low, high = wilson_interval(accuracy, n_effective(run))
    yield note(
        "How often the reward model agrees with held-out preferences",
        f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, 95 % interval {figure(low)} to {figure(high)}; "
        f"rewards_eval/margins {figure(run.eval.last('rewards_eval/margins'))}",
        "A policy that is trained on these rewards learns what the model learned of the preferences, with its errors. "
        "Only differences of rewards of the same prompt have a meaning.",
    )


def no_better_than_chance(run: Run) -> Iterator[Finding]:
    if run.updates < 20:
        return
    accuracy, n = run.eval.last(EVAL_ACCURACY), n_evaluated(run)
    low, high = wilson_interval(accuracy, n_effective(run))
    value = f"{EVAL_ACCURACY} {figure(accuracy)} on {count(n, 'pair')}, 95 % interval {figure(low)} to {figure(high)}"
    if low > 0.5 and high < USEFUL:
        yield note(
            "Held-out pairs are ranked little better than by chance",
            value,
            f"That is above chance, but by less than {figure(USEFUL - 0.5)}: what was learned carries over, but is "
            "little. Train longer or with a larger lr, unless the preferences are mostly noise.",
        )
    elif high < USEFUL:
        yield warning(
            "Held-out pairs are ranked no better than by chance",
            value,
            "The policy has not learned a preference that carries over. If training pairs are ranked right, use more "
            "data; if not, a larger lr or more updates, unless the preferences are noise.",
        )
    elif is_inconclusive(accuracy, n):
        text = f"{count(n, 'pair')} cannot tell whether anything was learned."
        if n < ENOUGH_PAIRS:
            text += f" To tell an accuracy of 0.60 from chance takes about {ENOUGH_PAIRS}: {_advise_more_pairs(run)}."
        else:
            text += " If anything was, it is little: train longer or with a larger lr."
        yield note("Held-out accuracy cannot be told from chance", value, text)


def new_training_pairs(run: Run) -> Iterator[Finding]:
    """Accuracy on new training pairs, if held-out pairs are too few."""
    examples, accuracies = run.train.points(TRAIN_ACCURACY)
    accuracies = accuracies[examples <= run.count("epoch")]  # none if the count is lost
    late = accuracies[len(accuracies) // 2 :]
    if len(late) < 20 or not is_inconclusive(run.eval.last(EVAL_ACCURACY), n_effective(run)):
        return
    accuracy, bound = float(late.mean()), student_quantile(len(late) - 1) * mean_error(late)
    if accuracy - bound > 0.5:
        yield note(
            "New training pairs are ranked better than by chance",
            f"{TRAIN_ACCURACY} {figure(accuracy)} over the second half of the first epoch, 98 % interval "
            f"{figure(accuracy - bound)} to {figure(accuracy + bound)}",
            "An update ranks its pairs before it trains on them, so in a first epoch they are as new as held-out ones, "
            "of which there are too few to tell. Something was learned that carries over; to measure how much, "
            f"{_advise_more_pairs(run)}.",
        )


def _advise_more_pairs(run: Run) -> str:
    available = run.count("test.examples")
    if not available > 0:
        return "raise n_eval_examples, if the test split has them"
    if n_evaluated(run) < available:
        return f"raise n_eval_examples, for the test split has {available:,.0f}"
    return f"put more pairs into the test split, which has only these {available:,.0f}"


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
        error, has_learned = math.sqrt(2) * accuracy_error(best, n_effective(run)), True
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
    return fall <= errors * accuracy_error(float(accuracies[-1]), n_effective(run))


def accuracy_gap(run: Run) -> Iterator[Finding]:
    train, held_out = run.tail("train", TRAIN_ACCURACY), run.tail("eval", EVAL_ACCURACY)
    if train - held_out > max(0.15, 2 * accuracy_error(held_out, n_effective(run))):
        yield note(
            "Training pairs are ranked better than held-out ones",
            f"accuracy {figure(train)} against {figure(held_out)}",
            "Part of what was learned holds for the training pairs only. Go by held-out accuracy; more epochs would "
            "widen the gap.",
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
        evaluated = run.eval["loss/eval"]
        held_out = [evaluated[rows][-1:] for rows in (run.eval.updates <= end, run.eval.updates > end)]
        held_out_before, held_out_after = (float(values[0]) if len(values) else math.nan for values in held_out)
        if step > max(bound, 0.05 * abs(before.mean())) and held_out_before - held_out_after < step / 2:
            yield note(
                "Training loss fell by a step as an epoch began",
                f"loss/train {figure(before.mean())} over the {n} updates before update {end + 1:,}, "
                f"{figure(after.mean())} over the {n} from it on; loss/eval {figure(held_out_before)} before, "
                f"{figure(held_out_after)} after",
                "From there on the run sees its examples again, and remembers them: their loss falls at once, and that "
                "of held-out ones does not follow. Judge by held-out examples alone, and train for fewer epochs if "
                "their loss rises.",
            )
            return


# --- the learning rate, gradients, speed ------------------------------------------------------------------------------


def warmup(run: Run) -> Iterator[Finding]:
    """A warmup that did not end."""
    peak_lr, largest_lr = number(run.setting("lr")), float(run.train.points("lr")[1].max())
    is_scaled = run.setting("lr_scaling", "none") != "none"  # by a factor that is not recorded
    if run.state.word != "complete" or is_scaled or not largest_lr < 0.999 * peak_lr:
        return
    warmup_steps = number(run.setting("warmup_steps"))
    if warmup_steps >= run.updates:
        text = "The warmup is as long as the run, or longer: lower warmup_steps, or train for more updates."
    else:
        skipped = "updates skipped for NaN" + (" or because all pairs were ties" if run.online else "")
        text = f"The warmup counts only updates that were applied, not {skipped}: see why there were so many."
    updates = f"warmup_steps {figure(warmup_steps)}, {count(run.updates, 'update')}"
    value = f"lr {largest_lr:.3g} at most, of {peak_lr:.3g}; {updates}"
    yield warning("The learning rate never reached its value", value, text)


def rate_too_high(run: Run) -> Iterator[Finding]:
    """Chosen responses that fall fast, or gradients that grow."""
    evidence = [text for text in (_describe_fast_fall(run), _describe_growing_gradients(run)) if text]
    if evidence:
        yield warning(
            "The learning rate looks too high",
            "; ".join(evidence),
            "Steps this large change more than what the examples are about. Try a third of lr, or more warmup_steps.",
        )


def _describe_fast_fall(run: Run) -> str | None:
    """Describe the first blocks of updates between which chosen responses fell fast."""
    beta, tokens = number(run.setting("loss.beta")), run.count("train.mean_chosen_tokens")
    scale = beta if run.is_per_token else beta * tokens  # rewards per nat and token
    is_beta_times_log_ratio = run.setting("loss.f_divergence", "reverse_kl") == "reverse_kl"
    updates, rewards = run.train.updates, run.train["rewards_train/chosen"]
    n_blocks = len(rewards) // (BLOCK // 2)
    if not (scale > 0 and is_beta_times_log_ratio and n_blocks >= 3):
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
    share = float((norms > limit).mean())
    if share >= 0.5:
        yield note(
            "Most gradients are clipped",
            f"grad_norm above {figure(limit)} in {percent(share)} of the updates; its median {figure(median(norms))}",
            "Every clipped gradient has the same norm, so batches count alike, whatever their gradients' size. If that "
            "is not meant, raise max_grad_norm; with SGD, which then takes larger steps, lower lr too.",
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
            "The machine was slower or shared, memory ran short, or late examples were shorter. See what else ran.",
        )
