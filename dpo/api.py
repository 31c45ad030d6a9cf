"""Training from Python, such as in a notebook: a run in a process of its own, and its results."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError, RunError
from dpo.redaction import redact
from dpo.settings.command_line import PARSER, check_line, parse, parse_key
from dpo.settings.places import store_rows
from dpo.system import host
from dpo.system.launching import end_with_parent
from dpo.system.plain_files import read_json, write_file, write_json
from dpo.system.run_directory import exiting_on_failure
from dpo.system.signals import end_on_stop_signals
from dpo.train import RUN_LOG
from dpo.train import run as run_plan

if TYPE_CHECKING:
    import pandas as pd

# files by which the child tells this process where it writes, and why it failed
PLACE_FILE = "place.txt"
FAILURE_FILE = "failure.json"


@dataclass(frozen=True, repr=False)
class Result:
    """What a run left in its directory; also of a run that still trains, or that a command line started."""

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row per update and evaluation; docs/metrics.md has the columns."""
        return self._read("metrics.jsonl")

    @property
    def samples(self) -> "pd.DataFrame":
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

    def _read(self, name: str) -> "pd.DataFrame":
        import pandas as pd

        return pd.DataFrame([json.loads(line) for line in _Tail(self.directory / name).read()])

    def __repr__(self) -> str:
        has_run = (self.directory / "metrics.jsonl").exists()  # false after dry_run=true
        return f"{self.directory}\n{self.verdict}" if has_run else str(self.directory)


def run(keys: Mapping | Sequence[str] | str = (), data: Any = None) -> Result:
    """Train as `dpo train` does, under a progress bar.

    `keys` are `{"loss": "dpo", "loss.beta": 0.1}`, or what a command line has, `"loss=dpo loss.beta=0.1"`. `data`, in
    place of the key `datasets`, is a path, or has the rows of docs/formats.md: a list of mappings, a `DataFrame` or a
    `datasets.Dataset`. Raises InputError for bad input, and RunError for a run that fails. If it is interrupted, the
    run first saves a checkpoint.
    """
    if isinstance(keys, Mapping):
        overrides = [f"{key}={_write(value)}" for key, value in keys.items()]
    else:
        overrides = shlex.split(keys) if isinstance(keys, str) else [*keys]
    given = {parse_key(override): override for override in overrides}
    if data is None and not given.keys() & {"datasets", "experiment"}:
        raise InputError("there is no data: pass data=ROWS, or set the key datasets")
    idle = given.keys() & {"datasets", "dataset_sources.rows", "dataset_sources.rows.path"}
    if data is not None and idle:
        raise InputError(f"data and {', '.join(idle)} exclude each other: use one")
    if isinstance(data, (str, Path)):
        overrides.append(f"datasets={_write([data])}")
    elif data is not None:
        if isinstance(data, getattr(sys.modules.get("pandas"), "DataFrame", ())):
            data = data.to_dict("records")
        place = given.get("local_dirs")
        stored = store_rows({"datasets": data, "local_dirs": place and PARSER.parse_override(place).value()})
        if "dataset_sources" not in stored:
            raise InputError(f"data is {redact(repr(data))[:100]}: pass rows, or one split of a Dataset")
        overrides += ["datasets=[rows]", f"dataset_sources.rows={_write(stored['dataset_sources']['rows'])}"]
    if not given.keys() & {"exp_name", "experiment"}:
        overrides.append("exp_name=notebook")
    return Result(_train(overrides))


def _write(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_write(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_write, value))}]"
    if isinstance(value, (str, Path)):  # quotes are escaped, and so are backslashes before them
        text = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value))
        return "'" + text.replace("'", r"\'") + "'"
    return str(value)


def _train(overrides: Sequence[str]) -> Path:
    """Train in a child process; show its messages, and its updates as a bar. Returns the run's directory."""
    with tempfile.TemporaryDirectory() as folder, tqdm(unit="update") as bar:
        output = _Tail(Path(folder, "output.txt"))
        place = Path(folder, PLACE_FILE)
        metrics = None
        start = f"from dpo.api import _start; _start({os.getpid()}, {folder!r})"
        with output.path.open("wb") as file:
            child = subprocess.Popen(
                **host.python_command("-c", start, *overrides),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it once, from here
            )
        try:
            has_ended = False
            while not has_ended:
                time.sleep(0.3)
                has_ended = child.poll() is not None  # what it wrote before is read below
                for line in output.read():
                    if not line.startswith("update "):
                        bar.write(line)
                if metrics is None and place.exists():
                    metrics = _Tail(Path(place.read_text(encoding="utf-8"), "metrics.jsonl"))
                if metrics is not None:
                    report = metrics.path.with_name("preflight.json")
                    if bar.total is None and report.exists():
                        bar.total = read_json(report)["updates"]
                    for line in metrics.read():
                        bar.update(json.loads(line)["updates"] - bar.n)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if Path(folder, FAILURE_FILE).exists():
            failure = read_json(Path(folder, FAILURE_FILE))
            raise (InputError if failure["is_input"] else RunError)(failure["message"])
    if child.returncode or metrics is None:  # a bug, or a stop signal
        raise RunError("\n".join(output.lines[-20:]))
    return metrics.path.parent


class _Tail:
    """The complete lines of a file that grows, and may not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[str] = []
        self._n_read = 0

    def read(self) -> list[str]:
        """The lines that are new."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(min(self._n_read, file.seek(0, os.SEEK_END)))  # a resumed run truncates its logs
            *lines, unfinished = file.read().split(b"\n")
            self._n_read = file.tell() - len(unfinished)
        new = [line.decode(errors="replace") for line in lines]
        self.lines += new
        return new


def _start(parent: int, folder: str) -> None:
    """Train in this process, which ends with its parent; tell by files in the folder where, or why it failed."""
    end_with_parent(parent, signal.SIGTERM)
    host.harden_stdio()
    end_on_stop_signals()
    host.set_allocators(os.environ)
    RUN_LOG.begin()
    with exiting_on_failure(RUN_LOG):
        try:
            plan, problems = check_line(parse(sys.argv[1:]))
            if problems:
                raise InputError("\n".join(problems))
            if plan is None:
                raise InputError("dpo.run trains one run: leave out options such as -m")
            write_file(Path(folder, PLACE_FILE), os.path.abspath(plan.run.local_run_dir).encode())
            run_plan(plan)
        except (InputError, RunError) as error:
            failure = {"is_input": isinstance(error, InputError), "message": redact(str(error))}
            write_json(Path(folder, FAILURE_FILE), failure)
            raise
