"""The part of a W&B server that a run needs."""

import http.server
import json
import threading


class WandbServer:
    """A server on a free port of this machine, until `close`.

    `requests` are the paths that were asked for, `bodies` the JSON that came with them.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.bodies: list[dict] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_POST(self) -> None:
                outer.requests.append(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = {}
                if self.path.endswith(("/graphql", "/file_stream")):
                    outer.bodies.append(json.loads(body))
                if self.path.endswith("/graphql"):
                    answer = outer._answer(outer.bodies[-1])
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_GET = do_POST

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: dict) -> dict:
        query, variables = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "entity"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": "run", "config": "{}", "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        viewer = {"id": "u", "entity": "entity", "username": "user", "flags": "{}", "teams": {"edges": []}}
        return {"data": {"viewer": viewer} if "iewer" in query else {}}
