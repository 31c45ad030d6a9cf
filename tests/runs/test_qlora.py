"""Runs with adapters over a 4-bit base: where they begin, and what a checkpoint holds. (How they are computed:
test_invariance.py.)"""

from __future__ import annotations

import math
from pathlib import Path

import peft
import pytest
import torch
from support.models import batch_of
from support.runs import GOLDEN, compose, read_metrics

from benchmarks.soak import WALL_CLOCK
from dpo.checkpoint.files import read_state
from dpo.models.adapters import switch
from dpo.models.export import export
from dpo.models.loading import load_policy, model_loaders
from dpo.models.pretrained import load_model
from dpo.models.quantization import Linear4bit, quantize
from dpo.models.side_by_side import Choices, load_panel
from dpo.settings.plan import resolve

pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")

# SGD: others divide a gradient by its size, and so make much of the rounding of one that is nearly 0
QLORA = (
    "lora=qlora", "lora.r=4", "lora.alpha=8", "optimizer=SGD", "lr=0.3", "warmup_steps=0", "n_examples=16",
    "export=false",
)  # fmt: skip


@pytest.fixture
def config_of(command):
    """The composed config of a small run."""

    return lambda *overrides: compose(*command("test", *overrides))


def assert_alike(first: Path, second: Path) -> None:
    """Metrics of every update and evaluation, and the trained adapter, are those of another run."""
    for split in ("train", "eval"):
        for ours, theirs in zip(read_metrics(first, split), read_metrics(second, split), strict=True):
            for name in ours.keys() - {"split", *WALL_CLOCK}:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), (split, name)
    ours, theirs = (read_state(run_dir / "LATEST" / "policy.pt") for run_dir in (first, second))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


def assert_begins_at_the_reference(run_dir: Path) -> None:
    first, last = read_metrics(run_dir, "train")[0], read_metrics(run_dir, "train")[-1]
    assert first["loss/train"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards_train/chosen"] == first["rewards_train/rejected"] == first["rewards_train/accuracies"] == 0
    assert last["loss/train"] != pytest.approx(math.log(2), abs=1e-4)


def test_dpo_begins_at_the_adapter_of_sft(run, tmp_path):
    run("sft", *QLORA, "loss=sft")
    for reference in ("adapter", "model"):
        start = (f"model.archive={tmp_path}/sft/LATEST", f"lora.reference={reference}")
        run(reference, *QLORA, *start, *["model.reference_dtype=null"] * (reference == "model"))
    assert_begins_at_the_reference(tmp_path / "adapter")
    assert_alike(tmp_path / "adapter", tmp_path / "model")


def test_a_checkpoint_is_an_adapter_that_peft_loads_and_is_merged_and_asked(run, config_of, tmp_path):
    run("trained", *QLORA)
    directory = tmp_path / "trained" / "LATEST"
    assert all(".lora_" in name for name in read_state(directory / "policy.pt"))
    config = config_of(*QLORA)
    plan = resolve(config)
    ours, _ = load_policy(model_loaders(plan)[0], plan, rank=0, resume_from=directory)
    assert sum(isinstance(module, Linear4bit) for module in ours.modules()) == 7 * 3
    base = quantize(load_model(str(GOLDEN / "tiny-llama"), dtype=torch.float32, attn_implementation="sdpa"))
    ids = batch_of(4)["chosen_input_ids"]
    before = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, str(directory))
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    assert not torch.allclose(before, ours(ids).logits, atol=1e-4)

    export(directory, tmp_path / "merged", merge=True)  # onto what 4 bits keep of the base
    merged = load_model(str(tmp_path / "merged"), dtype=torch.float32, attn_implementation="sdpa")
    torch.testing.assert_close(merged(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-5)

    warnings: list[str] = []
    panel = load_panel([directory], Choices(), log=warnings.append)
    [policy], reference = panel.policies, panel.reference
    assert reference.model is policy.model
    assert warnings == []  # the base is the one that the run recorded
    with switch(policy.model, policy.adapter)():
        assert torch.equal(policy.model(ids).logits, ours(ids).logits)
