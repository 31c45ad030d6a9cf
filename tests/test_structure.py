"""The shape of the code: which file may know which.

What fails here is drawn in docs/architecture.md.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from support.runs import ROOT, run_python

ROOMS = (
    "errors",
    "numbers",
    "losses",
    "system",
    "settings",
    "data",
    "parallel",
    "checkpoint",
    "models",
    "analysis",
    "reporting",
    "training",
)
PUBLIC = ("train", "trainers", "preference_datasets", "utils")
PATHS = [ROOT / f"{name}.py" for name in PUBLIC] + sorted((ROOT / "dpo").rglob("*.py"))
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports_of(name: str) -> set[str]:
    """The modules a file imports, also inside functions, with dots."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


OURS = {name: imports_of(name) & FILES.keys() for name in FILES}


def importers_of(module: str) -> set[str]:
    return {name for name in FILES if module in {found.split(".")[0] for found in imports_of(name)}}


def room_of(name: str) -> str:
    return name.split(".")[1]


def test_the_house_has_no_other_rooms():
    assert {path.stem for path in ROOT.glob("*.py")} == set(PUBLIC)
    assert {path.stem for path in (ROOT / "dpo").iterdir() if path.name not in ("__pycache__", "__init__.py")} == set(
        ROOMS
    )


def test_a_room_imports_itself_and_the_rooms_before_it():
    upward = {
        f"{name} imports {other}"
        for name in OURS
        for other in OURS[name] - {"dpo"}
        if name.startswith("dpo.") and (other in PUBLIC or ROOMS.index(room_of(other)) > ROOMS.index(room_of(name)))
    }
    assert upward == set()


def test_there_is_no_cycle():
    order = list(graphlib.TopologicalSorter(OURS).static_order())  # raises CycleError, which names the files
    assert set(order) == FILES.keys()


def test_each_foreign_world_has_one_door():
    assert importers_of("wandb") == {"dpo.reporting.wandb"}
    assert importers_of("hydra") == {"train", "dpo.settings.command_line"}
    assert {name for name in importers_of("omegaconf") if not name.startswith("dpo.settings.")} == {"train", "trainers"}
    knows_shards = {name for name, file in FILES.items() if re.search("DTensor|DeviceMesh", file.read_text("utf-8"))}
    assert {name.rpartition(".")[0] for name in knows_shards} == {"dpo.parallel"}


def test_data_and_losses_know_no_processes():
    for name in FILES:
        if name in ("preference_datasets", "dpo.losses") or name.startswith("dpo.data."):
            assert not re.search(r"\b(world_size|torch\.distributed)\b", FILES[name].read_text("utf-8")), name


IMPORT_ALL = """
import importlib, random, sys
import numpy, torch
allow_tf32, dtype = torch.backends.cuda.matmul.allow_tf32, torch.get_default_dtype()
states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
for name in sys.argv[1:]:
    importlib.import_module(name)
assert torch.backends.cuda.matmul.allow_tf32 == allow_tf32 == False
assert torch.get_default_dtype() == dtype
assert torch.equal(torch.get_rng_state(), states[0])
assert random.getstate() == states[1]
assert (numpy.random.get_state()[1] == states[2]).all()
"""


def test_importing_prints_and_changes_nothing(tmp_path):
    result = run_python("-c", IMPORT_ALL, *FILES, cwd=tmp_path, PYTHONPATH=str(ROOT))

    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_checking_a_config_needs_no_torch():
    script = (
        "import sys, dpo.settings.validation; assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    )
    result = run_python("-c", script, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr


def test_nothing_depends_on_where_the_project_lies():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = {"neighbour": b".." + b"/shared", "absolute": b"/wo" + b"rk/"}  # in two parts, for this file is read too
    found = {
        f"{name}: {kind}"
        for name in listed.stdout.decode().split("\0")
        if name and (ROOT / name).is_file()
        for kind, text in places.items()
        if text in (ROOT / name).read_bytes()
    }
    assert found == set()  # tests/support/runs.py finds the maintainers' data as ROOT.parent / "shared"


DESCRIBED = (*PUBLIC, "dpo", "scripts", "benchmarks", "experiments")  # files and folders of what is not a test


def list_documented() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef | ast.Module]]:
    """Everything that may have a docstring, with where it is."""
    for name in DESCRIBED:
        for path in [ROOT / f"{name}.py"] if name in PUBLIC else sorted((ROOT / name).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", node


def test_functions_are_named_after_what_they_do_and_docstrings_say_it_in_a_dozen_words():
    badly_named, wordy = [], []
    for place, node in list_documented():
        if isinstance(node, ast.FunctionDef) and re.search("^_?of_|(?<!out)(?<!best)_of(_|$)", node.name):
            badly_named.append(place)
        words = (ast.get_docstring(node) or "-").splitlines()[0].split()
        if len(words) > 12 or words[0] in ("Of", "What", "Whether"):
            wordy.append(f"{place}: {' '.join(words)}")
    assert badly_named == []
    assert wordy == []
