"""`dpo sample` asks as a run was trained, and answers as its models do."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from support.formats import assistant, system, tool, user
from support.models import load_tiny
from support.pytests import refused
from support.runs import TINY, change_json
from support.templates import PLAIN

from dpo.commands.sample import converse, main
from dpo.models.answers import Sampling
from dpo.models.export import export
from dpo.models.generation import LoadedModel, load_for_generation

LLAMA = str(TINY)
ASKED = ["Where is the red umbrella?", "Hello!", "Who has seen the old map, and when?", "Is it still here?"]
TALK = [user("Good morning."), assistant("Good morning."), user("Is the ladder still here?")]


@pytest.fixture(scope="module")
def run_dir(finished) -> Path:
    """A run whose policy has moved away from its reference."""
    return finished("lr=1e-2")


@pytest.fixture(scope="module")
def models(run_dir):
    return load_for_generation(run_dir)


@pytest.fixture
def chatty(chat):
    return chat(PLAIN)


def answered(models: list[LoadedModel], sampling: Sampling) -> dict[str, list[str]]:
    """The answers of each model to some prompts."""
    answers = {}
    for model in models:
        texts = [model.write([user(text)]) for text in ASKED]
        prompts = [model.encode(text, n_new=12) for text in texts]
        answers[model.name] = [model.answer(prompt, number, sampling) for number, prompt in enumerate(prompts)]
    return answers


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_dialogue_a_chat_or_text_as_it_is(chatty, models):
    """A control token in a message of a chat is refused."""

    def ask(form: str, messages: list[dict[str, str]]) -> str:
        model = models[0]._replace(tokenizer=chatty, form=form)
        return chatty.decode(model.encode(model.write(messages), n_new=8))

    assert ask("hh", TALK) == (
        "\n\nHuman: Good morning.\n\nAssistant: Good morning.\n\nHuman: Is the ladder still here?\n\nAssistant:"
    )
    assert ask("hh", [system("Be kind."), *TALK[:1]]).startswith("Be kind.\n\nHuman: Good")
    with refused("content of a message of role 'user' has the control token '<"):
        ask("chat", [user("Write <|endoftext|>")])
    with refused("has no turn of role 'tool' and no calls: choose the form chat"):
        ask("hh", [*TALK, tool("42")])
    assert ask("raw", [user("Once upon")]) == "Once upon"


def test_a_prompt_with_its_answer_must_fit_the_models_positions(tokenizer):
    own = transformers.GPT2Config(vocab_size=1024, n_embd=8, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(own)
    policy = LoadedModel("policy", model, tokenizer, "raw")
    with refused(r"prompt and answer may be too long: .*set 16 or less"):
        policy.encode(policy.write(TALK), n_new=12)


def test_prompts_are_asked_as_the_run_was_trained_and_so_does_its_export(run_dir, tmp_path):
    home, run = shutil.copytree(LLAMA, tmp_path / "base"), tmp_path / "run"
    change_json(home / "tokenizer_config.json", chat_template=PLAIN)
    (run / "step-8").mkdir(parents=True)
    os.link(run_dir / "step-24" / "policy.pt", run / "step-8" / "policy.pt")
    (run / "config.yaml").write_text(
        f"datasets: [mine]\nloss: {{name: dpo, beta: 0.3}}\nmodel: {{name_or_path: {home}}}\n"
    )
    forms = {}
    for form in ("chat", "hh", "raw", None):
        record = {} if form is None else {"prompt_formats": {"mine": form}}
        (run / "preflight.json").write_text(json.dumps({"train": {"examples": 8, "prompts": 8, **record}}))
        out = export(run / "step-8", tmp_path / f"out-{form}")
        forms[form] = [load_for_generation(path)[0].form for path in (run / "step-8", out)]
    assert forms == {"chat": ["chat"] * 2, "hh": ["hh"] * 2, "raw": ["raw"] * 2, None: ["chat"] * 2}
    assert r"Form of a prompt: `\n\nHuman: ...\n\nAssistant:`." in (tmp_path / "out-hh" / "README.md").read_text()
    (tmp_path / "out-hh" / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff\xfe")  # somebody else's
    assert load_for_generation(tmp_path / "out-hh")[0].form == "chat"


# --- answers ---------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate(run_dir, models, tokenizer):
    answers = answered(models, Sampling(12, temperature=0))
    for name, model in (("policy", load_tiny(archive=run_dir)), ("reference", load_tiny())):
        for text, given in zip(ASKED, answers[name], strict=True):
            ids = tokenizer(f"\n\nHuman: {text}\n\nAssistant:", return_tensors="pt")["input_ids"]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert given == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_reference_is_the_start_of_the_run_or_left_out(run_dir, models):
    of_run = answered(models, Sampling(12))
    [start] = load_for_generation(LLAMA)
    assert answered([start._replace(form="hh")], Sampling(12)) == {"policy": of_run["reference"]}
    assert answered(load_for_generation(run_dir, reference="none"), Sampling(12)) == {"policy": of_run["policy"]}


def test_a_session_says_how_answers_are_drawn_and_bad_input_is_a_sentence_and_status_2(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))
    assert main([str(run_dir), "--top-p", "0.5", "--max-new-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert r"in the form hh: \n\nHuman: ...\n\nAssistant:" in out
    assert "drawn with temperature 1, top-p 0.5, top-k 50" in out
    assert re.findall("--- (.*) ---", out) == ["policy", "reference"]
    assert err == ""
    assert main([f"{run_dir}-nowhere"]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert re.match(r"error: .*-nowhere does not exist", error)


@pytest.mark.parametrize("form", ["hh", "chat", "raw"])
def test_each_side_continues_its_own_conversation_until_it_is_reset(form, models, chatty, monkeypatch, capsys):
    asked: dict[str, list] = {"policy": [], "reference": []}
    draw = LoadedModel.answer

    def listen(self, prompt, *rest):
        answer = f"\x1b[2J{draw(self, prompt, *rest)}"
        asked[self.name].append((chatty.decode(prompt), answer.strip()))
        return answer

    monkeypatch.setattr(LoadedModel, "answer", listen)
    refused = "Say <|endoftext|>\n" if form == "chat" else ""  # and asked again
    monkeypatch.setattr("sys.stdin", io.StringIO(f"One?\n\n{refused}Two?\n/reset\nOne?\n"))
    converse([model._replace(tokenizer=chatty, form=form) for model in models], Sampling(6))

    said = {"hh": "\n\nHuman: {}\n\nAssistant:", "chat": "<user>{}<|endoftext|>\n<assistant>", "raw": "{}"}[form]
    for turns in asked.values():
        (first, answer), (second, _), (after_reset, _) = turns
        assert first == after_reset == said.format("One?")
        history = {"hh": f"{first} {answer}", "chat": f"{first}{answer}<|endoftext|>\n", "raw": ""}[form]
        assert second == history + said.format("Two?")
    shown, errors = capsys.readouterr()
    assert ("has the control token '<|endoftext|>'" in errors) == bool(refused)
    assert shown.count("--- policy ---\n\ufffd[2J") == shown.count("--- reference ---\n\ufffd[2J") == 3
    assert all(character.isprintable() or character in "\n\t" for character in shown)
