"""Scorers of the policy's answers: rules, a user's function, or a sequence classification model with one output."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from dpo.data.prompt_forms import make_chat, write_dialogue
from dpo.data.schema import Prompt
from dpo.data.templates import TemplateRejects, apply_template, change_texts
from dpo.data.tokenization import TextEncoder, remove_special_tokens
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, ScorerFailed, explaining
from dpo.models.answers import Answer
from dpo.models.pretrained import disable_dropout, list_limits, load_onto, model_digest, refuse_missing_weights
from dpo.redaction import shorten
from dpo.settings.plan import Plan
from dpo.system.host import count_gpus
from dpo.system.plain_files import resolve_path
from dpo.system.users_code import hash_code, load_module, run_users_code
from dpo.system.waiting import after_rank_0, check_alike, from_rank_0, is_rank_0

LARGEST_SCORE = 3.4e38  # the largest float32
NO_LIMIT = 10**9  # tokens of a text; a tokenizer that knows no limit has a huge number


class Scorer(NamedTuple):
    name: str  # as in the config
    score: Any  # maps prompts, and an answer to each, to a number per answer; None on a rank that scores nothing
    digest: str = ""  # identifies the code or weights, which must be the same when a run is resumed
    in_parallel: bool = False  # true: each process scores its own answers; false: rank 0 scores all
    notes: Sequence[str] = ()  # to log at the start
    check: Callable[[Prompt], Any] = lambda prompt: None  # raises InputError for an unsupported prompt
    file: Path | None = None  # the user's code, whose line is named in errors

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        """Score the answers.

        Raises ScorerFailed if the scorer raises an error, or does not give a finite number for each answer.
        """

        @torch.no_grad()
        def compute() -> list[float]:
            scores = []
            for score in self.score(prompts, answers):
                if isinstance(score, str | bytes):
                    raise TypeError(f"the score {score!r} is text")
                scores.append(float(score))
            return scores

        scores = run_users_code(compute, ScorerFailed, f"{self.name} failed", self.file)
        if len(scores) != len(answers):
            raise ScorerFailed(f"{self.name} gave {len(scores)} scores to {len(answers)} answers")
        for score, answer in zip(scores, answers, strict=True):
            if not abs(score) <= LARGEST_SCORE:  # also if the score is NaN
                raise ScorerFailed(
                    f"{self.name} gave the score {score}, which is not finite, to {shorten(answer.text)}"
                )
        return scores


@contextmanager
def seeded_generators(*numbers: int) -> Iterator:
    """Seed the generators of Python, numpy and torch by these numbers; afterwards they continue where they were."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    seeds = np.random.SeedSequence(numbers).generate_state(4)
    with torch.random.fork_rng(devices=range(count_gpus())):
        random.seed(seeds.tobytes())
        np.random.seed(seeds)
        torch.manual_seed(int(seeds.view(np.uint64)[0]))
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def load_function(file: Path, name: str) -> Callable:
    """Load a user's function from a Python file, which may import modules beside it.

    Returns a scorer of prompts and answers, which passes their texts to the function.
    """
    users_function = getattr(load_module(file, f"{file} cannot be run"), name, None)
    if not callable(users_function):
        raise InputError(f"{file} has no function {name}")
    return lambda prompts, answers: users_function(
        [prompt.text for prompt in prompts], [answer.text for answer in answers]
    )


# Our own reward models have this format: the tokens that a policy reads, and EOS if the answer ended.
POLICY_FORMAT = "policy"
NO_ANSWER = Answer("", (), ended=True)  # encoded with a prompt to check the prompt alone
FORMAT_KEY = "reward_format"  # the entry for the format in an exported reward model's config


