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


def batch(*numbers: int) -> SimpleNamespace:
    return SimpleNamespace(cache_rows=list(numbers))


def score(batch) -> torch.Tensor:
    return LOGPS[batch.cache_rows]


def stored(*rows: list[float]) -> np.ndarray:
    return np.array(rows)


UNKNOWN = [float("nan")] * 2


def score_all(known: ReferenceLogps, batches, score=score, read: np.ndarray | None = None, tmp_path="FILE") -> int:
    return known.fill(batches, score, read, path=tmp_path, seed=0)


@pytest.mark.slow
def test_scores_that_cannot_be_saved_serve_the_run_all_the_same(run, tmp_path, capsys):
    (tmp_path / "cache").mkdir()
    run("first", "n_examples=8", "cache_reference_logps=all", f"local_dirs=[{tmp_path}/cache]")
    [user] = (tmp_path / "cache").iterdir()
    (user / "reference_logps").rename(tmp_path / "away")
    (user / "reference_logps").touch()
    run("run", "n_examples=8", "cache_reference_logps=all", f"local_dirs=[{tmp_path}/cache]")
    assert "scored by the reference; warning: they are not saved for other runs" in capsys.readouterr().out
    assert (tmp_path / "run" / "LATEST").exists()


def test_a_file_holds_what_was_known_to_the_last_bit(tmp_path):
    known, logps = ReferenceLogps(3, 2), torch.tensor([[-1 / 3, -1e-30], [-12345.678, 0.0]])
    known.store([0, 2], logps)
    known.save(tmp_path / "new" / "file.npz")

    read = read_logps(tmp_path / "new" / "file.npz", (3, 2))
    assert read[[0, 2]].tolist() == logps.double().tolist()
    assert np.isnan(read[1]).all()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.npz"]  # nothing beside it


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 half of one"])
def test_another_file_is_one_message(content, tmp_path):
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        read_logps(tmp_path / "file.npz", (2, 2))


@pytest.mark.parametrize("logps", [np.array([object()]), np.zeros((3, 2))])
def test_a_file_is_read_as_data_of_this_many_examples(logps, tmp_path):
    np.savez(tmp_path / "file.npz", logps=logps)
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        read_logps(tmp_path / "file.npz", (2, 2))


def test_only_what_is_missing_is_scored_and_some_of_the_rest_is_scored_again():
    scored = []

    def score_and_keep(batch):
        scored.append(batch.cache_rows)
        return score(batch)

    known = ReferenceLogps(2, 2)
    read = stored(LOGPS[0].tolist(), UNKNOWN)
    assert score_all(known, [batch(0), batch(1), batch(1)], score_and_keep, read) == 1
    assert scored == [[1], [0]]  # the missing one, once; then the one to check
    assert torch.equal(known.find([0, 1]), LOGPS.double())


@pytest.mark.parametrize("batches", [[batch(0)], [batch(0, 1)]])
def test_a_file_of_other_numbers_is_refused_also_for_part_of_a_batch(batches):
    with pytest.raises(InputError, match=r"FILE: stored .* differ by up to 0\.25 .*: remove this file"):
        score_all(ReferenceLogps(2, 2), batches, read=stored([-1.5, -2.5], UNKNOWN))


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
