"""The memory that updates need, and settings that reduce it."""

import logging
import math
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dpo.data.examples import Example
from dpo.data.preflight import TrainingData
from dpo.errors import RunError, WarningLine, is_memory_error, one_sentence
from dpo.models.adapters import POLICY, adapter_weights, trained_parameters
from dpo.models.layouts import GPU_ALIGNMENT, Layout, Microbatch, Padded, SharedPrefix, layout_by_rules
from dpo.models.loading import make_policy_structure
from dpo.models.logprobs import LOGITS_AT_ONCE
from dpo.models.pretrained import DTYPES
from dpo.models.scoring import load_reward_model
from dpo.parallel.mesh import Mesh, fake_processes
from dpo.parallel.sharding import find_blocks, local_tensor
from dpo.parallel.tensor_parallel import cut_modules, find_plan
from dpo.settings.plan import Plan
from dpo.system.host import find_device_memory, resident_memory
from dpo.training.batches import Batches
from dpo.training.online import add_placeholders, make_prompt_example, pick_training_prompts
from dpo.training.optimization import count_states

Bytes = Counter[str]  # memory of a process in bytes, by purpose

FRAGMENTATION_SHARE = 0.3  # memory lost to fragmentation on a CPU, as a share of the allocated; measured on SmolLM2
# On a GPU, a step of any other optimizer computes a temporary value for each weight, for all weights at once.
WITHOUT_TEMPORARIES = ("Adafactor", "SGD")
PLAIN_ATTENTION = "plain_sdpa"  # the name under which transformers' SDPA is registered a second time
MAX_WEIGHTS_SHARE = 0.5  # frozen weights are whole if everything but activations fits into this share of a GPU
N_SEARCHED_BATCHES = 50  # global batches that are searched for the largest microbatch: searching all would take long
WAYS_TO_SAVE = (  # settings that save memory, in the order in which to try them
    "a larger gradient_accumulation_steps, activation_checkpointing=true, cache_reference_logps=all, lora=lora, a "
    "smaller max_length or model, or more processes with trainer=FSDPTrainer"
)


def predict(plan: Plan, data: TrainingData) -> tuple[Bytes, list[str]]:
    """Predict a process's memory at the peak of its updates, in bytes by purpose; return it with notes for the user.

    If a process group already exists, activations are counted as if tensor parallelism did not divide them.
    """
    memory, notes = count_all(plan, data, read_batches(plan, data), decide_frozen_weights(plan))
    return find_peak(plan, memory), notes


def read_batches(plan: Plan, data: TrainingData) -> list[list[Example]]:
    """Read the examples of the first N_SEARCHED_BATCHES batches; [] if the run is online, as it draws its pairs."""
    if plan.online:
        return []
    return [batch.examples for batch in islice(Batches(plan, data, Padded()).train(), N_SEARCHED_BATCHES)]


def count_all(
    plan: Plan,
    data: TrainingData,
    batches: list[list[Example]],
    frozen: str | None,
    n_blocks: int | None = None,
) -> tuple[Bytes, list[str]]:
    """Count a process's bytes for every purpose, and return them with notes for the user.

    `batches` are those of `read_batches`. `frozen` is "whole", "sharded" or None, from `decide_frozen_weights`. The
    model has `n_blocks` blocks, by default all.
    """
    policy = make_policy_structure(plan, n_blocks)
    memory = count_weight_memory(plan, policy, frozen)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if plan.gpus and isinstance(layout, SharedPrefix):  # the rules see the meta device, not the GPU
        layout.alignment = GPU_ALIGNMENT
    microbatch = find_largest_microbatch(plan, data, batches, layout)
    memory["logits"] = count_logits(plan, policy, microbatch)
    activations, notes = count_activations(plan, policy, layout, microbatch)
    return memory + activations, notes


