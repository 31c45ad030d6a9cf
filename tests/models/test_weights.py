"""Archives of ours and of the published reference load, strictly, as data."""

from pathlib import Path

import pytest
import torch
from support import models
from support.models import IDS
from support.pytests import refused
from support.runs import Bomb

from dpo.checkpoint.files import set_link, write_checkpoint
from dpo.models.paths import find_archive
from dpo.models.pretrained import load_archive

FAMILIES = ("gpt-neox", "gpt2, tied", "llama")


def build(family: str, seed: int = 0) -> torch.nn.Module:
    model = models.build(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * seed)
    return model


def as_in_2023(family: str, state: dict) -> dict:
    """The state dict that transformers 4.29 had of the same model."""
    causal, inv_freq = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril(), torch.rand(4)
    state = dict(state)
    for n in range(2):
        if family == "gpt-neox":
            layer = f"gpt_neox.layers.{n}.attention"
            state |= {f"{layer}.bias": causal, f"{layer}.masked_bias": torch.tensor(-1e9)}
            state |= {f"{layer}.rotary_emb.inv_freq": inv_freq}
        elif family == "gpt2, tied":
            layer = f"transformer.h.{n}.attn"
            state |= {f"{layer}.bias": causal.byte(), f"{layer}.masked_bias": torch.tensor(-1e4)}
        else:
            state |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": inv_freq}
    if family == "gpt-neox":
        state["embed_out.weight"] = state.pop("lm_head.weight")
    elif family == "gpt2, tied":
        del state["lm_head.weight"]  # stored once, as safetensors keeps it
    return state


def archive(path, state) -> str:
    torch.save({"step_idx": 64, "state": state, "metrics": {"loss/eval": 1.0}}, path)
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_archive_of_2023_gives_the_logits_of_the_model_that_wrote_it(family, tmp_path):
    trained, fresh = build(family, seed=1), build(family, seed=2)

    load_archive(fresh, archive(tmp_path / "policy.pt", as_in_2023(family, trained.state_dict())))

    assert not torch.equal(build(family, seed=2)(IDS).logits, trained(IDS).logits)
    assert torch.equal(fresh(IDS).logits, trained(IDS).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.extra.weight": torch.zeros(1)}, r"model\.extra\.weight is not in the model"),
        ({"lm_head.weight": torch.zeros(102, 32)}, r"lm_head\.weight has another shape"),
        ({"lm_head.weight": None}, r"it lacks lm_head\.weight"),
    ],
)
def test_another_architecture_is_refused_and_the_model_is_left_as_it_was(change, said, tmp_path):
    model, state = build("llama", seed=2), build("llama", seed=1).state_dict() | change
    wrong = {name: tensor for name, tensor in state.items() if tensor is not None}
    with refused(rf"does not fit the model \(LlamaForCausalLM\): {said}"):
        load_archive(model, archive(tmp_path / "policy.pt", wrong))
    assert torch.equal(model(IDS).logits, build("llama", seed=2)(IDS).logits)


@pytest.mark.parametrize("content", [[1], {"state": {"lm_head.weight": "text"}}, {"state": Bomb(Path("executed"))}])
def test_a_file_that_is_no_archive_is_refused_and_no_code_in_it_is_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "policy.pt")
    with refused(r"policy\.pt (is not a policy\.pt|is damaged|has no 'state')"):
        load_archive(build("llama"), tmp_path / "policy.pt")
    assert not (tmp_path / "executed").exists()


def test_an_archive_may_be_named_by_its_file_its_directory_or_its_run(tmp_path):
    run = tmp_path / "run"
    write_checkpoint(run / "step-64", {"policy": {}}.items(), step_idx=64, metrics=None, facts={})
    set_link(run / "LATEST", run / "step-64")
    for name in (run / "step-64" / "policy.pt", run / "step-64", run / "LATEST", run):
        assert find_archive(str(name)).resolve() == run / "step-64" / "policy.pt"
    for nothing, said in ((tmp_path, "is neither a policy.pt nor a directory that"), (run / "no", "does not exist")):
        with refused(f"{nothing} {said}"):
            find_archive(str(nothing))
