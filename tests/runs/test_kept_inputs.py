"""What a run was trained on counts, and not what has since been put in its place."""

import shutil

from safetensors.torch import load_file, save_file
from support.formats import user
from support.pytests import refused
from support.runs import TINY, append_text, change_manifest, read_json, write_rows

from dpo.checkpoint.files import MANIFEST
from dpo.commands.export import main as export
from dpo.models.generation import load_for_generation

TEMPLATE = "{{ mark }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_template_that_was_edited_is_neither_exported_nor_asked_nor_trained_on(run, run_dir, tmp_path):
    template, rows = tmp_path / "chat.jinja", [{"prompt": f"{i}", "chosen": "A", "rejected": "B"} for i in range(20)]
    template.write_text(TEMPLATE)
    data = write_rows(tmp_path / "mine.jsonl", rows)
    settings = (f"datasets=[{data}]", "chat=always", f"chat_template={template}", "do_first_eval=false")
    settings += ("+chat_template_args.mark=x",)
    run("run", *settings, "n_examples=4")
    template.write_text(TEMPLATE.replace("{{ mark }}", "["))
    assert export([str(run_dir), str(tmp_path / "out")]) == 0
    assert export([str(run_dir), str(tmp_path / "other"), "--template", str(template)]) == 0
    [model] = load_for_generation(run_dir, reference="none")
    run("run", *settings, "n_examples=8", "resume=auto")  # the edited template would not take the argument

    assert (tmp_path / "out" / "chat_template.jinja").read_text().endswith(TEMPLATE)
    assert (tmp_path / "other" / "chat_template.jinja").read_text() == template.read_text()
    asked = model.encode(model.write([user("Hi")]), n_new=1)
    assert model.tokenizer.decode(asked) == "x<user>Hi"


def test_a_file_that_a_strangers_config_names_as_template_is_not_read(copied, tmp_path, capsys):
    run_dir, secret = copied("theirs", "n_examples=8"), tmp_path / "token"
    secret.write_text("hf_secret")
    append_text(run_dir / "config.yaml", f"\nchat_template: {secret}\n")
    kept = export([str(run_dir), str(tmp_path / "kept")])
    (run_dir / "LATEST" / MANIFEST).unlink()
    refused = export([str(run_dir), str(tmp_path / "refused")])
    said = capsys.readouterr().err
    secret.with_name("mine").write_text(TEMPLATE)
    given = export([str(run_dir), str(tmp_path / "given"), "--template", str(tmp_path / "mine")])

    assert (kept, refused, given) == (0, 2, 0)
    assert f"kept the path of its chat template, {secret}, and not the text: add --template FILE" in said
    assert not (tmp_path / "kept" / "chat_template.jinja").exists()
    assert (tmp_path / "given" / "chat_template.jinja").read_text() == TEMPLATE


def test_an_adapter_is_neither_merged_nor_asked_on_a_base_that_was_exchanged(run, run_dir, tmp_path, capsys):
    base = shutil.copytree(TINY, tmp_path / "base")
    run("run", f"model.name_or_path={base}", "lora=lora", "n_examples=4", "do_first_eval=false")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    moved = ["--model", str(TINY)]
    command = [str(run_dir), str(tmp_path / "out"), "--merge"]

    assert (export(command), export([*command, *moved])) == (2, 0)
    assert f"error: the base {base} has other weights" in capsys.readouterr().err
    with refused(rf"the base {base} has other weights than those .* add --model"):
        load_for_generation(run_dir)
    assert len(load_for_generation(run_dir, model=moved[1])) == 2


def test_a_run_that_was_made_before_holdout_keeps_a_tenth(run, run_dir, tmp_path):
    rows = [{"prompt": f"{i}", "chosen": "A", "rejected": "B"} for i in range(40)]
    settings = (f"datasets=[{write_rows(tmp_path / 'mine.jsonl', rows)}]", "chat=never", "do_first_eval=false")
    run("run", *settings, "n_examples=4", "holdout=0.1")
    latest = run_dir / "LATEST"
    recorded = read_json(latest / MANIFEST)["config"]
    del recorded["holdout"]
    change_manifest(latest, config=recorded)
    for n_examples in (8, 12):
        run("run", *settings, f"n_examples={n_examples}", "resume=auto")
    assert read_json(run_dir / "preflight.json")["test"]["prompts"] == 4
    with refused(r"holdout=0.5 \(was 0.1\)"):
        run("run", *settings, "n_examples=16", "holdout=0.5", "resume=auto")
