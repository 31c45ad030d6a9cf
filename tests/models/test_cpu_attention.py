"""Attention in bfloat16 on a CPU: what float64 gives, as closely as torch's own kernel, whatever the mask."""

from __future__ import annotations

import pytest
import torch
from support.models import GROUPED, build, list_examples
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from dpo.models import cpu_attention
from dpo.models.cpu_attention import masked_attention
from dpo.models.layouts import Padded, SharedPrefix

LENGTH = 23
LOWEST = torch.finfo(torch.float32).min


def mask_of(seen: torch.Tensor) -> torch.Tensor:
    """(1, 1, L, L), additive."""
    return torch.zeros(1, 1, *seen.shape).masked_fill_(~seen, LOWEST)


def masks() -> dict[str, torch.Tensor]:
    columns = torch.arange(LENGTH)
    causal = columns[:, None] >= columns
    trees = causal & (columns[:, None] // 9 == columns // 9)
    scattered = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.2
    bias = torch.randn(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    return {
        "causal": mask_of(causal),
        "trees": mask_of(trees),
        "no order": mask_of(scattered | torch.eye(LENGTH, dtype=torch.bool)),
        "each row its own": torch.cat([mask_of(causal), mask_of(trees)]),
        "a bias": bias,
    }


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient, (2, 3, L, 8)."""
    values = torch.randn(4, 2, 3, LENGTH, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [value.to(dtype).requires_grad_() for value in values]


def results_of(function, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of `function(query, key, value)`, in float64."""
    *inputs, grad = tensors(dtype)
    out = function(*inputs)
    out.backward(grad)
    return [result.detach().double() for result in (out, *(x.grad for x in inputs))]


@pytest.mark.parametrize("name", masks())
def test_output_and_gradients_are_as_close_to_float64_as_those_of_torch(name, monkeypatch):
    mask = masks()[name]
    monkeypatch.setattr(cpu_attention, "BLOCK", 5)

    exact = results_of(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask.double()), torch.float64)
    torchs = results_of(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask), torch.bfloat16)
    ours = results_of(lambda q, k, v: masked_attention(q, k, v, mask, 8**-0.5), torch.bfloat16)

    for mine, theirs, wanted in zip(ours, torchs, exact, strict=True):
        assert (mine - wanted).norm() < max(2 * (theirs - wanted).norm(), 2**-8 * wanted.norm())


@pytest.fixture
def calls(monkeypatch) -> list[torch.dtype]:
    """The dtypes of the queries that come to our kernel."""
    seen = []

    def note(query, *others):
        seen.append(query.dtype)
        return masked_attention(query, *others)

    monkeypatch.setattr(cpu_attention, "masked_attention", note)
    return seen


def logps_of(
    layout, *, dtype: torch.dtype | None, weights: torch.dtype = torch.float32, attention: str = "sdpa"
) -> torch.Tensor:
    model = build(lambda: LlamaConfig(**GROUPED), attention=attention, dtype=weights)
    [microbatch] = layout.split(list_examples(rows=8, shared=True), 1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return layout.forward(model, microbatch.inputs).logps.sum(-1).flatten().detach()


def test_shared_prefixes_in_bfloat16_use_it_under_sdpa_and_nothing_else_does(calls):
    shared = SharedPrefix({"full_attention": None}, max_length=32)
    exact = logps_of(shared, dtype=None)
    logps_of(shared, dtype=torch.bfloat16, attention="eager")
    logps_of(Padded(), dtype=torch.bfloat16)
    assert calls == []

    ours = logps_of(shared, dtype=torch.bfloat16)
    assert calls == [torch.bfloat16] * 2  # layers
    assert not torch.equal(ours, exact)
    torch.testing.assert_close(ours, exact, rtol=5e-3, atol=0)
    eager = logps_of(shared, dtype=None, weights=torch.bfloat16, attention="eager")
    torch.testing.assert_close(logps_of(shared, dtype=None, weights=torch.bfloat16), eager, rtol=2e-2, atol=0)
    assert calls == [torch.bfloat16] * 4
