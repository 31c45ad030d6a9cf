"""Rules of the report on simulated runs: how often each errs, and how often it sees what it is for.

Every row of RATES simulates runs without the fault (the null) and runs with it (the alternative), at the sample sizes
of the default settings. Rules that state a fact, which cannot err, are in FACTS. docs/LOG.md has the table, which
this command prints:

    python -m pytest -m slow -s tests/analysis/test_rules_on_simulated_runs.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import yaml
from support.records import sample
from support.runs import ROOT

from dpo.analysis import rules_on_answers as on_answers
from dpo.analysis import rules_on_pairs as on_pairs
from dpo.analysis import rules_on_training as on_training
from dpo.analysis.findings import RULES
from dpo.analysis.ledger_file import SCHEMA, encode
from dpo.analysis.rules import NOTE, WARNING, Finding
from dpo.analysis.runs import Log, Run
from dpo.data.counts import SplitCounter
from dpo.data.table import Prompt

DEFAULTS = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
DPO = yaml.safe_load((ROOT / "config/loss/dpo.yaml").read_text(encoding="utf-8")) | {"beta": 0.1}
ONLINE = yaml.safe_load((ROOT / "config/online/online.yaml").read_text(encoding="utf-8"))
BATCH, N_HELD_OUT = DEFAULTS["batch_size"], DEFAULTS["n_eval_examples"]
N_SAMPLES, N_TOKENS = DEFAULTS["n_eval_model_samples"], DEFAULTS["n_eval_tokens"]
LONG, SHORT = 160_800 // BATCH, 2_000 // BATCH  # updates: the training split of HH, and a small dataset
WARMUP = 150  # updates
N_EVALUATIONS = LONG * BATCH // 20_000 + 1  # after the first update
TOKENS = 70.0  # of a response
TRIALS, ALL_TRIALS = 3, 1000  # simulated runs of each kind, by default and in the slow test
LIMITS = {WARNING: 0.05, NOTE: 0.10}  # largest rate of false ones

Rng = np.random.Generator
Draw = Callable[[Rng, tuple[int, ...]], np.ndarray]  # values with mean 0 and standard deviation 1
LAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "Student's t (5)": lambda rng, shape: rng.standard_t(5, shape) / (5 / 3) ** 0.5,
    "skewed (1 - exponential)": lambda rng, shape: 1 - rng.exponential(size=shape),
}


class Columns(Log):
    """A log made of columns."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.n_rows = len(columns["updates"])
        super().__init__()
        self._columns, self.names = dict(columns), list(columns)
        self.examples, self.updates = columns["updates"] * BATCH, columns["updates"]

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns.get(name, np.full(self.n_rows, np.nan))


def make_run(train: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray] | None = None, **more: Any) -> Run:
    """A run with these metrics; `settings`, `preflight` and other fields of Run in `more`."""
    config = DEFAULTS | {"loss": DPO} | more.pop("settings", {})
    preflight = {"train": {"mean_chosen_tokens": TOKENS, "mean_rejected_tokens": TOKENS}} | more.pop("preflight", {})
    n = len(next(iter(train.values()), ()))
    logs = {"train": Columns({"updates": np.arange(1.0, n + 1), **train})} if n else {}
    if held_out is not None:
        logs["eval"] = Columns(held_out)
    return Run(Path("run"), "simulated", config=config, preflight=preflight, **logs, **more)


def losses_at(margins: np.ndarray, loss: Mapping[str, Any]) -> np.ndarray:
    """The losses of pairs by their margins."""
    assert loss["name"] == "dpo"
    return np.logaddexp(0.0, -margins)


def describe(split: str, margins: np.ndarray, loss: Mapping[str, Any], chosen: np.ndarray | None = None) -> dict:
    """Metrics of margins, (rows, pairs); `chosen` has the chosen rewards, which are else half of the margins."""
    chosen = margins / 2 if chosen is None else chosen
    means = {"chosen": chosen, "rejected": chosen - margins, "margins": margins, "accuracies": margins > 0}
    metrics = {f"rewards_{split}/{name}": values.mean(axis=1) for name, values in means.items()}
    return metrics | {f"loss/{split}": losses_at(margins, loss).mean(axis=1)}


