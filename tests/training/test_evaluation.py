"""An evaluation is a mean over the test examples, each once, however they are cut into batches, layouts and
processes."""

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from support import trainers
from support.models import load_tiny, move_weights, plain_logps
from support.pytests import sampled
from support.runs import compose, read_json, small_run, write_rows
from support.warm import launch

import trainers as own
from dpo.data.examples import Example
from dpo.settings.plan import make_plan
from dpo.training.evaluation import Interval
from dpo.training.objective import per_example_auc
from trainers import BasicTrainer

LAYOUTS = ("padded", "shared_prefix")
WAYS = [
    (f"loss={loss}", f"layout={layout}", f"eval_batch_size={size}")
    for loss, layout, size in itertools.product(("sft", "dpo", "bco", "aot"), LAYOUTS, (3, 16))
]
ONE_BY_ONE = ("layout=padded", "eval_batch_size=1")
FSDP = ("trainer=FSDPTrainer",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Eight training pairs; as test splits one, three and seven pairs of as many prompts, of different lengths."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [
        {"prompt": f"Where is{' the' * i}?", "chosen": f" Here{' I think' * (i % 3)}.", "rejected": f" Go{'!' * i}."}
        for i in range(15)
    ]
    for n in (1, 3, 7):
        write_rows(folder / f"{n}" / "train.jsonl", pairs[7:])
        write_rows(folder / f"{n}" / "test.jsonl", pairs[:n])
    return folder


def make_trainer(folder: Path, n: int, *overrides: str, rank: int = 0, world_size: int = 1) -> BasicTrainer:
    """A trainer with a test split of n rows, whose policy is not its reference any more."""
    options = ("n_eval_examples=256", "datasets=[mine]", f"dataset_sources.mine={folder / f'{n}'}", *overrides)
    config = compose(*small_run(folder, folder / "run", *options))
    policy, reference = (load_tiny() for _ in range(2))
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.2)
    reference = None if config.loss.name == "sft" else reference
    return getattr(own, config.trainer)(policy, config, 0, config.local_run_dir, reference, rank, world_size)


def evaluate(trainer: BasicTrainer) -> dict:
    trainer.objective.average = trainer.batches.plan.data.eval_batch_size  # of updates, which must not matter
    evaluated = trainer.evaluator.metrics()
    digests = [example.digest for batch in trainer.eval_batches for example in batch.examples]
    table = {name: values.tolist() for name, values in evaluated.examples.items()}
    return {"means": evaluated.means(), "digests": digests, "table": table}


def assert_same(ours: dict, theirs: dict) -> None:
    assert ours["digests"] == theirs["digests"]
    for kind in ("means", "table"):
        assert ours[kind].keys() == theirs[kind].keys()
        for name, values in theirs[kind].items():
            # A reward is a difference of log-probabilities of up to 100, which are right to 1e-6.
            tolerance = {"rel": 1e-6, "abs": 1e-5} if name.startswith(("rewards", "loss")) else {"rel": 1e-6}
            assert ours[kind][name] == pytest.approx(values, **tolerance), name


@pytest.fixture(scope="module")
def expected(folder):
    """The evaluation of n rows under a loss: one row at a time, padded, in one process."""
    return cache(lambda loss, n: evaluate(make_trainer(folder, n, loss, *ONE_BY_ONE)))


@pytest.mark.parametrize("way", sampled(zip(WAYS), 3), ids=", ".join)
def test_layouts_and_sizes_of_batches_change_nothing(way, folder, expected):
    found = evaluate(make_trainer(folder, 7, *way))
    assert len(set(found["digests"])) == len(found["digests"]) == 7
    assert_same(found, expected(way[0], 7))


def test_a_process_evaluates_no_more_examples_at_a_time_than_when_the_run_began(folder, expected):
    """The run began with four processes, which had two examples of an update each; one is left."""
    in_four = ("batch_size=8", "microbatch_size=2", "eval_batch_size=7", "layout=padded")
    trainer = make_trainer(folder, 7, "loss=dpo", *in_four)
    assert [len(microbatch.indices) for microbatch in trainer.eval_batches[0].microbatches] == [2, 2, 2, 1]
    assert_same(evaluate(trainer), expected("loss=dpo", 7))
    assert trainer.evaluator.sampler.rows == 1


