"""Tests marked `gpu` run in a process of their own, so that a CUDA error in one stops no other."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dpo.system.host import count_gpus, set_allocators

# The acceptance run goes in the order of value, so that a run that is cut short has done what matters most.
NAMES = ("layouts", "features", "syncs", "golden", "memory", "rates", "fsdp", "repeats", "compile")
DEADLINE = time.time() + 60 * float(os.environ.get("GPU_CHECK_MINUTES", "inf"))
CHILD = "GPU_TEST_CHILD"  # set in the process of one test
LAST_LINES = 40  # of the output of a test that ended without a result


@pytest.fixture
def record(record_property):
    """Record a measurement in words, which are printed, and in numbers."""

    def write(words: str, **numbers: object) -> None:
        print(f"\n    {words}", flush=True)  # the log has it even if the test is killed
        for name, value in {"measured": words, **numbers}.items():
            record_property(name, value)

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the acceptance run by NAMES."""

    def find_place(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(NAMES) if item.name.startswith(f"test_{name}")), len(NAMES))

    if all(item.get_closest_marker("gpu") for item in items):
        items.sort(key=find_place)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """Run a test by a pytest of its own; the time limit counts here, and ends all that the test started."""
    if CHILD in os.environ or pyfuncitem.get_closest_marker("gpu") is None:
        return None
    marker = pyfuncitem.get_closest_marker("timeout")
    limit, left = marker.args[0] if marker else 0.0, DEADLINE - time.time()
    if limit > left:
        pytest.skip(f"may take {limit:.0f} s, and {left:.0f} s are left: raise --minutes")
    root, folder = pyfuncitem.config.rootpath, pyfuncitem.funcargs["tmp_path"]
    result, log = folder / "result.xml", folder / "log"
    options = ["-m", "", "-s", "-q", "-p", "no:cacheprovider", f"--rootdir={root}", f"--basetemp={folder / 'own'}"]
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # BasicTrainer refuses some features on several
    environment = {**os.environ, CHILD: "1", "CUDA_VISIBLE_DEVICES": one_gpu}
    set_allocators(environment)  # as train.py does
    if count_gpus():  # as many threads as in training; tests/conftest.py sets one
        environment.pop("OMP_NUM_THREADS", None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={result}", pyfuncitem.nodeid],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:  # above all pytest-timeout's
            print("\n".join(["", *read_last_lines(log)]), flush=True)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not result.exists():
        pytest.fail("\n".join([f"its process ended with status {status}", *read_last_lines(log)]), pytrace=False)
    show_result(pyfuncitem, ElementTree.parse(result))
    return True


def read_last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]


def show_result(item, result: ElementTree.ElementTree) -> None:
    """Pass on properties and outcome that the test's own pytest wrote."""
    for entry in result.iter("property"):
        item.user_properties.append((entry.get("name"), entry.get("value")))
        if entry.get("name") == "measured":
            print(f"\n    {entry.get('value')}", end="", flush=True)
    print()
    if (skipped := result.find(".//skipped")) is not None:
        pytest.skip(skipped.get("message", ""))
    for kind in ("failure", "error"):
        if (failed := result.find(f".//{kind}")) is not None:
            pytest.fail(failed.text or "", pytrace=False)
