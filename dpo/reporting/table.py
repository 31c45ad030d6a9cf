"""The callbacks of every run, by the names under which checkpoints hold their states."""

from __future__ import annotations

from dpo.reporting.anomalies import NonFiniteGuard, SpikeWarner
from dpo.reporting.files import FileLogger
from dpo.reporting.ledger import Ledger
from dpo.reporting.report import ReportWriter
from dpo.reporting.tensorboard import TensorBoardLogger
from dpo.reporting.wandb import WandbLogger

CALLBACKS = {
    "nonfinite": NonFiniteGuard,
    "files": FileLogger,
    "ledger": Ledger,
    "report": ReportWriter,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "spikes": SpikeWarner,
}
LOGS = tuple(name for callback in CALLBACKS.values() for name in (*callback.files, *callback.derived))
