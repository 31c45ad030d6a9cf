"""Rows in memory, written to files that a config can name.

So processes, tables and a resumed run find them as they find all other data.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, explaining, explaining_library, one_sentence
from dpo.settings.files import load_defaults
from dpo.settings.places import SPLIT_NAMES
from dpo.system.run_directory import get_local_dir

FOLDER = "dpo-rows"  # in the local directory
SPLITS = frozenset(chain(*SPLIT_NAMES.values()))


def store_rows(config: DictConfig | Mapping[str, Any]) -> DictConfig | Mapping[str, Any]:
    """Replace rows in a config by the paths of files.

    They are in `datasets` or `dataset_sources`. Rows in `datasets` get the names `rows`, `rows_2` and so on. Raises
    InputError for what cannot be rows.
    """
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    datasets, sources = values.get("datasets"), values.get("dataset_sources")
    given = dict(sources) if isinstance(sources, Mapping) else {}
    if not isinstance(datasets, list) or any(isinstance(each, Mapping) and not _are_splits(each) for each in datasets):
        datasets = [datasets]  # one name, or one list of records
    names: list[Any] = []
    for number, each in enumerate(datasets, start=1):
        is_name = each is None or isinstance(each, (str, int, float))  # or a wrong value, refused with all others
        names.append(each if is_name else f"rows_{number}" if number > 1 else "rows")
        if not is_name:
            given[names[-1]] = each
    folder = Path(get_local_dir(values.get("local_dirs") or load_defaults()["local_dirs"]), FOLDER).absolute()
    stored = {name: _store_source(source, f"dataset_sources.{name}", folder) for name, source in given.items()}
    if all(stored[name] is source for name, source in given.items()):
        return config
    return {**values, "dataset_sources": stored, **({"datasets": names} if "datasets" in values else {})}


def _are_splits(value: Any) -> bool:
    """Return whether a value maps splits to rows, as a `DatasetDict` does."""
    return isinstance(value, Mapping) and not SPLITS.isdisjoint(value)


def _store_source(source: Any, key: str, folder: Path) -> Any:
    """Replace the rows in a value of `dataset_sources` by their path."""
    if source is None or isinstance(source, (str, int, float)):
        return source
    if isinstance(source, Mapping) and not _are_splits(source):
        path = source.get("path")
        stored = _store_source(path, f"{key}.path", folder)
        return source if stored is path else {**source, "path": stored}
    splits = {name: source[name] for name in source if name in SPLITS} if isinstance(source, Mapping) else {"": source}
    with explaining(OSError, lambda reason: InputError(f"{key}: rows cannot be kept in {folder}: {reason}")):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder))
        try:
            files = [_write(rows, temporary / (split or "rows"), key) for split, rows in splits.items()]
            digest = hashlib.sha256()
            for file in files:
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
            stored_in = folder / digest.hexdigest()[:32]
            with suppress(OSError):  # the same rows are there already
                temporary.rename(stored_in)
            names = [file.name for file in files]
            if temporary.exists() and filecmp.cmpfiles(temporary, stored_in, names, shallow=False)[0] != names:
                raise InputError(f"{key}: {stored_in} does not hold the rows that it is named after: move it away")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    has_test_split = len(files) > 1 or not files[0].name.startswith(("rows", "train"))
    return str(stored_in if has_test_split else stored_in / files[0].name)


def _write(rows: Any, path: Path, key: str) -> Path:
    """Write rows to PATH.jsonl, or a `datasets.Dataset` to PATH.parquet."""
    datasets = sys.modules.get("datasets")  # whoever has a Dataset has imported it
    if datasets is not None and isinstance(rows, datasets.Dataset):
        file = path.with_suffix(".parquet")
        with explaining_library(lambda error: InputError(f"{key}: its rows cannot be written: {one_sentence(error)}")):
            rows.to_parquet(file)  # keeps the names of classes
        return file
    if not isinstance(rows, list):
        raise InputError(
            f"{key} is {type(rows).__name__}: give a list of records, a datasets.Dataset, or {{train: ROWS, test: "
            f"ROWS}}"
        )
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as stream:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise InputError(f"row {number} of {key} is {type(row).__name__}, not a mapping of columns to values")
            with explaining_library(lambda error, n=number: InputError(f"row {n} of {key}: {one_sentence(error)}")):
                stream.write(json.dumps(dict(row), default=lambda value: value.tolist()) + "\n")  # numpy's numbers
    return path.with_suffix(".jsonl")
