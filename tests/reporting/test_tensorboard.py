"""TensorBoard shows what `metrics.jsonl` has, once."""

from pathlib import Path

import pytest
from support.records import context_in
from support.runs import read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dpo.reporting.events import Evaluation, Update
from dpo.reporting.trackers import TensorBoardLogger


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of every metric, as float32."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def logged(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of `metrics.jsonl`."""
    found: dict[str, list[tuple[int, float]]] = {}
    for split in ("train", "eval"):
        for line in read_metrics(run_dir, split):
            updates = {"counters/updates": line.pop("updates")} if split == "train" else {}
            for name, value in (line | updates).items():
                if name not in ("split", "examples", "updates"):
                    found.setdefault(name, []).append((line["examples"], value))
    return found


@pytest.mark.slow
def test_a_run_that_was_stopped_or_killed_and_continued_shows_nothing_twice(run, run_and_stop, run_dir, tmp_path):
    settings = ("tensorboard.enabled=true", "save_every=4", "n_examples=32")
    run_and_stop("run", *settings, after=5)
    for step in ("step-20", "step-16"):  # as if it had been killed after the fifth update, with the third saved last
        (run_dir / step).rename(tmp_path / step)

    run("run", *settings, "resume=auto")

    assert len(list((run_dir / "tensorboard").iterdir())) == 2
    shown, expected = scalars(run_dir), logged(run_dir)
    assert {"loss/train", "loss/eval", "rewards_train/margins", "lr", "grad_norm"} <= shown.keys() == expected.keys()
    assert [step for step, _ in shown["loss/train"]] == [*range(4, 36, 4)]
    for name, values in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in values], name
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in values], rel=1e-6), name


def test_an_evaluation_that_a_resumed_run_begins_with_hides_no_update(tmp_path):
    killed = TensorBoardLogger(context_in(tmp_path))
    for number in (1, 2, 3):
        killed.on_update(Update(number, 4 * number, (), {}, {"loss/train": 0.5}))
    killed.on_end()
    resumed = TensorBoardLogger(context_in(tmp_path))
    resumed.on_evaluation(Evaluation(3, 12, {"loss/eval": 0.6}))
    resumed.on_end()
    shown = scalars(tmp_path)
    assert [[step for step, _ in shown[name]] for name in ("loss/train", "loss/eval")] == [[4, 8, 12], [12]]
