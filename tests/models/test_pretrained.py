"""Models are loaded without dropout and guesses; rows are scored alone."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import build, list_examples, move_weights
from support.pytests import refused
from support.runs import TINY, Bomb, change_json

from dpo.data.tokenizer import load_tokenizer
from dpo.models import pretrained
from dpo.models.adapters import add_adapter, count_parameters
from dpo.models.logprobs import padded_logps
from dpo.models.packing import pad
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_archive

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WITH_DROPOUT = {
    "gpt2": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32),  # its default: 0.1
    "opt": transformers.OPTConfig(
        **SMALL, ffn_dim=32, word_embed_proj_dim=16, dropout=0.2, attention_dropout=0.2, layerdrop=0.5
    ),
}


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_training_forwards_are_evaluation_forwards_bit_for_bit(family, tmp_path):
    torch.manual_seed(0)
    as_published = transformers.AutoModelForCausalLM.from_config(WITH_DROPOUT[family], attn_implementation="eager")
    as_published.save_pretrained(tmp_path)
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        random = (as_published.train()(ids).logits, as_published.eval()(ids).logits)
        model = pretrained.load_model(ModelPath(str(tmp_path)), dtype=torch.float32)
        ours = (model.train()(ids).logits, model.eval()(ids).logits)

    assert not torch.equal(*random)  # or there would be nothing to switch off
    assert torch.equal(*ours)
    assert torch.equal(ours[1], random[1])


def test_softmax_is_in_float32_for_a_bfloat16_model_and_stays_in_float64():
    rows = pad(list_examples(rows=4), 40)
    for dtype, expected, limit in ((torch.bfloat16, torch.float32, 1e-6), (torch.float64, torch.float64, 1e-13)):
        model = build("llama", dtype=dtype)
        logits = model(rows.input_ids).logits.to(expected).flatten(0, 1)[rows.scored]
        ours = padded_logps(model, rows, None).logps.transpose(0, 1).flatten()[rows.slots]
        assert ours.dtype == expected
        picked = logits.log_softmax(-1).gather(1, rows.targets[:, None]).squeeze(1)
        torch.testing.assert_close(ours, picked, rtol=limit, atol=0)


def load_float32(name: str):
    return pretrained.load_model(ModelPath(name), dtype=torch.float32)


def test_weights_that_are_missing_are_an_error_not_random_numbers(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with refused(rf"has no weights for {name}: were they saved with another class\?"):
        load_float32(str(tmp_path / "model"))


def write_code(file: Path) -> None:
    file.unlink()
    torch.save({"weight": Bomb(Path("ran"))}, file.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-1000])),  # an interrupted download
        ("model.safetensors", write_code),
        ("config.json", partial(change_json, num_attention_heads=0)),
        ("config.json", partial(change_json, rope_parameters={"rope_type": "unheard of"})),
        ("generation_config.json", lambda file: file.write_text("[]")),
        ("tokenizer_config.json", partial(change_json, chat_template=5)),
    ],
)
def test_damaged_or_foreign_files_of_a_model_are_one_sentence_and_no_code_is_run(name, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(shutil.copytree(TINY, "model"))
    damage(tmp_path / model / name)
    what = "tokenizer" if name.startswith("tokenizer") else "model"
    with refused(rf"^{what} 'model' cannot be loaded; [^\n]*$") as error:
        (load_tokenizer if what == "tokenizer" else load_float32)(model)
    assert error.value.__cause__ is not None
    assert not Path("ran").exists()


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "tokenizer")
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        change_json(file, eos_token=None)
    with refused("has no EOS token"):
        load_tokenizer(str(folder))


ONE_LAYER = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
GPT = {"vocab_size": 40, "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
POSITION_TABLES = {
    "GPT-2": lambda: transformers.GPT2Config(**GPT),
    "GPT-J": lambda: transformers.GPTJConfig(**GPT, rotary_dim=4),
    "OPT": lambda: transformers.OPTConfig(**ONE_LAYER, ffn_dim=8, max_position_embeddings=16),
}


@pytest.mark.parametrize("family", POSITION_TABLES)
def test_a_table_of_positions_limits_the_length(family):
    model = transformers.AutoModelForCausalLM.from_config(POSITION_TABLES[family]()).eval()
    pretrained.check_positions(model, 16)
    with refused(r"max_length=17 is too long for .*: set 16 or less"):
        pretrained.check_positions(model, 17)
    model(torch.full((1, 16), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 17), 5))


def test_rotary_positions_limit_the_length_only_if_they_change_with_it(tiny_llama):
    pretrained.check_positions(tiny_llama, 10 * tiny_llama.config.max_position_embeddings)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    lengths = {"max_position_embeddings": 16, "rope_parameters": rope}
    config = transformers.LlamaConfig(**ONE_LAYER, **lengths, intermediate_size=8, initializer_range=1.0)
    dynamic = transformers.LlamaForCausalLM(config).eval()
    pretrained.check_positions(dynamic, 16)
    with refused(r"set 16 or less, beyond which .* depend on other rows"):
        pretrained.check_positions(dynamic, 17)
    row = torch.arange(17)[None]
    assert not torch.allclose(dynamic(row).logits[:, :8], dynamic(row[:, :8]).logits, atol=1e-3)


# --- weights from an archive ---------------------------------------------------------------------------------------


def save_with_an_archive(family: str, folder: Path) -> str:
    """A model's directory with settings for sampling, and a `policy.pt`."""
    model = build(family)
    model.generation_config.top_p, model.generation_config.do_sample = 0.9, True
    model.save_pretrained(folder)
    move_weights(model, 0.1)
    torch.save({"step_idx": 8, "state": model.state_dict(), "metrics": None}, folder / "policy.pt")
    return str(folder)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}  # those that are not saved, too


