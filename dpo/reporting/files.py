"""Log files: a run appends to them, a resumed run truncates them.

docs/metrics.md describes their lines.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpo.analysis.runs import rank_answers
from dpo.models.answers import Drawn
from dpo.numbers import count
from dpo.reporting.events import Callback, Evaluation, RunContext, Sample, Update
from dpo.system.plain_files import move_aside
from dpo.system.run_directory import add_to_record, create_run_dir, now


class Appender(Callback):
    """A callback that appends to `files` in the run directory.

    At the start of a resumed run each file is truncated to the size that it had at the checkpoint, as the run writes
    the later records again. A file that is damaged before that size is renamed, and a new file gets the complete
    records before the damage. A file that the checkpoint does not know is renamed too.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.run_dir = context.run_dir
        self._sizes: Mapping[str, int] = {}  # bytes at the checkpoint, by file
        self._was_off = False  # the run has trained without this callback

    def find_end(self, path: Path, size: int) -> int:
        """Position after the last complete record in the first `size` bytes.

        Subclasses know the form of a record; here all bytes count as complete.
        """
        return size

    def on_start(self) -> None:
        create_run_dir(str(self.run_dir), logs=(*self.files, *self.derived), continued=True)
        for name in self.files:  # not the checkpoint's names: a forged checkpoint may name any file
            self._truncate(self.run_dir / name, self._sizes.get(name))
        if self._was_off:
            names = ", ".join(self.files)
            self.context.log(f"warning: {names} lacks the updates during which this log was switched off in the config")

    def _truncate(self, path: Path, size: int | None) -> None:
        """Truncate a file to its size at the checkpoint, or less; None if no checkpoint recorded a size."""
        size_now = path.stat().st_size if path.exists() else 0
        logged = size or 0  # before the checkpoint
        n_bytes_left = min(logged, size_now)
        end = self.find_end(path, n_bytes_left)
        is_unknown, is_damaged = size is None and size_now > 0, end < n_bytes_left
        is_short = not is_damaged and end < logged
        if is_unknown or is_damaged or is_short:  # what was made from the file is older or newer than it
            for name in self.derived:
                if (self.run_dir / name).exists():
                    move_aside(self.run_dir / name)
        if is_unknown:
            problem = f"does not belong to a checkpoint of this run, so it is renamed to {move_aside(path).name}"
        elif is_damaged:
            aside = move_aside(path)
            with aside.open("rb") as damaged_file:
                path.write_bytes(damaged_file.read(end))
            problem = (
                f"is damaged after {end:,} of the {logged:,} bytes that were logged before the checkpoint: the damaged "
                f"file is renamed to {aside.name}, and a new {path.name} has its first {end:,} bytes"
            )
        elif is_short:
            problem = f"lacks the last {logged - end:,} of the {logged:,} bytes that were logged before the checkpoint"
        else:
            if end < size_now:
                os.truncate(path, end)
            return
        self.context.log(f"warning: {path} {problem}")

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
        """Position after the last complete line within `size` bytes.

        In `.jsonl` only lines with a JSON object are complete.
        """
        end = 0
        if size == 0:  # the file may be missing
            return end
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or end + len(line) > size:
                    break
                if path.suffix == ".jsonl" and not _is_json_object(line):
                    break
                end += len(line)
        return end

    def append(self, name: str, lines: Iterable[str]) -> None:
        path = self.run_dir / name
        with path.open("ab+") as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            if size > 0 and file.read() != b"\n":  # the last line is incomplete, for example after a full disk
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                print(f"warning: {path} ended with an incomplete line, which was removed", flush=True)
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class FileLogger(LogWriter):
    """Logger of metrics, samples, and answers; in `env.json` of parameter counts and the run's end."""

    files = ("metrics.jsonl", "samples.jsonl", "samples.txt", "answers.jsonl")

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._drawn: list[dict[str, Any]] = []  # records of the last update's answers, for the next evaluation

    def on_start(self) -> None:
        super().on_start()
        if self.context.parameters is not None:
            add_to_record(self.run_dir, parameters=self.context.parameters._asdict())

    def on_update(self, update: Update) -> None:
        self._log("train", update.metrics, examples=update.n_examples, updates=update.number)
        n_recorded = self.context.plan.evaluation.n_eval_model_samples
        drawn_by_prompt = list(update.drawn.values())[:n_recorded]
        self._drawn = [_make_record(update.n_examples, drawn) for drawn in drawn_by_prompt]

    def on_evaluation(self, evaluation: Evaluation) -> None:
        examples = evaluation.n_examples
        self._log("eval", evaluation.metrics, examples=examples, updates=evaluation.n_updates)
        self._append_records(self._drawn, self._describe_drawn(examples))

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        records = [{"examples": n_examples, **sample._asdict()} for sample in samples]
        self._append_records(records, self._describe_samples(n_examples, samples))

    def on_answers(self, n_examples: int, answers: Mapping[str, str]) -> None:
        records = [{"examples": n_examples, "prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
        self.append("answers.jsonl", (json.dumps(record, ensure_ascii=False) for record in records))

    def _append_records(self, records: Sequence[Mapping[str, Any]], text: Iterable[str]) -> None:
        if records:
            self.append("samples.jsonl", (json.dumps(record, ensure_ascii=False) for record in records))
            self.append("samples.txt", text)

    def _describe_samples(self, n_examples: int, samples: Sequence[Sample]) -> Iterator[str]:
        for sample in samples:
            yield from (_make_heading(n_examples), sample.prompt.strip(), "--- policy ---", sample.policy.strip())
            if sample.reference is not None:
                yield from ("--- reference ---", sample.reference.strip())
            yield ""

    def _describe_drawn(self, n_examples: int) -> Iterator[str]:
        for record in self._drawn:
            yield from (_make_heading(n_examples, ", drawn by the last update"), record["prompt"].strip())
            for name, answer in rank_answers(record):
                facts = f"score {answer['score']:.6g}, {count(answer['tokens'], 'token')}"
                if not answer["ended"]:
                    facts += ", cut off"
                yield from (f"--- {name}: {facts} ---", answer["text"].strip())
            yield ""

    def state_dict(self) -> dict[str, Any]:
        """File sizes, and the drawn answers that the next evaluation will write."""
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


def _make_heading(n_examples: int, what: str = "") -> str:
    bar = "=" * 30
    return f"{bar} after {count(n_examples, 'example')}{what} {bar}"


def _make_record(n_examples: int, drawn: Drawn) -> dict[str, Any]:
    """A record of `samples.jsonl`: a prompt and its answers."""
    answers = [
        {"text": answer.text, "score": answer.score, "tokens": len(answer.tokens), "ended": answer.ended}
        for answer in drawn.answers
    ]
    # best and worst are indices in `completions`
    record = {"examples": n_examples, "prompt": drawn.prompt, "turns": drawn.turns, "completions": answers}
    record |= {"best": drawn.best, "worst": drawn.worst}
    if drawn.is_flipped:
        record["flipped"] = True
    return record
