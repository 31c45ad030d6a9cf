"""Prediction of a run's memory, and of the settings that reduce it.

Fake tensors, which have shapes but no data, run a forward and a backward pass on the largest microbatch, a step of
sampling, and the scoring of answers, while a tracker records the memory in use. Memory that is held throughout training
(weights, gradients, optimizer) is computed from the policy's parameters.
"""

from __future__ import annotations

import math
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.data.examples import list_examples
from dpo.data.preflight import TrainingData
from dpo.errors import InputError, RunError, one_sentence
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, find_adapter, trained_parameters
from dpo.models.answers import Sampling, choosing
from dpo.models.layouts import Layout, Microbatch, layout_by_rules
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations, choose_attention
from dpo.models.reward_model import find_reward_structure
from dpo.parallel.sharding import find_blocks
from dpo.settings.plan import Plan
from dpo.settings.validation import find_problems
from dpo.system.host import host_memory, resident_memory
from dpo.training.batches import Batch, Batches
from dpo.training.memory_tracker import MemoryTracker, on_device
from dpo.training.online import encode_prompt, some_prompts
from dpo.training.optimization import OPTIMIZERS

Bytes = Counter[str]  # memory of a process in bytes, by purpose

PURPOSES = (  # in the order in which they are printed
    "policy",
    "gradients",
    "optimizer",
    "reference",  # a separate model, or a second adapter
    "scorer",  # a reward model, whole on every process
    "gathered",  # weights gathered from other processes' shards
    "reduced",  # a unit's gradients while they are reduced, in float32
    "activations",
    "logits",
    "kv_cache",  # keys and values of the tokens so far, while answers are sampled
    "update",  # temporaries of an optimizer that updates all parameters at once, on a GPU
    "kept",  # freed but kept by the allocator, on a CPU
    "process",  # Python, libraries and data, in host memory
)
# purposes whose memory is allocated while training, and so fragments the heap of a process on a CPU
ALLOCATED_IN_TRAINING = ("gradients", "optimizer", "activations", "logits", "kv_cache")
# memory lost to fragmentation, as a share of the memory above; measured on SmolLM2 in one process on a CPU
KEPT_SHARE = 0.2
REDUCED_ITEMSIZE = torch.float32.itemsize  # of a gradient while it is summed over processes (`sharding.distribute`)
UPDATES_ONE_BY_ONE = ("Adafactor",)  # the other optimizers update all parameters, or shards, at once on a GPU
MIN_SAVED_SHARE = 0.03  # of the memory other than that of Python and libraries, for a setting to be suggested
MAX_FILLED_SHARE = 0.85  # of a GPU's memory, by larger microbatches that are suggested
N_SEARCHED_BATCHES = 50  # global batches that are searched for the largest microbatch: a whole run would take long


def predict(plan: Plan, data: TrainingData) -> Bytes:
    """Predict the peak memory of a process.

    The prediction is too high under tensor parallelism, as it counts the activations of whole layers.
    """
    return max(predict_phases(plan, data).values(), key=Bytes.total)


def predict_phases(plan: Plan, data: TrainingData) -> dict[str, Bytes]:
    """Predict a process's peak memory in each phase of a run."""
    policy = find_policy_structure(plan, plan.model.policy_dtype)
    held = _count_held(plan, policy)
    uses_reward_model = plan.online is not None and plan.online.scorer == "reward_model"
    reward = find_reward_structure(plan) if uses_reward_model else None
    if reward:
        held["scorer"] = _count_bytes((*reward.model.parameters(), *reward.model.buffers()))
    gathered_dtype = DTYPES[plan.compute_dtype] if plan.trainer.multi_process else None
    fake, device = FakeTensorMode(), "cuda" if torch.cuda.is_available() else "cpu"
    with fake:
        policy = on_device(policy, device, gathered_dtype)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if policy.config._attn_implementation not in ("eager", "sdpa"):  # kernels that fake tensors cannot run
        policy.set_attn_implementation(choose_attention(policy.config, "sdpa"))  # takes about as much, with its masks
    train_microbatches, eval_batches = _find_batches(plan, data, layout)
    # the second backward pass runs while gradients are held; further ones need no more memory
    n_backwards = min(plan.data.gradient_accumulation_steps, 2)
    update_peak = _find_microbatch_peak(plan, policy, fake, layout, train_microbatches, n_backwards=n_backwards)
    eval_microbatches = (microbatch for batch in eval_batches for microbatch in batch.microbatches)
    eval_peak = _find_microbatch_peak(plan, policy, fake, layout, eval_microbatches, n_backwards=0)
    held["process"] = 0 if plan.gpus else resident_memory()  # measured here, with all libraries imported

    phases: dict[str, Bytes] = {}
    between_updates = _without(held, "gradients", "reduced", "update")
    if plan.reference == "model" and plan.caches_reference_first:
        phases["scoring the reference"] = _without(between_updates, "optimizer") + eval_peak
        # the reference is freed before training
        held, between_updates = _without(held, "reference"), _without(between_updates, "reference")
    phases["training"] = held + max(update_peak, eval_peak, key=Bytes.total)
    if plan.evaluation.sample_during_eval:
        phases["samples"] = _predict_samples(plan, policy, fake, between_updates, eval_batches)
    if plan.online:
        phases |= _predict_online(plan, data, policy, reward, fake, between_updates)
    if not plan.gpus and plan.dims.world_size == 1:
        for phase in phases.values():
            phase["kept"] = int(KEPT_SHARE * sum(phase[purpose] for purpose in ALLOCATED_IN_TRAINING))
    return phases


