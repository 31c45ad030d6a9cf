"""Prediction of a run's memory, and of the settings that reduce it.

Fake tensors, which have shapes but no data, run a forward and a backward pass on the largest microbatch, a step of
sampling, and the scoring of answers, while a tracker records the memory in use. Memory that is held throughout training
(weights, gradients, optimizer) is computed from the policy's parameters.
"""

from __future__ import annotations

import math
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.data.examples import Example, list_examples
from dpo.data.preflight import TrainingData
from dpo.data.table import Prompt
from dpo.errors import InputError, RunError, one_sentence
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, find_adapter, trained_parameters
from dpo.models.answers import Sampling, make_logits_processors
from dpo.models.layouts import Layout, Microbatch, layout_by_rules
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations, choose_attention
from dpo.models.reward_model import find_reward_structure
from dpo.numbers import count
from dpo.parallel.sharding import find_blocks
from dpo.settings.plan import Plan, TrainingPlan
from dpo.settings.validation import find_problems
from dpo.system.host import host_memory, list_own_gpus, resident_memory
from dpo.training.batches import Batch, Batches, with_mismatched
from dpo.training.evaluation import Interval, limit_new_tokens
from dpo.training.memory_tracker import MemoryTracker, materialize
from dpo.training.online import add_placeholders, encode_prompt, list_held_out, some_prompts
from dpo.training.optimization import make_optimizer

Bytes = Counter[str]  # memory of a process in bytes, by purpose

PURPOSES = (  # in the order in which they are printed
    "policy",
    "gradients",
    "optimizer",
    "reference",  # a separate model, or a second adapter
    "scorer",  # a reward model, whole on every process
    "gathered",  # weights gathered from other processes' shards
    "reduced",  # a unit's gradients while they are reduced; with `fsdp_reduce_once` all that wait to be reduced
    "activations",
    "logits",
    "kv_cache",  # keys and values of the tokens so far, while answers are sampled
    "update",  # temporaries of an optimizer that updates all parameters at once, on a GPU
    "kept",  # freed but kept by the allocator, on a CPU
    "process",  # Python, libraries and data, in host memory
)
# purposes whose memory is allocated while training, and so fragments the heap of a process on a CPU
ALLOCATED_IN_TRAINING = ("gradients", "optimizer", "activations", "logits", "kv_cache")
# memory lost to fragmentation, as a share of the memory for these purposes; measured on a CPU, on SmolLM2
KEPT_SHARE = 0.2
SPARE_SHARE = 0.15  # of a GPU's memory, for what is not predicted: the CUDA context, NCCL's buffers, fragmentation
# settings of `fsdp_` keys that take more memory, so that processes send less
COMMUNICATION_SAVERS = {"reshard_after_forward": False, "reduce_once": True}
MIN_SAVED_BYTES = 1e8  # one of these settings is recommended if it saves at least this much communication per update
UPDATES_ONE_BY_ONE = ("Adafactor",)  # the other optimizers update all parameters, or shards, at once on a GPU
MIN_SAVED_SHARE = 0.03  # a setting is suggested if it saves at least this share of the memory without `process`
MAX_FILLED_SHARE = 0.85  # larger microbatches are suggested if they fill at most this share of a GPU's memory
N_SEARCHED_BATCHES = 50  # global batches that are searched for the largest microbatch: a whole run would take long


def predict_peak(plan: Plan, data: TrainingData) -> Bytes:
    """Predict the peak memory of a process.

    The prediction is too high under tensor parallelism, as it counts the activations of whole layers.
    """
    return max(predict_phases(plan, data).values(), key=Bytes.total)


def predict_phases(plan: Plan, data: TrainingData) -> dict[str, Bytes]:
    """Predict a process's peak memory in each phase of a run."""
    passes = run_passes(plan, data)
    return sum_phases(_decide_frozen_weights(plan, passes), passes)


class Passes(NamedTuple):
    """The memory that the passes of each phase take, and the models.

    Neither depends on how processes communicate, so plans that differ only in keys `fsdp_` share them.
    """

    policy: Any  # the policy's structure, without weights
    update: Bytes
    evaluation: Bytes
    sampling: dict[str, Bytes]  # by phase
    scoring: Bytes | None  # None without a reward model
    scorer: int  # bytes of a reward model's weights
    process: int  # bytes of Python, libraries and data; 0 with GPUs


