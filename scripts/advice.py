"""Recommendation for training on given GPUs or the CPU: trainer, dtype, batch size, and a command line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from scripts.probes import Gpu, Products


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


class Model(NamedTuple):
    """Number of parameters, and bytes of activations for a pair of 2 x 512 tokens with default attention."""

    parameters: float
    pair_bf16: float
    pair_fp32: float


MODELS = {  # counted with fake tensors; tests/scripts/test_advice.py checks them
    "gpt2-large": Model(0.774e9, 2.9e9, 5.5e9),
    "gpt2-xl": Model(1.558e9, 4.6e9, 9.0e9),
    "pythia28": Model(2.775e9, 3.2e9, 6.3e9),
    "gptj": Model(6.051e9, 8.2e9, 13.4e9),
    "llama7b": Model(6.738e9, 6.3e9, 11.3e9),
    "pythia69": Model(6.857e9, 5.1e9, 9.9e9),
    "qwen3-4b-base": Model(4.022e9, 7.4e9, 12.6e9),
    "llama3.1-8b": Model(8.030e9, 7.5e9, 13.5e9),
    "qwen3-8b-base": Model(8.191e9, 9.0e9, 15.5e9),
}
STATE = 4 + 4 + 4 + 2  # bytes per parameter: float32 weights, gradients and RMSprop state, 16-bit reference
ADAPTER = 0.2  # bytes per parameter of its base: of rank 16, in float32, with gradients and RMSprop state
NOT_QUANTIZED = 0.13  # share of parameters that lora=qlora does not quantize: embeddings and head of an 8B model
QUANTIZED = 0.52  # bytes of each quantized parameter, with scales
FASTER = 1.2  # bfloat16 is recommended on a CPU if its products are this many times as fast as float32's
CHECKPOINTED = 0.2  # at most this share of the activations remains with activation_checkpointing


class Advice(NamedTuple):
    """Recommended settings. `examples_per_gpu` go through one backward pass; None if no model in the table fits."""

    trainer: str
    model: str
    dtype: str
    examples_per_gpu: int | None
    command: str
    reasons: list[str]


def recommend(
    gpus: Sequence[Gpu], *, memory: float, products: Products | None = None, model: str = "pythia28"
) -> Advice:
    """Recommend how to train `model`, or the largest smaller one that fits, on these GPUs.

    `memory` is the host's, in bytes; `products` is the CPU's speed, if it was measured.
    """
    usable = 0.9 * min((g.total for g in gpus), default=memory)
    bf16 = bool(gpus) and all(g.bf16 for g in gpus)
    names = sorted((m for m in MODELS if MODELS[m] <= MODELS[model]), key=lambda m: MODELS[m], reverse=True)
    for name, checkpointing in itertools.product(names if gpus else (), (False, True)):
        pair = (MODELS[name].pair_bf16 if bf16 else MODELS[name].pair_fp32) * (CHECKPOINTED if checkpointing else 1)
        left = usable - STATE * MODELS[name].parameters / len(gpus)
        if left >= pair:
            break
    else:
        return small_model_advice(usable, n_gpus=len(gpus), products=products)

    examples = 2 ** int(math.log2(min(left / pair, max(1, 64 // len(gpus)))))
    reasons = [
        f"weights 4, gradients 4 and RMSprop state 4 bytes per parameter in float32, reference 2 in 16 bits: "
        f"{gb(usable - left)} of each GPU's {gb(usable)} (90 %), {gb(left)} remain for activations",
        f"{gb(pair)} for a pair of 2 x 512 tokens{', checkpointed' if checkpointing else ''}: "
        f"{examples} per GPU per microbatch (calculated, not measured; SFT needs less)",
    ]
    if name != model:
        lacking = f"{gb(STATE * MODELS[model].parameters / len(gpus))} per GPU plus activations"
        reasons.insert(0, f"model={model} needs {lacking}; {name} is the largest that fits")
    if len(gpus) > 1:
        reasons.append("use TensorParallelTrainer only if one example does not fit a GPU: it shards activations too")
    reasons.append(says_of_adapters(usable, n_gpus=len(gpus), bf16=bf16))
    # rank 0 loads one model at a time, the policy in float32, before it is distributed
    reading = 4 * MODELS[name].parameters + 4e9
    if (len(gpus) > 1 or bf16) and memory < reading:
        reasons.append(f"rank 0 needs {gb(reading)} of host memory to load the weights; this host has {gb(memory)}")
    reasons.append("then DPO: the same with loss=dpo loss.beta=0.1 exp_name=hh_dpo model.archive=RUN_OF_SFT/LATEST")
    # on one GPU FSDPTrainer shards nothing but has mixed precision, unlike BasicTrainer
    trainer, dtype = ("FSDPTrainer" if len(gpus) > 1 or bf16 else "BasicTrainer"), ("bfloat16" if bf16 else "float32")
    command = training_command(name, trainer, len(gpus), examples, bf16=bf16, checkpointing=checkpointing)
    return Advice(trainer, name, dtype, examples, command, reasons)


def training_command(model: str, trainer: str, n_gpus: int, examples: int, *, bf16: bool, checkpointing: bool) -> str:
    """Command with about 64 examples per update, as in the README, and batch sizes that divide it."""
    accumulation = max(1, 64 // (n_gpus * examples))
    return (
        f"python train.py loss=sft model={model} datasets=[hh] exp_name=hh_sft trainer={trainer}"
        f"{' model.fsdp_policy_mp=bfloat16' if bf16 else ''}{' activation_checkpointing=true' if checkpointing else ''}"
        f" batch_size={n_gpus * examples * accumulation} gradient_accumulation_steps={accumulation}"
        f" eval_batch_size={n_gpus * examples}"
    )


def says_of_bfloat16(products: Products) -> str:
    """Sentence on whether `model.autocast=bfloat16` is faster on this CPU, with both speeds."""
    float32, bfloat16 = (f"{rate / 1e9:,.0f}" for rate in products)
    measured = f"matrix products run at {bfloat16} GFLOP/s in bfloat16 here, {float32} in float32"
    if products.bfloat16 >= FASTER * products.float32:
        return f"model.autocast=bfloat16 is faster for a larger model: {measured}"
    return f"model.autocast=bfloat16 is not faster on this CPU: {measured}; it needs AVX512-BF16 or AMX"


def says_of_adapters(usable: float, *, n_gpus: int, bf16: bool = False) -> str:
    """Sentence on the largest base of an adapter, with half of the memory for activations."""
    width = 2 if bf16 else 4
    frozen = {"lora": width, "qlora": (1 - NOT_QUANTIZED) * QUANTIZED + NOT_QUANTIZED * width}
    shards = {"lora": max(1, n_gpus), "qlora": 1}  # every process holds a whole 4-bit base
    dtype, found = " model.policy_dtype=bfloat16" if bf16 else "", []
    for name, n_bytes in frozen.items():
        billions = usable / 2 * shards[name] / (n_bytes + ADAPTER) / 1e9
        found.append(f"lora={name}{dtype} takes {n_bytes + ADAPTER:.1f}, so up to about {float(f'{billions:.2g}'):g}")
    install = "" if find_spec("bitsandbytes") else ", after pip install bitsandbytes"
    return (
        f"adapters need fewer bytes per parameter, as the frozen base is the reference too, and fit larger models "
        f"(in billions, with half of the memory for activations): {'; '.join(found)}{install}"
    )


def small_model_advice(usable: float, *, n_gpus: int, products: Products | None = None) -> Advice:
    """Recommend BasicTrainer and the demo model, with the size of the largest model that fits."""
    reasons = [
        f"{'the GPUs are small' if n_gpus else 'no GPU'}: models of up to about {usable / 2 / STATE / 1e6:.0f} million "
        f"parameters fit ({STATE} bytes each, and as much for activations, in 90 % of the memory)",
    ]
    reasons.append(says_of_adapters(usable, n_gpus=n_gpus))
    if not n_gpus:
        reasons.append("trainer=FSDPTrainer world_size=2 tries the sharded code, in two processes")
    if not n_gpus and products:
        reasons.append(says_of_bfloat16(products))
    command = "python train.py loss=sft model=demo datasets=[demo] exp_name=demo_sft trainer=BasicTrainer"
    return Advice("BasicTrainer", "demo", "float32", None, f"{command} batch_size=32 wandb.enabled=false", reasons)
