"""Check 5: `compile=true` and `flex_attention` after sampling: the compiled code runs, and no graph is added.

Without a GPU the blocks are compiled by Dynamo only, without code generation, and flex_attention is left out.
"""

from __future__ import annotations

import logging
import re
from functools import partialmethod
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.gpu_checks.common import TINY, Outcome, Setting, few_words, measure_seconds, train_here
from scripts.gpu_checks.models import write_model
from scripts.gpu_checks.table import TIMES_FASTER_COMPILED

COMMON = ("loss=dpo", "loss.beta=0.1", "datasets=[hh]", "n_eval_examples=4", "eval_batch_size=4",
          "n_eval_model_samples=4", "n_epochs=1", "max_prompt_length=64", "do_first_eval=true",
          "sample_during_eval=true", "model.reference_dtype=float32")  # fmt: skip
COMPLAINTS = ("recompile_limit", "cache_size_limit", "unfused", "materializes the full scores")
SETTLED = 3  # updates after which no shape may need a new graph


class Counts:
    """A backend of torch.compile that counts graphs and how often they run."""

    def __init__(self, *, gpu: bool) -> None:
        self.gpu, self.graphs, self.runs = gpu, 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        if self.gpu:
            from torch._inductor.compile_fx import compile_fx  # what the backend "inductor" calls

            compiled: Any = compile_fx(graph, inputs)
        else:
            compiled = graph.forward

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run


def check(setting: Setting) -> Outcome:
    sizes = setting.pick((12, 768, 12), (6, 768, 12), None)
    model = write_model(setting, "llama", *sizes) if sizes else TINY
    common = (*COMMON, f"model.name_or_path={model}", f"dataset_sources.hh={few_words(setting, 48)}",
              f"max_length={setting.pick(160, 160, 96)}", "batch_size=6",
              *(("model.random_init=true", "model.autocast=bfloat16") if setting.gpu else ()))  # fmt: skip
    counts = Counts(gpu=setting.gpu)
    plain_compile = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(plain_compile, backend=counts)
    try:
        compiled = run_updates(setting, "compiled", counts, *common, "compile=true")
    finally:
        torch.nn.Module.compile = plain_compile
    results = {"compiled": compiled}
    if setting.gpu:
        results["plain"] = run_updates(setting, "plain", None, *common)
        results["flex"] = run_updates(setting, "flex", None, *common, "model.attn_implementation=flex_attention")
    return judge(setting, results)


def judge(setting: Setting, results: dict[str, list[dict[str, Any]]]) -> Outcome:
    settled = {name: updates[SETTLED:] for name, updates in results.items()}
    runs = min(update["runs"] for update in settled["compiled"])
    wanted = settled["compiled"][0]["blocks"]
    new_graphs = sum(update["graphs"] for update in settled["compiled"])
    complaints = complaints_in(Path(setting.folder))
    seconds = {name: median(update["seconds"] for update in updates) for name, updates in settled.items()}
    figure = (
        f"{runs} graphs run in an update of {wanted} compiled blocks, {new_graphs} new ones after update {SETTLED}, "
        f"{results['compiled'][-1]['graphs in all']} in all"
    )
    passed = runs >= wanted and new_graphs == 0 and not complaints
    if setting.gpu:
        times = {name: seconds["plain"] / seconds[name] for name in ("compiled", "flex")}
        figure += f"; against eager {times['compiled']:.2f} times as fast, flex {times['flex']:.2f} against sdpa"
        passed = passed and times["compiled"] >= TIMES_FASTER_COMPILED
    else:
        figure += "; flex_attention and time need a GPU"
    figure += f"; log: {'; '.join(complaints)}" if complaints else ""
    return Outcome(passed, figure, {"seconds": seconds, "updates": results, "complaints": complaints})


def complaints_in(folder: Path) -> list[str]:
    """Lines of this process's log about graphs that are no longer compiled."""
    log = folder / "log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    found = [line.strip()[:200] for line in lines if any(what in line for what in COMPLAINTS)]
    return list(dict.fromkeys(re.sub(r"^\S+ [\d:.]+ \d+ ", "", line) for line in found))


def run_updates(setting: Setting, name: str, counts: Counts | None, *overrides: str) -> list[dict[str, Any]]:
    """Time, loss and graphs of each update; sampling comes before the first."""
    updates: list[dict[str, Any]] = []

    def watch(trainer: type) -> type:
        class Watched(trainer):
            def train_step(self, batch: Any) -> Any:
                graphs, runs = (counts.graphs, counts.runs) if counts else (0, 0)
                made: list[Any] = []
                seconds = measure_seconds(setting.device, lambda: made.append(super(Watched, self).train_step(batch)))
                update = {"seconds": seconds, "loss": made[0].metrics["loss/train"]}
                if counts:
                    layers = self.policy.config.num_hidden_layers
                    forwards = len(batch.microbatches) * 2  # the policy's and the reference's, each pair once
                    update |= {"graphs": counts.graphs - graphs, "runs": counts.runs - runs,
                               "graphs in all": counts.graphs, "blocks": layers * forwards}  # fmt: skip
                updates.append(update)
                return made[0]

        return Watched

    logging.getLogger("torch._dynamo").setLevel(logging.WARNING)
    train_here(setting, name, "BasicTrainer", watch, *overrides)
    return updates
