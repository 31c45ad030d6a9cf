"""Training from Python, such as in a notebook: a run in a process of its own, and its results."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_result
from dpo.errors import InputError, RunError
from dpo.redaction import redact
from dpo.settings.command_line import PARSER, check_line, parse, parse_key, quote
from dpo.settings.places import store_rows
from dpo.system import host
from dpo.system.launching import end_with_parent
from dpo.system.plain_files import read_json, write_file
from dpo.system.run_directory import exiting_on_failure
from dpo.system.signals import end_on_stop_signals
from dpo.train import RUN_LOG
from dpo.train import run as run_plan

if TYPE_CHECKING:
    import pandas as pd

# Through these files the child tells this process where it writes, and why it failed.
RUN_DIR_FILE = "place.txt"
FAILURE_FILES = {"bad_input.txt": InputError, "failure.txt": RunError}


class Result:
    """The results of a run, read from its directory. The run may still train, or be one of the command line."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

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
        """The directory of the trained model, which `from_pretrained` of transformers loads."""
        return self.directory / "LATEST" / "hf"

    def _read(self, name: str) -> "pd.DataFrame":
        """Read a file of JSON lines, each of which becomes a row."""
        import pandas as pd

        # Only complete lines are read, as a run that trains may be writing the last one.
        return pd.DataFrame([json.loads(line) for line in _Tail(self.directory / name).read()])

    def __repr__(self) -> str:
        has_run = (self.directory / "metrics.jsonl").exists()  # false after dry_run=true
        return f"{self.directory}\n{self.verdict}" if has_run else str(self.directory)


def run(keys: Mapping | Sequence[str] | str = (), data: Any = None) -> Result:
    """Train as `dpo train` does, under a progress bar.

    `keys` is a mapping, `{"loss": "dpo", "loss.beta": 0.1}`, or the words of a command line as a list or a string,
    `"loss=dpo loss.beta=0.1"`. `data` replaces the key `datasets`. It is a path, or rows as in docs/formats.md: a list
    of mappings, a `DataFrame` or a `datasets.Dataset`. Returns when the run has ended. Raises InputError for bad input,
    and RunError if the run fails. On an interrupt, the run saves a checkpoint before it ends.
    """
    if isinstance(keys, Mapping):
        overrides = [f"{key}={_write_value(value)}" for key, value in keys.items()]
    else:
        overrides = shlex.split(keys) if isinstance(keys, str) else [*keys]
    by_key = {parse_key(override): override for override in overrides}
    if data is None and not by_key.keys() & {"datasets", "experiment"}:
        raise InputError("there is no data: pass data=ROWS, or set the key datasets")
    other_data = by_key.keys() & {"datasets", "dataset_sources.rows", "dataset_sources.rows.path"}
    if data is not None and other_data:
        raise InputError(f"data and {', '.join(other_data)} exclude each other: use one")
    if isinstance(data, (str, Path)):
        overrides.append(f"datasets={_write_value([data])}")
    elif data is not None:
        # pandas is not imported here: a caller who passes a DataFrame has imported it.
        if isinstance(data, getattr(sys.modules.get("pandas"), "DataFrame", ())):
            data = data.astype(object).where(data.notna(), None).to_dict("records")  # an empty cell is a null
        local_dirs = by_key.get("local_dirs")  # the whole override, such as "local_dirs=[runs]"
        stored = store_rows({"datasets": data, "local_dirs": local_dirs and PARSER.parse_override(local_dirs).value()})
        if "dataset_sources" not in stored:  # `store_rows` did not recognize `data` as rows
            raise InputError(f"data is {redact(repr(data))[:100]}: pass rows, or one split of a Dataset")
        overrides += ["datasets=[rows]", f"dataset_sources.rows={_write_value(stored['dataset_sources']['rows'])}"]
    if not by_key.keys() & {"exp_name", "experiment"}:
        overrides.append("exp_name=notebook")
    return Result(_train_in_child(overrides))


def _write_value(value: Any) -> str:
    """Write a value in the grammar of Hydra's overrides, from which the child's parser reads the same value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_write_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_write_value, value))}]"
    return quote(str(value)) if isinstance(value, (str, Path)) else str(value)


def _train_in_child(overrides: Sequence[str]) -> Path:
    """Train in a child process, and return the run's directory.

    Meanwhile the child's messages are shown, and its updates as a progress bar. On an exception here, such as an
    interrupt, the child is told to stop, and waited for.
    """
    with tempfile.TemporaryDirectory() as folder, tqdm(unit="update") as bar:
        output = _Tail(Path(folder, "output.txt"))
        run_dir_file = Path(folder, RUN_DIR_FILE)  # exists once the child knows the run's directory
        metrics = None  # the run's metrics.jsonl, once its directory is known
        code = f"from dpo.api import _run_child; _run_child({os.getpid()}, {folder!r})"
        with output.path.open("wb") as file:
            child = subprocess.Popen(
                **host.python_process_options("-c", code, *overrides),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it once, from here
            )
        try:
            has_ended = False
            while not has_ended:
                time.sleep(0.3)
                has_ended = child.poll() is not None  # asked before its output is read, so that none is missed
                for line in output.read():
                    if not line.startswith("update "):  # the bar shows these
                        bar.write(line)
                if metrics is None and run_dir_file.exists():
                    metrics = _Tail(Path(run_dir_file.read_text(encoding="utf-8"), "metrics.jsonl"))
                if metrics is not None:
                    preflight = metrics.path.with_name("preflight.json")
                    if bar.total is None and preflight.exists():  # written once the data is loaded
                        bar.total = read_json(preflight)["updates"]
                    for line in metrics.read():
                        bar.update(json.loads(line)["updates"] - bar.n)  # `update` takes the increase
        except BaseException:
            child.terminate()
            child.wait()
            raise
        for name, kind in FAILURE_FILES.items():
            failure = Path(folder, name)
            if failure.exists():
                raise kind(failure.read_text(encoding="utf-8"))
        if child.returncode or metrics is None:  # a bug, or a stop signal
            raise RunError("\n".join(output.path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]))
    return metrics.path.parent


class _Tail:
    """Reads the complete lines of a file that grows, and that may not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self._end = 0  # byte where the last complete line ends

    def read(self) -> list[str]:
        """Return the complete lines that were added since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(min(self._end, file.seek(0, os.SEEK_END)))  # a resumed run truncates its logs
            *lines, unfinished = file.read().split(b"\n")
            self._end = file.tell() - len(unfinished)
        return [line.decode(errors="replace") for line in lines]


def _run_child(parent: int, folder: str) -> None:
    """Train in this process, the child that `_train_in_child` starts, by the overrides on its command line.

    The child stops when its parent, whose process id is `parent`, ends. Files in `folder` tell the parent the run's
    directory, and why the run failed if it did.
    """
    end_with_parent(parent, signal.SIGTERM)
    host.harden_stdio()
    end_on_stop_signals()
    host.set_allocators(os.environ)
    RUN_LOG.begin()
    with exiting_on_failure(RUN_LOG):
        try:
            plan = check_line(parse(sys.argv[1:]))
            if plan is None:
                raise InputError("dpo.run trains one run: leave out options such as -m")
            write_file(Path(folder, RUN_DIR_FILE), os.path.abspath(plan.run.local_run_dir).encode())
            run_plan(plan)
        except (InputError, RunError) as error:
            name = "bad_input.txt" if isinstance(error, InputError) else "failure.txt"
            write_file(Path(folder, name), redact(str(error)).encode(errors="backslashreplace"))
            raise