def evaluate_in_ways(rank: int, world_size: int, folder: Path, cases: list[tuple[int, tuple]]) -> None:
    """Metrics and samples of each case, from rank 0."""
    results = []
    for n, way in cases:
        trainer = make_trainer(folder, n, *way, rank=rank, world_size=world_size)
        prompts = [sample.prompt for sample in trainer.evaluator.samples(n_examples=0)]
        results.append({**evaluate(trainer), "prompts": prompts})
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(results))


@pytest.mark.slow
def test_processes_may_be_more_than_there_are_examples(folder, expected):
    cases = [
        (n, (*FSDP, "loss=dpo", f"layout={layout}", "eval_batch_size=3", "n_eval_model_samples=16", "max_length=48"))
        for n in (1, 3)
        for layout in LAYOUTS
    ]
    launch(evaluate_in_ways, 4, folder, cases, process_group=True)

    for (n, _), found in zip(cases, read_json(folder / "found.json"), strict=True):
        assert_same(found, expected("loss=dpo", n))
        assert len(set(found["prompts"])) == len(found["prompts"]) == n  # none twice


# --- when a run evaluates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "settings", "every", "keep", "sampled"),
    [
        (40_000, {}, 20_000, None, None),  # 160,000 examples in batches of 4
        (13, {}, 8, 2, {0, 8, 24, 52}),  # 6 evaluations after 8, 16, ..., and one at the end
        (800, {"keep_checkpoints": 5}, 400, 5, {0, 400, 1600, 3200}),
        (800, {"save_every": 8}, 400, None, {0, 400, 1600, 3200}),
        (800, {"eval_every": 1001}, 1000, None, None),
    ],
)
def test_without_an_interval_a_short_run_has_about_eight_evaluations(updates, settings, every, keep, sampled):
    assert Interval.of(make_plan({"batch_size": 4, **settings}), updates) == (every, keep, sampled)


def test_the_kl_of_kto_is_estimated_on_the_mismatched_examples_of_the_global_batch(tmp_path):
    settings = ("loss=kto", "unpair=true", "batch_size=8", "gradient_accumulation_steps=2", "self_test=false")
    trainer = trainers.make(trainers.compose(tmp_path, "kto", *settings, "loss.undesirable_weight=0.5"))
    torch.manual_seed(0)
    policy, reference = trainer.policy, trainer.reference_model
    move_weights(reference, 0.03)
    batch = trainers.next_batch(trainer)

    def log_ratios(examples: list[Example]) -> torch.Tensor:
        with torch.no_grad():
            [of_policy], [of_reference] = (plain_logps(model, examples) for model in (policy, reference))
        return of_policy - of_reference

    z = log_ratios(batch.mismatched.examples).mean()
    assert z > 0.01
    assert [e.prompt for e in batch.mismatched.examples] == [e.prompt for e in batch.examples]
    by_hand = []
    for example, u in zip(batch.examples, log_ratios(batch.examples), strict=True):
        by_hand.append((-0.1 * (u - z)).sigmoid() if example.roles == ("chosen",) else 0.5 * (0.1 * (u - z)).sigmoid())
    metrics = trainer.train_step(batch).metrics
    assert metrics["kto/kl/train"] == pytest.approx(z.item(), rel=1e-4)
    assert metrics["loss/train"] == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-4)


def test_labelled_responses_are_ranked_against_all_of_the_other_kind():
    is_chosen = torch.tensor([True, True, False, True, False])
    rewards = torch.tensor([3.0, 1.0, 1.0, -2.0, -1.0])
    weights = torch.tensor([4.0, 2.0, 3.0, 1.0, 1.0])
    shares = per_example_auc(rewards, is_chosen, weights)
    assert shares.tolist() == pytest.approx([1, 2.5 / 4, 5 / 7, 0, 6 / 7])  # 1.0 ties with 1.0, which counts half
    assert (shares * weights)[is_chosen].sum().item() == pytest.approx(7 * 21 / 28)
    assert (shares * weights)[~is_chosen].sum().item() == pytest.approx(4 * 21 / 28)
