"""Win rates from verdicts on two models, also at equal lengths, and how small a difference the sample could show."""

import math
from typing import NamedTuple

import numpy as np

from dpo.analysis.verdict import FEWEST, share_interval
from dpo.numbers import count, percent

N_RESAMPLES = 10_000  # bootstrap samples; a tenth of them where a model is fitted to each, which takes longer
FEWEST_FOR_LENGTH = 100  # with fewer prompts, no length-controlled win rate is reported
FEWEST_ON_A_SIDE = 0.1  # nor is one if a model has the longer answer on a smaller share of prompts
SMALLEST_SHOWN = 0.1  # a win rate's difference from one half that users should be able to see
DETECTABLE = 1.96 + 0.84  # a test at 5 % finds a difference of this many standard errors in 80 % of samples


class Rate(NamedTuple):
    """A share of wins, in which a tie is half a win."""

    value: float
    low: float  # the 95 % interval
    high: float

    def __str__(self) -> str:
        return f"{percent(self.value)} (95 % interval {percent(self.low)} to {percent(self.high)})"


class Summary(NamedTuple):
    n: int  # prompts with a valid verdict
    wins: int
    ties: int  # also where the two orders of the answers gave different winners
    losses: int
    rate: Rate
    smallest: float  # the smallest difference from one half that the sample could show
    missing: int  # further prompts that it would take to show a difference of SMALLEST_SHOWN
    controlled: Rate | None  # at equal lengths; None with too few prompts, or if one model's are nearly all longer

    def describe(self, name: str, other: str) -> str:
        """Say in sentences how often each model wins, and how small a difference this many prompts can show."""
        counts = f"{name} wins {self.wins:,}, ties {self.ties:,} and loses {self.losses:,} of {count(self.n, 'prompt')}"
        text = f"{counts} against {other}: win rate {self.rate}. "
        needed = ""
        if self.missing:
            more = count(self.missing, "more prompt")
            needed = f"; {more} would show a rate {100 * SMALLEST_SHOWN:.0f} points away from 50 %"
        if self.n < FEWEST:
            return f"{text}That is too few to say much{needed}."
        points = count(math.ceil(100 * self.smallest), "point")
        text += f"This many can show a rate {points} or more away from 50 %{needed}"
        if self.controlled is None:
            needs = f"{FEWEST_FOR_LENGTH} prompts, on some of which each model has the longer answer"
            return f"{text}. No length-controlled rate, which needs {needs}."
        return f"{text}. At equal lengths of the answers: {self.controlled}."


def summarize_verdicts(scores: list[float], differences: list[int]) -> Summary:
    """Summarize the verdicts on N prompts.

    `scores` (N) are 1 for a win, 0.5 for a tie and 0 for a loss; `differences` (N) are by how many characters the first
    answer is the longer one.
    """
    values = np.array(scores, dtype=float)
    generator = np.random.default_rng(0)
    wins = int((values > 0.5).sum())
    losses = int((values < 0.5).sum())
    deviation = values.std(ddof=1) if len({*scores}) > 1 else 0.5  # equal verdicts show no spread: take the largest
    controlled = None
    surplus = np.array(differences, dtype=float)
    rarer_side = min((surplus > 0).mean(), (surplus < 0).mean())
    # If one model's answers are nearly always longer, the effect of length cannot be told from the model's quality. If
    # all lengths are equal, there is no such effect.
    if len(values) >= FEWEST_FOR_LENGTH and (rarer_side >= FEWEST_ON_A_SIDE or not surplus.any()):
        controlled = find_controlled_rate(values, surplus, generator)
    return Summary(
        n=len(values),
        wins=wins,
        ties=len(values) - wins - losses,
        losses=losses,
        rate=find_rate(values, generator),
        smallest=min(0.5, DETECTABLE * deviation / len(values) ** 0.5),
        missing=max(0, math.ceil((DETECTABLE * deviation / SMALLEST_SHOWN) ** 2) - len(values)),
        controlled=controlled,
    )


def find_rate(values: np.ndarray, generator: np.random.Generator) -> Rate:
    """Return the mean of `values` (N), scores from 0 to 1, with the 95 % interval of a bootstrap over prompts."""
    mean = float(values.mean())
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) == 1:  # every resample equals the sample, and the interval would have no width
        return Rate(mean, *share_interval(mean, n))
    # A resample's mean depends only on how often it has each distinct score, so only these counts are drawn.
    means = generator.multinomial(n, counts / n, size=N_RESAMPLES) @ distinct / n
    return Rate(mean, *np.quantile(means, (0.025, 0.975)).tolist())


def find_controlled_rate(values: np.ndarray, differences: np.ndarray, generator: np.random.Generator) -> Rate:
    """Return the win rate that a logistic regression on the length difference predicts at equal lengths.

    The regressor is tanh of the difference over its standard deviation, as in length-controlled AlpacaEval (arXiv
    2404.04475), whose term for the difficulty of instructions is left out: it needs many models' answers.
    """
    n = len(values)
    inputs = np.ones((n, 2))  # for intercept and slope
    inputs[:, 1] = np.tanh(differences / (differences.std() or 1.0))
    # An L2 penalty, in units of one prompt's log-likelihood. Its first entry keeps the intercept finite if all verdicts
    # are equal.
    penalty = np.diag([1e-3, 0.1])

    def fit(weights: np.ndarray) -> float:
        """Return the win rate at equal lengths, where `weights` say how often each prompt counts.

        Newton's method finds the intercept and the slope that maximize log-likelihood minus penalty.
        """
        solution = np.zeros(2)
        for _ in range(25):
            predicted = 1 / (1 + np.exp(-inputs @ solution))
            gradient = inputs.T @ (weights * (values - predicted)) - penalty @ solution
            curvature = (inputs * (weights * predicted * (1 - predicted))[:, None]).T @ inputs + penalty
            step = np.linalg.solve(curvature, gradient)
            solution += step * min(1.0, 2 / float(np.abs(step).max() or 1.0))  # longer steps could overshoot
        return 1 / (1 + float(np.exp(-solution[0])))  # the intercept alone: the length difference is 0

    resampled = [fit(generator.multinomial(n, np.full(n, 1 / n))) for _ in range(N_RESAMPLES // 10)]
    return Rate(fit(np.ones(n)), *np.quantile(resampled, (0.025, 0.975)).tolist())
