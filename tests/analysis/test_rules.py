"""Rules of the report: each finds its fault in a run that has no other, and none finds one in a healthy run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.records import CONFIG, PREFLIGHT, evaluation, rewards, sample, update

from dpo.analysis import rules
from dpo.analysis.rules import RULES, find_all, is_broken
from dpo.analysis.runs import Log, Run, State

N = 100  # updates
BATCH = CONFIG["batch_size"]
MINUS = "\N{MINUS SIGN}"
ANSWERS = [f"An answer of {i} with a few words, and then some." for i in range(16)]
LOOP = f"{'ha' * 20} " * 11  # as many words as an answer
ONLINE = {"name": "online", "n_samples": 2, "max_new_tokens": 16, "mix_offline": 0.0}
Course = Callable[[int], float] | float  # of a metric, by update


def at(course: Course, k: int) -> float:
    return course(k) if callable(course) else course


def train(n: int = N, **metrics: Course) -> Log:
    """Updates whose loss falls while half to all of the pairs become ranked right."""
    usual = {"loss/train": lambda k: 0.69 - k / 500, **rewards("train", 0.1, -0.1, 0.7)}
    return Log(
        [update(k, **{name: at(course, k) for name, course in (usual | metrics).items()}) for k in range(1, n + 1)]
    )


def evaluate(loss: float, accuracy: float, chosen: float = -49.0, rejected: float = -52.0) -> dict[str, Any]:
    changed = {"logps_eval/chosen": chosen, "logps_eval/rejected": rejected}
    return evaluation(N, loss, **rewards("eval", 0.1, -0.2, accuracy), **changed)


START = evaluate(0.69, 0.0, -50.0, -50.0) | {"updates": 0, "examples": 0}


def held_out(*last: dict[str, Any]) -> dict[str, Any]:
    return {"eval": Log([START, *last])}


def counts(split: str, **more: Any) -> dict[str, Any]:
    return {"preflight": PREFLIGHT | {split: PREFLIGHT[split] | more}}


def sampled(policy: Iterable[str], reference: Iterable[str | None] = ANSWERS) -> dict[str, Any]:
    return {
        "samples": [sample(400, p, r, f"prompt {i}") for i, (p, r) in enumerate(zip(policy, reference, strict=True))]
    }


def drawn(n: int = N, **courses: Course) -> dict[str, Any]:
    """Updates of an online run; scores rise unless they are given."""
    usual = {"score": lambda k: k / 100, "score_best": 2.0, "score_worst": 0.0, "kl": 0.5, "length": 10.0, "eos": 0.97}
    courses = usual | {"ties": 0.1} | courses
    return {"train": train(n, **{f"online/{name}": course for name, course in courses.items()})}


def with_settings(run: Run, **settings: Any) -> Run:
    return replace(run, config=run.config | settings)


HEALTHY = Run(
    Path("run"), "made", config=CONFIG, preflight=PREFLIGHT, train=train(), state=State("complete", ""),
    **held_out(evaluate(0.55, 0.7)), **sampled(ANSWERS),
)  # fmt: skip
HEALTHY_ONLINE = replace(with_settings(HEALTHY, online=ONLINE), **drawn())
WIN_RATE = {"online_eval/win_rate": 0.4, "online_eval/win_rate_se": 0.03}
LABELS = {"desirable": 100, "undesirable": 300}
KTO = {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

FAULTS: dict[str, list[tuple[Run, str]]] = {  # by title: runs, and the beginning of the numbers that are told
    "Loss or gradient was not a number": [
        (replace(HEALTHY, train=train(grad_norm=lambda k: None if k in (3, 5) else 1.0)), "2 of 100 updates: 3, 5"),
    ],
    "The run has collapsed": [
        (replace(HEALTHY, train=train(**{"loss/train": lambda k: 3.0 if k > 50 else 0.6})),
         "loss/train 3 now, 0.69 at the start"),
    ],
    "Chosen responses become much less likely": [  # of 20 tokens
        (replace(HEALTHY, **held_out(evaluate(0.55, 0.7, -53.0, -55.0))),
         f"change of held-out log-probabilities per token: chosen {MINUS}0.15, rejected {MINUS}0.25"),
    ],
    "Held-out pairs are ranked no better than by chance": [
        (replace(HEALTHY, **held_out(evaluate(0.69, 0.45))),
         "rewards_eval/accuracies 0.45 on 256 pairs, 95 % interval 0.387 to 0.512"),
    ],
    "The held-out loss rises while the training loss falls": [
        (replace(HEALTHY, **held_out(evaluate(0.55, 0.7) | {"examples": 200}, evaluate(0.8, 0.7))),
         "loss/eval 0.55 at 200 examples, 0.8 at the last; loss/train 0.599, then 0.499"),
    ],
    "The learning rate had little effect": [
        (replace(HEALTHY, train=train(lr=lambda k: 1e-8 * k / 10)), "lr 1e-07 at most, of 1e-06; warmup_steps 0, 100"),
        (replace(HEALTHY, **held_out(evaluate(0.55, 0.7, -49.9, -50.1))),
         f"change of held-out log-probabilities per token: chosen +0.005, rejected {MINUS}0.005"),
    ],
    "Samples are empty or repeat themselves": [
        (replace(HEALTHY, **sampled(["", " \n"] * 4 + ANSWERS[8:])), "8 of 16 samples, the reference's 0 of 16"),
        (replace(HEALTHY, **sampled([""] * 16, [None] * 16)), "16 of 16 samples"),
    ],
    "Samples have changed in length": [
        (replace(HEALTHY, **sampled([answer * 2 for answer in ANSWERS])), "21 words on average, the reference's 11"),
    ],
    "Training examples are cut": [
        (replace(HEALTHY, **counts("train", truncated_responses=4, identical_pairs=3)),
         "truncated_responses 4 of 400 (1 %)"),
    ],
    "Held-out prompts or answers are in the training data": [
        (with_settings(replace(HEALTHY, **counts("test", prompts_like_train=26, answers_in_train=3)), datasets=["my"]),
         "prompts_like_train 26 of 256 (10 %); answers_in_train 3 of 256 (1 %)"),
    ],
    "The answers have not become better": [
        (replace(HEALTHY_ONLINE, eval=Log([START, evaluate(0.7, 0.4) | WIN_RATE])),
         "online_eval/win_rate 0.4, standard error 0.03, on 256 held-out prompts"),
        (replace(HEALTHY_ONLINE, **drawn(score=1.0)), "online/score 1 at first, 1 now, a change of +0 to +0"),
    ],
    "Most prompts give a tie": [(replace(HEALTHY_ONLINE, **drawn(ties=0.8)), "online/ties 0.8")],
    "Scores and lengths grow together": [
        (replace(HEALTHY_ONLINE, **drawn(length=lambda k: 10 + k / 10)),
         "online/length 10.6 tokens at first, 19.6 now; correlation with online/score 1"),
    ],
    "An earlier checkpoint is better": [
        (replace(HEALTHY, best=200, **held_out(evaluate(0.55, 0.8) | {"examples": 200}, evaluate(0.55, 0.75))),
         "rewards_eval/accuracies 0.8 at 200 examples, 0.75 at the last"),
    ],
    "Nearly all gradients are clipped": [
        (replace(HEALTHY, train=train(grad_norm=12.0)), "grad_norm above 10 in 100 % of the updates; its median 12"),
    ],
    "Length predicts the preference in the data": [
        (replace(HEALTHY, **counts("train", chosen_longer=0.85)), "chosen is longer in 85 % of the training pairs"),
    ],
    "Some examples contradict each other or are faulty": [
        (replace(HEALTHY, **counts("train", contradictory_pairs=5, empty_responses=400)),
         "contradictory_pairs 5 of 400 (1 %); empty_responses 400 of 400 (100 %)"),
    ],
    "Few examples or one label have most of the weight": [
        (replace(HEALTHY, **counts("train", effective_examples=150.0)), "effective_examples 150 of 400"),
        (with_settings(replace(HEALTHY, **counts("train", **LABELS)), loss=KTO),
         "desirable responses weigh 0.333 times as much as undesirable ones"),
    ],
    "Drawn answers are cut off": [
        (replace(HEALTHY_ONLINE, **drawn(eos=0.5)), "online/eos 0.5 end within online.max_new_tokens=16"),
    ],
    "The policy has gone far from the reference": [(replace(HEALTHY_ONLINE, **drawn(kl=20.0)), "online/kl 20 nats")],
}  # fmt: skip


@pytest.mark.parametrize(("title", "run", "value"), [(title, *each) for title, runs in FAULTS.items() for each in runs])
def test_a_rule_alone_finds_its_fault(title, run, value):
    [found] = find_all(run)
    assert found.title == title
    assert found.value.startswith(value)


def test_every_rule_has_such_a_run_and_warnings_come_before_notes():
    assert {rule.title for rule in RULES} == FAULTS.keys()
    levels = [rule.level for rule in RULES]
    assert levels == sorted(levels, reverse=True)


TWO = held_out(evaluate(0.55, 0.8) | {"examples": 200}, evaluate(0.56, 0.75))
NEARLY = {
    "a healthy run": HEALTHY,
    "a healthy online run, whose scorer may contradict held-out labels": replace(
        HEALTHY_ONLINE, **held_out(evaluate(2.0, 0.3))
    ),
    "nothing was logged": Run(Path("run"), "made", config=CONFIG),
    "no file could be read": Run(Path("run"), "made"),
    "numbers that are none": with_settings(
        replace(HEALTHY, **counts("train", empty_responses=1, examples=0)), datasets=3, batch_size="x", warmup_steps=[]
    ),
    "responses without tokens": replace(HEALTHY, **counts("test", mean_chosen_tokens=0, mean_rejected_tokens=0)),
    "margins that grow by what chosen lose": replace(HEALTHY, **held_out(evaluate(0.55, 0.7, -52.0, -56.0))),
    "a loss that holds chosen up": with_settings(
        replace(HEALTHY, **held_out(evaluate(0.55, 0.7, -54.0, -55.0))), loss={"name": "dpop"}
    ),
    "an accuracy above chance": replace(HEALTHY, **held_out(evaluate(0.6, 0.57))),
    "few pairs": replace(HEALTHY, **held_out(evaluate(0.6, 0.5)), **counts("test", examples=8, prompts=8)),
    "a loss that rose by 2 %": replace(HEALTHY, **TWO),
    "BEST is the last": replace(HEALTHY, best=400, **TWO),
    "a run that still trains": replace(HEALTHY, train=train(10, lr=1e-8), state=State("training", "")),
    "a rate that is scaled": with_settings(replace(HEALTHY, train=train(lr=1e-8)), lr_scaling="sqrt"),
    "one sample in sixteen is empty": replace(HEALTHY, **sampled(["", *ANSWERS[1:]])),
    "the reference repeats itself too": replace(HEALTHY, **sampled([LOOP] * 8 + ANSWERS[8:], ANSWERS[:8] + [LOOP] * 8)),
    "SFT should change lengths": with_settings(
        replace(HEALTHY, **sampled([answer * 3 for answer in ANSWERS])), loss={"name": "sft"}
    ),
    "one sample is very long": replace(HEALTHY, **sampled([ANSWERS[0] * 90, *ANSWERS[1:]])),
    "published splits share prompts": replace(HEALTHY, **counts("test", prompts_like_train=26)),
    "less than 1 % is cut": replace(HEALTHY, **counts("train", truncated_responses=3)),
    "half of forty prompts tie": replace(HEALTHY_ONLINE, **drawn(ties=0.6)),
    "longer answers that score less": replace(
        HEALTHY_ONLINE, **drawn(length=lambda k: 10 + k / 10, score=lambda k: k % 50)
    ),
    "weights of wpo move": with_settings(
        replace(HEALTHY, train=train(**{"loss/train": lambda k: 3.0 if k > 1 else 0.7})),
        loss={"name": "dpo", "beta": 0.1, "wpo": True},
    ),
    "labels that are balanced by weights": with_settings(
        replace(HEALTHY, **counts("train", **LABELS)), loss=KTO | {"desirable_weight": 3.0}
    ),
}


@pytest.mark.parametrize("run", NEARLY.values(), ids=NEARLY)
def test_no_rule_finds_a_fault_where_there_is_none(run):
    assert find_all(run) == []


@pytest.mark.parametrize(
    ("text", "broken"), [("", True), (" \n", True), ("no " * 100, True), (LOOP, True), ("\u65e5\u672c" * 100, True),
                         ("yes", False), (" ".join(ANSWERS[:1]) + Path(__file__).read_text()[:400], False)],
)  # fmt: skip
def test_a_text_without_words_or_with_the_same_ones_is_broken(text, broken):
    assert is_broken(text) == broken


# --- rules that infer: how often they err, and what they see ----------------------------------------------------------

N_PAIRS = 256


def with_held_out(rng: np.random.Generator, accuracy: float, rise: float = 0.0) -> Run:
    """Losses of pairs vary by 0.6, those of batches as much as their size lets them."""
    losses = 0.6 + 0.6 * rng.standard_normal((2, N_PAIRS)).mean(axis=1) + np.array([0, rise])
    right = rng.binomial(N_PAIRS, accuracy) / N_PAIRS
    noise = 0.6 * rng.standard_normal(N + 1) / BATCH**0.5
    middle, last = evaluate(losses[0], right) | {"examples": 200}, evaluate(losses[1], right)
    return replace(
        HEALTHY, train=train(**{"loss/train": lambda k: 0.69 - k / 500 + noise[k]}), **held_out(middle, last)
    )


def with_losses(rng: np.random.Generator, end: float) -> Run:
    """Losses with an exponential tail, whose mean goes from 0.69 to `end`."""
    noise = rng.exponential(size=(N + 1, BATCH)).mean(axis=1)
    course = lambda k: (0.69 + (end - 0.69) * min(1.0, k / 50)) * (1.0 if k == 1 else noise[k])  # noqa: E731
    return replace(HEALTHY, train=train(**{"loss/train": course}))


def with_samples(rng: np.random.Generator, factor: float = 1.0, empty: float = 0.2) -> Run:
    """Samples of 60 words on average; of the reference's a fifth is empty."""

    def write(factor: float, empty: float) -> list[str]:
        return ["" if rng.random() < empty else "a b c d e f " * int(factor * rng.geometric(0.1)) for _ in range(32)]

    policy, reference = write(factor, empty), write(1.0, 0.2)
    return replace(HEALTHY, **sampled(policy, reference))


