"""Prediction of a run's memory from shapes alone, and the settings that would reduce it.

A model without weights runs a forward and a backward on the largest microbatch with fake tensors; a tracker records
the memory in use.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.data.preflight import TrainingData
from dpo.errors import InputError, RunError
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, find_adapter
from dpo.models.answers import Sampling
from dpo.models.layouts import Layout, Microbatch, layout_by_rules
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations
from dpo.models.reward_model import find_reward_structure
from dpo.parallel.sharding import find_blocks
from dpo.settings.plan import Plan
from dpo.settings.validation import find_problems
from dpo.system.host import host_memory, resident_memory
from dpo.training.batches import Batches
from dpo.training.memory_tracker import MemoryEstimate, MemoryTracker, on_device
from dpo.training.online_memory import (
    LongestAnswers,
    Rounds,
    longest_prompt,
    longest_text,
    peak_of_sampling,
    peak_of_scoring,
)
from dpo.training.optimization import OPTIMIZERS

# share of temporary memory: holes in the memory that a single process on a CPU keeps (`keep_freed_memory`),
# measured on SmolLM2
KEPT = 0.2
REDUCED = torch.float32.itemsize  # bytes of a gradient while it is summed over processes (`sharding.distribute`)
ADAPTER = torch.float32.itemsize  # bytes of an adapter's weight, whatever the base's dtype (`adapters.add_adapter`)
ONE_BY_ONE = ("Adafactor",)  # the other optimizers update all parameters at once on a GPU
LOOKED_AT = 50  # global batches that are searched for the largest microbatch


def predict(plan: Plan, data: TrainingData) -> MemoryEstimate:
    """The peak memory of a process.

    Too high under tensor parallelism, where it counts the activations of whole layers.
    """
    return max(predict_phases(plan, data).values(), key=lambda need: need.total)


def predict_phases(plan: Plan, data: TrainingData) -> dict[str, MemoryEstimate]:
    """The peak memory of a process in each phase of a run, by the phase's name."""
    fake = FakeTensorMode()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = find_policy_structure(plan, plan.compute_dtype)
    with fake:
        policy = on_device(policy, device, DTYPES[plan.compute_dtype] if plan.trainer.multi_process else None)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    forward = partial(layout.forward, with_squares=plan.loss.needs_squares)
    trained, evaluated, n_rows, n_prompt = _largest_microbatches(plan, data, layout)
    n_backwards = min(plan.data.gradient_accumulation_steps, 2)
    with fake:
        of_update, of_scoring = (
            _run(policy.train(), forward, _as_fake(trained, fake, device), plan.model.autocast, n_backwards).peak,
            _run(policy.eval(), forward, _as_fake(evaluated, fake, device), plan.model.autocast, 0).peak,
        )
    training = _held_while_training(plan, policy, on_gpu=device == "cuda")
    at_peak = max(of_update, of_scoring, key=lambda peak: peak["activations"] + peak["logits"])
    phases = {"training": (training, at_peak)}
    between_updates = training._replace(gradients=0, reduced=0, update=0)
    if plan.reference == "model" and plan.caches_reference_first:  # then the reference is freed
        phases = {
            "scoring the reference": (between_updates._replace(optimizer=0), of_scoring),
            "training": (training._replace(reference=0), at_peak),
        }
    if plan.evaluation.sample_during_eval:
        held = between_updates._replace(reference=phases["training"][0].reference)
        phases["samples"] = _sampling_phase(plan, policy, fake, held, n_rows=n_rows, n_prompt=n_prompt)
    if plan.online:
        phases |= _online_phases(plan, data, policy, fake, between_updates)
        phases["training"] = training._replace(scorer=phases["sampling"][0].scorer), at_peak
    return {name: _with_activations(*phase, plan, device) for name, phase in phases.items()}


