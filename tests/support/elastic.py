"""Machines of a torchrun job, as groups of processes that meet over the loopback interface."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.faults import start_interpreter

# The store of the rendezvous is on no machine that is lost, and torchrun notices soon what has gone.
SERVE = (
    "import time; from torch.distributed import TCPStore; "
    "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True); "
    "time.sleep(3600)"
)
CONFIG = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


class Job:
    """`torchrun train.py OVERRIDES` on machines, of which each has one process; it goes on with at least one."""

    def __init__(self, overrides: list[str], log: Path, n_machines: int = 3) -> None:
        self.overrides, self.log, self.n_machines = overrides, log, n_machines
        self.server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        self.port = int(self.server.stdout.readline())  # type: ignore[union-attr]
        self.machines = [self.start() for _ in range(n_machines)]
        self.former: list[subprocess.Popen] = []  # in whose places are others

    def replace(self, index: int) -> subprocess.Popen:
        """Start a machine in the place of another, and return the other."""
        former = self.machines[index]
        self.machines[index] = self.start()
        self.former.append(former)
        return former

    def start(self) -> subprocess.Popen:
        arguments = [
            *("-m", "torch.distributed.run", f"--nnodes=1:{self.n_machines}", "--nproc-per-node=1", "--rdzv-id=job"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={CONFIG}"),
            *("--max-restarts=100", "--monitor-interval=0.1", "train.py", *self.overrides),
        ]
        with self.log.open("a") as log:
            return start_interpreter(*arguments, output=log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def signal(self, machine: subprocess.Popen, number: int) -> None:
        """Send a signal to all processes of a machine at once: SIGKILL ends it, SIGSTOP takes its power."""
        for pid in (machine.pid, *list_descendants(machine.pid)):
            os.kill(pid, number)

    def wait(self, *, without: int | None = None) -> None:
        """Wait for the end of all machines but one."""
        for index, machine in enumerate(self.machines):
            if index != without:
                assert machine.wait(180) == 0, self.log.read_text()

    def end(self) -> None:
        for machine in (*self.machines, *self.former):
            if machine.poll() is None:
                self.signal(machine, signal.SIGKILL)
                machine.wait()
        self.server.kill()
        self.server.wait()


def list_descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()  # the children of each thread
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [*children, *(other for child in children for other in list_descendants(child))]


def wait_until(is_so: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
