"""An exported checkpoint is the model that was trained, bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, IDS, assert_near, build, publish, save_adapter
from support.pytests import refused, slow
from support.runs import TINY, change_json, flip_a_bit

from dpo.models.export import export


@pytest.fixture
def home(tmp_path) -> Path:
    """The directory of a Llama."""
    return publish(tmp_path / "base", build("llama"))


def archive(path: Path, state: dict, metrics: dict | None = None) -> Path:
    torch.save({"step_idx": 64, "state": state, "metrics": metrics}, path)
    return path


def load(folder: Path, attention: str = "sdpa", **more) -> transformers.PreTrainedModel:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, output_loading_info=True, **more
    )
    assert not any(loading.values()), loading
    return model.eval()


def facts_of(folder: Path) -> dict:
    """The facts on training in a model card."""
    return yaml.safe_load((folder / "README.md").read_text().split("evaluated.\n")[1])


USUAL = ("llama", "gpt2, tied")


@pytest.mark.parametrize("family", [*USUAL, *(slow(family) for family in FAMILIES if family not in USUAL)])
def test_merged_models_of_every_family_give_the_logits_of_training(family, tmp_path):
    home = publish(tmp_path / "base", build(family))
    (home / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    logits, of_peft = save_adapter(tmp_path / "adapter", family, home)
    merged = load(export(tmp_path / "adapter", tmp_path / "merged", merge=True), "eager")
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=0, atol=2e-5)
    assert_near(merged(IDS).logits, of_peft)
    assert merged.generation_config.eos_token_id == [0, 7]
    assert "???" not in (tmp_path / "merged" / "README.md").read_text()  # the loss is unknown


def test_an_archive_of_the_published_reference_is_exported(tmp_path):
    model = build("gpt-neox").eval()
    state = model.state_dict()
    state["embed_out.weight"] = state.pop("lm_head.weight")  # as transformers 4.29 called it
    state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    (tmp_path / "LATEST").mkdir()
    archive(tmp_path / "LATEST" / "policy.pt", state)
    # Its runs have a config.yaml, of which the known keys are read.
    (tmp_path / "config.yaml").write_text(
        f"model: {{name_or_path: {publish(tmp_path / 'base', model)}}}\nloss: {{name: dpo}}\n"
    )
    assert torch.equal(load(export(tmp_path, tmp_path / "out"), "eager")(IDS).logits, model(IDS).logits)


def test_a_models_own_code_goes_with_it_if_it_may_run(home, tmp_path):
    (home / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    places = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change_json(home / "config.json", model_type="own", auto_map=places)
    model = build("llama").eval()
    policy = archive(tmp_path / "policy.pt", model.state_dict())

    with refused(r"Python code.*--trust-remote-code"):
        export(policy, tmp_path / "out", model=str(home))
    out = export(policy, tmp_path / "out", model=str(home), trust_remote_code=True)

    # Code for an older transformers, as Phi-3 has, is not named where transformers' own class is exported.
    change_json(home / "config.json", model_type="llama")
    plain = export(policy, tmp_path / "plain", model=str(home))
    assert "modeling_own" not in "".join(file.read_text() for file in plain.glob("*.json"))

    shutil.rmtree(home)
    again = load(out, "eager", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_an_export_fills_the_empty_directory_to_which_a_link_leads(home, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    policy = archive(tmp_path / "policy.pt", build("llama").state_dict())
    assert export(policy, tmp_path / "link", model=str(home)) == tmp_path / "elsewhere"
    assert (tmp_path / "link" / "config.json").exists()


def test_a_damaged_checkpoint_is_not_exported(copied, tmp_path):
    run_dir = copied("run", "lora=lora", "n_examples=8")
    flip_a_bit(run_dir / "step-8" / "adapter_model.safetensors")  # which PEFT would not notice
    for merge in (False, True):
        with refused(r"adapter_model.safetensors: checksum mismatch"):
            export(run_dir, tmp_path / "out", merge=merge)
    assert not (tmp_path / "out").exists()


# --- adapters --------------------------------------------------------------------------------------------------------


def adapter_of_run(run: Path, family: str, base: Path, keys: str = "", **settings) -> torch.Tensor:
    """Make a run with an adapter; returns the logits with it."""
    home = base if base.is_dir() else base.parent / "base"
    folder = run / "step-8"
    logits, _ = save_adapter(folder, family, base, **settings)
    weights = load_file(folder / "adapter_model.safetensors")
    archive(folder / "policy.pt", weights, {"loss/eval": 0.5})
    (run / "LATEST").symlink_to("step-8")
    (run / "config.yaml").write_text(
        "loss: {name: dpo, beta: 0.3}\nlora: {name: lora, r: 4, alpha: 12}\n"
        f"model: {{name_or_path: {home}{keys}}}\n"
    )
    return logits


def test_the_base_is_rounded_as_the_run_rounded_it_and_the_sum_once(home, run_dir, tmp_path):
    """Stored in float32, trained in bfloat16."""
    adapter_of_run(run_dir, "llama", home, ", policy_dtype: bfloat16", target_modules=["q_proj"])
    name = "model.layers.1.self_attn.q_proj"
    weights = load_file(run_dir / "step-8" / "adapter_model.safetensors")
    a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    had = build("llama").state_dict()[f"{name}.weight"].bfloat16().float() + 3 * b @ a

    for dtype, stored in ((None, torch.bfloat16), ("float32", torch.float32)):
        state = load(export(run_dir, tmp_path / f"{dtype}", merge=True, dtype=dtype)).state_dict()
        torch.testing.assert_close(state[f"{name}.weight"], had.to(stored), rtol=1e-6, atol=1e-7)
        assert torch.equal(state["lm_head.weight"].float(), build("llama").lm_head.weight.bfloat16().float())


def test_a_base_that_peft_cannot_load_is_exported_first(home, run_dir, tmp_path):
    sft = archive(tmp_path / "policy.pt", build("llama").state_dict())
    logits = adapter_of_run(run_dir, "llama", sft)
    with refused(rf"or export the base first: dpo export {sft} (.*)/hf$"):
        export(run_dir, tmp_path / "out")

    export(sft, tmp_path / "hf", model=str(home))
    model = transformers.AutoModelForCausalLM.from_pretrained(export(run_dir, tmp_path / "out")).eval()
    assert_near(model(IDS).logits, logits)

    sft.unlink()  # or the new place of the base is given
    merged = load(export(run_dir, tmp_path / "merged", merge=True, model=str(tmp_path / "hf")))
    assert_near(merged(IDS).logits, logits)


def test_what_cannot_be_exported_or_merged_is_one_sentence(run_dir, tmp_path):
    home = publish(tmp_path / "base", build("llama, tied"))
    whole = archive(tmp_path / "policy.pt", build("llama, tied").state_dict())
    foreign, tied = tmp_path / "foreign", tmp_path / "tied"
    save_adapter(foreign, "llama, tied", home)
    save_adapter(tied, "llama, tied", home, target_modules=["lm_head", "q_proj"])
    file = tied / "adapter_model.safetensors"  # in which PEFT has the base's head too
    save_file({name: tensor for name, tensor in load_file(file).items() if ".lora_" in name}, file)
    adapter_of_run(run_dir, "llama", home, ", random_init: true")
    for path, options, said in (
        (whole, {"merge": True, "model": str(home)}, "or no adapter for --merge"),
        (run_dir, {"dtype": "bfloat16"}, "in a dtype, add --merge"),
        (run_dir, {}, "has random weights, which PEFT cannot load: add --merge"),
        (foreign, {}, "holds an adapter: .* add --merge"),
        (tied, {"merge": True}, "tied names a layer .* tied to the embedding"),
        (TINY, {}, "holds no policy.pt or adapter"),
        (tmp_path / "nowhere", {}, "nowhere does not exist"),
    ):
        with refused(said) as raised:
            export(path, tmp_path / "out", **options)
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()


def test_the_card_tells_what_is_known(home, run_dir, tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()  # as in the repository's directory
    monkeypatch.chdir(tmp_path)
    (run_dir / "step-64").mkdir(parents=True)
    archive(run_dir / "step-64" / "policy.pt", build("llama").state_dict(), {"rewards_eval/margins": 1.25})
    (run_dir / "config.yaml").write_text(
        f"exp_name: 'courteous ![x](y) <b>'\n"
        f"datasets: [hh, mine, demo]\ndataset_sources: {{mine: /home/somebody/mine.jsonl}}\n"
        f"lr: 1.0e-6\nmodel: {{name_or_path: {home}}}\nloss: {{name: dpo, beta: 0.3}}\n"
        'optimizer: "a```\\n# b"\n'
    )
    (run_dir / "env.json").write_text('{"git_commit": "abc123", "packages": {}, "started": "2026-01-01"}')

    out = export(run_dir / "step-64", tmp_path / "out")

    card = (out / "README.md").read_text()
    head, text = card.split("---\n")[1:]
    for line in ("- Anthropic/hh-rlhf", "library_name: transformers", "- dpo"):
        assert line in head
    assert "base_model" not in head  # a directory is nothing that the Hub knows
    assert "![x](y)" not in text.split("## Training")[0]  # what a user wrote is no markup
    facts = facts_of(out)
    assert facts.pop("settings")["optimizer"] == "a```\n# b"
    assert facts == {
        "base": "base",
        "weights": "LlamaForCausalLM, float32",
        "examples trained on": 64,
        "metrics": {"rewards_eval/margins": 1.25},
        "data": {"hh": "Anthropic/hh-rlhf", "mine": "local files: mine.jsonl", "demo": "demo"},
        "commit": "abc123",
    }
    assert not any(text in card for text in ("/home/somebody", "BitsAndBytesConfig", str(tmp_path)))
