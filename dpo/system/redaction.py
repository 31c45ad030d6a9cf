"""Redaction of likely secrets, before anything is written."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from typing import Any

SECRET_KEY = re.compile(
    r"(^|_)(api_?key|key|key_id|token|pat|credentials?|bearer|auth)$|(secret|password|passwd|passphrase)$",
    re.IGNORECASE,
)
TOKENIZER_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask)_token$", re.IGNORECASE)
CAMEL_CASE_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Searched in texts of others, so each takes a time that grows no faster than the text: no run of characters is searched
# again from its middle.
URL_CREDENTIALS = re.compile(r"://(?:[^/\s]*|[^/@:\s]+:\S*)@")  # a password may contain @ and /
URL_SECRETS = re.compile(
    r"([?&][^=&?\s]*(?:key|token|secret|password|signature|sig|credential)=)[^&\s]+", re.IGNORECASE
)
# KEY=VALUE in a text, where VALUE is no interpolation such as ${oc.env:NAME}; VALUE's quote may be unclosed
ASSIGNMENT = re.compile(r"""(?<![\w-])([\w-]+)=(?!["']?\$\{)('[^']*'?|"[^"]*"?|[^\s,&}\]]+)""")
INTERPOLATION = re.compile(r"\$\{(oc\.env:\w+|[\w.]+)\}")


@lru_cache(1000)
def is_secret(name: Any) -> bool:
    """Whether a key is named like a secret, as `api_key`, `authToken` and `db.password` are."""
    last_part = str(name).rpartition(".")[2]
    words = CAMEL_CASE_BOUNDARY.sub("_", last_part)
    return SECRET_KEY.search(words) is not None and TOKENIZER_KEY.search(words) is None


def redact(value: Any) -> Any:
    """Replace by REDACTED: values of keys named like a secret (KEY=VALUE in texts too) and of such environment
    variables, and credentials in URLs.
    """
    if isinstance(value, dict):
        secret_keys = {k for k, v in value.items() if is_secret(k) and v and not INTERPOLATION.fullmatch(str(v))}
        return {k: "REDACTED" if k in secret_keys else redact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    if not isinstance(value, str):
        return value
    text = value
    for name, secret in os.environ.items():
        if is_secret(name) and len(secret) >= 8:  # a short value may be an ordinary word
            # as messages and JSON write it; repr escapes a quote if there are quotes of both kinds
            forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], " ".join(secret.split())}
            for form in sorted(forms | {form.replace("'", "\\'") for form in forms}, key=len, reverse=True):
                text = text.replace(form, "REDACTED")
    # up to its last @ each word is searched: behind it there are no credentials, but perhaps many ://
    text = re.sub(r"(?<!\S)\S*@", lambda match: URL_CREDENTIALS.sub("://REDACTED@", match[0]), text)
    text = URL_SECRETS.sub(r"\1REDACTED", text)
    return ASSIGNMENT.sub(lambda match: f"{match[1]}=REDACTED" if is_secret(match[1]) else match[0], text)
