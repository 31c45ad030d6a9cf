"""Code written for the reference: its names, config and calls."""

import copy
import importlib
import os
import re

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from support.pytests import refused, succeeded
from support.runs import GOLDEN, ROOT, TINY, list_updates, read_code, read_metrics, run_script

import train
from dpo.settings.keys import KEYS, compose_config
from dpo.settings.plan import flatten
from dpo.system.launching import get_open_port
from dpo.system.plain_files import read_yaml
from preference_datasets import get_batch_iterator
from trainers import BasicTrainer

PAGE = ROOT / "docs" / "porting.md"


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path):
    code = read_code(PAGE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo" / "demo_model").symlink_to(ROOT / "dpo" / "demo_model")
    result = succeeded(run_script("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)))

    assert re.search(r"chosen: \(4, \d+\) labels: torch\.int64", result.stdout)
    run = tmp_path / "ported-run"
    assert list_updates(run) == [4, 8, 12, 16]
    assert (run / "step-8" / "policy.pt").exists()
    assert os.readlink(run / "LATEST") == "step-16"


def test_every_name_of_the_page_is_there():
    [table] = re.findall(r"\| module \| names \|\n.*?\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    for row in table.splitlines():
        names = re.findall(r"`(\w+)`", row)
        holder = BasicTrainer if "a trainer" in row else importlib.import_module(names.pop(0))
        assert [name for name in names if not callable(getattr(holder, name, None))] == []


CHANGED = {
    "exp_name": "test",
    "datasets": ["demo"],
    "eval_batch_size": 4,
    "n_eval_model_samples": 4,
    "lr": 1e-4,
    "max_length": 96,
    "max_prompt_length": 88,
    "n_examples": 8,
    "n_eval_examples": 4,
    "warmup_steps": 0,
    "eval_every": 8,
    "sample_during_eval": False,
    "local_dirs": [".cache"],
    "loss": {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False},
}


def reference_config(**changes: object) -> dict:
    """The keys of the reference's own config, and no others."""
    config = read_yaml(GOLDEN / "reference_config.yaml")
    config["model"] |= {"name_or_path": str(TINY), "reference_dtype": "float32"}
    config["wandb"]["enabled"] = False
    return config | CHANGED | changes


def test_the_references_config_trains_into_a_directory_that_is_made(tiny_llama, tmp_path):
    run_dir = tmp_path / "not" / "there"
    config = OmegaConf.create(reference_config())
    OmegaConf.set_struct(config, True)
    trainer = BasicTrainer(copy.deepcopy(tiny_llama), config, 0, str(run_dir), copy.deepcopy(tiny_llama), 0, 1)
    assert run_dir.is_dir()
    with refused("loss=dpo needs a reference model"):
        BasicTrainer(tiny_llama, config, 0, run_dir)
    trainer.train()
    assert list_updates(run_dir) == [4, 8]
    assert trainer.config.local_run_dir == str(run_dir)
    composed = set(flatten(OmegaConf.create(compose_config(loss="dpo"))))
    assert set(flatten(trainer.config)) == composed <= KEYS.keys() | {"dataset_sources"}


def test_a_trainer_can_save_before_it_trains(tiny_llama, run_dir):
    loggers = {"wandb": {"enabled": True}, "tensorboard": {"enabled": True}}
    config = OmegaConf.create(reference_config(**loggers))
    BasicTrainer(copy.deepcopy(tiny_llama), config, 0, run_dir, tiny_llama).save()
    assert (run_dir / "LATEST" / "policy.pt").is_file()


# --- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_pad_token_pads_with_eos():
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = None
    batch = next(get_batch_iterator(["demo"], tokenizer, batch_size=4, n_epochs=1, max_length=96, silent=True))
    ids, mask = batch["chosen_input_ids"], batch["chosen_attention_mask"]
    assert (ids.dtype, ids.shape[0]) == (torch.int64, 4)
    assert (mask == 0).any()
    assert (ids[mask == 0] == tokenizer.eos_token_id).all()


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loss", {"name": "foo"}, "loss.name=foo must be one of sft, dpo"),
        ("loss", {"name": "dpo"}, "loss.beta is not set: set loss.beta=VALUE"),
        ("model", None, "model.name_or_path is not set: set model="),
    ],
)
def test_what_a_ported_config_must_have_is_named(key, value, message, tiny_llama, run_dir):
    config = reference_config()
    config.pop(key, None)
    if value is not None:
        config[key] = value
    with refused(message):
        BasicTrainer(tiny_llama, OmegaConf.create(config), 0, run_dir, tiny_llama)


# --- worker_main ---------------------------------------------------------------------------------------------------


def test_worker_main_refuses_what_cannot_run(tiny_llama):
    config = OmegaConf.create(reference_config(lr=-1, optimizer="AdmW"))
    with refused(r"lr=-1 must be a number above 0; optimizer=AdmW: did you mean AdamW"):
        train.worker_main(0, 1, config, tiny_llama, tiny_llama)
    config = OmegaConf.create(reference_config(trainer="FSDPTrainer"))
    with refused("fsdp_port is null"):
        train.worker_main(0, 2, config, tiny_llama, tiny_llama)


SPAWN = """
import copy, sys, torch
from omegaconf import OmegaConf
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_model
from train import worker_main
if __name__ == "__main__":
    config = OmegaConf.load(sys.argv[1])
    policy = load_model(ModelPath(config.model.name_or_path), dtype=torch.float32, attn_implementation="sdpa")
    torch.multiprocessing.spawn(worker_main, nprocs=2, args=(2, config, policy, copy.deepcopy(policy)))
"""


@pytest.mark.slow
def test_two_processes_that_are_spawned_meet_and_give_the_numbers_of_one(tiny_llama, run_dir, tmp_path):
    one = OmegaConf.create(reference_config(local_run_dir=str(tmp_path / "one")))
    train.worker_main(0, 1, one, copy.deepcopy(tiny_llama), copy.deepcopy(tiny_llama))
    two = reference_config(trainer="FSDPTrainer", fsdp_port=get_open_port(), local_dirs=[str(tmp_path)])
    OmegaConf.save(OmegaConf.create(two), tmp_path / "config.yaml")
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    succeeded(run_script(str(script), str(tmp_path / "config.yaml"), PYTHONPATH=str(ROOT), LOGNAME="me"))
    [run_dir] = (tmp_path / "me").glob("test_*")
    losses = [[line["loss/train"] for line in read_metrics(where, "train")] for where in (tmp_path / "one", run_dir)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
