"""The table of callbacks, and the names of the files that they write."""

from dpo import plugins
from dpo.reporting.anomalies import CollapseWarner, NonFiniteGuard
from dpo.reporting.events import Callback
from dpo.reporting.files import FileLogger
from dpo.reporting.ledger import Ledger
from dpo.reporting.report import ReportWriter
from dpo.reporting.trackers import TensorBoardLogger, WandbLogger

CALLBACKS = {  # in the order of their calls
    "nonfinite": NonFiniteGuard,
    "files": FileLogger,
    "ledger": Ledger,
    "report": ReportWriter,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "collapse": CollapseWarner,
}


def list_callbacks() -> dict[str, type[Callback]]:
    """Return the classes of our callbacks and of the user's, by name."""
    return CALLBACKS | plugins.CALLBACKS


def list_logs() -> list[str]:
    """List the files that callbacks append to, or make from them, relative to a run's directory."""
    return [name for callback in list_callbacks().values() for name in (*callback.files, *callback.derived)]
