"""Predicts a run's memory from shapes alone, and which settings would reduce it.

A model without weights runs a forward and a backward on the largest microbatch with fake tensors, which have shapes and
lifetimes but no data (`torch._subclasses.FakeTensorMode`); a tracker records what is alive when.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dpo.data.preflight import TrainingData
from dpo.errors import InputError, RunError
from dpo.losses import needs_squares, needs_tails
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, find_adapter, trained_parameters
from dpo.models.layouts import Layout, Microbatch, layout_by_rules
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import DTYPES
from dpo.parallel.sharding import find_blocks
from dpo.settings.choices import ADAPTED
from dpo.settings.files import defaults_of
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_config_problems
from dpo.system.host_memory import host_memory, resident_memory
from dpo.training.batches import Batches
from dpo.training.optimization import OPTIMIZERS

# of what comes and goes: holes in what one process on a CPU keeps (`malloc.keep_freed_memory`), measured on SmolLM2
KEPT = 0.2
REDUCED = torch.float32.itemsize  # bytes of a gradient while it is summed over processes (`sharding.distribute`)
ADAPTER = torch.float32.itemsize  # bytes of an adapter's weight, whatever the base has (`adapters.add_adapter`)
ONE_BY_ONE = ("Adafactor",)  # the other optimizers update all parameters at once on a GPU
LOOKED_AT = 50  # global batches that are searched for the largest microbatch


class MemoryEstimate(NamedTuple):
    """Bytes of one process at its peak, by purpose."""

    policy: int
    gradients: int
    optimizer: int
    reference: int  # a model of its own, or a second adapter
    gathered: int  # weights gathered from other processes' shards
    reduced: int  # a unit's gradients while they are reduced, in float32
    activations: int
    logits: int
    update: int  # temporaries of an optimizer that updates all parameters at once, on a GPU
    kept: int  # freed but kept by the allocator, on a CPU
    process: int  # Python, libraries and data: host memory

    @property
    def total(self) -> int:
        return sum(self)


class MemoryTracker(TorchDispatchMode):
    """Tracks the storages of all tensors that operations inside it create."""

    def __init__(self, held: Iterable[torch.Tensor], *, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kinds = {tensor.untyped_storage()._cdata: "held" for tensor in held}

    @classmethod
    def of(cls, model: Any) -> MemoryTracker:
        """A tracker that distinguishes a model's gradients and logits from its activations."""
        tracker = cls((*model.parameters(), *model.buffers()), vocabulary=model.get_output_embeddings().weight.shape[0])
        for parameter in trained_parameters(model):
            parameter.register_post_accumulate_grad_hook(tracker._is_gradient)
        return tracker

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._kinds:
            return
        self._kinds[key] = "logits" if tensor.ndim and tensor.shape[-1] == self.vocabulary else "activations"
        size = storage.nbytes()
        self.live[self._kinds[key]] += size
        weakref.finalize(storage, self._forget, key, size)
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _forget(self, key: int, size: int) -> None:
        self.live[self._kinds.pop(key)] -= size

    def _is_gradient(self, parameter: torch.nn.Parameter) -> None:
        storage = parameter.grad.untyped_storage()
        kind = self._kinds.get(storage._cdata)
        if kind not in (None, "gradients"):
            self.live[kind] -= storage.nbytes()
            self.live["gradients"] += storage.nbytes()
            self._kinds[storage._cdata] = "gradients"


def predict(config: DictConfig, plan: Plan, data: TrainingData) -> MemoryEstimate:
    """The peak of a process. Under tensor parallelism it counts the activations of whole layers, which is too much."""
    fake = FakeTensorMode()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = find_policy_structure(config, plan, plan.compute_dtype)
    with fake:
        policy = _on_device(policy, device, DTYPES[plan.compute_dtype] if plan.trainer.multi_process else None)
    if config.activation_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    layout, _ = layout_by_rules(config.layout, policy, max_length=config.max_length)
    forward = layout.forward
    if needs_tails(config.loss) or needs_squares(config.loss):
        forward = partial(layout.forward_details, with_squares=needs_squares(config.loss))
    trained, evaluated = _largest_microbatches(config, plan, data, layout)
    n_backwards = min(config.gradient_accumulation_steps, 2)
    with fake:
        of_update, of_scoring = (
            _run(policy.train(), forward, _as_fake(trained, fake, device), config.model.autocast, n_backwards).peak,
            _run(policy.eval(), forward, _as_fake(evaluated, fake, device), config.model.autocast, 0).peak,
        )
    training = _held_while_training(config, plan, policy, on_gpu=device == "cuda")
    at_peak = max(of_update, of_scoring, key=lambda peak: peak["activations"] + peak["logits"])
    if plan.reference != "model" or config.cache_reference_logps != "all":
        return _with_activations(training, at_peak, plan, device)
    scoring = training._replace(gradients=0, optimizer=0, reduced=0, update=0)  # then the reference is freed
    phases = ((scoring, of_scoring), (training._replace(reference=0), at_peak))
    return max((_with_activations(*phase, plan, device) for phase in phases), key=lambda need: need.total)


