"""Prompts of held-out data or of a file, and the answers of two models to them."""

import hashlib
import json
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tqdm

from dpo.data.custom import get_custom
from dpo.data.preflight import load_data
from dpo.data.prompt_forms import make_chat
from dpo.data.schema import Prompt, naming_place
from dpo.data.sources import load_rows
from dpo.data.table import number_prompts
from dpo.data.tokenization import list_end_strings, remove_special_tokens
from dpo.errors import InputError, explaining
from dpo.models.adapters import make_adapter_context
from dpo.models.answers import Answer, Sampling, TokenIds, format_for_readers, generate, list_end_tokens
from dpo.models.generation import LoadedModel
from dpo.models.pretrained import model_digest
from dpo.redaction import shorten
from dpo.settings.places import Source
from dpo.system.plain_files import JsonLinesStore

ANSWERS = "answers.jsonl"
ANSWER_MARK = r'\{"key": "\w{16}", "model": '  # pattern of the beginning of this file
ANSWER_FORM = {"answer": str, "tokens": list, "ended": bool}  # what each of its lines has


class Pair(NamedTuple):
    """Two answers to a prompt, for a judge to compare; the score in a `Verdict` is the first answer's."""

    prompt: Prompt
    question: str  # the prompt as people and judges read it
    first: Answer
    second: Answer

    @property
    def id(self) -> str:
        return hash_texts(self.question, self.first.text, self.second.text)


def hash_texts(*texts: str) -> str:
    """Return 16 hex digits that identify these texts in the files of an evaluation."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


# --- prompts ----------------------------------------------------------------------------------------------------------


def load_prompts(model: LoadedModel, options: Namespace) -> list[Prompt]:
    """Return a random sample of at most `options.limit` prompts, drawn with `options.seed`, in their original order.

    They are from the file `--prompts` (docs/formats.md) or, without it, the test prompts of the model's run.
    """
    file = options.prompts
    if file is not None:
        source = Source(file)
        rows = load_rows(source, "train" if source.has_no_splits else "test")
        # With chat="never" the template renders chats of messages, but prompts that are texts stay as written. With
        # trains_on="prompts" a record needs no responses, but those that it has are read, for `list_labelled`.
        data = get_custom(rows, file, model.tokenizer, name="prompts", trains_on="prompts", chat="never")
        prompts: Any = list(number_prompts([("prompts", data)], keep_all=True))
    elif model.path.run_dir is None:
        raise InputError(f"{model.path.name} is not a run, so it held out no prompts: pass --prompts FILE")
    else:
        # A dry run writes no table. No code of a model's repository is run here, even if the command allows it.
        plan = model.path.plan.change("dry_run", True).change("model.trust_remote_code", False)
        with explaining(InputError, lambda why: InputError(f"the run's data cannot be read: {why}; or pass --prompts")):
            prompts = load_data(plan, silent=True).test
    sampled = np.random.default_rng(options.seed).permutation(len(prompts))[: options.limit]
    return [prompts[int(i)] for i in sorted(sampled)]


def list_labelled(prompts: list[Prompt], tokenizer: Any) -> list[Pair]:
    """Return the first pair of each prompt that has one in the data; `Pair.first` is the chosen response."""
    pairs = []
    for prompt in prompts:
        texts = prompt.texts(0)
        if {"chosen", "rejected"} <= texts.keys():
            answers = []
            for text in (texts["chosen"], texts["rejected"]):
                # Of the token ids, judges read only the end token's.
                ends = [token for token in list_end_strings(tokenizer) if text.endswith(token)]
                tokens = tuple(tokenizer.convert_tokens_to_ids(ends))
                # Answers that are drawn have no special tokens in their text.
                answers.append(Answer(remove_special_tokens(text, tokenizer), tokens, ended=True))
            pairs.append(Pair(prompt, format_for_readers(prompt, prompt.text, tokenizer), *answers))
    return pairs


# --- answers ----------------------------------------------------------------------------------------------------------


def encode_for(model: LoadedModel, prompt: Prompt, tokenizer: Any | None, *, n_new: int) -> TokenIds | None:
    """Return a prompt's token ids for a model, or None if prompt and `n_new` tokens exceed the model's positions.

    `tokenizer` is the one that the prompt's text was made with, or None. If it is the model's own, the text is encoded
    as in training; else the prompt's messages are written in the form of the model's prompts. Raises InputError if this
    form cannot express them.
    """
    text = prompt.text
    if tokenizer is not model.tokenizer:
        with naming_place(f"the prompt {shorten(prompt.written)}"):
            text = model.write(prompt.messages or make_chat(prompt, "")[:-1])  # without the empty answer
    with suppress(InputError):
        return model.encode(text, n_new=n_new)
    return None


def draw_answers(
    loaded: LoadedModel,
    questions: list[str],
    encoded: tuple[TokenIds, ...],
    sampling: Sampling,
    folder: Path,
    *,
    batch_size: int,
) -> list[Answer]:
    """Return an answer to each prompt, either from the file ANSWERS in `folder` or drawn now and added to that file.

    `questions` are the prompts as people read them, and `encoded` has their token ids. The longest prompts are answered
    first: if memory is too small, this shows at once.
    """
    store = JsonLinesStore(folder / ANSWERS, ANSWER_MARK, ANSWER_FORM)
    model = loaded.model
    sampling = sampling._replace(end_tokens=list_end_tokens(model.generation_config, loaded.tokenizer))
    identity = model_digest(model, str(model.dtype), loaded.adapter)
    keys = [hash_texts(identity, repr(sampling), repr(tokens)) for tokens in encoded]
    missing = [i for i, key in enumerate(keys) if key not in store.lines]
    missing.sort(key=lambda i: -len(encoded[i]))
    with make_adapter_context(model, loaded.adapter)():
        for start in tqdm.tqdm(range(0, len(missing), batch_size), desc=f"{loaded.name}, batches", disable=not missing):
            batch = missing[start : start + batch_size]
            # The indices in `batch` also seed the answers, so an answer does not depend on how prompts are batched.
            drawn = generate(model, loaded.tokenizer, [encoded[i] for i in batch], batch, sampling)
            for i, new in zip(batch, drawn, strict=True):
                facts = {"prompt": questions[i], "answer": new.text, "tokens": new.tokens, "ended": new.ended}
                store.add(keys[i], model=loaded.name, **facts)
    lines = [store.lines[key] for key in keys]
    return [Answer(line["answer"], tuple(line["tokens"]), line["ended"]) for line in lines]
