"""Starting a run's processes, or joining a launcher's, and ending them together.

torch is imported inside functions: a parent starts its workers first, and imports torch while they do. `docs/LOG.md`
says why torch's own launchers are not used.
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
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import wait as wait_for_any
from typing import TYPE_CHECKING, Any, NamedTuple

from dpo.errors import InputError, RunError, is_lost_contact
from dpo.system.host import (
    end_with_parent,
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

START_METHOD = "spawn"  # of workers, as CUDA does not work in a forked process
BAD_INPUT, FAILED, LOST_CONTACT = 2, 1, 3  # exit statuses of a worker
ABORTED = -signal.SIGABRT  # exit code of a worker that NCCL's watchdog killed, as a collective timed out
GRACE_SECS = 5  # wait of a rank that lost contact, so that the rank that caused the loss exits first and is named
FAILURE_SECS = 1  # time for other workers to exit after one failed: another may report bad input, which says more
STOP_SECS = 60  # time for other workers to exit after one exited on a stop signal, which all of them got
ABORT_SECS = 60  # time for other workers to exit after NCCL's watchdog killed one: it kills the waiting ranks in turn


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

    A process that a launcher started (`find_rank_env`) runs its own worker, and exits when the worker ends. Without
    `process_group`, the worker is called in this process. Otherwise `world_size` workers are spawned here and meet at
    `port` (None: a free one). A collective that waits longer than `timeout_secs` fails. Raises InputError for bad input
    that a worker found, Stopped if the run was asked to stop, and WorkerFailed if a worker did not finish.
    """
    raise_open_file_limit()
    rank_env = find_rank_env()
    if rank_env is not None:
        status, message = _run_in_group(rank_env, worker, args, timeout_secs)
        if status == BAD_INPUT and rank_env.rank != 0:
            # rank 0 may have the same error; the launcher ends this process once rank 0 has reported it
            time.sleep(GRACE_SECS)
        if message:
            print(redact(f"error: {message}" if status == BAD_INPUT else message), file=sys.stderr, flush=True)
        _exit_now(status)
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
    local_rank: int  # among the ranks of its machine; the index of its GPU
    address: str
    port: int
    serves_store: bool = False  # whether this process serves the rendezvous store