def run_passes(plan: Plan, data: TrainingData) -> Passes:
    """Run the passes of each phase, on fake tensors."""
    reward, scorer_bytes = None, 0
    if plan.online is not None and plan.online.scorer == "reward_model":
        reward = find_reward_structure(plan)
        scorer_bytes = _count_bytes((*reward.model.parameters(), *reward.model.buffers()))
    policy = find_policy_structure(plan, plan.model.policy_dtype)
    gathered_dtype = DTYPES[plan.compute_dtype] if plan.trainer.multi_process else None
    fake = FakeTensorMode()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with fake:
        policy = materialize(policy, device, gathered_dtype)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if policy.config._attn_implementation not in ("eager", "sdpa"):  # fake tensors cannot run other kernels
        policy.set_attn_implementation(choose_attention(policy.config, "sdpa"))  # takes about as much memory
    train_microbatches, eval_batches = _find_batches(plan, data, layout)
    # the second backward pass runs while gradients are held; further ones need no more memory
    n_backwards = min(plan.data.gradient_accumulation_steps, 2)
    update_peak = _find_microbatch_peak(plan, policy, fake, layout, train_microbatches, n_backwards=n_backwards)
    eval_microbatches = (microbatch for batch in with_mismatched(eval_batches) for microbatch in batch.microbatches)
    eval_peak = _find_microbatch_peak(plan, policy, fake, layout, eval_microbatches, n_backwards=0)
    sampling_peaks, scoring_peak = {}, None
    if plan.evaluation.sample_during_eval:
        sampling_peaks["samples"] = _find_samples_peak(plan, policy, fake, eval_batches)
    if plan.online:
        sampling_peaks["sampling"], scoring_peak = _find_online_peaks(plan, data, policy, reward, fake)
    return Passes(
        policy=find_policy_structure(plan, plan.model.policy_dtype),  # anew, as the one above may have `gathered_dtype`
        update=update_peak,
        evaluation=eval_peak,
        sampling=sampling_peaks,
        scoring=scoring_peak,
        scorer=scorer_bytes,
        process=0 if plan.gpus else resident_memory(),  # measured here, with all libraries imported
    )


def sum_phases(plan: Plan, passes: Passes) -> dict[str, Bytes]:
    """Add up, by phase, what a process holds and its passes take."""
    held = _count_held(plan, passes.policy) + Counter(scorer=passes.scorer, process=passes.process)
    phases: dict[str, Bytes] = {}
    if plan.reference == "model" and plan.caches_reference_first:
        before_training = _without(held, "gradients", "reduced", "update", "optimizer")
        phases["scoring the reference"] = before_training + passes.evaluation
        held = _without(held, "reference")  # the reference is freed before training
    in_backward = _without(held, "update")
    if plan.data.gradient_accumulation_steps == 1:  # gradients come as activations go, and add nothing to the peak
        in_backward = _without(in_backward, "gradients")
    phases["backward"] = in_backward + passes.update
    phases["optimizer"] = _without(held, "gathered", "reduced")
    between_updates = _without(held, "gradients", "reduced", "update")
    phases["evaluation"] = between_updates + passes.evaluation
    for phase, peak in passes.sampling.items():
        phases[phase] = between_updates + peak
        # where memory allows, `sharding.gathered_weights` gathers all weights at once, not unit by unit
        all_gathered = _count_all_gathered(plan, passes.policy)
        if all_gathered <= (_find_device_memory(plan) - between_updates.total()) / 2:
            phases[phase]["gathered"] = all_gathered
    if passes.scoring is not None:
        phases["scoring"] = between_updates + passes.scoring
    if not plan.gpus and plan.dims.world_size == 1:
        for memory in phases.values():
            memory["kept"] = int(KEPT_SHARE * sum(memory[purpose] for purpose in ALLOCATED_IN_TRAINING))
    return phases


def _find_samples_peak(plan: Plan, policy: Any, fake: FakeTensorMode, eval_batches: Sequence[Batch]) -> Bytes:
    """Peak while an evaluation draws samples."""
    # at least 2 tokens, as `_find_sampling_peak` feeds the last two one by one
    n_prompt_tokens = max(2, *(len(example.prompt) for batch in eval_batches for example in batch.examples))
    sampling = Sampling(limit_new_tokens(plan, n_prompt_tokens))
    n_rows = math.ceil(max(len(batch.examples) for batch in eval_batches) / plan.dims.data_size)
    return _find_sampling_peak(
        plan, policy, fake, sampling, n_rows=n_rows, n_prompt_tokens=n_prompt_tokens, autocast=None
    )


def _find_online_peaks(
    plan: Plan, data: TrainingData, policy: Any, reward: Any, fake: FakeTensorMode
) -> tuple[Bytes, Bytes | None]:
    """Peaks while answers are sampled, and while they are scored.

    The second is None without a reward model.
    """
    online, sizes, prompts = plan.online, OnlineSizes.of(plan), some_prompts(data)
    # an evaluation samples and scores one answer to each held-out prompt
    n_held_out = min(plan.data.n_eval_examples, len(data.test))
    held_out_rows = min(plan.prompts_at_a_time, math.ceil(n_held_out / plan.dims.data_size))
    held_out_scored = min(plan.prompts_at_a_time, math.ceil(n_held_out / plan.dims.world_size))
    sampling_peak = _find_sampling_peak(
        plan,
        policy,
        fake,
        Sampling(online.max_new_tokens, online.temperature, online.top_p),
        n_rows=max(sizes.rows_per_batch, held_out_rows),
        n_prompt_tokens=max(len(encode_prompt(prompt, data, plan).prompt) for prompt in prompts),
        autocast=plan.model.autocast,
    )
    if reward is None:
        return sampling_peak, None
    # a reward model reads whole prompts, which the policy's limits do not truncate
    longest = max(len(reward.encode(prompt, "")["input_ids"]) for prompt in prompts) + online.max_new_tokens
    scoring_peak = _find_scoring_peak(
        reward.model,
        fake,
        policy.device.type,
        n_rows=max(sizes.scored_rows, held_out_scored),
        n_tokens=min(longest, reward.limit or longest),
    )
    return sampling_peak, scoring_peak


