"""Shared prefixes against the plain path: the same numbers for every model that can take them; who cannot says why."""

import pytest
import torch
import transformers
from support.models import COMMON, FAMILIES, GROUPED, build, list_examples
from support.pytests import refused

from dpo.losses import preference_loss
from dpo.models.attention import choose_attention
from dpo.models.layouts import Padded, SharedPrefix, choose_layout, layout_by_rules

LONG = 32  # max_length of the batches here
WINDOWED = {**GROUPED, "sliding_window": 6}  # shorter than the prompts and responses of a batch
LOCAL_TOO = {**WINDOWED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {
    **FAMILIES,
    "mistral, all layers windowed": lambda: transformers.MistralConfig(**WINDOWED),
    "qwen2, some layers windowed": lambda: transformers.Qwen2Config(
        **WINDOWED, use_sliding_window=True, layer_types=LOCAL_TOO["layer_types"]
    ),
    "gemma2, every second layer windowed": lambda: transformers.Gemma2Config(**LOCAL_TOO, final_logit_softcapping=2.0),
    "granite, logits_scaling": lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=4.0),
    "falcon, attention code of its own": lambda: transformers.FalconConfig(**COMMON),
}
IN_FLOAT32 = {**SHARED, "mixtral, experts": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4)}
GPT_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 101}
PADDED = {
    "bloom": (lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=101), "no positions"),
    "falcon, columns for positions": (lambda: transformers.FalconConfig(**COMMON, alibi=True), "refuses"),
    "gpt-neo, local attention": (
        lambda: transformers.GPTNeoConfig(**GPT_NEO, window_size=6, attention_types=[[["global", "local"], 1]]),
        "attends locally (window_size=6)",
    ),
    "gpt-neo, as many columns as positions": (
        lambda: transformers.GPTNeoConfig(
            **GPT_NEO, window_size=4 * LONG, max_position_embeddings=2 * LONG, attention_types=[[["global"], 2]]
        ),
        "refuses",
    ),
    "jamba": (
        lambda: transformers.JambaConfig(**GROUPED, num_experts=2, use_mamba_kernels=False, mamba_d_state=4),
        "recurrent",
    ),
}


@pytest.fixture
def pairs():
    """Pairs of many lengths; examples 0 and 3 share a prompt and a response."""
    return list_examples(rows=8, shared=True)


@pytest.mark.parametrize("family", IN_FLOAT32)
def test_without_a_mask_padded_rows_have_the_same_log_probabilities(family, pairs):
    model = build(IN_FLOAT32[family], attention=choose_attention("sdpa")).eval()
    layout, reason = layout_by_rules("padded", model, max_length=LONG)
    assert (layout.masked, reason) == (False, None)
    [microbatch] = layout.split(pairs, 1)
    without, masked = (each.forward(model, microbatch.inputs).logps for each in (layout, Padded()))
    torch.testing.assert_close(without, masked, rtol=1e-5, atol=1e-5)


def score_alone(model, example):
    """Log-probabilities of the two responses, each in a row of its own, by the model's logits and torch's functions."""
    scores = []
    for response in example.responses:
        ids = torch.tensor([[*example.prompt, *response]])
        logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        scores.append(logps[-len(response) :].sum())
    return torch.stack(scores)


def losses_and_gradients(model, layout, batch):
    """Log-probabilities in the order of the batch, mean loss and gradients by name, over two microbatches.

    Without a layout each response is scored alone.
    """
    model.zero_grad()
    n = len(batch)
    logps, total = torch.zeros(2, n, dtype=torch.float64), 0.0
    for microbatch in (layout or Padded()).split(batch, 2):
        if layout:
            chosen, rejected = layout.forward(model, microbatch.inputs).logps.sum(-1)
        else:
            chosen, rejected = torch.stack([score_alone(model, batch[i]) for i in microbatch.indices], 1)
        reference = [torch.full_like(chosen, -3.0), torch.full_like(chosen, -4.0)]
        losses = preference_loss(chosen, rejected, *reference, beta=0.5, label_smoothing=0.1)[0].sum() / n
        losses.backward()
        total += losses.item()
        logps[:, microbatch.indices] = torch.stack((chosen, rejected)).detach().double()
    return logps, total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_the_same(model, batch, tolerance):
    layout, note = choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=model.dtype)
    assert isinstance(layout, SharedPrefix), note
    logps, loss, gradients = losses_and_gradients(model, layout, batch)
    expected_logps, expected_loss, expected_gradients = losses_and_gradients(model, None, batch)

    torch.testing.assert_close(logps, expected_logps, rtol=tolerance, atol=0)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    norms = {name: gradient.norm() for name, gradient in expected_gradients.items()}
    total = torch.stack(list(norms.values())).norm()
    for name, gradient in expected_gradients.items():  # some are 0 but for rounding, as of a bias of keys
        assert (gradients[name] - gradient).norm() <= tolerance * max(norms[name], 1e-3 * total, 1e-3), name


