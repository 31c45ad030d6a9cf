"""Check 10: two ranks on one device over gloo: FSDP2, tensor parallelism, and a rank that hangs.

NCCL needs a GPU per rank. Whether gloo's collectives accept CUDA tensors is tried first, without our code:
`python -m scripts.gpu_checks.two_ranks RANK STORE` is one rank of that.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from scripts.gpu_checks.common import TINY, Outcome, Process, Run, Setting, Skipped, few_words
from scripts.gpu_checks.demo import WITHOUT_TF32, distance
from scripts.gpu_checks.table import HANG_SECONDS, RANKS_TOLERANCE

COMMON = (f"model.name_or_path={TINY}", "model.block_name=LlamaDecoderLayer", "loss=dpo", "loss.beta=0.1",
          "model.reference_dtype=float32", "datasets=[hh]", "n_eval_examples=4", "eval_batch_size=4",
          "do_first_eval=false", "sample_during_eval=false", "max_length=96", "max_prompt_length=64", "n_epochs=null",
          "batch_size=4", "n_examples=16", "lr=1e-4", "warmup_steps=2")  # fmt: skip
WAYS = {"FSDP": "FSDPTrainer", "tensor parallelism": "TensorParallelTrainer"}
COLLECTIVE_SECONDS = 15


def check(setting: Setting) -> Outcome:
    if setting.gpu:
        try_gloo(setting)
    common = (*COMMON, f"dataset_sources.hh={few_words(setting, 16)}", f"collective_timeout_secs={COLLECTIVE_SECONDS}")
    plain = Run(setting, "plain", *common, **WITHOUT_TF32)
    pairs = {way: start_pair(setting, trainer, "on_gloo", *common) for way, trainer in WAYS.items()}
    hanging = start_pair(setting, "FSDPTrainer", "hang", *common, name="hang")
    wanted = plain.done().records(split="train")
    for pair in pairs.values():
        for rank in pair:
            rank.done()
    far = {way: farthest(pair[0].records(split="train"), wanted) for way, pair in pairs.items()}
    seconds, blame = end_of_hang(hanging)
    faults = [f"{way} off by {d:.1e} (of {RANKS_TOLERANCE:g})" for way, d in far.items() if not d <= RANKS_TOLERANCE]
    faults += [f"a hang: {blame}"] if blame else []
    figure = "; ".join(
        faults or [*(f"{way} off by {d:.1e}" for way, d in far.items()), f"a hang named and ended in {seconds:.0f} s"]
    )
    return Outcome(not faults, figure, {"distance": far, "hang_seconds": seconds})


def start_pair(setting: Setting, trainer: str, first: str, *overrides: str, name: str | None = None) -> list[Run]:
    """Two ranks, started as by torchrun but both on the first device."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    name = name or trainer
    rank_env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where = f"local_run_dir={setting.folder}/{name}-0"
    ranks = []
    for rank in range(2):
        place = {**rank_env, "RANK": str(rank), "LOCAL_RANK": str(rank), **WITHOUT_TF32}
        settings = (*overrides, f"trainer={trainer}", where)
        ranks.append(Run(setting, f"{name}-{rank}", *settings, first=f"{__spec__.name}:{first}", **place))
    return ranks


def on_gloo() -> None:
    """Make this rank use gloo even with a GPU; it then takes the first one."""
    from dpo.system import launching

    assert callable(launching._backend)
    launching._backend = lambda local_rank: "gloo"


def hang() -> None:
    """Make rank 1 hang in its second update."""
    from trainers import BasicTrainer

    on_gloo()
    clip = BasicTrainer.clip_gradient

    def hanging(self: BasicTrainer) -> Any:
        if self.rank == 1 and self.state.batch_counter == 1:
            time.sleep(3600)
        return clip(self)

    BasicTrainer.clip_gradient = hanging


def farthest(ours: list[dict], theirs: list[dict]) -> float:
    """The largest distance of a metric; infinite if updates are missing."""
    if len(ours) != len(theirs) or not theirs:
        return float("inf")
    kinds = ("logps", "loss", "grad_norm", "rewards")
    return max(
        distance(one[key], value, key)
        for one, two in zip(ours, theirs, strict=True)
        for key, value in two.items()
        if key.startswith(kinds) and not key.endswith("accuracies")
    )


def end_of_hang(pair: list[Run]) -> tuple[float, str | None]:
    """Seconds until the waiting rank has exited, and what was wrong with its exit."""
    waits, hangs = pair
    start = time.monotonic()
    status = waits.wait(HANG_SECONDS)
    seconds = time.monotonic() - start
    hangs.wait(0)
    if status is None:
        return seconds, f"the other rank still waited after {HANG_SECONDS:g} s"
    if status == 0 or "rank 1 did not answer" not in waits.text():
        return seconds, f"the other rank exited with status {status} and named no rank: {waits.last_line()}"
    return seconds, None


# --- without our code ------------------------------------------------------------------------------------------------


def try_gloo(setting: Setting) -> None:
    """Raises Skipped if torch's gloo cannot do FSDP's collectives on CUDA tensors."""
    store = str(Path(setting.folder) / "store")
    command = [sys.executable, "-m", "scripts.gpu_checks.two_ranks"]
    ranks = [Process(setting, f"gloo-{rank}", [*command, str(rank), store]) for rank in range(2)]
    statuses = [rank.wait(45) for rank in ranks]
    for status, rank in zip(statuses, ranks, strict=True):
        if status != 0:
            raise Skipped(f"not possible: gloo on CUDA tensors exited with status {status}: {rank.last_line()}")


def probe(rank: int, store: str) -> None:
    """The collectives that FSDP and tensor parallelism call, on a mesh of two ranks on one GPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    group = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",)).get_group()
    ones, half, whole = (torch.ones(n, device="cuda") for n in (4, 2, 4))
    dist.broadcast(ones, src=0, group=group)
    dist.all_reduce(ones, group=group)
    dist.all_reduce(ones, op=dist.ReduceOp.MAX, group=group)
    dist.all_gather_into_tensor(whole, half, group=group)
    dist.reduce_scatter_tensor(half, whole, op=dist.ReduceOp.AVG, group=group)
    torch.cuda.synchronize()
    assert ones.tolist() == [2.0] * 4, ones
    assert half.tolist() == [1.0] * 2, half


if __name__ == "__main__":
    probe(int(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
