"""A sharded checkpoint has all parts of all tensors once, however they are divided."""

from pathlib import Path

import pytest
import torch
from support.models import build
from support.warm import launch

from dpo.checkpoint.files import read_state
from dpo.checkpoint.saver import Checkpoints, ModelPart
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute, full_state
from dpo.settings.plan import ParallelDims


def save_and_read(rank: int, world_size: int, dims: ParallelDims, trained: bool, folder: Path) -> None:
    mesh = Mesh(rank, dims)
    model = build("llama, tied", on_meta=rank > 0).requires_grad_(trained)
    model = distribute(model, mesh, block_name=None, compute_dtype=torch.float32, frozen_whole=not trained)
    checkpoints = Checkpoints(folder, mesh, keep=None, log=print, sharded=True)
    checkpoints.save([ModelPart("policy", model)], step_idx=8, metrics=None, quality=None, facts={})
    expected = full_state(model.state_dict())
    if rank == 0:
        found = read_state(folder / "step-8" / "policy.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


DIVISIONS = {
    "uneven rows, cut and sharded": (ParallelDims(6, shard_size=3, tensor_size=2), True),
    "hybrid": (ParallelDims(4, shard_size=2), True),
    "frozen weights whole, cut": (ParallelDims(4, shard_size=2, tensor_size=2), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_what_is_read_is_what_was_saved(division, tmp_path):
    dims, trained = DIVISIONS[division]
    launch(save_and_read, dims.world_size, dims, trained, tmp_path, process_group=True)
