"""Files that a run appends to, and a resumed run truncates.

docs/metrics.md describes their lines.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpo.analysis.runs import rank_answers
from dpo.models.answers import Drawn
from dpo.numbers import count
from dpo.reporting.events import Callback, Evaluation, RunContext, Update
from dpo.system.plain_files import move_aside
from dpo.system.run_directory import add_to_record, create_run_dir, now


class Appender(Callback):
    """A callback that appends to `files` in the run directory.

    At the start each file is cut to its last whole record within the size in the checkpoint; later records are removed,
    as they will be written again. Files unknown to the checkpoint, and damaged ones, are moved aside with a warning.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.run_dir = context.run_dir
        self._sizes: Mapping[str, int] = {}  # of the files, at the checkpoint
        self._was_off = False

    def find_end(self, path: Path, size: int) -> int:
        """End of the last whole record within `size` bytes.

        Here, where nothing is known about records, all bytes count as whole.
        """
        return size

    def on_start(self) -> None:
        create_run_dir(str(self.run_dir), logs=(*self.files, *self.derived), continued=True)
        for name in self.files:  # not those that the checkpoint names: a forged one may name any file
            self._keep_known(self.run_dir / name, self._sizes.get(name))
        if self._was_off:
            self.context.log(f"warning: {', '.join(self.files)}: nothing of what was trained while this was off")

    def _keep_known(self, path: Path, size: int | None) -> None:
        """Cut a file to its `size` in the checkpoint, if any."""
        on_disk = path.stat().st_size if path.exists() else 0
        if size is None:
            if on_disk:
                aside = self._move_aside(path)
                self.context.log(f"warning: no checkpoint knows {path}: it becomes {aside.name}")
            return
        present = min(size, on_disk)  # bytes that the checkpoint counts and that are there
        end = self.find_end(path, present)
        if end < present:
            aside = self._move_aside(path)
            with aside.open("rb") as damaged:
                path.write_bytes(damaged.read(end))
            self.context.log(
                f"warning: {path} is damaged after {end:,} of the {size:,} bytes that were logged before the "
                f"checkpoint: these stay, and the file as it was becomes {aside.name}"
            )
        elif end < size:
            self.context.log(f"warning: {path} is missing what was logged before the checkpoint")
            self._move_derived_aside()
        elif end < on_disk:
            os.truncate(path, end)

    def _move_aside(self, path: Path) -> Path:
        self._move_derived_aside()
        return move_aside(path)

    def _move_derived_aside(self) -> None:
        for name in self.derived:
            if (self.run_dir / name).exists():
                move_aside(self.run_dir / name)

    def state_dict(self) -> dict[str, Any]:
        """The size of each file, which is synced to the disk first."""
        sizes = dict.fromkeys(self.files, 0)
        for name in self.files:
            path = self.run_dir / name
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = file.seek(0, os.SEEK_END)
        return {"log_bytes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sizes, self._was_off = state.get("log_bytes", {}), state.get("was_off", False)


class LogWriter(Appender):
    """An appender of lines, flushed immediately."""

    def find_end(self, path: Path, size: int) -> int:
        """End of the last whole line; in `.jsonl`, of JSON objects."""
        end = 0
        if not size:  # the file may be missing
            return end
        with path.open("rb") as file:
            for line in file:
                is_whole = line.endswith(b"\n") and end + len(line) <= size
                if not is_whole or (path.suffix == ".jsonl" and not _is_object(line)):
                    break
                end += len(line)
        return end

    def append(self, name: str, lines: Iterable[str]) -> None:
        path = self.run_dir / name
        with path.open("ab+") as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            if size and file.read() != b"\n":  # a full disk or another program cut the last line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                print(f"warning: {path} ended with an incomplete line, which was removed", flush=True)
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class FileLogger(LogWriter):
    """Logger of metrics, samples, and the last drawn answers.

    It also records in `env.json` the parameter counts and when the run ended. NaN and infinite values are null.
    """

    files = ("metrics.jsonl", "samples.jsonl", "samples.txt")

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._drawn: list[dict[str, Any]] = []  # records of the last update's answers, for the next evaluation

    def on_start(self) -> None:
        super().on_start()
        if self.context.parameters is not None:
            add_to_record(self.run_dir, parameters=self.context.parameters._asdict())

    def on_update(self, update: Update) -> None:
        self._log("train", update.metrics, examples=update.n_examples, updates=update.number)
        shown = [*update.drawn.values()][: self.context.plan.evaluation.n_eval_model_samples]
        self._drawn = [_make_record(update.n_examples, drawn) for drawn in shown]

    def on_evaluation(self, evaluation: Evaluation) -> None:
        examples = evaluation.n_examples
        self._log("eval", evaluation.metrics, examples=examples, updates=evaluation.n_updates)
        records = [{"examples": examples, **sample._asdict()} for sample in evaluation.samples] + self._drawn
        if not records:
            return
        self.append("samples.jsonl", (json.dumps(record, ensure_ascii=False) for record in records))
        lines, bar, after = [], "=" * 30, f"after {count(examples, 'example')}"
        for sample in evaluation.samples:
            lines += [f"{bar} {after} {bar}", sample.prompt.strip(), "--- policy ---", sample.policy.strip()]
            lines += ["--- reference ---", sample.reference.strip()] if sample.reference is not None else []
            lines.append("")
        for record in self._drawn:
            lines += [f"{bar} {after}, drawn by the last update {bar}", record["prompt"].strip()]
            for name, answer in rank_answers(record):
                facts = f"score {answer['score']:.6g}, {count(answer['tokens'], 'token')}"
                lines.append(f"--- {name}: {facts}{'' if answer['ended'] else ', cut off'} ---")
                lines.append(answer["text"].strip())
            lines.append("")
        self.append("samples.txt", lines)

    def state_dict(self) -> dict[str, Any]:
        """Sizes, and drawn answers that the next evaluation will write."""
        return super().state_dict() | ({"drawn": self._drawn} if self._drawn else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._drawn = state.get("drawn", [])

    def on_end(self) -> None:
        add_to_record(self.run_dir, ended=now())

    def _log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"split": split, "examples": examples, "updates": updates, **finite}
        self.append("metrics.jsonl", [json.dumps(line)])


def _make_record(n_examples: int, drawn: Drawn) -> dict[str, Any]:
    """A prompt, its answers in order, and the pair's indices."""
    answers = [{"text": a.text, "score": a.score, "tokens": len(a.tokens), "ended": a.ended} for a in drawn.answers]
    pair = {"best": drawn.best, "worst": drawn.worst}
    return {"examples": n_examples, "prompt": drawn.prompt, "completions": answers, **pair}