def _without(memory: Bytes, *purposes: str) -> Bytes:
    return Counter({purpose: n_bytes for purpose, n_bytes in memory.items() if purpose not in purposes})


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# --- memory held throughout -------------------------------------------------------------------------------------------


def _count_held(plan: Plan, policy: Any) -> Bytes:
    """The memory that follows from the policy's parameters, by purpose.

    It is held throughout training, except `gathered`, `reduced` and `update`.
    """
    dims = plan.dims
    n_shards = dims.shard_size * dims.tensor_size
    is_whole = plan.fsdp.frozen_weights == "whole"

    def count_frozen(n_bytes: int, n_elements: int, dtype: str) -> int:
        """Bytes of frozen weights on a process.

        Whole ones are in the `dtype` in which they compute, shards in the dtype in which they were loaded.
        """
        if is_whole:
            return n_elements * DTYPES[dtype].itemsize // dims.tensor_size
        return n_bytes // n_shards

    weights, trained = list(policy.parameters()), trained_parameters(policy)
    buffer_bytes = _count_bytes(policy.buffers())  # buffers are not sharded
    reference_adapter = list(adapter_weights(policy, REFERENCE).values())
    base_bytes = _count_bytes(weights) - _count_bytes(trained) - _count_bytes(reference_adapter)
    n_base = _count_elements(weights) - _count_elements(trained) - _count_elements(reference_adapter)
    trained_bytes = _count_bytes(trained) // n_shards
    state_ratio, temporary_ratio = _measure_optimizer(plan.training)
    held = Counter(
        policy=trained_bytes + count_frozen(base_bytes, n_base, plan.compute_dtype) + buffer_bytes,
        gradients=trained_bytes,
        optimizer=int(trained_bytes * state_ratio),
    )
    if plan.reference == "model":
        policy_adapter = list(adapter_weights(policy, POLICY).values())
        n_elements = _count_elements(weights) - _count_elements(policy_adapter)
        n_bytes = n_elements * DTYPES[plan.reference_dtype].itemsize
        if find_adapter(plan.model.archive):  # the reference loads this adapter too, which has the size of the policy's
            n_elements += _count_elements(policy_adapter)
            n_bytes += _count_bytes(policy_adapter)
        held["reference"] = count_frozen(n_bytes, n_elements, plan.reference_dtype) + buffer_bytes
    elif plan.reference == "adapter":
        held["reference"] = count_frozen(
            _count_bytes(reference_adapter), _count_elements(reference_adapter), plan.compute_dtype
        )
    if dims.shard_size > 1:
        held["gathered"], held["reduced"] = _count_gathered(plan, policy), _count_reduced(plan, policy)
    if plan.gpus and plan.training.optimizer not in UPDATES_ONE_BY_ONE:
        held["update"] = int(trained_bytes * temporary_ratio)
    return held


def _count_gathered(plan: Plan, policy: Any) -> int:
    """Bytes of the weights that FSDP holds gathered at a time."""
    root, *blocks = (_count_elements(unit) for unit in _list_units(plan, policy))
    # the running block and the prefetched next one; without resharding, all blocks until their backward pass
    n_in_blocks = 2 * max(blocks) if plan.fsdp.reshard_after_forward else sum(blocks)
    gathered = (root + n_in_blocks) * DTYPES[plan.compute_dtype].itemsize
    if plan.reference == "model" and plan.fsdp.frozen_weights != "whole":
        gathered += root * DTYPES[plan.reference_dtype].itemsize  # the reference's root stays until the update ends
    return gathered // plan.dims.tensor_size


def _count_reduced(plan: Plan, policy: Any) -> int:
    """Bytes of the gradients that FSDP holds whole at a time."""
    itemsize = DTYPES[plan.fsdp.reduce_dtype].itemsize
    trained_units = [[p for p in unit if p.requires_grad] for unit in _list_units(plan, policy)]
    reduced = max(map(_count_elements, trained_units)) * itemsize // plan.dims.tensor_size
    if plan.fsdp.reduce_once and plan.data.gradient_accumulation_steps > 1:  # all wait until the last microbatch
        reduced += _count_elements(trained_parameters(policy)) * itemsize // plan.dims.tensor_size
    return reduced


def _list_units(plan: Plan, policy: Any) -> list[list[torch.Tensor]]:
    """The parameters that FSDP gathers, by unit.

    First those of the root unit, such as embeddings and head, then those of each block.
    """
    blocks = [list(block.parameters()) for block in find_blocks(policy, plan.model.block_name)]
    in_blocks = {parameter for block in blocks for parameter in block}
    units = [[parameter for parameter in policy.parameters() if parameter not in in_blocks], *blocks]
    if plan.fsdp.frozen_weights == "whole":  # nothing gathers weights that every process holds whole
        units = [[parameter for parameter in unit if parameter.requires_grad] for unit in units]
    return units


def _count_all_gathered(plan: Plan, policy: Any) -> int:
    """Bytes of the gathered policy; 0 if it is not sharded."""
    if plan.dims.shard_size == 1:
        return 0
    n_elements = sum(_count_elements(unit) for unit in _list_units(plan, policy))
    return n_elements * DTYPES[plan.compute_dtype].itemsize // plan.dims.tensor_size


