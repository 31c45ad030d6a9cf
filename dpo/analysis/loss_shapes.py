"""Losses as functions of a pair's rewards, without torch.

`dpo/losses/formulas.py` has them as functions of log-probabilities. The report needs these shapes to compute how strong
a loss's gradient still is, and how much the losses of pairs vary. A loss has no shape if it has no rewards, compares
the pairs of a batch, or has an option that adds another term.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

STEP = 1e-4  # of a numerical derivative
NORMAL_SCORES = np.linspace(-6, 6, 601)  # a mean under the normal distribution is NORMAL_WEIGHTS @ f(NORMAL_SCORES)
NORMAL_WEIGHTS = np.exp(-(NORMAL_SCORES**2) / 2) / np.exp(-(NORMAL_SCORES**2) / 2).sum()


def _logistic(x: np.ndarray) -> np.ndarray:
    """-log sigmoid(x)."""
    return np.logaddexp(0.0, -x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-_logistic(x))


def _exo(margin: np.ndarray, eps: float) -> np.ndarray:
    p_chosen, p_rejected = _sigmoid(margin), _sigmoid(-margin)
    return p_chosen * (-_logistic(margin) - np.log1p(-eps)) + p_rejected * (-_logistic(-margin) - np.log(eps))


def _discopop(margin: np.ndarray, tau: float) -> np.ndarray:
    return _sigmoid(-margin / tau) * _logistic(margin) + np.exp(-_logistic(margin / tau) - margin)


# w and r are the rewards of chosen and rejected, and m is their margin; the other parameters are options of the loss
OF_MARGIN: dict[str, Callable[..., np.ndarray]] = {
    "dpo": lambda m, label_smoothing=0.0: (1 - label_smoothing) * _logistic(m) + label_smoothing * _logistic(-m),
    "dpo_norm": lambda m: _logistic(m),
    "ipo": lambda m, beta: ((m - 0.5) / beta) ** 2,
    "hinge": lambda m: np.maximum(0.0, 1 - m),
    "robust": lambda m, label_smoothing: (
        ((1 - label_smoothing) * _logistic(m) - label_smoothing * _logistic(-m)) / (1 - 2 * label_smoothing)
    ),
    "exo": lambda m, label_smoothing: _exo(m, label_smoothing),
    "discopop": lambda m, tau: _discopop(m, tau),
    "simpo": lambda m, gamma: _logistic(m - gamma),
}
OF_BOTH: dict[str, Callable[..., np.ndarray]] = {
    "apo_zero": lambda w, r: _sigmoid(-w) + _sigmoid(r),
    "apo_down": lambda w, r: _sigmoid(w) + _sigmoid(r - w),
    "nca": lambda w, r: _logistic(w) + (_logistic(-w) + _logistic(-r)) / 2,
    "sppo": lambda w, r, beta: ((w - 0.5) / beta) ** 2 + ((r + 0.5) / beta) ** 2,
    "dpop": lambda w, r, penalty: _logistic(w - r - penalty * np.maximum(0.0, -w)),
    "bradley_terry": lambda w, r, centering: _logistic(w - r) + centering * (w + r) ** 2,
    "cal_dpo": lambda w, r, beta: _logistic((w - r) / beta) + ((w - 0.5) / beta) ** 2 + ((r + 0.5) / beta) ** 2,
}


class LossShape(NamedTuple):
    """A loss as a function of rewards.

    `of_margin` is None if the two rewards matter separately.
    """

    of_rewards: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (chosen, rejected) -> losses
    of_margin: Callable[[np.ndarray], np.ndarray] | None = None

    def gradient(self, chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
        """Norms of the derivatives by the two rewards, (B,)."""
        by_chosen = self.of_rewards(chosen + STEP, rejected) - self.of_rewards(chosen - STEP, rejected)
        by_rejected = self.of_rewards(chosen, rejected + STEP) - self.of_rewards(chosen, rejected - STEP)
        return np.hypot(by_chosen, by_rejected) / (2 * STEP)

    def estimate_deviation(self, mean_loss: float, mean_margin: float) -> float:
        """Estimate the standard deviation of a pair's loss from two means.

        Margins are taken to be normal: their standard deviation is the one that gives this mean loss.
        """
        assert self.of_margin is not None
        low, high = 0.0, 1.0  # deviations of margins
        while self._average(mean_margin, high) < mean_loss and high < 1e6:
            high *= 2
        for _ in range(50):  # bisection
            middle = (low + high) / 2
            if self._average(mean_margin, middle) < mean_loss:
                low = middle
            else:
                high = middle
        losses = self.of_margin(mean_margin + high * NORMAL_SCORES)
        return float(np.sqrt(NORMAL_WEIGHTS @ (losses - NORMAL_WEIGHTS @ losses) ** 2))

    def _average(self, mean_margin: float, deviation: float) -> float:
        """Average the loss over normal margins."""
        assert self.of_margin is not None
        return float(NORMAL_WEIGHTS @ self.of_margin(mean_margin + deviation * NORMAL_SCORES))


def find_loss_shape(config: Any) -> LossShape | None:
    """Find the shape of the loss that `config` describes; None without one."""
    if not isinstance(config, Mapping):
        return None
    name = str(config.get("name"))
    has_other_terms = any(config.get(key) for key in ("sft_weight", "wpo", "reference_free", "offset_by_margin"))
    function = OF_MARGIN.get(name) or OF_BOTH.get(name)
    if function is None or has_other_terms or config.get("f_divergence", "reverse_kl") != "reverse_kl":
        return None
    options = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if key in ("m", "w", "r"):
            continue
        options[key] = config.get(key, parameter.default)
        if not isinstance(options[key], (int, float)):  # an edited config may lack it
            return None
    shape = partial(function, **options)
    if name in OF_MARGIN:
        return LossShape(lambda w, r: shape(w - r), of_margin=shape)
    return LossShape(shape)
