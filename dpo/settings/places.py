"""Where datasets are: local paths and Hub ids. Opens no file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpo.errors import InputError
from dpo.settings.choices import BUILT_IN, FIELDS, OPTIONAL_FIELDS
from dpo.settings.keys import REMOVED, Problem, are_names, is_text

SUFFIXES = (*(f"{kind}{packed}" for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")), ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPLIT_NAMES = {  # names that a split may have; the first one present is used
    "train": ("train", "train_prefs", "train_sft"),
    "test": ("test", "validation", "valid", "val", "dev", "eval", "test_prefs", "test_sft"),
}
SOURCE_FORMAT = "dataset_sources.NAME.format"  # a key that went
SAVED = "state.json"  # a file in every directory that `datasets.Dataset.save_to_disk` writes


def find_suffix(name: str) -> str:
    """Find which of SUFFIXES a file's name has; "" if none."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def seen_from(path: Path) -> str:
    """Return " in DIR" for a missing relative path, else ""."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


@dataclass(frozen=True)
class Source:
    """A local path or Hub id, and how its records are read."""

    path: str
    revision: str | None = None  # of a Hub id: a branch, tag or commit
    # maps fields of choices.FIELDS to the source's columns, and those without a column to None
    columns: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, value: Any) -> Source:
        """Parse the value of `dataset_sources.NAME`.

        It is a path or Hub id, or `{path: ..., revision: ..., columns: ...}`. Raises InputError for anything else.
        """
        key, source = f"dataset_sources.{name}", value if isinstance(value, Mapping) else {"path": value}
        if "format" in source:
            raise InputError(f"{key}.format was removed after {REMOVED[SOURCE_FORMAT]}")
        if not is_text(source.get("path")) or set(source) - {"path", "revision", "columns"}:
            raise InputError(
                f"{key}={value!s:.200} must be a directory, file or Hub id, or {{path: ..., revision: ..., columns: "
                f"...}}"
            )
        columns = source.get("columns") or {}
        if columns and name in BUILT_IN:
            raise InputError(f"{key}.columns: {name} is built in, with fixed columns: choose another name")
        are_mapped = isinstance(columns, Mapping) and all(
            own in FIELDS and (is_text(column) or (column is None and own in OPTIONAL_FIELDS))
            for own, column in columns.items()
        )
        if not are_mapped:
            raise InputError(
                f"{key}.columns={columns} must map some of {', '.join(FIELDS)} to the names of your columns, such as "
                f"{{prompt: question, chosen: best}}; {', '.join(OPTIONAL_FIELDS)} may be null"
            )
        return cls(source["path"], source.get("revision"), columns)

    @property
    def local(self) -> Path | None:
        """The local path; None if it may be a Hub id."""
        path = Path(os.path.expanduser(self.path))
        is_path = self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1 or find_suffix(self.path) != ""
        return path if is_path or path.exists() else None

    @property
    def has_no_splits(self) -> bool:
        """Return whether one file or saved dataset holds all records."""
        return self.local is not None and (self.local.is_file() or (self.local / SAVED).is_file())


def place_datasets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace paths and Hub ids in `datasets` by their last parts, and define these in `dataset_sources`.

    The path of the chat template becomes absolute, as a later command may run in another directory. Wrong values stay
    as they are.
    """
    placed = dict(values)
    template, datasets, given = (values[key] for key in ("chat_template", "datasets", "dataset_sources"))
    if is_text(template):
        placed["chat_template"] = os.path.abspath(os.path.expanduser(template))
    datasets = [datasets] if is_text(datasets) else datasets
    if not (are_names(datasets) and isinstance(given, Mapping)):
        return placed
    names, sources = [], dict(given)
    for value in datasets:
        name = value
        if not _is_placed(value, sources) and not _find_problem(value, sources):
            name = _make_name(value)
            settings = sources.get(name)  # the dataset's columns or revision, if set
            sources[name] = {**settings, "path": value} if isinstance(settings, Mapping) else value
        names.append(name)
    return placed | {"datasets": names, "dataset_sources": sources}


def find_dataset_problems(datasets: Sequence[str], sources: Any) -> list[Problem]:
    """List what is wrong with `datasets` and `dataset_sources`, whose paths are placed."""
    if not isinstance(sources, Mapping):
        sentence = f"dataset_sources={sources} must map names to paths or Hub ids, such as dataset_sources.hh=DIR"
        return [Problem("dataset_sources", sentence)]
    left = [value for value in datasets if not _is_placed(value, sources)]
    problems = [Problem("datasets", _find_problem(value, sources)) for value in left]
    for name, value in sources.items():
        try:
            if value is not None:
                Source.parse(name, value)
        except InputError as error:
            problems.append(Problem(f"dataset_sources.{name}", str(error)))
    return problems


def _is_placed(name: str, sources: Mapping[str, Any]) -> bool:
    """Return whether it is known where a dataset of this name is."""
    source = sources.get(name)
    return name in BUILT_IN or ("path" in source if isinstance(source, Mapping) else bool(source))


def _find_problem(value: str, sources: Mapping[str, Any]) -> str:
    """Explain why a value of `datasets` that names no source is no path or Hub id either; "" if it is one."""
    path, name = Source(value).local, _make_name(value)
    if path is None and not HUB_ID.fullmatch(value):
        return (
            f"datasets names {value!r}, which is none of {', '.join(BUILT_IN)}, and no file or directory: give its "
            f"path or Hub id, or say where it is with dataset_sources.{value}=DIR_FILE_OR_HUB_ID"
        )
    if path is not None and not path.exists():
        return f"datasets names {value}, and there is no such file or directory{seen_from(path)}"
    if _is_placed(name, sources):
        return f"datasets has {value}, and another one called {name}: give OTHER, and dataset_sources.OTHER={value}"
    return ""


def _make_name(path: str) -> str:
    """Make a dataset's name: `mine` for `/data/mine.csv.gz` and `somebody/mine`."""
    name = os.path.basename(os.path.abspath(os.path.expanduser(path)))
    return re.sub(r"[^\w-]", "_", name[: len(name) - len(find_suffix(name))])
