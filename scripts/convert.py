"""Convert preference data to another format.

    python -m scripts.convert IN OUT --to FORMAT

IN is what `datasets` of train.py may name: a file, a directory of train and test files or of `save_to_disk`, or a Hub
id. OUT is a new file that ends in .jsonl, .json, .csv or .tsv, each also with .gz, or in .parquet. docs/formats.md
describes the formats. Columns that are not part of IN's format are copied. A warning names what OUT cannot hold, with
numbers of records. Exit status: 0 written, 1 could not be written, 2 bad input.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dpo.data.columns import ColumnsError, find_columns, recognize_columns
from dpo.data.custom import read_scores
from dpo.data.records import (
    FORMATS,
    CannotHoldError,
    Format,
    Record,
    is_system_unused,
    read_record,
    recognize_format,
    write_record,
)
from dpo.data.schema import SURROGATE, check_unicode, drop_nulls
from dpo.data.sources import iterate_places, iterate_rows, load_rows
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.choices import DATA_FORMATS, NUMBER_FIELDS, SYSTEM, TOOLS
from dpo.settings.places import SUFFIXES, Source, find_suffix
from dpo.system.plain_files import replacing

NAME = "IN"  # the source's name in messages
KINDS = ("pairs", "labels", "targets")  # the first of these that IN's columns hold is converted
SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Report:
    """Counts of the changes that OUT requires, and where each first occurs."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.loses = False  # something is left out, not only written in another form
        self._first: dict[str, str] = {}

    def add(self, change: str, where: str) -> None:
        self._counts[change] += 1
        self.loses |= "left out" in change
        self._first.setdefault(change, where)

    def __str__(self) -> str:
        texts = (f"{change} ({count(n, 'record')}, first {self._first[change]})" for change, n in self._counts.items())
        return "; ".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("source", metavar="IN", help="a file, a directory or a Hub id")
    option("out", metavar="OUT", type=Path, help="the file to write")
    option("--to", required=True, choices=DATA_FORMATS, metavar="FORMAT", help=f"one of {', '.join(DATA_FORMATS)}")
    option("--format", metavar="FORMAT", help="the format of IN, if it is recognized wrongly")
    option("--columns", type=parse_columns, help="the columns of IN, as in '{prompt: question, chosen: best}'")
    option("--split", choices=("train", "test"), default="train", help="the split of IN (default: train)")
    options = parser.parse_args(arguments)
    if not options.source:
        parser.error("IN is empty: give a file, a directory or a Hub id")
    try:
        source = {"path": options.source, "format": options.format, "columns": options.columns}
        print(convert(Source.parse(NAME, source), options.split, options.out, options.to))
    except InputError as error:
        # the message is about keys of train.py, where this script has options
        text = str(error).replace(f"dataset_sources.{NAME}.", "--").replace(f"dataset_sources.{NAME}=", f"{NAME}=")
        text = text.replace(f"training on {KINDS[-1]} needs", "converting needs")
        print(f"error: {text}", file=sys.stderr)
        return 2
    except OSError as error:  # a file that cannot be read raises InputError, so writing failed
        print(f"error: {options.out} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


def parse_columns(text: str) -> Any:
    """Parse the value of `--columns`, which `Source.parse` checks."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)  # reads every value as text, also `yes` and `no`
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text} is not like {{prompt: question, chosen: best}}") from error


def convert(source: Source, split: str, out: Path, to: str) -> str:
    """Convert a split to a file, and say what was written."""
    suffix = find_suffix(out.name)
    if not suffix:
        raise InputError(f"{out} must end in one of {', '.join(SUFFIXES)}")
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: give another file, or remove it")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.parent}")
    if split == "test" and source.has_no_splits:
        raise InputError(f"{source.path} has no splits: leave --split=test out")
    report = Report()
    rows, data_format = convert_rows(source, split, to, report)
    fit_file(rows, suffix, FORMATS[to].columns.values(), report)
    if not rows:
        raise InputError(f"{to} holds no record of {source.path}: {report}")
    with replacing(out) as temporary:
        write_rows([row for _, row in rows], temporary, suffix)
    if text := str(report):
        what = f"warning: {out} does not hold all of" if report.loses else f"{out} holds all of"
        print(f"{what} {source.path}: {text}", file=sys.stderr)
    return f"{count(len(rows), 'record')} of {source.path} ({data_format}) written to {out} ({to})"


def convert_rows(source: Source, split: str, to: str, report: Report) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """Convert the rows of a split.

    Returns (place in the source, converted row) for each row that OUT can hold, and the name of the source's format.
    """
    rows = load_rows(source, split)
    used = find_used_columns(rows, source)
    holds_lists = "responses" in FORMATS[to].columns
    converted, data_format = [], source.format
    for row, (_, where) in zip(iterate_rows(rows, used.values()), iterate_places(rows, source.path), strict=True):
        record = read_record(row, used, where, name=NAME)
        data_format = data_format or recognize_format(row, used, record) or "columns of its own"  # by the first row
        scores = read_scores(row, used, len(record.responses), where) if record.is_list else []
        if not holds_lists and len(scores) == 2 and scores[0] != scores[1]:
            # OUT has no lists, but a list of two responses is a pair if one has the higher score
            ranked = record.responses if scores[0] > scores[1] else record.responses[::-1]
            record = record._replace(responses=ranked, is_list=False)
        try:
            written, changes = convert_row(row, used, record, FORMATS[to])
        except CannotHoldError as error:
            changes = [f"records are left out because of {error}"]
        else:
            converted.append((where, written))
        for change in changes:
            report.add(change, where)
    return converted, data_format or ""


def convert_row(
    row: Mapping[str, Any], used: Mapping[str, str], record: Record, out_format: Format
) -> tuple[dict[str, Any], list[str]]:
    """Convert a row that was read as `record`, and say what changed.

    Columns that neither the row's own format nor `out_format` has are copied. Raises CannotHoldError.
    """
    written, changes = write_record(record, out_format)
    # the fields of numbers have the same names in all formats
    number_fields = (*NUMBER_FIELDS, "scores") if record.is_list else NUMBER_FIELDS
    written |= {field: row[used[field]] for field in number_fields if used.get(field) in row}
    if "scores" in used and not record.is_list:
        changes.append(f"the column {used['scores']} is left out")
    taken = {*out_format.columns.values(), *(field for field in NUMBER_FIELDS if field in used)}
    unused = {column: value for column, value in row.items() if column not in used.values()}
    copied = {column: value for column, value in unused.items() if column not in taken}
    # an unused column whose name OUT needs is lost, except for values that are empty or that a used column repeats:
    # UltraFeedback's messages repeat chosen
    no_loss = [None, "", [], {}, *(row[column] for column in used.values() if column in row)]
    lost = [column for column, value in unused.items() if column in taken and value not in no_loss]
    if is_system_unused(row, used, record):
        lost.append(used[SYSTEM])
    changes += [f"the column {column} is left out" for column in lost]
    return written | copied, changes


def find_used_columns(rows: Sequence[Any], source: Source) -> dict[str, str]:
    """Find IN's columns by field, for the first of KINDS that fits.

    Raises the ColumnsError of the last kind if none fits.
    """
    present = find_columns(rows)
    options: dict[str, Any] = {
        "name": NAME,
        "origin": source.path,
        "format_columns": FORMATS[source.format].columns if source.format else None,
        "with_margins": True,
    }
    *first_kinds, last_kind = KINDS
    for kind in first_kinds:
        with suppress(ColumnsError):
            return recognize_columns(present, source.columns, trains_on=kind, **options).used
    return recognize_columns(present, source.columns, trains_on=last_kind, **options).used


def fit_file(rows: list[tuple[str, dict[str, Any]]], suffix: str, needed: Collection[str], report: Report) -> None:
    """Change the values of `rows` that a kind of file cannot hold.

    Raises InputError if a table cannot hold a `needed` column, and for a text that is not Unicode, unless the file is
    JSON.
    """
    if "json" not in suffix:
        for where, row in rows:
            for key, value in row.items():
                check_unicode(key, "the name of a field", where)
                check_unicode(json.dumps(value, ensure_ascii=False, default=str), f"field {key!r}", where)
    if suffix == ".parquet":
        return
    is_table = suffix.removesuffix(".gz") in SEPARATORS
    for where, row in rows:
        for key, value in list(row.items()):
            if is_table and isinstance(value, (list, dict)):
                if key == TOOLS:
                    row[key] = json.dumps(value, ensure_ascii=False)
                elif key in needed:
                    raise InputError(
                        f"a {suffix} file cannot hold chat messages or turns ({where}): write .jsonl or .parquet"
                    )
                else:
                    report.add(f"the column {key} is left out", where)
                    del row[key]
            elif not isinstance(value, (str, bool, int, float, list, dict, type(None))):
                report.add(f"the column {key} is now text", where)
                row[key] = str(value)


def write_rows(rows: list[dict[str, Any]], path: Path, suffix: str) -> None:
    """Write rows to a file of the kind that a suffix names."""
    kind = suffix.removesuffix(".gz")
    names = list(dict.fromkeys(key for row in rows for key in row))
    if kind == ".parquet":
        _write_parquet([{name: row.get(name) for name in names} for row in rows], path)
        return
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if kind in SEPARATORS:
            # \r in `lineterminator` makes the writer quote a text with a lone \r, at which readers would end the row
            writer = csv.DictWriter(file, names, delimiter=SEPARATORS[kind], lineterminator="\r\n")
            writer.writeheader()
            writer.writerows(rows)
        elif kind == ".jsonl":
            file.writelines(f"{_encode(row)}\n" for row in rows)
        else:
            file.write("[\n" + ",\n".join(map(_encode, rows)) + "\n]\n")


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows that have the same columns to a Parquet file.

    In Parquet all objects of a column have the same fields. If that would change nulls, types or the order of keys in
    tools or arguments of calls, all tools and arguments become JSON.
    """
    import pyarrow.parquet

    as_json = [_encode_objects(row) for row in rows]
    with suppress(pyarrow.ArrowException, OverflowError):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        read_back = (_encode_objects(drop_nulls(row)) for row in pyarrow.parquet.read_table(path).to_pylist())
        # the JSON of tools and arguments also shows changes of nulls, types and order
        if all(drop_nulls(row) == read for row, read in zip(as_json, read_back, strict=True)):
            return
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_json), path)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"a Parquet file cannot hold these columns ({error}): write .jsonl") from error


def _encode_objects(value: Any, key: str = "") -> Any:
    """Replace tools and arguments, however deep, by JSON."""
    if key in (TOOLS, "arguments") and isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return [_encode_objects(item) for item in value]
    if isinstance(value, dict):
        return {name: _encode_objects(item, name) for name, item in value.items()}
    return value


def _encode(row: dict[str, Any]) -> str:
    """Encode a row as JSON, with escapes if UTF-8 cannot hold it."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return json.dumps(row, default=str) if SURROGATE.search(text) else text


if __name__ == "__main__":
    sys.exit(main())
