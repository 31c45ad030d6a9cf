"""What the reference gave is found again by content, in a run and in a file, and a wrong file is noticed."""

from __future__ import annotations

import copy
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpo.errors import InputError
from dpo.models.weights import model_digest
from dpo.training.reference import LogpTable, ReferenceLogps, read_logps

KEYS = [(b"a" * 16, b"b" * 16), (b"c" * 16, b"d" * 16)]
LOGPS = torch.tensor([[-1.5, -2.25], [-3.0, -4.125]])


def table(keys, logps) -> LogpTable:
    made = LogpTable()
    made.add(dict(zip(keys, logps, strict=True)))
    return made


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

    read = table(KEYS[0], LOGPS[0].tolist())
    known = ReferenceLogps()
    n_scored = known.score_all([batch(KEYS[:1]), batch(KEYS[1:]), batch(KEYS[1:])], score, read, seed=0)
    assert n_scored == 1
    assert scored == [KEYS[1:], KEYS[:1]]  # the missing one, once; then the one to check
    assert torch.equal(known.find(KEYS), LOGPS.double())


def test_a_file_of_other_numbers_is_refused():
    read = table(KEYS[0], [-1.5, -2.5])
    with pytest.raises(InputError, match=r"off by up to 0\.25: remove their file"):
        ReferenceLogps().score_all([batch(KEYS[:1])], lambda batch: LOGPS[:1], read, seed=0)


def test_what_a_file_knows_of_a_batch_that_is_scored_anyway_is_compared():
    read = table(KEYS[0], [-1.5, -2.5])
    with pytest.raises(InputError, match=r"off by up to 0\.25: remove their file"):
        ReferenceLogps().score_all([batch(KEYS)], lambda batch: LOGPS, read, seed=0)


def test_without_a_file_nothing_is_scored_twice():
    known = ReferenceLogps()
    known.score_all([batch(KEYS)], lambda batch: LOGPS, LogpTable(), seed=0)
    assert known.score_all([batch(KEYS)], fail, LogpTable(), seed=0) == 0
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


def keys_at_random(n: int, seed: int) -> list[bytes]:
    """Distinct keys, many of which hold or end in zero bytes."""
    draw = random.Random(seed)
    return list({bytes(draw.choice((0, 0, 1, 255)) for _ in range(16)) for _ in range(n)})


def test_many_are_found_whatever_bytes_their_keys_have_and_the_last_value_counts():
    keys = keys_at_random(60_000, seed=0)
    expected: dict[bytes, float] = {}
    known, draw = LogpTable(), random.Random(1)
    for start in range(0, len(keys), 500):
        entries = {
            key: draw.uniform(-99, 0) for key in (*keys[start : start + 500], *draw.sample(keys[: start + 1], 1))
        }
        known.add(entries)
        expected |= entries
    assert len(known) == len(expected)
    assert known.find(keys).tolist() == [expected[key] for key in keys]
    assert known.find([*keys[:5], b"\0" * 15 + b"\7"]) is None
    assert b"\7" * 16 not in known


def test_an_entry_takes_few_bytes():
    known = ReferenceLogps()
    raw = np.random.default_rng(0).bytes(16 * 200_000)
    keys = [(raw[i : i + 16], raw[i + 16 : i + 32]) for i in range(0, len(raw), 32)]
    tracemalloc.start()
    for start in range(0, len(keys), 1000):
        part = [(bytes(bytearray(a)), bytes(bytearray(b))) for a, b in keys[start : start + 1000]]
        known.add(part, torch.zeros(len(part), 2))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000 * 40  # 24 each, and the last ones in a dictionary; a dictionary of all takes 150


def test_what_a_checkpoint_holds_does_not_depend_on_the_order_of_learning():
    there, back = ReferenceLogps(), ReferenceLogps()
    there.add(KEYS, LOGPS)
    back.add(KEYS[::-1], LOGPS.flip(0))
    for key, value in there.state_dict().items():
        assert torch.equal(value, back.state_dict()[key])
    again = ReferenceLogps()
    again.load_state_dict(there.state_dict())
    assert torch.equal(again.find(KEYS), LOGPS.double())


def test_a_checkpoint_that_knew_nothing_is_loaded():
    known = ReferenceLogps()
    known.load_state_dict(ReferenceLogps().state_dict())
    assert known.find(KEYS) is None
