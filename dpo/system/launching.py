"""Starting the processes of a run, or joining those of torchrun or Slurm, and ending all when one fails.

torch is imported inside functions: a parent starts its workers first, and imports torch while they do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from enum import Enum
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from dpo.errors import InputError, RunError
from dpo.system.host import (
    keep_freed_memory,
    print_whatever_happens,
    raise_open_file_limit,
    return_freed_memory,
    without_collecting_garbage,
)
from dpo.system.rank_env import RankEnv, find_rank_env, read_number
from dpo.system.redaction import redact
from dpo.system.signals import ASKED, Stopped, ctrl_c_ignored, killed_by_stop_signals, on_stop_signals

if TYPE_CHECKING:
    import torch.distributed as dist

START_METHOD = "spawn"  # for workers: CUDA does not work in a forked process
BAD_INPUT, FAILED, LOST_CONTACT = 2, 1, 3  # exit statuses of a worker
GRACE_SECS = 5  # delay before a rank that lost contact exits, so that the rank that caused it exits first and is named
STOP_SECS = 60  # time for the other workers to exit, once one has exited on a signal sent to all
ABORTED = -signal.SIGABRT  # how NCCL's watchdog kills a rank whose collective timed out
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
    """Run `worker(rank, world_size, *args)` in `world_size` processes that meet in a process group.

    A process that a launcher started (`find_rank_env`) runs its own worker and exits with it. Otherwise the processes
    are spawned here and meet at `port` (None: a free one): over NCCL with one GPU each, or over gloo on the CPU.
    Without `process_group` the worker is called in this process. A collective that waits longer than `timeout_secs`
    fails. Raises InputError for bad input that a worker found, Stopped if the run was asked to stop, and WorkerFailed
    if a worker did not finish.
    """
    raise_open_file_limit()
    rank_env = find_rank_env()
    if rank_env is not None:
        status, message = _work(rank_env, worker, args, timeout_secs)
        if status:
            if status == BAD_INPUT and rank_env.rank != 0:
                time.sleep(GRACE_SECS)  # all ranks may have found it: rank 0 reports it, and this one is ended
            if message:
                message = redact(f"error: {message}" if status == BAD_INPUT else message)
                print(message, file=sys.stderr, flush=True)
        _leave(status)
    elif not process_group:
        keep_freed_memory()
        worker(0, 1, *args)
    else:
        _spawn(
            worker,
            world_size,
            args,
            port=port or read_number("MASTER_PORT", 0, environ=os.environ),
            timeout_secs=timeout_secs,
        )


def _backend(local_rank: int) -> str:
    """The backend: NCCL with GPUs, else gloo. Raises InputError if this machine has fewer GPUs than processes."""
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


def get_open_port() -> int:
    """A TCP port that is currently free on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return server.getsockname()[1]


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
    """Join the default process group, through `store` or the environment's `MASTER_ADDR` and `MASTER_PORT`.

    `timeout` is the longest wait of a collective; None is torch's default. `local_rank`, by default `rank`, is the rank
    within the machine, and under NCCL the index of its GPU.
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


# --- in a worker ---------------------------------------------------------------------------------------------------


def _work(rank_env: RankEnv, worker: Callable[..., None], args: tuple, timeout_secs: float) -> tuple[int, str]:
    """Join the group, run the worker, leave the group. Returns the exit status and the error message.

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
        with killed_by_stop_signals():
            store = _meet(rank_env, timeout_secs)
            init_distributed(
                rank_env.rank,
                rank_env.world_size,
                backend=_backend(rank_env.local_rank),
                timeout=timedelta(seconds=timeout_secs),
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


def _meet(rank_env: RankEnv, timeout_secs: float) -> dist.Store:
    """The rendezvous store of this run's ranks; new for every restart by torchrun."""
    import torch.distributed as dist

    store = dist.TCPStore(
        rank_env.address,
        rank_env.port,
        is_master=rank_env.hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_secs),
    )
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _compare_notes(store: dist.Store, rank_env: RankEnv, note: str, timeout_secs: float) -> str:
    """Record in the store how this rank ended; if it lost contact, wait, then name the ranks that did not."""
    import torch.distributed as dist

    try:
        store.set(f"{note} {rank_env.rank}", "")
        if note != "lost":
            return ""
        time.sleep(GRACE_SECS)
        others = [rank for rank in range(rank_env.world_size) if not store.check([f"lost {rank}"])]
        failed = [rank for rank in others if store.check([f"failed {rank}"])]
    except dist.DistError as error:
        return f"rank 0's rendezvous store is also unreachable: {error}\n"
    if not others:
        return ""
    if failed:
        return f"because {_ranks(failed)} failed\n"
    return f"because {_ranks(others)} did not answer within collective_timeout_secs={timeout_secs:g}, or was killed\n"


