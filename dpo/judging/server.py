"""A server with the chat completions protocol: OpenAI's, vLLM's, llama.cpp's, `transformers serve` and others."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tqdm

from dpo.errors import InputError, one_sentence
from dpo.judging.answers import hash_texts
from dpo.system.plain_files import append_line, read_lines

KEYS = ("JUDGE_API_KEY", "OPENAI_API_KEY")  # environment variables, of which the first that is set is sent
N_TRIES, WAIT_SECS = 4, 1.0  # the wait doubles with each try
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses after which another try may succeed
LONGEST_REPLY = 512  # tokens
ERRORS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:  # it could send the key to another host
        return None


class Server:
    """Asks one question per call, in parallel; replies are kept in a file, so that an interrupted evaluation goes on.

    Raises InputError if the server cannot be used at all.
    """

    def __init__(self, url: str, model: str | None, cache: Path, *, parallel: int, timeout: float) -> None:
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.cache, self.parallel, self.timeout = cache, parallel, timeout
        self._replies = {line["key"]: line["reply"] for line in read_lines(cache)}
        self._opener, self._lock = urllib.request.build_opener(_NoRedirects), threading.Lock()
        self._key = next((key for name in KEYS if (key := os.environ.get(name, "").strip())), None)
        if "@" in self.url:
            raise InputError("--judge URL has a user or password: give the key in JUDGE_API_KEY instead")
        is_here = re.match(r"http://(127\.[\d.]+|localhost|\[::1\])(:\d+)?(/|$)", self.url)
        if self._key and self.url.startswith("http://") and not is_here:
            raise InputError(f"--judge {url} would send the key of {' or '.join(KEYS)} unencrypted: give an https URL")
        self.model = model or self._find_model()

    def ask_all(self, questions: Sequence[str]) -> list[str | Exception]:
        """The reply to each question, or why there is none."""
        first = [self._ask(question) for question in questions[:2]]  # before many calls fail for the same reason
        if all(isinstance(reply, Exception) for reply in first):
            raise InputError(f"--judge {self.url} does not answer: {first[0]}")
        pool = ThreadPoolExecutor(self.parallel)
        try:
            others = pool.map(self._ask, questions[2:])
            return first + list(tqdm.tqdm(others, total=len(questions), initial=len(first), desc="judging"))
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C

    def _ask(self, question: str) -> str | Exception:
        key = hash_texts(self.url, self.model, question)
        if key in self._replies:
            return self._replies[key]
        message = {"role": "user", "content": question}
        body = {"model": self.model, "messages": [message], "temperature": 0, "max_tokens": LONGEST_REPLY}
        try:
            content = self._request("/chat/completions", body)["choices"][0]["message"]["content"]
            if not isinstance(content, str):
                raise ValueError(f"the reply has no text: {content!r:.100}")
        except ERRORS as error:
            return OSError(self._hide_key(error))
        with self._lock:
            append_line(self.cache, {"key": key, "reply": content})
            self._replies[key] = content
        return content

    def _find_model(self) -> str:
        """The first model that the server names."""
        try:
            return self._request("/models")["data"][0]["id"]
        except ERRORS as error:
            why = f"{self.url}/models cannot be read: {self._hide_key(error)}"
            raise InputError(f"--judge {why}; is it running? Or name its model with --judge-model") from error

    def _hide_key(self, error: Exception) -> str:
        text = one_sentence(error)
        return text.replace(self._key, "***") if self._key else text

    def _request(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        failure: Exception = OSError("not asked")
        for number in range(N_TRIES):
            try:
                end, content = time.monotonic() + self.timeout, b""
                with self._opener.open(request, timeout=self.timeout) as response:
                    while part := response.read1():
                        content += part
                        if time.monotonic() > end:
                            raise TimeoutError("timed out")
                return json.loads(content)
            except urllib.error.HTTPError as error:
                detail = error.read(300).decode(errors="replace")
                failure = OSError(f"status {error.code}: {' '.join(detail.split())}")
                if error.code not in BUSY:
                    raise failure from None
            except (OSError, http.client.HTTPException) as error:
                failure = error
            if number + 1 < N_TRIES:
                time.sleep(WAIT_SECS * 2**number)
        raise failure
