"""Updates in this process: waits for the device, compiled blocks, memory."""

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu import COMMON, GPU, TINY, Run, describe, few_words, limit, pick, train_here, write_model
from support.runs import ROOT

from dpo.training.objective import Objective
from trainers import Trainer

MOST_READS = 1  # reads of the device by the host per update
PREDICTION = 0.15 if GPU else 0.3  # relative; on a CPU libraries take most of the memory of so small a run


# --- waits for the device --------------------------------------------------------------------------------------------

BEFORE, WITHIN, AFTER = "before the first forward", "from the first forward to the last backward", "after it"


@pytest.mark.gpu
@pytest.mark.slow
@limit(60)
@pytest.mark.parametrize("base", ["BasicTrainer", "FSDPTrainer"])
def test_syncs_an_update_waits_for_the_device_once_and_after_its_backward(base, tmp_path, record, monkeypatch):
    """Two epochs: in the second the reference's log-probabilities are cached.

    Without a GPU nothing is counted: tests/test_trainers.py counts what would wait.
    """
    updates = count_waits(monkeypatch)
    own = ("batch_size=8", "gradient_accumulation_steps=2", "n_epochs=2")
    train_here(tmp_path, base, f"trainer={base}", *COMMON, *own, f"dataset_sources.hh={few_words(tmp_path, 24)}")
    counted = updates[1:]  # the first is the warm-up
    most = max(update.total() for update in counted)
    for phase, place in sorted(set().union(*counted)):
        record(f"{max(update[phase, place] for update in counted)} x {place}, {phase}")
    record(f"at most {most} in an update (of {MOST_READS})", most=most)
    assert {phase for update in counted for phase, _ in update} <= {BEFORE, AFTER}
    assert most <= MOST_READS


def count_waits(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    """The waits of each update by phase and place."""
    updates: list[Counter] = []
    phase = BEFORE
    step, clip, losses = Trainer.train_step, Trainer.clip_gradient, Objective.losses

    def enter(name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal phase
        phase = name
        return method(*args, **options)

    def counted_step(trainer: Trainer, batch: Any) -> Any:
        assert not (GPU and torch.backends.cuda.cudnn_sdp_enabled())
        updates.append(counts := Counter())
        with waits(lambda: counts.update([(phase, find_place())])):
            return enter(BEFORE, step, trainer, batch)

    monkeypatch.setattr(Trainer, "train_step", counted_step)
    monkeypatch.setattr(Trainer, "clip_gradient", lambda trainer: enter(AFTER, clip, trainer))
    monkeypatch.setattr(Objective, "losses", lambda *args, **options: enter(WITHIN, losses, *args, **options))
    return updates


def find_place() -> str:
    """The project's innermost line on the stack, outside this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and frame.filename != __file__ and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno} ({frame.name})"
    return "no line of ours"


@contextmanager
def waits(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` wherever torch warns that an operation waits for the device."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            note()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")


# --- compiled blocks -------------------------------------------------------------------------------------------------

COMPLAINTS = re.compile(r".*(?:recompile_limit|cache_size_limit).*")
SETTLED = 3  # updates after which no shape may need a new graph


@pytest.mark.gpu
@pytest.mark.slow
@limit(150)
def test_compile_blocks_stay_compiled_after_sampling(tmp_path, record, monkeypatch, capfd):
    sizes = pick((12, 768, 12), (6, 768, 12), None)
    model = write_model(tmp_path / "llama", describe("llama", *sizes)) if sizes else TINY
    common = (*COMMON, f"model.name_or_path={model}", f"dataset_sources.hh={few_words(tmp_path, 48)}",
              "n_eval_model_samples=4", "n_epochs=1", "sample_during_eval=true", f"max_length={pick(160, 160, 96)}",
              "batch_size=6", "compile=true", "do_first_eval=true",
              *(("model.random_init=true", "model.autocast=bfloat16") if GPU else ()))  # fmt: skip
    graphs, step, compile_module = [], Trainer.train_step, torch.nn.Module.compile

    def count_graphs(trainer: Trainer, batch: Any) -> Any:
        update = step(trainer, batch)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return update

    if not GPU:  # no code is generated
        monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **_: compile_module(block, backend="eager"))
    monkeypatch.setattr(Trainer, "train_step", count_graphs)
    train_here(tmp_path, "compiled", *common)
    record(f"{graphs[-1]} graphs, {graphs[-1] - graphs[SETTLED - 1]} of them after {SETTLED} updates")
    out, err = capfd.readouterr()
    assert COMPLAINTS.findall(out + err) == []
    assert 0 < graphs[SETTLED - 1] == graphs[-1]


# --- memory ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "whole": (),
    "sharded": ("trainer=FSDPTrainer", "world_size=1"),
    "lora": ("lora=lora",),
    "padded": ("layout=padded",),
    "AdamW": ("optimizer=AdamW",),
}


@pytest.mark.gpu
@pytest.mark.slow
@limit(60)
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_as_the_dry_run_predicted(variant, tmp_path, record):
    length, batch, n = pick((512, 16, 96), (512, 16, 96), (96, 4, 12))
    own = (f"max_length={length}", f"batch_size={batch}", f"n_examples={n}", "debug=true", *VARIANTS[variant])
    data = (f"dataset_sources.hh={few_words(tmp_path, 40)}", *large_model(tmp_path))
    dry, real = (Run(tmp_path, name, *COMMON, *data, *own, f"dry_run={name == 'dry'}") for name in ("dry", "real"))
    said = re.search(r"total +([\d.]+) GB", dry.done().text)
    assert said, "the dry run printed no total"
    predicted, peak = float(said[1]), real.done().records(split="train")[-1]["memory/peak_gb"]
    off = predicted / peak - 1
    record(f"{variant}: predicted {predicted:.2f} GB, measured {peak:.2f}: {off:+.0%} (of {PREDICTION:.0%})", off=off)
    assert abs(off) <= PREDICTION


def large_model(folder: Path) -> tuple[str, str]:
    """Overrides for a model whose weights dominate a run's memory."""
    sizes = pick((12, 1024, 16), (12, 1024, 16), (4, 512, 8))
    return (f"model.name_or_path={write_model(folder / 'llama', describe('llama', *sizes))}", "model.random_init=true")
