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
        return [round(x, 3) for x in (low + (high - low) * torch.rand(n, generator=generator)).tolist()]

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
    rows = [pair[side][kind] for side in SIDES for pair in pairs]
    return torch.tensor([row + [0.0] * (T - len(row)) for row in rows], dtype=dtype)


def count_tokens(pairs: list[dict]) -> list[int]:
    return [len(pair[side]["policy"]) for side in SIDES for pair in pairs]


# --- TRL's losses of the policy's log-probabilities (2 * pairs, T) ---------------------------------------------------


class Model:
    """A stand-in that returns what a model with TRL's head returns."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, log_probs: torch.Tensor, squares: torch.Tensor) -> None:
        zeros = torch.zeros_like(log_probs)
        for_metrics = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        self.outputs = SimpleNamespace(log_probs=log_probs, log_sum_sq_probs=squares, **for_metrics)

    def __call__(self, **_: Any) -> SimpleNamespace:
        return self.outputs


def dpo(pairs: list[dict], log_probs: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute a loss of DPOTrainer; `options` are those of DPOConfig."""
    reference = table(pairs, "reference", log_probs.dtype)
    squares = table(pairs, "squares", log_probs.dtype)
    mask = torch.tensor([[0] + [1] * n + [0] * (T - n) for n in count_tokens(pairs)])  # one token of prompt
    tau = options.pop("discopop_tau", 0.05)
    trainer = SimpleNamespace(
        model=Model(log_probs, squares),
        ref_model=Model(reference, squares),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(discopop_tau=tau, gradient_checkpointing_kwargs=None),
        loss_weights=options.pop("loss_weights", [1.0]),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **{
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "label_smoothing": 0.0,
            "use_weighting": False,
            **options,
        },
    )
    zeros, ones = torch.zeros_like(mask), torch.ones_like(mask)
    inputs = {"input_ids": zeros, "attention_mask": ones, "completion_mask": mask}
    return DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)


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
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), alpha=0.0, **options)
    return CPOTrainer.cpo_loss(trainer, *scores.chunk(2))[0].mean()


