"""The plan of a config: trainer, groups of processes, dtypes, names."""

import pytest
import torch
from support.commands import compose
from support.pytests import slow

import trainers
from dpo.checkpoint.resume import decide_autocast
from dpo.models.pretrained import DTYPES
from dpo.settings import keys
from dpo.settings.keys import KEYS, ResumeRule, compose_config
from dpo.settings.places import BUILT_IN
from dpo.settings.plan import ParallelDims, Plan, resolve
from dpo.settings.validation import find_value_problems
from dpo.training.optimization import LR_SCALINGS, OPTIMIZERS, SCHEDULES

FSDP = "trainer=FSDPTrainer"
TENSOR = "trainer=TensorParallelTrainer"


def plan_of(*overrides: str, **given: int) -> Plan:
    return resolve(compose(" ".join(["exp_name=x", *overrides])), **given)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("overrides", "trainer", "dims"),
    [
        ("lr=1", "BasicTrainer", (1, 1, 1)),  # one process, however many GPUs
        (FSDP, "FSDPTrainer", (2, 2, 1)),  # one process per GPU
        (f"{FSDP} world_size=4 fsdp_shard_size=2", "FSDPTrainer", (4, 2, 1)),
        (f"{TENSOR} world_size=4", "TensorParallelTrainer", (4, 1, 4)),
        (f"{TENSOR} world_size=4 tensor_parallel_size=2", "TensorParallelTrainer", (4, 2, 2)),
        (f"{TENSOR} tensor_parallel.backend=tensor_parallel", "PackageTensorParallelTrainer", (1, 1, 1)),
        (f"{TENSOR} world_size=-1 loss.name=[a] ++loss.weights=3", "TensorParallelTrainer", (2, 1, 2)),  # wrong values
    ],
)
def test_trainer_and_groups_of_processes(overrides, trainer, dims):
    plan = plan_of(overrides)
    assert (plan.trainer.name, plan.dims) == (trainer, ParallelDims(*dims))


def test_given_processes_count_before_those_of_a_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert plan_of(FSDP).dims.world_size == 8
    assert plan_of(FSDP, world_size=3).dims.world_size == 3


@pytest.mark.parametrize(
    ("overrides", "policy", "reference"),
    [
        ("model.fsdp_policy_mp=bfloat16", "float32", "float16"),  # one process gathers nothing
        (f"{FSDP} model.fsdp_policy_mp=bfloat16", "bfloat16", "float16"),
        (f"{FSDP} model.fsdp_policy_mp=bfloat16 model.reference_dtype=null", "bfloat16", "bfloat16"),
        ("model.policy_dtype=bfloat16 model.reference_dtype=null", "bfloat16", "bfloat16"),
        ("lora=lora model.reference_dtype=bfloat16", "float32", "float32"),  # the reference is inside the policy
    ],
)
def test_policy_and_reference_compute_in_these_dtypes(overrides, policy, reference):
    plan = plan_of(f"loss=dpo loss.beta=0.1 {overrides}")
    assert (plan.compute_dtype, plan.reference_dtype) == (policy, reference)
    assert plan_of("loss=sft").reference is None


@pytest.mark.parametrize(
    ("overrides", "has_it", "recorded", "precision"),  # model.autocast and model.fsdp_policy_mp
    [
        ("", True, None, ("bfloat16", None)),
        slow("", False, None, (None, None)),
        (FSDP, True, None, (None, "bfloat16")),  # autocast would keep copies that FSDP cannot free
        slow(FSDP, False, None, (None, None)),
        slow(f"{FSDP} model.fsdp_policy_mp=float32", True, None, (None, "float32")),
        slow(f"{TENSOR} tensor_parallel.backend=tensor_parallel", True, None, (None, None)),
        # A resumed run keeps its precision, also by another trainer.
        (FSDP, False, {"model.autocast": "bfloat16"}, (None, "bfloat16")),
        slow("", False, {"model.fsdp_policy_mp": "bfloat16"}, ("bfloat16", None)),
        slow(FSDP, True, {"model.autocast": None}, (None, None)),
    ],
)
def test_modern_computes_in_bfloat16_where_gpus_have_it_and_records_that(
    overrides, has_it, recorded, precision, monkeypatch
):
    monkeypatch.setattr("dpo.checkpoint.resume.has_bfloat16", lambda: has_it)
    given = plan_of(f"experiment=modern loss=dpo loss.beta=0.1 {overrides}")
    assert given.model.autocast == "auto"  # the parent of several processes asks no GPU
    plan = decide_autocast(given, recorded).change("seed", 1)
    assert tuple(plan.values[key] for key in keys.PRECISION) == precision
    assert plan.reference_dtype == plan.compute_dtype == (precision[1] or "float32")


def test_modern_computes_in_float32_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert decide_autocast(plan_of("experiment=modern_lora")).model.autocast is None


def test_the_names_of_the_config_are_those_of_the_tables():
    assert all(getattr(trainers, name).name == name == spec.name for name, spec in keys.TRAINERS.items())
    assert {name: f"torch.{name}" for name in DTYPES} == {name: str(dtype) for name, dtype in DTYPES.items()}
    assert all(cls.__name__ == name and issubclass(cls, torch.optim.Optimizer) for name, cls in OPTIMIZERS.items())
    for key, table in {"schedule": SCHEDULES, "lr_scaling": LR_SCALINGS, "trainer": keys.TRAINERS}.items():
        assert KEYS[key].wanted == f"one of {', '.join(table)}"
    assert (*compose_config()["dataset_sources"], "demo") == (*BUILT_IN,)


def test_a_resumed_run_keeps_what_makes_it_the_run_it_is():
    kept = {key for key in KEYS if KEYS[key].resume is ResumeRule.FIXED}
    assert {"seed", "lr", "batch_size", "datasets", "loss.name", "loss.beta", "model.policy_dtype"} <= kept
    assert not {"world_size", "local_run_dir", "n_epochs", "layout"} & kept


def test_an_option_that_another_loss_has_may_be_in_the_config_of_a_python_caller():
    """An example is a user's own `@hydra.main` with experiment=modern, which sets loss.average for loss=sft."""
    plan = plan_of("experiment=modern", "loss=dpo", "loss.beta=0.1")
    assert "loss.average" not in plan.values
    assert not [problem for problem in find_value_problems(plan.values) if problem.key.startswith("loss.")]
