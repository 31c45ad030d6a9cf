"""Policies and their reference, which answer the same prompts, with implicit rewards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpo.checkpoint.files import read_state
from dpo.data.asking import UserPrompt, choose_format, render
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
from dpo.models.adapters import add_stored_adapter, read_adapter, switch
from dpo.models.answers import Answer, Sampling, Tokens, answer, log_probabilities
from dpo.models.card import find_prompt_format
from dpo.models.loading import digest_reference, find_source, load_base, resolve_name
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, count_positions, find_changing_ropes
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights
from dpo.parallel.sharding import choose_device_map
from dpo.system.host import count_gpus

REFERENCE = "reference"
CHOOSE_REFERENCE = "give --reference DIR, or --no-reference"
Answers = Mapping[str, Answer]  # by the names of the sides
Rewards = dict[str, float | None]  # by the names of the sides


class Side(NamedTuple):
    """A policy or the reference.

    Sides with the same base share one `model`, and compute with different adapters in it.
    """

    name: str  # policy, policy_2, ..., or REFERENCE
    model: Any
    beta: float | None  # of the policy's loss; None if unknown, and for the reference
    autocast: torch.dtype | None  # dtype in which the run scored responses; None without autocast
    adapter: str | None = None  # the name of this side's adapter in the model

    def answer(self, *arguments: Any, **options: Any) -> list[Answer]:
        """`answers.answer`, with this side's adapter."""
        with switch(self.model, self.adapter)():
            return answer(self.model, *arguments, **options)

    def log_probabilities(self, *arguments: Any) -> list[float]:
        """`answers.log_probabilities`, with this side's adapter."""
        with switch(self.model, self.adapter)():
            return log_probabilities(self.model, *arguments)


