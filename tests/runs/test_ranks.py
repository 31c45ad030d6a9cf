"""Processes that might differ, on several machines or by what rank 0 alone reads, agree or are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support.models import build, save_reward_model
from support.pytests import refused, slow, succeeded
from support.runs import TINY, assert_alike, change_json, compose, small_run, train
from support.warm import launch

import train as main
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute
from dpo.settings.plan import ParallelDims

SHARDED = ("trainer=FSDPTrainer", "world_size=2", "collective_timeout_secs=60")
SPLIT = ("trainer=TensorParallelTrainer", "world_size=2", "collective_timeout_secs=60")
SLOW = pytest.mark.slow


# --- a head of its own in the file, which the config ties ------------------------------------------------------------


@pytest.fixture
def tied(tmp_path) -> Path:
    """The tiny Llama, whose head and embeddings differ, with a config that ties them."""
    folder = shutil.copytree(TINY, tmp_path / "tied")
    change_json(folder / "config.json", tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize("several", [SHARDED, slow(SPLIT)], ids=("FSDP", "TP"))
def test_a_head_that_the_config_ties_and_the_file_has_trains_the_same_on_several_processes(
    several, tied, run, command, tmp_path
):
    settings = (f"model.name_or_path={tied}", "n_examples=8", "eval_every=8")
    starts = ((), ("n_examples=12", "resume=auto")) if several == SPLIT else ((),)
    for more in starts:
        run("one", *settings, *more)
        succeeded(train(*command("two", *settings, *several, *more)))
    assert_alike(tmp_path / "one", tmp_path / "two")


@SLOW
def test_such_a_head_may_be_in_an_archive(tied, run, command, tmp_path):
    run("sft", f"model.name_or_path={tied}", "loss=sft", "n_examples=8")
    settings = (f"model.name_or_path={tied}", f"model.archive={tmp_path / 'sft'}", "n_examples=8")
    run("one", *settings)
    assert train(*command("two", *settings, *SHARDED)).returncode == 0
    assert_alike(tmp_path / "one", tmp_path / "two")


# --- two machines ----------------------------------------------------------------------------------------------------


def start_run(rank: int, world_size: int, config: Any, folder: Path, of_rank_1: dict[str, Any]) -> None:
    """A run on a machine of its own, on which HERE in a path is another directory."""
    text = json.dumps(OmegaConf.to_container(config)).replace("HERE", str(folder / str(rank)))
    plan = main.resolve(json.loads(text), with_plugins=True)
    for key, value in of_rank_1.items() if rank else ():
        plan = plan.change(key, value)
    main.work(rank, world_size, plan)


@pytest.fixture
def start(rows, tokenizer, run_dir, tmp_path):
    """Start two machines with files alike but for one, if that is named, of rank 1."""

    def start(*settings: str, changed: str = "", **of_rank_1: Any) -> None:
        for rank in range(2):
            folder = Path(save_reward_model(tmp_path / str(rank), "llama", tokenizer))
            (folder / "my.py").write_text(PLUGIN)
        file = tmp_path / "1" / changed
        if changed.endswith(".safetensors"):
            weights = load_file(file)
            weights["score.weight"] += 1e-3
            save_file(weights, file, metadata={"format": "pt"})
        elif changed:
            file.write_text(file.read_text().replace("[0]", "[1]").replace("1e-06", "0.1"))
        config = compose(*small_run(rows, run_dir, *SHARDED, "n_examples=8", *settings))
        launch(start_run, 2, config, tmp_path, of_rank_1, process_group=True, timeout_secs=60)

    return start


PLUGIN = (
    "import dpo.plugins\ndpo.plugins.add_reader('mine', dict)\ndef score(prompts, answers): return [0] * len(answers)"
)
ONLINE = ("online=online", "online.max_new_tokens=4", "max_length=44")
SCORED = (*ONLINE, "online.scorer=function", "online.function=HERE/my.py:score")
REWARDED = (*ONLINE, "online.scorer=reward_model", "online.reward_model=HERE")


def test_machines_with_other_code_of_a_plugin_or_another_setting_are_refused(start, run_dir):
    with refused(r"^rank 1 on .* and rank 0 on .* differ in lr, the code of plugins: use the same files"):
        start("plugins=[HERE/my.py]", changed="my.py", lr=1e-4)
    assert not (run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "changed", "named"),
    [
        (["model.name_or_path=HERE"], "config.json", "the model's config.json"),
        (REWARDED, "model.safetensors", "online.reward_model"),
        slow(SCORED, "my.py", "online.function"),
    ],
)
def test_machines_with_another_model_or_scorer_are_refused(settings, changed, named, start, run_dir):
    with refused(rf"rank 1 on .* differ in {named}: use the same files"):
        start(*settings, changed=changed)
    assert not (run_dir / "metrics.jsonl").exists()


@SLOW
def test_machines_with_the_same_files_in_other_places_train(start, run_dir):
    start("plugins=[HERE/my.py]", *REWARDED)
    assert (run_dir / "LATEST").exists()


def distribute_unlike(rank: int, world_size: int) -> None:
    model = build("llama, tied" if rank else "llama")
    distribute(model, Mesh(rank, ParallelDims(2, 2)), block_name=None, compute_dtype=torch.float32)


def test_models_of_another_structure_are_refused_before_their_weights_are_sent():
    with refused(r"rank 1 on .* differ in the weight lm_head.weight: use the same files"):
        launch(distribute_unlike, 2, process_group=True, timeout_secs=60)
