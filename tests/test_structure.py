"""Structure of the code: how much there is, how densely it is written, and which module may import which.

docs/architecture.md describes the structure.
"""

import ast
import collections
import graphlib
import importlib
import io
import itertools
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.pytests import succeeded
from support.runs import ROOT, run_python

LIMITS = {  # tokens of Python and Jinja; what adds to them names what goes. Lines, docstrings and comments are free
    "product": 154_000,
    "experiments and benchmarks": 18_700,
    "tests": 186_800,
}
DOCUMENT_KB, README_LINES = 266, 190
PARTS = {"tests": "tests", "experiments": "experiments and benchmarks", "benchmarks": "experiments and benchmarks"}
# Each of these packages and modules of `dpo` imports itself and those before it.
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
    """Find the line and column at which each statement that is only a text begins."""
    alone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return {(value.lineno, value.col_offset) for value in alone if isinstance(getattr(value, "value", None), str)}


def list_tokens(text: str) -> Iterator[tuple[str, tuple[int, int], int]]:
    """List tokens without comments and layout: the text, the line and column where it begins, and its last line."""
    lines = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]  # where each begins
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":  # from Python 3.12 on; before, a string with values is one token
            start = start if depth else token.start
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            if depth == 0:
                ends = lines[token.end[0] - 1] + token.end[1]
                yield text[lines[start[0] - 1] + start[1] : ends], start, token.end[0]
        elif depth == 0 and kind in ("NAME", "OP", "NUMBER", "STRING"):
            yield token.string, token.start, token.end[0]


def count_tokens(text: str) -> int:
    """Count tokens without docstrings; of a string, also one with values, each word counts."""
    docstrings = find_docstrings(text)
    return sum(len(token.split()) for token, start, _ in list_tokens(text) if start not in docstrings)


def test_a_string_counts_its_words_and_layout_and_docstrings_count_nothing():
    assert count_tokens('x = f"two words" + "" \n# a comment\nif x:\n    pass\n') == 10
    assert count_tokens('"""A module."""\ndef f():\n    """Say\n    little."""\n    "no docstring".strip()\n') == 11


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


# --- style, which `make lint` checks ----------------------------------------------------------------------------------

MOST = {  # of a kind per 1,000 lines of dpo/ and of the files at the top; there is none of any other
    "tokens": 8_400,
    "comprehensions": 42,
    "conditional expressions": 27,
    "tuple assignments": 10,
}


def find_kinds(node: ast.AST) -> Iterator[str]:
    """Find what makes code dense, and docstrings that begin in mid-sentence."""
    match node:
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield "comprehensions"
            if sum(isinstance(part, ast.comprehension) for part in ast.walk(node)) > 2:
                yield "comprehensions of three levels"
        case ast.IfExp():
            yield "conditional expressions"
            if isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp):
                yield "conditionals inside conditionals"
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
            yield "tuple assignments"
        case ast.For(iter=ast.IfExp()) | ast.comprehension(iter=ast.IfExp()):
            yield "loops over conditionals"
        case ast.Call():
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
                    yield "literals unpacked into calls"
        case ast.BinOp(op=ast.Mult()):
            sides = [ast.unparse(side) for side in (node.left, node.right)]
            # A condition has names, calls or operators such as these.
            condition = r"not |bool\(|[\w.]*\b(is|has|with)_|.* (and|or|in|is|[<>=!]+) [^)]*$"
            if any(re.match(r"f?['\"[(]", side) for side in sides) and any(re.match(condition, side) for side in sides):
                yield "texts or lists times conditions"
        case ast.FunctionDef() | ast.ClassDef():
            if re.match(r"[a-z]|(Raises|Also|With|Without|Of|As|Unlike|Only)\b", ast.get_docstring(node) or ""):
                yield "docstrings that begin in mid-sentence"


def find_dense_kinds(texts: Iterable[str]) -> dict[str, tuple[float, list[str]]]:
    """Find the kinds of which these files have more than MOST: how many per 1,000 lines, and some of them."""
    n_lines = 0
    places = collections.defaultdict(list)
    for text in texts:
        lines = set()
        for token, (line, _), last_line in list_tokens(text):
            lines.update(range(line, last_line + 1))
            places["tokens"].append(token)
        n_lines += len(lines)
        for node in ast.walk(ast.parse(text)):
            for kind in find_kinds(node):
                places[kind].append(ast.unparse(node))
    found = {kind: (1000 * len(all_of_kind) / n_lines, all_of_kind[-9:]) for kind, all_of_kind in places.items()}
    return {kind: (rate, last) for kind, (rate, last) in found.items() if rate > MOST.get(kind, 0)}


DENSE = """
[a for b in c for d in b for a in d]
a if b else c if d else e
for a in b if c else d: pass
a(*(b, c))
'a' * (b > c)
class A: 'with a'
a, b = c, d
"""


def test_the_style_is_no_denser_than_was_agreed():
    assert find_dense_kinds(path.read_text() for path in (*PATHS, *ROOT.glob("*.py"))) == {}
    assert len(find_dense_kinds([DENSE])) == 10  # all


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


def test_private_names_of_libraries_are_at_most_thirteen_in_a_table_with_the_tests_that_would_notice():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+? \| .*?`(test_\w+\.py)`", text.partition("## Private names")[2], re.MULTILINE)
    names = list_private_names()
    assert {name for cell, _ in rows for name in re.findall(r"\b_[a-z]\w*", cell)} == names
    assert len(names) <= 13
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
