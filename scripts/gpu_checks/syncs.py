"""Check 4: where an update makes the host wait for the device.

On a GPU torch reports it (`set_sync_debug_mode`). On a CPU reads of floating-point and boolean tensors are counted;
integer tensors are data, which is on the host on a GPU too.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from scripts.gpu_checks.common import ROOT, TINY, Outcome, Setting, few_words, train_here
from scripts.gpu_checks.table import MOST_READS

COMMON = (f"model.name_or_path={TINY}", "model.reference_dtype=float32", "loss=dpo", "loss.beta=0.1", "datasets=[hh]",
          "batch_size=8", "gradient_accumulation_steps=2", "n_eval_examples=4", "eval_batch_size=4",
          "sample_during_eval=false", "n_epochs=2", "max_length=96", "max_prompt_length=64")  # fmt: skip
BEFORE, WITHIN, AFTER = "before the first forward", "from the first forward to the last backward", "after it"


def check(setting: Setting) -> Outcome:
    """Two epochs: in the second the reference's log-probabilities are cached."""
    data = few_words(setting, 24)
    details: dict[str, Any] = {"lines": []}
    within = most = 0
    for base in ("BasicTrainer", "FSDPTrainer"):
        updates: list[Counter] = []
        facts: dict[str, Any] = {}
        watch = partial(counting, updates=updates, facts=facts, gpu=setting.gpu)
        train_here(setting, base, base, watch, *COMMON, f"dataset_sources.hh={data}")
        counted = updates[1:]  # the first is the warm-up
        details[base] = {"updates": [as_table(update) for update in counted], **facts}
        within = max(within, *(n_within(update) for update in counted))
        most = max(most, *(update.total() for update in counted))
        for phase, place in sorted(set().union(*counted)):
            times = max(update[phase, place] for update in counted)
            details["lines"].append(f"{base}: {times} x {place}, {phase}")
    cudnn = [base for base in ("BasicTrainer", "FSDPTrainer") if details[base]["cudnn_sdp"]]
    figure = f"{within} from the first forward to the last backward (of 0), {most} in an update (of {MOST_READS})"
    figure += f"; cuDNN's attention is on in {' and '.join(cudnn)}" if cudnn else ""
    return Outcome(within == 0 and most <= MOST_READS and not cudnn, figure, details)


def n_within(update: Counter) -> int:
    return sum(n for (phase, _), n in update.items() if phase == WITHIN)


def as_table(update: Counter) -> list[dict[str, Any]]:
    return [{"phase": phase, "place": place, "times": n} for (phase, place), n in update.items()]


def counting(trainer: type, *, updates: list[Counter], facts: dict[str, Any], gpu: bool) -> type:
    """The trainer, extended to count the waits of each update by phase and place."""

    class Counted(trainer):
        def train_step(self, batch: Any) -> Any:
            facts["cudnn_sdp"] = gpu and torch.backends.cuda.cudnn_sdp_enabled()
            self.phase, losses = BEFORE, self.objective.losses
            self.objective.losses = self._first_forward(losses)
            counts: Counter = Counter()
            try:
                with waits_on_gpu(self._note(counts)) if gpu else reads_on_cpu(self._note(counts)):
                    return super().train_step(batch)
            finally:
                self.objective.losses = losses
                updates.append(counts)

        def _first_forward(self, losses: Callable) -> Callable:
            def forward(*args: Any, **kwargs: Any) -> Any:
                self.phase = WITHIN
                return losses(*args, **kwargs)

            return forward

        def clip_gradient(self) -> torch.Tensor:
            self.phase = AFTER
            return super().clip_gradient()

        def _note(self, counts: Counter) -> Callable[[], None]:
            return lambda: counts.update([(self.phase, place_of_ours())])

    return Counted


def place_of_ours() -> str:
    """The project's innermost line on the stack, outside this package."""
    here = Path(__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(here) and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno} ({frame.name})"
    return "no line of ours"


@contextmanager
def waits_on_gpu(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` wherever torch warns that an operation waits for the device."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            note()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def is_result(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.bool


class _Reads(TorchDispatchMode):
    """Notes each read of a result tensor, except of copies made for the host."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.note, self.on_host = note, WeakTensorKeyDictionary()

    def read(self, tensor: torch.Tensor) -> None:
        if is_result(tensor) and tensor not in self.on_host:
            self.note()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.read(args[0])
        out = function(*args, **(kwargs or {}))
        if any(isinstance(tensor, torch.Tensor) and tensor in self.on_host for tensor in tree_iter((args, kwargs))):
            self.on_host.update((tensor, True) for tensor in tree_iter(out) if isinstance(tensor, torch.Tensor))
        return out


@contextmanager
def reads_on_cpu(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` wherever values of a result tensor are read, or it is copied for the host."""
    tolist, cpu, reads = torch.Tensor.tolist, torch.Tensor.cpu, _Reads(note)

    def counted_tolist(tensor: torch.Tensor) -> Any:
        reads.read(tensor)
        return tolist(tensor)

    def counted_cpu(tensor: torch.Tensor) -> torch.Tensor:
        reads.read(tensor)
        copy = tensor.clone()
        reads.on_host[copy] = True
        return copy

    torch.Tensor.tolist, torch.Tensor.cpu = counted_tolist, counted_cpu
    try:
        with reads:
            yield
    finally:
        torch.Tensor.tolist, torch.Tensor.cpu = tolist, cpu
