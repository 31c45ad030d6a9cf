"""The reference's small helpers."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import utils


def test_pad_to_length_pads_on_the_right_of_one_dimension():
    two_by_two = torch.tensor([[1, 2], [3, 4]])

    assert utils.pad_to_length(two_by_two, 4, -100).tolist() == [[1, 2, -100, -100], [3, 4, -100, -100]]
    assert utils.pad_to_length(two_by_two, 3, 0, dim=0).tolist() == [[1, 2], [3, 4], [0, 0]]
    assert utils.pad_to_length(two_by_two, 1, 0) is two_by_two  # never cuts
    assert utils.pad_to_length(two_by_two.bool(), 3, 0).dtype == torch.bool


def test_the_ranks_slices_partition_a_batch():
    batch = {"ids": torch.arange(12).view(6, 2), "texts": list("abcdef")}

    parts = [utils.slice_and_move_batch_for_device(batch, rank, 3, "cpu") for rank in range(3)]

    assert [part["texts"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert parts[1]["ids"].tolist() == [[4, 5], [6, 7]]
    assert utils.slice_and_move_batch_for_device(batch, 0, 2, "meta")["ids"].device.type == "meta"
    with pytest.raises(ValueError, match="6 rows cannot be cut into 4 equal parts"):
        utils.slice_and_move_batch_for_device(batch, 0, 4, "cpu")


def test_temporarily_seeded_random_gives_the_same_numbers_and_puts_both_states_back():
    def draw() -> tuple[float, float]:
        return random.random(), np.random.rand()

    random.seed(1), np.random.seed(1)
    undisturbed = draw(), draw()

    random.seed(1), np.random.seed(1)
    first = draw()
    with utils.TemporarilySeededRandom(np.int64(2**32 - 1)):  # Python 3.11 refuses numpy integers as seeds
        inside = draw()
    assert (first, draw()) == undisturbed
    with utils.TemporarilySeededRandom(2**32 - 1):
        assert draw() == inside not in undisturbed


def _gather_on_one_of_two(rank: int, port: int, folder: str) -> None:
    utils.init_distributed(rank, 2, port=port, backend="gloo")
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0]]).T + 100 * rank  # not contiguous, as metrics may be
    gathered = utils.all_gather_if_needed(table, rank, 2)
    with open(f"{folder}/{rank}.txt", "w") as out:
        utils.rank0_print("only rank 0", file=out)
        print(gathered.tolist(), file=out)
    dist.destroy_process_group()


def test_two_processes_gather_every_rows_in_rank_order_and_one_of_them_prints(tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    arguments = (utils.get_open_port(), str(tmp_path))
    torch.multiprocessing.start_processes(_gather_on_one_of_two, arguments, nprocs=2, start_method="forkserver")

    rows = "[[1.0, 2.0], [10.0, 20.0], [101.0, 102.0], [110.0, 120.0]]"
    assert (tmp_path / "0.txt").read_text().splitlines() == ["only rank 0", rows]
    assert (tmp_path / "1.txt").read_text().splitlines() == [rows]
