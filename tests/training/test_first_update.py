"""Work before the first update is announced with its size, and samples that would cost much of a run wait."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.runs import GOLDEN, compose

from dpo.data.counts import Preflight, SplitReport
from dpo.data.preflight import TrainingData
from dpo.settings.plan import resolve
from dpo.training.first_update import FirstUpdate

SAMPLED = ("sample_during_eval=true", "n_eval_model_samples=4", "n_eval_tokens=5")
WAITS = "warning: no samples before the first update; the first samples come with the evaluation after "


def collect_samples(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def first_update(*overrides: str, loss: str = "dpo", updates: int = 100) -> FirstUpdate:
    """The work of a run on pairs of 100 tokens: a prompt of 40 and responses of 30."""
    lengths = {"mean_prompt_tokens": 40.0, "mean_chosen_tokens": 30.0, "mean_rejected_tokens": 30.0}
    report = Preflight(SplitReport(examples=400, **lengths), SplitReport(examples=40, **lengths), updates, 0, 400)
    usual = (f"loss={loss}", f"model.name_or_path={GOLDEN / 'tiny-llama'}", "exp_name=test", "local_run_dir=run")
    config = compose(*usual, *overrides)
    data = TrainingData(tokenizer=None, encode=None, train=None, test=None, report=report)
    return FirstUpdate.of(resolve(config), data, sizes=(16, 16))


def test_each_thing_is_announced_with_its_size_and_the_keys_that_change_it():
    first = first_update("cache_reference_logps=all", "lora=lora", "do_first_sampling=true")
    assert first.messages == [
        "before the first update:\n"
        "  self-test on 2 examples (self_test=false leaves it out)\n"
        "  the reference scores up to 432 examples (cache_reference_logps=as_needed scores each when it is needed)\n"
        "  evaluation of 32 examples in 2 batches (n_eval_examples; do_first_eval=false leaves it out)\n"
        "  samples of policy and reference for 16 prompts, up to 4,096 tokens (n_eval_model_samples, n_eval_tokens; "
        "do_first_sampling=false leaves them out)"
    ]


def test_a_warning_says_why_samples_wait():
    assert first_update("eval_every=400", "self_test=false", "do_first_eval=true", updates=300).messages[1] == (
        f"{WAITS}400 examples. Now they could take 10% of the time of all updates (up to 4,096 tokens). "
        "do_first_sampling=true samples now all the same; lower n_eval_model_samples or n_eval_tokens for fewer or "
        "shorter samples"
    )


def test_what_is_not_done_is_not_announced():
    assert first_update("self_test=false", "do_first_eval=false").messages == []


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ((), 2 * 16 * 128),
        (("n_eval_model_samples=32",), 2 * 32 * 128),
        (("n_eval_tokens=10",), 2 * 16 * 10),
        (("n_eval_tokens=null",), 2 * 16 * (512 - 40)),  # as in the reference: up to max_length
        (("max_length=100", "max_prompt_length=50"), 2 * 16 * (100 - 40)),
        (("cache_reference_logps=all",), 16 * 128),  # whose model is freed
    ],
)
def test_samples_are_counted_before_they_are_drawn(overrides, tokens):
    [announced] = first_update("do_first_sampling=true", *overrides).messages
    assert f", up to {tokens:,} tokens (" in announced


def test_without_a_reference_the_policy_alone_samples():
    [announced] = first_update("do_first_sampling=true", loss="sft").messages
    assert "samples of the policy for 16 prompts, up to 2,048 tokens (" in announced


@pytest.mark.parametrize(
    ("updates", "asked_for", "draws"),
    [
        (307, "null", False),  # 3 * 4,096 sampled tokens against a tenth of 307 * 4 * 100
        (308, "null", True),
        (307, "true", True),
        (308, "false", False),
    ],
)
def test_samples_wait_if_they_could_cost_more_than_a_tenth_of_the_run(updates, asked_for, draws):
    first = first_update(f"do_first_sampling={asked_for}", "eval_every=400", updates=updates)
    assert first.draws_samples == draws
    warnings = [line for line in first.messages if line.startswith("warning")]
    assert len(warnings) == (asked_for == "null" and not draws)
    assert all(line.startswith(f"{WAITS}400 examples") and "do_first_sampling=true" in line for line in warnings)


def test_online_a_run_costs_what_is_drawn_for_it_too():
    drawn = ("online=online", "online.scorer=shorter", "online.max_new_tokens=10", "max_prompt_length=40")
    _, warning = first_update(*drawn, updates=1).messages
    n_sampled = int(re.search(r"up to ([\d,]+) tokens", warning)[1].replace(",", ""))
    assert f"could take {3 * n_sampled / (4 * (40 + 2 * 10 + 3 * 2 * 10)):,.0%} of the time" in warning


def test_a_short_run_samples_at_its_next_evaluation_and_dry_run_says_so(run, tmp_path, capfd):
    said = {}
    for dry_run in ("true", "false"):
        run("run", *SAMPLED, f"dry_run={dry_run}")
        said[dry_run] = capfd.readouterr().out

    announced = said["false"][said["false"].index("before the first update:") :].splitlines()[:4]
    assert announced[2].startswith("  evaluation of 4 examples in 1 batch (")
    assert announced[3].startswith(WAITS)
    assert "\n".join(announced) in said["true"]
    assert {sample["examples"] for sample in collect_samples(tmp_path / "run")} == {8, 16, 24}


def test_samples_before_the_first_update_can_be_asked_for_and_have_at_most_so_many_tokens(run, tmp_path, capfd):
    settings = ("loss=sft", "n_examples=4", "do_first_sampling=true")
    texts = {}
    for most in ("5", "null"):
        run(most, *SAMPLED, *settings, f"n_eval_tokens={most}")
        assert WAITS not in capfd.readouterr().out
        samples = collect_samples(tmp_path / most)
        assert [sample["examples"] for sample in samples] == [0] * 4 + [4] * 4
        texts[most] = [sample["policy"] for sample in samples]

    for short, whole in zip(texts["5"], texts["null"], strict=True):
        assert whole.startswith(short.rstrip("\ufffd"))  # which may be cut within a character
        assert len(short) < len(whole)


def test_a_long_evaluation_is_announced_with_its_time(run, monkeypatch, capfd):
    monkeypatch.setattr("trainers.LONG_EVALUATION_SECS", 0)
    run("with", "do_first_eval=true", "self_test=true")
    assert re.search(r"the evaluation takes about \d:\d\d, at the speed of the self-test", capfd.readouterr().out)
    run("without", "do_first_eval=false", "self_test=true")
    assert "the evaluation takes" not in capfd.readouterr().out
