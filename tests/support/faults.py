"""Runs of train.py beside the test, and faults that happen in them."""

import contextlib
import importlib
import inspect
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

from dpo.system import launching
from support.runs import ROOT, make_environment
from support.warm import Python

SHARDED = ("trainer=FSDPTrainer", "world_size=2", "eval_batch_size=8", "n_eval_examples=8", "n_examples=40")
STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}  # of a run that was asked to stop


def start_run(overrides: list[str], fault: Callable[[], None] | None = None, **environment: str) -> Python:
    """`python train.py OVERRIDES` in a session of its own, beside the test."""
    environment = make_environment(**environment)
    return Python("train.py", *overrides, environment=environment, merge=True, session=True, fault=fault)


def start_interpreter(
    *arguments: str, prepare: Callable[[], object] = lambda: None, output: Any = None, **environment: str
) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in a new interpreter and a session of its own, with pipes, or a file for all it prints."""

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests may run with SIGINT ignored
        prepare()

    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=make_environment(**environment),
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=subprocess.STDOUT if output else subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=begin,
    )


def kill_at_step_of_saving(number: int) -> None:
    """SIGKILL this process at a step of saving.

    That is the `number`-th call that brings a checkpoint's files or names to the disk.
    """
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


def kill_rank_at_step_of_saving(rank: int, number: int) -> None:
    """SIGKILL the worker of a rank at a step of saving."""
    run_worker = launching._run_worker

    def run_and_die(rank_env: launching.RankEnv, *arguments: Any) -> None:
        if rank_env.rank == rank:
            kill_at_step_of_saving(number)
        run_worker(rank_env, *arguments)

    launching._run_worker = run_and_die


def _name(argument: Any) -> Any:
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else argument


def kill_after_update(number: int) -> None:
    """SIGKILL this process in the middle of update `number` + 1."""
    from trainers import Trainer

    clip = Trainer.clip_gradient

    def kill_or_clip(self: Trainer) -> Any:
        if self.batch_counter == number:
            signal.raise_signal(signal.SIGKILL)
        return clip(self)

    Trainer.clip_gradient = kill_or_clip


def fail_to_sample(*ranks: int) -> None:
    """Let these ranks fail at the third token of every sample, which a checkpoint precedes."""
    from dpo.training.evaluation import Evaluator
    from dpo.training.online import StopRequest

    check, draw = StopRequest.raise_before_token, Evaluator.samples

    def failing(self: StopRequest, index: int) -> None:
        if index == 2 and self.mesh.rank in ranks:
            raise ArithmeticError("no such token")
        check(self, index)

    def draw_failing(self: Evaluator, **options: Any) -> Any:
        StopRequest.raise_before_token = failing
        return draw(self, **options)

    Evaluator.samples = draw_failing


def call_before(place: str, act: Callable[[], Any]) -> None:
    """Call `act` before the first call of `MODULE:NAME`.

    An exception of `act` is swallowed.
    """
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
    """Let writes beyond this size fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