@pytest.mark.parametrize("family", SHARED)
def test_log_probabilities_loss_and_gradients_in_float64_are_those_of_each_response_alone_to_1e10(
    family, pairs, nothing_in_float32
):
    assert_the_same(build(SHARED[family], dtype=torch.float64), pairs, 1e-10)


@pytest.mark.parametrize("family", IN_FLOAT32)
def test_log_probabilities_loss_and_gradients_in_float32_agree_to_1e5_with_the_attention_of_a_run(family, pairs):
    assert_the_same(build(IN_FLOAT32[family], attention=choose_attention("sdpa")), pairs, 1e-5)


@pytest.mark.parametrize("family", PADDED)
def test_a_model_that_cannot_share_prefixes_is_padded_and_says_why(family):
    config, reason = PADDED[family]
    model = build(config, dtype=torch.float64)
    layout, note = choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=torch.float64)
    assert isinstance(layout, Padded)
    assert note.startswith(f"layout=padded: {type(model).__name__} ")
    assert reason in note


# --- attention by segments: its numbers are compared on a GPU, by tests/gpu/test_gpu_layouts.py ----------------------


def test_attention_by_segments_refuses_a_model_whose_scores_are_changed():
    model = build(SHARED["gemma2, every second layer windowed"], attention=choose_attention("varlen"))
    with refused("varlen does not support Gemma2Attention, which changes attention scores"):
        choose_layout("shared_prefix", model, max_length=LONG, compute_dtype=torch.float32)


def test_with_attention_by_segments_padded_rows_and_sampling_are_those_of_sdpa():
    [rows], prompts = Padded().split(list_examples(rows=4), 1), torch.tensor([[0, 5, 6], [7, 8, 9]])
    found = []
    for attention in ("sdpa", choose_attention("varlen")):
        model = build("llama", attention=attention)
        generated = model.generate(prompts, attention_mask=prompts.sign(), max_new_tokens=5, do_sample=False)
        found.append((Padded().forward(model, rows.inputs).logps, generated))
    assert all(torch.equal(*values) for values in zip(*found, strict=True))


# --- models whose code says little ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_responses", "layout"), [(2, SharedPrefix), (4, Padded)])
def test_a_model_that_computes_otherwise_in_long_rows_is_padded_if_the_run_has_such_rows(n_responses, layout):
    class OfLength(type(build("llama").model)):
        def forward(self, input_ids, **kwargs):
            output = super().forward(input_ids, **kwargs)
            output.last_hidden_state *= 1.0 if input_ids.shape[1] <= 2 * LONG else 0.5
            return output

    model = build("llama")
    model.model.__class__ = OfLength
    chosen, note = choose_layout(
        "shared_prefix", model, max_length=LONG, compute_dtype=torch.float32, n_responses=n_responses
    )
    assert isinstance(chosen, layout), note
    assert layout is SharedPrefix or "off by" in note


def test_a_reference_of_another_class_gets_padded_rows_and_a_reason():
    model, reference = build("llama", attention="sdpa"), build("gpt-neox", attention="sdpa")
    chosen, note = choose_layout(
        "shared_prefix", model, reference=reference, max_length=LONG, compute_dtype=torch.float32
    )
    assert chosen == Padded()
    assert note == "layout=padded: LlamaForCausalLM has a reference of another class, GPTNeoXForCausalLM"
