"""Models that paths name, and when another base may be given."""

from pathlib import Path

from support.pytests import refused
from support.runs import GOLDEN, TINY, append_text

from dpo.models.paths import find_model

OTHER = str(GOLDEN)  # any directory


def run_with(base: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "policy.pt").touch()
    (folder / "config.yaml").write_text(f"model: {{name_or_path: {base}}}")
    return folder


def base_of(path: str | Path, **options) -> str:
    return find_model(path, **options).plan.model.name_or_path


def test_a_model_is_not_replaced_by_another():
    assert base_of("some/model", hub=True) == "some/model"
    with refused(rf"{TINY!s} is a whole model: "):
        find_model(str(TINY), model=OTHER)


def test_a_given_base_is_used_instead_of_one_that_is_unknown_or_has_moved(tmp_path):
    (tmp_path / "policy.pt").touch()
    moved = run_with("../moved/away", tmp_path / "moved")
    assert base_of(moved, model=OTHER) == base_of(tmp_path, model=OTHER) == OTHER
    with refused(r"names no base, .*: add --model"):
        find_model(tmp_path)


def test_an_interpolation_in_the_config_of_a_run_from_elsewhere_is_refused(tmp_path):
    """It would put this machine's environment into a model card."""
    run = run_with(str(TINY), tmp_path / "run")
    append_text(run / "config.yaml", "\nexp_name: ${oc.env:HOME}\n")
    with refused(r"'\$\{oc\.env:HOME\}' is an interpolation, not a value"):
        find_model(run)
