"""What the doctor recommends for machines made up here, and the table of models that it computes with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from support.runs import compose
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import train
from dpo.losses import _get_batch_logps
from dpo.models.pretrained import choose_attention, disable_dropout
from scripts.advice import CHECKPOINTED, MODELS, recommend
from scripts.probes import Gpu, Products


def gpu(name: str = "NVIDIA H100", total: float = 85e9, **changes) -> Gpu:
    values = {"free": total - 0.6e9, "bf16": True, "peers": range(8), "error": None, **changes}
    return Gpu(name, int(total), **values)


H100 = gpu()
RTX4090 = gpu("NVIDIA GeForce RTX 4090", 25.4e9, peers=())
V100 = gpu("Tesla V100", 34e9, bf16=False)
T4 = gpu("Tesla T4", 8e9, bf16=False)


@pytest.mark.parametrize(
    ("gpus", "model", "advised", "extra"),
    [
        # 76.5 GB usable; 38.9 / 8 of state leave 71.6 GB, 22 pairs of 3.2 GB
        ([H100] * 8, "pythia28", ("FSDPTrainer", "pythia28", "bfloat16", 8), "batch_size=64"),
        # 37.7 GB left, 11 pairs of 3.2 GB; one GPU, for mixed precision
        ([H100], "pythia28", ("FSDPTrainer", "pythia28", "bfloat16", 8), "gradient_accumulation_steps=8"),
        ([H100] * 6, "pythia28", ("FSDPTrainer", "pythia28", "bfloat16", 8), "batch_size=48"),
        # 22.9 GB usable: pythia28 doesn't fit; gpt2-xl leaves 1.0, of a pair 0.9 with checkpointing
        ([RTX4090], "pythia28", ("FSDPTrainer", "gpt2-xl", "bfloat16", 1), "activation_checkpointing=true"),
        # 30.6 GB usable, 20.9 left
        ([V100] * 4, "pythia28", ("FSDPTrainer", "pythia28", "float32", 2), "gradient_accumulation_steps=8"),
        # 30.6 GB usable, 6.6 left: none without checkpointing
        ([V100] * 4, "pythia69", ("FSDPTrainer", "pythia69", "float32", 2), "activation_checkpointing=true"),
        # the smallest GPU and the oldest decide
        ([H100, V100], "gpt2-xl", ("FSDPTrainer", "gpt2-xl", "float32", 2), "batch_size=64"),
        # 76.5 GB usable; 114.7 / 8 of state leave 62.2 GB, 6 pairs of 9.0 GB
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
    assert ("model.fsdp_policy_mp=bfloat16" in overrides) == (advice.dtype == "bfloat16")
    assert "float16" not in {override.split("=")[1] for override in overrides}
    assert advice.model == model or "fit" in advice.reasons[0] or advice.model == "demo"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    assert train.find_config_problems(compose(*overrides)) == []


@pytest.mark.parametrize(
    ("products", "said"),
    [
        (
            Products(184e9, 767e9),
            "is faster for a larger model: matrix products run at 767 GFLOP/s in bfloat16",
        ),
        (Products(283e9, 141e9), "bfloat16 is not faster on this CPU: matrix products run at 141 GFLOP/s in bfloat16"),
        (Products(200e9, 239e9), "not faster on this CPU"),
        (Products(200e9, 240e9), "is faster"),
    ],
)
def test_bfloat16_is_recommended_on_a_cpu_where_it_was_measured_to_be_faster(products, said):
    text = " ".join(recommend([], memory=16e9, products=products).reasons)
    assert said in text
    assert f"{products.float32 / 1e9:.0f} in float32" in text
    for unknown in (recommend([], memory=16e9), recommend([H100], memory=16e9, products=products)):
        assert "autocast" not in " ".join([*unknown.reasons, unknown.command])


@pytest.mark.parametrize(
    ("gpus", "lora", "qlora"),
    [
        # half of 22.9 GB; a base of 2 bytes per parameter, or of 0.52 where it is quantized, and 0.2 for the adapter
        (
            [RTX4090],
            "lora=lora model.policy_dtype=bfloat16 takes 2.2, so up to about 5.2",
            "takes 0.9, so up to about 13",
        ),
        # shards of the base, but all of a 4-bit one, on each of 8
        (
            [H100] * 8,
            "takes 2.2, so up to about 140",
            "lora=qlora model.policy_dtype=bfloat16 takes 0.9, so up to about 42",
        ),
        ([T4], "lora=lora takes 4.2, so up to about 0.86", "lora=qlora takes 1.2, so up to about 3.1"),
        ([], "lora=lora takes 4.2, so up to about 1.7", "lora=qlora takes 1.2, so up to about 6.1"),
    ],
)
def test_how_large_the_base_of_an_adapter_may_be_is_said(gpus, lora, qlora, monkeypatch):
    for installed in (True, False):
        monkeypatch.setattr("scripts.advice.find_spec", lambda name, found=installed: found or None)
        text = " ".join(recommend(gpus, memory=16e9).reasons)
        assert lora in text
        assert qlora in text
        assert ("pip install bitsandbytes" in text) != installed


GPT2, NEOX = transformers.GPT2Config, transformers.GPTNeoXConfig
QWEN3 = partial(transformers.Qwen3Config, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
CONFIGS = {
    "gpt2-large": GPT2(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2(n_embd=1600, n_layer=48, n_head=25),
    "pythia28": NEOX(hidden_size=2560, num_attention_heads=32, num_hidden_layers=32, intermediate_size=4 * 2560),
    "gptj": transformers.GPTJConfig(),
    "llama7b": transformers.LlamaConfig(),
    "pythia69": NEOX(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, intermediate_size=4 * 4096),
    "qwen3-4b-base": QWEN3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, tie_word_embeddings=True),
    "llama3.1-8b": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8
    ),
    "qwen3-8b-base": QWEN3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36),
}


def saved_bytes(config: transformers.PreTrainedConfig, dtype: torch.dtype, *, checkpointing: bool) -> tuple[int, int]:
    """(parameters, bytes that the forward of a pair of 2 x 512 tokens saves for backward), without any memory."""
    saved = {}
    with FakeTensorMode() as fake:
        attention = choose_attention(config, "sdpa")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        ids, mask = torch.zeros(2, 512, dtype=torch.long), torch.zeros(2, 1, 512, 512, dtype=dtype)
    disable_dropout(model.train())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = (storage.nbytes(), tensor)  # kept, or its address would be used again
        return tensor

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with fake, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _get_batch_logps(model(ids, attention_mask=mask, use_cache=False).logits.float(), ids)
    n_bytes = sum(size for key, (size, _) in saved.items() if key not in weights)
    return sum(p.numel() for p in model.parameters()), n_bytes


CORNERS = ("gpt2-large", "pythia28", "llama7b", "qwen3-4b-base")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in CORNERS else pytest.mark.slow) for n in MODELS])
def test_table_of_models_is_what_transformers_builds(name, monkeypatch):
    # as on a GPU: an earlier test may have put `dpo/models/cpu_attention.py` in its place
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    row, config = MODELS[name], CONFIGS[name]
    parameters, in_bf16 = saved_bytes(config, torch.bfloat16, checkpointing=False)
    _, in_fp32 = saved_bytes(config, torch.float32, checkpointing=False)
    _, boundaries = saved_bytes(config, torch.bfloat16, checkpointing=True)

    assert row == pytest.approx((parameters, in_bf16, in_fp32), rel=0.02)
    # what checkpointing keeps, and one layer computed again
    assert boundaries + in_bf16 / config.num_hidden_layers < CHECKPOINTED * in_bf16


def test_too_little_host_memory_for_reading_the_weights_is_said():
    reasons = [" ".join(recommend([H100] * 8, memory=memory, model="llama7b").reasons) for memory in (20e9, 50e9)]
    too_little = "31.0 GB of host memory to load the weights; this host has 20.0 GB"
    assert [too_little in text for text in reasons] == [True, False]
