"""Resuming a run: its directory, its checkpoint, and what must be unchanged."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import IO, Any, NamedTuple

from dpo.checkpoint.files import (
    MANIFEST,
    STEP,
    WRONG_FORM,
    DamagedCheckpoint,
    check_complete,
    find_checkpoints,
    parse_step,
    point,
    read_state,
    sync,
    tidy,
)
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.settings.files import dotted, load_defaults
from dpo.settings.keys import KEYS, REMOVED, Resume
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, check_writable, move_aside, replacing
from dpo.system.redaction import redact
from dpo.system.run_directory import (
    LOCK,
    ORIGIN,
    check_free,
    create_run_dir,
    explain_lock,
    is_lock,
    is_locked,
    leaving_nothing_if_refused,
    lock_run_dir,
    read_record,
    write_record,
)
from dpo.system.waiting import sending_heartbeats

FACTS: dict[str, Any] = {  # facts about the run in a manifest, with their types
    **{"updates": int, "evaluated": bool, "best_at": int | None, "config": dict, "model": dict},
    **{"data": str, "tokens": str},
}
VERSION_KEY = "transformers_version"  # key of a model's config
# keys of a model's config that do not affect a run: they name the model's origin, or our own config decides them
WITHOUT_EFFECT = ("architectures", "dtype", "torch_dtype", "use_cache", "id2label", "label2id")
DROPOUT_ENDINGS = ("dropout", "pdrop", "layerdrop")  # endings of further keys without effect, as dropout is always off


class ResumePoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Mapping[str, Any]


class Run(NamedTuple):
    """A run's directory, locked by this process, and its resume point."""

    directory: Path
    lock: IO
    resume_point: ResumePoint | None = None

    @property
    def checkpoint(self) -> Path | None:
        return None if self.resume_point is None else self.resume_point.path

    @property
    def id(self) -> str | None:
        """The id of the run that is continued."""
        return None if self.resume_point is None else self.resume_point.manifest.get("run")

    def is_finished(self, updates: int) -> bool:
        """Return whether all updates, the last evaluation and its samples are done."""
        if self.resume_point is None:
            return False
        manifest = self.resume_point.manifest
        is_evaluated = manifest["updates"] >= updates and manifest["evaluated"]
        # samples are drawn after the checkpoint is saved, so it cannot tell whether they were
        return is_evaluated and not (manifest.get("samples_due") and self._lacks_samples(manifest["examples"]))

    def record(self, plan: Plan) -> None:
        """Write the config, and facts about this start of the run, into its directory."""
        saved_at = None if self.checkpoint is None else (self.checkpoint / MANIFEST).stat().st_mtime
        facts = {"processes": plan.dims.world_size, "run": self.id, "continues_from": saved_at}
        write_record(self.directory, plan.nested_values(), **facts)

    def _lacks_samples(self, n_examples: int) -> bool:
        """Return whether the last line of samples.jsonl is no sample after `n_examples`."""
        log = self.directory / "samples.jsonl"
        try:
            last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
            return last["examples"] != n_examples or "policy" not in last
        except (OSError, *WRONG_FORM):
            return True


def look_at_run(plan: Plan, logs: Sequence[str]) -> ResumePoint | None:
    """The checkpoint that `open_run` would continue from, or its InputError; writes nothing."""
    run_dir = _resolve(plan.run.local_run_dir)
    if is_lock(run_dir / LOCK) and is_locked(run_dir):
        raise explain_lock(run_dir)
    source = _find_source(plan, run_dir)
    if not source.began_here:
        check_free(run_dir, logs)
    return _find_resume_point(source.own, plan) if source.own else source.other


def open_run(plan: Plan, logs: Sequence[str]) -> Run:
    """Create or reopen a run's directory, locked, and find its resume point.

    A run that resumes another run's checkpoint starts with copies of this checkpoint and of that run's `logs`.
    """
    with sending_heartbeats():  # to the other ranks, which wait
        source = _find_source(plan, _resolve(plan.run.local_run_dir))
        run_dir = create_run_dir(plan.run.local_run_dir, logs=logs, continued=source.began_here)
        run = Run(run_dir, lock_run_dir(run_dir))
        if source.own:
            tidy(run_dir)
            resume_point = _find_resume_point(source.own, plan)
            if resume_point is None:
                _move_logs_aside(run_dir, logs)
            else:
                _move_damaged_aside(run_dir, newer_than=resume_point.path)
        else:
            resume_point = source.other
            if resume_point is not None:
                _copy_checkpoint(resume_point, run_dir, logs)
        if resume_point is None:
            return run
        print(f"continuing from {resume_point.path}")
        resume_point = resume_point._replace(path=run_dir.resolve() / resume_point.path.name)
        # set the links again, as a run may be killed between saving and setting them
        point(run_dir / "LATEST", resume_point.path)
        best = run_dir / f"step-{resume_point.manifest['best_at']}"
        if best.exists():
            point(run_dir / "BEST", best)
        return run._replace(resume_point=resume_point)


