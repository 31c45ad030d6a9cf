"""An export is the base's own directory with other weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, GROUPED, IDS, assert_near, build, publish
from support.runs import change_json, read_json, run_card
from support.small_configs import shrink

from dpo.models.export import export
from dpo.settings.plan import resolve

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


def export_state(state: dict, base: Path, out: str = "out", **options) -> Path:
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


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    if isinstance(model, Path):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, loading = load(model, attn_implementation="eager", output_loading_info=True)
        assert not loading["missing_keys"]
    return model.eval()(input_ids=IDS, use_cache=False).logits


def compare_with_base(config, folder: Path) -> None:
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
        expected = read_json(published / "config.json")
        expected["dtype"] = "bfloat16" if published == half else "float32"  # transformers takes a single weight's
        assert expected.items() <= written.items()
        assert written["torch_dtype"] == written["dtype"]
    # The weights are the same; memory that is aligned in another way may round otherwise.
    torch.testing.assert_close(logits_of(out), logits_of(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FIVE)
def test_an_export_has_the_names_shapes_dtypes_and_config_of_its_base(family, tmp_path):
    compare_with_base(FIVE[family](), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_family_has_the_names_shapes_dtypes_and_config_of_its_base(tmp_path):
    compared = []
    for config_class in {*transformers.MODEL_FOR_CAUSAL_LM_MAPPING}:  # where some are twice
        config = shrink(config_class)
        is_theirs = config_class.__module__.startswith("transformers.")  # not a class that another test has registered
        if is_theirs and config is not None and not config.is_encoder_decoder:
            compare_with_base(config, tmp_path / config_class.__name__)
            compared.append(config_class.__name__)
    assert len(compared) > 50


# --- config, tokenizer and further files -----------------------------------------------------------------------------


def test_a_config_has_the_spellings_of_transformers_4_and_5(tmp_path):
    model = build(FIVE["llama, rope scaled"])
    base = publish(tmp_path / "base", model)
    current = read_json(base / "config.json")
    scaling = {key: value for key, value in ROPE.items() if key != "rope_theta"}
    older = {key: value for key, value in current.items() if key not in ("rope_parameters", "dtype")}
    older |= {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16", "of_somebody": [1]}
    for name, published in (("new", current), ("old", older)):
        (base / "config.json").write_text(json.dumps(published))
        out = export_state(model.state_dict(), base, name)
        written = read_json(out / "config.json")
        assert (written["rope_theta"], written["rope_scaling"], written["rope_parameters"]) == (500000.0, scaling, ROPE)
        assert torch.equal(logits_of(out), logits_of(model))
    assert written["of_somebody"] == [1]


def test_a_base_keeps_what_the_model_does_not_use(tmp_path, printed):
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
    tensors = read_tensors(out)
    assert torch.equal(tensors["mtp.norm.weight"], further["mtp.norm.weight"])
    assert torch.equal(tensors["lm_head.weight"], build("llama").lm_head.weight.bfloat16())
    assert read_json(out / "generation_config.json") == settings | {"eos_token_id": [0, 5], "pad_token_id": 0}
    for name in (*names, "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert "--dtype" not in printed()


def test_of_a_tokenizer_only_template_and_pad_token_change(tmp_path):
    model = build(lambda: transformers.LlamaConfig(**WITH_1024))
    base = publish(tmp_path / "base", model)
    change_json(base / "tokenizer_config.json", pad_token="<|end|>", chat_template="old")
    (base / "special_tokens_map.json").write_text('{"pad_token": "<|end|>", "sep_token": "x"}')
    tokens = read_json(base / "tokenizer.json")["added_tokens"]
    further = {**tokens[0], "id": 1024, "content": "<|end|>"}  # without an embedding, as some published pad tokens
    change_json(base / "tokenizer.json", added_tokens=[*tokens, further])
    (tmp_path / "new.jinja").write_text("{{ messages[0].content }}")

    out = export_state(model.state_dict(), base, template=tmp_path / "new.jinja")

    before, after = (read_json(folder / "tokenizer_config.json") for folder in (base, out))
    assert before.pop("chat_template") == "old"
    assert after == before | {"pad_token": "<|endoftext|>"}
    assert read_json(out / "special_tokens_map.json") == {"pad_token": "<|endoftext|>", "sep_token": "x"}
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_a_reward_models_new_pad_token_is_the_only_new_token(tmp_path):
    base = publish(tmp_path / "base", build(lambda: transformers.LlamaConfig(**WITH_1024)))
    tokens = read_json(base / "tokenizer.json")["added_tokens"]
    change_json(base / "tokenizer.json", added_tokens=[*tokens, {**tokens[0], "id": 2, "content": '"'}])
    change_json(base / "tokenizer_config.json", added_tokens_decoder={"0": tokens[0]}, chat_template=CHAT)
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    published = transformers.AutoTokenizer.from_pretrained(base).get_vocab()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    keys = {"model": {"name_or_path": str(base)}, "loss": {"name": "bradley_terry"}, "datasets": ["mine"]}
    (tmp_path / "config.yaml").write_text(json.dumps(keys))
    (tmp_path / "preflight.json").write_text('{"train": {"prompt_formats": {"mine": "chat"}}}')

    out = export_state(model.state_dict(), base, model=None, dtype="float16")

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == published | {tokenizer.pad_token: 1024}
    written, expected = read_json(out / "config.json"), read_json(base / "config.json")
    changed = {key: written[key] for key in expected if written[key] != expected[key]}
    assert changed.pop("architectures") == ["LlamaForSequenceClassification"]
    assert changed == {"vocab_size": 1025, "pad_token_id": 1024, "dtype": "float16"}
    shown = run_card(out)
    assert shown["text"] == '<user>Hello"\n<assistant>Hi!"'  # without the line break, which is not scored
    assert shown["reward"] == pytest.approx(
        model(tokenizer(shown["text"], return_tensors="pt").input_ids).logits.item(), rel=0.01
    )


@pytest.mark.parametrize("place", ["shards", "an old file beside shards", "bin", "hub"])
def test_bases_are_read_where_transformers_reads_them(place, tmp_path, monkeypatch, printed):
    base = publish(tmp_path / "base", build("gpt-neox"))
    named = str(base)
    tensors = read_tensors(base) | {"mtp.norm.weight": torch.ones(4)}
    change_file(base, tensors)
    if place == "bin":
        (base / "model.safetensors").unlink()
        torch.save(tensors, base / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif "shards" in place:
        if place == "shards":
            (base / "model.safetensors").rename(base / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        monkeypatch.chdir(tmp_path)
        repository = Path(resolve({}).run.cache_dir, "models--some--base")
        for folder in ("refs", "snapshots"):
            (repository / folder).mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        shutil.copytree(base, repository / "snapshots" / ("0" * 40))
        named = "some/base"
    monkeypatch.setattr("dpo.models.export.SHARD_BYTES", 10_000)
    out = export_state(build("gpt-neox").state_dict(), base, model=named)
    assert read_tensors(out).keys() == tensors.keys()
    shards = read_json(out / "model.safetensors.index.json")["weight_map"]
    assert len({*shards.values()}) > 2
    size = sum(file.stat().st_size for file in out.glob("*.safetensors")) / 1e9
    halved = "in half of that: dpo export RUN DIR --dtype bfloat16"
    assert printed() == f"exported {out} ({size:.3g} GB); {halved}\n"


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


# --- an older transformers -------------------------------------------------------------------------------------------

OLD = "4.57.6"
READER = """
import sys, torch, transformers

