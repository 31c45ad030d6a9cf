"""Runs with adapters, on a base in full or in 4 bits.

That no layout or stop changes a run is in test_invariance.py; gradients on every mesh are in
tests/parallel/test_sharding.py.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.models import load_tiny
from support.pytests import refused, slow
from support.runs import TINY, assert_alike, compose, read_metrics
from transformers import AutoModelForCausalLM

from dpo.checkpoint.files import read_state
from dpo.models.adapters import WEIGHTS, make_adapter_context
from dpo.models.export import export
from dpo.models.generation import load_for_generation
from dpo.models.loading import load_policy, model_loaders
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_model
from dpo.models.quantization import Linear4bit, quantize
from dpo.settings.plan import resolve
from trainers import BasicTrainer, Trainer

BASE = TINY
IDS = torch.arange(3, 43).reshape(2, 20)
# SGD: others divide a gradient by its size, and so make much of the rounding of one that is nearly 0
LORA = (
    "lora=lora", "lora.r=4", "lora.alpha=8", "optimizer=SGD", "lr=0.3", "warmup_steps=0", "n_examples=16",
    "model.reference_dtype=null",
)  # fmt: skip
QLORA = (*LORA, "lora=qlora")
SAMPLED = ("sample_during_eval=true", "n_eval_model_samples=4")


@pytest.fixture
def base(tmp_path) -> Path:
    """A copy of the base, whose weights a test may change."""
    return Path(shutil.copytree(BASE, tmp_path / "base"))


@pytest.fixture
def sft(finished) -> Path:
    """The adapter of a run of SFT."""
    return finished(*LORA, "loss=sft", "n_examples=8", "do_first_eval=false") / "LATEST"


def needs_bitsandbytes(kind: str) -> None:
    if kind == "qlora":
        pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")


def with_reference(reference: str, adapter: Path | None = None) -> tuple[str, ...]:
    """Settings of DPO from an adapter, or from one that is new."""
    return (*LORA, f"lora.reference={reference}", *[f"model.archive={adapter}"] * (adapter is not None))


def loaded(adapter: Path | None = None, base: Path = BASE) -> Any:
    """The base, with an adapter as PEFT puts it there."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, str(adapter))


def merged(adapter: Path | None = None) -> Any:
    model = loaded() if adapter is None else loaded(adapter).merge_and_unload()
    return model.requires_grad_(True)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("lora", "base"), slow("lora", "adapter"), slow("qlora", "adapter")],
)
def test_a_reference_that_shares_the_base_is_a_second_model(kind, reference, finished, sft, command, tmp_path):
    needs_bitsandbytes(kind)
    adapter = sft if reference == "adapter" else None
    ours, theirs = (finished(*with_reference(name, adapter), f"lora={kind}", *SAMPLED) for name in (reference, "model"))
    assert_alike(ours, theirs, 1e-6)
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    first, last = read_metrics(ours, "train")[0], read_metrics(ours, "eval")[-1]
    assert first["loss/train"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards_train/chosen"] == first["rewards_train/rejected"] == 0
    assert last["rewards_eval/margins"] != pytest.approx(0, abs=1e-3)
    if kind == "lora":  # as two models, into which PEFT merged what was saved
        config = compose(*command("merged", "n_examples=16"))
        whole = BasicTrainer(merged(ours / "LATEST"), config, 0, tmp_path / "m", merged(adapter))
        for name, value in whole.evaluator.metrics().means().items():
            assert last[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_what_is_saved_is_the_adapter_alone_and_peft_loads_it(run, sft, monkeypatch, tmp_path):
    trainers, train = [], Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda trainer: trainers.append(trainer) or train(trainer))
    run("dpo", *with_reference("adapter", sft), "optimizer=AdamW", "lr=1e-3")

    [trainer], latest, weights = trainers, tmp_path / "dpo" / "LATEST", load_file(tmp_path / "dpo" / "LATEST" / WEIGHTS)
    assert weights.keys() == read_state(latest / "policy.pt").keys()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in weights)
    with torch.no_grad():
        ours, pefts, at_once = (model(IDS).logits for model in (trainer.policy.eval(), loaded(latest), merged(latest)))
        before = merged(sft)(IDS).logits
    torch.testing.assert_close(ours, pefts, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(at_once, pefts, rtol=1e-5, atol=1e-5)
    assert (pefts - before).abs().max() > 1e-2
    # Frozen weights have no state of the optimizer, and had no gradient.
    assert len(trainer.optimizer.state) == len(weights)


def test_a_checkpoint_over_4_bits_is_an_adapter_that_peft_loads_and_is_merged_and_asked(finished, command, tmp_path):
    needs_bitsandbytes("qlora")
    directory = finished(*QLORA) / "LATEST"
    assert all(".lora_" in name for name in read_state(directory / "policy.pt"))
    plan = resolve(compose(*command("test", *QLORA)))
    ours = load_policy(model_loaders(plan)[0], plan, directory)
    assert sum(isinstance(module, Linear4bit) for module in ours.modules()) == 7 * 3
    base = quantize(load_tiny())
    before = base(IDS).logits
    theirs = peft.PeftModel.from_pretrained(base, str(directory))
    assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
    assert not torch.allclose(before, ours(IDS).logits, atol=1e-4)

    export(directory, tmp_path / "merged", merge=True)  # onto what 4 bits keep of the base
    merged = load_model(ModelPath(str(tmp_path / "merged")), dtype=torch.float32, attn_implementation="sdpa")
    torch.testing.assert_close(merged(IDS).logits, ours(IDS).logits, rtol=1e-4, atol=1e-5)

    policy, reference = load_for_generation(directory)
    assert reference.model is policy.model
    with make_adapter_context(policy.model, policy.adapter)():
        assert torch.equal(policy.model(IDS).logits, ours(IDS).logits)


@pytest.mark.parametrize("reference", ["base", slow("adapter")])
def test_a_run_whose_frozen_weights_were_exchanged_is_refused(reference, run, base, sft, tmp_path):
    settings = (*with_reference(reference), f"model.name_or_path={base}")
    settings += (f"model.archive={sft}",) if reference == "adapter" else ()
    run("run", *settings, "n_examples=4")
    if reference == "adapter":
        run("other", *LORA, "loss=sft", "n_examples=4", "seed=1")
        settings = (*settings, f"model.archive={tmp_path / 'other' / 'LATEST'}")
    else:
        other = loaded(base=base)
        with torch.no_grad():
            other.model.norm.weight.mul_(1.01)
        other.save_pretrained(base)
    with refused(r"the reference or base model has changed since the checkpoint"):
        run("run", *settings, "n_examples=8", "resume=auto")


@pytest.mark.slow
def test_dropout_is_on_in_updates_and_off_in_evaluations(run, tmp_path):
    """The learning rate leaves the weights as they are."""
    short = ("lora=lora", "n_examples=4", "eval_every=4", "warmup_steps=0")
    run("sft", *short, "loss=sft", "lr=0.01")
    for dropout in ("0", "0.3"):
        same = ("lora.reference=adapter", f"model.archive={tmp_path / 'sft'}", "optimizer=SGD", "lr=1e-12")
        run(dropout, *short, *same, f"lora.dropout={dropout}")

    of = {split: [read_metrics(tmp_path / dropout, split) for dropout in ("0", "0.3")] for split in ("train", "eval")}
    assert all(a["loss/eval"] == b["loss/eval"] for a, b in zip(*of["eval"], strict=True))
    assert all(a["rewards_train/margins"] == 0 for a in of["train"][0])
    assert all(b["rewards_train/margins"] != 0 for b in of["train"][1])