def _count_elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _measure_optimizer(training: TrainingPlan) -> tuple[float, float]:
    """Bytes of an optimizer's state and temporaries, per byte of parameter.

    Measured in an update of a small parameter.
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(training, [parameter], foreach=not training.optimizer_args.get("fused"))  # as on a GPU
    optimizer.step()  # the first step makes the states, which must not count as temporaries
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    with MemoryTracker([parameter, parameter.grad, *states]) as tracker:
        optimizer.step()
    return _count_bytes(states) / parameter.nbytes, tracker.peak.total() / parameter.nbytes


def notes_on_disk(plan: Plan, interval: Interval, updates: int, policy: torch.nn.Module, run_dir: Path) -> list[str]:
    """The disk that a run's checkpoints and its export need."""
    if plan.run.debug:
        return []
    n_saves = math.ceil(updates * plan.data.batch_size / (plan.run.save_every or interval.n_examples))
    n_kept = n_saves if interval.keep is None else min(n_saves, interval.keep + 1)  # and BEST
    weights = _count_bytes(trained_parameters(policy))
    n_bytes = n_kept * weights * (1 + _measure_optimizer(plan.training)[0]) + plan.run.export * weights
    free = shutil.disk_usage(run_dir).free
    parts = [f"{count(n_kept, 'checkpoint')} (keep_checkpoints)", *["LATEST/hf (export)"] * plan.run.export]
    return [
        f"{'warning: ' * (n_bytes > free)}the run's files take about {n_bytes / 1e9:.3g} GB on disk, where "
        f"{free / 1e9:.3g} GB are free: {' and '.join(parts)}"
    ]


# --- memory of single phases ------------------------------------------------------------------------------------------


def _find_batches(plan: Plan, data: TrainingData, layout: Layout) -> tuple[list[Microbatch], list[Batch]]:
    """Microbatches of the first training batches, and the evaluation batches."""
    n_examples = N_SEARCHED_BATCHES * plan.data.batch_size
    if plan.data.n_examples is not None:
        n_examples = min(n_examples, plan.data.n_examples)
    shortened_plan = plan.change("n_examples", n_examples)
    batches_class = LongestBatches if plan.online else Batches
    train_microbatches, eval_batches = [], []
    for rank in range(min(plan.dims.data_size, 4)):  # microbatches of further ranks are about as large
        batches = batches_class(shortened_plan, data, layout, seed=plan.run.seed, rank=rank, size=plan.dims.data_size)
        train_microbatches += [microbatch for batch in batches.train() for microbatch in batch.microbatches]
        eval_batches += batches.test()
    return train_microbatches, eval_batches


class LongestBatches(Batches):
    """Batches of an online run with the longest possible sequences.

    All answers have `max_new_tokens`. In each training batch `n_offline` prompts get their longest pair from the data
    instead of two answers: the prompts for which this adds the most tokens.
    """

    def test(self) -> Iterator[Batch]:
        """Iterate over the evaluation's pairs, then over its longest answers."""
        yield from super().test()
        prompts, size = list_held_out(self.plan, self.data), self.plan.data.eval_batch_size
        for start in range(0, len(prompts), size):
            examples = self._add_longest_answers(prompts[start : start + size], n_answers=1)
            yield Batch(examples, [1.0] * len(examples), self.split(examples, 1), cache_rows=())

    def _add_longest_answers(self, prompts: Sequence[Prompt], *, n_answers: int) -> list[Example]:
        n_tokens = self.plan.online.max_new_tokens
        return [
            add_placeholders(encode_prompt(prompt, self.data, self.plan), n_tokens, n_answers) for prompt in prompts
        ]

    def train(self, *, skip: int = 0) -> Iterator[Batch]:
        return self._iterate_train(self._make_longest_batch, [1] * len(self.data.train), skip=skip)

    def _make_longest_batch(self, example_ids: Sequence[tuple[int, int]]) -> Batch:
        """Make a training batch of placeholder answers and longest pairs."""
        plan, prompts = self.plan, self.read_prompts(example_ids)
        examples = self._add_longest_answers(prompts, n_answers=2)
        if plan.n_offline:
            pairs_by_prompt = [self.encode(list_examples(prompt)) for prompt in prompts]
            longest_pairs = [max(pairs, key=lambda pair: pair.n_tokens) for pairs in pairs_by_prompt]
            added_tokens = [
                pair.n_tokens - example.n_tokens for pair, example in zip(longest_pairs, examples, strict=True)
            ]
            by_added_tokens = sorted(range(len(prompts)), key=added_tokens.__getitem__, reverse=True)
            for index in by_added_tokens[: plan.n_offline]:
                examples[index] = longest_pairs[index]
        microbatches = self.split(examples, plan.data.gradient_accumulation_steps)
        return Batch(examples, [1.0] * len(examples), microbatches, cache_rows=())


