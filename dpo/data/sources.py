"""Records of files, directories, saved datasets and the Hub.

`datasets` and pyarrow are imported where they are used: that takes half a second, and text files need neither.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from dpo.data.schema import Row, TableRow, is_message
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.plugins import find_digests
from dpo.redaction import shorten
from dpo.settings.places import SAVED, SPLIT_NAMES, SUFFIXES, TOOLS, Source, check_exists, find_suffix
from dpo.system.host import go_offline_without_hub
from dpo.system.plain_files import check_readable

NULLABLE = ("default", "const")  # fields of a JSON schema whose null has a meaning
NAMED_BY_USER = ("properties", "arguments")  # objects whose keys are names given by the user, not fields of a schema
ROWS_PER_BATCH = 1000  # rows of an Arrow table that are decoded together, so that few are in memory twice
FIRST_BYTES_OF_SHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # .xlsx and .xls, whatever the names say


class ArrowRows(Sequence[Mapping]):
    """Rows of a `datasets.Dataset`, decoded when read; images and sounds stay as they are."""

    def __init__(self, dataset: Any):
        self.dataset = dataset.with_format("arrow")
        self.features = dataset.features.to_dict()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        [row] = _decode_rows(self.dataset[index], self.features)  # the table has one row
        return row

    def __iter__(self) -> Iterator[Mapping]:
        for table in self.dataset.iter(ROWS_PER_BATCH):
            yield from _decode_rows(table, self.features)


def _decode_rows(table: Any, features: Mapping) -> Iterator[dict]:
    for row in table.to_pylist():
        yield {column: _decode(value, features.get(column), column) for column, value in row.items()}


def _decode(value: Any, feature: Any, key: str) -> Any:
    """Decode a value of an Arrow table, whose type in `datasets` is `feature`, and whose column or key is `key`.

    Arrow gives each object of a column the fields of all others, as nulls: those are dropped. A class becomes its name,
    as its number has no meaning: `class_encode_column` numbers sorted names, so true is 1, but desirable 0.
    """
    if value is None:
        return None
    if not isinstance(feature, dict):
        feature = {}
    kind = feature.get("_type")
    if kind == "ClassLabel":
        return feature["names"][value] if value >= 0 else None  # -1 stands for no label
    if kind == "Json":
        return json.loads(value)
    if isinstance(value, list):
        return [_decode(item, feature.get("feature"), key) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {}
    for name, item in value.items():
        if item is not None or (name in NULLABLE and key not in NAMED_BY_USER):
            # below `arguments`, names at every depth are the user's
            fields[name] = _decode(item, feature.get(name), key if key == "arguments" else name)
    return fields


def load_rows(source: Source, split: str, cache_dir: str | None = None, *, limit: int | None = None) -> Sequence[Row]:
    """Load a split, with `limit` only so many records of each file. A source without splits is a train split.

    An error stands in place of a record that cannot be parsed. Raises InputError for a source without records.
    """
    files = _find_files(source, split)
    if not files:
        return ArrowRows(_load_with_datasets(source, split, cache_dir))
    rows = []
    for file in files:
        # the libraries that parse files raise anything for damage
        with explaining_library(lambda error, file=file: InputError(f"{file} cannot be read: {one_sentence(error)}")):
            for number, row in enumerate(islice(_parse_file(file), limit), start=1):
                if not isinstance(row, (Mapping, InputError)):
                    row = InputError(f"record {number} of {file} is {shorten(row)}, not an object with fields")
                rows.append(row)
    if not rows:
        raise InputError(f"{', '.join(map(str, files))} holds no records")
    return rows


def identify_source(source: Source, cache_dir: str | None) -> Any:
    """Make a JSON value that changes whenever the source, or its cache, does; None if there are no files."""
    path = source.local
    states = []
    if path is None or source.subset:
        # the paths of cached files have a digest of the revision and its files; data in memory has no files
        states += [file["filename"] for file in _load_with_datasets(source, "train", cache_dir).cache_files]
    else:
        path = path.absolute()
        # a file, or what `_find_files` looks at in a directory, with the files of saved datasets
        for file in sorted([path, *path.glob("*"), *path.glob("*/*"), *path.glob("data/*/*")]):
            if os.path.isfile(file):
                stat = file.stat()  # every write sets ctime, but a program such as rsync may restore mtime
                states.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    # the code of a plugin's reader also decides what the rows are
    return [source, find_digests(), states] if states else None


class MissingSplit(InputError):
    """A source has no split of a name."""


def has_split(source: Source, split: str, cache_dir: str | None) -> bool:
    """Return whether a source has a split of its own; one of the Hub is downloaded for that."""
    try:
        if not _find_files(source, split):
            _load_with_datasets(source, split, cache_dir)
    except MissingSplit:
        return False
    return True


def _load_with_datasets(source: Source, split: str, cache_dir: str | None) -> Any:
    """Load a split from the Hub, its cache or a clone, under the first of its possible names that the dataset has."""
    go_offline_without_hub()
    import datasets

    problem = None
    for name in SPLIT_NAMES.get(split, (split,)):
        try:
            return datasets.load_dataset(
                str(source.local or source.path),
                source.subset,
                split=name,
                cache_dir=cache_dir,
                revision=source.revision or None,
            )
        except Exception as error:  # `datasets` has errors of its own, and raises those of other libraries
            problem = problem or error
            # another name helps only if no split has this one
            if not re.match("(Unknown|Bad) split", str(error)):
                break
    else:
        raise MissingSplit(f"dataset {source.path} has no {split} split: {one_sentence(problem)}") from problem
    if subsets := re.search(r"(?:available configs|Available): \[(.*?)\]", str(problem)):
        raise InputError(
            f"dataset {source.path} has the subsets {subsets[1]}: choose one with dataset_sources.NAME.subset=SUBSET"
        ) from problem
    raise InputError(
        f"dataset {source.path} (split {split}) cannot be loaded: {one_sentence(problem)}. Without network, point "
        f"dataset_sources at a local directory"
    ) from problem


def _find_files(source: Source, split: str) -> list[Path]:
    """Find the files of a split: `SPLIT.SUFFIX`, shards `SPLIT-*.SUFFIX` as on the Hub, or a saved dataset `SPLIT`.

    Returns [] if `datasets` has to find the files: on the Hub, or in a clone from it, where README.md lists them.
    """
    folder = source.local
    if folder is None or source.subset:
        return []
    check_exists(folder)
    if source.has_no_splits:
        if split == "test":
            raise MissingSplit(f"{folder} has no test split: use a directory with one")
        return [folder]
    names = SPLIT_NAMES.get(split, (split,))
    entries = sorted([*folder.glob("*"), *folder.glob("data/*")])
    for name in names:
        groups = defaultdict(list)  # the shards of a directory are one group, and a whole file is another
        for entry in entries:
            suffix = find_suffix(entry.name)
            stem = entry.name.lower().removesuffix(suffix)
            is_data = suffix or (entry / SAVED).is_file()
            if is_data and (stem == name or stem.startswith(f"{name}-")):
                groups[entry.parent, suffix, stem == name].append(entry)
        if len(groups) > 1:
            listed = ", ".join(str(file.relative_to(folder)) for file in chain(*groups.values()))
            raise InputError(f"{folder} has several files of its {name} split ({listed}): keep one of them")
        for files in groups.values():  # at most one group
            return files
    readme = folder / "README.md"
    if readme.is_file() and "config_name:" in readme.read_text(encoding="utf-8", errors="replace"):
        return []
    raise MissingSplit(
        f"{folder} has no {split} split, a file or saved dataset named {' or '.join(names)}; datasets={folder}/FILE "
        f"takes both splits from one file"
    )


def _parse_file(file: Path) -> Iterator:
    """Yield records, with an error in place of each that cannot be parsed."""
    if file.is_dir():
        import datasets

        yield from ArrowRows(datasets.load_from_disk(file))
        return
    check_readable(file)
    suffix = find_suffix(file.name)
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        metadata = json.loads((table.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))  # as `datasets` writes it
        for batch in table.iter_batches(ROWS_PER_BATCH):
            yield from _decode_rows(batch, metadata.get("info", {}).get("features", {}))
        return
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(file, "rb") as stream:
        if stream.read(4) in FIRST_BYTES_OF_SHEETS:
            raise InputError(f"{file} is a spreadsheet or another ZIP archive: save the sheet as CSV (UTF-8)")
    if not suffix:
        raise InputError(f"{file} is not one of *{', *'.join(SUFFIXES)}")
    # utf-8-sig skips a byte order mark; newline="" keeps the newlines in a table's fields as they are
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        if suffix.startswith((".csv", ".tsv")):
            yield from _parse_table(lines, file)
        elif suffix.startswith(".jsonl"):
            yield from _parse_json_lines(lines, file)
        else:
            yield from _parse_json(lines.read(), file)


def _parse_json_lines(lines: Iterable[str], file: Path) -> Iterator:
    """Yield the value on each line that is not blank, or an error if it is not JSON."""
    for number, line in enumerate(lines, start=1):
        text = line.rstrip()  # without the newline, after which an error would be on "line 2"
        try:
            if text:
                yield json.loads(text)
        except (ValueError, RecursionError) as error:  # also too many digits of a number, or levels of lists
            yield InputError(f"line {number} of {file} is not JSON: {one_sentence(error).replace('line 1 ', '')}")


def _parse_json(text: str, file: Path) -> Iterable:
    """Parse a list of records, an object with such a list under some key, a single record, or JSON lines."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith("["):
            raise
        return _parse_json_lines(text.split("\n"), file)  # splitlines would also split at U+2028 inside strings
    if not isinstance(content, dict):
        return content
    lists = {}  # lists of records; a list of messages or tools is part of a single record
    for key, value in content.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and not is_message(first) and key != TOOLS:
            lists[key] = value
    if len(lists) > 1:
        raise InputError(f"{file} has several lists of records, {', '.join(lists)}: put each into a file of its own")
    return next(iter(lists.values()), [content])


def _parse_table(lines: TextIO, file: Path) -> Iterator:
    """Yield a row for each record of a CSV or TSV file, or an error for one with too few or too many fields."""
    csv.field_size_limit(2**31 - 1)  # the largest that the csv module takes on every platform
    first_line = lines.readline()
    # Excel separates by semicolons in languages that write 0.5 as 0,5
    separators = "\t" if ".tsv" in file.name.lower() else ",;\t"
    unquoted = re.sub('"[^"]*"', "", first_line)
    separator = max(separators, key=unquoted.count)
    # With a space after the separator, as people type it, a quote after the space would not count as one.
    skips_space = f"{separator} " in unquoted
    reader = csv.reader(chain([first_line], lines), delimiter=separator, skipinitialspace=skips_space, strict=True)
    header: list[str] = []
    end = 0  # line on which the last record ends
    try:
        for number, fields in enumerate(reader, start=1):
            begin = end + 1
            end = reader.line_num
            if not any(fields):  # an empty line is not a record, nor is an empty row of a sheet
                continue
            if not header:
                while not fields[-1]:  # a sheet may have empty columns at its end
                    fields.pop()
                header = fields
                names = [name for name in header if name]
                if len(set(names)) < len(names):
                    raise InputError(f"{file}: the first line names a column twice: {', '.join(names)}")
            elif len(fields) < len(header) or any(fields[len(header) :]):  # empty fields may follow
                yield InputError(
                    f"the record on line {begin} of {file} has {len(fields)} fields, and the first line names "
                    f"{len(header)}: put fields with {separator!r} or newlines in quotes, and no title above the names"
                )
            else:
                row = TableRow(zip(header, fields, strict=False))
                row.pop("", None)  # a column without a name, such as pandas' numbers of rows
                row.number = number
                yield row
    except csv.Error as error:
        raise InputError(
            f"{file} cannot be read: {error}, in the record that begins on line {end + 1}: quote a field that "
            f'contains quotation marks, and double these, as in "say ""yes"""'
        ) from error
