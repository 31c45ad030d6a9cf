"""Where the records of datasets are; rows in memory become files, so that processes and resumed runs find them too."""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, explaining_library, one_sentence, suggest
from dpo.plugins import DATASETS, READERS
from dpo.redaction import shorten
from dpo.settings.keys import are_names, compose_config, is_text
from dpo.system.plain_files import write_file
from dpo.system.run_directory import FACTS, get_local_dir

# Hub ids of the datasets that preference_datasets.py loads, all in HH's format; the demo has none
BUILT_IN = {
    "hh": "Anthropic/hh-rlhf",
    "shp": "stanfordnlp/SHP",
    "se": "HuggingFaceH4/stack-exchange-preferences",
    "demo": "",
}
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPLIT_NAMES = {  # names that a split may have; the first one present is used
    "train": ("train", "train_prefs", "train_sft"),
    "test": ("test", "validation", "valid", "val", "dev", "eval", "test_prefs", "test_sft"),
}
SAVED = "state.json"  # a file in every directory that `datasets.Dataset.save_to_disk` writes
ROWS_FOLDER = "dpo-rows"  # in the local directory

# A form of custom data is the fields of its records. FORMS has, by what a loss trains on, the forms from which its
# examples can be made. Online runs train on "prompts".
WHOLE_PAIR_FIELDS = ("chosen", "rejected")  # both begin with the prompt
PAIRS = (("prompt", "chosen", "rejected"), WHOLE_PAIR_FIELDS)
LISTS = (("prompt", "responses", "scores"), ("prompt", "responses"))
# The first form whose fields all have a column is used.
FORMS = {
    "pairs": (*PAIRS, *LISTS),
    "prompts": (*PAIRS, *LISTS, ("prompt",)),
    "targets": (*PAIRS, *LISTS, ("prompt", "completion"), ("messages",)),
    "labels": (("prompt", "completion", "label"), ("messages", "label"), *PAIRS),  # pairs with `unpair`
    "lists": (*LISTS, *PAIRS),
}
# Records of any form may have these fields; the config may say that such a field has no column.
SYSTEM = "system"  # a system turn
TOOLS = "tools"  # the tools that a chat may call
NUMBER_FIELDS = ("weight", "margin")
OPTIONAL_FIELDS = (SYSTEM, TOOLS, *NUMBER_FIELDS)
FIELDS = ("prompt", "chosen", "rejected", "responses", "scores", "completion", "messages", "label", *OPTIONAL_FIELDS)


class Problem(NamedTuple):
    key: str  # whose value is the problem; "" for a condition on several keys
    sentence: str


# --- paths and Hub ids ------------------------------------------------------------------------------------------------