@pytest.mark.parametrize(("family", "dtype"), [("llama, tied", torch.bfloat16), ("gpt-j", torch.float32)])
def test_with_an_archive_a_model_is_what_it_would_be_had_its_own_weights_been_overwritten(family, dtype, tmp_path):
    name, attention = save_with_an_archive(family, tmp_path), "eager" if family == "gpt-j" else "sdpa"
    overwritten = pretrained.load_model(ModelPath(name), dtype=dtype, attn_implementation=attention)
    load_archive(overwritten, name)
    (tmp_path / "model.safetensors").unlink()  # nobody needs it

    ours = pretrained.load_model(ModelPath(name, name), dtype=dtype, attn_implementation=attention)

    theirs = tensors_of(overwritten)
    assert tensors_of(ours).keys() == theirs.keys()  # tied weights have one name
    for key, tensor in tensors_of(ours).items():
        assert (tensor.dtype, tensor.stride()) == (theirs[key].dtype, theirs[key].stride())
        assert torch.equal(tensor, theirs[key]), key
    assert ours.generation_config.top_p == 0.9
    assert (ours.config.to_dict(), ours.name_or_path) == (overwritten.config.to_dict(), overwritten.name_or_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # a reference is the policy, rounded
def test_random_weights_are_what_the_class_draws_from_the_seed(dtype, tmp_path):
    build("llama", on_meta=True).config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9}')  # not taken: it came with the trained weights
    torch.manual_seed(3)
    drawn = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).to(dtype)
    ours = pretrained.load_model(ModelPath(str(tmp_path), random_init=True, seed=3), dtype=dtype)
    weights, others = dict(ours.named_parameters()), dict(drawn.named_parameters())
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
    assert ours.generation_config.top_p != 0.9


def test_a_run_says_that_max_length_is_too_long_and_what_an_adapter_trains():
    model = build("llama")
    n = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model) == {"trainable": n, "total": n}
    assert pretrained.describe_model(model, max_length=2048) == []
    add_adapter(model, 4, 8, ["q_proj"])
    trained = 2 * (4 * 32 + 32 * 4)  # layers, A and B
    length, adapter = pretrained.describe_model(model, max_length=2049)
    assert length.startswith("warning: max_length=2,049 is more than the 2,048 tokens")
    assert adapter.startswith(f"trainable parameters: 512 of {n + trained:,} ({trained / (n + trained):.2%})")
