"""Starting a run's processes, or joining a launcher's, and ending them together.

torch is imported inside functions: a parent starts its workers first, and imports torch while they do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from dpo.errors import InputError, RunError
from dpo.system.host import (
    keep_freed_memory,
    print_whatever_happens,
    raise_open_file_limit,
    return_freed_memory,
    without_collecting_garbage,
)
from dpo.system.redaction import redact
from dpo.system.signals import ASKED, Stopped, handling_signals, on_stop_signals

if TYPE_CHECKING:
    import torch.distributed as dist

START_METHOD = "spawn"  # for workers: CUDA does not work in a forked process
BAD_INPUT, FAILED, LOST_CONTACT = 2, 1, 3  # exit statuses of a worker
GRACE_SECS = 5  # delay before a rank that lost contact exits, so that the rank that caused it exits first and is named
STOP_SECS = 60  # time for the other workers to exit, once one has exited on a signal sent to all
ABORTED = -signal.SIGABRT  # how NCCL's watchdog kills a rank whose collective timed out
FAILURE_SECS = 1  # time for the other workers to exit after a failure: one may report bad input, which says more
ABORT_SECS = 60  # time between such kills on different ranks, which may wait in different collectives


class WorkerFailed(RunError):
    """A worker did not finish; the message has its rank and traceback."""


def launch(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    process_group: bool,
    port: int | None = None,
    timeout_secs: float = 1800,
) -> None:
    """Run `worker(rank, world_size, *args)` in processes that form a group.

    A process that a launcher started (`find_rank_env`) runs its own worker and exits with it. Otherwise `world_size`
    processes are spawned here and meet at `port` (None: a free one): over NCCL with one GPU each, or over gloo on the
    CPU. Without `process_group` the worker is called in this process. A collective that waits longer than
    `timeout_secs` fails. Raises InputError for bad input that a worker found, Stopped if the run was asked to stop, and
    WorkerFailed if a worker did not finish.
    """
    raise_open_file_limit()
    rank_env = find_rank_env()
    if rank_env is not None:
        status, message = _work(rank_env, worker, args, timeout_secs)
        if status == BAD_INPUT and rank_env.rank != 0:
            time.sleep(GRACE_SECS)  # rank 0 may report the same error first; then the launcher ends this process
        if message:
            print(redact(f"error: {message}" if status == BAD_INPUT else message), file=sys.stderr, flush=True)
        _leave(status)
    elif not process_group:
        keep_freed_memory()
        worker(0, 1, *args)
    else:
        _spawn(worker, world_size, args, port=port or _read_number("MASTER_PORT", 0), timeout_secs=timeout_secs)


# --- the rank that a launcher assigned -------------------------------------------------------------------------------


class RankEnv(NamedTuple):
    """A process's rank in a run, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int  # within its machine: the index of its GPU
    address: str
    port: int
    hosts: bool = False  # whether it serves the rendezvous store


def find_rank_env() -> RankEnv | None:
    """The rank that torchrun or Slurm assigned; None without a launcher.

    Slurm assigns one if an `srun` has several tasks. Raises InputError for variables that are missing or not numbers.
    """
    number, environ = _read_number, os.environ
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        rank = number("RANK")
        hosts = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = environ.get("MASTER_ADDR", "localhost"), number("MASTER_PORT", 29500)
        return RankEnv(rank, number("WORLD_SIZE"), number("LOCAL_RANK", rank), address, port, hosts)
    if number("SLURM_STEP_NUM_TASKS", 1) > 1:  # not SLURM_NTASKS, which a batch script has too
        rank, local_rank = number("SLURM_PROCID"), number("SLURM_LOCALID")
        port = number("MASTER_PORT", 20_000 + number("SLURM_JOB_ID") % 20_000)
        address = environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_STEP_NODELIST", ""))
        return RankEnv(rank, number("SLURM_STEP_NUM_TASKS"), local_rank, address, port, hosts=rank == 0)
    return None


