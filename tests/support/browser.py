"""A headless Chromium, driven over two pipes."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")

AS_3_AND_4 = """
import fcntl, os, sys
for number, pipe in zip((3, 4), [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""  # Chromium reads commands from descriptor 3, and answers on 4


class Browser:
    """A page of Chromium.

    `events` are the messages that Chromium sent unasked.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._numbers = commands, answers, itertools.count(1)
        self._unread, self.events, self._session = b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        number = next(self._numbers)
        message = {
            "id": number,
            "method": method,
            "params": params,
            **({"sessionId": self._session} if self._session else {}),
        }
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Show a page on a screen of this width in pixels."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def errors(self) -> list[str]:
        """Exceptions and messages of the console and the browser."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """URLs that the page asked for, except `data:` URLs."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith("data:")]

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _read(self, within: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + within
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {within} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    assert CHROMIUM is not None
    chromium_in, commands = os.pipe()
    answers, chromium_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        program = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        command = [sys.executable, "-c", AS_3_AND_4, str(chromium_in), str(chromium_out), *program]
        process = subprocess.Popen(
            command,
            pass_fds=(chromium_in, chromium_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(chromium_in)
        os.close(chromium_out)
        try:
            yield Browser(commands, answers)
        finally:
            process.terminate()
            process.wait(20)
            os.close(commands)
            os.close(answers)