def _predict_samples(
    plan: Plan, policy: Any, fake: FakeTensorMode, held: Bytes, eval_batches: Sequence[Batch]
) -> Bytes:
    """Peak memory of a process while an evaluation draws samples."""
    # at least 2 tokens, as `_predict_sampling` feeds the last two one by one
    n_prompt_tokens = max(2, *(len(example.prompt) for batch in eval_batches for example in batch.examples))
    n_left = plan.data.max_length - n_prompt_tokens
    sampling = Sampling(min(n_left, plan.evaluation.n_eval_tokens or n_left))
    n_rows = math.ceil(max(len(batch.examples) for batch in eval_batches) / plan.dims.data_size)
    return _predict_sampling(
        plan, policy, fake, held, sampling, n_rows=n_rows, n_prompt_tokens=n_prompt_tokens, autocast=None
    )


def _predict_online(
    plan: Plan, data: TrainingData, policy: Any, reward: Any, fake: FakeTensorMode, held: Bytes
) -> dict[str, Bytes]:
    """Peak memory of a process while it samples and scores answers."""
    online, sizes, prompts = plan.online, OnlineSizes.of(plan), some_prompts(data)
    sampling = _predict_sampling(
        plan,
        policy,
        fake,
        held,
        Sampling(online.max_new_tokens, online.temperature, online.top_p),
        n_rows=sizes.rows_per_batch,
        n_prompt_tokens=max(len(encode_prompt(prompt, data, plan).prompt) for prompt in prompts),
        autocast=plan.model.autocast,
    )
    if reward is None:
        return {"sampling": sampling}
    # a reward model reads whole prompts, which the policy's limits do not truncate
    longest = max(len(reward.encode(prompt, "")) for prompt in prompts) + online.max_new_tokens
    n_tokens = min(longest, reward.limit or longest)
    device = policy.device.type
    peak = _find_scoring_peak(reward.model, fake, device, n_rows=sizes.scored_rows, n_tokens=n_tokens)
    return {"sampling": sampling, "scoring": held + peak}


def _without(memory: Bytes, *purposes: str) -> Bytes:
    return Counter({purpose: n_bytes for purpose, n_bytes in memory.items() if purpose not in purposes})


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# --- memory held throughout -------------------------------------------------------------------------------------------


def _count_held(plan: Plan, policy: Any) -> Bytes:
    """Memory held throughout training, by purpose.

    Includes what FSDP gathers and reduces, and an optimizer's temporaries, which come in every update.
    """
    dims, buffer_bytes = plan.dims, _count_bytes(policy.buffers())  # buffers are not sharded
    n_shards = dims.shard_size * dims.tensor_size
    policy_adapter, reference_adapter = (list(adapter_weights(policy, name).values()) for name in (POLICY, REFERENCE))
    trained_bytes = _count_bytes(trained_parameters(policy)) // n_shards
    state_ratio, temporary_ratio = _measure_optimizer(plan.training.optimizer)
    policy_bytes = _count_bytes(policy.parameters()) - _count_bytes(reference_adapter)
    held = Counter(
        policy=policy_bytes // n_shards + buffer_bytes,
        gradients=trained_bytes,
        optimizer=int(trained_bytes * state_ratio),
    )
    if plan.reference == "model":
        n_base = _count_elements(policy.parameters()) - _count_elements(policy_adapter)
        base_bytes = n_base * DTYPES[plan.reference_dtype].itemsize
        # a reference loaded from an adapter has one of the policy's size
        adapter_bytes = _count_bytes(policy_adapter) if find_adapter(plan.model.archive) else 0
        held["reference"] = (base_bytes + adapter_bytes) // n_shards + buffer_bytes
    elif plan.reference == "adapter":
        held["reference"] = _count_bytes(reference_adapter) // n_shards
    if dims.shard_size > 1:  # FSDP's units are each block, and the root with embeddings and head
        blocks = [list(block.parameters()) for block in find_blocks(policy, plan.model.block_name)]
        in_blocks = {parameter for block in blocks for parameter in block}
        root = [parameter for parameter in policy.parameters() if parameter not in in_blocks]
        # the root, the running block, and the next block, which is prefetched
        n_gathered = _count_elements(root) + 2 * max(map(_count_elements, blocks))
        held["gathered"] = n_gathered * DTYPES[plan.compute_dtype].itemsize // dims.tensor_size
        n_reduced = max(_count_elements(p for p in unit if p.requires_grad) for unit in (root, *blocks))
        held["reduced"] = n_reduced * REDUCED_ITEMSIZE // dims.tensor_size
    if plan.gpus and plan.training.optimizer not in UPDATES_ONE_BY_ONE:
        held["update"] = int(trained_bytes * temporary_ratio)
    return held


