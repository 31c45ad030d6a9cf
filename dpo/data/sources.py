"""Sources of records: files, directories, saved datasets, the Hub.

They know no dataset's columns. `datasets` and pyarrow are imported where they are used: they take half a second, and
text files need neither.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from dpo.data.schema import is_sharegpt
from dpo.errors import InputError
from dpo.settings.places import METADATA, SAVED, SUFFIXES, Source, find_suffix, seen_from
from dpo.system.plain_files import check_readable

HUB_IDS = {
    "hh": "Anthropic/hh-rlhf",
    "shp": "stanfordnlp/SHP",
    "se": "HuggingFaceH4/stack-exchange-preferences",
}
SPLIT_NAMES = {  # names of each split; the first one present is used
    "train": ("train", "train_prefs", "train_sft"),
    "test": ("test", "validation", "valid", "val", "dev", "eval", "test_prefs", "test_sft"),
}
UNKNOWN_SPLIT = re.compile("(Unknown|Bad) split")  # message of `datasets` if no split has that name
ANY_TEXT = 2**31 - 1  # characters in a field of a table
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def load_rows(source: Source, split: str, cache_dir: str | None = None) -> Sequence[Mapping[str, Any]]:
    """Load the records of a split, or of a source without splits.

    Raises InputError if there are none.
    """
    path = source.local
    if path is None:
        return _load_from_hub(source, split, cache_dir)
    if not path.exists():
        place = f"{source.path} does not exist{seen_from(path)}"
        raise InputError(f"dataset source {place}; give a directory, a file or a Hub id")
    files = _split_files(path, split) if path.is_dir() and not source.has_no_splits else [path]
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def identify_source(source: Source, cache_dir: str | None = None) -> Any:
    """A JSON value that changes with a source; None without one.

    It has files with their sizes and times, or the Hub's fingerprint. The time of the last change (ctime) is set by
    every write, whatever a program restores.
    """
    path = source.local
    if path is None:
        fingerprint = getattr(_load_from_hub(source, "train", cache_dir), "_fingerprint", None)
        return fingerprint and [source.path, dict(source.columns), fingerprint]
    try:
        inside = sorted(file for depth in ("*", "*/*", "data/*/*") for file in path.glob(depth))
        files = [path] if path.is_file() else inside
        stats = [(str(file), file.stat()) for file in files if file.is_file()]
    except OSError:  # loading says why it cannot be read
        return None
    times = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return [str(path.absolute()), dict(source.columns), times]


def _split_files(folder: Path, split: str) -> list[Path]:
    """Find the files of a split, in the folder or its `data/`.

    They are `SPLIT.SUFFIX`, shards `SPLIT-*.SUFFIX` as on the Hub, or a saved `SPLIT`. Raises InputError for none or
    several sets.
    """
    names = SPLIT_NAMES.get(split, (split,))
    held = [entry for place in (folder, folder / "data") if place.is_dir() for entry in sorted(place.iterdir())]
    for name in names:
        sets: dict[tuple[Path, str], list[Path]] = {}  # files of this name by place and suffix
        for entry in held:
            suffix = find_suffix(entry.name)
            stem = entry.name[: len(entry.name) - len(suffix)]
            if stem == name and (suffix or (entry / SAVED).is_file()):
                sets[entry, suffix] = [entry]
            elif suffix and stem.startswith(f"{name}-"):
                sets.setdefault((entry.parent, suffix), []).append(entry)
        if len(sets) > 1:
            listed = ", ".join(str(file.relative_to(folder)) for files in sets.values() for file in files)
            raise InputError(f"{folder} holds its {name} split in several formats or places ({listed}); keep one")
        if sets:
            [files] = sets.values()
            return files
    present = ", ".join(entry.name for entry in held[:8] if entry.parent == folder) or "nothing"
    wanted = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    other = f" (or {', '.join(names[1:])} in place of {split})" if names[1:] else ""
    raise InputError(
        f"{folder} has no {split} split: it needs one of {wanted}{other}; it holds {present}{_offer(held)}"
    )


def _offer(held: Sequence[Path]) -> str:
    """Suggest a file for both splits, never one of a test split."""
    files = [entry for entry in held if find_suffix(entry.name) and entry.is_file() and entry.name not in METADATA]
    saved = [entry for entry in held if (entry / SAVED).is_file()]
    stems = {entry: entry.name.split(".")[0] for entry in (*files, *saved)}
    suitable = [entry for entry, stem in stems.items() if stem in SPLIT_NAMES["train"]]
    suitable = suitable or [entry for entry, stem in stems.items() if stem not in SPLIT_NAMES["test"]]
    if not suitable:
        return ""
    which, that = (suitable[0], "that") if len(suitable) == 1 else (suitable[0].parent / "FILE", "one")
    return f". datasets={which} takes both splits from {that} file: a tenth of its prompts is test"


def _read(file: Path) -> list[Mapping[str, Any]]:
    """Read the records of a file or of a saved dataset."""
    try:
        rows = _read_records(file)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise InputError(
            f"{file} cannot be read: it is not UTF-8 (byte {byte:#04x}); convert it, as with "
            f"`iconv -f {'UTF-16' if is_utf16 else 'LATIN1'} -t utf-8`"
        ) from error
    except InputError:
        raise
    except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:  # ValueError: also pyarrow's
        raise InputError(f"{file} cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(f"record {number} of {file} is {type(row).__name__}, not an object with fields")
    return rows


def _read_records(file: Path) -> list[Any]:
    if file.is_dir():
        import datasets

        return list(datasets.load_from_disk(file).with_format(None))
    check_readable(file)
    suffix = find_suffix(file.name)
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file).to_pylist()
    if not suffix:
        raise InputError(f"{file} is not one of {', '.join('*' + s for s in SUFFIXES)}: name it by what it holds")
    opener = gzip.open if suffix.endswith(".gz") else open
    # a byte order mark is no text, and newlines in a table's fields stay as they are
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        return list(PARSERS[suffix.removesuffix(".gz")](lines, file))


def _parse_lines(lines: Iterable[str], file: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(f"line {number} of {file} is not JSON: {error}") from error


def _parse_json(lines: TextIO, file: Path) -> Iterator[Any]:
    """Parse a list of records, an object with one, or JSON lines."""
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
        if not held and _is_columnar(content):
            raise InputError(
                f"{file} holds a list for each column ({', '.join(map(str, content))}), and records are expected, "
                f"[{{...}}, {{...}}]: pandas writes them with to_json(..., orient='records')"
            )
        content = content[held[0]] if held else [content] if any(content.values()) else []
    yield from content if isinstance(content, list) else [content]


def _is_records(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "role" not in item and not is_sharegpt(item) for item in value)
    )


def _is_columnar(content: Mapping[str, Any]) -> bool:
    values = list(content.values())
    lists = all(isinstance(value, list) and not any(isinstance(item, Mapping) for item in value) for value in values)
    return any(values) and (lists or all(isinstance(value, Mapping) and "0" in value for value in values))


def _parse_table(lines: TextIO, file: Path, *, separator: str) -> Iterator[dict[str, str]]:
    """Parse a table whose first line names its columns."""
    csv.field_size_limit(ANY_TEXT)
    first_line = lines.readline()
    if separator == "," and "," not in first_line:  # Excel writes semicolons where 0.5 is 0,5
        separator = next((other for other in (";", "\t") if other in first_line), separator)
    reader = csv.reader(itertools.chain([first_line], lines), delimiter=separator, strict=True)
    header: list[str] = []
    number = 0  # of records so far
    n_lines = 0  # of the file up to the end of the last record
    try:
        for fields in reader:
            if not header:
                header = fields
                if len(set(header)) < len(header):
                    raise InputError(f"{file}: the first line names a column twice: {', '.join(header)}")
            elif fields:  # an empty line is not a record
                number += 1
                if len(fields) != len(header):
                    raise InputError(
                        f"record {number} of {file} (line {reader.line_num}) has {len(fields)} fields, and the first "
                        f"line names {len(header)}: put fields with {SEPARATORS[separator]} or newlines in quotes"
                    )
                yield dict(zip(header, fields, strict=True))
            n_lines = reader.line_num
    except csv.Error as error:
        raise InputError(
            f"{file} cannot be read: {error}, in the record that begins on line {n_lines + 1}: put a field with a "
            f'quote in it in quotes, and write that quote twice, as in "say ""yes"""'
        ) from error


PARSERS: dict[str, Callable[..., Iterator[Any]]] = {
    ".jsonl": _parse_lines,
    ".json": _parse_json,
    ".csv": partial(_parse_table, separator=","),
    ".tsv": partial(_parse_table, separator="\t"),
}


def _load_from_hub(source: Source, split: str, cache_dir: str | None) -> Sequence[Mapping[str, Any]]:
    """Load a split from the Hub, under its first name there."""
    import datasets

    *others, last = SPLIT_NAMES.get(split, (split,))
    load: Any = partial(datasets.load_dataset, source.path, cache_dir=cache_dir, revision=source.revision or None)
    try:
        for name in others:
            try:
                return load(split=name)
            except ValueError as error:
                if not UNKNOWN_SPLIT.match(str(error)):
                    raise
        return load(split=last)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"dataset {source.path} (split {split}) is no file or directory here, and cannot be loaded from the Hub or "
            f"its cache: {reason}. Without network, point dataset_sources at a local directory"
        ) from error
