"""Callbacks for TensorBoard and W&B; the only file that imports wandb."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from dpo.errors import InputError, WarningLine, explaining, one_sentence
from dpo.redaction import redact
from dpo.reporting.events import Callback, Evaluation, RunContext, Sample, Update
from dpo.system.host import is_installed
from dpo.system.run_directory import REPORT

FLUSH_SECS = 10  # a killed run loses at most this many seconds of TensorBoard's events
FINISH_SECS = 300  # W&B's time limit for sending unsent data at the end


class TensorBoardLogger(Callback):
    _writer: Any = None  # until the first point

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.tensorboard and not context.plan.run.debug

    def on_update(self, update: Update) -> None:
        metrics = {**update.metrics, "counters/updates": update.number}
        self._log(metrics, update.n_examples, hidden_from=update.n_examples)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        # an earlier process may have logged the update at this step
        self._log(evaluation.metrics, evaluation.n_examples, hidden_from=evaluation.n_examples + 1)

    def _log(self, metrics: Mapping[str, float], n_examples: int, *, hidden_from: int) -> None:
        """Add a point at the step `n_examples` to the curve of each metric.

        An earlier process's points are hidden from the step `hidden_from` on, as this process logs them again.
        """
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self.run_dir / "tensorboard"), purge_step=hidden_from, flush_secs=FLUSH_SECS
            )
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, n_examples)

    def on_end(self) -> None:
        if self._writer:
            self._writer.close()


class WandbLogger(Callback):
    """Logs to W&B under the names of the reference code.

    The summary has the last evaluation as `last/NAME`, and the best one after the first update as `best/NAME`.
    Once W&B has started, a run never fails because of it, and waits for it only at the end: unsent data stays on disk.
    """

    _run_id: str | None = None  # the W&B run, before `on_start` the one to continue
    _last_train_time = float("-inf")  # when training metrics were last sent
    _best_quality = float("-inf")  # among the evaluations after the first update
    _is_disabled = False
    _is_aborted = False

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        plan = context.plan
        return super().is_wanted(context) and plan.wandb.enabled and not plan.run.debug and is_installed("wandb")

    def on_start(self) -> None:
        # W&B's cache would fill up the home directory, unless the user has moved it.
        if not {"WANDB_CACHE_DIR", "XDG_CACHE_HOME"} & os.environ.keys():
            os.environ["WANDB_CACHE_DIR"] = os.path.abspath(self.plan.run.local_dir)
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        keys = self.plan.wandb
        settings = redact(
            {
                "name": self.plan.run.exp_name,
                "project": keys.project,
                "entity": keys.entity,
                "group": keys.group,
                "notes": keys.notes,
                "tags": keys.tags or None,  # an empty list would replace the tags in WANDB_TAGS
                "config": self.plan.nested_values() | self.context.count_parameters(),
            }
        )
        settings |= {
            "dir": str(self.run_dir),
            "id": self._run_id,
            "resume": "allow",
            # `x_disable_meta`: W&B's metadata would have the command line, which may hold secrets.
            "settings": wandb.Settings(finish_timeout=FINISH_SECS, x_disable_meta=True),
        }
        with explaining(
            (wandb.Error, ValueError),  # for wrong settings W&B raises these offline too
            lambda why: InputError(f"W&B cannot start: {why}; fix this, or set wandb.enabled=false"),
        ):
            self.run = self._start(wandb, settings)
        self._run_id = self.run.id
        # Plot by this counter: W&B's own step can only grow, but a run resumed from an earlier checkpoint goes back.
        self.run.define_metric("counters/examples")
        self.run.define_metric("*", step_metric="counters/examples")
        self._upload("preflight.json")

    @staticmethod
    def _start(wandb: Any, settings: Mapping) -> Any:
        """Start a W&B run, and print where it is. Without an API key or after an error it is offline, kept on disk."""
        reason = "no API key, which `wandb login` would save"
        try:
            # `prompt=False`: else `login` asks for a key on a terminal. Modes other than online need no key.
            if os.environ.get("WANDB_MODE") not in (None, "", "online") or wandb.login(prompt=False):
                run = wandb.init(**settings)
                print(f"W&B: {run.url or run.dir}")
                return run
        except wandb.Error as error:
            reason = one_sentence(error)
        run = wandb.init(**settings, mode="offline")
        folder = Path(run.dir).parent
        print(f"W&B: {reason}, so offline in {folder}: wandb sync {folder}, or wandb.enabled=false")
        return run

    def on_update(self, update: Update) -> None:
        """Log the metrics, unless an update's were sent less than `minimum_log_interval_secs` ago."""
        now = time.monotonic()
        if now - self._last_train_time >= self.plan.run.minimum_log_interval_secs:
            self._last_train_time = now
            self._log({**update.metrics, "counters/updates": update.number}, update.n_examples)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._log({**evaluation.metrics, "counters/updates": evaluation.n_updates}, evaluation.n_examples)
        metric, sign = self.plan.best  # sign: +1 if higher is better, else -1
        quality = sign * evaluation.metrics.get(metric, math.nan)
        prefixes = ["last"]
        if evaluation.n_updates > 0 and quality > self._best_quality:  # false for NaN
            self._best_quality = quality
            prefixes.append("best")
        facts = {"examples": evaluation.n_examples, "updates": evaluation.n_updates, **evaluation.metrics}
        for prefix in prefixes:
            self._unless_disabled(self.run.summary.update, {f"{prefix}/{name}": facts[name] for name in facts})

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        """Log a table of prompts and texts for the policy, and one for the reference."""
        for model in ("policy", "reference"):
            rows = []
            for sample in samples:
                text = getattr(sample, model)
                if text is not None:
                    rows.append([n_examples, sample.prompt, text])
            if rows:  # the reference may have none
                table = self._wandb.Table(columns=["step", "prompt", "sample"], data=rows)
                self._log({f"{model}_samples": table}, n_examples)

    def _log(self, values: Mapping, n_examples: int) -> None:
        """Log metrics, or tables of samples, at the step `n_examples`."""
        self._unless_disabled(self.run.log, {**values, "counters/examples": n_examples})

    def _unless_disabled(self, call: Callable, *arguments: Any) -> None:
        """Call a function of W&B. After the first error a warning is printed, and nothing is called any more."""
        if self._is_disabled:
            return
        try:
            call(*arguments)
        except (self._wandb.Error, OSError) as error:
            self._is_disabled = True
            problem = f"W&B logging disabled after an error ({type(error).__name__}: {error})"
            self.log(WarningLine(f"{problem}; metrics.jsonl is complete"))

    def state_dict(self) -> dict:
        """Return the W&B run's id, and the run's directory: only a run in this directory may continue the W&B run."""
        return {"wandb_id": self._run_id, "run_dir": str(self.run_dir.resolve()), "best": self._best_quality}

    def load_state_dict(self, state: Mapping) -> None:
        # A run that continues another run's checkpoint gets a W&B run of its own.
        if state.get("run_dir") == str(self.run_dir.resolve()):
            self._run_id = state["wandb_id"]
            self._best_quality = state["best"]

    def on_abort(self, reason: str) -> None:
        self._is_aborted = True
        self._unless_disabled(self.run.alert, "run aborted", redact(reason), "ERROR")

    def on_end(self) -> None:
        self._upload(str(REPORT))
        self._unless_disabled(self.run.finish, int(self._is_aborted))  # 1 marks the W&B run as failed

    def _upload(self, name: str) -> None:
        """Upload a file if it exists and `wandb.artifacts` is true."""
        file = self.run_dir / name
        if self.plan.wandb.artifacts and file.is_file():
            # W&B reads both paths as glob patterns, so they are escaped.
            self._unless_disabled(self.run.save, escape(str(file)), escape(str(self.run_dir)), "now")
