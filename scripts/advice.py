"""Recommendation for training on given GPUs or the CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

GPT2, NEOX = {"model_type": "gpt2"}, {"model_type": "gpt_neox", "num_attention_heads": 32, "num_hidden_layers": 32}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36}
MODELS: dict[str, dict[str, Any]] = {  # the smallest first: what transformers' default config of the type lacks
    "gpt2-large": {**GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "pythia28": {**NEOX, "hidden_size": 2560, "intermediate_size": 10240},
    "qwen3-4b-base": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "gptj": {"model_type": "gptj"},
    "llama7b": {"model_type": "llama"},
    "pythia69": {**NEOX, "hidden_size": 4096, "intermediate_size": 16384},
    "llama3.1-8b": {"model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen3-8b-base": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
}
PAIR = (2, 512)  # rows and tokens
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
    """Recommended settings.

    `examples_per_gpu` go through one backward pass; None if no model in the table fits.
    """

    trainer: str
    model: str
    dtype: str
    examples_per_gpu: int | None
    command: str
    reasons: list[str]


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


# --- models, without weights -----------------------------------------------------------------------------------------


def build_model(name: str, dtype: Any) -> Any:
    import transformers

    from dpo.models.pretrained import choose_attention

    config = transformers.AutoConfig.for_model(**MODELS[name])
    attention = choose_attention(config, "sdpa")
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


@functools.cache
def count_parameters(name: str) -> int:
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(name, torch.float32).parameters())


@functools.cache
def measure_pair(name: str, dtype_name: str, *, checkpointing: bool) -> int:
    """Bytes that a pair's forward keeps for its backward, by fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dpo.models.pretrained import checkpoint_activations, disable_dropout
    from dpo.training.memory_tracker import MemoryTracker

    dtype = getattr(torch, dtype_name)
    with FakeTensorMode():
        model = build_model(name, dtype).train()
        disable_dropout(model)
        if checkpointing:
            checkpoint_activations(model)
        ids, mask = torch.zeros(PAIR, dtype=torch.long), torch.zeros(PAIR[0], 1, PAIR[1], PAIR[1], dtype=dtype)
        with MemoryTracker.of(model) as tracker:
            loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss  # while it lives, so does the rest
        del loss
    kept = tracker.peak.total()
    if checkpointing:  # one layer is computed again in the backward
        kept += measure_pair(name, dtype_name, checkpointing=False) // model.config.num_hidden_layers
    return kept


# --- the recommendation ----------------------------------------------------------------------------------------------


def recommend(gpus: Sequence[Gpu], *, memory: float, model: str = "pythia28") -> Advice:
    """Recommend how to train `model`, or the largest that fits."""
    usable = 0.9 * min((g.total for g in gpus), default=memory)
    dtype = "bfloat16" if gpus and all(g.bf16 for g in gpus) else "float32"
    names = [*MODELS][: [*MODELS].index(model) + 1]
    for name, checkpointing in itertools.product(reversed(names) if gpus else (), (False, True)):
        parameters = count_parameters(name)
        left = usable - STATE * parameters / len(gpus)
        if left > 0 and left >= (pair := measure_pair(name, dtype, checkpointing=checkpointing)):
            break
    else:
        return recommend_small_model(usable, n_gpus=len(gpus))

    examples = 2 ** int(math.log2(min(left / pair, max(1, 64 // len(gpus)))))
    reasons = [
        f"weights 4, gradients 4 and RMSprop state 4 bytes per parameter in float32, reference 2 in 16 bits: "
        f"{gb(usable - left)} of each GPU's {gb(usable)} (90 %), {gb(left)} remain for activations",
        f"{gb(pair)} for a pair of 2 x 512 tokens{', checkpointed' if checkpointing else ''}: "
        f"{examples} per GPU per microbatch (calculated, not measured; SFT needs less)",
    ]
    if name != model:
        lacking = f"{gb(STATE * count_parameters(model) / len(gpus))} per GPU plus activations"
        reasons.insert(0, f"model={model} needs {lacking}; {name} is the largest that fits")
    if len(gpus) > 1:
        reasons.append("use TensorParallelTrainer only if one example does not fit a GPU: it shards activations too")
    reasons.append(recommend_adapters(usable, n_gpus=len(gpus), dtype=dtype))
    # on one GPU FSDPTrainer shards nothing but has mixed precision, unlike BasicTrainer
    trainer = "FSDPTrainer" if len(gpus) > 1 or dtype == "bfloat16" else "BasicTrainer"
    reading = 4 * parameters + 4e9  # rank 0 loads one model at a time, the policy in float32, before it is distributed
    if trainer == "FSDPTrainer" and memory < reading:
        reasons.append(f"rank 0 needs {gb(reading)} of host memory to load the weights; this host has {gb(memory)}")
    reasons.append("then DPO: the same with loss=dpo loss.beta=0.1 exp_name=hh_dpo model.archive=RUN_OF_SFT/LATEST")
    # about 64 examples per update, as in the README, and batch sizes that divide it
    at_once, accumulation = len(gpus) * examples, max(1, 64 // (len(gpus) * examples))
    command = (
        f"python train.py loss=sft model={name} datasets=[hh] exp_name=hh_sft trainer={trainer}"
        f"{' model.fsdp_policy_mp=bfloat16' if dtype == 'bfloat16' else ''}"
        f"{' activation_checkpointing=true' if checkpointing else ''}"
        f" batch_size={at_once * accumulation} gradient_accumulation_steps={accumulation} eval_batch_size={at_once}"
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
    own = " model.policy_dtype=bfloat16" if dtype == "bfloat16" else ""
    found = []
    for name, frozen, shards in (
        ("lora", width, max(1, n_gpus)),
        ("qlora", (1 - NOT_QUANTIZED) * QUANTIZED + NOT_QUANTIZED * width, 1),  # every process holds a whole 4-bit base
    ):
        n_bytes = frozen + ADAPTER
        billions = usable / 2 * shards / n_bytes / 1e9
        found.append(f"lora={name}{own} takes {n_bytes:.1f}, so up to about {float(f'{billions:.2g}'):g}")
    install = "" if find_spec("bitsandbytes") else ", after pip install bitsandbytes"
    return (
        f"adapters need fewer bytes per parameter, as the frozen base is the reference too, and fit larger models "
        f"(in billions, with half of the memory for activations): {'; '.join(found)}{install}"
    )


def recommend_autocast(cpuinfo: str) -> str:
    """Say whether this CPU computes products in bfloat16."""
    if has := {"avx512_bf16", "amx_bf16"} & {*cpuinfo.split()}:
        return f"model.autocast=bfloat16 may be faster for a larger model: the CPU has {' and '.join(sorted(has))}"
    return "model.autocast=bfloat16 is not faster on this CPU, which has neither AVX512-BF16 nor AMX"
