"""Continuing a run: its directory, the checkpoint to continue from, whether config and data are still its own."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from omegaconf import DictConfig

from checkpoint import (
    MANIFEST,
    STEP,
    DamagedCheckpoint,
    check_complete,
    check_contents,
    find_checkpoints,
    point,
    step_of,
    sync_directory,
    tidy,
)
from checkpoint_contents import FACTS as FACT_SHAPES
from checkpoint_contents import find_odd
from checksums import BLOCK, HashedFile
from plain_files import check_readable, check_writable, remove
from preflight import TrainingData
from run_directory import LOG_FILES, ORIGIN, create_run_dir, lock_run_dir, redact
from settings import flatten
from utils import InputError
from waiting import made_progress

# keys that a continued run may change: where it runs, how it rounds, how long it goes on, what it tells
MAY_CHANGE = (
    *("exp_name", "debug", "local_dirs", "local_run_dir", "wandb.enabled", "wandb.entity", "wandb.project"),
    *("trainer", "world_size", "fsdp_port", "fsdp_shard_size", "tensor_parallel_size", "tensor_parallel.backend"),
    *("collective_timeout_secs", "num_workers", "layout", "compile", "activation_checkpointing", "deterministic"),
    *("gradient_accumulation_steps", "model.attn_implementation", "model.block_name", "cache_reference_logps"),
    *("model.archive", "n_epochs", "n_examples", "n_eval_examples", "eval_batch_size", "eval_every", "do_first_eval"),
    *("sample_during_eval", "n_eval_model_samples", "minimum_log_interval_secs", "self_test", "nan_policy"),
    *("resume", "save_every", "keep_checkpoints", "dry_run"),
)
OF_EACH_COMMAND = ("exp_name", "local_dirs", "local_run_dir", "resume", "dry_run")
FACTS = frozenset(("updates", "evaluated", "best_at", "config", "data"))  # that a manifest tells of its run


class Run(NamedTuple):
    """A run's directory, which is this process's alone, and where it continues."""

    directory: Path
    lock: IO
    checkpoint: Path | None = None
    manifest: Mapping[str, Any] = {}

    def is_finished(self, updates: int) -> bool:
        """Whether the checkpoint is that of a run of so many updates that was evaluated at its end."""
        return self.checkpoint is not None and self.manifest["updates"] >= updates and self.manifest["evaluated"]


class Found(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Mapping[str, Any]


def open_run(config: DictConfig) -> Run:
    """Make or reopen the directory of a run, and find the checkpoint from which it continues, if it does.

    A run that continues elsewhere begins with that checkpoint and the logs. Raises InputError if the directory holds
    another run or is in use, if there is no checkpoint where one was named, and if the config is not that of its run.
    """
    if config.resume is None:
        return _claim(config, continued=False)
    path = Path(os.path.realpath(config.local_run_dir))
    source = path if config.resume == "auto" else Path(os.path.realpath(os.path.expanduser(config.resume)))
    if source == path or (_is_named(source) and source.parent == path):
        return _continue_here(config, source)
    found = _find_whole(source, config)
    begun = _is_begun(path, found)
    if begun and find_checkpoints(path):  # the command was given before
        return _continue_here(config, path)
    run = _claim(config, continued=begun)
    _begin_with(found, run.directory)
    return _go_on(run, found)


def _claim(config: DictConfig, *, continued: bool) -> Run:
    run_dir = create_run_dir(config.local_run_dir, continued=continued)
    return Run(run_dir, lock_run_dir(run_dir))


def _continue_here(config: DictConfig, source: Path) -> Run:
    """Go on in the run's own directory, or start there if `auto` finds nothing."""
    run = _claim(config, continued=True)
    tidy(run.directory)
    found = _find_whole(source, config)
    if found is None:
        _move_logs_aside(run.directory)
        return run
    if _is_named(source):
        _refuse_going_back(found, config.resume)
    else:
        _move_damaged_aside(found, run.directory)
    return _go_on(run, found)


def _go_on(run: Run, found: Found) -> Run:
    print(f"continuing from {found.path}")
    run = run._replace(checkpoint=run.directory.resolve() / found.path.name, manifest=found.manifest)
    _point_again(run)
    return run


def _is_named(source: Path) -> bool:
    """Whether a path is one checkpoint, not a run's directory."""
    return STEP.fullmatch(source.name) is not None


