"""A model's tokenizer and its chat template."""

import contextlib
import hashlib
import json
import pickle
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import transformers

from dpo.errors import InputError, explaining, explaining_library, one_sentence
from dpo.settings.keys import ChatPlan
from dpo.settings.places import check_exists, find_local
from dpo.system.host import go_offline_without_hub
from dpo.system.plain_files import check_readable

# the beginning of a macro that replaces transformers' function, which writes the time of rendering
DATE_MACRO = "{%- macro strftime_now(format) -%}{{- "


def explaining_load_errors(what: str, name: str):
    """Return a context that turns an error of loading `name` into an InputError.

    `what` says what `name` is, such as "tokenizer". Raises InputError for a local path that does not exist.
    """
    path = find_local(name)
    check_exists(path)
    if path is None:
        go_offline_without_hub()

    def explain(error: Exception) -> InputError:
        if "trust_remote_code" in str(error):
            return InputError(
                f"{what} {name!r} contains Python code, which is not run by default: read it, then set "
                f"model.trust_remote_code=true, or --trust-remote-code for a script"
            )
        why = one_sentence(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's message would advise to run the code in the file
            why = "a file of weights has code besides data, which is not run, or is damaged"
        return InputError(
            f"{what} {name!r} cannot be loaded; use a local directory with whole files, such as RUN/LATEST/hf, or a "
            f"Hub id: {why}"
        )

    return explaining_library(explain)


def load_tokenizer(
    name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False, chat: ChatPlan | None = None
) -> Any:
    """Load a tokenizer with a run's chat template; raises InputError if it has no EOS.

    It pads with EOS, as a published pad token may lack an embedding.
    """
    with explaining_load_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=trust_remote_code
        )
        # values of a wrong type in the files raise only when they are used
        tokenizer.decode(tokenizer("a")["input_ids"], clean_up_tokenization_spaces=False)
        templates = tokenizer.chat_template or ""
        "".join(templates.values() if isinstance(templates, dict) else [templates])
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {name!r} has no EOS token, which ends every response; set one in its files")
    tokenizer.pad_token_id = tokenizer.eos_token_id
    set_end_and_media_tokens(tokenizer, name, cache_dir)
    if chat is not None:
        bind_template(tokenizer, chat, date=chat.chat_template_date)
    return tokenizer


class KeptTemplate(str):
    """The `chat_template` that an earlier run has saved: JSON of the template itself, not the path of a file.

    The JSON is null if the tokenizer had no template, and an object if it had several.
    """


