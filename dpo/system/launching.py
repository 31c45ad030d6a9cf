"""Starting a run's processes, or joining a launcher's; docs/LOG.md says why torch's own launchers are not used."""

import ctypes
import faulthandler
import math
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from typing import Any, NamedTuple

from dpo.errors import InputError, RunError, explaining, find_advice, is_lost_contact
from dpo.redaction import redact
from dpo.system.host import (
    count_gpus,
    drop_safe_path,
    harden_stdio,
    importing_without_gc,
    keep_freed_memory,
    raise_open_file_limit,
    return_freed_memory,
    safe_path_for_children,
)
from dpo.system.signals import STOP_STATUS, Stopped, end_process, handling_signals, on_stop_signals

START_METHOD = "spawn"  # CUDA does not work in a forked process
GRACE_SECS = 5  # a rank that lost contact waits, so that the rank that caused the loss exits first and is named
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
DONE, FAILED, BAD_INPUT, LOST_CONTACT = range(4)  # exit statuses of a worker, besides those of signals
# Once a worker has exited with a status, the others have this many seconds to exit too. The order counts: the first
# status here that any worker has is the run's. After a failure, another worker may still report bad input, which says
# more. Ranks that lost contact, or are asked to stop, end one after the other. Once one is done, others may still be in
# a last collective.
PATIENCE = {BAD_INPUT: 1, FAILED: 1, STOP_STATUS: 60, LOST_CONTACT: 60, DONE: math.inf}


def launch(
    worker: Callable,
    world_size: int,
    *args: Any,
    process_group: bool,
    port: int | None = None,
    timeout_secs: float = 1800,
    heartbeat_timeout_secs: float = 60,
) -> None:
    """Run `worker(rank, world_size, *args)` in processes that form a group, and return when all are done.

    A process that a launcher started runs its own worker, and exits with its status. Without `process_group`, the
    worker is called here, as rank 0 of 1; otherwise `world_size` workers are spawned and meet at `port` (None: a free
    one). `timeout_secs` limits a collective, and `heartbeat_timeout_secs` the silence of a machine. Raises InputError,
    Stopped or RunError if a worker did not finish.
    """
    raise_open_file_limit()
    if rank_env := find_rank_env():
        status, message = _run_in_group(rank_env, worker, args, timeout_secs, heartbeat_timeout_secs)
        if status == BAD_INPUT and rank_env.rank != 0:
            # Rank 0 may have the same error; the launcher ends this process once rank 0 has reported it.
            time.sleep(GRACE_SECS)
        if message:
            print(redact(f"error: {message}" if status == BAD_INPUT else message), file=sys.stderr)
        end_process("", status)
    elif process_group:
        # Listen from now on: another run could take a port that is only chosen here, and the two would meet.
        with listen("fsdp_port", port or 0) as listener:
            _spawn(worker, world_size, args, listener, timeout_secs)
    else:
        keep_freed_memory()
        worker(0, 1, *args)


# --- the rank that a launcher assigned -------------------------------------------------------------------------------


class RankEnv(NamedTuple):
    rank: int
    world_size: int
    local_rank: int  # among the ranks of its machine; the index of its GPU
    address: str
    port: int  # where the rendezvous store is
    machine: int = 0
    n_machines: int = 1
    listener: socket.socket | None = None  # listens at `port` already, for rank 0, which serves the store


def find_rank_env() -> RankEnv | None:
    """Read the rank that torchrun or Slurm (an `srun` of several tasks) assigned; None without a launcher."""
    environ = os.environ
    if {"RANK", "WORLD_SIZE"} <= environ.keys():  # torchrun
        rank_env = RankEnv(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            address="localhost",
            port=29500,
            machine=int(environ.get("GROUP_RANK", 0)),
            n_machines=int(environ.get("GROUP_WORLD_SIZE", 1)),
        )
    elif int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # not SLURM_NTASKS, which a batch script has too
        rank_env = RankEnv(
            rank=int(environ["SLURM_PROCID"]),
            world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            # Take the first node of a list, such as node03 in "node[03-05,9]".
            address=re.sub(r"^([^,\[]*)(?:\[(\w+))?.*", r"\1\2", environ.get("SLURM_STEP_NODELIST", "")),
            port=20_000 + int(environ["SLURM_JOB_ID"]) % 20_000,  # jobs rarely collide
            machine=int(environ.get("SLURM_NODEID", 0)),
            n_machines=int(environ.get("SLURM_STEP_NUM_NODES", 1)),
        )
    else:
        return None
    return rank_env._replace(
        address=environ.get("MASTER_ADDR") or rank_env.address, port=int(environ.get("MASTER_PORT") or rank_env.port)
    )


def count_processes_here(world_size: int) -> int:
    """Count a run's processes that use this machine's GPUs; 1 under Slurm, which may show each task its own GPU."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1 if find_rank_env() else world_size))


def count_machines() -> int:
    rank_env = find_rank_env()
    return rank_env.n_machines if rank_env else 1


# --- in a worker -----------------------------------------------------------------------------------------------------


def get_open_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def listen(name: str, port: int) -> socket.socket:
    """Listen at a port, 0 for any that is free; raise InputError, with the setting's `name`, if it is in use."""
    with explaining(OSError, lambda why: InputError(f"{name}={port} cannot be used: {why}; choose another port")):
        return socket.create_server(("", port))


