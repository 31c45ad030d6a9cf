"""A complete run leaves its policy as a model of transformers, and loses nothing if that fails."""

from __future__ import annotations

import re
import shutil
import signal

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from support.faults import Run
from support.runs import GOLDEN, read_metrics, run_script, small_run, train

from dpo.checkpoint.files import check_complete
from dpo.data.tokenizer import load_tokenizer
from dpo.models.loading import load_policy, model_loaders
from dpo.models.pretrained import load_model
from dpo.settings.files import with_defaults
from dpo.settings.plan import resolve
from dpo.system.signals import Stopped
from train import export_last

IDS = torch.arange(20).view(2, 10)


def same_as_checkpoint(run_dir, folder) -> bool:
    ours = load_model(str(GOLDEN / "tiny-llama"), dtype=torch.float32, archive=str(run_dir), attn_implementation="sdpa")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return torch.equal(ours.eval()(IDS).logits, theirs.eval()(IDS).logits)


def test_a_run_is_exported_verified_and_trained_further(command, tmp_path):
    result = train(*command("run"))
    run_dir = tmp_path / "run"
    assert result.returncode == 0, result.stderr
    assert f"exported {run_dir}/step-24/hf" in result.stdout
    assert same_as_checkpoint(run_dir, run_dir / "LATEST" / "hf")
    check_complete(run_dir / "step-24")
    assert [path.name for path in run_dir.glob("step-*/hf")] == ["hf"]

    shutil.rmtree(run_dir / "LATEST" / "hf")  # it comes back, and nothing is trained
    again = train(*command("run", "resume=auto"))
    assert "already complete" in again.stdout
    assert same_as_checkpoint(run_dir, run_dir / "LATEST" / "hf")
    assert f"exported {run_dir}" not in train(*command("run", "resume=auto")).stdout

    further = train(*command("further", f"model.name_or_path={run_dir}/LATEST/hf", "export=false"))
    assert further.returncode == 0, further.stderr
    trained = read_metrics(run_dir, "eval")[-1]["logps_eval/chosen"]
    assert read_metrics(tmp_path / "further", "eval")[0]["logps_eval/chosen"] == pytest.approx(trained, rel=1e-6)
    assert not (tmp_path / "further" / "LATEST" / "hf").exists()
    assert load_tokenizer(str(run_dir / "LATEST" / "hf")).get_vocab()


@pytest.mark.parametrize("trainer", ["FSDPTrainer", pytest.param("TensorParallelTrainer", marks=pytest.mark.slow)])
def test_several_processes_export_once(trainer, command, tmp_path):
    result = train(*command("run", f"trainer={trainer}", "world_size=2", "eval_batch_size=8", "n_eval_examples=8"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exported ") == 1
    assert same_as_checkpoint(tmp_path / "run", tmp_path / "run" / "LATEST" / "hf")


def test_a_run_of_an_adapter_is_exported_as_peft_loads_it_and_merged_by_hand(command, tmp_path):
    run_dir = tmp_path / "run"
    result = train(*command("run", "lora=lora", "model.reference_dtype=null"))
    assert result.returncode == 0, result.stderr
    assert f"exported {run_dir}/step-24/hf" in result.stdout
    assert "warning" not in result.stderr
    check_complete(run_dir / "step-24")

    merged = run_script("-m", "scripts.export", str(run_dir), str(tmp_path / "merged"), "--merge")

    assert (merged.returncode, merged.stdout) == (0, f"exported {tmp_path}/merged\n")
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        with_adapter, whole, base = (
            load(place).eval()(IDS).logits
            for place in (run_dir / "LATEST" / "hf", tmp_path / "merged", GOLDEN / "tiny-llama")
        )
    torch.testing.assert_close(whole, with_adapter, rtol=0, atol=1e-5)
    assert (whole - base).abs().max() > 0.1

    again = train(*command("again", f"model.name_or_path={run_dir}/LATEST/hf"))
    assert again.returncode == 2
    assert "hf is an adapter: give it as model.archive with lora=lora" in again.stderr


def test_the_card_of_an_adapter_loads_what_was_trained_as_it_is_written(run, tmp_path):
    """Its base's own config says float32: the run had it in bfloat16."""
    run("run", "lora=lora", "lr=1e-2", "model.policy_dtype=bfloat16", "model.reference_dtype=null", "n_examples=8")
    config, checkpoint = OmegaConf.load(tmp_path / "run" / "config.yaml"), tmp_path / "run" / "LATEST"
    plan = resolve(config)
    trained, _ = load_policy(model_loaders(plan)[0], plan, rank=0, resume_from=checkpoint)

    [snippet] = re.findall(r"```python\n(.*?)```", (checkpoint / "hf" / "README.md").read_text(), re.DOTALL)
    loaded: dict = {}
    exec(snippet.replace("PATH_OR_HUB_ID", str(checkpoint / "hf")), loaded)

    assert loaded["tokenizer"].get_vocab()
    with torch.no_grad():
        ours, theirs = trained.eval()(IDS).logits, loaded["model"].eval()(IDS).logits
        assert torch.equal(theirs, ours)
        base = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny-llama", dtype=torch.bfloat16)
        assert not torch.equal(base.eval()(IDS).logits, ours)


def fail_to_export() -> None:
    """The disk is full when the weights are to be written."""
    import errno

    from transformers import modeling_utils

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    modeling_utils.safe_save_file = full


def test_an_export_that_fails_costs_nothing_else(rows, tmp_path):
    run = Run(small_run(rows, tmp_path / "run"), tmp_path / "log", fail_to_export)
    assert run.wait() == 0
    log = run.log.read_text()
    assert log.count("warning: the run is complete, but not exported:") == 1
    assert "No space left on device" in log
    check_complete(tmp_path / "run" / "LATEST")
    assert {path.suffix for path in (tmp_path / "run" / "LATEST").iterdir()} == {".pt", ".json"}


@pytest.mark.parametrize("error", [KeyError("license"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), MemoryError()])
def test_whatever_fails_in_an_export_is_one_line(error, tmp_path, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "LATEST").mkdir()
    monkeypatch.setattr("dpo.models.export.export", fail)
    export_last(0, resolve(with_defaults({"local_run_dir": str(tmp_path)})))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the run is complete, but not exported: {type(error).__name__}")

    error = Stopped()
    with pytest.raises(Stopped):
        export_last(0, resolve(with_defaults({"local_run_dir": str(tmp_path)})))


def ask_to_stop_at_the_end() -> None:
    import os

    from trainers import BasicTrainer

    clip = BasicTrainer.clip_gradient

    def asking(self: BasicTrainer):
        if self.state.batch_counter == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return clip(self)

    BasicTrainer.clip_gradient = asking


def test_a_run_that_is_stopped_is_not_exported(rows, tmp_path):
    run = Run(small_run(rows, tmp_path / "run"), tmp_path / "log", ask_to_stop_at_the_end)
    assert run.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "run" / "LATEST" / "policy.pt").exists()
    assert not (tmp_path / "run" / "LATEST" / "hf").exists()


def test_the_best_checkpoint_is_exported_by_hand(command, tmp_path):
    run_dir = tmp_path / "run"
    assert train(*command("run", "export=false")).returncode == 0

    result = run_script("-m", "scripts.export", str(run_dir / "BEST"), str(tmp_path / "best"), "--dtype", "bfloat16")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"exported {tmp_path}/best\n"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "best").dtype == torch.bfloat16

    result = run_script("-m", "scripts.export", str(run_dir / "BEST"), str(tmp_path / "best"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/best exists already: remove it, or give another directory\n"
