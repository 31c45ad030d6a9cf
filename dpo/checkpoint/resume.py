"""Resuming a run: its directory, the checkpoint to continue from, and the check that config and data are unchanged."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dpo.checkpoint.checksums import BLOCK, HashedFile
from dpo.checkpoint.files import (
    MANIFEST,
    STEP,
    DamagedCheckpoint,
    check_complete,
    check_parts,
    find_checkpoints,
    parse_step,
    point,
    sync_directory,
    tidy,
)
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.settings.files import dotted, load_defaults
from dpo.settings.keys import KEYS, Resume
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, check_writable, move_aside, replacing
from dpo.system.redaction import redact
from dpo.system.run_directory import LOCK, ORIGIN, check_free, create_run_dir, lock_run_dir
from dpo.system.waiting import report_progress

FACTS = {"updates", "evaluated", "best_at", "config", "data", "tokens", "model"}  # about the run, in a manifest
# keys of a model's config that do not affect what is computed: its origin, and settings that keys of ours decide
VERSION = "transformers_version"
NOT_COMPUTED = ("architectures", "dtype", "torch_dtype", "use_cache", "id2label", "label2id")
DROPOUT = ("dropout", "pdrop", "layerdrop")  # endings of keys; dropout is always off


class ResumePoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Mapping[str, Any]


class Run(NamedTuple):
    """A run's directory, locked by this process, and the checkpoint in it from which the run resumes."""

    directory: Path
    lock: IO
    found: ResumePoint | None = None

    @property
    def checkpoint(self) -> Path | None:
        return None if self.found is None else self.found.path

    def is_finished(self, updates: int) -> bool:
        """Return whether the checkpoint comes after the last of `updates` and includes the final evaluation."""
        if self.found is None:
            return False
        return self.found.manifest["updates"] >= updates and self.found.manifest["evaluated"]


def look_at_run(plan: Plan) -> ResumePoint | None:
    """The checkpoint that `open_run` would continue from. Raises the same InputErrors, and writes nothing."""
    path = _real(plan.run.local_run_dir)
    if (path / LOCK).exists():
        lock_run_dir(path).close()
    if plan.run.resume is None:
        check_free(path)
        return None
    source = _source(plan)
    found = _find_whole(source, plan)
    if not _belongs_to(source, path):
        if not _is_begun(path, found):
            check_free(path)
        elif find_checkpoints(path):
            return _find_whole(path, plan)
    elif found is not None and _is_named(source):
        _refuse_going_back(found, plan.run.resume)
    return found


def open_run(plan: Plan, logs: Sequence[str]) -> Run:
    """Create or reopen the directory of a run, and find the checkpoint from which it resumes, if any.

    A run that resumes in another directory starts with copies of that checkpoint and of the files named `logs`. Raises
    InputError if the directory holds another run or is locked, if a named checkpoint is missing, and if the config is
    not that of its run.
    """
    if plan.run.resume is None:
        return _claim(plan, logs, continued=False)
    path, source = _real(plan.run.local_run_dir), _source(plan)
    if _belongs_to(source, path):
        return _continue_here(plan, source, logs)
    found = _find_whole(source, plan)
    begun = _is_begun(path, found)
    if begun and find_checkpoints(path):  # the same command was run before
        return _continue_here(plan, path, logs)
    run = _claim(plan, logs, continued=begun)
    _begin_with(found, run.directory, logs)
    return _go_on(run, found)


def _claim(plan: Plan, logs: Sequence[str], *, continued: bool) -> Run:
    run_dir = create_run_dir(plan.run.local_run_dir, logs=logs, continued=continued)
    return Run(run_dir, lock_run_dir(run_dir))