def find_rank_env() -> RankEnv | None:
    """The rank that torchrun or Slurm (an `srun` of several tasks) assigned; None without a launcher."""
    environ = os.environ
    if {"RANK", "WORLD_SIZE"} <= environ.keys():  # torchrun
        rank = _read_number("RANK")
        return RankEnv(
            rank,
            world_size=_read_number("WORLD_SIZE"),
            local_rank=_read_number("LOCAL_RANK", rank),
            address=environ.get("MASTER_ADDR", "localhost"),
            port=_read_number("MASTER_PORT", 29500),
            serves_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
    if _read_number("SLURM_STEP_NUM_TASKS", 1) > 1:  # not SLURM_NTASKS, which a batch script has too
        rank = _read_number("SLURM_PROCID")
        job_port = 20_000 + _read_number("SLURM_JOB_ID") % 20_000  # so that jobs on one node rarely collide
        return RankEnv(
            rank,
            world_size=_read_number("SLURM_STEP_NUM_TASKS"),
            local_rank=_read_number("SLURM_LOCALID"),
            address=environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_STEP_NODELIST", "")),
            port=_read_number("MASTER_PORT", job_port),
            serves_store=rank == 0,
        )
    return None


def _read_number(name: str, default: int | None = None) -> int:
    """The number in an environment variable."""
    text = os.environ.get(name, default)
    if text is None:
        raise InputError(
            f"the environment has some of a launcher's variables but not {name}: unset these variables, or launch again"
        )
    if not str(text).isdigit():
        raise InputError(f"{name}={text} in the environment is not a number: correct it, or unset it")
    return int(text)


def _first_node(nodes: str) -> str:
    """The first node of a list in Slurm's form: node03 of "node[03-05,9]"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST={nodes} names no node: set MASTER_ADDR to the first node")
    return match[1] + (match[2] or "")


# --- in a worker ---------------------------------------------------------------------------------------------------


def get_open_port() -> int:
    """A TCP port that is currently free on this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _backend(local_rank: int) -> str:
    """NCCL with a GPU for each process, gloo without GPUs; anything between is an InputError."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    n_gpus = torch.cuda.device_count()
    if local_rank >= n_gpus > 1:  # if one GPU is visible, Slurm may have given each task its own
        raise InputError(
            f"this machine has {n_gpus} GPUs, too few for one per process: lower world_size (or torchrun's "
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
    """Join the default process group.

    Without a `store`, processes meet at `MASTER_ADDR` and `MASTER_PORT` of the environment, or at `master_addr` and
    `port`. `timeout` is the longest wait of a collective; None is torch's default. `local_rank`, by default `rank`, is
    under NCCL the index of the GPU.
    """
    import torch
    import torch.distributed as dist

    if store is None:
        os.environ.setdefault("MASTER_ADDR", master_addr)
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None
    if backend == "nccl":  # set the GPU before joining, or NCCL takes GPU 0 on every rank
        device = torch.device("cuda", (rank if local_rank is None else local_rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store, device_id=device)


def _run_in_group(rank_env: RankEnv, worker: Callable[..., None], args: tuple, timeout_secs: float) -> tuple[int, str]:
    """Run the worker in a process group; return exit status and message, "" for a worker that is done."""
    with without_collecting_garbage():
        import torch.distributed as dist
        import tqdm

    return_freed_memory()
    tqdm.tqdm.set_lock(threading.RLock())  # tqdm's default is a semaphore that outlives a killed worker
    rank, store = rank_env.rank, None
    try:
        # let a stop signal kill this process, as no Python handler could run during the calls below
        with handling_signals(signal.SIG_DFL):
            timeout = timedelta(seconds=timeout_secs)
            server = dist.TCPStore(
                rank_env.address,
                rank_env.port,
                is_master=rank_env.serves_store,
                wait_for_workers=False,
                timeout=timeout,
            )
            # torchrun keeps its store when it restarts workers, so each attempt needs keys of its own
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", server)
            init_distributed(
                rank,
                rank_env.world_size,
                backend=_backend(rank_env.local_rank),
                timeout=timeout,
                store=dist.PrefixStore("group", store),
                local_rank=rank_env.local_rank,
            )
        status, message = 0, ""
        try:
            worker(rank, rank_env.world_size, *args)
        except Stopped as stopped:
            status = stopped.status
            if rank == 0:  # all ranks stop, and one says so
                message = str(stopped)
        dist.destroy_process_group()
        return status, message
    except InputError as error:
        status, message = BAD_INPUT, str(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            status, message = FAILED, traceback.format_exc()
    except RunError as error:
        status, message = FAILED, f"rank {rank}: {error}\n"
    except KeyboardInterrupt:
        status, message = 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        status, what = (LOST_CONTACT, "lost contact") if is_lost_contact(error) else (FAILED, "failed")
        message = f"rank {rank} {what}:\n{traceback.format_exc()}"
    if store is not None:
        message += _record_failure(store, rank_env, timeout_secs, lost_contact=status == LOST_CONTACT)
    return status, message


def _record_failure(store: dist.Store, rank_env: RankEnv, timeout_secs: float, *, lost_contact: bool) -> str:
    """Record in the store that this rank failed or lost contact.

    A rank that lost contact waits, so that the rank that caused the loss exits first. Then it reads what other ranks
    have recorded, and returns a text that names the cause.
    """
    import torch.distributed as dist

    try:
        store.set(f"{'lost' if lost_contact else 'failed'} {rank_env.rank}", "")
        if not lost_contact:
            return ""
        time.sleep(GRACE_SECS)
        suspects = [rank for rank in range(rank_env.world_size) if not store.check([f"lost {rank}"])]
        failed = [rank for rank in suspects if store.check([f"failed {rank}"])]
    except dist.DistError as error:
        return f"rank 0's rendezvous store is also unreachable: {error}\n"
    if failed:
        return f"because {_name_ranks(failed)} failed\n"
    if suspects:
        answer = f"did not answer within collective_timeout_secs={timeout_secs:g}, or was killed"
        return f"because {_name_ranks(suspects)} {answer}\n"
    return ""


def _name_ranks(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _exit_now(status: int) -> None:
    """Exit without finalizing the interpreter.

    Other threads may be stuck in a collective, or may still free the tensors of the last collectives. A thread that
    needs the interpreter while it is being finalized would abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_worker(rank_env: RankEnv, parent: int, pipe: Any, worker: Callable, args: tuple, timeout_secs: float) -> None:
    """Run a spawned worker, and send its message to the parent process."""
    print_whatever_happens()
    faulthandler.enable()  # the parent kills a stuck worker by SIGABRT, and this prints its stack
    end_with_parent(parent)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank_env.local_rank), str(rank_env.world_size)
    status, message = _run_in_group(rank_env, worker, args, timeout_secs)
    # the parent reads after this process has exited, so the message must fit into the pipe's buffer
    pipe.send(message[-20_000:])
    _exit_now(status)


# --- in the parent -------------------------------------------------------------------------------------------------


def _spawn(worker: Callable[..., None], world_size: int, args: tuple, *, port: int, timeout_secs: float) -> None:
    """Start the workers, wait for them, and leave none behind."""
    try:  # bind the port before any worker starts, as this process will serve the store there
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

            # The store's server is a thread. It starts after the workers, which may be forked: a process with threads
            # should not fork.
            store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            if workers.stop_signals:  # a signal that came while a worker was starting did not reach this worker
                workers.terminate()
            workers.wait()
        del store  # not before, as the workers need its server until they end
    finally:
        for process in workers.processes:
            process.kill()
        for process in workers.processes:
            process.join()


class Outcome(Enum):
    """The end of a worker."""

    DONE, STOPPED, LOST_CONTACT, FAILED = range(4)


class Ended(NamedTuple):
    """A worker that has exited."""

    outcome: Outcome
    status: int  # negative: the signal that killed it
    message: str | None  # None: it was killed before it could send one


