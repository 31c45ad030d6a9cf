"""Secrets are hidden wherever they came from, whatever prints them, and before anything is cut."""

import importlib
import json

import pytest
from support.formats import ASK, SKY, assistant
from support.runs import run_python

from dpo.data.custom import get_custom
from dpo.errors import MAX_MESSAGE, InputError, one_sentence
from dpo.redaction import redact

SECRET = "s3cret-0123456789/+abcdef"
PRINTING = f"""\
from dpo.system.host import harden_stdio
harden_stdio()
print("a line", "of {SECRET}")
raise ValueError("a bug that quotes {SECRET}")
"""


@pytest.mark.parametrize(
    ("shown", "redacted"),
    [
        ("https://bob:p@ss0rd@host/x", "https://REDACTED@host/x"),
        ("https://host/x?token=abc&split=train", "https://host/x?token=REDACTED&split=train"),
        ("pg-0123456789 and pat-0123456789", "REDACTED and REDACTED"),
        ("https://example.org/me@home", "https://example.org/me@home"),
        ("eos_token_id=2, pad_token=<pad>", "eos_token_id=2, pad_token=<pad>"),
        ("api_key=value-0123 token=VALUE0x", "api_key=REDACTED token=REDACTED"),
        ({"wandb": {"api_key": "abc"}, "HF_TOKEN": "a"}, {"wandb": {"api_key": "REDACTED"}, "HF_TOKEN": "REDACTED"}),
        ([{"secret": "abc", "token": None, "monkey": "x"}], [{"secret": "REDACTED", "token": None, "monkey": "x"}]),
    ],
)
def test_what_looks_like_a_secret_is_redacted_and_nothing_else(shown, redacted, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "pg-0123456789")
    monkeypatch.setenv("GITHUB_PAT", "pat-0123456789")
    assert redact(shown) == redacted


@pytest.mark.parametrize("secret", ["abc\\def'\"ghi", "ab'cdefgh", "line\nfeed here", "pässwörd-long"])
def test_a_secret_is_redacted_however_it_is_quoted(secret, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", secret)
    for shown in (secret, repr(f"a {secret}"), json.dumps(secret), " ".join(secret.split())):
        assert redact(f"tokenizer {shown} cannot be loaded").count("REDACTED") == 1


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("token", f"{SECRET}\n"),
        ("stored_tokens", f"[a-long-name]\nhf_token = {SECRET}\n"),
        ("netrc", f"machine api.wandb.ai\n  login a-long-name\n  password {SECRET}\n"),
    ],
)
def test_the_logins_of_this_machine_are_hidden(place, content, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    text = f"of {SECRET}, of hf_token and of a-long-name"
    assert redact(text) == text
    (tmp_path / place).write_text(content)
    assert redact(text) == text.replace(SECRET, "REDACTED")


@pytest.mark.parametrize("shown", ["s3cret-0123456789%2F%2Babcdef", r"s3cret-0123456789\/+abcdef", SECRET])
def test_a_secret_is_hidden_before_a_message_is_cut(shown, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    for n in range(MAX_MESSAGE - 30, MAX_MESSAGE):
        assert "s3c" not in one_sentence(ValueError("x" * n + shown))


@pytest.mark.parametrize("field", ["weight", "prompt", "chosen", "tools"])
def test_a_secret_is_hidden_before_a_value_of_a_record_is_cut(field, monkeypatch, chat):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    row = {"prompt": ASK, "chosen": SKY, "rejected": [assistant("Green.")], "weight": 1, "tools": None}
    tokenizer = chat("{% for m in messages %}{{ m.content }}{% endfor %}")
    for n in range(50, 80):
        with pytest.raises(InputError) as refusal:
            get_custom([{**row, field: ["x" * n + SECRET]}], "mine", tokenizer)
        assert "s3c" not in str(refusal.value)


@pytest.mark.parametrize("name", ["report", "ledger", "sample", "export", "evaluate", "verify"])
def test_every_command_hides_secrets_in_its_messages(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    more = {"export": [str(tmp_path / "out")], "evaluate": ["--judge", "human"]}.get(name, [])
    main = importlib.import_module(f"dpo.commands.{name}").main
    assert main([f"{tmp_path}/{SECRET}", *more]) == (1 if name == "verify" else 2)
    shown = "".join(capsys.readouterr())
    assert "REDACTED" in shown
    assert "s3cret" not in shown


def test_what_libraries_and_tracebacks_print_is_hidden():
    result = run_python("-c", PRINTING, MY_API_KEY=SECRET)
    assert result.stdout == "a line of REDACTED\n"
    assert "ValueError: a bug that quotes REDACTED" in result.stderr
    assert SECRET not in result.stderr.replace(f'quotes {SECRET}")', "")  # the line of the source
