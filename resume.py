"""Continuing a run: its directory, the checkpoint to continue from, whether config and data are still its own."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from checkpoint import STEP, DamagedCheckpoint, check_complete, find_checkpoints, point, step_of, tidy
from metrics import LOG_FILES
from preference_datasets import Prompt
from run_directory import create_run_dir, lock_run_dir, redact, write_record
from settings import flatten
from utils import InputError

# keys that a continued run may change: where it runs, how it rounds, how long it goes on, what it tells
MAY_CHANGE = (
    *("exp_name", "debug", "local_dirs", "local_run_dir", "wandb.enabled", "wandb.entity", "wandb.project"),
    *("trainer", "world_size", "fsdp_port", "fsdp_shard_size", "tensor_parallel_size", "tensor_parallel.backend"),
    *("collective_timeout_secs", "num_workers", "layout", "compile", "activation_checkpointing", "deterministic"),
    *("gradient_accumulation_steps", "model.attn_implementation", "model.block_name", "cache_reference_logps"),
    *("n_epochs", "n_examples", "n_eval_examples", "eval_batch_size", "eval_every", "do_first_eval"),
    *("sample_during_eval", "n_eval_model_samples", "minimum_log_interval_secs", "self_test", "nan_policy"),
    *("resume", "save_every", "keep_checkpoints", "dry_run"),
)
UNSET = object()


class Run(NamedTuple):
    """A run's directory, which is this process's alone, and where it continues."""

    directory: Path
    lock: IO
    checkpoint: Path | None = None
    manifest: Mapping[str, Any] = {}

    def is_finished(self, updates: int) -> bool:
        """Whether the checkpoint is that of a run of so many updates that was evaluated at its end."""
        return self.checkpoint is not None and self.manifest["updates"] >= updates and self.manifest["evaluated"]


def open_run(config: DictConfig) -> Run:
    """Make or reopen the directory of a run, and find the checkpoint from which it continues, if it does.

    Raises InputError if the directory holds another run or is in use, if there is no checkpoint where one was named,
    and if the config is not that of its run.
    """
    resume, path = config.resume, Path(config.local_run_dir).expanduser().resolve()
    here = resume is not None and (resume == "auto" or path in (p := Path(resume).expanduser().resolve(), p.parent))
    run_dir = create_run_dir(config.local_run_dir, continued=here)
    lock = lock_run_dir(run_dir)
    run = Run(run_dir, lock)
    if here:
        tidy(run_dir)
    if resume is not None:
        run = run._replace(**_choose_checkpoint(resume, run_dir.resolve()))
    if run.checkpoint is not None:
        check_fits(run.manifest, facts_of(config), where=run.checkpoint)
        print(f"continuing from {run.checkpoint}")
        if here:
            _point_again(run)
        else:
            _copy_logs(run.checkpoint.parent, run_dir)
    elif here:
        for log in (run_dir / name for name in LOG_FILES if (run_dir / name).exists()):
            print(f"{run_dir} holds no checkpoint, so the run starts again: removing {log.name}")
            log.unlink()
    write_record(run_dir, OmegaConf.to_container(config))
    return run


def _choose_checkpoint(resume: str, run_dir: Path) -> dict[str, Any]:
    """The complete checkpoint that `resume` means, with its manifest; nothing if `auto` finds none at all.

    A path is a checkpoint, or a run's directory: its newest complete one.
    """
    path = run_dir if resume == "auto" else Path(resume).expanduser().resolve()
    named = STEP.fullmatch(path.name) is not None
    candidates = [path] if named else find_checkpoints(path)
    here = find_checkpoints(run_dir) if named and path.parent == run_dir else []
    if later := [other.name for other in here if step_of(other) > step_of(path)]:
        raise InputError(
            f"resume={resume} would overwrite what its run saved later ({later[0]}); give another local_run_dir, to "
            f"which its logs are copied"
        )
    reasons = []
    for directory in candidates:
        try:
            return {"manifest": check_complete(directory), "checkpoint": directory}
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            print(f"warning: skipped: {error}")
    if resume == "auto" and not candidates:
        return {}
    raise InputError(
        f"resume={resume} finds no complete checkpoint{''.join(f'; {reason}' for reason in reasons[:3])}; give a run's "
        f"directory or one of its step-N, or start a run from weights alone with model.archive"
    )


def check_fits(manifest: Mapping[str, Any], config: Mapping[str, Any], *, where: Path) -> None:
    """Raises InputError that names each key whose change would make the continuation another run."""
    was = manifest["config"]
    changed = [
        f"{key}={config.get(key)} (was {was[key]})"
        for key in was
        if key not in MAY_CHANGE and was[key] != config.get(key, UNSET)
    ]
    if changed:
        raise InputError(
            f"{where} is of a run with another config: {', '.join(changed)}; give the same to continue it, or "
            f"start a new run from its weights with model.archive={where}"
        )


def check_data(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raises InputError if the training data is not what the run was trained on."""
    if run.checkpoint is not None and run.manifest["data"] != digest_data(prompts):
        raise InputError(
            f"the training data has changed since {run.checkpoint}: what was seen and what is left cannot be told "
            f"apart; restore it, or start a new run with model.archive={run.checkpoint}"
        )


def digest_data(prompts: Iterable[Prompt]) -> str:
    """A digest of prompts, responses and pairs in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.text, prompt.responses, prompt.pairs, prompt.sft_target)).encode())
    return digest.hexdigest()[:32]


def facts_of(config: DictConfig) -> dict[str, Any]:
    """The config as a manifest holds it: dotted keys, secrets left out."""
    return redact({key: value for key, value in flatten(config).items() if key != "dataset_sources"})


def _point_again(run: Run) -> None:
    """Set LATEST and BEST as the checkpoint has them: a run may be killed between its rename and the links."""
    point(run.directory / "LATEST", run.checkpoint)
    best = run.directory / f"step-{run.manifest['best_at']}"
    if best.exists():
        point(run.directory / "BEST", best)


def _copy_logs(source: Path, run_dir: Path) -> None:
    """A run that continues elsewhere takes its logs along."""
    for name in LOG_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, run_dir / name)
