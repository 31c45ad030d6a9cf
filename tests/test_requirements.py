"""requirements.lock has the packages that the requirements need, no others."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.runs import ROOT

CHANGED = "does not fit requirements*.txt: run `make lock`"


def make_lines(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-r ")]


def locked_versions() -> dict[str, str]:
    pairs = (line.split("==") for line in make_lines("requirements.lock"))
    return {canonicalize_name(name): version for name, version in pairs}


CHOSEN = [Requirement(line) for name in ("requirements.txt", "requirements-dev.txt") for line in make_lines(name)]
LOCKED = locked_versions()


@pytest.mark.parametrize("requirement", CHOSEN, ids=str)
def test_the_lock_has_what_we_chose(requirement):
    assert LOCKED.get(canonicalize_name(requirement.name), "none") in requirement.specifier, CHANGED


def needs_of(requirement: Requirement) -> list[Requirement]:
    """The requirements of an installed package here, with its extras."""
    found = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
    return [
        need
        for need in found
        if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in (requirement.extras or {""}))
    ]


def test_the_lock_has_what_those_need_and_nothing_else():
    reached, todo = set(), list(CHOSEN)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        seen = (name, *sorted(requirement.extras))
        if seen in reached:
            continue
        reached.add(seen)
        if name == "torch":  # a CUDA build pins its own CUDA packages, which a CPU build does not have
            todo += [need for need in needs_of(requirement) if canonicalize_name(need.name) in LOCKED]
            continue
        assert LOCKED.get(name, "none") in requirement.specifier, f"{requirement}: the lock {CHANGED}"
        todo += needs_of(requirement)
    if sys.version_info[:2] == (3, 11):  # made there; later Pythons need fewer
        assert {name for name, *_ in reached} == LOCKED.keys(), CHANGED
