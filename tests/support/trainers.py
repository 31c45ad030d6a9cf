"""Trainers in this process, with updates that move weights far."""

import copy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dpo.settings.plan import resolve
from dpo.training.batches import Batch
from support import runs
from support.models import load_tiny
from support.runs import GOLDEN, TINY
from trainers import BasicTrainer


def compose(folder: Path, run: str, *overrides: str) -> DictConfig:
    """The config of a short run on the data of tests/golden/words, of DPO unless a loss is named."""
    if not any(override.startswith("loss=") for override in overrides):
        overrides = ("loss=dpo", "loss.beta=0.1", *overrides)
    return runs.compose(
        "exp_name=test",
        f"local_run_dir={folder / run}",
        f"local_dirs=[{folder}]",
        f"model.name_or_path={TINY}",
        "model.reference_dtype=float32",
        "datasets=[hh]",
        f"dataset_sources.hh={GOLDEN / 'words'}",
        "max_length=160",
        "max_prompt_length=80",
        "eval_batch_size=4",
        "n_eval_examples=4",
        "n_examples=16",
        "sample_during_eval=false",
        "wandb.enabled=false",
        "optimizer=SGD",
        "warmup_steps=0",
        "lr=1.0",
        "max_grad_norm=1.0",
        *overrides,
    )


def make(config: DictConfig, **more: Any) -> BasicTrainer:
    """The trainer of a config, with the tiny Llama or another `policy`."""
    Path(config.local_run_dir).mkdir(exist_ok=True)
    policy = load_tiny()
    reference = copy.deepcopy(policy) if resolve(config).reference == "model" else None
    return BasicTrainer(more.get("policy", policy), config, config.seed, config.local_run_dir, reference)


def next_batch(trainer: BasicTrainer) -> Batch:
    return trainer.batches.make_batch(next(trainer.train_iterator), update=trainer.batch_counter)


def updates(trainer: BasicTrainer, n: int = 2) -> list[dict[str, float]]:
    """The metrics of `n` updates, without times, then of an evaluation."""
    trainer.check_and_score_reference()
    lines = [trainer.train_step(next_batch(trainer)).metrics for _ in range(n)]
    of_eval = trainer.evaluator.metrics().means()
    timeless = [{k: v for k, v in line.items() if "second" not in k and "memory" not in k} for line in lines]
    return [*timeless, of_eval]
