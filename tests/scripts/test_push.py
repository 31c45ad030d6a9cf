"""`dpo export --push` and `--gguf`."""

import html
import importlib
import json
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
from support import warm
from support.hub import TOKEN, serving_hub
from support.pytests import succeeded
from support.runs import ROOT, make_environment

from dpo.commands.export import complete_card, main
from dpo.models.paths import find_model

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


def call(hub, tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    # An upload by Xet goes to another kind of server; HF_HUB_OFFLINE is set for tests.
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    environment = make_environment(**settings, HF_HOME=str(tmp_path / "hf"), **more)
    return warm.run(*arguments, cwd=ROOT, environment=environment, timeout=200, fault=read_environment_again)


def read_environment_again() -> None:
    """The process is forked from one that has imported the Hub's library."""
    importlib.reload(huggingface_hub.constants)


def push(hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(hub, tmp_path, "-m", "dpo", "export", *arguments, HF_TOKEN=TOKEN)


def test_a_run_is_pushed_to_a_private_repository_with_its_verdict(hub, copied, tmp_path):
    run_dir = copied("run")
    result = succeeded(push(hub, tmp_path, str(run_dir), "--push", "me/mine"))
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


UPLOAD = """\
import pathlib, sys
from dpo.commands import command, export
folder = pathlib.Path(sys.argv[1])
upload = command(lambda arguments: export.push(folder, "me/mine", None, public=False, may_overwrite=True))
sys.exit(upload([]) * 10 + upload([]))
"""


def test_a_push_leaves_the_repository_as_the_last_export_is_and_a_refusal_shows_no_saved_token(hub, tmp_path):
    old = {"adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors"}
    old |= {"model.safetensors.index.json", "model-f16.gguf", "chat_template.jinja", "curves/3.png"}
    theirs = {".gitattributes", "LICENSE", "notes/config.md", "data.json"}
    hub.files["me/mine"], hub.private["me/mine"] = dict.fromkeys(old | theirs, b"old"), True
    folder, new = tmp_path / "export", {"model.safetensors", "config.json", "curves/0.png"}
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"new")
    saved = tmp_path / "hf" / "token"  # as `hf auth login` saves it
    saved.parent.mkdir()
    saved.write_text(TOKEN)
    hub.commits_left = 1
    result = call(hub, tmp_path, "-c", UPLOAD, str(folder))
    assert result.returncode == 1, result.stderr  # the first upload succeeds, and the second does not
    assert hub.unsigned == []
    assert hub.files["me/mine"].keys() == theirs | new
    assert "error: me/mine was not pushed: 403 " in result.stderr
    assert "Bearer REDACTED" in result.stderr
    assert TOKEN[:6] not in result.stderr


def test_a_card_shows_what_others_named_as_text(copied, tmp_path):
    run_dir = copied("run")
    source, name = find_model(run_dir), "<script>x</script>\n# Owned [a](http://b.c) www.b.c *b*"
    found = {"settings": {"model": str(source.policy_file)}, "sentences": [name]}
    (run_dir / "evaluation").mkdir()
    (run_dir / "evaluation" / "evaluation-<b>.json").write_text(json.dumps(found))
    (tmp_path / "README.md").write_text("---\n---\n# A model\n")
    complete_card(tmp_path, source, "run")
    lines = (tmp_path / "README.md").read_text().splitlines()
    [judged] = [line for line in lines if line.startswith("Judged by ")]
    assert html.unescape(judged) == f"Judged by <b>: {' '.join(name.split())}"
    assert not any(markup in judged for markup in ("<", "[", "*", "://", "www."))


@pytest.mark.slow
def test_a_run_is_pushed_again_where_it_was(hub, copied, tmp_path):
    run_dir = copied("run")
    assert push(hub, tmp_path, str(run_dir), "--push", "me/mine", "--public").returncode == 0
    assert not hub.private["me/mine"]
    succeeded(push(hub, tmp_path, str(run_dir), str(tmp_path / "out"), "--push", "me/mine", "--dtype", "bfloat16"))
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
            f"error: {name} exists, and this run did not make it: choose another name, or pass --yes\n",
        )
    assert hub.files["me/theirs"].keys() == {"README.md"}
    assert push(hub, tmp_path, str(run_dir), "--push", "me/theirs", "--yes").returncode == 0
    assert "model.safetensors" in hub.files["me/theirs"]


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


def test_a_file_that_is_no_evaluation_is_left_out_of_the_card(copied, tmp_path, printed):
    run_dir = copied("run")
    (run_dir / "evaluation").mkdir()
    for name, content in {"x": "[]", "y": "{", "z": "[" * 100_000}.items():
        (run_dir / "evaluation" / f"evaluation-{name}.json").write_text(content)
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: []\n---\n# A model\n")
    complete_card(folder, find_model(run_dir), "id")
    assert printed().count("left out of the card: ") == 3
