"""Rows in memory, written to files that a config can name.

So processes, tables and a resumed run find them as they find all other data.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.settings.files import load_defaults
from dpo.settings.places import SPLIT_NAMES
from dpo.system.plain_files import make_directory, replacing
from dpo.system.run_directory import get_local_dir

FOLDER = "dpo-rows"  # in the local directory
SPLITS = frozenset(chain(*SPLIT_NAMES.values()))


def store_rows(config: DictConfig | Mapping[str, Any]) -> DictConfig | Mapping[str, Any]:
    """Replace rows in `datasets`, which are called `rows`, or in `dataset_sources` by the paths of files.

    Rows are a list of mappings, a `datasets.Dataset`, or a mapping of splits to these. Raises InputError for rows that
    cannot be written.
    """
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    given, changed = values.get("dataset_sources"), {}
    sources = dict(given) if isinstance(given, Mapping) else {}
    if _find_splits(values.get("datasets")):
        sources["rows"], changed["datasets"] = values["datasets"], ["rows"]
    folder = Path(get_local_dir(values.get("local_dirs") or load_defaults()["local_dirs"]), FOLDER).absolute()
    stored = {name: _store(splits, name, folder) for name in sources if (splits := _find_splits(sources[name]))}
    return {**values, **changed, "dataset_sources": sources | stored} if stored else config


def _find_splits(value: Any) -> dict[str, Any]:
    """Find the rows in a value by split; rows without splits are `rows`."""
    if isinstance(value, Mapping) and not SPLITS.isdisjoint(value):
        return {name: value[name] for name in value if name in SPLITS}
    is_list = isinstance(value, list) and any(isinstance(row, Mapping) for row in value)
    return {"rows": value} if is_list or _is_dataset(value) else {}


def _is_dataset(value: Any) -> bool:
    datasets = sys.modules.get("datasets")  # whoever has a Dataset has imported it
    return datasets is not None and isinstance(value, datasets.Dataset)


def _store(splits: dict[str, Any], name: str, folder: Path) -> str:
    """Write the rows of a dataset's splits to a directory that is named after its content; return its path."""
    contents = {}
    problem = f"dataset_sources.{name}: its rows cannot be written"
    with explaining_library(lambda error: InputError(f"{problem}: {one_sentence(error)}")):
        for split, rows in splits.items():
            if _is_dataset(rows):  # Parquet keeps the names of classes
                rows.to_parquet(content := io.BytesIO())
                contents[f"{split}.parquet"] = content.getvalue()
            else:
                lines = (json.dumps(dict(row), default=lambda value: value.tolist()) for row in rows)  # numpy's numbers
                contents[f"{split}.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
    digest = hashlib.sha256()
    for file_name, content in contents.items():
        digest.update(f"{file_name} {len(content)} ".encode() + content)
    directory = folder / digest.hexdigest()[:32]
    make_directory(directory)
    for file_name, content in contents.items():
        file = directory / file_name
        if not file.exists():
            with replacing(file) as temporary:
                temporary.write_bytes(content)
        elif file.read_bytes() != content:
            raise InputError(f"dataset_sources.{name}: {file} does not hold the rows that were written: move it away")
    [first, *others] = contents
    return str(directory if others or not first.startswith(("rows", "train")) else directory / first)
