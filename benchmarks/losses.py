"""Cost of an update under each loss, relative to DPO.

Makes the last columns of the table in docs/losses.md.

    OMP_NUM_THREADS=1 python -m benchmarks.losses [LOSS ...]

A small random Llama trains on the words of `tests/golden`, 8 pairs (or their 16 labelled responses) per update in 2
microbatches. The model sees 8 batches twice: the first time the reference scores each pair, the second time the
reference's log-probabilities are cached. Times are CPU seconds of this process, which other work on the machine changes
little; so the model trains on the CPU.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import transformers

from benchmarks.harness import GOLDEN, compose, make_trainer
from dpo.losses import LOSSES

BATCHES = 8
SETTINGS = (
    *("model.random_init=true", "model.block_name=null", "model.reference_dtype=float32", "self_test=false"),
    *("datasets=[hh]", f"dataset_sources.hh={GOLDEN / 'words'}", "max_length=160", "max_prompt_length=80"),
    *("batch_size=8", "gradient_accumulation_steps=2", "eval_batch_size=8", "n_eval_examples=8"),
    *("sample_during_eval=false", "num_workers=0"),
)
DPO = ("loss=dpo", "loss.beta=0.1")
ROWS = {  # overrides for each loss and for options of DPO; a later entry replaces an earlier one
    **{name: (f"loss={name}",) for name in LOSSES},
    **{name: (f"loss={name}", "unpair=true", "batch_size=16") for name in LOSSES if LOSSES[name].trains_on == "labels"},
    "dpo": DPO,
    "ipo": ("loss=ipo", "loss.beta=0.1"),
    "mix": ("loss=mix", "loss.weights.dpo=0.8", "loss.weights.bco=0.2", "loss.weights.sft=0.1"),
    "sft_weight": (*DPO, "loss.sft_weight=0.2"),
    "wpo": (*DPO, "loss.wpo=true"),
    "ld_alpha": (*DPO, "loss.ld_alpha=0.5"),
    "f_divergence": (*DPO, "loss.f_divergence=js"),
}


def write_small_llama(folder: Path) -> None:
    """Write the golden runs' tokenizer, and the config of a small Llama."""
    shutil.copytree(GOLDEN / "tiny-llama", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4})
    config.update({"num_key_value_heads": 4, "head_dim": 48})
    config.save_pretrained(folder)


def measure(folder: Path, overrides: tuple[str, ...]) -> list[float]:
    """Measure CPU time relative to DPO's, with the reference scored and cached."""
    paths = (f"model.name_or_path={folder / 'llama'}", f"local_run_dir={folder / 'run'}", f"local_dirs=[{folder}]")
    dpo_trainer, trainer = (make_trainer(compose([*SETTINGS, *paths, *row])) for row in (DPO, overrides))
    dpo_batches, batches = (list(itertools.islice(t.train_iterator, BATCHES)) for t in (dpo_trainer, trainer))

    def time_update(trainer: Any, batch: Any) -> float:
        start = time.process_time()
        trainer.train_step(batch)
        return time.process_time() - start

    ratios = []
    for dpo_batch, batch in [*zip(dpo_batches, batches, strict=True)] * 2:
        dpo_secs = time_update(dpo_trainer, dpo_batch)
        ratios.append(time_update(trainer, batch) / dpo_secs)
    while_scored, cached = ratios[1:BATCHES], ratios[BATCHES:]  # the very first update warms up
    return [median(while_scored), median(cached)]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_small_llama(Path(folder, "llama"))
        for name in sys.argv[1:] or ROWS:
            while_scored, cached = measure(Path(folder), ROWS[name])
            print(f"| {name} | {while_scored:.2f}, {cached:.2f} |", flush=True)


if __name__ == "__main__":
    main()
