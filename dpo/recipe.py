"""The recipe: the steps of a run in each of its processes, in their order."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from dpo.analysis.rules import print_result
from dpo.checkpoint.resume import (
    OpenRun,
    check_inputs,
    find_model_facts,
    keep_choices,
    keep_template,
    opening_run,
    preview_resume,
)
from dpo.data.loading import check_columns
from dpo.data.preflight import TrainingData, list_first_examples, load_data
from dpo.data.schema import write_lines
from dpo.models.export import export_last
from dpo.models.loading import check_blocks, check_model, check_parts, find_model_config
from dpo.models.pretrained import take_model
from dpo.models.scoring import load_scorer
from dpo.reporting.table import list_logs
from dpo.settings.keys import PRECISION
from dpo.settings.plan import Plan
from dpo.system.run_directory import FIRST_EXAMPLES, RunLog
from dpo.system.waiting import check_alike, from_rank_0, meet_rank_0
from dpo.trainers import Trainer
from dpo.training.memory import explain_memory_error, print_prediction
from dpo.training.optimization import check_optimizer
from dpo.training.start import find_shared_facts, list_first_tasks, set_up_libraries


def dry_run(plan: Plan) -> None:
    """Print what a run would do, and the memory it needs; write nothing.

    Raises InputError for whatever the run would refuse, with two exceptions: a disk that is too small, and more
    processes than this machine has GPUs.
    """
    run = OpenRun(Path(plan.run.local_run_dir), preview_resume(plan, list_logs()))
    plan, data = _load(run, 0, plan, None)
    check_parts(plan)
    for role, text in list_first_examples(plan, data)[0].items():
        print(f"{role} of the first example: {text!r}")
    if not run.resume_point:
        print(list_first_tasks(plan))
    if plan.online:  # this checks the scorer's files, too
        print(*load_scorer(plan, "meta", rows=1).notes, sep="\n")
    print_prediction(plan, data)


def run_process(rank: int, plan: Plan, models: tuple | None, log: RunLog) -> None:
    """Open the run's directory on rank 0, then load data, train and export on every rank.

    `models` are policy and reference of a caller, or None to load those that the plan names.
    """
    with opening_run(plan, list_logs()) if rank == 0 else nullcontext() as run:
        # Rank 0 may take long to copy a checkpoint and logs into the directory, for which a collective would not wait.
        meet_rank_0("the run's directory")
        resume_from = from_rank_0(run and run.resume_point and run.resume_point.path)
        plan, data = _load(run, rank, plan, models)
        is_complete = from_rank_0(run and run.is_finished(plan, data.updates))
        if not is_complete:
            if run:
                run.record(plan)
                data.write_counts(run.directory / "preflight.json")
                write_lines(run.directory / FIRST_EXAMPLES, list_first_examples(plan, data))
                log.open(run.directory)
            with explain_memory_error(plan, data):
                Trainer(plan, data, models, rank=rank, resume_from=resume_from).train()
        elif run:
            print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
        export_last(plan, rank)
        if run and not is_complete:
            print_result(run.directory)


def _load(run: OpenRun | None, rank: int, plan: Plan, models: tuple | None) -> tuple[Plan, TrainingData]:
    """Return the plan with what rank 0 has chosen for all ranks, and the data; `run` is None on all ranks but 0.

    Raises InputError for what cannot be trained, cheap checks first.
    """
    resume_point = run and run.resume_point
    if run:
        plan = keep_choices(plan, run)
    # Rank 0 chose these for all: by the checkpoint, by its date, and by what its GPU computes in.
    for key in ("chat_template_date", "holdout", "microbatch_size", *PRECISION):
        plan = plan.change(key, from_rank_0(plan.values[key]))
    check_alike(find_shared_facts(plan))
    # Attention's kernel depends on these settings, and the predicted memory on the kernel.
    set_up_libraries(plan, progress_bars=rank == 0 and sys.stderr.isatty())

    check_optimizer(plan.training)
    if run and not resume_point:
        check_columns(plan)  # before a model is fetched
        if models is None:
            check_model(plan)  # before data is loaded, which may take minutes
    policy = models and take_model(models[0])
    if run:
        check_blocks(plan, policy)
    template = from_rank_0(keep_template(plan, resume_point))
    data = load_data(plan.change("chat_template", template), silent=rank != 0)
    model_config = policy.config if policy else find_model_config(plan)
    check_alike({"the model's config.json": json.dumps(find_model_facts(model_config), sort_keys=True)})
    if run:
        check_inputs(resume_point, data, model_config)
    return plan, data
