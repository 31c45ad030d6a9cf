"""A policy and its reference, loaded for generation."""

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from dpo.data.prompt_forms import CHAT, HH, RAW, write_dialogue
from dpo.data.schema import Messages, Prompt
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
from dpo.models.adapters import load_adapter, make_adapter_context
from dpo.models.answers import Sampling, TokenIds, choose_sampling, generate
from dpo.models.paths import ModelPath, find_model, find_prompt_format, locate_weights
from dpo.models.pretrained import DTYPES, check_positions, load_model
from dpo.models.quantization import quantize
from dpo.parallel.sharding import choose_device_map


class LoadedModel(NamedTuple):
    """A policy or a reference; if they have the same base, they share one `model`."""

    name: str
    model: Any
    tokenizer: Any
    form: str  # the form of its prompts, one of PROMPT_FORMS
    adapter: str | None = None  # the name of its adapter in `model`
    path: ModelPath | None = None

    def encode(self, text: str, *, n_new: int) -> TokenIds:
        """Encode a prompt as in training; InputError if the model has no positions for it and `n_new` tokens more."""
        tokens = tuple(TextEncoder(self.tokenizer)([text])[text])
        with explaining(InputError, lambda why: InputError(f"prompt and answer may be too long: {why}")):
            check_positions(self.model, len(tokens) + n_new)
        return tokens

    def write(self, messages: Messages) -> str:
        """Write messages in the form of the model's prompts; InputError if this form cannot express them.

        A raw prompt has only the last message.
        """
        if self.form == CHAT:
            return ChatTemplate(self.tokenizer).render(Prompt("", [], [], messages=messages), {}).text
        return write_dialogue(messages) if self.form == HH else messages[-1]["content"]

    def choose_sampling(self, options: Namespace) -> Sampling:
        """Choose how answers are drawn, from the options of a command."""
        return choose_sampling(
            self.model,
            self.tokenizer,
            vars(options),
            chat=self.form == CHAT,
            max_new_tokens=options.max_new_tokens,
            seed=(options.seed,),
        )

    def answer(self, prompt: TokenIds, number: int, sampling: Sampling) -> str:
        """Answer a prompt; `number`, which counts the session's prompts, is part of the seed."""
        with make_adapter_context(self.model, self.adapter)():
            [answer] = generate(self.model, self.tokenizer, [prompt], [number], sampling)
        return answer.text


def load_for_generation(path: str | Path, *, reference: str | None = None, **options: Any) -> list[LoadedModel]:
    """Load a policy, then what its run started from if there is such a model; `options` are those of `find_model`.

    With the `reference` "none" only the policy is loaded. Raises InputError if a model cannot be loaded.
    """
    policy = find_model(path, hub=True, **options)
    if policy.scalar_head:
        raise InputError(f"{path} is a reward model, which gives no answers: use a policy")
    tokenizer = load_tokenizer(policy.plan.model.tokenizer, **policy.options, chat=policy.plan.chat)
    sources = {"policy": policy}
    start = None if reference == "none" else _find_start(policy)
    if start is not None:
        sources["reference"] = start
    form = find_prompt_format(policy) or (CHAT if tokenizer.chat_template else RAW)
    bases = {}
    models = []
    for name, source in sources.items():
        print(f"{name}: {source.describe()}")
        plan = source.plan
        dtype = None  # the dtype in the model's own config
        if source.run_dir is not None or source.archive is not None:
            dtype = DTYPES[plan.model.policy_dtype]
        key = (source.archive, dtype)
        if key not in bases:
            # The run's own attention may need a GPU, unless it is eager.
            attention = "eager" if plan.model.attn_implementation == "eager" else "sdpa"
            device_map = None if plan.quantized else choose_device_map()
            base = load_model(source, dtype=dtype, attn_implementation=attention, device_map=device_map)
            if plan.quantized:
                quantize(base)
            bases[key] = base.eval()
        base = bases[key]
        if source.adapter is not None:
            load_adapter(base, source.adapter, name)
        models.append(LoadedModel(name, base, tokenizer, form, source.adapter and name, source))
    return models


def _find_start(policy: ModelPath) -> ModelPath | None:
    """Find the model that a policy's run started from, to be loaded in the reference's dtype; None if not known."""
    plan = policy.plan
    if policy.run_dir is None:  # an adapter started from its base
        return None if policy.adapter is None else policy._replace(adapter=None)
    start = locate_weights(plan.model.archive) if plan.model.archive else ModelPath()
    # An adapter names its base; model.archive may be a LATEST that has moved.
    archive = start.archive if policy.adapter is None else policy.archive
    adapter = None if plan.reference == "base" else start.adapter
    if plan.reference:
        plan = plan.change("model.policy_dtype", plan.reference_dtype)
    # The digest was recorded for the policy's base in the policy's dtype.
    return policy._replace(plan=plan, archive=archive, adapter=adapter, base_digest=None)
