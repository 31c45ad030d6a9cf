"""The runs of `experiments.sentiment`, and the rows of their policies.

A sweep can be killed at any time: what is complete in its directory is not made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError
from dpo.models.answers import Answer, Sampling, Tokens
from experiments import language
from experiments.reading import estimate_mean
from experiments.runs import (
    Job,
    Row,
    import_all,
    iterate_rows,
    keep_settings,
    read_rows,
    select_jobs,
    write_records,
    write_rows,
    write_whole,
)
from experiments.sentiment import data
from experiments.sentiment.data import OPENINGS, PROMPT_TOKENS, RESPONSE_TOKENS, Scale

DPO = ("loss=dpo", "loss.beta={knob}")
ONLINE = (
    "online=online", "online.scorer=function", "online.function={scorer}", f"online.max_new_tokens={RESPONSE_TOKENS}",
    "online.labels=bradley_terry", "online.ties=keep",
)  # fmt: skip
BATCH = 16  # pairs or prompts of an update
SAVE_EVERY = 512  # pairs between checkpoints, from which a killed run goes on
OVERSAMPLED = 1.4  # times the needed prompts and pairs: some texts are tokenized to other tokens than were sampled
PROMPTS_OF_A_JOB = 256
# seeds of the sampling
PROMPT_SEED, PAIR_SEED, HELD_OUT_SEED, LABEL_SEED, POLICY_SEED = range(5)


class Method(NamedTuple):
    """A kind of run, with its knob's values, the most informative first."""

    label: str
    overrides: tuple[str, ...]
    knobs: tuple[float, ...]


METHODS = {
    "dpo": Method("DPO", DPO, (0.1, 0.3, 0.03, 1.0)),
    "online_dpo": Method("online DPO", (*DPO, *ONLINE), (0.1, 0.3, 0.03, 1.0)),
    "ipo": Method("IPO", ("loss=ipo", "loss.beta={knob}"), (0.1, 0.2, 0.03, 0.5)),
    "sft_chosen": Method("SFT on the chosen", ("loss=sft", "n_epochs={knob}"), (1, 4)),
}


class Size(NamedTuple):
    """Size of the experiment."""

    pairs: int
    validation: int  # pairs that the trainer evaluates
    held_out: int  # prompts on which policies are measured
    samples: int  # of a policy for each of these prompts
    reference_samples: int  # of the reference, likewise
    kl_samples: int  # samples from which KL is estimated
    knobs: int  # values of a method's knob that are run


