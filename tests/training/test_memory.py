"""Memory is predicted from shapes, and running out of it is answered with what would help."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support import runs
from support.faults import run_out_of_memory_at, start_run
from support.models import REWARD_MODELS, save_reward_model
from support.runs import GOLDEN, small_run, train
from support.varlen import run_varlen_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dpo.errors import InputError, RunError
from dpo.models.answers import Sampling, answer
from dpo.models.layouts import Padded
from dpo.models.loading import model_loaders
from dpo.models.pretrained import load_model
from dpo.models.scoring import load_scorer
from dpo.settings.plan import resolve
from dpo.training import memory
from dpo.training.memory import (
    Communication,
    LongestBatches,
    count_communication,
    decide_communication,
    explain_out_of_memory,
    find_fewest_steps,
    notes_on_free_memory,
    predict_peak,
    predict_phases,
    suggest_settings,
)
from dpo.training.memory_tracker import MemoryTracker
from preference_datasets import load_data
from trainers import BasicTrainer

PARAMETERS = 282_048  # of the tiny Llama
# of its adapter of rank 4: 3 layers, each with 4 matrices of 64 x 64 and 3 of 64 x 176
ADAPTER = 4 * 3 * (4 * (64 + 64) + 3 * (64 + 176))

KV = 2 * 3 * 64 * 4  # bytes of a token's keys and values: 3 layers
FSDP = ("trainer=FSDPTrainer", "eval_batch_size=8", "batch_size=8")
ONLINE = ("online=online", "max_length=48", "max_prompt_length=8", "online.max_new_tokens=40", "online.scorer=shorter")


class Chain(torch.nn.Module):
    """Two layers of 100 x 100, and a head for 30 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = (torch.nn.Linear(100, n, bias=False) for n in (100, 100, 30))

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


def run_chain(rows: int) -> tuple[MemoryTracker, Chain]:
    chain = Chain()
    with MemoryTracker.of(chain) as tracker:
        hidden = torch.zeros(rows, 100).requires_grad_()
        logits = chain.head(torch.exp(chain.b(torch.exp(chain.a(hidden)))))
        logits.exp().sum().backward()
        del hidden, logits
    return tracker, chain


@pytest.mark.parametrize("rows", [7, 1000])
def test_a_ledger_follows_real_and_fake_tensors_alike(rows):
    real, chain = run_chain(rows)
    with FakeTensorMode():
        fake, fake_chain = run_chain(rows)

    assert real.peak["logits"] == fake.peak["logits"]
    assert abs(real.peak.total() - fake.peak.total()) <= 4 * 100 * 100  # a gradient is copied once more
    for tracker, kept in ((real, chain), (fake, fake_chain)):
        assert +tracker.live == {"gradients": sum(p.nbytes for p in kept.parameters())}


def test_what_is_saved_for_the_backward_pass_is_the_peak():
    with FakeTensorMode():
        peak = run_chain(100_000)[0].peak
    hidden = 4 * 100_000 * 100
    # the input, exp of a and of b are saved, exp of the logits too; one more of each comes and goes
    assert 3 * hidden <= peak["activations"] <= 6 * hidden
    assert peak["logits"] in (4 * 100_000 * 30, 2 * 4 * 100_000 * 30)


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch):
    """Libraries take more than models this small."""
    monkeypatch.setattr(memory, "resident_memory", lambda: 0)


@pytest.fixture
def compose(rows, tmp_path):
    return lambda *overrides: runs.compose(*small_run(rows, tmp_path / "run", *overrides))


def phases_of(config, world_size: int | None = None):
    """The predicted phases, and that of the most memory."""
    plan = resolve(config, world_size=world_size)
    phases = predict_phases(plan, load_data(plan, silent=True))
    return phases, max(phases.values(), key=lambda need: need.total())


def find_update(phases):
    """The predicted peak of an update."""
    return max((phases[phase] for phase in ("backward", "optimizer")), key=lambda need: need.total())


