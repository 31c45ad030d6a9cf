"""Processes: started here, or by torchrun or Slurm; joined into one group; ended together when one of them fails."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils import InputError, init_distributed

BAD_INPUT, FAILED, LOST_CONTACT = 2, 1, 3  # exit statuses of a worker
GRACE_SECS = 5  # between a failure and its victims' end: whoever caused it is to exit, and be named, first


class WorkerFailed(RuntimeError):
    """A worker did not finish; the message names its rank and has its traceback."""


class Seat(NamedTuple):
    """A process's place among those of a run."""

    rank: int
    world_size: int


def find_seat(environ: Mapping[str, str] = os.environ) -> Seat | None:
    """The seat that torchrun or Slurm (several tasks of one `srun`) gave this process; None if nobody did."""
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        return Seat(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # not SLURM_NTASKS, which a batch script has too
        return Seat(int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]))
    return None


def slurm_meeting_point(environ: Mapping[str, str]) -> dict[str, str]:
    """`MASTER_ADDR` and `MASTER_PORT` that all tasks of a Slurm step agree on: its first node, a port from the job."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)  # "node[03-05,9]" begins with node03
    assert first is not None
    return {
        "MASTER_ADDR": first[1] + (first[2] or ""),
        "MASTER_PORT": str(20_000 + int(environ["SLURM_JOB_ID"]) % 20_000),
    }


def launch(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    process_group: bool,
    port: int | None = None,
    timeout_secs: float = 1800,
) -> None:
    """Run `worker(rank, world_size, *args)` in `world_size` processes that meet in a process group.

    A process with a seat (`find_seat`) runs its own worker; else the processes are started here, at `port` (None: a
    free one), one of them without a process. NCCL joins them, one GPU each, or gloo on the CPU. A collective that
    waits longer than `timeout_secs` fails. Raises InputError for bad input that a worker found, and WorkerFailed.
    """
    raise_open_file_limit()
    seat = find_seat()
    if seat is not None:
        if "RANK" not in os.environ:
            os.environ.update({**slurm_meeting_point(os.environ), **os.environ})
        _end(seat, _work(seat, worker, args, timeout_secs))
    elif not process_group:
        worker(0, 1, *args)
    elif world_size == 1:
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
        try:
            worker(0, 1, *args)
        finally:
            dist.destroy_process_group()
    else:
        _spawn(worker, world_size, args, port=port or int(os.environ.get("MASTER_PORT", 0)), timeout_secs=timeout_secs)


def raise_open_file_limit() -> None:
    """Many workers with many tensors in shared memory run out of the soft limit; the hard one is ours to take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_freed_memory() -> None:
    """Give large freed tensors back to the system at once.

    glibc keeps them, in ever larger pieces; among the tensors that sharding gathers and frees at every block, that
    holds as much memory as the whole model would have taken.
    """
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def _backend() -> str:
    """NCCL on GPUs, else gloo. Raises InputError if this machine has fewer GPUs than processes."""
    if not torch.cuda.is_available():
        return "gloo"
    gpus = torch.cuda.device_count()
    if int(os.environ.get("LOCAL_RANK", 0)) >= gpus:
        raise InputError(
            f"this machine has {gpus} GPUs and was given more processes: lower world_size (or torchrun's "
            f"--nproc-per-node), or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return "nccl"


# --- in a worker ---------------------------------------------------------------------------------------------------


def _work(seat: Seat, worker: Callable[..., None], args: tuple, timeout_secs: float) -> tuple[int, str]:
    """Join the group, work, leave it; exit status and what went wrong."""
    return_freed_memory()
    try:
        init_distributed(
            seat.rank,
            seat.world_size,
            backend=_backend(),
            timeout=timedelta(seconds=timeout_secs),
        )
        worker(seat.rank, seat.world_size, *args)
        dist.destroy_process_group()
        return 0, ""
    except InputError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            return FAILED, traceback.format_exc()
        return BAD_INPUT, str(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        return LOST_CONTACT if _lost_contact(error) else FAILED, traceback.format_exc()


def _lost_contact(error: Exception) -> bool:
    """Whether a collective failed, most likely because another rank did."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _end(seat: Seat, outcome: tuple[int, str]) -> None:
    """Leave the process if its work failed, at once: other threads may be stuck in a collective."""
    status, message = outcome
    if status == 0:
        return
    if status == BAD_INPUT:
        if seat.rank != 0:
            time.sleep(GRACE_SECS)  # what every rank found, rank 0 alone should say: by then this one has been ended
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        print(f"rank {seat.rank} failed:\n{message}", file=sys.stderr, flush=True)
    if status == LOST_CONTACT:
        time.sleep(GRACE_SECS)
    sys.stdout.flush()
    os._exit(status)


def _run_worker(seat: Seat, parent: int, port: int, pipe: Any, worker: Callable, args: tuple, secs: float) -> None:
    faulthandler.enable()  # a stuck worker is ended by SIGABRT and shows where it was
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # no orphan, however the parent dies
    if os.getppid() != parent:
        os._exit(FAILED)
    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_RANK": str(seat.rank),
        "LOCAL_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
    }
    status, message = _work(seat, worker, args, secs)
    pipe.send(message[-20_000:])  # fits into the pipe's buffer: nobody reads it before this process has ended
    if status == LOST_CONTACT:
        time.sleep(GRACE_SECS)
    if status:
        sys.stdout.flush()
        os._exit(status)


# --- in the parent -------------------------------------------------------------------------------------------------


def _spawn(worker: Callable[..., None], world_size: int, args: tuple, *, port: int, timeout_secs: float) -> None:
    """Start the workers, wait for them, and leave none behind."""
    try:  # served from here, so that the port is taken before anyone is told of it
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise InputError(f"port {port} is not free; fsdp_port=null (and no MASTER_PORT) picks one that is") from error
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            seat = Seat(rank, world_size)
            process = context.Process(
                target=_run_worker, args=(seat, os.getpid(), store.port, sender, worker, args, timeout_secs)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        _wait_for(processes, pipes, timeout_secs)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _wait_for(processes: list, pipes: list, timeout_secs: float) -> None:
    """Return when all workers are done. Raises for the first that failed, or for those that never ended."""
    running, failed = dict(enumerate(processes)), []
    deadline = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait([p.sentinel for p in running.values()], left)
        if not ended:
            break
        for rank in [r for r, p in running.items() if p.sentinel in ended]:
            process = running.pop(rank)
            process.join()
            if process.exitcode:
                failed.append(rank)
        # once one has ended, so should the others: at once if it failed by itself, soon if it lost contact, and within
        # the time that a collective may take if it is done
        by_itself = any(processes[rank].exitcode != LOST_CONTACT for rank in failed)
        deadline = time.monotonic() + (1 if by_itself else 2 * GRACE_SECS if failed else timeout_secs)
    if failed or running:
        statuses = {rank: processes[rank].exitcode for rank in failed}
        messages = {rank: _last_words(pipes[rank]) for rank in failed}
        if all(status == LOST_CONTACT for status in statuses.values()):
            for process in running.values():  # nobody else is to blame: these shall show where they are
                os.kill(process.pid, signal.SIGABRT)
            wait([p.sentinel for p in running.values()], GRACE_SECS)
        raise _cause(statuses, messages, sorted(running), timeout_secs)


def _cause(
    statuses: Mapping[int, int], messages: Mapping[int, str], stuck: list[int], timeout_secs: float
) -> Exception:
    """What the failed workers' exit statuses and last words, in the order of their ends, say about the cause."""
    guilty = [rank for rank, status in statuses.items() if status != LOST_CONTACT]
    if guilty:
        rank = next((r for r in guilty if statuses[r] == BAD_INPUT), guilty[0])
        if statuses[rank] == BAD_INPUT:
            return InputError(messages[rank])
        return WorkerFailed(
            f"rank {rank} {'failed' if messages[rank] else _describe(statuses[rank])}:\n{messages[rank]}"
        )
    victims = "\n".join(f"rank {rank} lost contact:\n{text}" for rank, text in messages.items())
    if not stuck:
        return WorkerFailed(f"every rank lost contact with the others\n{victims}")
    names = " and ".join(f"rank {rank}" for rank in stuck)
    return WorkerFailed(f"{names} did not answer within collective_timeout_secs={timeout_secs:g}\n{victims}")


def _last_words(pipe: Any) -> str:
    try:
        return pipe.recv() if pipe.poll() else ""
    except EOFError:
        return ""


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status} and no message"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
