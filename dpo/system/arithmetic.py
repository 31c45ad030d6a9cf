"""Numerical settings of torch: TF32, determinism, autocast and compilation."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

# `torch.compile` may make this many graphs of the code that all blocks of policy and reference share; torch's default
# is 8.
GRAPHS = 32


def set_up_torch(*, deterministic: bool, compiles: bool) -> None:
    """Set this process's numerical options; `compiles` means that torch.compile will be used."""
    torch.backends.cuda.matmul.allow_tf32 = True  # faster; where float32 must be exact, use `without_tf32`
    # cuDNN's attention spends 20 to 40 ms of host time on a plan for every new shape, which most microbatches have
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch on CUDA
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # we read no tensor before it is written
    if compiles:
        from torch.compiler import config  # slow to import

        config.recompile_limit = max(GRAPHS, config.recompile_limit)


def find_compute_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which autocast computes with tensors of `dtype`, or `dtype` itself without autocast."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype  # also for the meta device, which has no autocast


@contextmanager
def without_tf32() -> Iterator:
    """Multiply matrices of float32 at full precision inside; TF32 would round the factors to 10 bits of mantissa."""
    matmul = torch.backends.cuda.matmul
    was_allowed = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = was_allowed


@contextmanager
def without_compilation(*, cache_implementation: str | None = None) -> Iterator:
    """Run models without torch.compile while they generate, and only warn of operations that are not deterministic.

    A key-value cache that grows would need a graph for every length, and so use up the recompile limit. With a
    `cache_implementation`, such as "static", the cache does not grow, and compiled code is used.
    """
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # If torch._dynamo was not imported, nothing was compiled, and `set_stance` would import it.
    forces_eager = cache_implementation is None and "torch._dynamo" in sys.modules
    # This only warns, as top-p sampling needs a cumulative sum, which is not deterministic on CUDA.
    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
    try:
        with torch.compiler.set_stance("force_eager") if forces_eager else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
