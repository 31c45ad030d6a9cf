"""Methods of `experiments.frontier`, their settings, and the planned comparisons."""

from __future__ import annotations

from typing import NamedTuple

NOISE = 0.2  # default share of flipped labels in noisy runs
SMOOTHING = 0.1  # of cDPO if labels are not flipped
BATCH = 64  # pairs of an update


class Method(NamedTuple):
    """A kind of run, and a line of the picture.

    The names in braces in `overrides` stand for arguments of `list_overrides`. A method without overrides of train.py
    is trained by `plain.py`.
    """

    label: str
    overrides: tuple[str, ...]
    betas: tuple[float | None, ...]  # values of `knob`, the strongest constraint first
    lr: float
    passes: int = 4  # over the pairs
    knob: str = "beta"
    noisy: bool = False  # some of its labels are flipped
    fresh: bool = False  # uses each prompt once, in smaller batches for as many updates
    pairs: int = BATCH  # of an update; a fresh method divides them by its passes
    examples_per_pair: int = 1
    between: tuple[float, ...] = ()  # betas that --night adds where policies of `betas` lie far apart
    core: tuple[float | None, ...] = ()  # the betas of the default sweep, which is the paper's comparison
    control: bool = False  # also trained on tasks of free length

    def list_overrides(self, *, beta: float | None, noise: float, **others: object) -> tuple[str, ...]:
        """List a run's overrides of train.py.

        `noise` is the run's share of flipped labels.
        """
        smoothing = noise if self.noisy else SMOOTHING
        values = {"beta": beta, "gamma": (beta or 0) / 2, "smoothing": smoothing, **others}
        return tuple(text.format(**values) for text in self.overrides)

    def count_passes(self, beta: float | None) -> int:
        """Count the passes over the pairs, which fix the number of updates.

        `beta` is the value of `knob`. If the knob is the passes, `beta` multiplies them.
        """
        if self.knob == "passes":
            return self.passes * int(beta or 1)
        return self.passes


BETAS = (1.0, 0.3, 0.1, 0.03, 0.01)
REFERENCE = "model.reference_dtype=float32"
DPO = ("loss=dpo", "loss.beta={beta}", REFERENCE)
CDPO = (*DPO, "loss.label_smoothing={smoothing}")
IPO = ("loss=ipo", "loss.beta={beta}", REFERENCE)
SIMPO = ("loss=simpo", "loss.beta={beta}", "loss.gamma={gamma}")  # gamma / beta = 0.5, as in its paper
APO = ("loss=apo_zero", "loss.beta={beta}", REFERENCE)
KTO = ("loss=kto", "loss.beta={beta}", "unpair=true", REFERENCE)
SCORER = ("online.scorer=function", "online.function={scorer}", "online.max_new_tokens={longest}")
ONLINE = ("online=online", *SCORER, "online.ties=skip")  # a tie here is the same response twice: no gradient

IPO_BETAS = (0.5, 0.2, 0.1, 0.03, 0.01)
REWARD_MODELS = ("rm_last", "rm_tokens")  # runs that train no policy

