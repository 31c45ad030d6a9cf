"""The losses are the papers' equations, worked by hand on a pair or two."""

import inspect
import math
from functools import partial

import pytest
import torch
from support.runs import GOLDEN, ROOT, read_json

from dpo.losses import LOSSES, SHARED, TRAINS_ON, Scores, _get_batch_logps, find_loss, preference_loss
from dpo.losses.formulas import sft
from dpo.settings.keys import compose_config
from dpo.training.objective import make_scores

nearly = partial(pytest.approx, rel=1e-12, abs=1e-12)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


DEFAULTS = {name: compose_config(loss=name)["loss"] for name in LOSSES}

# The pair's log-probabilities (policy chosen, policy rejected, reference chosen, reference rejected) give h = (-10 -
# -13) - (-11 - -12) = 3 - 1 = 2.
PAIR = tuple(column(x) for x in (-10, -13, -11, -12))


def compute(config: dict, scores: Scores) -> list[float]:
    """The loss of a pair, and the rewards of its chosen and its rejected response."""
    found = find_loss(config)(scores)
    return [values.item() for values in (found.losses, *found.rewards.values())]


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, minus_log_sigmoid(0.5 * 2)),
        ({"label_smoothing": 0.25}, 0.75 * minus_log_sigmoid(1) + 0.25 * minus_log_sigmoid(-1)),
        ({"reference_free": True}, minus_log_sigmoid(0.5 * 3)),  # h = -10 - -13
    ],
)
def test_dpo_is_equation_7_and_its_options_change_no_reward(options, expected):
    found = [values.item() for values in preference_loss(*PAIR, beta=0.5, **options)]
    assert found == [nearly(expected), 0.5 * (-10 + 11), 0.5 * (-13 + 12)]
    lengths, config = torch.ones(1), {"label_smoothing": 0, "reference_free": False, **options}
    scores = Scores(PAIR[0], lengths, PAIR[1], lengths, *PAIR[2:])
    assert compute({"name": "dpo", "beta": 0.5, **config}, scores) == found


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

    assert _get_batch_logps(logits, labels).tolist() == nearly(sums)
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    assert _get_batch_logps(logits, labels, average_log_prob=True).tolist() == nearly(means)


def test_every_loss_takes_exactly_the_keys_of_its_config_file():
    files = {path.stem for path in (ROOT / "config" / "loss").glob("*.yaml")}
    assert files == LOSSES.keys(), "each of LOSSES has a config/loss/NAME.yaml"
    for name, loss in LOSSES.items():
        config, shared = DEFAULTS[name], set()
        options = find_loss(config).options
        if name != "mix":  # whose options are those of its parts
            parameters = inspect.signature(loss.fn).parameters.values()
            options = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if loss.trains_on not in ("labels", "lists") and not loss.scalar_head:
            shared = {*SHARED} if loss.reference else {"sft_weight"} - {name + "_weight"}
        shared -= {"offset_by_margin"}
        if loss.takes_offset:
            shared.add("offset_by_margin")
        assert {*config} == {"name", *options, *shared}, f"config/loss/{name}.yaml"


# --- the others: the same pair, of 2 and 4 tokens: u_w = 1, u_l = -1, h = 2 ------------------------------------------

LENGTHS = column(2), column(4)
SCORES = Scores(PAIR[0], LENGTHS[0], PAIR[1], LENGTHS[1], *PAIR[2:])
HALF = 0.5  # beta


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ODDS = (math.exp(-10 / 2) / (1 - math.exp(-10 / 2))) / (math.exp(-13 / 4) / (1 - math.exp(-13 / 4)))

