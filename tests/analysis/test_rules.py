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
MINUS = "\N{MINUS SIGN}"
ANSWERS = [f"An answer of {i} with a few words, and then some." for i in range(16)]
LOOP = f"{'ha' * 20} " * 11  # as many words as an answer
ONLINE = {"name": "online", "n_samples": 2, "max_new_tokens": 16, "mix_offline": 0.0}
Course = Callable[[int], float] | float  # of a metric, by update


def train(**metrics: Course) -> dict[str, Log]:
    """Updates whose loss falls while 70 % of the pairs are ranked right."""
    courses = {"loss/train": lambda k: 0.69 - k / 500, **rewards("train", 0.1, -0.1, 0.7)} | metrics
    numbers = range(1, N + 1)
    return {
        "train": Log([update(k, **{name: c(k) if callable(c) else c for name, c in courses.items()}) for k in numbers])
    }


def evaluate(loss: float, accuracy: float, chosen: float = -49.0, rejected: float = -52.0) -> dict[str, Any]:
    changed = {"logps_eval/chosen": chosen, "logps_eval/rejected": rejected}
    return evaluation(N, loss, **rewards("eval", 0.1, -0.2, accuracy), **changed)


START = evaluate(0.69, 0.0, -50.0, -50.0) | {"updates": 0, "examples": 0}


def held_out(*last: dict[str, Any]) -> dict[str, Log]:
    return {"eval": Log([START, *last])}


def counts(split: str, **more: Any) -> dict[str, Any]:
    return {"preflight": PREFLIGHT | {split: PREFLIGHT[split] | more}}


def sampled(policy: Iterable[str], reference: Iterable[str | None] = ANSWERS) -> dict[str, Any]:
    both = enumerate(zip(policy, reference, strict=True))
    return {"samples": [sample(400, p, r, f"prompt {i}") for i, (p, r) in both]}


def drawn(**courses: Course) -> dict[str, Log]:
    """Updates of an online run; scores rise unless they are given."""
    usual = {"score": lambda k: k / 100, "score_best": 2.0, "score_worst": 0.0, "kl": 0.5, "eos": 0.97, "ties": 0.1}
    return train(**{f"online/{name}": course for name, course in (usual | courses).items()})


def changed(run: Run, **parts: Any) -> Run:
    """The run with other parts; `config` is added to its settings."""
    return replace(run, **(parts | {"config": run.config | parts.get("config", {})}))


