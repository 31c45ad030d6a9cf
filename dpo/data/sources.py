"""Where records come from: a local directory of split files, one local file, or the Hub. Knows no dataset's columns.

`datasets` and pyarrow are imported where they are used: JSON files need neither, and they take half a second.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpo.errors import InputError

HUB_IDS = {
    "hh": "Anthropic/hh-rlhf",
    "shp": "stanfordnlp/SHP",
    "se": "HuggingFaceH4/stack-exchange-preferences",
}
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


@dataclass(frozen=True)
class Source:
    """A local path or a Hub id, with an optional Hub revision (branch, tag or commit), and a map from our names of
    columns to the source's."""

    path: str
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, value: str | Mapping[str, str]) -> Source:
        """From `dataset_sources.NAME`: a path or Hub id, or `{path: ..., revision: ..., columns: ...}`."""
        if isinstance(value, str) and value:
            return cls(value)
        if isinstance(value, Mapping) and value.get("path") and set(value) <= {"path", "revision", "columns"}:
            return cls(str(value["path"]), value.get("revision"), value.get("columns") or {})
        raise InputError(
            f"dataset_sources.{name}={value!r} is neither a directory, file or Hub id, nor "
            f"{{path: ..., revision: ..., columns: ...}}"
        )

    @property
    def local(self) -> Path | None:
        """The path, if it exists here or can only be a local path; None for a Hub id."""
        path = Path(os.path.expanduser(self.path))
        looks_local = self.path.startswith(("/", ".", "~")) or self.path.endswith(SUFFIXES) or self.path.count("/") > 1
        return path if path.exists() or looks_local else None

    @property
    def is_file(self) -> bool:
        return self.local is not None and self.local.is_file()


def load_rows(source: Source, split: str, cache_dir: str | None = None) -> Sequence[Mapping[str, Any]]:
    """The records of a split; all records of a source that is one file. Raises InputError if they are not there."""
    path = source.local
    if path is None:
        return _load_from_hub(source, split, cache_dir)
    if not path.exists():
        raise InputError(f"dataset source {source.path} does not exist; give a directory, a file or a Hub id")
    files = _split_files(path, split) if path.is_dir() else [path]
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def _split_files(folder: Path, split: str) -> list[Path]:
    """`SPLIT.SUFFIX` or shards `SPLIT-*.SUFFIX`, in the folder or its `data/`, as on the Hub."""
    found = []  # every set of files that matches
    for place in (folder, folder / "data"):
        for suffix in SUFFIXES:
            found += [sorted(place.glob(f"{split}{suffix}")), sorted(place.glob(f"{split}-*{suffix}"))]
    found = [files for files in found if files]
    if len(found) > 1:
        names = ", ".join(str(file.relative_to(folder)) for files in found for file in files)
        raise InputError(f"{folder} holds its {split} split in several formats or places ({names}); keep one")
    if found:
        return found[0]
    present = ", ".join(sorted(os.listdir(folder))[:8]) or "nothing"
    wanted = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    raise InputError(f"{folder} has no {split} split: it needs one of {wanted}; it holds {present}")


def _read(file: Path) -> Iterator[Mapping[str, Any]]:
    if not file.name.endswith(SUFFIXES):
        raise InputError(f"{file} is not one of {', '.join('*' + s for s in SUFFIXES)}")
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            rows: Any = pyarrow.parquet.read_table(file).to_pylist()
        else:
            opener = gzip.open if file.suffix == ".gz" else open
            with opener(file, "rt", encoding="utf-8") as lines:
                rows = list(_parse_json(lines, file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    except ValueError as error:  # pyarrow's ArrowInvalid is a ValueError
        raise error if isinstance(error, InputError) else InputError(f"{file} cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(f"record {number} of {file} is {type(row).__name__}, not an object with fields")
    return iter(rows)


def _parse_json(lines: Any, file: Path) -> Iterator[Any]:
    """JSON lines, or one JSON list in a `.json` file."""
    if ".jsonl" not in file.name:
        text = lines.read()
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        lines = text.split("\n")  # splitlines would also split at U+2028 and the like inside strings
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(f"line {number} of {file} is not JSON: {error}") from error


def _load_from_hub(source: Source, split: str, cache_dir: str | None) -> Sequence[Mapping[str, Any]]:
    import datasets

    revision: dict[str, Any] = {"revision": source.revision} if source.revision else {}
    try:
        rows: Any = datasets.load_dataset(source.path, split=split, cache_dir=cache_dir, **revision)
        return rows
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"dataset {source.path} (split {split}) cannot be loaded from the Hub or its cache: {reason}. "
            f"Without network, point dataset_sources at a local directory"
        ) from error
