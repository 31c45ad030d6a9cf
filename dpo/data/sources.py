"""Where records come from: files, directories, datasets saved to disk, the Hub. Knows no dataset's columns.

`datasets` and pyarrow are imported where they are used: text files need neither, and they take half a second.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from dpo.data.schema import is_sharegpt
from dpo.errors import InputError
from dpo.settings.places import SAVED, SUFFIXES, Source, seen_from

HUB_IDS = {
    "hh": "Anthropic/hh-rlhf",
    "shp": "stanfordnlp/SHP",
    "se": "HuggingFaceH4/stack-exchange-preferences",
}
TEST_NAMES = ("test", "validation", "valid", "val", "dev", "eval")  # of the test split: the first that is there
UNKNOWN_SPLIT = re.compile("(Unknown|Bad) split")  # how `datasets` says that there is none of that name
ANY_TEXT = 2**31 - 1  # characters in a field of a table
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def load_rows(source: Source, split: str, cache_dir: str | None = None) -> Sequence[Mapping[str, Any]]:
    """The records of a split; all records of a source without splits. Raises InputError if they are not there."""
    path = source.local
    if path is None:
        return _load_from_hub(source, split, cache_dir)
    if not path.exists():
        place = f"{source.path} does not exist{seen_from(path)}"
        raise InputError(f"dataset source {place}; give a directory, a file or a Hub id")
    files = [path] if source.has_no_splits else _split_files(path, split)
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def _split_files(folder: Path, split: str) -> list[Path]:
    """`SPLIT.SUFFIX`, shards `SPLIT-*.SUFFIX` or a saved `SPLIT`, in the folder or its `data/`, as on the Hub."""
    names = _names_of(split)
    for name in names:
        found = []  # every set of files that matches
        for place in (folder, folder / "data"):
            found += [[place / name]] * (place / name / SAVED).is_file()
            for suffix in SUFFIXES:
                found += [sorted(place.glob(f"{name}{suffix}")), sorted(place.glob(f"{name}-*{suffix}"))]
        found = [files for files in found if files]
        if len(found) > 1:
            listed = ", ".join(str(file.relative_to(folder)) for files in found for file in files)
            raise InputError(f"{folder} holds its {name} split in several formats or places ({listed}); keep one")
        if found:
            return found[0]
    held = sorted(os.listdir(folder))
    present = ", ".join(held[:8]) or "nothing"
    alone = next((name for name in held if name.endswith(SUFFIXES)), "FILE")
    wanted = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    other = f" (or {', '.join(names[1:])} in place of {split})" if names[1:] else ""
    raise InputError(
        f"{folder} has no {split} split: it needs one of {wanted}{other}; it holds {present}. "
        f"datasets={folder / alone} takes both splits from that file: a tenth of its prompts is test"
    )


def _names_of(split: str) -> tuple[str, ...]:
    return TEST_NAMES if split == "test" else (split,)


def _read(file: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a file, or of a directory that `datasets` has saved."""
    if not (file.name.endswith(SUFFIXES) or file.is_dir()):
        raise InputError(f"{file} is not one of {', '.join('*' + s for s in SUFFIXES)}")
    try:
        if file.is_dir():
            import datasets

            rows: Any = list(datasets.load_from_disk(file).with_format(None))
        elif file.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows = list(_read_text(file))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{file} cannot be read: it is not UTF-8 (byte {byte:#04x}); convert it, as with `iconv -f LATIN1 -t utf-8`"
        ) from error
    except (OSError, EOFError, zlib.error, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    except ValueError as error:  # pyarrow's ArrowInvalid is a ValueError
        raise error if isinstance(error, InputError) else InputError(f"{file} cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(f"record {number} of {file} is {type(row).__name__}, not an object with fields")
    return iter(rows)


def _read_text(file: Path) -> Iterator[Any]:
    """The records of a text file, compressed or not, with or without a byte order mark."""
    opener = gzip.open if file.suffix == ".gz" else open
    parse = PARSERS[Path(file.name.removesuffix(".gz")).suffix]
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:  # newlines in a table's fields stay as they are
        yield from parse(lines, file)


def _parse_lines(lines: Iterable[str], file: Path) -> Iterator[Any]:
    """One JSON value per line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(f"line {number} of {file} is not JSON: {error}") from error


def _parse_json(lines: TextIO, file: Path) -> Iterator[Any]:
    """A JSON list of records, an object with one, or JSON lines."""
    text = lines.read()
    if not text.strip():
        return
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" or text.lstrip().startswith("["):
            raise
        yield from _parse_lines(text.split("\n"), file)  # splitlines would also split at U+2028 inside strings
        return
    if isinstance(content, Mapping):
        held = [key for key, value in content.items() if _is_records(value)]
        if len(held) > 1:
            raise InputError(
                f"{file} holds {len(held)} lists of records ({', '.join(held)}): give each a file of its own"
            )
        content = content[held[0]] if held else [content]
    yield from content if isinstance(content, list) else [content]


def _is_records(value: Any) -> bool:
    """Whether a value is a list of records, and no chat."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "role" not in item and not is_sharegpt(item) for item in value)
    )


def _parse_table(lines: TextIO, file: Path, *, separator: str) -> Iterator[dict[str, str]]:
    """The rows of a table whose first line names its columns. A field in quotes may hold newlines."""
    csv.field_size_limit(ANY_TEXT)
    first = lines.readline()
    if separator == "," and ";" in first and "," not in first:  # as Excel writes where 0.5 is 0,5
        separator = ";"
    reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
    header: list[str] = []
    number = read = 0  # records, and lines of the file
    try:
        for fields in reader:
            if not header:
                header = fields
                if len(set(header)) < len(header):
                    raise InputError(f"{file}: the first line names a column twice: {', '.join(header)}")
            elif fields:  # an empty line is no record
                number += 1
                if len(fields) != len(header):
                    raise InputError(
                        f"record {number} of {file} (line {reader.line_num}) has {len(fields)} fields, and the first "
                        f"line names {len(header)}: put fields with {SEPARATORS[separator]} or newlines in quotes"
                    )
                yield dict(zip(header, fields, strict=True))
            read = reader.line_num
    except csv.Error as error:
        raise InputError(
            f"{file} cannot be read: {error}, in the record that begins on line {read + 1}: put a field with a quote "
            f'in it in quotes, and write that quote twice, as in "say ""yes"""'
        ) from error


PARSERS: dict[str, Callable[..., Iterator[Any]]] = {
    ".jsonl": _parse_lines,
    ".json": _parse_json,
    ".csv": partial(_parse_table, separator=","),
    ".tsv": partial(_parse_table, separator="\t"),
}


def _load_from_hub(source: Source, split: str, cache_dir: str | None) -> Sequence[Mapping[str, Any]]:
    try:
        return _load_split(source, _names_of(split), cache_dir)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"dataset {source.path} (split {split}) is no file or directory here, and cannot be loaded from the Hub or "
            f"its cache: {reason}. Without network, point dataset_sources at a local directory"
        ) from error


def _load_split(source: Source, names: Sequence[str], cache_dir: str | None) -> Sequence[Mapping[str, Any]]:
    """The first split of these names that a dataset of the Hub has."""
    import datasets

    revision: dict[str, Any] = {"revision": source.revision} if source.revision else {}
    name, *others = names
    try:
        rows: Any = datasets.load_dataset(source.path, split=name, cache_dir=cache_dir, **revision)
        return rows
    except ValueError as error:
        if not (others and UNKNOWN_SPLIT.match(str(error))):
            raise
        return _load_split(source, others, cache_dir)
