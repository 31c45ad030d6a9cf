"""Report on one run or several: curves, and one page.

    dpo report RUN [RUN ...] [--out DIR]
    dpo report --serve RUN_OR_DIR [--port 8421]

RUN may still train or have crashed, or be a directory of runs, as a sweep makes it. `--serve` shows the page in a
browser of this machine, follows runs that train, and ends on Ctrl-C. Exit status: 0 written or served, 2 bad input.
"""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dpo.analysis.curves import draw_charts
from dpo.analysis.page import render, write_report
from dpo.analysis.runs import read_runs
from dpo.commands import command, make_parser
from dpo.errors import InputError
from dpo.settings.places import check_exists
from dpo.system.run_directory import REPORT, is_locked

LONGEST_SILENCE_SECS = 60  # a browser that sends or takes nothing for longer is not waited for


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or one of several runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/report; for several runs: report")
    parser.add_argument("--serve", action="store_true", help="show the page at 127.0.0.1, and follow runs that train")
    parser.add_argument("--port", type=int, default=8421, help="for --serve (default: 8421)")
    options = parser.parse_args(arguments)
    for path in options.runs:
        check_exists(path)
    if options.serve:
        serve(options.runs, options.port)
        return
    runs = list_runs(options.runs)
    default_out = runs[0] / REPORT.parent if len(runs) == 1 else REPORT.parent
    print(f"report: {write_report(runs, options.out or default_out)}")


def list_runs(paths: list[Path]) -> list[Path]:
    """List the directories of runs; a path that is not a run itself stands for the runs inside."""
    runs = []
    for path in paths:
        inside = sorted(file.parent for file in path.glob("*/config.yaml"))
        if not inside or (path / "metrics.jsonl").exists():  # a run itself, or a path that `read_runs` refuses
            inside = [path]
        runs += inside
    return runs


def serve(paths: list[Path], port: int) -> None:
    """Show the runs to browsers of this machine until Ctrl-C. Raises InputError if a path is not a run."""
    draw_charts(read_runs(list_runs(paths)))  # what cannot be shown is refused now, not at the first request
    drawing_lock = threading.Lock()  # matplotlib's styles are global

    class Handler(BaseHTTPRequestHandler):
        timeout = LONGEST_SILENCE_SECS

        def handle(self) -> None:
            with suppress(OSError):  # the browser closed the connection
                super().handle()

        def do_GET(self) -> None:
            runs = [run for run in list_runs(paths) if run.exists()]  # some may have been deleted meanwhile
            pages = {"/": ("all", runs)}  # (name, runs that are shown), by address
            for number, run in enumerate(runs):
                pages[f"/{number}"] = (run.name, [run])
            _, shown = pages.get(self.path, ("", []))
            status = 404
            body = b""
            # A page of another site could reach this server through a host name that resolves to 127.0.0.1.
            if self.headers.get("Host", "").lower().removesuffix(f":{port}") not in ("127.0.0.1", "localhost"):
                status = 403
            elif shown:
                links = [(name, address) for address, (name, _) in pages.items()]
                with suppress(InputError, OSError), drawing_lock:  # a run may be deleted while it is read
                    contents = read_runs(shown)
                    body = render(contents, draw_charts(contents), links)
                    status = 200
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            if any(map(is_locked, shown)):  # a run that trains has its directory locked
                self.send_header("Refresh", "5")  # seconds until the browser asks again
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"--port {port} cannot be served: {error}; choose another --port") from error
    port = server.server_port  # the system has chosen it for --port 0
    print(f"open http://127.0.0.1:{port} in a browser of this machine; Ctrl-C ends", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    print()
