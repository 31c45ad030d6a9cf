"""A policy and its reference, loaded to be asked."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

from dpo.data.asking import CHAT, HH, RAW, write_dialogue
from dpo.data.schema import Messages, Record
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
from dpo.models.adapters import add_stored_adapter, read_adapter, switch
from dpo.models.answers import Sampling, Tokens, answer
from dpo.models.export import Origin, find_origin, find_prompt_format
from dpo.models.loading import check_base, find_source, load_base, resolve_name
from dpo.models.pretrained import DTYPES, check_positions
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights
from dpo.parallel.sharding import choose_device_map


class Side(NamedTuple):
    """The policy or the reference; if they have the same base, they share one `model`."""

    name: str
    model: Any
    adapter: str | None = None  # the name of this side's adapter in the model


class Panel(NamedTuple):
    sides: list[Side]  # the policy, and the reference if there is one
    tokenizer: Any
    form: str  # of prompts, one of MEANINGS
    origin: Any = None  # the `Origin` of the policy

    def encode(self, messages: Messages, *, n_new: int) -> Tokens:
        """Encode messages as in training; InputError if a model has no positions for them and `n_new` tokens more."""
        text = self.write(messages)
        tokens = tuple(TextEncoder(self.tokenizer)([text])[text])
        for side in self.sides:
            with explaining(InputError, lambda why: InputError(f"prompt and answer may be too long: {why}")):
                check_positions(side.model, len(tokens) + n_new)
        return tokens

    def write(self, messages: Messages) -> str:
        """Write messages in the panel's form; InputError if it cannot hold them."""
        if self.form == CHAT:
            return ChatTemplate(self.tokenizer).render(Record(messages, [])).prompt
        return write_dialogue(messages) if self.form == HH else messages[-1]["content"]

    def answer(self, side: Side, prompt: Tokens, number: int, sampling: Sampling) -> str:
        """`number` is that of the prompt in the session."""
        with switch(side.model, side.adapter)():
            [given] = answer(side.model, self.tokenizer, [prompt], [number], sampling)
        return given.text


def load_panel(path: str | Path, *, reference: str | None = None, form: str | None = None, **options: Any) -> Panel:
    """Load a policy and its reference; `options` are those of `find_origin`.

    `reference` is a path, Hub id or "none"; None: what the policy's run started from. Raises InputError if a model
    cannot be loaded, or if the tokenizers differ.
    """
    policy = find_origin(path, hub=True, **options)
    if policy.plan.loss.scalar_head:
        raise InputError(f"{path} is a reward model, which gives no answers: give a policy")
    tokenizer = _load_tokenizer(policy)
    origins = {"policy": policy}
    if reference is None:
        origins["reference"] = _find_start(policy)
    elif reference != "none":
        trust = policy.plan.model.trust_remote_code
        origins["reference"] = find_origin(reference, hub=True, trust_remote_code=trust)
        if _load_tokenizer(origins["reference"]).get_vocab() != tokenizer.get_vocab():
            raise InputError(f"{reference} has another tokenizer than the policy: give a reference with the same one")
    bases = {}
    sides = [_load(name, origin, bases) for name, origin in origins.items() if origin]
    form = form or find_prompt_format(policy) or (CHAT if tokenizer.chat_template else RAW)
    return Panel(sides, tokenizer, form, policy)


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
    # the digest is of the policy's base in the policy's dtype
    return policy._replace(plan=plan, weights=Weights(archive, adapter).resolve(), base_digest=None)


def _load(name: str, origin: Origin, bases: dict[Hashable, Any]) -> Side:
    print(f"{name}: {origin.parts}")
    plan, weights = origin.plan, origin.weights
    has_plan_dtype = origin.run_dir is not None or weights.archive is not None
    dtype = DTYPES[plan.model.policy_dtype] if has_plan_dtype else None  # None: that of the model's own config
    init_seed = plan.run.seed if plan.model.random_init else None
    key = (resolve_name(plan.model.name_or_path), weights.archive, init_seed, plan.quantized, dtype)
    if key not in bases or (origin.base_digest and origin.base_digest != bases[key].base_digest):
        # not attention that needs a GPU
        attention = "eager" if plan.model.attn_implementation == "eager" else "sdpa"
        device_map = None if plan.quantized else choose_device_map()
        base = load_base(plan, dtype, weights.archive, attn_implementation=attention, device_map=device_map)
        check_base(base, origin.base_digest, plan)
        base.base_digest = origin.base_digest
        if plan.quantized:
            quantize(base)
        bases[key] = base.eval()
    if weights.adapter is None:
        return Side(name, bases[key])
    add_stored_adapter(bases[key], read_adapter(weights.adapter), name)
    return Side(name, bases[key], name)
