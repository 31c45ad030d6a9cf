"""Bad records: all are named, and refused or left out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpo.errors import InputError
from dpo.numbers import count
from dpo.system.plain_files import replacing

BAD = "bad record"
SHOWN = 20  # bad records, or records of a kind, that a message names


class BadRecordsError(InputError):
    """Some records of a dataset cannot be used: their numbers and reasons."""

    def __init__(self, name: str, found: list[tuple[int, str]]) -> None:
        super().__init__(list_bad(name, found))
        self.name, self.found = name, found


def list_bad(name: str, found: list[tuple[int, str]]) -> str:
    """List the first bad records of a dataset."""
    lines = [f"dataset {name}: {count(len(found), 'record')} that cannot be used"]
    lines += [reason for _, reason in found[:SHOWN]]
    return "\n  - ".join(lines) + ("\n  - ..." if len(found) > SHOWN else "")


def explain_refusal(error: BadRecordsError, folder: Path | None, exp_name: str) -> InputError:
    """Name all bad records in a new file of `folder`, if that is given, and how to leave them out."""
    where = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"bad_records-{exp_name.replace('/', '_')}-"
        with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".jsonl", dir=folder, delete=False) as file:
            where = f"; {file.name} names all of them"
        facts = {"dataset": error.name, "problem": BAD}
        write_problems(Path(file.name), ({**facts, "record": n, "reason": reason} for n, reason in error.found))
    return InputError(f"{error}\nbad_records=skip leaves such records out{where}")


def write_problems(path: Path, problems: Iterable[Mapping[str, Any]]) -> None:
    """Write one line of JSON for each problem; no file without any."""
    if lines := [json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems]:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
