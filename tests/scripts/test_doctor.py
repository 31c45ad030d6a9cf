"""The doctor, on this machine and where something is wrong."""

import pytest
from support.runs import run_python


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
