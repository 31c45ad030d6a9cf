"""Where datasets are: local paths and Hub ids. Opens no file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpo.errors import InputError
from dpo.settings.choices import FIELDS, OPTIONAL_FIELDS, join_with_or
from dpo.settings.files import load_defaults
from dpo.settings.keys import Problem, is_text

SUFFIXES = (*(f"{kind}{packed}" for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")), ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPLIT_NAMES = {  # names that a split may have; the first one present is used
    "train": ("train", "train_prefs", "train_sft"),
    "test": ("test", "validation", "valid", "val", "dev", "eval", "test_prefs", "test_sft"),
}
SAVED = "state.json"  # a file in every directory that `datasets.Dataset.save_to_disk` writes


def find_suffix(name: str) -> str:
    """Find which of SUFFIXES a file's name has; "" if none."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


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
        if isinstance(value, str) and value:
            return cls(value)
        key = f"dataset_sources.{name}"
        keys = {"path", "revision", "columns", "format"}  # the config of an earlier run may have a format
        if not isinstance(value, Mapping) or not value.get("path") or set(value) - keys:
            raise InputError(
                f"{key}={value!s:.200} must be a directory, file or Hub id, or {{path: ..., revision: ..., columns: "
                f"...}}"
            )
        columns = value.get("columns") or {}
        if columns and name in list_built_in():
            raise InputError(
                f"{key}.columns={columns}: the built-in dataset {name} has fixed columns; choose another name for your "
                f"data"
            )
        if not _are_columns(columns):
            raise InputError(
                f"{key}.columns={columns} must map some of {', '.join(FIELDS)} to the names of your columns, such as "
                f"{{prompt: question, chosen: best}}, or {join_with_or(OPTIONAL_FIELDS)} to null for none"
            )
        return cls(str(value["path"]), value.get("revision"), columns)

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


def _are_columns(value: Any) -> bool:
    """Return whether a value maps fields to columns.

    Optional fields may have None instead.
    """
    if not isinstance(value, Mapping) or set(value) - set(FIELDS):
        return False
    columns = [column for column in value.values() if column is not None]
    without_column = {name for name, column in value.items() if column is None}
    return all(map(is_text, columns)) and without_column <= set(OPTIONAL_FIELDS)


class Datasets(NamedTuple):
    """The names in `datasets`, with `dataset_sources` for all of them."""

    names: list[str]
    sources: dict[str, Any]
    problems: list[str]


def list_built_in() -> tuple[str, ...]:
    return *load_defaults()["dataset_sources"], "demo"


def name_datasets(datasets: str | Sequence[str], sources: Mapping[str, Any]) -> Datasets:
    """Replace paths and Hub ids in `datasets` by their last parts.

    `sources` is `dataset_sources`. The `sources` returned also have the replaced paths and Hub ids, by name.
    """
    names, named_sources, problems = [], dict(sources), []
    values = [datasets] if isinstance(datasets, str) else datasets
    for value in values:
        if value in list_built_in() or _has_path(named_sources.get(value)):
            names.append(value)  # it is a name already
            continue
        local_path, name = Source(value).local, _make_name(value)
        if local_path is None and not HUB_ID.fullmatch(value):
            problems.append(
                f"datasets names {value!r}, which is none of {', '.join(list_built_in())}, and no file or directory: "
                f"give its path or Hub id, or say where it is with dataset_sources.{value}=DIR_FILE_OR_HUB_ID"
            )
        elif local_path is not None and not local_path.exists():
            problems.append(f"datasets names {value}, and there is no such file or directory{seen_from(local_path)}")
        elif name in (*list_built_in(), *names) or _has_path(named_sources.get(name)):
            renamed = ",".join("OTHER" if other == value else other for other in values)
            problems.append(
                f"datasets has {value}, which would be called {name}, but another dataset has this name: choose a name "
                f"OTHER, and give datasets=[{renamed}] dataset_sources.OTHER={value}"
            )
        else:
            names.append(name)
            settings = named_sources.get(name)  # the dataset's columns or revision, if set
            named_sources[name] = {**settings, "path": value} if isinstance(settings, Mapping) else value
    return Datasets(names, named_sources, problems)


def find_dataset_problems(datasets: str | Sequence[str], sources: Any) -> list[Problem]:
    """List what is wrong with `datasets` and `dataset_sources`."""
    if not isinstance(sources, Mapping):
        sentence = f"dataset_sources={sources} must map names to paths or Hub ids, such as dataset_sources.hh=DIR"
        return [Problem("dataset_sources", sentence)]
    _, named_sources, sentences = name_datasets(datasets, sources)
    problems = [Problem("datasets", sentence) for sentence in sentences]
    for name, value in named_sources.items():
        if value is None:
            continue
        try:
            Source.parse(name, value)
        except InputError as error:
            problems.append(Problem("dataset_sources", str(error)))
        if isinstance(value, Mapping) and value.get("format"):
            sentence = (
                f"dataset_sources.{name}.format was removed after a66c8634: leave it out, as columns are recognized by "
                f"their names, or name them with dataset_sources.{name}.columns"
            )
            problems.append(Problem("dataset_sources", sentence))
    return problems


def _has_path(source: Any) -> bool:
    """Return whether a value of `dataset_sources` says where the data is."""
    return "path" in source if isinstance(source, Mapping) else bool(source)


def seen_from(path: Path) -> str:
    """Return " in DIR" for a missing relative path, else ""."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


def _make_name(path: str) -> str:
    """Make a dataset's name: `mine` for `/data/mine.csv.gz` and `somebody/mine`."""
    name = os.path.basename(os.path.abspath(os.path.expanduser(path)))
    return re.sub(r"[^\w-]", "_", name[: len(name) - len(find_suffix(name))])


def place_datasets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace paths in `datasets` by names, and define these in `dataset_sources`.

    The path of the chat template becomes absolute, as a later command may run in another directory. Invalid values stay
    as they are.
    """
    placed = dict(values)
    template = values.get("chat_template")
    if isinstance(template, str) and is_text(template):
        placed["chat_template"] = os.path.abspath(os.path.expanduser(template))
    datasets, sources = values.get("datasets"), values.get("dataset_sources")
    given = [datasets] if isinstance(datasets, str) else datasets
    if isinstance(sources, Mapping) and isinstance(given, list) and all(map(is_text, given)):
        names, named_sources, problems = name_datasets(given, sources)
        if not problems:
            placed |= {"datasets": names, "dataset_sources": named_sources}
    return placed
