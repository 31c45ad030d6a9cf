"""The 4-bit base of QLoRA: its arithmetic is that of bitsandbytes."""

import sys

import pytest
import torch
import transformers
from support.models import GROUPED, build
from support.pytests import refused
from support.runs import TINY
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from dpo.models.quantization import Linear4bit, quantize, round_weight

pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")


def layer_of(n_in: int, n_out: int) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(n_in, n_out)


def in_4_bits(layer: torch.nn.Linear) -> Linear4bit:
    return Linear4bit(layer.weight.detach(), layer.bias)


def test_a_layer_multiplies_with_its_dequantized_weight_forward_and_backward():
    layer = layer_of(176, 64)
    quantized = in_4_bits(layer)
    inputs = [torch.randn(3, 5, 176, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    weight = quantized.dequantized(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        outputs = [quantized(inputs[0])]
    assert all(tensor.numel() < weight.numel() for tensor in saved)  # it is dequantized again
    outputs.append(linear(inputs[1], weight, layer.bias))
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_the_base_is_the_same_for_any_number_of_threads():
    layer, n_threads = layer_of(4096, 1024), torch.get_num_threads()
    try:
        bases = []
        for n in (1, 3):
            torch.set_num_threads(n)
            bases.append(in_4_bits(layer).state_dict())
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(tensor, bases[1][name]) for name, tensor in bases[0].items())


def test_what_4_bits_keep_of_a_weight_is_what_the_layer_multiplies_with():
    conv, straight = Conv1D(64, 32), layer_of(32, 64)
    kept = in_4_bits(straight).dequantized(torch.float32)
    conv.weight.data = straight.weight.detach().T
    for layer in (straight, conv):
        round_weight(layer)
    assert torch.equal(straight.weight, kept)
    assert torch.equal(conv.weight, kept.T)


def test_the_same_layers_have_the_bytes_that_transformers_would_load():
    pytest.importorskip("accelerate", reason="transformers quantizes with it")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(TINY, dtype=torch.float32, quantization_config=settings)
    ours = quantize(load(TINY, dtype=torch.float32))
    layers = {name: layer for name, layer in ours.named_modules() if isinstance(layer, Linear4bit)}
    quantized = {name: m for name, m in theirs.named_modules() if type(m).__name__ == "Linear4bit"}
    assert len(layers) == 7 * 3
    assert layers.keys() == quantized.keys()
    for name, layer in layers.items():
        weight = quantized[name].weight
        assert torch.equal(layer.weight, weight.data)
        torch.testing.assert_close(layer.offset, weight.quant_state.offset)
        apart = layer.scales.to(int) - weight.quant_state.absmax.to(int)  # theirs may be rounded the other way
        assert apart.abs().max() <= 1
        assert apart.count_nonzero() < 0.02 * apart.numel()


@pytest.mark.parametrize(
    "family", ["llama", "gpt2, tied", lambda: transformers.Llama4TextConfig(**GROUPED, head_dim=8)]
)
def test_a_model_evaluates_as_it_trains_and_as_one_that_has_its_weights(family):
    model, same = quantize(build(family)), build(family)
    ids = torch.arange(48).view(4, 12)
    before = same(ids).logits
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            weight, other = layer.dequantized(torch.float32), same.get_submodule(name)
            other.weight.data = weight.T if isinstance(other, Conv1D) else weight
    trained = model(ids).logits
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, trained)
    torch.testing.assert_close(trained, same(ids).logits)
    assert not torch.allclose(trained, before, atol=1e-3)


def test_without_bitsandbytes_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with refused("lora=qlora needs bitsandbytes with kernels for this machine"):
        quantize(build("llama"))
