"""Checkpoints with a vision part: text is trained, and exports hold all of it."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import GROUPED, assert_near
from support.pytests import refused, slow
from support.runs import read_metrics, run_card, run_here

from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_structure
from dpo.models.published import check_names

VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14}
SIGLIP = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
LINEAR = {f"linear_{name}": n for name, n in (("num_value_heads", 4), ("num_key_heads", 2))}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MLLAMA_VISION = {**SIGLIP, "attention_heads": 2, "num_global_layers": 1, "vision_output_dim": 32, "max_num_tiles": 1}
MLLAMA_VISION |= {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]}


TRAINED = ("export=true", "lr=1e-2", "n_examples=4", "warmup_steps=0", "do_first_eval=false")


def text(**more) -> dict:
    return {**GROUPED, "vocab_size": 1024, "head_dim": 8, "pad_token_id": None, **more}


CONFIGS = {
    "qwen3.5": lambda: transformers.Qwen3_5Config(text_config=text(**LINEAR), vision_config=QWEN_VISION),
    "qwen3.5, experts": lambda: transformers.Qwen3_5MoeConfig(
        text_config=text(**LINEAR, **MIXTURE, shared_expert_intermediate_size=16), vision_config=QWEN_VISION
    ),
    "mllama": lambda: transformers.MllamaConfig(
        text_config=text(num_hidden_layers=3, cross_attention_layers=[1], **dict.fromkeys(IDS, 0)),
        vision_config=MLLAMA_VISION,
    ),
}
REFUSED = {
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**text()), vision_config=transformers.PixtralVisionConfig(**SIGLIP)
    ),
    "t5": lambda: transformers.T5Config(vocab_size=1024, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8),
}


@pytest.fixture
def save(tokenizer, tmp_path):
    """Save a random checkpoint by its name here; returns its path."""

    def save(name: str) -> str:
        torch.manual_seed(0)
        auto_class = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForImageTextToText
        auto_class.from_config((CONFIGS | REFUSED)[name]()).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "processor_config.json").write_text("{}")
        return str(tmp_path / "model")

    return save


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


@pytest.mark.parametrize("name", ["qwen3.5", slow("qwen3.5, experts"), slow("mllama")])
def test_an_export_holds_the_whole_checkpoint_under_its_names(name, save, command, run_dir, printed):
    model = save(name)
    settings = (*TRAINED, f"model.name_or_path={model}")
    run_here(command("run", *settings))
    run_here(command("run", *settings, "resume=auto", "n_examples=8"))
    exported = run_dir / "LATEST" / "hf"
    before, after = load_file(f"{model}/model.safetensors"), load_file(exported / "model.safetensors")
    assert {key: tensor.shape for key, tensor in after.items()} == {key: t.shape for key, t in before.items()}
    changed = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    assert changed
    assert not any("vision" in key or "visual" in key for key in changed)
    whole, loading = transformers.AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(loading.values())
    assert whole.dtype == torch.float32
    text = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert_near(logits_of(whole), logits_of(text))
    is_part = type(text) is not type(whole)
    assert ("only the text part of" in printed()) == is_part
    assert (exported / "processor_config.json").read_text() == "{}"
    run_here(command("next", *TRAINED, f"model.name_or_path={exported}", "export=false"))


@pytest.mark.parametrize("name", ["qwen3.5", slow("mllama")])
def test_an_adapter_has_the_names_of_the_checkpoints_class(name, save, command, run_dir, tmp_path):
    model = save(name)
    settings = (*TRAINED, f"model.name_or_path={model}", "lora=lora")
    run_here(command("run", *settings))
    adapter = run_dir / "LATEST" / "hf"
    whole = transformers.AutoModelForImageTextToText.from_pretrained(model)
    before = logits_of(whole)
    adapted = logits_of(peft.PeftModel.from_pretrained(whole, adapter))
    assert (adapted - before).abs().max() > 1e-3
    assert_near(logits_of(run_card(adapter)["model"]), adapted)
    reference = ("lora.reference=adapter", f"model.archive={run_dir}", "do_first_eval=true", "export=false")
    run_here(command("next", *settings, *reference))
    assert read_metrics(tmp_path / "next", "eval")[0]["rewards_eval/margins"] == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_language_model_is_refused_before_the_data_is_read(name, save, command):
    with refused(f"(?i)^model '.*' is a {name}ForConditionalGeneration, which .* does not load: use a model for"):
        run_here(command("run", f"model.name_or_path={save(name)}", "dataset_sources.hh=/nowhere"))


def test_a_text_part_that_cannot_be_told_from_other_parts_is_refused(save):
    model = save("qwen3.5")
    file = f"{model}/model.safetensors"
    tensors = load_file(file)
    twins = {key.replace("language_model", "second_model"): tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors | twins, file, metadata={"format": "pt"})
    with refused("cannot be told from the others"):
        check_names(load_structure(ModelPath(model), dtype=torch.float32), ModelPath(model))
