"""Resuming a run: its directory, its checkpoint, and what must be unchanged."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dpo.checkpoint.checksums import BLOCK, HashedFile
from dpo.checkpoint.files import (
    MANIFEST,
    STEP,
    DamagedCheckpoint,
    check_complete,
    find_checkpoints,
    parse_step,
    point,
    read_state,
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
VERSION = "transformers_version"
# keys of a model's config that do not affect what is computed: its origin, and settings that keys of ours decide
NOT_COMPUTED = ("architectures", "dtype", "torch_dtype", "use_cache", "id2label", "label2id")
DROPOUT = ("dropout", "pdrop", "layerdrop")  # endings of keys; dropout is always off


class ResumePoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Mapping[str, Any]


class Run(NamedTuple):
    """A run's directory, locked by this process, and its resume point."""

    directory: Path
    lock: IO
    found: ResumePoint | None = None

    @property
    def checkpoint(self) -> Path | None:
        return None if self.found is None else self.found.path

    def is_finished(self, updates: int) -> bool:
        """Return whether all updates and the final evaluation are done."""
        if self.found is None:
            return False
        return self.found.manifest["updates"] >= updates and self.found.manifest["evaluated"]


def look_at_run(plan: Plan) -> ResumePoint | None:
    """The checkpoint that `open_run` would continue from.

    Raises the same InputErrors, and writes nothing.
    """
    path = _real(plan.run.local_run_dir)
    if (path / LOCK).exists():
        lock_run_dir(path).close()
    if plan.run.resume is None:
        check_free(path)
        return None
    source, elsewhere = _find_source(plan, path)
    if elsewhere is None:
        return _find_own(source, plan)
    if not _is_begun(path, elsewhere):
        check_free(path)
    return elsewhere


def open_run(plan: Plan, logs: Sequence[str]) -> Run:
    """Create or reopen a run's directory, and find its resume point.

    A run that resumes in another directory starts with copies of that checkpoint and of the files named `logs`. Raises
    InputError if the directory holds another run or is locked, if a named checkpoint is missing, and if the config is
    not that of its run.
    """
    if plan.run.resume is None:
        return _claim(plan, logs, continued=False)
    path = _real(plan.run.local_run_dir)
    source, elsewhere = _find_source(plan, path)
    if elsewhere is not None:
        found = elsewhere
        run = _claim(plan, logs, continued=_is_begun(path, found))
        _begin_with(found, run.directory, logs)
    else:
        run = _claim(plan, logs, continued=True)
        tidy(run.directory)
        found = _find_own(source, plan)
        if found is None:
            _set_logs_aside(run.directory, logs)
            return run
        _set_damaged_aside(run.directory, newer_than=found.path)
    print(f"continuing from {found.path}")
    found = found._replace(path=run.directory.resolve() / found.path.name)
    # again, as a run may be killed before it sets its links
    point(run.directory / "LATEST", found.path)
    best = run.directory / f"step-{found.manifest['best_at']}"
    if best.exists():
        point(run.directory / "BEST", best)
    return run._replace(found=found)


def _set_logs_aside(run_dir: Path, logs: Sequence[str]) -> None:
    for log in (run_dir / name for name in logs if (run_dir / name).exists()):
        aside = move_aside(log).name
        print(f"{run_dir} holds no checkpoint, so the run starts over; {log.name} becomes {aside}")


def _set_damaged_aside(run_dir: Path, *, newer_than: Path) -> None:
    """Rename checkpoints after the complete one: pruning and resuming must ignore them."""
    for checkpoint in find_checkpoints(run_dir):
        if parse_step(checkpoint) > parse_step(newer_than):
            move_aside(checkpoint, f"damaged-{checkpoint.name}")


def _claim(plan: Plan, logs: Sequence[str], *, continued: bool) -> Run:
    run_dir = create_run_dir(plan.run.local_run_dir, logs=logs, continued=continued)
    return Run(run_dir, lock_run_dir(run_dir))


def _find_source(plan: Plan, run_dir: Path) -> tuple[Path, ResumePoint | None]:
    """The run or checkpoint to continue, and its resume point if elsewhere.

    The resume point is None if the run in `run_dir` continues.
    """
    resume = plan.run.resume
    source = run_dir if resume in (None, "auto") else _real(os.path.expanduser(resume))
    if source == run_dir or (_is_named(source) and source.parent == run_dir):
        return source, None
    found = _find_whole(source, plan)
    if _is_begun(run_dir, found) and find_checkpoints(run_dir):  # the same command ran before, and saved here
        return run_dir, None
    return source, found


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for a link that leads to itself


def _is_named(source: Path) -> bool:
    """Return whether a path names a single checkpoint, not a run's directory."""
    return STEP.fullmatch(source.name) is not None


def _find_whole(source: Path, plan: Plan) -> ResumePoint | None:
    """A run's newest complete checkpoint, or the named one.

    None if `auto` finds no checkpoint at all. Raises InputError if checkpoints exist but none is complete, and if the
    config is not that of the run.
    """
    candidates = [source] if _is_named(source) else find_checkpoints(source)
    reasons = ""
    for path in candidates:
        try:
            manifest = check_complete(path, report_progress)
            if missing := FACTS - manifest.keys():
                raise DamagedCheckpoint(f"{path / MANIFEST} lacks {', '.join(sorted(missing))}")
            for name in manifest["files"]:
                if name.endswith(".pt"):  # a part: refuse a form that cannot be read. This reads no tensors
                    read_state(path / name)
                    report_progress()
        except DamagedCheckpoint as error:
            print(f"warning: checkpoint skipped: {error}")
            reasons += f"; {error}"  # cut off below, as there may be many checkpoints
        else:
            check_fits(manifest, record_config(plan), where=path)
            return ResumePoint(path, manifest)
    if plan.run.resume == "auto" and not candidates:
        return None
    raise InputError(
        f"resume={plan.run.resume} finds no complete checkpoint{reasons[:1000]}; give a run's directory or one of its "
        f"step-N, or start a new run from weights with model.archive"
    )


