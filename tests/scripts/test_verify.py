"""`dpo verify` says of each checkpoint whether it is whole."""

from pathlib import Path

import pytest
import torch
from support.runs import PARTS

from dpo.checkpoint.files import set_link, write_checkpoint
from dpo.commands.verify import main


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run of two checkpoints."""
    for step in (8, 16):
        states = {part: {"a": torch.arange(50.0)} for part in PARTS}
        write_checkpoint(tmp_path / f"step-{step}", states.items(), step_idx=step, metrics=None, facts={})
    set_link(tmp_path / "LATEST", tmp_path / "step-16")
    return tmp_path


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_line_for_each_checkpoint_and_status_1_if_one_is_damaged(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["whole", f"{run_dir}/step-{n}"] for n in (16, 8)]

    flip_a_bit(run_dir / "step-8" / "optimizer.pt")
    (run_dir / "step-16" / "manifest.json").unlink()

    assert main([str(run_dir)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"damaged  {run_dir}/step-16 has no manifest",
        f"damaged  {run_dir}/step-8/optimizer.pt: checksum mismatch",
    ]


def test_one_checkpoint_may_be_named_by_its_link(run_dir, capsys):
    flip_a_bit(run_dir / "step-8" / "policy.pt")

    assert main([str(run_dir / "LATEST")]) == 0
    assert capsys.readouterr().out.startswith(f"whole    {run_dir}/step-16 (")
