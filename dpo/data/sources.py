"""Records of files, directories, saved datasets and the Hub.

Nothing here knows the columns of a dataset. `datasets` and pyarrow are imported where they are used, because importing
them takes half a second and text files need neither.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from dpo.data.problems import BadRecords
from dpo.data.schema import is_message
from dpo.errors import InputError, one_sentence
from dpo.settings.choices import NUMBER_FIELDS, TOOLS
from dpo.settings.places import SAVED, SPLIT_NAMES, SUFFIXES, Source, find_suffix, seen_from
from dpo.system.plain_files import check_depth, check_readable

HUB_IDS = {
    "hh": "Anthropic/hh-rlhf",
    "shp": "stanfordnlp/SHP",
    "se": "HuggingFaceH4/stack-exchange-preferences",
}
UNKNOWN_SPLIT = re.compile("(Unknown|Bad) split")  # the message of `datasets` about a missing split begins so
ROWS_PER_BATCH = 1000  # of a saved dataset: so many are in memory twice
LONGEST_FIELD = 2**31 - 1  # characters; the largest limit that the csv module takes on every platform
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
UNREADABLE = -1  # in place of the line of a record that cannot be parsed
SHEETS = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods", ".numbers")
SHEET = "a spreadsheet or another ZIP archive: save the sheet as CSV (UTF-8), and give that file"
FIRST_BYTES = {  # of files that are no text, whatever their names say
    b"PK\x03\x04": SHEET,
    b"PK\x05\x06": SHEET,  # without content
    b"\xd0\xcf\x11\xe0": SHEET,  # .xls
    b"\x1f\x8b": "compressed with gzip: add .gz to its name",
    b"BZh": "compressed with bzip2: unpack it",
    b"\xfd7zXZ": "compressed with xz: unpack it",
    b"7z\xbc\xaf": "compressed with 7-Zip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard: unpack it",
    b"PAR1": "a Parquet file: give it the suffix .parquet",
    b"SQLite format 3\0": "an SQLite database: export its table as CSV",
    b"%PDF-": "a PDF document: save its table as CSV (UTF-8)",
    b"\x89PNG": "a PNG picture, and records are text",
    b"\xff\xd8\xff": "a JPEG picture, and records are text",
}
UTF8_ADVICE = "save it as UTF-8 (in a spreadsheet as CSV UTF-8), or convert it, as with `iconv -f {} -t UTF-8`"


class FileRows(list[Mapping[str, Any]]):
    """Records of files, with the lines that they end on."""

    def __init__(self) -> None:
        self.files: list[tuple[Path, Sequence[int]]] = []  # each file with its records' lines, 0 if not read by lines

    def iterate_places(self) -> Iterator[tuple[int, str]]:
        """Yield numbers and places, as in `record 2 of FILE (line 3)`."""
        total = 0
        for file, lines in self.files:
            for number, line in enumerate(lines, start=1):
                total += 1
                if line != UNREADABLE:
                    yield total, _name_place(file, number, line)


def iterate_places(rows: Sequence[Mapping[str, Any]], origin: str) -> Iterator[tuple[int, str]]:
    """Yield each record's number and its place in its file or `origin`."""
    if isinstance(rows, FileRows):
        return rows.iterate_places()
    return ((number, f"record {number} of {origin}") for number in range(1, len(rows) + 1))


def _name_place(file: Path, number: int, line: int) -> str:
    return f"record {number} of {file}" + (f" (line {line})" if line else "")


def load_rows(
    source: Source,
    split: str,
    cache_dir: str | None = None,
    bad: BadRecords | None = None,
    limit: int | None = None,
) -> Sequence[Mapping[str, Any]]:
    """Load the records of a split.

    With `limit`, only so many of each local file. A source without splits gives all its records. Raises InputError for
    a source without records, and for a record that cannot be parsed, unless `bad` collects such records.
    """
    path = source.local
    if path is None:
        return _load_from_hub(source, split, cache_dir)
    if not path.exists():
        raise InputError(
            f"dataset source {source.path} does not exist{seen_from(path)}: give a directory, a file or a Hub id"
        )
    files = _split_files(path, split) if path.is_dir() and not source.has_no_splits else [path]
    rows = FileRows()
    for file in files:
        _read(file, rows, bad, limit)
    if not rows and not (bad and bad.found):
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def identify_source(source: Source, cache_dir: str | None = None) -> Any:
    """Make a JSON value that changes whenever the source changes.

    It holds the sizes and times of a local source's files, or for the Hub the fingerprint of `datasets`. Returns None
    if neither can be read.
    """
    path = source.local
    if path is None:
        fingerprint = getattr(_load_from_hub(source, "train", cache_dir), "_fingerprint", None)
        return fingerprint and [source.path, dict(source.columns), fingerprint]
    try:
        entries = sorted(entry for depth in ("*", "*/*", "data/*/*") for entry in path.glob(depth))
        files = [path] if path.is_file() else entries
        stats = [(str(file), file.stat()) for file in files if file.is_file()]
    except OSError:  # loading the source will raise an error that says why it cannot be read
        return None
    # every write sets ctime, but a program such as rsync may restore mtime
    states = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return [str(path.absolute()), dict(source.columns), states]