class RewardModel:
    """A model that scores answers, `rows` at a time, or one at a time if it has no pad token.

    `form`, how prompt and answer are encoded, is POLICY_FORMAT or a value of online.reward_format; by default it is
    "chat", "pair" or "text_eos", the first that the tokenizer allows. Texts longer than `limit` tokens lose their
    beginning, as the end has the answer.
    """

    def __init__(self, model: Any, tokenizer: Any, *, rows: int, form: str | None):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.rows = 1 if config.pad_token_id is None else rows  # by `pad_token_id` the model finds where texts end
        self.pad_token_id = config.pad_token_id or 0
        limits = [length for length, _ in list_limits(model)]
        # XLNet has -1 positions, so only positive numbers are limits.
        limits += [tokenizer.model_max_length, NO_LIMIT, getattr(config, "max_position_embeddings", None) or 0]
        self.limit = int(min(limit for limit in limits if limit > 0))
        separator = tokenizer.sep_token_id
        # This asks if the tokenizer puts a separator between two texts, not only after them.
        separates = separator is not None and separator in tokenizer("a", "b")["input_ids"][:-1]
        if form == "pair" and not separates:
            raise InputError("online.reward_format=pair: the reward model's tokenizer puts no separator between texts")
        if form is None:
            form = "pair" if separates else "text_eos"
            if tokenizer.chat_template:
                form = "chat"
        self.form = form
        self.eos = ""
        if form == "text_eos" and tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:  # else it appends EOS
            self.eos = tokenizer.eos_token or ""
        # Token types distinguish the prompt from the answer. Some models, such as RoBERTa, have none.
        self.has_types = getattr(config, "type_vocab_size", 0) > 1 and "token_type_ids" in tokenizer.model_input_names
        tokenizer.truncation_side = "left"
        self._encode = TextEncoder(tokenizer)
        config.use_cache = False  # nothing is generated

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        encoded = list(map(self.encode, prompts, answers))
        scores = []
        for start in range(0, len(encoded), self.rows):
            rows = encoded[start : start + self.rows]
            inputs = {}
            for name in rows[0]:
                padding = self.pad_token_id if name == "input_ids" else 0
                values = [torch.tensor(row[name], device=self.model.device) for row in rows]
                inputs[name] = pad_sequence(values, batch_first=True, padding_value=padding)  # (rows, T)
            scores += self.model(**inputs).logits.squeeze(-1).float().tolist()
        return scores

    def encode(self, prompt: Prompt, answer: Answer) -> Mapping[str, list[int]]:
        """Encode prompt and answer as the model's inputs, truncated on the left.

        Special tokens that are spelled out in the answer or in messages are removed. Raises InputError if the form
        cannot represent the prompt.
        """
        text = remove_special_tokens(answer.text, self.tokenizer)
        if self.form in ("pair", "text", "text_eos"):
            question = prompt.text.removeprefix(self.tokenizer.bos_token or "")  # the tokenizer adds BOS itself
            separator = ""
            if prompt.messages is not None:  # they become a dialogue, without the policy's chat template
                *asked, last = self._clean(make_chat(prompt, text))
                question = write_dialogue(asked)
                if self.form == "pair" and len(asked) == 1 and asked[0]["role"] == "user":
                    question = asked[0]["content"]
                text = last["content"]
                separator = " "
            if answer.ended:
                text += self.eos
            texts = [question, text]
            if self.form != "pair":
                texts = [separator.join(texts)]
            return self.tokenizer(
                *texts,
                truncation=True,
                max_length=self.limit,
                return_attention_mask=True,
                return_token_type_ids=self.has_types,
            )
        if self.form == "chat":
            problem = (
                f"online.reward_model={self.model.name_or_path}: its tokenizer's chat template rejects the prompt "
                f"{shorten(prompt.text)}"
            )
            with explaining(TemplateRejects, lambda why: InputError(f"{problem}: {why}")):
                chat = self._clean(make_chat(prompt, text))
                chat_text = apply_template(self.tokenizer, chat, tools=self._clean(prompt.tools))
            token_ids = self._encode([chat_text])[chat_text]
        elif prompt.apart:  # here the form is POLICY_FORMAT
            ids = self._encode([prompt.text, text])
            token_ids = ids[prompt.text] + ids[text]
        else:
            [tokens] = self._encode.encode_conversations([(prompt.text, [[text]])])
            token_ids = tokens.prompt + tokens.responses[0][0]
        if self.form == POLICY_FORMAT and answer.ended:
            end = self.tokenizer.eos_token_id
            if prompt.rendered and answer.tokens:  # a chat's turns may end in another token than EOS
                end = answer.tokens[-1]
            token_ids = [*token_ids, end]
        token_ids = token_ids[-self.limit :]
        return {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)}

    def _clean(self, value: Any) -> Any:
        return change_texts(value, lambda text: remove_special_tokens(text, self.tokenizer))

    def digest(self) -> str:
        """Hash what determines the scores: weights, architecture, vocabulary and chat template."""
        content = (self.tokenizer.chat_template, sorted(self.tokenizer.get_vocab().items()))
        weights = model_digest(self.model, str(self.model.dtype))
        return hashlib.sha256(repr((weights, content)).encode()).hexdigest()


