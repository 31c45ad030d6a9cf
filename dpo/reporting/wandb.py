"""Logging to Weights & Biases. The only file that imports wandb."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from dpo.errors import InputError, explaining, one_sentence
from dpo.reporting.events import Callback, Evaluation, RunContext, Update
from dpo.system.redaction import redact
from dpo.system.run_directory import REPORT

FINISH_SECS = 300  # W&B's time limit for sending unsent data at the end


class WandbLogger(Callback):
    """Logger to W&B under the reference's names.

    Training metrics are sent at most every `minimum_log_interval_secs`. The summary has the last evaluation as
    `last/NAME`, the best one after the first update as `best/NAME`. A run never waits or fails because of W&B: unsent
    data stays on the disk (`wandb sync`), and `metrics.jsonl` has everything.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._run_id: str | None = None  # of the run to continue
        self._last_train = self._best = float("-inf")
        self._lost = self._aborted = False

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.wandb.enabled and not context.plan.run.debug

    def on_start(self) -> None:
        import wandb

        self._table, self._errors = wandb.Table, (wandb.Error, OSError)
        plan, parameters = self.context.plan, self.context.parameters
        counts = {} if parameters is None else {"parameters": parameters._asdict()}
        settings = {
            "name": redact(plan.run.exp_name),
            "project": redact(plan.wandb.project),
            "entity": redact(plan.wandb.entity),
            "group": redact(plan.wandb.group),
            "tags": redact(list(plan.wandb.tags)) or None,  # an empty list would replace the tags in WANDB_TAGS
            "notes": redact(plan.wandb.notes),
            "config": redact(plan.nested_values()) | counts,
            "dir": str(self.context.run_dir),
            "id": self._run_id,
            "resume": "allow",
        }
        with explaining(
            (wandb.Error, ValueError),  # W&B raises them offline too
            lambda why: InputError(f"W&B cannot start: {why}; fix this, or set wandb.enabled=false"),
        ):
            self.run = self._start(wandb, settings)
        # not W&B's own step: a run that resumes from an earlier checkpoint logs the same counts again
        self.run.define_metric("counters/examples")
        self.run.define_metric("*", step_metric="counters/examples")
        self._upload("preflight.json")

    @staticmethod
    def _start(wandb: Any, settings: Mapping[str, Any]) -> Any:
        """Start a W&B run, offline if that fails or without key."""
        init = partial(
            wandb.init,
            **settings,
            settings=wandb.Settings(finish_timeout=FINISH_SECS, x_disable_meta=True),  # metadata has the command line
        )
        offline = None  # the reason why it logs offline
        try:  # with a mode set, a key configured or a terminal to ask on, wandb itself knows what to do
            if not (os.environ.get("WANDB_MODE") or (sys.stdin and sys.stdin.isatty()) or wandb.login(prompt=False)):
                offline = "no API key and no terminal to ask for one"
            run = init(mode="offline" if offline else None)
        except wandb.Error as error:
            offline = one_sentence(error)
            run = init(mode="offline")
        if offline:
            print(f"W&B: {offline}, so logging offline; upload with: wandb sync {Path(run.dir).parent}")
        return run

    def on_update(self, update: Update) -> None:
        now = time.monotonic()
        if now - self._last_train >= self.context.plan.logging.minimum_log_interval_secs:
            self._last_train = now
            self._send(update.metrics, examples=update.n_examples, updates=update.number)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        examples = evaluation.n_examples
        self._send(evaluation.metrics, examples=examples, updates=evaluation.n_updates)
        tables = {}
        for who in ("policy", "reference"):
            rows = [[examples, s.prompt, getattr(s, who)] for s in evaluation.samples if getattr(s, who) is not None]
            if rows:
                tables[f"{who}_samples"] = self._table(columns=["step", "prompt", "sample"], data=rows)
        if tables:
            self._unless_lost(self.run.log, {**tables, "counters/examples": examples})
        self._summarize("last", evaluation)
        name, sign = self.context.plan.loss.best
        quality = sign * evaluation.metrics.get(name, math.nan)
        if evaluation.n_updates > 0 and quality > self._best:  # false for NaN
            self._best = quality
            self._summarize("best", evaluation)

    def _summarize(self, which: str, evaluation: Evaluation) -> None:
        facts = {"examples": evaluation.n_examples, "updates": evaluation.n_updates, **evaluation.metrics}
        self._unless_lost(self.run.summary.update, {f"{which}/{name}": value for name, value in facts.items()})

    def _send(self, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        self._unless_lost(self.run.log, {**metrics, "counters/examples": examples, "counters/updates": updates})

    def _unless_lost(self, send: Callable, *arguments: Any) -> None:
        if self._lost:
            return
        try:
            send(*arguments)
        except self._errors as error:
            self._lost = True
            what = f"{type(error).__name__}: {error}"
            print(f"warning: W&B logging disabled after an error ({what}); metrics.jsonl is still written", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self.run.id, "run_dir": str(self.context.run_dir.resolve()), "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("run_dir") == str(self.context.run_dir.resolve()):  # else this run continues another one
            self._run_id = state["wandb_id"]
            self._best = state.get("best", self._best)

    def on_abort(self, reason: str) -> None:
        self._aborted = True
        self._unless_lost(self.run.alert, "run aborted", redact(reason), "ERROR")

    def on_end(self) -> None:
        self._upload(str(REPORT))
        self._unless_lost(self.run.finish, int(self._aborted))

    def _upload(self, name: str) -> None:
        """Upload a file of the run, if it exists and is wanted."""
        file = self.context.run_dir / name

        def copy_and_save() -> None:  # a file outside its own directory W&B would link, with a warning
            copy = Path(self.run.dir) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            self.run.save(escape(str(copy)), base_path=escape(self.run.dir), policy="now")  # these are glob patterns

        if self.context.plan.wandb.artifacts and file.is_file():
            self._unless_lost(copy_and_save)