def _online_phases(
    plan: Plan, data: TrainingData, policy: Any, fake: FakeTensorMode, held: MemoryEstimate
) -> dict[str, tuple[MemoryEstimate, Counter[str]]]:
    """The phases in which pairs are drawn, each with the memory held throughout and its temporary memory."""
    rounds, online, scoring = Rounds.of(plan), plan.online, Counter[str]()
    if online.scorer == "reward_model":
        reward = find_reward_structure(plan)
        weights = (*reward.model.parameters(), *reward.model.buffers())
        held = held._replace(scorer=sum(tensor.nbytes for tensor in weights))
        length = longest_text(reward, plan, data)
        scoring = peak_of_scoring(reward, rounds, fake, policy.device.type, length=length)
    drawing = Sampling(online.max_new_tokens, online.temperature, online.top_p)
    options = {"rows": rounds.rows, "n_prompt": longest_prompt(plan, data), "autocast": plan.model.autocast}
    sampling = peak_of_sampling(policy, drawing, fake, **options)
    phases = {"sampling": _while_sampling(plan, policy, held, sampling)}
    return phases | ({"scoring": (held, scoring)} if held.scorer else {})


def _sampling_phase(
    plan: Plan,
    policy: Any,
    fake: FakeTensorMode,
    held: MemoryEstimate,
    *,
    n_rows: int,
    n_prompt: int,
) -> tuple[MemoryEstimate, Counter[str]]:
    """The phase in which an evaluation samples, for batches of `n_rows` prompts of at most `n_prompt` tokens."""
    n_new = plan.data.max_length - n_prompt
    sampling = Sampling(min(n_new, plan.evaluation.n_eval_tokens or n_new))
    rows = -(-n_rows // plan.dims.data_size)
    peak = peak_of_sampling(policy, sampling, fake, rows=rows, n_prompt=n_prompt, autocast=None)
    return _while_sampling(plan, policy, held, peak)


def _while_sampling(
    plan: Plan, policy: Any, held: MemoryEstimate, sampling: Counter[str]
) -> tuple[MemoryEstimate, Counter[str]]:
    """One process's share of a sampling phase."""
    sampling["kv_cache"] //= plan.dims.tensor_size
    gathered = held.gathered
    if plan.dims.shard_size > 1:  # all weights at once, where they fit (`sharding.gathered_weights`)
        gathered = _count(policy.parameters()) * DTYPES[plan.compute_dtype].itemsize // plan.dims.tensor_size
        if gathered > (_device_memory(plan) - held.total) / 2:
            gathered = held.gathered
    return held._replace(gathered=gathered), sampling


def _held_while_training(plan: Plan, policy: Any, *, on_gpu: bool) -> MemoryEstimate:
    """Memory held throughout training: all but activations and freed memory that the allocator keeps."""
    model, dims, compute = plan.model, plan.dims, DTYPES[plan.compute_dtype]
    shards = dims.shard_size * dims.tensor_size
    adapter, second = (_count(adapter_weights(policy, name).values()) for name in (POLICY, REFERENCE))
    base, buffers = _count(policy.parameters()) - adapter - second, sum(b.nbytes for b in policy.buffers())
    policy_dtype, reference_dtype = (DTYPES[name].itemsize for name in (model.policy_dtype, plan.reference_dtype))
    # trained weights have gradients and optimizer state; the base may be frozen
    trained = (adapter * ADAPTER if adapter else base * policy_dtype) // shards
    states, temporary = _measure_states(plan.training.optimizer)
    # shards are updated one by one
    at_once = on_gpu and dims.world_size == 1 and plan.training.optimizer not in ONE_BY_ONE
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
        scorer=0,
        gathered=(root + 2 * max(blocks)) * compute.itemsize // dims.tensor_size,  # the block that runs, and the next
        reduced=reduced * REDUCED // dims.tensor_size,
        update=int(trained * temporary) if at_once else 0,
        activations=0,
        logits=0,
        kv_cache=0,
        kept=0,
        process=0 if on_gpu else resident_memory(),
    )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _with_activations(need: MemoryEstimate, peak: Counter[str], plan: Plan, device: str) -> MemoryEstimate:
    """The memory of a phase, with the activations of `peak`."""
    made = {kind: peak[kind] for kind in ("activations", "logits", "kv_cache")}
    comes_and_goes = need.gradients + need.optimizer + sum(made.values())
    kept = int(KEPT * comes_and_goes) if device == "cpu" and plan.dims.world_size == 1 else 0
    return need._replace(**made, kept=kept)


