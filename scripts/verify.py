"""Verifies checkpoints: reads every byte of every file and compares it with the checksums in the manifest.

    python -m scripts.verify RUN_OR_CHECKPOINT [...] [--json]

A run's directory means all of its `step-N`, newest first. Prints one line per checkpoint. Exit status: 0 all are
intact, 1 one is damaged, 2 a path is neither a run nor a checkpoint. Changes nothing. Resuming does the same with the
checkpoint it continues from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpo.checkpoint.files import MANIFEST, STEP, DamagedCheckpoint, check_complete, find_checkpoints


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that a path or link names, or all of the run whose directory it is."""
    path = path.expanduser().resolve()
    if path.is_dir() and (STEP.fullmatch(path.name) or (path / MANIFEST).exists()):
        return [path]
    return find_checkpoints(path)


def examine(checkpoint: Path) -> dict[str, Any]:
    """Check one checkpoint."""
    try:
        files = check_complete(checkpoint)["files"]
    except DamagedCheckpoint as error:
        return {"checkpoint": str(checkpoint), "whole": False, "reason": str(error)}
    return {"checkpoint": str(checkpoint), "whole": True, "bytes": sum(file["bytes"] for file in files.values())}


def as_line(found: dict[str, Any]) -> str:
    if found["whole"]:
        return f"whole    {found['checkpoint']} ({found['bytes'] / 1e9:.3g} GB)"
    return f"damaged  {found['reason']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.verify", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of text")
    asked = parser.parse_args(arguments)
    checkpoints = {path: checkpoints_at(path) for path in asked.paths}
    for path in (path for path, found in checkpoints.items() if not found):
        parser.error(f"{path} is neither a checkpoint nor a directory with a step-N")
    report = []
    for checkpoint in dict.fromkeys(c for found in checkpoints.values() for c in found):
        report.append(examine(checkpoint))
        if not asked.json:
            print(as_line(report[-1]), flush=True)
    if asked.json:
        print(json.dumps(report, indent=2))
    return int(not all(found["whole"] for found in report))


if __name__ == "__main__":
    sys.exit(main())
