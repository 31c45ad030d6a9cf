"""Recommendations for machines made up here."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.runs import compose
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from dpo.models.pretrained import checkpoint_activations, choose_attention, disable_dropout
from dpo.training.memory_tracker import MemoryTracker
from scripts.advice import MODELS, Gpu, recommend, recommend_adapters, recommend_autocast


def gpu(name: str = "NVIDIA H100", total: float = 85e9, **changes) -> Gpu:
    values = {"free": total - 0.6e9, "bf16": True, "error": None, **changes}
    return Gpu(name, int(total), **values)


H100 = gpu()
RTX4090 = gpu("NVIDIA GeForce RTX 4090", 25.4e9)
V100 = gpu("Tesla V100", 34e9, bf16=False)
T4 = gpu("Tesla T4", 8e9, bf16=False)


@pytest.mark.parametrize(
    ("gpus", "model", "advised", "extra"),
    [
        # 76.5 GB usable; 38.9 / 8 of state leave 71.6 GB, 20 pairs of 3.6 GB
        ([H100] * 8, "pythia28", ("FSDPTrainer", "pythia28", "bfloat16", 8), "batch_size=64"),
        # 32.1 GB left beside state and autocast's copies, 9 pairs of 3.6 GB
        ([H100], "pythia28", ("BasicTrainer", "pythia28", "bfloat16", 8), "gradient_accumulation_steps=8"),
        ([H100] * 6, "pythia28", ("FSDPTrainer", "pythia28", "bfloat16", 8), "batch_size=48"),
        # 22.9 GB usable: gpt2-xl doesn't fit, as its update takes 28.0; gpt2-large leaves 10.5, 3 pairs of 3.2 GB
        ([RTX4090], "pythia28", ("BasicTrainer", "gpt2-large", "bfloat16", 2), "model.autocast=bfloat16"),
        # 30.6 GB usable, 20.9 left for pairs of 6.5
        ([V100] * 4, "pythia28", ("FSDPTrainer", "pythia28", "float32", 2), "gradient_accumulation_steps=8"),
        # 30.6 GB usable, 7.0 left: none without checkpointing, with it 5 of 1.2; pythia69's update takes 30.9
        ([V100] * 4, "llama7b", ("FSDPTrainer", "llama7b", "float32", 4), "activation_checkpointing=true"),
        ([V100] * 4, "pythia69", ("FSDPTrainer", "llama7b", "float32", 4), "activation_checkpointing=true"),
        # the smallest GPU and the oldest decide
        ([H100, V100], "gpt2-xl", ("FSDPTrainer", "gpt2-xl", "float32", 2), "batch_size=64"),
        # 76.5 GB usable; 114.7 / 8 of state leave 62.2 GB
        ([H100] * 8, "qwen3-8b-base", ("FSDPTrainer", "qwen3-8b-base", "bfloat16", 4), "batch_size=64"),
        ([H100] * 128, "llama7b", ("FSDPTrainer", "llama7b", "bfloat16", 1), "batch_size=128"),
        ([T4], "pythia28", ("BasicTrainer", "demo", "float32", None), "datasets=[demo]"),
        ([], "pythia28", ("BasicTrainer", "demo", "float32", None), "datasets=[demo]"),
    ],
)
def test_recommendations_are_right_and_valid_commands(gpus, model, advised, extra, monkeypatch):
    advice = recommend(gpus, memory=16e9, model=model)
    python, script, *overrides = advice.command.split()

    assert advice[:4] == advised
    assert (python, script) == ("python", "train.py")
    assert extra in overrides
    precision = "model.autocast=bfloat16" if advice.trainer == "BasicTrainer" else "model.fsdp_policy_mp=bfloat16"
    assert (precision in overrides) == (advice.dtype == "bfloat16")
    assert "float16" not in {override.split("=")[1] for override in overrides}
    assert advice.model == model or "fit" in advice.reasons[0] or advice.model == "demo"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    assert train.find_config_problems(compose(*overrides)) == []


def test_bfloat16_is_recommended_on_a_cpu_that_computes_in_it():
    assert recommend_autocast("flags : fpu avx512_bf16 amx_bf16").endswith("the CPU has amx_bf16 and avx512_bf16")
    assert "is not faster on this CPU" in recommend_autocast("flags : fpu avx2")
    assert "model.autocast" in " ".join(recommend([], memory=16e9).reasons)


@pytest.mark.parametrize(
    ("machine", "lora", "qlora"),
    [
        # half of 22.9 GB; a base of 2 bytes per parameter, or of 0.52 where it is quantized, and 0.2 for the adapter
        (
            (22.9e9, 1, "bfloat16"),
            "lora=lora model.policy_dtype=bfloat16 takes 2.2 bytes per parameter, so up to about 5.2 billion fit",
            "takes 0.9 bytes per parameter, so up to about 13 billion fit",
        ),
        # shards of the base, but all of a 4-bit one, on each of 8
        (
            (76.5e9, 8, "bfloat16"),
            "takes 2.2 bytes per parameter, so up to about 140 billion fit",
            "lora=qlora model.policy_dtype=bfloat16 takes 0.9 bytes per parameter, so up to about 42 billion fit",
        ),
        (
            (14.4e9, 0, "float32"),
            "lora=lora takes 4.2 bytes per parameter, so up to about 1.7 billion fit",
            "lora=qlora takes 1.2 bytes per parameter, so up to about 6.1 billion fit",
        ),
    ],
)
def test_how_large_the_base_of_an_adapter_may_be_is_said(machine, lora, qlora, monkeypatch):
    usable, n_gpus, dtype = machine
    for installed in (True, False):
        monkeypatch.setattr("scripts.advice.find_spec", lambda name, found=installed: found or None)
        text = recommend_adapters(usable, n_gpus=n_gpus, dtype=dtype)
        assert lora in text
        assert qlora in text
        assert ("pip install bitsandbytes" in text) != installed


def test_too_little_host_memory_for_reading_the_weights_is_said():
    reasons = [" ".join(recommend([H100] * 8, memory=memory, model="llama7b").reasons) for memory in (20e9, 50e9)]
    too_little = "31.0 GB of host memory to load the weights; this host has 20.0 GB"
    assert [too_little in text for text in reasons] == [True, False]


GPT2, NEOX = {"model_type": "gpt2"}, {"model_type": "gpt_neox", "num_attention_heads": 32, "num_hidden_layers": 32}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36}
SHAPES = {  # what transformers' default config of the type lacks
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_what_a_pair_keeps_for_its_backward(name):
    """Counted with fake tensors; with checkpointing, a layer is computed again."""
    found = []
    for checkpointing, dtype in ((False, torch.bfloat16), (False, torch.float32), (True, torch.bfloat16)):
        config = transformers.AutoConfig.for_model(**SHAPES[name])
        attention = choose_attention(config, "sdpa")
        with FakeTensorMode():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
            disable_dropout(model.train())
            if checkpointing:
                checkpoint_activations(model)
            ids, mask = torch.zeros(2, 512, dtype=torch.long), torch.zeros(2, 1, 512, 512, dtype=dtype)
            with MemoryTracker.of(model) as tracker:
                loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss  # keeps the rest alive
            del loss
        found.append(tracker.peak.total() + (found[0] // config.num_hidden_layers if checkpointing else 0))
    known = MODELS[name]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(known.n_parameters, rel=1e-3)
    assert found == pytest.approx([*known.activations, known.checkpointed[0]], rel=0.05)
