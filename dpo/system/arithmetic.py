"""Numerical settings of torch: matmul precision, attention kernels, determinism, the recompile limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

GRAPHS = 32  # recompile limit of the code object that all blocks of policy and reference share; torch's is 8


def set_up_torch(*, deterministic: bool, compiles: bool) -> None:
    """Apply a run's settings to this process.

    `compiles`: the run uses torch.compile, whose import takes half a second.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    # cuDNN's attention builds a plan for every shape, 20 to 40 ms of host time; ours change with every microbatch
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch on CUDA
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # we read no tensor before it is written
    if compiles:
        from torch._dynamo import config

        config.recompile_limit = max(GRAPHS, config.recompile_limit)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, CUDA multiplies float32 matrices without rounding their inputs."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@contextmanager
def for_generation() -> Iterator[None]:
    """Inside, compiled code runs eagerly, and nondeterministic operations only warn.

    Generation would compile a graph for every cache length and use up the recompile limit that training needs; top-p
    sampling needs a cumulative sum, which is not deterministic on CUDA.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
