"""Policies and their reference, answering the same prompts side by side, with the answers' implicit rewards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

import torch

from dpo.checkpoint.files import read_state
from dpo.data.asking import Asked, choose_form, render
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.models.adapters import CONFIG, add_adapter, load_adapter, read_adapter, switch
from dpo.models.answers import Answer, Sampling, Tokens, answer, log_probabilities
from dpo.models.card import find_prompt_format
from dpo.models.loading import Weights, find_source, resolve_place
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, count_positions, load_config, load_model
from dpo.models.quantization import quantize
from dpo.models.weights import find_archive, model_digest
from dpo.parallel.sharding import choose_device_map
from dpo.system.arithmetic import for_generation
from dpo.system.host import count_gpus

REFERENCE = "reference"
OTHERWISE = "give --reference DIR, or --no-reference"
Answers = Mapping[str, Answer]  # by the names of the sides
Rewards = dict[str, float | None]


class Side(NamedTuple):
    """A model that answers; sides may share a model, with different adapters or none."""

    name: str  # policy, policy_2, ..., or REFERENCE
    model: Any
    beta: float | None  # beta of the policy's loss
    autocast: torch.dtype | None  # dtype in which its run scored responses
    adapter: str | None = None  # the model's adapter that it computes with

    def answer(self, tokenizer: Any, *asked: Any, **more: Any) -> list[Answer]:
        """Call `answers.answer` with this side's model."""
        with switch(self.model, self.adapter)():
            return answer(self.model, tokenizer, *asked, **more)

    def log_probabilities(self, *said: Any) -> list[float]:
        """Call `answers.log_probabilities` with this side's model."""
        with switch(self.model, self.adapter)():
            return log_probabilities(self.model, *said)


class Panel:
    """Models that answer the same prompts: the policies, then the reference, if any."""

    def __init__(self, sides: Sequence[Side], tokenizer: Any, form: str) -> None:
        self.sides, self.tokenizer, self.form = sides, tokenizer, form
        self.policies = [side for side in sides if side.name != REFERENCE]
        self.reference = next((side for side in sides if side.name == REFERENCE), None)

    def encode(self, asked: Asked, where: str, sampling: Sampling) -> Tokens:
        """Encode a prompt as in training, without adding special tokens. Raises InputError if it does not fit."""
        text = render(asked, self.form, self.tokenizer, where)
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError(f"{where}: the prompt has no tokens")
        for side in self.sides:
            if max(ids) >= (n := side.model.get_input_embeddings().num_embeddings):
                raise InputError(f"{where}: the {side.name} has {n} embeddings, and none for token id {max(ids)}")
            if len(ids) + sampling.max_new_tokens > (n := count_positions(side.model)):
                way_on = f"give --max-new-tokens {int(n) - len(ids)}" if len(ids) < n else "shorten the prompt"
                raise InputError(
                    f"{where}: {len(ids)} tokens of prompt and {sampling.max_new_tokens} of answer are more than the "
                    f"{n} positions of the {side.name}: {way_on}"
                )
        return ids

    def answer(self, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answers]:
        """The answers of all sides to each prompt; its number is mixed into the seed."""
        by_side = [side.answer(self.tokenizer, prompts, numbers, sampling) for side in self.sides]
        names = [side.name for side in self.sides]
        return [dict(zip(names, of_prompt, strict=True)) for of_prompt in zip(*by_side, strict=True)]

    def stream(self, prompt: Tokens, number: int, sampling: Sampling, show: Callable[[str, str], None]) -> Answers:
        """The answers of all sides to a prompt, generated at the same time.

        Sides that share a model answer one after the other. `show` gets (name of a side, its text so far).
        KeyboardInterrupt ends all.
        """
        news: SimpleQueue[tuple[str, list[int]] | None] = SimpleQueue()
        stop = Event()
        sharing: dict[int, list[Side]] = {}
        for side in self.sides:
            sharing.setdefault(id(side.model), []).append(side)

        def work(sides: list[Side]) -> Answers:
            def watch(name: str, tokens: list[int]) -> bool:
                news.put((name, tokens))
                return stop.is_set()

            def answered(side: Side) -> Answer:
                [made] = side.answer(self.tokenizer, [prompt], [number], sampling, watch=partial(watch, side.name))
                return made

            try:
                return {side.name: answered(side) for side in sides}
            finally:
                news.put(None)

        # Threads end in any order, and each restores the settings that it found: those of this thread.
        with for_generation(), ThreadPoolExecutor(len(sharing), thread_name_prefix="answer") as threads:
            try:
                working = [threads.submit(work, sides) for sides in sharing.values()]
                n_working = len(working)
                while n_working:
                    new = news.get()
                    if new is None:
                        n_working -= 1
                    else:  # the last tokens of a character may be missing
                        text = self.tokenizer.decode(
                            new[1], skip_special_tokens=True, clean_up_tokenization_spaces=False
                        )
                        show(new[0], text.rstrip("\ufffd"))
            finally:
                stop.set()
        made = {name: of_side for future in working for name, of_side in future.result().items()}
        return {side.name: made[side.name] for side in self.sides}

    def rewards(self, prompts: Sequence[Tokens], answers: Sequence[Answers]) -> list[Rewards]:
        """The implicit reward beta * (log pi - log ref) of each answer, None without a reference or beta.

        Log-probabilities are summed over tokens, whatever the loss. pi is the policy that gave the answer; for the
        reference's answers, the first policy.
        """
        found: list[Rewards] = [dict.fromkeys(of_prompt) for of_prompt in answers]
        if self.reference is None:
            return found
        for side in self.sides:
            policy = self.policies[0] if side is self.reference else side
            if policy.beta is None:
                continue
            said = [of_prompt[side.name] for of_prompt in answers]
            ours, theirs = (
                judge.log_probabilities(prompts, said, policy.autocast) for judge in (policy, self.reference)
            )
            for rewards, a, b in zip(found, ours, theirs, strict=True):
                rewards[side.name] = policy.beta * (a - b)
        return found


