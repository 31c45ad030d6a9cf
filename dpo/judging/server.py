"""A server with the chat completions protocol: OpenAI's, vLLM's, llama.cpp's, `transformers serve` and others."""

import json
import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, UnknownHandler

import tqdm

from dpo.errors import InputError, one_sentence
from dpo.judging.answers import hash_texts
from dpo.redaction import REMEMBERED, redact
from dpo.system.plain_files import JsonLinesStore

# Only these addresses surely mean this machine: another name may mean another host the next time it is looked up.
THIS_MACHINE = re.compile(r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:|/|$)", re.IGNORECASE)
N_TRIES = 4
WAIT_SECS = 1.0  # doubles with each try
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses after which another try may succeed
REPLY_MARK = r'\{"key": "\w{16}", "reply": '  # pattern of the beginning of the file of replies
# A call may raise these, and so may reading a reply that does not have the expected form.
ERRORS = (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError)


class Server:
    """Asks a server one question per call, with several calls at a time.

    Replies are saved in the file `cache`, so that an interrupted evaluation continues where it was.
    Raises InputError if the server cannot be used at all.
    """

    def __init__(self, url: str, model: str, cache: Path, *, parallel: int, timeout: float):
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.model = model
        self.parallel = parallel
        self.timeout = timeout
        self._replies = JsonLinesStore(cache, REPLY_MARK, {"reply": str})
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get("JUDGE_API_KEY", "").strip() or os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", key):  # a header cannot hold other characters
            raise InputError("JUDGE_API_KEY or OPENAI_API_KEY has a space, line break or the like: remove it")
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
            REMEMBERED.add(key)  # so that `redact` removes it from texts
        if "@" in self.url:
            raise InputError("--judge URL has a user or password: set the key in JUDGE_API_KEY instead")
        # An opener with these handlers alone follows no redirect, which could send the key to another host.
        self._opener = OpenerDirector()
        for handler in (HTTPHandler(), HTTPSHandler(), UnknownHandler()):
            self._opener.add_handler(handler)
        if not THIS_MACHINE.match(self.url):
            if key and not self.url.lower().startswith("https://"):
                raise InputError(
                    f"--judge {url} would send the key of JUDGE_API_KEY or OPENAI_API_KEY unencrypted: use https"
                )
            self._opener.add_handler(ProxyHandler())  # for this machine, it would get the key and answer itself

    def ask_all(self, questions: list[str]) -> list[str | Exception]:
        """Return the reply to each question, or the error that prevented it."""
        # Two calls are made first: what makes both fail would probably make all others fail too.
        first = [self._ask(question) for question in questions[:2]]
        if all(isinstance(reply, Exception) for reply in first):
            raise InputError(f"--judge {self.url} does not answer: {first[0]}")
        pool = ThreadPoolExecutor(self.parallel)
        try:
            others = pool.map(self._ask, questions[2:])
            return first + list(tqdm.tqdm(others, total=len(questions), initial=len(first), desc="judging"))
        finally:
            pool.shutdown(cancel_futures=True)  # no further call begins after Ctrl-C

    def _ask(self, question: str) -> str | Exception:
        """Return the reply to a question, saved or new, or the error that prevented it."""
        key = hash_texts(self.url, self.model, question)
        if key not in self._replies.lines:
            message = {"role": "user", "content": question}
            body = {"model": self.model, "messages": [message], "temperature": 0, "max_tokens": 512}
            try:
                content = self._request(body)["choices"][0]["message"]["content"]
                if not isinstance(content, str):
                    raise ValueError(f"the reply has no text: {content!r}")
            except ERRORS as error:
                return OSError(one_sentence(error))
            self._replies.add(key, reply=redact(content))  # a server may quote the key, and replies are published
        return self._replies.lines[key]["reply"]

    def _request(self, body: dict) -> Any:
        """Return the JSON with which the server replies.

        Makes up to N_TRIES tries while the server is busy or cannot be reached, then raises one of ERRORS.
        """
        data = json.dumps(body).encode()
        wait = WAIT_SECS
        n_left = N_TRIES
        while True:
            n_left -= 1
            # a new one each time: urllib changes a request for a proxy, and would send it unencrypted the next time
            request = Request(f"{self.url}/chat/completions", data, self._headers)
            status = 503  # a call without a reply counts as busy
            try:
                status, content = self._fetch(request)
                if status // 100 == 2:
                    return json.loads(content)
                failure = OSError(f"status {status}: {content.decode(errors='replace')}")
            except (OSError, HTTPException) as error:
                failure = error
            if n_left == 0 or status not in BUSY:
                raise failure
            time.sleep(wait)
            wait *= 2

    def _fetch(self, request: Request) -> tuple[int, bytes]:
        """Return status and content of a reply.

        The socket's timeout does not limit a reply that arrives byte by byte, so the call is made in a thread, which is
        abandoned when the time is up.
        """
        future = Future()

        def work() -> None:
            try:
                with self._opener.open(request, timeout=self.timeout) as response:
                    future.set_result((response.status, response.read(2**24)))  # the rest of a longer reply is not read
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return future.result(self.timeout)
        except TimeoutError:
            raise TimeoutError(f"no whole reply within {self.timeout:g} s") from None
