"""Commands, links, files, tests and make targets in the documents exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from support.commands import compose, find_refusals
from support.pytests import sampled
from support.runs import ROOT

from dpo.commands import COMMANDS as ALL_COMMANDS

COMMANDS = [name for name in ALL_COMMANDS if name != "train"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page: page.read_text() for page in PAGES}
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b(?!\.md)")
# Readers who follow CONTRIBUTING.md (as tests/runs/test_extensions.py does) or docs/online.md use these.
TO_BE_WRITTEN = ("config/loss/cpo.yaml", "loss=cpo", "rewards.py", "optimizer=Lion", "plugins=[my.py]", "my.py")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {".git", ".venv", ".cache"}
OURS = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {f.name for f in ROOT.iterdir()}
TEST_FILES = [*(ROOT / "tests").rglob("*.py")]
TESTS = {name for file in TEST_FILES for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
TESTS |= {file.stem for file in TEST_FILES}
GPUS = 4  # of the imagined machine, for commands that leave it the number of processes


def read_commands(text: str) -> list[str]:
    """Lines of code blocks, continued ones joined, and inline code; without comments."""
    lines = [line for block in FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#.*", "", line).strip() for line in (*lines, *INLINE.findall(FENCED.sub("", text)))]


ALL = [(NAMES[page], command) for page in PAGES for command in read_commands(TEXTS[page])]


def find_commands(pattern: str) -> list[tuple[str, str]]:
    """Commands that match, once each, with the first page that has it."""
    found = {command: page for page, command in reversed(ALL) if re.search(pattern, command)}
    return [(page, command) for command, page in found.items()]


# --- train.py ------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled_in(tmp_path):
    """Fill in what only the user knows: data, files, number of processes."""
    (tmp_path / "MINE" / "experiment").mkdir(parents=True)
    (tmp_path / "MINE" / "experiment" / "NAME.yaml").write_text("# @package _global_\nlr: 1e-6\n")
    (tmp_path / "RUN_OF_SFT" / "LATEST").mkdir(parents=True)
    (tmp_path / "rewards.py").touch()
    (tmp_path / "data.csv").touch()
    values = {name: str(tmp_path / name) for name in ("RUN_OF_SFT", "MINE", "rewards.py")}
    values |= {
        name: str(tmp_path / "data.csv")
        for name in ("DIR_FILE_OR_HUB_ID", "data/mine.csv", "data/pairs.jsonl", "data/dpo_en_demo.json")
    }
    values |= {"=N": "=2", "$SLURM_JOB_ID": "1", ".cache/demo/sft": values["RUN_OF_SFT"]}

    def fill_in(command: str) -> list[str]:
        for placeholder, value in values.items():
            command = re.sub(rf"{re.escape(placeholder)}\b", value, command)
        words = shlex.split(command)
        start = next(
            i for i, word in enumerate(words) if word == "train" or word.endswith(("train.py", "train.sbatch"))
        )
        return [w for w in words[start + 1 :] if not w.endswith("...") and w not in TO_BE_WRITTEN]

    return fill_in


@pytest.mark.parametrize(("page", "command"), sampled(find_commands(r"\b(dpo train|train\.py|train\.sbatch) [^)]"), 3))
def test_a_command_of_train_is_accepted(page, command, filled_in, monkeypatch):
    if "trainer=" in command:
        monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: GPUS)
    arguments = filled_in(command.removeprefix('eval "$(').removesuffix(')"'))
    problems = [] if "--help" in arguments else find_refusals(shlex.join(arguments))
    assert [p for p in problems if "..." not in command or " is not set: " not in p] == []


def test_there_are_commands_and_a_wrong_one_is_not_accepted(filled_in):
    assert len(find_commands(r"\bdpo train ")) > 30
    for command in ("loss=dpo loss.betta=0.1 ...", "experiment=hh_pythia28_sft max_length=256"):
        assert find_refusals(shlex.join(filled_in(f"dpo train {command}")))


# --- everything else that is run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "command"), find_commands(rf"^dpo ({'|'.join(COMMANDS)})\b"))
def test_a_command_takes_its_flags(page, command):
    name, arguments = re.search(r"dpo (\w+)(.*)", command).groups()
    source = "".join((ROOT / "dpo" / "commands" / f"{file}.py").read_text() for file in (name, "__init__"))
    assert [flag for flag in re.findall(r"(?<= )--[\w-]+", arguments) if f'"{flag}"' not in source] == []


@pytest.mark.parametrize(
    ("page", "command"), find_commands(r"python3? (-\w+ )*-m (scripts|benchmarks|experiments|pytest)")
)
def test_a_module_that_is_run_is_there_and_takes_the_flags(page, command):
    module, arguments = re.search(r"-m (\S+)(.*)", command).groups()
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if module.startswith(("scripts.", "benchmarks.", "experiments.")):
        source = Path(spec.origin).read_text()
        assert [flag for flag in re.findall(r"(?<= )--[\w-]+", arguments) if f'"{flag}"' not in source] == []
        compose(shlex.join(word for word in shlex.split(arguments) if re.match(r"[a-z_.]+=", word)))


def test_every_make_target_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(page, target) for page, command in ALL for target in re.findall(r"^make ([a-z][a-z-]*)", command)}
    assert len(named) > 5
    assert {(page, target) for page, target in named if target not in targets} == set()


# --- what is named -------------------------------------------------------------------------------------------------


def find_anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_link_file_and_test_that_is_named_is_there(page):
    """Files are paths below our directories, and names with our suffixes, without placeholders."""
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", TEXTS[page]):
        target, _, anchor = "".join(link).partition("#")
        file = page.parent / target if target else page
        is_there = file.exists() and (not anchor or anchor in find_anchors(file))
        lost += [] if is_there or target.startswith(("https://", "http://")) else ["".join(link)]
    for text in INLINE.findall(FENCED.sub("", TEXTS[page])):
        name = text.partition("::")[0].rstrip("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) or PLACEHOLDER.search(name) or name in TO_BE_WRITTEN:
            continue
        if name.split("/")[0] in FOLDERS and "/" in name:
            lost += [] if (ROOT / name).exists() or (ROOT / f"{name}.py").exists() else [name]
        elif re.search(r"\.(py|md|sh|sbatch|toml|lock)$", name) and Path(name).name not in OURS:
            lost.append(name)
    lost += [name for name in re.findall(r"\b(test_\w+)(?!\w|\.)", TEXTS[page]) if name not in TESTS]
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_lines_are_at_most_120_columns_wide(page):
    """Rows of printed tables are as wide as their numbers."""
    assert [line for line in TEXTS[page].splitlines() if len(line) > 120 and not line.startswith("| ")] == []
