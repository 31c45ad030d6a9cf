"""Metrics: one reduction per step, and where they go: `metrics.jsonl`, W&B, samples.

The only file that imports wandb. `docs/metrics.md` has the formula of every name.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from omegaconf import DictConfig, OmegaConf

from redaction import redact
from run_directory import LOG_FILES, create_run_dir
from utils import InputError

Parts = Sequence[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]  # rows of the global batch (n,), metrics (n,) each


class Reduced(NamedTuple):
    """The metrics of a global batch over all processes, on the host."""

    examples: dict[str, torch.Tensor]  # (B,) each, in the order of the examples
    scalars: dict[str, float]

    def means(self) -> dict[str, float]:
        """Means over the examples, and the scalars as they are."""
        means = torch.stack(list(self.examples.values())).double().mean(1)
        return dict(zip(self.examples, means.tolist(), strict=True)) | self.scalars


def reduce_parts(
    parts: Parts,
    n_rows: int,
    add: Callable[[torch.Tensor], torch.Tensor],
    *,
    counts: bool = True,
    scalars: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Reduced:
    """Metrics of all microbatches and processes: one collective and one copy to the host, which waits for the device.

    `add` sums a tensor over the processes, which hold zeros where another has values. Of processes that see the same
    rows one `counts`. `scalars` are summed as they are.
    """
    names = list(parts[0][1])
    values = torch.cat([torch.stack(list(metrics.values()), dim=1) for _, metrics in parts])  # (rows here, names)
    table = values.new_zeros(n_rows, len(names))
    if counts:
        table.index_copy_(0, torch.cat([rows for rows, _ in parts]), values)
    sums = add(torch.cat([table.flatten(), *(value.detach().to(table).reshape(1) for value in scalars.values())]))
    sums = sums.cpu()
    columns = sums[: table.numel()].view(n_rows, len(names)).unbind(1)
    return Reduced(
        dict(zip(names, columns, strict=True)), dict(zip(scalars, sums[table.numel() :].tolist(), strict=True))
    )


def peak_memory_gb() -> float:
    """Peak memory of this process in GB (1e9 bytes): allocated on the GPUs if there are any, else resident."""
    if torch.cuda.is_available():
        return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Sample(NamedTuple):
    """A prompt with what policy and reference (None for SFT) continued it with."""

    prompt: str
    policy: str
    reference: str | None


FINISH_SECS = 300  # that W&B may take to send the rest at the end


class Logger(Protocol):
    """Where metrics go. `examples` and `updates` count what was trained on so far.

    From `state_dict()`, saved with a checkpoint, another logger continues: with what was logged by then, and no more.
    """

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None: ...

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class NullLogger:
    """Ranks other than 0 log to this."""

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        pass

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


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


class WandbLogger:
    """Weights & Biases, under the reference's names; training metrics at most every `interval` seconds.

    Steps are `counters/examples` (a metric, not W&B's own step), so that a run rolled back to an earlier checkpoint
    can log the same counts again and loses nothing. The system's own records go with it. A run never waits or fails for
    W&B: what cannot be sent stays on the disk (`wandb sync`), and `metrics.jsonl` has everything.
    """

    def __init__(
        self,
        *,
        name: str,
        project: str,
        entity: str | None,
        config: Mapping,
        run_dir: Path,
        interval: float,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        import wandb

        self._table, self._errors = wandb.Table, (wandb.Error, OSError)
        self.run_dir, self.interval = run_dir, interval
        self._last_train = float("-inf")
        self._lost = False
        is_own = bool(state) and state.get("run_dir") == str(run_dir.resolve())  # not that of a run it continues
        settings = {
            "name": name,
            "project": project,
            "entity": entity,
            "config": dict(config),
            "dir": str(run_dir),
            "id": state["wandb_id"] if is_own else None,
            "resume": "allow",
        }
        try:
            self.run = self._start(wandb, settings)
        except (wandb.Error, ValueError) as error:  # offline too
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"W&B cannot start: {reason}; put that right, or wandb.enabled=false") from error
        self.run.define_metric("counters/examples")
        self.run.define_metric("*", step_metric="counters/examples")

    @staticmethod
    def _start(wandb: Any, settings: Mapping[str, Any]) -> Any:
        """A W&B run; offline, and said so, if it cannot reach its server or has no key."""
        init = partial(
            wandb.init,
            **settings,
            settings=wandb.Settings(finish_timeout=FINISH_SECS, x_disable_meta=True),  # which has the command line
        )
        offline = None  # why, if so
        try:  # with a mode set, a key configured or a terminal to ask on, wandb itself knows what to do
            if not (os.environ.get("WANDB_MODE") or (sys.stdin and sys.stdin.isatty()) or wandb.login(prompt=False)):
                offline = "no API key and no terminal to ask for one"
            run = init(mode="offline" if offline else None)
        except wandb.Error as error:
            offline = " ".join(str(error).split())
            run = init(mode="offline")
        if offline:
            print(f"W&B: {offline}, so logging offline; upload with: wandb sync {Path(run.dir).parent}")
        return run

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        now = time.monotonic()
        if split == "train":
            if now - self._last_train < self.interval:
                return
            self._last_train = now
        self._send({**metrics, "counters/examples": examples, "counters/updates": updates})

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None:
        tables = {}
        for who in ("policy", "reference"):
            rows = [[examples, s.prompt, getattr(s, who)] for s in samples if getattr(s, who) is not None]
            if rows:
                tables[f"{who}_samples"] = self._table(columns=["step", "prompt", "sample"], data=rows)
        self._send({**tables, "counters/examples": examples})

    def _send(self, values: Mapping[str, Any]) -> None:
        self._unless_lost(self.run.log, values)

    def _unless_lost(self, send: Callable, *arguments: Any) -> None:
        if self._lost:
            return
        try:
            send(*arguments)
        except self._errors as error:
            self._lost = True
            print(f"warning: W&B takes no more ({type(error).__name__}: {error}); metrics.jsonl goes on", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self.run.id, "run_dir": str(self.run_dir.resolve())}

    def close(self) -> None:
        self._unless_lost(self.run.finish)


class Loggers:
    """Several loggers as one."""

    def __init__(self, *loggers: Logger) -> None:
        self.loggers = loggers

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        for logger in self.loggers:
            logger.log(split, metrics, examples=examples, updates=updates)

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None:
        for logger in self.loggers:
            logger.log_samples(samples, examples=examples)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for logger in self.loggers for key, value in logger.state_dict().items()}

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


def make_logger(config: DictConfig, run_dir: Path, state: Mapping[str, Any]) -> Logger:
    """What a config asks for, continuing from a logger's `state` if it is not empty."""
    files = FileLogger(run_dir, state)
    if config.debug or not config.wandb.enabled:
        return files
    wandb = WandbLogger(
        name=redact(config.exp_name),
        project=redact(config.wandb.project),
        entity=redact(config.wandb.entity),
        config=redact(OmegaConf.to_container(config, resolve=True)),
        run_dir=run_dir,
        interval=config.minimum_log_interval_secs,
        state=state,
    )
    return Loggers(files, wandb)