WORKED = {  # loss: its options but beta, which is 0.5, and its value
    "hinge": ({}, 0),  # 1 - 0.5 * 2
    "robust": ({"label_smoothing": 0.2}, (0.8 * minus_log_sigmoid(1) - 0.2 * minus_log_sigmoid(-1)) / 0.6),
    "dpo_norm": ({}, minus_log_sigmoid(0.5 * (1 / 2 - -1 / 4))),
    "ipo": ({"average": True}, (1 / 2 - -1 / 4 - 1) ** 2),
    "exo": (
        {"label_smoothing": 0.2},
        sigmoid(1) * math.log(sigmoid(1) / 0.8) + sigmoid(-1) * math.log(sigmoid(-1) / 0.2),
    ),
    "discopop": ({"tau": 2.0}, (1 - sigmoid(1 / 2)) * minus_log_sigmoid(1) + sigmoid(1 / 2) * math.exp(-1)),
    "simpo": ({"gamma": 0.3}, minus_log_sigmoid(0.5 * (-10 / 2 - -13 / 4) - 0.3)),
    "orpo": ({}, 10 / 2 + 0.5 * minus_log_sigmoid(math.log(ODDS))),
    "apo_zero": ({}, 1 - sigmoid(0.5) + sigmoid(-0.5)),
    "apo_down": ({}, sigmoid(0.5) + 1 - sigmoid(1)),
    "nca": ({}, minus_log_sigmoid(0.5) + (minus_log_sigmoid(-0.5) + minus_log_sigmoid(0.5)) / 2),
    "bco": ({"momentum": 0.9}, 2 * minus_log_sigmoid(0.5)),
    "sppo": ({}, (1 - 1) ** 2 + (-1 + 1) ** 2),
    "dpop": ({"penalty": 50.0}, minus_log_sigmoid(1)),  # u_w > 0: nothing to penalise
    "cal_dpo": ({}, minus_log_sigmoid(2) + (1 - 1) ** 2 + (-1 + 1) ** 2),
    "beta_dpo": ({"alpha": 0.6, "momentum": 0.9}, minus_log_sigmoid(0.5 * (1 + 0.6 * (2 - 0.1 * 2)) * 2)),
    "aot": ({"label_smoothing": 0}, minus_log_sigmoid(0.5 * 2)),  # of one pair: DPO
    "aot_unpaired": ({"label_smoothing": 0}, minus_log_sigmoid(0.5 * 2)),
}


OF_PAIRS = [name for name, loss in LOSSES.items() if loss.trains_on == "pairs" and not loss.scalar_head]


@pytest.mark.parametrize("page", ["metrics.md", "losses.md"])
def test_every_loss_has_a_row_in_the_documents(page):
    text = (ROOT / "docs" / page).read_text()
    lacking = [name for name in LOSSES if f"\n| {name} |" not in text and f"\n| {name}, " not in text]
    assert lacking == [], f"docs/{page} lacks {lacking}"


def test_every_loss_is_worked_by_hand():
    of_labels = {name for name, loss in LOSSES.items() if loss.trains_on == "labels"}
    lacking = LOSSES.keys() - WORKED - of_labels - {"sft", "dpo", "mix", "plackett_luce", "bradley_terry"}
    assert lacking == set(), f"WORKED in tests/test_losses.py lacks {lacking}"
    with_offset = {name for name, loss in LOSSES.items() if loss.takes_offset and not loss.scalar_head}
    assert with_offset == LOGITS.keys(), f"LOGITS in tests/test_losses.py lacks {with_offset - LOGITS.keys()}"


@pytest.mark.parametrize("name", WORKED)
def test_a_pair_worked_by_hand(name):
    options, expected = WORKED[name]
    loss, *rewards = compute({"name": name, "beta": HALF, **options}, SCORES)

    assert loss == nearly(expected)
    u_w, u_l = (1, -1) if LOSSES[name].reference else (-10, -13)
    lengths = (2, 4) if name in ("dpo_norm", "ipo", "simpo", "orpo") else (1, 1)
    assert rewards == [HALF * u_w / lengths[0], HALF * u_l / lengths[1]]


def test_sft_sums_over_tokens_or_takes_their_mean():
    scores = Scores(torch.tensor([-6.0, -4.0]), torch.tensor([3, 1]))
    assert sft(scores, average="sum").losses.tolist() == [6, 4]
    assert sft(scores, average="mean").losses.tolist() == [2, 4]


