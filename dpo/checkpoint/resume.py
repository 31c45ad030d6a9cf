"""Where a run resumes, and what must be unchanged since.

Rank 0 alone reads and writes the run's directory. `logs` are the names of the files in it to which callbacks append.
"""

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from dpo.checkpoint.files import (
    MANIFEST,
    MANIFEST_FORM,
    STEP,
    DamagedCheckpoint,
    check_complete,
    find_checkpoints,
    parse_step,
    set_link,
    sync,
    tidy,
)
from dpo.data.preflight import TrainingData
from dpo.data.tokenizer import KeptTemplate
from dpo.errors import InputError, WarningLine
from dpo.plugins import find_digests
from dpo.redaction import redact
from dpo.settings.keys import KEYS, PACKAGE, PRECISION, ResumeRule, dotted, update_recorded
from dpo.settings.plan import Plan
from dpo.system.host import has_bfloat16
from dpo.system.plain_files import move_aside, replacing
from dpo.system.run_directory import FILES, check_holds_no_run, lock_run_dir, read_run_facts, write_run_facts

VERSION_KEY = "transformers_version"  # key of a model's config
# These keys of a model's config do not affect a run: they name the model's origin, or our own config decides them;
# dropout is always off.
WITHOUT_EFFECT = re.compile(r"_.*|architectures|(torch_)?dtype|use_cache|id2label|label2id|.*(dropout|pdrop|layerdrop)")

# --- the directory and its checkpoint --------------------------------------------------------------------------------


class ResumePoint(NamedTuple):
    path: Path  # a checkpoint
    manifest: Mapping  # that of the checkpoint, with its config in the keys of this version


class OpenRun(NamedTuple):
    """A run's directory, locked by this process."""

    directory: Path
    resume_point: ResumePoint | None

    def is_finished(self, plan: Plan, updates: int) -> bool:
        """Return whether all `updates` and the last evaluation are done, and no samples are due after it."""
        if not self.resume_point:
            return False
        manifest = self.resume_point.manifest
        # Samples are drawn after the last checkpoint is saved.
        are_drawn = read_run_facts(self.directory).get("sampled_at") == parse_step(self.resume_point.path)
        samples_due = manifest.get("samples_due") and plan.evaluation.sample_during_eval and not are_drawn
        return manifest["updates"] >= updates and bool(manifest.get("evaluated")) and not samples_due

    def record(self, plan: Plan) -> None:
        """Write the run's config and facts; a resumed run keeps its id, and its time up to the checkpoint counts."""
        former = None
        if point := self.resume_point:
            # The run's id, and the time at which the checkpoint was complete.
            former = (point.manifest["run"], (point.path / MANIFEST).stat().st_mtime)
        data_size = plan.dims.data_size
        if plan.run.resume == "auto":  # an earlier attempt may have ended before its first checkpoint
            data_size = read_run_facts(self.directory).get("data_size") or data_size
        write_run_facts(
            self.directory,
            plan.nested_values(),
            processes=plan.dims.world_size,
            microbatch_size=plan.data.microbatch_size,
            data_size=data_size,
            former=former,
        )


@contextmanager
def opening_run(plan: Plan, logs: Sequence[str]) -> Iterator[OpenRun]:
    """Lock the run's directory inside the context, and set it back to its resume point, if the run is resumed.

    After an InputError inside, new files and directories are removed, unless there are new logs or checkpoints.
    """
    run_dir = Path(plan.run.local_run_dir)
    missing = [path for path in (run_dir.absolute(), *run_dir.absolute().parents) if not os.path.lexists(path)]
    before = set(os.listdir(run_dir)) if run_dir.is_dir() else set()
    source = _find_resume_source(plan, logs)
    with lock_run_dir(run_dir):
        try:
            yield OpenRun(run_dir, _restore_run_dir(plan, source, logs) if source else None)
        except InputError:
            new_names = set(os.listdir(run_dir)) - before
            if new_names <= {*FILES}:  # neither logs nor checkpoints
                for name in new_names:
                    (run_dir / name).unlink()
                with suppress(OSError):  # not empty
                    for directory in missing:
                        directory.rmdir()
            raise


def preview_resume(plan: Plan, logs: Sequence[str]) -> ResumePoint | None:
    """Return the checkpoint that `opening_run` would continue, or raise its InputError; write nothing."""
    source = _find_resume_source(plan, logs)
    return _find_resume_point(source, plan) if source else None


