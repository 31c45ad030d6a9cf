"""Logging to TensorBoard with torch's writer, which needs the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpo.errors import InputError
from dpo.reporting.events import Callback, Evaluation, RunContext, Sample, Update
from dpo.system.plain_files import make_directory, move_aside

FLUSH_SECS = 10  # a killed run loses the events of at most this time


class TensorBoardLogger(Callback):
    """Writer of every update and evaluation to TensorBoard's event files.

    The files are in the directory `tensorboard` of the run. Metrics have the same names as in W&B, and steps are
    examples.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._n_examples: int | None = None  # at the last event; None: the checkpoint knows of no events

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.tensorboard and not context.plan.run.debug

    def on_start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.context.run_dir / "tensorboard"
        try:
            if self._n_examples is None and folder.is_dir():
                new_name = move_aside(folder).name
                self.context.log(
                    f"warning: {folder} does not belong to a checkpoint of this run, so it is renamed to {new_name}"
                )
            make_directory(folder)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error}; choose another local_run_dir") from error
        # TensorBoard hides the old events from this step on: they were logged after the checkpoint
        purge_step = None if self._n_examples is None else self._n_examples + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECS)

    def on_update(self, update: Update) -> None:
        self._log({**update.metrics, "counters/updates": update.number}, examples=update.n_examples)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._log(evaluation.metrics, examples=evaluation.n_examples)
        self._writer.flush()

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        for model in ("policy", "reference"):
            text = _as_markdown(samples, model)
            if text:
                self._writer.add_text(f"{model}_samples", text, n_examples)
        self._writer.flush()

    def _log(self, metrics: Mapping[str, float], *, examples: int) -> None:
        self._n_examples = examples
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, examples)

    def state_dict(self) -> dict[str, Any]:
        self._writer.flush()
        # -1 before the first event: a resumed run hides all events, from step 0 on
        return {"examples": -1 if self._n_examples is None else self._n_examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._n_examples = state.get("examples")

    def on_end(self) -> None:
        self._writer.close()


def _as_markdown(samples: Iterable[Sample], model: str) -> str:
    """Format prompts and a model's continuations as literal blocks.

    `model` is "policy" or "reference". Texts are indented, so that no text can end its block.
    """
    texts = []
    for sample in samples:
        continuation = getattr(sample, model)
        if continuation is not None:
            parts = ("**prompt**", _indent(sample.prompt), f"**{model}**", _indent(continuation))
            texts.append("\n\n".join(parts))
    return "\n\n---\n\n".join(texts)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
