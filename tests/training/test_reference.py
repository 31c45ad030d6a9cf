"""Each example is scored by the reference once, in a run and with a file; a wrong file is noticed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpo.errors import InputError
from dpo.models.weights import model_digest
from dpo.training.reference import ReferenceLogps, read_logps

LOGPS = torch.tensor([[-1.5, -2.25], [-3.0, -4.125]])
UNKNOWN = [float("nan")] * 2


def batch(*rows: int) -> SimpleNamespace:
    return SimpleNamespace(cache_rows=list(rows))


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 half an archive", np.array([object()]), np.zeros((3, 2))],
    ids=["empty", "half an archive", "objects", "another shape"],
)
def test_a_file_of_anything_else_is_refused(content, tmp_path):
    path = tmp_path / "file.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, logps=content)
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        read_logps(path, (2, 2))


def fill(path, stored: list[list[float]], batches: list) -> tuple[ReferenceLogps, list]:
    """A cache that is filled with a file of these values; and the rows that were scored."""
    np.savez(path, logps=np.array(stored))
    known, scored = ReferenceLogps(2, 2), []

    def score(batch) -> torch.Tensor:
        scored.append(batch.cache_rows)
        return LOGPS[batch.cache_rows]

    known.fill(batches, score, path=path, is_rank_0=True)
    return known, scored


def test_what_is_missing_is_scored_once_and_the_first_stored_batch_again(tmp_path):
    stored = [LOGPS[0].tolist(), UNKNOWN]
    known, scored = fill(tmp_path / "file.npz", stored, [batch(0), batch(0), batch(1), batch(1)])
    assert scored == [[0], [1]]
    assert torch.equal(known.find([0, 1]), LOGPS.double())
    assert read_logps(tmp_path / "file.npz", (2, 2)).tolist() == LOGPS.tolist()


@pytest.mark.parametrize("batches", [[batch(0)], [batch(0, 1)]])
def test_a_file_of_other_values_is_refused_also_for_a_part_of_a_batch(batches, tmp_path):
    with pytest.raises(InputError, match=r"file.npz: stored .* differ by up to 0\.25 .*: remove this file"):
        fill(tmp_path / "file.npz", [[-1.5, -2.5], UNKNOWN], batches)


def test_a_checkpoint_has_what_was_known_of_the_same_data():
    known, again = ReferenceLogps(3, 2), ReferenceLogps(3, 2)
    again.load_state_dict(known.state_dict())
    assert again.find([0]) is None
    known.store([0, 2], LOGPS)
    again.load_state_dict(known.state_dict())
    assert torch.equal(again.find([0, 2]), LOGPS.double())
    for other in (ReferenceLogps(2, 2), ReferenceLogps(3, 2, "another test split")):
        other.load_state_dict(known.state_dict())
        assert other.find([0]) is None


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
