"""Recommendation for training on given GPUs or the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Model(NamedTuple):
    """Parameters, and bytes that a pair's forward keeps for its backward.

    A pair is 2 rows of 512 tokens. The bytes were counted with fake tensors, as `dry_run=true` counts them.
    """

    parameters: float
    kept: tuple[float, float]  # in bfloat16, in float32
    checkpointed: tuple[float, float]  # the same with activation checkpointing


MODELS = {  # the smallest first
    "gpt2-large": Model(0.774e9, (3.17e9, 5.71e9), (0.70e9, 0.77e9)),
    "gpt2-xl": Model(1.558e9, (4.93e9, 9.24e9), (0.78e9, 0.93e9)),
    "pythia28": Model(2.776e9, (3.55e9, 6.48e9), (0.81e9, 0.97e9)),
    "qwen3-4b-base": Model(4.022e9, (8.31e9, 13.22e9), (2.00e9, 2.02e9)),
    "gptj": Model(6.051e9, (8.53e9, 13.61e9), (1.07e9, 1.40e9)),
    "llama7b": Model(6.738e9, (6.47e9, 11.46e9), (0.83e9, 1.21e9)),
    "pythia69": Model(6.857e9, (5.37e9, 10.12e9), (0.97e9, 1.30e9)),
    "llama3.1-8b": Model(8.030e9, (8.33e9, 13.99e9), (1.88e9, 2.08e9)),
    "qwen3-8b-base": Model(8.191e9, (9.98e9, 16.10e9), (2.17e9, 2.35e9)),
}
STATE = 4 + 4 + 4 + 2  # bytes per parameter: float32 weights, gradients and RMSprop state, 16-bit reference
ADAPTER = 0.2  # bytes per parameter of its base: of rank 16, in float32, with gradients and RMSprop state
NOT_QUANTIZED = 0.13  # share of parameters that lora=qlora does not quantize: embeddings and head of an 8B model
QUANTIZED = 0.52  # bytes of each quantized parameter, with scales


class Gpu(NamedTuple):
    """A GPU, with memory in bytes, and the `error` of its matmul."""

    name: str
    total: int
    free: int
    bf16: bool
    error: str | None = None


class Advice(NamedTuple):
    """Recommended settings."""

    trainer: str
    model: str
    dtype: str
    examples_per_gpu: int | None  # through one backward pass; None if no model in the table fits
    command: str
    reasons: list[str]


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


def recommend(gpus: Sequence[Gpu], *, memory: float, model: str = "pythia28") -> Advice:
    """Recommend how to train `model`, or the largest that fits."""
    usable = 0.9 * min((g.total for g in gpus), default=memory)  # `memory` is the host's
    dtype = "bfloat16" if gpus and all(g.bf16 for g in gpus) else "float32"
    names = [*MODELS][: [*MODELS].index(model) + 1]
    # the largest model comes first, each without and with activation checkpointing
    for name, checkpointing in itertools.product(reversed(names) if gpus else (), (False, True)):
        chosen = MODELS[name]
        in_bfloat16, in_float32 = chosen.checkpointed if checkpointing else chosen.kept
        pair_bytes = in_bfloat16 if dtype == "bfloat16" else in_float32
        state_bytes = STATE * chosen.parameters / len(gpus)
        free_bytes = usable - state_bytes  # for activations
        if free_bytes >= pair_bytes:
            break
    else:
        return recommend_small_model(usable, n_gpus=len(gpus))

    # a power of 2, and at most a batch of about 64 on all GPUs together
    examples = 2 ** int(math.log2(min(free_bytes / pair_bytes, max(1, 64 // len(gpus)))))
    reasons = [
        f"weights 4, gradients 4 and RMSprop state 4 bytes per parameter in float32, reference 2 in 16 bits: "
        f"{gb(state_bytes)} of each GPU's {gb(usable)} (90 %), {gb(free_bytes)} remain for activations",
        f"{gb(pair_bytes)} for a pair of 2 x 512 tokens{', checkpointed' if checkpointing else ''}: "
        f"{examples} per GPU per microbatch (calculated, not measured; SFT needs less)",
    ]
    if name != model:
        lacking = f"{gb(STATE * MODELS[model].parameters / len(gpus))} per GPU plus activations"
        reasons.insert(0, f"model={model} needs {lacking}; {name} is the largest that fits")
    if len(gpus) > 1:
        reasons.append("use TensorParallelTrainer only if one example does not fit a GPU: it shards activations too")
    reasons.append(recommend_adapters(usable, n_gpus=len(gpus), dtype=dtype))
    # on one GPU FSDPTrainer shards nothing but has mixed precision, unlike BasicTrainer
    trainer = "FSDPTrainer" if len(gpus) > 1 or dtype == "bfloat16" else "BasicTrainer"
    # rank 0 loads one model at a time, the policy in float32; 4 GB are for everything else
    loading_bytes = 4 * chosen.parameters + 4e9
    if trainer == "FSDPTrainer" and memory < loading_bytes:
        needed = f"{gb(loading_bytes)} of host memory to load the weights"
        reasons.append(f"rank 0 needs {needed}; this host has {gb(memory)}")
    reasons.append("then DPO: the same with loss=dpo loss.beta=0.1 exp_name=hh_dpo model.archive=RUN_OF_SFT/LATEST")
    # about 64 examples per update, as in the README, and batch sizes that divide it
    microbatch = len(gpus) * examples
    accumulation = max(1, 64 // microbatch)
    command = (
        f"python train.py loss=sft model={name} datasets=[hh] exp_name=hh_sft trainer={trainer}"
        f"{' model.fsdp_policy_mp=bfloat16' if dtype == 'bfloat16' else ''}"
        f"{' activation_checkpointing=true' if checkpointing else ''}"
        f" batch_size={microbatch * accumulation} gradient_accumulation_steps={accumulation}"
        f" eval_batch_size={microbatch}"
    )
    return Advice(trainer, name, dtype, examples, command, reasons)


def recommend_small_model(usable: float, *, n_gpus: int) -> Advice:
    reasons = [
        f"{'the GPUs are small' if n_gpus else 'no GPU'}: models of up to about {usable / 2 / STATE / 1e6:.0f} million "
        f"parameters fit ({STATE} bytes each, and as much for activations, in 90 % of the memory)",
        recommend_adapters(usable, n_gpus=n_gpus),
    ]
    if not n_gpus:
        reasons.append("trainer=FSDPTrainer world_size=2 tries the sharded code, in two processes")
        reasons.append(recommend_autocast(Path("/proc/cpuinfo").read_text()))
    command = "python train.py loss=sft model=demo datasets=[demo] exp_name=demo_sft trainer=BasicTrainer"
    return Advice("BasicTrainer", "demo", "float32", None, f"{command} batch_size=32 wandb.enabled=false", reasons)


def recommend_adapters(usable: float, *, n_gpus: int, dtype: str = "float32") -> str:
    """Say how large an adapter's base may be, beside equal activations."""
    width = 2 if dtype == "bfloat16" else 4
    dtype_setting = " model.policy_dtype=bfloat16" if dtype == "bfloat16" else ""
    options = []
    for name, base_bytes, shards in (  # bytes per parameter of the frozen base
        ("lora", width, max(1, n_gpus)),
        ("qlora", (1 - NOT_QUANTIZED) * QUANTIZED + NOT_QUANTIZED * width, 1),  # every process holds a whole 4-bit base
    ):
        n_bytes = base_bytes + ADAPTER
        billions = usable / 2 * shards / n_bytes / 1e9
        rounded = float(f"{billions:.2g}")  # to two digits
        options.append(f"lora={name}{dtype_setting} takes {n_bytes:.1f}, so up to about {rounded:g}")
    install = "" if find_spec("bitsandbytes") else ", after pip install bitsandbytes"
    return (
        f"adapters need fewer bytes per parameter, as the frozen base is the reference too, and fit larger models "
        f"(in billions, with half of the memory for activations): {'; '.join(options)}{install}"
    )


def recommend_autocast(cpuinfo: str) -> str:
    """Say whether this CPU computes products in bfloat16."""
    flags = {"avx512_bf16", "amx_bf16"} & {*cpuinfo.split()}
    if flags:
        return f"model.autocast=bfloat16 may be faster for a larger model: the CPU has {' and '.join(sorted(flags))}"
    return "model.autocast=bfloat16 is not faster on this CPU, which has neither AVX512-BF16 nor AMX"