def _find_microbatch_peak(
    plan: Plan,
    policy: Any,
    fake: FakeTensorMode,
    layout: Layout,
    microbatches: Iterable[Microbatch],
    *,
    n_backwards: int,
) -> Bytes:
    """Peak of activations and logits on the largest microbatch.

    With `n_backwards=0` there is no backward pass, as in evaluation.
    """
    largest = max(microbatches, key=lambda microbatch: microbatch.n_tokens)
    device, autocast = policy.device.type, DTYPES.get(plan.model.autocast)
    policy.train(n_backwards > 0)
    with fake, torch.set_grad_enabled(n_backwards > 0):
        inputs = largest.map(lambda tensor: fake.from_tensor(tensor).to(device)).inputs
        with MemoryTracker.of(policy) as tracker:
            for _ in range(max(1, n_backwards)):
                with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                    tokens = layout.forward(policy, inputs, with_squares=plan.loss.needs_squares)
                if n_backwards:
                    tokens.logps.sum().backward()
                del tokens
    return _without(tracker.peak, "gradients")


class OnlineSizes(NamedTuple):
    """Sizes of an update's sampling and scoring."""

    answers: int  # on all processes
    batches: int  # sampled by a process, each with one forward pass per token
    rows_per_batch: int  # answers that a process samples at a time
    scored_rows: int  # texts that a reward model reads at a time

    @classmethod
    def of(cls, plan: Plan) -> OnlineSizes:
        n_samples, n_prompts = plan.online.n_samples, plan.data.batch_size - plan.n_offline
        prompts_per_process = math.ceil(n_prompts / plan.dims.data_size)
        scored_per_process = math.ceil(n_prompts * n_samples / plan.dims.world_size)
        return cls(
            answers=n_prompts * n_samples,
            batches=math.ceil(prompts_per_process / plan.prompts_at_a_time),
            rows_per_batch=min(prompts_per_process, plan.prompts_at_a_time) * n_samples,
            scored_rows=min(scored_per_process, plan.prompts_at_a_time),
        )


def _find_sampling_peak(
    plan: Plan,
    policy: Any,
    fake: FakeTensorMode,
    sampling: Sampling,
    *,
    n_rows: int,
    n_prompt_tokens: int,
    autocast: str | None,
) -> Bytes:
    """Peak of the passes that sample `n_rows` answers at once.

    Each prompt has `n_prompt_tokens`. The peak comes while the prompts are read, or at the last token, when the KV
    cache is largest.
    """
    device, n_new_tokens = policy.device, sampling.max_new_tokens
    policy.eval()
    with (
        fake,
        torch.no_grad(),
        torch.autocast(device.type, dtype=DTYPES.get(autocast), enabled=autocast is not None),
    ):
        process_logits = make_logits_processors(sampling, range(n_rows), n_prompt=n_prompt_tokens)

        def forward(n_tokens: int, n_cached: int, cache: Any) -> Any:
            """Run the policy on `n_tokens`, draw the next token; return the cache.

            `cache` has keys and values of `n_cached` tokens. Only the memory in use matters, so token ids are zeros,
            and the drawn token is not used.
            """
            token_ids = torch.zeros(n_rows, n_tokens, dtype=torch.long, device=device)
            only_last_logits = {"logits_to_keep": 1} if policy._supports_logits_to_keep() else {}
            out = policy(input_ids=token_ids, past_key_values=cache, use_cache=True, **only_last_logits)
            ids_so_far = torch.zeros(n_rows, n_cached + n_tokens, dtype=torch.long, device=device)
            process_logits(ids_so_far, out.logits[:, -1].to(copy=True, dtype=torch.float32)).argmax(-1)
            return out.past_key_values

        with MemoryTracker.of(policy) as tracker:
            cache = forward(n_prompt_tokens, 0, None)
        peaks = [_separate_cache(tracker.peak, cache)]
        if n_new_tokens > 1:
            # tokens read before the last two forwards, of one token each; the last token drawn is never read
            n_cached = n_prompt_tokens + n_new_tokens - 3
            cache = forward(n_cached, 0, None)
            with MemoryTracker.of(policy) as tracker:
                cache = forward(1, n_cached, cache)  # replaces the cache by one that is tracked
                cache = forward(1, n_cached + 1, cache)
            peaks.append(_separate_cache(tracker.peak, cache))
    peak = max(peaks, key=Bytes.total)
    peak["kv_cache"] //= plan.dims.tensor_size
    return peak


def _separate_cache(peak: Bytes, cache: Any) -> Bytes:
    """Separate the KV cache from the activations, among which it was counted."""
    layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "keys")]
    n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return peak + Counter(kv_cache=n_bytes) - Counter(activations=n_bytes)


def _find_scoring_peak(model: Any, fake: FakeTensorMode, device: str, *, n_rows: int, n_tokens: int) -> Bytes:
    """Peak of a reward model's forward pass on `n_rows` texts.

    Each text has `n_tokens`. The model is on the meta device.
    """
    model.config.get_text_config().pad_token_id = 0  # classifiers refuse several rows without a padding token
    with fake, torch.no_grad():
        model = materialize(model, device, None)
        ids = torch.ones(n_rows, n_tokens, dtype=torch.long, device=device)
        with MemoryTracker((*model.parameters(), *model.buffers())) as tracker:
            model(input_ids=ids)
    return tracker.peak


# --- what processes gather and reduce -------------------------------------------------------------------------------


