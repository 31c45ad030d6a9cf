"""Processes that might differ, on several machines or by what rank 0 alone reads, agree or are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support.models import build, save_reward_model
from support.runs import GOLDEN, assert_alike, compose, small_run, train
from support.warm import launch

import train as main
from dpo.errors import InputError
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute
from dpo.settings.plan import ParallelDims

SHARDED = ("trainer=FSDPTrainer", "world_size=2", "collective_timeout_secs=60")
SPLIT = ("trainer=TensorParallelTrainer", "world_size=2", "collective_timeout_secs=60")


# --- a head of its own in the file, which the config ties ------------------------------------------------------------


@pytest.fixture
def tied(tmp_path) -> Path:
    """The tiny Llama, whose head and embeddings differ, with a config that ties them."""
    folder = shutil.copytree(GOLDEN / "tiny-llama", tmp_path / "tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


RESUMED = ("n_examples=12", "resume=auto")


@pytest.mark.parametrize(
    ("trainer", "parts"),
    [
        (SHARDED, [()]),
        pytest.param(SHARDED, [(), RESUMED], marks=pytest.mark.slow),
        pytest.param(SPLIT, [(), RESUMED], marks=pytest.mark.slow),
    ],
    ids=("FSDP", "FSDP resumed", "TP resumed"),
)
def test_a_head_that_the_config_ties_and_the_file_has_trains_the_same_on_several_processes(
    trainer, parts, tied, run, command, tmp_path
):
    settings = (f"model.name_or_path={tied}", "n_examples=8", "eval_every=4")
    for more in parts:
        run("one", *settings, *more)
        several = train(*command("two", *settings, *trainer, *more))
        assert several.returncode == 0, several.stderr
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal", "archive"])
def test_such_a_head_that_equals_the_embeddings_or_is_in_an_archive(case, tied, run, command, tmp_path):
    settings = [f"model.name_or_path={tied}", "n_examples=8"]
    if case == "equal":
        weights = load_file(tied / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    else:
        run("sft", *settings, "loss=sft")
        settings.append(f"model.archive={tmp_path / 'sft'}")
    run("one", *settings)
    several = train(*command("two", *settings, *SHARDED))
    assert several.returncode == 0, several.stderr
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
def refuse(rows, tmp_path):
    """What two machines are refused for, before the first update."""

    def refuse(*settings: str, **of_rank_1: Any) -> str:
        config = compose(*small_run(rows, tmp_path / "run", *SHARDED, *settings))
        with pytest.raises(InputError) as raised:
            launch(start_run, 2, config, tmp_path, of_rank_1, process_group=True, timeout_secs=60)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return str(raised.value)

    return refuse


def write_on_both(folder: Path, name: str, *texts: str) -> None:
    for rank, text in enumerate(texts):
        (folder / str(rank)).mkdir(exist_ok=True)
        (folder / str(rank) / name).write_text(text)


LOSS = """
import torch
from dpo.losses import Losses
from dpo.plugins import add_loss

add_loss("mine", lambda scores: Losses({}torch.tanh(scores.chosen - scores.rejected)))
"""


def test_machines_with_other_code_of_a_plugin_or_another_setting_are_refused(refuse, tmp_path):
    write_on_both(tmp_path, "my.py", LOSS.format(""), LOSS.format("-"))
    said = refuse("plugins=[HERE/my.py]", lr=1e-4)
    assert re.match("rank 1 on .* and rank 0 on .* differ in lr, the code of plugins: give all machines the same", said)


def test_machines_with_other_weights_of_a_reward_model_are_refused(refuse, tokenizer, tmp_path):
    for rank in range(2):
        save_reward_model(tmp_path / str(rank) / "rm", "llama", tokenizer)
    file = tmp_path / "1" / "rm" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"][0, 0] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    settings = ("online=online", "online.scorer=reward_model", "online.max_new_tokens=4", "max_length=44")
    said = refuse(*settings, "online.reward_model=HERE/rm")
    assert re.search("rank 1 on .* differ in online.reward_model: give all", said)


@pytest.mark.slow
def test_machines_with_another_scoring_function_are_refused(refuse, tmp_path):
    write_on_both(tmp_path, "judge.py", *(f"def score(prompts, answers): return [{n}] * len(answers)" for n in (1, 2)))
    settings = ("online=online", "online.scorer=function", "online.max_new_tokens=4", "max_length=44")
    assert "differ in online.function: give all" in refuse(*settings, "online.function=HERE/judge.py:score")


@pytest.mark.slow
def test_machines_with_the_same_files_in_other_places_train(rows, tokenizer, tmp_path):
    write_on_both(tmp_path, "my.py", LOSS.format(""), LOSS.format(""))
    for rank in range(2):
        save_reward_model(tmp_path / str(rank) / "rm", "llama", tokenizer)
    settings = ("online=online", "online.scorer=reward_model", "online.max_new_tokens=4", "max_length=44")
    places = ("plugins=[HERE/my.py]", "online.reward_model=HERE/rm", "n_examples=8")
    config = compose(*small_run(rows, tmp_path / "run", *SHARDED, *settings, *places))
    launch(start_run, 2, config, tmp_path, {}, process_group=True, timeout_secs=60)
    assert (tmp_path / "run" / "LATEST").exists()


def distribute_unlike(rank: int, world_size: int) -> None:
    model = build("llama, tied" if rank else "llama")
    distribute(model, Mesh(rank, ParallelDims(2, 2)), block_name=None, compute_dtype=torch.float32)


def test_models_of_another_structure_are_refused_before_their_weights_are_sent():
    with pytest.raises(InputError, match=r"rank 1 on .* differ in the weight lm_head.weight: give all machines"):
        launch(distribute_unlike, 2, process_group=True, timeout_secs=60)
