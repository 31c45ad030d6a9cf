"""Functions by which a Python file of the user adds a loss, a dataset and more; `plugins=[FILE.py]` runs such files."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpo.errors import InputError
from dpo.losses import LOSSES, Loss, Losses, list_options, list_parameters
from dpo.system.plain_files import resolve_path
from dpo.system.users_code import hash_code, load_module

Rows = Iterable[Mapping]
ADDED_LOSSES: dict[str, dict] = {}  # by loss: each option's default, or REQUIRED if it has none
DATASETS: dict[str, Callable[[str], Rows | None]] = {}
READERS: dict[str, Callable[[Mapping], Mapping | None]] = {}
OPTIMIZERS: dict[str, type] = {}
CALLBACKS: dict[str, type] = {}
REQUIRED = "???"  # how OmegaConf writes a value that is missing
_digests: dict[Path, str] = {}  # by file that has run


def add_loss(name: str, formula: Callable[..., Losses], **fields: Any) -> None:
    """Add `loss=NAME`, whose formula is a function like those of `dpo.losses.formulas`.

    The formula's keyword-only parameters become the keys `loss.PARAMETER`, with their types, bounds and defaults.
    `fields` are those of `dpo.losses.Loss`. Raises InputError for a parameter without a type, or with another type than
    a parameter of this name has in another loss.
    """
    loss = Loss(formula, **fields)
    known_types = list_options()
    parameters = inspect.signature(formula).parameters
    defaults = {}
    for option, annotation in list_parameters(loss).items():
        if option == "name" or annotation is inspect.Parameter.empty:
            raise InputError(f"loss {name}: its option {option} must have a type, and another name than `name`")
        known = known_types.get(option, annotation)
        if annotation != known:
            raise InputError(f"loss {name}: its option {option} must have the type of other losses' {option}, {known}")
        default = parameters[option].default
        defaults[option] = REQUIRED if default is inspect.Parameter.empty else default
    _add("loss", name, loss, LOSSES)
    ADDED_LOSSES[name] = defaults


def add_dataset(name: str, load: Callable[[str], Rows | None]) -> None:
    """Add `datasets=[NAME]`: `load("train")` and `load("test")` return rows, as docs/formats.md describes.

    If `load("test")` returns None, some of the prompts are held out as the test split.
    """
    _add("dataset", name, load, DATASETS)


def add_reader(name: str, read: Callable[[Mapping], Mapping | None]) -> None:
    """Add `dataset_sources.DATASET.reader=NAME`.

    `read` turns a row of the data into one that docs/formats.md describes, or returns None to leave the row out.
    """
    _add("reader", name, read, READERS)


def add_optimizer(name: str, optimizer: type) -> None:
    """Add `optimizer=NAME`, a class like those of `torch.optim`; its arguments are `optimizer_args`."""
    _add("optimizer", name, optimizer, OPTIMIZERS)


def add_callback(name: str, callback: type) -> None:
    """Add a subclass of `dpo.reporting.events.Callback` to every run; `name` is the key of its state in checkpoints."""
    _add("callback", name, callback, CALLBACKS)


def _add(what: str, name: str, added: Any, table: dict) -> None:
    """Add to a table; InputError for a name that it has, or that is no identifier (in which - counts as _)."""
    if name in table or not name.replace("-", "_").isidentifier():
        raise InputError(f"{what} {name!r}: this name is taken, or has other characters than letters, digits and _")
    table[name] = added


def run_plugins(files: Sequence[str]) -> None:
    """Run each file that has not yet run in this process. Raises InputError for one that fails."""
    for name in files:
        file = resolve_path(name)
        if file not in _digests:
            load_module(file, f"plugins: {file} cannot be run")
            _digests[file] = hash_code(file)


def find_digests() -> list[str]:
    """Return digests of the files that have run, by which a resumed run or another rank notices different code."""
    return sorted(_digests.values())