assert transformers.__version__ == sys.argv[1]
for folder in sys.argv[2:]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, loading = load(folder, attn_implementation="eager", output_loading_info=True)
    assert not loading["missing_keys"], loading
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("Where is the umbrella?")["input_ids"]
    with torch.no_grad():
        torch.save((model.eval()(torch.arange(20).view(2, 10), use_cache=False).logits, tokens), f"{folder}/read.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_4_reads_the_same_model_and_tokens(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), f"transformers=={OLD}"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (site / "transformers").exists():
        pytest.skip(f"transformers {OLD} cannot be installed: {installed.stderr[-300:]}")
    exports = []
    mixtral = transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    for family in (
        *FIVE.values(),
        FAMILIES["gemma3, norms per head"],
        FAMILIES["phi3, fused projections"],
        lambda: mixtral,
    ):
        model = build(family)
        folder = tmp_path / f"{len(exports)}"
        exports.append(export_state(model.state_dict(), publish(folder / "base", model)))
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", READER, OLD, *map(str, exports)], env=environment, check=True)
    for out in exports:
        logits, tokens = torch.load(out / "read.pt")
        assert_near(logits, logits_of(out))
        assert tokens == transformers.AutoTokenizer.from_pretrained(out)("Where is the umbrella?")["input_ids"]
