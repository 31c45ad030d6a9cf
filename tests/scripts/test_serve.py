"""`dpo report --serve` shows runs to this machine's browsers, and `dpo evaluate`'s page works in one."""

import http.client
import re
import signal
import socket
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.browser import opening_browser
from support.runs import append_text, make_environment, read_rows
from support.warm import Python

from dpo.analysis import curves
from dpo.commands import report
from dpo.judging.page import write_form
from dpo.system.run_directory import lock_run_dir


@pytest.fixture
def serve():
    """A function that starts a server of the runs in a directory, and returns its port and process."""
    processes = []

    def start(runs: Path, **options: Any) -> tuple[int, Python]:
        command = ("-m", "dpo", "report", "--serve", "--port", "0", str(runs))
        process = Python(*command, environment=make_environment(), **options)
        processes.append(process)
        while not (said := re.search(r"127\.0\.0\.1:(\d+) in a browser", process.text)):
            assert process.poll() is None
            time.sleep(0.05)
        return int(said[1]), process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def draw_no_curves() -> None:
    curves.plan_charts = lambda runs: []


def shorten_silence() -> None:
    curves.plan_charts = lambda runs: []
    report.LONGEST_SILENCE_SECS = 0.5


def get(port: int, path: str, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.fixture
def served(serve, copied, tmp_path) -> tuple[int, Python]:
    """The port and process of a server of two runs."""
    copied("runs/first")
    copied("runs/second")
    return serve(tmp_path / "runs", fault=draw_no_curves)


def test_runs_are_served_with_all_news_until_ctrl_c(served, tmp_path):
    port, process = served
    status, text = get(port, "/")
    assert (status, "2 runs compared" in text) == (200, True)
    assert '<a href="/0">first</a>' in text
    line = '{"split": "train", "examples": 4000, "updates": 1000}\n'
    append_text(tmp_path / "runs" / "second" / "metrics.jsonl", line)
    assert "1,000 of" in get(port, "/1")[1]
    with socket.create_connection(("127.0.0.1", port)) as impatient:
        impatient.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    (tmp_path / "runs" / "first").rename(tmp_path / "elsewhere")
    assert get(port, "/")[0] == 200
    (tmp_path / "runs").rename(tmp_path / "all")
    assert get(port, "/") == (404, "")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.text


def test_half_a_request_is_not_waited_for(serve, copied, tmp_path):
    copied("runs/first")
    port, _ = serve(tmp_path / "runs", fault=shorten_silence)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""  # closed


def test_nothing_but_reports_is_served_and_to_this_machine_alone(served):
    port, _ = served
    for path in (f"/{'1' * 5000}", "/2", "/-1", "/second", "/first/config.yaml", "/%2e%2e/runs/first/config.yaml"):
        assert get(port, path) == (404, "")
    for host in (f"localhost:{port}", f"LOCALHOST:{port}"):
        assert get(port, "/1", host)[0] == 200
    for host in ("example.org", f"127.0.0.1:{port}.example.org", "127.0.0.1:80"):
        assert get(port, "/", host) == (403, "")


def test_a_page_loads_itself_again_while_its_run_trains(served, tmp_path):
    def find_refresh() -> str | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{served[0]}/0") as response:
            return response.headers["Refresh"]

    assert find_refresh() is None
    with lock_run_dir(tmp_path / "runs" / "first"):
        assert int(find_refresh() or 0) > 0


@pytest.mark.slow
def test_people_judge_in_a_browser_by_keys_and_buttons_and_save_their_verdicts(tmp_path):
    from judging.test_judges import make_pair

    pairs = [make_pair(f"</script><b>first {i}", f"second {i}", f"Question {i}?") for i in range(3)]
    write_form(tmp_path / "judge.html", pairs, {"seed": 0})
    with opening_browser(tmp_path) as browser:
        browser.open((tmp_path / "judge.html").as_uri())
        shown = browser.run("document.getElementById('left-text').innerText")
        assert shown in ("</script><b>first 0", "second 0")
        browser.run("document.getElementById('left').click()")
        browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '2'}))")
        browser.open((tmp_path / "judge.html").as_uri())  # what was judged is remembered
        assert browser.run("document.getElementById('done').innerText") == "2"
        assert browser.run("document.getElementById('prompt').innerText") == "Question 2?"
        assert browser.run("document.getElementById('end').hidden")
        browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '3'}))")
        assert not browser.run("document.getElementById('end').hidden")
        browser.run("document.getElementById('save').click()")
        saved, deadline = tmp_path / "verdicts.jsonl", time.monotonic() + 20
        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    lines = read_rows(Path(saved))
    expected = zip(pairs, ("left", "tie", "right"), strict=True)
    assert lines == [{"pair": pair.id, "better": side, "drawn": {"seed": 0}} for pair, side in expected]
