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
from dpo.training.optimization import LR_SCALINGS, Schedule, count_states


def print_outlook(plan: Plan, data: TrainingData, *, is_first: bool) -> None:
    """Print what a dry run knows, the memory included; a resumed run is not `is_first`."""
    notes = notes_on_updates(plan, data, is_first=is_first)
    notes += load_scorer(plan, "meta", rows=1).notes if plan.online else []
    for note in notes:
        print(note)
    print_prediction(plan, data)


def list_notes(
    plan: Plan, data: TrainingData, evaluator: Evaluator, scheduler: Schedule, *, is_first: bool
) -> list[str]:
    """What a run says before it trains, `is_first` if it has not trained yet."""
    policy, eval_every = evaluator.objective.policy, plan.evaluation.eval_every
    n_examples = evaluator.interval.n_examples  # from one evaluation to the next
    notes = [*remarks(policy, attention=plan.model.attn_implementation, max_length=plan.data.max_length)]
    if eval_every not in (None, n_examples):
        notes.append(
            f"warning: eval_every={eval_every} is not a multiple of batch_size={plan.data.batch_size}; evaluating "
            f"every {n_examples} examples"
        )
    if plan.evaluation.sample_during_eval:
        notes.append(f"samples are drawn with {evaluator.sampling} (sample_temperature, sample_top_p, sample_top_k)")
    notes += [*notes_on_base(plan), *scheduler.notes]
    if evaluator.mesh.rank == 0 and not plan.run.debug:
        updates, keep, save_every = data.report.updates, evaluator.interval.keep, plan.run.save_every or n_examples
        n_saves = math.ceil(updates * plan.data.batch_size / save_every)
        n_kept = n_saves if keep is None else min(n_saves, keep + 1)  # and BEST
        weights = sum(parameter.nbytes for parameter in trained_parameters(policy))
        n_bytes = n_kept * weights * (1 + count_states(plan.training)) + plan.run.export * weights
        free = shutil.disk_usage(plan.run.local_run_dir).free
        notes.append(
            f"{'warning: ' * (n_bytes > free)}the run's files take about {n_bytes / 1e9:.3g} GB on disk, where "
            f"{free / 1e9:.3g} GB are free: {count(n_kept, 'checkpoint')} (keep_checkpoints)"
            f"{' and LATEST/hf (export)' * plan.run.export}"
        )
    return notes + notes_on_updates(plan, data, is_first=is_first)


def notes_on_updates(plan: Plan, data: TrainingData, *, is_first: bool) -> list[str]:
    """On the learning rate, and on the work before the first update.

    A resumed run, not `is_first`, keeps the rate that it began with.
    """
    training, evaluation, test, n_most = plan.training, plan.evaluation, data.report.test, plan.data.n_eval_examples
    notes, warmup, scaling = [], training.warmup_steps, training.lr_scaling
    if warmup and warmup > data.report.updates / 2:
        notes.append(
            f"warning: warmup_steps={warmup} takes most of the {count(data.report.updates, 'update')} of this run, or "
            f"all: with warmup_steps=null it takes a tenth"
        )
    if not is_first:
        return notes
    if scaling != "none":
        n_processes = plan.dims.data_size
        lr = training.lr * LR_SCALINGS[scaling](n_processes)
        notes.append(
            f"learning rate {lr:.6g}: lr={training.lr}, scaled for {n_processes} processes by lr_scaling={scaling}"
        )
    is_evaluated, is_sampled = evaluation.do_first_eval, evaluation.sample_during_eval
    n_examples, n_prompts = min(n_most, test.examples), min(n_most, test.prompts)
    is_sampled_first = is_evaluated and is_sampled and evaluation.do_first_sampling
    tasks = {
        "self-test (self_test)": training.self_test,
        "the reference scores all examples (cache_reference_logps)": plan.caches_reference_first,
        f"evaluation of {count(n_examples, 'example')} (do_first_eval, n_eval_examples)": is_evaluated and n_examples,
        f"answers to {count(n_prompts, 'held-out prompt')} (do_first_eval, n_eval_examples)": (
            is_evaluated and plan.online
        ),
        f"{count(min(N_ASKED, n_prompts), 'answer')} for comparison at the end (sample_during_eval)": is_sampled,
        f"{count(evaluation.n_eval_model_samples, 'sample')} (do_first_sampling, n_eval_model_samples)": (
            is_sampled_first
        ),
    }
    wanted = [task for task, is_wanted in tasks.items() if is_wanted]
    return [*notes, *([f"before the first update: {', '.join(wanted)}"] if wanted else [])]