def train_pairs(
    margins: np.ndarray,
    held_out: np.ndarray | None = None,
    *,
    loss: Mapping[str, Any] = DPO,
    ledger: bool = False,
    tokens: np.ndarray | None = None,
    **more: Any,
) -> Run:
    """A run with margins of its updates, (updates, BATCH), and of its evaluations, (evaluations, N_HELD_OUT).

    The first evaluation is before the first update, and has margins of 0. `tokens`, (N_HELD_OUT,), is the length of the
    chosen minus that of the rejected responses.
    """
    evaluations = None
    if held_out is not None:
        held_out = np.concatenate([np.zeros((1, held_out.shape[1])), held_out])
        updates = np.linspace(0, len(margins), len(held_out)).round()
        evaluations = {"updates": updates, **describe("eval", held_out, loss)}
        if ledger:
            more["ledger"] = write_ledger("eval", updates, held_out, loss, tokens)
    more["settings"] = {"loss": loss, **more.get("settings", {})}
    return make_run(describe("train", margins, loss), evaluations, **more)


def write_ledger(
    split: str, updates: np.ndarray, margins: np.ndarray, loss: Mapping[str, Any], tokens: np.ndarray | None = None
) -> pa.Table:
    """Rows of margins, (updates, pairs): a pair per column for evaluations, a new one each time for updates."""
    n_updates, n_pairs = margins.shape
    ids = np.tile(np.arange(n_pairs), n_updates) if split == "eval" else np.arange(margins.size)
    flat = margins.ravel()
    columns = dict.fromkeys(SCHEMA.names, np.zeros(len(flat)))
    columns |= {"example": ids.astype(str), "dataset": np.full(len(flat), "hh"), "split": np.full(len(flat), split)}
    columns |= {"update": np.repeat(updates, n_pairs), "margin": flat, "loss": losses_at(flat, loss)}
    columns["chosen_tokens"] = TOKENS + (0 if tokens is None else np.tile(tokens, n_updates)) + columns["chosen_tokens"]
    columns["rejected_tokens"] = columns["rejected_tokens"] + TOKENS
    columns["truncated"] = np.zeros(len(flat), dtype=bool)
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    return encode(pa.Table.from_arrays(arrays, schema=SCHEMA))


def rise(n: int) -> np.ndarray:
    """A course from 0 to 1, most of it in the first half, (n, 1)."""
    return 1 - np.exp(-4 * np.linspace(0, 1, n))[:, None]


def correlate(rng: Rng, n: int, correlation: float) -> np.ndarray:
    """Values with mean 0 and deviation 1, whose neighbours are correlated, (n,)."""
    kernel = correlation ** np.arange(30)
    return np.convolve(rng.standard_normal(n + 29), kernel, "valid") * (1 - correlation**2) ** 0.5


# --- simulated runs ---------------------------------------------------------------------------------------------------


@cache
def find_mean_margin(loss: float, deviation: float, draw: Draw) -> float:
    """Find the mean margin at which DPO has this mean loss, by bisection."""
    noise = draw(np.random.default_rng(1), (50_000,)) * deviation
    low, high = -10.0, 10.0
    for _ in range(16):
        mean = (low + high) / 2
        low, high = (mean, high) if np.logaddexp(0, -(mean + noise)).mean() > loss else (low, mean)
    return mean


def with_held_out_loss(rng: Rng, loss: float, law: str, *, ledger: bool, deviation: float = 2.0) -> Run:
    draw = LAWS[law]
    held_out = find_mean_margin(loss, deviation, draw) + deviation * draw(rng, (1, N_HELD_OUT))
    return train_pairs(np.zeros((SHORT, BATCH)), held_out, ledger=ledger)


def with_losses(rng: Rng, rise: float, n: int = SHORT, accuracy: float | None = None) -> Run:
    """Held-out losses that rise by `rise` on average, of SFT; if pairs become ranked right, of ORPO."""
    held_out = 100 + 40 * rng.standard_normal(N_HELD_OUT)
    later = held_out + rise + 10 * rng.standard_normal(N_HELD_OUT)
    training = 100 + 40 * rng.standard_normal((n, BATCH)).mean(axis=1)
    evaluations = {"updates": np.array([0.0, n]), "loss/eval": np.array([held_out.mean(), later.mean()])}
    if accuracy is not None:
        evaluations["rewards_eval/accuracies"] = rng.binomial(N_HELD_OUT, [0.5, accuracy]) / N_HELD_OUT
    loss = "sft" if accuracy is None else "orpo"
    return make_run({"loss/train": training}, evaluations, settings={"loss": {"name": loss}})