def _continue_here(plan: Plan, source: Path, logs: Sequence[str]) -> Run:
    """Continue in the run's own directory, or start there if `auto` finds nothing."""
    run = _claim(plan, logs, continued=True)
    tidy(run.directory)
    found = _find_whole(source, plan)
    if found is None:
        for log in (run.directory / name for name in logs if (run.directory / name).exists()):
            aside = move_aside(log).name
            print(f"{run.directory} holds no checkpoint, so the run starts over; {log.name} becomes {aside}")
        return run
    if _is_named(source):
        _refuse_going_back(found, plan.run.resume)
    else:
        _move_damaged_aside(found, run.directory)
    return _go_on(run, found)


def _go_on(run: Run, found: ResumePoint) -> Run:
    print(f"continuing from {found.path}")
    run = run._replace(found=found._replace(path=run.directory.resolve() / found.path.name))
    _point_again(run)
    return run


def _source(plan: Plan) -> Path:
    """The run or checkpoint that `resume` names."""
    resume = plan.run.resume
    return _real(plan.run.local_run_dir if resume in (None, "auto") else os.path.expanduser(resume))


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for a link that leads to itself


def _belongs_to(source: Path, run_dir: Path) -> bool:
    """Return whether a source is the run in this directory or one of its checkpoints."""
    return source == run_dir or (_is_named(source) and source.parent == run_dir)


def _is_named(source: Path) -> bool:
    """Return whether a path names a single checkpoint, not a run's directory."""
    return STEP.fullmatch(source.name) is not None


def _find_whole(source: Path, plan: Plan) -> ResumePoint | None:
    """A run's newest complete checkpoint, or the named one; None if `auto` finds no checkpoint at all.

    Raises InputError if checkpoints exist but none is complete, and if the config is not that of the run.
    """
    candidates = [source] if _is_named(source) else find_checkpoints(source)
    reasons = ""
    for path in candidates:
        try:
            manifest = check_complete(path, report_progress)
            if missing := FACTS - manifest.keys():
                raise DamagedCheckpoint(f"{path / MANIFEST} lacks {', '.join(sorted(missing))}")
            check_parts(path, manifest["files"], report_progress)
        except DamagedCheckpoint as error:
            print(f"warning: checkpoint skipped: {error}")
            reasons += f"; {error}"
        else:
            check_fits(manifest, record_config(plan), where=path)
            return ResumePoint(path, manifest)
    if plan.run.resume == "auto" and not candidates:
        return None
    raise InputError(
        f"resume={plan.run.resume} finds no complete checkpoint{reasons[:1000]}; give a run's directory or one of its "
        f"step-N, or start a new run from weights with model.archive"
    )


def _is_begun(run_dir: Path, found: ResumePoint) -> bool:
    """Return whether the directory holds a run that resumed, or began to resume, from this checkpoint."""
    origin = run_dir / ORIGIN
    check_writable(origin)
    return origin.exists() and origin.read_bytes() == found.manifest["sha256"].encode()


def _refuse_going_back(found: ResumePoint, resume: str) -> None:
    newest = find_checkpoints(found.path.parent)[0]
    if newest != found.path:
        raise InputError(
            f"resume={resume} would overwrite a later checkpoint of its run ({newest.name}); give another "
            f"local_run_dir, to which checkpoint and logs are copied"
        )


def _move_damaged_aside(found: ResumePoint, run_dir: Path) -> None:
    """Rename newer, damaged checkpoints, so that neither pruning nor the next resume considers them."""
    for path in find_checkpoints(run_dir):
        if parse_step(path) > parse_step(found.path):
            names = (path.with_name(f"damaged-{path.name}" + f".{n}" * (n > 0)) for n in itertools.count())
            path.rename(next(name for name in names if not name.exists()))


def check_fits(manifest: Mapping[str, Any], config: Mapping[str, Any], *, where: Path) -> None:
    """Raises InputError that names all changed keys which a resumed run may not change."""
    defaults = {key: value for key, value in dotted(load_defaults()) if key in KEYS and key in config}
    was = defaults | manifest["config"]  # where the run's version lacked a key, it behaved as by default
    differs = {key: f"{key}={config.get(key)} (was {was[key]})" for key in was if was[key] != config.get(key)}
    changed = [text for key, text in differs.items() if _on_resume(key) is Resume.KEEP]
    if not changed and (allowed := [text for key, text in differs.items() if _on_resume(key) is Resume.CHANGE]):
        print(f"continuing with {', '.join(allowed)}")
    if changed:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed)}; use the same values to continue it, or "
            f"start a new run from its weights with model.archive={where}"
        )


