"""The verdict on a run: did the model change, is it better? docs/metrics.md has the rules."""

import math

from dpo.analysis.runs import LoggedRun, number
from dpo.numbers import count, figure, percent, signed
from dpo.settings.keys import PRECISION

Z_95 = 1.959964  # half the width of a 95 % interval, in standard errors
# The relative rounding error of a dtype is its spacing of numbers near 1.
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALL_CHANGE = 0.01  # nats: a token's probability changes by a hundredth of itself
ENOUGH = 100  # this many pairs, or half as many responses of each label, tell an accuracy or AUC of 0.6 from 0.5
FEWEST = 10  # fewer examples are too few, whatever the result
TOO_FEW = ": {}, too few to judge; about {} would do"
RESPONSES = {  # names of responses in sentences, by kind of example and role; others are named by their role
    "targets": {"chosen": "targets"},
    "labels": {"chosen": "desirable", "rejected": "undesirable"},
}


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval (low, high) of a share of n examples."""
    middle = share + Z_95**2 / (2 * n)
    half_width = Z_95 * math.sqrt(share * (1 - share) / n + (Z_95 / (2 * n)) ** 2)
    scale = 1 + Z_95**2 / n
    return (middle - half_width) / scale, (middle + half_width) / scale


def n_evaluated(run: LoggedRun, what: str = "examples") -> float:
    """Return how many held-out examples, or prompts, an evaluation uses: `n_eval_examples` or, if fewer, all.

    `what` is "examples" or "prompts".
    """
    n_wanted = number(run.setting("n_eval_examples") or 256)  # 256 is the key's default
    n_available = run.counted(f"test.{what}")
    return min(n_wanted, n_available) if n_available > 0 else n_wanted


def n_effective(run: LoggedRun) -> float:
    """Estimate the effective sample size of an evaluation: its number of examples, times two shares of the test split.

    With weights w of the examples, the first share is (sum w)^2 / sum w^2 over their number. As the examples of one
    prompt count once, the second share is the number of prompts over the number of examples.
    """
    n = n_evaluated(run)
    n_examples = run.counted("test.examples")
    for name in ("test.effective_examples", "test.prompts"):
        share = run.counted(name) / n_examples
        if 0 < share < 1:  # false for NaN, if a count is missing
            n *= share
    return n


def describe_result(run: LoggedRun) -> str:
    """Say whether the model changed, and whether it is better on held-out data."""
    evaluated_at, _ = run.eval.points("loss/eval")  # numbers of examples trained on before each evaluation
    if run.train.has("online/score"):
        better = _describe_scores(run)
    elif not len(evaluated_at) or evaluated_at[-1] == 0:
        better = "The run was not evaluated after an update yet."
    elif run.eval.has("rewards_eval/accuracies"):
        better = _describe_pairs(run)
    elif run.eval.has("rewards_eval/auc"):
        better = _describe_labels(run)
    else:
        better = _describe_loss(run)
    return f"{describe_change(run)} {better}".strip()


def describe_change(run: LoggedRun) -> str:
    """Say whether the model changed, by its answers and log-probabilities; "" if neither was recorded."""
    answers = run.compared_answers()
    n_differ = sum(before != now for _, before, now in answers)
    changes, rounding = find_changes_per_token(run)
    largest = max(map(abs, changes.values()), default=0.0)
    facts = []
    if answers:
        facts.append(f"{n_differ or 'none'} of {count(len(answers), 'answer')} to held-out prompts changed")
    if changes:
        names = RESPONSES.get(run.objective.trains_on, {})
        moved = ", ".join(f"{names.get(role, role)} {signed(change)}" for role, change in changes.items())
        if rounding:  # 0: the dtypes are not known
            moved += f" (rounding: {figure(rounding, 1)})"
        facts.append(f"the log-probability per token of held-out responses moved: {moved}")
    # 16-bit weights may be too coarse for the steps of a small lr.
    if run.train.last("changed_weights") == 0 and not n_differ and largest <= rounding:
        facts = ["no weight changed in the first update at the full lr", *facts]
        return f"The model hardly changed: {', and '.join(facts)}: set model.policy_dtype=float32, or raise lr."
    if not facts:
        return ""
    # Rounding this coarse may hide what a small lr does.
    if not answers and largest <= rounding and rounding > 1e-4:
        return f"Whether the model changed cannot be told: {facts[0]}."
    advice = ": raise lr, or train longer"
    if not n_differ and changes and largest <= rounding:
        verb = "did not change"
    elif largest >= SMALL_CHANGE or (n_differ and (not changes or 2 * n_differ >= len(answers))):
        verb = "changed"
        advice = ""
    else:
        verb = "hardly changed"
    return f"The model {verb}: {', and '.join(facts)}{advice}."


def find_changes_per_token(run: LoggedRun) -> tuple[dict[str, float], float]:
    """Return the mean changes of held-out log-probabilities by role, and their rounding error, all in nats per token.

    A change is from the evaluation before the first update to the last one. A role that lacks either is left out.
    """
    changes = {}
    size = 1.0  # the largest |log-probability| per token of a role, at least 1 nat
    for role in ("chosen", "rejected"):
        n_tokens = run.counted(f"test.mean_{role}_tokens")
        examples, logps = run.eval.points(f"logps_eval/{role}")
        if n_tokens > 0 and len(logps) > 1 and examples[0] == 0:
            size = max(size, abs(logps[-1]) / n_tokens)
            changes[role] = (logps[-1] - logps[0]) / n_tokens
    dtypes = [str(run.setting(key)) for key in (*PRECISION, "model.policy_dtype")]
    # Log-probabilities are computed in these dtypes, and the coarsest one rounds most.
    return changes, size * max(ROUNDING.get(dtype, 0.0) for dtype in dtypes)


def _describe_scores(run: LoggedRun) -> str:
    """Compare an online run's first scores with its last, and its held-out answers with the reference's."""
    before, now = run.means_at_ends("online/score")
    _, kl = run.means_at_ends("online/kl")
    text = f"The mean score of the policy's answers was {figure(before)} at first and is {figure(now)} now"
    if math.isfinite(kl):  # there is a reference
        text += f", at online/kl {figure(kl)}"
    score = run.eval.last("online_eval/score")
    win_rate = run.eval.last("online_eval/win_rate")
    if math.isfinite(score):
        text += f". On held-out prompts it is {figure(score)}"
    if math.isfinite(win_rate):
        n = n_evaluated(run, "prompts")
        text += f", with a win rate of {percent(win_rate)} against the reference"
        text += _compare_with_chance(share_interval(win_rate, n), n, count(n, "prompt"))
    return f"{text}."


def _describe_loss(run: LoggedRun) -> str:
    """Compare the first held-out loss with the last; an SFT loss is shown per token."""
    _, losses = run.eval.points("loss/eval")
    name = "loss"
    caveat = ""
    n_tokens = run.counted("test.mean_chosen_tokens")
    if run.objective.trains_on == "targets" and n_tokens > 0:
        name = "loss per token"
        if run.setting("loss.average") != "mean":  # then the loss is a sum over tokens
            losses = losses / n_tokens
        if n_effective(run) < FEWEST:
            caveat = TOO_FEW.format(count(n_evaluated(run), "target"), ENOUGH)
    if losses[-1] == losses[0]:
        return f"The held-out {name} is {figure(losses[-1])}{caveat}."
    verb = "fell" if losses[-1] < losses[0] else "rose"
    return f"The held-out {name} {verb} from {figure(losses[0])} to {figure(losses[-1])}{caveat}."


def _describe_pairs(run: LoggedRun) -> str:
    """Say how many held-out pairs the last evaluation ranked right, and whether that is more than by chance."""
    accuracy = run.eval.last("rewards_eval/accuracies")
    n_examples = n_evaluated(run)
    if run.objective.trains_on == "lists":
        counted = count(n_examples, "list")
        text = f"{percent(accuracy)} of the pairs in {count(n_examples, 'held-out list')} are ranked right"
    else:
        counted = count(n_examples, "pair")
        verb = "gained on" if run.objective.reference else "is rated above"
        share = f"{accuracy * n_examples:,.0f}"
        if run.counted("test.effective_examples") > 0:  # pairs have weights, so the accuracy is no count
            share = f"{percent(accuracy)} by weight"
        text = f"In {share} of {count(n_examples, 'held-out pair')} the chosen response {verb} the rejected one"
    n = n_effective(run)
    if round(n) != n_examples:
        counted += f" (which count as {round(n):,})"
    return f"{text}{_compare_with_chance(share_interval(accuracy, n), n, counted)}."


def _describe_labels(run: LoggedRun) -> str:
    """Say how well rewards tell held-out responses with different labels apart, and whether better than by chance."""
    auc = run.eval.last("rewards_eval/auc")
    effective_share = n_effective(run) / run.counted("test.examples")  # the effective sample, as a share of the split
    text = f"By AUC, a desirable held-out response is rated above an undesirable one {percent(auc)} of the time"
    n_desirable = run.counted("test.desirable") * effective_share
    n_undesirable = run.counted("test.undesirable") * effective_share
    n = min(n_desirable, n_undesirable)
    if not n > 0:  # also for NaN: the counts are missing
        return f"{text}."
    counted = f"{n_desirable:,.0f} desirable and {n_undesirable:,.0f} undesirable responses"
    # The variance of an AUC is at most the variance of a share of n examples, where n counts the rarer label, so the
    # share's interval is used. Half as many responses of a label as pairs are enough: 2 n is compared with the limits.
    return f"{text}{_compare_with_chance(share_interval(auc, n), 2 * n, counted, f'{ENOUGH // 2} of each')}."


def _compare_with_chance(interval: tuple[float, float], n: float, counted: str, enough: object = ENOUGH) -> str:
    """Return the end of a sentence: a share's interval, and whether the share differs from 0.5, its value by chance.

    `counted` is the text for the n examples, such as "50 pairs"; `enough` says how many would do if n is too small.
    """
    if n < FEWEST:
        return TOO_FEW.format(counted, enough)
    low, high = interval
    text = f" (95 % interval {percent(low)} to {percent(high)})"
    if low > 0.5:
        return f"{text}: better than by chance"
    if high < 0.5:
        return f"{text}: worse than by chance, as far as {counted} tell"
    text += f": no better than by chance, as far as {counted} tell"
    return f"{text}; about {enough} would be needed to tell" if n < ENOUGH else text
