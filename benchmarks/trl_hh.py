"""TRL's DPOTrainer on rows written by `benchmarks.hh_smollm2`, which runs this with TRL's Python.

Imports nothing of ours but `trl_baseline`. The settings match our runs: rows in their order, RMSprop, their learning
rate at every update, the same tokens. A stopped run continues from its last checkpoint. Leaves the policy in FOLDER/hf,
and in FOLDER/trl.json the margin of each training pair before its update, the seconds of each update and TRL's own
evaluation of the test rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig

from benchmarks.trl_baseline import InOrder, Stopwatch


class LikeOurs(InOrder):
    """TRL's trainer with our warm-up, and a record of each update's seconds and each pair's (microbatch's) margin."""

    watch: Stopwatch

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = self.args.warmup_steps
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda update: min(1.0, (update + 1) / (warmup + 1))
        )
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        margins = self._metrics["train"].get("rewards/margins")
        if self.model.training and margins:
            logs |= {"margins": list(margins), "seconds": self.watch.times[-1]}
        super().log(logs, start_time)


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    train, test = (Dataset.from_list(json.loads((folder / f"{split}.json").read_text())) for split in ("train", "test"))
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy, reference = (AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32) for _ in range(2))
    config = DPOConfig(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=settings["batch_size"],
        learning_rate=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        optim="rmsprop",
        max_grad_norm=10.0,
        gradient_checkpointing=False,
        max_length=settings["max_length"],
        beta=settings["beta"],
        loss_type=[settings["loss"]],
        bf16=settings["bf16"],
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=settings["save_every"],
        save_total_limit=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    watch = Stopwatch()
    trainer = LikeOurs(
        model=policy,
        ref_model=reference,
        args=config,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.watch = watch
    begun = Path(config.output_dir).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir) if begun else None)
    history = [line for line in trainer.state.log_history if "margins" in line]
    found = {
        "margins": [margin for line in history for margin in line["margins"]],
        "seconds": [line["seconds"] for line in history],
        "evaluation": trainer.evaluate(),
    }
    trainer.save_model(str(folder / "hf"))
    (folder / "trl.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