def _find_resume_source(plan: Plan, logs: Sequence[str]) -> Path | None:
    """Return the directory of the run (maybe this one) or checkpoint that is continued; None for a new run.

    Raises InputError if the run would overwrite files.
    """
    resume = plan.run.resume
    run_dir = Path(os.path.realpath(plan.run.local_run_dir))  # without links, so that it can be compared
    if resume is None:
        check_holds_no_run(run_dir, logs)
        return None
    # Path.resolve would raise for a link that leads to itself.
    source = run_dir if resume == "auto" else Path(os.path.realpath(os.path.expanduser(resume)))
    checkpoints = find_checkpoints(run_dir)
    is_own_step = source.parent == run_dir and STEP.fullmatch(source.name)
    continues_here = (source == run_dir or is_own_step) and (checkpoints or read_run_facts(run_dir))
    if not continues_here:
        check_holds_no_run(run_dir, logs)
    elif is_own_step and checkpoints and parse_step(checkpoints[0]) > parse_step(source):
        raise InputError(
            f"resume={resume} would overwrite a later checkpoint of its run ({checkpoints[0].name}): choose another "
            "local_run_dir"
        )
    return source


def _restore_run_dir(plan: Plan, source: Path, logs: Sequence[str]) -> ResumePoint | None:
    """Set checkpoints and links back to the resume point, and return it; None if there is nothing to continue.

    A checkpoint of another run is copied first, with the logs.
    """
    run_dir = Path(os.path.realpath(plan.run.local_run_dir))
    is_own = run_dir in (source, source.parent)
    if is_own:
        tidy(run_dir)
    resume_point = _find_resume_point(source, plan)
    if not resume_point:
        return None
    if not is_own:  # copied completely or not at all
        checkpoint = resume_point.path
        _copy_files([name for name in logs if (checkpoint.parent / name).exists()], checkpoint.parent, run_dir)
        with replacing(run_dir / checkpoint.name) as copy:
            copy.mkdir()
            _copy_files([*resume_point.manifest["files"], MANIFEST], checkpoint, copy)
        sync(run_dir)
    print(f"continuing from {resume_point.path}")
    for checkpoint in find_checkpoints(run_dir):
        if parse_step(checkpoint) > parse_step(resume_point.path):
            move_aside(checkpoint, f"damaged-{checkpoint.name}")  # it was skipped as damaged, so nothing may use it
    resume_point = resume_point._replace(path=run_dir / resume_point.path.name)
    # Set the links again, as a run may be killed between saving a checkpoint and setting them.
    set_link(run_dir / "LATEST", resume_point.path)
    best = run_dir / f"step-{resume_point.manifest['best_at']}"
    if best.exists():
        set_link(run_dir / "BEST", best)
    return resume_point


def _find_resume_point(path: Path, plan: Plan) -> ResumePoint | None:
    """Find the newest complete checkpoint of a run, or check the one at `path`; None if resume=auto finds none at all.

    Raises InputError if no checkpoint is complete, or a key has changed that a run must keep.
    """
    candidates = find_checkpoints(path)
    if not candidates and plan.run.resume != "auto" and STEP.fullmatch(path.name):
        candidates = [path]
    reasons = ""
    for checkpoint in candidates:
        try:
            manifest = check_complete(checkpoint)
            missing = sorted(MANIFEST_FORM.keys() - manifest.keys())
            if missing:
                raise DamagedCheckpoint(f"{checkpoint / MANIFEST} lacks {', '.join(missing)}")
        except DamagedCheckpoint as error:
            print(WarningLine(f"checkpoint skipped: {error}"))
            reasons += f"; {error}"
            continue
        recorded = update_recorded(manifest["config"])
        config = config_for_manifest(plan)
        # A run chooses values for these keys when it begins, and keeps them unless they are set now.
        chosen_keys = ["holdout", "microbatch_size"]
        if plan.model.autocast == "auto":
            chosen_keys += PRECISION
        for key in chosen_keys:
            if config[key] in ("auto", None):
                config[key] = recorded.get(key)
        check_config(recorded, config, where=checkpoint)
        return ResumePoint(checkpoint, {**manifest, "config": recorded})
    if plan.run.resume == "auto" and not candidates:
        return None
    raise InputError(
        f"resume={plan.run.resume} finds no complete checkpoint{reasons[:1000]}; name another run or step-N, or "
        "start a new run with model.archive"
    )


def _copy_files(names: Sequence[str], source: Path, target: Path) -> None:
    """Copy files from the directory `source` to `target`, and wait until the copies are on the disk."""
    for name in names:
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    sync(target)


def keep_choices(plan: Plan, run: OpenRun) -> Plan:
    """Return the plan with what a run chooses once, and keeps.

    That is holdout, the date in chat templates, precision, and the size of microbatches, which is chosen again with
    another gradient_accumulation_steps.
    """
    recorded = run.resume_point.manifest["config"] if run.resume_point else {}
    if plan.data.microbatch_size is None:
        n_microbatches = plan.n_microbatches * plan.dims.data_size  # over all ranks
        size = math.ceil(plan.data.batch_size / n_microbatches)
        if not recorded:  # an earlier attempt may have ended before its first checkpoint
            size = read_run_facts(run.directory).get("microbatch_size") or size
        elif recorded.get("gradient_accumulation_steps") == plan.data.gradient_accumulation_steps:
            size = recorded.get("microbatch_size") or size
        plan = plan.change("microbatch_size", size)
    if plan.data.holdout is None:
        plan = plan.change("holdout", recorded.get("holdout"))
    today = recorded.get("chat_template_date") or date.today().isoformat()
    plan = plan.change("chat_template_date", plan.chat.chat_template_date or today)
    return decide_autocast(plan, recorded)


