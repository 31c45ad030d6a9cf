"""Policies and their reference, which answer the same prompts, with implicit rewards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

import torch

from dpo.checkpoint.files import read_state
from dpo.data.asking import UserPrompt, choose_format, render
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
from dpo.models.adapters import add_stored_adapter, read_adapter, switch
from dpo.models.answers import Answer, Sampling, Tokens, answer, log_probabilities
from dpo.models.card import find_prompt_format
from dpo.models.loading import digest_reference, find_source, load_base, resolve_place
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, count_positions
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights
from dpo.parallel.sharding import choose_device_map
from dpo.system.arithmetic import for_generation
from dpo.system.host import count_gpus

REFERENCE = "reference"
OTHERWISE = "give --reference DIR, or --no-reference"
Answers = Mapping[str, Answer]  # by the names of the sides
Rewards = dict[str, float | None]


class Side(NamedTuple):
    """A model that answers; sides may share one, with different adapters."""

    name: str  # policy, policy_2, ..., or REFERENCE
    model: Any
    beta: float | None  # beta of the policy's loss
    autocast: torch.dtype | None  # dtype in which its run scored responses
    adapter: str | None = None  # the model's adapter that it computes with

    def answer(self, *arguments: Any, **options: Any) -> list[Answer]:
        with switch(self.model, self.adapter)():
            return answer(self.model, *arguments, **options)

    def log_probabilities(self, *arguments: Any) -> list[float]:
        with switch(self.model, self.adapter)():
            return log_probabilities(self.model, *arguments)


class Panel:
    """Models that answer the same prompts: policies, then the reference."""

    def __init__(self, sides: Sequence[Side], tokenizer: Any, form: str) -> None:
        self.sides, self.tokenizer, self.form = sides, tokenizer, form
        self.policies = [side for side in sides if side.name != REFERENCE]
        self.reference = next((side for side in sides if side.name == REFERENCE), None)

    def encode(self, asked: UserPrompt, where: str, sampling: Sampling) -> Tokens:
        """Encode a prompt as in training, or raise InputError."""
        text = render(asked, self.form, self.tokenizer, where)
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError(f"{where}: the prompt has no tokens")
        # each side: a model given by --reference may have another vocabulary or fewer positions
        for side in self.sides:
            if max(ids) >= (n := side.model.get_input_embeddings().num_embeddings):
                raise InputError(f"{where}: the {side.name} has {n} embeddings, and none for token id {max(ids)}")
            if len(ids) + sampling.max_new_tokens > (n := count_positions(side.model)):
                fix = f"give --max-new-tokens {int(n) - len(ids)}" if len(ids) < n else "shorten the prompt"
                raise InputError(
                    f"{where}: {len(ids)} tokens of prompt and {sampling.max_new_tokens} of answer are more than the "
                    f"{n} positions of the {side.name}: {fix}"
                )
        return ids

    def answer(self, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answers]:
        """All sides' answers to prompts, whose numbers are mixed into the seed."""
        by_side = [side.answer(self.tokenizer, prompts, numbers, sampling) for side in self.sides]
        names = [side.name for side in self.sides]
        return [dict(zip(names, answers, strict=True)) for answers in zip(*by_side, strict=True)]

    def stream(self, prompt: Tokens, number: int, sampling: Sampling, show: Callable[[str, str], None]) -> Answers:
        """All sides' answers to a prompt, generated at the same time.

        Sides that share a model answer one after the other. `show` gets (name of a side, its text so far), from one
        thread at a time. KeyboardInterrupt ends all.
        """
        stop, showing = Event(), Lock()
        answers: dict[str, Answer] = {}  # by the name of the side

        def watch(name: str, tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            with showing:
                show(name, text.rstrip("\ufffd"))  # the last tokens of a character may be missing
            return stop.is_set()

        def work(sides: list[Side]) -> None:
            for side in sides:
                watch_side = partial(watch, side.name)
                [answers[side.name]] = side.answer(self.tokenizer, [prompt], [number], sampling, watch=watch_side)

        sharing = [[side for side in self.sides if side.model is model] for model in {s.model for s in self.sides}]
        # Threads end in any order, and each restores the settings that it found: set here, they are the same for all.
        with for_generation(), ThreadPoolExecutor(len(sharing), thread_name_prefix="answer") as threads:
            try:
                list(threads.map(work, sharing))
            finally:
                stop.set()
        return {side.name: answers[side.name] for side in self.sides}

    def rewards(self, prompts: Sequence[Tokens], answers: Sequence[Answers]) -> list[Rewards]:
        """The implicit rewards beta * (log pi - log ref) of answers.

        They are None without a reference or beta. Log-probabilities are summed over tokens, whatever the loss. pi is
        the policy that gave the answer; for the reference's answers, the first policy.
        """
        rewards: list[Rewards] = [dict.fromkeys(by_side) for by_side in answers]
        if self.reference is None:
            return rewards
        for side in self.sides:
            policy = self.policies[0] if side is self.reference else side
            if policy.beta is None:
                continue
            scored = prompts, [by_side[side.name] for by_side in answers], policy.autocast
            policy_logps, reference_logps = policy.log_probabilities(*scored), self.reference.log_probabilities(*scored)
            for reward, policy_logp, reference_logp in zip(rewards, policy_logps, reference_logps, strict=True):
                reward[side.name] = policy.beta * (policy_logp - reference_logp)
        return rewards


# --- loading ---------------------------------------------------------------------------------------------------------


class Choices(NamedTuple):
    """The user's options for a panel, beside the policies."""

    reference: str | None = None  # None: that of the policies' runs
    with_reference: bool = True
    beta: float | None = None  # None: those of the policies' runs
    form: str = "auto"
    model: str | None = None
    trust_remote_code: bool = False


def load_panel(paths: Sequence[str | Path], choices: Choices, *, log: Callable[[str], None] = print) -> Panel:
    """Load policies and their reference, one after the other.

    `log` gets notes and warnings. Raises InputError if one cannot be loaded, or if they have different tokenizers or
    references.
    """
    options: dict[str, Any] = {"trust_remote_code": choices.trust_remote_code, "hub": True}
    origins = [find_origin(path, model=choices.model, **options, alone=len(paths) == 1) for path in paths]
    if choices.model and all(origin.plan.model.name_or_path != choices.model for origin in origins):
        raise InputError(f"--model {choices.model}: all of these have a base model of their own")
    tokenizer = _load_tokenizer(origins[0])
    form = choose_format(choices.form, find_prompt_format(origins[0]), tokenizer)
    reference = None
    if choices.with_reference:
        reference = find_origin(choices.reference, **options) if choices.reference else _find_reference(origins)
    for other in (*origins[1:], *([reference] if reference and choices.reference else [])):
        _check_tokenizer(tokenizer, other)
    bases: dict[Hashable, Any] = {}
    names = ["policy", *(f"policy_{number}" for number in range(2, len(origins) + 1))]
    sides = [_load(name, origin, choices.beta, bases) for name, origin in zip(names, origins, strict=True)]
    if reference:
        try:
            sides.append(_load(REFERENCE, reference, None, bases))
        except InputError as error:
            raise InputError(f"the reference: {error}; {OTHERWISE}") from error
        if choices.reference is None and (checkpoint := _find_trained_otherwise(origins, sides[-1])):
            log(f"warning: {checkpoint} was trained with a reference of other weights or config than this: {OTHERWISE}")
    elif choices.with_reference:
        log("no reference is known, so there are no rewards: give --reference DIR to see both")
    if reference and not all(side.beta for side in sides if side.name != REFERENCE):
        log("no beta is known, so there are no rewards: give --beta")
    return Panel(sides, tokenizer, form)


def _load_tokenizer(origin: Origin) -> Any:
    return load_tokenizer(**find_source(origin.plan) | {"name": origin.plan.model.tokenizer})


def _check_tokenizer(tokenizer: Any, origin: Origin) -> None:
    name = origin.plan.model.tokenizer
    folder = Path(name).expanduser()
    if folder.is_dir() and not list(folder.glob("tokenizer*")):  # it has none of its own
        return
    if _load_tokenizer(origin).get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{name} has another tokenizer than the first model: they cannot be compared token by token")


def _find_reference(origins: Sequence[Origin]) -> Origin | None:
    """The model that all policies started from; None if not known."""
    starts = [_find_start(origin) for origin in origins if origin.run_dir is not None]
    starts = starts or [_remove_adapter(origin) for origin in origins if origin.weights.adapter is not None]
    if len(set(map(_identify, starts))) > 1:
        raise InputError(f"the policies were trained with different references: {OTHERWISE}")
    return starts[0] if starts else None


def _find_start(origin: Origin) -> Origin:
    """The model that a run started from, in its reference's dtype."""
    plan = origin.plan
    with explaining(InputError, lambda why: InputError(f"the reference: {why}; {OTHERWISE}")):
        start = locate_weights(plan.model.archive) if plan.model.archive else Weights()
    # an adapter names its base, which model.archive may no longer be: LATEST points elsewhere later
    archive = start.archive if origin.weights.adapter is None else origin.weights.archive
    adapter = None if plan.reference == "base" else start.adapter
    return origin._replace(
        plan=plan.change("model.policy_dtype", plan.reference_dtype) if plan.reference else plan,
        weights=Weights(*(place and place.resolve() for place in (archive, adapter))),
    )


def _remove_adapter(origin: Origin) -> Origin:
    return origin._replace(weights=Weights(origin.weights.archive))


def _find_dtype(origin: Origin) -> torch.dtype | None:
    """The dtype of the run's model; None: that of its own config."""
    known = origin.run_dir is not None or origin.weights.archive is not None
    return DTYPES[origin.plan.model.policy_dtype] if known else None


def _identify(origin: Origin) -> Hashable:
    """A key of a model's weights and dtype."""
    plan, weights = origin.plan, origin.weights
    drawn = plan.run.seed if plan.model.random_init else None
    place = resolve_place(plan.model.name_or_path)
    return place, weights.archive, weights.adapter, drawn, plan.quantized, _find_dtype(origin)


def _find_trained_otherwise(origins: Sequence[Origin], reference: Side) -> Path | None:
    """The first checkpoint whose run recorded another reference, if any."""
    for origin in origins:
        record = origin.policy and origin.policy.with_name("trainer.pt")
        if origin.run_dir is None or record is None or not record.is_file():
            continue
        # a run without a reference has recorded its base alone
        adapter = reference.adapter if origin.plan.reference else None
        recorded = read_state(record).get("reference")  # its digest
        if recorded and recorded != digest_reference(reference.model, origin.plan, adapter):
            return record.parent
    return None


def _load(name: str, origin: Origin, beta: float | None, bases: dict[Hashable, Any]) -> Side:
    """Load a side, on its base in `bases` or a new one."""
    plan, weights = origin.plan, origin.weights
    key = _identify(_remove_adapter(origin)), plan.model.attn_implementation
    if key not in bases:
        attention = "eager" if plan.model.attn_implementation == "eager" else "sdpa"  # the others need a GPU
        device_map = choose_device_map(count_gpus())
        base = load_base(
            plan, _find_dtype(origin), weights.archive, attn_implementation=attention, device_map=device_map
        )
        bases[key] = (quantize(base) if plan.quantized else base).eval()
    adapter = None if weights.adapter is None else name
    if adapter is not None:
        add_stored_adapter(bases[key], read_adapter(weights.adapter), adapter)
    autocast = DTYPES[plan.model.autocast] if plan.model.autocast else None
    return Side(name, bases[key], beta or plan.values.get("loss.beta"), autocast, adapter)