class Panel:
    """Models that answer the same prompts: policies, then the reference."""

    def __init__(self, sides: Sequence[Side], tokenizer: Any, form: str) -> None:
        self.sides, self.tokenizer, self.form = sides, tokenizer, form
        self._encode = TextEncoder(tokenizer)
        self.policies = [side for side in sides if side.name != REFERENCE]
        self.reference = next((side for side in sides if side.name == REFERENCE), None)

    def encode(self, asked: UserPrompt, where: str, sampling: Sampling, tools: Any = None) -> Tokens:
        """Encode a prompt as in training.

        `where` says where the prompt comes from. A chat may have `tools`. Raises InputError if the prompt is empty or
        does not fit a model.
        """
        text = render(asked, self.form, self.tokenizer, where, tools)
        token_ids = tuple(self._encode([text])[text])
        if not token_ids:
            raise InputError(f"{where}: the prompt has no tokens")
        n_prompt, n_answer, largest_id = len(token_ids), sampling.max_new_tokens, max(token_ids)
        # check every side, as a model given by --reference may have another vocabulary or fewer positions
        for side in self.sides:
            n_embeddings, n_positions = side.model.get_input_embeddings().num_embeddings, count_positions(side.model)
            if largest_id >= n_embeddings:
                raise InputError(
                    f"{where}: token id {largest_id} of the prompt is out of range for the {side.name}, which has "
                    f"{n_embeddings} embeddings: give models with the same tokenizer"
                )
            if n_prompt + n_answer > n_positions:
                fix = "shorten the prompt"
                if n_prompt < n_positions:
                    fix = f"give --max-new-tokens {int(n_positions) - n_prompt}"
                raise InputError(
                    f"{where}: the prompt's {n_prompt} tokens and up to {n_answer} tokens of answer are more than the "
                    f"{n_positions} positions of the {side.name}: {fix}"
                )
        return token_ids

    def check_batches(self, prompts: Sequence[Tokens], sampling: Sampling) -> None:
        """Raise InputError if rows of a batch would change each other's answers."""
        longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
        for side in self.sides:
            for kind, length in find_changing_ropes(side.model.config.get_text_config()):
                if longest > length:
                    raise InputError(
                        f"the {side.name} changes the rotary frequencies of a whole batch with a row of more than "
                        f"{length} tokens (rope_type={kind}), and prompt and answer may have {longest}: give "
                        f"--batch-size 1"
                    )

    def answer(self, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answers]:
        """The answers of all sides to each prompt.

        The prompts' numbers are mixed into the seed.
        """
        by_side = {side.name: side.answer(self.tokenizer, prompts, numbers, sampling) for side in self.sides}
        return [{name: answers[i] for name, answers in by_side.items()} for i in range(len(prompts))]

    def stream(
        self, side: Side, prompt: Tokens, number: int, sampling: Sampling, show: Callable[[str], None]
    ) -> Answer:
        """A side's answer to a prompt; `show` gets its text so far."""

        def watch(tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            show(text.rstrip("\ufffd"))  # a character of several tokens may be incomplete
            return False

        [answer] = side.answer(self.tokenizer, [prompt], [number], sampling, watch=watch)
        return answer

    def rewards(self, prompts: Sequence[Tokens], answers: Sequence[Answers]) -> list[Rewards]:
        """The implicit rewards beta * (log pi - log ref) of answers.

        Rewards are None without a reference or beta. Log-probabilities are summed over tokens, whatever the loss. pi is
        the policy that gave the answer; for the reference's answers, the first policy.
        """
        by_side = {
            side.name: self.score_answers(side, prompts, [row[side.name] for row in answers]) for side in self.sides
        }
        return [{name: rewards[i] for name, rewards in by_side.items()} for i in range(len(answers))]

    def score_answers(self, side: Side, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> list[float | None]:
        """The rewards of a side's answers."""
        policy = self.policies[0] if side is self.reference else side
        if self.reference is None or policy.beta is None:
            return [None] * len(answers)
        policy_logps = policy.log_probabilities(prompts, answers, policy.autocast)
        reference_logps = self.reference.log_probabilities(prompts, answers, policy.autocast)
        return [policy.beta * (ours - base) for ours, base in zip(policy_logps, reference_logps, strict=True)]


# --- loading ---------------------------------------------------------------------------------------------------------


class Choices(NamedTuple):
    """The user's options for a panel, besides the paths of the policies."""

    reference: str | None = None  # a path or Hub id; None: the reference of the policies' runs
    with_reference: bool = True
    beta: float | None = None  # None: each policy has the beta of its run
    form: str = "auto"  # of prompts, one of `asking.FORMATS`
    model: str | None = None  # the base of a policy that names none, a path or Hub id
    trust_remote_code: bool = False


def load_panel(paths: Sequence[str | Path], choices: Choices, *, log: Callable[[str], None] = print) -> Panel:
    """Load policies and their reference, one after the other.

    `log` gets notes and warnings. Raises InputError if a model cannot be loaded, or if the models have different
    tokenizers or references.
    """
    options: dict[str, Any] = {"trust_remote_code": choices.trust_remote_code, "hub": True}
    policies = [find_origin(path, model=choices.model, **options, alone=len(paths) == 1) for path in paths]
    if choices.model and all(origin.plan.model.name_or_path != choices.model for origin in policies):
        raise InputError(f"--model {choices.model} is not needed: every policy has a base model of its own")
    for path, origin in zip(paths, policies, strict=True):
        if origin.plan.loss.scalar_head:
            raise InputError(f"{path} is a reward model, which gives no answers: give a policy")
    tokenizer = _load_tokenizer(policies[0])
    form = choose_format(choices.form, find_prompt_format(policies[0]), tokenizer)
    reference = None
    if choices.with_reference:
        reference = find_origin(choices.reference, **options) if choices.reference else _find_reference(policies)
    for origin in policies[1:]:
        _check_tokenizer(tokenizer, origin)
    if reference and choices.reference:  # the reference of a run has the policy's tokenizer
        _check_tokenizer(tokenizer, reference)

    bases: dict[Hashable, Any] = {}
    names = ["policy", *(f"policy_{number}" for number in range(2, len(policies) + 1))]
    sides = [_load(name, origin, choices.beta, bases) for name, origin in zip(names, policies, strict=True)]
    if reference is None:
        if choices.with_reference:
            log("no reference is known, so there are no rewards: give --reference DIR to see a reference and rewards")
        return Panel(sides, tokenizer, form)
    try:
        reference_side = _load(REFERENCE, reference, None, bases)
    except InputError as error:
        raise InputError(f"the reference: {error}; {CHOOSE_REFERENCE}") from error
    checkpoint = None if choices.reference else _find_checkpoint_with_other_reference(policies, reference_side)
    if checkpoint:
        log(
            f"warning: {checkpoint} was trained with a reference of other weights or config than the one loaded now: "
            f"{CHOOSE_REFERENCE}"
        )
    names_without_beta = [side.name for side in sides if not side.beta]
    if names_without_beta:
        log(f"the beta of {' and '.join(names_without_beta)} is unknown, so rewards are missing: give --beta")
    return Panel([*sides, reference_side], tokenizer, form)


def _load_tokenizer(origin: Origin) -> Any:
    return load_tokenizer(**find_source(origin.plan) | {"name": origin.plan.model.tokenizer}, chat=origin.plan.chat)


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
    with explaining(InputError, lambda why: InputError(f"the reference: {why}; {CHOOSE_REFERENCE}")):
        start = locate_weights(plan.model.archive) if plan.model.archive else Weights()
    archive = start.archive
    if policy.weights.adapter is not None:  # the adapter names its base; model.archive may be a LATEST that has moved
        archive = policy.weights.archive
    adapter = None if plan.reference == "base" else start.adapter
    if plan.reference:
        plan = plan.change("model.policy_dtype", plan.reference_dtype)
    return policy._replace(
        plan=plan,
        weights=Weights(archive, adapter).resolve(),
    )


def _remove_adapter(origin: Origin) -> Origin:
    return origin._replace(weights=Weights(origin.weights.archive))


def _find_dtype(origin: Origin) -> torch.dtype | None:
    """The dtype to load a model in; None: its own config's."""
    has_plan_dtype = origin.run_dir is not None or origin.weights.archive is not None
    return DTYPES[origin.plan.model.policy_dtype] if has_plan_dtype else None


def _identify(origin: Origin) -> Hashable:
    """A key, equal for models with the same weights and dtype."""
    plan, weights = origin.plan, origin.weights
    init_seed = plan.run.seed if plan.model.random_init else None
    name = resolve_name(plan.model.name_or_path)
    return name, weights.archive, weights.adapter, init_seed, plan.quantized, _find_dtype(origin)


def _find_checkpoint_with_other_reference(policies: Sequence[Origin], reference: Side) -> Path | None:
    """The first of the policies' checkpoints that recorded another reference, if any."""
    for policy in policies:
        if policy.run_dir is None or policy.policy is None:
            continue
        trainer_file = policy.policy.with_name("trainer.pt")
        if not trainer_file.is_file():
            continue
        # a run without a reference recorded the digest of its base, without an adapter
        adapter = reference.adapter if policy.plan.reference else None
        recorded_digest = read_state(trainer_file).get("reference")
        if recorded_digest and recorded_digest != digest_reference(reference.model, policy.plan, adapter):
            return trainer_file.parent
    return None


def _load(name: str, origin: Origin, beta: float | None, bases: dict[Hashable, Any]) -> Side:
    """Load a side; its base is taken from `bases`, or added."""
    plan, weights = origin.plan, origin.weights
    key = _identify(_remove_adapter(origin)), plan.model.attn_implementation
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