def _on_resume(key: str) -> Resume:
    """The rule for a key in a resumed run; a key that this version does not know must not change."""
    return KEYS[key].resume if key in KEYS else Resume.KEEP


def check_inputs(found: ResumePoint | None, data: TrainingData, model_config: Any) -> None:
    """Raises InputError if data, tokenizer or model architecture differ from those the run was trained with."""
    if found is None:
        return
    was, now = found.manifest, record_inputs(data, model_config)
    as_before = f"restore it, or start a new run with model.archive={found.path}"
    if was["data"] != now["data"]:
        raise InputError(
            f"the training data has changed since {found.path}, so it is unknown which examples remain; {as_before}"
        )
    if was["tokens"] != now["tokens"]:
        raise InputError(
            f"the tokenizer has changed since {found.path}: it encodes the same texts differently; {as_before}"
        )
    before, after = was["model"], now["model"]
    keys = before.keys() & after.keys() - {VERSION}  # versions of transformers differ in their keys
    if before.get(VERSION) == after[VERSION]:
        keys = before.keys() | after.keys()
    values = {key: (after.get(key), before.get(key)) for key in keys}
    changed = [f"{key}={value} (was {former})" for key, (value, former) in values.items() if value != former]
    if changed:
        raise InputError(
            f"the model's config.json has changed since {found.path}: {', '.join(sorted(changed))}; {as_before}"
        )


def record_inputs(data: TrainingData, model_config: Any) -> dict[str, Any]:
    """The facts that `check_inputs` compares, for a manifest."""
    return {"data": data.digest, "tokens": data.report.train.token_digest, "model": model_facts(model_config)}


def model_facts(model_config: Any) -> dict[str, Any]:
    """The entries of a model's config that affect what is computed: dotted keys, JSON values."""
    facts = dotted(json.loads(model_config.to_json_string(use_diff=False)))
    return {
        key: value
        for key, value in facts
        if not any(k.startswith("_") or k in NOT_COMPUTED or k.endswith(DROPOUT) for k in key.split("."))
    }


def record_config(plan: Plan) -> dict[str, Any]:
    """The config for a manifest: dotted keys, secrets redacted."""
    return redact({key: value for key, value in plan.values.items() if key != "dataset_sources"})


def _point_again(run: Run) -> None:
    """Set LATEST and BEST to match the checkpoint, as a run may be killed before it sets them."""
    point(run.directory / "LATEST", run.found.path)
    best = run.directory / f"step-{run.found.manifest['best_at']}"
    if best.exists():
        point(run.directory / "BEST", best)


def _begin_with(found: ResumePoint, run_dir: Path, logs: Sequence[str]) -> None:
    """Record another run's checkpoint, then copy the run's logs and, whole or not at all, the checkpoint."""
    (run_dir / ORIGIN).write_text(found.manifest["sha256"])
    for log in (found.path.parent / name for name in logs):
        if log.exists():
            check_readable(log)
            _copy(log, run_dir / log.name)
    with replacing(run_dir / found.path.name) as copy:
        copy.mkdir()
        for name in (*found.manifest["files"], MANIFEST):
            _link(found.path / name, copy / name)
        sync_directory(copy)
    sync_directory(run_dir)


def _link(source: Path, target: Path) -> None:
    """Make a hard link, as the file never changes; a copy if the target is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file and sync the copy to the disk."""
    with source.open("rb") as file, HashedFile(target, report_progress) as copy:
        shutil.copyfileobj(file, copy, BLOCK)
        copy.sync()
