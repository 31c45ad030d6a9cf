"""What a run was trained on counts, and not what has since been put in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import GOLDEN, read_metrics, write_rows

from dpo.checkpoint.files import MANIFEST
from dpo.commands.export import main as export
from dpo.errors import InputError
from dpo.models.panel import load_panel

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EDITED = TEMPLATE.replace("<", "[[").replace(">", "]]")


@pytest.fixture
def chats(tmp_path) -> tuple[str, ...]:
    """The settings of a run on chats with a template in a file."""
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"Not {i}, but more."} for i in range(20)]
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    data = write_rows(tmp_path / "mine.jsonl", rows)
    return (f"datasets=[{data}]", "chat=always", f"chat_template={tmp_path / 'chat.jinja'}", "do_first_eval=false")


def test_a_template_that_was_edited_is_neither_exported_nor_asked_nor_trained_on(run, chats, tmp_path, capsys):
    run("run", *chats, "n_examples=4")
    (tmp_path / "chat.jinja").write_text(EDITED)
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    panel = load_panel(tmp_path / "run", reference="none")
    run("run", *chats, "n_examples=8", "resume=auto")

    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    asked = panel.encode([{"role": "user", "content": "Hi"}], n_new=1)
    assert panel.tokenizer.decode(asked) == "<user>Hi<assistant>"
    assert len(read_metrics(tmp_path / "run", "train")) == 2
    assert "is the one with which the run began, and not what" in capsys.readouterr().out


def test_a_file_that_a_strangers_config_names_as_template_is_not_read(copied, tmp_path, capsys):
    run_dir, secret = copied("theirs"), tmp_path / "token"
    secret.write_text("hf_secret")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    with (run_dir / "config.yaml").open("a") as file:
        file.write(f"\nchat_template: {secret}\n")
    kept = export([str(run_dir), str(tmp_path / "kept")])
    (run_dir / "LATEST" / MANIFEST).unlink()
    refused = export([str(run_dir), str(tmp_path / "refused")])
    said = capsys.readouterr().err
    given = export([str(run_dir), str(tmp_path / "given"), "--template", str(tmp_path / "mine.jinja")])

    assert (kept, refused, given) == (0, 2, 0)
    assert f"kept the path of its chat template, {secret}, and not the text: give --template FILE" in said
    texts = [path.read_bytes() for path in tmp_path.glob("[kg]i*/*") if path.is_file()]
    assert not any(b"hf_secret" in text for text in texts)
    assert not (tmp_path / "kept" / "chat_template.jinja").exists()
    assert (tmp_path / "given" / "chat_template.jinja").read_text() == TEMPLATE


def test_an_adapter_is_neither_merged_nor_asked_on_a_base_that_was_exchanged(run, tmp_path, capsys):
    base = shutil.copytree(GOLDEN / "tiny-llama", tmp_path / "base")
    run("run", f"model.name_or_path={base}", "lora=lora", "n_examples=4", "do_first_eval=false")
    exchange(base)
    merged = export([str(tmp_path / "run"), str(tmp_path / "out"), "--merge"])
    with pytest.raises(InputError, match=rf"the base {base} has other weights than those .* give --model"):
        load_panel(tmp_path / "run")
    moved = export([str(tmp_path / "run"), str(tmp_path / "moved"), "--merge", "--model", str(GOLDEN / "tiny-llama")])

    assert (merged, moved) == (2, 0)
    assert f"error: the base {base} has other weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert len(load_panel(tmp_path / "run", model=str(GOLDEN / "tiny-llama")).sides) == 2


def exchange(base: Path) -> None:
    """Change one weight of a model's file."""
    weights = load_file(base / "model.safetensors")
    torch.nn.init.constant_(weights["model.norm.weight"][:1], 0.5)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
