"""A stub of the Hub's protocol for uploads, on loopback: repositories are made and filled, files are read back."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_a_token_that_nobody_may_see"
COMMIT = "0123456789" * 4
NO_HEADERS: Mapping[str, str] = {}


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.private: dict[str, bool] = {}  # of each repository
        self.files: dict[str, dict[str, bytes]] = {}
        self.unsigned: list[str] = []  # paths of calls without the token
        self.commits_left = 100  # afterwards calls are refused, with their header in the message


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        is_signed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not (is_signed or path.startswith("/api/agent")):
            self.server.unsigned.append(path)
        parts = path.strip("/").split("/")
        hub = self.server
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            hub.private[name], hub.files[name] = wanted.get("visibility") == "private" or wanted.get("private"), {}
            self.send(200, {"url": f"{hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self.send(200, {"errors": [], "warnings": []})
        elif parts[:2] == ["api", "models"] and (name := "/".join(parts[2:4])) in hub.files:
            self.answer_about(name, parts[4:], body)
        elif parts[2:3] == ["resolve"] and (content := hub.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))):
            self.send(200, content, {"ETag": '"x"', "X-Repo-Commit": COMMIT})
        else:
            self.send(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def answer_about(self, name: str, what: list[str], body: bytes) -> None:
        files = self.server.files[name]
        if self.server.commits_left == 0:
            self.send(403, {"error": f"{'no ' * 30}{self.headers['Authorization']}"})
        elif what[:1] == ["preupload"]:
            sent = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in sent]
            self.send(200, {"files": modes})
        elif what[:1] == ["tree"]:
            self.send(200, [{"type": "file", "path": f, "size": len(files[f]), "oid": "x"} for f in files])
        elif what[:1] == ["commit"]:
            self.server.commits_left -= 1
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            self.send(200, {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            siblings = [{"rfilename": file} for file in files]
            self.send(200, {"id": name, "sha": COMMIT, "private": self.server.private[name], "siblings": siblings})

    def send(self, status: int, content: dict | list | bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def log_message(self, *args) -> None:
        pass


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
