"""Prediction of a run's memory, and of the settings that reduce it.

Models without weights run a forward and a backward pass on the largest microbatch, a step of sampling, and the scoring
of answers, on fake tensors; a tracker records the memory in use. Memory that is held throughout is computed from the
policy's parameters.
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
from dpo.errors import InputError, RunError
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, find_adapter, trained_parameters
from dpo.models.answers import Sampling, choosing
from dpo.models.generation import generating_with_sdpa
from dpo.models.layouts import Layout, Microbatch, layout_by_rules
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations
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

PURPOSES = (
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
TEMPORARY = ("gradients", "optimizer", "activations", "logits", "kv_cache")  # allocated while training
# share of TEMPORARY lost to fragmentation in a single process on a CPU, which keeps freed memory; measured on SmolLM2
KEPT = 0.2
REDUCED = torch.float32.itemsize  # bytes of a gradient while it is summed over processes (`sharding.distribute`)
ONE_BY_ONE = ("Adafactor",)  # the other optimizers update all parameters at once on a GPU
WORTH_A_TRY = 0.03  # least share of the memory, without that of Python and libraries, that a suggestion must save
FULL = 0.85  # share of a GPU's memory that a suggestion may fill
LOOKED_AT = 50  # global batches that are searched for the largest microbatch: laying out a whole run takes long


def predict(plan: Plan, data: TrainingData) -> Bytes:
    """Predict the peak memory of a process.

    Too high under tensor parallelism, where it counts the activations of whole layers.
    """
    return max(predict_phases(plan, data).values(), key=Bytes.total)


def predict_phases(plan: Plan, data: TrainingData) -> dict[str, Bytes]:
    """Predict a process's peak memory in each phase of a run."""
    policy = find_policy_structure(plan, plan.model.policy_dtype)
    held = _count_held(plan, policy)
    reward = find_reward_structure(plan) if plan.online and plan.online.scorer == "reward_model" else None
    if reward:
        held["scorer"] = _count_bytes((*reward.model.parameters(), *reward.model.buffers()))
    gathered = DTYPES[plan.compute_dtype] if plan.trainer.multi_process else None
    fake, device = FakeTensorMode(), "cuda" if torch.cuda.is_available() else "cpu"
    with fake:
        policy = on_device(policy, device, gathered)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    train_microbatches, eval_batches = _find_batches(plan, data, layout)
    n_backwards = min(plan.data.gradient_accumulation_steps, 2)  # the second runs while the first's gradients are held
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
        # at least 2 tokens, as `_while_sampling` feeds the last two one by one
        n_prompt = max(2, *(len(example.prompt) for batch in eval_batches for example in batch.examples))
        n_new = plan.data.max_length - n_prompt
        rows = -(-max(len(batch.examples) for batch in eval_batches) // plan.dims.data_size)
        sampling = Sampling(min(n_new, plan.evaluation.n_eval_tokens or n_new))
        phases["samples"] = _while_sampling(
            plan, policy, fake, between_updates, sampling, rows=rows, n_prompt=n_prompt, autocast=None
        )
    if plan.online:
        online, rounds, prompts = plan.online, Rounds.of(plan), some_prompts(data)
        sampling = Sampling(online.max_new_tokens, online.temperature, online.top_p)
        n_prompt = max(len(encode_prompt(prompt, data, plan).prompt) for prompt in prompts)
        autocast = plan.model.autocast
        phases["sampling"] = _while_sampling(
            plan, policy, fake, between_updates, sampling, rows=rounds.rows, n_prompt=n_prompt, autocast=autocast
        )
        if reward:  # a reward model reads whole prompts, which the policy's limits do not truncate
            longest = max(len(reward.encode(prompt, "")) for prompt in prompts) + online.max_new_tokens
            length = min(longest, reward.limit or longest)
            peak = _find_scoring_peak(reward.model, fake, device, rows=rounds.scored, length=length)
            phases["scoring"] = between_updates + peak
    if not plan.gpus and plan.dims.world_size == 1:
        for need in phases.values():
            need["kept"] = int(KEPT * sum(need[purpose] for purpose in TEMPORARY))
    return phases


def _without(need: Bytes, *purposes: str) -> Bytes:
    return Counter({purpose: size for purpose, size in need.items() if purpose not in purposes})


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# --- memory held throughout -------------------------------------------------------------------------------------------


def _count_held(plan: Plan, policy: Any) -> Bytes:
    """Memory held throughout training, by purpose.

    All of it but the process's own, activations, and the freed memory that the allocator keeps.
    """
    dims, buffers = plan.dims, _count_bytes(policy.buffers())  # buffers are not sharded
    shards = dims.shard_size * dims.tensor_size
    adapter, second = (list(adapter_weights(policy, name).values()) for name in (POLICY, REFERENCE))
    trained = _count_bytes(trained_parameters(policy)) // shards
    states, temporaries = _measure_optimizer(plan.training.optimizer)
    held = Counter(
        policy=(_count_bytes(policy.parameters()) - _count_bytes(second)) // shards + buffers,
        gradients=trained,
        optimizer=int(trained * states),
    )
    if plan.reference == "model":
        base = (_count(policy.parameters()) - _count(adapter)) * DTYPES[plan.reference_dtype].itemsize
        own = _count_bytes(adapter) if find_adapter(plan.model.archive) else 0
        held["reference"] = (base + own) // shards + buffers
    elif plan.reference == "adapter":
        held["reference"] = _count_bytes(second) // shards
    if dims.shard_size > 1:  # FSDP's units are each block, and the root with embeddings and head
        blocks = [[*block.parameters()] for block in find_blocks(policy, plan.model.block_name)]
        in_blocks = {parameter for block in blocks for parameter in block}
        root = [parameter for parameter in policy.parameters() if parameter not in in_blocks]
        at_once = _count(root) + 2 * max(map(_count, blocks))  # the running block, and the next, which is prefetched
        held["gathered"] = at_once * DTYPES[plan.compute_dtype].itemsize // dims.tensor_size
        largest = max(_count(p for p in unit if p.requires_grad) for unit in (root, *blocks))
        held["reduced"] = largest * REDUCED // dims.tensor_size
    # an optimizer of shards updates one parameter at a time, without large temporaries
    if plan.gpus and dims.world_size == 1 and plan.training.optimizer not in ONE_BY_ONE:
        held["update"] = int(trained * temporaries)
    return held


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _measure_optimizer(name: str) -> tuple[float, float]:
    """Bytes of state and of temporaries per byte of parameter.

    Measured by updating a small parameter.
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
    limit = min(plan.data.n_examples or 10**9, LOOKED_AT * plan.data.batch_size)
    shortened, make_batches = plan.change("n_examples", limit), LongestAnswers if plan.online else Batches
    trained, evaluations = [], []
    for rank in range(min(plan.dims.data_size, 4)):  # microbatches of further ranks are about as large
        batches = make_batches(shortened, data, layout, seed=plan.run.seed, rank=rank, size=plan.dims.data_size)
        trained += [microbatch for batch in batches.train() for microbatch in batch.microbatches]
        evaluations += batches.test()
    return trained, evaluations


class LongestAnswers(Batches):
    """Batches of an online run with the longest possible sequences.

    All answers have `max_new_tokens`. Where `n_offline` prompts of a batch get a pair from the data instead, these are
    assumed to be the prompts whose longest pair exceeds two such answers by the most tokens.
    """

    def train(self, *, skip: int = 0) -> Iterator[Batch]:
        return self._iterate_train(self._make_longest_batch, [1] * len(self.data.train), skip=skip)

    def _make_longest_batch(self, places: Sequence[tuple[int, int]]) -> Batch:
        plan, prompts = self.plan, self.read_prompts(places)
        # one answer of tokens 0, one of tokens 1: the shared-prefix layout would pack two equal answers only once
        answers = tuple((token,) * plan.online.max_new_tokens for token in (0, 1))
        examples = [encode_prompt(prompt, self.data, plan)._replace(responses=answers) for prompt in prompts]
        if plan.n_offline:
            longest_pairs = [
                max(self.encode(list_examples(prompt)), key=lambda pair: pair.n_tokens) for prompt in prompts
            ]
            extra_tokens = [p.n_tokens - e.n_tokens for p, e in zip(longest_pairs, examples, strict=True)]
            by_extra_tokens = sorted(range(len(prompts)), key=extra_tokens.__getitem__, reverse=True)
            for index in by_extra_tokens[: plan.n_offline]:
                examples[index] = longest_pairs[index]
        microbatches = self.split(examples, plan.data.gradient_accumulation_steps)
        # no numbers: nothing is scored here, so the reference's cache is not used
        return Batch(examples, [1.0] * len(examples), microbatches, numbers=())


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


class Rounds(NamedTuple):
    """Sizes of the batches in which answers are sampled and scored."""

    answers: int  # per update, on all processes
    batches: int  # sampled by a process per update, each with one forward pass per token
    rows: int  # answers in a batch
    scored: int  # texts that a reward model reads at a time

    @classmethod
    def of(cls, plan: Plan) -> Rounds:
        n_samples, n_prompts = plan.online.n_samples, plan.data.batch_size - plan.n_offline
        own_prompts = math.ceil(n_prompts / plan.dims.data_size)
        at_once = max(1, plan.data.eval_batch_size // plan.dims.data_size)
        own_answers = math.ceil(n_prompts * n_samples / plan.dims.world_size)
        return cls(
            answers=n_prompts * n_samples,
            batches=math.ceil(own_prompts / at_once),
            rows=min(own_prompts, at_once) * n_samples,
            scored=min(at_once, own_answers),
        )


def _while_sampling(
    plan: Plan,
    policy: Any,
    fake: FakeTensorMode,
    held: Bytes,
    sampling: Sampling,
    *,
    rows: int,
    n_prompt: int,
    autocast: str | None,
) -> Bytes:
    """Memory of a process that samples `rows` answers at once.

    The prompts have `n_prompt` tokens. The peak comes while the prompts are read, or at the last token. All weights are
    gathered if they fit (`sharding.gathered_weights`).
    """
    device, n_new, peaks = policy.device, sampling.max_new_tokens, []
    with (
        fake,
        torch.no_grad(),
        generating_with_sdpa(policy.eval()),
        torch.autocast(device.type, dtype=DTYPES.get(autocast), enabled=autocast is not None),
    ):
        choose = choosing(sampling, range(rows), n_prompt=n_prompt)

        def forward(n_tokens: int, n_before: int, cache: Any) -> Any:
            """Run the policy on `n_tokens`, draw a token, and return the cache.

            The cache has `n_before` tokens. Only the memory that this takes matters: ids are zeros, and the token is
            dropped.
            """
            ids = torch.zeros(rows, n_tokens, dtype=torch.long, device=device)
            only_last_logits = {"logits_to_keep": 1} if policy._supports_logits_to_keep() else {}
            out = policy(input_ids=ids, past_key_values=cache, use_cache=True, **only_last_logits)
            ids_so_far = torch.zeros(rows, n_before + n_tokens, dtype=torch.long, device=device)
            choose(ids_so_far, out.logits[:, -1].to(copy=True, dtype=torch.float32)).argmax(-1)
            return out.past_key_values

        for n_before in (0, n_new - 1):
            cache = None if n_before == 0 else forward(n_prompt + n_before - 2, 0, None)
            with MemoryTracker.of(policy) as tracker:
                if n_before == 0:
                    cache = forward(n_prompt, 0, None)
                else:  # two tokens: the first replaces the cache by one that is tracked, the second is the last of all
                    for n_remaining in (2, 1):
                        cache = forward(1, n_prompt + n_before - n_remaining, cache)
            layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "keys")]
            # the tracker cannot tell the cache from other activations
            kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
            peaks.append(tracker.peak + Counter(kv_cache=kv) - Counter(activations=kv))
            del cache, layers
    peak, dims = max(peaks, key=Bytes.total), plan.dims
    peak["kv_cache"] //= dims.tensor_size
    if dims.shard_size > 1:
        gathered = _count(policy.parameters()) * DTYPES[plan.compute_dtype].itemsize // dims.tensor_size
        if gathered <= (_device_memory(plan) - held.total()) / 2:
            held = held | Counter(gathered=gathered)
    return held + peak


def _find_scoring_peak(model: Any, fake: FakeTensorMode, device: str, *, rows: int, length: int) -> Bytes:
    """Peak of a reward model's forward pass on `rows` texts.

    The texts have `length` tokens, and the model has no weights.
    """
    model.config.get_text_config().pad_token_id = 0  # classifiers refuse several rows without one
    with fake, torch.no_grad():
        model = on_device(model, device, None)
        ids = torch.ones(rows, length, dtype=torch.long, device=device)
        with MemoryTracker((*model.parameters(), *model.buffers())) as tracker:
            model(input_ids=ids)
    return tracker.peak


# --- reports -------------------------------------------------------------------------------------------------------

HELP = (  # settings that may save memory: the key, and the value to try (None: not applicable)
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
    # takes the place of a second model
    ("lora.reference", lambda plan: plan.lora and ("adapter" if find_adapter(plan.model.archive) else "base")),
)


def suggest(plan: Plan, data: TrainingData) -> list[str]:
    """The three settings that save most, with the memory then needed."""
    need, helpful = predict(plan, data), []
    for key, change in HELP:
        value = change(plan)
        if value is None or plan.values.get(key) == value:
            continue
        other = plan.change(key, value)
        if find_problems(other.values, other):
            continue
        try:
            total = predict(other, data).total()
        except InputError:  # as for lora=qlora, if bitsandbytes has no kernels for this machine
            continue
        saved, reducible = need.total() - total, need.total() - need["process"]
        if saved > WORTH_A_TRY * reducible:
            written = str(value).lower() if isinstance(value, bool) else value  # as on the command line
            helpful.append((total, f"{key}={written} (then {total / 1e9:.2f} GB in all)"))
    return [text for _, text in sorted(helpful)[:3]]


def print_prediction(plan: Plan, data: TrainingData) -> None:
    """Print the memory needed and, if it won't fit, helpful settings."""
    phases, available = predict_phases(plan, data), _device_memory(plan)
    need = max(phases.values(), key=Bytes.total)
    for purpose in PURPOSES:
        if need[purpose]:
            print(f"{purpose:>12} {need[purpose] / 1e9:8.2f} GB")
    print(f"{'total':>12} {need.total() / 1e9:8.2f} GB per process; its device has {available / 1e9:.2f} GB")
    if plan.online:
        for phase, peak in phases.items():
            shown = {"gathered": "gathered", "activations": "activations", "logits": "logits", "kv_cache": "KV cache"}
            parts = [f"{text} {peak[purpose] / 1e9:.2f}" for purpose, text in shown.items() if peak[purpose]]
            details = f", of which {', '.join(parts)}" if parts else ""
            print(f"{phase:>12} {peak.total() / 1e9:8.2f} GB at its peak{details}")
        rounds, n_new = Rounds.of(plan), plan.online.max_new_tokens
        print(
            f"an update samples up to {rounds.answers * n_new:,} tokens, of {rounds.answers:,} answers, in "
            f"{rounds.batches * n_new:,} forwards of each process, of {rounds.rows:,} rows"
        )
    if need.total() > available:
        print("won't fit; looking for settings that would help", flush=True)  # a prediction for each takes a while
        print(f"try {_join(suggest(plan, data))}")


@contextmanager
def explaining_out_of_memory(plan: Plan, data: TrainingData) -> Iterator[None]:
    """Raise RunError with advice where memory runs out inside.

    The message says how much memory a process needs, and which settings would reduce that.
    """
    try:
        yield
    except RunError:  # already explains itself
        raise
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeErrors, on a GPU and on a CPU
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "t allocate memory" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors they hold
        torch.cuda.empty_cache()
        need, available = predict(plan, data).total(), _device_memory(plan)
        original = " ".join(str(error).split())[:200]
        raise RunError(
            f"out of memory: a process needs about {need / 1e9:.2f} GB, and its device has {available / 1e9:.2f} GB; "
            f"try {_join(suggest(plan, data))} ({original})"
        ) from error


def notes_on_free_memory(plan: Plan) -> list[str]:
    """A message after an update whose microbatches could have been larger, on a GPU."""
    if not torch.cuda.is_available():
        return []
    gpus = range(torch.cuda.device_count())
    held, peak = (sum(map(measure, gpus)) for measure in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    total = _device_memory(plan)
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
    fitting = [n for n in range(1, steps) if steps % n == 0 and held + (peak - held) * steps / n <= FULL * total]
    return min(fitting, default=steps)


def _join(suggestions: list[str]) -> str:
    return ", ".join(suggestions) or "a smaller model, or more processes with trainer=FSDPTrainer"


def _device_memory(plan: Plan) -> int:
    """Bytes available to one process.

    With GPUs, the memory of its GPU, or of all GPUs if it is the only process; without, its share of host memory.
    """
    if torch.cuda.is_available():
        gpus = range(1 if plan.trainer.multi_process else torch.cuda.device_count())
        return sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    return (host_memory().available + resident_memory()) // int(
        os.environ.get("LOCAL_WORLD_SIZE", plan.dims.world_size)
    )
