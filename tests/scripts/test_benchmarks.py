"""Every benchmark runs, on a tiny model, and counts what it says it counts."""

from __future__ import annotations

import pytest
from support.runs import GOLDEN, ROOT, run_script

from benchmarks import chart
from benchmarks.compare import Shape, count_flops
from dpo.data.examples import Example
from dpo.models.layouts import pad
from dpo.models.packing import pack

TINY = (
    f"model.name_or_path={GOLDEN / 'tiny-llama'}", "model.block_name=null", "datasets=[hh]",
    f"dataset_sources.hh={GOLDEN / 'words'}", "loss=dpo", "loss.beta=0.1", "max_length=128", "max_prompt_length=64",
)  # fmt: skip


def test_flops_of_a_padded_and_of_a_packed_pair():
    shape = Shape(matrices=1000, head=70, attention=16)
    rows = pad([Example((1, 2, 3), ((10, 11, 9), (20, 9)))] * 2, 10)
    # 40 tokens of 4 rows of 10; a reference: forward, policy: forward and a backward of two
    assert count_flops(shape, rows, with_reference=True) == 4 * 40 * (2 * 1000 + 4 * 10 * 16 + 2 * 70)
    assert count_flops(shape, rows, with_reference=False) == 3 * 40 * (2 * 1000 + 4 * 10 * 16 + 2 * 70)
    packed = pack([Example((1, 2, 3), ((10, 11, 9), (20, 9)))], row_tokens=100)  # 6 tokens fed, 5 scored
    assert count_flops(shape, packed, with_reference=True) == 4 * (6 * (2 * 1000 + 4 * 6 * 16) + 5 * 2 * 70)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        pytest.param(
            "step_overhead",
            ("n_examples=8", "n_eval_examples=4"),
            "outside forward, backward and optimizer",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "compare",
            ("--updates=1", "--only=padded;ours", "batch_size=4"),
            "losses of the counted updates",
            marks=pytest.mark.slow,
        ),
        ("online", ("--rounds=1", "batch_size=2", "eval_batch_size=2", "n_eval_examples=2"), "ours / bare: "),
        pytest.param(
            "profile_update", ("batch_size=4", "model.autocast=bfloat16"), "matrix products", marks=pytest.mark.slow
        ),
        pytest.param("startup", ("--answers", "--repeats=1"), "golden run to first update", marks=pytest.mark.slow),
        pytest.param(
            "startup",
            ("--pairs=200", "batch_size=4", *TINY[:2]),
            "200 pairs, second run:",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stack_exchange",
            ("--questions=400", "--processes=2", "batch_size=4", *TINY[:2]),
            "loaded after s",
            marks=pytest.mark.slow,
        ),
        pytest.param("growth", ("--updates=1", "--only=pairs per prompt", *TINY[:2]), "", marks=pytest.mark.slow),
        pytest.param("loading", TINY[:1], "FSDPTrainer, 2 processes    resumed", marks=pytest.mark.slow),
        ("ledger", ("--updates=20",), "appending 64 pairs"),
        pytest.param("distributed", ("n_examples=64", "batch_size=4"), "", marks=pytest.mark.slow),
    ],
)
def test_it_runs(module, arguments, said):
    common = TINY if module in ("step_overhead", "compare", "online", "profile_update", "distributed") else ()
    result = run_script("-m", f"benchmarks.{module}", *common, *arguments)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
    assert "failed" not in result.stdout


def test_the_picture_shows_the_table():
    assert (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8") == chart.picture()
    rows = chart.read_rows((ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8"))
    [ours] = [row for row in rows if "cached" in row.label]
    assert (ours.seconds, ours.memory) == (1.279, 4.95)
