"""Structure of the code: how much there is, and which module may import which.

docs/architecture.md describes the structure.
"""

import ast
import graphlib
import importlib
import io
import itertools
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
from support.pytests import succeeded
from support.runs import ROOT, run_python

LIMITS = {  # tokens of Python and Jinja; what adds to them names what goes. Lines, docstrings and comments are free
    "product": 156_000,
    "experiments and benchmarks": 18_700,
    "tests": 186_000,
}
DOCUMENT_KB, README_LINES = 256, 190
PARTS = {"tests": "tests", "experiments": "experiments and benchmarks", "benchmarks": "experiments and benchmarks"}
# of `dpo`, and modules; each imports itself and those before it
ORDER = """
redaction errors numbers losses system plugins settings data parallel checkpoint models analysis
reporting training preference_datasets judging trainers utils recipe train commands api __main__
"""
PACKAGES = ("", *ORDER.split())
PUBLIC = ("train", "trainers", "preference_datasets", "utils")  # the reference code's files
PATHS = sorted((ROOT / "dpo").rglob("*.py"))
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}
TEXTS = {name: path.read_text() for name, path in FILES.items()}


# --- size -------------------------------------------------------------------------------------------------------------


def list_files() -> list[Path]:
    """The files of the project, without those that git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def find_docstrings(text: str) -> set[tuple[int, int]]:
    """Find the line and column at which each docstring begins."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    firsts = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    return {(first.lineno, first.col_offset) for first in firsts}


def count_tokens(text: str) -> int:
    """Count tokens without docstrings, comments and layout; of a string, also one with values, each word counts."""
    docstrings = find_docstrings(text)
    lines = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]  # where each begins
    n, depth, start = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if token.start in docstrings and kind == "STRING":
            continue
        if kind == "FSTRING_START":  # from Python 3.12 on; before, it is a STRING
            start = start if depth else lines[token.start[0] - 1] + token.start[1]
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            n += len(text[start : lines[token.end[0] - 1] + token.end[1]].split()) if depth == 0 else 0
        elif depth == 0 and kind not in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"):
            n += len(token.string.split()) if kind == "STRING" else 1
    return n


def test_a_string_counts_its_words_and_layout_and_docstrings_count_nothing():
    assert count_tokens('x = f"two words" + "" \n# a comment\nif x:\n    pass\n') == 10
    assert count_tokens('"""A module."""\ndef f():\n    """Say\n    little."""\n    "no docstring"\n') == 7


@pytest.mark.parametrize("part", LIMITS)
def test_there_is_no_more_code_than_was_agreed(part):
    n_tokens = 0
    for file in list_files():
        if file.suffix in (".py", ".jinja") and PARTS.get(file.relative_to(ROOT).parts[0], "product") == part:
            text = file.read_text()
            n_tokens += count_tokens(text) if file.suffix == ".py" else len(text.split())
    assert n_tokens <= LIMITS[part], f"{part}: {n_tokens - LIMITS[part]:,} tokens too many: take out as much"


def test_the_documents_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    assert sum(file.stat().st_size for file in list_files() if file.suffix == ".md") <= 1000 * DOCUMENT_KB


# --- imports ----------------------------------------------------------------------------------------------------------


def find_imports(module: str) -> set[str]:
    """Find the full names that a module imports, also inside functions."""
    imports = set()
    for node in ast.walk(ast.parse(TEXTS[module])):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imports


IMPORTS = {module: find_imports(module) for module in FILES}
DEPENDENCIES = {module: IMPORTS[module] & FILES.keys() for module in FILES}  # among our own modules


def get_rank(module: str) -> int:
    """Place of a module's package in PACKAGES."""
    return PACKAGES.index(module.removeprefix("dpo").removeprefix(".").partition(".")[0])