def bind_template(tokenizer: Any, chat: ChatPlan, *, date: str | None = None) -> None:
    """Set a tokenizer's chat template to the run's, with the run's arguments and date bound.

    A call of `apply_chat_template` may override the arguments. `date`, in ISO format, is the day that `strftime_now`
    writes in place of the time of rendering. Raises InputError for a template that cannot be read or is empty, for an
    argument that it does not read, and for a wrong date.
    """
    if isinstance(chat.chat_template, KeptTemplate):
        tokenizer.chat_template = json.loads(chat.chat_template)
    elif chat.chat_template is not None:
        path = Path(chat.chat_template).expanduser()
        unread = f"chat_template={chat.chat_template} cannot be read"
        with explaining((OSError, UnicodeDecodeError), lambda why: InputError(f"{unread}: {why}")):
            check_readable(path)
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        if not tokenizer.chat_template.strip():
            raise InputError(f"chat_template={chat.chat_template} is empty: write a template into it")
    template = tokenizer.unbound_template = tokenizer.chat_template  # what a run saves
    arguments = ""
    for name, value in sorted(chat.chat_template_args.items()):
        if not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise InputError(
                f"chat_template_args has {name}, which the chat template does not read: correct the name, or remove "
                f"the argument"
            )
        arguments += f"{{%- if {name} is not defined %}}{{%- set {name} = {_as_jinja(value)} %}}{{%- endif %}}"
    if arguments:
        arguments = f"{{%- set null = none %}}{arguments}"  # Jinja reads JSON, except for null
    date_macro = "" if date is None else _write_date_macro(date)

    def bind(text: str) -> str:
        bound = arguments
        if "strftime_now" in text:
            bound = date_macro + arguments
        # Jinja drops a newline after a block, so an empty output separates the blocks from the template
        return f"{bound}{{{{- '' }}}}{text}" if bound else text

    if isinstance(template, dict):  # templates by name; one may be for messages with tools
        tokenizer.chat_template = {name: bind(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = bind(template)


def _as_jinja(value: Any) -> str:
    """Return a value as JSON, which Jinja reads too; it would read an escaped emoji as two halves of UTF-16."""
    return json.dumps(value, ensure_ascii=False)


def _write_date_macro(date: str) -> str:
    """Write a Jinja macro that replaces each directive in its argument, so a template may compute the format."""
    with explaining(ValueError, lambda why: InputError(f"chat_template_date={date} is not a date: {why}")):
        day = datetime.fromisoformat(date)
    directives = [f"%{sign}{letter}" for letter in "aAbBcdHIjmMpRSUwWxXyYFDeT" for sign in ("", "-")]
    # %% becomes a placeholder first, and a percent sign last, so that %%d is not read as a directive
    texts = {"%%": "\0"} | {directive: day.strftime(directive) for directive in directives} | {"\0": "%"}
    filters = "".join(f" | replace({_as_jinja(old)}, {_as_jinja(new)})" for old, new in texts.items())
    return f"{DATE_MACRO}format{filters} -}}}}{{%- endmacro -%}}"


def set_end_and_media_tokens(tokenizer: Any, name: str, cache_dir: str | None) -> None:
    """Set a tokenizer's `end_tokens`, which end an answer, and `media_tokens`, for images, video and audio.

    Both are lists of the strings of tokens, which the tokenizer and the model's config name. Without a config, nothing
    is set.
    """
    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(name, cache_dir=cache_dir)
    except OSError:  # a tokenizer alone, without a model's config
        return
    end_ids = config.get("eos_token_id")
    with contextlib.suppress(OSError):  # without a generation config
        end_ids = transformers.GenerationConfig.from_pretrained(name, cache_dir=cache_dir).eos_token_id
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    media_ids = [id for key, id in config.items() if re.fullmatch("(image|video|audio)_token_(id|index)", key)]
    named = [getattr(tokenizer, f"{medium}_token", None) for medium in ("image", "video", "audio")]
    tokenizer.media_tokens = [token for token in named if isinstance(token, str) and token]
    tokenizer.end_tokens = []
    for id, token in tokenizer.added_tokens_decoder.items():
        if id in media_ids:
            tokenizer.media_tokens.append(token.content)
        if id in end_ids:
            tokenizer.end_tokens.append(token.content)


def identify_tokenizer(tokenizer: Any) -> str | None:
    """Return a digest of what a tokenizer and its chat template do.

    It is None for a tokenizer in Python, which may do anything, and for a template that writes today's date.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    in_python = not tokenizer.is_fast or type(tokenizer).__module__.startswith("transformers_modules.")
    if in_python or ("strftime_now" in template and DATE_MACRO not in template):
        return None
    # the ids of the added tokens show settings outside the backend, such as split_special_tokens
    added = " ".join(token.content for token in tokenizer.added_tokens_decoder.values())
    made_of = (
        transformers.__version__,
        tokenizer.special_tokens_map,
        template,
        getattr(tokenizer, "media_tokens", None),
        getattr(tokenizer, "end_tokens", None),
        tokenizer(added, verbose=False)["input_ids"],  # not verbose, as they may be more than a model takes
        tokenizer.backend_tokenizer.to_str(),
    )
    return hashlib.sha256(repr(made_of).encode()).hexdigest()
