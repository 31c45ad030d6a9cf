"""Rules on NaN, collapse, loss, accuracy and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from dpo.analysis.measures import (
    COLLAPSED,
    COLLAPSED_EVALUATION,
    COLLAPSED_UPDATES,
    USEFUL,
    accuracy_error,
    best_of_many_quantile,
    compare_evaluations,
    evaluation_loss_error,
    find_start,
    is_above,
    is_collapsed,
    is_inconclusive,
    mean_error,
    mean_near,
    n_effective,
    n_evaluated,
    student_quantile,
    wilson_interval,
)
from dpo.analysis.rules import EVAL_ACCURACY, TRAIN_ACCURACY, Finding, note, warning
from dpo.analysis.runs import Run, last_tenth, number
from dpo.numbers import count, figure, percent, signed

SATURATED, NEARLY_SATURATED = 0.99, 0.95  # least training accuracy, and lower end of its interval
BLOCK = 50  # updates over which a fall or growth is measured
FAST_FALL = 0.5  # nats a token
GROWN_NORM = 5.0  # last median of grad_norm, as a multiple of the first
NEGLIGIBLE_RISE, CLEAR_RISE = 0.05, 0.25  # of a loss, as a share of it: the second if its error is unknown
ENOUGH_PAIRS = 400  # an accuracy of 0.60 is then four standard errors above chance

# --- NaN, collapse ----------------------------------------------------------------------------------------------------


def skipped_updates(run: Run) -> Iterator[Finding]:
    folders = _list_first([f"nonfinite-{update}" for update in run.nonfinite], 3)
    skipped = []
    for line in run.train.lines:
        # a loss or norm that was not finite is logged as null; an absent one says nothing
        logged = [line[name] for name in ("loss/train", "grad_norm") if name in line]
        if not np.isfinite([number(value) for value in logged]).all():
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


def collapse(run: Run) -> Iterator[Finding]:
    """The last updates or the last evaluation, if they show a collapse."""
    start = find_start(run)
    # under loss.wpo the weights of losses change with the policy, so a higher loss means nothing
    if start is None or run.setting("loss.wpo"):
        return
    windows = [(run.train, "train", n, factor) for n, factor in COLLAPSED_UPDATES]
    if not run.online:  # the policy follows the scorer, which may contradict the labels of held-out pairs
        windows.append((run.eval, "eval", 1, COLLAPSED_EVALUATION))
    for log, split, n, factor in windows:
        losses, margins = log[f"loss/{split}"], log[f"rewards_{split}/margins"]
        is_known = np.isfinite(losses + margins)
        losses, margins = losses[is_known][-n:], margins[is_known][-n:]
        if len(losses) == n and is_collapsed(start, losses, margins, factor):
            now = f"over the last {count(n, 'update')}" if split == "train" else "at the last evaluation"
            # a margin that is 0 up to rounding is shown as 0; adding 0.0 turns -0.0 into 0.0
            start_margin = figure(round(start.margin, 3) + 0.0)
            yield warning(
                "The run has collapsed",
                f"loss/{split} {figure(losses.mean())} {now}, {figure(start.loss)} at the start; "
                f"rewards_{split}/margins {figure(margins.mean())}, {start_margin} at the start",
                COLLAPSED,
            )
            return


# --- accuracy and loss ------------------------------------------------------------------------------------------------


def best_checkpoint(run: Run) -> Iterator[Finding]:
    if run.best is None or run.best_metric is None:
        return
    name, sign = run.best_metric
    examples, values = run.eval.points(name)
    values_at_best = values[examples == run.best]  # two, if a resumed run evaluated again there
    if not len(values_at_best):
        return
    best, last = values_at_best[-1], values[-1]
    if sign * (best - last) > 0:
        yield note(
            "BEST is better than the last evaluation",
            f"{name} {figure(best)} at {count(run.best, 'example')}, {figure(last)} at the last",
            f"Use step-{run.best}, which the link BEST names, rather than the last checkpoint. On few held-out "
            "examples the best of many evaluations is in part luck.",
        )


def worse_than_reference(run: Run) -> Iterator[Finding]:
    """A held-out loss above its start, pair by pair, by the ledger."""
    start, last_loss, n = find_start(run), run.eval.last("loss/eval"), n_effective(run)
    if not run.has_reference or start is None or run.eval.updates[0] > 0 or n < 2:
        return
    by_pair = compare_evaluations(run, "loss", 0, run.eval.updates[-1])
    if by_pair is None:
        return
    excess, bound = by_pair[0], student_quantile(int(n) - 1) * by_pair[1]
    if excess <= bound:
        return
    yield warning(
        "By its own loss the policy is worse than the reference",
        f"loss/eval {figure(last_loss)}, {figure(start.loss)} before training; the difference on "
        f"{count(n_evaluated(run), 'pair')} is {signed(excess)}, 98 % interval {signed(excess - bound)} to "
        f"{signed(excess + bound)}",
        "On held-out pairs this loss was lower before the first update: the policy lost more on some pairs than it "
        "gained on others. Take an earlier checkpoint, or train with a smaller lr, fewer epochs or a larger loss.beta. "
        "If accuracy is what matters, compare checkpoints by it.",
    )


def worse_than_start(run: Run) -> Iterator[Finding]:
    """A held-out loss above its start, in a run without a reference."""
    examples, losses = run.eval.points("loss/eval")
    if run.has_reference or len(losses) < 2 or examples[0] > 0:
        return
    rise, error = float(losses[-1] - losses[0]), math.sqrt(2) * evaluation_loss_error(run)
    by_example = compare_evaluations(run, "loss", 0, run.eval.updates[-1])
    if by_example is not None:
        rise, error = by_example
    # the error is 0 if the run has too few updates to estimate it
    negligible = (NEGLIGIBLE_RISE if error > 0 else CLEAR_RISE) * abs(losses[0])
    tolerated = max(negligible, student_quantile(max(5, int(n_effective(run)) - 1)) * error)
    if rise > tolerated:
        # some losses rise with the scale of the margins while more pairs are ranked right
        _, accuracies = run.eval.points(EVAL_ACCURACY)
        level, ranking = warning, ""
        if len(accuracies) > 1 and is_above(accuracies[-1], accuracies[0], n_effective(run) / 2):  # both are estimates
            level, ranking = note, f"; {EVAL_ACCURACY} {figure(accuracies[0])} before, {figure(accuracies[-1])} now"
        yield level(
            "By its own loss the model is worse than before training",
            f"loss/eval {figure(losses[0])} before the first update, {figure(losses[-1])} now; a rise up to "
            f"{figure(tolerated)} may be chance or is negligible{ranking}",
            "On held-out examples this loss was lower before the first update. If loss/train rose too, lr is too high; "
            "if not, train with a smaller lr or for fewer epochs, and look whether both splits are alike. If accuracy "
            "is what matters, compare checkpoints by it.",
        )


def saturation(run: Run) -> Iterator[Finding]:
    """Training pairs that are nearly all ranked right."""
    examples, accuracies = run.train.points(TRAIN_ACCURACY)
    last_accuracies = last_tenth(accuracies)
    accuracy, n = float(last_accuracies.mean()), len(last_accuracies)
    n_pairs = n * number(run.setting("batch_size", 1))
    if len(accuracies) < 5 or accuracy < SATURATED or not is_above(accuracy, NEARLY_SATURATED, n_pairs):
        return
    # accuracies of single batches jump, so saturation begins where a mean over `n` updates first shows it
    running_means = np.convolve(accuracies, np.ones(n) / n, mode="valid")
    since = examples[int(np.argmax(running_means >= SATURATED))]
    held_out_accuracy = run.eval.last(EVAL_ACCURACY)
    held_out = f" (held-out pairs: {percent(held_out_accuracy)})" if math.isfinite(held_out_accuracy) else ""
    first_norms, last_norms = run.ends("grad_norm")
    norms = ""
    if len(first_norms):
        norms = f"; grad_norm {figure(first_norms.mean())} at first, {figure(last_norms.mean())} now"
    yield note(
        "Accuracy is saturated",
        f"{TRAIN_ACCURACY} {figure(accuracy)} over the last {n} updates; rewards_train/margins "
        f"{figure(run.tail('train', 'rewards_train/margins'))}{norms}",
        f"Nearly every training pair is ranked right{held_out} from about {count(since, 'example')} on: accuracy can "
        "tell nothing more. Go by held-out pairs, margins and samples; once the gradient is small too, more updates "
        "change little.",
    )


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
    elif low <= 0.5:
        text = f"On {count(n, 'pair')} it is not clear whether anything was learned."
        if n < ENOUGH_PAIRS:
            text += f" To tell an accuracy of 0.60 from chance takes about {ENOUGH_PAIRS}: {_advise_more_pairs(run)}."
        else:
            text += " If so, it is little: train longer or with a larger lr."
        yield note("Held-out accuracy may be chance", value, text)


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
            "An update ranks its pairs before it trains on them, so in the first epoch they are as new as held-out "
            "pairs, which are too few here. Something was learned that carries over; to measure how much, "
            f"{_advise_more_pairs(run)}.",
        )


def _advise_more_pairs(run: Run) -> str:
    available = run.count("test.examples")
    if not available > 0:
        return "raise n_eval_examples, if the test split has more pairs"
    if n_evaluated(run) < available:
        return f"raise n_eval_examples, for the test split has {available:,.0f}"
    return f"put more pairs into the test split, which has only these {available:,.0f}"


def evaluation_turns(run: Run) -> Iterator[Finding]:
    """Evaluations that get worse while training gets better."""
    # under KTO all losses of an evaluation share an estimate of the KL, whose error is unknown
    is_kto = len(run.eval.points("kto/kl/eval")[0]) > 0
    loss_turn = None if is_kto else _find_turn(run, "loss", "loss/eval", "loss/train")
    start = find_start(run)
    start_loss = run.train.first("loss/train") if start is None else start.loss
    # if the training loss is above its start, the run has failed rather than overfitted
    if loss_turn is not None and loss_turn.train_at_last < start_loss:
        if _accuracy_did_not_fall(run, since=loss_turn.examples):
            yield note(
                "Evaluation loss rose while accuracy did not fall",
                loss_turn.value,
                "Accuracy did not fall beyond chance: the policy became surer of pairs that it ranks wrong, the usual "
                "course of a long run. Go by accuracy and samples; if the rewards themselves matter, stop earlier.",
            )
        else:
            yield _make_turn_warning(run, "loss", "loss/eval", loss_turn)
    accuracy_turn = _find_turn(run, "accuracy", EVAL_ACCURACY, TRAIN_ACCURACY)
    if accuracy_turn is not None:
        yield _make_turn_warning(run, "accuracy", EVAL_ACCURACY, accuracy_turn)


class Turn(NamedTuple):
    """The best evaluation, after which evaluations got worse and training better."""

    examples: float
    train_at_last: float  # training metric at the last evaluation
    value: str  # of the finding


def _find_turn(run: Run, kind: str, eval_name: str, train_name: str) -> Turn | None:
    """Find the turn, if any, of the loss or accuracy."""
    examples, values = run.eval.points(eval_name)
    updates = run.eval.updates[np.isfinite(run.eval[eval_name])]
    if len(values) < 2:
        return None
    sign = -1 if kind == "loss" else +1  # a lower loss is better, and a higher accuracy
    best_index = int(np.argmax(sign * values))
    best, last = float(values[best_index]), float(values[-1])
    train_at_best = mean_near(run, train_name, examples[best_index])
    train_at_last = mean_near(run, train_name, examples[-1])
    # standard error of the change from best to last: measured pair by pair, if the ledger has both evaluations
    ledger_column = "loss" if kind == "loss" else "right"
    mean_and_error = compare_evaluations(run, ledger_column, updates[best_index], updates[-1])
    if mean_and_error is not None:
        _, change_error = mean_and_error
    elif kind == "loss":
        change_error = math.sqrt(2) * evaluation_loss_error(run)
    else:
        change_error = math.sqrt(2) * accuracy_error(best, n_effective(run))
    negligible = max(0.05 * abs(best), 0.005) if kind == "loss" else 0.02
    # the best of many evaluations is partly luck
    tolerated = max(negligible, best_of_many_quantile(len(values) - 1) * change_error)
    got_worse = sign * (best - last) > tolerated
    training_got_better = sign * (train_at_last - train_at_best) > 0
    if not (got_worse and training_got_better):
        return None
    value = (
        f"{eval_name} {figure(best)} at {count(examples[best_index], 'example')}, {figure(last)} at "
        f"{examples[-1]:,.0f}; {train_name} {figure(train_at_best)}, then {figure(train_at_last)}; a change of "
        f"{kind} up to {figure(tolerated)} may be chance"
    )
    return Turn(examples[best_index], train_at_last, value)


def _make_turn_warning(run: Run, kind: str, eval_name: str, turn: Turn) -> Finding:
    ranks_checkpoints = run.objective is not None and run.objective.best[0] == eval_name
    best = " (BEST)" if ranks_checkpoints else ""
    if turn.examples > 0:
        advice = f"Take the checkpoint of that evaluation{best}, or train for fewer epochs."
    else:  # before the first update there is no checkpoint
        advice = "Train with a smaller lr, or for fewer epochs."
    return warning(
        f"Evaluation {kind} turned while training {kind} improved",
        turn.value,
        f"From there on the policy learned its training examples rather than what they have in common. {advice}",
    )


def _accuracy_did_not_fall(run: Run, *, since: float) -> bool:
    """Return whether held-out accuracy fell no more than chance explains.

    Compares the last evaluation with the first from `since` examples on; False if they are the same one. An evaluation
    before the first update does not count, as all its pairs tie.
    """
    examples, accuracies = run.eval.points(EVAL_ACCURACY)
    accuracies_since = accuracies[(examples >= since) & (examples > 0)]
    if len(accuracies_since) < 2:
        return False
    fall = float(accuracies_since[0] - accuracies[-1])
    # the evaluation at `since` was chosen as the best of all by loss, so its accuracy is probably lucky too
    quantile = best_of_many_quantile(len(accuracies) - 1)
    return fall <= quantile * math.sqrt(2) * accuracy_error(float(accuracies[-1]), n_effective(run))


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
    losses = run.train["loss/train"]  # (updates,)
    batch_size, epoch = number(run.setting("batch_size", 1)), run.count("epoch")
    if not (epoch >= batch_size > 0):
        return
    updates_per_epoch = int(epoch // batch_size)
    n = updates_per_epoch // 5  # updates compared, on either side of an epoch's end
    if n < 10:
        return
    for end in range(updates_per_epoch, len(losses) - n + 1, updates_per_epoch):
        compared = losses[end - 2 * n : end + n]
        if not np.isfinite(compared).all():
            continue
        earlier, before, after = np.split(compared, 3)  # (n,) each
        # a loss that falls steadily falls as much from `earlier` to `before` as from `before` to `after`
        steady_fall = max(float(earlier.mean() - before.mean()), 0.0)
        step = float(before.mean() - after.mean()) - steady_fall
        bound = student_quantile(n - 1) * math.hypot(mean_error(earlier), 2 * mean_error(before), mean_error(after))
        is_step = step > max(bound, 0.05 * abs(before.mean()))
        held_out, is_before = run.eval["loss/eval"], run.eval.updates <= end
        held_out_before, held_out_after = _last_or_nan(held_out[is_before]), _last_or_nan(held_out[~is_before])
        if is_step and held_out_before - held_out_after < step / 2:
            yield note(
                "Training loss fell by a step as an epoch began",
                f"loss/train {figure(before.mean())} over the {n} updates before update {end + 1:,}, "
                f"{figure(after.mean())} over the {n} from it on; loss/eval {figure(held_out_before)} before, "
                f"{figure(held_out_after)} after",
                "From there on the run sees its examples again, and remembers them: their loss falls at once, but the "
                "loss on held-out examples does not follow. Judge by held-out examples alone, and train for fewer "
                "epochs if their loss rises.",
            )
            return


def _last_or_nan(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else math.nan


# --- the learning rate, gradients, speed ------------------------------------------------------------------------------


def warmup(run: Run) -> Iterator[Finding]:
    """Warn if the warmup did not end."""
    peak_lr, largest_lr = number(run.setting("lr")), float(run.train.points("lr")[1].max())
    is_scaled = run.setting("lr_scaling", "none") != "none"  # by a factor that is not recorded
    stayed_below = largest_lr < 0.999 * peak_lr
    if run.state.word != "complete" or is_scaled or not stayed_below:
        return
    warmup_steps = run.warmup_steps
    if warmup_steps >= run.updates:
        text = "The warmup is as long as the run, or longer: lower warmup_steps, or train for more updates."
    else:
        skipped = "updates skipped for NaN" + (" or because all pairs were ties" if run.online else "")
        text = f"The warmup counts only updates that were applied, not {skipped}: see why there were so many."
    value = (
        f"lr {largest_lr:.3g} at most, of {peak_lr:.3g}; warmup_steps {figure(warmup_steps)}, "
        f"{count(run.updates, 'update')}"
    )
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
    """Describe the first fast fall of chosen responses."""
    beta, tokens = number(run.setting("loss.beta")), run.count("train.mean_chosen_tokens")
    reward_per_nat = beta if run.is_per_token else beta * tokens  # per nat of a token's mean log-probability
    is_beta_times_log_ratio = run.setting("loss.f_divergence", "reverse_kl") == "reverse_kl"
    updates, rewards = run.train.updates, run.train["rewards_train/chosen"]
    length = BLOCK // 2  # updates in a part
    n_parts = len(rewards) // length
    if not (reward_per_nat > 0 and is_beta_times_log_ratio and n_parts >= 3):
        return None
    nats = rewards[: n_parts * length].reshape(n_parts, length) / reward_per_nat
    means = nats.mean(axis=1)
    for i in range(n_parts - 2):
        fall = means[i] - means[i + 2]  # the middles of the two parts are BLOCK updates apart
        if not fall > FAST_FALL:  # also for NaN
            continue
        error = math.hypot(mean_error(_detrend(nats[i])), mean_error(_detrend(nats[i + 2])))
        if fall > 4 * error:
            return (
                f"log-probabilities of chosen responses fell by {figure(fall)} a token within {BLOCK} updates, up "
                f"to update {updates[(i + 3) * length - 1]:,.0f}"
            )
    return None


def _detrend(values: np.ndarray) -> np.ndarray:
    """Subtract the line of best fit: a steady trend is no noise."""
    times = np.arange(len(values)) - (len(values) - 1) / 2
    return values - values.mean() - times * (times @ values) / (times @ times)


def _describe_growing_gradients(run: Run) -> str | None:
    """Describe gradients that grew since the warmup."""
    is_after_warmup = run.train.updates > run.warmup_steps
    norms = run.train["grad_norm"][is_after_warmup]
    norms = norms[np.isfinite(norms)]
    if len(norms) < 4 * BLOCK:
        return None
    n_last = max(BLOCK, len(norms) // 10)
    first, last = float(np.median(norms[:BLOCK])), float(np.median(norms[-n_last:]))
    has_grown = first > 0 and last >= GROWN_NORM * first
    if not has_grown:
        return None
    return (
        f"the median of grad_norm was {figure(first)} in the first {BLOCK} updates after the warmup, and is "
        f"{figure(last)} now"
    )


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