def _split_files(folder: Path, split: str) -> list[Path]:
    """Find the files of a split, in `folder` or `folder/data`.

    They are one file `SPLIT.SUFFIX`, shards `SPLIT-*.SUFFIX` as on the Hub, or a saved dataset `SPLIT`. Raises
    InputError if the folder has none or several of these.
    """
    names = SPLIT_NAMES.get(split, (split,))
    directories = [directory for directory in (folder, folder / "data") if directory.is_dir()]
    entries = [entry for directory in directories for entry in sorted(directory.iterdir())]
    for name in names:
        copies = _find_named(name, entries)
        if len(copies) > 1:
            listed = ", ".join(str(file.relative_to(folder)) for files in copies for file in files)
            raise InputError(f"{folder} has several files of its {name} split ({listed}): keep one of them")
        if copies:
            return copies[0]
    present = ", ".join(entry.name for entry in entries[:8] if entry.parent == folder) or "nothing"
    accepted = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    other_names = f" (or {', '.join(names[1:])} in place of {split})" if names[1:] else ""
    raise InputError(
        f"{folder} has no {split} split: it needs one of {accepted}{other_names}; it holds {present}. "
        f"datasets={folder}/FILE takes both splits from one file: a tenth of its prompts is the test split"
    )


def _find_named(name: str, entries: Iterable[Path]) -> list[list[Path]]:
    """Find the entries with a split's name, as lists of files.

    The shards of one directory and suffix are one list; every other entry is a list of its own.
    """
    alone: list[list[Path]] = []
    shards: dict[tuple[Path, str], list[Path]] = {}  # by directory and suffix
    for entry in entries:
        suffix = find_suffix(entry.name)
        stem = entry.name[: len(entry.name) - len(suffix)]
        if stem == name and (suffix or (entry / SAVED).is_file()):
            alone.append([entry])
        elif suffix and stem.startswith(f"{name}-"):
            shards.setdefault((entry.parent, suffix), []).append(entry)
    return [*alone, *shards.values()]


def _read(file: Path, rows: FileRows, bad: BadRecords | None, limit: int | None) -> None:
    """Add the records of a file or saved dataset to `rows`."""
    lines, n_before = array("q"), sum(len(lines) for _, lines in rows.files)
    rows.files.append((file, lines))
    try:
        for number, (line, row) in enumerate(itertools.islice(_read_values(file), limit), start=1):
            if isinstance(row, Mapping):
                rows.append(row)
                lines.append(line)
                continue
            place = _name_place(file, number, line)
            reason = (
                row if isinstance(row, InputError) else f"{place} is {type(row).__name__}, not an object with fields"
            )
            if bad is None:
                raise InputError(reason)
            lines.append(UNREADABLE)
            bad.found.append((n_before + number, str(reason)))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        encoding = "UTF-16LE" if b"\0" in error.object else "WINDOWS-1252"  # which Excel writes as CSV
        raise InputError(
            f"{file} cannot be read: it is not UTF-8 (byte {byte:#04x}); {UTF8_ADVICE.format(encoding)}"
        ) from error
    except InputError:
        raise
    except Exception as error:  # the libraries that parse files raise anything for damage
        raise InputError(f"{file} cannot be read: {one_sentence(error)}") from error


