"""What a dry run prints: what a run would do, and the memory it needs."""

from __future__ import annotations

from dpo.data.preflight import TrainingData
from dpo.models.scoring import load_scorer
from dpo.settings.plan import Plan
from dpo.training.evaluation import notes_on_first_work
from dpo.training.memory import print_prediction
from dpo.training.optimization import find_warmup_warnings, notes_on_scaling


def print_outlook(plan: Plan, data: TrainingData, *, is_first: bool) -> None:
    """Print what the run would do; a resumed one, not `is_first`, keeps its first rate, and made its first update."""
    notes = [*find_warmup_warnings(plan.training, data.report.updates)]
    notes += notes_on_scaling(plan.training, plan.dims.data_size) if is_first else []
    notes += load_scorer(plan, "meta", rows=1).notes if plan.online else []
    notes += notes_on_first_work(plan, data) if is_first else []
    for note in notes:
        print(note)
    print_prediction(plan, data)