def measure_updates(config) -> int:
    """The bytes of all tensors at the peak of a run's updates."""
    policy, reference = model_loaders(resolve(config))
    trainer = BasicTrainer(policy, config, config.seed, config.local_run_dir, reference)
    trainer.check_and_score_reference()
    batches = list(trainer.train_iterator)
    trainer.train_step(batches[0])  # the first makes the optimizer's state
    models = [model for model in (trainer.policy, trainer.reference_model) if model is not None]
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    held += [value for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    with MemoryTracker(held) as tracker:
        for batch in batches:
            trainer.train_step(batch)
    return sum(tensor.nbytes for tensor in held) + tracker.peak.total()


@pytest.mark.parametrize(
    "settings",
    [
        "optimizer=AdamW loss.wpo=true",
        "lora=lora lora.r=4",
        "gradient_accumulation_steps=1",
        "model.attn_implementation=varlen model.autocast=bfloat16",
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                "loss=sft optimizer=Adafactor model.policy_dtype=bfloat16",
                "loss=simpo model.attn_implementation=sdpa model.autocast=bfloat16",
                "loss.wpo=true layout=padded",
                "optimizer=SGD layout=padded model.reference_dtype=float16 activation_checkpointing=true",
                "cache_reference_logps=all",
                "lora=lora lora.r=4 lora.reference=model model.policy_dtype=bfloat16 layout=padded",
                "lora=qlora lora.r=4",
            )
        ),
    ],
)
def test_the_prediction_is_what_updates_take(settings, compose):
    if "qlora" in settings:
        pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    run_varlen_on_cpu()
    config = compose("n_examples=8", "gradient_accumulation_steps=2", *settings.split())
    predicted, measured = find_update(phases_of(config)[0]), measure_updates(config)
    assert 0.98 < (predicted.total() - predicted["kept"]) / measured < 1.1


@pytest.mark.parametrize(("optimizer", "at_once"), [("RMSprop", True), ("Adafactor", False)])
def test_temporaries_of_an_update_on_a_gpu_are_those_of_all_parameters_unless_it_is_one_by_one(
    optimizer, at_once, compose
):
    plan = replace(resolve(compose(f"optimizer={optimizer}")), gpus=1)
    assert (predict_phases(plan, load_data(plan, silent=True))["optimizer"]["update"] > 0) is at_once


@pytest.mark.slow
def test_processes_share_the_temporaries_of_an_update_on_gpus(compose):
    plans = [replace(resolve(compose(*FSDP), world_size=n), gpus=n) for n in (1, 2)]
    alone, shared = (predict_phases(plan, load_data(plan, silent=True))["optimizer"]["update"] for plan in plans)
    assert shared == pytest.approx(alone / 2, rel=1e-3)
    assert shared > 0


def test_torch_updates_all_shards_at_once_where_it_does_so_with_whole_tensors(monkeypatch, fake_group):
    optimizer = import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    shard = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    for parameter in (torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(shard)):
        _, at_once = optimizer._default_to_fused_or_foreach([parameter], differentiable=False)
        assert at_once


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, ("model.policy_dtype=bfloat16", *ONLINE)),
        (2, (*FSDP, "model.fsdp_policy_mp=float16")),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                (1, ("model.autocast=bfloat16",)),
                (
                    1,
                    (
                        "trainer=TensorParallelTrainer",
                        "tensor_parallel.backend=tensor_parallel",
                        "tensor_parallel_size=2",
                    ),
                ),
                (2, ("trainer=TensorParallelTrainer", *FSDP[1:])),
            )
        ),
    ],
)
@pytest.mark.parametrize("attention", ["flex_attention", pytest.param("flash_attention_2", marks=pytest.mark.slow)])
def test_kernels_that_fake_tensors_cannot_run_are_predicted_as_sdpa(
    attention, world_size, settings, compose, monkeypatch
):
    find_structure = memory.find_policy_structure

    def as_on_a_gpu(*arguments: Any) -> Any:
        policy = find_structure(*arguments)
        policy.config._attn_implementation = attention  # which its package refuses to do on a CPU
        return policy

    # FlashAttention takes no masks of trees
    layout = {"flex_attention": "shared_prefix", "flash_attention_2": "padded"}[attention]
    sdpa = phases_of(compose("model.attn_implementation=sdpa", f"layout={layout}", *settings), world_size)[0]
    monkeypatch.setattr(memory, "find_policy_structure", as_on_a_gpu)
    assert phases_of(compose(*settings), world_size)[0] == sdpa