@dataclass(frozen=True)
class Sweep:
    """Runs from one model, with their directory and common overrides."""

    root: Path
    model: Path
    size: Size
    overrides: Sequence[str]

    def prepare(self) -> None:
        """Draw prompts, pairs, and the reference's answers to held-out prompts.

        Raises InputError if the directory has runs of other settings.
        """
        self.sentiment("")  # fails now if there is no lexicon, not after hours of sampling
        settings = {"model": str(self.model), **self.size._asdict(), "overrides": [*self.overrides]}
        keep_settings(self.root, settings)
        import_all("experiments.language")
        if not (self.root / "prompts.json").exists():
            write_whole(self.root / "prompts.json", json.dumps(self.draw_prompts(), indent=0))
        jobs: dict[Job, tuple[int, int, int, int]] = {}  # arguments of `draw_answers`
        for name, start, end, n_samples, seed in (
            ("held_out", 0, self.size.held_out, self.size.reference_samples, HELD_OUT_SEED),
            ("pairs", self.size.held_out, len(self.prompts), 2, PAIR_SEED),
        ):
            for first in range(start, end, PROMPTS_OF_A_JOB):
                job = Job(self.root / "answers" / f"{name}-{first}")
                jobs[job] = first, min(first + PROMPTS_OF_A_JOB, end), n_samples, seed

        def draw(job: Job) -> None:
            write_rows(job.result, self.draw_answers(*jobs[job]))

        done = dict(iterate_rows([*jobs], draw, lambda job, rows: f"{len(rows)} prompts answered", name="reference"))
        for name in ("held_out", "pairs"):
            rows = [row for job in jobs if job.directory.name.startswith(name) for row in done[job]]
            write_rows(self.root / f"{name}.json", rows)
        self.write_pairs()

    def draw_answers(self, first: int, end: int, n_samples: int, seed: int) -> list[Row]:
        """Draw the reference's answers to the prompts from `first` to `end`."""
        prompts = self.prompts[first:end]
        answers = self.answer(self.reference, prompts, n_samples, seed=seed, first=first)
        return [
            {
                "prompt": prompt,
                "texts": [answer.text for answer in prompt_answers],
                "ended": [answer.ended for answer in prompt_answers],
                "canonical": all(map(self.is_canonical, prompt_answers)),
            }
            for prompt, prompt_answers in zip(prompts, answers, strict=True)
        ]

    # --- prompts and pairs --------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.model))

    @cached_property
    def reference(self) -> Any:
        return language.load_reference(self.model)

    @cached_property
    def sentiment(self) -> data.Reward:
        return data.load_lexicon()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def is_canonical(self, answer: Answer) -> bool:
        """Check that the answer's text is tokenized to the sampled tokens."""
        tokens = answer.tokens[:-1] if answer.ended else answer.tokens
        return self.encode(answer.text) == [*tokens] and len(tokens) > 0

    def draw_prompts(self) -> list[str]:
        """Let the model continue the openings to distinct prompts."""
        n_wanted = self.size.held_out + int(OVERSAMPLED * (self.size.pairs + self.size.validation))
        openings = [tuple(self.encode(opening)) for opening in OPENINGS]
        sampling = Sampling(PROMPT_TOKENS - min(map(len, openings)), seed=PROMPT_SEED)
        n_each = math.ceil(int(OVERSAMPLED * n_wanted) / len(openings))
        answers = language.sample(self.reference, self.tokenizer, openings, sampling, n_samples=n_each)
        texts = []
        for opening, continuations in zip(openings, answers, strict=True):
            for answer in continuations:
                tokens = (*opening, *answer.tokens)
                if self.tokenizer.eos_token_id not in tokens[:PROMPT_TOKENS]:
                    texts.append(data.keep_prompt(tokens, self.encode, self.decode))
        distinct = [*dict.fromkeys(text for text in texts if text is not None)]
        if len(distinct) < n_wanted:
            raise InputError(
                f"{self.model} gave {len(distinct)} distinct prompts, and {n_wanted} are needed: give another --model"
            )
        order = np.random.default_rng(PROMPT_SEED).permutation(len(distinct))[:n_wanted]
        return [distinct[i] for i in order]

    @cached_property
    def prompts(self) -> list[str]:
        """All prompts, the held-out prompts first."""
        return json.loads((self.root / "prompts.json").read_text(encoding="utf-8"))

    def answer(
        self, side: Any, prompts: Sequence[str], n_samples: int, *, seed: int, first: int = 0
    ) -> list[list[Answer]]:
        """Sample `n_samples` answers to each prompt.

        `first` is the number of the first prompt.
        """
        sampling = Sampling(RESPONSE_TOKENS, seed=seed)
        encoded = [tuple(self.encode(prompt)) for prompt in prompts]
        return language.sample(side, self.tokenizer, encoded, sampling, n_samples=n_samples, first=first)

    def write_pairs(self) -> None:
        """Write the labelled pairs, and the rewards' scale."""
        records = [row for row in read_rows(self.root / "pairs.json") if row["canonical"] and len({*row["texts"]}) == 2]
        n_pairs, n_validation = self.size.pairs, self.size.validation
        if len(records) < n_pairs + n_validation:
            raise InputError(
                f"only {len(records)} of the pairs that {self.model} gave can be used, and {n_pairs + n_validation} "
                f"are needed: the rest have equal responses, or a text that is tokenized to other tokens than were "
                f"sampled. Give another --model"
            )
        records = records[: n_pairs + n_validation]
        sentiments = np.array([[self.sentiment(text) for text in row["texts"]] for row in records])
        if not sentiments.std():
            raise InputError(f"all responses of {self.model} have the same sentiment, so there is nothing to learn")
        scale = Scale(float(sentiments.mean()), float(sentiments.std()))
        write_whole(self.root / "scale.json", json.dumps(scale._asdict()))
        pairs = data.label_pairs(records, scale.standardize(sentiments), LABEL_SEED)
        write_records(self.root / "data", train=pairs[:n_pairs], test=pairs[n_pairs:])

    @cached_property
    def scale(self) -> Scale:
        return Scale(**json.loads((self.root / "scale.json").read_text(encoding="utf-8")))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def make_job(self, method: str, knob: float) -> Job:
        scorer = data.write_scorer(self.root, self.scale)
        overrides = (
            *language.list_overrides(self.model, self.root),
            "datasets=[sentiment]", f"dataset_sources.sentiment={self.root / 'data'}",
            f"max_length={PROMPT_TOKENS + RESPONSE_TOKENS}", f"max_prompt_length={PROMPT_TOKENS}",
            f"batch_size={BATCH}", f"n_eval_examples={self.size.validation}", "lr=5e-4",
            "eval_every=1000000000", f"save_every={SAVE_EVERY}", "keep_checkpoints=2",
            *(text.format(knob=knob, scorer=scorer) for text in METHODS[method].overrides),
            *self.overrides,
        )  # fmt: skip
        return Job(self.root / "runs" / f"{method}-{knob:g}", overrides)

    def train_all(self, methods: Sequence[str]) -> Iterator[list[Row]]:
        """Train and measure these methods' policies; yield the rows of each run.

        The rows of other methods' runs that were finished before are yielded too.
        """
        runs: dict[Job, tuple[str, float]] = {}
        for i in range(self.size.knobs):  # the most informative value of every method first
            for name, method in METHODS.items():
                if i < len(method.knobs):
                    runs[self.make_job(name, method.knobs[i])] = name, method.knobs[i]

        def finish(job: Job) -> None:
            method, knob = runs[job]
            policy, reference = language.load_policy(job.directory / "LATEST")
            write_rows(job.result, [{"method": method, "knob": knob, **self.measure(policy, reference)}])

        def describe(job: Job, rows: list[Row]) -> str:
            return f"reward {rows[0]['reward']:.3f} at KL {rows[0]['kl']:.3f}"

        for _, rows in iterate_rows(select_jobs(runs, methods), finish, describe, name="sentiment"):
            yield rows

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def held_out(self) -> list[str]:
        return self.prompts[: self.size.held_out]

    def find_rewards(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        """True rewards, (prompts, samples)."""
        return self.scale.standardize([[self.sentiment(text) for text in prompt_texts] for prompt_texts in texts])

    @cached_property
    def reference_rewards(self) -> np.ndarray:
        """True rewards of the reference on held-out prompts, (prompts, samples)."""
        return self.find_rewards([row["texts"] for row in read_rows(self.root / "held_out.json")])

    def measure(self, policy: Any, reference: Any) -> Row:
        """Measure rewards, KL and lengths of answers to the held-out prompts."""
        answers_by_prompt = self.answer(policy, self.held_out, self.size.samples, seed=POLICY_SEED)
        sampled: list[tuple[int, Tokens, Answer]] = [
            (prompt_index, tuple(self.encode(prompt)), answer)
            for prompt_index, (prompt, answers) in enumerate(zip(self.held_out, answers_by_prompt, strict=True))
            for answer in answers
        ]
        for_kl = sampled[:: max(1, len(sampled) // self.size.kl_samples)]  # evenly spaced
        prompt_indices, prompts, answers_for_kl = zip(*for_kl, strict=True)
        kl = estimate_mean(language.sum_kls(policy, reference, prompts, answers_for_kl), prompt_indices)
        rewards = self.find_rewards([[answer.text for answer in answers] for answers in answers_by_prompt])
        return self.make_row(rewards.mean(1)) | {
            "kl": kl.mean,
            "kl_half_width": kl.half_width,
            "length": float(np.mean([len(answer.tokens) for *_, answer in sampled])),
            "ended": float(np.mean([answer.ended for *_, answer in sampled])),
            "samples": len(sampled),
        }

    def make_row(self, rewards: np.ndarray) -> Row:
        """Make the part of a row that describes rewards, (prompts,)."""
        prompts = range(len(rewards))
        reward = estimate_mean(rewards, prompts)
        gain = estimate_mean(rewards - self.reference_rewards.mean(1), prompts)
        return {
            "reward": reward.mean,
            "reward_half_width": reward.half_width,
            "gain": gain.mean,
            "gain_half_width": gain.half_width,
            "rewards": [round(r, 3) for r in rewards],
        }

    def list_known(self) -> list[Row]:
        """List the rows that need no training: the reference and best-of-N."""
        rewards, rows = self.reference_rewards, []  # (prompts, samples)
        n = 1
        while n <= rewards.shape[1]:
            method = "reference" if n == 1 else "best_of_n"
            kl = {"kl": data.bound_best_kl(n), "kl_half_width": 0.0}
            rows.append({"method": method, "knob": n, **self.make_row(data.best_of(n, rewards)), **kl})
            n *= 2
        return rows