def find_peak(plan: Plan, memory: Bytes) -> Bytes:
    """Return the bytes of the purposes that are in memory in the phase of an update that needs the most."""
    whole_gradients = ["head_gradient", "unsharded_gradients"]  # an update has one of these
    backward = ["gathered", "activations", *whole_gradients]
    first_block_ends = ["gathered", "gathered_blocks", "gradients", "reduce_scatter_block"]
    # With fsdp_reduce_once, reduced gradients replace unsharded ones block by block, so the two do not add up.
    if not _reduces_once(plan):
        if plan.dims.shard_size > 1:  # the head's gradient is reduced with the root, after all blocks
            first_block_ends += whole_gradients
        if plan.n_microbatches > 1:  # in a single backward pass, gradients replace activations
            backward.append("gradients")
    phases = [  # a purpose that is in no phase needs its memory all the time
        [*backward, "logits"],
        [*backward, "gathered_blocks", "block_backward"],  # the backward pass of the last block begins
        [*backward, "gathered_blocks", "reduce_scatter_block"],  # it ends
        first_block_ends,
        ["gathered", "gradients", "tied_gradients"],
        ["gathered", "gradients", "reduce_scatter_root"],
        ["gradients", "optimizer_step"],
    ]
    peak = max(phases, key=lambda purposes: sum(memory[purpose] for purpose in purposes))
    absent = set().union(*phases).difference(peak)
    memory = Counter({purpose: n_bytes for purpose, n_bytes in memory.items() if purpose not in absent})
    if not plan.gpus:
        if plan.dims.world_size == 1:
            allocated = sum(memory[purpose] for purpose in ("gradients", "optimizer", "activations", "logits"))
            memory["fragmentation"] = int(FRAGMENTATION_SHARE * allocated)
        memory["python"] = resident_memory()  # Python, libraries and data
    return +memory  # without purposes that need nothing


def count_weight_memory(plan: Plan, policy: Any, frozen: str | None) -> Bytes:
    """Count the bytes that follow from the size of the weights, by purpose.

    `policy` may be on the meta device. `frozen` is "whole", "sharded" or None, from `decide_frozen_weights`.
    """
    dims = plan.dims
    # Trained and frozen weights are divided over these numbers of processes.
    n_shards = n_frozen_shards = dims.shard_size * dims.tensor_size
    is_whole = frozen == "whole"
    if is_whole:
        n_frozen_shards = dims.tensor_size
    compute_size = DTYPES[plan.compute_dtype].itemsize
    weights = {*policy.parameters()}
    trained = {*trained_parameters(policy)}
    # Whole frozen weights are in the compute dtype; shards keep the dtype in which they were loaded. Buffers, such as
    # 4-bit weights, are whole in every process.
    frozen_bytes = _count_bytes(weights - trained, compute_size if is_whole else None)
    trained_bytes = _count_bytes(trained) // n_shards
    memory = Counter(
        policy=trained_bytes + frozen_bytes // n_frozen_shards + _count_bytes(policy.buffers()),
        gradients=trained_bytes,
        optimizer=trained_bytes * count_states(plan.training),
    )
    if plan.gpus and plan.training.optimizer not in WITHOUT_TEMPORARIES:
        memory["optimizer_step"] = trained_bytes
    if plan.run.checkpoint_format == "sharded" and not plan.gpus:
        # A checkpoint is written from a copy while training goes on. With GPUs it is in the host's memory.
        memory["checkpoint_copy"] = trained_bytes + memory["optimizer"]
    if plan.reference == "model" and not plan.caches_all_reference_logps:  # else it is freed before training
        base = weights.difference(adapter_weights(policy, POLICY).values())
        memory["reference"] = _count_bytes(base, DTYPES[plan.reference_dtype].itemsize) // n_frozen_shards
    if plan.online and plan.online.scorer == "reward_model":
        memory["scorer"] = _count_bytes(load_reward_model(plan, "meta", 1).model.parameters())
    head = policy.get_output_embeddings()
    head_weights = trained.intersection(head.parameters() if head else ())
    head_bytes = _count_bytes(head_weights, compute_size) // dims.tensor_size
    if _reduces_once(plan):
        reduce_size = DTYPES[plan.fsdp.fsdp_reduce_dtype].itemsize
        memory["unsharded_gradients"] = _count_bytes(trained, reduce_size) // dims.tensor_size
    else:
        memory["head_gradient"] = head_bytes  # computed first, while all activations are still in memory
    if policy.get_input_embeddings().weight in head_weights:
        memory["tied_gradients"] = 3 * head_bytes  # the gradients of head and embedding, and their sum
    if dims.shard_size > 1:
        memory.update(_count_gathered(plan, policy, trained if is_whole else weights, trained))
    return memory


