"""Metrics: one reduction per step, and where they go: `metrics.jsonl`, W&B, samples.

The only file that imports wandb. `docs/metrics.md` has the formula of every name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from dpo.reporting.files import FileLogger, Sample
from dpo.reporting.wandb import WandbLogger
from dpo.system.redaction import redact


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
