"""The training loop: updates, evaluations, saves, and what is written."""

import copy
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from support.gpu import HostReads
from support.runs import compose, list_updates, read_metrics, read_rows

from dpo.training.objective import Reduced
from preference_datasets import get_batch_iterator
from trainers import BasicTrainer

DPO = ("loss=dpo", "loss.beta=0.1")
SAMPLED = ("sample_during_eval=true", "n_eval_model_samples=1", "do_first_sampling=true")
IN_PLAIN_SIGHT = ("warmup_steps=0", "optimizer=SGD", "lr=1.0", "max_grad_norm=1e9")  # an update is minus the gradient


@pytest.fixture
def make_trainer(command, tiny_llama):
    """A trainer on copies of the tiny Llama, from a real config."""

    def make(*overrides: str, run: str = "run", dtype: torch.dtype = torch.float32) -> BasicTrainer:
        config = compose(*command(run, "max_length=64", "minimum_log_interval_secs=0", *overrides))
        policy, reference = (copy.deepcopy(tiny_llama).to(dtype) for _ in range(2))
        reference = None if config.loss.name == "sft" else reference
        return BasicTrainer(policy, config, config.seed, config.local_run_dir, reference)

    return make


def flat_weights(trainer: BasicTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


# --- an update -----------------------------------------------------------------------------------------------------


def test_an_update_is_a_step_against_the_gradient_of_the_mean_loss(make_trainer):
    trainer = make_trainer("loss=sft", *IN_PLAIN_SIGHT, dtype=torch.float64)
    prepared = next(trainer.train_iterator)
    model = copy.deepcopy(trainer.policy)
    loss = 0
    for example in prepared.examples:  # one at a time, without padding
        n, ids = len(example.prompt), (*example.prompt, *example.responses[0])
        log_softmax = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        loss -= sum(log_softmax[t - 1, ids[t]] for t in range(n, len(ids))) / 4
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    before = flat_weights(trainer)

    metrics = trainer.train_step(prepared).metrics

    assert metrics["loss/train"] == pytest.approx(loss.item(), rel=1e-7)  # the model's norms and softmax are float32
    torch.testing.assert_close(flat_weights(trainer), before - gradient, rtol=1e-5, atol=1e-6)


# --- a run ---------------------------------------------------------------------------------------------------------


def checkpoints(run_dir: Path) -> dict[str, str | None]:
    """The directories of a run, and where its links point."""
    return {p.name: os.readlink(p) if p.is_symlink() else None for p in run_dir.iterdir() if p.is_dir()}


def test_a_run_evaluates_at_0_at_every_multiple_and_at_the_end_and_saves_with_it(make_trainer, printed):
    trainer = make_trainer(*DPO, "eval_every=10", "n_examples=12")  # batches of 4
    trainer.train()

    lines = printed()
    assert "self-test passed: first loss 0.693147" in lines
    evaluations = read_metrics(trainer.run_dir, "eval")
    assert [(e["examples"], e["updates"]) for e in evaluations] == [(0, 0), (8, 2), (12, 3)]
    assert list_updates(trainer.run_dir) == [4, 8, 12]
    assert checkpoints(trainer.run_dir).keys() == {"step-8", "step-12", "LATEST", "BEST"}
    assert os.readlink(trainer.run_dir / "LATEST") == "step-12"
    content = torch.load(trainer.run_dir / "LATEST" / "policy.pt", weights_only=True)
    assert content["metrics"].items() <= evaluations[-1].items()
    torch.testing.assert_close(content["state"], trainer.policy.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("loss", "name", "values"),
    [
        (DPO, "rewards_eval/accuracies", [0.99, 0.5, 0.9, 0.7]),  # the highest; step 0 is not a candidate
        (("loss=sft",), "loss/eval", [1.0, 9.0, 3.0, 3.0]),  # the lowest, and the first of equals
    ],
)
def test_best_points_to_the_best_evaluation_and_latest_to_the_last(loss, name, values, make_trainer, monkeypatch):
    trainer = make_trainer(*loss, "eval_every=4", "n_examples=12", "self_test=false")
    scripted = iter(values)
    others = {"loss/eval": torch.tensor([0.7]), "rewards_eval/margins": torch.tensor([0.0])}
    monkeypatch.setattr(trainer.evaluator, "metrics", lambda: Reduced({**others, name: torch.tensor([next(scripted)])}))

    trainer.train()

    steps = dict.fromkeys(["step-4", "step-8", "step-12"])
    assert checkpoints(trainer.run_dir) == {**steps, "LATEST": "step-12", "BEST": "step-8"}


def test_a_line_says_what_is_done_before_the_first_update(make_trainer, printed):
    trainer = make_trainer(*DPO, "n_examples=4", "max_length=36", *SAMPLED, "cache_reference_logps=all")
    trainer.train()

    [line] = [line for line in printed().splitlines() if line.startswith("before the first update: ")]
    keys = ("self_test", "cache_reference_logps", "do_first_eval, n_eval_examples", "sample_during_eval")
    assert all(f"({names})" in line for names in keys)
    answers = read_rows(trainer.run_dir / "answers.jsonl")
    assert [answer["examples"] for answer in answers] == [0, 0, 4, 4]
    # The one sample that was asked for is rounded up to a whole evaluation batch.
    assert len(read_rows(trainer.run_dir / "samples.jsonl")) == 8


def test_the_references_methods_take_the_references_batch(make_trainer, rows):
    trainer = make_trainer(*DPO)
    trainer.policy.lm_head.weight.data *= 1.3  # no longer the reference
    options = {"batch_size": 4, "max_length": 64, "max_prompt_length": 32, "n_epochs": 1, "silent": True}
    batch = next(get_batch_iterator(["hh"], trainer.tokenizer, **options, dataset_sources={"hh": str(rows / "hh")}))
    loss, metrics = trainer.get_batch_metrics(batch, trainer.config.loss, train=True)

    chosen, rejected = (metrics[f"rewards_train/{side}"] for side in ("chosen", "rejected"))
    expected = -torch.nn.functional.logsigmoid(chosen - rejected)
    assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-4)
    assert not any(value.requires_grad for value in metrics.values())

    logps = trainer.concatenated_forward(trainer.policy, batch)
    torch.testing.assert_close(
        torch.stack(logps), torch.stack([metrics["logps_train/chosen"], metrics["logps_train/rejected"]])
    )
    of_policy, of_reference = trainer.get_batch_samples(batch)
    assert (len(of_policy), len(of_reference)) == (4, 4)
    assert all(of_policy + of_reference)


