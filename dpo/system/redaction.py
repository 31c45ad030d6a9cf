"""Redaction of likely secrets before anything is written. Imports no torch."""

from __future__ import annotations

import os
import re
from typing import Any

SECRET_KEY = re.compile(
    r"(^|_)(api_?key|key|key_id|token|pat|credentials?|bearer|auth)$|(secret|password|passwd|passphrase)$",
    re.IGNORECASE,
)
TOKENIZER_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask)_token$", re.IGNORECASE)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
URL_CREDENTIALS = re.compile(r"://(?:[^/\s]*|[^/@:\s]+:\S*)@")  # a password may hold @ and /
URL_SECRETS = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|signature|sig|credential)=)[^&\s]+", re.IGNORECASE)
ASSIGNED = re.compile(r"""([\w-]+)=(?!["']?\$\{)('[^']*'?|"[^"]*"?|[^\s,&}\]]+)""")  # a quote may be unclosed
PLACEHOLDER = re.compile(
    r"""[\[\\'"]*value\d*(,value\d*)*[\]\\'"]*""", re.IGNORECASE
)  # in hints: key=[value1,value2], KEY=VALUE
KEY = re.compile(r"^[+~]*([\w.-]*)[\"']?\s*(?:[=:@]|\s|$)")  # the key of an override
REFERENCE = re.compile(r"\$\{(oc\.env:\w+|[\w.]+)\}")
INNER_KEY = re.compile(r"([\w-]+)[\"']?\s*[=:]")  # in an override's value


def is_secret(name: Any) -> bool:
    """Return whether a key is named like a secret: `api_key`, `authToken`, `db.password`."""
    words = HUMP.sub("_", str(name).rpartition(".")[2])
    return SECRET_KEY.search(words) is not None and TOKENIZER_KEY.search(words) is None


def secrets_in(overrides: list[str]) -> list[str]:
    """The values of secrets in a command line, well-formed or not.

    A reference (`${oc.env:NAME}`) is not a secret.
    """
    values, value_follows = [], False
    for override in overrides:
        key = KEY.match(override)
        ends = [key.end()] if key and is_secret(key[1]) else []  # where the names of secrets end
        ends += [inner.end() for inner in INNER_KEY.finditer(override) if is_secret(inner[1])]
        if not ends and not value_follows:
            continue
        value = override[min(ends, default=0) :].strip(" ='\"{")
        values.append(value)
        value_follows = not value  # as in `key = VALUE`, which is three overrides
    return [value for value in values if value and not REFERENCE.match(value)]


def redact(value: Any) -> Any:
    """Replace the secrets in `value`.

    These are values of keys named like a secret, also as KEY=VALUE in a string; credentials in URLs; and values of
    environment variables named like a secret. A reference (`${oc.env:NAME}`) is not a secret.
    """
    if isinstance(value, dict):
        return {k: "REDACTED" if is_secret(k) and v else redact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if is_secret(name) and len(secret) >= 8:
            value = value.replace(secret, "REDACTED")
    value = URL_SECRETS.sub(r"\1REDACTED", URL_CREDENTIALS.sub("://REDACTED@", value))

    def redacted(found: re.Match[str]) -> str:
        secret = is_secret(found[1]) and not PLACEHOLDER.fullmatch(found[2])
        return f"{found[1]}=REDACTED" if secret else found[0]

    return ASSIGNED.sub(redacted, value)