def _on_device(policy: Any, device: str, gathered: torch.dtype | None) -> Any:
    """A policy on the meta device with new tensors instead; in a FakeTensorMode they take no memory.

    Parameters are in the dtype `gathered` (None: in their own). PEFT cannot put adapters into a model of fake tensors.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay tied
    for module in policy.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new.to(gathered), requires_grad=tensor.requires_grad)
                    made[tensor] = new
                tensors[name] = made[tensor]
    return policy


def _held_while_training(config: DictConfig, plan: Plan, policy: Any, *, on_gpu: bool) -> MemoryEstimate:
    """Everything but activations and what the allocator keeps."""
    model, dims, compute = config.model, plan.dims, DTYPES[plan.compute_dtype]
    shards = dims.shard_size * dims.tensor_size
    adapter, second = (_count(adapter_weights(policy, name).values()) for name in (POLICY, REFERENCE))
    base, buffers = _count(policy.parameters()) - adapter - second, sum(b.nbytes for b in policy.buffers())
    policy_dtype, reference_dtype = (DTYPES[name].itemsize for name in (model.policy_dtype, plan.reference_dtype))
    # what is trained has gradients and optimizer state, beside a base that may be frozen
    trained = (adapter * ADAPTER if adapter else base * policy_dtype) // shards
    states, temporary = _states_of(config.optimizer)
    at_once = on_gpu and dims.world_size == 1 and config.optimizer not in ONE_BY_ONE  # shards are updated one by one
    adapter_of_reference = adapter if find_adapter(model.archive) else 0
    reference = {
        "model": (base * reference_dtype + adapter_of_reference * ADAPTER) // shards + buffers,
        "adapter": second * ADAPTER // shards,
    }
    units = _units(policy, model.block_name) if dims.shard_size > 1 else []
    root, *blocks = [sum(p.numel() for p in unit) for unit in units] or [0, 0]
    reduced = max((sum(p.numel() for p in unit if p.requires_grad) for unit in units), default=0)
    return MemoryEstimate(
        policy=(base * policy_dtype + adapter * ADAPTER) // shards + buffers,
        gradients=trained,
        optimizer=int(trained * states),
        reference=reference.get(plan.reference or "", 0),
        gathered=(root + 2 * max(blocks)) * compute.itemsize // dims.tensor_size,  # the block that runs, and the next
        reduced=reduced * REDUCED // dims.tensor_size,
        update=int(trained * temporary) if at_once else 0,
        activations=0,
        logits=0,
        kept=0,
        process=0 if on_gpu else resident_memory(),
    )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _with_activations(need: MemoryEstimate, peak: Counter[str], plan: Plan, device: str) -> MemoryEstimate:
    """The memory of a phase with these activations."""
    comes_and_goes = need.gradients + need.optimizer + peak["activations"] + peak["logits"]
    kept = int(KEPT * comes_and_goes) if device == "cpu" and plan.dims.world_size == 1 else 0
    return need._replace(activations=peak["activations"], logits=peak["logits"], kept=kept)


def _largest_microbatches(
    config: DictConfig, plan: Plan, data: TrainingData, layout: Layout
) -> tuple[Microbatch, Microbatch]:
    """The microbatches with the most tokens, of the run's first batches and of its evaluations."""
    limit = min(config.n_examples or 10**9, LOOKED_AT * config.batch_size)
    first = OmegaConf.merge(config, {"n_examples": limit})
    trained: list[Microbatch] = []
    evaluated: list[Microbatch] = []
    for rank in range(min(plan.dims.data_size, 4)):
        batches = Batches(first, data, layout, seed=config.seed, rank=rank, size=plan.dims.data_size)
        for batch in batches.train():
            trained += batch.microbatches
        for batch in batches.test():
            evaluated += batch.microbatches
    return max(trained, key=lambda m: m.n_tokens), max(evaluated, key=lambda m: m.n_tokens)


def _as_fake(microbatch: Microbatch, fake: FakeTensorMode, device: str) -> Any:
    return microbatch.map(lambda tensor: fake.from_tensor(tensor).to(device)).inputs


def _run(policy: Any, forward: Callable, inputs: Any, autocast: str | None, n_backwards: int) -> MemoryTracker:
    """Run forward and backward; twice if gradients accumulate, as the second finds them allocated; 0: forward only."""
    device = policy.device.type
    tracker = MemoryTracker.of(policy)
    with tracker, torch.set_grad_enabled(n_backwards > 0):
        for _ in range(max(1, n_backwards)):
            with torch.autocast(device, dtype=DTYPES.get(autocast), enabled=autocast is not None):
                logps = forward(policy, inputs)
            if n_backwards:
                sum(logps).sum().backward()
            del logps
    return tracker


