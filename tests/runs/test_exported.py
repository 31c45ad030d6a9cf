"""A complete run is exported to transformers."""

import errno
import shutil

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from support.models import IDS, load_tiny
from support.pytests import refused, succeeded
from support.runs import TINY, read_metrics, run_card, train

from dpo.checkpoint.files import check_complete
from dpo.models.loading import load_policy, model_loaders
from dpo.settings.plan import resolve


@pytest.fixture
def command(command):
    """The overrides of a small run that exports."""
    return lambda name, *overrides: command(name, "export=true", *overrides)


def same_as_checkpoint(run_dir, folder) -> bool:
    ours = load_tiny(archive=str(run_dir))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return torch.equal(ours.eval()(IDS).logits, theirs.eval()(IDS).logits)


def test_a_run_is_exported_verified_and_trained_further(run, run_dir, tmp_path, printed):
    run("run", "n_examples=8")
    assert f"exported {run_dir}/step-8/hf" in printed()
    assert same_as_checkpoint(run_dir, run_dir / "LATEST" / "hf")
    check_complete(run_dir / "step-8")

    shutil.rmtree(run_dir / "LATEST" / "hf")  # it comes back, and nothing is trained
    run("run", "n_examples=8", "resume=auto")
    assert "already complete" in printed()
    assert same_as_checkpoint(run_dir, run_dir / "LATEST" / "hf")
    run("run", "n_examples=8", "resume=auto")
    assert f"exported {run_dir}" not in printed()

    run("further", f"model.name_or_path={run_dir}/LATEST/hf", "export=false", "n_examples=4")
    trained = read_metrics(run_dir, "eval")[-1]["logps_eval/chosen"]
    assert read_metrics(tmp_path / "further", "eval")[0]["logps_eval/chosen"] == pytest.approx(trained, rel=1e-6)
    assert not (tmp_path / "further" / "LATEST" / "hf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["FSDPTrainer", "TensorParallelTrainer"])
def test_several_processes_export_once(trainer, command, run_dir):
    several = ("world_size=2", "eval_batch_size=8", "n_eval_examples=8", "n_examples=8", "do_first_eval=false")
    result = succeeded(train(*command("run", f"trainer={trainer}", *several)))
    assert result.stdout.count("exported ") == 1
    assert same_as_checkpoint(run_dir, run_dir / "LATEST" / "hf")


def test_the_card_of_an_adapter_loads_what_was_trained_as_it_is_written(run, run_dir):
    """Its base's own config says float32: the run had it in bfloat16."""
    run("run", "lora=lora", "lr=1e-2", "model.policy_dtype=bfloat16", "model.reference_dtype=null", "n_examples=8")
    config, checkpoint = OmegaConf.load(run_dir / "config.yaml"), run_dir / "LATEST"
    plan = resolve(config)
    trained = load_policy(model_loaders(plan)[0], plan, checkpoint)

    loaded = run_card(checkpoint / "hf")

    assert loaded["tokenizer"].get_vocab()
    with torch.no_grad():
        ours, theirs = trained.eval()(IDS).logits, loaded["model"].eval()(IDS).logits
        base = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
        trained_difference = (base.eval()(IDS).logits - ours).abs().max()
        # PEFT scales the product after rounding it to bfloat16, and training before that
        assert (theirs - ours).abs().max() < 0.05 * trained_difference
    with refused(r"hf is an adapter: set model\.archive to it, with lora=lora"):
        run("again", f"model.name_or_path={checkpoint}/hf")


def test_an_export_that_fails_costs_nothing_else(run, run_dir, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("dpo.models.export.save_torch_state_dict", fail)
    run("run", "n_examples=8")
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: the run is complete")]
    assert "its export failed: " in line
    assert "the disk is full" in line
    check_complete(run_dir / "LATEST")
    assert {path.suffix for path in (run_dir / "LATEST").iterdir()} == {".pt", ".json"}
