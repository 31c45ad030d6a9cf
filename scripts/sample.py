"""Ask a policy and its reference, and show their answers one after the other.

    python -m scripts.sample CHECKPOINT_OR_DIR
    python -m scripts.sample CHECKPOINT_OR_DIR --file prompts.jsonl --out answers.jsonl

CHECKPOINT_OR_DIR is a run's directory (which means its LATEST), one of its step-N, LATEST or BEST, a policy.pt, a
directory in Hugging Face's format or PEFT's, or a Hub id. Prompts are put into the form that the model was trained on,
which is printed. Typed prompts make a conversation with each model; /reset starts a new one. docs/export.md explains
the options. Exit status: 0, 2 bad input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tqdm import tqdm

from dpo.data.asking import CHAT, HH, HUMAN, MEANINGS, RAW
from dpo.data.schema import ASSISTANT, Record, get_field, read_messages, read_tools
from dpo.data.sources import load_rows
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError, explaining
from dpo.models.adapters import add_stored_adapter, read_adapter, switch
from dpo.models.answers import Answer, Sampling, Tokens, answer, choose_sampling
from dpo.models.export import find_prompt_format
from dpo.models.loading import find_source, load_base, resolve_name
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, check_positions
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights
from dpo.parallel.sharding import choose_device_map
from dpo.settings.places import Source
from dpo.system.arithmetic import set_up_torch
from dpo.system.host import count_gpus
from scripts import add_trust_option

RESET = "/reset"


class Side(NamedTuple):
    """The policy or the reference; if they have the same base, they share one `model`."""

    name: str
    model: Any
    adapter: str | None = None  # the name of this side's adapter in the model


class Panel(NamedTuple):
    """Models that answer the same prompts."""

    sides: list[Side]  # the policy, and the reference if there is one
    tokenizer: Any
    form: str  # of prompts, one of MEANINGS

    def encode(self, asked: str | list[Mapping[str, str]], where: str, *, n_new: int, tools: Any = None) -> Tokens:
        """Encode a text or chat messages as in training.

        `where` says where the prompt is from. Raises InputError if it does not suit the panel's form, or if a model
        has no positions for it and `n_new` tokens of answer.
        """
        text = self._render(asked, where, tools)
        tokens = tuple(TextEncoder(self.tokenizer)([text])[text])
        for side in self.sides:
            with explaining(InputError, lambda why: InputError(f"{where}: prompt and answer may be too long: {why}")):
                check_positions(side.model, len(tokens) + n_new)
        return tokens

    def _render(self, asked: str | list[Mapping[str, str]], where: str, tools: Any) -> str:
        if not asked:
            raise InputError(f"{where}: the prompt is empty")
        if isinstance(asked, str):
            if self.form == RAW or (self.form == HH and asked.startswith(HUMAN)):
                return asked
            asked = [{"role": "user", "content": asked}]
        messages, schemas = read_messages(asked, where), read_tools({"tools": tools}, "tools", where)
        if self.form == CHAT:
            return ChatTemplate(self.tokenizer).render(Record(messages, [], tools=schemas), where).prompt
        speakers = {"user": HUMAN, "assistant": ASSISTANT} if self.form == HH else {}
        if schemas or not speakers.keys() >= {message["role"] for message in messages}:
            raise InputError(f"{where}: such messages or tools need --format chat")
        return "".join(f"{speakers[m['role']]} {m['content'].strip()}" for m in messages) + ASSISTANT

    def answer(self, side: Side, prompts: Sequence[Tokens], numbers: Sequence[int], sampling: Sampling) -> list[Answer]:
        with switch(side.model, side.adapter)():
            return answer(side.model, self.tokenizer, prompts, numbers, sampling)


def load_panel(path: str | Path, *, reference: str | None = None, form: str | None = None, **options: Any) -> Panel:
    """Load a policy and its reference; `options` are those of `find_origin`.

    `reference` is a path or Hub id, "none", or None for the model that the policy's run started from; `form` that of
    prompts, or None for that in training, else `chat` with a chat template, else `raw`. Raises InputError if a model
    cannot be loaded, or if the tokenizers differ.
    """
    policy = find_origin(path, hub=True, **options)
    if policy.plan.loss.scalar_head:
        raise InputError(f"{path} is a reward model, which gives no answers: give a policy")
    tokenizer = _load_tokenizer(policy)
    if reference is None:
        origins = {"policy": policy, "reference": _find_start(policy)}
    elif reference == "none":
        origins = {"policy": policy}
    else:
        trust = policy.plan.model.trust_remote_code
        origins = {"policy": policy, "reference": find_origin(reference, hub=True, trust_remote_code=trust)}
        if _load_tokenizer(origins["reference"]).get_vocab() != tokenizer.get_vocab():
            raise InputError(f"{reference} has another tokenizer than the policy: give a reference with the same one")
    bases: dict[Hashable, Any] = {}
    sides = [_load(name, origin, bases) for name, origin in origins.items() if origin]
    form = form or find_prompt_format(policy) or (CHAT if tokenizer.chat_template else RAW)
    return Panel(sides, tokenizer, form)


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


def converse(panel: Panel, sampling: Sampling) -> None:
    """Hold a conversation with each side, over typed or piped lines; in the form raw each prompt is alone."""
    print(f"Type a prompt of one line, then Enter; {RESET} starts a new conversation, and Ctrl-D ends.")
    histories: list[list[dict[str, str]]] = [[] for _ in panel.sides]
    for index in itertools.count():
        try:
            line = input("> ").strip()
        except EOFError:
            break
        if line == RESET or panel.form == RAW:
            histories = [[] for _ in panel.sides]
        if line in ("", RESET):
            continue
        asked = [[*history, {"role": "user", "content": line}] for history in histories]
        where, n_new = f"this conversation ({RESET} ends it)", sampling.max_new_tokens
        try:  # before the first answer, as a prompt that does not fit changes no history
            prompts = [panel.encode(line if panel.form == RAW else each, where, n_new=n_new) for each in asked]
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        histories = asked
        for side, prompt, history in zip(panel.sides, prompts, histories, strict=True):
            [given] = panel.answer(side, [prompt], [index], sampling)
            history.append({"role": "assistant", "content": given.text.strip()})
            # without the control characters that could steer a terminal
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in given.text)
            print(f"--- {side.name} ---\n{shown.strip()}\n", flush=True)


def read_prompts(file: Path, out: Path) -> list[tuple[Any, Any]]:
    """Read a file's prompts, and the tools of each, or None; InputError also if `out` exists."""
    if os.path.lexists(out) or not file.is_file():
        raise InputError(f"--file {file} is not a file, or --out {out} exists already")
    rows = enumerate(load_rows(Source(str(file)), "train"), start=1)
    return [(get_field(row, "prompt", f"record {n} of {file}", (str, list)), row.get("tools")) for n, row in rows]