MIX = {"name": "mix", "label_smoothing": 0, "reference_free": False}
USUAL = 0.9 * 0.2 + 0.1 * 2  # the gap that beta-DPO compares with; the batch's is 2 nats


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        # DPOP penalises a chosen response that became less likely: u_w = -0.5, h = 0.5
        ({"name": "dpop", "penalty": 3.0}, {"chosen": PAIR[0] - 1.5}, minus_log_sigmoid(0.5 * (0.5 - 3 * 0.5))),
        # The shift of BCO and the usual gap of beta-DPO are running averages.
        (
            {"name": "bco", "momentum": 0.9},
            {"average": 0.2},
            minus_log_sigmoid(0.5 - 0.2) + minus_log_sigmoid(-(-0.5 - 0.2)),
        ),
        (
            {"name": "beta_dpo", "alpha": 0.6, "momentum": 0.9},
            {"average": 0.2},
            minus_log_sigmoid(0.5 * (1 + 0.6 * (2 - USUAL)) * 2),
        ),
        # WPO weighs by the likelihood of both responses, and not the SFT term
        (
            {"name": "hinge", "beta": 0.1, "wpo": True, "sft_weight": 0.3},
            {"chosen_squares": PAIR[0] + 0.5, "rejected_squares": PAIR[1] - 1.0},
            math.exp(-0.5 / 2 + 1 / 4) * (1 - 0.1 * 2) + 0.3 * 10 / 2,
        ),
        # A mix is a weighted sum.
        (
            {**MIX, "weights": {"dpo": 0.8, "apo_zero": 0.2, "sft": 0.1, "ipo": 0}},
            {},
            0.8 * minus_log_sigmoid(1) + 0.2 * 2 * sigmoid(-0.5) + 0.1 * 10,
        ),
    ],
)
def test_options_and_statistics_change_a_loss_as_worked_by_hand(config, change, expected):
    assert compute({"beta": HALF, **config}, SCORES._replace(**change))[0] == nearly(expected)


@pytest.mark.parametrize(
    ("weights", "needs", "rewards"),
    [
        ({"dpo": 1, "simpo": 2, "dpo_norm": 5, "sft": 0.1}, (True, True), [HALF * 1, HALF * -1]),
        ({"simpo": 2, "apo_zero": 0.5, "nca": 0}, (True, False), [HALF * 1, HALF * -1]),
        ({"simpo": 2, "orpo": 1, "sft": 0.1}, (False, True), [HALF * -10 / 2, HALF * -13 / 4]),
    ],
)
def test_a_mix_needs_what_its_parts_need_and_without_a_reference_rewards_are_per_token(weights, needs, rewards):
    config = {**MIX, "beta": HALF, "gamma": 0.3, "weights": weights}
    assert compute(config, SCORES)[1:] == rewards
    assert (find_loss(config).reference, find_loss(config).margin_only) == needs


# --- offsets ---------------------------------------------------------------------------------------------------------

LOGITS = {  # of the pair, under the options of WORKED
    "dpo": 1,
    "robust": 1,
    "dpo_norm": 0.5 * (1 / 2 - -1 / 4),
    "simpo": 0.5 * (-10 / 2 - -13 / 4) - 0.3,
    "beta_dpo": 0.5 * (1 + 0.6 * (2 - 0.1 * 2)) * 2,
    "dpop": 1,
}


@pytest.mark.parametrize("name", LOGITS)
def test_an_offset_shifts_the_logit_and_not_the_rewards(name):
    options = WORKED.get(name, ({"label_smoothing": 0, "reference_free": False},))[0]
    config = {"name": name, "beta": HALF, **options}
    loss, *rewards = compute(config, SCORES._replace(offset=torch.tensor([0.7])))
    logit = LOGITS[name] - 0.7
    expected = minus_log_sigmoid(logit)
    if name == "robust":
        expected = (0.8 * expected - 0.2 * minus_log_sigmoid(-logit)) / 0.6
    assert loss == pytest.approx(expected, rel=1e-6)
    assert rewards == compute(config, SCORES)[1:]


# --- losses of labels ------------------------------------------------------------------------------------------------


