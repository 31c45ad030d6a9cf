"""`dpo report --serve` shows runs to this machine's browsers, and `dpo evaluate`'s page works in one."""

import http.client
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.browser import opening_browser
from support.runs import ROOT, make_environment, read_rows, small_run
from support.warm import Python

from dpo.analysis import curves
from dpo.judging.page import write_form


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


def get(port: int, path: str, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_runs_are_served_to_this_machine_alone_and_nothing_else_is(serve, copied, tmp_path):
    copied("runs/first")
    copied("runs/second")
    port, process = serve(tmp_path / "runs", fault=draw_no_curves)
    status, text = get(port, "/")
    assert (status, "2 runs compared" in text) == (200, True)
    assert '<a href="/0">first</a>' in text
    assert get(port, "/1", host=f"localhost:{port}")[0] == 200
    assert get(port, "/1", host=f"LOCALHOST:{port}")[0] == 200
    with (tmp_path / "runs" / "second" / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "examples": 4000, "updates": 1000}\n')
    assert "1,000 of" in get(port, "/1")[1]  # whatever file has news
    with socket.create_connection(("127.0.0.1", port)) as impatient:
        impatient.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    outside = (
        f"/{'1' * 5000}",
        "/2",
        "/-1",
        "/second",
        "/third",
        "/first/config.yaml",
        "/../secret",
        "/%2e%2e/runs/first/config.yaml",
    )
    for path in outside:
        assert get(port, path) == (404, "")
    for host in ("example.org", f"127.0.0.1:{port}.example.org", "127.0.0.1:80"):
        assert get(port, "/", host=host) == (403, "")
    (tmp_path / "runs" / "first").rename(tmp_path / "elsewhere")
    assert get(port, "/")[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_a_browser_follows_a_run_that_trains_and_compares_finished_ones(serve, copied, rows, tmp_path):
    copied("runs/first")
    with opening_browser(tmp_path) as browser:
        command = small_run(
            rows, tmp_path / "runs" / "second", "n_examples=400000", "eval_every=400000", "exp_name=second"
        )
        train = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *command, "wandb.enabled=false"], env=make_environment(), cwd=ROOT
        )
        metrics = tmp_path / "runs" / "second" / "metrics.jsonl"
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            time.sleep(0.1)
            assert train.poll() is None
        port, _ = serve(tmp_path / "runs")
        browser.open(f"http://127.0.0.1:{port}/1")
        said = "document.body.innerText.match(/Still training after ([0-9,]+) of/)"
        first = browser.wait_for(said)[1]
        browser.wait_for(f"({said} || [])[1] > '{first}' ? 1 : 0")  # the page loads itself again
        browser.open(f"http://127.0.0.1:{port}/")
        assert browser.run("document.querySelectorAll('img').length") > 3
        assert browser.run("document.querySelector('h1').innerText") == "2 runs compared"
        train.send_signal(signal.SIGTERM)
        train.wait(timeout=60)
        browser.wait_for("!document.body.innerText.includes('still training')")
        browser.open(f"http://127.0.0.1:{port}/1")
        browser.wait_for("document.body.innerText.includes('Stopped after')")


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
