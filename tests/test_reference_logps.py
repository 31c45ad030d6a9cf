"""What the reference gave is found again by content, in a run and in a file, and a wrong file is noticed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reference_logps import ReferenceLogps, model_digest, read_logps
from utils import InputError

KEYS = [(b"a" * 16, b"b" * 16), (b"c" * 16, b"d" * 16)]
LOGPS = torch.tensor([[-1.5, -2.25], [-3.0, -4.125]])


def batch(keys) -> SimpleNamespace:
    return SimpleNamespace(keys=keys)


def fail(batch):
    raise AssertionError("scored what is known")


def test_a_batch_is_found_when_all_of_it_is_known():
    known = ReferenceLogps()
    assert known.find(KEYS) is None
    known.add(KEYS[:1], LOGPS[:1])
    assert known.find(KEYS) is None
    known.add(KEYS[1:], LOGPS[1:])
    assert torch.equal(known.find(KEYS), LOGPS.double())
    assert torch.equal(known.find([KEYS[1], KEYS[0]]), LOGPS.flip(0).double())


def test_a_file_holds_what_was_known_to_the_last_bit(tmp_path):
    known, logps = ReferenceLogps(), torch.tensor([[-1 / 3, -1e-30], [-12345.678, 0.0]])
    known.add(KEYS, logps)
    known.save(tmp_path / "new" / "file.npz")

    read = read_logps(tmp_path / "new" / "file.npz")
    assert [read[key] for row in KEYS for key in row] == logps.double().flatten().tolist()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.npz"]  # nothing beside it


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 half of one"])
def test_another_file_is_one_message(content, tmp_path):
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        read_logps(tmp_path / "file.npz")


def test_a_file_is_read_as_data(tmp_path):
    np.savez(tmp_path / "file.npz", keys=np.array([object()]), logps=np.zeros(1))
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        read_logps(tmp_path / "file.npz")


def test_only_what_is_missing_is_scored_and_some_of_the_rest_is_scored_again():
    scored = []

    def score(batch):
        scored.append(batch.keys)
        return LOGPS[[KEYS.index(row) for row in batch.keys]]

    read = dict(zip(KEYS[0], LOGPS[0].tolist(), strict=True))
    known = ReferenceLogps()
    n_scored = known.score_all([batch(KEYS[:1]), batch(KEYS[1:]), batch(KEYS[1:])], score, read, seed=0)
    assert n_scored == 1
    assert scored == [KEYS[1:], KEYS[:1]]  # the missing one, once; then the one to check
    assert torch.equal(known.find(KEYS), LOGPS.double())


def test_a_file_of_other_numbers_is_refused():
    read = dict(zip(KEYS[0], [-1.5, -2.5], strict=True))
    with pytest.raises(InputError, match=r"off by up to 0\.25: remove their file"):
        ReferenceLogps().score_all([batch(KEYS[:1])], lambda batch: LOGPS[:1], read, seed=0)


def test_what_a_file_knows_of_a_batch_that_is_scored_anyway_is_compared():
    read = dict(zip(KEYS[0], [-1.5, -2.5], strict=True))
    with pytest.raises(InputError, match=r"off by up to 0\.25: remove their file"):
        ReferenceLogps().score_all([batch(KEYS)], lambda batch: LOGPS, read, seed=0)


def test_without_a_file_nothing_is_scored_twice():
    known = ReferenceLogps()
    known.score_all([batch(KEYS)], lambda batch: LOGPS, {}, seed=0)
    assert known.score_all([batch(KEYS)], fail, {}, seed=0) == 0
    assert torch.equal(known.find(KEYS), LOGPS.double())


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