def choose_backend() -> str:
    return "nccl" if count_gpus() else "gloo"


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str = "localhost",
    port: int = 12355,
    backend: str = "nccl",
    timeout: timedelta | None = None,
    store: Any = None,
    local_rank: int | None = None,
) -> None:
    """Join the default process group.

    Without a `store`, processes meet at `MASTER_ADDR` and `MASTER_PORT` of the environment, or at `master_addr` and
    `port`. Under NCCL, `local_rank` (by default `rank`) is the index of the GPU.
    """
    import torch
    import torch.distributed as dist

    if store is None:
        os.environ.setdefault("MASTER_ADDR", master_addr)
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None
    if backend == "nccl":  # set the GPU before joining, or NCCL takes GPU 0 on every rank
        device = torch.device("cuda", (rank if local_rank is None else local_rank) % count_gpus())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store, device_id=device)


def _run_in_group(
    rank_env: RankEnv, worker: Callable, args: tuple, timeout_secs: float, heartbeat_timeout_secs: float
) -> tuple[int, str]:
    """Join the group and run a worker; return its exit status, and a message for the user, which may be empty."""
    with importing_without_gc():
        import torch.distributed as dist
        import tqdm

        from dpo.system import waiting

    # tqdm's own lock is a semaphore of the system, of whose leak Python would warn after `end_process`
    tqdm.tqdm.set_lock(threading.RLock())
    return_freed_memory()
    rank, world_size, local_rank, address, port, machine, n_machines, listener = rank_env
    # torchrun may serve the store itself; it keeps it when it restarts workers
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves_store = rank == 0 and (listener is not None or not has_agent_store)
    timeout = timedelta(seconds=timeout_secs)
    status = DONE
    message = ""
    try:
        if serves_store and not listener:
            listen("MASTER_PORT", port).close()  # if another program uses it, the store's error would say less
        # Let a stop signal kill this process, as no Python handler could run during the calls below.
        with handling_signals(signal.SIG_DFL):
            store = dist.TCPStore(
                address,
                port,
                is_master=serves_store,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach() if listener else None,
            )
            if has_agent_store:  # each attempt needs keys of its own
                store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        with waiting.watching_machines(
            store,
            machine,
            n_machines,
            writes=local_rank == 0,
            timeout_secs=heartbeat_timeout_secs,
            give_up=lambda why: end_process(f"rank {rank} ends: {why}\n", LOST_CONTACT),
        ):
            with handling_signals(signal.SIG_DFL):
                init_distributed(
                    rank, world_size, backend=choose_backend(), timeout=timeout, store=store, local_rank=local_rank
                )
            try:
                worker(rank, world_size, *args)
            except Stopped as stopped:  # all ranks stop, but only rank 0 says so
                status = stopped.status
                message = str(stopped) if rank == 0 else ""
        dist.destroy_process_group()
        return status, message
    except InputError as error:
        status = BAD_INPUT
        message = str(error)
    except RunError as error:
        status = FAILED
        message = f"rank {rank}: {error}\n"
    except Exception as error:
        status = LOST_CONTACT if is_lost_contact(error) else FAILED
        problem = "failed" if status == FAILED else "lost contact"
        message = f"rank {rank} {problem}:\n{traceback.format_exc()}"
        if advice := find_advice(error):
            message += f"{advice}\n"
    if dist.is_initialized():
        store = waiting.default_store()
        with suppress(dist.DistError, TimeoutError):  # rank 0, which serves the store, may have ended, or be suspended
            store.set(waiting.FAILURE_KEY, "")  # so that ranks that wait for this one give up
            if status == LOST_CONTACT:
                # In a thread, as a store whose process is suspended answers no call, and a call has no time limit.
                silent_ranks = ThreadPoolExecutor().submit(_name_silent_ranks, store, rank, world_size)
                message += silent_ranks.result(2 * GRACE_SECS)
    return status, message


def _name_silent_ranks(store: Any, rank: int, world_size: int) -> str:
    """Return a line that names the ranks that did not lose contact, one of which caused the loss; "" if all did."""
    store.set(f"rank {rank} lost contact", "")
    time.sleep(GRACE_SECS)  # until other ranks that lost contact have recorded it too
    silent = [f"rank {r}" for r in range(world_size) if not store.check([f"rank {r} lost contact"])]
    return f"because {' and '.join(silent)} failed, was killed, or did not answer in time\n" if silent else ""