def find_suffix(name: str) -> str:
    """Find which of SUFFIXES a file's name has; "" if none."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def find_local(name: str) -> Path | None:
    """Find the local path that a name stands for; None if it may be a Hub id."""
    path = Path(os.path.expanduser(name))
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or find_suffix(name)
    # A name in a directory of runs is a run's, even if it does not exist: it is not looked for on the Hub.
    is_run = "/" in name and os.path.isdir(path.parent) and any(path.parent.glob(f"*/{FACTS}"))
    return path if is_path or is_run or os.path.exists(path) else None


def check_exists(path: Path | None) -> None:
    """Raise InputError if nothing exists at a local path. None, a name that may be a Hub id, passes (`find_local`)."""
    if path is None or os.path.exists(path):
        return
    names = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise InputError(f"{path} does not exist{where}{suggest(path.name, names)}")


class Source(NamedTuple):
    path: str  # local, or a Hub id
    revision: str | None = None  # a branch, tag or commit on the Hub
    subset: str | None = None  # one of the data sets of a repository, which `datasets` calls a config
    columns: Mapping[str, str | None] = {}  # by fields of FIELDS; None: it has no column
    reader: str | None = None  # name of a plugin's reader, which makes rows from the source's

    @classmethod
    def parse(cls, name: str, value: Any) -> "Source":
        """Parse `dataset_sources.NAME`: a path or Hub id, or a mapping with it; InputError for anything else."""
        key = f"dataset_sources.{name}"
        options = value if isinstance(value, Mapping) else {"path": value}
        for option in options:
            if option not in cls._fields:
                raise InputError(f"{key} has the unknown key {option}: it may have {', '.join(cls._fields)}")
        if not is_text(options.get("path")):
            raise InputError(
                f"{key}={shorten(value)} must be a directory, file or Hub id, or a mapping with it as path"
            )
        source = cls(**options)
        columns = source.columns or {}
        are_valid = isinstance(columns, Mapping) and all(
            field in FIELDS and (is_text(column) or (column is None and field in OPTIONAL_FIELDS))
            for field, column in columns.items()
        )
        if not are_valid or (name in BUILT_IN and (columns or source.reader)):
            raise InputError(
                f"{key}.columns={columns} must map some of {', '.join(FIELDS)} to your columns, such as "
                f"{{prompt: question}}; {', '.join(OPTIONAL_FIELDS)} may be null; {', '.join(BUILT_IN)} take neither "
                f"columns nor reader"
            )
        if source.reader not in (None, *READERS):
            raise InputError(
                f"{key}.reader={source.reader} must be one that plugins add, of which there are {[*READERS]}"
            )
        subset = source.subset  # its name may be a number
        return source._replace(columns=columns, subset=subset and str(subset))

    @property
    def local(self) -> Path | None:
        """The local path; None if it may be a Hub id."""
        return find_local(self.path)

    @property
    def label(self) -> str:
        """What messages call the source; rows in memory, which became a file, are "data"."""
        return "data" if Path(self.path).parent.name == ROWS_FOLDER else self.path

    @property
    def has_no_splits(self) -> bool:
        """Whether one file or saved dataset holds all records."""
        path = self.local
        return path is not None and (not path.is_dir() or (path / SAVED).is_file())


def name_datasets(values: Mapping) -> dict:
    """Replace each path and Hub id in `datasets` by a name made of it, whose source in `dataset_sources` it becomes.

    Wrong values stay as they are. Returns a copy of `values`, the config.
    """
    datasets = values["datasets"]
    if is_text(datasets):
        datasets = [datasets]
    if not (are_names(datasets) and isinstance(values["dataset_sources"], Mapping)):
        return dict(values)
    names = []
    sources = dict(values["dataset_sources"])
    taken = {*BUILT_IN, *DATASETS}
    for name, source in sources.items():
        configured_path = source.get("path") if isinstance(source, Mapping) else source
        if configured_path:
            taken.add(name)
    for name in datasets:
        path = find_local(name)
        is_there = os.path.exists(path) if path else HUB_ID.fullmatch(name)
        last_part = os.path.basename(os.path.abspath(path or name))
        # Hydra must be able to read the name as a part of a key.
        new_name = re.sub(
            r"[^\w-]|^(?=[\d-])", "_", last_part[: len(last_part) - len(find_suffix(last_part))], flags=re.A
        )
        if is_there and taken.isdisjoint([name, new_name]):
            taken.add(new_name)
            # The config may have columns and other options for the new name.
            sources[new_name] = {**(sources.get(new_name) or {}), "path": name}
            name = new_name
        names.append(name)
    return {**values, "datasets": names, "dataset_sources": sources}


def find_source(name: str, sources: Mapping) -> Source:
    """Find where a dataset is. The path of the demo and of a plugin's dataset is "".

    Raises InputError for a wrong source, and for another name without one.
    """
    if sources.get(name) is not None:
        return Source.parse(name, sources[name])
    if name in BUILT_IN or name in DATASETS:
        return Source(BUILT_IN.get(name, ""))
    check_exists(find_local(name))
    raise InputError(
        f"datasets names {name}, which is neither one of {', '.join(BUILT_IN)} nor a file, directory or Hub id, or has "
        f"the name of another dataset: set dataset_sources.NAME=DIR_FILE_OR_HUB_ID"
    )


def find_dataset_problems(datasets: Sequence[str], sources: Any) -> Iterator[Problem]:
    if not isinstance(sources, Mapping):
        sentence = f"dataset_sources={sources} must map names to paths or Hub ids, such as dataset_sources.hh=DIR"
        yield Problem("dataset_sources", sentence)
        return
    if taken := BUILT_IN.keys() & DATASETS:
        yield Problem("plugins", f"plugins: the datasets {', '.join(taken)} have names of built-in ones: choose others")
    configured = [name for name, place in sources.items() if place is not None]
    for name in dict.fromkeys([*datasets, *configured]):
        try:
            find_source(name, sources)
        except InputError as error:
            yield Problem(f"dataset_sources.{name}" if name in configured else "datasets", str(error))


# --- rows in memory ---------------------------------------------------------------------------------------------------


def store_rows(config: Mapping) -> dict:
    """Replace rows (a list of mappings or a `datasets.Dataset`) in `datasets` or `dataset_sources` by paths of files.

    Raises InputError for rows that cannot be written.
    """
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    configured = values.get("dataset_sources")
    sources = dict(configured) if isinstance(configured, Mapping) else {}
    if _are_rows(values.get("datasets")):
        sources["rows"] = values["datasets"]
        values["datasets"] = ["rows"]
    local_dir = get_local_dir(values.get("local_dirs") or compose_config()["local_dirs"])
    for name, rows in sources.items():
        if _are_rows(rows):
            sources[name] = _store(rows, name, local_dir)
    if sources:
        values["dataset_sources"] = sources
    return values


def _are_rows(value: Any) -> bool:
    datasets = sys.modules.get("datasets")  # no value is a Dataset if this is not imported
    if datasets is not None and isinstance(value, datasets.Dataset):
        return True
    return isinstance(value, list) and any(isinstance(row, Mapping) for row in value)


def _simplify(value: Any) -> Any:
    """Turn a value that JSON cannot write into one that it can.

    Values of numpy and pandas become Python's; dates and the like become text. Raises TypeError if there is no text.
    """
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas' nulls
        return None
    if type(value).__str__ is object.__str__:  # str() would show an address in memory
        raise TypeError(f"{shorten(value)} has no text of its own")
    return str(value)


def _store(rows: Any, name: str, local_dir: str) -> str:
    """Write rows to a file that is named after its content; return its path."""
    problem = f"dataset_sources.{name}: its rows cannot be written"
    with explaining_library(lambda error: InputError(f"{problem}: {one_sentence(error)}")):
        if isinstance(rows, list):
            suffix = ".jsonl"
            content = "".join(json.dumps(dict(row), default=_simplify) + "\n" for row in rows).encode()
        else:  # a `datasets.Dataset`; Parquet keeps the names of its classes, and JSON would not
            suffix = ".parquet"
            buffer = io.BytesIO()
            rows.to_parquet(buffer)
            content = buffer.getvalue()
    file = Path(local_dir, ROWS_FOLDER, f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}").absolute()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)
    elif file.read_bytes() != content:
        raise InputError(f"dataset_sources.{name}: {file} does not hold the rows that were written: move it away")
    return str(file)
