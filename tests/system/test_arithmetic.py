"""Differences of a GPU, as far as a CPU can show them."""

import importlib
import os

import pytest
import torch

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


def test_a_deterministic_run_samples_by_what_has_no_deterministic_algorithm_with_a_warning():
    def act() -> None:
        torch.zeros(3).put_(torch.arange(3), torch.ones(3))

    set_up_torch(deterministic=True, compiles=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
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
