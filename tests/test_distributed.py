"""Several real processes on the CPU, through gloo: the numbers of one process, files that any run can read, and an
end for all when one fails. (That the golden runs come out the same is in test_golden.py.)"""

from __future__ import annotations

import torch
from conftest import GOLDEN, metrics_of, train

TINY = (
    f"model.name_or_path={GOLDEN / 'tiny-llama'}",
    "datasets=[hh]",
    f"dataset_sources.hh={GOLDEN / 'words'}",
    "max_length=160",
    "max_prompt_length=80",
    "n_eval_examples=16",
    "warmup_steps=0",
    "lr=1e-3",
    "exp_name=test",
)
TWO = ("trainer=FSDPTrainer", "world_size=2")


def test_two_processes_sample_save_what_one_can_load_and_compute_in_the_dtype_asked_for(tmp_path):
    sharded = train(
        *TINY, *TWO, "loss=dpo", "loss.beta=0.1", "n_examples=8", "model.fsdp_policy_mp=bfloat16",
        "model.reference_dtype=float32", "n_eval_model_samples=16", f"local_run_dir={tmp_path / 'two'}",
    )  # fmt: skip
    assert sharded.returncode == 0, sharded.stderr
    assert "in another dtype" in sharded.stdout  # bfloat16 against a float32 reference
    first = metrics_of(tmp_path / "two", "train")[0]
    assert first["rewards_train/margins"] != 0
    assert len((tmp_path / "two" / "samples.jsonl").read_text().splitlines()) == 2 * 16  # before and after

    policy = torch.load(tmp_path / "two" / "LATEST" / "policy.pt", weights_only=True)
    assert {str(tensor.dtype) for tensor in policy["state"].values()} == {"torch.float32"}
    continued = train(
        *TINY, "loss=sft", "n_examples=4", f"model.archive={tmp_path / 'two'}", f"local_run_dir={tmp_path / 'one'}",
        "sample_during_eval=false",
    )  # fmt: skip
    assert continued.returncode == 0, continued.stderr


def test_an_unknown_block_class_is_one_message_that_lists_the_blocks(tmp_path):
    result = train(*TINY, *TWO, "model.block_name=GPT2Block", f"local_run_dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert "model.block_name=GPT2Block" in result.stderr
    assert "LlamaDecoderLayer" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_batch_that_the_processes_cannot_share_is_refused_before_anything_starts(tmp_path):
    result = train(*TINY, *TWO, "batch_size=6", "gradient_accumulation_steps=2", f"local_run_dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert "batch_size=6 must be divisible by gradient_accumulation_steps * processes = 2 * 2" in result.stderr
    assert not (tmp_path / "run").exists()