def _read_number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise InputError(f"a launcher set some of its variables but not {name}: unset them, or launch again")
    if not str(text).isdigit():
        raise InputError(f"{name}={text} in the environment is not a number")
    return int(text)


def _first_node(nodes: str) -> str:
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)  # "node[03-05,9]" begins with node03
    if first is None:
        raise InputError(f"SLURM_STEP_NODELIST={nodes} names no node: set MASTER_ADDR to the first node")
    return first[1] + (first[2] or "")


# --- in a worker ---------------------------------------------------------------------------------------------------


def get_open_port() -> int:
    """A TCP port that is currently free on this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _backend(local_rank: int) -> str:
    """NCCL with GPUs, else gloo.

    Raises InputError if this machine has fewer GPUs than processes.
    """
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    gpus = torch.cuda.device_count()
    if local_rank >= gpus > 1:  # with one GPU visible, Slurm may have given each task its own
        raise InputError(
            f"this machine has {gpus} GPUs, too few for one per process: lower world_size (or torchrun's "
            f"--nproc-per-node), or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return "nccl"


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str = "localhost",
    port: int = 12355,
    backend: str = "nccl",
    timeout: timedelta | None = None,
    store: dist.Store | None = None,
    local_rank: int | None = None,
) -> None:
    """Join the default process group, through `store` or the environment.

    Without a store, `MASTER_ADDR` and `MASTER_PORT` say where. `timeout` is the longest wait of a collective; None is
    torch's default. `local_rank`, by default `rank`, is the rank within the machine, and under NCCL the index of its
    GPU.
    """
    import torch
    import torch.distributed as dist

    if store is None:
        os.environ.setdefault("MASTER_ADDR", master_addr)
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None
    if backend == "nccl":  # before joining, or NCCL takes GPU 0 on every rank
        device = torch.device("cuda", (rank if local_rank is None else local_rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store, device_id=device)


def _work(rank_env: RankEnv, worker: Callable[..., None], args: tuple, timeout_secs: float) -> tuple[int, str]:
    """Run the worker in the group; return exit status and error message.

    Each rank records in the store that it failed, or that it lost contact. A rank that lost contact waits, so that the
    rank that caused it exits first, then reads the records to name it.
    """
    with without_collecting_garbage():
        import torch.distributed as dist
        import tqdm

    return_freed_memory()
    tqdm.tqdm.set_lock(threading.RLock())  # tqdm's default is a semaphore that outlives a killed worker
    store = None
    try:
        # a stop signal kills this process, as the calls inside would not let a handler of Python run
        with handling_signals(signal.SIG_DFL):
            timeout = timedelta(seconds=timeout_secs)
            server = dist.TCPStore(
                rank_env.address, rank_env.port, is_master=rank_env.hosts, wait_for_workers=False, timeout=timeout
            )
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", server)
            init_distributed(
                rank_env.rank,
                rank_env.world_size,
                backend=_backend(rank_env.local_rank),
                timeout=timeout,
                store=dist.PrefixStore("group", store),
                local_rank=rank_env.local_rank,
            )
        status, said = 0, ""
        try:
            worker(rank_env.rank, rank_env.world_size, *args)
        except Stopped as stopped:  # all ranks together
            status, said = stopped.status, str(stopped) if rank_env.rank == 0 else ""
        dist.destroy_process_group()
        return status, said
    except InputError as error:
        note, status, message = "failed", BAD_INPUT, str(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            status, message = FAILED, traceback.format_exc()
    except RunError as error:
        note, status, message = "failed", FAILED, f"rank {rank_env.rank}: {error}\n"
    except KeyboardInterrupt:
        note, status, message = "failed", 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        lost = isinstance(error, dist.DistError) or "/gloo/" in str(error)  # probably because another rank failed
        note, status = ("lost", LOST_CONTACT) if lost else ("failed", FAILED)
        message = f"rank {rank_env.rank} {'lost contact' if lost else 'failed'}:\n{traceback.format_exc()}"
    if store is not None:
        message += _compare_notes(store, rank_env, note, timeout_secs)
    return status, message


def _compare_notes(store: dist.Store, rank_env: RankEnv, note: str, timeout_secs: float) -> str:
    """Record how this rank ended; say who ended otherwise."""
    import torch.distributed as dist

    try:
        store.set(f"{note} {rank_env.rank}", "")
        if note != "lost":
            return ""
        time.sleep(GRACE_SECS)
        not_lost = [rank for rank in range(rank_env.world_size) if not store.check([f"lost {rank}"])]
        failed = [rank for rank in not_lost if store.check([f"failed {rank}"])]
    except dist.DistError as error:
        return f"rank 0's rendezvous store is also unreachable: {error}\n"
    if failed:
        return f"because {_name(failed)} failed\n"
    silent = f"did not answer within collective_timeout_secs={timeout_secs:g}, or was killed"
    return f"because {_name(not_lost)} {silent}\n" if not_lost else ""


def _name(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _leave(status: int) -> None:
    """Exit now, without finalizing the interpreter.

    Other threads may be stuck in a collective. A process group that a mesh still references has threads that free the
    tensors of the last collectives; a thread that needs the interpreter during finalization aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_worker(rank_env: RankEnv, parent: int, pipe: Any, worker: Callable, args: tuple, timeout_secs: float) -> None:
    print_whatever_happens()
    faulthandler.enable()  # a stuck worker is killed by SIGABRT and prints its stack
    with without_collecting_garbage():
        import torch.multiprocessing
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # no orphan, however the parent dies
    if os.getppid() != parent:
        os._exit(FAILED)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank_env.local_rank), str(rank_env.world_size)
    status, message = _work(rank_env, worker, args, timeout_secs)
    pipe.send(message[-20_000:])  # fits into the pipe's buffer: the parent reads it after this process has exited
    _leave(status)