def test_a_reference_that_scores_all_pairs_first_counts_while_it_does(compose):
    small = ("optimizer=SGD", "model.policy_dtype=bfloat16", "eval_batch_size=8", "n_eval_examples=8")
    needs = {}
    for caching in ("as_needed", "all"):
        _, needs[caching] = phases_of(compose(f"cache_reference_logps={caching}", *small))
    # more than gradients and optimizer, which come after it
    assert needs["all"]["reference"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert needs["all"]["gradients"] == 0
    assert needs["all"].total() < needs["as_needed"].total()


def test_gradients_are_reduced_in_float32_whatever_is_computed_in(compose):
    _, need = phases_of(compose(*FSDP, "model.fsdp_policy_mp=bfloat16"), 2)
    embeddings_and_head = 2 * 1024 * 64 + 64  # the largest unit, with the last norm
    block = (PARAMETERS - embeddings_and_head) // 3
    assert need["reduced"] == 4 * embeddings_and_head
    # the policy's in bfloat16, and the reference's root unit in float32
    assert need["gathered"] == 2 * (embeddings_and_head + 2 * block) + 4 * embeddings_and_head


def test_processes_share_what_they_can(compose):
    (_, alone), (_, shared) = (phases_of(compose(*FSDP), n) for n in (1, 2))

    for name in ("policy", "gradients", "optimizer", "reference"):
        assert shared[name] == pytest.approx(alone[name] / 2, rel=1e-3)
    assert alone["gathered"] == 0 < shared["gathered"] < alone["policy"] + alone["reference"]
    assert shared["activations"] < alone["activations"]


@pytest.mark.parametrize(("reference", "expected"), [("adapter", 4 * ADAPTER), ("model", 4 * PARAMETERS + 4 * ADAPTER)])
def test_a_reference_of_an_adapter_is_a_second_one_or_a_model_with_it(reference, expected, compose, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    _, need = phases_of(compose("lora=lora", "lora.r=4", f"lora.reference={reference}", f"model.archive={tmp_path}"))
    assert need["reference"] == pytest.approx(expected, rel=1e-3)
    assert need["policy"] == pytest.approx(4 * PARAMETERS + 4 * ADAPTER, rel=1e-3)


@pytest.mark.slow
def test_samples_take_at_most_the_rows_of_the_test_split(compose):
    most = compose("sample_during_eval=true", "eval_batch_size=1000000000", "n_eval_examples=1000000000")
    data = load_data(resolve(most), silent=True)
    n = data.report.test.examples
    whole = compose("sample_during_eval=true", f"eval_batch_size={n}", f"n_eval_examples={n}")
    caches = [predict_phases(resolve(config), data)["samples"]["kv_cache"] for config in (most, whole)]
    assert caches[0] == caches[1] > 0


@pytest.mark.slow
def test_the_settings_that_help_most_come_first_with_what_they_leave(compose):
    config = compose(
        "batch_size=16", "n_examples=16", "eval_every=16", "model.name_or_path=" + str(GOLDEN / "tiny-llama")
    )
    found = suggest_settings(resolve(config), load_data(resolve(config), silent=True))

    assert 1 <= len(found) <= 3
    sizes = [float(re.search(r"\(then ([\d.]+) GB per process\)", text)[1]) for text in found]
    assert sizes == sorted(sizes)
    tried = compose("batch_size=16", "n_examples=16", "eval_every=16", "gradient_accumulation_steps=16")
    assert all(
        "gradient_accumulation_steps" not in text
        for text in suggest_settings(resolve(tried), load_data(resolve(tried), silent=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        (("loss=sft",), "lora=lora"),
        (("lora=lora", "lora.reference=model"), "lora.reference=base"),
        (("lora=lora", "lora.reference=model", "model.archive={adapter}"), "lora.reference=adapter"),
        (("lora=lora",), "lora=qlora"),
    ],
)
def test_adapters_are_offered_where_they_help_as_the_command_line_takes_them(overrides, offered, compose, tmp_path):
    if offered == "lora=qlora":
        pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    (tmp_path / "adapter_config.json").write_text("{}")
    settings = [override.format(adapter=tmp_path) for override in overrides]
    config = compose("optimizer=AdamW", "max_length=16", "max_prompt_length=8", "batch_size=1", *settings)
    before = OmegaConf.to_container(config.lora)
    found = suggest_settings(resolve(config), load_data(resolve(config), silent=True))

    assert offered in [text.split(" (")[0] for text in found]
    assert config.lora == before
    resolved = resolve(compose(*settings, offered))
    expected = offered.partition("=")[2] if offered.startswith("lora.reference") else "base"
    assert resolved.reference == (None if "loss=sft" in settings else expected)


@pytest.mark.slow
def test_processes_share_a_frozen_base_and_reduce_the_adapters_gradients_alone(compose):
    (_, alone), (_, shared) = (phases_of(compose(*FSDP, "lora=lora", "lora.r=4"), n) for n in (1, 2))

    for name in ("policy", "gradients", "optimizer"):
        assert shared[name] == pytest.approx(alone[name] / 2, rel=1e-3)
    embeddings_and_head = 2 * 1024 * 64 + 64
    block = (PARAMETERS - embeddings_and_head + ADAPTER) // 3
    assert shared["gathered"] == 4 * (embeddings_and_head + 2 * block)
    assert shared["reduced"] == 4 * ADAPTER // 3  # of a block


# --- what processes gather and reduce --------------------------------------------------------------------------------


@pytest.fixture
def on_gpus(compose, monkeypatch):
    """A plan for two GPUs of so many bytes, and its data."""
    run_passes, known = memory.run_passes, {}

    def run_once(plan, data):  # the passes do not depend on what is communicated
        key = plan.lora is None, plan.compute_dtype
        if key not in known:
            known[key] = run_passes(plan, data)
        return known[key]

    monkeypatch.setattr(memory, "run_passes", run_once)
    monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: 2)

    def make(*overrides, gpu=10**12):
        monkeypatch.setattr(memory, "_find_device_memory", lambda plan: gpu)
        plan = resolve(compose(*FSDP, "gradient_accumulation_steps=2", *overrides))
        return plan, load_data(plan, silent=True)

    return make


def held_and_sent(plan, data):
    """The memory of an update, and what it communicates."""
    return predict_phases(plan, data)["backward"], count_communication(plan)


def test_each_key_of_communication_takes_and_saves_what_it_should(on_gpus):
    plan, data = on_gpus("fsdp_frozen_weights=sharded", "model.fsdp_policy_mp=bfloat16")
    before, sent = held_and_sent(plan, data)
    embeddings_and_head = 2 * 1024 * 64 + 64
    blocks = PARAMETERS - embeddings_and_head
    changes = {}
    for key, value in (
        ("fsdp_frozen_weights", "whole"),
        ("fsdp_reshard_after_forward", False),
        ("fsdp_reduce_once", True),
        ("fsdp_reduce_dtype", "bfloat16"),
    ):
        need, less = held_and_sent(plan.change(key, value), data)
        sizes = {purpose: need[purpose] - before[purpose] for purpose in before | need}
        changes[key] = ({purpose: size for purpose, size in sizes.items() if size}, (sent - less).total())

    half = 1 / 2  # two processes, each of which sends half
    assert changes["fsdp_frozen_weights"] == (
        {"reference": 4 * PARAMETERS * half, "gathered": -4 * embeddings_and_head},
        half * 4 * (embeddings_and_head + 2 * blocks),
    )
    assert changes["fsdp_reshard_after_forward"] == ({"gathered": 2 * blocks // 3}, half * 2 * 2 * blocks)
    assert changes["fsdp_reduce_once"] == ({"reduced": 4 * PARAMETERS}, half * 4 * PARAMETERS)
    assert changes["fsdp_reduce_dtype"] == ({"reduced": -2 * embeddings_and_head}, half * 2 * 2 * PARAMETERS)


def test_a_base_that_is_whole_takes_its_compute_dtype_and_leaves_adapters_to_gather(on_gpus):
    plan, data = on_gpus("lora=lora", "lora.r=4", "model.fsdp_policy_mp=bfloat16", "fsdp_frozen_weights=whole")
    need, sent = held_and_sent(plan, data)
    assert need["policy"] == pytest.approx(2 * PARAMETERS + 4 * ADAPTER / 2, rel=1e-3)
    assert need["gathered"] == 2 * 2 * ADAPTER // 3
    assert sent == {"gathered": 2 * 3 * 2 * ADAPTER // 2, "reduced": 2 * 4 * ADAPTER // 2}


def test_frozen_weights_are_whole_on_gpus_that_have_room_and_the_start_says_so(on_gpus):
    plan, data = on_gpus()
    needs = {
        value: predict_peak(plan.change("fsdp_frozen_weights", value), data).total() for value in ("whole", "sharded")
    }
    assert needs["sharded"] < needs["whole"] == predict_peak(plan, data).total()
    chosen = {}
    for gpu in (10**12, needs["whole"] / 0.84, needs["whole"] / 0.86):
        plan, data = on_gpus(gpu=gpu)
        chosen[gpu] = decide_communication(plan, data)
        assert predict_peak(plan, data).total() == needs[chosen[gpu].frozen_weights]  # also where memory has run out
    assert [choice.frozen_weights for choice in chosen.values()] == ["whole", "whole", "sharded"]
    first, *_, last = (choice.notes[0] for choice in chosen.values())
    assert first.startswith("frozen weights are whole on every GPU: ")
    assert last.startswith("frozen weights are sharded on every GPU: ")
    asked, _ = on_gpus("fsdp_frozen_weights=sharded")
    assert decide_communication(asked, data) == Communication("sharded", [])


@pytest.mark.slow
def test_keys_that_save_communication_are_recommended_while_they_fit(on_gpus, monkeypatch):
    monkeypatch.setattr(memory, "MIN_SAVED_BYTES", 1)
    both = "fsdp_reshard_after_forward=false .* fsdp_reduce_once=true"
    plan, data = on_gpus("fsdp_frozen_weights=whole")
    need = predict_peak(plan, data).total()
    for gpu, expected in (
        (10**12, both),
        ((need + 3 * PARAMETERS) / 0.85, r"less: fsdp_reshard_after_forward=false \([^(]*\)$"),
        (need, None),
    ):
        plan, data = on_gpus("fsdp_frozen_weights=whole", gpu=gpu)
        notes = decide_communication(plan, data).notes
        assert len(notes) == (expected is not None)
        assert expected is None or re.search(expected, notes[0])


def test_a_dry_run_prints_what_is_communicated(on_gpus, capsys):
    memory.print_prediction(*on_gpus())
    sent = (
        r"FSDP sends ([\d.]+) GB from each process in an update, of which gathered weights ([\d.]+), reduced gradients"
    )
    assert re.search(sent + r" [\d.]+ \(frozen weights are whole\)", capsys.readouterr().out)


def test_keys_that_take_memory_are_offered_back_where_it_runs_out(on_gpus, monkeypatch):
    monkeypatch.setattr(memory, "SUGGESTIONS", [row for row in memory.SUGGESTIONS if row[0].startswith("fsdp")])
    monkeypatch.setattr(memory, "MIN_SAVED_SHARE", 0)  # of a tiny model little can be saved
    offered = suggest_settings(*on_gpus("fsdp_reshard_after_forward=false", "fsdp_reduce_once=true"))
    assert {text.split(" (")[0] for text in offered} == {
        "fsdp_frozen_weights=sharded",
        "fsdp_reshard_after_forward=true",
        "fsdp_reduce_once=false",
    }


def test_nothing_is_predicted_where_nothing_is_to_choose(on_gpus, compose, monkeypatch):
    monkeypatch.setattr(memory, "run_passes", None)
    lora = ("lora=lora", "fsdp_reshard_after_forward=false", "fsdp_reduce_once=true", "fsdp_frozen_weights=whole")
    assert decide_communication(*on_gpus(*lora)) == Communication("whole", [])
    monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: 0)
    assert decide_communication(*on_gpus()) == Communication("sharded", [])


def test_a_memory_that_cannot_be_predicted_is_said_and_stops_no_run(on_gpus, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no rule")

    monkeypatch.setattr(memory, "run_passes", fail)
    frozen, [note] = decide_communication(*on_gpus())
    assert frozen == "sharded"
    assert note.startswith("warning: the memory cannot be predicted, so frozen weights are sharded (NotImplementedE")


def test_a_prediction_leaves_random_numbers_alone(compose):
    plan = resolve(compose(*FSDP, "sample_during_eval=true"))
    data, before = load_data(plan, silent=True), torch.get_rng_state()
    predict_peak(plan, data)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_every_process_holds_a_4_bit_base_and_shares_the_rest(compose):
    pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    (_, alone), (phases, shared) = (phases_of(compose(*FSDP, "lora=qlora", "lora.r=4"), n) for n in (1, 2))

    others = 2 * 1024 * 64 + (2 * 3 + 1) * 64  # embeddings, head and norms
    floats = 4 * (others + ADAPTER)
    packed = alone["policy"] - floats
    assert 0.51 < packed / (PARAMETERS - others) < 0.7  # codes of 1 KB weigh in layers as small as these
    assert shared["policy"] == pytest.approx(packed + floats / 2, rel=1e-3)
    assert phases["optimizer"]["gradients"] == pytest.approx(4 * ADAPTER / 2, rel=1e-3)


@pytest.mark.parametrize(("settings", "offered"), [((), "model.autocast"), (FSDP, "model.fsdp_policy_mp")])
def test_products_in_bfloat16_are_offered_by_the_key_that_keeps_no_second_copy(settings, offered, compose, monkeypatch):
    rows = [row for row in memory.SUGGESTIONS if row[0] in ("model.autocast", "model.fsdp_policy_mp")]
    monkeypatch.setattr(memory, "SUGGESTIONS", rows)
    monkeypatch.setattr(memory, "MIN_SAVED_SHARE", -10)  # small as this model is, copies of weights outweigh the rest
    plan = resolve(compose(*settings), world_size=2 if settings else 1)
    [suggestion] = suggest_settings(plan, load_data(plan, silent=True))
    assert suggestion.startswith(f"{offered}=bfloat16 (then ")


# --- online -----------------------------------------------------------------------------------------------------------


def test_a_cache_and_a_reward_model_are_counted(compose, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", "llama", tokenizer)
    plain, _ = phases_of(compose(*ONLINE))
    scored, _ = phases_of(compose(*ONLINE, "online.scorer=reward_model", f"online.reward_model={folder}"))

    rows = 4 * 2
    assert plain["sampling"]["kv_cache"] == rows * (8 + 40 - 1) * KV
    assert plain["sampling"]["logits"] >= 2 * rows * 1024 * 4
    assert (plain["sampling"]["gradients"], plain["backward"]["kv_cache"]) == (0, 0)
    assert "scoring" not in plain
    weights = os.path.getsize(f"{folder}/model.safetensors")
    assert all(need["scorer"] == pytest.approx(weights, rel=2e-2) for need in scored.values())


@pytest.mark.slow
def test_processes_share_rows_and_gather_all_weights(compose):
    config = compose(*ONLINE, *FSDP)
    alone, shared = (phases_of(config, n)[0]["sampling"] for n in (1, 2))
    assert shared["kv_cache"] == alone["kv_cache"] / 2
    assert (alone["gathered"], shared["gathered"]) == (0, 4 * PARAMETERS)
    cut = compose(*ONLINE, *FSDP[1:], "trainer=TensorParallelTrainer")
    assert phases_of(cut, 2)[0]["sampling"]["kv_cache"] == alone["kv_cache"] / 2


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("online.temperature=0.5",), marks=pytest.mark.slow),
        ("online.top_p=0.9",),
    ],
)
def test_the_peak_of_sampling_is_that_of_real_tensors(settings, compose, tokenizer):
    config = compose(*ONLINE, "batch_size=8", "eval_batch_size=8", "online.n_samples=8", *settings)
    attention = config.model.attn_implementation
    model = load_model(config.model.name_or_path, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    online, rows = config.online, 64
    with MemoryTracker.of(model) as tracker:
        sampling = Sampling(40, online.temperature, online.top_p)
        answers = answer(model, tokenizer, [tuple(range(5, 13))] * rows, range(rows), sampling)
    assert max(len(one.tokens) for one in answers) == 40
    found = phases_of(config)[0]["sampling"]
    temporary = sum(found[name] for name in ("activations", "logits", "kv_cache"))
    assert temporary == pytest.approx(tracker.peak.total(), rel=0.1)


@pytest.mark.parametrize(
    ("family", "positions"),
    [*(pytest.param(family, 64, marks=pytest.mark.slow) for family in REWARD_MODELS), ("gpt2", 512)],
)
def test_the_peak_of_scoring_is_that_of_real_tensors(family, positions, compose, tokenizer, tmp_path):
    """Whole prompts are scored, up to the reward model's positions."""
    folder = save_reward_model(tmp_path / "reward", family, tokenizer, template=None, max_position_embeddings=positions)
    config = compose(*ONLINE, "online.scorer=reward_model", f"online.reward_model={folder}")
    real = load_scorer(resolve(config), torch.device("cpu"), rows=4).score
    prompts = load_data(resolve(config), silent=True).train
    longest = 40 + max(len(real.encode(prompts[i], "")["input_ids"]) for i in range(len(prompts)))
    with MemoryTracker((*real.model.parameters(), *real.model.buffers())) as tracker:
        real.forward([{"input_ids": [5] * min(longest, real.limit or longest)}] * 4)
    assert phases_of(config)[0]["scoring"]["activations"] == pytest.approx(tracker.peak.total(), rel=0.15)


def test_microbatches_are_of_prompts_with_the_longest_answers(compose):
    def first(*settings: str):
        plan = resolve(compose(*ONLINE, *settings))
        return next(LongestBatches(plan, load_data(plan, silent=True), Padded(), seed=0).train())

    [microbatch] = first("online.max_new_tokens=36", "max_prompt_length=12").microbatches  # longer ones are cut to that
    assert microbatch.n_tokens == 8 * (12 + 36)
    batch = first("online.max_new_tokens=2", "online.mix_offline=0.5", "max_length=24")
    lengths = sorted(len(response) for example in batch.examples for response in example.responses)
    assert lengths[:4] == [2] * 4 != lengths[4:]


@pytest.mark.slow
def test_smaller_batches_and_shorter_answers_are_offered(compose, monkeypatch):
    online = [
        row for row in memory.SUGGESTIONS if row[0] in ("eval_batch_size", "online.batch_size", "online.max_new_tokens")
    ]
    monkeypatch.setattr(memory, "SUGGESTIONS", online)
    plan = resolve(compose(*ONLINE, "online.n_samples=64", "gradient_accumulation_steps=4"))
    offered = [text.split(" (")[0] for text in suggest_settings(plan, load_data(plan, silent=True))]
    assert sorted(offered) == ["online.batch_size=2", "online.max_new_tokens=20"]


# --- what is printed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "settings", "sizes"),  # answers; batches of a process; rows in one; texts scored at a time
    [
        (1, ("online.n_samples=3",), (30, 3, 12, 4)),
        (2, ("online.n_samples=3",), (30, 3, 6, 2)),
        (1, ("eval_batch_size=64", "online.mix_offline=0.5"), (10, 1, 10, 10)),
        (1, ("eval_batch_size=64", "online.mix_offline=0.5", "online.batch_size=1"), (10, 5, 2, 1)),
    ],
)
def test_answers_are_sampled_in_rounds(world_size, settings, sizes, compose):
    config = compose(*ONLINE, "trainer=FSDPTrainer", "batch_size=10", *settings)
    assert memory.OnlineSizes.of(resolve(config, world_size=world_size)) == sizes


def test_a_dry_run_says_what_drawing_needs(run, capsys, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", "gpt2", tokenizer, template=None, max_position_embeddings=44)
    run("run", "dry_run=true", *ONLINE, "online.scorer=reward_model", f"online.reward_model={folder}")

    said = capsys.readouterr().out
    for line in ("scorer", "backward", "optimizer", "sampling", "scoring"):
        assert re.search(rf"^ *{line} +[\d.]+ GB", said, re.MULTILINE), line
    assert (
        "an update samples 8 answers, of up to 320 tokens in all; each process makes up to 40 forward passes of 8 rows"
    ) in said
    assert "the reward model sees the last 44 tokens of a prompt with its answer" in said


def test_a_dry_run_says_what_would_run_without_weights_and_writes_nothing(command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny-llama", model)
    for weights in (*model.glob("*.safetensors"), *model.glob("*.bin")):
        weights.unlink()
    before = sorted(os.listdir(tmp_path))

    result = train(*command("run", f"model.name_or_path={model}", "dry_run=true"))

    assert result.returncode == 0, result.stderr
    assert "6 updates of 4 examples will run" in result.stdout
    for line in ("policy", "optimizer", "reference", "activations", "total"):
        assert re.search(rf"^ *{line} +[\d.]+ GB", result.stdout, re.MULTILINE), line
    assert sorted(os.listdir(tmp_path)) == before


def test_of_several_processes_one_says_what_a_dry_run_finds(run, tmp_path, monkeypatch, capfd):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        run("run", "trainer=FSDPTrainer", "dry_run=true")
        assert ("total" in capfd.readouterr().out) == (rank == "0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer=TensorParallelTrainer", "world_size=3", "batch_size=3"), "does not divide"),
        (("model.archive=/nowhere",), "model.archive=/nowhere does not exist"),
        pytest.param(
            ("model.attn_implementation=flash_attention_2",),
            "flash_attention_2 needs a GPU and the package flash_attn, which are not available here: use sdpa",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it can be loaded here"),
        ),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(overrides, message, run):
    with pytest.raises(InputError, match=message):
        run("run", "dry_run=true", *overrides)


def test_running_out_of_memory_is_one_sentence_with_what_would_help(command, tmp_path):
    run = start_run(command("run", "batch_size=8"), partial(run_out_of_memory_at, 2))

    assert run.wait() == 1
    said = run.text.splitlines()[-1]
    assert re.search(r"out of memory: a process needs about [\d.]+ GB, and its device has [\d.]+ GB; try \w", said)
    assert "can't allocate memory: you tried to allocate 40000000000000 bytes" in said
    assert (tmp_path / "run" / "step-8" / "manifest.json").exists()


def test_memory_that_ran_out_is_named_even_if_the_prediction_fails(compose, monkeypatch):
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError("no rule for\nfake tensors")

    plan = resolve(compose())
    monkeypatch.setattr(memory, "predict_peak", refuse)
    with (
        pytest.raises(RunError, match=r"out of memory: .*no rule for fake tensors.*\(40 bytes\)") as raised,
        explain_out_of_memory(plan, load_data(plan, silent=True)),
    ):
        raise torch.OutOfMemoryError("40 bytes")
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_dry_run_refuses_parts_of_a_model_as_the_run_would(run, tmp_path):
    torch.save({"state": {"transformer.wte.weight": torch.zeros(2, 2)}}, tmp_path / "policy.pt")
    for override, message in (
        ("model.block_name=Nope", "model.block_name=Nope is not a module class of LlamaForCausalLM"),
        (f"model.archive={tmp_path}/policy.pt", "policy.pt.*transformer.wte.weight"),
    ):
        with pytest.raises(InputError, match=message):
            run("run", "dry_run=true", override)


@pytest.mark.slow
def test_a_dry_run_refuses_directory_and_checkpoint_as_the_run_would(run, command, rows, tmp_path, capsys):
    run("run", "n_examples=8")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    (tmp_path / "file").write_text("")
    for name, overrides, message in (
        ("run", (), "already holds a run"),
        ("new", ("resume=/nowhere",), "resume=/nowhere finds no complete checkpoint"),
        ("run", ("resume=auto", "lr=1e-4"), r"of a run with another config: lr=0.0001 \(was 0.001\)"),
        ("run", ("resume=auto", f"dataset_sources.hh={rows / 'more'}"), "the training data has changed"),
        ("run", (f"resume={tmp_path}/run/step-8", "n_examples=8"), None),
        ("fork", (f"resume={tmp_path}/run/step-8",), None),
        ("file/run", (), "local_run_dir=.*file/run cannot be written: .*Not a directory"),
    ):
        if message is None:
            run(name, "dry_run=true", *overrides)
        else:
            with pytest.raises(InputError, match=message):
                run(name, "dry_run=true", *overrides)
    (tmp_path / "file").unlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("steps", "held", "peak", "fewest"),
    [
        (8, 20, 25, 1),  # 20 + 8 * 5 = 60
        (8, 20, 32, 2),  # 20 + 4 * 12 = 68, which is all that may be filled
        (8, 20, 33, 4),
        (6, 20, 40, 3),  # the fewest, 2, would take 80, and 4 is no divisor
        (8, 40, 75, 8),
        (1, 20, 25, 1),
    ],
)
def test_the_fewest_accumulation_steps_that_fill_no_more_than_85_of_100(steps, held, peak, fewest):
    assert find_fewest_steps(steps, held=held, peak=peak, total=80) == fewest


def test_a_gpu_with_free_memory_is_told_of(monkeypatch, compose):
    plan = resolve(compose("gradient_accumulation_steps=4"))
    assert notes_on_free_memory(plan) == []
    gpu = {"memory_allocated": 20e9, "max_memory_allocated": 32e9}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(memory, "_find_gpu_memory", lambda gpu: 80e9)
    for name, size in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda i, size=size: size)
    [note] = notes_on_free_memory(plan)
    assert note.startswith("32 of 80 GB of GPU memory were used; gradient_accumulation_steps=1 should fit too")