def unpair(scores: Scores) -> Scores:
    """Each pair as two labelled examples: first all chosen responses, then all rejected ones."""
    columns = {}
    for role in ("chosen", "rejected"):
        for name in (role, f"{role}_lengths", f"reference_{role}"):
            own = getattr(scores, name)
            columns[name] = torch.cat([own, own * 0] if role == "chosen" else [own * 0, own])
    return Scores(**columns)


@pytest.mark.parametrize(("mismatched", "z"), [([0.5, 1.1], 0.8), ([0.5, -1.1], 0)])
def test_losses_of_labels_worked_by_hand(mismatched, z):
    """TRL's numbers test apo_zero_unpaired."""
    kto = find_loss({"name": "kto", "beta": HALF, "desirable_weight": 2, "undesirable_weight": 3})
    none = torch.zeros(2)
    statistic = kto.find_batch_statistic(Scores(column(*mismatched), torch.ones(2), none, none, none, none))
    scores = unpair(SCORES)._replace(batch_statistic=statistic)  # log-ratios of 1 and -1

    losses, rewards, metrics, *_ = kto(scores)
    by_hand = [2 * (1 - sigmoid(0.5 * (1 - z))), 3 * (1 - sigmoid(0.5 * (z - -1)))]
    assert losses.tolist() == nearly(by_hand)
    assert metrics["kto/kl"].tolist() == pytest.approx([z, z])
    assert [rewards[role].tolist() for role in ("chosen", "rejected")] == [[0.5, 0], [0, -0.5]]
    bco = find_loss({"name": "bco_unpaired", "beta": HALF, "momentum": 0.9})(scores._replace(average=0.2))
    assert bco.losses.tolist() == nearly([minus_log_sigmoid(0.5 - 0.2), minus_log_sigmoid(0.2 + 0.5)])


# --- the loss of ranked lists -----------------------------------------------------------------------------------------

PLACKETT_LUCE = {"name": "plackett_luce", "beta": HALF}


def rank(*log_ratios: list[float]) -> tuple[Scores, list[torch.Tensor]]:
    """Lists with these log-ratios, best first; and the policy's log-probabilities of each, which have gradients."""
    policy, columns = [(column(*values) - 20).requires_grad_() for values in log_ratios], {}
    for k, role in enumerate(TRAINS_ON["lists"]):
        is_there = column(*(role == "rejected" or k < len(values) - 1 for values in log_ratios))
        own = [values[-1 if role == "rejected" else k % len(values)] for values in policy]
        columns[role] = is_there * torch.stack(own)
        columns[f"{role}_lengths"] = is_there
        columns[f"reference_{role}"] = -20 * is_there
    return make_scores(columns), policy


def test_plackett_luce_is_the_probability_of_the_order_for_lists_of_any_length():
    lists = [[1.0, 0.2, -0.3, 0.5], [-1.0, 2.0], [3.0] + [0.1] * 14 + [0.0]]
    scores, policy = rank(*lists)
    losses, rewards, _, accuracies = find_loss(PLACKETT_LUCE)(scores)

    for loss, log_ratios in zip(losses.tolist(), lists, strict=True):
        strengths = [math.exp(HALF * u) for u in log_ratios]
        probability = math.prod(strengths[k] / sum(strengths[k:]) for k in range(len(strengths)))
        assert loss == nearly(-math.log(probability))
    assert accuracies.tolist() == pytest.approx([4 / 6, 0, (15 + 14) / 120])  # a tie is not right
    assert rewards["rejected"].tolist() == pytest.approx([0.25, 1, 0])
    losses.sum().backward()
    assert all(values.grad.isfinite().all() for values in policy)
    assert [values.grad.sum().item() for values in policy] == pytest.approx(
        [0] * 3, abs=1e-12
    )  # differences alone count


# --- options of all losses of pairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_sft_term_is_per_token_beside_every_loss_of_pairs(name):
    config = {**DEFAULTS[name], "beta": HALF} | ({"weights": {"simpo": 1, "dpo": 1}} if name == "mix" else {})
    assert config.pop("sft_weight") == 0
    alone, beside = (compute({**config, "sft_weight": weight}, SCORES)[0] for weight in (0, 0.3))
    assert beside - alone == pytest.approx(0.3 * 10 / 2, rel=1e-9)


