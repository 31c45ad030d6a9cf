"""Methods of `experiments.frontier`, their settings, and the planned comparisons."""

from __future__ import annotations

from typing import NamedTuple

BATCH = 64  # pairs of an update


class Method(NamedTuple):
    """A kind of run.

    `Sweep.make_job` fills in the names in braces in `overrides`. A method without overrides of train.py is trained by
    `plain.py`.
    """

    overrides: tuple[str, ...]
    betas: tuple[float | None, ...]  # values of `knob`, the strongest constraint first
    lr: float
    passes: int = 4  # over the pairs
    knob: str = "beta"
    fresh: bool = False  # uses each prompt once, in smaller batches for as many updates
    pairs: int = BATCH  # in an update; a fresh method divides them by its passes
    examples_per_pair: int = 1


DPO = ("loss=dpo", "loss.beta={beta}", "model.reference_dtype=float32")
ONLINE = (
    "online=online",
    "online.scorer=function",
    "online.function={scorer}",
    "online.max_new_tokens={longest}",
    "online.ties=skip",  # a tie here is the same response twice: no gradient
)
KTO = ("loss=kto", "loss.beta={beta}", "unpair=true", "model.reference_dtype=float32")
REWARD_MODELS = ("rm_last", "rm_tokens")  # runs that train no policy
# Learning rates and passes were chosen on pairs and prompts that no run uses (docs/frontier.md).
METHODS = {
    "dpo": Method(DPO, (1.0, 0.3, 0.1, 0.01), 1e-3),
    "kto": Method(KTO, (0.3, 0.1), 1e-3, examples_per_pair=2),
    "online_dpo": Method((*DPO, *ONLINE), (1.0, 0.3, 0.1, 0.01), 2e-3, fresh=True),
    "preferred_sft": Method(("loss=sft",), (1, 16), 5e-4, 2, knob="passes"),
    "unlikelihood": Method((), (0.01, 0.1, 1.0), 4e-3, 1, knob="alpha"),
    # An update has 4 prompts in place of 16, with all their responses.
    "exact_rl": Method((), (0.3, 0.1), 5e-4, fresh=True, pairs=16),
    "rm_last": Method((), (None,), 1e-3),
    "rm_tokens": Method((), (None,), 1e-3),
}

RM_BETAS = (2.0, 1.0, 0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05)  # for pi* of a reward model

# These comparisons were planned before the runs.
PLANNED_KLS = (1.0, 2.0, 4.0)
PLANNED = (  # the first method's reward less the second's at equal KL
    # The paper claims that DPO beats PPO (bounded by the reward models' optima), Unlikelihood and SFT on the chosen.
    *(("dpo", second) for second in ("rm_last", "rm_tokens", "unlikelihood", "preferred_sft", "exact_rl")),
    ("kto", "dpo"),
    ("online_dpo", "dpo"),  # responses of the policy, or pairs drawn beforehand
)
