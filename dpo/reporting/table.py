from dpo import plugins
from dpo.reporting.anomalies import CollapseWarner, NonFiniteGuard
from dpo.reporting.events import Callback
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


def list_callbacks() -> dict[str, type[Callback]]:
    return CALLBACKS | plugins.CALLBACKS


def list_logs() -> list[str]:
    """Names of files that callbacks write."""
    return [name for callback in list_callbacks().values() for name in (*callback.files, *callback.derived)]
