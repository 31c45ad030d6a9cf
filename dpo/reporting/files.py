"""Log files (docs/metrics.md): a run appends to them, a resumed run first truncates them to its checkpoint."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dpo.checkpoint.files import sync
from dpo.errors import WarningLine
from dpo.numbers import count
from dpo.reporting.events import Callback, Evaluation, Sample, Update
from dpo.system.plain_files import move_aside
from dpo.system.run_directory import add_run_facts, timestamp


class Appender(Callback):
    """Appends lines to `files` on rank 0 alone; a resumed run first truncates them to their sizes at the checkpoint.

    A file that is now shorter than that, or that the checkpoint does not know, is renamed, as are `derived`, the files
    made from `files`. The complete records that the checkpoint knows are written to a new file.
    """

    _sizes: Mapping[str, int] = {}  # bytes at the checkpoint, by file

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Append lines, which have no newlines, to a file in the run's directory."""
        if self.context.rank == 0:
            content = "".join(f"{line}\n" for line in lines)
            with (self.run_dir / name).open("ab") as file:
                file.write(content.encode("utf-8", "replace"))

    @staticmethod
    def find_end(path: Path, size: int) -> int:
        """Return the offset of the end of the last complete record, here a line, within the first `size` bytes."""
        with path.open("rb") as file:
            return file.read(size).rfind(b"\n") + 1

    def on_start(self) -> None:
        """Truncate the files to their sizes at the checkpoint, or rename them (see the class)."""
        if self.context.rank != 0:
            return
        for name in self.files:  # not the checkpoint's names: a forged checkpoint may name any file
            path = self.run_dir / name
            size = path.stat().st_size if path.exists() else 0
            saved_size = self._sizes.get(name, -1)  # -1: the checkpoint does not know the file
            # The offset of the end of the last complete record that the checkpoint knows.
            end = self.find_end(path, min(saved_size, size)) if saved_size > 0 and size else 0
            is_unknown = saved_size < 0 < size  # the file has lines of another run
            if end < saved_size or is_unknown:
                records = path.read_bytes()[:end] if size else b""  # read now, as the file is renamed below
                warning = f"{path} is not as the run's checkpoint knows it"
                for file in (*(self.run_dir / derived for derived in self.derived), path):
                    if file.exists():
                        warning += f"; {file.name} is renamed to {move_aside(file).name}"
                self.log(WarningLine(warning))
                if size:
                    path.write_bytes(records)
            elif size > end:
                os.truncate(path, end)

    def state_dict(self) -> dict:
        """Return the sizes of files after syncing them: a checkpoint must not record bytes that are not on the disk."""
        sizes = dict.fromkeys(self.files, 0)
        for name in self.files:
            path = self.run_dir / name
            if path.exists():
                sync(path)
                sizes[name] = path.stat().st_size
        return {"log_bytes": sizes}

    def load_state_dict(self, state: Mapping) -> None:
        self._sizes = state.get("log_bytes", {})


class FileLogger(Appender):
    """Logs metrics, samples and answers; adds parameter counts and the run's end to `env.json`."""

    files = ("metrics.jsonl", "samples.jsonl", "samples.txt", "answers.jsonl")
    _drawn: Sequence[dict] = ()  # records of the answers that the last update drew, which the next evaluation logs

    def on_start(self) -> None:
        """Truncate the files as any Appender does, and write to `env.json` how many parameters the policy has."""
        super().on_start()
        add_run_facts(self.run_dir, **self.context.count_parameters())

    def on_update(self, update: Update) -> None:
        """Log the metrics, and keep the answers that the policy drew for a few prompts until the next evaluation."""
        place = {"split": "train", "examples": update.n_examples, "updates": update.number}
        self._append_metrics(place, update.metrics)
        self._drawn = []
        for drawn in list(update.drawn.values())[: self.plan.evaluation.n_eval_model_samples]:
            record = {
                "examples": update.n_examples,
                "prompt": drawn.prompt,
                "completions": [
                    {"text": answer.text, "score": answer.score, "tokens": len(answer.tokens), "ended": answer.ended}
                    for answer in drawn.answers
                ],
                "best": drawn.best,  # an index in `completions`
                "worst": drawn.worst,
            }
            if drawn.is_flipped:
                record["flipped"] = True
            self._drawn.append(record)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        place = {"split": "eval", "examples": evaluation.n_examples, "updates": evaluation.n_updates}
        self._append_metrics(place, evaluation.metrics)
        for record in self._drawn:
            self._append_record("samples.jsonl", record)

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        bar = "=" * 30
        for sample in samples:
            self._append_record("samples.jsonl", {"examples": n_examples, **sample._asdict()})
            lines = [f"{bar} after {count(n_examples, 'example')} {bar}", sample.prompt.strip()]
            for name, text in (("policy", sample.policy), ("reference", sample.reference)):
                if text is not None:
                    lines += [f"--- {name} ---", text.strip()]
            self.append("samples.txt", [*lines, ""])  # for people

    def on_answers(self, n_examples: int, answers: Mapping[str, str]) -> None:
        for prompt, answer in answers.items():
            self._append_record("answers.jsonl", {"examples": n_examples, "prompt": prompt, "answer": answer})

    def state_dict(self) -> dict:
        return {**super().state_dict(), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._drawn = state.get("drawn", ())

    def on_end(self) -> None:
        add_run_facts(self.run_dir, ended=timestamp())

    def _append_metrics(self, place: Mapping, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._append_record("metrics.jsonl", {**place, **finite})

    def _append_record(self, name: str, record: Mapping) -> None:
        self.append(name, [json.dumps(record, ensure_ascii=False)])
