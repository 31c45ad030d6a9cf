"""Losses of given log-probabilities by TRL's own code: the oracle of `tests/test_losses.py`.

    python -m venv .trl && .trl/bin/pip install torch==2.13.0 trl==1.16.0
    .trl/bin/python -m benchmarks.trl_losses > tests/golden/trl_losses.json

Imports nothing of this project. TRL computes a loss inside a method of its trainer, between the model's forward pass
and the metrics. So the method is called with a stand-in for the trainer, which has only the attributes that the method
needs, and a model that returns the given log-probabilities.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

LENGTHS = ((3, 5), (4, 1), (2, 2), (6, 3), (1, 7))  # tokens of chosen and rejected, for each pair
T = max(max(lengths) for lengths in LENGTHS)
SIDES = ("chosen", "rejected")


def draw() -> dict[str, Any]:
    """Draw log-probabilities of tokens, and log sum_v pi(v)^2 of the policy."""
    generator = torch.Generator().manual_seed(0)

    def draw_uniform(n: int, low: float, high: float) -> list[float]:
        values = low + (high - low) * torch.rand(n, generator=generator)
        return [round(value, 3) for value in values.tolist()]

    pairs = []
    for lengths in LENGTHS:
        pair = {}
        for side, n in zip(SIDES, lengths, strict=True):
            policy = draw_uniform(n, -4, -0.1)
            log_ratios = draw_uniform(n, -0.9, 0.7)
            pair[side] = {
                "policy": policy,
                "reference": [round(p + r, 3) for p, r in zip(policy, log_ratios, strict=True)],
                "squares": draw_uniform(n, -3, -0.2),
            }
        pairs.append(pair)
    return {"pairs": pairs}


def table(pairs: list[dict], kind: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Tabulate each token's value of a kind, (2 * pairs, T).

    The rows are the chosen responses, then the rejected ones, padded with 0.
    """
    rows = []
    for side in SIDES:
        for pair in pairs:
            values = pair[side][kind]
            padding = [0.0] * (T - len(values))
            rows.append(values + padding)
    return torch.tensor(rows, dtype=dtype)


def count_tokens(pairs: list[dict]) -> list[int]:
    return [len(pair[side]["policy"]) for side in SIDES for pair in pairs]


# --- TRL's losses of the policy's log-probabilities (2 * pairs, T) ---------------------------------------------------


class Model:
    """A stand-in that returns what a model with TRL's head returns.

    KTO's trainer also scores mismatched responses, each of which is the response of the row before it. The ids of
    mismatched responses (`KL_input_ids`) are ones, and all other ids are zeros.
    """

    training = True
    is_gradient_checkpointing = False

    def __init__(self, log_probs: torch.Tensor, squares: torch.Tensor) -> None:
        self.log_probs = log_probs
        self.squares = squares

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        log_probs = self.log_probs
        if input_ids.any():
            log_probs = log_probs.roll(1, 0)
        zeros = torch.zeros_like(log_probs)  # for metrics alone
        return SimpleNamespace(
            log_probs=log_probs,
            log_sum_sq_probs=self.squares,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )


def make_trainer(pairs: list[dict], log_probs: torch.Tensor, **options: Any) -> SimpleNamespace:
    """Make the stand-in for a trainer of DPO or KTO with these options."""
    squares = table(pairs, "squares", log_probs.dtype)
    reference = table(pairs, "reference", log_probs.dtype)
    return SimpleNamespace(
        model=Model(log_probs, squares),
        ref_model=Model(reference, squares),
        accelerator=SimpleNamespace(
            device="cpu",
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
        ),
        args=SimpleNamespace(
            discopop_tau=options.pop("discopop_tau", 0.05),
            gradient_checkpointing_kwargs=None,
        ),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )


def make_inputs(pairs: list[dict]) -> dict[str, torch.Tensor]:
    """Make the inputs of a step, (2 * pairs, 1 + T): a token of prompt, then the response."""
    lengths = torch.tensor(count_tokens(pairs))
    is_response = torch.arange(T) < lengths[:, None]
    mask = torch.nn.functional.pad(is_response.long(), (1, 0))
    return {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }


def dpo(pairs: list[dict], log_probs: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute a loss of DPOTrainer; `options` are those of DPOConfig."""
    defaults = {
        "loss_weights": [1.0],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    trainer = make_trainer(pairs, log_probs, **{**defaults, **options})
    return DPOTrainer._compute_loss(trainer, trainer.model, make_inputs(pairs), return_outputs=False)


def cpo(pairs: list[dict], log_probs: torch.Tensor, *, kind: str, **options: Any) -> torch.Tensor:
    """Compute CPO's loss of a kind of scores: sums, means or log-ratios.

    Also for DPO with `label_smoothing`, which TRL's DPO trainer ignores under `sigmoid`: the CPO trainer has the same
    formula with smoothing.
    """
    scores = log_probs.sum(1)
    if kind == "means":
        scores = scores / torch.tensor(count_tokens(pairs))
    elif kind == "log-ratios":
        scores = scores - table(pairs, "reference").sum(1)
    chosen, rejected = scores.chunk(2)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        **options,
    )
    losses, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    return losses.mean()


def orpo(pairs: list[dict], log_probs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Compute ORPO's loss with our SFT term, on the response alone.

    TRL's SFT term includes the prompt, and is a mean over the batch.
    """
    means = log_probs.sum(1) / torch.tensor(count_tokens(pairs))
    chosen, rejected = means.chunk(2)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=beta,
    )
    odds_ratio_terms, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    return (-chosen - odds_ratio_terms).mean()


