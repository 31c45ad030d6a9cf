"""A run's directory: its files, lock, record of facts, and log of what rank 0 prints."""

import fcntl
import getpass
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import IO, Any

import yaml

from dpo import __version__
from dpo.errors import InputError, RunError, WarningLine, explaining, find_advice
from dpo.redaction import redact
from dpo.system.host import is_installed
from dpo.system.plain_files import list_wrong_types, read_json, replacing, write_json
from dpo.system.signals import Stopped

# A run has these files.
LOCK = ".lock"
REPORT = Path("report", "report.html")  # with report=true
LOCK_SECS = 1.0  # how long to wait for the lock, which a report that reads the run holds for a moment
HOLDER = "process"  # the first word of the lock, before the id of the process that holds it
LOG_FILE = "log.txt"
WARNINGS_FILE = "warnings.jsonl"  # the warnings among the lines of the log
FACTS = "env.json"  # the facts of a run
FIRST_EXAMPLES = "examples.jsonl"  # the first that are trained on
PROBLEMS = "data_problems.jsonl"  # records that have problems
FILES = (LOCK, "config.yaml", FACTS, "preflight.json", FIRST_EXAMPLES, PROBLEMS, LOG_FILE, WARNINGS_FILE)
OTHER_OUTPUTS = ("BEST", ".step-*", "nonfinite-*", "report", "tensorboard")  # what else it writes, besides logs
# What is read from env.json.
FACT_TYPES = {
    "run": str,
    "seconds_before": (float, NoneType),
    "microbatch_size": (int, NoneType),
    "data_size": (int, NoneType),  # the number of processes that saw different examples when the run began
    "sampled_at": (int, NoneType),  # number of examples after which the last samples were drawn
}
# `env.json` and `dpo doctor` have their versions.
PACKAGES = "torch transformers datasets tokenizers hydra-core omegaconf wandb numpy accelerate peft bitsandbytes"


def get_local_dir(prefixes: Sequence[str]) -> str:
    """Return `PREFIX/USER` for the first prefix that exists, or for the last if none does."""
    prefix = next(filter(os.path.exists, prefixes), prefixes[-1])
    user = str(os.getuid())  # in a container, it may have no name
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return os.path.join(prefix, user)


def get_local_run_dir(exp_name: str, local_dirs: Sequence[str]) -> str:
    """Return a new run's directory, whose name has the time."""
    # The time is to the microsecond, so that the jobs of a quick sweep get different directories.
    return os.path.join(get_local_dir(local_dirs), f"{exp_name}_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")


def check_holds_no_run(run_dir: Path, logs: Iterable[str] = ()) -> None:
    """Raise InputError if a new run would overwrite files of a run that began to train, or of someone else.

    `logs` are the names of further files that the new run writes.
    """
    with _explaining_errors(run_dir):
        names = sorted(os.listdir(run_dir)) if run_dir.exists() else []
    patterns = ("metrics.jsonl", "LATEST", "step-*")  # files of a run that began to train
    if not read_run_facts(run_dir):  # not known to be a run's, so files of these names may be someone else's
        patterns += (*FILES, *OTHER_OUTPUTS, *logs)
    lock = run_dir / LOCK
    if lock.is_file() and HOLDER.encode().startswith(lock.read_bytes()[: len(HOLDER)]):
        names.remove(LOCK)  # a run that was killed while it started has left it, maybe with only a part of its text
    if conflicts := [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]:
        raise InputError(
            f"local_run_dir={run_dir} already holds a run ({', '.join(conflicts)}), or other files of these names: "
            "choose another directory, move them away, or continue with resume=auto"
        )


