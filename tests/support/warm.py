"""Python processes that start in no time, forked from one that has imported what a run needs.

Their workers are forked too. Forked processes cannot show how an interpreter starts: a test of imports, of signals
before imports or of spawned workers needs real processes.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch

from dpo.system import launching

ROOT = Path(__file__).resolve().parents[2]
STACKS = signal.SIGRTMIN  # a forked process that gets it writes the stacks of its threads to its standard error
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "train",
        "trainers",
        "dpo.checkpoint.resume",
        "dpo.training.memory",
        "dpo.models.answers",
        "datasets",
        "transformers.models.llama",
        "hydra",
        "pytest",
        "torch.distributed.fsdp",
        "peft",
    ]
)


class Python:
    """`python ARGUMENTS` without a terminal, with methods of subprocess.Popen.

    `session`: the process leads a session, as a command in a terminal does. `merge`: errors go where output goes.
    `fault`: a function that is called in the process first, or alone if there are no arguments.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        cwd: Path = ROOT,
        session: bool = False,
        merge: bool = False,
        fault: Callable[[], None] | None = None,
    ) -> None:
        self.args = ["python", *arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name, "out")
        self._err = self._out if merge else Path(self._folder.name, "err")
        for path in (self._out, self._err):
            path.touch()
        self.stdout: TextIO = self._out.open()
        place = (cwd, dict(environment), self._out, self._err, session)
        self._process = CONTEXT.Process(target=_main, args=(arguments, fault, *place))
        self._process.start()
        self.pid: int = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    @property
    def text(self) -> str:
        """The output so far."""
        return self._out.read_text(errors="replace")

    def wait(self, timeout: float = 120) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self._print_stacks()
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout, self._out.read_bytes(), self._err.read_bytes())
        return self.returncode

    def _print_stacks(self) -> None:
        """Print what the process and its descendants have written, and where each of their threads is."""
        pids = [self.pid]
        for pid in pids:
            with contextlib.suppress(OSError):  # it may have ended
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                os.kill(pid, STACKS)
            time.sleep(0.5)  # so that no two write at once
        print(self.text, self._err.read_text(errors="replace"), sep="\n", file=sys.stderr)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return all output and all errors."""
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def run(*arguments: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`; return its output and exit status."""
    process = Python(*arguments, **options)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(
    worker: Callable, world_size: int, *args: Any, constants: Mapping[str, Any] | None = None, **options
) -> None:
    """`dpo.system.launching.launch` in a process of its own, with forked workers.

    `constants` of `launching` are changed in that process. Raises what the original raises.
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    act = partial(_launch, sender, dict(constants or {}), (worker, world_size, *args), options)
    process = Python(environment=os.environ, cwd=Path.cwd(), fault=act)
    sender.close()
    out, err = process.communicate(timeout=200)
    sys.stdout.write(out)
    sys.stderr.write(err)
    error = receiver.recv() if receiver.poll() else RuntimeError(f"the launcher ended with status {process.returncode}")
    if error is not None:
        raise error


# --- in the forked process -----------------------------------------------------------------------------------------


def _main(
    arguments: tuple[str, ...],
    fault: Callable[[], None] | None,
    cwd: Path,
    environment: dict[str, str],
    out: Path,
    err: Path,
    session: bool,
) -> None:
    if session:
        os.setsid()
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, appending), (err, appending))):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    faulthandler.register(STACKS)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # torch's thread pool does not survive a fork; the first two threads to ask for a new pool at once would race
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run with SIGINT ignored
    multiprocessing.process._parent_process = None  # this process is nobody's worker
    # CUDA works in no forked process
    launching.START_METHOD = "spawn" if torch.cuda.is_available() else "fork"
    status: object = 0
    try:
        if fault is not None:
            fault()
        if arguments:
            _interpret(*arguments)
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # waits for threads, as an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _interpret(kind: str, *rest: str) -> None:
    """Run a script, or what follows -m or -c."""
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if kind == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = type(sys)("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _launch(result: Connection, constants: dict[str, Any], arguments: tuple, options: dict) -> None:
    for name, value in constants.items():
        setattr(launching, name, value)
    try:
        launching.launch(*arguments, **options)
        result.send(None)
    except BaseException as error:  # also Stopped
        result.send(error)