def test_a_package_imports_itself_and_the_packages_before_it_and_there_is_no_cycle():
    upward = {
        f"{module} imports {other}"
        for module in DEPENDENCIES
        for other in DEPENDENCIES[module]
        if get_rank(other) > get_rank(module)
    }
    assert upward == set()
    order = list(graphlib.TopologicalSorter(DEPENDENCIES).static_order())  # raises CycleError, which names the modules
    assert set(order) == FILES.keys()


def test_the_files_at_the_top_are_the_modules_of_the_package():
    assert {path.stem for path in ROOT.glob("*.py")} == set(PUBLIC)
    for name in PUBLIC:
        assert importlib.import_module(name) is importlib.import_module(f"dpo.{name}")


def test_each_of_these_libraries_is_known_in_one_place():
    def find_importers(library: str) -> set[str]:
        return {module for module in FILES if library in {name.split(".")[0] for name in IMPORTS[module]}}

    assert find_importers("wandb") == {"dpo.reporting.trackers"}
    assert find_importers("hydra") == {"dpo.train", "dpo.settings.command_line"}
    outside_settings = {module for module in find_importers("omegaconf") if not module.startswith("dpo.settings.")}
    assert outside_settings == {"dpo.train", "dpo.trainers"}
    name_shards = {module for module, text in TEXTS.items() if re.search("DTensor|DeviceMesh", text)}
    assert {module.rpartition(".")[0] for module in name_shards} == {"dpo.parallel"}
    without_processes = ("dpo.preference_datasets", "dpo.losses", "dpo.data.")
    name_processes = {
        module for module, text in TEXTS.items() if re.search(r"\b(world_size|torch\.distributed)\b", text)
    }
    assert {module for module in name_processes if module.startswith(without_processes)} == set()


def list_private_names() -> set[str]:
    """The private names of libraries in our code: attributes, imports, and arguments of getattr and the like."""
    code = "\n".join(ast.unparse(ast.parse(text)) for text in TEXTS.values())  # without comments; strings end in '
    names = {*re.findall(r"\.(_[a-z]\w*)\b(?!')|import (_[a-z]\w*)|attr\(\w+, '(_[a-z]\w*)'", code)}
    defined = {*re.findall(r"(?:def |class |self\.|cls\.)(_[a-z]\w*)", code)}
    documented = {"_replace", "_asdict", "_fields", "_exit"}  # those of named tuples, and os._exit
    return {name for found in names for name in found if name} - defined - documented


def test_private_names_of_libraries_are_at_most_ten_in_a_table_with_the_tests_that_would_notice():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+? \| .*?`(test_\w+\.py)`", text.partition("## Private names")[2], re.MULTILINE)
    names = list_private_names()
    assert {name for cell, _ in rows for name in re.findall(r"\b_[a-z]\w*", cell)} == names
    assert len(names) <= 10
    assert {test for _, test in rows} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_every_file_has_a_row_in_the_table_of_packages():
    text, package, rows = (ROOT / "docs" / "architecture.md").read_text(), "", set()
    for first, files in re.findall(r"^\| (.*?) ?\| (`.+?`) \|", text.partition("## Words")[0], re.MULTILINE):
        package = first.strip("`") or package
        names = re.findall(r"`(.+?)`", files)
        rows |= {file if file.startswith("dpo/") else f"dpo/{package}/{file}" for file in names}
    wanted = {str(path.relative_to(ROOT)) for path in PATHS if path.stat().st_size}
    assert wanted <= rows, f"docs/architecture.md lacks {wanted - rows}"
    assert all((ROOT / row).exists() for row in rows), rows


def test_checking_a_config_needs_no_torch():
    loaded = "{'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    succeeded(run_python("-c", f"import sys, dpo.settings.validation; assert not {loaded}", PYTHONPATH=str(ROOT)))


def test_nothing_depends_on_where_the_project_lies():
    paths = (b".." + b"/shared", b"/wo" + b"rk/")  # in two parts, as this file is read too
    assert [file for file in list_files() if any(path in file.read_bytes() for path in paths)] == []
