"""TRL's DPOTrainer on given pairs, set up like our trainer.

`benchmarks.compare` runs `python -m benchmarks.trl_runs FOLDER` with the Python of TRL's environment, so this file
imports nothing of the project. FOLDER has `train.json`, and `settings.json` with the model and arguments of DPOConfig.
TRL trains on the rows in their order, with RMSprop, our clipping and our warm-up. Prints a line of JSON: seconds and
loss of each update but the first, and the peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

LIKE_OURS = {
    "optim": "rmsprop",
    "max_grad_norm": 10.0,
    "num_train_epochs": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": not torch.cuda.is_available(),
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}


class Stopwatch(TrainerCallback):
    """Recorder of the seconds of the last update."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.start


class LikeOurs(DPOTrainer):
    """TRL's trainer with our order and warm-up, which logs seconds."""

    watch: Stopwatch

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = self.args.warmup_steps
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda update: min(1.0, (update + 1) / (warmup + 1))
        )
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # an update, not the summary at the end
            logs["seconds"] = self.watch.seconds
        super().log(logs, start_time)


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    name = settings.pop("model")
    rows = Dataset.from_list(json.loads((folder / "train.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = DPOConfig(output_dir=str(folder / "checkpoints"), **{**LIKE_OURS, **settings})
    policy, reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), None
    if not config.precompute_ref_log_probs:
        reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    watch = Stopwatch()
    trainer = LikeOurs(
        model=policy,
        ref_model=reference,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.watch = watch
    trainer.train()
    updates = [line for line in trainer.state.log_history if "seconds" in line]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    timed = [{key: line[key] for key in ("seconds", "loss")} for line in updates[1:]]
    pairs = config.per_device_train_batch_size * config.gradient_accumulation_steps
    print(f"\n{json.dumps({'rows': timed, 'pairs': pairs, 'memory_gb': peak / 1e9})}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
