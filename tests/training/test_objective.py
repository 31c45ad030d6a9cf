"""Ranked lists, weights and margins of the data in the losses of updates and evaluations."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import trainers
from support.models import load_tiny
from support.runs import ask, write_splits, write_weighted
from support.warm import launch

from dpo.analysis.ledger import read_ledger
from dpo.models.layouts import SharedPrefix
from dpo.reporting.ledger import Ledger
from dpo.training.objective import Reduced, per_example_auc
from trainers import BasicTrainer, FSDPTrainer

DPO = ("loss=dpo", "loss.beta=0.5")
LISTS = ("loss=plackett_luce", "loss.beta=0.5")


@pytest.fixture
def make(tmp_path):
    """A function that makes a trainer on the data in a directory."""

    def make_trainer(run: str, data: Path, *overrides: str) -> BasicTrainer:
        source = ("datasets=[mine]", f"dataset_sources.mine={data}", "batch_size=8", "n_eval_examples=8")
        limits = ("n_epochs=null", "n_examples=32")
        return trainers.make(trainers.compose(tmp_path, run, *source, *limits, *overrides))

    return make_trainer


@pytest.mark.parametrize("loss", ["dpo", "kto"])  # of labels, the ranking is weighted too
@pytest.mark.parametrize("weight", [1e308, 5e-324], ids=str)
def test_weights_that_are_all_alike_give_the_numbers_of_none_whatever_their_size(loss, weight, make, tmp_path):
    found = []
    for weights in ({}, {"weight": weight}):
        run = f"run {len(weights)}"

        def make_row(split: str, i: int, weights: dict = weights) -> dict:
            answers = {"chosen": f" It is {i}.", "rejected": f" Who knows {i}?"}
            if loss == "kto":
                answers = {"completion": f" It is {i}.", "label": i % 2 == 0}
            return {"prompt": ask(split, i), **answers, **weights}

        trainer = make(run, write_splits(tmp_path / "data" / run, make_row), f"loss={loss}", "loss.beta=0.5")
        found.append([*trainers.updates(trainer), trainer.evaluate_if_due(is_last=True)])
    for without, alike in zip(*found, strict=True):
        assert alike == pytest.approx(without, rel=1e-9)
    assert found[1][-1].keys() >= {"loss/eval", trainer.plan.best[0]}


def test_a_role_whose_weights_are_small_beside_the_others_has_means_and_a_ranking():
    roles = [SimpleNamespace(roles=(role,)) for role in ("chosen", "chosen", "rejected")]
    table = {"rewards/chosen": torch.tensor([1.0, 4.0, 0.0]), "rewards/rejected": torch.tensor([0.0, 0.0, 2.0])}
    means = Reduced(table).means(roles, [1e-323, 5e-324, 1e308])
    assert means == {"rewards/chosen": 2.0, "rewards/rejected": 2.0}
    weights = torch.tensor([1e-323, 5e-324, 1e308], dtype=torch.float64)
    shares = per_example_auc(torch.tensor([1.0, 4.0, 2.0]), torch.tensor([True, True, False]), weights)
    assert shares.tolist() == pytest.approx([0, 1, 1 / 3])


def test_on_pairs_plackett_luce_trains_as_dpo_to_the_last_digit(make, tmp_path):
    data = write_weighted(tmp_path / "pairs")
    assert trainers.updates(make("lists", data, *LISTS)) == trainers.updates(make("dpo", data, *DPO))


@pytest.mark.parametrize("overrides", [DPO, (*DPO, "loss.offset_by_margin=true")], ids=" ".join)
def test_loss_and_metrics_are_weighted_means(overrides, make, tmp_path):
    trainer = make("run", write_weighted(tmp_path / "pairs"), *overrides, "ledger=true")
    trainers.updates(trainer)
    batch = trainers.next_batch(trainer)
    update = trainer.train_step(batch)
    weights = torch.tensor([example.weight for example in batch.examples], dtype=torch.float64)
    assert len({*batch.weights}) > 1
    for name in ("loss/train", "rewards_train/chosen", "rewards_train/accuracies"):
        mean = (weights * update.table[name]).sum() / weights.sum()
        assert update.metrics[name] == pytest.approx(mean.item(), rel=1e-6)
    offsets = torch.tensor([example.margin or 0.0 for example in batch.examples])
    margins = update.table["rewards_train/margins"]
    assert update.table["loss/train"].tolist() == pytest.approx((offsets - margins).exp().log1p().tolist(), rel=1e-5)

    [ledger] = [callback for callback in trainer.callbacks.callbacks.values() if isinstance(callback, Ledger)]
    ledger.on_start()
    ledger.on_update(update)
    rows = read_ledger(trainer.run_dir)
    assert rows["weight"].to_pylist() == batch.weights
    assert rows["offset"].to_pylist() == [example.margin for example in batch.examples]


@pytest.mark.parametrize("loss", ["bco", "beta_dpo"])
def test_running_averages_count_all_examples_alike(loss, make, tmp_path):
    trainer = make("run", write_weighted(tmp_path / "pairs"), f"loss={loss}", "loss.beta=0.5")
    trainers.updates(trainer)
    before, batch = trainer.objective.average, trainers.next_batch(trainer)
    table = trainer.train_step(batch).table
    assert len({*batch.weights}) > 1
    means = (table[f"rewards_train/{role}"].mean().item() for role in ("chosen", "rejected"))
    options = trainer.plan.loss.options
    value = trainer.plan.loss.running_statistic(*means, options["beta"])
    expected = options["momentum"] * before + (1 - options["momentum"]) * value
    assert trainer.objective.average == pytest.approx(expected, rel=1e-5)


def lay_out_under_fsdp(rank: int, world_size: int, folder: Path) -> None:
    """Make trainers whose reference is whole, as it is by default on GPUs, and sharded."""
    sizes = ("trainer=FSDPTrainer", f"world_size={world_size}", "batch_size=4")
    for frozen in ("whole", "sharded"):
        config = trainers.compose(folder, frozen, *DPO, *sizes, f"fsdp_frozen_weights={frozen}")
        policy, reference = (load_tiny() for _ in range(2))
        trainer = FSDPTrainer(policy, config, config.seed, config.local_run_dir, reference, rank, world_size)
        assert isinstance(trainer.objective.layout, SharedPrefix), frozen


def test_the_layout_does_not_depend_on_whether_the_reference_is_whole_or_sharded(tmp_path):
    launch(lay_out_under_fsdp, 2, tmp_path, process_group=True)