def with_accuracies(rng: Rng, training: float, held_out: float, n: int = N_HELD_OUT) -> Run:
    margins = [rng.random(shape) - 1 + share for shape, share in (
        ((SHORT, BATCH), training), ((1, n), held_out))]  # fmt: skip
    return train_pairs(*margins, preflight={"epoch": SHORT * BATCH}, settings={"n_eval_examples": n})


def with_turn(rng: Rng, *, fall: float = 0.0, growth: float = 1.0, churn: float = 1.0, ledger: bool = False) -> Run:
    """Evaluations of pairs whose margins vary from one to the next, by `churn`, while training improves.

    From the middle of the evaluations on, their mean falls by `fall` standard deviations, or all grow by `growth`.
    """
    n = N_EVALUATIONS
    late = np.clip(np.linspace(-1, 1, n), 0, 1)[:, None]
    standard = rng.standard_normal(N_HELD_OUT) + churn * rng.standard_normal((n, N_HELD_OUT))
    margins = (0.5 - fall * late + standard) * (1 + (growth - 1) * late)
    training = np.linspace(0, 3, SHORT)[:, None] + rng.standard_normal((SHORT, BATCH))
    return train_pairs(training, margins, ledger=ledger)


def with_training_margins(rng: Rng, mean: float, deviation: float, n: int = SHORT, loss: Any = DPO) -> Run:
    margins = np.minimum(1.0, 4 * rise(n)) * (mean + deviation * rng.standard_normal((n, BATCH)))
    return train_pairs(margins, loss=loss)


def with_collapse(rng: Rng, loss: float, deviation: float = 3.0) -> Run:
    """A run whose loss rises to a mean, as margins of this deviation have it."""
    margins = find_mean_margin(loss, deviation, LAWS["normal"]) + deviation * rng.standard_normal((SHORT, BATCH))
    return train_pairs(np.minimum(1.0, 10 * rise(SHORT)) * margins)


def with_chosen_rewards(rng: Rng, chosen: float, margin: float) -> Run:
    """Nats by which chosen responses changed, and the margin; both vary by 5 nats from pair to pair."""
    metrics: dict[str, dict[str, np.ndarray]] = {"train": {}, "eval": {"updates": np.array([0.0, SHORT])}}
    for split, shape in (("train", (SHORT, BATCH)), ("eval", (1, N_HELD_OUT))):
        margins = margin + 5 * rng.standard_normal(shape)
        nats = chosen + 5 * rng.standard_normal(shape)
        means = {"chosen": nats, "rejected": nats - margins, "margins": margins}
        for name, values in means.items():
            mean = values.mean(axis=1) if split == "train" else np.append(0.0, values.mean(axis=1))
            metrics[split][f"rewards_{split}/{name}"] = DPO["beta"] * mean
            metrics[split][f"logps_{split}/{name}"] = mean - 100
    return make_run(metrics["train"], metrics["eval"])


