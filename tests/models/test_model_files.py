"""The models of config/model name the blocks of their class."""

from functools import cache

import pytest
import yaml
from support.models import build
from support.pytests import refused
from support.runs import ROOT

from dpo.parallel.sharding import find_blocks

FILES = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((ROOT / "config" / "model").glob("*.yaml"))}
TO_BUILD_ON = ("blank_model", "blank_model_bfloat16")
MODELS = {name: content for name, content in FILES.items() if name not in (*TO_BUILD_ON, "demo")}
FAMILY_OF = {  # by how ids on the Hub begin: what `model_type` in the config.json there says
    "gpt2": "gpt2, tied",
    "EleutherAI/gpt-j": "gpt-j",
    "EleutherAI/pythia": "gpt-neox",
    "huggyllama/": "llama",
    "meta-llama/": "llama",
    "HuggingFaceTB/SmolLM2": "llama, tied",
    "mistralai/Mistral-7B": "mistral",
    "Qwen/Qwen2.5": "qwen2, tied, with biases",
    "Qwen/Qwen3": "qwen3, norms per head",
    "google/gemma-2": "gemma2",
    "google/gemma-3": "gemma3, norms per head",
    "microsoft/": "phi3, fused projections",  # Phi 4 too
    "allenai/OLMo-2": "olmo2, norms over all heads",
}
MADE_IN_BFLOAT16 = {family for family in FAMILY_OF.values() if not family.startswith("gp")}


def family_of(name: str) -> str:
    [family] = {family for start, family in FAMILY_OF.items() if MODELS[name]["name_or_path"].startswith(start)}
    return family


structure_of = cache(lambda family: build(family, on_meta=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_names_the_class_of_the_models_blocks(name):
    family, content = family_of(name), MODELS[name]
    model = structure_of(family)
    assert content["block_name"] in model._no_split_modules
    assert len(find_blocks(model, content["block_name"])) == model.config.num_hidden_layers
    assert content.keys() == {"defaults", "name_or_path", "block_name"}
    in_bfloat16 = family in MADE_IN_BFLOAT16 and name != "llama7b"  # of the reference, as it was
    assert content["defaults"] == [TO_BUILD_ON[in_bfloat16], "_self_"]


def test_without_a_name_blocks_are_those_declared_classes_that_the_model_has(monkeypatch):
    model = build("llama", on_meta=True)
    monkeypatch.setattr(model, "_no_split_modules", {"LlamaDecoderLayer", "VisionBlock"})  # as Qwen 3.5's text model
    assert find_blocks(model, None) == [*model.model.layers]
    monkeypatch.setattr(model, "_no_split_modules", {"VisionBlock"})
    with refused("block_name=null names no transformer blocks of LlamaForCausalLM"):
        find_blocks(model, None)
