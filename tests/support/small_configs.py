"""Small configs of the causal families that transformers has."""

from typing import Any

import torch
import transformers

NAMES = {  # of keys in families' configs, by the number that makes a small model
    1: "bos_token_id eos_token_id pad_token_id n_group topk_group first_k_dense_replace n_groups",
    2: "num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_experts_per_tok moe_k",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts rotary_dim",
    8: "head_dim linear_key_head_dim linear_value_head_dim sliding_window",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank",
    32: "hidden_size d_model n_embd dim intermediate_size ffn_dim n_inner ffn_hidden_size word_embed_proj_dim d_inner",
    64: "max_position_embeddings n_positions n_ctx",
    101: "vocab_size vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}


def shrink(config_class: type) -> Any:
    """A config whose model is small and runs; None if these sizes do not make one."""
    try:
        published = config_class().to_dict()
        sizes = {name: SIZES[name] for name in SIZES.keys() & {*published, *config_class.attribute_map}}
        for name in ("layer_types", "mlp_layer_types"):
            if published.get(name):
                sizes[name] = [*dict.fromkeys(published[name]), published[name][0]][:2]
        config = config_class(**sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if sum(weight.numel() for weight in model.parameters()) > 10**6:
            return None
        transformers.AutoModelForCausalLM.from_config(config)(torch.arange(20).view(2, 10), use_cache=False)
    except Exception:  # whatever a config or a model of one of 180 families refuses
        return None
    return config
