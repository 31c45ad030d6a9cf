"""`dpo export --push` and `--gguf`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.hub import TOKEN, serving_hub
from support.runs import run_python

from dpo.commands.export import main

CONVERTER = """\
import pathlib, sys
folder, _, file, _, kind = sys.argv[1:]
assert (pathlib.Path(folder) / "config.json").exists()
pathlib.Path(file).write_text("GGUF " + kind) if kind != "q9" else sys.exit("no such type")
"""


@pytest.fixture
def hub():
    with serving_hub() as serving:
        yield serving


def push(hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    # an upload by Xet goes to another kind of server; HF_HUB_OFFLINE is set for tests
    return run_python("-m", "dpo", "export", *arguments, **settings, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")


def test_a_run_is_pushed_to_a_private_repository_with_its_verdict(hub, copied, tmp_path):
    run_dir = copied("run")
    result = push(hub, tmp_path, str(run_dir), "--push", "me/mine")
    assert result.returncode == 0, result.stderr
    files = hub.files["me/mine"]
    assert hub.private["me/mine"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "curves/0.png"} <= files.keys()
    card = files["README.md"].decode()
    assert "## Results\n\nThe model changed:" in card
    assert "![Loss](curves/0.png)" in card
    listed = result.stdout.partition("these files go to me/mine (private if it is new):\n")[2]
    assert {line.split()[0] for line in listed.splitlines()[:-1]} == files.keys()
    assert TOKEN not in result.stdout + result.stderr + card
    assert hub.unsigned == []


@pytest.mark.slow
def test_a_run_is_pushed_again_where_it_was(hub, copied, tmp_path):
    run_dir = copied("run")
    assert push(hub, tmp_path, str(run_dir), "--push", "me/mine", "--public").returncode == 0
    assert not hub.private["me/mine"]
    again = push(hub, tmp_path, str(run_dir), str(tmp_path / "out"), "--push", "me/mine", "--dtype", "bfloat16")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == hub.files["me/mine"]["model.safetensors"]


@pytest.mark.slow
def test_what_the_run_did_not_make_is_not_overwritten_without_yes(hub, copied, tmp_path):
    run_dir = copied("run")
    hub.files["me/theirs"], hub.private["me/theirs"] = {"README.md": b"---\nlicense: mit\n---\nHand-made."}, False
    hub.files["me/empty"], hub.private["me/empty"] = {}, False
    for name in ("me/theirs", "me/empty"):
        result = push(hub, tmp_path, str(run_dir), "--push", name)
        assert (result.returncode, result.stderr) == (
            2,
            f"error: {name} exists, and this run did not make it: give another name, or --yes\n",
        )
    assert hub.files["me/theirs"].keys() == {"README.md"}
    assert push(hub, tmp_path, str(run_dir), "--push", "me/theirs", "--yes").returncode == 0
    assert "model.safetensors" in hub.files["me/theirs"]


@pytest.mark.slow
def test_a_refusal_of_the_hub_is_a_sentence_without_the_token(hub, copied, tmp_path):
    hub.shutdown()
    hub.server_close()
    result = push(hub, tmp_path, str(copied("run")), "--push", "me/mine")
    assert result.returncode == 1
    assert "error: me/mine was not pushed: " in result.stderr
    assert "Traceback" not in result.stderr
    assert TOKEN not in result.stderr


def test_the_converter_of_llama_cpp_gets_the_exported_model(copied, tmp_path, capsys):
    run_dir, checkout = str(copied("run")), tmp_path / "llama.cpp"
    arguments = ["--llama-cpp", str(checkout), "--gguf"]
    assert main([run_dir, str(tmp_path / "a"), *arguments, "f16"]) == 2
    assert "has no convert_hf_to_gguf.py" in capsys.readouterr().err
    checkout.mkdir()
    (checkout / "convert_hf_to_gguf.py").write_text(CONVERTER)
    assert main([run_dir, str(tmp_path / "a"), *arguments, "f16"]) == 0
    assert (tmp_path / "a" / "model-f16.gguf").read_text() == "GGUF f16"
    assert main([run_dir, str(tmp_path / "b"), *arguments, "q9"]) == 1
    assert "was not written" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--push", "no-user"], ["--push", "a/b/c"]])
def test_a_name_that_is_none_is_refused(arguments, copied, capsys):
    assert main([str(copied("run")), *arguments]) == 2
    assert "must be USER/NAME" in capsys.readouterr().err