def _largest_microbatches(plan: Plan, data: TrainingData, layout: Layout) -> tuple[Microbatch, Microbatch, int, int]:
    """The largest microbatches, and the largest batch and longest prompt of evaluations.

    Returns the microbatches with the most tokens among the run's first training batches and among its evaluations, the
    number of examples in the largest evaluation batch, and the number of tokens in the longest evaluation prompt.
    """
    limit = min(plan.data.n_examples or 10**9, LOOKED_AT * plan.data.batch_size)
    first = plan.change("n_examples", limit)
    trained: list[Microbatch] = []
    evaluated: list[Microbatch] = []
    n_rows, n_prompt = 0, 2  # sampling is predicted with forwards of the last two tokens
    for rank in range(min(plan.dims.data_size, 4)):
        kind = LongestAnswers if plan.online else Batches
        batches = kind(first, data, layout, seed=plan.run.seed, rank=rank, size=plan.dims.data_size)
        for batch in batches.train():
            trained += batch.microbatches
        for batch in batches.test():
            evaluated += batch.microbatches
            n_rows = max(n_rows, len(batch.examples))
            n_prompt = max(n_prompt, *(len(example.prompt) for example in batch.examples))
    in_training, in_evaluation = (max(those, key=lambda m: m.n_tokens) for those in (trained, evaluated))
    return in_training, in_evaluation, n_rows, n_prompt


def _as_fake(microbatch: Microbatch, fake: FakeTensorMode, device: str) -> Any:
    return microbatch.map(lambda tensor: fake.from_tensor(tensor).to(device)).inputs


def _run(policy: Any, forward: Callable, inputs: Any, autocast: str | None, n_backwards: int) -> MemoryTracker:
    """Run forward and backward `n_backwards` times; 0: forward only.

    Two show the accumulation of gradients: the second finds them allocated.
    """
    device = policy.device.type
    tracker = MemoryTracker.of(policy)
    with tracker, torch.set_grad_enabled(n_backwards > 0):
        for _ in range(max(1, n_backwards)):
            with torch.autocast(device, dtype=DTYPES.get(autocast), enabled=autocast is not None):
                tokens = forward(policy, inputs)
            if n_backwards:
                tokens.logps.sum().backward()
            del tokens
    return tracker