# --- the reference -------------------------------------------------------------------------------------------------


def count_forwards(model: torch.nn.Module) -> list[None]:
    """A list that grows whenever the model computes hidden states."""
    calls: list[None] = []
    model.base_model.register_forward_hook(lambda *_: calls.append(None))
    return calls


def test_the_reference_scores_every_pair_once_in_a_run(make_trainer):
    trainer = make_trainer(
        *DPO, "n_epochs=3", "n_examples=null", "batch_size=11", "eval_every=11", "self_test=false", "debug=true"
    )
    calls = count_forwards(trainer.reference_model)
    trainer.train()
    assert trainer.batch_counter == 6
    assert len(read_metrics(trainer.run_dir, "eval")) == 7
    assert len(calls) == 1 + 2  # one evaluation batch, and the training batches of the first epoch


def test_with_all_references_cached_nothing_changes_and_the_model_is_gone(make_trainer, tmp_path):
    options = (*DPO, "n_epochs=2", "batch_size=8", "lr=1e-3", "warmup_steps=0", "debug=true")
    plain = make_trainer(*options, "loss.beta=0.5", run="plain")
    cached = (f"local_dirs=[{tmp_path}]", "cache_reference_logps=all")
    first = make_trainer(*options, *cached, run="first")
    reference = weakref.ref(first.reference_model)
    second = make_trainer(*options, *cached, "loss.beta=0.5", run="second")
    calls = count_forwards(second.reference_model)
    for trainer in (plain, first, second):
        trainer.train()

    gc.collect()
    assert reference() is None
    assert len(calls) == 1  # the self-test: the first run has left all log-probabilities
    assert torch.equal(flat_weights(second), flat_weights(plain))


def test_a_tie_whose_loss_is_infinite_changes_nothing(make_trainer):
    trainer = make_trainer("loss=ipo", "loss.beta=0.1", "loss.f_divergence=forward_kl", "model.reference_dtype=float32")
    batch = next(trainer.train_iterator)
    trainer.train_step(batch)  # caches the reference
    context = trainer.objective.prepare(batch._replace(weights=[1.0, 1.0, 0.0, 1.0]))
    context.reference[2, 0] += 1000
    [microbatch] = batch.microbatches
    per_example, metrics = trainer.objective.losses(microbatch, context, split="train")
    trainer.objective.weigh(per_example, microbatch, context).backward()
    losses = torch.zeros(4).index_copy(0, microbatch.indices, metrics["loss/train"])
    assert losses.isfinite().tolist() == [True, True, False, True]
    assert trainer.clip_gradient().isfinite()
    mean = Reduced({"loss/train": losses}).means(weights=context.weights.tolist())["loss/train"]
    assert mean == pytest.approx(losses[[0, 1, 3]].mean().item())


@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
def test_the_host_runs_ahead_of_a_gpu_through_all_microbatches_with_ties_too(layout, make_trainer):
    trainer = make_trainer(*DPO, f"layout={layout}", "gradient_accumulation_steps=2")
    batch = next(trainer.train_iterator)._replace(weights=[0.0, 1.0, 1.0, 0.0])
    context = trainer.objective.prepare(batch)
    with HostReads() as reads:
        for microbatch in batch.microbatches:
            losses, _ = trainer.objective.losses(microbatch, context, split="train")
            trainer.objective.weigh(losses, microbatch, context).backward()
        trainer.clip_gradient()
    assert reads.number == 0
