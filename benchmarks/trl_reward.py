"""Updates of a reward model by TRL's `RewardTrainer`: the oracle of `tests/models/test_scalar_head.py`.

    python -m venv .trl && .trl/bin/pip install torch==2.13.0 trl==1.16.0
    .trl/bin/python -m benchmarks.trl_reward > tests/golden/trl_reward.json

Imports nothing of this project. The trainer gets texts, which it tokenizes, and trains on them in their order.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch.utils.data import SequentialSampler

MODEL = Path(__file__).parent.parent / "tests" / "golden" / "tiny-llama"
BATCH_SIZE, N_UPDATES, LR = 4, 6, 0.1
CENTERING, MARGIN = 0.05, 0.3


class Trainer(trl.RewardTrainer):
    """Trains on the rows in their order, and keeps each update's numbers."""

    losses: list[float]

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses.append(loss.item())
        return loss


def make_rows() -> list[dict[str, str]]:
    """Make pairs of different lengths."""
    return [
        {
            "prompt": f"\n\nHuman: Where is number {i}?{' It is late.' * (i % 3)}\n\nAssistant:",
            "chosen": f" On desk {i}{', I think' * (i % 4)}.",
            "rejected": f" Go {'away ' * (i % 5)}!",
        }
        for i in range(BATCH_SIZE * N_UPDATES)
    ]


def draw_head(size: int) -> list[float]:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.1
    return [round(weight, 4) for weight in weights.tolist()]


def train(rows: list[dict[str, Any]], head: list[float], *, centering: float) -> list[float]:
    """Train a reward model; return the loss of each update."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor([head]))
    with tempfile.TemporaryDirectory() as folder:
        config = trl.RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=N_UPDATES,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            center_rewards_coefficient=centering or None,
            # by default EOS is the padding, so the model would score the token before a text's final EOS
            pad_token=tokenizer.convert_ids_to_tokens(len(tokenizer) - 1),
            max_length=None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        trainer.losses = []
        with contextlib.redirect_stdout(sys.stderr):  # the trainer prints its logs
            trainer.train()
    return trainer.losses


def main() -> None:
    rows, head = make_rows(), draw_head(64)
    with_margins = [{**row, "margin": MARGIN * (i % 3)} for i, row in enumerate(rows)]
    cases: dict[str, Callable[[], list[float]]] = {
        "plain": lambda: train(rows, head, centering=0),
        "centering": lambda: train(rows, head, centering=CENTERING),
        "margin": lambda: train(with_margins, head, centering=0),
    }
    losses = {name: case() for name, case in cases.items()}
    made_by = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    settings = {"batch_size": BATCH_SIZE, "lr": LR, "centering": CENTERING, "margins": [MARGIN * i for i in range(3)]}
    json.dump({"made_by": made_by, **settings, "head": head, "rows": rows, "losses": losses}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
