"""Both layouts in every precision and attention: the same log-probabilities, by the kernels that are meant."""

import itertools
from typing import Any

import pytest
import torch
from support.gpu import DEVICE, GPU, build, describe, limit, needs_gpu, pick, random_pairs
from torch.utils._pytree import tree_map_only

from dpo.models.attention import attend_by_segments
from dpo.models.layouts import Layout, Padded, SharedPrefix, choose_layout
from dpo.models.packing import Packed, pack, tree_mask
from dpo.system.arithmetic import set_up_torch

FAMILIES = ("llama", "gpt_neox")
PRECISIONS = ("float32", "bfloat16", "autocast")
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.02, "autocast": 0.02}  # relative; float32 with TF32's products
KERNELS = {  # by attention: of sdpa not cuDNN's, not the plain one
    "sdpa": {"efficient", "flash"} if GPU else {"flash_attention_for_cpu", "ours"},
    "varlen": {"varlen"},
}


# --- shared prefixes against padded rows -----------------------------------------------------------------------------


def list_combinations() -> list[tuple[str, str, str]]:
    """Families, precisions and attentions. varlen takes no float32."""
    found = list(itertools.product(FAMILIES, PRECISIONS, ("eager", "sdpa")))
    varlen = list(itertools.product(FAMILIES, PRECISIONS[1:], ("varlen",)))
    return found + pick(varlen, varlen[:1], [])


@pytest.mark.gpu
@pytest.mark.slow
@limit(120)
def test_layouts_shared_prefixes_are_kept_and_give_the_logps_of_padded_rows(tmp_path, record):
    """One combination that fails stops no other."""
    set_up_torch(deterministic=False, compiles=False)
    faults = []
    for combination in list_combinations():
        try:
            said, fault = compare_layouts(*combination)
        except Exception as error:  # in one combination: the others still run
            said, fault = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        record(f"{' '.join(combination):34} {said}")
        if fault:
            faults.append(f"{combination}: {fault}")
        if GPU:
            torch.cuda.empty_cache()
    assert faults == []


def compare_layouts(family: str, precision: str, attention: str) -> tuple[str, str | None]:
    """Run the same pairs forward and backward in both layouts; returns what was found, and what is wrong with it."""
    layers, hidden, heads = pick((12, 768, 12), (12, 768, 12), (3, 64, 4))
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = build(describe(family, layers, hidden, heads), dtype=dtype, attention=attention)
    pairs = random_pairs(pick(8, 8, 2), prompt=pick((200, 400), (200, 400), (20, 40)),
                         response=pick((50, 200), (50, 200), (5, 20)))  # fmt: skip
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "autocast"):
        compute_dtype = torch.bfloat16 if precision == "autocast" else dtype
        layout, note = choose_layout("shared_prefix", model, max_length=1024, compute_dtype=compute_dtype)
        if not isinstance(layout, SharedPrefix):
            return "not kept", note or "not kept"
        kernels = "+".join(sorted(find_kernels(model, layout, pairs)))
        ours, padded = (find_logps(model, way, pairs) for way in (layout, Padded()))
    difference = ((padded - ours).abs() / padded.abs()).max().item()
    said = f"off by {difference:.1e} {kernels}"
    if not difference <= TOLERANCE[precision]:
        return said, said
    if attention in KERNELS and not (kernels and {*kernels.split("+")} <= KERNELS[attention]):
        return said, f"attention ran as {kernels or 'no kernel known to the profiler'}"
    return said, None


def find_logps(model: Any, layout: Layout, pairs: list[Any]) -> torch.Tensor:
    """Log-probabilities, whose backward pass works."""
    [microbatch] = layout.split(pairs, 1)
    logps = layout.forward(model, microbatch.to(DEVICE).inputs).logps.sum(-1)
    logps.sum().backward()
    model.zero_grad(set_to_none=True)
    return logps.detach().float().cpu()


def find_kernels(model: Any, layout: Layout, pairs: list[Any]) -> set[str]:
    """The implementations of attention that a forward used."""
    [microbatch] = layout.split(pairs, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layout.forward(model, microbatch.to(DEVICE).inputs)
    return {kernel for event in profile.key_averages() if (kernel := name_kernel(event.key))}


def name_kernel(operator: str) -> str | None:
    """The implementation of attention that an operator stands for; None for other operators."""
    if operator == "_MaskedAttention":  # `dpo/models/attention.py`, which replaces SDPA
        return "ours"
    if operator == "torch_attn::_varlen_attn":
        return "varlen"
    prefix = "aten::_scaled_dot_product_"
    if not operator.startswith(prefix) or operator.endswith("_backward"):
        return None
    name = operator.removeprefix(prefix).removesuffix("_attention")
    return "math" if name == "attention_math" else name


@pytest.mark.gpu
@needs_gpu
@limit(60)
def test_layouts_varlen_attends_as_the_dense_mask_says(tmp_path, record):
    """Grouped heads, windows, and responses that see their prompt, forward and backward."""
    packed = pack(random_pairs(6, prompt=(1, 300), response=(1, 200)), max_tree_tokens=None)
    worst = 0.0
    for dtype, head, window in itertools.product((torch.bfloat16, torch.float16), (64, 80, 128), (None, 100)):
        found, exact = attend_to(packed, dtype, head, window)
        differences = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
        worst = max(worst, *differences)
    record(f"off by {worst:.1e} (of {TOLERANCE['bfloat16']:g})", worst=worst)
    assert worst <= TOLERANCE["bfloat16"]


def attend_to(packed: Packed, dtype: torch.dtype, head: int, window: int | None) -> tuple[list[torch.Tensor], ...]:
    """Output and gradients of 8 query heads that share 2 key heads, by segments and in float32 by the dense mask."""
    torch.manual_seed(0)
    length, results = packed.input_ids.shape[1], []
    values = [torch.randn(1, n_heads, length, head, device=DEVICE).to(dtype) for n_heads in (8, 2, 2, 8)]
    for attend, of_dtype in ((by_segments, dtype), (by_mask, torch.float32)):
        *inputs, grad = [value.detach().to(of_dtype).requires_grad_() for value in values]
        out = attend(*inputs, packed, window)
        results.append([tensor.float() for tensor in (out.detach(), *torch.autograd.grad(out, inputs, grad))])
    return tuple(results)


def by_segments(query: Any, key: Any, value: Any, packed: Packed, window: int | None) -> torch.Tensor:
    segments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), packed.segments)
    mask = torch.zeros(1, 1, 1, 1, device=DEVICE)  # as `dpo/models/logprobs.py` gives it
    out, _ = attend_by_segments(torch.nn.Module(), query, key, value, mask, segments, sliding_window=window)
    return out.transpose(1, 2)


def by_mask(query: Any, key: Any, value: Any, packed: Packed, window: int | None) -> torch.Tensor:
    mask = tree_mask(packed, window=window).to(DEVICE)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
