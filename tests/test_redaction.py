"""Secrets are hidden wherever they came from, whatever prints them, and before anything is cut."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from support.runs import run_python, write_rows

from dpo.errors import LONGEST, one_sentence
from dpo.redaction import redact

SECRET = "s3cret-0123456789/+abcdef"
FAILING = f"""\
def score(prompt, answer):
    raise ValueError("no access with {SECRET}")
"""
PRINTING = f"""\
from dpo.system.host import print_whatever_happens
print_whatever_happens()
print("a line", "of {SECRET}")
raise ValueError("a bug that quotes {SECRET}")
"""


@pytest.mark.parametrize("place", ["token", "stored_tokens", "netrc"])
def test_the_logins_of_this_machine_are_hidden(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    text = f"of {SECRET}, of hf_token and of a-long-name"
    assert redact(text) == text
    content = {
        "token": f"{SECRET}\n",
        "stored_tokens": f"[a-long-name]\nhf_token = {SECRET}\n",
        "netrc": f"machine api.wandb.ai\n  login a-long-name\n  password {SECRET}\n",
    }
    (tmp_path / place).write_text(content[place])
    assert redact(text) == text.replace(SECRET, "REDACTED")
    (tmp_path / place).write_bytes(b"\xff\x00 is none of these")  # nor is this an error
    assert redact(text) == text


@pytest.mark.parametrize("shown", ["s3cret-0123456789%2F%2Babcdef", r"s3cret-0123456789\/+abcdef", SECRET])
def test_a_secret_is_hidden_before_a_message_is_cut(shown, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    for n in range(LONGEST - 30, LONGEST):
        assert "s3c" not in one_sentence(ValueError("x" * n + shown))


@pytest.mark.parametrize("name", ["report", "ledger", "sample", "export", "evaluate", "verify"])
def test_every_command_hides_secrets_in_its_messages(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    more = {"export": [str(tmp_path / "out")], "evaluate": ["--judge", "human"]}.get(name, [])
    main = importlib.import_module(f"dpo.commands.{name}").main
    assert main([f"{tmp_path}/{SECRET}", *more]) == (1 if name == "verify" else 2)
    shown = "".join(capsys.readouterr())
    assert "REDACTED" in shown
    assert "s3cret" not in shown


def test_an_error_of_a_scoring_function_is_hidden_in_an_evaluation_as_in_training(
    copied, monkeypatch, capsys, tmp_path
):
    from dpo.commands.evaluate import main

    monkeypatch.setenv("MY_API_KEY", SECRET)
    (tmp_path / "judge.py").write_text(FAILING)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Who is there?"}])
    arguments = [str(copied("run")), "--prompts", str(prompts), "--max-new-tokens", "2", "--limit", "1"]
    assert main([*arguments, "--judge", f"function:{tmp_path / 'judge.py'}:score", "--out", str(tmp_path / "out")]) == 1
    shown = "".join(capsys.readouterr())
    assert "no access with REDACTED" in shown
    assert "s3cret" not in shown


def test_what_libraries_and_tracebacks_print_is_hidden(tmp_path: Path):
    result = run_python("-c", PRINTING, MY_API_KEY=SECRET)
    assert result.stdout == "a line of REDACTED\n"
    assert "ValueError: a bug that quotes REDACTED" in result.stderr
    assert SECRET not in result.stderr.replace(f'quotes {SECRET}")', "")  # the line of the source
