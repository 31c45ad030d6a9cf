"""A policy and its reference, which answer the same prompts, with implicit rewards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from dpo.data.asking import UserPrompt, choose_format, render
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError
from dpo.models.adapters import add_stored_adapter, read_adapter, switch
from dpo.models.answers import Answer, Sampling, Tokens, answer, log_probabilities
from dpo.models.card import find_prompt_format
from dpo.models.loading import find_source, load_base, resolve_name
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, count_positions, find_changing_ropes
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights
from dpo.parallel.sharding import choose_device_map
from dpo.system.host import count_gpus


class Side(NamedTuple):
    """The policy or the reference; if they have the same base, they share one `model`."""

    name: str
    model: Any
    adapter: str | None = None  # the name of this side's adapter in the model


class Shown(transformers.TextStreamer):
    """Prints an answer while it grows, without the control characters that could steer a terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        print(shown, end="\n" if stream_end else "", flush=True)


class Panel(NamedTuple):
    """Models that answer the same prompts."""

    sides: list[Side]  # the policy, and the reference if there is one
    encoder: TextEncoder
    form: str  # of prompts: one of `asking.FORMATS` except `auto`
    beta: float | None = None  # of rewards; None: unknown
    autocast: torch.dtype | None = None  # in which the run scored responses

    def encode(self, asked: UserPrompt, where: str, sampling: Sampling, tools: Any = None) -> Tokens:
        """Encode a prompt as in training.

        `where` says where the prompt comes from. A chat may have `tools`. Raises InputError if the prompt is empty,
        stands for an image, or does not fit a model.
        """
        tokenizer = self.encoder.tokenizer
        text = render(asked, self.form, tokenizer, where, tools)
        for medium in getattr(tokenizer, "media_tokens", ()):
            if medium in repr(asked):
                raise InputError(
                    f"{where}: the prompt has {medium}, which stands for an image, video or audio: remove it"
                )
        tokens = tuple(self.encoder([text])[text])
        for side in self.sides:
            # beyond some length a rope may change for all rows of a batch
            ropes = find_changing_ropes(side.model.config.get_text_config())
            limit = min(count_positions(side.model), *(length for _, length in ropes), float("inf"))
            if len(tokens) + sampling.max_new_tokens > limit:
                raise InputError(
                    f"{where}: the prompt's {len(tokens)} tokens and up to {sampling.max_new_tokens} tokens of answer "
                    f"are more than the {limit} positions of the {side.name}: shorten the prompt, or lower "
                    f"--max-new-tokens"
                )
        return tokens

    def answer(
        self, side: Side, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling, *, show: bool = False
    ) -> list[Answer]:
        """A side's answer to each prompt; with `show` a single one is printed while it grows."""
        options: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        streamer = Shown(self.encoder.tokenizer, skip_prompt=True, **options) if show else None
        with switch(side.model, side.adapter)():
            return answer(side.model, self.encoder.tokenizer, prompts, numbers, sampling, streamer=streamer)

    def rewards(self, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> list[float | None]:
        """The implicit rewards beta * (log pi - log ref), summed over tokens, of answers by either side.

        Rewards are None without a reference or beta.
        """
        if len(self.sides) == 1 or self.beta is None:
            return [None] * len(answers)
        by_side = []
        for side in self.sides:
            with switch(side.model, side.adapter)():
                by_side.append(log_probabilities(side.model, prompts, answers, self.autocast))
        return [self.beta * (ours - base) for ours, base in zip(*by_side, strict=True)]


def load_panel(
    path: str | Path,
    *,
    reference: str | None = None,
    with_reference: bool = True,
    beta: float | None = None,
    form: str = "auto",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> Panel:
    """Load a policy and its reference.

    `reference` is a path or Hub id, or None for the model that the policy's run started from; `beta` that of the
    rewards, or None for the run's; `form` of prompts is one of `asking.FORMATS`; `model` is the base of a policy that
    names none. Prints why there are no rewards. Raises InputError if a model cannot be loaded, or if the tokenizers
    differ.
    """
    policy = find_origin(path, model=model, trust_remote_code=trust_remote_code, hub=True)
    if policy.plan.loss.scalar_head:
        raise InputError(f"{path} is a reward model, which gives no answers: give a policy")
    tokenizer = _load_tokenizer(policy)
    origins = {"policy": policy}
    if reference:
        origins["reference"] = find_origin(reference, trust_remote_code=trust_remote_code, hub=True)
        # the models are compared token by token
        if _load_tokenizer(origins["reference"]).get_vocab() != tokenizer.get_vocab():
            raise InputError(f"{reference} has another tokenizer than the policy: give a reference with the same one")
    elif with_reference:
        if start := _find_start(policy):
            origins["reference"] = start
        else:
            print("no reference is known, so there are no rewards: give --reference DIR")
    beta = beta or policy.plan.values.get("loss.beta")
    if beta is None and len(origins) == 2:
        print("the beta of the policy's loss is unknown, so there are no rewards: give --beta")

    bases: dict[Hashable, Any] = {}
    sides = [_load(name, origin, bases) for name, origin in origins.items()]
    autocast = DTYPES[policy.plan.model.autocast] if policy.plan.model.autocast else None
    form = choose_format(form, find_prompt_format(policy), tokenizer)
    return Panel(sides, TextEncoder(tokenizer), form, beta, autocast)


def _load_tokenizer(origin: Origin) -> Any:
    return load_tokenizer(origin.plan.model.tokenizer, **find_source(origin.plan).options, chat=origin.plan.chat)


def _find_start(policy: Origin) -> Origin | None:
    """The model that a policy's run started from, in the reference's dtype; None if not known."""
    plan, weights = policy.plan, policy.weights
    if policy.run_dir is None:  # an adapter started from its base
        return None if weights.adapter is None else policy._replace(weights=Weights(weights.archive))
    start = locate_weights(plan.model.archive) if plan.model.archive else Weights()
    # an adapter names its base; model.archive may be a LATEST that has moved
    archive = start.archive if weights.adapter is None else weights.archive
    adapter = None if plan.reference == "base" else start.adapter
    if plan.reference:
        plan = plan.change("model.policy_dtype", plan.reference_dtype)
    return policy._replace(plan=plan, weights=Weights(archive, adapter).resolve())


def _load(name: str, origin: Origin, bases: dict[Hashable, Any]) -> Side:
    """Load a side; its base is taken from `bases`, or added."""
    plan, weights = origin.plan, origin.weights
    has_plan_dtype = origin.run_dir is not None or weights.archive is not None
    dtype = DTYPES[plan.model.policy_dtype] if has_plan_dtype else None  # None: that of the model's own config
    init_seed = plan.run.seed if plan.model.random_init else None
    key = (resolve_name(plan.model.name_or_path), weights.archive, init_seed, plan.quantized, dtype)
    if key not in bases:
        # not attention that needs a GPU
        attention = "eager" if plan.model.attn_implementation == "eager" else "sdpa"
        gpus = count_gpus()
        device_map = None if plan.quantized else choose_device_map(gpus)
        base = load_base(plan, dtype, weights.archive, attn_implementation=attention, device_map=device_map)
        if plan.quantized:
            quantize(base, device="cuda" if gpus else None)
        bases[key] = base.eval()
    if weights.adapter is None:
        return Side(name, bases[key])
    add_stored_adapter(bases[key], read_adapter(weights.adapter), name)
    return Side(name, bases[key], name)
