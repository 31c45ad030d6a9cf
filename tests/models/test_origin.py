"""Models that paths name, and when another base may be given."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import GOLDEN

from dpo.errors import InputError
from dpo.models.origin import find_origin
from dpo.models.side_by_side import load_panel

LLAMA = str(GOLDEN / "tiny-llama")
OTHER = str(GOLDEN)  # any directory


def run_with(base: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "policy.pt").touch()
    (folder / "config.yaml").write_text(f"model: {{name_or_path: {base}}}")
    return folder


def base_of(path: str | Path, **options) -> str:
    return find_origin(path, **options).plan.model.name_or_path


@pytest.mark.parametrize("path", [LLAMA, "some/model"])
def test_a_model_is_not_replaced_by_another(path):
    assert base_of(path, hub=True) == path
    with pytest.raises(InputError, match=rf"{path} is a whole model, which needs no --model {OTHER}: "):
        find_origin(path, model=OTHER, hub=True)
    assert base_of(path, model=OTHER, hub=True, alone=False) == path


def test_a_base_model_is_for_the_weights_that_lack_one(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "policy.pt").touch()
    whole, moved = run_with(LLAMA, tmp_path / "whole"), run_with("../moved/away", tmp_path / "moved")
    for alone in (True, False):
        assert base_of(tmp_path / "bare", model=OTHER, alone=alone) == OTHER
        assert base_of(moved, model=OTHER, alone=alone) == OTHER
        assert base_of(whole, model=OTHER, alone=alone) == (OTHER if alone else LLAMA)
    with pytest.raises(InputError, match=f"--model {OTHER} is not needed: every policy has a base model of its own"):
        load_panel([whole, LLAMA], model=OTHER)


def test_an_interpolation_in_the_config_of_a_run_from_elsewhere_is_refused(tmp_path):
    """It would put this machine's environment into a model card."""
    run = run_with(LLAMA, tmp_path / "run")
    with (run / "config.yaml").open("a") as file:
        file.write("\nexp_name: ${oc.env:HOME}\n")
    with pytest.raises(InputError, match=r"'\$\{oc\.env:HOME\}' is an interpolation, not a value"):
        find_origin(run)