def orpo(pairs: list[dict], log_probs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Compute ORPO's loss with our SFT term, on the response alone.

    TRL's SFT term includes the prompt, and is a mean over the batch.
    """
    chosen, rejected = (log_probs.sum(1) / torch.tensor(count_tokens(pairs))).chunk(2)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=beta)
    return (-chosen - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]).mean()


class ModelOfLabels:
    """A stand-in for a model that also scores mismatched responses.

    The ids of mismatched responses (`KL_input_ids`) are ones, and all other ids are zeros.
    """

    training, is_gradient_checkpointing = True, False

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs = log_probs

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        log_probs = self.log_probs.roll(1, 0) if input_ids.any() else self.log_probs
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros)


def kto(pairs: list[dict], log_probs: torch.Tensor, *, loss_type: str, **options: Any) -> torch.Tensor:
    """Compute a loss of KTOTrainer on the single responses of pairs.

    `options` are those of KTOConfig. A row's mismatched response is the response of the row before it, as in TRL.
    """
    mask = torch.tensor([[0] + [1] * n + [0] * (T - n) for n in count_tokens(pairs)])
    trainer = SimpleNamespace(
        model=ModelOfLabels(log_probs),
        ref_model=ModelOfLabels(table(pairs, "reference", log_probs.dtype)),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    zeros, ones = torch.zeros_like(mask), torch.ones_like(mask)
    inputs = {"input_ids": zeros, "attention_mask": ones, "completion_mask": mask}
    inputs |= {"KL_input_ids": ones, "KL_attention_mask": ones, "KL_completion_mask": mask}
    inputs["label"] = torch.tensor([side == "chosen" for side in SIDES for _ in pairs])
    return KTOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)


# --- cases: our config, TRL's loss -----------------------------------------------------------------------------------

CASES: list[tuple[dict, partial]] = []
F_ALPHA = 0.3


def case(our_config: dict[str, Any], *loss_types: str, **options: Any) -> None:
    """Add a case of DPOTrainer."""
    CASES.append((our_config, partial(dpo, beta=our_config["beta"], loss_types=loss_types, **options)))


case({"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}, "sigmoid")
case({"name": "dpo_norm", "beta": 2.0}, "sigmoid_norm")
case({"name": "hinge", "beta": 0.3}, "hinge")
case({"name": "ipo", "beta": 0.2, "average": True}, "ipo")
case({"name": "robust", "beta": 0.3, "label_smoothing": 0.1}, "robust", label_smoothing=0.1)
case({"name": "exo", "beta": 0.3, "label_smoothing": 0.01}, "exo_pair", label_smoothing=0.01)
case({"name": "nca", "beta": 0.3}, "nca_pair")
case({"name": "bco", "beta": 0.3, "momentum": 1.0}, "bco_pair")
case({"name": "sppo", "beta": 0.3}, "sppo_hard")
case({"name": "apo_zero", "beta": 0.3}, "apo_zero")
case({"name": "apo_down", "beta": 0.3}, "apo_down")
case({"name": "discopop", "beta": 0.3, "tau": 0.5}, "discopop", discopop_tau=0.5)
for name in ("aot", "aot_unpaired"):
    for smoothing in (0, 0.1):
        case({"name": name, "beta": 0.3, "label_smoothing": smoothing}, name, label_smoothing=smoothing)
for smoothing, free in ((0.1, False), (0.3, True)):
    our_config = {"name": "dpo", "beta": 0.3, "label_smoothing": smoothing, "reference_free": free}
    options = {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": smoothing}
    CASES.append((our_config, partial(cpo, kind="sums" if free else "log-ratios", **options)))
for name, loss_type in (("dpo_norm", "sigmoid_norm"), ("hinge", "hinge"), ("discopop", "discopop")):
    tau = {"tau": 0.05} if name == "discopop" else {}
    for divergence, trl_divergence in (
        ("forward_kl", "forward_kl"),
        ("js", "js_divergence"),
        ("alpha", "alpha_divergence"),
    ):
        our_config = {"name": name, "beta": 0.3, **tau, "f_divergence": divergence, "f_alpha": F_ALPHA}
        case(our_config, loss_type, f_divergence_type=trl_divergence, f_alpha_divergence_coef=1 - F_ALPHA)
NORM = {"name": "dpo_norm", "beta": 0.3}
case({**NORM, "sft_weight": 0.2}, "sigmoid_norm", "sft", loss_weights=[1.0, 0.2])
case({**NORM, "wpo": True}, "sigmoid_norm", use_weighting=True)  # with hinge TRL 1.16's backward fails
case({**NORM, "ld_alpha": 0.4}, "sigmoid_norm", ld_alpha=0.4)
SIMPO = {"loss_type": "simpo", "simpo_gamma": 0.8, "beta": 2.5, "label_smoothing": 0.0}
CASES.append(({"name": "simpo", "beta": 2.5, "gamma": 0.8}, partial(cpo, kind="means", **SIMPO)))
CASES.append(({"name": "orpo", "beta": 0.2}, partial(orpo, beta=0.2)))
for name, weights in (("kto", (1.0, 1.0)), ("kto", (1.5, 0.7)), ("apo_zero_unpaired", (1.5, 0.7))):
    our_config = {"name": name, "beta": 0.3, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    options = {key: value for key, value in our_config.items() if key != "name"}
    CASES.append((our_config, partial(kto, loss_type=name, **options)))


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
    results = []
    for our_config, loss in CASES:
        each = [measure(our_config, loss, [pair]) for pair in inputs["pairs"]]
        results.append({"config": our_config, "each": each, "together": measure(our_config, loss, inputs["pairs"])})
    made_by = {"trl": trl.__version__, "torch": torch.__version__}
    json.dump({"made_by": made_by, **inputs, "results": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
