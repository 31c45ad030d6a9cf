"""`dpo.run` trains as `dpo train` does, and leaves no process."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.pytests import refused
from support.runs import ROOT, make_environment, read_code, read_metrics, small_run

import dpo
from dpo.api import _write_value
from dpo.settings.command_line import PARSER, parse_key

ROWS = [{"prompt": f"What is {i}?", "chosen": f" It is {i}.", "rejected": f" No {i}."} for i in range(40)]


@pytest.fixture
def keys(rows, tmp_path, monkeypatch) -> dict:
    monkeypatch.chdir(tmp_path)
    for name, value in make_environment().items():
        monkeypatch.setenv(name, value)
    given = {parse_key(o): PARSER.parse_override(o).value() for o in small_run(rows, tmp_path / "run")}
    own = {key: value for key, value in given.items() if key != "datasets"}
    return own | {"wandb.enabled": False, "n_examples": 8, "sample_during_eval": True, "export": True}


def list_processes(text: str) -> list[str]:
    """Command lines with a text."""
    listed = subprocess.run(["ps", "-ewwo", "args="], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if text in line]


def test_rows_are_trained_on_and_the_result_has_metrics_samples_a_verdict_and_a_model(keys, capsys):
    result = dpo.run(keys, data=ROWS)

    assert list(result.metrics["loss/train"].dropna()) == [
        line["loss/train"] for line in read_metrics(Path(keys["local_run_dir"]), "train")
    ]
    assert {"prompt", "policy", "reference"} <= {*result.samples.columns}
    assert "held-out pairs" in result.verdict
    assert (result.model / "config.json").exists()
    assert repr(result).startswith(str(result.directory))
    assert list_processes(keys["local_run_dir"]) == []
    output = capsys.readouterr()
    assert "evaluation after 0 examples" in output.out
    assert re.search(r"2/2 \[", output.err)  # the bar


@pytest.mark.slow
def test_the_lines_of_the_readme_train(keys, monkeypatch, printed):
    lines = read_code(ROOT / "README.md")
    assert len([line for line in lines.splitlines() if line]) == 5
    train = dpo.run
    small = "model=demo wandb.enabled=false n_epochs=1 max_length=48 max_prompt_length=32"  # the model is on the Hub
    monkeypatch.setattr(dpo, "run", lambda keys, data: train(f"{keys} {small}", data), raising=False)
    exec(lines.replace("import dpo\n", ""), {"dpo": dpo})
    assert "The model" in printed()


def test_bad_input_is_an_error_with_all_problems(keys):
    with refused(r"(?s)(?=.*unknown key loss.betta: did you mean loss.beta).*lr=-1 must be"):
        dpo.run({**keys, "loss.betta": 0.1, "lr": -1}, data=ROWS)
    with refused(r"data is 3: pass rows, or one split"):
        dpo.run(keys, data=3)
    with refused("rows.csv does not exist"):
        dpo.run(keys, data="rows.csv")
    with refused("there is no data: pass data=ROWS"):
        dpo.run(keys)
    with refused("data and datasets exclude each other: use one"):
        dpo.run({**keys, "datasets": "demo"}, data=ROWS)
    with refused(r"record 3 of data: chosen is missing"):
        dpo.run({**keys, "dry_run": True}, data=[*ROWS[:2], {"prompt": "?"}, *ROWS])


def test_a_table_of_pandas_is_trained_on_and_lies_where_local_dirs_says(keys, tmp_path):
    table = pd.DataFrame([{**ROWS[0], "system": "Be kind."}, *ROWS[1:]])  # its empty cells are NaN
    result = dpo.run({**keys, "dry_run": True, "local_dirs": [str(tmp_path / "mine")]}, data=table)
    assert len(list((tmp_path / "mine").glob("*/dpo-rows/*.jsonl"))) == 1
    assert dpo.Result(str(result.directory)).directory == result.directory


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_whose_caller_is_interrupted_or_killed_saves_and_ends(keys, number, tmp_path):
    keys |= {"n_examples": 4000, "eval_every": 4000}
    code = f"import dpo; print(dpo.run({keys!r}, data={ROWS!r}))"
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and '"train"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    caller.send_signal(number)
    caller.communicate(timeout=100)
    while list_processes(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert caller.returncode == -number
    assert (tmp_path / "run" / "LATEST" / "manifest.json").exists()
    assert list_processes(str(tmp_path)) == []


NAMES = st.from_regex("[a-z_]+", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(NAMES, parts, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=50)
@given(VALUES)
@example("\\\n")
def test_every_value_is_read_as_it_was_given(value):
    assert PARSER.parse_override(f"key={_write_value(value)}").value() == value
