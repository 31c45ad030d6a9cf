"""Runs of train.py in processes of their own that start in no time (forked from one that has imported all), with a
fault on the way. For `test_faults.py`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

from support.warm import CONTEXT, ROOT


def kill_at_step_of_saving(number: int) -> None:
    """SIGKILL this process at the `number`-th call that brings a checkpoint's files or names to the disk."""
    calls = 0

    def dying(call: Callable) -> Callable:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if any(re.search("step-|LATEST|BEST", str(_name(argument))) for argument in arguments):
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted

    for name in ("fsync", "rename", "replace", "symlink"):
        setattr(os, name, dying(getattr(os, name)))


def _name(argument: Any) -> Any:
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else argument


def kill_after_update(number: int) -> None:
    """SIGKILL this process when it has made so many updates, in the middle of the next one."""
    from trainers import BasicTrainer

    clip = BasicTrainer.clip_gradient

    def dying(self: BasicTrainer) -> Any:
        if self.state.batch_counter == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(self)

    BasicTrainer.clip_gradient = dying


def run_out_of_memory_at(number: int) -> None:
    """At this update torch is asked for more memory than there is anywhere."""
    import torch

    from trainers import BasicTrainer

    clip = BasicTrainer.clip_gradient

    def greedy(self: BasicTrainer) -> Any:
        if self.state.batch_counter == number:
            torch.empty(10**13)
        return clip(self)

    BasicTrainer.clip_gradient = greedy


def swallow_signal_in(place: str, number: int) -> None:
    """The signal comes when `MODULE:NAME` is called, which goes on whatever is raised."""
    call_before(place, partial(signal.raise_signal, number))


def call_before(place: str, act: Callable[[], Any]) -> None:
    """Before the first call of `MODULE:NAME` this is called, and what it raises swallowed."""
    module, _, names = place.partition(":")
    *path, name = names.split(".")
    owner = reduce(getattr, path, importlib.import_module(module))
    original, calls = getattr(owner, name), []

    def acting(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(place)
            with contextlib.suppress(BaseException):
                act()
        return original(*arguments, **options)

    setattr(owner, name, staticmethod(acting) if inspect.ismethod(original) else acting)


def limit_file_size(n_bytes: int) -> None:
    """Writing more than so much to a file fails, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def _train(overrides: list[str], log: Path, fault: Callable | None, arguments: tuple) -> None:
    import hydra
    import torch

    import train
    from dpo.errors import InputError, RunError
    from dpo.system.signals import Stopped

    torch.set_num_threads(1)
    file = log.open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    signal.signal(signal.SIGINT, signal.default_int_handler)  # wherever the tests run
    if fault is not None:
        fault(*arguments)
    status = 0
    with hydra.initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        config = hydra.compose("config", [f"++{o}" if o.startswith("dataset_sources.") else o for o in overrides])
    try:
        train.run(config)
    except (InputError, RunError) as error:
        print(error)
        status = 2 if isinstance(error, InputError) else 1
    except Stopped as stopped:
        print(stopped)
        status = stopped.status
    with contextlib.suppress(OSError):
        file.flush()
    os._exit(status)


class Run:
    """A run that goes on beside the test."""

    def __init__(self, overrides: list[str], log: Path, fault: Callable | None = None, *arguments: Any) -> None:
        self.log = log
        self.process = CONTEXT.Process(target=_train, args=(overrides, log, fault, arguments))
        self.process.start()

    def wait(self) -> int:
        """Its exit status; minus a signal's number if that ended it."""
        self.process.join(120)
        assert self.process.exitcode is not None, f"it did not end:\n{self.log.read_text()}"
        return self.process.exitcode
