"""An adapter's dropout is a function of the text: wherever a token is computed, its features are dropped alike."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build, list_examples

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models.adapter_dropout import AdapterDropout, Dropout, hash_paths
from dpo.models.adapters import POLICY, REFERENCE, add_adapter, make_adapter_config, switch
from dpo.models.layouts import Padded, SharedPrefix, pad
from dpo.models.packing import NONE

P = 0.3
SHARED_PREFIX = SharedPrefix({"full_attention": None}, max_length=32)


@pytest.fixture
def pairs():
    """Pairs of many lengths; examples 0, 3 and 5 share a prompt, 0 and 3 a response."""
    return list_examples(rows=8, shared=True)


def adapted(dropout: float = P, *, dtype: torch.dtype = torch.float64, names: tuple[str, ...] = (POLICY,), **options):
    """A tiny Llama whose adapters change what it computes."""
    model = build("llama", dtype=dtype, **options)
    for name in reversed(names):
        add_adapter(model, make_adapter_config(4, 8, "auto"), name=name, dropout=dropout if name == POLICY else 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def logps_and_gradients(model, layout, examples, parts=1, update=0):
    """Log-probabilities in the order of the examples, (2, B), and gradients by name, summed over microbatches."""
    model.zero_grad()
    dropout, logps = AdapterDropout(model, seed=5), torch.zeros(2, len(examples), dtype=torch.float64)
    for microbatch in layout.split(examples, parts):
        with dropout.on(microbatch.inputs, update=update):
            found = layout.forward(model, microbatch.inputs).logps.sum(-1)
            found.tanh().sum().backward()
        logps[:, microbatch.indices] = found.detach().double()
    return logps, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(n_tokens: int, n_features: int, *, seed: int = 0, update: int = 0, layers: int = 1) -> list[torch.Tensor]:
    """What the layers keep of a text, each (n_tokens, n_features) of zeros and ones."""
    text = torch.randint(1000, (n_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    modules = torch.nn.ModuleList(Dropout(P, n_features) for _ in range(layers))
    with AdapterDropout(modules, seed=seed).on(pad([Example((), (tuple(text),))], n_tokens), update=update):
        return [(module(torch.ones(1, n_tokens, n_features))[0] > 0).double() for module in modules]


# --- the mask -----------------------------------------------------------------------------------


def in_sigmas(values: torch.Tensor) -> float:
    """How far the mean of independent values of mean 0 and variance 1 is from 0."""
    return abs(values.sum().item()) / math.sqrt(values.numel())


def test_features_are_dropped_at_random_at_the_rate_asked_for():
    [mask] = kept(400, 512)
    values = (mask - (1 - P)) / math.sqrt(P * (1 - P))

    assert in_sigmas(values) < 4
    assert in_sigmas(values[1:] * values[:-1]) < 4  # of neighbouring tokens
    assert in_sigmas(values[:, 1:] * values[:, :-1]) < 4  # of neighbouring features
    assert in_sigmas(values[1:, 1:] * values[:-1, 1:] * values[1:, :-1] * values[:-1, :-1]) < 4
    for dim in (0, 1):  # no token and no feature is preferred
        sums = values.sum(dim) / math.sqrt(values.shape[dim])
        assert abs(sums.var().item() - 1) < 5 * math.sqrt(2 / len(sums))


@pytest.mark.parametrize("other", [{"update": 1}, {"seed": 1}, {"layers": 2}])
def test_another_update_seed_or_layer_has_an_independent_mask(other):
    a, b = kept(400, 512)[0], kept(400, 512, **other)[-1]
    values = [(mask - (1 - P)) / math.sqrt(P * (1 - P)) for mask in (a, b)]
    assert in_sigmas(values[0] * values[1]) < 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_kept_is_scaled_up_and_so_is_its_gradient(dtype):
    rows = pad(list_examples(2), 12)
    x = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    layer = Dropout(P, 32)
    with AdapterDropout(layer, seed=0).on(rows, update=0):
        y, mask = layer(x), layer(torch.ones(4, 12, 32)) > 0
        torch.testing.assert_close(layer(x.flatten(0, 1)), y.flatten(0, 1))  # as some models have it
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    y.backward(gradient)

    assert y.dtype == dtype
    assert 0 < mask.double().mean() < 1
    torch.testing.assert_close(y, x * mask / torch.tensor(1 - P, dtype=dtype))
    torch.testing.assert_close(x.grad, gradient * mask / torch.tensor(1 - P, dtype=dtype))


def test_a_slice_of_the_features_has_its_part_of_the_mask():
    """As a process has it under tensor parallelism."""
    whole, part = Dropout(P, 32), Dropout(P, 32)
    part.first_feature = 16
    x = torch.ones(4, 12, 32)
    with AdapterDropout(whole, seed=0).on(pad(list_examples(2), 12), update=0):
        expected = whole(x)[..., 16:]
    with AdapterDropout(part, seed=0).on(pad(list_examples(2), 12), update=0):
        assert torch.equal(part(x[..., 16:]), expected)


def test_a_layer_that_is_given_some_tokens_only_is_refused():
    layer = Dropout(P, 32)
    with (
        AdapterDropout(layer, seed=0).on(pad(list_examples(2), 12), update=0),
        pytest.raises(InputError, match=r"lora.dropout=0.3 .* is given \(7,\) for \(4, 12\) tokens"),
    ):
        layer(torch.ones(7, 32))


# --- the same for the same text -----------------------------------------------------------------

tokens = st.lists(st.integers(0, 2), max_size=4).map(tuple)
responses = st.lists(st.integers(0, 2), max_size=3).map(lambda ids: (*ids, 3))
examples = st.lists(st.builds(lambda p, a, b: Example(p, (a, b)), tokens, responses, responses), min_size=1, max_size=9)


def hashes_by_text(inputs) -> dict[tuple[int, ...], set[int]]:
    """The hashes of the tokens that are there, by the text up to each."""
    found: dict[tuple[int, ...], set[int]] = {}
    rows = zip(inputs.input_ids.tolist(), hash_paths(inputs).tolist(), strict=True)
    for row, (ids, hashes) in enumerate(rows):
        for column, value in enumerate(hashes):
            if hasattr(inputs, "tree"):
                tree, branch = inputs.tree[row].tolist(), inputs.branch[row].tolist()
                if tree[column] == NONE:
                    continue
                seen = [i for i in range(column + 1) if tree[i] == tree[column] and branch[i] in (NONE, branch[column])]
            else:
                if not inputs.attention_mask[row, column]:
                    continue
                seen = list(range(column + 1))
            found.setdefault(tuple(ids[i] for i in seen), set()).add(value)
    return found


@settings(max_examples=60, deadline=None)
@given(examples)
def test_a_token_has_the_hash_of_its_text_in_both_layouts(batch):
    padded, packed = (hashes_by_text(layout.split(batch, 1)[0].inputs) for layout in (Padded(), SHARED_PREFIX))
    assert all(len(of_text) == 1 for of_text in (*padded.values(), *packed.values()))
    assert all(padded[text] == of_text for text, of_text in packed.items())
    assert len(set().union(*padded.values())) == len(padded)  # and no other text has it


@pytest.mark.parametrize("parts", [1, 3])
def test_layouts_and_microbatches_drop_alike(parts, pairs):
    model = adapted()
    expected, expected_gradients = logps_and_gradients(model, Padded(), pairs)
    without, _ = logps_and_gradients(adapted(0), Padded(), pairs)
    logps, gradients = logps_and_gradients(model, SHARED_PREFIX, pairs, parts)

    assert (logps - without).abs().min() > 1e-4
    torch.testing.assert_close(logps, expected, rtol=1e-6, atol=0)  # the model rounds in float32 here and there
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_activations_that_are_computed_again_drop_alike(pairs):
    model = adapted(dtype=torch.float32)
    expected = logps_and_gradients(model, SHARED_PREFIX, pairs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(logps_and_gradients(model, SHARED_PREFIX, pairs), expected)


@pytest.mark.slow
def test_compiled_blocks_drop_alike_without_a_graph_for_each_update(pairs):
    model, graphs = adapted(dtype=torch.float32), []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    expected = [logps_and_gradients(model, SHARED_PREFIX, pairs, update=update) for update in range(3)]
    for block in model.model.layers:
        block.compile(dynamic=True, fullgraph=True, backend=count)
    found = [logps_and_gradients(model, SHARED_PREFIX, pairs, update=update) for update in range(3)]

    torch.testing.assert_close(found, expected)
    assert len(graphs) == 2  # the first block's input needs no gradient


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU code is compiled by a C++ compiler")
def test_compiled_code_wraps_products_as_torch_does():
    layer, x = Dropout(P, 32), torch.randn(4, 12, 32)
    with AdapterDropout(layer, seed=0).on(pad(list_examples(2), 12), update=0):
        torch.testing.assert_close(torch.compile(layer, dynamic=True)(x), layer(x))


# --- where it is off ----------------------------------------------------------------------------


@torch.no_grad()
def test_only_the_policys_adapter_drops_and_only_inside(pairs):
    """In train mode as well; the base and a reference's adapter never do."""
    model, rows = adapted(names=(POLICY, REFERENCE)).train(), pad(pairs, 12)

    def logps():
        found = {POLICY: Padded().forward(model, rows).logps.sum(-1)}
        for name in (REFERENCE, None):
            with switch(model, name)():
                found[name] = Padded().forward(model, rows).logps.sum(-1)
        return found

    before = logps()
    with AdapterDropout(model, seed=0).on(rows, update=0):
        inside = logps()
    after = logps()

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (inside[POLICY] - before[POLICY]).abs().min() > 1e-4
    assert torch.equal(inside[REFERENCE], before[REFERENCE])
    assert torch.equal(inside[None], before[None])


def test_without_dropout_nothing_is_added():
    assert not any(isinstance(module, (Dropout, torch.nn.Dropout)) for module in adapted(0).modules())