class Communication(NamedTuple):
    """The decision on frozen weights, and notes on what is communicated."""

    frozen_weights: str  # one of FROZEN_WEIGHTS
    notes: list[str]


def decide_communication(plan: Plan, data: TrainingData) -> Communication:
    """Decide `fsdp_frozen_weights` by the predicted memory.

    Also recommends keys that fit and save communication. On CPUs, or if there is nothing to decide or to recommend, no
    memory is predicted.
    """
    is_sharded = plan.dims.shard_size > 1
    savers = {}  # settings that this run could change to communicate less
    if is_sharded:
        savers = {name: value for name, value in COMMUNICATION_SAVERS.items() if getattr(plan.fsdp, name) != value}
    if plan.data.gradient_accumulation_steps == 1:  # gradients are reduced once per update anyway
        savers.pop("reduce_once", None)
    memory_decides = _memory_decides(plan)
    if not plan.gpus or not (memory_decides or savers):
        return Communication(plan.fsdp.frozen_weights or "sharded", [])
    try:
        passes = run_passes(plan, data)
    except Exception as error:  # from a model that does not run on fake tensors: it may train nevertheless
        why = f"{type(error).__name__}: {one_sentence(error)}"
        result = "frozen weights are sharded" if memory_decides else "no key is recommended"
        note = f"warning: the memory cannot be predicted, so {result} ({why})"
        return Communication(plan.fsdp.frozen_weights or "sharded", [note])
    plan = _decide_frozen_weights(plan, passes)
    frozen_weights = plan.fsdp.frozen_weights or "sharded"
    notes = [_explain_decision(plan, passes)] if memory_decides and is_sharded else []
    available, recommended = (1 - SPARE_SHARE) * _find_device_memory(plan), []
    for name, value in savers.items():
        changed_plan = _change_fsdp(plan, **{name: value})
        peak = _find_peak(changed_plan, passes)
        saved = count_communication(plan).total() - count_communication(changed_plan).total()
        if peak <= available and saved >= MIN_SAVED_BYTES:
            added = peak - _find_peak(plan, passes)
            sizes = f"{saved / 1e9:.3g} GB per update, for {added / 1e9:.3g} GB of memory"
            recommended.append(f"fsdp_{name}={str(value).lower()} ({sizes})")
            plan = changed_plan  # the next setting must fit beside this one
    if recommended:
        notes.append(f"there is memory for settings that communicate less: {', or '.join(recommended)}")
    return Communication(frozen_weights, notes)


def _memory_decides(plan: Plan) -> bool:
    """Return whether the predicted memory decides `fsdp_frozen_weights`."""
    has_choice = plan.has_frozen_weights and plan.can_hold_frozen_whole
    return plan.fsdp.frozen_weights is None and plan.trainer.multi_process and plan.gpus > 0 and has_choice


def _decide_frozen_weights(plan: Plan, passes: Passes) -> Plan:
    """The plan with `fsdp_frozen_weights` decided: whole on GPUs, if there is room."""
    if not _memory_decides(plan):
        return plan
    whole, sharded = _change_fsdp(plan, frozen_weights="whole"), _change_fsdp(plan, frozen_weights="sharded")
    # without memory to gather all weights once, sampling gathers them for every token
    if _gathers_to_sample(sharded, passes) and not _gathers_to_sample(whole, passes):
        return sharded
    # however little memory there is, whole weights are chosen if they take no more than sharded ones, as is the case
    # with shard_size=1, where whole weights are not copied
    max_peak = max((1 - SPARE_SHARE) * _find_device_memory(plan), _find_peak(sharded, passes))
    return whole if _find_peak(whole, passes) <= max_peak else sharded


def _gathers_to_sample(plan: Plan, passes: Passes) -> bool:
    """Return whether sampling gathers all of the policy's weights at once."""
    phases, all_gathered = sum_phases(plan, passes), _count_all_gathered(plan, passes.policy)
    return all(phases[phase]["gathered"] >= all_gathered for phase in passes.sampling)


def _explain_decision(plan: Plan, passes: Passes) -> str:
    """Compare the decided `fsdp_frozen_weights` with its other value."""
    frozen_weights = plan.fsdp.frozen_weights
    other = "sharded" if frozen_weights == "whole" else "whole"
    other_plan = _change_fsdp(plan, frozen_weights=other)
    return (
        f"frozen weights are {frozen_weights} on every GPU: the run takes {_find_peak(plan, passes) / 1e9:.3g} of "
        f"{_find_device_memory(plan) / 1e9:.3g} GB as predicted, and sends "
        f"{count_communication(plan).total() / 1e9:.3g} GB per update; fsdp_frozen_weights={other} would take "
        f"{_find_peak(other_plan, passes) / 1e9:.3g} GB and send {count_communication(other_plan).total() / 1e9:.3g} GB"
    )


def _find_peak(plan: Plan, passes: Passes) -> int:
    return max(memory.total() for memory in sum_phases(plan, passes).values())


def _change_fsdp(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, fsdp=replace(plan.fsdp, **fields))


