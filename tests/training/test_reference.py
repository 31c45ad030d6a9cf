"""What the reference's cache keeps, and which files it takes; `test_trainers.py` has its runs."""

import copy

import numpy as np
import pytest
import torch
from support.pytests import refused

from dpo.models.pretrained import model_digest
from dpo.training.objective import ReferenceLogps, read_logps

LOGPS = torch.tensor([[-1.5, -2.25], [-3.0, -4.125]])


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 half an archive", np.zeros((3, 2))],
    ids=["empty", "half an archive", "another shape"],
)
def test_a_file_without_log_probabilities_of_the_right_shape_is_refused(content, tmp_path):
    path = tmp_path / "file.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, logps=content)
    with refused("is not a file of reference log-probabilities"):
        read_logps(path, (2, 2))


def test_cached_log_probabilities_are_restored():
    known, again = ReferenceLogps(3, 2), ReferenceLogps(3, 2)
    again.load_state_dict(known.state_dict())
    assert again.find([0]) is None
    known.store([0, 2], LOGPS)
    again.load_state_dict(known.state_dict())
    assert torch.equal(again.find([0, 2]), LOGPS.double())


def test_the_digest_tells_weights_dtype_and_architecture(tiny_llama):
    digest = model_digest(tiny_llama, "float32")
    assert model_digest(copy.deepcopy(tiny_llama), "float32") == digest
    assert model_digest(tiny_llama, "bfloat16") != digest
    other = copy.deepcopy(tiny_llama)
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5.0}
    assert model_digest(other, "float32") != digest
    other = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        other.lm_head.weight[7, 3] += 1e-6
    assert model_digest(other, "float32") != digest
    assert model_digest(copy.deepcopy(tiny_llama).bfloat16(), "float32") != digest
