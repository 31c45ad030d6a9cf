"""Weights that `model.archive` names, of a policy or an adapter."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, GROUPED, build, publish
from support.pytests import refused, slow
from support.runs import TINY, change_json, compose, run_here
from transformers import AutoModelForCausalLM

from dpo.checkpoint.files import write_state
from dpo.models.adapters import CONFIG, POLICY, REFERENCE, WEIGHTS, adapter_weights, policy_part
from dpo.models.loading import check_parts, find_start, load_policy, model_loaders, notes_on_base
from dpo.models.paths import ModelPath, locate_weights
from dpo.models.pretrained import load_model, model_digest
from dpo.models.published import _find_box
from dpo.parallel.sharding import list_ties
from dpo.settings.plan import Plan, resolve

ALIKE = ("lora.r=4", "lora.alpha=8", "lora.target_modules=[q_proj,v_proj]")
TO_ADAPTER = ("lora=lora", "lora.reference=adapter", *ALIKE)


@pytest.fixture
def adapter(run_dir) -> Path:
    """A run whose LATEST is an adapter that PEFT wrote."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(TINY)
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **settings))
    model.save_pretrained(run_dir / "step-8")
    (run_dir / "step-8" / "policy.pt").touch()
    (run_dir / "LATEST").symlink_to("step-8")
    return run_dir


@pytest.fixture
def check(command) -> Callable[..., Plan]:
    """Check models as a dry run does; returns the plan."""

    def check(*overrides: str) -> Plan:
        plan = resolve(compose(*command("run", *overrides)))
        check_parts(plan)
        return plan

    return check


def test_an_adapter_is_named_by_its_run_its_checkpoint_or_its_policy(adapter, tmp_path):
    for name in ("", "LATEST", "step-8", "step-8/policy.pt"):
        assert locate_weights(adapter / name) == ModelPath(str(TINY), adapter=adapter / "step-8")
    (tmp_path / "policy.pt").touch()
    assert locate_weights(tmp_path) == ModelPath(archive=tmp_path / "policy.pt")


def test_an_adapter_that_peft_made_is_policy_and_reference(adapter, check):
    plan = check(*TO_ADAPTER, f"model.archive={adapter}")
    policy = load_policy(model_loaders(plan)[0], plan, None)
    theirs = load_file(adapter / "LATEST" / WEIGHTS)
    for name in (POLICY, REFERENCE):
        ours = {f"base_model.model.{key}": weight for key, weight in adapter_weights(policy, name).items()}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert {weight.requires_grad for weight in ours.values()} == {name == POLICY}


def test_an_adapter_goes_with_the_settings_that_the_refusals_name(adapter, check):
    archive = f"model.archive={adapter}"
    for overrides, said in (
        ((), r"set lora=lora lora.reference=adapter, or merge it first: dpo export \S+ DIR --merge"),
        (("loss=sft",), "is an adapter: set lora=lora, or merge it first"),
        (("lora=lora", *ALIKE), "is an adapter: set lora=lora lora.reference=adapter, or merge"),
        (("lora=lora", "lora.reference=adapter"), "is an adapter of another size: set lora.r=4 lora.alpha=8"),
        (
            (*TO_ADAPTER, "lora.target_modules=auto"),
            r"differs in .*: set lora.target_modules as in its adapter_config",
        ),
    ):
        with refused(said):
            check(archive, *overrides)
    check(*TO_ADAPTER, archive)
    plan = check("loss=sft", "lora=lora", *ALIKE, archive)
    assert find_start(plan).adapter is not None


def test_an_adapter_of_another_base_than_the_model_gets_a_warning(adapter, check, tmp_path):
    plan = check(*TO_ADAPTER, f"model.archive={adapter}")
    assert notes_on_base(plan) == []
    [line] = notes_on_base(plan.change("model.name_or_path", str(tmp_path)))
    assert line == f"warning: model.archive={adapter} was trained on {TINY}, and model.name_or_path={tmp_path}"


def test_a_policy_may_be_the_base_of_an_adapter_and_has_to_stay(adapter, check, tmp_path):
    sft, run = tmp_path / "sft" / "policy.pt", adapter
    sft.parent.mkdir()
    torch.save({"step_idx": 8, "state": AutoModelForCausalLM.from_pretrained(TINY).state_dict()}, sft)
    change_json(run / "LATEST" / CONFIG, base_model_name_or_path=str(sft))
    plan = check(*TO_ADAPTER, f"model.archive={run}")
    assert find_start(plan) == ModelPath(archive=sft, adapter=run / "step-8")
    sft.unlink()
    with refused(f"{sft} does not exist"):
        check(*TO_ADAPTER, f"model.archive={run}")