def _find_own(source: Path, plan: Plan) -> ResumePoint | None:
    """Find the resume point in the run's own directory.

    Only the newest complete checkpoint may continue there: an older one would overwrite it.
    """
    found = _find_whole(source, plan)
    newest = find_checkpoints(found.path.parent)[0] if found and _is_named(source) else None
    if newest and newest != found.path:
        raise InputError(
            f"resume={plan.run.resume} would overwrite a later checkpoint of its run ({newest.name}); give another "
            f"local_run_dir, to which checkpoint and logs are copied"
        )
    return found


def _is_begun(run_dir: Path, found: ResumePoint) -> bool:
    """Return whether the directory's run began with this checkpoint."""
    origin = run_dir / ORIGIN
    check_writable(origin)
    return origin.exists() and origin.read_bytes() == found.manifest["sha256"].encode()


def check_fits(manifest: Mapping[str, Any], config: Mapping[str, Any], *, where: Path) -> None:
    """Raises InputError for changed keys that a resumed run must keep."""
    defaults = {key: value for key, value in dotted(load_defaults()) if key in KEYS and key in config}
    # a version of the code that lacked a key behaved as the key's default does
    saved = defaults | manifest["config"]
    changed: dict[Resume, list[str]] = defaultdict(list)
    for key in saved:
        if saved[key] != config.get(key):
            rule = KEYS[key].resume if key in KEYS else Resume.KEEP  # KEEP also for a key that this version lacks
            changed[rule].append(f"{key}={config.get(key)} (was {saved[key]})")
    if changed[Resume.KEEP]:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed[Resume.KEEP])}; use the same values to "
            f"continue it, or start a new run from its weights with model.archive={where}"
        )
    if changed[Resume.CHANGE]:
        print(f"continuing with {', '.join(changed[Resume.CHANGE])}")


def check_inputs(found: ResumePoint | None, data: TrainingData, model_config: Any) -> None:
    """Raises InputError if data, tokenizer or model have changed."""
    if found is None:
        return
    saved, current = found.manifest, record_inputs(data, model_config)
    saved_model, model = saved["model"], current["model"]
    keys = saved_model.keys() & model.keys() - {VERSION}  # versions of transformers differ in their keys
    if saved_model.get(VERSION) == model[VERSION]:
        keys = saved_model.keys() | model.keys()
    changed = [
        f"{key}={model.get(key)} (was {saved_model.get(key)})" for key in keys if model.get(key) != saved_model.get(key)
    ]
    since = f"has changed since {found.path}"
    if saved["data"] != current["data"]:
        problem = f"the training data {since}, so it is unknown which examples remain"
    elif saved["tokens"] != current["tokens"]:
        problem = f"the tokenizer {since}: it encodes the same texts differently"
    elif changed:
        problem = f"the model's config.json {since}: {', '.join(sorted(changed))}"
    else:
        return
    raise InputError(f"{problem}; restore it, or start a new run with model.archive={found.path}")


def record_inputs(data: TrainingData, model_config: Any) -> dict[str, Any]:
    """The facts that `check_inputs` compares, for a manifest."""
    return {"data": data.digest, "tokens": data.report.train.token_digest, "model": model_facts(model_config)}


def model_facts(model_config: Any) -> dict[str, Any]:
    """The entries of a model's config that affect what is computed."""

    def is_computed(name: str) -> bool:
        return not (name.startswith("_") or name in NOT_COMPUTED or name.endswith(DROPOUT))

    facts = dotted(json.loads(model_config.to_json_string(use_diff=False)))
    return {key: value for key, value in facts if all(map(is_computed, key.split(".")))}


def record_config(plan: Plan) -> dict[str, Any]:
    """The config for a manifest: dotted keys, secrets redacted."""
    return redact({key: value for key, value in plan.values.items() if key != "dataset_sources"})


def _begin_with(found: ResumePoint, run_dir: Path, logs: Sequence[str]) -> None:
    """Copy another run's checkpoint, whole or not at all, and its logs."""
    (run_dir / ORIGIN).write_text(found.manifest["sha256"])
    for log in (found.path.parent / name for name in logs):
        if log.exists():
            check_readable(log)
            _copy(log, run_dir / log.name)
    with replacing(run_dir / found.path.name) as copy:
        copy.mkdir()
        for name in (*found.manifest["files"], MANIFEST):
            try:
                os.link(found.path / name, copy / name)  # the file never changes
            except OSError:  # on another file system
                _copy(found.path / name, copy / name)
        sync_directory(copy)
    sync_directory(run_dir)


def _copy(source: Path, target: Path) -> None:
    """Copy a file and sync the copy to the disk."""
    with source.open("rb") as file, HashedFile(target, report_progress) as copy:
        shutil.copyfileobj(file, copy, BLOCK)
        copy.sync()
