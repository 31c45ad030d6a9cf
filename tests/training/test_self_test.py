"""Step 0 lets sound runs through and stops the others with the likely cause."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from support.models import plain_logps

from dpo.data.collation import find_examples, get_collate_fn, tokenize_batch_element
from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.losses import ROLES, TRAINS_ON, find_loss
from dpo.models.layouts import Padded
from dpo.parallel.mesh import Mesh
from dpo.training.objective import Objective
from dpo.training.self_test import check_causality, check_models

IN_REFERENCE, LENGTHS = [f"reference_{role}" for role in ROLES], [f"{role}_lengths" for role in ROLES]
DPO = {"beta": 0.1, "label_smoothing": 0, "reference_free": False}


@pytest.fixture(scope="module")
def batch(tokenizer):
    pairs = [
        ("\n\nHuman: Where?\n\nAssistant:", " Here.", " No."),
        ("\n\nHuman: Who?\n\nAssistant:", " I.", " Not me."),
    ]
    return get_collate_fn(tokenizer)(
        [tokenize_batch_element(*pair, "keep_start", tokenizer, 64, 32) for pair in pairs],
    )


@pytest.fixture
def policy(tiny_llama):
    return copy.deepcopy(tiny_llama)


def check(policy, reference, batch, name="dpo", options=DPO, other_dtype=None) -> str:
    examples = find_examples(batch)
    if reference is None:
        examples = [Example(e.prompt, e.responses[:1], roles=TRAINS_ON["targets"]) for e in examples]
    lengths = torch.tensor([e.n_scored for e in examples]).T
    config = {"name": name, **options}
    (note,) = check_models(
        policy,
        lambda: dict(zip(ROLES, plain_logps(policy, examples), strict=False)),
        None if reference is None else lambda: dict(zip(IN_REFERENCE, plain_logps(reference, examples), strict=False)),
        given=dict(zip(LENGTHS, lengths, strict=False)),
        loss=find_loss(config),
        other_policy_dtype=other_dtype,
    )
    return note


@pytest.mark.parametrize(
    ("name", "options", "first_loss"),
    [
        ("dpo", DPO, "0.693147"),  # ln 2
        ("dpo", DPO | {"label_smoothing": 0.2}, "0.693147"),
        ("ipo", {"beta": 0.1}, "25.000000"),  # (1 / (2 * 0.1))^2
    ],
)
def test_equal_models_pass_with_the_loss_that_agreement_gives(name, options, first_loss, policy, tiny_llama, batch):
    note = check(policy, tiny_llama, batch, name, options)
    assert note.startswith(f"self-test passed: first loss {first_loss}, rewards within 0 of 0")


def test_a_mix_with_a_part_that_has_no_reference_passes_and_other_weights_are_still_found(policy, tiny_llama, batch):
    """The rewards of a mix with a reference are log-ratios, whatever its parts have."""
    options = DPO | {"gamma": 1.0, "weights": {"dpo": 1, "simpo": 1, "sft": 0.1}}
    assert check(policy, tiny_llama, batch, "mix", options).startswith("self-test passed: ")
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.1)
    with pytest.raises(InputError, match="policy and reference do not hold the same weights"):
        check(policy, tiny_llama, batch, "mix", options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_causal_model_passes_and_another_is_refused(dtype, autocast, policy):
    def check_causal(model):
        dtypes = set()
        model.get_output_embeddings().register_forward_hook(lambda *arguments: dtypes.add(arguments[-1].dtype))
        check_causality(
            Objective(model.to(dtype), None, Padded(), Mesh(), find_loss({"name": "sft"}), autocast=autocast)
        )
        assert dtypes == {autocast or dtype}  # FlashAttention, for one, refuses float32

    check_causal(policy)
    sizes = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16, initializer_range=0.3)
    with pytest.raises(InputError, match="BertLMHeadModel depend on later tokens"):
        check_causal(transformers.BertLMHeadModel(config))
    config.is_decoder = True
    check_causal(transformers.BertLMHeadModel(config))


def test_a_forward_may_differ_from_the_same_again_by_rounding_alone(policy):
    logps = torch.tensor([-300.0, -20.0])
    of_both = {"chosen": logps, "rejected": logps - 5}
    config = {"name": "dpo", **DPO}

    def check_forward_off_in_training(relative: float) -> list[str]:
        def forward():
            return {name: values * (1 + relative * policy.training) for name, values in of_both.items()}

        return check_models(
            policy,
            forward,
            lambda: {f"reference_{role}": values for role, values in of_both.items()},
            given=dict.fromkeys(LENGTHS[:2], torch.ones(2)),
            loss=find_loss(config),
        )

    eps = torch.finfo(torch.float32).eps  # as where sums over processes come in another order
    assert check_forward_off_in_training(2 * eps)
    with pytest.raises(InputError, match=r"train-mode and eval-mode log-probabilities differ by 0\.0003"):
        check_forward_off_in_training(1e-6)


def test_reference_free_passes_with_the_policys_own_loss(policy, tiny_llama, batch):
    note = check(policy, tiny_llama, batch, options=DPO | {"reference_free": True})
    assert note.startswith("self-test passed: first loss")
    assert "0.693147" not in note  # the reference is not there to cancel the policy's preference


def test_sft_needs_no_reference(policy, batch):
    sft_batch = {key: value for key, value in batch.items() if not key.startswith("rejected")}
    assert check(policy, None, sft_batch, "sft", {}).startswith("self-test passed")


def test_it_leaves_the_policy_ready_to_train(policy, tiny_llama, batch):
    before = copy.deepcopy(policy.state_dict())
    policy.eval()
    check(policy, tiny_llama, batch)

    assert policy.training
    assert all(p.requires_grad and p.grad is None for p in policy.parameters())
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_dropout_is_found(policy, tiny_llama, batch):
    policy.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(InputError, match=r"differ by .*LlamaForCausalLM .*dropout"):
        check(policy, tiny_llama, batch)


@pytest.mark.parametrize("who", ["policy", "reference"])
def test_broken_weights_are_found_and_whose_they_are(who, policy, tiny_llama, batch):
    broken = copy.deepcopy(tiny_llama)
    broken.lm_head.weight.data[5] = float("nan")
    models = (broken, tiny_llama) if who == "policy" else (policy, broken)
    with pytest.raises(InputError, match=f"log-probabilities of the {who} are not finite"):
        check(*models, batch)


def test_a_reference_with_other_weights_is_found(policy, tiny_llama, batch):
    policy.lm_head.weight.data *= 1.1
    with pytest.raises(InputError, match=r"instead of 0, so policy and reference do not hold the same weights"):
        check(policy, tiny_llama, batch)


def test_rewards_of_a_float16_reference_are_explained(policy, tiny_llama, batch):
    note = check(policy, copy.deepcopy(tiny_llama).half(), batch, other_dtype="float32")
    assert "so they differ by rounding, and rewards by up to " in note
    assert note.endswith("model.reference_dtype=float32 makes these rewards 0")


@pytest.mark.parametrize(("name", "beta", "loss"), [("dpo", 1e39, "nan"), ("ipo", 1e-30, "inf")])
@pytest.mark.parametrize("other_dtype", [None, "float32"])
def test_a_beta_that_no_float32_loss_can_hold_is_named(name, beta, loss, other_dtype, policy, tiny_llama, batch):
    message = f"the {name} loss of equal models is {loss} with loss.beta={beta}, which overflows float32"
    with pytest.raises(InputError, match=re.escape(message)):
        check(policy, tiny_llama, batch, name, (DPO if name == "dpo" else {}) | {"beta": beta}, other_dtype)
