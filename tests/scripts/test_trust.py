"""A directory runs its code only if the command line says so."""

import shutil
from pathlib import Path

import pytest
from support.pytests import slow, succeeded
from support.runs import TINY, change_json, run_script, small_run, train

CODE = """\
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({proof!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
PLACES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


@pytest.fixture(scope="module")
def elsewhere(rows, tmp_path_factory) -> Path:
    """A run, an adapter's run and their model, whose code touches `proof`."""
    folder = tmp_path_factory.mktemp("elsewhere")
    home = shutil.copytree(TINY, folder / "model")
    (home / "own.py").write_text(CODE.format(proof=str(folder / "proof")))
    (home / "custom_generate").mkdir()
    (home / "custom_generate" / "generate.py").write_text(
        f"import pathlib\npathlib.Path({str(folder / 'proof')!r}).touch()\n"
        "def generate(inputs, model, **options):\n    return type(model).generate(model, inputs, **options)\n"
    )
    change_json(home / "config.json", model_type="own", auto_map=PLACES)
    change_json(
        home / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
    )
    for name, lora in (("run", "none"), ("adapter", "lora")):
        overrides = small_run(rows, folder / name, f"model.name_or_path={home}", f"lora={lora}", "n_examples=8")
        mine = ("export=true", "datasets=[mine]", f"dataset_sources.mine={rows / 'hh'}", "model.trust_remote_code=true")
        result = succeeded(train(*overrides, *mine, HF_MODULES_CACHE=str(folder / "modules")))
        assert f"exported {folder / name}" in result.stdout
        assert "trust_remote_code: true" in (folder / name / "config.yaml").read_text()
    return folder


SAMPLE = ("sample", "{run}")  # without any prompt
TOOLS = {
    "export": ("run", ("export", "{run}", "{out}")),
    "export of an adapter": ("adapter", ("export", "{run}", "{out}")),
    "export of a merged adapter": ("adapter", ("export", "{run}", "{out}", "--merge")),
    "sample": ("run", SAMPLE),
    "sample of an adapter": ("adapter", SAMPLE),
    "sample of a model": ("model", SAMPLE),
    "sample of an export": ("run/LATEST/hf", SAMPLE),
}


@pytest.mark.parametrize("tool", [t if t == "sample" else slow(t) for t in TOOLS])
def test_no_tool_runs_code_that_a_directory_brings_unless_its_command_line_says_so(tool, elsewhere, tmp_path):
    name, arguments = TOOLS[tool]
    places = {"run": elsewhere / name, "out": tmp_path / "out"}
    command = ["-m", "dpo", *(argument.format(**places) for argument in arguments)]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    proof = elsewhere / "proof"
    proof.unlink(missing_ok=True)

    refused = run_script(*command, **environment)

    assert not proof.exists()
    assert refused.returncode == 2
    assert "set model.trust_remote_code=true, or --trust-remote-code for a script" in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()

    succeeded(run_script(*command, "--trust-remote-code", **environment))
    assert proof.exists()


def test_a_run_that_continues_is_asked_again(elsewhere, rows, tmp_path):
    (elsewhere / "proof").unlink(missing_ok=True)
    overrides = small_run(rows, tmp_path / "run", f"model.name_or_path={elsewhere / 'model'}", "n_examples=16")
    result = train(*overrides, f"resume={elsewhere / 'run'}", f"dataset_sources.mine={rows / 'hh'}", "datasets=[mine]")
    assert result.returncode == 2
    assert not (elsewhere / "proof").exists()
