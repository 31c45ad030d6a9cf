"""A reward model: a sequence classification model with one output."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from dpo.data.asking import TemplateRejects, apply_template, as_messages, escape_texts
from dpo.data.table import Prompt
from dpo.data.tokenization import TextEncoder, unescape
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, explaining
from dpo.models.adapters import CONFIG
from dpo.models.answers import Answer
from dpo.models.pretrained import (
    check_positions,
    count_positions,
    disable_dropout,
    find_changing_ropes,
    refuse_gaps,
    silenced_reports,
)
from dpo.models.weights import model_digest
from dpo.parallel.mesh import from_rank_0
from dpo.settings.choices import join_with_or
from dpo.settings.plan import Plan
from dpo.system.waiting import after_rank_0

Inputs = dict[str, list[int]]  # input_ids, and token_type_ids where there are any
FORMATS = {  # values of online.reward_format, and how a note describes them
    "chat": "in its chat template",
    "pair": "as two segments",
    "text_eos": "as one text, with EOS if the answer ended",
    "text": "as one text",
    "policy": "as a policy reads them, with EOS if the answer ended",
}
MARK = "reward_format"  # the entry for the format in an exported reward model's config


class RewardModel:
    """A model that scores answers, `rows` at a time.

    `form` is a key of FORMATS. `limit` is the largest number of tokens in a prompt with its answer, or None if not
    known. Longer texts are truncated.
    """

    def __init__(self, model: Any, tokenizer: Any, *, rows: int, form: str) -> None:
        self.model, self.tokenizer, self.rows = model.eval().requires_grad_(False), tokenizer, rows
        self.form = form
        # a tokenizer may append EOS itself
        self.appends_eos = form == "text_eos" and tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]
        # RoBERTa, for one, has no types that tell segments apart
        n_types = getattr(model.config.get_text_config(), "type_vocab_size", 0)
        self.has_types = form == "pair" and n_types > 1 and "token_type_ids" in tokenizer.model_input_names
        self.limit = _find_limit(model, tokenizer)
        tokenizer.truncation_side = "left"  # keep the end of a long text, which has the answer
        self._encode = TextEncoder(tokenizer)
        self.pad = model.config.get_text_config().pad_token_id
        model.config.get_text_config().use_cache = False  # nothing is generated

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        """The score of each answer."""
        texts = [
            self.encode(prompt, answer.text, ended=answer.ended)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        # texts of about equal length are scored together, so that little is padded
        longest_first = sorted(range(len(texts)), key=lambda i: len(texts[i]["input_ids"]), reverse=True)
        scores = [0.0] * len(texts)
        for start in range(0, len(texts), self.rows):
            indices = longest_first[start : start + self.rows]
            batch_scores = self.forward([texts[i] for i in indices]).tolist()
            for i, score in zip(indices, batch_scores, strict=True):
                scores[i] = score
        return scores

    def check(self, prompt: Prompt) -> None:
        """Raise InputError if the chat template rejects a prompt."""
        self.encode(prompt, "")

    def encode(self, prompt: Prompt, answer: str, *, ended: bool = True) -> Inputs:
        """The tokens of prompt and answer, truncated on the left.

        Raises InputError if the chat template rejects the prompt.
        """
        if self.form in ("policy", "chat"):
            if self.form == "policy" and not prompt.apart:
                [tokens] = self._encode.encode_whole([(prompt.text, [[answer]], [])])
                token_ids = tokens.prompt + tokens.responses[0][0]
            else:
                texts = [prompt.text, answer] if self.form == "policy" else [self._render(prompt, answer)]
                ids = self._encode(texts)
                token_ids = [token for text in texts for token in ids[text]]
            if ended and self.form == "policy":
                token_ids.append(self.tokenizer.eos_token_id)
            return {"input_ids": token_ids[-self.limit :] if self.limit else token_ids}
        prompt_text = unescape(prompt.text)
        texts = [prompt_text, answer] if self.form == "pair" else [prompt_text + answer]
        if self.appends_eos and ended:
            texts[-1] += self.tokenizer.eos_token
        truncation: dict[str, Any] = {} if self.limit is None else {"truncation": True, "max_length": self.limit}
        encoded = self.tokenizer(*texts, **truncation)
        names = ("input_ids", "token_type_ids") if self.has_types else ("input_ids",)
        return {name: encoded[name] for name in names}

    def _render(self, prompt: Prompt, answer: str) -> str:
        try:
            chat, tools = (escape_texts(value, self.tokenizer) for value in (as_messages(prompt, answer), prompt.tools))
            return apply_template(self.tokenizer, chat, tools=tools)
        except TemplateRejects as error:
            raise InputError(
                f"online.reward_model={self.model.name_or_path}: its tokenizer's chat template rejects the prompt "
                f"{prompt.text[:200]!r}: {error}"
            ) from error

    @torch.no_grad()
    def forward(self, texts: Sequence[Inputs]) -> torch.Tensor:
        """The scores of B texts, (B,) in float32."""
        pad = self.pad
        if pad is None:
            # the model scores at the last token that is not `pad`: without a pad token, take a token that ends no text
            last_tokens = {text["input_ids"][-1] for text in texts}
            pad = next(token for token in itertools.count() if token not in last_tokens)
        self.model.config.get_text_config().pad_token_id = pad
        lengths = [len(text["input_ids"]) for text in texts]

        def stack(rows: Iterable[list[int]], padding: int) -> torch.Tensor:
            """Pad rows on the right to (B, T)."""
            padded = [[*row, *[padding] * (max(lengths) - len(row))] for row in rows]
            return torch.tensor(padded, device=self.model.device)

        inputs = {"input_ids": stack((text["input_ids"] for text in texts), pad)}
        if self.has_types:
            inputs["token_type_ids"] = stack((text["token_type_ids"] for text in texts), 0)
        mask = stack(([1] * length for length in lengths), 0)
        logits = self.model(**inputs, attention_mask=mask).logits
        if logits.shape != (len(texts), 1):
            raise ValueError(
                f"{type(self.model).__name__} gave outputs of shape {tuple(logits.shape)} for {len(texts)} texts: its "
                f"code must give one output per text"
            )
        return logits[:, 0].float()


def load_reward_model(plan: Plan, device: torch.device, *, rows: int) -> tuple[RewardModel, str]:
    """Load the reward model that `online.reward_model` names, and its digest.

    The digest covers weights and tokenizer. Every process loads the model, from files that rank 0 has fetched. Raises
    InputError if the model cannot be loaded, has no weights for its head, or does not have exactly one output.
    """
    reward_model = after_rank_0("the reward model", lambda: _load(plan, device, rows))
    digest = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tokenizer = reward_model.tokenizer
        tokenizer_content = tokenizer.chat_template, sorted(tokenizer.get_vocab().items())
        weights_digest = model_digest(reward_model.model, str(reward_model.model.dtype))
        digest = hashlib.sha256(repr((weights_digest, tokenizer_content)).encode()).hexdigest()
    return reward_model, from_rank_0(digest)


def find_reward_structure(plan: Plan) -> RewardModel:
    """The reward model without weights.

    Raises InputError as `load_reward_model` does.
    """
    return _load(plan, torch.device("meta"), 1)


def notes_on(reward_model: RewardModel, plan: Plan) -> tuple[str, ...]:
    """Messages on a format that was guessed, and on truncated prompts."""
    notes = []
    if plan.online.reward_format is None and reward_model.form not in ("chat", "policy"):
        other_formats = [form for form in FORMATS if form not in ("chat", reward_model.form)]
        notes.append(
            f"online.reward_format is null, so the reward model gets prompt and answer {FORMATS[reward_model.form]}: "
            f"if it was trained otherwise, give online.reward_format={' or '.join(other_formats)}"
        )
    if reward_model.limit is not None and reward_model.limit < plan.data.max_length:
        notes.append(
            f"the reward model sees the last {reward_model.limit:,} tokens of a prompt with its answer, which may have "
            f"up to max_length={plan.data.max_length} tokens: scores do not depend on the beginning of long prompts"
        )
    return tuple(notes)


def _load(plan: Plan, device: torch.device, rows: int) -> RewardModel:
    """Load the reward model that `online.reward_model` names, and check it."""
    name = plan.online.reward_model
    key = f"online.reward_model={name}"
    source = {"cache_dir": plan.run.cache_dir, "trust_remote_code": plan.model.trust_remote_code}
    advice = "give a sequence classification model with one output"
    if (Path(name).expanduser() / CONFIG).is_file():
        raise InputError(f"{key} is an adapter: merge it into its base, and {advice}")
    with explaining_load_errors("reward model", name), silenced_reports():
        model_config = transformers.AutoConfig.from_pretrained(name, **source)
        if model_config.num_labels != 1:
            model_class = ", ".join(model_config.architectures or ["model"])
            raise InputError(f"{key} is a {model_class} with {model_config.num_labels} outputs (num_labels): {advice}")
        loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, **source, dtype="auto", device_map={"": device}, output_loading_info=True
        )
        model, loading = loaded
    refuse_gaps(loading, key, f"{advice}, saved with its head")
    with explaining_load_errors("tokenizer of the reward model", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
    disable_dropout(model)
    with explaining(InputError, lambda why: InputError(f"{key}: {why}")):
        check_positions(model, min(plan.data.max_length, count_positions(model)))  # a longer text is truncated
    recorded_format = "policy" if getattr(model_config, MARK, None) == "policy" else None
    form = _find_format(tokenizer, plan.online.reward_format or recorded_format, key)
    reward_model = RewardModel(model, tokenizer, rows=rows, form=form)
    if reward_model.limit is not None and reward_model.limit <= plan.online.max_new_tokens:
        raise InputError(
            f"{key} sees {reward_model.limit:,} tokens, and an answer may have online.max_new_tokens="
            f"{plan.online.max_new_tokens}: lower online.max_new_tokens, or give another model"
        )
    reward_model.check(Prompt("Hello", [], [], "keep_start", rendered=False))
    return reward_model


def _find_format(tokenizer: Any, wanted: str | None, key: str) -> str:
    """Find the form of a reward model's input, one of FORMATS.

    `wanted` is `online.reward_format`, or what the model's config says; None stands for the first form that the
    tokenizer allows. Raises InputError if the tokenizer lacks what the wanted form needs.
    """
    separator = tokenizer.sep_token_id
    separates = separator is not None and separator in tokenizer("a", "b")["input_ids"][:-1]  # between two texts
    lacking = {
        "chat": None if tokenizer.chat_template else "has no chat template",
        "pair": None if separates else "puts no separator between two texts",
        "text_eos": None if tokenizer.eos_token else "has no EOS token",
        "text": None,
        "policy": None if tokenizer.eos_token else "has no EOS token",
    }
    possible = [form for form, problem in lacking.items() if problem is None]
    if wanted is None:
        return possible[0]
    if lacking[wanted]:
        raise InputError(
            f"online.reward_format={wanted}: the tokenizer of {key} {lacking[wanted]}: give {join_with_or(possible)}"
        )
    return wanted


def _find_limit(model: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that a model takes, if known."""
    limits = [count_positions(model), *(n for _, n in find_changing_ropes(model.config.get_text_config()))]
    if tokenizer.model_max_length < 10**9:  # a tokenizer that knows no limit has a huge number
        limits.append(tokenizer.model_max_length)
    n_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if n_positions is not None and n_positions > 0:  # XLNet has -1
        limits.append(n_positions)
    limit = min(limits)
    return None if limit == math.inf else int(limit)