def lock_run_dir(run_dir: Path) -> IO:
    """Create the directory if need be, and lock it while the returned file is open.

    Raises InputError if another process holds the lock for longer than LOCK_SECS, unless it is of an earlier attempt of
    the same torchrun job: a machine that the job has lost may keep its lock.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # what torchrun calls a job without --rdzv-id
    job_note = "" if job == "none" else f", in job {job} of torchrun"
    lock = run_dir / LOCK
    deadline = time.monotonic() + LOCK_SECS
    while True:
        with _explaining_errors(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            file = lock.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samefile(lock, file.fileno()):
                break
        except FileNotFoundError:  # a refused run has removed it
            pass
        except BlockingIOError as error:
            with file:
                file.seek(0)
                holder = file.read(1000).strip()
            if time.monotonic() < deadline:
                time.sleep(0.02)
            elif job_note and holder.endswith(job_note):
                print(f"the lock of {run_dir} is taken from {holder}, which its job has given up")
                lock.unlink()
            else:
                raise InputError(
                    f"local_run_dir={run_dir} is locked by {holder}: stop it first, or choose another directory"
                ) from error
        except OSError as error:  # some network file systems have no locks
            print(WarningLine(f"{run_dir} cannot be locked ({error}): do not start a second run there"))
            return file
        file.close()  # the next round opens the file that is there then
    file.truncate(0)
    print(f"{HOLDER} {os.getpid()} on {socket.gethostname()}{job_note}", file=file, flush=True)
    return file


def is_locked(run_dir: Path) -> bool:
    """Whether a process that writes the run holds its lock; False if that cannot be known."""
    try:
        with (run_dir / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except OSError as error:
        return isinstance(error, BlockingIOError)  # other errors: there is no such file, or there are no locks
    return False


def _explaining_errors(run_dir: Path) -> AbstractContextManager:
    """Replace errors of the file system by an InputError that names the run's directory."""
    return explaining(
        OSError,
        lambda why: InputError(
            f"local_run_dir={run_dir} cannot be written: {why}; choose another, or other local_dirs"
        ),
    )


# --- facts about the run ---------------------------------------------------------------------------------------------


def write_run_facts(run_dir: Path, config: dict, *, former: tuple[str, float] | None = None, **more: Any) -> None:
    """Write `config.yaml`, without secrets, and the facts of a run that starts or is resumed, `env.json`.

    `former` has the id of the run that is continued, and the time of its checkpoint in seconds since 1970. `more` has
    further facts.
    """
    import torch  # not at the top, as the report imports this file without torch

    run = secrets.token_hex(8)
    seconds_before = 0.0  # how long the run had taken at the checkpoint from which it continues; None: unknown
    if former:
        run, saved_at = former
        old_facts = read_run_facts(run_dir)  # empty if the run continues another's checkpoint
        seconds_before = old_facts.get("seconds_before")
        if seconds_before is not None:
            # The time from the former start to the checkpoint is added.
            seconds_before += max(0.0, saved_at - datetime.fromisoformat(old_facts["started"]).timestamp())
    commit = ""
    checkout = Path(__file__).parents[2]
    # This prints the commit, and -dirty if files have changed; untracked files, such as runs of the user, do not count.
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if (checkout / "pyproject.toml").exists():  # an installed package may be inside someone else's repository
        with suppress(OSError):  # there is no git
            commit = subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()
    facts = {
        "run": run,
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES.split() if is_installed(name)},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        **more,
        "started": timestamp(),
        "seconds_before": seconds_before,
        "git_commit": commit.removesuffix("-dirty") or None,
        "git_uncommitted_changes": commit.endswith("-dirty") if commit else None,
    }
    with _explaining_errors(run_dir):
        _write_facts(run_dir, facts)  # first, as they mark the directory as this run's
        (run_dir / "config.yaml").write_text(yaml.safe_dump(redact(config), sort_keys=False), encoding="utf-8")


