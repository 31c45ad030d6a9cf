"""Methods that `experiments.frontier` compares, with their settings."""

from __future__ import annotations

from typing import NamedTuple

NOISE = 0.2  # default share of flipped labels in noisy runs
SMOOTHING = 0.1  # of cDPO if labels are not flipped


class Method(NamedTuple):
    """A line of the picture.

    The names in braces in `overrides` stand for arguments of `list_overrides`.
    """

    label: str
    overrides: tuple[str, ...]
    betas: tuple[float | None, ...]  # from the strongest hold on the policy to the weakest
    lr: float
    noisy: bool = False  # some of its labels are flipped
    once: bool = False  # sees each pair once, in smaller batches, so that it has as many updates as the others
    between: tuple[float, ...] = ()  # more betas, left out with --quick, where the policies of `betas` lie far apart

    def list_overrides(self, *, beta: float | None, noise: float, **others: object) -> tuple[str, ...]:
        """List a run's overrides of train.py.

        `noise` is the share of flipped labels if the method is noisy.
        """
        smoothing = noise if self.noisy else SMOOTHING
        values = {"beta": beta, "gamma": (beta or 0) / 2, "smoothing": smoothing, **others}
        return tuple(text.format(**values) for text in self.overrides)


BETAS = (1.0, 0.3, 0.1, 0.03, 0.01)
DPO = ("loss=dpo", "loss.beta={beta}", "model.reference_dtype=float32")
CDPO = (*DPO, "loss.label_smoothing={smoothing}")
IPO = ("loss=ipo", "loss.beta={beta}", "model.reference_dtype=float32")
SIMPO = ("loss=simpo", "loss.beta={beta}", "loss.gamma={gamma}")  # gamma / beta = 0.5, as in its paper
APO = ("loss=apo_zero", "loss.beta={beta}", "model.reference_dtype=float32")
ONLINE = ("online=online", "online.scorer=function", "online.function={scorer}", "online.max_new_tokens={longest}")

IPO_BETAS = (0.5, 0.2, 0.1, 0.03, 0.01)

METHODS = {
    "dpo": Method("DPO", DPO, BETAS, 2e-3, between=(0.55,)),
    "cdpo": Method("conservative DPO", CDPO, BETAS, 2e-3, between=(0.55,)),
    "ipo": Method("IPO", IPO, IPO_BETAS, 2e-3, between=(0.055,)),
    "simpo": Method("SimPO", SIMPO, (30.0, 10.0, 3.0, 1.0, 0.3), 2e-3),
    "apo_zero": Method("APO-zero", APO, (3.0, 1.0, 0.3, 0.1, 0.03), 1e-3),
    "online_dpo": Method("online DPO", (*DPO, *ONLINE), BETAS, 2e-3, once=True, between=(0.17,)),
    "dpo_once": Method("DPO, each pair seen once", DPO, BETAS, 2e-3, once=True),
    "preferred_sft": Method("SFT on the chosen", ("loss=sft",), (None,), 4e-3),
    "dpo_noisy": Method("DPO", DPO, BETAS, 2e-3, noisy=True, between=(0.55,)),
    "cdpo_noisy": Method("conservative DPO", CDPO, BETAS, 2e-3, noisy=True, between=(0.55,)),
    "ipo_noisy": Method("IPO", IPO, IPO_BETAS, 2e-3, noisy=True, between=(0.055,)),
}
