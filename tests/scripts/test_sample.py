"""`python -m scripts.sample` asks as a run was trained, and answers as its models do."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from support.models import COMMON
from support.runs import GOLDEN, write_rows

from dpo.data.demo import get_demo
from dpo.errors import InputError
from dpo.models.answers import Sampling
from dpo.models.export import export
from dpo.models.pretrained import Source, load_model
from scripts.sample import Panel, Side, converse, load_panel, main

LLAMA = str(GOLDEN / "tiny-llama")
ASKED = ["Where is the red umbrella?", "Hello!", "Who has seen the old map, and when?", "Is it still here?"]
TALK = [
    {"role": "user", "content": "Good morning."},
    {"role": "assistant", "content": "Good morning."},
    {"role": "user", "content": "Is the ladder still here?"},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def load(archive: Path | None = None):
    archive_name = archive and str(archive)
    return load_model(Source(LLAMA), dtype=torch.float32, archive=archive_name, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run whose policy has moved away from its reference."""
    run = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    state = {key: tensor + 0.02 * torch.randn(tensor.shape) for key, tensor in load().state_dict().items()}
    (run / "step-8").mkdir(parents=True)
    torch.save({"step_idx": 8, "state": state, "metrics": None}, run / "step-8" / "policy.pt")
    (run / "LATEST").symlink_to("step-8")
    (run / "config.yaml").write_text(
        f"datasets: [hh]\nloss: {{name: dpo, beta: 0.3}}\nmodel: {{name_or_path: {LLAMA}, reference_dtype: float32}}\n"
    )
    return run


@pytest.fixture(scope="module")
def panel(run_dir):
    return load_panel(run_dir)


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def answered(run_dir: Path | str, out: Path, *more: str) -> list[dict]:
    """Answer a file of prompts; return the answers."""
    file = write_rows(out.with_suffix(".prompts.jsonl"), [{"prompt": text} for text in ASKED])
    arguments = [str(run_dir), "--file", str(file), "--out", str(out), "--max-new-tokens", "12", *more]
    assert main(arguments) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


# --- prompts ---------------------------------------------------------------------------------------------------------


def ask(form: str, tokenizer, asked, **more) -> str:
    return tokenizer.decode(Panel([], tokenizer, form).encode(asked, "line 7", n_new=8, **more))


def test_a_prompt_is_a_dialogue_a_chat_or_text_as_it_is(chatty):
    """In a chat control tokens in messages are text, and a prefilled answer goes on."""
    dialogue = "\n\nHuman: Good morning.\n\nAssistant: Good morning.\n\nHuman: Is the ladder still here?\n\nAssistant:"
    assert ask("hh", chatty, TALK) == ask("hh", chatty, dialogue) == dialogue
    assert all(ask("hh", chatty, prompt) == prompt for prompt in list(get_demo("test"))[:9])
    assert ask("chat", chatty, "Hello") == "<user>Hello<|endoftext|><assistant>"
    begun = [{"role": "user", "content": "Write <|endoftext|>"}, {"role": "assistant", "content": "It is "}]
    assert ask("chat", chatty, begun) == "<user>Write <|endoftext|><|endoftext|><assistant>It is "
    assert Panel([], chatty, "chat").encode(begun, "", n_new=8).count(chatty.eos_token_id) == 1
    assert ask("raw", chatty, " Once upon\n") == " Once upon\n"


@pytest.mark.parametrize(
    ("asked", "form", "more", "said"),
    [
        ("", "raw", {}, "is empty"),
        ([], "chat", {}, "is empty"),
        (TALK, "raw", {}, "need --format chat"),
        ([{"role": "system", "content": "Be kind."}], "hh", {}, "need --format chat"),
        (TALK, "hh", {"tools": [{"type": "function", "function": {"name": "look"}}]}, "need --format chat"),
        ([{"role": "user"}], "chat", {}, "content is missing, and must be text"),
    ],
)
def test_a_prompt_that_does_not_suit_its_form_is_refused(asked, form, more, said, chatty):
    with pytest.raises(InputError, match=f"^line 7: .*{said}"):
        ask(form, chatty, asked, **more)


