"""Memory is predicted from shapes, and running out of it is answered with what would help."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import runs
from support.models import save_reward_model
from support.pytests import refused, sampled, slow, succeeded
from support.runs import TINY, small_run, train
from support.tracked import Tracker
from support.warm import launch

from dpo.data.preflight import load_data
from dpo.models.layouts import Padded
from dpo.parallel.sharding import local_tensor
from dpo.settings.keys import STEPS_OF_LR
from dpo.settings.plan import resolve
from dpo.training import memory
from dpo.training.memory import decide_frozen_weights, predict
from dpo.training.optimization import OPTIMIZERS, count_states, make_optimizer
from dpo.training.parts import agree_on_frozen_weights
from trainers import Trainer

PARAMETERS = 282_048  # of the tiny Llama
ROOT_UNIT = 2 * 1024 * 64 + 64  # embeddings, head and last norm
BLOCK = (PARAMETERS - ROOT_UNIT) // 3
# Its adapter of rank 4 has 3 layers, each with 4 matrices of 64 x 64 and 3 of 64 x 176.
ADAPTER = 4 * 3 * (4 * (64 + 64) + 3 * (64 + 176))
FSDP = "trainer=FSDPTrainer eval_batch_size=8 batch_size=8 gradient_accumulation_steps=2 model.fsdp_policy_mp=bfloat16"
ONLINE = "online=online max_length=48 max_prompt_length=8 online.max_new_tokens=40 online.scorer=shorter"


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch):
    """Libraries take more than models this small."""
    monkeypatch.setattr(memory, "resident_memory", lambda: 0)


@pytest.fixture
def plan_of(rows, run_dir):
    def make(settings: str = "", world_size: int | None = None):
        config = runs.compose(*small_run(rows, run_dir, *settings.split()))
        return resolve(config, world_size=world_size)

    return make


@pytest.fixture
def predict_for(plan_of):
    def find(settings: str = "", world_size: int | None = None):
        plan = plan_of(settings, world_size)
        return predict(plan, load_data(plan, silent=True))[0]

    return find


SHARDED = "trainer=FSDPTrainer world_size=2"
CUT = "trainer=TensorParallelTrainer world_size=2"


def measure_updates(rank: int, world_size: int, config: Any, file: Path) -> None:
    """Write the most bytes that tensors take in updates of rank 0."""
    plan = resolve(config, world_size=world_size)
    trainer = Trainer(plan, load_data(plan, silent=True), None, rank=rank)
    trainer.check_and_score_reference()
    batches = list(trainer.batches.train())
    trainer.train_step(batches[0])  # the first makes the optimizer's state
    models = [model for model in (trainer.policy, trainer.reference_model) if model is not None]
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    held += [value for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    held = [local_tensor(tensor) for tensor in held]
    with Tracker(held) as tracker:
        for batch in batches:
            trainer.train_step(batch)
    if rank == 0:
        file.write_text(str(sum(tensor.nbytes for tensor in held) + tracker.peak))


@pytest.fixture
def assert_predicted(rows, run_dir, tmp_path):
    def assert_it(settings: str, **shape: Any) -> None:
        """Tensors take what is predicted, within 5 %, in updates of a Llama of this shape."""
        transformers.AutoConfig.from_pretrained(TINY, **shape).save_pretrained(tmp_path / "model")
        own = (f"model.name_or_path={tmp_path}/model", f"model.tokenizer_name_or_path={TINY}", "model.random_init=true")
        overrides = ("n_examples=16", "batch_size=8", "gradient_accumulation_steps=2", *own, *settings.split())
        config = runs.compose(*small_run(rows, run_dir, *overrides))
        plan = resolve(config)
        predicted, notes = predict(plan, load_data(plan, silent=True))
        file = tmp_path / "bytes"
        launch(measure_updates, plan.dims.world_size, config, file, process_group=plan.trainer.multi_process)
        assert notes == []
        assert predicted.total() - predicted["fragmentation"] == pytest.approx(int(file.read_text()), rel=0.05)

    return assert_it


@pytest.mark.parametrize(
    "settings",
    [
        "optimizer=AdamW",
        slow("lora=lora lora.r=4"),
        slow("lora=qlora lora.r=4 gradient_accumulation_steps=1"),
        slow("cache_reference_logps=all"),
        slow("layout=padded model.attn_implementation=eager"),
        slow("activation_checkpointing=true optimizer=SGD"),
        slow("model.autocast=bfloat16 gradient_accumulation_steps=1"),
        SHARDED,
        slow(f"{SHARDED} fsdp_reduce_once=true"),
        slow(f"{SHARDED} optimizer=AdamW fsdp_reshard_after_forward=false"),
        slow(f"{SHARDED} model.fsdp_policy_mp=bfloat16 model.attn_implementation=eager gradient_accumulation_steps=1"),
        slow(f"{SHARDED} lora=lora activation_checkpointing=true"),
        slow(f"{SHARDED} lora=qlora"),
        slow("trainer=FSDPTrainer world_size=4 fsdp_shard_size=2 cache_reference_logps=all"),
        slow(f"{CUT} gradient_accumulation_steps=1"),
        slow(f"{CUT} lora=lora lora.r=4 activation_checkpointing=true"),
        slow("trainer=TensorParallelTrainer world_size=4 tensor_parallel_size=2"),
    ],
)
def test_the_prediction_is_within_5_percent_of_what_updates_take(settings, assert_predicted):
    assert_predicted(settings, num_hidden_layers=16, hidden_size=256, intermediate_size=704)


@pytest.mark.slow
def test_a_large_matrix_that_is_head_and_embedding_has_two_gradients_and_their_sum(assert_predicted):
    assert_predicted("", num_hidden_layers=4, hidden_size=128, vocab_size=8192, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("lr=1e-5", {"policy": 4 * PARAMETERS, "gradients": 4 * PARAMETERS, "optimizer": 4 * PARAMETERS}),
        ("optimizer=AdamW cache_reference_logps=all", {"optimizer": 8 * PARAMETERS, "reference": 0}),
        (
            "lora=lora lora.r=4 model.policy_dtype=bfloat16",
            {"policy": 2 * PARAMETERS + 4 * ADAPTER, "gradients": 4 * ADAPTER, "reference": 0},
        ),
        # With two processes, the policy's root and two blocks are gathered in bfloat16; the head has whole gradients.
        (
            FSDP,
            {
                "policy": 4 * PARAMETERS / 2,
                "reference": 4 * PARAMETERS / 2,
                "gathered": 2 * ROOT_UNIT,
                "gathered_blocks": 2 * 2 * BLOCK,
                "head_gradient": 2 * 1024 * 64,
            },
        ),
        (
            f"{FSDP} lora=lora lora.r=4 fsdp_frozen_weights=whole fsdp_reduce_dtype=bfloat16",
            {
                "policy": 2 * PARAMETERS + 4 * ADAPTER / 2,
                "gathered_blocks": 2 * 2 * ADAPTER / 3,
                "head_gradient": 0,
            },
        ),
    ],
)
def test_the_memory_that_is_held_follows_from_numbers_of_parameters(settings, expected, predict_for):
    found = predict_for(
        f"model.reference_dtype=float32 gradient_accumulation_steps=2 {settings}", 2 if "FSDP" in settings else 1
    )
    assert {purpose: found[purpose] for purpose in expected} == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", sampled(zip(OPTIMIZERS), 3))
def test_the_state_of_an_optimizer_is_counted_in_values_per_weight(name, plan_of):
    training = plan_of().training._replace(optimizer=name, optimizer_args={})
    parameter = torch.nn.Parameter(torch.zeros(256, 256))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(training, torch.nn.ParameterList([parameter]))
    optimizer.step()
    n_values = sum(value.numel() for value in optimizer.state[parameter].values() if torch.is_tensor(value))
    counted = f"count_states of dpo/training/optimization.py counts {count_states(training)} values of {name}"
    assert n_values / parameter.numel() == pytest.approx(count_states(training), abs=0.02), counted


def test_every_optimizer_is_listed_by_whether_its_steps_are_about_as_large_as_lr():
    lacking = OPTIMIZERS.keys() - STEPS_OF_LR - {"Adadelta", "Adafactor", "Adagrad", "ASGD", "Rprop", "SGD"}
    assert lacking == set(), f"STEPS_OF_LR in dpo/settings/keys.py, or the others in this test, lack {lacking}"


def test_a_model_that_cannot_run_without_data_is_estimated_with_a_sentence(plan_of, monkeypatch):
    plan = plan_of("gradient_accumulation_steps=2")
    data, make_structure = load_data(plan, silent=True), memory.make_policy_structure
    counted = predict(plan, data)[0]["activations"]

    def make_curious(*arguments: Any) -> Any:
        policy = make_structure(*arguments)
        policy.base_model.register_forward_hook(lambda *results: bool(results[-1].last_hidden_state.sum() > 0))
        return policy

    monkeypatch.setattr(memory, "make_policy_structure", make_curious)
    found, [note] = predict(plan, data)
    assert note.startswith("warning: activations are estimated roughly, as the model cannot run here: ")
    assert counted / 3 < found["activations"] < 3 * counted


def test_gpus_keep_no_attention_weights_even_if_values_are_narrower_than_queries(plan_of, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "first_k_dense_replace": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    heads |= {"q_lora_rank": None, "kv_lora_rank": 16, "v_head_dim": 16}
    transformers.DeepseekV3Config(**sizes, **heads, vocab_size=1024).save_pretrained(tmp_path)
    own = f"model.name_or_path={tmp_path} model.tokenizer_name_or_path={TINY} model.random_init=true"
    plan = plan_of(f"{own} batch_size=16")
    data = load_data(plan, silent=True)
    batches = memory.read_batches(plan, data)
    microbatch = memory.find_largest_microbatch(plan, data, batches, Padded())
    on_cpu, on_gpu = (
        memory._run_on_fakes(replace(plan, gpus=n), memory.make_policy_structure(plan), Padded(), microbatch, None)
        for n in (0, 1)
    )
    rows, length = microbatch.inputs.input_ids.shape
    assert on_cpu - on_gpu == 2 * 8 * rows * length**2 * 4  # in 2 layers, of 8 heads, 4 bytes each


def test_an_online_run_has_the_longest_answers_and_a_reward_model(predict_for, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", "llama", tokenizer)
    short, long = (predict_for(f"{ONLINE} online.max_new_tokens={n}") for n in (10, 40))
    assert 2 < long["activations"] / short["activations"] < 6
    scored = predict_for(f"{ONLINE} online.scorer=reward_model online.reward_model={folder}")
    assert scored["scorer"] == pytest.approx(os.path.getsize(f"{folder}/model.safetensors"), rel=2e-2)


def test_frozen_weights_are_whole_on_gpus_of_which_half_stays_free(plan_of, monkeypatch):
    monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: 2)
    plan = plan_of(FSDP, 2)
    held = memory.find_peak(plan, memory.count_weight_memory(plan, memory.make_policy_structure(plan), "whole")).total()
    for available, expected in ((2.01 * held, "whole"), (1.99 * held, "sharded")):
        monkeypatch.setattr(memory, "find_device_memory", lambda *_, size=available, **__: size)
        assert decide_frozen_weights(plan) == expected
        for another_is_full in (False, True):
            mesh = SimpleNamespace(any=lambda here, there=another_is_full: here or there)
            is_whole = agree_on_frozen_weights(plan, mesh, SimpleNamespace(line=print))
            assert is_whole == (expected == "whole" and not another_is_full)
    assert decide_frozen_weights(plan_of(f"{FSDP} loss=sft", 2)) is None  # nothing is frozen


# --- what is printed -------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_run_without_weights_and_writes_nothing(command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    before = sorted(os.listdir(tmp_path))

    result = succeeded(train(*command("run", f"model.name_or_path={model}", "dry_run=true")))

    assert "6 updates of 4 examples will run" in result.stdout
    for line in ("policy", "optimizer", "reference", "activations", "total"):
        assert re.search(rf"^ *{line} +[\d.]+ GB", result.stdout, re.MULTILINE), line
    assert sorted(os.listdir(tmp_path)) == before


def test_a_dry_run_refuses_what_a_run_would_and_writes_nothing(run, run_dir, tmp_path):
    run("run", "n_examples=8")
    torch.save({"state": {"transformer.wte.weight": torch.zeros(2, 2)}}, tmp_path / "policy.pt")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name, override, message in (
        ("new", "resume=/nowhere", "resume=/nowhere finds no complete checkpoint"),
        ("new", f"model.archive={tmp_path}/policy.pt", "policy.pt.*transformer.wte.weight"),
    ):
        with refused(message):
            run(name, "dry_run=true", override)
    run("fork", "dry_run=true", f"resume={run_dir}/step-8")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
