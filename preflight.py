"""What a run will train on, said before it starts: counts per split, updates, dropped examples."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import load_tokenizer
from preference_datasets import Prompt, load_prompts
from tokenization import TextEncoder, truncate
from utils import InputError


@dataclass
class SplitReport:
    """Counts over the examples of one split (pairs, or SFT targets); lengths in tokens."""

    prompts: int = 0
    examples: int = 0
    truncated_prompts: int = 0  # examples whose prompt is cut
    truncated_responses: int = 0  # examples of which a response is cut, and with it its EOS
    empty_responses: int = 0  # examples with a response of nothing but whitespace and EOS
    identical_pairs: int = 0  # chosen and rejected are the same tokens after truncation: no gradient under DPO
    duplicated_pairs: int = 0  # a pair that an earlier pair of its prompt repeats
    contradictory_pairs: int = 0  # a pair whose reverse is also there
    texts_with_eos: int = 0  # distinct texts; any is an error
    mean_chosen_tokens: float = 0.0
    mean_rejected_tokens: float = 0.0
    chosen_longer: float = 0.0  # fraction of pairs; far from 0.5, length alone predicts the preference


@dataclass
class Preflight:
    """Both splits, and what the stop rule makes of them."""

    train: SplitReport
    test: SplitReport
    updates: int
    dropped_examples: int  # of last partial batches, over all epochs

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> tuple[int, int]:
    """(updates, dropped examples) of `iterate_batches`, without iterating."""
    per_epoch, remainder = divmod(examples, batch_size)
    if per_epoch == 0:
        return 0, examples
    updates = 0
    for epoch in itertools.count():
        if epoch == n_epochs:
            return updates, epoch * remainder
        if n_examples is not None:  # the batch that reaches n_examples is the last; one always runs
            left = max(1, math.ceil((n_examples - epoch * examples) / batch_size))
            if left <= per_epoch:
                return updates + left, epoch * remainder
        updates += per_epoch
    raise AssertionError("unreachable")


def inspect_split(
    prompts: Sequence[Prompt], encode: TextEncoder, *, sft_mode: bool, max_length: int, max_prompt_length: int
) -> SplitReport:
    """Tokenize and count every example of a split. Raises InputError that names the first text containing EOS."""
    report = SplitReport(prompts=len(prompts))
    encode.prime(text for p in prompts for texts in p.examples(sft_mode) for text in (p.text, *texts.values()))
    guilty = _find_eos(prompts, encode, sft_mode)
    report.texts_with_eos = len(guilty)
    if guilty:
        text, prompt_text = next(iter(guilty.items()))
        raise InputError(
            f"{len(guilty)} text{'s contain' if len(guilty) > 1 else ' contains'} the EOS token "
            f"{encode.tokenizer.eos_token!r}, which would end it early; clean the data. "
            f"The first: {text[:300]!r}, under the prompt {prompt_text[-200:]!r}"
        )
    longer = 0
    for prompt in prompts:
        pairs_seen: set[tuple[str, ...]] = set()
        for texts in prompt.examples(sft_mode):
            lengths = _count_example(report, prompt, texts, encode, max_length, max_prompt_length)
            report.mean_chosen_tokens += lengths[0]
            if sft_mode:
                continue
            report.mean_rejected_tokens += lengths[1]
            longer += lengths[0] > lengths[1]
            pair = tuple(texts.values())
            report.duplicated_pairs += pair in pairs_seen
            report.contradictory_pairs += pair[::-1] in pairs_seen and pair[0] != pair[1]
            pairs_seen.add(pair)
    if report.examples:
        report.mean_chosen_tokens /= report.examples
        report.mean_rejected_tokens /= report.examples
        report.chosen_longer = longer / report.examples
    return report


def _find_eos(prompts: Sequence[Prompt], encode: TextEncoder, sft_mode: bool) -> dict[str, str]:
    """The texts that contain EOS, with their prompts. A rendered chat may: there EOS ends earlier turns, as meant."""
    eos = encode.tokenizer.eos_token_id
    guilty: dict[str, str] = {}
    for prompt in prompts:
        for texts in prompt.examples(sft_mode) if not prompt.rendered else ():
            guilty |= {text: prompt.text for text in (prompt.text, *texts.values()) if eos in encode(text)}
    return guilty


def _count_example(
    report: SplitReport, prompt: Prompt, texts: dict[str, str], encode: TextEncoder, max_length: int, max_prompt: int
) -> list[int]:
    """Add one example's counts to the report; token counts of its responses as they will be scored."""
    eos = encode.tokenizer.eos_token_id
    prompt_ids, full = encode(prompt.text), [encode(text) for text in texts.values()]
    cut_prompt, cut = truncate(
        prompt_ids, [[*ids, eos] for ids in full], prompt.truncation_mode, max_length, max_prompt
    )
    report.examples += 1
    report.truncated_prompts += len(cut_prompt) < len(prompt_ids)
    report.truncated_responses += any(len(c) <= len(f) for c, f in zip(cut, full, strict=True))
    report.empty_responses += not all(text.strip() for text in texts.values())
    report.identical_pairs += len(cut) == 2 and cut[0] == cut[1]
    return [len(ids) for ids in cut]


