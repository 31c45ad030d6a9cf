"""An adapter's files may come from anywhere: what is wrong with them is one sentence with file, key and value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
from support.models import build
from support.runs import GOLDEN, ROOT

from dpo.errors import InputError
from dpo.models.adapters import CONFIG, find_base, read_adapter


@pytest.fixture
def adapter(tmp_path) -> Path:
    """A directory as PEFT writes it."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(build("llama"), config).save_pretrained(tmp_path)
    return tmp_path


def change(adapter: Path, **changes: object) -> None:
    file = adapter / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *(("r", value, "an integer >= 1") for value in (-1, 0, "16", True, 1.5, None, [4])),
        *(
            ("lora_alpha", value, "a number above 0")
            for value in (float("nan"), float("inf"), 1e308, -1, 0, "16", True, None, {"q_proj": 8})
        ),
        ("lora_dropout", 1, r"a number in [0, 1)"),
        *(
            (key, value, "a list of names, or a regular expression that compiles")
            for key in ("target_modules", "exclude_modules")
            for value in (5, [["q_proj"]], "(", "a{99999999999999999999}")
        ),
        ("layers_pattern", ["("], "a regular expression that compiles, or a list of them"),
        *(("layers_to_transform", value, "an integer, a list of integers, or null") for value in ("x", 1.5, ["x"])),
        *(("init_lora_weights", value, "true, false or a name") for value in (5, {"a": 1}, None)),
        ("fan_in_fan_out", "x", "true or false"),
        ("base_model_name_or_path", ["a"], "a string, or null"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key_and_file(key, value, wanted, adapter):
    change(adapter, **{key: value})
    with pytest.raises(InputError) as error:
        read_adapter(adapter)
    assert str(error.value).endswith(f"{adapter / CONFIG}: {key}={json.dumps(value)} must be {wanted}")


def test_a_rank_that_the_weights_have_not_is_refused_before_it_takes_memory(adapter):
    change(adapter, r=10**9)
    with pytest.raises(InputError, match=rf"{CONFIG}: r=1000000000, and \S+\.lora_A\.weight is \(4, 32\)$"):
        read_adapter(adapter)


def test_layers_that_the_model_has_not_are_blamed_on_the_adapters_file(adapter):
    change(adapter, target_modules=["nope"], base_model_name_or_path=str(GOLDEN / "tiny-llama"))
    command = [sys.executable, "-m", "scripts.sample", str(adapter)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, input="hello\n")
    assert result.returncode == 2
    assert f"{adapter / CONFIG}: target_modules cannot be adapted in LlamaForCausalLM" in result.stderr
    assert "lora.target_modules" not in result.stderr


@pytest.mark.parametrize("depth", [100_000, 900, 150])
@pytest.mark.parametrize("read", [read_adapter, find_base])
def test_what_is_nested_without_end_is_a_sentence(depth, read, adapter):
    nested = "[" * depth + "]" * depth
    (adapter / CONFIG).write_text((adapter / CONFIG).read_text().replace('"alpha_pattern": {}', f'"x": {nested}'))
    with pytest.raises(InputError, match=rf"{CONFIG} is not JSON that can be read: "):
        read(adapter)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "bias"])
def test_what_is_off_may_be_written_in_any_way(key, adapter):
    change(adapter, **{key: None})
    assert read_adapter(adapter).config.r == 4


def test_modules_that_it_names_are_not_imported(adapter):
    change(adapter, auto_mapping={"base_model_class": "x", "parent_library": "antigravity"})
    assert read_adapter(adapter).config.auto_mapping is None


@pytest.mark.parametrize("content", ["[]", "5", '"r"', "{", "\xff"])
def test_a_file_that_holds_something_else_is_a_sentence_of_every_tool(content, adapter):
    (adapter / CONFIG).write_text(content, encoding="latin-1")
    command = [sys.executable, "-m", "scripts.export", str(adapter), str(adapter / "out"), "--merge", "--model=x/y"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
