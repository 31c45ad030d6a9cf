"""requirements.lock has a version of each package that we chose."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.runs import ROOT


def read_lines(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-r ")]


def test_each_requirement_is_locked_in_a_version_that_fits():
    pinned = [line.split("==") for line in read_lines("requirements.lock")]
    locked = {canonicalize_name(name): version for name, version in pinned}
    for line in (*read_lines("requirements.txt"), *read_lines("requirements-dev.txt")):
        requirement = Requirement(line)
        version = locked.get(canonicalize_name(requirement.name), "none")
        assert version in requirement.specifier, f"{line} does not fit {version}: run `make lock`"