def end_with_parent(parent: int, signal_number: int) -> None:
    """Let the system send this process a signal when its parent, whose process id is `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(FAILED)


def _run_worker(rank_env: RankEnv, parent: int, pipe: Any, worker: Callable, args: tuple, timeout_secs: float) -> None:
    """Run a worker in this spawned process, send its exit status and message to the parent, and end the process."""
    drop_safe_path()
    end_with_parent(parent, signal.SIGKILL)
    harden_stdio()
    faulthandler.enable()  # the parent kills a stuck worker by SIGABRT, and this prints its stack
    os.environ["LOCAL_RANK"] = str(rank_env.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(rank_env.world_size)
    # A single machine has no heartbeats, so their timeout is infinite.
    status, message = _run_in_group(rank_env, worker, args, timeout_secs, heartbeat_timeout_secs=math.inf)
    # The parent reads after this process has exited, so the message must fit into the pipe's buffer of 64 KiB.
    pipe.send((status, redact(message)[-15_000:]))
    end_process("", status)


# --- in the parent ---------------------------------------------------------------------------------------------------


def _spawn(worker: Callable, world_size: int, args: tuple, listener: socket.socket, timeout_secs: float) -> None:
    """Start workers, and return when all are done, or raise the error that ended the run; leave no worker running.

    The workers meet at the port where `listener` listens.
    """
    port = listener.getsockname()[1]
    context = multiprocessing.get_context(START_METHOD)
    processes = []  # by rank
    pipes = []  # by rank; a worker sends how its work ended
    stop_signals = []  # numbers of the stop signals that this process got

    def stop_workers(number: int) -> str:
        """Send workers SIGTERM, on which they save and stop; return the message to print."""
        stop_signals.append(number)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
        return "stopping after saving what was trained"

    try:
        with on_stop_signals(stop_workers):
            for rank in range(world_size):
                rank_env = RankEnv(rank, world_size, rank, "127.0.0.1", port, listener=listener if rank == 0 else None)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_worker, args=(rank_env, os.getpid(), sender, worker, args, timeout_secs)
                )
                # A terminal sends Ctrl-C to all processes, but only this one should handle and forward it: a process
                # that is started while Ctrl-C is ignored ignores it, too.
                with handling_signals(signal.SIG_IGN, signal.SIGINT), safe_path_for_children():
                    process.start()
                listener.close()  # rank 0 has a copy; with this one open, ranks could connect after rank 0 ended
                sender.close()  # the worker has a copy; with this one open, the pipe would not end with the worker
                processes.append(process)
                pipes.append(receiver)
            if stop_signals:  # one came while a worker was starting, and did not reach this worker
                stop_workers(stop_signals.pop())  # adds the number again; a worker ignores a second signal
            _wait_for_workers(processes, pipes, stop_signals, timeout_secs)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _wait_for_workers(processes: list, pipes: list, stop_signals: list[int], timeout_secs: float) -> None:
    """Wait until all workers have exited, or until the PATIENCE after an exit is over.

    Raises InputError, RunError or Stopped if not all are done.
    """
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended = {}  # messages of workers by status, in the order of their exits
    status = DONE
    seconds_left = None  # no limit until a worker has exited
    while running and (exited := wait_for_any(running, seconds_left)):
        for sentinel in exited:
            rank = running.pop(sentinel)
            worker_status, message = _read_outcome(rank, processes[rank], pipes[rank], stop_signals)
            ended.setdefault(worker_status, []).append(message)
        # PATIENCE is in order: its first status that occurred says most about the run
        status = next(status for status in PATIENCE if status in ended)
        seconds_left = min(PATIENCE[status], timeout_secs)

    messages = ended[status]
    if status == BAD_INPUT:
        raise InputError(messages[0])
    if status == FAILED:
        raise RunError(messages[0])
    if status == STOP_STATUS:
        raise Stopped(*stop_signals[:1])
    if running:  # at least one of these hangs; at SIGABRT, faulthandler prints their stacks
        for rank in running.values():
            os.kill(processes[rank].pid, signal.SIGABRT)
        wait_for_any(running, GRACE_SECS)
        hanging = " and ".join(f"rank {rank}" for rank in running.values())
        messages.insert(0, f"{hanging} did not answer within collective_timeout_secs={timeout_secs:g}")
    if running or status == LOST_CONTACT:
        raise RunError("\n".join(filter(None, messages)))


def _read_outcome(rank: int, process: Any, pipe: Any, stop_signals: list[int]) -> tuple[int, str]:
    """Return the (status, message) that an exited worker sent, or else what follows from its process's exit status.

    `stop_signals` are the numbers of the stop signals that this process got and forwarded to the worker.
    """
    process.join()
    if pipe.poll():
        with suppress(EOFError):  # the worker ended without a message
            return pipe.recv()
    status = process.exitcode
    # A stop signal kills a worker that does not train yet.
    if status == STOP_STATUS or (stop_signals and -status in (signal.SIGTERM, *stop_signals)):
        return STOP_STATUS, ""
    if status >= 0:
        return FAILED, f"rank {rank} exited with status {status} before it was done"
    message = f"rank {rank} was killed by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        message += ", as the kernel does when memory runs out"
    return LOST_CONTACT if status == -signal.SIGABRT else FAILED, message  # NCCL aborts at a timeout
