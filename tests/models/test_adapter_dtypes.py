"""In which dtypes an adapter is kept and multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from dpo.models.adapters import add_adapter, make_adapter_config


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_an_adapter_is_kept_in_float32_and_multiplied_in_the_dtype_of_its_input(base, autocast):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = transformers.LlamaForCausalLM(config).to(base)
    add_adapter(model, make_adapter_config(4, 8, ["q_proj"]))
    layer: Any = model.model.layers[0].self_attn.q_proj
    down, up = layer.lora_A["policy"], layer.lora_B["policy"]
    torch.nn.init.normal_(up.weight)
    inputs, kept = torch.randn(3, 16).to(base), []

    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
    ):
        output = layer(inputs)
    output.float().sum().backward()

    used = torch.bfloat16 if autocast else base
    x, a, b = (tensor.detach().to(used) for tensor in (inputs, down.weight, up.weight))
    expected = x @ layer.base_layer.weight.T.to(used) + (x @ a.T) @ b.T * 2
    assert output.dtype == used
    assert torch.equal(output.detach(), expected)
    assert {tensor.dtype for tensor in kept} == {used}
    assert {tensor.dtype for factor in (down, up) for tensor in (factor.weight, factor.weight.grad)} == {torch.float32}