def _count_gathered(plan: Plan, policy: Any, sharded: set[Tensor], trained: set[Tensor]) -> Bytes:
    """Count the bytes of gathered weights, and of gradients while they are reduced, by purpose.

    FSDP shards the weights `sharded`, and there are gradients of `trained`.
    """
    blocks = [{*block.parameters()} for block in find_blocks(policy, plan.model.block_name)]
    units = [{*policy.parameters()}.difference(*blocks), *blocks]  # the root is the first
    compute_size = DTYPES[plan.compute_dtype].itemsize
    # The gradients of a unit are whole until its backward pass is done; then they are reduced from a copy in the
    # reduce dtype.
    grad_size = compute_size + DTYPES[plan.fsdp.fsdp_reduce_dtype].itemsize
    root, *block_bytes = [_count_bytes(unit & sharded, compute_size) // plan.dims.tensor_size for unit in units]
    root_gradients, *gradients = [_count_bytes(unit & trained, grad_size) // plan.dims.tensor_size for unit in units]
    root_shard = _count_bytes(units[0] & trained) // plan.dims.shard_size // plan.dims.tensor_size
    # The root's shard, which is made last, already counts under the purpose `gradients`.
    memory = Counter(
        gathered=root, reduce_scatter_root=root_gradients - root_shard, reduce_scatter_block=max(gradients)
    )
    if plan.fsdp.fsdp_reshard_after_forward:
        memory["gathered_blocks"] = 2 * max(block_bytes)  # the running block and the next one
    else:
        memory["gathered"] += sum(block_bytes)
    return memory


def _reduces_once(plan: Plan) -> bool:
    """Return whether FSDP reduces gradients only in the last of an update's several backward passes."""
    return plan.dims.shard_size > 1 and plan.n_microbatches > 1 and plan.fsdp.fsdp_reduce_once


def _count_bytes(tensors: Iterable[Tensor], itemsize: int | None = None) -> int:
    """Count the bytes of tensors, with `itemsize` bytes a value if given, else as their dtypes have."""
    return sum(tensor.numel() * (itemsize or tensor.itemsize) for tensor in tensors)


def count_logits(plan: Plan, policy: Any, microbatch: Microbatch) -> int:
    """Return the bytes of a microbatch's logits and of what is computed from them, at the peak of the backward pass."""
    head = policy.get_output_embeddings()
    if head is None:  # a reward model has none
        return 0
    vocabulary = head.weight.shape[0]
    itemsize = DTYPES[plan.model.autocast or plan.compute_dtype].itemsize
    copy = head.weight.numel() * itemsize if plan.model.autocast else 0  # the head's weight, as autocast casts it
    n_logits = len(microbatch.inputs.targets) * vocabulary
    n_chunks = max(1, math.ceil(n_logits / LOGITS_AT_ONCE["gpu" if plan.gpus else "cpu"]))
    # A GPU computes the log-probabilities of a whole chunk in float32, from a copy in float32 if the logits are in
    # another dtype; a CPU takes a few rows at a time.
    bytes_per_logit = itemsize
    if plan.gpus:
        bytes_per_logit += 4 if itemsize == 4 else 8
    # Under tensor parallelism there are a process's slice, the copy that it sends, the gathered slices, and the joined
    # logits.
    if plan.dims.tensor_size > 1:
        bytes_per_logit = max(bytes_per_logit, itemsize * (2 + 2 / plan.dims.tensor_size))
    if microbatch.inputs.padding_mask is not None:  # not in chunks: the gradients of all logits, and of scored ones
        n_all = microbatch.n_tokens * vocabulary
        peak = max((n_all + n_logits) * itemsize, n_logits * bytes_per_logit)
        if plan.dims.tensor_size > 1:
            peak = max(peak, n_all * bytes_per_logit)
        return copy + int(peak)
    return copy + int(n_logits // n_chunks * bytes_per_logit)


def find_largest_microbatch(plan: Plan, data: TrainingData, batches: list[list[Example]], layout: Layout) -> Microbatch:
    """Return the microbatch of these batches with the most tokens; online, make one of placeholder answers."""
    if plan.online:  # the longest possible answers to the longest prompts
        n_pairs = math.ceil(plan.data.batch_size / (plan.n_microbatches * plan.dims.data_size))
        prompts = [make_prompt_example(prompt, data, plan) for prompt in pick_training_prompts(data)]
        longest = sorted(prompts, key=lambda example: len(example.prompt))[-n_pairs:]
        pairs = [add_placeholders(prompt, plan.online.max_new_tokens) for prompt in longest]
        return layout.split(pairs, 1)[0]
    # Only rank 0's microbatches are compared; other processes have microbatches of about the same size.
    split = partial(layout.split, parts=plan.n_microbatches, size=plan.dims.data_size)
    return max((part for examples in batches for part in split(examples)), key=lambda part: part.n_tokens)


def count_activations(plan: Plan, policy: Any, layout: Layout, microbatch: Microbatch) -> tuple[Bytes, list[str]]:
    """Count the activations kept for the backward pass, without logits, and what a block's backward pass adds.

    Returns bytes by purpose, and notes for the user: one if the bytes are only a rough estimate.
    """
    config = policy.config.get_text_config()
    compute_size = DTYPES[plan.compute_dtype].itemsize
    n_blocks = config.num_hidden_layers
    notes = []
    # When a run is out of memory, its process group still exists, so no fake one can be made.
    is_simulated = plan.dims.tensor_size > 1 and not dist.is_initialized()
    try:
        with fake_processes(plan.dims) if is_simulated else nullcontext() as mesh:
            kept = _run_on_fakes(plan, policy, layout, microbatch, mesh)
    except Exception as error:  # a model's own code may raise anything on tensors without values
        # Memory is counted as if the inputs and outputs of all matrices of the model were kept.
        width = sum(sum(parameter.shape[-2:]) for parameter in policy.base_model.parameters() if parameter.ndim > 1)
        kept = width * microbatch.n_tokens * compute_size
        notes.append(
            WarningLine(f"activations are estimated roughly, as the model cannot run here: {one_sentence(error)}")
        )
    kept_by_block = kept // n_blocks
    block_backward = kept_by_block // 2  # what a block's backward pass computes; the share was measured
    if plan.training.activation_checkpointing:  # keeps the blocks' inputs, and computes a block again
        kept = n_blocks * microbatch.n_tokens * config.hidden_size * compute_size
        block_backward += kept_by_block
    return Counter(activations=kept, block_backward=block_backward), notes


def _run_on_fakes(plan: Plan, policy: Any, layout: Layout, microbatch: Microbatch, mesh: Mesh | None) -> int:
    """Run a forward pass on tensors without values, and count the bytes that it keeps for a backward pass.

    This changes `policy`: its weights become fake tensors on the CPU, its attention plain and, under FSDP, its dtype
    that of computation.
    """
    head = policy.get_output_embeddings()
    vocabulary = head and head.weight.shape[0]  # None for a reward model
    if plan.trainer.multi_process:  # FSDP gathers all weights in one dtype
        policy.to(DTYPES[plan.compute_dtype])  # and its buffers, which hardly matter
    # A GPU's kernels keep no attention weights. A CPU's do if values are narrower than queries, as DeepSeek's are.
    drops_weights = plan.gpus and policy.config._attn_implementation != "eager"
    rows, length = microbatch.inputs.input_ids.shape
    use_plain_attention(policy)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # `count_activations` explains errors
    autocast = torch.autocast("cpu", DTYPES.get(plan.model.autocast), enabled=plan.model.autocast is not None)
    kept = set()  # storages, so that views count once

    def keep(tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves for the backward pass."""
        shape = tensor.shape
        if drops_weights and shape[-2:] == (length, length) and tensor.numel() > rows * length**2:
            return tensor  # weights of several heads, and no mask or hidden state that is as wide as rows are long
        if shape[-1:] != (vocabulary,):  # `count_logits` counts logits
            kept.add(local_tensor(tensor).untyped_storage())
        return tensor

    with fake, autocast, saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.to_empty(device="cpu")
        if mesh is not None:
            cut_modules(dict(policy.named_modules()), find_plan(policy), mesh.device_mesh["tensor"])
        layout.forward(policy.train(), microbatch.inputs)
    weights = {local_tensor(tensor).untyped_storage() for tensor in (*policy.parameters(), *policy.buffers())}
    return sum(storage.nbytes() for storage in kept - weights)


def use_plain_attention(model: Any) -> None:
    """Let a model use transformers' SDPA, unless its attention is eager: other kernels keep about as much memory.

    Ours read values, which fake tensors do not have.
    """
    if model.config._attn_implementation != "eager":
        AttentionInterface.register(PLAIN_ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(PLAIN_ATTENTION, sdpa_mask)
        model.set_attn_implementation(PLAIN_ATTENTION)


def decide_frozen_weights(plan: Plan, available: float | None = None) -> str | None:
    """Return how each process should hold frozen weights: "whole" or "sharded"; None if that makes no difference.

    The key `fsdp_frozen_weights` decides. If it is null, they are whole if a process then needs at most
    MAX_WEIGHTS_SHARE of its GPU, without activations. A GPU has `available` bytes, by default those that are free on
    this machine's GPU.
    """
    has_frozen_weights = plan.lora or plan.reference == "model"
    if plan.fsdp.fsdp_frozen_weights or not (plan.trainer.multi_process and has_frozen_weights):
        return plan.fsdp.fsdp_frozen_weights
    if not (plan.gpus and plan.frozen_whole_is_exact):
        return "sharded"
    needed = find_peak(plan, count_weight_memory(plan, make_policy_structure(plan), "whole")).total()
    return "whole" if needed <= MAX_WEIGHTS_SHARE * (available or _find_available(plan)) else "sharded"


def print_prediction(plan: Plan, data: TrainingData) -> None:
    """Print the predicted memory by purpose, notes, and what to do if it exceeds what is free."""
    memory, notes = predict(plan, data)
    for purpose, n_bytes in memory.items():
        print(f"{purpose:>20} {n_bytes / 1e9:8.2f} GB")
    needed = memory.total()
    available = _find_available(plan)
    print(f"{'total':>20} {needed / 1e9:8.2f} GB per process at its peak; its device has {available / 1e9:.2f} GB free")
    for note in notes:
        print(note)
    if needed > available:
        print(f"won't fit: try {WAYS_TO_SAVE}")


def _find_available(plan: Plan) -> float:
    """Return the bytes that a process of the run can get on its device."""
    return find_device_memory(plan.dims.world_size, multi_process=plan.trainer.multi_process)


@contextmanager
def explain_memory_error(plan: Plan, data: TrainingData) -> Iterator:
    """Raise RunError with the predicted memory and advice if memory runs out inside the context."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RunError) or not is_memory_error(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors that local variables hold
        torch.cuda.empty_cache()
        needs = ""
        with suppress(MemoryError, RuntimeError):  # there may be too little memory even to predict it
            memory, _ = predict(plan, data)
            needs = (
                f"a process needs about {memory.total() / 1e9:.2f} GB, and its device has "
                f"{_find_available(plan) / 1e9:.2f} GB; "
            )
        raise RunError(f"out of memory: {needs}try {WAYS_TO_SAVE} ({one_sentence(error)[:200]})") from error
