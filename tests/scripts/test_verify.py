"""`dpo verify` says of each checkpoint whether it is whole."""

from pathlib import Path

import pytest
from support.runs import flip_a_bit, write_steps

from dpo.checkpoint.files import set_link
from dpo.commands.verify import main


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run of two checkpoints."""
    *_, latest = write_steps(tmp_path, 8, 16)
    set_link(tmp_path / "LATEST", latest)
    return tmp_path


def test_a_line_for_each_checkpoint_and_status_1_if_one_is_damaged(run_dir, printed):
    assert main([str(run_dir)]) == 0
    lines = printed().splitlines()
    assert [line.split()[:2] for line in lines] == [["whole", f"{run_dir}/step-{n}"] for n in (16, 8)]

    flip_a_bit(run_dir / "step-8" / "optimizer.pt")
    (run_dir / "step-16" / "manifest.json").unlink()

    assert main([str(run_dir)]) == 1
    assert printed().splitlines() == [
        f"damaged  {run_dir}/step-16 has no manifest",
        f"damaged  {run_dir}/step-8/optimizer.pt: checksum mismatch",
    ]


def test_one_checkpoint_may_be_named_by_its_link(run_dir, printed):
    flip_a_bit(run_dir / "step-8" / "policy.pt")

    assert main([str(run_dir / "LATEST")]) == 0
    assert printed().startswith(f"whole    {run_dir}/step-16 (")
