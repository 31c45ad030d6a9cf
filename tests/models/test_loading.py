"""Weights that `model.archive` names, of a policy or an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.models import build
from support.runs import GOLDEN, compose, run_here
from transformers import AutoModelForCausalLM

from dpo.errors import InputError
from dpo.models.adapters import CONFIG, POLICY, REFERENCE, WEIGHTS, adapter_weights, policy_part
from dpo.models.loading import check_parts, find_weights, load_policy, model_loaders, notes_on_base
from dpo.models.weights import Weights, locate_weights
from dpo.settings.plan import resolve

BASE = GOLDEN / "tiny-llama"
ALIKE = ("lora.r=4", "lora.alpha=8", "lora.target_modules=[q_proj,v_proj]")
TO_ADAPTER = ("lora=lora", "lora.reference=adapter", *ALIKE)


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(BASE)


@pytest.fixture
def adapter(base, tmp_path):
    """Make a run whose LATEST is an adapter that PEFT wrote."""

    def make() -> Path:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **settings))
        model.save_pretrained(tmp_path / "run" / "step-8")
        model.unload()
        (tmp_path / "run" / "step-8" / "policy.pt").touch()
        (tmp_path / "run" / "LATEST").symlink_to("step-8")
        return tmp_path / "run"

    return make


@pytest.fixture
def check(command):
    """Check models as a dry run does; returns config and plan."""

    def check(*overrides: str) -> tuple[Any, Any]:
        config = compose(*command("run", *overrides))
        plan = resolve(config)
        check_parts(plan)
        return config, plan

    return check


def test_an_adapter_is_named_by_its_run_its_checkpoint_or_its_policy(adapter, tmp_path):
    run = adapter()
    for name in (run, run / "LATEST", run / "step-8", run / "step-8" / "policy.pt"):
        archive, found, base = locate_weights(name)
        assert (archive, found.resolve(), base) == (None, run / "step-8", str(BASE))
    (tmp_path / "policy.pt").touch()
    assert locate_weights(tmp_path) == Weights(tmp_path / "policy.pt")


def test_an_adapter_that_peft_made_is_policy_and_reference(adapter, check):
    given = adapter()
    _, plan = check(*TO_ADAPTER, f"model.archive={given}")
    policy, _ = load_policy(model_loaders(plan)[0], plan, rank=0, resume_from=None)
    theirs = load_file(given / "LATEST" / WEIGHTS)
    for name in (POLICY, REFERENCE):
        ours = {f"base_model.model.{key}": weight for key, weight in adapter_weights(policy, name).items()}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert {weight.requires_grad for weight in ours.values()} == {name == POLICY}


def test_an_adapter_goes_with_the_settings_that_the_refusals_name(adapter, check):
    archive = f"model.archive={adapter()}"
    for overrides, said in (
        ((), r"choose lora=lora lora.reference=adapter, or merge it first: python -m scripts\.export \S+ DIR --merge"),
        (("loss=sft",), "is an adapter: choose lora=lora, or merge it first"),
        (("lora=lora", *ALIKE), "is an adapter: choose lora=lora lora.reference=adapter, or merge"),
        (("lora=lora", "lora.reference=adapter"), "is an adapter of another size: give lora.r=4 lora.alpha=8"),
        (
            (*TO_ADAPTER, "lora.target_modules=auto"),
            r"differs in .*: give lora.target_modules as in its adapter_config",
        ),
        ((*TO_ADAPTER, f"model.archive={BASE}"), "is neither a policy.pt nor a directory that"),
    ):
        with pytest.raises(InputError, match=said):
            check(archive, *overrides)
    check(*TO_ADAPTER, archive)
    _, plan = check("loss=sft", "lora=lora", *ALIKE, archive)
    assert find_weights(plan).adapter is not None


def test_an_adapter_of_another_base_than_the_model_gets_a_warning(adapter, check, tmp_path):
    given = adapter()
    config, plan = check(*TO_ADAPTER, f"model.archive={given}")
    assert notes_on_base(plan) == []
    config.model.name_or_path = str(tmp_path)
    [line] = notes_on_base(resolve(config))
    assert line.startswith(f"warning: model.archive={given} was trained on {BASE}, and model.name_or_path={tmp_path}: ")


def test_a_policy_may_be_the_base_of_an_adapter_and_has_to_stay(adapter, check, tmp_path):
    sft, run = tmp_path / "sft" / "policy.pt", adapter()
    sft.parent.mkdir()
    torch.save({"step_idx": 8, "state": AutoModelForCausalLM.from_pretrained(BASE).state_dict()}, sft)
    config = run / "LATEST" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(sft)}))
    _, plan = check(*TO_ADAPTER, f"model.archive={run}")
    assert find_weights(plan) == Weights(sft, run / "LATEST")
    sft.unlink()
    with pytest.raises(InputError, match=f"model.archive={sft} does not exist"):
        check(*TO_ADAPTER, f"model.archive={run}")


def test_a_checkpoint_names_its_base_by_a_path_that_stays(command, tmp_path):
    """Not by LATEST, which moves."""
    sft = tmp_path / "sft"
    (sft / "step-8").mkdir(parents=True)
    (sft / "step-8" / "policy.pt").touch()
    (sft / "LATEST").symlink_to("step-8")
    plan = resolve(compose(*command("run", "lora=lora", f"model.archive={sft}")))
    model, _ = load_policy(build("llama"), plan, rank=0, resume_from=None)
    base = json.loads(policy_part(model).convert({})[CONFIG])["base_model_name_or_path"]
    assert base == str(sft / "step-8" / "policy.pt")


def test_a_quantized_model_is_refused_before_the_data_is_read(command, tmp_path):
    model = shutil.copytree(BASE, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"load_in_8bit": True}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"is quantized already \(its config\.json has a quantization_config\)"):
        run_here(command("run", f"model.name_or_path={model}", "dataset_sources.hh=/nowhere"))


@pytest.mark.parametrize(("weights", "loads"), [("simpo", False), ("dpo", True)])
def test_a_mix_loads_a_reference_if_one_of_its_losses_needs_it(weights, loads, command):
    plan = resolve(compose(*command("run", "loss=mix", f"loss.weights.{weights}=0.8", "loss.weights.sft=0.1")))
    assert (model_loaders(plan)[1] is not None) == loads
