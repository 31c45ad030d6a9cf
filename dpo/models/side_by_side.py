"""Policies and their reference, which answer the same prompts, with implicit rewards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from dpo.data.asking import UserPrompt, choose_format, render
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
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

REFERENCE = "reference"
CHOOSE_REFERENCE = "give --reference DIR, or --no-reference"


class Side(NamedTuple):
    """A policy or the reference.

    Sides with the same base share one `model`, and compute with different adapters in it.
    """

    name: str  # policy, policy_2, ..., or REFERENCE
    model: Any
    beta: float | None  # of the policy's loss; None if unknown, and for the reference
    autocast: torch.dtype | None  # dtype in which the run scored responses; None without autocast
    adapter: str | None = None  # the name of this side's adapter in the model


class Shown(transformers.TextStreamer):
    """Prints an answer while it grows, without the control characters that could steer a terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        print(shown, end="\n" if stream_end else "", flush=True)


class Panel:
    """Models that answer the same prompts: policies, then the reference."""

    def __init__(self, sides: Sequence[Side], tokenizer: Any, form: str) -> None:
        self.sides, self.tokenizer, self.form = sides, tokenizer, form
        self._encode = TextEncoder(tokenizer)
        self.reference = next((side for side in sides if side.name == REFERENCE), None)

    def encode(self, asked: UserPrompt, where: str, sampling: Sampling, tools: Any = None) -> Tokens:
        """Encode a prompt as in training.

        `where` says where the prompt comes from. A chat may have `tools`. Raises InputError if the prompt is empty,
        stands for an image, or does not fit a model.
        """
        text = render(asked, self.form, self.tokenizer, where, tools)
        media_tokens = getattr(self.tokenizer, "media_tokens", ())
        if medium := next((token for token in media_tokens if token in repr(asked)), None):
            raise InputError(f"{where}: the prompt has {medium}, which stands for an image, video or audio: remove it")
        tokens = tuple(self._encode([text])[text])
        if not tokens:
            raise InputError(f"{where}: the prompt has no tokens")
        n_prompt, n_answer = len(tokens), sampling.max_new_tokens
        # check every side, as a model given by --reference may have another vocabulary or fewer positions
        for name, model, *_ in self.sides:
            n_embeddings = model.get_input_embeddings().num_embeddings
            if max(tokens) >= n_embeddings:
                raise InputError(
                    f"{where}: token id {max(tokens)} of the prompt is out of range for the {name}, which has "
                    f"{n_embeddings} embeddings: give models with the same tokenizer"
                )
            # beyond some length a rope may change for all rows of a batch
            ropes = find_changing_ropes(model.config.get_text_config())
            limit = min(count_positions(model), *(length for _, length in ropes), float("inf"))
            if n_prompt + n_answer > limit:
                fix = f"give --max-new-tokens {int(limit) - n_prompt}" if n_prompt < limit else "shorten the prompt"
                raise InputError(
                    f"{where}: the prompt's {n_prompt} tokens and up to {n_answer} tokens of answer are more than the "
                    f"{limit} positions of the {name}: {fix}"
                )
        return tokens

    def answer(
        self, side: Side, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling, *, show: bool = False
    ) -> list[Answer]:
        """A side's answer to each prompt; with `show` a single one is printed while it grows."""
        options: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        streamer = Shown(self.tokenizer, skip_prompt=True, **options) if show else None
        with switch(side.model, side.adapter)():
            return answer(side.model, self.tokenizer, prompts, numbers, sampling, streamer=streamer)

    def rewards(self, side: Side, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> list[float | None]:
        """The implicit rewards beta * (log pi - log ref) of a side's answers.

        Rewards are None without a reference or beta. Log-probabilities are summed over tokens, whatever the loss. pi is
        the policy that gave the answer; for the reference's answers, the first policy.
        """
        policy = self.sides[0] if side is self.reference else side
        if self.reference is None or policy.beta is None:
            return [None] * len(answers)
        by_model = []
        for one in (policy, self.reference):
            with switch(one.model, one.adapter)():
                by_model.append(log_probabilities(one.model, prompts, answers, policy.autocast))
        return [policy.beta * (ours - base) for ours, base in zip(*by_model, strict=True)]


# --- loading ---------------------------------------------------------------------------------------------------------


def load_panel(
    paths: Sequence[str | Path],
    *,
    reference: str | None = None,
    with_reference: bool = True,
    beta: float | None = None,
    form: str = "auto",
    model: str | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = print,
) -> Panel:
    """Load policies and their reference, one after the other.

    `reference` is a path or Hub id, or None for the model that the policies' runs started from; `beta` that of the
    rewards, or None for the runs'; `form` of prompts is one of `asking.FORMATS`; `model` is the base of a policy that
    names none. `log` gets notes. Raises InputError if a model cannot be loaded, or if the models have different
    tokenizers or references.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "hub": True}
    origins = {
        f"policy_{n}" if n > 1 else "policy": find_origin(path, model=model, **options, alone=len(paths) == 1)
        for n, path in enumerate(paths, start=1)
    }
    policies = [*origins.values()]
    if model and all(origin.plan.model.name_or_path != model for origin in policies):
        raise InputError(f"--model {model} is not needed: every policy has a base model of its own")
    for path, origin in zip(paths, policies, strict=True):
        if origin.plan.loss.scalar_head:
            raise InputError(f"{path} is a reward model, which gives no answers: give a policy")
    if with_reference:
        start = find_origin(reference, **options) if reference else _find_reference(policies)
        if start is None:
            log("no reference is known, so there are no rewards: give --reference DIR to see a reference and rewards")
        else:
            origins[REFERENCE] = start
    first = policies[0]
    tokenizer = _load_tokenizer(first)
    form = choose_format(form, find_prompt_format(first), tokenizer)
    for origin in (*policies[1:], *([origins[REFERENCE]] if reference else [])):
        _check_tokenizer(tokenizer, origin)

    bases: dict[Hashable, Any] = {}
    sides = [_load(name, origin, beta, bases) for name, origin in origins.items() if name != REFERENCE]
    if REFERENCE in origins:
        with _explaining_reference():
            sides.append(_load(REFERENCE, origins[REFERENCE], None, bases))
    unknown = [side.name for side in sides if side.beta is None and side.name != REFERENCE]
    if unknown and REFERENCE in origins:
        log(f"the beta of {' and '.join(unknown)} is unknown, so rewards are missing: give --beta")
    return Panel(sides, tokenizer, form)


def _explaining_reference() -> AbstractContextManager[None]:
    return explaining(InputError, lambda why: InputError(f"the reference: {why}; {CHOOSE_REFERENCE}"))


def _load_tokenizer(origin: Origin) -> Any:
    return load_tokenizer(origin.plan.model.tokenizer, **find_source(origin.plan).options, chat=origin.plan.chat)


def _check_tokenizer(tokenizer: Any, origin: Origin) -> None:
    """Raise InputError if a model has another tokenizer than the first model."""
    name = origin.plan.model.tokenizer
    directory = Path(name).expanduser()
    if directory.is_dir() and not list(directory.glob("tokenizer*")):  # a directory of weights, without a tokenizer
        return
    if _load_tokenizer(origin).get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{name} has another tokenizer than the first model, so the models cannot be compared token by token: give "
            f"models with the same tokenizer"
        )


def _find_reference(policies: Sequence[Origin]) -> Origin | None:
    """The model that all policies started from; None if not known."""
    references = [_find_start(origin) for origin in policies if origin.run_dir is not None]
    if not references:  # without a run, an adapter started from its base
        references = [_remove_adapter(origin) for origin in policies if origin.weights.adapter is not None]
    if len({_identify(origin) for origin in references}) > 1:
        raise InputError(f"the policies were trained with different references: {CHOOSE_REFERENCE}")
    return references[0] if references else None


def _find_start(policy: Origin) -> Origin:
    """The model that a policy's run started from, in the reference's dtype."""
    plan = policy.plan
    with _explaining_reference():
        start = locate_weights(plan.model.archive) if plan.model.archive else Weights()
    # an adapter names its base; model.archive may be a LATEST that has moved
    archive = start.archive if policy.weights.adapter is None else policy.weights.archive
    adapter = None if plan.reference == "base" else start.adapter
    if plan.reference:
        plan = plan.change("model.policy_dtype", plan.reference_dtype)
    return policy._replace(plan=plan, weights=Weights(archive, adapter).resolve())


def _remove_adapter(origin: Origin) -> Origin:
    return origin._replace(weights=Weights(origin.weights.archive))


def _find_dtype(origin: Origin) -> torch.dtype | None:
    """The dtype to load a model in; None: its own config's."""
    has_plan_dtype = origin.run_dir is not None or origin.weights.archive is not None
    return DTYPES[origin.plan.model.policy_dtype] if has_plan_dtype else None


def _identify(origin: Origin) -> Hashable:
    """A key, equal for models with the same weights, dtype and attention."""
    plan, weights = origin.plan, origin.weights
    init_seed = plan.run.seed if plan.model.random_init else None
    name, attention = resolve_name(plan.model.name_or_path), plan.model.attn_implementation
    return name, weights.archive, weights.adapter, init_seed, plan.quantized, _find_dtype(origin), attention


def _load(name: str, origin: Origin, beta: float | None, bases: dict[Hashable, Any]) -> Side:
    """Load a side; its base is taken from `bases`, or added."""
    plan, weights = origin.plan, origin.weights
    key = _identify(_remove_adapter(origin))
    if key not in bases:
        # not flash or flex attention, which need a GPU
        attention = "eager" if plan.model.attn_implementation == "eager" else "sdpa"
        gpus = count_gpus()
        device_map = None if plan.quantized else choose_device_map(gpus)
        base = load_base(
            plan, _find_dtype(origin), weights.archive, attn_implementation=attention, device_map=device_map
        )
        if plan.quantized:
            quantize(base, device="cuda" if gpus else None)
        bases[key] = base.eval()
    adapter = None if weights.adapter is None else name
    if adapter is not None:
        add_stored_adapter(bases[key], read_adapter(weights.adapter), adapter)
    autocast = DTYPES[plan.model.autocast] if plan.model.autocast else None
    return Side(name, bases[key], beta or plan.values.get("loss.beta"), autocast, adapter)