def decide_autocast(plan: Plan, recorded: Mapping | None = None) -> Plan:
    """Replace model.autocast=auto in the plan by a dtype, or by None for no autocast.

    A resumed run keeps the dtype in `recorded`, the config of its checkpoint. A new run of several processes takes
    model.fsdp_policy_mp if it is set. Otherwise it is bfloat16 if the GPU computes in it, except with the package
    tensor_parallel. With several processes the dtype becomes model.fsdp_policy_mp, and autocast is off, as it would
    keep copies of weights that FSDP could not free. This asks the GPU, so a parent that only starts processes must not
    call it.
    """
    if plan.model.autocast != "auto":
        return plan
    is_multi_process = plan.trainer.multi_process
    dtype = None
    if recorded:
        dtype = recorded.get("model.autocast") or recorded.get("model.fsdp_policy_mp")
    elif is_multi_process and plan.model.fsdp_policy_mp:
        dtype = plan.model.fsdp_policy_mp
    elif plan.gpus and plan.trainer != PACKAGE and has_bfloat16():
        dtype = "bfloat16"
    if is_multi_process:
        return plan.change("model.autocast", None).change("model.fsdp_policy_mp", dtype)
    return plan.change("model.autocast", dtype)


def keep_template(plan: Plan, resume_point: ResumePoint | None) -> str | None:
    """Return the value of `chat_template` for reading data: the resumed run's text, unless another file is named."""
    named = plan.chat.chat_template
    if not resume_point or named != resume_point.manifest["config"].get("chat_template"):
        return named
    return KeptTemplate(json.dumps(resume_point.manifest["chat_template"]))


# --- what must be unchanged ----------------------------------------------------------------------------------------


def config_for_manifest(plan: Plan) -> dict:
    """Return the config for a manifest: values by dotted key, with secrets redacted.

    `dataset_sources` is left out, as `check_inputs` compares the data itself.
    """
    return redact({key: value for key, value in plan.values.items() if key != "dataset_sources"})


def check_config(recorded: Mapping, config: Mapping, *, where: Path) -> None:
    """Raise InputError for changed keys that a resumed run must keep, and print those that it may change.

    `recorded` is the config of the checkpoint `where`, `config` the present one, both by dotted key.
    """
    changed = defaultdict(list)
    for key, saved_value in recorded.items():
        if config.get(key) != saved_value:
            rule = KEYS[key].resume if key in KEYS else ResumeRule.FIXED  # another version may have saved other keys
            changed[rule].append(f"{key}={config.get(key)} (was {saved_value})")
    if changed[ResumeRule.FIXED]:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed[ResumeRule.FIXED])}; use the same, or start "
            f"a new run with model.archive={where}"
        )
    if changed[ResumeRule.CHANGEABLE]:
        print(f"continuing with {', '.join(changed[ResumeRule.CHANGEABLE])}")


def inputs_for_manifest(data: TrainingData, model_config: Any) -> dict:
    """Return what a manifest has about data and model; `check_inputs` compares all but the chat template."""
    return {
        "data": data.reports["train"].digest,
        "test_data": data.reports["test"].digest,
        "tokens": data.reports["train"].token_digest,
        "code": find_digests(),
        "model": find_model_facts(model_config),
        "chat_template": getattr(data.tokenizer, "unbound_template", None),
    }


def find_model_facts(model_config: Any) -> dict:
    """Return the entries of a model's config that affect its outputs, by dotted key."""
    facts = dotted(json.loads(model_config.to_json_string(use_diff=False)))
    return {key: value for key, value in facts if not any(map(WITHOUT_EFFECT.fullmatch, key.split(".")))}


def check_inputs(resume_point: ResumePoint | None, data: TrainingData, model_config: Any) -> None:
    """Raise InputError if data, tokenizer, plugins or model have changed since the checkpoint."""
    if not resume_point:
        return
    saved = resume_point.manifest
    current = inputs_for_manifest(data, model_config)
    names = {
        "data": "the training data",
        "test_data": "the test data",
        "tokens": "the tokenizer",
        "code": "the code of plugins",
    }
    changed = [name for key, name in names.items() if saved.get(key) != current[key]]
    before = saved["model"]
    now = current["model"]
    keys = before.keys() | now.keys()
    if before.get(VERSION_KEY) != now[VERSION_KEY]:  # versions of transformers differ in their keys
        keys = (before.keys() & now.keys()) - {VERSION_KEY}
    for key in sorted(keys):
        if now.get(key) != before.get(key):
            changed.append(f"{key}={now.get(key)} (was {before.get(key)}) in the model's config.json")
    if changed:
        where = resume_point.path
        raise InputError(
            f"{changed[0]} has changed since {where}; restore it, or start a new run with model.archive={where}"
        )