HEALTHY = Run(
    Path("run"), "made", config=CONFIG, preflight=PREFLIGHT, state=State("complete", ""),
    **train(), **held_out(evaluate(0.55, 0.7)), **sampled(ANSWERS),
)  # fmt: skip
HEALTHY_ONLINE = changed(HEALTHY, config={"online": ONLINE}, **drawn())
LABELS = {"desirable": 100, "undesirable": 300}
KTO = {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

FAULTS = (  # title of the rule, a run that has this fault alone, and the numbers that are told
    ("Loss or gradient was not a number", changed(HEALTHY, **train(grad_norm=lambda k: None if k in (3, 5) else 1.0)),
     "2 of 100 updates, the first 3"),
    ("The run has collapsed", changed(HEALTHY, **train(**{"loss/train": lambda k: 3.0 if k > 50 else 0.6})),
     "loss/train 3 now, 0.69 at the start"),
    ("Chosen responses become much less likely", changed(HEALTHY, **held_out(evaluate(0.55, 0.7, -53.0, -55.0))),
     f"change of held-out log-probabilities per token: chosen {MINUS}0.15, rejected {MINUS}0.25"),  # of 20 tokens
    ("Held-out pairs are ranked no better than by chance", changed(HEALTHY, **held_out(evaluate(0.69, 0.45))),
     "rewards_eval/accuracies 0.45 on 256 pairs, 95 % interval 0.387 to 0.512"),
    ("The held-out loss rises while the training loss falls",
     changed(HEALTHY, **held_out(evaluate(0.55, 0.7) | {"examples": 200}, evaluate(0.8, 0.7))),
     "loss/eval 0.55 at 200 examples, 0.8 at last; loss/train 0.599, then 0.499"),
    ("The learning rate had little effect", changed(HEALTHY, **train(lr=lambda k: 1e-8 * k / 10)),
     "lr 1e-07 at most, of 1e-06, in 100 updates"),
    ("The learning rate had little effect", changed(HEALTHY, **held_out(evaluate(0.55, 0.7, -49.9, -50.1))),
     f"change of held-out log-probabilities per token: chosen +0.005, rejected {MINUS}0.005"),
    ("Samples are empty or repeat themselves", changed(HEALTHY, **sampled(["", " \n"] * 4 + ANSWERS[8:])),
     "8 of 16 samples; of the reference or at first 0"),
    ("Samples are empty or repeat themselves", changed(HEALTHY, **sampled([""] * 16, [None] * 16)), "16 of 16 samples"),
    ("Samples have changed in length", changed(HEALTHY, **sampled([answer * 2 for answer in ANSWERS])),
     "21 words on average, of the reference or at first 11"),
    ("Training examples are cut", changed(HEALTHY, **counts("train", truncated_responses=4, identical_pairs=3)),
     "truncated_responses 4 of 400 (1 %)"),
    ("Held-out prompts or answers are in the training data",
     changed(HEALTHY, config={"datasets": ["my"]}, **counts("test", prompts_like_train=26, answers_in_train=3)),
     "prompts_like_train 26 of 256 (10 %); answers_in_train 3 of 256 (1 %)"),
    ("The answers are worse than the reference's",
     changed(HEALTHY_ONLINE, eval=Log([START, evaluate(0.7, 0.4) | {"online_eval/win_rate": 0.4}])),
     "online_eval/win_rate 0.4 on 256 held-out prompts"),
    ("Scores and lengths grow together", changed(HEALTHY_ONLINE, **drawn(length=lambda k: 20.0 if k <= 50 else 40.0)),
     "20 tokens, score 0.055 at first; 40 tokens, score 0.955 now"),
    ("Most prompts give a tie", changed(HEALTHY_ONLINE, **drawn(ties=0.8)), "online/ties 0.8"),
    ("An earlier checkpoint is better",
     changed(HEALTHY, best=200, **held_out(evaluate(0.55, 0.8) | {"examples": 200}, evaluate(0.55, 0.75))),
     "rewards_eval/accuracies 0.8 at 200 examples, 0.75 at last"),
    ("Nearly all gradients are clipped", changed(HEALTHY, **train(grad_norm=20.0)),
     "grad_norm above 10 in 100 % of the updates"),
    ("Length predicts the preference in the data", changed(HEALTHY, **counts("train", chosen_longer=0.85)),
     "chosen is longer in 85 % of the training pairs"),
    ("Some examples contradict each other or are faulty",
     changed(HEALTHY, **counts("train", contradictory_pairs=5, empty_responses=400)),
     "contradictory_pairs 5 of 400 (1 %); empty_responses 400 of 400 (100 %)"),
    ("Few examples or one label have most of the weight", changed(HEALTHY, **counts("train", effective_examples=150.0)),
     "effective_examples 150 of 400"),
    ("Few examples or one label have most of the weight",
     changed(HEALTHY, config={"loss": KTO}, **counts("train", **LABELS)),
     "desirable responses weigh 0.333 times as much as undesirable ones"),
    ("Drawn answers are cut off", changed(HEALTHY_ONLINE, **drawn(eos=0.5)), "online/eos 0.5"),
    ("The policy has gone far from the reference", changed(HEALTHY_ONLINE, **drawn(kl=20.0)), "online/kl 20"),
)  # fmt: skip


@pytest.mark.parametrize(("title", "run", "value"), FAULTS)
def test_a_rule_alone_finds_its_fault(title, run, value):
    [(rule, found)] = find_all(run)
    assert rule.title == title
    assert found.startswith(value)


def test_every_rule_has_such_a_run_and_warnings_come_before_notes():
    assert {rule.title for rule in RULES} == {title for title, _, _ in FAULTS}
    levels = [rule.level for rule in RULES]
    assert levels == sorted(levels, reverse=True)


SOUND = {
    "a healthy run": HEALTHY,
    "a healthy online run, whose scorer may contradict held-out labels": changed(
        HEALTHY_ONLINE, **held_out(evaluate(2.0, 0.3))
    ),
    "nothing was logged": Run(Path("run"), "made", config=CONFIG),
    "no file could be read": Run(Path("run"), "made"),
    "margins that grow by what chosen lose": changed(HEALTHY, **held_out(evaluate(0.55, 0.7, -52.0, -56.0))),
    "a loss that holds chosen up": changed(
        HEALTHY, config={"loss": {"name": "dpop"}}, **held_out(evaluate(0.55, 0.7, -54.0, -55.0))
    ),
    "few pairs": changed(HEALTHY, **held_out(evaluate(0.6, 0.5)), **counts("test", examples=8, prompts=8)),
    "a run that still trains": changed(HEALTHY, state=State("training", ""), **train(lr=1e-8)),
    "the reference repeats itself too": changed(HEALTHY, **sampled([LOOP] * 8 + ANSWERS[8:], ANSWERS[:8] + [LOOP] * 8)),
    "SFT should change lengths": changed(
        HEALTHY, config={"loss": {"name": "sft"}}, **sampled([answer * 3 for answer in ANSWERS])
    ),
    "one sample is very long": changed(HEALTHY, **sampled([ANSWERS[0] * 90, *ANSWERS[1:]])),
    "published splits share prompts": changed(HEALTHY, **counts("test", prompts_like_train=26)),
    "scores rise at the same length": changed(HEALTHY_ONLINE, **drawn(length=20.0)),
    "weights of wpo move": changed(
        HEALTHY,
        config={"loss": {"name": "dpo", "wpo": True}},
        **train(**{"loss/train": lambda k: 3.0 if k > 1 else 0.7}),
    ),
    "labels that are balanced by weights": changed(
        HEALTHY, config={"loss": KTO | {"desirable_weight": 3.0}}, **counts("train", **LABELS)
    ),
}


@pytest.mark.parametrize("run", SOUND.values(), ids=SOUND)
def test_no_rule_finds_a_fault_where_there_is_none(run):
    assert find_all(run) == []


def test_a_text_without_words_or_with_the_same_ones_is_broken():
    assert all(map(is_broken, ["", " \n", "no " * 100, LOOP, "\u65e5\u672c" * 100]))
    assert not any(map(is_broken, ["yes", Path(__file__).read_text()[:400]]))


def simulate(rng: np.random.Generator, *, accuracy: float = 0.7, rise: float = 0.0, factor: float = 1.0) -> Run:
    """Losses of pairs vary by 0.6, and those of batches of 4 by half of it; samples have 60 words on average."""
    losses = 0.6 + 0.6 * rng.standard_normal((2, 256)).mean(axis=1) + np.array([0, rise])
    right, noise = rng.binomial(256, accuracy) / 256, 0.3 * rng.standard_normal(N + 1)
    last = evaluate(losses[0], right) | {"examples": 200}, evaluate(losses[1], right)
    policy, reference = (["a b c d e f " * int(f * rng.geometric(0.1)) for _ in range(32)] for f in (factor, 1.0))
    course = {"loss/train": lambda k: 0.69 - k / 500 + noise[k]}
    return changed(HEALTHY, **train(**course), **held_out(*last), **sampled(policy, reference))


@pytest.mark.parametrize(
    ("condition", "without", "fault"),
    [
        (rules.no_better_than_chance, {"accuracy": 0.56}, {"accuracy": 0.47}),
        (rules.overfitted, {}, {"rise": 0.4}),
        (rules.sample_lengths, {}, {"factor": 3.0}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rule_that_infers_is_seldom_wrong_and_sees_what_it_is_for(condition, without, fault):
    """At most 5 % false alarms, and a power of half; the seeds are fixed."""

    def rate(options: dict[str, Any]) -> float:
        runs = [simulate(np.random.default_rng(seed), **options) for seed in range(100)]
        return sum(condition(run) is not None for run in runs) / 100

    assert rate(without) <= 0.05
    assert rate(fault) >= 0.5
