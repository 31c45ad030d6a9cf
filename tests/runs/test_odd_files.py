"""Files that are no files, and files that hold something else than they should: refused in words, never waited for."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.runs import PARTS, read_metrics, train, write_rows

from dpo.checkpoint.files import (
    MANIFEST,
    DamagedCheckpoint,
    check_complete,
    hash_manifest,
    point,
    prune,
    read_state,
    tidy,
    write_checkpoint,
)
from dpo.checkpoint.parts import Part, RandomPart, find_misfit
from dpo.checkpoint.saver import Checkpoints
from dpo.errors import InputError
from dpo.models.weights import find_archive
from dpo.parallel.mesh import Mesh
from dpo.reporting.events import RunContext
from dpo.reporting.files import FileLogger
from dpo.reporting.table import LOGS
from dpo.settings.plan import resolve
from dpo.system.plain_files import check_readable, check_writable, remove
from dpo.system.run_directory import FILES, create_run_dir
from dpo.training.optimization import OPTIMIZERS, Schedule
from dpo.training.reference import read_logps

# --- files that are no files ---------------------------------------------------------------------------------------


def make(kind: str, path: Path) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to({"device": "/dev/zero", "symbolic link": path.parent / "elsewhere", "loop": path}[kind])


def vouch(checkpoint: Path, **changes: Any) -> None:
    """Change a manifest, and let its own checksum say that it was so written."""
    manifest = json.loads((checkpoint / MANIFEST).read_text()) | changes
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}))


def vouch_for_file(file: Path) -> None:
    content = file.read_bytes()
    manifest, sha256 = json.loads((file.parent / MANIFEST).read_text()), hashlib.sha256(content).hexdigest()
    files = {**manifest["files"], file.name: {"sha256": sha256, "bytes": len(content)}}
    vouch(file.parent, files=files, blocks={**manifest["blocks"], file.name: [sha256]})  # less than a block


def replace_state(file: Path, change: Callable[[Any], Any]) -> None:
    """Write another state into a checkpoint's file, and vouch for it."""
    content = torch.load(file, weights_only=True)
    torch.save({**content, "state": change(content["state"])}, file)
    vouch_for_file(file)


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "device"])
def test_what_is_no_file_is_not_read_and_a_link_to_a_file_is(kind, tmp_path):
    make(kind, tmp_path / "odd")
    for read in (check_readable, partial(read_logps, shape=(1, 2)), read_state):
        with pytest.raises(InputError, match=f"odd is a {kind}; a regular file is expected"):
            read(tmp_path / "odd")
    write_rows(tmp_path / "rows", [{"prompt": "a"}])
    (tmp_path / "link").symlink_to("rows")
    check_readable(tmp_path / "link")


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "device", "symbolic link", "loop"])
@pytest.mark.parametrize("name", [*FILES])
def test_what_a_run_writes_is_a_file_of_its_own_or_the_run_does_not_begin(kind, name, tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    make(kind, tmp_path / name)
    called = "symbolic link" if kind in ("device", "loop") else kind
    with pytest.raises(InputError, match=f"{name} is a {called}; a regular file is expected: move it away"):
        create_run_dir(str(tmp_path), logs=LOGS, continued=True)
    assert (tmp_path / "elsewhere").read_text() == "precious"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt"])
def test_a_logger_writes_to_files_alone(name, tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / name).symlink_to("elsewhere")
    logger = FileLogger(RunContext(resolve(OmegaConf.create()), tmp_path, 0, None, print))
    logger.load_state_dict({"log_bytes": {name: 0}})
    with pytest.raises(InputError, match="symbolic link; a regular file is expected"):
        logger.on_start()
    assert (tmp_path / "elsewhere").read_text() == "precious"


@pytest.mark.parametrize("link", ["LATEST", "BEST"])
@pytest.mark.parametrize("kind", ["directory", "FIFO", "file"])
def test_what_should_be_a_link_and_is_not_is_said_before_anything_is_computed(link, kind, tmp_path):
    (tmp_path / link).touch() if kind == "file" else make(kind, tmp_path / link)
    with pytest.raises(InputError, match=f"{link} is a {kind}; a symbolic link to a step-N is expected: remove it"):
        create_run_dir(str(tmp_path), continued=True)


def write(run_dir: Path, *steps: int) -> list[Path]:
    for step in steps:
        states = {part: {"a": torch.arange(5.0)} for part in PARTS}
        write_checkpoint(run_dir / f"step-{step}", states.items(), step_idx=step, metrics=None, facts={})
    return [run_dir / f"step-{step}" for step in steps]


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
@pytest.mark.parametrize("name", ["policy.pt", "random.pt", MANIFEST])
def test_a_checkpoint_with_something_else_than_files_is_damaged(kind, name, tmp_path):
    [saved] = write(tmp_path, 8)
    (saved / name).unlink()
    make(kind, saved / name)
    if name != MANIFEST:
        manifest = json.loads((saved / MANIFEST).read_text())
        files = {**manifest["files"], name: {"sha256": "", "bytes": (saved / name).stat().st_size}}
        vouch(saved, files=files, blocks={**manifest["blocks"], name: []})

    with pytest.raises(DamagedCheckpoint, match=f"{name} is a {kind}; a regular file is expected"):
        check_complete(saved)


@pytest.mark.parametrize("kind", ["file", "directory", "symbolic link", "FIFO", "loop"])
def test_whatever_has_a_temporary_name_is_cleared_away_but_nothing_that_it_points_to(kind, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    names = [".step-8.tmp", ".step-8.former", ".step-16.pruned"]

    def plant() -> None:
        for name in names:
            (tmp_path / name).touch() if kind == "file" else make(kind, tmp_path / name)

    [saved] = write(tmp_path, 8)
    plant()
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step-8"]
    plant()
    write(tmp_path, 8, 16, 24, 32)
    point(tmp_path / "LATEST", saved)
    prune(tmp_path, 2)
    check_complete(saved)
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "elsewhere", "step-24", "step-32", "step-8"]
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_links_that_lead_nowhere_or_round_in_circles_are_no_traceback(tmp_path, run):
    steps = write(tmp_path, 8, 16, 24)
    (tmp_path / "BEST").symlink_to("BEST")
    point(tmp_path / "LATEST", steps[-1])
    prune(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["BEST", "LATEST", "step-16", "step-24"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "LATEST").symlink_to("LATEST")
    with pytest.raises(InputError, match="finds no complete checkpoint"):
        run("run", f"resume={tmp_path}/other/LATEST")
    with pytest.raises(InputError, match=r"is neither a policy\.pt nor a directory that contains one"):
        find_archive(f"{tmp_path}/other")
    with pytest.raises(InputError, match=r"~nobody-of-that-name/x does not exist"):
        find_archive("~nobody-of-that-name/x")


def test_a_resume_of_such_a_directory_ends_at_once_and_in_words(command, run, tmp_path):
    run("run", "n_examples=8")
    (tmp_path / "run" / "samples.jsonl").mkdir()
    os.mkfifo(tmp_path / "run" / ".step-16.tmp")
    result = train(*command("run", "resume=auto"))
    assert result.returncode == 2
    [message] = result.stderr.splitlines()
    assert message == f"error: {tmp_path}/run/samples.jsonl is a directory; a regular file is expected: move it away"

    (tmp_path / "run" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(InputError, match=r"metrics\.jsonl is a FIFO; a regular file is expected"):
        run("fork", f"resume={tmp_path}/run/step-8")


# --- files that hold something else --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [pytest.param(p, marks=[] if p == "trainer" else pytest.mark.slow) for p in PARTS])
def test_a_part_that_is_something_else_ends_the_run_in_words(part, run, tmp_path):
    run("run", "n_examples=8")
    replace_state(tmp_path / "run" / "step-8" / f"{part}.pt", lambda state: {"a": 3})
    with pytest.raises(InputError, match=rf"{part}\.pt (does not hold the state of a run|is not a policy\.pt)"):
        run("run", "resume=auto")


@pytest.mark.parametrize("state", [{"states": []}, {"states": 3}, {"states": [{"python": 3}]}, [], 3])
def test_random_states_that_no_generator_takes_are_damage(state, tmp_path):
    write_checkpoint(tmp_path / "step-8", {"random": state}.items(), step_idx=8, metrics=None, facts={})
    if state == {"states": []}:  # of no process: as of another number of processes
        Checkpoints(tmp_path, Mesh(), keep=None, log=print).restore(tmp_path / "step-8", [RandomPart(Mesh())])
        return
    with pytest.raises(DamagedCheckpoint, match=r"random\.pt does not hold the state of a run: "):
        Checkpoints(tmp_path, Mesh(), keep=None, log=print).restore(tmp_path / "step-8", [RandomPart(Mesh())])


# --- an optimizer's own state --------------------------------------------------------------------------------------


def stepped(kind: type[torch.optim.Optimizer], *shapes: tuple[int, ...]) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, lr=1e-3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_fits_it_and_no_other_model(name):
    shapes = ((2, 3), (3,))
    optimizer = stepped(OPTIMIZERS[name], *shapes)
    state = optimizer.state_dict()
    assert find_misfit(optimizer, state) is None
    assert "it has 3 parameters, not 2" in find_misfit(optimizer, stepped(OPTIMIZERS[name], *shapes, (1,)).state_dict())
    if state["state"]:
        other = stepped(OPTIMIZERS[name], (4, 5), (3,)).state_dict()
        assert "parameter 0: " in find_misfit(optimizer, other)


def test_another_optimizers_state_is_named():
    adam, rmsprop = (stepped(OPTIMIZERS[name], (2,)) for name in ("AdamW", "RMSprop"))
    misfit = find_misfit(adam, rmsprop.state_dict())
    assert misfit == "parameter 0: its keys are step, square_avg, not exp_avg, exp_avg_sq, step"


def test_a_state_that_does_not_fit_ends_the_run_in_words(run, tmp_path):
    run("run", "n_examples=8")
    file = tmp_path / "run" / "step-8" / "optimizer.pt"
    replace_state(file, lambda state: {**state, "state": {0: {"step": torch.zeros(())}}})
    with pytest.raises(
        InputError, match=r"optimizer\.pt does not fit RMSprop: parameter 0: its keys are step, not square"
    ):
        run("run", "resume=auto")


def test_settings_that_a_torch_before_did_not_have_are_those_of_today(run, tmp_path):
    run("run", "n_examples=8")

    def before(state: Any) -> Any:
        groups = [{k: v for k, v in group.items() if k != "alpha"} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    replace_state(tmp_path / "run" / "step-8" / "optimizer.pt", before)
    run("run", "n_examples=12", "resume=auto")
    assert len(read_metrics(tmp_path / "run", "train")) == 3


def test_a_run_that_continues_elsewhere_meets_such_files_there(run, tmp_path):
    run("run", "n_examples=8")
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / ".step-8.tmp").touch()
    run("fork", f"resume={tmp_path}/run/step-8", "n_examples=12")
    (tmp_path / "fork" / ".continues").unlink()
    os.mkfifo(tmp_path / "fork" / ".continues")
    with pytest.raises(InputError, match=r"\.continues is a FIFO; a regular file is expected"):
        run("fork", f"resume={tmp_path}/run/step-8", "n_examples=16")


def test_a_schedulers_state_sets_only_what_it_has(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = Schedule(optimizer, warmup_steps=4, updates=8, kind="cosine", min_ratio=0.0)
    saved = {"scheduler": {**scheduler.state_dict(), "step": 3, "last_epoch": 2}}
    checkpoint = tmp_path / "step-8"
    write_checkpoint(checkpoint, saved.items(), step_idx=8, metrics=None, facts={})
    checkpoints = Checkpoints(tmp_path, Mesh(), keep=None, log=print)
    checkpoints.restore(checkpoint, [Part("scheduler", scheduler)])
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 3


def test_remove_takes_links_and_leaves_what_they_lead_to(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "b").symlink_to("a")
    remove(tmp_path / "b")
    remove(tmp_path / "nowhere")
    assert (tmp_path / "a" / "file").exists()
    remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    check_writable(tmp_path / "new")
