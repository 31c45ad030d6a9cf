"""The doctor, on this machine and where something is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.runs import run_python

from scripts import doctor


@pytest.mark.slow  # starts processes that import torch
def test_report_of_this_machine():
    result = run_python("-m", "scripts.doctor")

    assert (result.returncode, result.stderr) == (0, "")
    assert "python 3." in result.stdout
    assert "processes: the sum is right" in result.stdout
    assert result.stdout.endswith("no problems\n")


def test_a_torch_that_does_not_import_is_a_problem_with_its_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")

    result = run_python("-m", "scripts.doctor", PYTHONPATH=str(tmp_path))

    assert result.returncode == 1
    assert "libcudart.so.13 is missing" in result.stdout
    assert result.stderr == ""


def test_packages_that_are_missing_or_of_another_major_version_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "requirements.txt").write_text("no_such_package==1.0\nnumpy==1.0\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))

    assert "no_such_package is not installed: pip install -r requirements.txt" in doctor.list_problems()

    assert "(tested 1.0)" in capsys.readouterr().out
