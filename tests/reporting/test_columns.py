"""Texts beside each other on a terminal, whole in the end."""

from __future__ import annotations

import os
import re

import pytest

from dpo.reporting.columns import Columns, measure_width, wrap


@pytest.mark.parametrize(
    "text", ["a few words and a verylongwordindeed", "two\n\nlines", "猫が好きです。とても", "e\u0301" * 9, ""]
)
def test_lines_fit_and_hold_all_words(text):
    lines = wrap(text, 8)
    assert all(measure_width(line) <= 8 for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


def screen_of(written: str) -> list[str]:
    """The lines that a terminal shows, also above its upper edge."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[AJm]|\n|\r)", written):
        if match := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(match[1])
        elif part == "\x1b[J":
            lines = [*lines[:row], ""]
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part not in ("", "\r") and not part.startswith("\x1b"):
            lines[row] = part
    return lines


@pytest.mark.parametrize("rows", [4, 50])
def test_what_grows_is_whole_in_the_end(rows, monkeypatch, capsys):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((45, rows)))
    texts = {"policy": "word " * 60, "reference": "another sentence.\n" * 9}
    columns = Columns(list(texts))
    highest = 0
    for n in range(0, 300, 7):
        for title, text in texts.items():
            columns.show(title, text[:n])
            highest = max(highest, columns.n_drawn)
    for title, text in texts.items():
        columns.show(title, text)
    columns.close(["3 tokens", "4 tokens"])

    lines = screen_of(capsys.readouterr().out)
    assert highest < rows  # a terminal cannot go back above its upper edge
    left, right = ([line[start : start + 21].strip() for line in lines[1:]] for start in (0, 23))
    assert lines[0].split() == ["policy", "reference"]
    assert " ".join(left).split() == ["word"] * 60 + ["3", "tokens"]
    assert " ".join(right).split() == ["another", "sentence."] * 9 + ["4", "tokens"]


def test_what_would_steer_the_terminal_is_replaced():
    assert wrap("red \x1b[31m\x07alarm", 40) == ["red \ufffd[31m\ufffdalarm"]
