"""How torch computes: precision of products, kernels of attention, determinism, limits of compilation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

GRAPHS = 32  # that all blocks of policy and reference, which share one code object, may have; torch's limit is 8


def set_up_torch(*, deterministic: bool, compiles: bool) -> None:
    """Settings of this process for a run. `compiles`: it uses torch.compile, whose import takes half a second."""
    torch.backends.cuda.matmul.allow_tf32 = True
    # cuDNN's attention makes a plan for every shape, 20 to 40 ms of host time, and ours change with every microbatch
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks of CUDA users here
        torch.use_deterministic_algorithms(True)
    if compiles:
        from torch._dynamo import config

        config.recompile_limit = max(GRAPHS, config.recompile_limit)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, CUDA multiplies float32 matrices in float32, whose inputs TF32 rounds to 10 bits of mantissa."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@contextmanager
def for_generation() -> Iterator[None]:
    """Inside, compiled code runs as written, and an operation that has no deterministic algorithm only warns.

    Generation would compile a graph for every length of its cache and use up the limit that training needs; top-p
    sampling needs a cumulative sum, which is not deterministic on CUDA.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
