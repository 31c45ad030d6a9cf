"""Redaction of likely secrets, before anything is written."""

import html
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

SECRET_KEY = re.compile(
    r"(^|_)(api_?keys?|key|key_id|token|pat|credentials?|bearer|auth|pass)$|(secrets?|passwords?|passwd|passphrase)$",
    re.IGNORECASE,
)
# Special tokens of a tokenizer are no secrets, although SECRET_KEY matches their names.
TOKENIZER_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask)_token$", re.IGNORECASE)
CAMEL_CASE_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Others may have written the texts that these patterns search, so the time must grow no faster than the text: no run of
# characters is searched again from its middle.
URL_CREDENTIALS = re.compile(r"://(?:[^/\s]*|[^/@:\s]+:\S*)@")  # a password may contain @ and /
URL_SECRETS = re.compile(
    r"([?&][^=&?\s]*(?:key|token|secret|password|signature|sig|credential)=)[^&\s]+", re.IGNORECASE
)
# KEY=VALUE in a text, where VALUE is no interpolation such as ${oc.env:NAME}; VALUE's quote may be unclosed
ASSIGNMENT = re.compile(r"""(?<![\w-])([\w-]+)=(?!["']?\$\{)('[^']*'?|"[^"]*"?|[^\s,&}\]]+)""")
REMEMBERED: set[str] = set()  # secrets from places where `_list_secrets` does not look
MIN_SECRET = 8  # characters; a shorter value may be an ordinary word
# OmegaConf's reference to a value, which names a secret but does not contain it
INTERPOLATION = re.compile(r"\$\{(oc\.env:\w+|[\w.]+)\}")


@lru_cache(1000)
def is_secret(name: Any) -> bool:
    """Whether a key is named like a secret, as `api_key`, `authToken` and `db.password` are."""
    last_part = str(name).rpartition(".")[2]
    words = CAMEL_CASE_BOUNDARY.sub("_", last_part)
    return SECRET_KEY.search(words) is not None and TOKENIZER_KEY.search(words) is None


def _list_secrets() -> Iterator[str]:
    """Yield REMEMBERED, and the secrets in the environment and in the files of `hf auth login` and `wandb login`."""
    yield from REMEMBERED
    yield from (secret for name, secret in os.environ.items() if is_secret(name))
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    hub = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    token = os.environ.get("HF_TOKEN_PATH") or f"{hub}/token"
    logins = os.environ.get("NETRC") or f"{home}/.netrc"
    for file in (token, f"{hub}/stored_tokens", logins):
        with suppress(OSError):  # there is no such file, or it may not be read
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode):
                yield from _read_secrets(file, status.st_mtime_ns)


@lru_cache(8)
def _read_secrets(file: str, mtime_ns: int) -> list[str]:
    """Find the secrets in a file: tokens alone on their line, values of an INI file, passwords of a netrc file.

    `mtime_ns` is the time at which the file was last modified, by which the cache notices a new login.
    """
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    return re.findall(r"(?:^(?=\S+$)|=\s*|password\s+)(\S+)", text, re.MULTILINE)


def shorten(value: Any) -> str:
    """Return the first 80 characters of a value's `repr`, without secrets, for a message."""
    return redact(repr(value))[:80]


@lru_cache(1000)
def _list_forms(secret: str) -> list[str]:
    """Return the ways in which messages, JSON, pages and URLs write a secret.

    The longest comes first, as it may contain the others.
    """
    forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret), " ".join(secret.split())}
    forms.add(quote(secret, safe="", errors="surrogateescape"))
    # repr escapes a quote if a text has quotes of both kinds, and some writers of JSON escape a slash
    forms |= {form.replace(character, f"\\{character}") for form in forms for character in "'/"}
    return sorted(forms, key=len, reverse=True)


def redact(value: Any) -> Any:
    """Replace likely secrets in a text, or in a tree of dicts and lists, by REDACTED.

    These are the values of keys named like a secret (in a text KEY=VALUE), the secrets of this machine's environment
    and logins, and credentials in URLs. Redact a text before you cut it: a part of a secret is not found.
    """
    if isinstance(value, dict):
        redacted = {}
        for key, part in value.items():
            # An empty value hides nothing, and an interpolation only names a secret.
            holds_secret = is_secret(key) and part and not INTERPOLATION.fullmatch(str(part))
            redacted[key] = "REDACTED" if holds_secret else redact(part)
        return redacted
    if isinstance(value, list):
        return [redact(part) for part in value]
    if not isinstance(value, str):
        return value
    text = value
    for secret in sorted({*_list_secrets()}, key=len, reverse=True):  # the longest first, as it may contain others
        if len(secret.strip()) >= MIN_SECRET:
            for form in _list_forms(secret.strip()):
                text = text.replace(form, "REDACTED")
    # Each word is searched up to its last @: after it there are no credentials, but perhaps many ://, which take time.
    text = re.sub(r"(?<!\S)\S*@", lambda match: URL_CREDENTIALS.sub("://REDACTED@", match[0]), text)
    text = URL_SECRETS.sub(r"\1REDACTED", text)
    return ASSIGNMENT.sub(lambda match: f"{match[1]}=REDACTED" if is_secret(match[1]) else match[0], text)
