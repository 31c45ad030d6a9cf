"""TRL's DPOTrainer on given pairs, set up like our trainer.

`benchmarks.compare` and `benchmarks.hh_smollm2` run `python -m benchmarks.trl_runs FOLDER` with the Python of TRL's
environment, so this file imports nothing of the project. FOLDER has `train.json`, perhaps `test.json`, and
`settings.json` with the model and arguments of DPOConfig. TRL trains on the rows in their order, with RMSprop, our
clipping and our warm-up. Prints a line of JSON: seconds and loss of each update but the first, and the peak memory.

With `test.json` a stopped run continues from its last checkpoint. FOLDER then gets the policy in `hf`, and `trl.json`:
the margin of each training pair before its update, the seconds of each update, and TRL's evaluation of the test rows.
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
from transformers.trainer_utils import get_last_checkpoint
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
    """TRL's trainer with our order and warm-up, and more in its log."""

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
        margins = self._metrics["train"].get("rewards/margins")  # one per microbatch
        if self.model.training and margins:
            logs |= {"margins": list(margins), "seconds": self.watch.seconds}
        super().log(logs, start_time)


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    name = settings.pop("model")
    files = {split: folder / f"{split}.json" for split in ("train", "test")}
    rows = {split: Dataset.from_list(json.loads(file.read_text())) for split, file in files.items() if file.exists()}
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
        train_dataset=rows["train"],
        eval_dataset=rows.get("test"),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.watch = watch
    was_stopped = "test" in rows and Path(config.output_dir).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir) if was_stopped else None)
    updates = [line for line in trainer.state.log_history if "margins" in line]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    if "test" in rows:
        results = {
            "margins": [margin for line in updates for margin in line["margins"]],
            "seconds": [line["seconds"] for line in updates],
            "evaluation": trainer.evaluate(),
        }
        trainer.save_model(str(folder / "hf"))
        (folder / "trl.json").write_text(json.dumps(results, indent=1))
    timed = [{key: line[key] for key in ("seconds", "loss")} for line in updates[1:]]
    pairs = config.per_device_train_batch_size * config.gradient_accumulation_steps
    print(f"\n{json.dumps({'rows': timed, 'pairs': pairs, 'memory_gb': peak / 1e9})}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