class Choices(NamedTuple):
    """The user's options for a panel, beside the policies."""

    reference: str | None = None  # None: that of the policies' runs
    with_reference: bool = True
    beta: float | None = None  # None: those of the policies' runs
    form: str = "auto"
    model: str | None = None
    trust_remote_code: bool = False


def load_panel(paths: Sequence[str | Path], choices: Choices, *, log: Callable[[str], None] = print) -> Panel:
    """Load the policies at these paths and their reference, one after the other; `log` gets notes and warnings.

    Raises InputError if one cannot be loaded, or if they have different tokenizers or references.
    """
    known = {"trust_remote_code": choices.trust_remote_code, "hub": True}
    origins = [find_origin(path, model=choices.model, **known, alone=len(paths) == 1) for path in paths]
    if choices.model and all(origin.plan.model.name_or_path != choices.model for origin in origins):
        raise InputError(f"--model {choices.model}: all of these have a base model of their own")
    tokenizer = _load_tokenizer(origins[0])
    form = choose_form(choices.form, find_prompt_format(origins[0]), tokenizer)
    reference = _find_reference(origins, choices) if choices.with_reference else None
    others = [*origins[1:], *([reference[0]] if reference and choices.reference else [])]
    for other in others:
        _check_tokenizer(tokenizer, other)
    bases: dict[Hashable, Any] = {}
    sides = [_load_policy(origin, number, choices.beta, bases) for number, origin in enumerate(origins, start=1)]
    if reference:
        origin, dtype = reference
        try:
            sides.append(_load(REFERENCE, origin, dtype, bases))
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
    source = find_source(origin.plan)
    name = origin.plan.model.tokenizer_name_or_path or source["name"]
    return load_tokenizer(**{**source, "name": name})


def _check_tokenizer(tokenizer: Any, origin: Origin) -> None:
    """Raises InputError if a model has another tokenizer. A local directory may lack one."""
    name = origin.plan.model.tokenizer_name_or_path or origin.plan.model.name_or_path
    folder = Path(name).expanduser()
    if folder.is_dir() and not list(folder.glob("tokenizer*")):
        return
    if _load_tokenizer(origin).get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{name} has another tokenizer than the first model: they cannot be compared token by token")


def _find_reference(origins: Sequence[Origin], choices: Choices) -> tuple[Origin, str | None] | None:
    """The reference and its dtype (None: its own), or None if it is not known."""
    if choices.reference is not None:
        origin = find_origin(choices.reference, trust_remote_code=choices.trust_remote_code, hub=True)
        return origin, _policy_dtype(origin)
    found = [_find_beginning(origin) for origin in origins if origin.run_dir is not None]
    found = found or [(o._replace(adapter=None), _policy_dtype(o)) for o in origins if o.adapter is not None]
    if not found:
        return None
    if len({_identity(origin, dtype) for origin, dtype in found}) > 1:
        raise InputError(f"the policies were trained with different references: {OTHERWISE}")
    return found[0]


