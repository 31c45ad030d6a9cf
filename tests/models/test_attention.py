"""Attention in bfloat16 on a CPU: what float64 gives, as closely as torch's own kernel, whatever the mask."""

import pytest
import torch
from support.models import GROUPED, build, list_examples
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from dpo.models import attention as our_attention
from dpo.models.attention import masked_attention
from dpo.models.layouts import Padded, SharedPrefix

LENGTH = 23
COLUMNS = torch.arange(LENGTH)
CAUSAL = COLUMNS[:, None] >= COLUMNS
TREES = CAUSAL & (COLUMNS[:, None] // 9 == COLUMNS // 9)


def make_mask(*seen: torch.Tensor) -> torch.Tensor:
    """(rows, 1, L, L), additive."""
    return torch.stack([torch.zeros(1, LENGTH, LENGTH).masked_fill_(~row, torch.finfo().min) for row in seen])


MASKS = {
    "trees": make_mask(TREES),
    "each row its own": make_mask(CAUSAL, TREES),
    "a bias": torch.randn(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)),
}


def find_results(function, dtype: torch.dtype, key_heads: int) -> list[torch.Tensor]:
    """Output and gradients of `function(query, key, value)`, in float64."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, heads, LENGTH, 8) for heads in (4, key_heads, key_heads, 4)]
    *inputs, grad = [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]
    inputs = [x.requires_grad_() for x in inputs]
    out = function(*inputs)
    return [result.detach().double() for result in (out, *torch.autograd.grad(out, inputs, grad))]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_output_and_gradients_are_as_close_to_float64_as_those_of_torch(name, key_heads, monkeypatch):
    mask = MASKS[name]
    monkeypatch.setattr(our_attention, "QUERIES_AT_ONCE", 5)

    def torchs(query, key, value):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query), enable_gqa=True)

    exact, theirs = (find_results(torchs, dtype, key_heads) for dtype in (torch.float64, torch.bfloat16))
    ours = find_results(lambda q, k, v: masked_attention(q, k, v, mask, 8**-0.5), torch.bfloat16, key_heads)
    for mine, its, wanted in zip(ours, theirs, exact, strict=True):
        assert (mine - wanted).norm() < max(3 * (its - wanted).norm(), 2**-8 * wanted.norm())


def test_only_shared_prefixes_in_bfloat16_under_sdpa_use_it(monkeypatch):
    calls = []
    monkeypatch.setattr(our_attention, "masked_attention", lambda *args: calls.append(1) or masked_attention(*args))

    def find_logps(layout, autocast: bool, attention: str = "sdpa") -> torch.Tensor:
        model = build(lambda: LlamaConfig(**GROUPED), attention=attention)
        [microbatch] = layout.split(list_examples(rows=8, shared=True), 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return layout.forward(model, microbatch.inputs).logps.sum(-1).detach()

    shared = SharedPrefix({"full_attention": None}, max_length=32)
    exact = find_logps(shared, autocast=False)
    find_logps(shared, autocast=True, attention="eager")
    find_logps(Padded(), autocast=True)
    assert calls == []
    torch.testing.assert_close(find_logps(shared, autocast=True), exact, rtol=5e-3, atol=0)
    assert len(calls) == 2  # layers
