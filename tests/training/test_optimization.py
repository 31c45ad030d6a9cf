"""The learning rate of every update: formulas worked by hand, and what a run that continues makes of them."""

import math

import pytest
import torch
from support.faults import SHARDED
from support.pytests import refused, slow, succeeded
from support.runs import read_metrics, train, train_here

from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_change
from dpo.checkpoint.files import read_state
from dpo.parallel import sharding
from dpo.parallel.sharding import step_and_count_changes
from dpo.settings.plan import make_plan
from dpo.training.optimization import Schedule, check_optimizer, make_optimizer


def make_schedule(kind: str, *, updates: int, warmup_steps: int | None = 0, min_ratio: float = 0.0) -> Schedule:
    """The schedule of an optimizer with a rate of 1."""
    keys = {"schedule": kind, "warmup_steps": warmup_steps, "min_lr_ratio": min_ratio, "lr_scaling": "none"}
    training = make_plan(keys | {"lr": 1.0}).training
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return Schedule(training, optimizer, updates=updates, data_size=1)


def rates(schedule: Schedule, updates: int) -> list[float]:
    """The learning rates of the next updates."""
    found = []
    for _ in range(updates):
        [group] = schedule.optimizer.param_groups
        assert schedule.get_last_lr() == [group["lr"]]
        found.append(group["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


HALF = math.sqrt(0.5)  # cos(pi / 4)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("constant", {"updates": 6, "warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]),
        ("linear", {"updates": 6, "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("linear", {"updates": 4, "min_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        ("cosine", {"updates": 4, "min_ratio": 0.1}, [1, 0.1 + 0.9 * (1 + HALF) / 2, 0.55, 0.1 + 0.9 * (1 - HALF) / 2]),
        ("cosine", {"updates": 1}, [1]),
        ("linear", {"updates": 2, "warmup_steps": 9}, [1 / 10, 2 / 10]),
    ],
)
def test_the_rate_rises_over_the_warmup_and_then_falls_to_the_least_at_the_end(kind, settings, expected):
    schedule = make_schedule(kind, **settings)
    assert rates(schedule, len(expected)) == pytest.approx(expected, rel=1e-12)
    if kind != "constant" and settings.get("warmup_steps", 0) < len(expected):  # what one more update would have
        assert schedule.get_last_lr() == pytest.approx([settings.get("min_ratio", 0.0)], abs=1e-12)


@pytest.mark.parametrize("updates", [3, 6, 20])
def test_a_longer_run_continues_on_the_curve_of_its_new_length(updates):
    first = make_schedule("cosine", updates=6, warmup_steps=1, min_ratio=0.1)
    rates(first, 2)
    whole, again = (make_schedule("cosine", updates=updates, warmup_steps=1, min_ratio=0.1) for _ in range(2))
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    again.load_state_dict(first.state_dict())

    assert rates(again, 5) == rates(whole, 7)[2:]  # bit for bit
    assert again.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("updates", "warmup"), [(9, 0), (78, 7), (100_000, 150)])
def test_the_default_warmup_is_a_tenth_of_the_run_and_stays_when_the_run_becomes_longer(updates, warmup):
    schedule, longer = (make_schedule("constant", updates=n, warmup_steps=None) for n in (updates, 10 * updates))
    longer.load_state_dict(schedule.state_dict())
    expected = [min(1.0, (update + 1) / (warmup + 1)) for update in range(200)]
    assert rates(schedule, 200) == pytest.approx(expected)
    assert rates(longer, 200) == pytest.approx(expected)


def test_changes_are_counted_in_a_sample_of_the_weights_with_a_gradient(monkeypatch):
    """Below 1, bfloat16 has a number every 2^-8."""
    weights = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weights, torch.nn.Parameter(torch.ones(1))], lr=2**-8)
    gradient = torch.tensor([[1.0, 0.1, 0.0], [1.0, 0.1, 0.1]])
    weights.grad = gradient.bfloat16()
    assert step_and_count_changes(optimizer) == (2, 5)
    assert (weights != 1).tolist() == [[True, False, False], [True, False, False]]
    weights.grad = gradient.bfloat16()
    monkeypatch.setattr(sharding, "SAMPLED_WEIGHTS", 2)
    assert step_and_count_changes(optimizer) == (1, 2)  # the first and the last of six


