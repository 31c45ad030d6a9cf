"""Losses of given log-probabilities by TRL's own code: the oracle of `tests/test_losses.py`.

    python -m venv .trl && .trl/bin/pip install torch==2.13.0 trl==1.16.0
    .trl/bin/python -m benchmarks.trl_losses > tests/golden/trl_losses.json

Needs nothing of ours. TRL's trainers compute the losses between a model's forward and their metrics, so their methods
get a model that returns these log-probabilities, and only the trainer's attributes that they need.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

LENGTHS = ((3, 5), (4, 1), (2, 2), (6, 3), (1, 7))  # tokens of chosen and rejected
T = max(map(max, LENGTHS))


def draw() -> dict[str, Any]:
    """Draw log-probabilities of each token by policy and reference, and log sum_v pi(v)^2 of the policy."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int, low: float, high: float) -> list[float]:
        return [round(x, 3) for x in (low + (high - low) * torch.rand(n, generator=generator)).tolist()]

    pairs = []
    for lengths in LENGTHS:
        pair = {}
        for side, n in zip(("chosen", "rejected"), lengths, strict=True):
            policy = tokens(n, -4, -0.1)
            pair[side] = {
                "policy": policy,
                "reference": [round(p + d, 3) for p, d in zip(policy, tokens(n, -0.9, 0.7), strict=True)],
                "squares": tokens(n, -3, -0.2),
            }
        pairs.append(pair)
    return {"pairs": pairs}


class Model:
    """A stand-in that returns log-probabilities as a model with TRL's fused head does."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, log_probs: torch.Tensor, squares: torch.Tensor) -> None:
        none = torch.zeros_like(log_probs)
        self.outputs = SimpleNamespace(
            log_probs=log_probs,
            log_sum_sq_probs=squares,
            entropy=none,
            mean_logits=none,
            is_top1=none.bool(),
        )

    def __call__(self, **_: Any) -> SimpleNamespace:
        return self.outputs


def table(pairs: list[dict], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Values of each token, (2 * pairs, T): all chosen, then all rejected."""
    rows = [pair[side][kind] for side in ("chosen", "rejected") for pair in pairs]
    return torch.tensor([row + [0.0] * (T - len(row)) for row in rows], dtype=dtype)


def dpo_trainer(pairs: list[dict], dtype: torch.dtype = torch.float64, **options: Any) -> tuple[float, torch.Tensor]:
    """Mean loss of these pairs, and its gradient with respect to each token, (2 * pairs, T)."""
    log_probs = table(pairs, "policy", dtype).requires_grad_()
    squares = table(pairs, "squares", dtype)
    lengths = [len(pair[side]["policy"]) for side in ("chosen", "rejected") for pair in pairs]
    mask = torch.tensor([[0] + [1] * n + [0] * (T - n) for n in lengths])  # one token of prompt
    types = options.pop("loss_type")
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=Model(log_probs, squares),
        ref_model=Model(table(pairs, "reference", dtype), squares),
        accelerator=same,
        args=SimpleNamespace(discopop_tau=options.pop("discopop_tau", 0.05), gradient_checkpointing_kwargs=None),
        loss_types=types,
        loss_weights=options.pop("loss_weights", [1.0] * len(types)),
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
    inputs = {"input_ids": mask * 0, "attention_mask": mask * 0 + 1, "completion_mask": mask}
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    loss.backward()
    return loss.item(), log_probs.grad


def reference_free(pairs: list[dict], loss_of: Callable[..., torch.Tensor]) -> tuple[float, torch.Tensor]:
    """The same for a loss of the mean log-probabilities."""
    log_probs = table(pairs, "policy", torch.float64).requires_grad_()
    lengths = torch.tensor([len(pair[side]["policy"]) for side in ("chosen", "rejected") for pair in pairs])
    loss = loss_of(*(log_probs.sum(1) / lengths).chunk(2)).mean()
    loss.backward()
    return loss.item(), log_probs.grad


def simpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    options = {"alpha": 0.0, "loss_type": "simpo", "simpo_gamma": 0.8, "beta": 2.5, "label_smoothing": 0.0}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **options)
    return CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """ORPO with our SFT term, on the response alone; TRL's includes the prompt, and is a mean over the batch."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=0.2)
    return -chosen - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]


def conservative(pairs: list[dict], options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """CPO's sigmoid loss, with DPO's log-ratios in place of log-probabilities if there is a reference.

    TRL's DPO trainer ignores `label_smoothing` under `sigmoid`; CPO's, which has the same formula, uses it.
    """
    log_probs = table(pairs, "policy", torch.float64).requires_grad_()
    sums = log_probs.sum(1)
    if not options["reference_free"]:
        sums = sums - table(pairs, "reference", torch.float64).sum(1)
    given = {
        "alpha": 0.0,
        "loss_type": "sigmoid",
        "beta": options["beta"],
        "label_smoothing": options["label_smoothing"],
    }
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **given)
    loss = CPOTrainer.cpo_loss(trainer, *sums.chunk(2))[0].mean()
    loss.backward()
    return loss.item(), log_probs.grad


F_ALPHA = 0.3
CASES: list[tuple[dict, Callable[[list[dict]], tuple[float, torch.Tensor]]]] = []


def case(ours: dict[str, Any], **options: Any) -> None:
    CASES.append((ours, lambda pairs: dpo_trainer(pairs, beta=ours["beta"], **options)))


case({"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}, loss_type=["sigmoid"])
case({"name": "dpo_norm", "beta": 2.0}, loss_type=["sigmoid_norm"])
case({"name": "hinge", "beta": 0.3}, loss_type=["hinge"])
case({"name": "ipo", "beta": 0.2, "average": True}, loss_type=["ipo"])
case({"name": "robust", "beta": 0.3, "label_smoothing": 0.1}, loss_type=["robust"], label_smoothing=0.1)
case({"name": "exo", "beta": 0.3, "label_smoothing": 0.01}, loss_type=["exo_pair"], label_smoothing=0.01)
case({"name": "nca", "beta": 0.3}, loss_type=["nca_pair"])
case({"name": "bco", "beta": 0.3, "momentum": 1.0}, loss_type=["bco_pair"])
case({"name": "sppo", "beta": 0.3}, loss_type=["sppo_hard"])
case({"name": "apo_zero", "beta": 0.3}, loss_type=["apo_zero"])
case({"name": "apo_down", "beta": 0.3}, loss_type=["apo_down"])
case({"name": "discopop", "beta": 0.3, "tau": 0.5}, loss_type=["discopop"], discopop_tau=0.5)
for name in ("aot", "aot_unpaired"):
    for smoothing in (0, 0.1):
        ours = {"name": name, "beta": 0.3, "label_smoothing": smoothing}
        case(ours, loss_type=[name], label_smoothing=smoothing)
for smoothing, free in ((0.1, False), (0.3, True)):
    ours = {"name": "dpo", "beta": 0.3, "label_smoothing": smoothing, "reference_free": free}
    CASES.append((ours, lambda pairs, ours=ours: conservative(pairs, ours)))
for name, loss_type in (("dpo_norm", "sigmoid_norm"), ("hinge", "hinge"), ("discopop", "discopop")):
    own = {"tau": 0.05} if name == "discopop" else {}
    for divergence, theirs in (("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")):
        case(
            {"name": name, "beta": 0.3, **own, "f_divergence": divergence, "f_alpha": F_ALPHA},
            loss_type=[loss_type],
            f_divergence_type=theirs,
            f_alpha_divergence_coef=1 - F_ALPHA,
            dtype=torch.float32,  # the only one that TRL clamps
        )
for ours, theirs in (
    ({"sft_weight": 0.2}, {"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.2]}),
    ({"wpo": True}, {"loss_type": ["sigmoid_norm"], "use_weighting": True}),  # with hinge TRL 1.16's backward fails
    ({"ld_alpha": 0.4}, {"loss_type": ["sigmoid_norm"], "ld_alpha": 0.4}),
):
    case({"name": "dpo_norm", "beta": 0.3, **ours}, **theirs)
CASES.append(({"name": "simpo", "beta": 2.5, "gamma": 0.8}, lambda pairs: reference_free(pairs, simpo)))
CASES.append(({"name": "orpo", "beta": 0.2}, lambda pairs: reference_free(pairs, orpo)))


def main() -> None:
    inputs = draw()
    results = []
    for ours, run in CASES:
        # each pair as a batch of its own, then all as one: the loss, its gradient to first tokens, chosen first
        batches = [*([pair] for pair in inputs["pairs"]), inputs["pairs"]]
        found = [(loss, gradient[:, 0].tolist()) for loss, gradient in map(run, batches)]
        *each, together = [{"loss": loss, "gradient": gradient} for loss, gradient in found]
        results.append({"config": ours, "each": each, "together": together})
    made_by = {"trl": trl.__version__, "torch": torch.__version__}
    json.dump({"made_by": made_by, **inputs, "results": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
