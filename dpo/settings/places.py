"""Places of datasets; opens no file and knows no record."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from dpo.errors import InputError
from dpo.settings.choices import FIELDS
from dpo.settings.files import load_defaults
from dpo.settings.keys import is_text

SUFFIXES = (*(f"{kind}{packed}" for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")), ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
METADATA = ("dataset_dict.json", "dataset_info.json", "state.json")  # files that `datasets` saves beside the data
SAVED = "state.json"  # file that `datasets.Dataset.save_to_disk` leaves in its directory


def find_suffix(name: str) -> str:
    """The data suffix of a file's name in lower case, or empty."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


@dataclass(frozen=True)
class Source:
    """A local path or a Hub id, with an optional Hub revision.

    A revision is a branch, tag or commit. `columns` maps our names of columns to the source's.
    """

    path: str
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, value: Any) -> Source:
        """Parse `dataset_sources.NAME`.

        It is a path or Hub id, or `{path: ..., revision: ..., columns: ...}`. Raises InputError for anything else.
        """
        if isinstance(value, str) and value:
            return cls(value)
        key = f"dataset_sources.{name}"
        if not isinstance(value, Mapping) or not value.get("path") or set(value) - {"path", "revision", "columns"}:
            what = "a directory, file or Hub id, or {path: ..., revision: ..., columns: ...}"
            raise InputError(f"{key}={value} must be {what}")
        columns = value.get("columns") or {}
        if columns and name in built_in():
            raise InputError(
                f"{key}.columns={columns}: {name} has columns of its own; choose another name for your data"
            )
        if not isinstance(columns, Mapping) or set(columns) - set(FIELDS) or not all(map(is_text, columns.values())):
            what = f"map some of {', '.join(FIELDS)} to your names: {{prompt: question, chosen: best}}"
            raise InputError(f"{key}.columns={columns} must {what}")
        return cls(str(value["path"]), value.get("revision"), columns)

    @property
    def local(self) -> Path | None:
        """The path, if it exists or cannot be a Hub id."""
        path = Path(os.path.expanduser(self.path))
        looks_local = self.path.startswith(("/", ".", "~")) or bool(find_suffix(self.path)) or self.path.count("/") > 1
        return path if os.path.exists(path) or looks_local else None

    @property
    def has_no_splits(self) -> bool:
        """Return whether one file or saved dataset holds all records."""
        return self.local is not None and (self.local.is_file() or (self.local / SAVED).is_file())


class Datasets(NamedTuple):
    names: list[str]
    sources: dict[str, Any]
    problems: list[str]


def built_in() -> tuple[str, ...]:
    return *load_defaults()["dataset_sources"], "demo"


def name_datasets(given: str | Sequence[str], sources: Mapping[str, Any]) -> Datasets:
    """Find the names and places in `datasets`.

    A path or Hub id is own data, named after its last part.
    """
    names, places, problems = [], dict(sources), []
    listed = [given] if isinstance(given, str) else given
    for value in listed:
        if value in built_in() or _has_place(places.get(value)):
            names.append(value)
            continue
        source = Source(value)
        if source.local is None and not HUB_ID.fullmatch(value):
            problems.append(
                f"datasets names {value!r}, which is none of {', '.join(built_in())}, and no file or directory: "
                f"give its path or Hub id, or say where it is with dataset_sources.{value}=DIR_FILE_OR_HUB_ID"
            )
        elif source.local is not None and not source.local.exists():
            problems.append(f"datasets names {value}, and there is no such file or directory{seen_from(source.local)}")
        elif (name := _name_after(value)) in (*built_in(), *names) or _has_place(places.get(name)):
            renamed = ",".join("OTHER" if other == value else other for other in listed)
            problems.append(
                f"datasets names {value}, but the name {name} is taken: give datasets=[{renamed}] "
                f"dataset_sources.OTHER={value}"
            )
        else:
            names.append(name)
            places[name] = {**places[name], "path": value} if isinstance(places.get(name), Mapping) else value
    return Datasets(names, places, problems)


def find_dataset_problems(given: str | Sequence[str], sources: Any) -> list[str]:
    """List what is wrong with `datasets` and `dataset_sources`, one sentence each."""
    if not isinstance(sources, Mapping):
        return [f"dataset_sources={sources} must map names to places, such as dataset_sources.hh=DIR"]
    _, places, problems = name_datasets(given, sources)
    for name, value in ((name, value) for name, value in places.items() if value is not None):
        try:
            Source.parse(name, value)
        except InputError as error:
            problems.append(str(error))
    return problems


def _has_place(source: Any) -> bool:
    return bool(source) and not (isinstance(source, Mapping) and "path" not in source)


def seen_from(path: Path) -> str:
    """` in DIR` for a relative path, which is sought there."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


def _name_after(place: str) -> str:
    """A name for keys: `mine` for `/data/mine.csv.gz` and `somebody/mine`."""
    name = os.path.basename(os.path.abspath(os.path.expanduser(place)))
    return re.sub(r"[^\w-]", "_", name[: len(name) - len(find_suffix(name))])


def place_datasets(config: DictConfig) -> None:
    """Make `datasets` a list of names, and put their places into `dataset_sources`."""
    sources: Any = OmegaConf.to_container(config.dataset_sources)
    given: Any = config.datasets if isinstance(config.datasets, str) else list(config.datasets)
    names, sources, _ = name_datasets(given, sources)
    with open_dict(config):
        config.datasets, config.dataset_sources = names, sources