def load_reward_model(plan: Plan, device: torch.device | str, rows: int) -> RewardModel:
    """Load `online.reward_model`, a sequence classification model, and its tokenizer.

    Raises InputError if it cannot be loaded, lacks weights, has not exactly one output, or cannot encode a prompt.
    """
    name = plan.online.reward_model
    key = f"online.reward_model={name}"
    source = {"cache_dir": plan.run.cache_dir, "trust_remote_code": plan.model.trust_remote_code}
    advice = "use a sequence classification model with one output"
    with explaining_load_errors("reward model", name):
        model_config = transformers.AutoConfig.from_pretrained(name, **source)
        if model_config.num_labels != 1:
            model_class = ", ".join(model_config.architectures or ["model"])
            raise InputError(f"{key} is a {model_class} with {model_config.num_labels} outputs (num_labels): {advice}")
        load = partial(transformers.AutoModelForSequenceClassification.from_pretrained, name, **source)
        model, loading = load_onto({"": device}, load, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
    refuse_missing_weights(loading, key, f"{advice}, saved with its head")
    disable_dropout(model)
    form = plan.online.reward_format
    if form is None and getattr(model_config, FORMAT_KEY, None) == POLICY_FORMAT:
        form = POLICY_FORMAT
    reward_model = RewardModel(model, tokenizer, rows=rows, form=form)
    # Encode a prompt now, so that a format or template that does not fit is refused before training.
    reward_model.encode(Prompt("Hello", [], []), NO_ANSWER)
    return reward_model


def load_scorer(plan: Plan, device: torch.device | str, *, rows: int) -> Scorer:
    """Load the scorer that `plan.online` names; InputError if that is impossible.

    Every process loads a reward model, which scores `rows` answers at a time, from files that rank 0 has fetched. A dry
    run has torch's meta device as `device`: the model then has shapes without weights, and its scorer no digest.
    """
    online = plan.online
    if online.scorer == "reward_model":
        reward_model = after_rank_0("the reward model", lambda: load_reward_model(plan, device, rows))
        digest = reward_model.digest() if str(device) != "meta" else ""
        # Each process scores its own answers, by the files of its machine. If these differed, the scores of an update
        # would be those of different models.
        check_alike({"online.reward_model": digest})
        note = f"the reward model gets prompt and answer in the form {reward_model.form} (docs/online.md)"
        if reward_model.limit < plan.data.max_length:
            note += f"; of texts with more than {reward_model.limit:,} tokens it sees the end"
        return Scorer(
            f"online.reward_model={online.reward_model}",
            reward_model,
            digest,
            in_parallel=True,
            notes=[note],
            check=partial(reward_model.encode, answer=NO_ANSWER),
        )
    if online.scorer == "function":
        path, _, name = online.function.rpartition(":")
        file = resolve_path(path or name)  # without ":NAME", it is refused as the function's name
        # Rank 0 scores all answers: other ranks do not load the function.
        score = load_function(file, name) if is_rank_0() else None
        own_digest = hash_code(file) if file.is_file() else None
        digest = from_rank_0(own_digest)
        check_alike({"online.function": own_digest or digest})  # a resumed run may have another rank 0
        return Scorer(f"online.function={online.function}", score, digest, file=file)
    scores = {
        "keyword": lambda prompts, answers: [answer.text.count(online.keyword) for answer in answers],
        "shorter": lambda prompts, answers: [-len(answer.tokens) for answer in answers],
    }
    return Scorer(f"online.scorer={online.scorer}", scores[online.scorer])