def kto(pairs: list[dict], log_probs: torch.Tensor, *, loss_type: str, **options: Any) -> torch.Tensor:
    """Compute a loss of KTOTrainer on the single responses of pairs; `options` are those of KTOConfig."""
    trainer = make_trainer(
        pairs,
        log_probs,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        **options,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    inputs = make_inputs(pairs)
    is_chosen = [side == "chosen" for side in SIDES for _ in pairs]
    inputs |= {
        "KL_input_ids": inputs["attention_mask"],  # ones
        "KL_attention_mask": inputs["attention_mask"],
        "KL_completion_mask": inputs["completion_mask"],
        "label": torch.tensor(is_chosen),
    }
    return KTOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)


# --- cases: our config, TRL's loss -----------------------------------------------------------------------------------

CASES: list[tuple[dict, partial]] = []
F_ALPHA = 0.3


def case(our_config: dict[str, Any], loss: Callable, **options: Any) -> None:
    """Add a case of a loss above."""
    CASES.append((our_config, partial(loss, beta=our_config["beta"], **options)))


def dpo_case(our_config: dict[str, Any], *loss_types: str, **options: Any) -> None:
    """Add a case of DPOTrainer."""
    case(our_config, dpo, loss_types=loss_types, **options)


dpo_case(
    {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False},
    "sigmoid",
)
dpo_case({"name": "dpo_norm", "beta": 2.0}, "sigmoid_norm")
dpo_case({"name": "hinge", "beta": 0.3}, "hinge")
dpo_case({"name": "ipo", "beta": 0.2, "average": True}, "ipo")
dpo_case(
    {"name": "robust", "beta": 0.3, "label_smoothing": 0.1},
    "robust",
    label_smoothing=0.1,
)
dpo_case(
    {"name": "exo", "beta": 0.3, "label_smoothing": 0.01},
    "exo_pair",
    label_smoothing=0.01,
)
dpo_case({"name": "nca", "beta": 0.3}, "nca_pair")
dpo_case({"name": "bco", "beta": 0.3, "momentum": 1.0}, "bco_pair")
dpo_case({"name": "sppo", "beta": 0.3}, "sppo_hard")
dpo_case({"name": "apo_zero", "beta": 0.3}, "apo_zero")
dpo_case({"name": "apo_down", "beta": 0.3}, "apo_down")
dpo_case(
    {"name": "discopop", "beta": 0.3, "tau": 0.5},
    "discopop",
    discopop_tau=0.5,
)
for name in ("aot", "aot_unpaired"):
    for smoothing in (0, 0.1):
        dpo_case(
            {"name": name, "beta": 0.3, "label_smoothing": smoothing},
            name,
            label_smoothing=smoothing,
        )
for kind, smoothing in (("log-ratios", 0.1), ("sums", 0.3)):
    case(
        {
            "name": "dpo",
            "beta": 0.3,
            "label_smoothing": smoothing,
            "reference_free": kind == "sums",
        },
        cpo,
        kind=kind,
        loss_type="sigmoid",
        label_smoothing=smoothing,
    )
for our_config, loss_type in (
    ({"name": "dpo_norm", "beta": 0.3}, "sigmoid_norm"),
    ({"name": "hinge", "beta": 0.3}, "hinge"),
    ({"name": "discopop", "beta": 0.3, "tau": 0.05}, "discopop"),
):
    for divergence, trl_divergence in (
        ("forward_kl", "forward_kl"),
        ("js", "js_divergence"),
        ("alpha", "alpha_divergence"),
    ):
        dpo_case(
            {**our_config, "f_divergence": divergence, "f_alpha": F_ALPHA},
            loss_type,
            f_divergence_type=trl_divergence,
            f_alpha_divergence_coef=1 - F_ALPHA,
        )
NORM = {"name": "dpo_norm", "beta": 0.3}
dpo_case(
    {**NORM, "sft_weight": 0.2},
    "sigmoid_norm",
    "sft",
    loss_weights=[1.0, 0.2],
)
# with hinge TRL 1.16's backward fails
dpo_case({**NORM, "wpo": True}, "sigmoid_norm", use_weighting=True)
dpo_case({**NORM, "ld_alpha": 0.4}, "sigmoid_norm", ld_alpha=0.4)
case(
    {"name": "simpo", "beta": 2.5, "gamma": 0.8},
    cpo,
    kind="means",
    loss_type="simpo",
    simpo_gamma=0.8,
    label_smoothing=0.0,
)
case({"name": "orpo", "beta": 0.2}, orpo)
for name, desirable, undesirable in (
    ("kto", 1.0, 1.0),
    ("kto", 1.5, 0.7),
    ("apo_zero_unpaired", 1.5, 0.7),
):
    weights = {
        "desirable_weight": desirable,
        "undesirable_weight": undesirable,
    }
    case({"name": name, "beta": 0.3, **weights}, kto, loss_type=name, **weights)


def measure(our_config: dict[str, Any], loss: partial, pairs: list[dict]) -> dict[str, Any]:
    """Measure a batch's mean loss, and its gradient at first tokens."""
    # under an f-divergence TRL clamps tensors, but only those in float32
    dtype = torch.float32 if "f_divergence" in our_config else torch.float64
    log_probs = table(pairs, "policy", dtype).requires_grad_()
    value = loss(pairs, log_probs)
    value.backward()
    return {"loss": value.item(), "gradient": log_probs.grad[:, 0].tolist()}


def main() -> None:
    inputs = draw()
    pairs = inputs["pairs"]
    results = []
    for our_config, loss in CASES:
        results.append(
            {
                "config": our_config,
                "each": [measure(our_config, loss, [pair]) for pair in pairs],
                "together": measure(our_config, loss, pairs),
            }
        )
    made_by = {"trl": trl.__version__, "torch": torch.__version__}
    json.dump({"made_by": made_by, **inputs, "results": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