def with_fall(rng: Rng, *, per_token: float, over: int) -> Run:
    """Chosen responses that fall by nats a token over so many updates.

    Log-ratios vary by 10 nats. Pairs of a prompt stay together, so those of three updates are alike.
    """
    start = rng.integers(SHORT // 4, SHORT // 2)
    course = -np.clip((np.arange(SHORT) - start) / over, 0, 1) * per_token * TOKENS
    by_prompt = np.repeat(rng.standard_normal(SHORT), 3)[:SHORT]
    chosen = DPO["beta"] * (course + 10 * by_prompt + 5 * rng.standard_normal(SHORT))
    return make_run({"rewards_train/chosen": chosen, "rewards_train/margins": chosen})


def with_gradients(rng: Rng, growth: float) -> Run:
    """Gradients that vary by half up and down, and grow after the warmup."""
    course = np.linspace(0, np.log(growth), SHORT - WARMUP - 100)
    course = np.pad(course, (WARMUP + 50, 50), "edge") + 0.7 * correlate(rng, SHORT, 0.5)
    return make_run({"grad_norm": np.exp(course), "rewards_train/margins": np.zeros(SHORT)})


def with_epochs(rng: Rng, step: float) -> Run:
    """Two epochs of a small dataset: margins grow steadily, and by `step` at once as the second one begins."""
    mean = np.linspace(0.3, 0.8, 2 * SHORT) + step * (np.arange(2 * SHORT) >= SHORT)
    margins = mean[:, None] + 1.5 * rng.standard_normal((2 * SHORT, BATCH))
    held_out = {"updates": np.array([0.0, SHORT, 2 * SHORT]), "loss/eval": np.array([0.693, 0.62, 0.63])}
    return make_run(describe("train", margins, DPO), held_out, preflight={"epoch": SHORT * BATCH})


def with_speed(rng: Rng, slowdown: float) -> Run:
    """Updates that vary in speed, like their neighbours, and become slower in the second half."""
    course = np.where(np.arange(SHORT) < SHORT / 2, 1.0, 1 / slowdown)
    return make_run({"tokens_per_second": 1000 * course * np.exp(0.3 * correlate(rng, SHORT, 0.8))})


def with_dialogues(rng: Rng, shared: float) -> Run:
    """Dialogues that open with a greeting in one of five cases; this share of the test's is from training."""
    greetings = ["Hi", "Hello there", "Can you help me?", "I have a question"]

    numbers = rng.permutation(2000 + N_HELD_OUT)
    openings = [
        f"What do you know about subject {number}?" if rng.random() > 0.2 else greetings[number % 4]
        for number in numbers
    ]
    training, test = openings[:2000], openings[2000:]
    test[: round(shared * N_HELD_OUT)] = training[: round(shared * N_HELD_OUT)]
    counters = []
    for split, texts in {"train": training, "test": test}.items():
        counters.append(SplitCounter(encode=None))  # it is not asked to tokenize
        dialogues = (f"\n\nHuman: {opening}\n\nAssistant: Go on.\n\nHuman: {split} {i}\n\nAssistant:"
                     for i, opening in enumerate(texts))  # fmt: skip
        prompts = (Prompt(text, [], [], "keep_end", True) for text in dialogues)
        list(counters[-1].watch(prompts))
    counters[1].count_in_train(counters[0])
    return make_run({}, preflight={"test": dict(counters[1].counts)})


def with_labels(rng: Rng, flipped: float, law: str, shift: float) -> Run:
    """A ledger of a small dataset, with this share of flipped labels; `shift` is the mean margin in deviations."""
    margins = rise(SHORT) * (shift + LAWS[law](rng, (SHORT, BATCH)))
    margins = np.where(rng.random(margins.shape) < flipped, -margins, margins)
    ledger = write_ledger("train", np.arange(1.0, SHORT + 1), margins, DPO)
    return make_run(describe("train", margins, DPO), ledger=ledger)


def with_lengths(rng: Rng, longer: float, shorter: float) -> Run:
    """Held-out accuracies of pairs whose chosen response is longer, in 60 %, and of those where it is shorter."""
    tokens = np.where(rng.random(N_HELD_OUT) < 0.6, 20, -20)
    margins = rng.random((1, N_HELD_OUT)) - 1 + np.where(tokens > 0, longer, shorter)
    return train_pairs(np.zeros((SHORT, BATCH)), margins, ledger=True, tokens=tokens)


def with_samples(rng: Rng, policy: Callable[[Rng], str], reference: Callable[[Rng], str]) -> Run:
    samples = [sample(SHORT * BATCH, policy(rng), reference(rng), f"prompt {i}") for i in range(N_SAMPLES)]
    return make_run({"rewards_train/margins": np.zeros(SHORT)}, samples=samples)


def with_cut_off_samples(rng: Rng, policy: float, reference: float) -> Run:
    """Samples of which these shares are cut off; long answers of both are to the same prompts."""
    samples = []
    for i, difficulty in enumerate(rng.standard_normal(N_SAMPLES)):
        ended = {}
        for model, share in (("policy", policy), ("reference", reference)):
            length = 0.5**0.5 * (difficulty + rng.standard_normal())
            ended[f"{model}_ended"] = bool(length < NormalDist().inv_cdf(1 - share))
        samples.append({**sample(SHORT * BATCH, "some words", "some words", f"prompt {i}"), **ended})
    return make_run({"rewards_train/margins": np.zeros(SHORT)}, samples=samples)


def empty_in(share: float) -> Callable[[Rng], str]:
    return lambda rng: "" if rng.random() < share else "some words"


WORDS: dict[str, Callable[[Rng], float]] = {  # numbers of words with a mean of about 60 and 45
    "geometric": lambda rng: rng.geometric(1 / 60),
    "lognormal": lambda rng: 1 + np.exp(rng.normal(3.6, 0.6)),
}


def of_words(law: str, factor: float) -> Callable[[Rng], str]:
    return lambda rng: "word " * int(factor * WORDS[law](rng)) + "end."


def online(held_out: Mapping[str, np.ndarray] | None = None, mix_offline: float = 0.0, **metrics: np.ndarray) -> Run:
    settings = {"online": {**ONLINE, "scorer": "shorter", "ties": "skip", "mix_offline": mix_offline}}
    return make_run({f"online/{name}": values for name, values in metrics.items()}, held_out, settings=settings)


def with_shares(rng: Rng, name: str, share: float, n_answers: int = 1, mix_offline: float = 0.0) -> Run:
    """Shares of the answers, or of the prompts, of each update; answers to one prompt are alike."""
    n_prompts = round(BATCH * (1 - mix_offline))
    by_prompt = rng.beta(share, 1 - share, (SHORT, n_prompts))  # their correlation is 0.5
    shares = rng.binomial(n_answers, by_prompt).mean(axis=1) / n_answers
    return online(mix_offline=mix_offline, **{name: shares})


def with_win_rate(rng: Rng, share: float, tied: float, n: int = N_HELD_OUT) -> Run:
    """Answers to held-out prompts that win in this share of the comparisons, ties aside."""
    wins = np.where(rng.random(n) < tied, 0.5, rng.random(n) < share)
    held_out = {"win_rate": wins.mean(), "win_rate_se": wins.std(ddof=1) / n**0.5}
    columns = {f"online_eval/{name}": np.array([0.5, value]) for name, value in held_out.items()}
    run = online({"updates": np.array([0.0, SHORT]), **columns}, score=np.zeros(SHORT))
    run.config["n_eval_examples"] = n
    return run


def with_scores(rng: Rng, change: float, *, kl: float = 1.0, n: int = SHORT, correlation: float = 0.3) -> Run:
    """Scores that change by deviations of an answer's, with correlated noise of their updates."""
    noise = correlate(rng, n, correlation) / (BATCH * ONLINE["n_samples"]) ** 0.5
    score = change * rise(n)[:, 0] + noise
    return online(score=score, score_best=score + 0.56, score_worst=score - 0.56, kl=np.full(n, kl),
                  length=np.full(n, 40.0), eos=rng.binomial(8, 0.9, n) / 8)  # fmt: skip


def with_lengths_of_answers(rng: Rng, growth: float) -> Run:
    length = (40 * (1 + (growth - 1) * rise(SHORT)[:, 0])) * np.exp(0.2 * rng.standard_normal(SHORT))
    return online(length=length, score=0.05 * (length - 40) + 0.35 * rng.standard_normal(SHORT))


# --- the rules, their nulls and alternatives --------------------------------------------------------------------------


class Rates(NamedTuple):
    """A rule, and runs without and with what it is for; `least_power` is held by the test."""

    find: Callable[[Run], Iterator[Finding]]  # of a rule
    level: str
    title: str  # beginning of the finding's title
    null: str
    draw_null: Callable[[Rng], Run]
    alternative: str
    draw_alternative: Callable[[Rng], Run]
    sizes: str
    least_power: float

    def measure(self, draw: Callable[[Rng], Run], trials: int) -> float:
        """Share of the runs with this finding; the seeds are the same each time."""
        return float(np.mean([self.is_found(draw(np.random.default_rng(seed))) for seed in range(trials)]))

    def is_found(self, run: Run) -> bool:
        [rule] = [rule for rule in RULES if rule.find is self.find]
        return any(found.level == self.level and found.title.startswith(self.title) for found in rule.apply(run))


HELD_OUT = f"{N_HELD_OUT} pairs"
SMALL, LARGE = f"{SHORT:,} updates", f"{LONG:,} updates"

RATES = [
    *(
        Rates(
            on_training.worse_than_reference, WARNING, "By its own loss",
            f"loss/eval ln 2, margins {law}", partial(with_held_out_loss, loss=0.693147, law=law, ledger=True),
            "loss/eval 0.9", partial(with_held_out_loss, loss=0.9, law=law, ledger=True), f"{HELD_OUT}, ledger", 0.5,
        )
        for law in LAWS
    ),
    *(
        Rates(
            on_training.worse_than_start, WARNING, "By its own loss the model",
            "SFT, loss/eval 100 before and now", partial(with_losses, rise=0, n=n),
            f"{rise} more", partial(with_losses, rise=rise, n=n), f"{n} updates", 0.9,
        )
        for n, rise in ((SHORT, 20), (10, 40))
    ),
    Rates(
        on_training.worse_than_start, NOTE, "By its own loss the model",
        "ORPO, loss/eval 20 more, accuracy 0.5", partial(with_losses, rise=20, accuracy=0.5),
        "accuracy 0.65", partial(with_losses, rise=20, accuracy=0.65), f"{SMALL}, {HELD_OUT}", 0.9,
    ),
    *(
        Rates(
            on_training.no_better_than_chance, WARNING, "Held-out pairs are ranked no better",
            "accuracy 0.55", partial(with_accuracies, training=0.7, held_out=0.55, n=n),
            "accuracy 0.5", partial(with_accuracies, training=0.7, held_out=0.5, n=n), f"{n:,} pairs", power,
        )
        for n, power in ((N_HELD_OUT, 0.3), (1024, 0.8))
    ),
    Rates(
        on_training.no_better_than_chance, NOTE, "Held-out pairs are ranked little better",
        "accuracy 0.57", partial(with_accuracies, training=0.7, held_out=0.57, n=4096),
        "accuracy 0.525", partial(with_accuracies, training=0.7, held_out=0.525, n=4096), "4,096 pairs", 0.5,
    ),
    Rates(
        on_training.no_better_than_chance, NOTE, "Held-out accuracy may be chance",
        "accuracy 0.62", partial(with_accuracies, training=0.7, held_out=0.62),
        "accuracy 0.53", partial(with_accuracies, training=0.7, held_out=0.53), HELD_OUT, 0.5,
    ),
    Rates(
        on_training.new_training_pairs, NOTE, "New training pairs are ranked better",
        "accuracy 0.5", partial(with_accuracies, training=0.5, held_out=0.55),
        "accuracy 0.57", partial(with_accuracies, training=0.57, held_out=0.55), SMALL, 0.5,
    ),
    Rates(
        on_training.accuracy_gap, NOTE, "Training pairs are ranked better",
        "0.7 on both", partial(with_accuracies, training=0.7, held_out=0.7),
        "0.95 and 0.7", partial(with_accuracies, training=0.95, held_out=0.7), HELD_OUT, 0.5,
    ),
    *(
        rates
        for ledger in (False, True)
        for sizes in [f"{N_EVALUATIONS} evaluations, {HELD_OUT}" + (", ledger" if ledger else "")]
        for rates in (
            Rates(
                on_training.evaluation_turns, WARNING, "Evaluation loss turned",
                "margins vary, their mean stays", partial(with_turn, ledger=ledger),
                "mean margin falls by 1 deviation", partial(with_turn, fall=1.0, ledger=ledger), sizes, 0.5,
            ),
            Rates(
                on_training.evaluation_turns, NOTE, "Evaluation loss rose while accuracy",
                "margins vary, their mean stays", partial(with_turn, ledger=ledger),
                "all margins grow threefold", partial(with_turn, growth=3.0, ledger=ledger), sizes, 0.5,
            ),
            Rates(
                on_training.evaluation_turns, WARNING, "Evaluation loss turned",
                "all margins grow threefold", partial(with_turn, growth=3.0, ledger=ledger),
                "mean margin falls by 1 deviation", partial(with_turn, fall=1.0, ledger=ledger), sizes, 0.5,
            ),
            Rates(
                on_training.evaluation_turns, WARNING, "Evaluation accuracy turned",
                "margins vary, their mean stays", partial(with_turn, ledger=ledger),
                "mean margin falls by 0.5 deviations", partial(with_turn, fall=0.5, ledger=ledger), sizes, 0.5,
            ),
        )
    ),
    Rates(
        on_training.saturation, NOTE, "Accuracy is saturated",
        "accuracy 0.97", partial(with_training_margins, mean=1.88, deviation=1.0),
        "accuracy 0.999, margin 2", partial(with_training_margins, mean=2.0, deviation=0.65), SMALL, 0.5,
    ),
    Rates(
        on_training.collapse, WARNING, "The run has collapsed",
        "loss/train rises to twice its start", partial(with_collapse, loss=2 * 0.693147),
        "to four times its start", partial(with_collapse, loss=4 * 0.693147), SMALL, 0.5,
    ),
    Rates(
        on_pairs.margin_sides, WARNING, "Chosen responses become less likely",
        "chosen falls by the margin, 0.5 nats", partial(with_chosen_rewards, chosen=-0.5, margin=0.5),
        "chosen falls by 10 nats, margin 5", partial(with_chosen_rewards, chosen=-10.0, margin=5.0), HELD_OUT, 0.5,
    ),
    Rates(
        on_training.rate_too_high, WARNING, "The learning rate looks too high",
        "0.3 nats a token in 50 updates", partial(with_fall, per_token=0.3, over=50),
        "1 nat a token in 50 updates", partial(with_fall, per_token=1.0, over=50), SMALL, 0.5,
    ),
    Rates(
        on_training.rate_too_high, WARNING, "The learning rate looks too high",
        "grad_norm grows threefold", partial(with_gradients, growth=3.0),
        "grad_norm grows tenfold", partial(with_gradients, growth=10.0), SMALL, 0.5,
    ),
    Rates(
        on_training.epoch_step, NOTE, "Training loss fell by a step",
        "margins grow steadily", partial(with_epochs, step=0.0),
        "they grow by 1.5 at once", partial(with_epochs, step=1.5), f"2 epochs of {SMALL}", 0.5,
    ),
    Rates(
        on_training.slowing, NOTE, "Updates became slower",
        "speeds vary by 30 %", partial(with_speed, slowdown=1.0),
        "half as fast", partial(with_speed, slowdown=2.0), SMALL, 0.9,
    ),
    Rates(
        on_pairs.leakage, NOTE, "Test prompts are in the training split",
        "a fifth open with a greeting", partial(with_dialogues, shared=0.0),
        "5 % open as in training", partial(with_dialogues, shared=0.05), f"2,000 and {N_HELD_OUT} prompts", 0.9,
    ),
    *(
        Rates(
            on_pairs.label_noise, NOTE, "Some labels may be wrong",
            f"no flipped labels, margins {law}", partial(with_labels, flipped=0.0, law=law, shift=0.8),
            "20 % flipped, 98 % of others ranked right", partial(with_labels, flipped=0.2, law=law, shift=2.0),
            f"{SMALL}, ledger", 0.5,
        )
        for law in LAWS
    ),
    Rates(
        on_pairs.accuracy_by_length, NOTE, "Held-out accuracy depends on length",
        "0.68 for both", partial(with_lengths, longer=0.68, shorter=0.68),
        "0.8 and 0.55", partial(with_lengths, longer=0.8, shorter=0.55), f"{HELD_OUT}, ledger", 0.5,
    ),
    Rates(
        on_pairs.accuracy_by_length, WARNING, "Held-out pairs are ranked by length",
        "0.8 and 0.5", partial(with_lengths, longer=0.8, shorter=0.5),
        "0.85 and 0.35", partial(with_lengths, longer=0.85, shorter=0.35), f"{HELD_OUT}, ledger", 0.5,
    ),
    *(
        Rates(
            on_answers.empty_samples, level, "Some of the policy's samples are empty",
            f"{percent} % of both are empty",
            partial(with_samples, policy=empty_in(percent / 100), reference=empty_in(percent / 100)),
            "50 % of the policy's, 5 % of the reference's",
            partial(with_samples, policy=empty_in(0.5), reference=empty_in(0.05)), f"{N_SAMPLES} samples", power,
        )
        for level, power in ((WARNING, 0.5), (NOTE, 0.0)) for percent in (5, 30)
    ),
    *(
        Rates(
            on_answers.sample_lengths, WARNING, "The policy's samples have become",
            f"{law} lengths", partial(with_samples, policy=of_words(law, 1), reference=of_words(law, 1)),
            "three times as long", partial(with_samples, policy=of_words(law, 3), reference=of_words(law, 1)),
            f"{N_SAMPLES} samples", 0.5,
        )
        for law in WORDS
    ),
    *(
        Rates(
            on_answers.cut_off_samples, level, "The policy's samples are cut off",
            f"{percent} % of both are cut off",
            partial(with_cut_off_samples, policy=percent / 100, reference=percent / 100),
            "70 % of the policy's, 20 % of the reference's", partial(with_cut_off_samples, policy=0.7, reference=0.2),
            f"{N_SAMPLES} samples", power,
        )
        for level, power in ((WARNING, 0.5), (NOTE, 0.0)) for percent in (20, 50)
    ),
    *(
        Rates(
            on_answers.win_rate, WARNING, "The reference's answers are better",
            f"{tied} % tied, 50 % of the others won", partial(with_win_rate, share=0.5, tied=tied / 100, n=n),
            f"{won} % won", partial(with_win_rate, share=won / 100, tied=tied / 100, n=n), f"{n} prompts", 0.5,
        )
        for tied, won, n in ((0, 40, N_HELD_OUT), (50, 35, N_HELD_OUT), (0, 10, 8))
    ),
    *(
        rates
        for mix_offline in (0.0, 0.5)
        for sizes in [SMALL + ", half from the datasets" * (mix_offline > 0)]
        for answers in [{"name": "eos", "n_answers": ONLINE["n_samples"], "mix_offline": mix_offline}]
        for rates in (
            Rates(
                on_answers.unfinished_answers, NOTE, "Some answers are cut off",
                "90 % end", partial(with_shares, share=0.9, **answers),
                "75 % end", partial(with_shares, share=0.75, **answers), sizes, 0.5,
            ),
            Rates(
                on_answers.unfinished_answers, WARNING, "Most answers are cut off",
                "50 % end", partial(with_shares, share=0.5, **answers),
                "35 % end", partial(with_shares, share=0.35, **answers), sizes, 0.5,
            ),
            Rates(
                on_answers.ties, WARNING, "Most prompts give a tie",
                "50 % tie", partial(with_shares, name="ties", share=0.5, mix_offline=mix_offline),
                "65 % tie", partial(with_shares, name="ties", share=0.65, mix_offline=mix_offline), sizes, 0.5,
            ),
        )
    ),
    Rates(
        on_answers.scores, NOTE, "Scores rise",
        "scores stay", partial(with_scores, change=0.0),
        "they rise by 0.5 deviations", partial(with_scores, change=0.5), SMALL, 0.5,
    ),
    Rates(
        on_answers.scores, WARNING, "Scores have fallen",
        "scores stay", partial(with_scores, change=0.0),
        "they fall by 0.5 deviations", partial(with_scores, change=-0.5), SMALL, 0.5,
    ),
    Rates(
        on_answers.scores, WARNING, "Scores have not risen",
        "they rise by 0.12 deviations", partial(with_scores, change=0.12, n=LONG),
        "scores stay", partial(with_scores, change=0.0, n=LONG), LARGE, 0.5,
    ),
    Rates(
        on_answers.divergence, WARNING, "The policy has gone far",
        "12 nats, scores stay", partial(with_scores, change=0.0, kl=12.0),
        "12 nats, they fall by 0.5 deviations", partial(with_scores, change=-0.5, kl=12.0), SMALL, 0.5,
    ),
    Rates(
        on_answers.scores_with_length, WARNING, "Scores and lengths grow together",
        "lengths stay", partial(with_lengths_of_answers, growth=1.0),
        "lengths double", partial(with_lengths_of_answers, growth=2.0), SMALL, 0.5,
    ),
]  # fmt: skip


FACTS = {  # these say what was counted, and infer nothing
    on_training.skipped_updates, on_training.best_checkpoint, on_training.warmup, on_training.clipping,
    on_training.reward_accuracy,
    on_pairs.data_counts, on_pairs.length_in_margin, on_pairs.lengths_in_data,
    on_answers.accuracies_online, on_answers.time_to_draw,
}  # fmt: skip


def test_every_rule_that_infers_is_simulated():
    assert {rule.find for rule in RULES} - {rates.find for rates in RATES} == FACTS


@pytest.mark.parametrize("rates", RATES, ids=lambda rates: f"{rates.title} ({rates.null}; {rates.sizes})")
def test_a_rule_is_seldom_wrong_and_sees_what_it_is_for(rates):
    """A few runs of each kind, whose seeds are fixed; the slow test has enough of them for rates."""
    trials = 1 if LARGE in rates.sizes else TRIALS
    assert rates.measure(rates.draw_null, trials) <= 1 / 3
    if rates.least_power >= 0.5:
        assert rates.measure(rates.draw_alternative, trials) >= 1 / 3


def test_the_docs_have_every_row():
    page = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    assert [rates.title for rates in RATES if f"| {rates.title} | {rates.level} | {rates.null} |" not in page] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rates_and_powers_at_all_trials():
    rows = ["| finding | level | null | false | alternative | power | sizes |", "|---|---|---|---|---|---|---|"]
    wrong = []
    for rates in RATES:
        false_alarms, power = (rates.measure(draw, ALL_TRIALS) for draw in (rates.draw_null, rates.draw_alternative))
        cells = [rates.title, rates.level, rates.null, f"{100 * false_alarms:.1f} %", rates.alternative]
        rows.append("| " + " | ".join([*cells, f"{100 * power:.0f} %", rates.sizes]) + " |")
        if false_alarms > LIMITS[rates.level] or power < rates.least_power:
            wrong.append(rows[-1])
    print("\n" + "\n".join(rows))
    assert wrong == []
