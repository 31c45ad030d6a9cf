"""Predicted memory and communication of FSDP, by model and config keys.

    python -m benchmarks.communication

Each cell has the memory that `dry_run` predicts for a GPU, the bytes that FSDP sends from a GPU in an update, and the
share of an update's time that sending takes if it does not overlap with compute. **The share is arithmetic, not
measured**: an update of 64 pairs of 250 tokens, 8 pairs per GPU and microbatch; 340 GB/s between GPUs; a pair's compute
as in MODELS.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import transformers

from benchmarks.harness import GOLDEN, compose
from dpo.settings.plan import Plan, resolve
from dpo.training.memory import Passes, count_communication, run_passes, sum_phases
from preference_datasets import load_data

PAIRS, PER_MICROBATCH = 64, 8
PROMPT, RESPONSE = 140, 55  # tokens; a pair shares its prompt
BANDWIDTH = 340e9  # bytes per second that NCCL reaches over NVLink
GPUS = (2, 8)


class Model(NamedTuple):
    """A model's shape, and seconds of compute per pair.

    The seconds are for an H100 in bfloat16: matrix products at 550 and 600 TFLOP/s, attention over whole rows of 800
    tokens at 100 TFLOP/s, and elementwise passes at 2.5 TB/s. With an adapter the products for gradients of the
    weights, a quarter of all, are not needed.
    """

    config: transformers.PretrainedConfig
    pair_seconds: float
    pair_seconds_lora: float


MODELS = {
    "Pythia-2.8B": Model(
        transformers.GPTNeoXConfig(
            vocab_size=50304, hidden_size=2560, num_hidden_layers=32, num_attention_heads=32, intermediate_size=10240,
            architectures=["GPTNeoXForCausalLM"],
        ),
        0.0169,
        0.0146,
    ),
    "Llama-3-8B": Model(
        transformers.LlamaConfig(
            vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=14336, architectures=["LlamaForCausalLM"],
        ),
        0.0389,
        0.0331,
    ),
}  # fmt: skip
WHOLE, KEPT, IN_BFLOAT16 = "fsdp_frozen_weights=whole", "fsdp_reshard_after_forward=false", "fsdp_reduce_dtype=bfloat16"
LORA = "lora=lora lr=1e-5"
SETTINGS = {
    "`fsdp_frozen_weights=sharded`": "",
    "`fsdp_frozen_weights=whole`": WHOLE,
    "and `fsdp_reshard_after_forward=false`": f"{WHOLE} {KEPT}",
    "and `fsdp_reduce_once=true`": f"{WHOLE} {KEPT} fsdp_reduce_once=true",
    "and `fsdp_reduce_dtype=bfloat16`": f"{WHOLE} {KEPT} fsdp_reduce_once=true {IN_BFLOAT16}",
    "`lora=lora fsdp_frozen_weights=sharded`": LORA,
    "`lora=lora fsdp_frozen_weights=whole`": f"{LORA} {WHOLE}",
}


def write_pairs(folder: Path) -> None:
    """Write a custom dataset of pairs with PROMPT and RESPONSE tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(GOLDEN / "tiny-llama")
    # a word that is one token, even in a row of repetitions
    word = next(w for w in ("the", "walk", "green", "a") if len(tokenizer(f" {w}" * 9).input_ids) == 9)
    row = {"prompt": f" {word}" * PROMPT, "chosen": f" {word}" * RESPONSE, "rejected": f" {word}" * (RESPONSE - 1)}
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps({**row, "prompt": row["prompt"] + str(i)}) + "\n" for i in range(2 * PAIRS))
        )


def make_plan(folder: Path, name: str, settings: str, gpus: int) -> Plan:
    common = (
        f"model.name_or_path={folder / name}", "datasets=[own]", f"dataset_sources.own={folder}",
        f"local_dirs=[{folder}]", "loss=dpo", "loss.beta=0.1", "sample_during_eval=false", "trainer=FSDPTrainer",
        f"world_size={gpus}", "model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16", f"batch_size={PAIRS}",
        f"gradient_accumulation_steps={PAIRS // PER_MICROBATCH // gpus}",
    )  # fmt: skip
    plan = replace(resolve(compose([*common, *settings.split()]), world_size=gpus), gpus=gpus)
    # `sharded` rows leave this key out
    return replace(plan, fsdp=replace(plan.fsdp, frozen_weights=plan.fsdp.frozen_weights or "sharded"))


def format_cell(plan: Plan, model: Model, passes: Passes) -> str:
    """Format memory, bytes sent, and the share of time for sending."""
    memory = max(need.total() for need in sum_phases(plan, passes).values())
    sent = count_communication(plan).total()
    seconds = PAIRS / plan.gpus * (model.pair_seconds_lora if plan.lora else model.pair_seconds)
    share = sent / BANDWIDTH / (sent / BANDWIDTH + seconds)
    return f"{memory / 1e9:.0f} GB, {sent / 1e9:.1f} GB, {share:.0%}"


def print_line(*cells: str) -> None:
    """Print a line of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    columns = [f"{name}, {gpus} GPUs" for name in MODELS for gpus in GPUS]
    print_line("keys", *columns)
    print_line(*["---"] * (1 + len(columns)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pairs(folder)
        for name, model in MODELS.items():
            model.config.save_pretrained(folder / name)
            for file in GOLDEN.glob("tiny-llama/*token*"):
                shutil.copy(file, folder / name)
        passes = {}  # by model, with an adapter and without; the number of GPUs does not change them
        for label, settings in SETTINGS.items():
            cells = []
            for (name, model), gpus in itertools.product(MODELS.items(), GPUS):
                plan = make_plan(folder, name, settings, gpus)
                key = name, plan.lora is None
                if key not in passes:
                    passes[key] = run_passes(plan, load_data(plan, silent=True))
                cells.append(format_cell(plan, model, passes[key]))
            print_line(label, *cells)


if __name__ == "__main__":
    main()