def test_ld_alpha_counts_the_tails_less_in_policy_and_reference():
    tails = {"chosen_tail": PAIR[0] * 0, "rejected_tail": PAIR[1] * 0 - 6, "reference_chosen_tail": PAIR[0] * 0}
    scores = SCORES._replace(**tails, reference_rejected_tail=PAIR[1] * 0 - 8)
    config = {"name": "hinge", "beta": 0.1, "ld_alpha": 0.25}
    u_l = (-13 + 0.75 * 6) - (-12 + 0.75 * 8)
    assert compute(config, scores) == nearly([1 - 0.1 * (1 - u_l), 0.1, 0.1 * u_l])


@pytest.mark.parametrize("divergence", ["forward_kl", "alpha", "js"])
def test_a_rejected_response_that_fell_far_has_a_finite_gradient(divergence):
    chosen, rejected = (torch.tensor([u], requires_grad=True) for u in (1.0, -500.0))
    scores = Scores(chosen, torch.ones(1), rejected, torch.ones(1), torch.zeros(1), torch.zeros(1))
    config = {**DEFAULTS["dpo"], "beta": 0.1, "f_divergence": divergence, "f_alpha": 0.5}
    losses = find_loss(config)(scores).losses
    losses.sum().backward()
    assert all(x.isfinite().all() for x in (losses, chosen.grad, rejected.grad))


# --- what TRL makes of the same log-probabilities: benchmarks/trl_losses.py made the table ---------------------------

TRL = read_json(GOLDEN / "trl_losses.json")


def list_scores(pairs: list[dict]) -> tuple[Scores, list[torch.Tensor]]:
    """List scores, and the first tokens' log-probabilities of all chosen and of all rejected, which have gradients."""
    named, first = {}, []
    for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
        tokens = {kind: [column(*p[side][kind]) for p in pairs] for kind in pairs[0][side]}
        shorter = [min(len(p[side]["policy"]), len(p[other]["policy"])) for p in pairs]
        first.append(torch.stack([t[0] for t in tokens["policy"]]).requires_grad_())
        rest = torch.stack([t[1:].sum() for t in tokens["policy"]])
        named[side], named[f"reference_{side}"] = first[-1] + rest, torch.stack([t.sum() for t in tokens["reference"]])
        named[f"{side}_squares"] = torch.stack([t.sum() for t in tokens["squares"]])
        for whose, kind in (("", "policy"), ("reference_", "reference")):
            tails = [t[n:].sum() for t, n in zip(tokens[kind], shorter, strict=True)]
            named[f"{whose}{side}_tail"] = torch.stack(tails)
        named[f"{side}_lengths"] = torch.tensor([len(t) for t in tokens["policy"]])
    return Scores(**named), first


@pytest.mark.parametrize("case", TRL["results"], ids=lambda case: "-".join(map(str, case["config"].values())))
def test_losses_and_gradients_are_those_of_trl(case):
    batches = [([pair], each) for pair, each in zip(TRL["pairs"], case["each"], strict=True)]
    if not case["config"].get("sft_weight"):  # TRL takes its mean over the tokens of all pairs
        batches.append((TRL["pairs"], case["together"]))
    for pairs, theirs in batches:
        scores, first = list_scores(pairs)
        loss = find_loss(case["config"])
        if loss.trains_on == "labels":
            scores = unpair(scores)
            if loss.mismatched:  # each prompt with the response of the row before it
                shifted = Scores(*(column.roll(1) if torch.is_tensor(column) else column for column in scores))
                scores = scores._replace(batch_statistic=loss.find_batch_statistic(shifted))
        loss = loss(scores).losses.mean()
        loss.backward()
        in_float32 = "f_divergence" in case["config"] or case["config"]["name"] in ("exo", "orpo")  # there, also partly
        tolerance = {"rel": 1e-4, "abs": 1e-6} if in_float32 else {"rel": 1e-10, "abs": 1e-12}
        assert loss.item() == pytest.approx(theirs["loss"], **tolerance)
        assert [g for t in first for g in t.grad.tolist()] == pytest.approx(theirs["gradient"], **tolerance)