def _measure_states(optimizer: str) -> tuple[float, float]:
    """Bytes of state, and of temporaries in an update, per byte of parameter; measured on a small parameter."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    small = OPTIMIZERS[optimizer]([parameter], lr=0.1, foreach=True)  # as on a GPU
    small.step()
    states = [v for v in small.state[parameter].values() if isinstance(v, torch.Tensor)]
    with MemoryTracker([parameter, parameter.grad, *states]) as tracker:
        small.step()
    return sum(v.nbytes for v in states) / parameter.nbytes, tracker.peak.total() / parameter.nbytes


def _units(policy: Any, block_name: str | None) -> list[list[torch.nn.Parameter]]:
    """The parameters of each FSDP unit: first the root (embeddings and head), then each block."""
    blocks = [[*block.parameters()] for block in find_blocks(policy, block_name)]
    within = {parameter for block in blocks for parameter in block}
    return [[parameter for parameter in policy.parameters() if parameter not in within], *blocks]


# --- reports -------------------------------------------------------------------------------------------------------

HELP = (  # keys, and the value to try; None: nothing
    ("gradient_accumulation_steps", lambda plan: 2 * plan.data.gradient_accumulation_steps),
    ("activation_checkpointing", lambda plan: True),
    ("model.attn_implementation", lambda plan: "sdpa"),
    ("model.autocast", lambda plan: "bfloat16"),
    ("cache_reference_logps", lambda plan: "all"),
    ("max_length", lambda plan: plan.data.max_length // 2),
    (
        "eval_batch_size",
        lambda plan: plan.data.eval_batch_size // 2 if plan.evaluation.sample_during_eval or plan.online else None,
    ),
    ("sample_during_eval", lambda plan: False),
    ("online.max_new_tokens", lambda plan: plan.online.max_new_tokens // 2 if plan.online else None),
    ("lora", lambda plan: "lora" if plan.lora is None else None),
    ("lora", lambda plan: None if plan.quantized else "qlora"),
    ("lora.reference", lambda plan: _without_second_model(plan)),
)


def _without_second_model(plan: Plan) -> str | None:
    """The `lora.reference` that needs no separate model; None without an adapter."""
    if plan.lora is None:
        return None
    return "adapter" if find_adapter(plan.model.archive) else "base"


def suggest(plan: Plan, data: TrainingData) -> list[str]:
    """The three settings that would save the most, each with the memory a process would then need."""
    need, found = predict(plan, data), []
    for key, change in HELP:
        value = change(plan)
        if value is None or plan.values.get(key) == value:
            continue
        other = plan.change(key, value)
        if find_problems(other.values, other):
            continue
        try:
            total = predict(other, data).total
        except InputError:  # bitsandbytes has no kernels for this machine
            continue
        if need.total - total > 0.03 * (need.total - need.process):
            found.append((total, f"{key}={str(value).lower() if value is True else value} ({total / 1e9:.2f} GB)"))
    return [text for _, text in sorted(found)[:3]]


def print_prediction(plan: Plan, data: TrainingData) -> None:
    """Print the memory that the run would need and, if it would not fit, settings that would help."""
    phases, available = predict_phases(plan, data), _device_memory(plan)
    need = max(phases.values(), key=lambda need: need.total)
    for name, value in need._asdict().items():
        if value:
            print(f"{name:>12} {value / 1e9:8.2f} GB")
    print(f"{'total':>12} {need.total / 1e9:8.2f} GB per process; its device has {available / 1e9:.2f} GB")
    if plan.online:
        for name, of_phase in phases.items():
            print(f"{name:>12} {of_phase.total / 1e9:8.2f} GB at its peak{_what_comes_and_goes(of_phase)}")
        print(Rounds.of(plan).tell(plan))
    if need.total > available:
        print("won't fit; looking for settings that would help", flush=True)  # a prediction for each takes a while
        print(f"try {_join(suggest(plan, data))}")


def _what_comes_and_goes(need: MemoryEstimate) -> str:
    kinds = {
        "gathered": need.gathered,
        "activations": need.activations,
        "logits": need.logits,
        "KV cache": need.kv_cache,
    }
    said = ", ".join(f"{kind} {value / 1e9:.2f}" for kind, value in kinds.items() if value)
    return f", of which {said}" if said else ""


@contextmanager
def explaining_out_of_memory(plan: Plan, data: TrainingData) -> Iterator[None]:
    """Inside, running out of memory raises RunError with the memory needed and the settings that would help."""
    try:
        yield
    except RunError:  # already explains itself
        raise
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError, on CUDA and in its CPU allocator
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "t allocate memory" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors they hold
        torch.cuda.empty_cache()
        need, available = predict(plan, data).total, _device_memory(plan)
        said = " ".join(str(error).split())[:200]
        raise RunError(
            f"out of memory: a process needs about {need / 1e9:.2f} GB, and its device has {available / 1e9:.2f} GB; "
            f"try {_join(suggest(plan, data))} ({said})"
        ) from error


def _join(found: list[str]) -> str:
    return ", ".join(found) or "a smaller model, or more processes with trainer=FSDPTrainer"


def _device_memory(plan: Plan) -> int:
    """Bytes available to one process: its GPU, all GPUs if it is the only process, or its share of host memory."""
    if torch.cuda.is_available():
        gpus = range(1 if plan.trainer.multi_process else torch.cuda.device_count())
        return sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    return (host_memory().available + resident_memory()) // int(
        os.environ.get("LOCAL_WORLD_SIZE", plan.dims.world_size)
    )
