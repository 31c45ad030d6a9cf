"""Structure of the code: which module may import which, and how functions are named.

docs/architecture.md describes the structure.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess

import pytest
from support.runs import ROOT, run_python

PACKAGES = (  # of `dpo`; each imports itself and those before it
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


def find_imports(module: str) -> set[str]:
    """Find the full names that a module imports, also inside functions."""
    imports = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imports


DEPENDENCIES = {module: find_imports(module) & FILES.keys() for module in FILES}  # among our own modules


def find_importers(library: str) -> set[str]:
    return {module for module in FILES if library in {name.split(".")[0] for name in find_imports(module)}}


def get_rank(module: str) -> int:
    """Place of a module's package in PACKAGES; the public modules come last."""
    return len(PACKAGES) if module in PUBLIC else PACKAGES.index(module.split(".")[1])


def test_every_module_is_public_or_in_a_package():
    assert {path.stem for path in ROOT.glob("*.py")} == set(PUBLIC)
    packages = {path.stem for path in (ROOT / "dpo").iterdir() if path.name not in ("__pycache__", "__init__.py")}
    assert packages == set(PACKAGES)


def test_a_package_imports_itself_and_the_packages_before_it():
    upward = {
        f"{module} imports {other}"
        for module in DEPENDENCIES
        for other in DEPENDENCIES[module] - {"dpo"}
        if module != "dpo" and get_rank(other) > get_rank(module)
    }
    assert upward == set()


def test_there_is_no_cycle():
    order = list(graphlib.TopologicalSorter(DEPENDENCIES).static_order())  # raises CycleError, which names the modules
    assert set(order) == FILES.keys()


def test_each_of_these_libraries_is_known_in_one_place():
    assert find_importers("wandb") == {"dpo.reporting.trackers"}
    assert find_importers("hydra") == {"train", "dpo.settings.command_line"}
    outside_settings = {module for module in find_importers("omegaconf") if not module.startswith("dpo.settings.")}
    assert outside_settings == {"train", "trainers", "dpo.training.porting"}
    name_shards = {module for module, file in FILES.items() if re.search("DTensor|DeviceMesh", file.read_text("utf-8"))}
    assert {module.rpartition(".")[0] for module in name_shards} == {"dpo.parallel"}


def test_the_recipe_is_short_and_the_trainer_gets_what_it_uses():
    assert len(FILES["train"].read_text("utf-8").splitlines()) <= 290
    assert len(DEPENDENCIES["trainers"] - {"dpo"}) <= 22


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


@pytest.mark.slow
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
    paths = {"neighbour": b".." + b"/shared", "absolute": b"/wo" + b"rk/"}  # in two parts, as this file is read too
    mentions = {
        f"{name}: {kind}"
        for name in listed.stdout.decode().split("\0")
        if name and (ROOT / name).is_file()
        for kind, path in paths.items()
        if path in (ROOT / name).read_bytes()
    }
    assert mentions == set()  # tests/support/runs.py finds the maintainers' data as ROOT.parent / "shared"


def test_functions_are_named_after_what_they_do():
    """`find_size`, not `size_of`."""
    badly_named = []
    for name in (*PUBLIC, "dpo", "scripts", "benchmarks", "experiments"):
        for path in [ROOT / f"{name}.py"] if name in PUBLIC else sorted((ROOT / name).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and re.search("^_?of_|(?<!out)(?<!best)_of(_|$)", node.name):
                    badly_named.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert badly_named == []