def _count_elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _measure_optimizer(name: str) -> tuple[float, float]:
    """Bytes of an optimizer's state and temporaries, per byte of parameter.

    Measured in an update of a small parameter.
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = OPTIMIZERS[name]([parameter], lr=0.1, foreach=True)  # as on a GPU
    optimizer.step()  # the first step makes the states, which must not count as temporaries
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    with MemoryTracker([parameter, parameter.grad, *states]) as tracker:
        optimizer.step()
    return _count_bytes(states) / parameter.nbytes, tracker.peak.total() / parameter.nbytes


# --- memory of single phases ------------------------------------------------------------------------------------------


def _find_batches(plan: Plan, data: TrainingData, layout: Layout) -> tuple[list[Microbatch], list[Batch]]:
    """Microbatches of the first training batches, and the evaluation batches."""
    n_examples = N_SEARCHED_BATCHES * plan.data.batch_size
    if plan.data.n_examples is not None:
        n_examples = min(n_examples, plan.data.n_examples)
    shortened_plan = plan.change("n_examples", n_examples)
    batches_class = LongestAnswers if plan.online else Batches
    train_microbatches, eval_batches = [], []
    for rank in range(min(plan.dims.data_size, 4)):  # microbatches of further ranks are about as large
        batches = batches_class(shortened_plan, data, layout, seed=plan.run.seed, rank=rank, size=plan.dims.data_size)
        train_microbatches += [microbatch for batch in batches.train() for microbatch in batch.microbatches]
        eval_batches += batches.test()
    return train_microbatches, eval_batches


class LongestAnswers(Batches):
    """Batches of an online run with the longest possible sequences.

    All answers have `max_new_tokens`. The `n_offline` prompts that get a pair from the data are assumed to be those
    whose longest pair has the most tokens more than two such answers.
    """

    def train(self, *, skip: int = 0) -> Iterator[Batch]:
        return self._iterate_train(self._make_longest_batch, [1] * len(self.data.train), skip=skip)

    def _make_longest_batch(self, example_ids: Sequence[tuple[int, int]]) -> Batch:
        plan, prompts = self.plan, self.read_prompts(example_ids)
        # one answer of tokens 0, one of tokens 1: the shared-prefix layout would pack two equal answers only once
        answers = tuple((token,) * plan.online.max_new_tokens for token in (0, 1))
        examples = [encode_prompt(prompt, self.data, plan)._replace(responses=answers) for prompt in prompts]
        if plan.n_offline:
            pairs_by_prompt = [self.encode(list_examples(prompt)) for prompt in prompts]
            longest_pairs = [max(pairs, key=lambda pair: pair.n_tokens) for pairs in pairs_by_prompt]
            n_more_tokens = [
                pair.n_tokens - example.n_tokens for pair, example in zip(longest_pairs, examples, strict=True)
            ]
            indices = sorted(range(len(prompts)), key=lambda index: n_more_tokens[index], reverse=True)
            for index in indices[: plan.n_offline]:
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
    largest, device = max(microbatches, key=lambda microbatch: microbatch.n_tokens), policy.device.type
    policy.train(n_backwards > 0)
    autocast = DTYPES.get(plan.model.autocast)
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
        prompts_at_a_time = plan.prompts_at_a_time
        scored_per_process = math.ceil(n_prompts * n_samples / plan.dims.world_size)
        return cls(
            answers=n_prompts * n_samples,
            batches=math.ceil(prompts_per_process / prompts_at_a_time),
            rows_per_batch=min(prompts_per_process, prompts_at_a_time) * n_samples,
            scored_rows=min(prompts_at_a_time, scored_per_process),
        )


def _predict_sampling(
    plan: Plan,
    policy: Any,
    fake: FakeTensorMode,
    held: Bytes,
    sampling: Sampling,
    *,
    n_rows: int,
    n_prompt_tokens: int,
    autocast: str | None,
) -> Bytes:
    """Peak memory of a process that samples `n_rows` answers at once.

    Each prompt has `n_prompt_tokens`. `held` is the memory in use besides. The peak comes while the prompts are read,
    or at the last token, when the KV cache is largest. Sharded weights are all gathered if they fit
    (`sharding.gathered_weights`).
    """
    device, n_new_tokens = policy.device, sampling.max_new_tokens
    policy.eval()
    with (
        fake,
        torch.no_grad(),
        torch.autocast(device.type, dtype=DTYPES.get(autocast), enabled=autocast is not None),
    ):
        choose = choosing(sampling, range(n_rows), n_prompt=n_prompt_tokens)

        def forward(n_tokens: int, n_cached: int, cache: Any) -> Any:
            """Run the policy on `n_tokens`; return the new cache.

            `cache` has keys and values of `n_cached` tokens. A token is drawn too. Only the memory in
            use matters, so token ids are zeros, and the drawn token is not used.
            """
            token_ids = torch.zeros(n_rows, n_tokens, dtype=torch.long, device=device)
            only_last_logits = {"logits_to_keep": 1} if policy._supports_logits_to_keep() else {}
            out = policy(input_ids=token_ids, past_key_values=cache, use_cache=True, **only_last_logits)
            ids_so_far = torch.zeros(n_rows, n_cached + n_tokens, dtype=torch.long, device=device)
            choose(ids_so_far, out.logits[:, -1].to(copy=True, dtype=torch.float32)).argmax(-1)
            return out.past_key_values

        with MemoryTracker.of(policy) as tracker:
            cache = forward(n_prompt_tokens, 0, None)
        peaks = [_separate_cache(tracker.peak, cache)]
        if n_new_tokens > 1:
            n_cached = n_prompt_tokens + n_new_tokens - 3  # before the last two forwards, of one token each
            cache = forward(n_cached, 0, None)
            with MemoryTracker.of(policy) as tracker:
                cache = forward(1, n_cached, cache)  # replaces the cache by one that is tracked
                cache = forward(1, n_cached + 1, cache)
            peaks.append(_separate_cache(tracker.peak, cache))
    peak, dims = max(peaks, key=Bytes.total), plan.dims
    peak["kv_cache"] //= dims.tensor_size
    if dims.shard_size > 1:
        n_elements = _count_elements(policy.parameters())
        gathered_bytes = n_elements * DTYPES[plan.compute_dtype].itemsize // dims.tensor_size
        if gathered_bytes <= (_find_device_memory(plan) - held.total()) / 2:
            held = held | Counter(gathered=gathered_bytes)
    return held + peak


def _separate_cache(peak: Bytes, cache: Any) -> Bytes:
    """Separate the KV cache from the activations, among which it was counted."""
    layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "keys")]
    n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return peak + Counter(kv_cache=n_bytes) - Counter(activations=n_bytes)


def _find_scoring_peak(model: Any, fake: FakeTensorMode, device: str, *, n_rows: int, n_tokens: int) -> Bytes:
    """Peak of a reward model's forward pass on `n_rows` texts.

    Each text has `n_tokens`. The model is on the meta device.
    """
    model.config.get_text_config().pad_token_id = 0  # classifiers refuse several rows without one
    with fake, torch.no_grad():
        model = on_device(model, device, None)
        ids = torch.ones(n_rows, n_tokens, dtype=torch.long, device=device)
        with MemoryTracker((*model.parameters(), *model.buffers())) as tracker:
            model(input_ids=ids)
    return tracker.peak


# --- reports -------------------------------------------------------------------------------------------------------


def _find_small_reference(plan: Plan) -> str | None:
    """The `lora.reference` that needs no second model; None without an adapter."""
    if plan.lora is None:
        return None
    return "adapter" if find_adapter(plan.model.archive) else "base"


SUGGESTIONS = (  # settings that may save memory: the key, and the value to try by the plan (None: not applicable)
    ("gradient_accumulation_steps", lambda plan: 2 * plan.data.gradient_accumulation_steps),
    ("activation_checkpointing", lambda plan: True),
    ("model.attn_implementation", lambda plan: "sdpa"),
    # with several processes autocast would keep a second copy of all weights
    ("model.autocast", lambda plan: None if plan.trainer.multi_process else "bfloat16"),
    ("model.fsdp_policy_mp", lambda plan: "bfloat16" if plan.trainer.multi_process else None),
    ("cache_reference_logps", lambda plan: "all"),
    ("max_length", lambda plan: plan.data.max_length // 2),
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


def suggest(plan: Plan, data: TrainingData) -> list[str]:
    """The three settings that save most, with the memory then needed."""
    memory, suggestions = predict(plan, data), []
    min_saved = MIN_SAVED_SHARE * (memory.total() - memory["process"])
    for key, choose_value in SUGGESTIONS:
        value = choose_value(plan)
        if value is None or plan.values.get(key) == value:
            continue
        changed_plan = plan.change(key, value)
        if find_problems(changed_plan.values, changed_plan):
            continue
        try:
            total = predict(changed_plan, data).total()
        except InputError:  # as for lora=qlora, if bitsandbytes has no kernels for this machine
            continue
        if memory.total() - total > min_saved:
            value_text = str(value).lower() if isinstance(value, bool) else value  # as on the command line
            suggestions.append((total, f"{key}={value_text} (then {total / 1e9:.2f} GB in all)"))
    suggestions.sort()  # by the memory then needed
    return [text for _, text in suggestions[:3]]


def print_prediction(plan: Plan, data: TrainingData) -> None:
    """Print the memory needed and, if it won't fit, helpful settings."""
    phases, available = predict_phases(plan, data), _find_device_memory(plan)
    memory = max(phases.values(), key=Bytes.total)
    for purpose in PURPOSES:
        if memory[purpose]:
            print(f"{purpose:>12} {memory[purpose] / 1e9:8.2f} GB")
    print(f"{'total':>12} {memory.total() / 1e9:8.2f} GB per process; its device has {available / 1e9:.2f} GB")
    if plan.online:
        _print_online_phases(plan, phases)
    if memory.total() > available:
        print("won't fit; looking for settings that would help", flush=True)  # a prediction for each takes a while
        print(f"try {_join(suggest(plan, data))}")


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
def explaining_out_of_memory(plan: Plan, data: TrainingData) -> Iterator[None]:
    """Raise RunError with advice if memory runs out inside.

    The message says how much memory a process needs, and which settings would reduce that.
    """
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
        needed, available = predict(plan, data).total(), _find_device_memory(plan)
        return (
            f"a process needs about {needed / 1e9:.2f} GB, and its device has {available / 1e9:.2f} GB; "
            f"try {_join(suggest(plan, data))}"
        )
    except Exception as error:  # a model that cannot be predicted has run out of memory all the same
        return f"what a process needs could not be predicted ({one_sentence(error)})"


