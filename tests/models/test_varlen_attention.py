"""Attention by segments, on a plain loop in place of the GPU's kernel: the numbers of the dense mask, no squares."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from models.test_layouts import FLOAT32_ONLY, LONG, SHARED, WINDOWED
from support.models import build, list_examples
from support.varlen import run_varlen_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models import varlen_attention
from dpo.models.layouts import Padded, SharedPrefix, choose_layout
from dpo.models.packing import pack, tree_mask
from dpo.models.pretrained import choose_attention
from dpo.models.varlen_attention import varlen_attn

OWN_CODE = ("gpt-j", "falcon, rotary", "gpt-neo, positions enough")  # do not use transformers' attention interface
UNSUPPORTED = {
    "gemma2": "softcap",
    "gemma2, every second layer windowed": "softcap",
    "doge, all columns": "a mask of its own",
}
FAMILIES = {k: v for k, v in {**SHARED, **FLOAT32_ONLY}.items() if k not in (*OWN_CODE, *UNSUPPORTED)}
FAMILIES["gemma2, no softcap"] = lambda: transformers.Gemma2Config(
    **WINDOWED, head_dim=8, layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=None
)


@pytest.fixture(autouse=True, scope="module")
def kernel():
    run_varlen_on_cpu()


PAIR = Example((1, 2, 3), ((10, 11, 9), (20, 9)))


def test_segments_of_two_prompts():
    packed = pack([PAIR, Example((4,), ((30, 31, 9), (9,)))], max_tree_tokens=None, alignment=4)
    assert packed.input_ids.tolist() == [[1, 2, 3, 10, 11, 20, 4, 30, 31, 0, 0, 0]]
    queries, keys, columns, longest = packed.segments
    # a response of one token feeds nothing, so it has no segment
    assert queries.tolist() == [0, 3, 5, 6, 7, 9, 12]
    assert [columns[a:b].tolist() for a, b in pairwise(keys)] == [
        [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5], [6], [6, 7, 8], [9, 10, 11],
    ]  # fmt: skip
    assert longest == (3, 5)
    assert (queries.dtype, keys.dtype, columns.dtype) == (torch.int32, torch.int32, torch.int64)  # as the kernel wants


@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("window", [None, 3])
def test_segments_see_what_the_dense_mask_says(alignment, window):
    examples = [*list_examples(rows=8, shared=True), Example((), ((5, 6, 9), (9,))), Example((1,), ((9,), (9,)))]
    packed = pack(examples, max_tree_tokens=None, alignment=alignment)
    [dense] = tree_mask(packed, window=window)[:, 0]
    seen = torch.zeros_like(dense)
    queries, keys, columns, _ = packed.segments
    for (start, end), (first, last) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        for i in range(start, end):
            until = last - (end - 1 - i)  # behind its own column
            seen[i, columns[max(first, until - (window or last)) : until]] = True
    text = packed.tree[0] >= 0
    assert torch.equal(seen[text], dense[text])
    assert not seen[~text][:, text].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_those_of_the_dense_mask(family):
    examples = list_examples(rows=8, shared=True)
    found = {}
    for attention in ("eager", "varlen"):
        model = build(FAMILIES[family], attention=attention)
        layout, note = choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=torch.float32)
        assert isinstance(layout, SharedPrefix), note
        [microbatch] = layout.split(examples, 1)
        assert (microbatch.inputs.segments is not None) == (attention == "varlen")
        logps = layout.forward(model, microbatch.inputs).logps.sum(-1)
        (logps[0] - logps[1]).sigmoid().log().mean().backward()
        found[attention] = logps.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    (logps, gradients), (expected, expected_gradients) = found["varlen"], found["eager"]
    torch.testing.assert_close(logps, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    total = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * total, name


@pytest.mark.parametrize("family", OWN_CODE)
def test_a_model_with_attention_code_of_its_own_is_refused(family):
    with pytest.raises(InputError, match=r"varlen does not support \w+ForCausalLM, whose attention is code of its own"):
        choose_attention(SHARED[family](), "varlen")


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_layers_that_ask_for_more_are_refused(family):
    model = build(SHARED[family], attention="varlen")
    with pytest.raises(
        InputError, match=rf"varlen does not support \w+Attention, which has {UNSUPPORTED[family]}: use"
    ):
        choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=torch.float32)


def test_a_model_that_cannot_share_prefixes_is_refused(monkeypatch):
    for window, reason in ((6, "attends locally"), (None, "off by")):
        model = build("llama", attention="varlen")
        if window:
            model.config.attention_window_size = window
        else:
            monkeypatch.setattr(varlen_attention, "varlen_attn", lambda query, *_, **__: query)
        with pytest.raises(InputError, match=f"varlen: LlamaForCausalLM .*{reason}.*: use sdpa"):
            choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=torch.float32)


def test_padded_rows_and_sampling_are_those_of_sdpa():
    [rows], prompts = Padded().split(list_examples(rows=4), 1), torch.tensor([[0, 5, 6], [7, 8, 9]])
    found = []
    for attention in ("sdpa", "varlen"):
        model = build("llama", attention=attention)
        generated = model.generate(prompts, attention_mask=prompts.sign(), max_new_tokens=5, do_sample=False)
        found.append((Padded().forward(model, rows.inputs).logps, generated))
    assert all(torch.equal(*values) for values in zip(*found, strict=True))


def test_under_autocast_the_kernel_gets_bfloat16(monkeypatch):
    dtypes = []

    def note(query, key, value, *others, **options):
        dtypes.extend(x.dtype for x in (query, key, value))
        return varlen_attn(query, key, value, *others, **options)

    monkeypatch.setattr(varlen_attention, "varlen_attn", note)
    model = build("llama", attention="varlen")
    layout = SharedPrefix({"full_attention": None}, max_length=LONG, by_segments=True)
    [microbatch] = layout.split(list_examples(rows=4), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layout.forward(model, microbatch.inputs)
    assert {*dtypes} == {torch.bfloat16}


def test_compiled_blocks_have_one_graph_for_all_rows():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layout = SharedPrefix({"full_attention": None}, max_length=LONG, by_segments=True)
    model, compiled = (build("llama", attention="varlen").requires_grad_(False) for _ in range(2))
    for block in compiled.model.layers:
        block.compile(backend=count, dynamic=True)
    for rows, length in ((8, 12), (5, 9), (3, 17)):
        [microbatch] = layout.split(list_examples(rows=rows, length=length), 1)
        expected, found = (layout.forward(each, microbatch.inputs).logps for each in (model, compiled))
        torch.testing.assert_close(found, expected)
    assert len(graphs) == 1


class Counting(TorchDispatchMode):
    """Records the size of the largest storage that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        sizes = [tensor.untyped_storage().nbytes() for tensor in tree_iter(out) if isinstance(tensor, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def measure_largest(attention: str, n: int) -> int:
    """The bytes of the largest tensor of a forward and backward pass on n pairs, with torch's own kernel."""
    examples = [Example((i, *range(40)), ((1, *range(20)), (2, *range(20)))) for i in range(n)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build("llama", attention=attention, dtype=torch.bfloat16)
        layout = SharedPrefix({"full_attention": None}, max_length=LONG, by_segments=attention == "varlen")
        packed = pack(examples, max_tree_tokens=layout.max_tree_tokens and 10**6, length=81 * n)
        with Counting() as counting:
            layout.forward(model, packed).logps.sum().backward()
    return counting.largest


def test_no_tensor_grows_with_the_square_of_the_row():
    measured = {attention: [measure_largest(attention, n) for n in (8, 64)] for attention in ("varlen", "sdpa")}
    few, many = measured["varlen"]
    assert many <= 8 * few
    few, many = measured["sdpa"]
    assert many > 8 * few  # a square is seen
