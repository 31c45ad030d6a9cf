"""What the report says of a run that draws its pairs, on metrics made by hand. docs/metrics.md has the rules."""

from __future__ import annotations

import numpy as np
import pytest
from support.records import CONFIG, evaluation, rewards, update

from dpo.analysis.findings import Finding, find_all
from dpo.analysis.runs import Log, Run

ONLINE = {
    **{"name": "online", "n_samples": 2, "scorer": "shorter", "max_new_tokens": 16, "missing_eos_penalty": 0.0},
    **{"ties": "skip", "mix_offline": 0.0},
}
USUAL = {
    **{"online/score": 1.0, "online/score_best": 2.0, "online/score_worst": 0.0, "online/kl": 0.5},
    **{"online/length": 10.0, "online/eos": 0.9, "online/ties": 0.1},
    **{"online/sampling_share": 0.6, "online/scoring_share": 0.05},
}


def found_in(n: int = 40, *, settings: dict | None = None, **courses) -> dict[str, Finding]:
    """The findings of n updates by title. `courses` are of metrics, by k from 0 to 1; `kl` stands for `online/kl`."""
    lines = []
    for k in range(1, n + 1):
        drawn = {**USUAL, **{f"online/{name}": course(k / n) for name, course in courses.items()}}
        lines.append(update(k, **drawn, **rewards("train", 0.1, -0.1, 0.995)))
    config = {**CONFIG, "online": {**ONLINE, **(settings or {})}}
    held_out = [evaluation(n, 0.7, **rewards("eval", -1.0, 1.0, 0.4))]
    return {f.title: f for f in find_all(Run(__file__, "made", config, train=Log(lines), eval=Log(held_out)))}


def test_a_run_as_it_should_be_has_no_warning_though_held_out_labels_are_not_the_scorers():
    found = found_in(score=lambda k: 4 * k)
    assert {finding.level for finding in found.values()} == {"note"}
    assert found["Scores rise"].value == "online/score 0.55 over the first 10 updates, 3.55 over the last"
    accuracies = found["What accuracies mean here"]
    assert accuracies.value == "rewards_train/accuracies 0.995; rewards_eval/accuracies 0.4"
    assert "need not rise" in accuracies.text
    assert "from the datasets" not in accuracies.text
    assert found["What drawing the pairs takes"].value == "sampling 60 %, scoring 5 % of the time in updates"
    mixed = found_in(settings={"mix_offline": 0.25})["What accuracies mean here"]
    assert "but for the 25 % from the datasets" in mixed.text


def test_answers_that_are_cut_off():
    title = "Most answers are cut off"
    warning = found_in(eos=lambda k: 0.05)[title]
    assert (warning.level, warning.value) == (
        "warning",
        "online/eos 0.05: so many end within online.max_new_tokens=16",
    )
    assert "online.missing_eos_penalty" in warning.text
    assert "penalty" not in found_in(eos=lambda k: 0.0, settings={"missing_eos_penalty": 1.0})[title].text
    assert title not in found_in(eos=lambda k: 0.51)
    assert found_in(eos=lambda k: 0.51)["Some answers are cut off"].level == "note"


def test_ties():
    title = "Most prompts give a tie"
    warning = found_in(ties=lambda k: k)[title]
    assert (warning.level, warning.value) == ("warning", "online/ties 0.887; online.n_samples 2")
    assert "online.ties=skip" in warning.text
    assert "online.ties=keep" in found_in(ties=lambda k: 0.5, settings={"ties": "keep"})[title].text
    assert title not in found_in(ties=lambda k: 0.49)


def test_scores_that_do_not_rise_by_more_than_chance():
    noise = iter(np.random.default_rng(0).normal(size=40))
    warning = found_in(score=lambda k: next(noise))["Scores have not risen"]
    assert warning.level == "warning"
    assert "two standard errors" in warning.value
    falls = found_in(score=lambda k: -4 * k)["Scores have not risen"].value
    assert falls.startswith("online/score \N{MINUS SIGN}0.55 over the first 10 updates, \N{MINUS SIGN}3.55")
    assert not {"Scores have not risen", "Scores rise"} & found_in(19).keys()


@pytest.mark.parametrize(
    ("score", "length", "is_found"),
    [
        (lambda k: k, lambda k: 10 + 10 * k, True),
        (lambda k: k, lambda k: 10 + 3 * k, False),  # 1.2 times as long
        (lambda k: -k, lambda k: 10 + 10 * k, False),
        (lambda k: k, lambda k: 20 - 10 * k, False),  # what `shorter` asks for
        (lambda k: k, lambda k: 10.0, False),
    ],
)
def test_scores_that_are_won_by_length(score, length, is_found):
    warning = found_in(score=score, length=length).get("Scores and lengths grow together")
    assert (warning is not None) == is_found
    if warning is not None:
        assert warning.value == (
            "online/length 11.4 tokens at first, 18.9 now; correlation of online/score and online/length over the "
            "updates 1"
        )


def test_a_policy_far_from_the_reference():
    title = "The policy has gone far from the reference"
    note = found_in(kl=lambda k: 20.0, score=lambda k: k)[title]
    assert (note.level, note.value) == ("note", "online/kl 20 nats, 2 a token")
    assert title not in found_in(kl=lambda k: 9.9)
    warning = found_in(kl=lambda k: 20.0, eos=lambda k: 1 - 0.05 * k)[title]  # its answers no longer end
    assert warning.level == "warning"
    assert warning.value.endswith("; online/eos 0.993 at first, 0.956 now")


def test_shares_of_the_time_are_of_the_whole_time():
    """The first half took 2 s an update, of which 0.6 for sampling; the second 0.5 s, of which 0.2."""
    lines = [update(k, **USUAL) for k in (1, 2)]
    lines += [update(k, **{**USUAL, "online/sampling_share": 0.2, "examples_per_second": 8.0}) for k in (3, 4)]
    found = find_all(Run(__file__, "made", CONFIG, train=Log(lines)))
    [takes] = [finding for finding in found if finding.title == "What drawing the pairs takes"]
    assert takes.value == "sampling 52 %, scoring 5 % of the time in updates"  # (0.6 * 4 + 0.2 * 1) / 5
