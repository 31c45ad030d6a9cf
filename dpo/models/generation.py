"""Continuations of prompts, sampled in one process or in lockstep with others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.data.collation import PaddedBatch
from dpo.data.examples import Example
from dpo.data.table import Prompt
from dpo.data.tokenization import unescape
from dpo.errors import one_sentence
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.system.arithmetic import without_compilation


class SamplingFailed(Exception):
    """Sampling failed on at least one process; the message says why."""


class Continuation(NamedTuple):
    """A model's continuation of a prompt."""

    text: str
    ended: bool  # by an end token, not cut off at the limit


SampleBatch = Callable[[Any, PaddedBatch], list[Continuation]]  # gets a model and collated prompts


def find_end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The EOS tokens of a tokenizer and of a model's generation config."""
    model_eos: Any = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(model_eos if isinstance(model_eos, list) else [model_eos])} - {None}


@torch.no_grad()
def sample(
    model: Any,
    batch: PaddedBatch,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    seed: int | Sequence[int],
    in_step: bool = False,
    cache_implementation: str | None = None,
) -> list[Continuation]:
    """Sample one continuation per prompt; leave the random state as it was.

    `in_step`: several processes hold shards of the model and sample in lockstep, so each continues until all have
    finished. `cache_implementation` is for transformers' `generate`.
    """
    prompt_ids = batch["prompt_input_ids"]
    gpus = range(torch.cuda.device_count())
    with (
        torch.random.fork_rng(devices=gpus),
        without_compilation(cache_implementation=cache_implementation),
        generating_with_sdpa(model),
    ):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        ids = model.generate(
            prompt_ids,
            attention_mask=batch["prompt_attention_mask"],
            max_new_tokens=max_new_tokens,  # overrides the model's generation config
            do_sample=True,
            synced_gpus=in_step,
            cache_implementation=cache_implementation,
            pad_token_id=tokenizer.pad_token_id,
        )
    new_ids = ids[:, prompt_ids.shape[1] :]
    texts = tokenizer.batch_decode(new_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # the pad token may be an end token too, but only a text that has ended is padded
    end_tokens = find_end_tokens(model, tokenizer)
    ended = [not end_tokens.isdisjoint(row) for row in new_ids.tolist()]
    return [Continuation(*row) for row in zip(texts, ended, strict=True)]


@contextmanager
def generating_with_sdpa(model: Any) -> Iterator[None]:
    """Replace FlexAttention by SDPA attention inside."""
    if model.config._attn_implementation != "flex_attention":
        yield
        return
    model.set_attn_implementation("sdpa")  # FlexAttention is fast only if compiled, and generation is not
    try:
        yield
    finally:
        model.set_attn_implementation("flex_attention")


@contextmanager
def before_each_forward(model: Any, act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with 0, 1, ... before each forward pass inside.

    Sampling runs one pass per token. Processes that sample in lockstep call `act` in lockstep, so it can raise on
    all of them together.
    """
    numbers = itertools.count()
    # prepended, so that `act` is called before FSDP's hook gathers weights
    handle = model.register_forward_pre_hook(lambda *_: act(next(numbers)), prepend=True)
    try:
        yield
    finally:
        handle.remove()


CUT = "[...]"  # replaces the truncated part of a prompt


def fed_prompts(examples: Sequence[Example], prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    """The texts of prompts as fed, with CUT for truncated text."""
    texts = []
    for example in examples:
        prompt = prompts[example.id[0]]
        if not example.prompt_is_cut:
            texts.append(unescape(prompt.text))
        elif prompt.truncation_mode == "keep_start":
            texts.append(f"{tokenizer.decode(list(example.prompt))} {CUT}")
        else:
            texts.append(f"{CUT} {tokenizer.decode(list(example.prompt))}")
    return texts


def sample_batches(
    model: Any,
    sample_batch: SampleBatch,
    batches: Iterable[PaddedBatch],
    mesh: Mesh,
) -> list[Continuation]:
    """Continuations of all prompts of global batches, in order.

    `sample_batch` returns the continuations of one process's part of a batch. Sharded weights are gathered once. As all
    processes take part in every forward pass, a process without prompts continues the first prompt and discards the
    result. Raises SamplingFailed on every process if an error is raised on any.
    """
    continuations, device = [], next(model.parameters()).device
    with gathered_weights(model):
        for batch in batches:
            indices_by_rank = np.array_split(np.arange(len(batch["prompt_input_ids"])), mesh.data_size)
            indices = indices_by_rank[mesh.data_rank]
            fed_indices = indices if len(indices) else [0]
            keys = ("prompt_input_ids", "prompt_attention_mask")
            part: Any = {key: batch[key][fed_indices].to(device) for key in keys}
            outcomes = mesh.gather_all(_sample_or_explain(sample_batch, model, part, len(indices)))
            for outcome in outcomes[:: mesh.tensor_size]:  # ranks along `tensor` have equal outcomes
                if isinstance(outcome, str):  # errors are exchanged like texts, so that all processes raise together
                    raise SamplingFailed(outcome)
                continuations += outcome
    return continuations


def _sample_or_explain(
    sample_batch: SampleBatch, model: Any, batch: PaddedBatch, n_kept: int
) -> list[Continuation] | str:
    """Sample the first `n_kept` continuations; return the message of an error."""
    try:
        return sample_batch(model, batch)[:n_kept]
    except Exception as error:  # `generate`, and a model's own code, may raise anything
        release_gathered(model)  # the forward pass may not have ended
        return f"{type(error).__name__} {one_sentence(error)}"