def answer_file(panel: Panel, sampling: Sampling, asked: list[tuple[Any, Any]], options: argparse.Namespace) -> None:
    """Write the answers to each prompt."""
    encoded = [
        panel.encode(prompt, f"record {n} of {options.file}", n_new=sampling.max_new_tokens, tools=tools)
        for n, (prompt, tools) in enumerate(asked, start=1)
    ]
    with options.out.open("x", encoding="utf-8") as file:
        for start in tqdm(range(0, len(encoded), options.batch_size), unit="batch", disable=None):
            prompts = encoded[start : start + options.batch_size]
            numbers = range(start, start + len(prompts))
            by_side = [panel.answer(side, prompts, numbers, sampling) for side in panel.sides]
            for number, answers in zip(numbers, zip(*by_side, strict=True), strict=True):
                texts = {side.name: given.text for side, given in zip(panel.sides, answers, strict=True)}
                file.write(json.dumps({"prompt": asked[number][0], **texts}, ensure_ascii=False) + "\n")
            file.flush()
    print(f"answers to {options.file} are in {options.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("path", metavar="CHECKPOINT_OR_DIR")
    option("--reference", metavar="DIR", help="reference, instead of the model that the run started from; or none")
    option("--file", type=Path, help="prompts, one JSON object per line")
    option("--out", type=Path, help="new file for the answers, one JSON object per line")
    option("--batch-size", type=int, default=8, help="prompts of --file at a time")
    option("--temperature", type=float, help="0: the most probable token")
    option("--top-p", type=float, help="0.9: only the most probable 90 percent")
    option("--top-k", type=int, help="tokens to draw from, 0: all")
    option("--seed", type=int, default=0)
    option("--max-new-tokens", type=int, default=256)
    option("--format", choices=[*MEANINGS], help="form of prompts, instead of that in training")
    option("--model", metavar="DIR_OR_HUB_ID", help="base model of a policy.pt without a config.yaml")
    add_trust_option(parser)
    options = parser.parse_args(arguments)
    if (options.file is None) != (options.out is None):
        parser.error("--file and --out go together")

    set_up_torch(deterministic=False, compiles=False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        # a wrong file is refused before models are loaded
        asked = [] if options.file is None else read_prompts(options.file, options.out)
        panel = load_panel(
            options.path,
            reference=options.reference,
            form=options.format,
            model=options.model,
            trust_remote_code=options.trust_remote_code,
        )
        sampling = choose_sampling(
            panel.sides[0].model,
            panel.tokenizer,
            vars(options),
            chat=panel.form == CHAT,
            max_new_tokens=options.max_new_tokens,
            seed=(options.seed,),
        )
        print(f"prompts are asked in the form {panel.form}: {MEANINGS[panel.form]} (--format changes it)")
        print(f"answers are drawn with {sampling} (--temperature, --top-p, --top-k)")
        if options.file is None:
            converse(panel, sampling)
        else:
            answer_file(panel, sampling, asked, options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
