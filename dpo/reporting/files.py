"""`metrics.jsonl`, `samples.jsonl` and `samples.txt`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpo.system.run_directory import LOG_FILES, create_run_dir


class Sample(NamedTuple):
    """A prompt with what policy and reference (None for SFT) continued it with."""

    prompt: str
    policy: str
    reference: str | None


class FileLogger:
    """`metrics.jsonl`, `samples.jsonl` and `samples.txt` in the run directory; every line, flushed at once.

    What is no finite number is null, as JSON wants it.
    The directory is made if it is not there. What lies in the files beyond a `state` is cut off: it was logged after
    the checkpoint and will be again.
    """

    def __init__(self, run_dir: Path, state: Mapping[str, Any] | None = None) -> None:
        self.run_dir = run_dir
        create_run_dir(str(run_dir), continued=True)
        sizes = (state or {}).get("log_bytes", {})
        for name in (name for name in LOG_FILES if name in sizes):  # a checkpoint may name any file
            path, size = run_dir / name, sizes[name]
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                print(f"warning: {path} lacks lines that were logged before the checkpoint")
            elif found > size:
                os.truncate(path, size)

    def state_dict(self) -> dict[str, Any]:
        """The bytes of each file, which are on the disk by then."""
        sizes = {}
        for name in LOG_FILES:
            path = self.run_dir / name
            sizes[name] = 0
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = file.seek(0, os.SEEK_END)
        return {"log_bytes": sizes}

    def _append(self, name: str, lines: Iterable[str]) -> None:
        path = self.run_dir / name
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a full disk, or somebody else, has cut it
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
                    print(f"warning: {path} ended in the middle of a line, which is removed", flush=True)
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"split": split, "examples": examples, "updates": updates, **finite}
        self._append("metrics.jsonl", [json.dumps(line)])

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None:
        self._append(
            "samples.jsonl",
            (json.dumps({"examples": examples, **s._asdict()}, ensure_ascii=False) for s in samples),
        )
        lines = []
        for sample in samples:
            lines += [f"{'=' * 30} after {examples} examples {'=' * 30}", sample.prompt.strip()]
            lines += ["--- policy ---", sample.policy.strip()]
            lines += ["--- reference ---", sample.reference.strip()] if sample.reference is not None else []
            lines.append("")
        self._append("samples.txt", lines)

    def close(self) -> None:
        pass
