"""Every benchmark runs on a tiny model, and counts correctly."""

import pytest
from support.pytests import slow, succeeded
from support.runs import GOLDEN, TINY, run_script

from benchmarks.compare import Shape, count_flops
from dpo.data.examples import Example
from dpo.models.packing import pack, pad

LLAMA = (f"model.name_or_path={TINY}", "model.block_name=null", "batch_size=4")
SMALL = (
    *LLAMA,
    "datasets=[hh]",
    f"dataset_sources.hh={GOLDEN / 'words'}",
    "loss=dpo",
    "loss.beta=0.1",
    "max_length=128",
    "max_prompt_length=64",
)


def test_flops_of_a_padded_and_of_a_packed_pair():
    shape = Shape(matrices=1000, head=70, attention=16)
    pair = Example((1, 2, 3), ((10, 11, 9), (20, 9)))
    rows = pad([pair] * 2, 10)
    # 40 tokens of 4 rows of 10; a reference: forward, policy: forward and a backward of two
    assert count_flops(shape, rows, with_reference=True) == 4 * 40 * (2 * 1000 + 4 * 10 * 16 + 2 * 70)
    assert count_flops(shape, rows, with_reference=False) == 3 * 40 * (2 * 1000 + 4 * 10 * 16 + 2 * 70)
    packed = pack([pair], max_tree_tokens=100)  # 6 tokens fed, 5 scored
    assert count_flops(shape, packed, with_reference=True) == 4 * (6 * (2 * 1000 + 4 * 6 * 16) + 5 * 2 * 70)
    by_segments = pack([pair], max_tree_tokens=None)
    columns = 3 * 3 + 2 * 5 + 1 * 4
    assert count_flops(shape, by_segments, with_reference=True) == 4 * (6 * 2 * 1000 + 4 * columns * 16 + 5 * 2 * 70)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        slow("profile", (*SMALL, "n_examples=12", "n_eval_examples=4"), "of it in no phase"),
        slow("compare", (*SMALL, "--updates=1", "--only=padded;ours"), "losses of the counted updates"),
        slow(
            "compare",
            (*SMALL, "--updates=1", "--row=world_size=1", "--row=trainer=FSDPTrainer world_size=2"),
            "measured trainer=FSDPTrainer world_size=2",
        ),
        slow("startup", ("--answers", "--repeats=1"), "refused config"),
        slow("startup", (*LLAMA, "--pairs=200"), "200 pairs, second run:"),
    ],
)
def test_a_benchmark_runs_on_a_tiny_model_and_says_its_result(module, arguments, said):
    result = succeeded(run_script("-m", f"benchmarks.{module}", *arguments))
    assert said in result.stdout
    assert "failed" not in result.stdout
