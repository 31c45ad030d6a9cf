"""The losses are the papers' equations, worked by hand on a pair or two."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import yaml
from support.runs import ROOT

from dpo.losses import LOSSES, Loss, Scores, _get_batch_logps, preference_loss

# one pair, log-probabilities (policy chosen, policy rejected, reference chosen, reference rejected):
# h = (-10 - -13) - (-11 - -12) = 3 - 1 = 2
PAIR = tuple(torch.tensor([x], dtype=torch.float64) for x in (-10.0, -13.0, -11.0, -12.0))


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


def test_dpo_is_equation_7():
    losses, chosen, rejected = preference_loss(*PAIR, beta=0.5)

    assert losses.item() == pytest.approx(minus_log_sigmoid(0.5 * 2), rel=1e-12)
    assert losses.item() == pytest.approx(0.31326168751822286, rel=1e-12)  # ln(1 + 1/e)
    assert (chosen.item(), rejected.item()) == (0.5 * (-10 + 11), 0.5 * (-13 + 12))


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_dpo_starts_at_ln_2_where_policy_and_reference_agree(eps):
    policy = torch.tensor([-10.0, -200.0]), torch.tensor([-13.0, -5.0])
    losses, chosen, rejected = preference_loss(*policy, *policy, beta=0.1, label_smoothing=eps)

    torch.testing.assert_close(losses, torch.full((2,), math.log(2)))
    assert not chosen.any()
    assert not rejected.any()


def test_conservative_dpo_weighs_the_flipped_pair_by_label_smoothing():
    losses, *_ = preference_loss(*PAIR, beta=0.5, label_smoothing=0.25)
    assert losses.item() == pytest.approx(0.75 * minus_log_sigmoid(1) + 0.25 * minus_log_sigmoid(-1), rel=1e-12)


def test_ipo_is_equation_17():
    losses, chosen, rejected = preference_loss(*PAIR, beta=0.1, ipo=True)

    assert losses.item() == pytest.approx((2 - 1 / 0.2) ** 2, rel=1e-12)  # 9
    assert (chosen.item(), rejected.item()) == pytest.approx((0.1, -0.1), rel=1e-12)


def test_reference_free_changes_the_loss_and_not_the_rewards():
    losses, *rewards = preference_loss(*PAIR, beta=0.5, reference_free=True)

    assert losses.item() == pytest.approx(minus_log_sigmoid(0.5 * 3), rel=1e-12)  # h = -10 - -13
    assert rewards == list(preference_loss(*PAIR, beta=0.5)[1:])


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reference_free": True}, {"ipo": True}])
def test_gradients_agree_with_finite_differences_and_rewards_have_none(options):
    policy = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([-10.0, -3.0], [-13.0, -2.5])]
    reference = [torch.tensor(x, dtype=torch.float64) for x in ([-11.0, -4.0], [-12.0, -2.0])]

    assert torch.autograd.gradcheck(lambda *p: preference_loss(*p, *reference, beta=0.5, **options)[0], policy)
    losses, *rewards = preference_loss(*policy, *reference, beta=0.5, **options)
    assert losses.requires_grad
    assert not any(reward.requires_grad for reward in rewards)


def test_log_probabilities_are_sums_over_the_labelled_tokens_of_the_next_position():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    labels = torch.tensor([[-100, -100, 3, 0, 6], [-100, 1, -100, -100, -100], [4, 5, -100, 2, -100]])
    sums, counts = [0.0] * 3, [0] * 3
    for b in range(3):
        for t in range(1, 5):  # what predicts the first token is not there, so its label is never scored
            if labels[b, t] != -100:
                scores = logits[b, t - 1].tolist()
                sums[b] += scores[labels[b, t]] - math.log(sum(map(math.exp, scores)))
                counts[b] += 1
    assert counts == [3, 1, 2]

    assert _get_batch_logps(logits, labels).tolist() == pytest.approx(sums, rel=1e-12)
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    assert _get_batch_logps(logits, labels, average_log_prob=True).tolist() == pytest.approx(means, rel=1e-12)


def test_unlabelled_positions_have_no_gradient():
    logits = torch.zeros(1, 4, 3, requires_grad=True)
    _get_batch_logps(logits, torch.tensor([[-100, -100, 1, -100]])).sum().backward()

    assert logits.grad.abs().sum(-1).bool().tolist() == [[False, True, False, False]]


def test_every_loss_takes_exactly_the_keys_of_its_config_file():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "config" / "loss").glob("*.yaml")}

    assert files.keys() == LOSSES.keys()
    for name, keys in files.items():
        assert keys.pop("name") == name
        parameters = inspect.signature(LOSSES[name].fn).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == keys.keys()


def test_the_table_of_losses_hands_its_options_on():
    lengths = torch.ones(1)
    scores = Scores(PAIR[0], lengths, PAIR[1], lengths, *PAIR[2:])
    expected = preference_loss(*PAIR, 0.5, label_smoothing=0.25, reference_free=True)
    config = {"name": "dpo", "beta": 0.5, "label_smoothing": 0.25, "reference_free": True}
    assert tuple(LOSSES["dpo"](scores, config)) == expected
    assert tuple(LOSSES["ipo"](scores, {"name": "ipo", "beta": 0.5})) == preference_loss(*PAIR, 0.5, ipo=True)
    assert LOSSES["sft"](Scores(PAIR[0], lengths), {"name": "sft"}) == (-PAIR[0], None, None)
    assert [LOSSES[name].reference for name in ("sft", "dpo", "ipo")] == [False, True, True]


def test_sft_takes_no_notice_of_a_ported_beta():
    assert LOSSES["sft"](Scores(PAIR[0], torch.ones(1)), {"name": "sft", "beta": 0.1}).losses == -PAIR[0]


def test_a_reference_without_pairs_is_refused():
    with pytest.raises(ValueError, match="must be pairwise: give reference=False"):
        Loss(LOSSES["sft"].fn, pairwise=False)
