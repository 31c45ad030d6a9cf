"""Which models can be cut; that the numbers are those of one process is in test_sharding.py."""

import pytest
import transformers
from support.models import COMMON, FAMILIES, build
from support.pytests import refused

from dpo.models.adapters import POLICY, add_adapter
from dpo.parallel.tensor_parallel import check_tensor_parallel, find_plan


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (transformers.LlamaConfig(hidden_size=576, num_attention_heads=9), 2, "num_attention_heads=9: set"),
        (transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4, "num_key_value_heads=2: set"),
        (transformers.GPT2Config(n_head=20), 3, "num_attention_heads=20: set"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anything_loads(config, size, message):
    with refused(f"tensor_parallel_size={size} does not divide {message}"):
        check_tensor_parallel(config, size)
    check_tensor_parallel(config, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan_that_cuts_its_large_matrices(family):
    model = build(family)
    plan = find_plan(model)
    cut = {name for name, style in plan.items() if style.cut}
    matrices = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2}
    matrices.discard("transformer.wpe")  # of GPT-2's few positions
    assert matrices == cut & matrices


def test_a_family_without_a_plan_is_refused():
    with refused("plan of OPTForCausalLM is empty; use trainer=FSDPTrainer"):
        find_plan(build(lambda: transformers.OPTConfig(hidden_size=32, ffn_dim=44, num_attention_heads=4)))


def test_a_style_we_do_not_know_is_refused():
    model = build("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp": "moe_tp_experts"}
    with refused("uses moe_tp_experts, which is not supported"):
        find_plan(model)


def test_a_plan_that_forgets_a_parameter_which_sees_slices_is_refused():
    config = transformers.PhiConfig(**{**COMMON, "num_hidden_layers": 1}, qk_layernorm=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with refused(r"does not say how to shard model\.layers\.0\.self_attn\.q_layernorm"):
        find_plan(model)


def test_a_plan_that_forgets_an_adapted_layer_which_sees_slices_is_refused():
    model = build("llama")
    add_adapter(model, 3, 6, "auto", name=POLICY)
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if not name.endswith("k_proj")}
    with refused(r"does not say how to shard model\.layers\.0\.self_attn\.k_proj; use trainer"):
        find_plan(model)
