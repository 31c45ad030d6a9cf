"""The plan of a config: trainer, groups of processes, dtypes, names."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch
from support.commands import compose

import preference_datasets
import trainers
from dpo.models.pretrained import DTYPES
from dpo.settings import choices, keys
from dpo.settings.files import load_defaults
from dpo.settings.keys import KEYS, Resume
from dpo.settings.plan import ParallelDims, Plan, resolve
from dpo.system import host
from dpo.training.optimization import LR_SCALINGS, OPTIMIZERS, SCHEDULES


def plan_of(*overrides: str, **given: int) -> Plan:
    return resolve(compose(" ".join(["exp_name=x", *overrides])), **given)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("overrides", "trainer", "dims"),
    [
        ((), "BasicTrainer", (1, 1, 1)),  # one process, however many GPUs
        (("trainer=FSDPTrainer",), "FSDPTrainer", (2, 2, 1)),  # one process per GPU
        (("trainer=FSDPTrainer", "world_size=4", "fsdp_shard_size=2"), "FSDPTrainer", (4, 2, 1)),
        (("trainer=TensorParallelTrainer", "world_size=4"), "TensorParallelTrainer", (4, 1, 4)),
        (
            ("trainer=TensorParallelTrainer", "world_size=4", "tensor_parallel_size=2"),
            "TensorParallelTrainer",
            (4, 2, 2),
        ),
        (
            ("trainer=TensorParallelTrainer", "tensor_parallel.backend=tensor_parallel", "tensor_parallel_size=2"),
            "PackageTensorParallelTrainer",
            (1, 1, 1),
        ),
    ],
)
def test_trainer_and_groups_of_processes(overrides, trainer, dims):
    plan = plan_of(*overrides)
    assert (plan.trainer.name, plan.dims, plan.launched) == (trainer, ParallelDims(*dims), False)


def test_groups_of_processes_fill_the_world():
    dims = ParallelDims.of(8, shard_size=2, tensor_size=2)
    assert (dims.data_size, dims.replicate_size) == (4, 2)
    assert ParallelDims.of(8, tensor_size=2) == ParallelDims(8, shard_size=4, tensor_size=2)


def test_given_processes_count_before_those_of_a_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert plan_of("trainer=FSDPTrainer").dims.world_size == 8
    assert plan_of("trainer=FSDPTrainer").launched
    assert plan_of("trainer=FSDPTrainer", world_size=3).dims.world_size == 3


def test_the_policy_computes_in_the_dtype_in_which_it_is_gathered():
    mixed = ("model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16")
    assert plan_of(*mixed).compute_dtype == "float32"
    plan = plan_of("trainer=FSDPTrainer", *mixed)
    assert (plan.compute_dtype, plan.reference_dtype, plan.model.autocast) == ("bfloat16", "bfloat16", None)


def test_a_reference_without_a_dtype_computes_as_the_policy_does():
    null = "model.reference_dtype=null"
    assert plan_of(null).reference_dtype == "float32"
    assert plan_of(null, "model.policy_dtype=bfloat16").reference_dtype == "bfloat16"
    assert plan_of(null, "trainer=FSDPTrainer", "model.fsdp_policy_mp=bfloat16").reference_dtype == "bfloat16"


def test_a_reference_inside_the_policy_computes_as_the_policy_does():
    dpo = ("loss=dpo", "loss.beta=0.1")
    plan = plan_of(*dpo, "lora=lora", "model.reference_dtype=bfloat16")
    assert (plan.reference, plan.reference_dtype) == ("base", plan.compute_dtype)
    assert plan_of(*dpo).reference == "model"
    assert plan_of("loss=sft").reference is None


@pytest.mark.parametrize(
    "override", ["trainer=3", "world_size=-1", "tensor_parallel_size=x", "loss.name=[a]", "+loss.weights=3"]
)
def test_a_value_that_makes_no_sense_leaves_a_plan(override):
    assert plan_of("trainer=TensorParallelTrainer", override).dims.world_size in (1, 2)


def test_the_names_of_the_config_are_those_of_the_tables():
    assert all(getattr(trainers, name).name == name == spec.name for name, spec in choices.TRAINERS.items())
    assert {name: f"torch.{name}" for name in DTYPES} == {name: str(dtype) for name, dtype in DTYPES.items()}
    assert all(cls.__name__ == name and issubclass(cls, torch.optim.Optimizer) for name, cls in OPTIMIZERS.items())
    assert (tuple(SCHEDULES), tuple(LR_SCALINGS)) == (get_args(keys.Schedule), get_args(keys.LRScaling))
    assert tuple(choices.TRAINERS) == get_args(keys.TrainerName)
    assert tuple(choices.TENSOR_PARALLEL_BACKENDS) == get_args(keys.Backend)
    assert (*load_defaults()["dataset_sources"], "demo") == preference_datasets.BUILT_IN == choices.BUILT_IN


def test_a_resumed_run_keeps_what_makes_it_the_run_it_is():
    kept = {key for key in KEYS if KEYS[key].resume is Resume.KEEP}
    assert {"seed", "lr", "batch_size", "datasets", "loss.name", "loss.beta", "model.policy_dtype"} <= kept
    assert not {"world_size", "local_run_dir", "n_epochs", "layout"} & kept


def test_a_plan_is_not_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of().gpus = 3


def test_torch_is_asked_for_gpus_only_where_there_may_be_one(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    there, nowhere = (f"{tmp_path}/nvidia*",), (f"{tmp_path}/kfd",)
    assert host.count_gpus(nowhere) == 2  # torch is here already
    monkeypatch.delitem(host.sys.modules, "torch")
    assert host.count_gpus(nowhere) == 0
    monkeypatch.setitem(host.sys.modules, "torch", torch)
    assert host.count_gpus(there) == 2
