"""An adapter's dropout is a function of the text."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from support.models import build, list_examples
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.errors import InputError
from dpo.models import adapter_dropout
from dpo.models.adapter_dropout import AdapterDropout, Dropout, Pattern
from dpo.models.adapters import POLICY, REFERENCE, add_adapter, make_adapter_config, switch
from dpo.models.layouts import Padded, SharedPrefix, pad

P = 0.3
PAIRS = list_examples(rows=8, shared=True)  # of many lengths; 0, 3 and 5 share a prompt, 0 and 3 a response
ROWS = pad(PAIRS, 12)


def build_adapted(dropout: float = P) -> torch.nn.Module:
    """A tiny Llama with a policy's and a reference's adapter."""
    model = build("llama", dtype=torch.float64)
    for name in (REFERENCE, POLICY):
        add_adapter(model, make_adapter_config(4, 8, "auto"), name=name, dropout=dropout if name == POLICY else 0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
    return model


def train_on(model, layout, parts=1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of PAIRS, (2, B), and gradients by name, summed over microbatches."""
    model.zero_grad()
    dropout, logps = AdapterDropout(model, seed=5), torch.zeros(2, len(PAIRS), dtype=torch.float64)
    for microbatch in layout.split(PAIRS, parts):
        with dropout.on(microbatch.inputs, update=0):
            found = layout.forward(model, microbatch.inputs).logps.sum(-1)
            found.tanh().sum().backward()
        logps[:, microbatch.indices] = found.detach()
    return logps, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def find_masks(*, seed: int = 0, update: int = 0, layers: int = 2) -> list[torch.Tensor]:
    """The features that each layer keeps, (rows, tokens, 512)."""
    modules = torch.nn.ModuleList(Dropout(P, 512) for _ in range(layers))
    with AdapterDropout(modules, seed=seed).on(ROWS, update=update):
        return [drop(module, torch.ones(*ROWS.input_ids.shape, 512)).double() for module in modules]


def drop(layer: Dropout, x: torch.Tensor) -> torch.Tensor:
    return layer.find_pattern(x).drop(x)


