"""Small configs of every causal family that transformers has."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads", "mamba_num_heads")
HEADS += ("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads", "time_step_rank")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
WIDTHS += ("word_embed_proj_dim", "decoder_ffn_dim", "encoder_ffn_dim", "embedding_size", "lru_width", "d_inner")
OF_HEADS = ("head_dim", "attention_head_dim", "d_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
OF_HEADS += (
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_d_state",
    "state_size",
    "hidden_size_per_layer_input",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "mamba_d_conv", "rotary_dim")
SIXTEEN = ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "mamba_d_head")
SIXTEEN += ("mamba_head_dim", "attention_window_size")
TWO = ("num_key_value_heads", "num_experts_per_tok", "moe_k", "linear_num_key_heads", "expand", "mamba_expand")
ONE = ("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups")
ONE += ("bos_token_id", "eos_token_id", "pad_token_id")
SIZES = dict.fromkeys(LAYERS + TWO, 2) | dict.fromkeys(HEADS + EXPERTS, 4) | dict.fromkeys(WIDTHS, 32)
SIZES |= dict.fromkeys(OF_HEADS, 8) | dict.fromkeys(SIXTEEN, 16)
SIZES |= dict.fromkeys(ONE, 1) | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64)
SIZES |= {"hidden_size_per_layer_input": 8, "vocab_size": 101, "vocab_size_per_layer_input": 101, "sliding_window": 8}
LARGEST = 10**6  # weights


def shrink(config_class: type) -> Any:
    """A config whose model is small and runs; None if these sizes do not make one."""
    try:
        published = config_class().to_dict()
        names = published.keys() | config_class.attribute_map.keys()
        sizes = {name: size for name, size in SIZES.items() if name in names}
        if "qk_rope_head_dim" in sizes:  # these compute the other
            sizes.pop("head_dim", None)
        for name in ("layer_types", "mlp_layer_types"):
            if published.get(name):
                sizes[name] = [*dict.fromkeys(published[name]), *published[name][:1]][:2]
        config = config_class(**sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if sum(weight.numel() for weight in model.parameters()) > LARGEST:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model(input_ids=torch.arange(20).view(2, 10), use_cache=False)
    except Exception:  # whatever a config or model of one of 180 families refuses
        return None
    return config