@pytest.mark.parametrize(
    "rope",
    [None, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}],  # a long row changes its batch
)
def test_a_prompt_with_its_answer_must_fit_the_models_positions(rope, tokenizer):
    own = transformers.GPT2Config(vocab_size=1024, n_embd=8, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    if rope:
        sizes = COMMON | {"vocab_size": 1024}
        own = transformers.LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(own)
    panel = Panel([Side("policy", model)], tokenizer, "raw")
    with pytest.raises(InputError, match=r"^here: prompt and answer may be too long: .*give 16 or less"):
        panel.encode(" Where is the map?", "here", n_new=12)


def test_prompts_are_asked_as_the_run_was_trained_and_so_does_its_export(run_dir, tmp_path):
    home, run = shutil.copytree(LLAMA, tmp_path / "base"), tmp_path / "run"
    settings = json.loads((home / "tokenizer_config.json").read_text())
    (home / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    (run / "step-8").mkdir(parents=True)
    os.link(run_dir / "step-8" / "policy.pt", run / "step-8" / "policy.pt")
    (run / "config.yaml").write_text(
        f"datasets: [mine]\nloss: {{name: dpo, beta: 0.3}}\nmodel: {{name_or_path: {home}}}\n"
    )
    forms = {}
    for form in ("chat", "hh", "raw", None):
        record = {} if form is None else {"prompt_formats": {"mine": form}}
        (run / "preflight.json").write_text(json.dumps({"train": {"examples": 8, "prompts": 8, **record}}))
        out = export(run / "step-8", tmp_path / f"out-{form}")
        forms[form] = [load_panel(path).form for path in (run / "step-8", out)]
    assert forms == {"chat": ["chat"] * 2, "hh": ["hh"] * 2, "raw": ["raw"] * 2, None: ["chat"] * 2}
    assert r"Form of a prompt: `\n\nHuman: ...\n\nAssistant:`." in (tmp_path / "out-hh" / "README.md").read_text()
    (tmp_path / "out-hh" / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff\xfe")  # somebody else's
    assert load_panel(tmp_path / "out-hh").form == "chat"


# --- answers ---------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate(run_dir, tokenizer, tmp_path):
    records = answered(run_dir, tmp_path / "a.jsonl", "--temperature", "0")

    for name, model in (("policy", load(run_dir)), ("reference", load())):
        for text, record in zip(ASKED, records, strict=True):
            ids = tokenizer(f"\n\nHuman: {text}\n\nAssistant:", return_tensors="pt")["input_ids"]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert record[name] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_batches_change_no_answer_and_seeds_do(run_dir, tmp_path):
    options = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "5")
    one, all_at_once = (answered(run_dir, tmp_path / f"{n}.jsonl", *options, "--batch-size", n) for n in ("1", "4"))
    assert one == all_at_once
    another = answered(run_dir, tmp_path / "6.jsonl", *options[:-1], "6")
    assert [r["policy"] for r in another] != [r["policy"] for r in one]


def test_the_reference_is_the_start_of_the_run_or_the_one_given(run_dir, tmp_path):
    alone = answered(LLAMA, tmp_path / "a.jsonl", "--format", "hh")
    assert [{*record} for record in alone] == [{"prompt", "policy"}] * 4
    of_run = answered(run_dir, tmp_path / "b.jsonl")
    assert [record["reference"] for record in of_run] == [record["policy"] for record in alone]
    assert answered(run_dir, tmp_path / "c.jsonl", "--reference", LLAMA) == of_run
    without = [{key: record[key] for key in ("prompt", "policy")} for record in of_run]
    assert answered(run_dir, tmp_path / "d.jsonl", "--reference", "none") == without


def test_a_reference_with_another_tokenizer_is_refused(run_dir, tmp_path, tokenizer):
    other = shutil.copytree(LLAMA, tmp_path / "other")
    renamed = copy.deepcopy(tokenizer)
    renamed.add_tokens(["<new>"])
    renamed.save_pretrained(other)
    with pytest.raises(InputError, match="other has another tokenizer than the policy"):
        load_panel(run_dir, reference=str(other))


def test_bad_input_is_a_sentence_and_status_2(run_dir, tmp_path, capsys):
    run, file = str(run_dir), str(write_rows(tmp_path / "p.jsonl", [{"prompt": "Hello"}, {"prompt": 3}]))
    out = ["--out", str(tmp_path / "out.jsonl")]
    for arguments, said in (
        ([f"{run}-nowhere"], "does not exist"),
        ([run, "--file", f"{file}l", *out], "is not a file"),
        ([run, "--file", file, *out], "record 2 of .*prompt is 3, and must be text or a list of messages"),
        ([run, "--file", file, "--out", file], "exists already"),
        ([run, "--reference", f"{run}-nowhere"], "does not exist"),
    ):
        assert main(arguments) == 2, said
        [error] = capsys.readouterr().err.splitlines()
        assert re.match(f"error: .*{said}", error)


@pytest.mark.parametrize("form", ["hh", "chat", "raw"])
def test_each_side_continues_its_own_conversation_until_it_is_reset(form, panel, chatty, monkeypatch, capsys):
    asked: dict[str, list] = {"policy": [], "reference": []}
    draw = Panel.answer

    def listen(self, side, prompts, *rest):
        [answer] = draw(self, side, prompts, *rest)
        answer = answer._replace(text=f"\x1b[2J{answer.text}")
        asked[side.name].append((chatty.decode(prompts[0]), answer.text.strip()))
        return [answer]

    monkeypatch.setattr(Panel, "answer", listen)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\n\nTwo?\n/reset\nOne?\n"))
    converse(panel._replace(tokenizer=chatty, form=form), Sampling(6))

    said = {"hh": "\n\nHuman: {}\n\nAssistant:", "chat": "<user>{}<|endoftext|><assistant>", "raw": "{}"}[form]
    for turns in asked.values():
        (first, answer), (second, _), (after_reset, _) = turns
        assert first == after_reset == said.format("One?")
        history = {"hh": f"{first} {answer}", "chat": f"{first}{answer}<|endoftext|>", "raw": ""}[form]
        assert second == history + said.format("Two?")
    shown = capsys.readouterr().out
    assert shown.count("--- policy ---\n\ufffd[2J") == shown.count("--- reference ---\n\ufffd[2J") == 3
    assert all(character.isprintable() or character in "\n\t" for character in shown)