def _states_of(optimizer: str) -> tuple[float, float]:
    """Bytes per byte of parameter, measured on a small one: of state, and of temporaries in an update."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    small = OPTIMIZERS[optimizer]([parameter], lr=0.1, foreach=True)  # as on a GPU
    small.step()
    states = [v for v in small.state[parameter].values() if isinstance(v, torch.Tensor)]
    with MemoryTracker([parameter, parameter.grad, *states]) as tracker:
        small.step()
    return sum(v.nbytes for v in states) / parameter.nbytes, tracker.peak.total() / parameter.nbytes


def _units(policy: Any, block_name: str | None) -> list[list[torch.nn.Parameter]]:
    """The parameters of the FSDP units: of the root (embeddings and head), then of each block."""
    blocks = [[*block.parameters()] for block in find_blocks(policy, block_name)]
    within = {parameter for block in blocks for parameter in block}
    return [[parameter for parameter in policy.parameters() if parameter not in within], *blocks]


# --- reports -------------------------------------------------------------------------------------------------------

HELP = (  # keys, and the value to try; None: nothing
    ("gradient_accumulation_steps", lambda c: 2 * c.gradient_accumulation_steps),
    ("activation_checkpointing", lambda c: True),
    ("model.attn_implementation", lambda c: "sdpa"),
    ("model.autocast", lambda c: "bfloat16"),
    ("cache_reference_logps", lambda c: "all"),
    ("max_length", lambda c: c.max_length // 2),
    ("lora", lambda c: None if c.lora.name in ADAPTED else "lora"),
    ("lora", lambda c: None if c.lora.name == "qlora" else "qlora"),
    ("lora.reference", lambda c: _without_second_model(c)),
)


def _without_second_model(config: DictConfig) -> str | None:
    """The `lora.reference` that needs no model of its own."""
    if config.lora.name not in ADAPTED:
        return None
    return "adapter" if find_adapter(config.model.archive) else "base"


def suggest(config: DictConfig, plan: Plan, data: TrainingData) -> list[str]:
    """The three settings that would save the most, each with the memory a process would then need."""
    need, found = predict(config, plan, data), []
    for key, change in HELP:
        value = change(config)
        if value is None or OmegaConf.select(config, key) == value:
            continue
        other = _changed(config, key, value)
        changed = resolve(other, trainer=plan.trainer, world_size=plan.dims.world_size)
        if find_config_problems(other, changed):
            continue
        try:
            total = predict(other, changed, data).total
        except InputError:  # bitsandbytes has no kernels for this machine
            continue
        if need.total - total > 0.03 * (need.total - need.process):
            found.append((total, f"{key}={str(value).lower() if value is True else value} ({total / 1e9:.2f} GB)"))
    return [text for _, text in sorted(found)[:3]]


def _changed(config: DictConfig, key: str, value: Any) -> DictConfig:
    """A copy of a config, as if the command line had this override too."""
    other: Any = OmegaConf.merge(config, {})
    if key == "lora":
        other.lora = defaults_of(lora=value)["lora"] | {k: v for k, v in config.lora.items() if k != "name"}
    else:
        OmegaConf.update(other, key, value)
    return other


def dry_run(config: DictConfig, plan: Plan, data: TrainingData) -> None:
    """Print the memory that the run would need and, if it would not fit, settings that would help."""
    need, available = predict(config, plan, data), _device_memory(plan)
    for name, value in need._asdict().items():
        if value:
            print(f"{name:>12} {value / 1e9:8.2f} GB")
    print(f"{'total':>12} {need.total / 1e9:8.2f} GB per process; its device has {available / 1e9:.2f} GB")
    if need.total > available:
        print(f"won't fit; try {_join(suggest(config, plan, data))}")


@contextmanager
def explaining_out_of_memory(config: DictConfig, plan: Plan, data: TrainingData) -> Iterator[None]:
    """Inside, running out of memory raises RunError with what was needed and which settings would help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError, on CUDA and in its CPU allocator
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "t allocate memory" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors they hold
        torch.cuda.empty_cache()
        need, available = predict(config, plan, data).total, _device_memory(plan)
        said = " ".join(str(error).split())[:200]
        raise RunError(
            f"out of memory: a process needs about {need / 1e9:.2f} GB, and its device has {available / 1e9:.2f} GB; "
            f"try {_join(suggest(config, plan, data))} ({said})"
        ) from error


def _join(found: list[str]) -> str:
    return ", ".join(found) or "a smaller model, or more processes with trainer=FSDPTrainer"


def _device_memory(plan: Plan) -> int:
    """Bytes available to one process: its GPU's memory, that of all GPUs if it is alone, or its share of the host's."""
    if torch.cuda.is_available():
        gpus = range(1 if plan.trainer.multi_process else torch.cuda.device_count())
        return sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    return (host_memory().available + resident_memory()) // int(
        os.environ.get("LOCAL_WORLD_SIZE", plan.dims.world_size)
    )
