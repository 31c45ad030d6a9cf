"""TRL's DPOTrainer on pairs written by `benchmarks.compare`, which runs this with the Python of TRL's environment.

Imports nothing of ours. Prints one line of JSON: seconds of each update but the first, and the peak memory.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


class Stopwatch(TrainerCallback):
    def __init__(self):
        self.times, self.losses = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter() - self.start)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class InOrder(DPOTrainer):
    """TRL's trainer with our pairs in order, which it would shuffle."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    rows = json.loads((folder / "pairs.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy, reference = (AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32) for _ in range(2))
    config = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=settings["batch_size"] // settings["accumulation"],
        gradient_accumulation_steps=settings["accumulation"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        optim="rmsprop",
        max_grad_norm=10.0,
        max_length=settings["max_length"],
        beta=settings["beta"],
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        **({"bf16": False} | settings["options"]),
    )
    watch = Stopwatch()
    trainer = InOrder(
        model=policy,
        ref_model=None if config.precompute_ref_log_probs else reference,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    timed = [{"seconds": s, "loss": loss} for s, loss in zip(watch.times[1:], watch.losses[1:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 1e9
    print()
    print(json.dumps({"rows": timed, "pairs": settings["batch_size"], "memory_gb": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