def _ranks(ranks: list[int]) -> str:
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
    context = multiprocessing.get_context(START_METHOD)
    pipes, processes = [], []
    asked: list[int] = []
    try:
        with on_stop_signals(partial(_forward, processes, asked)):
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                rank_env = RankEnv(rank, world_size, local_rank=rank, address=address, port=port)
                process = context.Process(
                    target=_run_worker, args=(rank_env, os.getpid(), sender, worker, args, timeout_secs)
                )
                with ctrl_c_ignored():
                    process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            with without_collecting_garbage():
                import torch.distributed as dist

            # a thread serves the store: it starts after the workers, which may be forked
            store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            if asked:  # a signal came while a worker was starting, which did not get it
                _terminate(processes)
            _wait_for(processes, pipes, timeout_secs, asked, began=time.monotonic())
        del store  # needed until here
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _forward(processes: list, asked: list[int], number: int) -> str:
    """Ask the workers, which ignore Ctrl-C, to stop; record the signal; return a message about it."""
    asked.append(number)
    _terminate(processes)
    return "stopping, after what was trained is saved"


def _terminate(processes: list) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGTERM)


class End(Enum):
    """Outcome of a worker."""

    DONE, STOPPED, LOST_CONTACT, FAILED = range(4)


def _classify(status: int, *, reported: bool, asked: list[int], timed_out: bool) -> End:
    """Classify a worker's outcome by its exit status.

    `reported`: the worker had returned before it exited; `asked` are the signals that the parent received;
    `timed_out`: the run has lasted longer than the collective timeout, so NCCL may have killed a worker whose
    collective timed out.
    """
    if status == 0:
        return End.DONE if reported else End.FAILED
    if status == ASKED or (asked and -status in (signal.SIGTERM, *asked)):  # killed by the signal, if not training yet
        return End.STOPPED
    if status == LOST_CONTACT or (status == ABORTED and (timed_out or asked)):
        return End.LOST_CONTACT
    return End.FAILED


def _patience(ends: Collection[End], *, aborted: bool, timeout_secs: float) -> float:
    """Seconds that the other workers get to exit, given the outcomes so far."""
    if End.FAILED in ends:
        return 1
    if End.STOPPED in ends:
        return min(STOP_SECS, timeout_secs)
    if End.LOST_CONTACT in ends:
        return ABORT_SECS if aborted else 2 * GRACE_SECS
    return timeout_secs


def _wait_for(processes: list, pipes: list, timeout_secs: float, asked: list[int], *, began: float) -> None:
    """Wait until all workers are done. Raises for the first that failed, or for those that never exited.

    `asked` are the signals that the parent received, `began` is the time when the workers started.
    """
    running, ends, words, deadline = dict(enumerate(processes)), {}, {}, None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait([p.sentinel for p in running.values()], left)
        if not ended:
            break
        for rank in [r for r, p in running.items() if p.sentinel in ended]:
            process = running.pop(rank)
            process.join()
            timed_out = time.monotonic() - began >= timeout_secs
            words[rank] = _last_words(pipes[rank])
            reported = words[rank] is not None
            ends[rank] = _classify(process.exitcode, reported=reported, asked=asked, timed_out=timed_out)
        aborted = any(processes[rank].exitcode == ABORTED for rank in ends)
        deadline = time.monotonic() + _patience(ends.values(), aborted=aborted, timeout_secs=timeout_secs)
    kinds = {*ends.values()}
    if End.STOPPED in kinds and End.FAILED not in kinds and (asked or not (running or End.LOST_CONTACT in kinds)):
        raise Stopped(*asked[:1])  # the rest are waiting for the stopped ones in calls that no signal interrupts
    if not running and kinds <= {End.DONE}:
        return
    if kinds <= {End.DONE, End.LOST_CONTACT}:
        for process in running.values():  # the hang is in one of these: make them print their stacks
            os.kill(process.pid, signal.SIGABRT)
        wait([p.sentinel for p in running.values()], GRACE_SECS)
    statuses = {rank: processes[rank].exitcode for rank, end in ends.items() if end != End.DONE}
    lost = {rank for rank, end in ends.items() if end == End.LOST_CONTACT}
    raise _cause(statuses, words, sorted(running), lost, timeout_secs)


def _cause(
    statuses: Mapping[int, int],
    messages: Mapping[int, str | None],
    stuck: list[int],
    lost: set[int],
    timeout_secs: float,
) -> Exception:
    """The exception that explains why workers did not finish.

    Exit statuses and last messages are in the order in which workers exited. Ranks in `lost` lost contact.
    """
    guilty = [rank for rank in statuses if rank not in lost]
    if guilty:
        rank = next((r for r in guilty if statuses[r] == BAD_INPUT), guilty[0])
        message = messages[rank]
        if statuses[rank] == BAD_INPUT and message:
            return InputError(message)
        return WorkerFailed(message or f"rank {rank} {_describe(statuses[rank])}")
    blame = [f"{_ranks(stuck)} did not answer within collective_timeout_secs={timeout_secs:g}"] * bool(stuck)
    aborted = "was killed by SIGABRT, as NCCL does when a collective times out"
    return WorkerFailed("\n".join([*blame, *(messages[rank] or f"rank {rank} {aborted}" for rank in statuses)]))


def _last_words(pipe: Any) -> str | None:
    """The report of a worker that has exited; None if there is none."""
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status} before it was done"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