def _identity(origin: Origin, dtype: str | None) -> Hashable:
    model = origin.plan.model
    drawn = origin.plan.run.seed if model.random_init else None
    quantized = origin.plan.quantized
    return resolve_place(model.name_or_path), origin.weights, origin.adapter, drawn, quantized, dtype


def _find_beginning(origin: Origin) -> tuple[Origin, str]:
    """The model that a run started from: its loss's reference, or else the policy before training; and its dtype."""
    model, plan = origin.plan.model, origin.plan
    loss = LOSSES.get(origin.plan.values.get("loss.name"))
    dtype = plan.reference_dtype if loss and loss.reference else model.policy_dtype
    try:
        weights, adapter = Weights.of(model.archive)
        if origin.adapter is not None:  # it names its base, even if the archive has changed
            return origin._replace(adapter=None if plan.reference == "base" else adapter and adapter.resolve()), dtype
        weights = None if weights is None else find_archive(weights).resolve()
    except InputError as error:
        raise InputError(f"the reference: {error}; {OTHERWISE}") from error
    return origin._replace(weights=weights), dtype


def _find_trained_otherwise(origins: Sequence[Origin], reference: Side) -> Path | None:
    """The first checkpoint whose run recorded another reference than this; None if there is none."""
    digests: dict[Hashable, str] = {}  # each costs a pass over the weights
    for origin in origins:
        record = origin.policy and origin.policy.with_name("trainer.pt")
        if origin.run_dir is None or record is None or not record.is_file():
            continue
        recorded, plan = read_state(record).get("reference"), origin.plan
        dtype = plan.model.autocast or plan.reference_dtype
        adapter = reference.adapter if plan.reference else None  # else the record is that of the base alone
        if recorded and (dtype, adapter) not in digests:
            digests[dtype, adapter] = model_digest(reference.model, dtype, adapter)
        if recorded and recorded != digests[dtype, adapter]:
            return record.parent
    return None


def _policy_dtype(origin: Origin) -> str | None:
    """The dtype of the run's policy; None without a run: that of the model's own config."""
    return None if origin.policy is None else origin.plan.model.policy_dtype


def _load_policy(origin: Origin, number: int, beta: float | None, bases: dict[Hashable, Any]) -> Side:
    autocast = origin.plan.model.autocast
    side = _load("policy" if number == 1 else f"policy_{number}", origin, _policy_dtype(origin), bases)
    return side._replace(
        beta=beta or origin.plan.values.get("loss.beta"), autocast=DTYPES[autocast] if autocast else None
    )


def _load(name: str, origin: Origin, dtype: str | None, bases: dict[Hashable, Any]) -> Side:
    """Load a side, on one of the `bases` if that is its own too, else on a new base that is added to them."""
    base = _identity(origin._replace(adapter=None), dtype), origin.plan.model.attn_implementation
    model = bases[base] = bases[base] if base in bases else _load_base(origin, dtype)
    if origin.adapter is None:
        return Side(name, model, None, None)
    stored = read_adapter(origin.adapter)
    try:
        add_adapter(model, stored.config, name=name, targets=f"{stored.directory / CONFIG}: target_modules")
        load_adapter(model, stored, name)
    except InputError as error:
        raise InputError(f"{origin.adapter} does not fit {origin.plan.model.name_or_path}: {error}") from error
    return Side(name, model, None, None, name)


def _load_base(origin: Origin, dtype: str | None) -> Any:
    source, model = find_source(origin.plan), origin.plan.model
    own_dtype = load_config(**source).dtype or torch.float32
    loaded = load_model(
        **source,
        dtype=DTYPES[dtype] if dtype else own_dtype,
        archive=None if origin.weights is None else str(origin.weights),
        attn_implementation="eager" if model.attn_implementation == "eager" else "sdpa",  # the others need a GPU
        random_init=model.random_init,
        seed=origin.plan.run.seed,
        device_map=choose_device_map(count_gpus()),
    )
    if origin.plan.quantized:
        quantize(loaded)
    return loaded.eval()