# learning rates and passes are those that --tune chose
METHODS = {
    "dpo": Method("DPO", DPO, BETAS, 1e-3, between=(0.55,), core=(1.0, 0.3, 0.1, 0.01), control=True),
    "cdpo": Method("conservative DPO", CDPO, BETAS, 2e-3, between=(0.55,)),
    "ipo": Method("IPO", IPO, IPO_BETAS, 2e-3, between=(0.055,)),
    "simpo": Method("SimPO", SIMPO, (30.0, 10.0, 3.0, 1.0, 0.3), 1e-3),
    "apo_zero": Method("APO-zero", APO, (3.0, 1.0, 0.3, 0.1, 0.03), 2e-3, 2),
    "kto": Method("KTO", KTO, BETAS, 1e-3, examples_per_pair=2, core=(0.3, 0.1)),
    "online_dpo": Method(
        "online DPO", (*DPO, *ONLINE), BETAS, 2e-3,
        fresh=True, between=(0.17,), core=(1.0, 0.3, 0.1, 0.01), control=True,
    ),
    "dpo_once": Method("DPO, each pair seen once", DPO, BETAS, 4e-3, 1, fresh=True),
    "preferred_sft": Method("SFT on the chosen", ("loss=sft",), (1, 4, 16), 5e-4, 2, "passes", core=(1, 16)),
    "unlikelihood": Method("Unlikelihood", (), (0.01, 0.03, 0.1, 0.3, 1.0), 4e-3, 1, "alpha", core=(0.01, 0.1, 1.0)),
    "reinforce": Method("REINFORCE, true reward", (), BETAS, 1e-3, fresh=True),
    # an update has 4 prompts in place of 16, with all their responses
    "exact_rl": Method("exact RL, true reward", (), BETAS, 5e-4, fresh=True, pairs=16, core=(0.3, 0.1)),
    "rm_last": Method("reward model, last token", (), (None,), 1e-3, core=(None,)),
    "rm_tokens": Method("reward model, per token", (), (None,), 1e-3, core=(None,)),
    "dpo_noisy": Method("DPO", DPO, BETAS, 1e-3, noisy=True, between=(0.55,)),
    "cdpo_noisy": Method("conservative DPO", CDPO, BETAS, 2e-3, noisy=True, between=(0.55,)),
    "ipo_noisy": Method("IPO", IPO, IPO_BETAS, 2e-3, noisy=True, between=(0.055,)),
}  # fmt: skip

# --- policies that come from a run without more training --------------------------------------------------------------

REWEIGHTED_BETA = 0.3  # of the DPO policy that is reweighted
SCALES = (0.5, 1.0, 1.4, 2.0, 2.5, 3.3)  # factors of its log-ratio
RM_BETAS = (2.0, 1.0, 0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05)  # of a reward model's pi*
RM_DRAWS = (2, 8, 32, 128, 512, 2048)  # the N of best-of-N by a reward model
DERIVED = {
    "dpo_reweighted": "DPO, reweighted",
    "rm_last": "optimum of a reward model, last token",
    "rm_tokens": "optimum of a reward model, per token",
    "best_by_rm_last": "best of N by a reward model, last token",
    "best_by_rm_tokens": "best of N by a reward model, per token",
}


def find_label(name: str) -> str:
    return DERIVED.get(name) or METHODS[name].label


# --- comparisons planned before the runs ------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A comparison: the first method's reward less the second's at equal KL."""

    first: str
    second: str
    fixed_length: bool = True


PLANNED_KLS = (1.0, 2.0, 4.0)
PLANNED = (
    # the paper's claim: DPO against PPO (bounded by the reward models' optima), Unlikelihood and SFT on the chosen
    *(Planned("dpo", second) for second in ("rm_last", "rm_tokens", "best_by_rm_tokens", "unlikelihood")),
    *(Planned("dpo", second) for second in ("preferred_sft", "reinforce", "exact_rl")),
    # which loss
    *(Planned(first, "dpo") for first in ("cdpo", "ipo", "simpo", "apo_zero", "kto")),
    # training with a small beta, or reweighting a policy of a larger one
    *(Planned("dpo_reweighted", "dpo", fixed_length) for fixed_length in (True, False)),
    # responses of the policy, or pairs drawn beforehand
    Planned("online_dpo", "dpo"),
    *(Planned("online_dpo", "dpo_reweighted", fixed_length) for fixed_length in (True, False)),
    Planned("online_dpo", "dpo_once"),
    # label noise
    *(Planned(first, "dpo_noisy") for first in ("dpo", "cdpo_noisy", "ipo_noisy")),
)  # fmt: skip


class PlannedFall(NamedTuple):
    """A comparison: a method's reward with `smaller` less its reward with `beta`."""

    method: str
    beta: float
    smaller: float
    fixed_length: bool = True


PLANNED_FALLS = (
    PlannedFall("dpo", 0.1, 0.01),
    PlannedFall("dpo", 0.1, 0.01, fixed_length=False),
    PlannedFall("online_dpo", 0.1, 0.01),
    PlannedFall("dpo_noisy", 0.1, 0.01),
)
