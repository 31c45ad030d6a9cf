"""Adapters are PEFT's: those of others are read or refused, and PEFT gives the same logits with ours."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from support.models import build
from support.runs import GOLDEN

from dpo.errors import InputError
from dpo.models.adapters import (
    CONFIG,
    POLICY,
    REFERENCE,
    WEIGHTS,
    StoredAdapter,
    adapter_weights,
    add_adapter,
    base_weights,
    find_adapter,
    load_adapter,
    make_adapter_config,
    policy_part,
    read_adapter,
    switch,
)
from dpo.models.loading import Weights, check_parts, find_weights
from dpo.models.weights import model_digest
from dpo.settings.files import with_defaults
from dpo.settings.plan import resolve

LLAMA = str(GOLDEN / "tiny-llama")
IDS = torch.arange(20).view(2, 10)


def made_by_peft(folder: Path, family: str = "llama", **settings) -> tuple[Path, torch.Tensor]:
    """The directory of an adapter that PEFT has made, and the logits that PEFT gives with it."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False} | settings
    torch.manual_seed(1)
    model = peft.get_peft_model(build(family), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(IDS).logits


def with_random_adapter(family: str = "llama", targets: str | list[str] = "auto"):
    """A model of ours with an adapter that adds something."""
    model = build(family).eval()
    add_adapter(model, make_adapter_config(4, 12, targets))
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in adapter_weights(model, "policy").values():
            weight.copy_(0.1 * torch.randn(weight.shape))
    return model


def write(model, folder: Path) -> Path:
    """An adapter's files as a checkpoint has them."""
    part = policy_part(model)
    folder.mkdir(parents=True)
    for name, content in part.convert(part.gather(copy=True)).items():
        (folder / name).write_bytes(content)
    return folder


# --- what PEFT has made, and what PEFT reads -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2, tied", "phi3, fused projections"])
def test_an_adapter_that_peft_has_made_gives_the_logits_that_it_gives_there(family, tmp_path):
    folder, expected = made_by_peft(tmp_path, family)
    model, stored = build(family).eval(), read_adapter(folder)
    add_adapter(model, stored.config)
    load_adapter(model, stored)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-6)
        with switch(model, None)():
            assert torch.equal(model(IDS).logits, build(family).eval()(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2, tied"])
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(family, tmp_path):
    model = with_random_adapter(family)
    theirs = peft.PeftModel.from_pretrained(build(family), write(model, tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=0, atol=1e-6)
        merged = theirs.merge_and_unload()
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
        assert (merged(IDS).logits - build(family).eval()(IDS).logits).abs().max() > 0.1


def test_adapters_of_other_sizes_and_layers_stand_beside_each_other(tmp_path):
    folder, expected = made_by_peft(tmp_path, target_modules=["v_proj"], r=2)
    model, stored = with_random_adapter(targets=["q_proj"]), read_adapter(folder)
    with torch.no_grad():
        before = model(IDS).logits
        add_adapter(model, stored.config, name=REFERENCE)
        load_adapter(model, stored, REFERENCE)
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-6)
        with switch(model, "policy")():
            assert torch.equal(model(IDS).logits, before)


def test_a_model_with_adapters_has_its_base_under_the_names_that_it_has_alone():
    alone, weights = build("llama").state_dict(), base_weights(with_random_adapter())
    assert weights.keys() == alone.keys()
    assert all(torch.equal(weights[name], alone[name]) for name in alone)


# --- what cannot be read ---------------------------------------------------------------------------------------------

ODD = {
    "use_dora": ({"use_dora": True}, "use_dora=True"),
    "use_rslora": ({"use_rslora": True}, "use_rslora=True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
    "bias": ({"bias": "all"}, "bias=all"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens.lora_embedding_A"),
}


@pytest.mark.parametrize("what", ODD)
def test_an_adapter_of_another_kind_is_one_sentence(what, tmp_path):
    settings, said = ODD[what]
    folder, _ = made_by_peft(tmp_path, **settings)
    with pytest.raises(InputError, match=rf"{said}.* not supported here: merge it into its base with peft") as raised:
        read_adapter(folder)
    assert "\n" not in str(raised.value)


def test_prompt_tuning_is_no_lora(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(build("llama"), config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="adapter of type PromptTuning; only LORA is supported"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (WEIGHTS, b""),
        (WEIGHTS, b"not safetensors" * 9),
        (WEIGHTS, None),
        (CONFIG, b"{"),
        (CONFIG, b"[1, 2]"),
        (CONFIG, b"\xff\xfe"),
        (CONFIG, b'{"peft_type": "SOMETHING_NEW"}'),
        (CONFIG, b'{"r": 4}'),
    ],
)
def test_a_damaged_adapter_is_one_sentence(name, content, tmp_path):
    folder, _ = made_by_peft(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match="is not an adapter in PEFT's format") as raised:
        read_adapter(folder)
    assert "\n" not in str(raised.value)


def test_an_adapter_that_is_cut_off_is_one_sentence(tmp_path):
    folder, _ = made_by_peft(tmp_path)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(InputError, match="is not an adapter in PEFT's format"):
        read_adapter(folder)


def test_an_adapter_that_does_not_fit_names_what_it_was_trained_on(tmp_path):
    folder, _ = made_by_peft(tmp_path, target_modules=["q_proj", "v_proj"])
    with pytest.raises(InputError, match=r"give lora.target_modules=\[q_proj,v_proj\], or the model that it was"):
        load_adapter(with_random_adapter(), read_adapter(folder))
    with pytest.raises(InputError, match="cannot be adapted in GPTNeoXForCausalLM"):
        add_adapter(build("gpt-neox"), read_adapter(folder).config)


# --- what model.archive names ----------------------------------------------------------------------------------------


def test_the_digest_of_a_reference_adapter_knows_how_it_is_scaled():
    models = [build("llama") for _ in range(3)]
    for model, alpha in zip(models, (8, 8, 16), strict=True):
        add_adapter(model, make_adapter_config(4, alpha, "auto"), name=REFERENCE)
    first, same, other = (model_digest(model, "float32", REFERENCE) for model in models)
    assert first == same != other


def of_run(folder: Path, base: str | None = None) -> Path:
    """A run's directory with an adapter for tiny-llama in LATEST."""
    model = with_random_adapter()
    model.peft_config["policy"].base_model_name_or_path = base or LLAMA
    write(model, folder / "step-8")
    state = policy_part(model).gather(copy=True)
    torch.save({"step_idx": 8, "state": state, "metrics": None}, folder / "step-8/policy.pt")
    (folder / "LATEST").symlink_to("step-8")
    return folder


def settings(**keys):
    return with_defaults({"model": {"name_or_path": LLAMA}, "loss": {"name": "dpo", "beta": 0.1}, **keys})


def weights_of(archive, **lora) -> Weights:
    config = settings(lora=lora) if lora else settings()
    config.model.archive = str(archive)
    return find_weights(resolve(config))


def test_an_adapter_is_named_by_its_run_its_checkpoint_or_its_policy(tmp_path):
    run = of_run(tmp_path / "run")
    for name in (run, run / "LATEST", run / "step-8", run / "step-8" / "policy.pt"):
        base, adapter = Weights.of(str(name))
        assert base is None
        assert adapter.resolve() == run / "step-8"
    assert find_adapter(None) is find_adapter(tmp_path) is None
    assert Weights.of(None) == (None, None)
    assert Weights.of("some/policy.pt") == ("some/policy.pt", None)


def test_the_base_of_an_adapter_may_be_a_policy_which_the_next_run_takes_too(tmp_path):
    sft = tmp_path / "sft" / "policy.pt"
    sft.parent.mkdir()
    sft.touch()
    run = of_run(tmp_path / "run", str(sft))
    assert Weights.of(str(run)) == (str(sft), run / "LATEST")

    sft.unlink()
    with pytest.raises(InputError, match=rf"^{sft}, the base of {run}/LATEST, is not there: name it in .*{CONFIG}$"):
        Weights.of(str(run))
    (run / "LATEST" / CONFIG).write_text("{")
    with pytest.raises(InputError, match=r"LATEST is not an adapter in PEFT's format: .*Expecting property name"):
        Weights.of(str(run))


def test_an_adapter_without_a_place_or_a_place_without_one_is_one_sentence(tmp_path):
    run, whole = of_run(tmp_path / "run"), tmp_path / "policy.pt"
    whole.touch()
    for archive, lora, said in (
        (
            run,
            {},
            r"is an adapter: choose lora=lora lora.reference=adapter, or merge it first: ",
        ),
        (run, {"name": "lora", "reference": "base"}, r"choose lora.reference=adapter, or merge it first"),
        (whole, {"name": "lora", "reference": "adapter"}, r"policy.pt is not an adapter, which lora.reference=adapter"),
        (tmp_path / "no", {"name": "lora", "reference": "adapter"}, r"model.archive=.*no does not exist$"),
    ):
        with pytest.raises(InputError, match=said):
            weights_of(archive, **lora)
    assert weights_of(run, name="lora", reference="adapter").adapter == run / "LATEST"
    assert weights_of(whole, name="lora", reference="base") == (str(whole), None)


def test_an_adapter_of_another_size_is_refused_with_what_to_give(tmp_path):
    run = of_run(tmp_path / "run")
    for lora, said in (
        ({"r": 8, "alpha": 12}, r"is an adapter of another size: give lora.r=4$"),
        ({"r": 8, "alpha": 16}, r"give lora.r=4 lora.alpha=12$"),
        ({"r": 4, "alpha": 12, "target_modules": ["q_proj"]}, r"give lora.target_modules=\[\S*down_proj,"),
    ):
        config = settings(lora={"name": "lora", "reference": "adapter", **lora})
        config.model.archive = str(run)
        with pytest.raises(InputError, match=said):
            check_parts(resolve(config))


def test_each_name_of_layers_has_to_be_there():
    with pytest.raises(InputError, match=r"names layers that LlamaForCausalLM has not: nonsense, other$"):
        add_adapter(build("llama"), make_adapter_config(4, 8, ["q_proj", "other", "nonsense"]), name=POLICY, seed=0)


def test_names_of_layers_are_advised_only_if_they_would_help():
    """PEFT may adapt some layers of a name alone: the same names again would be refused again."""
    model = build("llama")
    add_adapter(model, make_adapter_config(4, 8, ["q_proj", "v_proj"]), name=POLICY, seed=0)
    whole = {name: tensor.detach().clone() for name, tensor in adapter_weights(model, POLICY).items()}
    first = {name: tensor for name, tensor in whole.items() if ".layers.0." in name}
    for weights, said in (
        ({name: tensor for name, tensor in whole.items() if "q_proj" in name}, r"give lora.target_modules=\[q_proj\],"),
        (first, r"give lora.target_modules=\[model.layers.0.self_attn.q_proj,model.layers.0.self_attn.v_proj\],"),
        ({name: tensor[:, :1] for name, tensor in whole.items()}, r"give the model that it was trained on$"),
    ):
        with pytest.raises(InputError, match=said):
            load_adapter(
                model, StoredAdapter(Path("DIR"), make_adapter_config(4, 8, r".*layers\.0.*(q|v)_proj"), weights)
            )


def test_a_checkpoint_names_its_base_by_a_path_that_stays(tmp_path):
    """Not by LATEST, which moves, nor relative to a directory."""
    from dpo.models.loading import load_policy

    sft = tmp_path / "sft"
    (sft / "step-8").mkdir(parents=True)
    (sft / "step-8" / "policy.pt").touch()
    (sft / "LATEST").symlink_to("step-8")
    config = settings(lora={"name": "lora", "r": 4, "alpha": 12})
    for archive, base in ((None, LLAMA), (str(sft), str(sft / "step-8" / "policy.pt"))):
        config.model.archive = archive
        model, _ = load_policy(build("llama"), resolve(config), rank=0, resume_from=None)
        assert json.loads(policy_part(model).convert({})[CONFIG])["base_model_name_or_path"] == base
