"""Calls of a server with the chat completions protocol, here a stub on loopback."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.pytests import refused
from support.runs import append_text

from dpo.judging import server as server_module
from dpo.judging.server import Server


class Stub(BaseHTTPRequestHandler):
    """Replies with the question, after the failures that the question names."""

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = content["messages"][0]["content"]
        self.server.calls.append((question, content["model"], self.headers.get("Authorization")))
        n_before = sum(call[0] == question for call in self.server.calls) - 1
        if question == "wait":
            time.sleep(0.6)
        if question == "busy" and n_before < 2:
            return self.send(429, {"error": "slow down"})
        if question == "moved":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            return None
        if question == "refused":
            return self.send(401, {"error": "no such key"})
        if question.startswith("drips"):  # in its headers, its body, or that of an error
            self.send_response(500 if question == "drips error" else 200)
            if question != "drips headers":
                self.end_headers()
            for _ in range(20):
                self.wfile.write(b" ")
                time.sleep(0.05)
            return None
        if question.startswith("echo"):
            padding = question.removeprefix("echo")
            return self.send(400, {"error": f"{padding}{self.headers.get('Authorization')}"})
        if question == "quote":
            return self.send(200, {"choices": [{"message": {"content": f"A {self.headers.get('Authorization')}"}}]})
        if question == "strange":
            return self.send(200, {"choices": []})
        return self.send(200, {"choices": [{"message": {"content": f"re: {question}"}}]})

    def send(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def stub(monkeypatch):
    for name in ("JUDGE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_module, "WAIT_SECS", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.calls = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def open_server(url: str, tmp_path: Path, model: str = "small") -> Server:
    return Server(url, model, tmp_path / "replies.jsonl", parallel=4, timeout=0.4)


def connect(stub, tmp_path: Path, **model: str) -> Server:
    return open_server(f"http://127.0.0.1:{stub.server_address[1]}/v1", tmp_path, **model)


def test_replies_come_in_order_and_failures_are_tried_again_or_returned(stub, tmp_path):
    replies = connect(stub, tmp_path).ask_all(["a", "busy", "strange", "wait", "b"])
    assert replies[:2] == ["re: a", "re: busy"]
    assert replies[4] == "re: b"
    assert "list index out of range" in str(replies[2])
    assert "no whole reply within 0.4 s" in str(replies[3])
    start = time.monotonic()
    _, *dripped = connect(stub, tmp_path).ask_all(["a", "drips", "drips headers", "drips error"])
    assert all("no whole reply within 0.4 s" in str(reply) for reply in dripped)
    assert time.monotonic() - start < 2 * 0.9 * server_module.N_TRIES
    assert [call[0] for call in stub.calls].count("drips") == server_module.N_TRIES
    counts = [sum(call[0] == question for call in stub.calls) for question in ("a", "busy", "strange", "wait")]
    assert counts == [1, 3, 1, server_module.N_TRIES]
    assert {model for _, model, _ in stub.calls} == {"small"}


def test_an_interrupted_evaluation_asks_only_what_is_missing(stub, tmp_path):
    connect(stub, tmp_path).ask_all(["a", "b"])
    append_text(tmp_path / "replies.jsonl", '{"key": "cut o')
    assert connect(stub, tmp_path).ask_all(["a", "b", "c"]) == ["re: a", "re: b", "re: c"]
    assert [call[0] for call in stub.calls] == ["a", "b", "c"]
    assert connect(stub, tmp_path, model="other").ask_all(["a"]) == ["re: a"]
    assert len(stub.calls) == 4


def test_the_key_is_from_the_environment_and_goes_nowhere_else(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key\r")  # of a file with the line ends of Windows
    server = connect(stub, tmp_path)
    assert server.ask_all(["a"]) == ["re: a"]
    assert stub.calls[0][2] == "Bearer secret-key"
    with refused("status 302"):
        server.ask_all(["moved"])
    assert "secret" not in f"{server.ask_all(['echo', 'a'])}" + (tmp_path / "replies.jsonl").read_text()
    with refused("has a user or password"):
        open_server("https://me:secret@example.org/v1", tmp_path)
    with refused("would send the key of JUDGE_API_KEY or OPENAI_API_KEY unencrypted"):
        open_server("http://example.org/v1", tmp_path)
    for host in ("127.0.0.1.example.org", "localhost.example.org"):  # names may lead elsewhere
        with refused("unencrypted"):
            open_server(f"http://{host}/v1", tmp_path)


@pytest.mark.parametrize("padding", ["x" * 270, "x" * 280, "\n" * 600_000])
def test_no_part_of_a_key_that_a_server_quotes_is_shown_or_written(padding, stub, tmp_path, monkeypatch):
    key = "sk-0123456789" * 4
    monkeypatch.setenv("JUDGE_API_KEY", key)
    replies = connect(stub, tmp_path).ask_all(["quote", f"echo{padding}", "quote"])
    shown = f"{replies}" + (tmp_path / "replies.jsonl").read_text()
    assert replies[0] == "A Bearer REDACTED"
    assert "status 400" in shown
    assert not any(key[i : i + 6] in shown for i in range(len(key) - 5))


@pytest.mark.parametrize("key", ["sk-01234567\nsk-89abcdef", "sk-schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    with refused("has a space, line break or the like") as refusal:
        connect(stub, tmp_path)
    assert "sk-" not in str(refusal.value)
    assert not stub.calls


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_proxy_is_not_asked_for_an_address_of_this_machine(host, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # where nobody listens
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("JUDGE_API_KEY", "secret-key")
    url = f"http://{host}:{stub.server_address[1]}/v1"
    server = open_server(url, tmp_path)
    assert server.ask_all(["a"]) == ["re: a"]
    assert stub.calls == [("a", "small", "Bearer secret-key")]


def test_a_server_that_refuses_is_named_before_all_is_asked(stub, tmp_path):
    with refused(r"does not answer: status 401: .*no such key"):
        connect(stub, tmp_path).ask_all(["refused", "refused", "b"])
    assert connect(stub, tmp_path).ask_all(["refused", "b"])[1] == "re: b"  # one that is refused is not the server
    with refused("does not answer: .*refused"):
        open_server("http://127.0.0.1:1/v1", tmp_path).ask_all(["a"])
