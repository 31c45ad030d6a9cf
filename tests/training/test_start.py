"""The self-test lets sound runs through and stops the others with the likely cause."""

import copy

import pytest
import torch
from support.pytests import refused

from dpo.data.examples import Example
from dpo.losses import TRAINS_ON, find_loss
from dpo.models.layouts import Padded
from dpo.parallel.mesh import Mesh
from dpo.settings.plan import make_plan
from dpo.training.objective import Objective, Reference, ReferenceLogps
from dpo.training.start import self_test

DPO = {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}
PAIRS = [Example((1, 2, 3), ((4, 5), (6,))), Example((7, 8), ((9, 10, 11), (12, 13)))]


@pytest.fixture
def policy(tiny_llama):
    return copy.deepcopy(tiny_llama)


def check(policy, reference=None, loss=DPO, reference_dtype="float32", autocast=None, examples=PAIRS) -> str:
    reference = reference and Reference(reference, None, ReferenceLogps(0, 2))
    objective = Objective(policy, reference, Padded(), Mesh(), find_loss(loss), autocast=autocast)
    if objective.loss.trains_on == "targets":
        examples = [example._replace(responses=example.responses[:1], roles=TRAINS_ON["targets"]) for example in PAIRS]
    dtypes = {"model.policy_dtype": "float32", "model.reference_dtype": reference_dtype}
    return self_test(objective, examples, make_plan({"trainer": "BasicTrainer", **dtypes}))


@pytest.mark.parametrize(
    ("loss", "first_loss"),
    [(DPO, "0.693147"), ({"name": "ipo", "beta": 0.1}, "25.000000")],  # ln 2, and (1 / (2 * 0.1))^2
)
def test_equal_models_pass_with_the_loss_of_equal_models(loss, first_loss, policy, tiny_llama):
    before = copy.deepcopy(policy.state_dict())
    note = check(policy, tiny_llama, loss)

    assert note.startswith(f"self-test passed: first loss {first_loss}, rewards within 0 of 0")
    assert policy.training
    assert all(p.requires_grad and p.grad is None for p in policy.parameters())
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("loss", [DPO, DPO | {"name": "mix", "gamma": 1.0, "weights": {"dpo": 1, "simpo": 1}}])
def test_a_reference_with_other_weights_is_found(loss, policy, tiny_llama):
    assert check(policy, tiny_llama, loss).startswith("self-test passed")
    policy.lm_head.weight.data *= 1.1
    with refused("so policy and reference do not hold the same weights"):
        check(policy, tiny_llama, loss)


def test_a_margin_that_overflows_is_refused_with_what_to_change(policy, tiny_llama):
    loss = DPO | {"offset_by_margin": True}
    usual, huge = ([pair._replace(margin=margin) for pair in PAIRS] for margin in (2.0, 1e308))
    note = check(policy, tiny_llama, loss, examples=usual)
    assert note.startswith("self-test passed: first loss 2.126928")  # ln(1 + e^2)
    with refused("the first dpo loss is inf: choose a loss.beta closer to 0.1, or smaller margins"):
        check(policy, tiny_llama, loss, examples=huge)


def test_dropout_is_found(policy, tiny_llama):
    policy.model.layers[1].self_attn.attention_dropout = 0.5
    with refused(r"LlamaForCausalLM in train and eval mode differ by .*dropout"):
        check(policy, tiny_llama)


@pytest.mark.parametrize("broken", ["policy", "reference"])
def test_the_model_whose_weights_are_broken_is_named(broken, policy, tiny_llama):
    models = {"policy": policy, "reference": copy.deepcopy(tiny_llama)}
    models[broken].lm_head.weight.data[4:] = float("nan")
    with refused(f"log-probabilities of the {broken} are not finite"):
        check(**models)