def count_communication(plan: Plan) -> Bytes:
    """Bytes that FSDP sends from each process in an update.

    Counts the passes over an update's microbatches, as if none were in the reference's cache. Leaves out passes for a
    loss's statistic of the batch.
    """
    dims, fsdp, n_microbatches = plan.dims, plan.fsdp, plan.data.gradient_accumulation_steps
    policy = find_policy_structure(plan, plan.model.policy_dtype)
    root, *blocks = (_count_elements(unit) for unit in _list_units(plan, policy))
    # forward and backward; a reference that is the policy without its adapter, or with another, runs forward once more
    n_passes = 3 if plan.reference in ("base", "adapter") else 2
    # the root unit stays gathered for a whole update, a block for a pass or, without resharding, for a microbatch
    n_gathers = n_microbatches * (n_passes if fsdp.reshard_after_forward else 1)
    gathered = (root + sum(blocks) * n_gathers) * DTYPES[plan.compute_dtype].itemsize
    if plan.reference == "model" and fsdp.frozen_weights != "whole":
        gathered += (root + sum(blocks) * n_microbatches) * DTYPES[plan.reference_dtype].itemsize
    gradient_bytes = _count_elements(trained_parameters(policy)) * DTYPES[fsdp.reduce_dtype].itemsize
    reduced = gradient_bytes * (1 if fsdp.reduce_once else n_microbatches)
    # in a ring of n processes each sends all shards but one, which is (n - 1) / n of the tensor
    sent_gathered = gathered * (dims.shard_size - 1) // dims.shard_size
    sent_reduced = reduced * (dims.shard_size - 1) // dims.shard_size
    # once per update the copies of a shard add up their gradients, which takes two rounds of the ring
    n_copies = dims.replicate_size
    sent_reduced += 2 * gradient_bytes // dims.shard_size * (n_copies - 1) // n_copies
    return Counter(gathered=sent_gathered // dims.tensor_size, reduced=sent_reduced // dims.tensor_size)


# --- reports -------------------------------------------------------------------------------------------------------


def _find_small_reference(plan: Plan) -> str | None:
    """The `lora.reference` that needs no second model; None without an adapter."""
    if plan.lora is None:
        return None
    return "adapter" if find_adapter(plan.model.archive) else "base"


SUGGESTIONS = (  # settings that may save memory: a key, and a function that returns the value to try, or None
    ("gradient_accumulation_steps", lambda plan: 2 * plan.data.gradient_accumulation_steps),
    ("activation_checkpointing", lambda plan: True),
    ("model.attn_implementation", lambda plan: "sdpa"),
    # with several processes autocast would keep a second copy of all weights
    ("model.autocast", lambda plan: None if plan.trainer.multi_process else "bfloat16"),
    ("model.fsdp_policy_mp", lambda plan: "bfloat16" if plan.trainer.multi_process else None),
    ("cache_reference_logps", lambda plan: "all"),
    ("max_length", lambda plan: plan.data.max_length // 2),
    ("fsdp_frozen_weights", lambda plan: "sharded" if plan.dims.shard_size > 1 and plan.has_frozen_weights else None),
    ("fsdp_reshard_after_forward", lambda plan: True),
    ("fsdp_reduce_once", lambda plan: False),
    (
        "eval_batch_size",
        lambda plan: plan.data.eval_batch_size // 2 if plan.evaluation.sample_during_eval else None,
    ),
    ("online.batch_size", lambda plan: plan.prompts_at_a_time * plan.dims.data_size // 2 if plan.online else None),
    ("sample_during_eval", lambda plan: False),
    ("online.max_new_tokens", lambda plan: plan.online.max_new_tokens // 2 if plan.online else None),
    ("lora", lambda plan: "lora" if plan.lora is None else None),
    ("lora", lambda plan: None if plan.quantized else "qlora"),
    ("lora.reference", _find_small_reference),
)


def suggest_settings(plan: Plan, data: TrainingData) -> list[str]:
    """Find the three settings that save most, with the memory then needed.

    Each setting is tried alone.
    """
    memory, suggestions = predict_peak(plan, data), []
    min_saved = MIN_SAVED_SHARE * (memory.total() - memory["process"])
    for key, choose_value in SUGGESTIONS:
        value = choose_value(plan)
        if value is None or plan.values.get(key) == value:
            continue
        changed_plan = plan.change(key, value)
        if find_problems(changed_plan.values, changed_plan):
            continue
        try:
            total = predict_peak(changed_plan, data).total()
        except InputError:  # as for lora=qlora, if bitsandbytes has no kernels for this machine
            continue
        if memory.total() - total > min_saved:
            value_text = str(value).lower() if isinstance(value, bool) else value  # as on the command line
            suggestions.append((total, f"{key}={value_text} (then {total / 1e9:.2f} GB per process)"))
    suggestions.sort()  # by the memory then needed
    return [text for _, text in suggestions[:3]]


def print_prediction(plan: Plan, data: TrainingData) -> None:
    """Print the memory needed and, if it won't fit, helpful settings."""
    passes, available = run_passes(plan, data), _find_device_memory(plan)
    decided_plan = _decide_frozen_weights(plan, passes)
    phases = sum_phases(decided_plan, passes)
    phase, memory = max(phases.items(), key=lambda item: item[1].total())
    for purpose in PURPOSES:
        if memory[purpose]:
            print(f"{purpose:>12} {memory[purpose] / 1e9:8.2f} GB")
    total = f"{memory.total() / 1e9:8.2f} GB per process at its peak ({phase})"
    print(f"{'total':>12} {total}; its device has {available / 1e9:.2f} GB")
    if plan.online:
        _print_online_phases(plan, phases)
    if plan.dims.shard_size > 1:
        sent, frozen = count_communication(decided_plan), decided_plan.fsdp.frozen_weights or "sharded"
        details = f" (frozen weights are {frozen})" if plan.has_frozen_weights else ""
        print(
            f"FSDP sends {sent.total() / 1e9:.2f} GB from each process in an update, of which gathered weights "
            f"{sent['gathered'] / 1e9:.2f}, reduced gradients {sent['reduced'] / 1e9:.2f}{details}"
        )
    if memory.total() > available:
        print("won't fit; looking for settings that would help", flush=True)  # a prediction for each takes a while
        print(f"try {_join_suggestions(plan, data)}")


def _print_online_phases(plan: Plan, phases: dict[str, Bytes]) -> None:
    labels = {"gathered": "gathered", "activations": "activations", "logits": "logits", "kv_cache": "KV cache"}
    for phase, peak in phases.items():
        parts = [f"{label} {peak[purpose] / 1e9:.2f}" for purpose, label in labels.items() if peak[purpose]]
        details = f", of which {', '.join(parts)}" if parts else ""
        print(f"{phase:>12} {peak.total() / 1e9:8.2f} GB at its peak{details}")
    sizes, n_new_tokens = OnlineSizes.of(plan), plan.online.max_new_tokens
    print(
        f"an update samples {sizes.answers:,} answers, of up to {sizes.answers * n_new_tokens:,} tokens in all; each "
        f"process makes up to {sizes.batches * n_new_tokens:,} forward passes of {sizes.rows_per_batch:,} rows"
    )


@contextmanager
def explain_out_of_memory(plan: Plan, data: TrainingData) -> Iterator[None]:
    """Raise RunError with advice if memory runs out inside."""
    try:
        yield
    except RunError:  # a RuntimeError too, but its message needs no explanation
        raise
    except (MemoryError, RuntimeError) as error:
        # on a CPU torch raises a plain RuntimeError: "can't allocate memory", "couldn't allocate memory"
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_out_of_memory and "t allocate memory" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors that local variables hold
        torch.cuda.empty_cache()
        original_message = " ".join(str(error).split())[:200]
        raise RunError(f"out of memory: {_advise(plan, data)} ({original_message})") from error


def _advise(plan: Plan, data: TrainingData) -> str:
    try:
        needed, available = predict_peak(plan, data).total(), _find_device_memory(plan)
        return (
            f"a process needs about {needed / 1e9:.2f} GB, and its device has {available / 1e9:.2f} GB; "
            f"try {_join_suggestions(plan, data)}"
        )
    except Exception as error:  # a model that cannot be predicted has run out of memory all the same
        return f"the memory that a process needs could not be predicted ({one_sentence(error)})"


def notes_on_free_memory(plan: Plan) -> list[str]:
    """A message if, after an update, larger microbatches would fit."""
    if not torch.cuda.is_available():
        return []
    current_steps = plan.data.gradient_accumulation_steps
    fewest_steps, peak, total = 1, 0, 0  # the fewest that fit on every GPU
    for gpu in list_own_gpus(multi_process=plan.trainer.multi_process):
        gpu_peak, gpu_total = torch.cuda.max_memory_allocated(gpu), _find_gpu_memory(gpu)
        held = torch.cuda.memory_allocated(gpu)
        steps = find_fewest_steps(current_steps, held=held, peak=gpu_peak, total=gpu_total)
        fewest_steps = max(fewest_steps, steps)
        peak, total = peak + gpu_peak, total + gpu_total
    if fewest_steps == current_steps:
        return []
    return [
        f"{peak / 1e9:.3g} of {total / 1e9:.3g} GB of GPU memory were used; gradient_accumulation_steps={fewest_steps} "
        f"should fit too, and larger microbatches keep a GPU busier"
    ]


def find_fewest_steps(steps: int, *, held: int, peak: int, total: int) -> int:
    """The fewest accumulation steps that should fit, a divisor of `steps`.

    Memory beyond what is `held` between updates is assumed to grow with the microbatches.
    """
    for n in range(1, steps):
        predicted = held + (peak - held) * steps / n
        if steps % n == 0 and predicted <= MAX_FILLED_SHARE * total:
            return n
    return steps


def _join_suggestions(plan: Plan, data: TrainingData) -> str:
    return ", or ".join(suggest_settings(plan, data)) or "a smaller model, or more processes with trainer=FSDPTrainer"


def _find_device_memory(plan: Plan) -> int:
    """Bytes available to one process.

    With GPUs, the memory of its GPU, or of all GPUs if it is the only process. Without GPUs, its share of host memory.
    """
    if torch.cuda.is_available():
        return sum(map(_find_gpu_memory, list_own_gpus(multi_process=plan.trainer.multi_process)))
    n_processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", plan.dims.world_size))  # the launchers set it
    return (host_memory().available + resident_memory()) // n_processes_here


def _find_gpu_memory(gpu: int) -> int:
    return torch.cuda.get_device_properties(gpu).total_memory
