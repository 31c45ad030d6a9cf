"""What a run says before it trains, and what a dry run prints."""

from __future__ import annotations

import math
import shutil

from dpo.data.preflight import TrainingData
from dpo.models.adapters import trained_parameters
from dpo.models.loading import notes_on_base
from dpo.models.pretrained import remarks
from dpo.models.scoring import load_scorer
from dpo.numbers import count
from dpo.settings.plan import Plan
from dpo.training.evaluation import N_ASKED, Evaluator
from dpo.training.memory import print_prediction
from dpo.training.optimization import count_states


def print_outlook(plan: Plan, data: TrainingData, *, is_first: bool) -> None:
    """Print what a dry run knows, the memory included; a resumed run is not `is_first`."""
    notes = list_first_tasks(plan, data) if is_first else []
    for note in [*notes, *(load_scorer(plan, "meta", rows=1).notes if plan.online else [])]:
        print(note)
    print_prediction(plan, data)


def list_notes(plan: Plan, data: TrainingData, evaluator: Evaluator, *, is_first: bool) -> list[str]:
    """What a run says before it trains, `is_first` if it has not trained yet."""
    policy = evaluator.objective.policy
    notes = [*remarks(policy, attention=plan.model.attn_implementation, max_length=plan.data.max_length)]
    if plan.evaluation.sample_during_eval:
        notes.append(f"samples are drawn with {evaluator.sampling} (sample_temperature, sample_top_p, sample_top_k)")
    notes += notes_on_base(plan)
    if evaluator.mesh.rank == 0 and not plan.run.debug:
        keep, save_every = evaluator.interval.keep, plan.run.save_every or evaluator.interval.n_examples
        n_saves = math.ceil(data.report.updates * plan.data.batch_size / save_every)
        n_kept = n_saves if keep is None else min(n_saves, keep + 1)  # and BEST
        weights = sum(parameter.nbytes for parameter in trained_parameters(policy))
        n_bytes = n_kept * weights * (1 + count_states(plan.training)) + plan.run.export * weights
        free = shutil.disk_usage(plan.run.local_run_dir).free
        notes.append(
            f"{'warning: ' * (n_bytes > free)}the run's files take about {n_bytes / 1e9:.3g} GB on disk, where "
            f"{free / 1e9:.3g} GB are free: {count(n_kept, 'checkpoint')} (keep_checkpoints)"
            f"{' and LATEST/hf (export)' * plan.run.export}"
        )
    return notes + (list_first_tasks(plan, data) if is_first else [])


def list_first_tasks(plan: Plan, data: TrainingData) -> list[str]:
    """One line on the work before the first update, if there is any."""
    evaluation, test, n_most = plan.evaluation, data.report.test, plan.data.n_eval_examples
    is_evaluated, is_sampled = evaluation.do_first_eval, evaluation.sample_during_eval
    n_examples, n_prompts = min(n_most, test.examples), min(n_most, test.prompts)
    tasks = {
        "self-test (self_test)": plan.training.self_test,
        "the reference scores all examples (cache_reference_logps)": plan.caches_reference_first,
        f"evaluation of {count(n_examples, 'example')} (do_first_eval, n_eval_examples)": is_evaluated and n_examples,
        f"answers to {count(n_prompts, 'held-out prompt')} (do_first_eval, n_eval_examples)": (
            is_evaluated and plan.online
        ),
        f"{count(min(N_ASKED, n_prompts), 'answer')} for comparison at the end (sample_during_eval)": is_sampled,
        f"{count(evaluation.n_eval_model_samples, 'sample')} (do_first_sampling, n_eval_model_samples)": (
            is_evaluated and is_sampled and evaluation.do_first_sampling
        ),
    }
    wanted = [task for task, is_wanted in tasks.items() if is_wanted]
    return [f"before the first update: {', '.join(wanted)}"] if wanted else []
