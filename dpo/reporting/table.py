from __future__ import annotations

from dpo.reporting.anomalies import CollapseWarner, NonFiniteGuard
from dpo.reporting.files import FileLogger
from dpo.reporting.ledger import Ledger
from dpo.reporting.report import ReportWriter
from dpo.reporting.trackers import TensorBoardLogger, WandbLogger

CALLBACKS = {
    "nonfinite": NonFiniteGuard,
    "files": FileLogger,
    "ledger": Ledger,
    "report": ReportWriter,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "collapse": CollapseWarner,
}
LOGS = tuple(name for callback in CALLBACKS.values() for name in (*callback.files, *callback.derived))