@contextmanager
def opening_run(plan: Plan, logs: Sequence[str]) -> Iterator[Run]:
    """Context in an open run, whose lock is released at its end, as a caller in Python may start another run.

    A new directory is removed if the run is refused before it writes there.
    """
    with leaving_nothing_if_refused(Path(plan.run.local_run_dir)):
        run = open_run(plan, logs)
        with run.lock:
            yield run


def _move_logs_aside(run_dir: Path, logs: Sequence[str]) -> None:
    for name in logs:
        if (run_dir / name).exists():
            new_name = move_aside(run_dir / name).name
            print(f"{run_dir} holds no checkpoint, so the run starts over; {name} is renamed to {new_name}")


def _move_damaged_aside(run_dir: Path, *, newer_than: Path) -> None:
    """Rename checkpoints newer than the complete one, so that nothing uses them."""
    for checkpoint in find_checkpoints(run_dir):
        if parse_step(checkpoint) > parse_step(newer_than):
            move_aside(checkpoint, f"damaged-{checkpoint.name}")


class ResumeSource(NamedTuple):
    """What a run continues from: at most one of `own` and `other`."""

    began_here: bool = False  # whether the directory is known to be this run's
    own: Path | None = None  # the run's directory or a checkpoint in it, which is searched once the directory is locked
    other: ResumePoint | None = None  # another run's checkpoint, which is copied


def _find_source(plan: Plan, run_dir: Path) -> ResumeSource:
    if plan.run.resume is None:
        return ResumeSource()
    path = run_dir if plan.run.resume == "auto" else _resolve(os.path.expanduser(plan.run.resume))
    if path == run_dir or (_is_checkpoint(path) and path.parent == run_dir):
        checkpoints = find_checkpoints(run_dir)
        if path != run_dir and checkpoints and parse_step(checkpoints[0]) > parse_step(path):
            raise InputError(
                f"resume={plan.run.resume} would overwrite a later checkpoint of its run ({checkpoints[0].name}); give "
                f"another local_run_dir, to which checkpoint and logs are copied"
            )
        is_known = checkpoints or (run_dir / ORIGIN).exists() or read_record(run_dir)
        return ResumeSource(bool(is_known), own=path)
    other = _find_resume_point(path, plan)
    assert other is not None  # only `resume=auto` may find nothing
    origin = run_dir / ORIGIN
    check_writable(origin)
    began_here = origin.exists() and origin.read_bytes() == other.manifest["sha256"].encode()
    if began_here and find_checkpoints(run_dir):  # the same command ran before, and saved here
        return ResumeSource(began_here, own=run_dir)
    return ResumeSource(began_here, other=other)


def _resolve(path: str) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for a link that leads to itself


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path names one checkpoint, not a run's directory."""
    return STEP.fullmatch(path.name) is not None


def _find_resume_point(path: Path, plan: Plan) -> ResumePoint | None:
    """A run's newest complete checkpoint, or the checkpoint at `path`; None if `resume=auto` finds none at all.

    Raises InputError if none is complete, or if the config does not fit the checkpoint.
    """
    candidates = [path] if _is_checkpoint(path) else find_checkpoints(path)
    reasons = ""
    for checkpoint in candidates:
        try:
            manifest = _verify(checkpoint)
        except DamagedCheckpoint as error:
            print(f"warning: checkpoint skipped: {error}")
            reasons += f"; {error}"
        else:
            check_fits(manifest, record_config(plan), where=checkpoint)
            return ResumePoint(checkpoint, manifest)
    if plan.run.resume == "auto" and not candidates:
        return None
    short_reasons = reasons[:1000]  # there may be many checkpoints
    raise InputError(
        f"resume={plan.run.resume} finds no complete checkpoint{short_reasons}; give a run's directory or one of its "
        f"step-N, or start a new run from weights with model.archive"
    )


def _verify(checkpoint: Path) -> dict[str, Any]:
    """Verify that a checkpoint can be resumed; return its manifest."""
    manifest = check_complete(checkpoint)
    if odd := sorted(name for name, kind in FACTS.items() if not isinstance(manifest.get(name, ...), kind)):
        raise DamagedCheckpoint(f"{checkpoint / MANIFEST} lacks {', '.join(odd)}, or has them in another form")
    for name in manifest["files"]:
        if name.endswith(".pt"):
            read_state(checkpoint / name)  # raises for a file of another form; reads no tensors, which are mapped
    return manifest


