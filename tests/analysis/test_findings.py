"""What the report says of a run, on metrics made by hand. docs/metrics.md has the rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.records import CONFIG, evaluation, rewards, sample, update

from dpo.analysis.findings import Finding, find_all, lengths_of_samples
from dpo.analysis.measures import USEFUL, MarginParts, find_change, find_spikes, margin_parts, wilson_interval
from dpo.analysis.runs import Log, Run, State

TOKENS = {"mean_chosen_tokens": 20.0, "mean_rejected_tokens": 20.0}


def run_of(lines: list[dict], **more) -> Run:
    train, evaluations = ([line for line in lines if line["split"] == split] for split in ("train", "eval"))
    given = {"config": CONFIG, "preflight": {"train": TOKENS, "test": TOKENS}, **more}
    return Run(Path("run"), "made", train=Log(train), eval=Log(evaluations), **given)


def find(title: str, lines: list[dict], **more) -> Finding | None:
    """What is found under a title."""
    return next((finding for finding in find_all(run_of(lines, **more)) if finding.title == title), None)


def pairs(number: int, accuracy: float, loss: float = 0.6) -> dict:
    return update(number, **rewards("train", 0.1, -0.1, accuracy), **{"loss/train": loss})


def test_a_run_as_it_should_be_has_no_warning():
    lines = [evaluation(0, 0.69, **rewards("eval", 0.0, 0.0, 0.0))]
    lines += [pairs(k, accuracy=0.5 + k / 400, loss=0.69 - k / 1000) for k in range(1, 101)]
    lines += [evaluation(100, 0.6, **rewards("eval", 0.2, -0.2, 0.72))]
    assert [finding for finding in find_all(run_of(lines)) if finding.level == "warning"] == []


# --- accuracy and loss


def test_chance_is_that_of_the_examples_that_there_are():
    lines = [pairs(k, accuracy=0.9) for k in range(1, 31)] + [evaluation(30, 0.7, **rewards("eval", 0.1, -0.1, 0.8))]
    title = "Held-out accuracy cannot be told from chance"

    def of(n: int) -> dict:
        return {"preflight": {"train": TOKENS, "test": {**TOKENS, "examples": n}}}

    note = find(title, lines, **of(6))
    assert "on 6 pairs" in note.value  # of the 256 that the config allows: raising that would give no more
    assert "the test split has no more than these 6, so put more pairs into it" in note.text
    assert find(title, lines) is None
    lines[-1] = evaluation(30, 0.7, **rewards("eval", 0.1, -0.1, 0.53))
    assert "raise n_eval_examples, for the test split has 9,000" in find(title, lines, **of(9000)).text


def test_little_better_than_by_chance_is_no_denial():
    lines = [pairs(k, 0.5) for k in range(1, 31)] + [evaluation(30, 0.69, **rewards("eval", 0.1, 0.0, 0.535))]
    many = {"config": CONFIG | {"n_eval_examples": 5000}}
    note = find("Held-out pairs are ranked little better than by chance", lines, **many)
    assert (note.level, note.value) == (
        "note",
        "rewards_eval/accuracies 0.535 on 5,000 pairs, 95 % interval 0.521 to 0.549",
    )
    assert "above chance, but by less than 0.05" in note.text
    assert find("Held-out pairs are ranked no better than by chance", lines, **many) is None


def test_saturated_accuracy():
    lines = [pairs(k, accuracy=0.5 if k <= 40 else 1.0) for k in range(1, 101)]
    warning = find("Accuracy is saturated", lines)
    assert warning.level == "warning"
    assert warning.value == "rewards_train/accuracies 1 over the last 10 updates"
    assert "from about 164 examples on" in warning.text  # the first ten that are all right begin with update 41
    assert "grad_norm was 1 over the first 10 updates and is 1 now, so updates still move the policy" in warning.text
    # hinge and IPO have no gradient left at margins where DPO has most of it: the measured one tells
    spent = [{**line, "grad_norm": 1.0 if line["updates"] < 50 else 0.05} for line in lines]
    assert "is 0.05 now: more updates mostly widen margins" in find("Accuracy is saturated", spent).text
    assert find("Accuracy is saturated", [pairs(k, accuracy=0.98) for k in range(1, 101)]) is None


def test_evaluation_that_turns_while_training_improves():
    lines = [pairs(k, accuracy=0.6, loss=0.7 - k / 1000) for k in range(1, 201)]
    turned = [evaluation(n, loss) for n, loss in ((0, 0.69), (100, 0.60), (200, 0.66))]
    warning = find("Evaluation loss turned while training loss improved", lines + turned)
    # of ten updates up to 100 the mean is 0.7 - 0.0955, of twenty (a tenth of all) up to 200 it is 0.7 - 0.1905
    assert warning.value == "loss/eval 0.6 at 400 examples, 0.66 at 800; loss/train 0.609, then 0.509"
    for last in (0.60, 0.62):  # at most 5 % above the best
        lines_now = lines + [evaluation(n, loss) for n, loss in ((0, 0.69), (100, 0.60), (200, last))]
        assert find("Evaluation loss turned while training loss improved", lines_now) is None
    worse = [pairs(k, accuracy=0.6, loss=0.5 + k / 1000) for k in range(1, 201)]
    assert find("Evaluation loss turned while training loss improved", worse + turned) is None


def test_a_turn_is_told_of_a_policy_that_learned_its_training_examples():
    title = "Evaluation loss turned while training loss improved"
    start = [evaluation(0, 0.693, **rewards("eval", 0.0, 0.0, 0.0))]
    last = [evaluation(26, 10.8, **rewards("eval", -5.0, 0.4, 0.33))]

    def lines(end: float) -> list[dict]:
        return start + [pairs(k, 0.5, loss=end + 26 - k) for k in range(1, 27)] + last

    assert find(title, lines(19.0)) is None  # its training loss is far above the start too
    warning = find(title, lines(-9.0))
    assert "checkpoint" not in warning.text  # there is none from before the first update
    few = {"config": CONFIG | {"loss": {"name": "sft"}}, "preflight": {"test": {"examples": 6}}}
    noisy = [update(k, **{"loss/train": 150 - k + 60 * (k % 2)}) for k in range(1, 61)]
    evaluated = [evaluation(0, 250.0), evaluation(30, 101.0), evaluation(60, 138.0)]
    assert find(title, noisy + evaluated, **few) is None  # chance explains it on 6 examples
    assert find(title, noisy + evaluated, config=few["config"]) is not None


@pytest.mark.parametrize(("loss", "is_best"), [("sft", True), ("dpo", False), ("another", False)])
def test_best_is_named_where_it_is_ranked_by_what_turned(loss, is_best):
    lines = [pairs(k, accuracy=0.6, loss=0.7 - k / 1000) for k in range(1, 201)]
    lines += [evaluation(n, value) for n, value in ((0, 0.69), (100, 0.60), (200, 0.66))]
    warning = find("Evaluation loss turned while training loss improved", lines, config={"loss": {"name": loss}})
    assert ("(BEST)" in warning.text) == is_best


@pytest.mark.parametrize(("last", "is_found"), [(0.70, True), (0.76, False)])
def test_accuracy_that_chance_explains_is_no_turn(last, is_found):
    """Two standard errors of 0.8 on 256 pairs are 2 sqrt(0.8 * 0.2 / 256) = 0.05."""
    lines = [pairs(k, accuracy=0.5 + k / 500) for k in range(1, 201)]
    lines += [evaluation(n, 0.6, **rewards("eval", 0, -1, accuracy)) for n, accuracy in ((100, 0.8), (200, last))]
    warning = find("Evaluation accuracy turned while training accuracy improved", lines)
    assert (warning is not None) == is_found


def test_no_better_than_chance():
    def lines(accuracy: float) -> list[dict]:
        return [pairs(k, 0.5) for k in range(1, 31)] + [evaluation(30, 0.69, **rewards("eval", 0.1, 0.0, accuracy))]

    title = "Held-out pairs are ranked no better than by chance"
    warning = find(title, lines(0.45))
    assert (warning.level, warning.value) == (
        "warning",
        "rewards_eval/accuracies 0.45 on 256 pairs, 95 % interval 0.39 to 0.511",
    )
    note = find("Held-out accuracy cannot be told from chance", lines(0.55))
    assert (note.level, note.value) == (
        "note",
        "rewards_eval/accuracies 0.55 on 256 pairs, 95 % interval 0.489 to 0.61",
    )
    assert note.text.startswith("256 pairs cannot tell whether anything was learned. To tell an accuracy of 0.60 from")
    few = {"preflight": {"test": {"examples": 64}}}  # n_eval_examples is 256
    assert "64 pairs cannot tell" in find("Held-out accuracy cannot be told from chance", lines(0.6), **few).text
    assert not {title, "Held-out accuracy cannot be told from chance"} & {
        f.title for f in find_all(run_of(lines(0.57)))
    }


def test_learning_is_denied_to_a_policy_that_has_learned_in_less_than_one_run_of_twenty(capsys):
    rng = np.random.default_rng(0)
    rates = {}
    for n in (64, 128, 256, 512, 1024):
        for accuracy in (0.55, 0.60, 0.65):
            found = [wilson_interval(share, n) for share in rng.binomial(n, accuracy, 4000) / n]
            denied, unsure = (
                np.mean([f(i) for i in found]) for f in (lambda i: i.high < USEFUL, lambda i: i.low <= 0.5)
            )
            rates[n, accuracy] = denied
            with capsys.disabled():
                print(f"\n{n} pairs, true accuracy {accuracy}: denied {denied:.1%}, left open {unsure:.1%}", end="")
    assert max(rates.values()) <= 0.05
    coin = [wilson_interval(share, 1024).high < USEFUL for share in rng.binomial(1024, 0.5, 4000) / 1024]
    assert np.mean(coin) > 0.8  # and said of a coin, where there are pairs enough


def test_training_pairs_ranked_better_than_held_out_ones():
    def lines(accuracy: float) -> list[dict]:
        return [pairs(k, 0.9) for k in range(1, 31)] + [evaluation(30, 0.6, **rewards("eval", 0.1, 0.0, accuracy))]

    note = find("Training pairs are ranked better than held-out ones", lines(0.7))
    assert (note.level, note.value) == ("note", "accuracy 0.9 against 0.7")
    assert find("Training pairs are ranked better than held-out ones", lines(0.8)) is None


# --- numbers that are none, and spikes


def test_skipped_updates_are_named():
    lines = [update(k, **({"loss/train": None, "grad_norm": None} if k in (3, 5) else {})) for k in range(1, 7)]
    warning = find("Updates were skipped: loss or gradient was not a number", lines, nonfinite=[3, 5])
    assert warning.value == "2 of 6 updates: 3, 5"
    assert "nonfinite-3, nonfinite-5" in warning.text


def test_the_update_that_ended_the_run_is_named():
    title = "The run ended on a loss or gradient that was not a number"
    ended = {"nonfinite": [7], "state": State("aborted", "")}
    assert find(title, [update(k) for k in range(1, 7)], **ended).value == "update 7"


def test_spikes_are_measured_against_the_median_of_the_hundred_before():
    values = np.ones(200)
    values[19], values[30], values[50], values[150] = 50, 10, 10.5, 36
    assert find_spikes(values) == [(50, 10.5), (150, 36.0)]  # before update 20 too few are known; 10 times is not above
    values[:100] = np.nan
    assert find_spikes(values) == [(150, 36.0)]
    assert find_spikes(np.full(30, np.nan)) == find_spikes(np.zeros(30)) == []


def test_a_gradient_spike_is_a_warning_with_its_value():
    lines = [update(k, grad_norm=2.0 if k != 40 else 72.0) for k in range(1, 61)]
    warning = find("Gradient spikes", lines)
    assert warning.level == "warning"
    assert warning.value == "grad_norm 72 at update 40, 36 times its median before; 1 spike in all"
    assert find("Loss spikes", lines) is None
    assert find("Loss spikes", [update(k, **{"loss/train": 9.0 if k == 30 else 0.6}) for k in range(1, 61)]) is not None


def test_where_gradients_are_spent_none_is_a_spike():
    norms = [4.9, 16.0] + [2e-17] * 118  # all is learned in two updates, as with lr=1e-1
    norms += [1e-15] + [2e-17] * 20
    assert find_spikes(np.array(norms)) == []
    assert [place for place, _ in find_spikes(np.array([*norms, 1.0]))] == [141]


# --- chosen, rejected, length


def with_margin(chosen: float, rejected: float, *, logps: tuple = (-50.0, -50.0), **more) -> list[Finding]:
    """Findings on an evaluation with these rewards, after one in which `logps` of both sides were -50."""
    named = ("logps_eval/chosen", "logps_eval/rejected")
    first = evaluation(0, 0.69, **rewards("eval", 0.0, 0.0, 0.0), **dict.fromkeys(named, -50.0))
    last = evaluation(50, 0.5, **rewards("eval", chosen, rejected), **dict(zip(named, logps, strict=True)))
    return find_all(run_of([first, *(update(k) for k in range(1, 51)), last], **more))


def test_which_side_the_margin_comes_from():
    [story] = [f for f in with_margin(0.3, -0.9, logps=(-47.0, -59.0)) if f.title == "Where the margin comes from"]
    assert story.value == "margin 1.2 = chosen +0.3 minus rejected −0.9"
    assert "25 % of the margin is chosen rising, 75 % is rejected falling" in story.text


def test_chosen_that_fall_while_margins_grow_are_explained():
    title = "Chosen responses become less likely while margins grow"
    [story] = [f for f in with_margin(-0.2, -1.0, logps=(-52.0, -60.0)) if f.title == title]
    assert story.level == "note"
    assert story.value == "logps_eval/chosen −50, then −52 (−2); margin 0.8 = chosen −0.2 minus rejected −1"
    assert "rejected falling gives 125 % of the margin, and chosen falling takes 25 % away" in story.text
    assert "The loss sees only the difference" in story.text

    [story] = [f for f in with_margin(-2.0, -2.8, logps=(-70.0, -78.0)) if f.title == title]
    assert story.level == "warning"  # chosen fell by 20, and the sides parted by 8


def test_without_two_evaluations_the_first_updates_are_compared_with_the_last():
    lines = [
        update(k, **{"logps_train/chosen": -50.0 - k, "logps_train/rejected": -50.0 - 3 * k}) for k in range(1, 41)
    ]
    change = find_change(run_of(lines))
    assert (change.split, change.chosen_before, change.chosen_after) == ("train", -55.5, -85.5)
    assert change.margin == -30 + 90


def test_what_length_gives_is_the_margin_without_its_part_for_equal_lengths():
    # 0.01 per token on both sides, 100 and 50 tokens: all of the margin is length
    assert MarginParts("eval", 1.0, 0.5, 100, 50).length == pytest.approx(0.5)
    # equal lengths: none; -0.01 and -0.03 per token, 40 and 60 tokens: (-0.02) * (40 - 60)
    assert MarginParts("eval", 1.0, 0.5, 50, 50).length == 0
    assert MarginParts("eval", -0.4, -1.8, 40, 60).length == pytest.approx(0.4)


def test_a_margin_that_is_mostly_length_is_a_warning():
    tokens = {"test": {"mean_chosen_tokens": 100.0, "mean_rejected_tokens": 50.0}}
    [warning] = [f for f in with_margin(1.0, 0.4, preflight=tokens) if f.title == "Much of the margin is length"]
    # per token 0.01 and 0.008: 0.009 * 50 of 0.6
    assert warning.level == "warning"
    assert warning.value == "+0.45 of the margin 0.6 (75 %); mean tokens 100 chosen, 50 rejected"
    assert "Much of the margin is length" not in [f.title for f in with_margin(1.0, 0.4)]
    assert "What length gives cannot be told" in [f.title for f in with_margin(1.0, 0.4, preflight={})]


def without_length_or_reference(loss: dict) -> dict[str, Finding]:
    """Of a run whose chosen responses are shorter, and whose rewards are means over tokens."""
    lines = [evaluation(0, 1.0, **rewards("eval", -2.6, -2.7, 0.55), **{"logps_eval/chosen": -53.0})]
    lines += [update(k, **rewards("train", -2.4, -2.6, 0.6), **{"loss/train": 0.9}) for k in range(1, 101)]
    lines += [evaluation(100, 0.9, **rewards("eval", -2.4, -2.6, 0.66), **{"logps_eval/chosen": -49.0})]
    tokens = {"mean_chosen_tokens": 41.0, "mean_rejected_tokens": 51.6}
    run = run_of(lines, config={**CONFIG, "loss": loss}, preflight={"train": tokens, "test": tokens})
    return {finding.title: finding for finding in find_all(run)}


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "simpo", "beta": 2.0, "gamma": 1.0},
        {"name": "orpo", "beta": 0.1},
        {"name": "mix", "beta": 2.0, "weights": {"simpo": 1.0, "sft": 0.5}},
    ],
)
def test_without_a_reference_sides_are_compared_with_their_start_and_nothing_is_length(loss):
    found = without_length_or_reference(loss)
    assert not {"Much of the margin is length", "What length gives"} & found.keys()
    story = found["Where the margin comes from"]
    assert story.value == "margin +0.1 since the start = chosen +0.2 minus rejected +0.1"
    assert story.text.startswith("Since the start, both became more likely")
    assert "reference" not in story.text


@pytest.mark.parametrize("loss", [{"name": "dpo_norm", "beta": 5.0}, {"name": "ipo", "beta": 0.1, "average": True}])
def test_of_rewards_per_token_nothing_is_length(loss):
    found = without_length_or_reference(loss)
    assert not {"Much of the margin is length", "What length gives"} & found.keys()
    assert "Against the reference" in found["Chosen responses become less likely while margins grow"].text


def test_sums_of_ipo_and_unknown_losses():
    assert "Much of the margin is length" in without_length_or_reference({"name": "ipo", "beta": 0.1, "average": False})
    found = without_length_or_reference({"name": "another"})
    assert "Much of the margin is length" not in found
    assert "Since the start" in found["Where the margin comes from"].text


# --- collapse, and BEST


def test_a_run_that_collapses():
    title = "The run has collapsed"
    start = [evaluation(0, 0.693, **rewards("eval", 0.0, 8e-7, 0.0))]  # rounding
    lines = [update(k, **rewards("train", -20.0, 10.0, 0.3), **{"loss/train": 3.0}) for k in range(1, 101)]
    assert find(title, start + lines).value == (
        "loss/train 3 over the 64 updates up to 64, 3 over the last 64, 0.693 at the start; "
        "rewards_train/margins −30 over the 64 updates up to 64, 0 at the start"
    )
    assert find(title, start + lines[:63]) is None
    rejected_fall_further = [{**line, **rewards("train", -10.0, -20.0)} for line in lines]
    assert find(title, start + rejected_fall_further) is None
    unevaluated = [update(1, **rewards("train", 0.0, 0.0, 0.0), **{"loss/train": 0.693}), *lines[1:]]
    assert "0.693 at the start" in find(title, unevaluated).value


def test_a_short_run_that_collapses_is_told_by_its_evaluations_or_by_few_updates():
    title = "The run has collapsed"
    start = [evaluation(0, 0.693, **rewards("eval", 0.0, 0.0, 0.0))]
    lines = [update(k, **rewards("train", -20.0, 10.0, 0.3), **{"loss/train": 30.0}) for k in range(1, 17)]
    assert "over the 16 updates up to 16" in find(title, start + lines).value
    bad = [evaluation(13, 55.8, **rewards("eval", -40.0, -12.1, 0.33))]
    assert find(title, start + lines[:13] + bad).value == (
        "loss/eval 55.8 at 52 examples, 55.8 at the last evaluation, 0.693 at the start; rewards_eval/margins −27.9, "
        "0 at the start"
    )
    online = {"config": CONFIG | {"online": {"name": "online"}}}  # may follow a scorer that the labels contradict
    assert find(title, start + lines[:13] + bad, **online) is None
    weighted = {"config": CONFIG | {"loss": {"name": "dpo", "beta": 0.1, "wpo": True}}}
    assert find(title, start + lines + bad, **weighted) is None


def test_best_is_named_where_it_is_better_than_the_last_evaluation():
    lines = [update(k, **rewards("train", 0.1, 0.0)) for k in range(1, 11)]
    lines += [evaluation(n, 0.6, **rewards("eval", 0.1, 0.0, accuracy)) for n, accuracy in ((5, 0.8), (10, 0.75))]
    note = find("BEST is better than the last evaluation", lines, best=20)
    assert note.value == "rewards_eval/accuracies 0.8 at 20 examples, 0.75 at the last"
    assert "step-20" in note.text
    assert find("BEST is better than the last evaluation", lines, best=40) is None
    assert find("BEST is better than the last evaluation", lines) is None


def test_a_loss_that_rises_while_accuracy_does_not_fall_is_a_note():
    lines = [pairs(k, accuracy=0.6, loss=0.7 - k / 1000) for k in range(1, 201)]
    lines += [
        evaluation(n, loss, **rewards("eval", 0.1, 0.0, 0.7)) for n, loss in ((0, 0.69), (100, 0.60), (200, 0.66))
    ]
    assert find("Evaluation loss rose while accuracy did not fall", lines).level == "note"
    assert find("Evaluation loss turned while training loss improved", lines) is None


def test_a_pair_that_is_not_learned_among_many_that_are_is_no_spike():
    first = [evaluation(0, 0.693, **rewards("eval", 0.0, 0.0, 0.0))]
    learned = [update(k, **rewards("train", 2.0, -3.0), **{"loss/train": 0.01}) for k in range(1, 61)]
    learned[39]["loss/train"] = 0.5
    assert find("Loss spikes", first + learned) is None
    assert find("Loss spikes", [*learned[:39], {**learned[39], "loss/train": 0.8}, *learned[40:]]) is not None


def test_parts_are_of_the_last_evaluation_or_of_the_last_updates():
    lines = [evaluation(0, 0.69, **rewards("eval", 0.0, 0.0))]
    lines += [update(k, **rewards("train", 0.1 * k, 0.0)) for k in range(1, 31)]
    assert margin_parts(run_of(lines))[:3] == ("train", pytest.approx(2.55), 0.0)  # the mean of 2.1 to 3.0
    assert margin_parts(run_of([*lines, evaluation(30, 0.5, **rewards("eval", 0.7, 0.2))]))[:3] == ("eval", 0.7, 0.2)
    assert margin_parts(run_of([update(1)])) is None


@pytest.mark.parametrize(("words", "level"), [(30, "warning"), (14, None), (4, "warning")])
def test_samples_that_become_long_or_short(words, level):
    samples = [sample(0, "a " * 10, "a " * 10)] * 8 + [sample(40, "a " * words, "a " * 10)] * 8
    lines = [update(10, **rewards("train", 0.1, 0.0))]
    kind = "long" if words > 10 else "short"
    finding = find(f"The policy's samples have become {kind}", lines, samples=samples)
    assert (finding and finding.level) == level
    if finding:
        assert finding.value.startswith(
            f"{words} words on average, the reference's 10 (8 samples); after the same prompt"
        )
    assert find(f"The policy's samples have become {kind}", lines, samples=samples[-7:]) is None  # too few


def test_samples_without_a_reference_are_compared_with_the_first():
    samples = [sample(0, "a " * 10)] * 8 + [sample(40, "a " * 20)] * 8
    lines = [update(10, **rewards("train", 0.1, 0.0))]
    assert "its first 10" in find("The policy's samples have become long", lines, samples=samples).value
    assert find("The policy's samples have become long", [update(10)], samples=samples) is None  # SFT: they should


LAWS = {  # numbers of words with a mean of about 60 and 45
    "geometric": lambda rng, shape: rng.geometric(1 / 60, shape),
    "lognormal": lambda rng, shape: np.exp(rng.normal(3.6, 0.6, shape)).astype(int) + 1,
}


@pytest.mark.parametrize("law", LAWS)
def test_lengths_of_one_law_are_seldom_called_different_and_twice_the_length_is_seen(law, capsys):
    rng, lines = np.random.default_rng(0), [update(10, **rewards("train", 0.1, 0.0))]

    def share_with_a_warning(n: int, times: int, runs: int = 1000) -> float:
        found = 0
        for _ in range(runs):
            lengths = LAWS[law](rng, (n, 2)) * (times, 1)
            samples = [sample(40, "a " * policy, "a " * other) for policy, other in lengths]
            found += any("samples have become" in f.title for f in lengths_of_samples(run_of(lines, samples=samples)))
        return found / runs

    false, power = ({n: share_with_a_warning(n, times) for n in (8, 16, 32, 64)} for times in (1, 2))
    with capsys.disabled():
        print(f"\n{law}: false alarms {false}, seen at twice the length {power}", end="")
    assert max(false.values()) <= 0.05
    assert power[64] > 0.7


def test_a_policy_that_says_nothing():
    def lines(policy, reference=None, first=None):
        before = [sample(0, text, None, f"prompt {i}") for i, text in enumerate(first or [])]
        others = reference or [None] * len(policy)
        now = [sample(40, p, r, f"prompt {i}") for i, (p, r) in enumerate(zip(policy, others, strict=True))]
        return {"samples": before + now}

    ran, words = [update(10, **rewards("train", 0.1, 0.0))], ["some words"] * 16
    all_empty = find("The policy says nothing", ran, **lines([" \n"] * 16, words))
    assert (all_empty.level, all_empty.value) == ("warning", "16 of 16 samples, the reference's 0 of 16")
    assert find("The policy says nothing", ran, **lines([""] * 16)).value == "16 of 16 samples"  # nothing to compare
    title = "Some of the policy's samples are empty"
    assert find(title, ran, **lines(["", *words[1:]], words)).level == "note"  # as chance has it in one prompt of two
    half = [""] * 8 + words[8:]
    assert find(title, ran, **lines(half, words)).level == "warning"
    assert find(title, ran, **lines(half, first=words)).value == "8 of 16 samples, its first 0 of 16"
    assert find(title, ran, **lines(half, half)) is None
    assert find(title, ran, **lines(half[::-1], half)) is None  # others, and as many
    assert find("The policy says nothing", [update(10)], **lines([""] * 16)) is not None  # under SFT too


@pytest.mark.parametrize("loss", [{"name": "dpop"}, {"name": "apo_down"}, {"name": "dpo", "sft_weight": 0.5}])
def test_of_a_loss_that_sees_each_side_it_is_not_said_that_it_sees_only_their_difference(loss):
    config = {"config": CONFIG | {"loss": {"beta": 0.1, **loss}}}
    title = "Chosen responses become less likely while margins grow"
    [story] = [f for f in with_margin(-1.5, -2.0, logps=(-65.0, -70.0), **config) if f.title == title]
    assert story.level == "note"
    assert "difference" not in story.text
    assert "dpop" not in story.text


def test_sides_that_moved_alike_give_no_shares_of_the_margin():
    [story] = [f for f in with_margin(0.483, 0.479, logps=(-45.0, -45.0)) if f.title == "Where the margin comes from"]
    assert "both moved by nearly as much" in story.text
    assert "%" not in story.text


def test_a_policy_and_its_reference_that_say_nothing():
    """As after SFT on empty targets: training on pairs is not the cause."""
    lines = [update(1, **rewards("train", 0.1, 0.0))]
    finding = find("The policy says nothing", lines, samples=[sample(0, "", "")] * 6)
    assert (finding.level, finding.value) == ("warning", "6 of 6 samples, the reference's 6 of 6")
    assert "the archive that it started from" in finding.text


def test_empty_responses_are_worth_a_look():
    counted = {"preflight": {"train": {"examples": 54, "empty_responses": 54}}}
    assert find("Worth a look in the data", [update(1)], **counted).value == "empty_responses 54 of 54 (100 %)"


def test_sides_that_fall_alike_are_not_said_to_gain():
    lines = [update(k, **rewards("train", -0.17, -0.121)) for k in range(1, 31)]
    assert "rejected responses did at least as well as chosen ones" in find("Where the margin comes from", lines).text


def test_of_few_held_out_pairs_no_gap_is_told():
    lines = [pairs(k, 0.5) for k in range(1, 31)] + [evaluation(30, 0.7, **rewards("eval", -0.2, -0.1, 1 / 3))]
    title = "Training pairs are ranked better than held-out ones"
    assert find(title, lines, preflight={"train": TOKENS, "test": {**TOKENS, "examples": 6}}) is None
    assert find(title, lines) is not None


def test_data_in_which_length_tells_the_better_one():
    lines = [update(1, **rewards("train", 0.1, 0.0))]
    note = find("Length predicts the preference in the data", lines, preflight={"train": {"chosen_longer": 0.85}})
    assert note.value == "chosen is longer in 85 % of the training pairs"
    assert "with those of the reference." in note.text
    simpo = {"config": CONFIG | {"loss": {"name": "simpo", "beta": 2.0, "gamma": 1.0}}}
    told = find_all(run_of(lines, preflight={"train": {"chosen_longer": 0.85}}, **simpo))
    assert "Length predicts the preference in the data" in [f.title for f in told]
    assert not [f for f in told if "reference" in f.text]
    assert (
        find("Length predicts the preference in the data", lines, preflight={"train": {"chosen_longer": 0.6}}) is None
    )


# --- the run itself


def test_a_warmup_that_does_not_end():
    lines = [update(k, lr=1e-8 * k) for k in range(1, 11)]
    title = "The learning rate never reached its value"
    assert find(title, lines, state=State("complete", "")).value == "lr 1e-07 at most, of 1e-06"
    assert find(title, lines, state=State("training", "")) is None
    assert find(title, [update(1)], state=State("complete", "")) is None
    scaled = {"config": {**CONFIG, "lr_scaling": "sqrt"}}  # to a rate that is not in the config
    assert find(title, lines, state=State("complete", ""), **scaled) is None


def test_gradients_that_are_clipped_as_a_rule():
    lines = [update(k, grad_norm=12.0 if k % 4 else 8.0) for k in range(1, 21)]
    assert find("Most gradients are clipped", lines).value == "grad_norm above 10 in 75 % of the updates; its median 12"


def test_updates_that_become_slower():
    lines = [update(k, tokens_per_second=100.0 if k <= 20 else 60.0) for k in range(1, 41)]
    value = "tokens_per_second 100 in the first quarter, 60 in the last"
    assert find("Updates became slower", lines).value == value
    assert find("Updates became slower", lines[:20] * 2) is None


def test_counts_of_the_preflight_that_are_worth_a_look():
    counts = {"examples": 200, "tokenized": 100, "truncated_responses": 25, "contradictory_pairs": 1}
    note = find("Worth a look in the data", [update(1)], preflight={"train": counts})
    assert note.value == "truncated_responses 25 of 100 (25 %)"  # 1 contradictory pair of 200 is below one in a hundred


def test_nothing_is_said_of_a_run_without_metrics():
    assert find_all(run_of([])) == []
