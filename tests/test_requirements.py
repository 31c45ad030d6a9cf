"""requirements.lock has a version of each package that the project asks for."""

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMED = {Requirement(line).name for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines}


def read_lines(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def test_each_requirement_is_locked_in_a_version_that_fits():
    pinned = [line.split("==") for line in read_lines("requirements.lock")]
    locked = {canonicalize_name(name): version for name, version in pinned}
    for line in (*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)):
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            version = locked.get(canonicalize_name(requirement.name), "none")
            assert version in requirement.specifier, f"{line} does not fit {version}: run `make lock`"


def test_requirements_txt_names_what_is_used_in_the_locked_versions():
    assert "-c requirements.lock" in (ROOT / "requirements.txt").read_text()
    known = {"tqdm", "accelerate"}  # come with transformers; or are asked for where BasicTrainer has several GPUs
    assert {Requirement(line).name for line in read_lines("requirements.txt")} <= NAMED | known
    assert "tensor-parallel" in read_lines("requirements.txt")
