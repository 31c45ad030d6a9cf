"""An export is the base's own directory with other weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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
from dpo.models.pretrained import Source, load_structure
from dpo.models.text_part import check_names
from dpo.settings.plan import resolve

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
# keys of a config that transformers 4 and 5 call differently, which an export has by both names
SPELLINGS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "dtype", "torch_dtype"}
SPELLINGS |= {"rotary_emb_base", "rotary_pct", "rope_local_base_freq"}
OLD = "transformers==4.57.6"


def publish(folder: Path, model: Any, tokenizer: Path = GOLDEN / "tiny-llama") -> Path:
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return folder


def archive(path: Path, state: dict) -> Path:
    torch.save({"step_idx": 64, "state": state, "metrics": None}, path)
    return path


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def describe(folder: Path) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in read_tensors(folder).items()}


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(read_json(file) | changes))


@torch.no_grad()
def logits_of(folder: Path | Any) -> torch.Tensor:
    model = folder
    if isinstance(folder, Path):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        assert not loading["missing_keys"]
    return model.eval()(input_ids=IDS, use_cache=False).logits


def compare_with_base(config: Any, folder: Path) -> None:
    """An export in float32, and one in bfloat16 of a base in bfloat16, have what the base has."""
    model = build(lambda: config).eval()
    base = publish(folder / "base", model)
    half = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    publish(folder / "half", half)
    trained = {
        name: tensor + 0.01 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(trained)
    policy = archive(folder / "policy.pt", model.state_dict())
    out = export(policy, folder / "out", model=str(base))
    rounded = export(policy, folder / "rounded", model=str(folder / "half"), dtype="bfloat16")

    assert describe(out) == describe(base)
    assert describe(rounded) == describe(folder / "half")
    for exported, published in ((out, base), (rounded, folder / "half")):
        written, expected = read_json(exported / "config.json"), read_json(published / "config.json")
        assert written.pop("torch_dtype") == written["dtype"]
        assert expected.items() <= written.items()
        assert written.keys() - expected.keys() <= SPELLINGS
    assert torch.equal(logits_of(out), logits_of(model))


@pytest.mark.parametrize("family", FIVE)
def test_an_export_has_the_names_shapes_dtypes_and_config_of_its_base(family, tmp_path):
    compare_with_base(FIVE[family](), tmp_path)


@pytest.mark.slow
def test_every_family_has_the_names_shapes_dtypes_and_config_of_its_base(tmp_path):
    compared = []
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        config = shrink(config_class)
        if config is None or config.is_encoder_decoder:
            continue
        compare_with_base(config, tmp_path / config_class.__name__)
        shutil.rmtree(tmp_path / config_class.__name__)
        compared.append(config_class.__name__)
    assert len(compared) > 50


# --- config, tokenizer and further files -----------------------------------------------------------------------------


def test_a_config_has_the_spellings_of_transformers_4_and_5(tmp_path):
    base = publish(tmp_path / "base", build(FIVE["llama, rope scaled"]))
    current = read_json(base / "config.json")
    policy = archive(tmp_path / "policy.pt", build(FIVE["llama, rope scaled"]).state_dict())
    theta = ROPE["rope_theta"]
    scaling = {key: value for key, value in ROPE.items() if key != "rope_theta"}
    older = {key: value for key, value in current.items() if key not in ("rope_parameters", "dtype")}
    older |= {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "bfloat16", "of_somebody": [1]}
    for name, published in (("new", current), ("old", older)):
        (base / "config.json").write_text(json.dumps(published))
        out = export(policy, tmp_path / name, model=str(base))
        written = read_json(out / "config.json")
        assert (written["rope_theta"], written["rope_scaling"], written["rope_parameters"]) == (theta, scaling, ROPE)
        assert (written["torch_dtype"], written["dtype"]) == ("float32", "float32")
        assert torch.equal(logits_of(out), logits_of(build(FIVE["llama, rope scaled"])))
    assert written["of_somebody"] == [1]


def test_a_base_keeps_what_the_model_does_not_use(tmp_path):
    """Layers that predict several tokens, settings of generation, and the tokenizer's files."""
    base = publish(tmp_path / "base", build("llama").bfloat16())
    file = base / "model.safetensors"
    further = {"model.layers.2.eh_proj.weight": torch.ones(4, 8).bfloat16(), "mtp.norm.weight": torch.ones(4)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    texts = {"special_tokens_map.json": "{ }", "vocab.json": "{}", "merges.txt": "#", "tokenizer.model": "x"}
    texts |= {"chat_template.jinja": "{{ messages }}", "added_tokens.json": "{}", "processor_config.json": "{}"}
    for name, text in texts.items():
        (base / name).write_text(text)
    settings = {
        "repetition_penalty": 1.05,
        "min_p": 0.1,
        "suppress_tokens": [3],
        "max_new_tokens": 7,
        "temperature": 0.6,
    }
    (base / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [5]}))
    policy = archive(tmp_path / "policy.pt", build("llama").state_dict())

    out = export(policy, tmp_path / "out", model=str(base), dtype="bfloat16")

    assert describe(out) == describe(base)
    assert torch.equal(read_tensors(out)["mtp.norm.weight"], further["mtp.norm.weight"])
    written = read_json(out / "generation_config.json")
    assert settings.items() <= written.items()
    assert written["eos_token_id"] == [0, 5]
    for name in (*texts, "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name


def test_of_a_tokenizer_only_template_and_pad_token_change(tmp_path):
    """The names of the class and of other tokens stay, and nothing of this machine is written."""
    base = publish(tmp_path / "base", build(lambda: transformers.LlamaConfig(**GROUPED | {"vocab_size": 1024})))
    change_json(base / "tokenizer_config.json", pad_token="<|end|>", chat_template="old", of_somebody=[1])
    (base / "special_tokens_map.json").write_text('{"pad_token": "<|end|>", "sep_token": "x"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    fast = read_json(base / "tokenizer.json")
    fast["added_tokens"].append({**fast["added_tokens"][0], "id": 1024, "content": "<|end|>"})
    (base / "tokenizer.json").write_text(json.dumps(fast))  # a pad token without an embedding, as some published ones
    (tmp_path / "new.jinja").write_text("{{ messages[0].content }}")
    policy = archive(tmp_path / "policy.pt", build(lambda: transformers.AutoConfig.from_pretrained(base)).state_dict())

    out = export(policy, tmp_path / "out", model=str(base), template=tmp_path / "new.jinja")

    before, after = (read_json(folder / "tokenizer_config.json") for folder in (base, out))
    assert before.pop("chat_template") == "old"
    assert after == before | {"pad_token": "<|endoftext|>"}
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert read_json(out / "special_tokens_map.json") == {"pad_token": "<|endoftext|>", "sep_token": "x"}
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    exported = transformers.AutoTokenizer.from_pretrained(out)
    assert exported.chat_template == "{{ messages[0].content }}"
    assert exported("Where is it?")["input_ids"] == tokenizer("Where is it?")["input_ids"]


def test_a_reward_models_new_pad_token_is_the_only_new_token(tmp_path):
    config = transformers.LlamaConfig(**GROUPED | {"vocab_size": 1024, "pad_token_id": None}, num_labels=1)
    base = publish(tmp_path / "base", build(lambda: config))
    change_json(base / "tokenizer_config.json", added_tokens_decoder={})
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    policy = archive(tmp_path / "policy.pt", model.state_dict())
    (tmp_path / "config.yaml").write_text(f"model: {{name_or_path: {base}}}\nloss: {{name: bradley_terry}}\n")

    out = export(policy, tmp_path / "out", dtype="float16")

    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (base, out))
    assert after.get_vocab() == before.get_vocab() | {"<|pad|>": 1024}
    assert after.pad_token_id == 1024
    written, expected = read_json(out / "config.json"), read_json(base / "config.json")
    assert written["vocab_size"] == 1025
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert written["id2label"] == {"0": "LABEL_0"}
    assert {key for key in expected if written[key] != expected[key]} == {
        "architectures", "vocab_size", "pad_token_id", "dtype",
    }  # fmt: skip
    tensors = read_tensors(out)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert torch.equal(tensors["model.embed_tokens.weight"][:1024], model.model.embed_tokens.weight.half())
    assert tensors.keys() == model.state_dict().keys()


def test_the_size_is_said_and_how_to_halve_it(tmp_path):
    base = publish(tmp_path / "base", build("llama"))
    policy = archive(tmp_path / "policy.pt", build("llama").state_dict())
    whole = export(policy, tmp_path / "whole", model=str(base))
    half = export(policy, tmp_path / "half", model=str(base), dtype="bfloat16")
    size = (whole / "model.safetensors").stat().st_size / 1e9
    assert (
        describe_export(whole)
        == f"exported {whole} ({size:.3g} GB); in half of that: dpo export RUN DIR --dtype bfloat16"
    )
    assert "--dtype" not in describe_export(half)


@pytest.mark.parametrize("place", ["shards", "bin", "hub"])
def test_bases_are_read_where_transformers_reads_them(place, tmp_path, monkeypatch):
    base = publish(tmp_path / "base", build("gpt-neox"))
    named, file = str(base), base / "model.safetensors"
    tensors = load_file(file) | {"mtp.norm.weight": torch.ones(4)}
    assert "embed_out.weight" in tensors
    file.unlink()
    if place == "bin":
        torch.save(tensors, base / "pytorch_model.bin")
    elif place == "shards":
        parts = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for part in set(parts.values()):
            save_file({name: tensors[name] for name in tensors if parts[name] == part}, base / part, {"format": "pt"})
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    else:
        save_file(tensors, file, metadata={"format": "pt"})
        monkeypatch.chdir(tmp_path)
        repository = Path(resolve({}).run.cache_dir, "models--some--base")
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (repository / "snapshots").mkdir()
        shutil.move(base, repository / "snapshots" / ("0" * 40))
        named = "some/base"
    policy = archive(tmp_path / "policy.pt", build("gpt-neox").state_dict())
    assert read_tensors(export(policy, tmp_path / "out", model=named)).keys() == tensors.keys()


def test_an_old_file_beside_newer_shards_is_what_is_read(tmp_path):
    """As transformers does."""
    base = publish(tmp_path / "base", build("llama"))
    newer = {f"newer.{name}": tensor for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(newer, base / "model-1.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(newer, "model-1.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    check_names(load_structure(Source(str(base)), dtype=torch.float32), str(base), None)
    out = export(archive(tmp_path / "policy.pt", build("llama").state_dict()), tmp_path / "out", model=str(base))
    assert read_tensors(out).keys() == build("llama").state_dict().keys()


# --- heads of their own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [True, False])
def test_a_head_that_the_config_ties_and_the_weights_do_not_is_kept(in_file, tmp_path):
    base = publish(tmp_path / "base", build("llama, tied"))
    untied = dict(load_file(base / "model.safetensors"))
    untied["lm_head.weight"] = untied["model.embed_tokens.weight"] + 0.1
    if in_file:
        save_file(untied, base / "model.safetensors", metadata={"format": "pt"})

    out = export(archive(tmp_path / "policy.pt", untied), tmp_path / "out", model=str(base))

    assert read_json(out / "config.json")["tie_word_embeddings"] is False
    assert read_tensors(out).keys() == untied.keys()
    model = build(lambda: transformers.LlamaConfig(**GROUPED))
    model.load_state_dict(untied)
    assert torch.equal(logits_of(out), logits_of(model))


def test_a_tied_head_that_the_files_have_is_there_again(tmp_path):
    base = publish(tmp_path / "base", build("llama, tied"))
    state = build("llama, tied").state_dict()  # with both names
    save_file({name: tensor.clone() for name, tensor in state.items()}, base / "model.safetensors", {"format": "pt"})
    out = export(archive(tmp_path / "policy.pt", state), tmp_path / "out", model=str(base))
    assert describe(out) == describe(base)
    assert read_json(out / "config.json")["tie_word_embeddings"] is True
    assert torch.equal(logits_of(out), logits_of(build("llama, tied")))


# --- readers with an older transformers ------------------------------------------------------------------------------

READER = """
import sys, torch, transformers

assert transformers.__version__ == "4.57.6"
for folder in sys.argv[1:]:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"], loading
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(20).view(2, 10), use_cache=False).logits
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.save((logits, tokenizer("Where is the red umbrella?")["input_ids"]), f"{folder}/read.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_4_reads_the_same_model_and_tokens(tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), OLD]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if not (site / "transformers").exists():
        pytest.skip(f"{OLD} cannot be installed: {installed.stderr[-300:]}")
    exports = []
    older = {"gemma3": FAMILIES["gemma3, norms per head"], "phi3": FAMILIES["phi3, fused projections"]}
    older["mixtral"] = lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    for name, config in (FIVE | older).items():
        model = build(config)
        base = publish(tmp_path / name / "base", model)
        policy = archive(tmp_path / name / "policy.pt", model.state_dict())
        exports.append(export(policy, tmp_path / name / "out", model=str(base)))
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", READER, *map(str, exports)], env=environment, check=True)
    for out in exports:
        logits, tokens = torch.load(out / "read.pt")
        torch.testing.assert_close(logits, logits_of(out), rtol=0, atol=1e-5)
        assert tokens == transformers.AutoTokenizer.from_pretrained(out)("Where is the red umbrella?")["input_ids"]
