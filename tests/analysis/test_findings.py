"""Findings of the report, on metrics made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from support.records import CONFIG, evaluation, rewards, sample, update

from dpo.analysis.findings import find_all
from dpo.analysis.measures import find_change, length_part, margin_parts
from dpo.analysis.rules import Finding
from dpo.analysis.runs import Log, Run, State

TOKENS = {"mean_chosen_tokens": 20.0, "mean_rejected_tokens": 20.0}
MINUS = "\N{MINUS SIGN}"
Lines = list[dict[str, Any]]


def run_of(lines: Lines, **more) -> Run:
    """A run with these lines; other keys of `more` are settings."""
    train, evaluations = ([line for line in lines if line["split"] == split] for split in ("train", "eval"))
    settings = {key: more.pop(key) for key in [*more] if key not in Run.__dataclass_fields__}
    given = {"config": CONFIG | settings, "preflight": {"train": TOKENS, "test": TOKENS}, **more}
    return Run(Path("run"), "made", train=Log(train), eval=Log(evaluations), **given)


def find(title: str, lines: Lines, **more) -> Finding | None:
    return next((finding for finding in find_all(run_of(lines, **more)) if finding.title == title), None)


def updates(n: int, **metrics: Any) -> Lines:
    """Updates with metrics: numbers, or functions of the update.

    `loss` stands for `loss/train`.
    """
    lines = []
    for k in range(1, n + 1):
        values = {name: value(k) if callable(value) else value for name, value in metrics.items()}
        accuracy, loss = values.pop("accuracy", None), values.pop("loss", 0.6)
        sides = {} if accuracy is None else rewards("train", 0.1, -0.1, accuracy)
        lines.append(update(k, **sides, **{"loss/train": loss}, **values))
    return lines


def evaluated(*evaluations: tuple[int, float, float | None]) -> Lines:
    """(update, loss, accuracy) of each evaluation."""
    return [
        evaluation(k, loss, **({} if accuracy is None else rewards("eval", 0.1, -0.1, accuracy)))
        for k, loss, accuracy in evaluations
    ]


def held_out(accuracy: float, training: float = 0.5) -> Lines:
    return updates(30, accuracy=training) + evaluated((30, 0.69, accuracy))


def of_test_pairs(n: int) -> dict[str, Any]:
    return {"preflight": {"train": TOKENS, "test": {**TOKENS, "examples": n}}}


def long_samples(words: int, n: int = 8) -> dict[str, Any]:
    return {"samples": [sample(0, "a " * 10, "a " * 10)] * 8 + [sample(40, "a " * words, "a " * 10)] * n}


def with_margin(chosen: float, rejected: float, logps: tuple = (-50.0, -50.0)) -> Lines:
    """An evaluation with these rewards; both sides had log-probabilities of -50 before."""
    named = ("logps_eval/chosen", "logps_eval/rejected")
    first = evaluation(0, 0.69, **rewards("eval", 0.0, 0.0, 0.0), **dict.fromkeys(named, -50.0))
    last = evaluation(50, 0.5, **rewards("eval", chosen, rejected), **dict(zip(named, logps, strict=True)))
    return [first, *updates(50, accuracy=0.7), last]


def drawing(n: int = 40, **courses) -> Lines:
    """Updates that draw pairs, with `courses` by k from 0 to 1."""
    lines = []
    for k in range(1, n + 1):
        drawn = USUAL | {f"online/{name}": course(k / n) for name, course in courses.items()}
        lines.append(update(k, **drawn, **rewards("train", 0.1, -0.1, 0.995)))
    answers = {"online_eval/win_rate": courses.get("win_rate", lambda k: 0.5)(1), "online_eval/win_rate_se": 0.03}
    return [*lines, evaluation(n, 0.7, **rewards("eval", -1.0, 1.0, 0.4), **answers)]


def online(**settings: Any) -> dict[str, Any]:
    return {"online": ONLINE | settings}


ONLINE = {"name": "online", "n_samples": 2, "scorer": "shorter", "max_new_tokens": 16, "missing_eos_penalty": 0.0}
ONLINE |= {"ties": "skip", "mix_offline": 0.0}
USUAL = {f"online/{name}": value for name, value in {
    "score": 1.0, "score_best": 2.0, "score_worst": 0.0, "kl": 0.5, "length": 10.0, "eos": 0.9, "ties": 0.1,
    "sampling_share": 0.6, "scoring_share": 0.05}.items()}  # fmt: skip

ONE_PAIR = [update(10, **rewards("train", 0.1, 0.0))]
IMPROVES = updates(200, accuracy=0.6, loss=lambda k: 0.7 - k / 1000)
LEARNS = updates(200, accuracy=lambda k: 0.5 + k / 500)
FELL = [update(k, **rewards("train", -20.0, 10.0, 0.3), **{"loss/train": 3.0}) for k in range(1, 101)]
AT_REFERENCE = [evaluation(0, 0.693, **rewards("eval", 0.0, 8e-7, 0.0))]  # 8e-7 is rounding
BAD = [evaluation(13, 55.8, **rewards("eval", -40.0, -12.1, 0.33))]
BEST_THEN_WORSE = ONE_PAIR + evaluated((5, 0.6, 0.8), (10, 0.6, 0.75))
EIGHT_OF_54 = {"train": {"examples": 54, "empty_responses": 54}}
SIMPO = {"loss": {"name": "simpo", "beta": 2.0, "gamma": 1.0}}

UNCLEAR = "Held-out accuracy may be chance"
CHANCE = "Held-out pairs are ranked no better than by chance"
SATURATED = "Accuracy is saturated"
WORSE_THAN_REFERENCE = "By its own loss the policy is worse than the reference"
TOO_HIGH, STEP = "The learning rate looks too high", "Training loss fell by a step as an epoch began"
LEAKAGE = "Test prompts are in the training split"
LOSS_TURNED = "Evaluation loss turned while training loss improved"
ACCURACY_TURNED = "Evaluation accuracy turned while training accuracy improved"
GAP = "Training pairs are ranked better than held-out ones"
COLLAPSED = "The run has collapsed"
LONG, SHORT = (f"The policy's samples have become {kind}" for kind in ("long", "short"))
WARMUP = "The learning rate never reached its value"
SIDES = "Where the margin comes from"
CUT_OFF, TIES = "Most answers are cut off", "Most prompts give a tie"
RISE, FLAT, LENGTH_WINS = "Scores rise", "Scores have not risen", "Scores and lengths grow together"
FAR, ACCURACIES, TIME = (
    "The policy has gone far from the reference",
    "What accuracies mean here",
    "Time for drawing pairs",
)
LONGER = {"preflight": {"test": {"mean_chosen_tokens": 100.0, "mean_rejected_tokens": 50.0}}}
IS_LENGTH = "Much of the margin is length"
LESS_LIKELY = "Chosen responses become less likely while margins grow"
BEST = "BEST is better than the last evaluation"
BY_LENGTH = "Length predicts the preference in the data"


COMPLETE = {"state": State("complete", "")}
WARMING_UP = updates(10, lr=lambda k: 1e-8 * k)
LOSES = "The reference's answers are better"
BRADLEY_TERRY = {"labels": "bradley_terry", "ties": "keep"}


class Told(NamedTuple):
    level: str
    title: str
    value: str  # its beginning
    lines: Lines
    more: Mapping[str, Any] = MappingProxyType({})
    text: str = ""  # a part of it
    absent: str = "no such word"  # not a part of it


TOLD = [
    Told("note", UNCLEAR, "rewards_eval/accuracies 0.55 on 256 pairs, 95 % interval 0.489 to 0.61", held_out(0.55),
         text="On 256 pairs it is not clear whether anything was learned. To tell an accuracy of 0.60 from"),
    # of the 256 that the config allows: raising that would give no more
    Told("note", UNCLEAR, "rewards_eval/accuracies 0.8 on 6 pairs", held_out(0.8), of_test_pairs(6),
         text="put more pairs into the test split, which has only these 6"),
    Told("note", UNCLEAR, "", held_out(0.53), of_test_pairs(9000),
         text="raise n_eval_examples, for the test split has 9,000"),
    Told("warning", CHANCE, "rewards_eval/accuracies 0.45 on 256 pairs, 95 % interval 0.39 to 0.511", held_out(0.45)),
    Told("note", "Held-out pairs are ranked little better than by chance",
         "rewards_eval/accuracies 0.535 on 5,000 pairs, 95 % interval 0.521 to 0.549", held_out(0.535),
         {"n_eval_examples": 5000}, "above chance, but by less than 0.05"),
    Told("note", "New training pairs are ranked better than by chance", "rewards_train/accuracies 0.75 over the second "
         "half of the first epoch, 98 % interval 0.", updates(100, accuracy=lambda k: 1.0 if k % 2 else 0.5)
         + evaluated((100, 0.69, 0.55)), {"preflight": {"epoch": 400.0}}),
    # the first twenty that are all right begin with update 41
    Told("note", SATURATED, "rewards_train/accuracies 1 over the last 20 updates; rewards_train/margins 0.2; grad_norm "
         "1 at first, 1 now",
         updates(200, accuracy=lambda k: 0.5 if k <= 40 else 1.0), text="from about 164 examples on: accuracy can tell "
         "nothing more."),
    # by 0.02 a token in each of 100 updates
    Told("warning", TOO_HIGH, "log-probabilities of chosen responses fell by 1 a token within 50 updates, up to update "
         "75",
         [update(k, **rewards("train", -0.1 * 70 * min(k, 100) * 0.02 + 0.01 * (k % 2), 0.0)) for k in range(1, 201)],
         {"preflight": {"train": {"mean_chosen_tokens": 70.0}}}),
    Told("warning", TOO_HIGH, "the median of grad_norm was 1 in the first 50 updates after the warmup, and is 6 now",
         updates(200, grad_norm=lambda k: 1.0 if k <= 100 else 6.0)),
    Told("note", STEP, "loss/train 0.6 over the 20 updates before update 101, 0.4 over the 20 from it on; loss/eval "
         "0.6 before, 0.61 after", updates(200, loss=lambda k: 0.6 if k <= 100 else 0.4) + evaluated(
         (100, 0.6, None), (200, 0.61, None)), {"preflight": {"epoch": 400.0}}),
    Told("note", LEAKAGE, "of 100 test prompts, 3 (3 %) are training prompts too, and 12 (12 %) open with the",
         updates(1), {"preflight": {"test": {"prompts": 100, "prompts_in_train": 3, "first_turns_in_train": 12}}}),
    Told("warning", LEAKAGE, "", updates(1), {"preflight": {"test": {
         "prompts": 100, "prompts_in_train": 10, "first_turns_in_train": 12}}}),
    # of ten updates up to 100 the mean is 0.7 - 0.0955, of twenty (a tenth of all) up to 200 it is 0.7 - 0.1905
    Told("warning", LOSS_TURNED, "loss/eval 0.6 at 400 examples, 0.66 at 800; loss/train 0.609, then 0.509",
         IMPROVES + evaluated((0, 0.69, None), (100, 0.60, None), (200, 0.66, None))),
    Told("note", "Evaluation loss rose while accuracy did not fall", "",
         IMPROVES + evaluated((0, 0.69, 0.7), (100, 0.60, 0.7), (200, 0.66, 0.7))),
    # 1.645 standard errors of the difference of 0.8 and as much, on 256 pairs: 1.645 sqrt(2 * 0.8 * 0.2 / 256) = 0.058
    Told("warning", ACCURACY_TURNED, "", LEARNS + evaluated((100, 0.6, 0.8), (200, 0.6, 0.70))),
    Told("note", GAP, "accuracy 0.9 against 0.7", held_out(0.7, training=0.9)),
    Told("note", BEST, "rewards_eval/accuracies 0.8 at 20 examples, 0.75 at the last", BEST_THEN_WORSE, {"best": 20},
         "step-20"),
    Told("warning", "Updates were skipped: loss or gradient was not a number", "2 of 6 updates: 3, 5",
         [update(k, **({"loss/train": None, "grad_norm": None} if k in (3, 5) else {})) for k in range(1, 7)],
         {"nonfinite": [3, 5]}, "nonfinite-3, nonfinite-5"),
    Told("warning", "The run ended on a loss or gradient that was not a number", "update 7", updates(6),
         {"nonfinite": [7], "state": State("aborted", "")}),
    Told("warning", COLLAPSED, "loss/train 3 over the last 50 updates, 0.693 at the start; "
         f"rewards_train/margins {MINUS}30, 0 at the start", AT_REFERENCE + FELL),
    Told("warning", COLLAPSED, "loss/train 3 over the last 50 updates, 0.693 at the start",
         [update(1, **rewards("train", 0.0, 0.0, 0.0), **{"loss/train": 0.693}), *FELL[1:]]),
    Told("warning", COLLAPSED, "loss/train 30 over the last 16 updates",
         AT_REFERENCE + [{**line, "loss/train": 30.0} for line in FELL[:16]]),
    Told("warning", COLLAPSED, "loss/eval 55.8 at the last evaluation, 0.693 at the start; "
         f"rewards_eval/margins {MINUS}27.9, 0 at the start", AT_REFERENCE + FELL[:13] + BAD),
    Told("warning", LONG, "30 words on average, the reference's 10 (8 samples); after the same prompt", ONE_PAIR,
         long_samples(30)),
    Told("warning", SHORT, "4 words on average, the reference's 10 (8 samples); after the same prompt", ONE_PAIR,
         long_samples(4)),
    Told("warning", LONG, "20 words on average, its first 10", ONE_PAIR,
         {"samples": [sample(0, "a " * 10)] * 8 + [sample(40, "a " * 20)] * 8}),
    Told("note", "Some responses are empty", "empty_responses 54 of 54 (100 %)", updates(1),
         {"preflight": EIGHT_OF_54}),
    # 1 contradictory pair of 200 is below one in a hundred
    Told("note", "Many responses are cut off", "truncated_responses 25 of 100 (25 %)", updates(1),
         {"preflight": {"train": {
             "examples": 200, "tokenized": 100, "truncated_responses": 25, "contradictory_pairs": 1}}}),
    Told("note", BY_LENGTH, "chosen is longer in 85 % of the training pairs", ONE_PAIR,
         {"preflight": {"train": {"chosen_longer": 0.85}}}, "with those of the reference."),
    Told("note", BY_LENGTH, "", ONE_PAIR, {"preflight": {"train": {"chosen_longer": 0.85}}, **SIMPO},
         "with those of its first ones."),
    Told("warning", WARMUP, "lr 1e-07 at most, of 1e-06; warmup_steps 150, 10 updates", WARMING_UP,
         {**COMPLETE, "warmup_steps": 150}, "lower warmup_steps"),
    Told("warning", WARMUP, "", WARMING_UP, COMPLETE, "not updates skipped for NaN: see why", absent="ties"),
    Told("warning", WARMUP, "", WARMING_UP, {**COMPLETE, "online": {"name": "online"}}, "all pairs were ties"),
    Told("note", "Most gradients are clipped", "grad_norm above 10 in 75 % of the updates; its median 12",
         updates(20, grad_norm=lambda k: 12.0 if k % 4 else 8.0)),
    Told("note", "Updates became slower", "tokens_per_second 100 in the first quarter, 60 in the last",
         updates(40, tokens_per_second=lambda k: 100.0 if k <= 20 else 60.0)),
    Told("note", SIDES, f"margin 1.2 = chosen +0.3 minus rejected {MINUS}0.9", with_margin(0.3, -0.9, (-47.0, -59.0)),
         text="more likely, which gives 25 % of the margin, and rejected ones less likely, which gives 75 %."),
    Told("note", SIDES, "", with_margin(0.483, 0.479, (-45.0, -45.0)), text="both moved by nearly as much", absent="%"),
    Told("note", SIDES, "", [update(k, **rewards("train", -0.17, -0.121)) for k in range(1, 31)],
         text="rejected responses did at least as well as chosen ones"),
    Told("note", LESS_LIKELY, f"logps_eval/chosen {MINUS}50, then {MINUS}52 ({MINUS}2); margin 0.8 = chosen {MINUS}0.2 "
         f"minus rejected {MINUS}1", with_margin(-0.2, -1.0, (-52.0, -60.0)),
         text="which takes away 25 % of the margin, and rejected ones less likely, which gives 125 %. The loss sees"),
    # chosen fell by 20, and the sides parted by 8
    Told("warning", LESS_LIKELY, "", with_margin(-2.0, -2.8, (-70.0, -78.0)), text="loss=dpop"),
    *(Told("note", LESS_LIKELY, "", with_margin(-1.5, -2.0, (-65.0, -70.0)), {"loss": loss}, absent="difference")
      for loss in ({"name": "dpop"}, {"name": "apo_down"}, {"name": "dpo", "sft_weight": 0.5})),
    # per token 0.01 and 0.008: 0.009 * 50 of 0.6
    Told("note", IS_LENGTH, "margin 0.6; with sides of equal length 0.15; mean tokens 100 chosen, 50 rejected",
         with_margin(1.0, 0.4), LONGER),
    Told("note", RISE, "online/score 0.55 over the first 10 updates, 3.55 over the last",
         drawing(score=lambda k: 4 * k), online()),
    Told("warning", "Scores have fallen", f"online/score {MINUS}0.55 over the first 10 updates, {MINUS}3.55 over the "
         f"last; change {MINUS}3, 98 % interval", drawing(score=lambda k: -4 * k), online()),
    # scores of the best and the worst answer lie 2 apart
    Told("warning", FLAT, "online/score 1 over the first 10 updates, 1 over the last; change +0, 98 % interval +0 to "
         "+0; best minus worst answer 2", drawing(score=lambda k: 1.0), online()),
    Told("note", "No clear change in scores", "",
         drawing(score=lambda k: 1.0 + int(400 * k) % 70 / 100), online()),
    Told("note", ACCURACIES, "rewards_train/accuracies 0.995; rewards_eval/accuracies 0.4", drawing(), online(),
         "need not rise", absent="from the datasets"),
    Told("note", ACCURACIES, "", drawing(), online(mix_offline=0.25), "but for the 25 % from the datasets"),
    Told("warning", CUT_OFF, "online/eos 0.05: this share of answers ends within online.max_new_tokens=16",
         drawing(eos=lambda k: 0.05), online(), "online.missing_eos_penalty"),
    Told("warning", CUT_OFF, "", drawing(eos=lambda k: 0.0), online(missing_eos_penalty=1.0), absent="penalty"),
    Told("note", "Some answers are cut off", "", drawing(eos=lambda k: 0.51), online()),
    Told("warning", TIES, "online/ties 0.887; online.n_samples 2", drawing(ties=lambda k: k), online(), "ties=skip"),
    Told("note", TIES, "", drawing(ties=lambda k: 0.7), online(ties="keep"), "together"),
    Told("note", TIES, "", drawing(ties=lambda k: 0.7), online(**BRADLEY_TERRY), absent="online.n_samples"),
    Told("note", ACCURACIES, "", drawing(), online(**BRADLEY_TERRY), "agree with the labels drawn from the scores"),
    Told("warning", LOSES, "online_eval/win_rate 0.42, standard error 0.03, on 256 held-out prompts",
         drawing(win_rate=lambda k: 0.42), online()),
    Told("warning", LENGTH_WINS, "online/length 11.4 tokens at first, 18.9 now; correlation of online/score and "
         "online/length over the updates 1", drawing(score=lambda k: k, length=lambda k: 10 + 10 * k), online()),
    Told("note", FAR, "online/kl 20 nats, 2 a token", drawing(kl=lambda k: 20.0, score=lambda k: k), online()),
    # its answers no longer end
    Told("warning", FAR, "online/kl 20 nats, 2 a token; online/eos 0.993 at first, 0.956 now",
         drawing(kl=lambda k: 20.0, eos=lambda k: 1 - 0.05 * k), online()),
    # the first half took 2 s an update, of which 0.6 for sampling; the second 0.5 s, of which 0.2
    Told("note", TIME, "sampling 52 %, scoring 5 % of the time in updates", [update(k, **USUAL) for k in (1, 2)] + [
         update(k, **{**USUAL, "online/sampling_share": 0.2, "examples_per_second": 8.0}) for k in (3, 4)]),
]  # fmt: skip


@pytest.mark.parametrize("told", TOLD, ids=lambda told: f"{told.level}: {told.title}")
def test_finding(told):
    found = find(told.title, told.lines, **told.more)
    assert found is not None
    assert found.level == told.level
    assert found.value.startswith(told.value)
    assert told.text in found.text
    assert told.absent not in found.text


SLOWER = "Updates became slower"
WORSE = evaluated((0, 0.69, None), (100, 0.60, None), (200, 0.66, None))
ACCURACY_STAYS = evaluated((0, 0.69, 0.7), (100, 0.60, 0.7), (200, 0.66, 0.7))
NOT_TOLD = {
    "enough pairs tell it from chance": (UNCLEAR, held_out(0.57), {}),
    "0.57 is better than chance": (CHANCE, held_out(0.57), {}),
    "little better is not a denial": (CHANCE, held_out(0.535), {"n_eval_examples": 5000}),
    "0.98 is not saturated": (SATURATED, updates(100, accuracy=0.98), {}),
    "a rise of 3 %": (LOSS_TURNED, IMPROVES + evaluated((0, 0.69, None), (100, 0.60, None), (200, 0.62, None)), {}),
    "training got worse too": (LOSS_TURNED, updates(200, loss=lambda k: 0.5 + k / 1000) + WORSE, {}),
    "accuracy did not fall": (LOSS_TURNED, IMPROVES + ACCURACY_STAYS, {}),
    "chance explains a fall of 0.04": (ACCURACY_TURNED, LEARNS + evaluated((100, 0.6, 0.8), (200, 0.6, 0.76)), {}),
    "a gap of 0.1": (GAP, held_out(0.8, training=0.9), {}),
    "a gap on few pairs": (GAP, held_out(1 / 3), of_test_pairs(6)),
    "BEST is the last": (BEST, BEST_THEN_WORSE, {"best": 40}),
    "no BEST": (BEST, BEST_THEN_WORSE, {}),
    "too few updates for a collapse": (COLLAPSED, AT_REFERENCE + FELL[:49], {}),
    "margins grow": (COLLAPSED, AT_REFERENCE + [{**line, **rewards("train", -10.0, -20.0)} for line in FELL], {}),
    "labels may contradict a scorer": (COLLAPSED, AT_REFERENCE + FELL[:13] + BAD, {"online": {"name": "online"}}),
    "weights of wpo move": (COLLAPSED, AT_REFERENCE + FELL + BAD, {"loss": {"name": "dpo", "wpo": True}}),
    "14 words for 10": (LONG, ONE_PAIR, long_samples(14)),
    "7 samples": (LONG, ONE_PAIR, long_samples(30, n=7)),
    "SFT should change lengths": (LONG, updates(10), {**long_samples(30), "loss": {"name": "sft"}}),
    "length in 60 % of the pairs": (BY_LENGTH, ONE_PAIR, {"preflight": {"train": {"chosen_longer": 0.6}}}),
    "a run that still trains": (WARMUP, WARMING_UP, {"state": State("training", "")}),
    "the rate was reached": (WARMUP, updates(1), COMPLETE),
    "the rate is scaled": (WARMUP, WARMING_UP, {**COMPLETE, "lr_scaling": "sqrt"}),
    "chance explains a win rate of 0.45": (LOSES, drawing(win_rate=lambda k: 0.45), online()),
    "as fast at the end": (SLOWER, updates(20) * 2, {}),
    "equal lengths": (IS_LENGTH, with_margin(1.0, 0.4), {}),
    "unknown lengths": (IS_LENGTH, with_margin(1.0, 0.4), {"preflight": {}}),
    "half of the answers end": (CUT_OFF, drawing(eos=lambda k: 0.51), online()),
    "half of 40 prompts tie": (TIES, drawing(ties=lambda k: 0.6), online()),
    "0.72 on 256 pairs is chance": (
        WORSE_THAN_REFERENCE, [*AT_REFERENCE, evaluation(30, 0.72, **rewards("eval", 0.3, 0.0, 0.6))], {}),
    "a loss that is not the same for all pairs at the start": (
        WORSE_THAN_REFERENCE, [*AT_REFERENCE, evaluation(30, 2.0, **rewards("eval", 0.3, 0.0, 0.6))],
        {"loss": {"name": "dpo", "beta": 0.1, "sft_weight": 1}}),
    "40 pairs do not show 0.99": (SATURATED, updates(100, accuracy=1.0), {}),
    "evaluations follow": (STEP, updates(200, loss=lambda k: 0.6 if k <= 100 else 0.4) + evaluated(
        (100, 0.6, None), (200, 0.45, None)), {"preflight": {"epoch": 400.0}}),
    "a steady fall": (STEP, updates(200, loss=lambda k: 0.6 - k / 1000) + evaluated(
        (100, 0.6, None), (200, 0.6, None)), {"preflight": {"epoch": 400.0}}),
    "a slow fall": (TOO_HIGH, [update(k, **rewards("train", -0.001 * k, 0.0)) for k in range(1, 201)], {}),
    "an older preflight": (LEAKAGE, updates(1), {"preflight": {"test": {"prompts": 100}}}),
    "19 updates": (FLAT, drawing(19), online()),
    "1.2 times as long": (LENGTH_WINS, drawing(score=lambda k: k, length=lambda k: 10 + 3 * k), online()),
    "longer, and worse": (LENGTH_WINS, drawing(score=lambda k: -k, length=lambda k: 10 + 10 * k), online()),
    "what `shorter` asks for": (LENGTH_WINS, drawing(score=lambda k: k, length=lambda k: 20 - 10 * k), online()),
    "all as long": (LENGTH_WINS, drawing(score=lambda k: k), online()),
    "9.9 nats": (FAR, drawing(kl=lambda k: 9.9), online()),
}  # fmt: skip


@pytest.mark.parametrize(("title", "lines", "more"), NOT_TOLD.values(), ids=NOT_TOLD)
def test_no_finding(title, lines, more):
    assert find(title, lines, **more) is None


def test_a_good_run_has_no_warning_and_one_without_metrics_no_finding():
    lines = [evaluation(0, 0.69, **rewards("eval", 0.0, 0.0, 0.0))]
    lines += updates(100, accuracy=lambda k: 0.5 + k / 400, loss=lambda k: 0.69 - k / 1000)
    lines += [evaluation(100, 0.6, **rewards("eval", 0.2, -0.2, 0.72))]
    drawn = run_of(drawing(score=lambda k: 4 * k), **online())  # held-out labels contradict its scorer
    for run in (run_of(lines), drawn):
        assert {finding.level for finding in find_all(run)} == {"note"}
    assert find_all(run_of([])) == []


# --- accuracy and loss


def test_a_turn_needs_a_policy_that_learned_its_training_examples():
    start = [evaluation(0, 0.693, **rewards("eval", 0.0, 0.0, 0.0))]
    last = [evaluation(26, 10.8, **rewards("eval", -5.0, 0.4, 0.33))]

    def lines(end: float) -> Lines:
        return start + updates(26, accuracy=0.5, loss=lambda k: end + 26 - k) + last

    assert find(LOSS_TURNED, lines(19.0)) is None  # its training loss is far above the start too
    warning = find(LOSS_TURNED, lines(-9.0))
    assert "checkpoint" not in warning.text  # there is none from before the first update
    noisy = updates(60, loss=lambda k: 150 - k + 60 * (k % 2))
    noisy += evaluated((0, 250.0, None), (30, 101.0, None), (60, 138.0, None))
    sft = {"loss": {"name": "sft"}}
    assert find(LOSS_TURNED, noisy, preflight={"test": {"examples": 6}}, **sft) is None  # chance explains it
    assert find(LOSS_TURNED, noisy, **sft) is not None


@pytest.mark.parametrize(("loss", "is_best"), [("sft", True), ("dpo", False), ("another", False)])
def test_best_is_named_if_it_is_ranked_by_what_turned(loss, is_best):
    lines = IMPROVES + evaluated((0, 0.69, None), (100, 0.60, None), (200, 0.66, None))
    assert ("(BEST)" in find(LOSS_TURNED, lines, loss={"name": loss}).text) == is_best


# --- chosen, rejected, length


def test_without_two_evaluations_the_first_updates_are_compared_with_the_last():
    lines = [
        update(k, **{"logps_train/chosen": -50.0 - k, "logps_train/rejected": -50.0 - 3 * k}) for k in range(1, 41)
    ]
    change = find_change(run_of(lines))
    assert (change.split, change.chosen_before, change.chosen_after) == ("train", -55.5, -85.5)
    assert change.margin == -30 + 90


def test_parts_are_of_the_last_evaluation_or_of_the_last_updates():
    lines = [evaluation(0, 0.69, **rewards("eval", 0.0, 0.0))]
    lines += [update(k, **rewards("train", 0.1 * k, 0.0)) for k in range(1, 31)]
    assert margin_parts(run_of(lines))[:2] == (pytest.approx(2.55), 0.0)  # the mean of 2.1 to 3.0
    assert margin_parts(run_of([*lines, evaluation(30, 0.5, **rewards("eval", 0.7, 0.2))]))[:2] == (0.7, 0.2)
    assert margin_parts(run_of([update(1)])) is None


def test_length_part_is_the_margin_without_its_part_for_equal_lengths():
    # 0.01 per token on both sides, 100 and 50 tokens: all of the margin is length
    assert length_part(1.0, 0.5, 100, 50) == pytest.approx(0.5)
    # equal lengths: none; -0.01 and -0.03 per token, 40 and 60 tokens: (-0.02) * (40 - 60)
    assert length_part(1.0, 0.5, 50, 50) == 0
    assert length_part(-0.4, -1.8, 40, 60) == pytest.approx(0.4)


def with_shorter_chosen(loss: dict) -> dict[str, Finding]:
    lines = [evaluation(0, 1.0, **rewards("eval", -2.6, -2.7, 0.55), **{"logps_eval/chosen": -53.0})]
    lines += [update(k, **rewards("train", -2.4, -2.6, 0.6), **{"loss/train": 0.9}) for k in range(1, 101)]
    lines += [evaluation(100, 0.9, **rewards("eval", -2.4, -2.6, 0.66), **{"logps_eval/chosen": -49.0})]
    tokens = {"mean_chosen_tokens": 41.0, "mean_rejected_tokens": 51.6}
    found = find_all(run_of(lines, loss=loss, preflight={"train": tokens, "test": tokens}))
    return {finding.title: finding for finding in found}


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "simpo", "beta": 2.0, "gamma": 1.0},
        {"name": "orpo", "beta": 0.1},
        {"name": "mix", "beta": 2.0, "weights": {"simpo": 1.0, "sft": 0.5}},
        {"name": "another"},
    ],
)
def test_without_a_reference_sides_are_compared_with_their_start_and_nothing_is_length(loss):
    found = with_shorter_chosen(loss)
    assert not {IS_LENGTH, "How lengths change the margin"} & found.keys()
    story = found[SIDES]
    assert story.value == "margin +0.1 since the start = chosen +0.2 minus rejected +0.1"
    assert story.text.startswith("Since the start, chosen responses became more likely, which gives 200 % of the")
    assert "reference" not in story.text


def test_nothing_is_length_in_rewards_per_token():
    for loss in ({"name": "dpo_norm", "beta": 5.0}, {"name": "ipo", "beta": 0.1, "average": True}):
        found = with_shorter_chosen(loss)
        assert not {IS_LENGTH, "How lengths change the margin"} & found.keys()
        assert "Against the reference" in found[LESS_LIKELY].text
    assert IS_LENGTH in with_shorter_chosen({"name": "ipo", "beta": 0.1, "average": False})


# --- samples


def test_empty_samples():
    def lines(policy, reference=None, first=None):
        before = [sample(0, text, None, f"prompt {i}") for i, text in enumerate(first or [])]
        others = reference or [None] * len(policy)
        now = [sample(40, p, r, f"prompt {i}") for i, (p, r) in enumerate(zip(policy, others, strict=True))]
        return {"samples": before + now}

    words, nothing, some = ["some words"] * 16, "The policy says nothing", "Some of the policy's samples are empty"
    all_empty = find(nothing, ONE_PAIR, **lines([" \n"] * 16, words))
    assert (all_empty.level, all_empty.value) == ("warning", "16 of 16 samples, the reference's 0 of 16")
    assert find(nothing, ONE_PAIR, **lines([""] * 16)).value == "16 of 16 samples"  # nothing to compare
    assert find(some, ONE_PAIR, **lines(["", *words[1:]], words)) is None  # as chance has it in one of two
    assert find(some, ONE_PAIR, **lines([*[""] * 4, *words[4:]], words)).level == "note"  # in one of sixteen
    half = [""] * 8 + words[8:]
    assert find(some, ONE_PAIR, **lines(half, words)).level == "warning"
    assert find(some, ONE_PAIR, **lines(half, first=words)).value == "8 of 16 samples, its first 0 of 16"
    assert find(some, ONE_PAIR, **lines(half, half)) is None
    assert find(some, ONE_PAIR, **lines(half[::-1], half)) is None  # others, and as many
    assert find(nothing, [update(10)], **lines([""] * 16)) is not None  # under SFT too
    both = find(nothing, ONE_PAIR, **lines([""] * 6, [""] * 6))  # as after SFT on empty targets
    assert (both.level, both.value) == ("warning", "6 of 6 samples, the reference's 6 of 6")
    assert "the archive that the run started from" in both.text


def test_cut_off_samples():
    def lines(policy: str, reference: str = "") -> dict[str, Any]:
        """Samples that ended, were cut off, or do not say so: e, c and a space."""
        known = {"e": {"ended": True}, "c": {"ended": False}, " ": {}}
        return {"samples": [
            {**sample(40, "words", "words" if reference else None, f"prompt {i}"),
             **{f"policy_{key}": value for key, value in known[p].items()},
             **{f"reference_{key}": value for key, value in known[r].items()}}
            for i, (p, r) in enumerate(zip(policy, reference or " " * len(policy), strict=True))
        ]}  # fmt: skip

    more, every = "The policy's samples are cut off more often", "All samples are cut off"
    found = find(more, ONE_PAIR, **lines("c" * 8 + "e" * 8, "e" * 15 + "c"))
    assert (found.level, found.value) == ("warning", "8 of 16 samples, the reference's 1 of 16")
    assert find(more, ONE_PAIR, **lines("c" * 4 + "e" * 12, "e" * 16)).level == "note"  # by chance in one of sixteen
    assert find(more, ONE_PAIR, **lines("c" * 8 + "e" * 8, "e" * 8 + "c" * 8)) is None  # others, and as many
    assert find(more, ONE_PAIR, **lines("c" * 8 + "e" * 8)) is None  # nothing to compare with
    assert find(more, ONE_PAIR, **lines("c" * 8 + "e" * 8, " " * 16)) is None  # as in samples of an earlier version
    assert find(every, ONE_PAIR, **lines("c" * 8)).value == "8 of 8 samples"
    assert find(every, ONE_PAIR, **lines("c" * 8, "c" * 8)).value == "8 of 8 samples, the reference's 8 of 8"
    assert find(every, ONE_PAIR, **lines(" " * 8, " " * 8)) is None
