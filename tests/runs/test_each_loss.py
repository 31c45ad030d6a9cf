"""Every loss trains: the same numbers whatever the microbatches, layout and processes, and again after a resume."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from support import runs
from support.runs import GOLDEN, read_metrics, small_run, train
from support.warm import launch

from dpo.losses import LOSSES, find_loss
from dpo.models.loading import model_loaders
from dpo.models.pretrained import load_model
from dpo.settings.plan import resolve
from dpo.training.batches import Batch
from trainers import BasicTrainer, FSDPTrainer

COMMANDS = {name: (f"loss={name}",) for name in LOSSES}
COMMANDS["dpo"] += ("loss.beta=0.1",)
COMMANDS["ipo"] += ("loss.beta=0.1",)
COMMANDS["mix"] += ("loss.weights.dpo=0.8", "loss.weights.bco=0.2", "loss.weights.sft=0.1")
PAIRS = tuple(name for name in COMMANDS if name != "sft")
OPTIONS = {
    "sft term": ("loss.sft_weight=0.2",),
    "wpo": ("loss.wpo=true",),
    "ld": ("loss.ld_alpha=0.3",),
    "ld, all cached": ("loss.ld_alpha=0.3", "cache_reference_logps=all"),
    "forward kl": ("loss.f_divergence=forward_kl",),
    "all": ("loss.sft_weight=0.2", "loss.wpo=true", "loss.ld_alpha=0.3", "loss.f_divergence=alpha", "loss.f_alpha=0.2"),
}


def compose(folder: Path, run: str, *overrides: str) -> DictConfig:
    """Updates of 4 pairs on the words, with which weights move far."""
    return runs.compose(
        *("exp_name=test", f"local_run_dir={folder / run}", f"local_dirs=[{folder}]"),
        *(f"model.name_or_path={GOLDEN / 'tiny-llama'}", "model.reference_dtype=float32", "datasets=[hh]"),
        *(f"dataset_sources.hh={GOLDEN / 'words'}", "max_length=160", "max_prompt_length=80", "eval_batch_size=4"),
        *("n_eval_examples=4", "n_examples=16", "sample_during_eval=false", "wandb.enabled=false", "optimizer=SGD"),
        *("warmup_steps=0", "lr=1.0", "max_grad_norm=1.0", *overrides),
    )


def make(cls: type[BasicTrainer], config: DictConfig, rank: int = 0, world_size: int = 1) -> BasicTrainer:
    Path(config.local_run_dir).mkdir(exist_ok=True)
    policy = load_model(str(GOLDEN / "tiny-llama"), dtype=torch.float32)
    reference = copy.deepcopy(policy) if resolve(config).loss.reference else None
    return cls(policy, config, config.seed, config.local_run_dir, reference, rank, world_size)


def next_batch(trainer: BasicTrainer) -> Batch:
    return trainer.batches.draw(next(trainer.train_iterator), update=trainer.batch_counter)


def updates(trainer: BasicTrainer, n: int = 2) -> list[dict[str, float]]:
    """The metrics of so many updates, and of an evaluation after them."""
    trainer.check_and_score_reference()
    found = [trainer.train_step(next_batch(trainer)).metrics for _ in range(n)]
    of_eval = trainer.evaluator.metrics().means()
    timeless = [{k: v for k, v in line.items() if "second" not in k and "memory" not in k} for line in found]
    return [*timeless, of_eval]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Of all, those chosen run in `make test`."""
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(PAIRS, "dpo", "orpo", "cal_dpo", "bco", "beta_dpo", "aot", "mix"))
def test_microbatches_change_nothing(name, tmp_path):
    whole = updates(make(BasicTrainer, compose(tmp_path, "whole", *COMMANDS[name])))
    parts = compose(tmp_path, "parts", *COMMANDS[name], "gradient_accumulation_steps=4", "layout=padded")

    assert_same(updates(make(BasicTrainer, parts)), whole)
    first, second, _ = whole
    assert second["rewards_train/margins"] != first["rewards_train/margins"]
    assert all(torch.tensor(list(line.values())).isfinite().all() for line in whole)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "beta_dpo", "bco"])
def test_an_evaluation_depends_on_weights_and_examples_alone(name, tmp_path):
    """Not on how its examples are cut into batches, nor on the updates before it."""
    command = (*COMMANDS[name], "loss.beta=0.5", "n_eval_examples=32")
    trained = make(BasicTrainer, compose(tmp_path, "trained", *command))
    updates(trained)
    torch.manual_seed(0)
    for parameter in trained.policy.parameters():  # so that pairs are in another order than by the reference
        parameter.data += 0.3 * torch.randn_like(parameter)
    expected = trained.evaluator.metrics().means()
    for size in (2, 8, 32):
        other = make(BasicTrainer, compose(tmp_path, f"in {size}", *command, f"eval_batch_size={size}"))
        other.policy.load_state_dict(trained.policy.state_dict())
        other.objective.models_are_equal = False
        found = other.evaluator.metrics().means()
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    at_equal_models = 2 * math.log(2) if name == "bco" else math.log(2)
    assert expected["loss/eval"] != pytest.approx(at_equal_models, rel=1e-3)


