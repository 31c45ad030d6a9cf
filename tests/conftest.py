"""Fixtures that tests of several packages use."""

import copy
import gc
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Only fixtures import what needs torch: xdist reads this file too, before starting the processes that run tests.
os.environ["HF_HUB_OFFLINE"] = "1"
if "GPU_TEST_CHILD" not in os.environ:  # tests/gpu/conftest.py decides for its child processes
    os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny: threads would wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, whose children would not hear it either
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until tests are collected: nothing that the tests import is garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, as many tests wait.

    At most 5, as each takes a gigabyte of memory.
    """
    return min(len(os.sched_getaffinity(0)) + 1, 5)


@pytest.fixture(scope="session")
def tokenizer():
    from support.runs import TINY

    from dpo.data.tokenizer import load_tokenizer

    return load_tokenizer(str(TINY))


@pytest.fixture
def chat(tokenizer):
    """A function that gives a copied tiny tokenizer a chat template."""

    def with_template(template: str):
        copied = copy.deepcopy(tokenizer)
        copied.chat_template = template
        return copied

    return with_template


@pytest.fixture
def printed(capsys) -> Callable[[], str]:
    """A function that returns what was printed since it was last asked."""
    return lambda: capsys.readouterr().out


@pytest.fixture(scope="session")
def loaded_tiny_llama():
    from support.models import load_tiny

    return load_tiny()


@pytest.fixture
def tiny_llama(loaded_tiny_llama):
    return copy.deepcopy(loaded_tiny_llama)  # a trainer freezes its reference, for example


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """Two datasets of 22 training pairs and 8 test pairs each.

    Training pairs have 11 prompts, and make 5 batches of 4 and a rest.
    """
    from support.runs import write_rows

    folder = tmp_path_factory.mktemp("data")

    def row(i: int, dataset: str) -> dict[str, str]:
        prompt = f"\n\nHuman: Where is {dataset} number {i // 2}?\n\nAssistant:"
        return {
            "chosen": f"{prompt} On desk {i}{', I think' * (i % 3)}.",
            "rejected": f"{prompt} Go {'away ' * (i % 4)}!",
        }

    for name in ("hh", "more"):
        write_rows(folder / name / "train.jsonl", [row(i, name) for i in range(22)])
        write_rows(folder / name / "test.jsonl", [row(i, name) for i in range(22, 30)])
    return folder


@pytest.fixture(scope="session")
def finished(rows, tmp_path_factory) -> Callable[..., Path]:
    """The directory of a complete run with these overrides, trained once.

    Compare with the run, or copy it. Ask for it before anything is patched.
    """
    from support.runs import small_run, train_here

    @cache
    def train_once(*overrides: str) -> Path:
        run_dir = tmp_path_factory.mktemp("trained") / "run"
        train_here(small_run(rows, run_dir, *overrides))
        return run_dir

    return train_once


@pytest.fixture
def copied(finished, tmp_path) -> Callable[..., Path]:
    """Copy a complete run with these overrides to `tmp_path / name`."""
    return lambda name, *overrides: shutil.copytree(finished(*overrides), tmp_path / name, symlinks=True)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """The directory of the run with the name "run"."""
    return tmp_path / "run"


@pytest.fixture
def command(rows, tmp_path):
    """The overrides of a small run into `tmp_path / name`."""
    from support.runs import small_run

    return lambda name, *overrides: small_run(rows, tmp_path / name, *overrides)


@pytest.fixture
def run(command):
    """Run train.py's `run` in this process."""
    from support.runs import run_here

    return lambda name, *overrides: run_here(command(name, *overrides))


@pytest.fixture
def run_and_stop(run, monkeypatch):
    """Run train.py's `run` here, stopped by a signal in update `after`."""
    from dpo.reporting.files import FileLogger
    from dpo.system.signals import Stopped

    log = FileLogger.on_update

    def start(name: str, *overrides: str, after: int = 3) -> None:
        def log_and_stop(self, update) -> None:
            log(self, update)
            if update.number == after:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(FileLogger, "on_update", log_and_stop)
            with pytest.raises(Stopped):
                run(name, *overrides)

    return start


@pytest.fixture
def nothing_in_float32(monkeypatch):
    from support.models import keep_float64

    keep_float64(monkeypatch)


@pytest.fixture
def spoil(monkeypatch):
    """Make a loss of training batch `update` NaN, or its gradient."""

    def arm(update: int, what: str = "loss") -> None:
        from dpo.training.objective import Objective

        losses_of, seen = Objective.losses, []

        def spoilt(self, *arguments, split, **options):
            losses, metrics = losses_of(self, *arguments, split=split, **options)
            if split == "train":
                seen.append(1)
                if len(seen) == update:
                    if what == "loss":
                        losses = losses * float("nan")
                        metrics = {**metrics, "loss/train": losses.detach()}
                    else:
                        losses.register_hook(lambda gradient: gradient * float("inf"))
            return losses, metrics

        monkeypatch.setattr(Objective, "losses", spoilt)

    return arm