class _Workers:
    """The spawned processes of a run, by rank."""

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.processes: list[Any] = []
        self.stop_signals: list[int] = []  # received by this process
        self._pipes: list[Any] = []  # each with the message of a worker
        self._ended: dict[int, Ended] = {}  # by rank, in the order of their exits

    def start(self, rank_env: RankEnv, worker: Callable[..., None], args: tuple) -> None:
        """Start a worker; the caller starts them in rank order."""
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
        """Forward a stop signal as SIGTERM, on which workers save and stop; return a message about it."""
        self.stop_signals.append(number)
        self.terminate()
        return "stopping after saving what was trained"

    def terminate(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Wait until all workers are done, or raise why they are not."""
        stuck = self._wait_for_exits()
        outcomes = {ended.outcome for ended in self._ended.values()}
        if not stuck and outcomes <= {Outcome.DONE}:
            return
        # workers that were asked to stop and did not may be waiting for stopped ones: that is no failure
        is_excused = self.stop_signals or (not stuck and Outcome.LOST_CONTACT not in outcomes)
        if Outcome.STOPPED in outcomes and Outcome.FAILED not in outcomes and is_excused:
            raise Stopped(*self.stop_signals[:1])
        if stuck and not outcomes & {Outcome.STOPPED, Outcome.FAILED}:
            for process in stuck.values():  # at least one of these hangs: make all print their stacks
                os.kill(process.pid, signal.SIGABRT)
            wait_for_any([process.sentinel for process in stuck.values()], GRACE_SECS)
        raise self._make_error(stuck=sorted(stuck))

    def _wait_for_exits(self) -> dict[int, Any]:
        """Wait until all workers have exited, or time is up since one has; return those that run on, by rank."""
        start = time.monotonic()
        running = dict(enumerate(self.processes))
        deadline = None
        while running:
            secs_left = None if deadline is None else max(0.0, deadline - time.monotonic())
            exited = wait_for_any([process.sentinel for process in running.values()], secs_left)
            if not exited:
                break
            for rank, process in list(running.items()):
                if process.sentinel in exited:
                    process.join()
                    del running[rank]
                    self._ended[rank] = self._describe(rank, secs=time.monotonic() - start)
            deadline = time.monotonic() + self._find_time_left()
        return running

    def _describe(self, rank: int, *, secs: float) -> Ended:
        """The end of a worker that exited after `secs` seconds."""
        status, pipe, message = self.processes[rank].exitcode, self._pipes[rank], None
        with suppress(EOFError):
            message = pipe.recv() if pipe.poll() else None
        was_killed_by_stop = self.stop_signals and -status in (signal.SIGTERM, *self.stop_signals)  # before it trained
        # NCCL aborts a worker whose collective has timed out, so an abort before the timeout has another cause
        was_aborted_by_nccl = status == ABORTED and (secs >= self.timeout_secs or self.stop_signals)
        if status == 0 and message is not None:
            outcome = Outcome.DONE
        elif status == ASKED or was_killed_by_stop:
            outcome = Outcome.STOPPED
        elif status == LOST_CONTACT or was_aborted_by_nccl:
            outcome = Outcome.LOST_CONTACT
        else:
            outcome = Outcome.FAILED
        return Ended(outcome, status, message)

    def _find_time_left(self) -> float:
        """The number of seconds that running workers have to exit."""
        outcomes = {ended.outcome for ended in self._ended.values()}
        if Outcome.FAILED in outcomes:
            return FAILURE_SECS
        if Outcome.STOPPED in outcomes:
            return min(STOP_SECS, self.timeout_secs)
        if Outcome.LOST_CONTACT in outcomes:
            # another worker that lost contact waits GRACE_SECS before it exits; twice is safe
            return ABORT_SECS if any(ended.status == ABORTED for ended in self._ended.values()) else 2 * GRACE_SECS
        return self.timeout_secs  # exited workers are done, and the others may be in a last collective

    def _make_error(self, *, stuck: list[int]) -> Exception:
        """The exception for a run whose workers did not all finish, with the ranks that never exited."""
        failed = {
            rank: ended for rank, ended in self._ended.items() if ended.outcome in (Outcome.FAILED, Outcome.STOPPED)
        }
        for ended in failed.values():  # bad input says more than other failures
            if ended.status == BAD_INPUT and ended.message:
                return InputError(ended.message)
        if failed:
            rank, ended = next(iter(failed.items()))  # the first worker that exited is the cause
            return WorkerFailed(ended.message or f"rank {rank} {_describe_exit(ended.status)}")
        abort = "was killed by SIGABRT, as NCCL does when a collective times out"
        messages = [
            ended.message or f"rank {rank} {abort}"
            for rank, ended in self._ended.items()
            if ended.outcome == Outcome.LOST_CONTACT
        ]
        if stuck:
            answer = f"did not answer within collective_timeout_secs={self.timeout_secs:g}"
            messages.insert(0, f"{_name_ranks(stuck)} {answer}")
        return WorkerFailed("\n".join(messages))


def _describe_exit(status: int) -> str:
    """Describe the end of a process that left no message."""
    if status >= 0:
        return f"exited with status {status} before it was done"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
