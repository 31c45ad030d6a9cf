"""Saving and restoring the parts of a run while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dpo.checkpoint.files import DamagedCheckpoint, point, prune, write_checkpoint
from dpo.checkpoint.parts import Part
from dpo.errors import explaining_library, one_sentence
from dpo.parallel.mesh import Mesh
from dpo.system.host import host_memory
from dpo.system.run_directory import read_record
from dpo.system.waiting import meet_rank_0, sending_heartbeats


class Checkpoints:
    """Saves a run's states, gathered on rank 0, which writes them in the background if a copy fits in memory.

    BEST is the best of evaluations of the same `n_evaluated` examples.
    """

    def __init__(
        self, run_dir: Path, mesh: Mesh, *, keep: int | None, log: Callable[[str], None], n_evaluated: int = 0
    ) -> None:
        self.run_dir, self.mesh, self.keep, self.log, self.n_evaluated = run_dir, mesh, keep, log, n_evaluated
        self.run = read_record(run_dir).get("run")  # the id of the run, by which it knows its checkpoints
        self.best_at: int | None = None  # number of examples at BEST
        self.best = -math.inf  # quality of BEST; higher is better
        self.latest = math.nan  # quality of LATEST; NaN if it was not evaluated
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._n_meetings = 0

    def save(
        self,
        parts: Sequence[Part],
        *,
        step_idx: int,
        metrics: Mapping | None,
        quality: float | None,
        facts: Callable[[], Mapping],
        elsewhere: Path | None = None,
    ) -> None:
        """Save the parts to `step-N`, LATEST and, if of the highest quality so far, BEST; every process must call it.

        With `elsewhere`, saves to that directory instead and changes no link.
        """
        self.wait()  # for the previous save, so that at most one copy of the state is in memory
        links = []
        if not elsewhere:
            links = ["LATEST"]
            self.latest = math.nan if quality is None else quality
            if self.latest > self.best:  # false for NaN
                self.best, self.best_at = self.latest, step_idx
                links = ["LATEST", "BEST"]
        n_bytes = sum(part.n_bytes for part in parts)
        # beside the copy, as much memory again must remain for training, which goes on meanwhile
        in_background = self.mesh.rank == 0 and 2 * n_bytes < host_memory().available
        states = self._gather(parts, copy=in_background)  # a generator: each part is gathered when taken from it
        if self.mesh.rank != 0:
            for _ in states:  # take part in the collectives
                pass
            return
        directory = elsewhere or self.run_dir / f"step-{step_idx}"
        all_facts = {**facts(), "run": self.run, "best_at": self.best_at}
        write = partial(self._write, directory, links=links, step_idx=step_idx, metrics=metrics, facts=all_facts)
        if in_background:
            self._writing = self._thread.submit(write, list(states))
            if elsewhere:  # the caller may read the files at once
                self.wait()
        else:
            write(states)  # takes one part at a time from the generator, so that only one is in memory

    def _gather(self, parts: Sequence[Part], *, copy: bool) -> Iterator[tuple[str, Any]]:
        """Yield the name and state of each part, whole on rank 0 alone, then its further files."""
        for part in parts:
            self._wait_for_rank_0()  # it may still be writing the previous part
            state = part.gather(copy=copy)
            yield part.name, state
            if self.mesh.rank == 0:
                yield from part.convert(state).items()

    def _wait_for_rank_0(self) -> None:
        """Wait until rank 0 has written its file and calls this too."""
        self._n_meetings += 1  # each meeting of the ranks needs a name of its own
        meet_rank_0(f"meeting {self._n_meetings} over checkpoints")

    def _write(self, directory: Path, states: Iterable[tuple[str, Any]], *, links: list[str], **content: Any) -> None:
        with sending_heartbeats():
            write_checkpoint(directory, states, **content)
            for link in links:
                point(self.run_dir / link, directory)
            if self.keep is not None:
                prune(self.run_dir, self.keep, self.run)
        self.log(f"saved {directory}")

    def restore(self, checkpoint: Path, parts: Sequence[Part]) -> None:
        """Continue with the parts as they were saved; every process must call it."""
        for part in parts:
            file = checkpoint / f"{part.name}.pt"

            def explain(error: Exception, file: Path = file) -> DamagedCheckpoint:
                reason = f"{type(error).__name__} {one_sentence(error)}"
                return DamagedCheckpoint(f"{file} does not hold the state of a run: {reason}")

            with explaining_library(explain):
                part.restore(file)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_at": self.best_at, "n_evaluated": self.n_evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()` if its BEST is in this run's directory, which may be a new one."""
        if state["n_evaluated"] != self.n_evaluated:
            evaluated = f"{self.n_evaluated} test examples are evaluated, and were {state['n_evaluated']}"
            self.log(f"BEST is chosen anew from now on, as {evaluated}: their means cannot be compared")
            return
        if (self.run_dir / f"step-{state['best_at']}").exists():
            self.best, self.best_at = state["best"], state["best_at"]

    def check(self) -> None:
        """Raise the error of a background write that has failed."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for a background write to end; raise its error, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Make every process wait until rank 0 has written everything."""
        self.wait()
        self._wait_for_rank_0()
        self.mesh.any(False)  # a barrier