def fix_template_date(plan: Plan, resume_point: ResumePoint | None) -> Plan:
    """Decide the date that a chat template writes, once for a run."""
    recorded = resume_point.manifest["config"].get("chat_template_date") if resume_point else None
    return plan.change("chat_template_date", plan.chat.template_date or recorded or date.today().isoformat())


def check_fits(manifest: Mapping[str, Any], config: Mapping[str, Any], *, where: Path) -> None:
    """Raise InputError for changed keys that a resumed run must keep."""
    defaults = {key: value for key, value in dotted(load_defaults()) if key in KEYS and key in config}
    # a checkpoint of older code may lack a key; that code behaved as the key's default does
    saved = defaults | manifest["config"]
    changed: dict[Resume, list[str]] = defaultdict(list)
    for key, saved_value in saved.items():
        if key in REMOVED:
            print(f"{key}={saved_value} of {where} is ignored: it was removed after {REMOVED[key]}")
        elif config.get(key) != saved_value:
            rule = KEYS[key].resume if key in KEYS else Resume.KEEP  # this version of the code may lack a saved key
            changed[rule].append(f"{key}={config.get(key)} (was {saved_value})")
    if changed[Resume.KEEP]:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed[Resume.KEEP])}; use the same values to "
            f"continue that run, or start a new one from its weights with model.archive={where}"
        )
    if changed[Resume.CHANGE]:
        print(f"continuing with {', '.join(changed[Resume.CHANGE])}")


def check_inputs(resume_point: ResumePoint | None, data: TrainingData, model_config: Any) -> None:
    """Raise InputError if data, tokenizer or model have changed."""
    if resume_point is None:
        return
    saved, current = resume_point.manifest, record_inputs(data, model_config)
    changes = _list_changes(saved["model"], current["model"])
    since = f"has changed since {resume_point.path}"
    problems = {  # each with whether it is there
        f"the training data {since}, so the remaining examples are unknown": saved["data"] != current["data"],
        f"the test data {since}, so its evaluations cannot be compared with the earlier ones": (
            saved.get("test_data", current["test_data"]) != current["test_data"]
        ),
        f"the tokenizer {since}: it encodes the same texts differently": saved["tokens"] != current["tokens"],
        f"the model's config.json {since}: {', '.join(changes)}": changes,
    }
    if problem := next((sentence for sentence, is_there in problems.items() if is_there), None):
        raise InputError(
            f"{problem}; restore what has changed, or start a new run with model.archive={resume_point.path}"
        )


def _list_changes(saved_model: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """The changed entries of a model's config, with both values."""
    if saved_model.get(VERSION_KEY) == model[VERSION_KEY]:
        keys = saved_model.keys() | model.keys()
    else:  # versions of transformers differ in their keys
        keys = (saved_model.keys() & model.keys()) - {VERSION_KEY}
    changed = [key for key in keys if model.get(key) != saved_model.get(key)]
    return sorted(f"{key}={model.get(key)} (was {saved_model.get(key)})" for key in changed)


def record_inputs(data: TrainingData, model_config: Any) -> dict[str, Any]:
    """The facts that `check_inputs` compares, for a manifest."""
    tokens = data.report.train.token_digest
    model = find_model_facts(model_config)
    return {"data": data.digest, "test_data": data.test_digest, "tokens": tokens, "model": model}


def find_model_facts(model_config: Any) -> dict[str, Any]:
    """The entries of a model's config that affect its outputs."""

    def is_without_effect(name: str) -> bool:
        return name.startswith("_") or name in WITHOUT_EFFECT or name.endswith(DROPOUT_ENDINGS)

    facts = dotted(json.loads(model_config.to_json_string(use_diff=False)))
    return {key: value for key, value in facts if not any(map(is_without_effect, key.split(".")))}


def record_config(plan: Plan) -> dict[str, Any]:
    """The config for a manifest: dotted keys, secrets redacted."""
    return redact({key: value for key, value in plan.values.items() if key != "dataset_sources"})


def _copy_checkpoint(resume_point: ResumePoint, run_dir: Path, logs: Sequence[str]) -> None:
    """Copy another run's checkpoint, completely or not at all, and its logs."""
    checkpoint = resume_point.path
    (run_dir / ORIGIN).write_text(resume_point.manifest["sha256"])
    for name in logs:
        log = checkpoint.parent / name
        if log.exists():
            check_readable(log)
            _copy_file(log, run_dir / name)
    with replacing(run_dir / checkpoint.name) as copy:
        copy.mkdir()
        for name in (*resume_point.manifest["files"], MANIFEST):
            try:
                os.link(checkpoint / name, copy / name)  # a link suffices, as the file never changes
            except OSError:  # on another file system
                _copy_file(checkpoint / name, copy / name)
        sync(copy)
    sync(run_dir)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync(target)
