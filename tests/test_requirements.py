"""requirements.lock has the packages that the requirements need, no others."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.runs import ROOT


def read_lines(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-r ")]


LOCKED = {
    canonicalize_name(name): version for name, version in (x.split("==") for x in read_lines("requirements.lock"))
}


def find_needs(requirement: Requirement) -> list[Requirement]:
    """The requirements of an installed package here, with its extras."""
    found = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
    extras = requirement.extras or {""}
    needs = [n for n in found if not n.marker or any(n.marker.evaluate({"extra": extra}) for extra in extras)]
    if canonicalize_name(requirement.name) == "torch":  # a CUDA build pins CUDA packages, which a CPU build lacks
        return [need for need in needs if canonicalize_name(need.name) in LOCKED]
    return needs


def test_the_lock_has_what_we_chose_and_what_that_needs_and_nothing_else():
    todo = [Requirement(line) for name in ("requirements.txt", "requirements-dev.txt") for line in read_lines(name)]
    reached = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in reached:
            continue
        reached.add((name, *sorted(requirement.extras)))
        assert LOCKED.get(name, "none") in requirement.specifier, f"{requirement} does not fit: run `make lock`"
        todo += find_needs(requirement)
    if sys.version_info[:2] == (3, 11):  # made there; later Pythons need fewer
        assert {name for name, *_ in reached} == LOCKED.keys(), "run `make lock`"