def test_an_evaluation_of_beta_dpo_is_that_of_dpo_and_one_of_bco_shifts_by_its_own_mean(tmp_path):
    found = {}
    for name in ("beta_dpo", "dpo", "bco"):
        trainer = make(BasicTrainer, compose(tmp_path, name, *COMMANDS["dpo"]))
        updates(trainer)
        trainer.objective.loss = find_loss(compose(tmp_path, "other", *COMMANDS[name], "loss.beta=0.1").loss)
        found[name] = trainer.evaluator.metrics()
    assert found["beta_dpo"].means() == found["dpo"].means()
    chosen, rejected = (found["bco"].examples[f"rewards_eval/{side}"] for side in ("chosen", "rejected"))
    shift = (chosen.mean() + rejected.mean()) / 2
    losses = -((chosen - shift).sigmoid().log() + (shift - rejected).sigmoid().log())
    assert found["bco"].means()["loss/eval"] == pytest.approx(losses.mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", quick(OPTIONS, "all"))
def test_options_of_all_losses_are_the_same_in_every_layout(name, tmp_path):
    options = OPTIONS[name]
    packed, padded = (
        updates(make(BasicTrainer, compose(tmp_path, layout, *COMMANDS["dpo"], *options, f"layout={layout}")))
        for layout in ("shared_prefix", "padded")
    )
    assert_same(packed, padded)
    plain = updates(make(BasicTrainer, compose(tmp_path, "plain", *COMMANDS["dpo"])))
    assert packed[1]["loss/train"] != pytest.approx(plain[1]["loss/train"], rel=1e-3)  # the option does something


@pytest.mark.parametrize("name", quick(["bco", "beta_dpo"], "beta_dpo"))
def test_a_resumed_run_has_the_running_average_again(name, rows, tmp_path):
    command = [o for o in small_run(rows, tmp_path / "run", *COMMANDS[name], "lr=1e-2") if "n_examples=24" not in o]
    elsewhere = [o.replace(str(tmp_path / "run"), str(tmp_path / "whole")) for o in command]
    results = [
        train(*elsewhere, "n_examples=16"),
        train(*command, "n_examples=8"),
        train(*command, "n_examples=16", "resume=auto"),
    ]
    assert [result.returncode for result in results] == [0, 0, 0], results[-1].stderr
    whole, resumed = (
        [line["loss/train"] for line in read_metrics(tmp_path / run, "train")] for run in ("whole", "run")
    )
    assert resumed == whole
    assert len(whole) == 4


WITHOUT = {
    "simpo": (False, COMMANDS["simpo"]),
    "orpo": (False, COMMANDS["orpo"]),
    "their mix": (False, ("loss=mix", "loss.weights.simpo=1", "loss.weights.orpo=0.5", "loss.weights.sft=0.1")),
    "a mix with dpo": (True, COMMANDS["mix"]),
}


@pytest.mark.parametrize(("loads", "command"), WITHOUT.values(), ids=WITHOUT)
def test_a_loss_without_a_reference_loads_none(loads, command, tmp_path):
    config = compose(tmp_path, "run", *command)
    assert (model_loaders(resolve(config))[1] is not None) == loads


def update_all(rank: int, world_size: int, configs: dict[str, Any], out: Path) -> None:
    found = {name: updates(make(FSDPTrainer, config, rank, world_size)) for name, config in configs.items()}
    if rank == 0:
        out.write_text(json.dumps(found))


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(tmp_path):
    two = ("trainer=FSDPTrainer", "gradient_accumulation_steps=2", "eval_batch_size=2")
    configs = {name: compose(tmp_path, f"two {name}", *COMMANDS[name], *two) for name in COMMANDS}
    configs["options"] = compose(tmp_path, "two options", *COMMANDS["dpo"], *OPTIONS["all"], *two)
    launch(update_all, 2, configs, tmp_path / "two.json", process_group=True)

    found = json.loads((tmp_path / "two.json").read_text())
    for name, config in configs.items():
        config.trainer, config.gradient_accumulation_steps, config.local_run_dir = "BasicTrainer", 1, f"{tmp_path}/one"
        config.eval_batch_size = 4
        assert_same(found[name], updates(make(BasicTrainer, config)))