def describe(split: str, report: SplitReport) -> str:
    """One paragraph for stdout: what is there, then only the counts that are not 0."""
    text = f"{split}: {report.examples:,} examples of {report.prompts:,} prompts"
    notes = {
        "with a truncated prompt": report.truncated_prompts,
        "with a truncated response": report.truncated_responses,
        "with an empty response": report.empty_responses,
        "identical pairs": report.identical_pairs,
        "duplicated pairs": report.duplicated_pairs,
        "contradictory pairs": report.contradictory_pairs,
    }
    text += "".join(f", {count:,} {what}" for what, count in notes.items() if count)
    text += f"; {report.mean_chosen_tokens:.1f} tokens per chosen response"
    if report.mean_rejected_tokens:
        gap = report.mean_chosen_tokens - report.mean_rejected_tokens
        text += f", {report.mean_rejected_tokens:.1f} per rejected (gap {gap:+.1f}; chosen longer in "
        text += f"{report.chosen_longer:.0%} of pairs)"
    return text


@dataclass
class TrainingData:
    """What a trainer trains on: the prompts of both splits, their token ids, and the preflight."""

    tokenizer: Any
    encode: TextEncoder
    train: list[Prompt]
    test: list[Prompt]
    report: Preflight

    def check_vocabulary(self, n_embeddings: int) -> None:
        """Raises InputError if the texts use token ids that the model has no embedding for."""
        largest = self.encode.largest_id()
        if largest >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {largest} but the model embeds only {n_embeddings} tokens; "
                f"set model.tokenizer_name_or_path to the model's own tokenizer"
            )


def prepare_data(
    names: Sequence[str],
    tokenizer_name: str,
    *,
    sft_mode: bool,
    batch_size: int,
    eval_batch_size: int,
    max_length: int,
    max_prompt_length: int,
    n_epochs: int | None,
    n_examples: int | None,
    dataset_sources: Any,
    cache_dir: str | None,
    silent: bool,
) -> TrainingData:
    """Load, tokenize and count both splits, and print the counts unless `silent`.

    Raises InputError for what cannot be trained on, and for a split that does not fill one batch.
    """
    tokenizer = load_tokenizer(tokenizer_name, cache_dir=cache_dir)
    encode = TextEncoder(tokenizer)
    prompts, reports = {}, {}
    for split, size, key in (("train", batch_size, "batch_size"), ("test", eval_batch_size, "eval_batch_size")):
        prompts[split] = load_prompts(
            names, split, silent=silent, cache_dir=cache_dir, dataset_sources=dataset_sources, tokenizer=tokenizer
        )
        reports[split] = inspect_split(
            prompts[split], encode, sft_mode=sft_mode, max_length=max_length, max_prompt_length=max_prompt_length
        )
        if reports[split].examples < size:
            raise InputError(
                f"the {split} split of {', '.join(names)} has {reports[split].examples} examples, too few for one "
                f"batch of {key}={size}: lower {key} or add data"
            )
    updates, dropped = count_updates(
        reports["train"].examples, batch_size=batch_size, n_epochs=n_epochs, n_examples=n_examples
    )
    if not silent:
        for split, report in reports.items():
            print(describe(split, report))
        print(
            f"{updates:,} updates of {batch_size} examples will run; last partial batches drop {dropped:,} examples",
            flush=True,
        )
    return TrainingData(
        tokenizer,
        encode,
        prompts["train"],
        prompts["test"],
        Preflight(**reports, updates=updates, dropped_examples=dropped),
    )
