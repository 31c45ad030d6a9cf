"""A server with the chat completions protocol: OpenAI's, vLLM's, llama.cpp's, `transformers serve` and others."""

import ipaddress
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, HTTPHandler, ProxyHandler, Request, build_opener

import tqdm

from dpo.errors import InputError, one_sentence
from dpo.judging.answers import hash_texts
from dpo.redaction import REMEMBERED, redact
from dpo.system.plain_files import append_line, read_lines

KEYS = ("JUDGE_API_KEY", "OPENAI_API_KEY")  # environment variables, of which the first that is set is sent
N_TRIES, WAIT_SECS = 4, 1.0  # the wait doubles with each try
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses after which another try may succeed
LONGEST_REPLY = 512  # tokens
REPLY_MARK = r'\{"key": "\w{16}", "reply": '  # how the file of replies begins
ERRORS = (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError)
LARGEST_REPLY = 2**24  # bytes; what comes after is not read
T = TypeVar("T")


class _AsTheyCome(HTTPErrorProcessor):
    def http_response(self, request: Any, response: Any) -> Any:
        """Follow no redirect, which could send the key to another host."""
        return response

    https_response = http_response


class _ConnectionHere(HTTPConnection):
    """Checks where it leads, as a name may lead elsewhere than when it was looked up."""

    def connect(self) -> None:
        super().connect()
        if not _is_loopback(peer := self.sock.getpeername()[0]):
            self.close()
            raise OSError(f"{self.host} led to this machine before, and now to {peer}")


class _HandlerHere(HTTPHandler):
    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_ConnectionHere, request)


def _is_loopback(address: str) -> bool:
    """True for 0.0.0.0 too, a connection to which stays on this machine."""
    return address == "0.0.0.0" or ipaddress.ip_address(address).is_loopback


def _is_here(url: str) -> bool:
    """Whether a host has addresses of this machine alone; not if its name is not known here, as behind a proxy."""
    try:
        parts = urlsplit(url)
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # a host, or port, that is none
        return False
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _call_within(seconds: float, call: Callable[[], T]) -> T:
    """Call in a thread that is abandoned when the time is up: a server may send a byte at a time for ever."""
    results = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no whole reply within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


class Server:
    """Asks one question per call, in parallel; replies are kept in a file, so that an interrupted evaluation goes on.

    Raises InputError if the server cannot be used at all.
    """

    def __init__(self, url: str, model: str | None, cache: Path, *, parallel: int, timeout: float):
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.cache, self.parallel, self.timeout = cache, parallel, timeout
        kept = read_lines(cache, REPLY_MARK, {"key": str, "reply": str})
        self._replies = {line["key"]: line["reply"] for line in kept}
        handlers, self._lock = [_AsTheyCome()], threading.Lock()
        self._key = next((key for name in KEYS if (key := os.environ.get(name, "").strip())), None)
        if self._key and not re.fullmatch("[!-~]+", self._key):  # a header cannot hold others
            raise InputError(f"the key in {' or '.join(KEYS)} has a space, line break or the like: set it without")
        REMEMBERED.add(self._key or "")
        if "@" in self.url:
            raise InputError("--judge URL has a user or password: give the key in JUDGE_API_KEY instead")
        if _is_here(self.url):  # a proxy would be sent key and questions, and would answer
            handlers += [ProxyHandler({}), _HandlerHere()]
        elif self._key and not self.url.lower().startswith("https://"):
            raise InputError(f"--judge {url} would send the key of {' or '.join(KEYS)} unencrypted: give an https URL")
        self._opener = build_opener(*handlers)
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
                raise ValueError(f"the reply has no text: {content!r}")
        except ERRORS as error:
            return OSError(one_sentence(error))
        content = redact(content)  # a server may quote the key, and replies are written and published
        with self._lock:
            append_line(self.cache, {"key": key, "reply": content})
            self._replies[key] = content
        return content

    def _find_model(self) -> str:
        """The first model that the server names."""
        try:
            return self._request("/models")["data"][0]["id"]
        except ERRORS as error:
            raise InputError(
                f"--judge {self.url}/models cannot be read: {one_sentence(error)}; is it running? Or name its model "
                "with --judge-model"
            ) from error

    def _request(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, headers)
        failure: Exception = OSError("not asked")
        for number in range(N_TRIES):
            try:
                status, content = _call_within(self.timeout, partial(self._fetch, request))
                if status // 100 == 2:
                    return json.loads(content)
                failure = OSError(f"status {status}: {content.decode(errors='replace')}")
                if status not in BUSY:
                    break
            except (OSError, HTTPException) as error:
                failure = error
            if number + 1 < N_TRIES:
                time.sleep(WAIT_SECS * 2**number)
        raise failure

    def _fetch(self, request: Request) -> tuple[int, bytes]:
        with self._opener.open(request, timeout=self.timeout) as response:
            return response.status, response.read(LARGEST_REPLY)