def _read_values(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values in a file, not yet checked to be records.

    In place of a value that cannot be parsed there is an InputError. Each value comes with the line that it ends on, or
    0 if the file is not read by lines.
    """
    if file.is_dir():
        import datasets

        dataset = datasets.load_from_disk(file)
        features = dataset.features if "ClassLabel" in repr(dataset.features) else None
        for table in dataset.with_format("arrow").iter(ROWS_PER_BATCH):  # which decodes no image
            yield from ((0, _name_classes(row, features)) for row in table.to_pylist())
        return
    check_readable(file)
    suffix = find_suffix(file.name)
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file)
        features = None
        if b"ClassLabel" in (table.schema.metadata or {}).get(b"huggingface", b""):  # written by `datasets`
            import datasets

            features = datasets.Features.from_arrow_schema(table.schema)
        batches = table.to_batches(ROWS_PER_BATCH)
        yield from ((0, _name_classes(row, features)) for batch in batches for row in batch.to_pylist())
        return
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(file, "rb") as stream:
        _check_is_text(file, stream.read(16))
    if not suffix:
        raise InputError(
            f"{file} is not one of {', '.join(f'*{suffix}' for suffix in SUFFIXES)}: give it the suffix of its format"
        )
    # utf-8-sig skips a byte order mark; newline="" keeps the newlines in a table's fields as they are
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        yield from PARSERS[suffix.removesuffix(".gz")](lines, file)


def _check_is_text(file: Path, start: bytes) -> None:
    """Refuse all but UTF-8 by a file's first bytes, whatever its name says."""
    kinds = [kind for first, kind in FIRST_BYTES.items() if start.startswith(first)]
    if kinds or file.name.lower().endswith(SHEETS):
        raise InputError(f"{file} is {kinds[0] if kinds else SHEET}")
    encoding = json.detect_encoding(start)  # by a byte order mark or, without one, by NUL bytes
    if not encoding.startswith("utf-8"):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv names it
        reason = "has its byte order mark" if name in ("UTF-16", "UTF-32") else "has NUL bytes between its characters"
        raise InputError(f"{file} looks like {name}, as it {reason}: {UTF8_ADVICE.format(name)}")


def _keep_encoded(feature: Any) -> Any:
    """Return a feature of `datasets` that leaves images, audio and video encoded.

    Nothing here reads such data, and decoding it needs packages that may be absent.
    """
    import datasets

    if isinstance(feature, dict):
        return {name: _keep_encoded(part) for name, part in feature.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return dataclasses.replace(feature, feature=_keep_encoded(feature.feature))
    return dataclasses.replace(feature, decode=False) if hasattr(feature, "decode") else feature


def _name_classes(value: Any, feature: Any) -> Any:
    """Replace the numbers of class labels by their names.

    The number of a class says nothing: `class_encode_column` makes false 0 and true 1, but desirable 0, undesirable 1.
    """
    if value is None or feature is None:
        return value
    if isinstance(feature, dict):
        return {name: _name_classes(part, feature.get(name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_name_classes(part, getattr(feature, "feature", None)) for part in value]
    if hasattr(feature, "int2str"):
        return feature.int2str(value) if value >= 0 else None  # -1 stands for no label
    return value


def _parse_json_lines(lines: Iterable[str], file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.rstrip())  # so errors at its end name its last column
            check_depth(value)
        except json.JSONDecodeError as error:
            value = InputError(f"line {number} of {file} is not JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:  # too many digits of a number, or levels of lists
            value = InputError(f"line {number} of {file} cannot be read: {error}")
        yield number, value


def _parse_json(lines: TextIO, file: Path) -> Iterator[tuple[int, Any]]:
    """Parse records: a list, an object with a list, or JSON lines."""
    text = lines.read()
    if not text.strip():
        return
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        has_several_values = error.msg == "Extra data" and not text.lstrip().startswith("[")
        if not has_several_values:
            raise
        yield from _parse_json_lines(text.split("\n"), file)  # splitlines would also split at U+2028 inside strings
        return
    if isinstance(content, Mapping):
        content = _find_records(content, file)
    for value in content if isinstance(content, list) else [content]:
        check_depth(value)
        yield 0, value


def _find_records(content: Mapping[str, Any], file: Path) -> list[Any]:
    """Find the records in an object: its list of records, or itself.

    A list `tools` does not count: it belongs to a record.
    """
    lists = {
        key: value
        for key, value in content.items()
        if key != TOOLS and isinstance(value, list) and value and not any(map(_is_no_record, value))
    }
    if len(lists) > 1:
        raise InputError(
            f"{file} holds {len(lists)} lists of records ({', '.join(lists)}): give each a file of its own"
        )
    if lists:
        return next(iter(lists.values()))
    # pandas writes a list for each column, or a mapping from the numbers of rows, "0" and so on
    values = [*content.values()]
    are_lists = all(
        isinstance(value, list) and all(not isinstance(item, Mapping) for item in value) for value in values
    )
    if any(values) and (are_lists or all(isinstance(value, Mapping) and "0" in value for value in values)):
        raise InputError(
            f"{file} holds a list for each column ({', '.join(map(str, content))}), and records are expected, "
            f"[{{...}}, {{...}}]: pandas writes them with to_json(..., orient='records')"
        )
    return [content] if any(values) else []  # an object with an empty list has no records


def _is_no_record(value: Any) -> bool:
    return not isinstance(value, Mapping) or is_message(value)


def _parse_table(lines: TextIO, file: Path, *, separator: str) -> Iterator[tuple[int, Any]]:
    """Parse a table whose first line names its columns."""
    csv.field_size_limit(LONGEST_FIELD)
    first_line = lines.readline()
    if re.fullmatch(r'"?sep=."?\s*', first_line):
        raise InputError(
            f"{file}: the first line must name the columns: remove {first_line.strip()}, which is for Excel"
        )
    if separator == ",":  # Excel writes semicolons where 0.5 is 0,5
        separator = max(SEPARATORS, key=re.sub('"[^"]*"', "", first_line).count)
    reader = csv.reader(itertools.chain([first_line], lines), delimiter=separator, strict=True)
    header: list[str] = []
    n_records = 0
    n_lines = 0  # lines of the file up to the end of the last record
    try:
        for fields in reader:
            n_lines = reader.line_num
            if any("\0" in field for field in fields):
                raise InputError(
                    f"{file} holds NUL bytes (line {n_lines}): remove them, or if it is UTF-16, "
                    f"{UTF8_ADVICE.format('UTF-16LE')}"
                )
            if not any(fields):  # an empty line is not a record, nor is an empty row of a sheet
                continue
            if not header:
                while not fields[-1]:  # a sheet may have empty columns at its end
                    fields.pop()
                header = fields
                names = [name for name in header if name]
                if len(set(names)) < len(names):
                    raise InputError(f"{file}: the first line names a column twice: {', '.join(names)}")
                continue
            n_records += 1
            if len(fields) < len(header) or any(fields[len(header) :]):
                problem = (
                    f"record {n_records} of {file} (line {n_lines}) has {len(fields)} fields, and the first line names "
                    f"{len(header)}: put fields with {SEPARATORS[separator]} or newlines in quotes, and let the first "
                    f"line, with no title above it, name the columns"
                )
                yield n_lines, InputError(problem)
                continue
            row = {name: field for name, field in zip(header, fields, strict=False) if name}
            if separator == ";":
                row |= {name: row[name].replace(",", ".") for name in NUMBER_FIELDS if name in row}
            yield n_lines, row
    except csv.Error as error:
        raise InputError(
            f"{file} cannot be read: {error}, in the record that begins on line {n_lines + 1}: quote a "
            f'field that contains quotation marks, and double these marks, as in "say ""yes"""'
        ) from error


PARSERS: dict[str, Callable[..., Iterator[tuple[int, Any]]]] = {  # yield each value with the line that it ends on
    ".jsonl": _parse_json_lines,
    ".json": _parse_json,
    ".csv": partial(_parse_table, separator=","),
    ".tsv": partial(_parse_table, separator="\t"),
}


def _load_from_hub(source: Source, split: str, cache_dir: str | None) -> Sequence[Mapping[str, Any]]:
    """Load a split from the Hub, under its first existing name."""
    import datasets

    *first_names, last_name = SPLIT_NAMES.get(split, (split,))

    def load(split: str) -> Any:
        rows: Any = datasets.load_dataset(
            source.path, split=split, cache_dir=cache_dir, revision=source.revision or None
        )
        for column, feature in rows.features.items():
            if (encoded := _keep_encoded(feature)) != feature:
                rows = rows.cast_column(column, encoded)
        features = rows.features
        if "ClassLabel" in repr(features):
            fingerprint = rows._fingerprint
            rows = rows.with_transform(
                lambda columns: {
                    name: [_name_classes(value, features[name]) for value in values] for name, values in columns.items()
                }
            )
            rows._fingerprint = fingerprint  # the transform says nothing more, and cannot always be hashed
        return rows

    try:
        for name in first_names:
            try:
                return load(name)
            except ValueError as error:
                if not UNKNOWN_SPLIT.match(str(error)):
                    raise
        return load(last_name)
    except Exception as error:  # `datasets` has errors of its own, and raises those of other libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"dataset {source.path} (split {split}) is no file or directory here, and cannot be loaded from the Hub or "
            f"its cache: {reason}. Without network, point dataset_sources at a local directory"
        ) from error
