"""An export is the base's own directory with other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, GROUPED, build
from support.runs import GOLDEN
from support.small_configs import shrink

from dpo.models.export import describe_export, export

IDS = torch.arange(20).view(2, 10)
ROPE = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FIVE = {
    "gpt-neox": FAMILIES["gpt-neox"],
    "gpt2": FAMILIES["gpt2, tied"],
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, num_experts=4, head_dim=8),
    "llama, rope scaled": lambda: transformers.LlamaConfig(**GROUPED, rope_parameters=ROPE),
    "glm4-moe, kept in float32": lambda: transformers.Glm4MoeConfig(
        **GROUPED, **EXPERTS, n_routed_experts=4, head_dim=8, first_k_dense_replace=1
    ),
}
CHAT = """{% for m in messages %}<{{ m.role }}>{{ m.content }}"
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WITH_1024 = GROUPED | {"vocab_size": 1024, "pad_token_id": None}  # embeddings, as many as the tokenizer has tokens


def publish(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny-llama" / file, folder)
    return folder


def export_state(state: dict, base: Path, out: str = "out", **options: Any) -> Path:
    """An export beside `base` of trained weights."""
    policy = base.parent / "policy.pt"
    torch.save({"step_idx": 64, "state": state, "metrics": None}, policy)
    return export(policy, base.parent / out, **{"model": str(base), **options})


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def describe(folder: Path) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in read_tensors(folder).items()}


def change_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(read_json(file) | changes))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    if isinstance(model, Path):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, loading = load(model, attn_implementation="eager", output_loading_info=True)
        assert not loading["missing_keys"]
    return model.eval()(input_ids=IDS, use_cache=False).logits


def compare_with_base(config: Any, folder: Path) -> None:
    """An export in float32, and one in bfloat16 of a base in bfloat16, have what the base has."""
    model = build(lambda: config)
    base = publish(folder / "base", model)
    half = publish(folder / "half", transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01
    out = export_state(model.state_dict(), base)
    rounded = export_state(model.state_dict(), half, "rounded", dtype="bfloat16")
    for exported, published in ((out, base), (rounded, half)):
        assert describe(exported) == describe(published)
        written = read_json(exported / "config.json")
        assert read_json(published / "config.json").items() <= written.items()
        assert written["torch_dtype"] == written["dtype"]
    assert torch.equal(logits_of(out), logits_of(model))


@pytest.mark.parametrize("family", FIVE)
def test_an_export_has_the_names_shapes_dtypes_and_config_of_its_base(family, tmp_path):
    compare_with_base(FIVE[family](), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_family_has_the_names_shapes_dtypes_and_config_of_its_base(tmp_path):
    compared = []
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        config = shrink(config_class)
        if config is not None and not config.is_encoder_decoder:
            compare_with_base(config, tmp_path / config_class.__name__)
            compared.append(config_class.__name__)
    assert len(compared) > 50


# --- config, tokenizer and further files -----------------------------------------------------------------------------


def test_a_base_keeps_what_the_model_does_not_use(tmp_path):
    """Layers that predict several tokens, settings of generation, and the tokenizer's files."""
    base = publish(tmp_path / "base", build("llama").bfloat16())
    further = {"model.layers.2.eh_proj.weight": torch.ones(4, 8).bfloat16(), "mtp.norm.weight": torch.ones(4)}
    change_file(base, read_tensors(base) | further)
    names = ("special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
    for name in names:
        (base / name).write_text("{ }")
    settings = {"repetition_penalty": 1.05, "min_p": 0.1, "suppress_tokens": [3], "max_new_tokens": 7}
    settings |= {"stop_strings": ["x"], "num_beams": 4}  # with which transformers would not write the file
    (base / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [5]}))

    out = export_state(build("llama").state_dict(), base, dtype="bfloat16")

    assert describe(out) == describe(base)
    assert torch.equal(read_tensors(out)["mtp.norm.weight"], further["mtp.norm.weight"])
    assert read_json(out / "generation_config.json") == settings | {"eos_token_id": [0, 5], "pad_token_id": 0}
    for name in (*names, "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert "--dtype" not in describe_export(out)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["in the file", "trained", "equal"])
def test_a_head_that_the_config_ties_and_the_weights_do_not_is_kept(head, tmp_path):
    model = build("llama, tied" if head == "equal" else "llama")
    base = publish(tmp_path / "base", model)
    if head == "trained":
        publish(base, build("llama, tied"))
    elif head == "equal":
        change_file(base, model.state_dict())  # it is there twice
    change_json(base / "config.json", tie_word_embeddings=True)

    out = export_state(model.state_dict(), base)

    assert read_json(out / "config.json")["tie_word_embeddings"] == (head == "equal")
    assert read_tensors(out).keys() == model.state_dict().keys()
    assert torch.equal(logits_of(out), logits_of(model))
