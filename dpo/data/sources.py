"""Records of files, directories, saved datasets and the Hub.

`datasets` and pyarrow are imported where they are used: that takes half a second, and text files need neither.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from dpo.data.schema import Row, TableRow, is_message
from dpo.errors import InputError, one_sentence
from dpo.redaction import shorten
from dpo.settings.places import SAVED, SPLIT_NAMES, SUFFIXES, TOOLS, Source, check_exists, find_suffix
from dpo.system.host import use_caches_without_hub
from dpo.system.plain_files import check_readable

NULLABLE = ("default", "const")  # a null of these says something in a JSON schema
UNKNOWN_SPLIT = re.compile("(Unknown|Bad) split")  # the message of `datasets` about a missing split begins so
ROWS_PER_BATCH = 1000  # so many rows of an Arrow table are in memory twice
SUBSETS = re.compile(r"(?:available configs|Available): \[(.*?)\]")  # messages of `datasets` list them so
FIRST_BYTES_OF_SHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # .xlsx and .xls, whatever the names say


class ArrowRows(Sequence[Mapping]):
    """Rows of a `datasets.Dataset`, decoded when read; images and sounds stay as they are."""

    def __init__(self, dataset: Any):
        self.dataset, self.features = dataset.with_format("arrow"), dataset.features.to_dict()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        [row] = self.select([index])
        return row

    def __iter__(self) -> Iterator[Mapping]:
        for table in self.dataset.iter(ROWS_PER_BATCH):
            for row in table.to_pylist():
                yield _decode_row(row, self.features)

    def select(self, indices: Iterable[int]) -> ArrowRows:
        return ArrowRows(self.dataset.select(indices))


def _decode_row(row: Mapping, features: Mapping) -> dict:
    return {column: _decode(value, features.get(column), column) for column, value in row.items()}


def _decode(value: Any, feature: Any, key: str) -> Any:
    """Decode a value of Arrow, which gives each object of a column the fields of all others: those are dropped.

    Classes get their names: `class_encode_column` makes true 1, but desirable 0.
    """
    if value is None or not isinstance(feature, dict):
        feature = {}
    if isinstance(value, list):
        return [_decode(item, feature.get("feature"), key) for item in value]
    if feature.get("_type") == "ClassLabel":
        return feature["names"][value] if value >= 0 else None  # -1 stands for no label
    if feature.get("_type") == "Json":
        return json.loads(value)
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        # the user gives names to arguments and properties, which are no fields of a schema
        if item is not None or (name in NULLABLE and key not in ("properties", "arguments")):
            kept[name] = _decode(item, feature.get(name), key if key == "arguments" else name)
    return kept


def load_rows(source: Source, split: str, cache_dir: str | None = None, *, limit: int | None = None) -> Sequence[Row]:
    """Load a split, or all records of a source without splits; with `limit`, only so many of each local file.

    An error stands in place of a record that cannot be parsed. Raises InputError for a source without records.
    """
    path = source.local
    if path is None or source.subset:
        return ArrowRows(_load_from_hub(source, split, cache_dir))
    check_exists(source.path)
    files = _find_files(path, split) if path.is_dir() and not source.has_no_splits else [path]
    if not files:
        return ArrowRows(_load_from_hub(source, split, cache_dir))
    rows = [row for file in files for row in islice(_read_file(file), limit)]
    if not rows:
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def identify_source(source: Source, cache_dir: str | None) -> Any:
    """Make a JSON value that changes whenever the source, or its cache, does; None if there are no files."""
    path = source.local
    if path is None or source.subset:
        # their paths have a digest of the revision and its files; there are none if the data are in memory
        files = [file["filename"] for file in _load_from_hub(source, "train", cache_dir).cache_files]
        return [source.path, source.subset, dict(source.columns), files] if files else None
    try:
        entries = sorted(entry for depth in ("*", "*/*", "data/*/*") for entry in path.glob(depth))
        stats = [(str(file), file.stat()) for file in (entries or [path]) if file.is_file()]
    except OSError:  # loading the source will raise an error that says why it cannot be read
        return None
    # every write sets ctime, but a program such as rsync may restore mtime
    states = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return [str(path.absolute()), dict(source.columns), states]


def _load_from_hub(source: Source, split: str, cache_dir: str | None) -> Any:
    use_caches_without_hub()
    import datasets

    names = list(SPLIT_NAMES.get(split, (split,)))
    while True:
        name = names.pop(0)
        try:
            return datasets.load_dataset(
                source.path, source.subset, split=name, cache_dir=cache_dir, revision=source.revision or None
            )
        except Exception as error:  # `datasets` has errors of its own, and raises those of other libraries
            if listed := SUBSETS.search(str(error)):
                raise InputError(
                    f"dataset {source.path} has the subsets {listed[1]}: choose one with "
                    f"dataset_sources.NAME.subset=SUBSET"
                ) from error
            if not (names and UNKNOWN_SPLIT.match(str(error))):
                raise InputError(
                    f"dataset {source.path} (split {split}) cannot be loaded from a directory here, the Hub or its "
                    f"cache: {one_sentence(error)}. Without network, point dataset_sources at a local directory"
                ) from error


def _find_files(folder: Path, split: str) -> list[Path]:
    """Find `SPLIT.SUFFIX`, shards `SPLIT-*.SUFFIX` as on the Hub, or a saved dataset `SPLIT`.

    There are none if README.md says where they are, as in a clone from the Hub.
    """
    names = SPLIT_NAMES.get(split, (split,))
    folders = filter(Path.is_dir, (folder, folder / "data"))
    entries = [entry for each in folders for entry in sorted(each.iterdir())]
    for name in names:
        found: dict[Any, list[Path]] = {}  # shards are together, by directory and suffix
        for entry in entries:
            suffix = find_suffix(entry.name)
            stem = entry.name[: len(entry.name) - len(suffix)]
            if suffix and stem.startswith(f"{name}-"):
                found.setdefault((entry.parent, suffix), []).append(entry)
            elif stem == name and (suffix or (entry / SAVED).is_file()):
                found[entry] = [entry]
        if len(found) > 1:
            listed = ", ".join(str(file.relative_to(folder)) for files in found.values() for file in files)
            raise InputError(f"{folder} has several files of its {name} split ({listed}): keep one of them")
        for files in found.values():
            return files
    readme = folder / "README.md"
    if readme.is_file() and "config_name:" in readme.read_text(encoding="utf-8", errors="replace"):
        return []
    raise InputError(
        f"{folder} has no {split} split, a file or saved dataset named {' or '.join(names)} (such as {split}.jsonl or "
        f"{split}.csv); datasets={folder}/FILE takes both splits from one file"
    )


def _read_file(file: Path) -> Iterator[Row]:
    """Yield records, with an error in place of each that cannot be parsed."""
    try:
        for number, row in enumerate(_parse_file(file), start=1):
            is_row = isinstance(row, (Mapping, InputError))
            yield (
                row if is_row else InputError(f"record {number} of {file} is {shorten(row)}, not an object with fields")
            )
    except InputError:
        raise
    except Exception as error:  # the libraries that parse files raise anything for damage
        fix = ": save it as UTF-8 (in a spreadsheet as CSV UTF-8)" if isinstance(error, UnicodeError) else ""
        raise InputError(f"{file} cannot be read: {one_sentence(error)}{fix}") from error


def _parse_file(file: Path) -> Iterator:
    suffix = find_suffix(file.name)
    if file.is_dir():
        import datasets

        yield from ArrowRows(datasets.load_from_disk(file))
        return
    check_readable(file)
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        about = json.loads((table.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))  # as `datasets` writes it
        features = about.get("info", {}).get("features", {})
        for batch in table.iter_batches(ROWS_PER_BATCH):
            yield from (_decode_row(row, features) for row in batch.to_pylist())
        return
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(file, "rb") as stream:
        if stream.read(4) in FIRST_BYTES_OF_SHEETS:
            raise InputError(
                f"{file} is a spreadsheet or another ZIP archive: save the sheet as CSV (UTF-8), and give that file"
            )
    if not suffix:
        raise InputError(f"{file} is not one of {', '.join(f'*{each}' for each in SUFFIXES)}")
    kinds = {".jsonl": _parse_json_lines, ".json": _parse_json, ".csv": _parse_table, ".tsv": _parse_table}
    parse = kinds[suffix.removesuffix(".gz")]
    # utf-8-sig skips a byte order mark; newline="" keeps the newlines in a table's fields as they are
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        yield from parse(lines, file)


def _parse_json_lines(lines: Iterable[str], file: Path) -> Iterator:
    for number, line in enumerate(lines, start=1):
        try:
            if text := line.rstrip():  # without its end, at which an error would be on the next line
                yield json.loads(text)
        except (ValueError, RecursionError) as error:  # also too many digits of a number, or levels of lists
            yield InputError(f"line {number} of {file} is not JSON: {one_sentence(error).replace('line 1 ', '')}")


def _parse_json(lines: TextIO, file: Path) -> Iterator:
    """Parse a list of records, an object that has one under a key, or JSON lines."""
    text = lines.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith("["):
            raise
        return _parse_json_lines(text.split("\n"), file)  # splitlines would also split at U+2028 inside strings
    if isinstance(content, list):
        return iter(content)
    keys = [key for key, value in content.items() if key != TOOLS and _are_records(value)] if content else []
    if len(keys) > 1:
        raise InputError(f"{file} has several lists of records, {', '.join(keys)}: give each a file of its own")
    return iter(content[keys[0]] if keys else [content])


def _are_records(value: Any) -> bool:
    """Whether a value is a list of objects that are no messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and not is_message(item) for item in value)