def read_run_facts(run_dir: Path) -> dict:
    """Return the facts in `env.json`; {} unless `write_run_facts` wrote them."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        facts = read_json(run_dir / FACTS)
        datetime.fromisoformat(facts["started"])
        if {"packages", "git_commit"} <= facts.keys() and not list_wrong_types(facts, FACT_TYPES):
            return facts
    return {}


def add_run_facts(run_dir: Path, **new_facts: Any) -> None:
    """Add facts to `env.json`, unless it is missing or damaged."""
    if facts := read_run_facts(run_dir):
        _write_facts(run_dir, {**facts, **new_facts})


def _write_facts(run_dir: Path, facts: dict) -> None:
    with replacing(run_dir / FACTS) as temporary:
        write_json(temporary, facts)


def timestamp() -> str:
    """Return the time now in UTC, as ISO 8601 writes it to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- log.txt ---------------------------------------------------------------------------------------------------------


class RunLog:
    """Copies finished lines of Python's standard streams to `log.txt`, and warnings also to `warnings.jsonl`.

    Progress bars are copied only in their last state. Until `open`, the lines are kept in memory, as a refused run
    leaves no directory.
    """

    _run_dir: Path | None = None  # once it is open
    _unfinished = ""

    def __init__(self):
        self._pending = defaultdict(str)  # lines that are not written yet, by file name

    def begin(self, pending: Mapping[str, str] = {}) -> None:
        """Begin to copy; lines `pending` in the parent process's log (`take_pending`) come first."""
        self.close()
        self._pending = defaultdict(str, {WARNINGS_FILE: "", **pending})  # the file exists even if nothing warns
        self._unfinished = ""
        sys.stdout = RecordedStream(sys.stdout, self)
        sys.stderr = RecordedStream(sys.stderr, self)

    def open(self, run_dir: str | Path) -> None:
        """Write pending lines to the run's directory, and from now on each line as soon as it is finished."""
        self._run_dir = Path(run_dir)
        self.add("")  # writes the pending lines

    def close(self) -> None:
        """End copying, and put back the streams from before `begin`."""
        self._run_dir = None
        sys.stdout = getattr(sys.stdout, "original", sys.stdout)
        sys.stderr = getattr(sys.stderr, "original", sys.stderr)

    def take_pending(self) -> dict[str, str]:
        """Return the lines that are not written yet, by file name, and forget them; for `begin` in a child process."""
        pending = self._pending
        self._pending = defaultdict(str)
        return pending

    def add(self, text: str) -> None:
        """Add text, which may end within a line. If the log is open, write all finished lines.

        A text that is a WarningLine is also kept for `warnings.jsonl`.
        """
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            # A bar draws itself again after a carriage return; only its last state is kept.
            self._pending[LOG_FILE] += redact(line.rstrip("\r").rpartition("\r")[2]) + "\n"
        if isinstance(text, WarningLine):
            self._pending[WARNINGS_FILE] += json.dumps({"warning": redact(text.message)}) + "\n"
        if self._run_dir:
            for name, content in self.take_pending().items():
                # A full disk must not end a run.
                with suppress(OSError), (self._run_dir / name).open("ab", buffering=0) as file:
                    file.write(content.encode("utf-8", "backslashreplace"))  # UTF-8 has no lone surrogates


@dataclass
class RecordedStream:
    """A stream that writes texts to the stream `original` and to a log. Our progress bars use `original` alone."""

    original: Any
    log: RunLog

    def write(self, text: str) -> int:
        self.log.add(text)
        return self.original.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@contextmanager
def exiting_on_failure(log: RunLog) -> Iterator:
    """Print one sentence on an error that is not a bug, or on a stop signal, and raise SystemExit with its status.

    Any other error passes, after advice on it is printed if there is some. With HYDRA_FULL_ERROR=1, all errors pass.
    """
    try:
        yield
    except (InputError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if error.__cause__:  # the traceback of the library's error is for the log alone
            log.add(traceback.format_exc())
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if advice := find_advice(error):
            print(f"error: {advice}", file=sys.stderr)
        raise
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C changes nothing
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
