"""Rules of the report: each finds its fault in a run that has no other, and none finds one in a healthy run."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.records import CONFIG, PREFLIGHT, evaluation, rewards, sample, update

from dpo.analysis.rules import RULES, find_all, find_length_change, is_broken
from dpo.analysis.runs import Log, LoggedRun

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
    usual = {"score": lambda k: k / 100, "score_best": 2.0, "score_worst": 0.0, "kl": 0.5, "eos": 0.97}
    return train(**{f"online/{name}": course for name, course in (usual | courses).items()})


def changed(run: LoggedRun, **parts: Any) -> LoggedRun:
    """The run with other parts; `config` is added to its settings."""
    return replace(run, **(parts | {"config": run.config | parts.get("config", {})}))


HEALTHY = LoggedRun(
    Path("run"), "made", config=CONFIG, preflight=PREFLIGHT, state="complete",
    **train(), **held_out(evaluate(0.55, 0.7)), **sampled(ANSWERS),
)  # fmt: skip
HEALTHY_ONLINE = changed(HEALTHY, config={"online": ONLINE}, **drawn())
LABELS = {"desirable": 100, "undesirable": 300}
KTO = {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

FAULTS = (  # beginning of the rule's title, a run that has this fault alone, and the numbers that are told
    ("Loss or gradient", changed(HEALTHY, **train(grad_norm=lambda k: None if k in (3, 5) else 1.0)),
     "2 of 100 updates"),
    ("Loss or gradient",  # the second is an overflow that a smaller loss_scale avoids
     changed(HEALTHY, **train(grad_norm=lambda k: None if k in (3, 5) else 1.0, loss_scale=lambda k: 1.0 + (k > 4))),
     "1 of 100 updates"),
    ("The run has collapsed", changed(HEALTHY, **train(**{"loss/train": lambda k: 4.0 if k > 50 else 0.6})),
     "loss/train 4 now"),
    ("Chosen responses become", changed(HEALTHY, **held_out(evaluate(0.55, 0.7, -53.0, -55.0))),
     f"change of held-out log-probabilities per token: chosen {MINUS}0.15, rejected {MINUS}0.25"),  # of 20 tokens
    ("The held-out loss rises",
     changed(HEALTHY, **held_out(evaluate(0.55, 0.7) | {"examples": 200}, evaluate(0.8, 0.7))),
     "loss/eval 0.55 at 200 examples, 0.8 at last"),
    ("Samples are empty", changed(HEALTHY, **sampled(["", " \n"] * 4 + ANSWERS[8:])),
     "8 of 16 samples"),
    ("Samples are empty", changed(HEALTHY, **sampled([""] * 16, [None] * 16)), "16 of 16 samples"),
    ("Samples have changed", changed(HEALTHY, **sampled([answer * 2 for answer in ANSWERS])),
     "21 words on average"),
    ("Scores and lengths grow together", changed(HEALTHY_ONLINE, **drawn(length=lambda k: 20.0 if k <= 50 else 40.0)),
     "20 tokens, score 0.055 at first"),
    ("An earlier checkpoint",
     changed(HEALTHY, best_at=200, **held_out(evaluate(0.55, 0.8) | {"examples": 200}, evaluate(0.55, 0.75))),
     "rewards_eval/accuracies 0.8 at 200"),
    ("Length predicts", changed(HEALTHY, **counts("train", chosen_longer=0.85)),
     "chosen is longer in 85 %"),
    ("One label has most of the weight",
     changed(HEALTHY, config={"loss": KTO}, **counts("train", **LABELS)),
     "desirable responses weigh 0.333"),
    ("Drawn answers are cut off", changed(HEALTHY_ONLINE, **drawn(eos=0.5)), "online/eos 0.5"),
)  # fmt: skip


@pytest.mark.parametrize(("title", "run", "value"), FAULTS)
def test_a_rule_alone_finds_its_fault(title, run, value):
    [(rule, found)] = find_all(run)
    assert rule.title.startswith(title)
    assert found.startswith(value)


def test_every_rule_has_such_a_run_and_warnings_come_before_notes():
    titles = tuple(title for title, _, _ in FAULTS)
    assert [rule.title for rule in RULES if not rule.title.startswith(titles)] == []
    levels = [rule.level for rule in RULES]
    assert levels == sorted(levels, reverse=True)


SOUND = (
    HEALTHY,
    # The scorer may contradict held-out labels.
    changed(HEALTHY_ONLINE, **held_out(evaluate(2.0, 0.3))),
    LoggedRun(Path("run"), "made", config=CONFIG),  # nothing was logged
    changed(HEALTHY, **sampled(["", "", *ANSWERS[2:]], [None] * 16)),  # as they may have been before training
    # The margins grow by what chosen lose.
    changed(HEALTHY, **held_out(evaluate(0.55, 0.7, -52.0, -56.0))),
    # This loss holds chosen up.
    changed(HEALTHY, config={"loss": {"name": "dpop"}}, **held_out(evaluate(0.55, 0.7, -54.0, -55.0))),
    # The pairs are few.
    changed(HEALTHY, **held_out(evaluate(0.6, 0.5)), **counts("test", examples=8, prompts=8)),
    changed(HEALTHY, state="still training", **train(lr=1e-8)),
    # The reference repeats itself too.
    changed(HEALTHY, **sampled([LOOP] * 8 + ANSWERS[8:], ANSWERS[:8] + [LOOP] * 8)),
    # SFT should change lengths
    changed(HEALTHY, config={"loss": {"name": "sft"}}, **sampled([answer * 3 for answer in ANSWERS])),
    # The weights of wpo move.
    changed(
        HEALTHY,
        config={"loss": {"name": "dpo", "wpo": True}},
        **train(**{"loss/train": lambda k: 3.0 if k > 1 else 0.7}),
    ),
    # Weights balance the labels.
    changed(HEALTHY, config={"loss": KTO | {"desirable_weight": 3.0}}, **counts("train", **LABELS)),
)


@pytest.mark.parametrize("run", SOUND)
def test_no_rule_finds_a_fault_where_there_is_none(run):
    assert find_all(run) == []


def with_lengths(rng: np.random.Generator, factor: float) -> LoggedRun:
    """Samples of 60 words on average, times the factor, beside those of the reference."""
    policy, reference = (["a b c d e f " * n for n in rng.geometric(0.1, 32)] for _ in range(2))
    return changed(HEALTHY, **sampled([text * int(factor) for text in policy], reference))


def test_a_change_in_length_is_seldom_found_without_one_and_mostly_with_one():
    """There are at most 5 % false alarms, and a power of half; the seeds are fixed."""

    def rate(factor: float) -> float:
        runs = (with_lengths(np.random.default_rng(seed), factor) for seed in range(100))
        return np.mean([bool(find_length_change(run)) for run in runs])

    assert rate(1) <= 0.05
    assert rate(3) >= 0.5


def test_a_text_without_words_or_with_the_same_ones_is_broken():
    assert all(map(is_broken, ["", " \n", "no " * 100, LOOP, "\u65e5\u672c" * 100]))
    assert not any(map(is_broken, ["yes", Path(__file__).read_text()[:400]]))
