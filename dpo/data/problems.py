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
    """Some records of a dataset cannot be used; `are_all`: none can."""

    def __init__(self, name: str, found: list[tuple[int, str]], *, are_all: bool) -> None:
        reasons = {reason.partition(": ")[2] for _, reason in found}  # without the record's place
        if are_all and len(reasons) == 1 < len(found):  # such as a template that cannot render anything
            text = f"dataset {name}: none of its {len(found):,} records can be used: {reasons.pop()}"
        else:
            text = found[0][1] if len(found) == 1 else list_bad(name, found)
        super().__init__(text)
        self.name, self.found, self.are_all = name, found, are_all


class BadRecords:
    """The bad records of a split, with numbers and reasons."""

    def __init__(self, *, skip: bool = False) -> None:
        self.skip = skip
        self.found: list[tuple[int, str]] = []

    def finish(self, name: str, *, is_empty: bool) -> list[str]:
        """Raise BadRecordsError, or return a note on what is left out; `is_empty`: nothing is left."""
        self.found.sort()
        if self.found and (is_empty or not self.skip):
            raise BadRecordsError(name, self.found, are_all=is_empty)
        return [f"warning: left out: {list_bad(name, self.found)}"] if self.found else []


def list_bad(name: str, found: list[tuple[int, str]]) -> str:
    """List the first bad records of a dataset."""
    lines = [f"dataset {name}: {count(len(found), 'record')} that cannot be used"]
    lines += [reason for _, reason in found[:SHOWN]]
    return "\n  - ".join(lines) + ("\n  - ..." if len(found) > SHOWN else "")


def explain_refusal(error: BadRecordsError, folder: Path | None, exp_name: str) -> InputError:
    """Name all bad records in a new file of `folder`, if that is given, and how to leave them out."""
    if error.are_all:
        return InputError(str(error))
    where = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"bad_records-{exp_name.replace('/', '_')}-"
        with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".jsonl", dir=folder, delete=False) as file:
            path = Path(file.name)
        problems = [
            {"dataset": error.name, "record": number, "problem": BAD, "reason": reason}
            for number, reason in error.found
        ]
        write_problems(path, problems)
        where = f"; {path} names all of them"
    return InputError(f"{error}\nbad_records=skip leaves such records out{where}")


def write_problems(path: Path, problems: Iterable[Mapping[str, Any]]) -> None:
    """Write one line of JSON for each problem; no file without any."""
    if lines := [json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems]:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