def test_a_checkpoint_names_its_base_by_a_path_that_stays(command, tmp_path):
    """LATEST would move."""
    sft = tmp_path / "sft"
    (sft / "step-8").mkdir(parents=True)
    (sft / "step-8" / "policy.pt").touch()
    (sft / "LATEST").symlink_to("step-8")
    plan = resolve(compose(*command("run", "lora=lora", f"model.archive={sft}")))
    model = load_policy(build("llama"), plan, None)
    base = json.loads(policy_part(model).convert({})[CONFIG])["base_model_name_or_path"]
    assert base == str(sft / "step-8" / "policy.pt")


def test_a_quantized_model_is_refused_before_the_data_is_read(command, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    change_json(model / "config.json", quantization_config={"load_in_8bit": True})
    with refused("is quantized: use the model that it was made from"):
        run_here(command("run", f"model.name_or_path={model}", "dataset_sources.hh=/nowhere"))


@pytest.mark.parametrize(
    "family",
    [
        *(name if name.startswith("gpt") else slow(name) for name in FAMILIES),
        pytest.param(lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4), id="experts"),
        slow(
            lambda: transformers.Lfm2Config(**GROUPED, full_attn_idxs=[0])
        ),  # with convolutions, whose weight is (n, 1, 3)
    ],
)
@pytest.mark.parametrize("kind", ["files", slow("archive")])
def test_parameters_that_stay_in_their_files_are_read_as_a_whole_model_has_them(family, kind, tmp_path):
    model = build(family, dtype=torch.bfloat16)
    source = ModelPath(str(publish(tmp_path, model)))
    if kind == "archive":
        write_state(tmp_path / "run" / "policy.pt", {"state": model.state_dict()})
        source = source._replace(archive=tmp_path / "run" / "policy.pt")
    whole = load_model(source, dtype=torch.float32)
    left = load_model(source, dtype=torch.float32, stays_in_files=True)
    assert model_digest(left, "float32") == model_digest(whole, "float32")
    assert list_ties(left) == list_ties(whole)
    assert left.generation_config == whole.generation_config
    assert {parameter.untyped_storage().nbytes() for parameter in left.parameters()} == {4}  # one number, in float32


def test_a_head_that_differs_from_the_embedding_is_not_tied_though_the_config_says_so(tmp_path):
    model = build("llama, tied")
    state = model.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    source = ModelPath(str(publish(tmp_path, model)))
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    whole = load_model(source, dtype=torch.bfloat16)
    left = load_model(source, dtype=torch.bfloat16, stays_in_files=True)
    assert list_ties(left) == list_ties(whole) == {name: name for name in state}
    assert model_digest(left, "bfloat16") == model_digest(whole, "bfloat16")


def test_experts_of_several_dtypes_are_loaded_as_a_whole_and_the_log_says_so(tmp_path, capsys):
    model = build(lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4), dtype=torch.bfloat16)
    source = ModelPath(str(publish(tmp_path, model)))
    state = load_file(tmp_path / "model.safetensors")
    name = next(name for name in state if "experts.1." in name)
    save_file({**state, name: state[name].float()}, tmp_path / "model.safetensors", {"format": "pt"})
    left = load_model(source, dtype=torch.float32, stays_in_files=True)
    assert model_digest(left, "float32") == model_digest(load_model(source, dtype=torch.float32), "float32")
    assert f"{tmp_path} is loaded as a whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cut", "box"),
    [
        (lambda whole: whole[2, 1:3], ((2, 1, 0), (1, 2, 4))),
        (lambda whole: whole[:, :1, :2], ((0, 0, 0), (4, 1, 2))),
        (lambda whole: whole.transpose(0, 2), None),  # of the same shape
        (lambda whole: whole.flatten(1), None),
        (lambda whole: whole[0, 0, 0], ((0, 0, 0), (1, 1, 1))),
    ],
)
def test_a_part_of_a_weight_is_found_unless_it_is_not_a_box(cut, box):
    whole = torch.empty(4, 3, 4)
    assert _find_box(cut(whole), whole) == box


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 1, 3), (5, 1)])
def test_a_whole_weight_is_a_box_of_any_shape(shape):
    assert _find_box(torch.empty(shape), torch.empty(shape)) == ((0,) * len(shape), shape)