def _find_whole(source: Path, config: DictConfig) -> Found | None:
    """A run's newest complete checkpoint, or the one that is named; None if `auto` finds none at all.

    Raises InputError if no checkpoint is complete, and if the config is not that of its run.
    """
    candidates = [source] if _is_named(source) else find_checkpoints(source)
    reasons = ""
    for path in candidates:
        try:
            manifest = check_complete(path, made_progress)
            if missing := FACTS - manifest.keys():
                raise DamagedCheckpoint(f"{path / MANIFEST} lacks {', '.join(sorted(missing))}")
            if odd := find_odd(manifest, FACT_SHAPES):
                raise DamagedCheckpoint(f"{path / MANIFEST}: {odd}")
            check_contents(path, made_progress)
        except DamagedCheckpoint as error:
            print(f"warning: skipped: {error}")
            reasons += f"; {error}"
        else:
            check_fits(manifest, facts_of(config), where=path)
            return Found(path, manifest)
    if config.resume == "auto" and not candidates:
        return None
    raise InputError(
        f"resume={config.resume} finds no complete checkpoint{reasons[:1000]}; give a run's directory or one of its "
        f"step-N, or start a run from weights alone with model.archive"
    )


def _is_begun(run_dir: Path, found: Found) -> bool:
    """Whether the directory holds a run that continues this checkpoint, or was to."""
    origin = run_dir / ORIGIN
    check_writable(origin)
    return origin.exists() and origin.read_bytes() == found.manifest["sha256"].encode()


def _refuse_going_back(found: Found, resume: str) -> None:
    newest = find_checkpoints(found.path.parent)[0]
    if newest != found.path:
        raise InputError(
            f"resume={resume} would overwrite what its run saved later ({newest.name}); give another local_run_dir, "
            f"to which checkpoint and logs are copied"
        )


def _move_damaged_aside(found: Found, run_dir: Path) -> None:
    """Newer checkpoints, which are damaged, shall neither count when pruning nor come first again."""
    for path in find_checkpoints(run_dir):
        if step_of(path) > step_of(found.path):
            names = (path.with_name(f"damaged-{path.name}" + f".{n}" * (n > 0)) for n in itertools.count())
            path.rename(next(name for name in names if not name.exists()))


def _move_logs_aside(run_dir: Path) -> None:
    for log in (run_dir / name for name in LOG_FILES if (run_dir / name).exists()):
        print(f"{run_dir} holds no checkpoint, so the run starts again; {log.name} becomes {log.name}.old")
        log.replace(f"{log}.old")


def check_fits(manifest: Mapping[str, Any], config: Mapping[str, Any], *, where: Path) -> None:
    """Raises InputError that names each key whose change would make the continuation another run."""
    was = manifest["config"]
    differs = {key: f"{key}={config.get(key)} (was {was[key]})" for key in was if was[key] != config.get(key)}
    changed = [text for key, text in differs.items() if key not in MAY_CHANGE]
    if not changed and (allowed := [text for key, text in differs.items() if key not in OF_EACH_COMMAND]):
        print(f"continuing with {', '.join(allowed)}")
    if changed:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed)}; give the same to continue it, or "
            f"start a new run from its weights with model.archive={where}"
        )


def check_data(run: Run, data: TrainingData) -> None:
    """Raises InputError if the training data is not what the run was trained on."""
    if run.checkpoint is not None and run.manifest["data"] != data.digest:
        raise InputError(
            f"the training data has changed since {run.checkpoint}: what was seen and what is left cannot be told "
            f"apart; restore it, or start a new run with model.archive={run.checkpoint}"
        )


def facts_of(config: DictConfig) -> dict[str, Any]:
    """The config as a manifest holds it: dotted keys, secrets left out."""
    return redact({key: value for key, value in flatten(config).items() if key != "dataset_sources"})


def _point_again(run: Run) -> None:
    """Set LATEST and BEST as the checkpoint has them: a run may be killed between its rename and the links."""
    point(run.directory / "LATEST", run.checkpoint)
    best = run.directory / f"step-{run.manifest['best_at']}"
    if best.exists():
        point(run.directory / "BEST", best)


def _begin_with(found: Found, run_dir: Path) -> None:
    """Another run's logs and checkpoint, this last and whole or not at all, after a note of which checkpoint it is."""
    (run_dir / ORIGIN).write_text(found.manifest["sha256"])
    for log in (found.path.parent / name for name in LOG_FILES):
        if log.exists():
            check_readable(log)
            _copy(log, run_dir / log.name)
    temporary = run_dir / f".{found.path.name}.tmp"
    remove(temporary)
    try:
        temporary.mkdir()
        for name in (*found.manifest["files"], MANIFEST):
            _link(found.path / name, temporary / name)
        sync_directory(temporary)
        temporary.rename(run_dir / found.path.name)
        sync_directory(run_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """The same file under another name, for it never changes; a copy of it on another file system."""
    try:
        os.link(source, target)
    except OSError:
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    """A copy that is on the disk."""
    with source.open("rb") as file, HashedFile(target, made_progress) as copy:
        shutil.copyfileobj(file, copy, BLOCK)
        copy.sync()
