"""Recommendation of settings to train with, on given GPUs or the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Model(NamedTuple):
    """Number of parameters, and bytes of the activations of a pair.

    A pair is 2 rows of 512 tokens. The bytes are what the forward pass keeps for the backward pass, counted with fake
    tensors as by `dry_run=true`.
    """

    n_parameters: float
    activations: tuple[float, float]  # in bfloat16, in float32
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
# bytes per parameter
STATE = 4 + 4 + 4 + 2  # float32 weights, gradients and RMSprop state, 16-bit reference
COPIES = 2  # autocast's bfloat16 copies of weights, kept from forward to backward; FSDP frees its copies earlier
UPDATE = 4  # RMSprop's temporaries on a GPU, after activations and copies are freed
ADAPTER = 0.2  # per parameter of the base: an adapter of rank 16, in float32, with gradients and RMSprop state
QUANTIZED = 0.52  # 4 bits and scales, for a parameter that lora=qlora quantizes
# share of the parameters of an 8B model that lora=qlora does not quantize: embeddings and head
UNQUANTIZED_SHARE = 0.13


class Gpu(NamedTuple):
    """A GPU, as a probe found it."""

    name: str
    total: int  # bytes of memory
    free: int
    bf16: bool  # supports bfloat16
    error: str | None = None  # of a matrix product, or of the probe


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
    """Recommend how to train `model`, or the largest that fits.

    If nothing fits, or without a GPU, recommends a tiny model. `memory` is the host's, in bytes.
    """
    n_gpus = len(gpus)
    usable_bytes = 0.9 * min((gpu.total for gpu in gpus), default=memory)
    dtype = "bfloat16" if gpus and all(gpu.bf16 for gpu in gpus) else "float32"
    fit = find_fit(model, usable_bytes, n_gpus=n_gpus, dtype=dtype) if gpus else None
    if fit is None:
        return recommend_small_model(usable_bytes, n_gpus=n_gpus)

    most_examples = min(fit.free_bytes / fit.pair_bytes, max(1, 64 // n_gpus))  # at most 64 on all GPUs together
    examples = 2 ** int(math.log2(most_examples))
    # without other GPUs FSDP would copy every weight twice per microbatch for nothing (docs/distributed.md)
    trainer = "BasicTrainer" if n_gpus == 1 else "FSDPTrainer"
    policy_setting = reference_setting = copies_note = ""
    if dtype == "bfloat16" and n_gpus == 1:
        policy_setting, reference_setting = " model.autocast=bfloat16", " model.reference_dtype=bfloat16"
        copies_note = f", autocast's copies {COPIES}"
    elif dtype == "bfloat16":
        policy_setting = " model.fsdp_policy_mp=bfloat16"
    reasons = [
        f"bytes per parameter: weights 4, gradients 4, RMSprop state 4 (float32), reference 2 (16 bits){copies_note}: "
        f"{gb(fit.state_bytes)} of {gb(usable_bytes)} (90 % of a GPU), so {gb(fit.free_bytes)} remain for activations",
        f"{gb(fit.pair_bytes)} for a pair of 2 x 512 tokens{', checkpointed' if fit.checkpointing else ''}: "
        f"{examples} per GPU and microbatch (calculated, not measured; SFT needs less)",
    ]
    if fit.model != model:
        needed = f"{gb(STATE * MODELS[model].n_parameters / n_gpus)} per GPU plus activations or temporaries"
        reasons.insert(0, f"model={model} needs {needed}; {fit.model} is the largest that fits")
    if n_gpus > 1:
        reasons.append(
            "use TensorParallelTrainer only if one example does not fit a GPU: this trainer shards activations too"
        )
    reasons.append(recommend_adapters(usable_bytes, n_gpus=n_gpus, dtype=dtype))
    # rank 0 loads one model at a time, the policy in float32; 4 GB are for everything else
    loading_bytes = 4 * MODELS[fit.model].n_parameters + 4e9
    if memory < loading_bytes:
        reasons.append(
            f"rank 0 needs {gb(loading_bytes)} of host memory to load the weights; this host has {gb(memory)}"
        )
    dpo = f"loss=dpo loss.beta=0.1 exp_name=hh_dpo model.archive=RUN_OF_SFT/LATEST{reference_setting}"
    reasons.append(f"then DPO: the same with {dpo}")
    # batches of about 64 examples, as in the README, in whole microbatches
    microbatch = n_gpus * examples
    accumulation = max(1, 64 // microbatch)
    command = (
        f"python train.py loss=sft model={fit.model} datasets=[hh] exp_name=hh_sft trainer={trainer}{policy_setting}"
        f"{' activation_checkpointing=true' if fit.checkpointing else ''}"
        f" batch_size={microbatch * accumulation} gradient_accumulation_steps={accumulation}"
        f" eval_batch_size={microbatch}"
    )
    return Advice(trainer, fit.model, dtype, examples, command, reasons)


class Fit(NamedTuple):
    """A model that fits, and its bytes on each GPU."""

    model: str
    checkpointing: bool
    state_bytes: float
    free_bytes: float  # for activations
    pair_bytes: float  # of a pair's activations


def find_fit(model: str, usable_bytes: float, *, n_gpus: int, dtype: str) -> Fit | None:
    """Find the largest model, up to `model`, that fits; else None.

    Activation checkpointing is tried before a smaller model.
    """
    names = list(MODELS)
    uses_autocast = n_gpus == 1 and dtype == "bfloat16"
    for name in reversed(names[: names.index(model) + 1]):
        n_parameters = MODELS[name].n_parameters / n_gpus  # on each GPU
        state_bytes = (STATE + COPIES if uses_autocast else STATE) * n_parameters
        free_bytes = usable_bytes - state_bytes
        can_update = usable_bytes >= (STATE + UPDATE) * n_parameters
        for checkpointing in (False, True):
            in_bfloat16, in_float32 = MODELS[name].checkpointed if checkpointing else MODELS[name].activations
            pair_bytes = in_bfloat16 if dtype == "bfloat16" else in_float32
            if can_update and free_bytes >= pair_bytes:
                return Fit(name, checkpointing, state_bytes, free_bytes, pair_bytes)
    return None


def recommend_small_model(usable_bytes: float, *, n_gpus: int) -> Advice:
    """Recommend a tiny model where none of `MODELS` fits."""
    millions = usable_bytes / 2 / STATE / 1e6  # the other half is for activations
    reasons = [
        f"{'the GPUs are small' if n_gpus else 'no GPU'}: models of up to about {millions:.0f} million "
        f"parameters fit ({STATE} bytes each, and as much for activations, in 90 % of the memory)",
        recommend_adapters(usable_bytes, n_gpus=n_gpus),
    ]
    if not n_gpus:
        reasons.append("trainer=FSDPTrainer world_size=2 tries the sharded code, in two processes")
        reasons.append(recommend_autocast(Path("/proc/cpuinfo").read_text()))
    command = "python train.py loss=sft model=demo datasets=[demo] exp_name=demo_sft trainer=BasicTrainer"
    return Advice("BasicTrainer", "demo", "float32", None, f"{command} batch_size=32 wandb.enabled=false", reasons)


def recommend_adapters(usable_bytes: float, *, n_gpus: int, dtype: str = "float32") -> str:
    """Say how large an adapter's base may be.

    Half of the memory is left for activations.
    """
    lora_bytes, dtype_setting = 4, ""  # bytes of a parameter of the base
    if dtype == "bfloat16":
        lora_bytes, dtype_setting = 2, " model.policy_dtype=bfloat16"
    qlora_bytes = (1 - UNQUANTIZED_SHARE) * QUANTIZED + UNQUANTIZED_SHARE * lora_bytes  # the mean over parameters
    options = []
    for name, base_bytes, n_shards in (
        ("lora", lora_bytes, max(1, n_gpus)),
        ("qlora", qlora_bytes, 1),  # every process holds a complete 4-bit base
    ):
        bytes_per_parameter = base_bytes + ADAPTER
        billions = usable_bytes / 2 * n_shards / bytes_per_parameter / 1e9
        fitting = f"up to about {float(f'{billions:.2g}'):g} billion fit"  # to two digits
        options.append(f"lora={name}{dtype_setting} takes {bytes_per_parameter:.1f} bytes per parameter, so {fitting}")
    install = "" if find_spec("bitsandbytes") else ", after pip install bitsandbytes"
    return (
        f"adapters fit larger models, as the frozen base is the reference too; with half of the memory for "
        f"activations, {'; '.join(options)}{install}"
    )


def recommend_autocast(cpuinfo: str) -> str:
    """Say whether a CPU computes matrix products in bfloat16.

    `cpuinfo` is the content of /proc/cpuinfo.
    """
    flags = {"avx512_bf16", "amx_bf16"} & {*cpuinfo.split()}
    if flags:
        return f"model.autocast=bfloat16 may be faster for a larger model: the CPU has {' and '.join(sorted(flags))}"
    return "model.autocast=bfloat16 is not faster on this CPU, which has neither AVX512-BF16 nor AMX"
