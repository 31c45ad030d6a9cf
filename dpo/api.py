"""Training from Python, such as in a notebook: a run in a process of its own, and its results."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from tqdm.auto import tqdm

from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError, RunError
from dpo.settings.command_line import PARSER, parse_key
from dpo.settings.keys import PACKAGE_DIR, load_defaults
from dpo.settings.places import store_rows
from dpo.system.plain_files import read_json
from dpo.system.run_directory import get_local_run_dir

if TYPE_CHECKING:
    import pandas as pd

POLL_SECS = 0.3
START = "from dpo.api import _start; _start({})"  # in the child; the number is that of its parent


@dataclass(frozen=True)
class Result:
    """What a run left in its directory; also of a run that still trains, or that a command line started."""

    directory: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per update and evaluation; docs/metrics.md has the columns."""
        return self._read("metrics.jsonl")

    @property
    def samples(self) -> pd.DataFrame:
        """A row per prompt and evaluation, with the texts of policy and reference."""
        return self._read("samples.jsonl")

    @property
    def verdict(self) -> str:
        """Whether the model changed, and whether it is better on held-out data."""
        return describe_result(read_run(self.directory))

    @property
    def model(self) -> Path:
        """The trained model, which `from_pretrained` of transformers loads."""
        return self.directory / "LATEST" / "hf"

    def _read(self, name: str) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([json.loads(line) for line in _Tail(self.directory / name).read()])

    def __repr__(self) -> str:
        return f"{self.directory}\n{self.verdict}"


def run(keys: Mapping[str, Any] | Sequence[str] | str = (), data: Any = None) -> Result:
    """Train as `dpo train` does, under a progress bar.

    `keys` are `{"loss": "dpo", "loss.beta": 0.1}`, or what a command line has, `"loss=dpo loss.beta=0.1"`. `data`, in
    place of the key `datasets`, has the rows of docs/formats.md: a list of mappings or a `datasets.Dataset`. Raises
    InputError for bad input, and RunError for a run that fails. If it is interrupted, the run first saves a checkpoint.
    """
    if isinstance(keys, Mapping):
        overrides = [f"{key}={_write(value)}" for key, value in keys.items()]
    else:
        overrides = shlex.split(keys) if isinstance(keys, str) else [*keys]
    given: dict[str, Any] = {"exp_name": "notebook", "local_dirs": load_defaults()["local_dirs"]}
    for override in overrides:
        with suppress(HydraException):  # the run says what is wrong with it
            given[parse_key(override)] = PARSER.parse_override(override).value()
    if data is not None:
        stored = store_rows({"datasets": data, "local_dirs": given["local_dirs"]})
        if "dataset_sources" not in stored:
            raise InputError(f"data is a {type(data).__name__}: give a list of mappings, or one split of a Dataset")
        overrides += ["datasets=[rows]", f"dataset_sources.rows={_write(stored['dataset_sources']['rows'])}"]
    run_dir = given.get("local_run_dir") or get_local_run_dir(given["exp_name"], given["local_dirs"])
    directory = Path(run_dir).expanduser().absolute()
    _train([f"exp_name={_write(given['exp_name'])}", *overrides, f"local_run_dir={_write(directory)}"], directory)
    return Result(directory)


def _write(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_write(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_write, value))}]"
    if isinstance(value, (str, Path)):  # a quote is escaped, and so are backslashes before it
        return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + "\\'" * bool(found[2]), str(value)) + "'"
    return str(value)


def _train(overrides: Sequence[str], directory: Path) -> None:
    """Train in a child process; show its messages, and its updates as a bar."""
    paths = [str(PACKAGE_DIR.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder, tqdm(unit="update") as bar:
        output, metrics = _Tail(Path(folder, "output.txt")), _Tail(directory / "metrics.jsonl")
        with output.path.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-c", START.format(os.getpid()), *overrides],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it once, from here
            )
        try:
            while True:
                has_ended = child.poll() is not None  # what it wrote before is read below
                if bar.total is None and (directory / "preflight.json").exists():
                    bar.total = read_json(directory / "preflight.json")["updates"]
                for line in output.read():
                    if not line.startswith("update "):
                        bar.write(line)
                for line in metrics.read():
                    bar.update(json.loads(line)["updates"] - bar.n)
                if has_ended:
                    break
                time.sleep(POLL_SECS)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode:
        message = re.split("bad configuration:\n|error: ", "\n".join(output.lines[-20:]))[-1].strip()
        raise (InputError if child.returncode == 2 else RunError)(message)


class _Tail:
    """The complete lines of a file that grows, and may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self._unfinished, self._n_read = path, [], b"", 0

    def read(self) -> list[str]:
        """Those that are new."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(min(self._n_read, file.seek(0, os.SEEK_END)))  # a resumed run truncates its logs
            content = file.read()
            self._n_read = file.tell()
        *lines, self._unfinished = (self._unfinished + content).split(b"\n")
        self.lines += (new := [line.decode(errors="replace") for line in lines])
        return new


def _start(parent: int) -> None:
    """Train in this process, which ends with its parent."""
    from dpo.commands import main
    from dpo.system.launching import end_with_parent

    end_with_parent(parent, signal.SIGTERM)
    main(["train", *sys.argv[1:]])