# --- in the parent -------------------------------------------------------------------------------------------------


def _spawn(worker: Callable[..., None], world_size: int, args: tuple, *, port: int, timeout_secs: float) -> None:
    """Start the workers, wait for them, and leave none behind."""
    try:  # the parent serves the store, so it binds the port before it starts any worker
        server = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(f"port {port} is in use; fsdp_port=null picks a free one") from error
    address, port = server.getsockname()
    workers = _Workers(timeout_secs)
    try:
        with on_stop_signals(workers.stop):
            for rank in range(world_size):
                rank_env = RankEnv(rank, world_size, local_rank=rank, address=address, port=port)
                workers.start(rank_env, worker, args)
            with without_collecting_garbage():
                import torch.distributed as dist

            # a thread serves the store: it starts after the workers, which may be forked
            store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            if workers.asked:  # a signal came while a worker was starting, which did not get it
                workers.terminate()
            workers.wait()
        del store  # the workers needed its server until they ended
    finally:
        for process in workers.processes:
            process.kill()
        for process in workers.processes:
            process.join()


class End(Enum):
    """Outcome of a worker."""

    DONE, STOPPED, LOST_CONTACT, FAILED = range(4)


class _Workers:
    """The spawned processes of a run, by rank."""

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.processes: list[Any] = []
        self.asked: list[int] = []  # stop signals that this process received
        self._pipes: list[Any] = []  # each has the message of a worker that has returned
        self._messages: dict[int, str | None] = {}  # of workers that have exited, first to last; None: did not return
        self._ends: dict[int, End] = {}

    def start(self, rank_env: RankEnv, worker: Callable[..., None], args: tuple) -> None:
        context = multiprocessing.get_context(START_METHOD)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_worker, args=(rank_env, os.getpid(), sender, worker, args, self.timeout_secs)
        )
        # a terminal sends Ctrl-C to all processes, but only this one should handle and forward it
        with handling_signals(signal.SIG_IGN, signal.SIGINT):
            process.start()
        sender.close()
        self._pipes.append(receiver)
        self.processes.append(process)

    def stop(self, number: int) -> str:
        """Forward a stop signal; return a message about it."""
        self.asked.append(number)
        self.terminate()
        return "stopping, after what was trained is saved"

    def terminate(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Wait until all workers are done.

        Raises for the first that failed, or for those that never exited.
        """
        began, running, deadline = time.monotonic(), dict(enumerate(self.processes)), None
        while running:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = wait([process.sentinel for process in running.values()], patience)
            if not ended:
                break
            for rank in [rank for rank, process in running.items() if process.sentinel in ended]:
                running.pop(rank).join()
                self._messages[rank] = _receive(self._pipes[rank])
                # NCCL kills a worker whose collective timed out, not before
                self._ends[rank] = self._classify(rank, timed_out=time.monotonic() - began >= self.timeout_secs)
            deadline = time.monotonic() + self._find_patience()
        ends = {*self._ends.values()}
        if End.STOPPED in ends and End.FAILED not in ends:
            all_stopped = not running and End.LOST_CONTACT not in ends
            # once the run was asked to stop, other workers may still wait for stopped ones in uninterruptible calls
            if all_stopped or self.asked:
                raise Stopped(*self.asked[:1])
        if not running and ends <= {End.DONE}:
            return
        if ends <= {End.DONE, End.LOST_CONTACT}:
            for process in running.values():  # at least one of them hangs: make them print their stacks
                os.kill(process.pid, signal.SIGABRT)
            wait([process.sentinel for process in running.values()], GRACE_SECS)
        raise self._explain(stuck=sorted(running))

    def _classify(self, rank: int, *, timed_out: bool) -> End:
        status = self.processes[rank].exitcode
        if status == 0:
            return End.DONE if self._messages[rank] is not None else End.FAILED
        if status == ASKED or (self.asked and -status in (signal.SIGTERM, *self.asked)):  # killed, if not training yet
            return End.STOPPED
        if status == LOST_CONTACT or (status == ABORTED and (timed_out or self.asked)):
            return End.LOST_CONTACT
        return End.FAILED

    def _find_patience(self) -> float:
        """Seconds that the workers still running now get to exit."""
        ends = self._ends.values()
        if End.FAILED in ends:  # the run's outcome is known
            return FAILURE_SECS
        if End.STOPPED in ends:
            return min(STOP_SECS, self.timeout_secs)
        if End.LOST_CONTACT in ends:
            aborted = any(self.processes[rank].exitcode == ABORTED for rank in self._ends)
            # another worker that lost contact sleeps for GRACE_SECS before it exits; as long again is a reserve
            return ABORT_SECS if aborted else 2 * GRACE_SECS
        return self.timeout_secs  # all so far are done: those still running may be in a last collective

    def _explain(self, *, stuck: list[int]) -> Exception:
        """The exception that says why workers did not finish or exit."""
        statuses = {rank: self.processes[rank].exitcode for rank, end in self._ends.items() if end != End.DONE}
        guilty = [rank for rank in statuses if self._ends[rank] != End.LOST_CONTACT]
        if guilty:
            rank = next((rank for rank in guilty if statuses[rank] == BAD_INPUT), guilty[0])
            message = self._messages[rank]
            if statuses[rank] == BAD_INPUT and message:
                return InputError(message)
            return WorkerFailed(message or f"rank {rank} {_describe(statuses[rank])}")
        aborted = "was killed by SIGABRT, as NCCL does when a collective times out"
        messages = [self._messages[rank] or f"rank {rank} {aborted}" for rank in statuses]
        if stuck:
            messages.insert(0, f"{_name(stuck)} did not answer within collective_timeout_secs={self.timeout_secs:g}")
        return WorkerFailed("\n".join(messages))


def _receive(pipe: Any) -> str | None:
    """The message of a worker that has exited, if any."""
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status} before it was done"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