def notes_on_free_memory(plan: Plan) -> list[str]:
    """A message if, after an update, larger microbatches would fit.

    Not yet run on a GPU.
    """
    if not torch.cuda.is_available():
        return []
    gpus = range(torch.cuda.device_count())
    held, peak = (sum(map(measure, gpus)) for measure in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    total = _find_device_memory(plan)
    steps = find_fewest_steps(plan.data.gradient_accumulation_steps, held=held, peak=peak, total=total)
    if steps == plan.data.gradient_accumulation_steps:
        return []
    return [
        f"{peak / 1e9:.3g} of {total / 1e9:.3g} GB of GPU memory were used; gradient_accumulation_steps={steps} "
        f"should fit too, and larger microbatches keep a GPU busier"
    ]


def find_fewest_steps(steps: int, *, held: int, peak: int, total: int) -> int:
    """The fewest accumulation steps that should fit, a divisor of `steps`.

    Memory beyond what is `held` between updates is taken to grow as microbatches do.
    """
    fitting = [
        n for n in range(1, steps) if steps % n == 0 and held + (peak - held) * steps / n <= MAX_FILLED_SHARE * total
    ]
    return min(fitting, default=steps)


def _join(suggestions: list[str]) -> str:
    return ", ".join(suggestions) or "a smaller model, or more processes with trainer=FSDPTrainer"


def _find_device_memory(plan: Plan) -> int:
    """Bytes available to one process.

    With GPUs, the memory of its GPU, or of all GPUs if it is the only process; without, its share of host memory.
    """
    if torch.cuda.is_available():
        gpus = range(1 if plan.trainer.multi_process else torch.cuda.device_count())
        return sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    n_processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", plan.dims.world_size))  # the launchers set it
    return (host_memory().available + resident_memory()) // n_processes_here
