"""Differences of a GPU, as far as a CPU can show them."""

import importlib
import os
from typing import Any

import pytest
import torch
from support.runs import ask, write_splits
from test_trainers import DPO, make_trainer  # noqa: F401  (fixtures)

from dpo import commands
from dpo.system.arithmetic import set_up_torch, without_compilation
from dpo.system.host import set_allocators


@pytest.fixture(autouse=True)
def restored():
    """Settings of the process as they were."""
    allowed, deterministic = torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.use_deterministic_algorithms(deterministic)


# --- torch.compile -------------------------------------------------------------------------------------------------


class CountedBackend:
    """A backend of torch.compile that counts graphs and calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, traced: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return traced.forward(*arguments)

        return run


@pytest.fixture
def backend(monkeypatch):
    counted, compile = CountedBackend(), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda block, dynamic, options: compile(block, backend=counted, dynamic=dynamic)
    )
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_blocks_are_trained_compiled_also_after_sampling(make_trainer, backend, tmp_path):  # noqa: F811
    def pair(split: str, i: int) -> dict[str, str]:
        return {"chosen": f"{ask(split, i)} On the desk{'!' * (i % 3)}", "rejected": f"{ask(split, i)} Go!"}

    pairs = write_splits(tmp_path / "pairs", pair)
    set_up_torch(deterministic=False, compiles=True)
    assert torch._dynamo.config.recompile_limit >= 32  # torch's own is 8: policy and reference share the blocks' code
    settings = ("compile=true", "sample_during_eval=true", "n_eval_model_samples=4", "n_examples=16")
    trainer = make_trainer(*DPO, f"dataset_sources.hh={pairs}", *settings)
    trainer.check_and_score_reference()
    after_checks = backend.calls
    trainer.evaluator.samples(n_examples=0)
    assert backend.calls == after_checks  # generation runs as written
    trainer.evaluator.metrics()
    graphs = []
    for batch in trainer.train_iterator:  # of other shapes
        before = backend.calls
        trainer.train_step(batch)
        blocks = len(trainer.policy.model.layers)
        assert backend.calls - before >= 2 * blocks * len(batch.microbatches)  # policy and reference
        graphs.append(backend.graphs)
    assert len(graphs) == 4
    assert graphs[-1] == graphs[1]  # nothing is traced anew
    assert backend.graphs <= 12


# --- generation ----------------------------------------------------------------------------------------------------


def test_a_deterministic_run_samples_by_what_has_no_deterministic_algorithm_with_a_warning():
    def act() -> None:
        torch.zeros(3).put_(torch.arange(3), torch.ones(3))

    set_up_torch(deterministic=True, compiles=False)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        act()
    with without_compilation(), pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        act()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        act()


def test_no_attention_kernel_that_plans_for_every_shape_and_memory_that_grows_in_segments():
    torch.backends.cuda.enable_cudnn_sdp(True)
    set_up_torch(deterministic=False, compiles=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    for environment, setting in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),  # the user says otherwise
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ):
        set_allocators(environment)
        assert environment.get("PYTORCH_ALLOC_CONF") == setting


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_allocators_are_set_before_the_module_of_a_command_is_imported(name, monkeypatch):
    def stop(*_: object) -> None:
        raise LookupError(os.environ["PYTORCH_ALLOC_CONF"])

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(importlib, "import_module", stop)
    monkeypatch.setattr(commands.host, "harden_stdio", stop)  # what `train` begins with
    with pytest.raises(LookupError, match="expandable_segments:True"):
        commands.main([name])