# --- runs ----------------------------------------------------------------------------------------------------------


def lrs(run_dir) -> list[float]:
    return [line["lr"] for line in read_metrics(run_dir, "train")]


def test_an_update_that_is_skipped_takes_no_step_along_the_curve(run, spoil, run_dir):
    spoil(3)
    run("run", "schedule=linear", "warmup_steps=0", "nan_policy=skip", "do_first_eval=false", "eval_every=24")
    assert lrs(run_dir) == pytest.approx([1e-3 * n / 6 for n in (6, 5, 4, 4, 3, 2)])


@pytest.mark.slow
def test_two_processes_scale_the_rate_and_a_run_keeps_it_with_another_number(command, run, run_dir):
    settings = ("lr_scaling=linear", "warmup_steps=0", "do_first_eval=false")
    succeeded(train(*command("run", *SHARDED, *settings, "n_examples=8")))
    assert lrs(run_dir) == [0.002] * 2

    run("run", *settings, "n_examples=12", "resume=auto")

    assert lrs(run_dir) == [0.002] * 3
    groups = read_state(run_dir / "step-12" / "optimizer.pt")["param_groups"]
    assert [group["lr"] for group in groups] == [0.002]


# --- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "arguments", "complaint"),
    [
        ("AdamW", {"weight_decay": 0.25, "betas": (0.5, 0.75), "eps": 1e-6}, ""),
        ("SGD", {"momentum": 0.5, "nesterov": True}, ""),
        ("RMSprop", {"betas": [0.9, 0.95]}, "'betas'"),
        ("Adam", {"betas": [0.9, 2]}, "Invalid beta parameter"),
        ("AdamW", {"lr": 1.0}, "multiple values for keyword argument 'lr'"),
    ],
)
def test_the_optimizers_arguments_reach_it_or_are_refused_with_those_it_takes(optimizer, arguments, complaint):
    training = make_plan({}).training._replace(optimizer=optimizer, optimizer_args=arguments, lr=1e-3)
    if complaint:
        with refused(f"optimizer={optimizer}, which takes .*weight_decay.*{complaint}"):
            check_optimizer(training)
    else:
        [group] = make_optimizer(training, torch.nn.Linear(2, 1)).param_groups
        assert {name: group[name] for name in ("lr", *arguments)} == {"lr": 1e-3, **arguments}


PROCESSES = slow("trainer=FSDPTrainer world_size=2")


@pytest.mark.parametrize("way", ["", PROCESSES])
def test_a_run_whose_16_bit_weights_hardly_change_is_told_the_share(way, command, tmp_path):
    settings = ("optimizer=SGD", "model.policy_dtype=bfloat16", *way.split())

    def find_result(name: str, *more: str) -> tuple[list[float | None], str]:
        train_here(command(name, *settings, *more))
        lines = read_metrics(tmp_path / name, "train")
        return [line.get("changed_weights") for line in lines], (tmp_path / name / "log.txt").read_text()

    shares, log = find_result("small", "lr=1e-12")
    assert shares == [None] * 4 + [0.0, None]  # the fifth update has the full rate
    key = "fsdp_policy_mp" if way else "autocast"
    told = "warning: update 5, the first at the full lr, changed"
    assert f"{told} 0 % of" in log
    assert f"set model.policy_dtype=float32 model.{key}=bfloat16" in log
    assert describe_change(read_run(tmp_path / "small")).startswith("The model hardly changed: no weight changed")
    shares, log = find_result("large", "optimizer=AdamW", "lr=1e-2")
    assert 0.1 < (shares[4] or 0) < 1
    assert told not in log


def test_an_optimizer_that_cannot_take_a_step_is_refused_before_training():
    training = make_plan({}).training._replace(optimizer="Adam", optimizer_args={"differentiable": True})
    with refused(r"optimizer=Adam with optimizer_args=\{'differentiable': True\} cannot take a step: .*leaf"):
        check_optimizer(training)
