"""An adapter that is given: made by PEFT, it is taken if it fits, else one sentence says what to give instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.runs import GOLDEN, compose
from transformers import AutoModelForCausalLM

import train  # noqa: F401  (registers the config's resolvers)
from dpo.errors import InputError
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights
from dpo.models.loading import check_parts, find_weights, load_policy, model_loaders, notes_on_base
from dpo.settings.plan import resolve

BASE = GOLDEN / "tiny-llama"
ALIKE = ("lora.r=4", "lora.alpha=8", "lora.target_modules=[q_proj,v_proj]")
TO_ADAPTER = ("lora=lora", "lora.reference=adapter", *ALIKE)


@pytest.fixture
def adapter(tmp_path):
    """Makes a directory as PEFT writes it, of an adapter that adds something."""

    def make(**settings: Any) -> Path:
        plain = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        base = AutoModelForCausalLM.from_pretrained(BASE)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(base, peft.LoraConfig(**{"init_lora_weights": False, **plain, **settings}))
        model.save_pretrained(tmp_path / "given")
        return tmp_path / "given"

    return make


@pytest.fixture
def check(command):
    """What a dry run checks of the models, and the config and plan."""

    def check(*overrides: str) -> tuple[Any, Any]:
        config = compose(*command("run", *overrides))
        plan = resolve(config)
        check_parts(plan)
        return config, plan

    return check


def test_an_adapter_that_peft_made_is_policy_and_reference(adapter, check):
    given = adapter()
    _, plan = check(*TO_ADAPTER, f"model.archive={given}")
    policy, _ = load_policy(model_loaders(plan)[0], plan, rank=0, resume_from=None)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), given, adapter_name="given")
    theirs = {name.removeprefix("base_model.model."): w for name, w in adapter_weights(theirs, "given").items()}
    for name in (POLICY, REFERENCE):
        ours = adapter_weights(policy, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert {weight.requires_grad for weight in ours.values()} == {name == POLICY}


def test_sft_goes_on_with_an_adapter_whatever_the_reference_would_be(adapter, check):
    given = adapter()
    _, plan = check("loss=sft", "lora=lora", *ALIKE, f"model.archive={given}")
    assert find_weights(plan).adapter == given


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            (),
            r"choose lora=lora lora.reference=adapter, or merge it first: python -m scripts\.export \S+ DIR --merge",
        ),
        (("loss=sft",), r"is an adapter: choose lora=lora, or merge it first"),
        (("lora=lora", *ALIKE), "the reference would be its base, without it: choose lora.reference=adapter, or merge"),
        (("lora=lora", "lora.reference=adapter"), "is an adapter of another size: give lora.r=4 lora.alpha=8"),
        ((*TO_ADAPTER, "lora.target_modules=auto"), r"differs in .*: give lora.target_modules=\[q_proj,v_proj\]"),
        (TO_ADAPTER, None),
    ],
)
def test_what_to_give_beside_an_adapter_is_said(overrides, expected, adapter, check):
    archive = f"model.archive={adapter()}"
    if expected is None:
        check(*overrides, archive)
        return
    with pytest.raises(InputError, match=expected):
        check(*overrides, archive)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"target_modules": r".*\.(q|v)_proj"}, "q_proj,v_proj"),
        (
            {"layers_to_transform": [1], "layers_pattern": "layers"},
            "model.layers.1.self_attn.q_proj,model.layers.1.self_attn.v_proj",
        ),
    ],
)
def test_the_layers_to_give_for_an_adapter_are_accepted(settings, names, adapter, check):
    archive = f"model.archive={adapter(**settings)}"
    with pytest.raises(InputError, match=rf"give lora.target_modules=\[{names}\], or the model that it was trained on"):
        check(*TO_ADAPTER, "lora.target_modules=auto", archive)
    check(*TO_ADAPTER, f"lora.target_modules=[{names}]", archive)


def test_what_is_no_adapter_cannot_be_the_reference(check):
    with pytest.raises(
        InputError, match=r"is not an adapter, which lora.reference=adapter needs: .* lora.reference=base"
    ):
        check(*TO_ADAPTER, f"model.archive={BASE}")


def test_an_adapter_of_another_base_than_the_model_gets_a_line(adapter, check, tmp_path):
    given = adapter()
    config, _ = check(*TO_ADAPTER, f"model.archive={given}")
    assert notes_on_base(resolve(config)) == []
    config.model.name_or_path = str(tmp_path)
    [line] = notes_on_base(resolve(config))
    assert line.startswith(f"warning: {given} was trained on {BASE}, and model.name_or_path={tmp_path}: make sure")


@pytest.mark.parametrize(
    ("loss", "loads"),
    [
        (("loss=simpo",), False),
        (("loss=orpo",), False),
        (("loss=mix", "loss.weights.simpo=1", "loss.weights.orpo=0.5", "loss.weights.sft=0.1"), False),
        (("loss=mix", "loss.weights.dpo=0.8", "loss.weights.bco=0.2"), True),
    ],
)
def test_a_loss_without_a_reference_loads_none(loss, loads, command):
    assert (model_loaders(resolve(compose(*command("run", *loss))))[1] is not None) == loads
