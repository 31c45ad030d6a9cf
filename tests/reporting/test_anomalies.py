"""NaN never reaches the weights; collapse is a warning."""

import pytest
import torch
from support.faults import SHARDED
from support.records import context_in, evaluation, rewards, start, update, write_run
from support.runs import list_updates, read_metrics, read_rows, train

from dpo.checkpoint.files import read_state
from dpo.errors import RunError
from dpo.reporting.anomalies import MAX_SKIPPED, CollapseWarner
from dpo.reporting.events import Evaluation
from dpo.reporting.table import CALLBACKS

SPOILT = ("optimizer=SGD", "lr=1e30", "warmup_steps=0", "max_grad_norm=1e30")  # after one update


@pytest.mark.parametrize(("loss", "what"), [("dpo", "loss"), ("sft", "gradient")])
def test_it_stops_before_the_update_and_keeps_the_batch_for_replay(loss, what, run, spoil, run_dir):
    spoil(4, what)
    with pytest.raises(RunError, match=r"update 4 has loss .*; its examples are in .*nonfinite-4;"):
        run("run", f"loss={loss}", "save_every=4")

    assert len(read_metrics(run_dir, "train")) == 3
    assert (run_dir / "LATEST").resolve().name == "step-12"
    rows = read_rows(run_dir / "nonfinite-4" / "train.jsonl")
    assert len(rows) == 4
    texts = {"chosen", "rejected"} if loss == "dpo" else {"completion"}
    assert rows[0].keys() >= {"prompt", *texts, "prompt_number", "loss/train"}
    if loss == "dpo":
        reference = read_state(run_dir / "step-12" / "trainer.pt")["reference_logps"]["logps"]
        assert reference.isfinite().any()
        assert not reference.isinf().any()
    source = f"dataset_sources.bad={run_dir}/nonfinite-4"
    run("replay", f"loss={loss}", "datasets=[bad]", source, "n_examples=4", "do_first_eval=false")


def test_skipped_the_update_does_not_happen_and_the_run_goes_on(run, spoil, run_dir, printed):
    spoil(4)
    run("run", "save_every=4", "nan_policy=skip")

    assert "warning: update 4 has loss nan" in printed()
    assert list_updates(run_dir) == [4, 8, 12, 16, 20, 24]
    states = [read_state(run_dir / f"step-{n}" / f"{part}.pt") for n in (12, 16) for part in ("policy", "optimizer")]
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert states[1]["state"][0]["step"] == states[3]["state"][0]["step"] == 3
    assert all(value.isfinite().all() for value in read_state(run_dir / "step-24" / "policy.pt").values())
    assert read_state(run_dir / "step-24" / "trainer.pt")["callbacks"]["nonfinite"]["skipped"] == 1


@pytest.mark.parametrize(("what", "scale"), [("gradient", 1.0), ("loss", 2.0**16)])
def test_a_loss_that_is_nan_in_float16_or_a_gradient_that_no_scale_helps_stops_the_run(
    what, scale, run, spoil, monkeypatch
):
    monkeypatch.setattr("dpo.training.optimization.INITIAL_SCALE", scale)
    spoil(4, what)
    with pytest.raises(RunError, match=r"update 4 has .*float16 holds numbers up to 65504"):
        run("run", "model.autocast=float16", "model.reference_dtype=null")


def test_skipping_has_an_end(run, run_dir):
    with pytest.raises(RunError, match=f"{MAX_SKIPPED} updates were skipped before"):
        run("run", *SPOILT, "nan_policy=skip", "n_examples=80", "eval_every=80", "self_test=false")
    assert len(list(run_dir.glob("nonfinite-*"))) == MAX_SKIPPED + 1


@pytest.mark.slow
def test_every_rank_stops(command, run_dir):
    result = train(*command("run", *SPOILT, *SHARDED))

    assert result.returncode == 1
    assert "error: rank" in result.stderr
    assert "update 2 has loss" in result.stderr
    assert "Traceback" not in result.stderr
    assert len((run_dir / "nonfinite-2" / "train.jsonl").read_text().splitlines()) == 4


def test_a_run_that_collapses_is_told_once_with_what_to_try_also_if_it_is_resumed(tmp_path, printed):
    warner = CollapseWarner(context_in(tmp_path))

    def evaluate(margin: float, loss: float) -> str:
        losses = [0.7, *[loss] * 15]
        lines = [update(k, **{"loss/train": loss}, **rewards("train", margin, 0)) for k, loss in enumerate(losses, 1)]
        write_run(tmp_path, [evaluation(0, 0.69, **rewards("eval", 0, 0)), *lines])
        warner.on_evaluation(Evaluation(16, 64, {}))
        return printed()

    assert evaluate(0, 0.6) == ""
    told = "warning: the run has collapsed: loss/train 20 now, 0.69 at the start; it seldom recovers: start again with"
    assert evaluate(-9, 20.0).startswith(told)
    assert evaluate(-9, 20.0) == ""
    warner = start(CollapseWarner(context_in(tmp_path)), warner.state_dict())
    assert evaluate(-9, 20.0) == ""
    assert list(CALLBACKS).index("files") < list(CALLBACKS).index("collapse")  # which reads what that has written
