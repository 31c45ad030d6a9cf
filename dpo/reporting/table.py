"""The callbacks of every run, by the names under which checkpoints hold their states."""

from __future__ import annotations

from dpo.reporting.anomalies import NonFiniteGuard, SpikeWarner
from dpo.reporting.files import FileLogger
<<<<<<< HEAD
from dpo.reporting.ledger import Ledger
from dpo.reporting.tensorboard import TensorBoardLogger
=======
from dpo.reporting.report import ReportWriter
>>>>>>> 421be57 (scripts.report and report=true: curves and one page of a run or several)
from dpo.reporting.wandb import WandbLogger

CALLBACKS = {
    "nonfinite": NonFiniteGuard,
    "files": FileLogger,
<<<<<<< HEAD
    "ledger": Ledger,
    "tensorboard": TensorBoardLogger,
=======
    "report": ReportWriter,
>>>>>>> 421be57 (scripts.report and report=true: curves and one page of a run or several)
    "wandb": WandbLogger,
    "spikes": SpikeWarner,
}
LOGS = tuple(name for callback in CALLBACKS.values() for name in callback.files)
