"""The wheel: what is in it, and that it trains where nothing else is."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.commands import compose
from support.pytests import succeeded
from support.runs import ROOT, make_environment, run_python

import dpo
from dpo.settings.plan import resolve
from dpo.settings.validation import find_plan_warnings, find_problems
from dpo.system.host import is_installed

TRAIN = "model=demo datasets=[demo] loss=dpo loss.beta=0.1 exp_name=try local_run_dir=run n_examples=8"
PUBLIC = "api plugins train trainers preference_datasets utils losses errors commands"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "dpo", folder / "source" / "dpo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "./source"]
    succeeded(run_python("-m", "pip", *command, cwd=folder))
    [file] = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_has_one_package_with_all_its_files_and_trains_from_an_empty_directory(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"dpo", f"dpo_train-{dpo.__version__}.dist-info"}
    files = [path for path in (ROOT / "dpo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in files} <= names
    (tmp_path / "empty" / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "empty" / "mine" / "experiment" / "small.yaml").write_text("# @package _global_\nn_epochs: 3\n")
    command = ["-m", "dpo", "train", *TRAIN.split(), "dry_run=true", "--config-dir=mine", "experiment=small"]
    where = {"cwd": tmp_path / "empty", "PYTHONPATH": str(tmp_path / "installed")}
    result = succeeded(run_python(*command, **where))
    assert "2 updates of 4 examples" in result.stdout
    code = "import dpo.commands; print(dpo.__file__); dpo.commands.main(['--version'])"
    version = run_python("-c", code, **where)
    assert version.stdout == f"{tmp_path / 'installed' / 'dpo' / '__init__.py'}\ndpo {dpo.__version__}\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_plain_install_trains_the_demo_from_an_empty_directory(wheel, tmp_path):
    """With nothing but the dependencies: wandb, matplotlib, peft and others are missing."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", wheel, "-c", ROOT / "requirements.lock"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if re.search("No matching distribution|ConnectionError|NewConnectionError", installed.stderr):
        pytest.skip(f"packages cannot be downloaded: {installed.stderr[-200:]}")
    assert installed.returncode == 0, installed.stderr
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python.with_name("dpo")), *arguments]
        return subprocess.run(command, cwd=empty, env=make_environment(), capture_output=True, text=True)

    listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout.lower()
    assert not re.search("^(wandb|matplotlib|peft|accelerate|bitsandbytes|beautifulsoup4|tensorboard)==", listed, re.M)
    imports = "; ".join(f"import dpo.{name}" for name in PUBLIC.split())
    assert subprocess.run([python, "-c", imports], cwd=empty).returncode == 0
    trained = succeeded(run("train", *TRAIN.split()))
    assert trained.stdout.count("wandb") == 1
    assert "warning: W&B gets nothing, as wandb is not installed" in trained.stdout
    succeeded(run("train", *TRAIN.split(), "resume=auto", "n_examples=16"))
    for command in ("verify run", "export run out", "evaluate run --judge human --max-new-tokens 4 --limit 2"):
        succeeded(run(*command.split()))
    refused = run("report", "run")
    assert (refused.returncode, "pip install matplotlib" in refused.stderr) == (2, True)


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("dpo.settings.validation.is_installed", lambda name: False)
    plan = resolve(
        compose("lora=qlora report=true tensorboard.enabled=true datasets=[se] loss=sft exp_name=x model=demo")
    )
    missing = [problem.sentence for problem in find_problems(plan)]
    for package in ("bitsandbytes", "matplotlib", "tensorboard", "beautifulsoup4"):
        assert any(f"needs {package}: pip install {package}" in text for text in missing)
    assert "W&B gets nothing, as wandb is not installed" in find_plan_warnings(plan)
    assert is_installed("torch")
    assert not is_installed("no-such-package")
