"""The verdict says whether the model changed, and what its held-out examples prove."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.records import evaluation, rewards, update, write_run
from support.runs import write_rows

from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_result, share_interval

FLOAT32 = {"policy_dtype": "float32", "reference_dtype": "float32"}


def judge(folder: Path, *logged: dict[str, Any], answers: Sequence[tuple[int, str, str]] = (), **more: Any) -> str:
    """The verdict on a run with these evaluations and answers."""
    test = {"examples": 256, "prompts": 256, "mean_chosen_tokens": 20.0, "mean_rejected_tokens": 20.0}
    config = {"model": FLOAT32, **more.pop("config", {})}
    run = write_run(folder, [update(1), *logged], config=config, preflight={"test": test | more})
    lines = [{"examples": n, "prompt": prompt, "answer": answer} for n, prompt, answer in answers]
    write_rows(run / "answers.jsonl", lines)
    return describe_result(read_run(run))


@pytest.mark.parametrize(
    ("n", "prompts", "accuracy", "says"),
    [
        (9, 9, 1.0, "9 pairs, too few to judge; about 100 would do"),
        (1, 1, 1.0, ": 1 pair, too few"),
        (
            20,
            20,
            0.8,
            "In 16 of 20 held-out pairs the chosen response gained on the rejected one (95 % interval 58 % to 92 %)",
        ),
        (
            20,
            20,
            0.6,
            "(95 % interval 39 % to 78 %): no better than by chance, as far as 20 pairs tell",
        ),
        (256, 20, 2 / 3, "as far as 256 pairs (which count as 20) tell"),  # of 20 prompts
        (50, 8, 0.9, ": 50 pairs (which count as 8), too few to judge"),
        (256, 256, 0.3, "worse than by chance"),
    ],
)
def test_few_pairs_are_too_few_and_many_have_an_interval(tmp_path, n, prompts, accuracy, says):
    last = evaluation(1, 0.6, **rewards("eval", 0.1, -0.1, accuracy))
    assert says in judge(tmp_path, last, examples=n, prompts=prompts)


@pytest.mark.parametrize(
    ("differ", "of", "change", "says"),
    [
        (7, 8, 0.05, "The model changed: 7 of 8 answers to held-out prompts changed, and the "
         "log-probability per token of held-out responses moved: chosen +0.05, rejected \u22120.05"),
        (0, 8, 0.05, "The model changed: none of 8"),
        (1, 8, 1e-4, "The model hardly changed: 1 of 8 answers"),
        (0, 8, 1e-9, "The model did not change: none of 8"),
        (0, 0, 0.05, "The model changed: the log-probability per token"),  # nothing was sampled
        (0, 0, 1e-9, "The model did not change: the log-probability per token"),
        (3, 8, None, "The model changed: 3 of 8 answers"),
        (0, 8, None, "The model hardly changed: none of 8"),
        (0, 0, None, "The held-out loss"),
    ],
)  # fmt: skip
def test_the_verdict_says_how_much_the_model_changed(tmp_path, differ, of, change, says):
    def answer(n_examples: int, n_changed: int) -> list[tuple[int, str, str]]:
        return [(n_examples, f"{i}?", "new" if i < n_changed else "old") for i in range(of)]

    answers = [*answer(0, 0), *answer(2, of), *answer(4, differ), (4, "another?", "new")]  # the newest count
    chosen = [{} if change is None else {"logps_eval/chosen": -50.0 + 20 * k * change} for k in (0, 1)]
    rejected = [{} if change is None else {"logps_eval/rejected": -50.0 - 20 * k * change} for k in (0, 1)]
    evaluations = [evaluation(k, 0.7 - 0.1 * k, **chosen[k], **rejected[k]) for k in (0, 1)]
    verdict = judge(tmp_path, *evaluations, answers=answers)
    assert verdict.startswith(says)
    assert ("raise lr" in verdict) == ("hardly" in says or "did not" in says)


def test_without_answers_a_coarse_dtype_may_hide_a_change(tmp_path):
    evaluations = [evaluation(k, 0.7, **{"logps_eval/chosen": -50.0 + 0.01 * k}) for k in (0, 1)]
    verdict = judge(tmp_path, *evaluations, config={"model": {"policy_dtype": "bfloat16"}})
    assert verdict.startswith("Whether the model changed cannot be told")


@pytest.mark.parametrize(
    ("loss", "last", "counts", "says"),
    [
        ("kto", {"rewards_eval/auc": 1.0}, {"examples": 6, "prompts": 6, "desirable": 3, "undesirable": 3},
         "an undesirable one 100 % of the time: 3 desirable and 3 undesirable responses, too few"),
        ("kto", {"rewards_eval/auc": 0.75}, {"desirable": 128, "undesirable": 128},
         "75 % of the time (95 % interval 67 % to 82 %): better"),
        ("kto", {"rewards_eval/auc": 0.9}, {"desirable": 252, "undesirable": 4}, "4 undesirable responses, too"),
        ("kto", {}, {"desirable": 256, "undesirable": 0}, "The held-out loss fell from 40 to 30."),  # labels are alike
        ("plackett_luce", {"rewards_eval/accuracies": 0.65}, {"examples": 40, "prompts": 40},
         "65 % of the pairs in 40 held-out lists are ranked right"),
        ("sft", {}, {}, "The held-out loss per token fell from 2 to 1.5."),
        ("sft", {}, {"examples": 6, "prompts": 6}, "from 2 to 1.5: 6 targets, too few"),
        ("simpo", {"rewards_eval/accuracies": 0.75}, {}, "rated above the rejected one"),
        ("dpo", {"rewards_eval/accuracies": 0.9}, {"effective_examples": 200.0},
         "In 90 % by weight of 256 held-out pairs the chosen"),
    ],
)  # fmt: skip
def test_every_loss_has_its_measure_of_what_is_better(tmp_path, loss, last, counts, says):
    config = {"loss": {"name": loss, "beta": 0.1}}
    verdict = judge(tmp_path, evaluation(0, 40.0), evaluation(1, 30.0, **last), config=config, **counts)
    assert says in verdict


def test_an_online_run_without_a_reference_has_no_kl_from_it(tmp_path):
    verdict = judge(tmp_path, update(2, **{"online/score": 1.5}))
    assert verdict == "The mean score of the policy's answers was 1.5 at first and is 1.5 now."


def test_an_interval_is_wilsons():
    """Its bounds are where a share is 1.96 of its standard errors from the observed one."""
    for p in share_interval(0.7, 50):
        assert abs(p - 0.7) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 50))
