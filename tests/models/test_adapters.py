"""Adapters are PEFT's: both ways the logits are the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import COMMON, GROUPED, IDS, assert_near, build, list_examples, save_adapter
from support.pytests import refused
from support.runs import change_json

from dpo.commands.export import main as export_by_hand
from dpo.models import logprobs
from dpo.models.adapters import (
    CONFIG,
    POLICY,
    REFERENCE,
    WEIGHTS,
    AdaptedLayer,
    adapter_weights,
    add_adapter,
    base_weights,
    load_adapter,
    make_adapter_context,
    policy_part,
    read_adapter,
    seed_dropout,
)
from dpo.models.layouts import SharedPrefix
from dpo.models.pretrained import checkpoint_activations, describe_model


@pytest.fixture
def made_by_peft(tmp_path) -> Path:
    save_adapter(tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    return tmp_path / "adapter"


def build_adapted(family: str | Callable = "llama", targets: str | list[str] = "auto"):
    """A model of ours with an adapter that adds something."""
    model = build(family).eval()
    add_adapter(model, 4, 12, targets)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in adapter_weights(model, "policy").values():
            weight.copy_(0.1 * torch.randn(weight.shape))
    return model


mixtral = partial(transformers.MixtralConfig, **GROUPED)
falcon = partial(transformers.FalconConfig, **COMMON)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2, tied", mixtral, falcon])
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(family, tmp_path):
    model = build_adapted(family)
    part = policy_part(model)
    for name, content in part.convert(part.gather()).items():
        (tmp_path / name).write_bytes(content)
    theirs = peft.PeftModel.from_pretrained(build(family), tmp_path).eval()
    assert_near(theirs(IDS).logits, model(IDS).logits)
    assert_near(theirs.merge_and_unload()(IDS).logits, model(IDS).logits)
    assert (model(IDS).logits - build(family).eval()(IDS).logits).abs().max() > 0.1


def test_auto_adapts_linear_layers_alone_beside_experts_and_routers():
    shared = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}
    base, model = (make(lambda: transformers.Qwen2MoeConfig(**GROUPED, num_experts=4, **shared)).eval()
                   for make in (build, build_adapted))  # fmt: skip
    layers = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    named = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"}
    assert {name.rpartition(".")[2] for name in layers} == named
    assert all(isinstance(base.get_submodule(name), torch.nn.Linear) for name in layers)
    model(IDS).logits.sum().backward()
    assert all(weight.grad is not None for weight in adapter_weights(model, POLICY).values())
    assert (model(IDS).logits - base(IDS).logits).abs().max() > 1e-3


def test_a_model_without_linear_layers_has_nothing_to_adapt():
    model = build("llama")
    model.model.layers = torch.nn.ModuleList()
    with refused("lora.target_modules=auto finds no linear layers in LlamaForCausalLM"):
        add_adapter(model, 4, 8, "auto")


@torch.no_grad()
def test_adapters_of_other_sizes_and_layers_stand_beside_each_other_on_the_plain_base(tmp_path):
    expected, _ = save_adapter(tmp_path, target_modules=["v_proj"], r=2)
    model, alone = build_adapted(targets=["q_proj"]), build("llama").state_dict()
    before = model(IDS).logits
    load_adapter(model, tmp_path, REFERENCE)
    assert_near(model(IDS).logits, expected)
    with make_adapter_context(model, "policy")():
        assert torch.equal(model(IDS).logits, before)
    weights = base_weights(model)
    assert weights.keys() == alone.keys()
    assert all(torch.equal(weights[name], alone[name]) for name in alone)


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 2}),
        ("init_lora_weights", "pissa_niter_4"),
        ("peft_type", "PROMPT_TUNING"),
        ("modules_to_save", ["embed_tokens"]),
    ],
)
def test_an_adapter_of_another_kind_is_refused(key, value, made_by_peft):
    change_json(made_by_peft / CONFIG, **{key: value})
    with refused(rf"{key}=.* not supported here: merge it into its base with peft"):
        read_adapter(made_by_peft)


def test_weights_of_other_layers_than_linear_ones_are_refused(made_by_peft):
    weights = load_file(made_by_peft / WEIGHTS) | {"base_model.model.model.wte.lora_embedding_A": torch.ones(4, 101)}
    save_file(weights, made_by_peft / WEIGHTS)
    with refused(r"wte\.lora_embedding_A, which is not supported here"):
        read_adapter(made_by_peft)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (WEIGHTS, b"not safetensors" * 9),
        (CONFIG, b"[1, 2]"),
        (CONFIG, b'{"peft_type": "LORA", "r": 1.5, "lora_alpha": 8}'),
        (CONFIG, b'{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}'),
    ],
)
def test_a_damaged_adapter_is_one_sentence(name, content, made_by_peft, tmp_path, capsys):
    (made_by_peft / name).write_bytes(content)
    assert export_by_hand([str(made_by_peft), str(tmp_path / "out"), "--merge", "--model=x/y"]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: {made_by_peft} is not an adapter in PEFT's format: ")


def test_an_adapter_that_does_not_fit_is_refused_with_what_is_absent(made_by_peft):
    with refused(rf"{made_by_peft} names layers that are not in GPTNeoX\S+: model.layers.0."):
        load_adapter(build("gpt-neox"), made_by_peft)
    with refused("names layers that are not in LlamaForCausalLM: other"):
        add_adapter(build("llama"), 4, 8, ["q_proj", "other"])
    for family, layer in (("llama", "embed_tokens"), ("llama, tied", "lm_head")):
        with refused("is not linear, is the scalar head, or is tied to the embedding"):
            build_adapted(family, targets=[layer])
    stored = load_file(made_by_peft / WEIGHTS)
    weights = {name: torch.ones(4, 9) if "lora_A" in name else tensor for name, tensor in stored.items()}
    save_file(weights, made_by_peft / WEIGHTS)
    with refused(r"does not fit .*, which differs in .*lora_A.*: set lora\.target_modules"):
        load_adapter(build("llama"), made_by_peft)


# --- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapted_layer_has_the_values_and_gradients_of_the_formula(dtype, p):
    """W x + B A dropout(x) * alpha / r; dropout scales what it keeps by 1 / (1 - p)."""
    torch.manual_seed(0)
    layer = AdaptedLayer(torch.nn.Linear(32, 24, dtype=dtype))
    layer.add(POLICY, 4, 8, dropout=p, generator=torch.Generator())
    layer.in_use = POLICY
    a, b = (part[POLICY].weight for part in (layer.lora_A, layer.lora_B))
    assert a.dtype == b.dtype == torch.float32  # whatever the base's is
    b.data = torch.randn(24, 4)
    x = torch.randn(16, 12, 32).to(dtype).requires_grad_()
    seed_dropout(5)
    y = layer(x)
    seed_dropout(5)
    seen = torch.nn.functional.dropout(x, p)
    assert (seen == 0).double().mean().item() == pytest.approx(p, abs=0.02)
    expected = layer.base_layer(x) + seen @ a.to(dtype).T @ b.to(dtype).T * 2
    gradient = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(output, (x, a, b), gradient) for output in (y, expected))
    limit = 0.02 if dtype == torch.bfloat16 else 1e-6
    for mine, its in zip((y, *ours), (expected, *theirs), strict=True):
        assert (mine - its).norm() < limit * its.norm()


def adapt_llama(targets: str | list[str] = "auto"):
    """A tiny Llama whose policy's adapter drops, and whose reference's does not; neither is zero."""
    model = build("llama", dtype=torch.float64)
    for name, dropout in ((REFERENCE, 0), (POLICY, 0.3)):
        add_adapter(model, 4, 8, targets, name=name, dropout=dropout)
        for weight in adapter_weights(model, name).values():
            weight.data = 0.1 * torch.randn_like(weight)
    return model.train()


@torch.no_grad()
def test_only_the_policys_adapter_drops_in_train_mode_and_anew_in_each_update():
    model = adapt_llama()

    def find_logits(*numbers: int, name: str | None = POLICY) -> torch.Tensor:
        seed_dropout(*numbers)
        with make_adapter_context(model, name)():
            return model(IDS).logits

    first = find_logits(0, 1, 0)
    assert torch.equal(find_logits(0, 1, 0), first)
    for other in ((0, 2, 0), (0, 1, 1), (1, 1, 0)):  # another update, process, seed
        assert not torch.equal(find_logits(*other), first)
    for name in (REFERENCE, None):
        assert torch.equal(find_logits(0, 1, 0, name=name), find_logits(0, 2, 0, name=name))
    model.eval()
    assert torch.equal(find_logits(0, 1, 0), find_logits(0, 2, 0))


def test_activations_and_logits_that_are_computed_again_drop_alike(monkeypatch):
    """The gradient is the slope of the loss, which it is not if the backward pass draws other masks."""
    model = adapt_llama(["q_proj", "down_proj", "lm_head"])
    layout = SharedPrefix({"full_attention": None}, max_length=32)
    [microbatch] = layout.split(list_examples(rows=4), 1)
    checkpoint_activations(model)
    model.enable_input_require_grads()
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", {"cpu": 2**9})

    def find_loss() -> torch.Tensor:
        seed_dropout(0)
        return layout.forward(model, microbatch.inputs).logps.sum()

    find_loss().backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    slope = sum(parameter.grad.double().pow(2).sum() for parameter in trained).sqrt()
    losses = []
    for step in (-5e-3, 1e-2):
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(parameter.grad, alpha=step / slope.item())
            losses.append(find_loss())
    assert (losses[1] - losses[0]).item() / 1e-2 == pytest.approx(slope.item(), rel=0.01)


def test_experts_without_an_adapter_are_said_with_their_share():
    experts = {"num_experts": 4, "moe_intermediate_size": 16}
    model = build(lambda: transformers.Qwen3MoeConfig(**GROUPED, **experts, head_dim=8), on_meta=True)
    n_all = sum(parameter.numel() for parameter in model.parameters())
    n_experts = 2 * 4 * 3 * 32 * 16  # two layers of four experts, each with gate, up and down
    assert describe_model(model, max_length=8) == []
    add_adapter(model, 4, 8, "auto")
    assert describe_model(model, max_length=8)[1:] == [
        f"warning: the experts, {round(100 * n_experts / n_all)} % of the weights, get no adapter"
    ]
