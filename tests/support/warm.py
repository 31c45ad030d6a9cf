"""`python train.py` in processes that start in no time: forked from one that has imported what a run needs."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["train", "trainers", "dpo.checkpoint.resume", "datasets", "transformers", "hydra", "dpo.training.memory"]
)


def run_train(
    overrides: tuple[str, ...], *, cwd: Path, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `python train.py OVERRIDES` prints and exits with."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = CONTEXT.Process(target=_main, args=(overrides, cwd, environment, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["train.py", *overrides], timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(["train.py", *overrides], process.exitcode, out.read_text(), err.read_text())


def redirect(out: Path, err: Path) -> None:
    """Standard output and error of this process go to files from now on, and nothing comes in."""
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(((Path(os.devnull), os.O_RDONLY), (out, appending), (err, appending))):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))


def _main(overrides: tuple[str, ...], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    import torch

    redirect(out, err)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # wherever the tests run
    sys.argv = [str(ROOT / "train.py"), *overrides]
    status: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
