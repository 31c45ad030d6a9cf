"""The directory of a run, and other places on this machine."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import yaml

from dpo.errors import InputError, RunError, explaining
from dpo.system.plain_files import check_link, check_writable, replacing
from dpo.system.redaction import redact

LOCK = ".lock"
ORIGIN = ".continues"  # in a run that continues another one: the checksum of the other's manifest
STREAM, PARQUET = "ledger.arrows", "ledger.parquet"  # with ledger=true
REPORT = Path("report", "report.html")  # with report=true
SWEEP = "sweep.json"  # in the directory of a sweep, which contains those of its jobs
FILES = (LOCK, "config.yaml", "env.json", "preflight.json", ORIGIN)
PACKAGES = "torch transformers datasets tokenizers hydra-core omegaconf wandb numpy accelerate"


def get_local_dir(prefixes: Sequence[str]) -> str:
    """`PREFIX/USER` for the first prefix that exists, else for the last.

    Creates nothing, unlike the reference implementation.
    """
    prefix = next((p for p in prefixes if os.path.exists(p)), prefixes[-1])
    return os.path.join(prefix, getpass.getuser())


def get_cache_dir(local_dirs: Sequence[str]) -> str | None:
    """The cache directory of models and datasets: `LOCAL_DIR/USER`.

    None, the libraries' default, if the environment sets `XDG_CACHE_HOME` or `HF_HOME`.
    """
    return None if {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys() else get_local_dir(local_dirs)


def get_local_run_dir(exp_name: str, local_dirs: Sequence[str]) -> str:
    """`LOCAL_DIR/EXP_NAME_TIMESTAMP`. Creates nothing.

    The time is to the microsecond, so that the jobs of a quick sweep get different directories.
    """
    return os.path.join(get_local_dir(local_dirs), f"{exp_name}_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")


def check_free(path: str | Path) -> None:
    """Raises InputError if a directory holds a run or is not writable."""
    run_dir = Path(path)
    held = [name for name in ("metrics.jsonl", "LATEST") if os.path.lexists(run_dir / name)]
    if held:
        raise InputError(
            f"local_run_dir={path} already holds a run ({', '.join(held)}): choose another directory, move this one "
            f"away, or continue the run with resume=auto"
        )
    with _explaining(path):
        path_and_parents = (run_dir.absolute(), *run_dir.absolute().parents)
        nearest = next(path for path in path_and_parents if os.path.lexists(path))  # where a run would start to create
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def create_run_dir(path: str, *, logs: Iterable[str] = (), continued: bool = False) -> Path:
    """Create a run's directory; the run will append to the files `logs`.

    Raises InputError if it already holds a run, unless that run is `continued`, or if something other than a file is in
    the place of a file of the run.
    """
    if not continued:
        check_free(path)
    run_dir = Path(path)
    with _explaining(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, *logs):
            check_writable(run_dir / name)
        for name in ("LATEST", "BEST"):
            check_link(run_dir / name)
    return run_dir


def write_record(run_dir: Path, config: dict[str, Any], *, processes: int = 1) -> None:
    """Write `config.yaml`, and `env.json` with facts for repeating the run."""
    import torch  # here, as the report needs this module without torch

    commit = _git("rev-parse", "HEAD")
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_find_versions()),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "processes": processes,
        "started": now(),
        "git_commit": commit or None,
        "git_uncommitted_changes": bool(_git("status", "--porcelain")) if commit else None,
    }
    with _explaining(run_dir):
        (run_dir / "config.yaml").write_text(yaml.safe_dump(redact(config), sort_keys=False), encoding="utf-8")
        (run_dir / "env.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _find_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES.split():  # these alone, as listing all installed packages takes a while
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _git(*arguments: str) -> str:
    """Git's output for our own checkout, if there is one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def add_to_record(run_dir: Path, **more: Any) -> None:
    """Add facts to `env.json`, unless it is missing or damaged."""
    path = run_dir / "env.json"
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(facts, dict):
        with replacing(path) as beside:
            beside.write_text(json.dumps({**facts, **more}, indent=2) + "\n", encoding="utf-8")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def lock_run_dir(run_dir: Path) -> IO:
    """Lock the directory while the returned file is open.

    The system releases the lock when this process ends. Raises InputError if another process holds it.
    """
    with _explaining(run_dir):
        file = (run_dir / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError(f"local_run_dir={run_dir} is locked by a running process: stop it first") from error
    except OSError as error:  # some network file systems have no locks
        print(f"warning: {run_dir} cannot be locked ({error}): do not start a second run there")
    return file


def is_locked(run_dir: Path) -> bool:
    """Return whether a running process is known to hold the directory's lock."""
    try:
        with (run_dir / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def explaining_full_disk(run_dir: str | Path) -> Iterator[None]:
    """Inside, a full disk raises RunError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunError(f"{run_dir} cannot be written ({error}): free some space; checkpoints are intact") from error


def _explaining(path: str | Path) -> AbstractContextManager[None]:
    advice = "choose another, or set local_dirs, where it is created"
    return explaining(OSError, lambda why: InputError(f"local_run_dir={path} cannot be written: {why}; {advice}"))
