"""Continuations of prompts, sampled in one process or in lockstep with others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from dpo.data.collation import PaddedBatch
from dpo.data.examples import Example
from dpo.data.table import Prompt
from dpo.data.tokenization import find_control, unescape
from dpo.errors import RunError, one_sentence
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import gathered_weights, release_gathered
from dpo.settings.keys import KEYS
from dpo.system.arithmetic import without_compilation
from dpo.system.waiting import all_arrive

PATIENCE_SECS = 10  # of a process that cannot sample, for the others to fail too: more than a token takes


class SamplingFailed(Exception):
    """Sampling failed on at least one process; the message says why."""


class Continuation(NamedTuple):
    """A model's continuation of a prompt."""

    text: str
    ended: bool  # by an end token, not cut off at the limit


SampleBatch = Callable[[Any, PaddedBatch], list[Continuation]]  # gets a model and collated prompts


class Sampling(NamedTuple):
    """Settings of sampling."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int | Sequence[int] = 0
    cache_implementation: str | None = None  # of transformers' `generate`
    top_k: int = 0  # 0: all tokens


CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # transformers' own, with which the reference code samples


def choose_sampling(generation_config: Any, wanted: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Choose temperature, top_p and top_k.

    A value is the wanted one, if it is not None, else that of a model's generation config, else a default, which for
    `chat` is another. Nothing else of a generation config is used: penalties, for instance, would show another
    distribution than the model's.
    """
    chosen = {}
    for name, default in (CHAT_DEFAULTS if chat else DEFAULTS).items():
        published = getattr(generation_config, name, None)
        is_usable = published is not None and KEYS[f"sample_{name}"].rule.holds(published)
        chosen[name] = wanted[name] if wanted[name] is not None else published if is_usable else default
    return chosen


def describe_sampling(chosen: Mapping[str, Any]) -> str:
    """Describe temperature, top-p and top-k."""
    if not chosen["temperature"]:
        return "temperature 0, the most probable token"
    limits = f"top-p {chosen['top_p']:g}, top-k {chosen['top_k'] or 'none'}"
    return f"temperature {chosen['temperature']:g}, {limits}"


def list_end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The EOS tokens of a tokenizer, and then of a generation config."""
    published = generation_config.eos_token_id
    tokens = [tokenizer.eos_token_id, *(published if isinstance(published, list) else [published])]
    return [token for token in dict.fromkeys(tokens) if token is not None]


def cut_at_end(tokens: Sequence[int], end_tokens: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Cut off what follows an end token; say if there is one."""
    end = next((i for i, token in enumerate(tokens, start=1) if token in end_tokens), None)
    return tuple(tokens[:end]), end is not None


@contextmanager
def plain_generation(model: Any, cache_implementation: str | None) -> Iterator[None]:
    """Replace the model's own generation config by transformers' defaults inside."""
    own_config = model.generation_config
    model.generation_config = transformers.GenerationConfig()
    try:
        with without_compilation(cache_implementation=cache_implementation), generating_with_sdpa(model):
            yield
    finally:
        model.generation_config = own_config


@torch.no_grad()
def sample(
    model: Any,
    batch: PaddedBatch,
    tokenizer: Any,
    sampling: Sampling,
    *,
    in_step: bool = False,
) -> list[Continuation]:
    """Sample one continuation per prompt; leave the random state as it was.

    `in_step`: several processes hold shards of the model and sample in lockstep, so each continues until all have
    finished.
    """
    prompt_ids = batch["prompt_input_ids"]
    end_tokens = list_end_tokens(model.generation_config, tokenizer)
    options = {name: getattr(sampling, name) for name in DEFAULTS} if sampling.temperature else {}
    gpus = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=gpus), plain_generation(model, sampling.cache_implementation):
        torch.manual_seed(int(np.random.SeedSequence(sampling.seed).generate_state(1)[0]))
        rows = model.generate(
            prompt_ids,
            attention_mask=batch["prompt_attention_mask"],
            max_new_tokens=sampling.max_new_tokens,
            do_sample=bool(options),
            **options,
            eos_token_id=end_tokens,
            pad_token_id=tokenizer.pad_token_id,
            synced_gpus=in_step,
            cache_implementation=sampling.cache_implementation,
        )
    continuations = []
    for new_tokens in rows[:, prompt_ids.shape[1] :].tolist():
        tokens, ended = cut_at_end(new_tokens, end_tokens)  # padding follows the end token
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        continuations.append(Continuation(text, ended))
    return continuations


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


WORDS_OF_SENTENCE = 3  # fewer are a header, such as "user" or "### Answer:"
CUT = "[...]"  # replaces the truncated part of a prompt


def fed_prompts(examples: Sequence[Example], prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    """The texts of prompts as fed, with CUT for truncated text."""
    texts = []
    for example in examples:
        prompt = prompts[example.id[0]]
        if not example.prompt_is_cut:
            texts.append(unescape(prompt.text))
        else:
            part = tokenizer.decode(list(example.prompt), clean_up_tokenization_spaces=False)
            cut = {"keep_start": f"{part} {CUT}", "keep_end": f"{CUT} {part}"}
            texts.append(cut.get(prompt.truncation_mode, part))
    return texts


def write_turns(prompt: Prompt, fed: str, tokenizer: Any) -> str:
    """Write a prompt for readers, without control tokens.

    The turns of a chat have their roles; a truncated chat is its text as `fed`.
    """
    if not prompt.messages or fed != unescape(prompt.text):
        return find_control(tokenizer).sub("", fed).strip()
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt.messages)


def find_added(prompt: Prompt, tokenizer: Any) -> str:
    """Find a template's own sentences, such as a system prompt."""
    if not prompt.messages:
        return ""
    before, pieces = unescape(prompt.text), []
    for message in reversed(prompt.messages):
        content = (message.get("content") or "").strip()
        if content and content in before:
            before, _, after = before.rpartition(content)
            pieces.append(after)
    lines = find_control(tokenizer).sub("\n", "\n".join([before, *reversed(pieces)])).splitlines()
    return "\n".join(line.strip() for line in lines if len(line.split()) >= WORDS_OF_SENTENCE)


def sample_batches(
    model: Any,
    sample_batch: SampleBatch,
    batches: Iterable[PaddedBatch],
    mesh: Mesh,
) -> list[Continuation]:
    """Continuations of all prompts of global batches, in order.

    `sample_batch` returns the continuations of one process's part of a batch. Sharded weights are gathered once. As all
    processes take part in every forward pass, a process without prompts continues the first prompt and discards the
    result. Raises SamplingFailed on every process if an error is raised on all; RunError if others go on, as their next
    collective would wait for this process.
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
        outcome = sample_batch(model, batch)[:n_kept]
    except Exception as error:  # `generate`, and a model's own code, may raise anything
        release_gathered(model)  # the forward pass may not have ended
        outcome = f"{type(error).__name__} {one_sentence(error)}"
    has_failed = isinstance(outcome, str)
    if not all_arrive("the end of sampling", patience_secs=PATIENCE_SECS if has_failed else 0):
        raise RunError(
            f"samples could not be drawn by this process alone, for which the others would wait: {outcome}; "
            f"resume=auto continues, and sample_during_eval=false draws none"
        )
    return outcome
