"""Weights & Biases. The only file that imports wandb."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dpo.errors import InputError
from dpo.reporting.files import Sample

FINISH_SECS = 300  # that W&B may take to send the rest at the end


class WandbLogger:
    """Weights & Biases, under the reference's names; training metrics at most every `interval` seconds.

    Steps are `counters/examples` (a metric, not W&B's own step), so that a run rolled back to an earlier checkpoint
    can log the same counts again and loses nothing. The system's own records go with it. A run never waits or fails for
    W&B: what cannot be sent stays on the disk (`wandb sync`), and `metrics.jsonl` has everything.
    """

    def __init__(
        self,
        *,
        name: str,
        project: str,
        entity: str | None,
        config: Mapping,
        run_dir: Path,
        interval: float,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        import wandb

        self._table, self._errors = wandb.Table, (wandb.Error, OSError)
        self.run_dir, self.interval = run_dir, interval
        self._last_train = float("-inf")
        self._lost = False
        is_own = bool(state) and state.get("run_dir") == str(run_dir.resolve())  # not that of a run it continues
        settings = {
            "name": name,
            "project": project,
            "entity": entity,
            "config": dict(config),
            "dir": str(run_dir),
            "id": state["wandb_id"] if is_own else None,
            "resume": "allow",
        }
        try:
            self.run = self._start(wandb, settings)
        except (wandb.Error, ValueError) as error:  # offline too
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"W&B cannot start: {reason}; put that right, or wandb.enabled=false") from error
        self.run.define_metric("counters/examples")
        self.run.define_metric("*", step_metric="counters/examples")

    @staticmethod
    def _start(wandb: Any, settings: Mapping[str, Any]) -> Any:
        """A W&B run; offline, and said so, if it cannot reach its server or has no key."""
        init = partial(
            wandb.init,
            **settings,
            settings=wandb.Settings(finish_timeout=FINISH_SECS, x_disable_meta=True),  # which has the command line
        )
        offline = None  # why, if so
        try:  # with a mode set, a key configured or a terminal to ask on, wandb itself knows what to do
            if not (os.environ.get("WANDB_MODE") or (sys.stdin and sys.stdin.isatty()) or wandb.login(prompt=False)):
                offline = "no API key and no terminal to ask for one"
            run = init(mode="offline" if offline else None)
        except wandb.Error as error:
            offline = " ".join(str(error).split())
            run = init(mode="offline")
        if offline:
            print(f"W&B: {offline}, so logging offline; upload with: wandb sync {Path(run.dir).parent}")
        return run

    def log(self, split: str, metrics: Mapping[str, float], *, examples: int, updates: int) -> None:
        now = time.monotonic()
        if split == "train":
            if now - self._last_train < self.interval:
                return
            self._last_train = now
        self._send({**metrics, "counters/examples": examples, "counters/updates": updates})

    def log_samples(self, samples: Sequence[Sample], *, examples: int) -> None:
        tables = {}
        for who in ("policy", "reference"):
            rows = [[examples, s.prompt, getattr(s, who)] for s in samples if getattr(s, who) is not None]
            if rows:
                tables[f"{who}_samples"] = self._table(columns=["step", "prompt", "sample"], data=rows)
        self._send({**tables, "counters/examples": examples})

    def _send(self, values: Mapping[str, Any]) -> None:
        self._unless_lost(self.run.log, values)

    def _unless_lost(self, send: Callable, *arguments: Any) -> None:
        if self._lost:
            return
        try:
            send(*arguments)
        except self._errors as error:
            self._lost = True
            print(f"warning: W&B takes no more ({type(error).__name__}: {error}); metrics.jsonl goes on", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self.run.id, "run_dir": str(self.run_dir.resolve())}

    def close(self) -> None:
        self._unless_lost(self.run.finish)