def _parse_table(lines: TextIO, file: Path) -> Iterator:
    csv.field_size_limit(2**31 - 1)  # the largest that the csv module takes on every platform
    first_line = lines.readline()
    # Excel writes semicolons where 0.5 is 0,5
    separators = "\t" if find_suffix(file.name).startswith(".tsv") else ",;\t"
    separator = max(separators, key=re.sub('"[^"]*"', "", first_line).count)
    reader = csv.reader(chain([first_line], lines), delimiter=separator, strict=True)
    header = []
    end = 0  # line on which the last record ends
    try:
        for number, fields in enumerate(reader, start=1):
            begin, end = end + 1, reader.line_num
            if not any(fields):  # an empty line is not a record, nor is an empty row of a sheet
                continue
            if not header:
                while not fields[-1]:  # a sheet may have empty columns at its end
                    fields.pop()
                header = fields
                names = [name for name in header if name]
                if len(set(names)) < len(names):
                    raise InputError(f"{file}: the first line names a column twice: {', '.join(names)}")
            elif len(fields) < len(header) or any(fields[len(header) :]):
                yield InputError(
                    f"the record on line {begin} of {file} has {len(fields)} fields, and the first line names "
                    f"{len(header)}: put fields with {separator!r} or newlines in quotes, and no title above the "
                    f"names of the columns"
                )
            else:
                row = TableRow((name, field) for name, field in zip(header, fields, strict=False) if name)
                row.number = number
                yield row
    except csv.Error as error:
        raise InputError(
            f"{file} cannot be read: {error}, in the record that begins on line {end + 1}: quote a field that "
            f'contains quotation marks, and double these marks, as in "say ""yes"""'
        ) from error
