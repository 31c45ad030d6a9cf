"""Rows in memory, written to files that a config can name.

So processes, tables and a resumed run find them as they find all other data.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.settings.files import load_defaults
from dpo.settings.places import SPLIT_NAMES
from dpo.system.run_directory import get_local_dir

FOLDER = "dpo-rows"  # in the local directory
SPLITS = frozenset(chain(*SPLIT_NAMES.values()))


def store_rows(config: DictConfig | Mapping[str, Any]) -> DictConfig | Mapping[str, Any]:
    """Replace rows in `datasets` or `dataset_sources` by the paths of files.

    Rows in `datasets` get the names `rows`, `rows_2` and so on. Raises InputError for what cannot be rows.
    """
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    datasets, sources = values.get("datasets"), values.get("dataset_sources")
    given = dict(sources) if isinstance(sources, Mapping) else {}
    if not isinstance(datasets, list) or any(isinstance(each, Mapping) and not _are_splits(each) for each in datasets):
        datasets = [datasets]  # one name, or one list of records
    names = []
    for number, each in enumerate(datasets, start=1):
        is_rows = not (each is None or isinstance(each, (str, int, float)))  # numbers are refused with all wrong values
        name = (f"rows_{number}" if number > 1 else "rows") if is_rows else each
        names.append(name)
        if is_rows:
            given[name] = each
    folder = Path(get_local_dir(values.get("local_dirs") or load_defaults()["local_dirs"]), FOLDER).absolute()
    stored = {name: _store_source(source, f"dataset_sources.{name}", folder) for name, source in given.items()}
    if all(stored[name] is source for name, source in given.items()):
        return config
    return {**values, "dataset_sources": stored, **({"datasets": names} if "datasets" in values else {})}


def _are_splits(value: Any) -> bool:
    """Return whether a value maps splits to rows, as a `DatasetDict` does."""
    return isinstance(value, Mapping) and not SPLITS.isdisjoint(value)


def _store_source(source: Any, key: str, folder: Path) -> Any:
    """Replace the rows in a value of `dataset_sources` by the path of files named after their content."""
    if source is None or isinstance(source, (str, int, float)):
        return source
    if isinstance(source, Mapping) and not _are_splits(source):
        path = source.get("path")
        stored = _store_source(path, f"{key}.path", folder)
        return source if stored is path else {**source, "path": stored}
    splits = {name: source[name] for name in source if name in SPLITS} if _are_splits(source) else {"rows": source}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        files = [_write(rows, Path(temporary, split), key) for split, rows in splits.items()]
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
        directory, names = folder / digest.hexdigest()[:32], [file.name for file in files]
        with suppress(OSError):  # the same rows are there already
            Path(temporary).rename(directory)
        if Path(temporary).exists() and filecmp.cmpfiles(temporary, directory, names, shallow=False)[0] != names:
            raise InputError(f"{key}: {directory} does not hold the rows that it is named after: move it away")
    has_test_split = len(files) > 1 or not files[0].name.startswith(("rows", "train"))
    return str(directory if has_test_split else directory / files[0].name)


def _write(rows: Any, path: Path, key: str) -> Path:
    """Write rows to PATH.jsonl, or a `datasets.Dataset` to PATH.parquet, which keeps the names of classes."""
    datasets = sys.modules.get("datasets")  # whoever has a Dataset has imported it
    is_dataset = datasets is not None and isinstance(rows, datasets.Dataset)
    file = path.with_suffix(".parquet" if is_dataset else ".jsonl")
    if not is_dataset and not (isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows)):
        raise InputError(f"{key} is {type(rows).__name__}: give a list of mappings of columns to values, or a Dataset")
    with explaining_library(lambda error: InputError(f"{key}: its rows cannot be written: {one_sentence(error)}")):
        if is_dataset:
            rows.to_parquet(file)
        else:
            lines = (json.dumps(dict(row), default=lambda value: value.tolist()) for row in rows)  # numpy's numbers
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file