def with_scores(rng: np.random.Generator, rise: float, win_rate: float = 0.5) -> Run:
    """Scores of neighbouring updates are alike; half of the held-out comparisons tie."""
    noise = np.convolve(rng.standard_normal(N + 9), 0.5 ** np.arange(9), "valid")
    wins = np.where(rng.random(N_PAIRS) < 0.5, 0.5, rng.random(N_PAIRS) < win_rate)
    answers = {"online_eval/win_rate": wins.mean(), "online_eval/win_rate_se": wins.std(ddof=1) / N_PAIRS**0.5}
    run = replace(HEALTHY_ONLINE, eval=Log([START, evaluate(0.7, 0.5) | answers]))
    scores = {"score": lambda k: rise * k / N + 0.3 * noise[k], "score_best": 3.0, "score_worst": 0.0}
    return replace(run, **drawn(**scores))


def with_shares(rng: np.random.Generator, name: str, share: float) -> Run:
    return replace(HEALTHY_ONLINE, **drawn(**{name: lambda k: rng.binomial(BATCH, share) / BATCH}))


@pytest.mark.parametrize(
    ("condition", "draw", "without", "fault"),
    [
        (rules.no_better_than_chance, with_held_out, {"accuracy": 0.56}, {"accuracy": 0.47}),
        (rules.overfitted, with_held_out, {"accuracy": 0.7}, {"accuracy": 0.7, "rise": 0.4}),
        (rules.collapsed, with_losses, {"end": 2 * 0.69}, {"end": 4.0}),
        (rules.broken_samples, with_samples, {}, {"empty": 0.7}),
        (rules.sample_lengths, with_samples, {}, {"factor": 3.0}),
        (rules.answers_no_better, with_scores, {"rise": 1.5}, {"rise": -1.5}),
        (rules.answers_no_better, with_scores, {"rise": 1.5}, {"rise": 1.5, "win_rate": 0.25}),
        (rules.ties, with_shares, {"name": "ties", "share": 0.5}, {"name": "ties", "share": 0.8}),
        (rules.unfinished_answers, with_shares, {"name": "eos", "share": 0.92}, {"name": "eos", "share": 0.6}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_rule_that_infers_is_seldom_wrong_and_sees_what_it_is_for(condition, draw, without, fault):
    """At most 5 % false alarms, and a power of half; the seeds are fixed."""

    def rate(options: dict[str, Any]) -> float:
        return np.mean([condition(draw(np.random.default_rng(seed), **options)) is not None for seed in range(100)])

    assert rate(without) <= 0.05
    assert rate(fault) >= 0.5
