"""Secrets: what looks like one is replaced before anything is written down or printed. Imports no torch."""

from __future__ import annotations

import os
import re
from typing import Any

SECRET_KEY = re.compile(r"((^|_)(api_?key|key|token|pat|credentials?)|secret|password|passwd)$", re.IGNORECASE)
URL_CREDENTIALS = re.compile(r"://(?:[^/\s]*|[^/@:\s]+:\S*)@")  # a password may hold @ and /
URL_SECRETS = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|signature|sig|credential)=)[^&\s]+", re.IGNORECASE)
ASSIGNED = re.compile(r"""([\w-]+)=(?!["']?\$\{)('[^']*'?|"[^"]*"?|[^\s,&}\]]+)""")  # a quote may be left open


def redact(value: Any) -> Any:
    """`value` with what looks like a secret replaced: keys that name one, also as KEY=VALUE in a text, credentials
    inside URLs, and whatever the environment holds under such a name. A reference (`${oc.env:NAME}`) is none."""
    if isinstance(value, dict):
        return {k: "REDACTED" if SECRET_KEY.search(str(k)) and v else redact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v) for v in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if SECRET_KEY.search(name) and len(secret) >= 8:
            value = value.replace(secret, "REDACTED")
    value = URL_SECRETS.sub(r"\1REDACTED", URL_CREDENTIALS.sub("://REDACTED@", value))
    return ASSIGNED.sub(lambda found: f"{found[1]}=REDACTED" if SECRET_KEY.search(found[1]) else found[0], value)
