"""`dpo consolidate` makes a full checkpoint of a sharded one, which torch reads, too."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.faults import SHARDED
from support.pytests import refused
from support.runs import find_differences
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dpo.checkpoint.files import find_checkpoints, read_state
from dpo.checkpoint.shards import SHARDS
from dpo.commands.consolidate import main

pytestmark = pytest.mark.slow  # two runs of two processes


@pytest.fixture
def sharded(finished):
    return finished(*SHARDED, "checkpoint_format=sharded")


def test_the_full_checkpoint_is_that_of_a_run_that_saves_full_ones(sharded, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sharded, run, symlinks=True)
    for checkpoint in find_checkpoints(run):
        assert len(list(checkpoint.glob(SHARDS))) == 4  # two processes, of policy and optimizer
        shutil.rmtree(checkpoint)
        assert main([str(sharded / checkpoint.name), str(checkpoint)]) == 0
        assert not list(checkpoint.glob(SHARDS))
    assert find_differences(finished(*SHARDED), run) == []


def test_what_is_there_is_not_replaced(sharded, tmp_path):
    assert main([str(sharded), str(tmp_path)]) == 2


def test_torchs_own_reader_reads_the_shards(sharded):
    checkpoint = sharded / "LATEST"
    state = read_state(checkpoint / "policy.pt")
    found = {f"policy.{name}": torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    assert all(torch.equal(found[f"policy.{name}"], tensor) for name, tensor in state.items())


def test_a_policy_without_its_shards_is_refused(sharded, tmp_path):
    shutil.copy(sharded / "LATEST" / "policy.pt", tmp_path)
    with refused("policy.pt needs the shard-.* of its checkpoint, which are damaged: they lack parts of a tensor"):
        read_state(tmp_path / "policy.pt")
