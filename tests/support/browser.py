"""A headless Chromium, driven by ChromeDriver's protocol."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class Browser:
    def __init__(self, driver: str) -> None:
        self.session = f"{driver}/session"

    def call(self, path: str, **content: Any) -> Any:
        """POST, or GET without content and with a path that begins with `?`."""
        request = urllib.request.Request(self.session + path, json.dumps(content).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def open(self, url: str) -> None:
        self.call("/url", url=url)

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        return self.call("/execute/sync", script=f"return {script}", args=[])


@contextmanager
def opening_browser(downloads: Path) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if not (driver and chromium):
        pytest.skip("there is no Chromium with ChromeDriver: apt-get install chromium chromium-driver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        browser = Browser(f"http://127.0.0.1:{port}")
        preferences = {"download.default_directory": str(downloads)}
        arguments = [*FLAGS.split(), f"--user-data-dir={downloads / 'profile'}"]
        options = {"binary": chromium, "args": arguments, "prefs": preferences}
        deadline = time.monotonic() + 30
        while True:
            try:
                made = browser.call("", capabilities={"alwaysMatch": {"goog:chromeOptions": options}})
                break
            except OSError:  # not started yet
                assert time.monotonic() < deadline
                time.sleep(0.2)
        browser.session += f"/{made['sessionId']}"
        yield browser
    finally:
        process.terminate()
        process.wait()