def test_features_are_dropped_at_the_rate_asked_for_anew_in_each_layer_update_and_token():
    mask, *others = [*find_masks(), *find_masks(update=1), *find_masks(seed=1)]
    text = mask[0, :12]
    assert mask.mean().item() == pytest.approx(1 - P, abs=0.02)
    for other in (*(other[0, :12] for other in others), text.roll(1, 0), text.roll(1, 1)):
        assert (text * other).mean().item() == pytest.approx((1 - P) ** 2, abs=0.04)  # independent


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapted_layer_has_the_values_and_gradients_of_the_formula(dtype, p):
    """W x + B A dropout(x) * alpha / r; dropout scales what it keeps by 1 / (1 - p)."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 24, dtype=dtype)})
    model.get_output_embeddings = model.get_input_embeddings = lambda: None
    model.config = transformers.PreTrainedConfig()
    add_adapter(model, make_adapter_config(4, 8, ["layer"]), dropout=p)
    layer = model["layer"]
    a, b = (part[POLICY].weight for part in (layer.lora_A, layer.lora_B))
    b.data = torch.randn(24, 4)
    x = torch.randn(16, 12, 32).to(dtype).requires_grad_()
    with AdapterDropout(model, seed=0).on(ROWS, update=0):
        mask = drop(layer.lora_dropout[POLICY], torch.ones(16, 12, 32)) if p else torch.ones(16, 12, 32)
        rows = layer(x.flatten(0, 1))  # as some models have it
        y = layer(x)
    torch.testing.assert_close(rows, y.flatten(0, 1), rtol=0, atol=0)
    seen = x * (mask / (1 - p)).to(dtype)
    expected = layer.base_layer(x) + seen @ a.to(dtype).T @ b.to(dtype).T * 2
    gradient = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(output, (x, a, b), gradient) for output in (y, expected))
    limit = 0.02 if dtype == torch.bfloat16 else 1e-6
    for mine, its in zip((y, *ours), (expected, *theirs), strict=True):
        assert (mine - its).norm() < limit * its.norm()


def test_a_frozen_input_gets_no_gradient():
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 24)})
    model.get_output_embeddings = model.get_input_embeddings = lambda: None
    model.config = transformers.PreTrainedConfig()
    add_adapter(model, make_adapter_config(4, 8, ["layer"]))
    passed, product = model["layer"].lora_A[POLICY](torch.randn(5, 32), 1.0, None)
    assert (passed.requires_grad, product.requires_grad) == (False, True)


def test_layouts_and_microbatches_drop_alike_and_so_do_activations_that_are_computed_again():
    model, layout = build_adapted(), SharedPrefix({"full_attention": None}, max_length=32)
    expected, without = train_on(model, Padded()), train_on(build_adapted(0), Padded())
    assert (expected[0] - without[0]).abs().min() > 1e-4
    torch.testing.assert_close(train_on(model, layout, parts=3), expected, rtol=1e-5, atol=1e-6)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    torch.testing.assert_close(train_on(model, layout, parts=3), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU code is compiled by a C++ compiler")
def test_compiled_code_drops_alike_and_is_not_compiled_again_for_each_update():
    layer, x, y = Dropout(P, 32), torch.randn(16, 12, 32), torch.randn(16, 12, 32)
    fused = adapter_dropout._fuse_drop(torch.device("cpu"))  # as on a GPU
    for update in range(3):
        with (
            AdapterDropout(layer, seed=0).on(ROWS, update=update),
            torch._dynamo.config.patch(error_on_recompile=update > 0),  # a monkeypatch would remove the option
        ):
            pattern = layer.find_pattern(x)
            assert torch.equal(fused(x, *pattern, None), pattern.drop(x))
            assert torch.equal(fused(x, *pattern, y), pattern.drop(x, onto=y))


@pytest.mark.parametrize("shape", [(16, 12, 32), (192, 32)])
@pytest.mark.parametrize("is_compiling", [False, True])
def test_on_gpus_the_fused_kernel_gets_two_dims_and_compiled_code_fuses_by_itself(shape, is_compiling, monkeypatch):
    calls = []

    def fused(*arguments):
        calls.append([argument.dim() for argument in arguments if torch.is_tensor(argument)])
        return adapter_dropout._drop(*arguments)

    monkeypatch.setattr(adapter_dropout, "_fuse_drop", lambda device: fused)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    with FakeTensorMode():
        x, a, b = (
            torch.ones(shape, device="cuda"),
            torch.ones(*shape[:-1], 1, device="cuda"),
            torch.ones(32, device="cuda"),
        )
        assert Pattern(a, b, 0).drop(x, onto=x).shape == shape
    assert calls == ([] if is_compiling else [[2, 2, 1, 2]])


@torch.no_grad()
def test_only_the_policys_adapter_drops_and_only_inside():
    """In train mode too, base and reference never drop."""
    model = build_adapted().train()

    def logps() -> list[torch.Tensor]:
        found = [Padded().forward(model, ROWS).logps.sum(-1)]
        for name in (REFERENCE, None):
            with switch(model, name)():
                found.append(Padded().forward(model, ROWS).logps.sum(-1))
        return found

    before = logps()
    with AdapterDropout(model, seed=0).on(ROWS, update=0):
        inside = logps()
    assert all(map(torch.equal, before, logps()))
    assert [torch.equal(*both) for both in zip(before, inside, strict=True)] == [False, True, True]


def test_a_layer_that_is_given_some_tokens_only_is_refused():
    layer = Dropout(P, 32)
    with (
        AdapterDropout(layer, seed=0).on(ROWS, update=0),
        pytest.raises(InputError, match=r"lora.dropout=0.3 .* has \(16, 12\) tokens, .* input for \(7,\):"),
    ):
        layer.find_pattern(torch.ones(7, 32))
