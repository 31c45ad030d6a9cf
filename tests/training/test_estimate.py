"""Collectives and operations that are counted on fake tensors are those of a real update."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.pytests import slow
from support.runs import TINY, compose, small_run
from support.warm import launch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dpo.data.preflight import load_data
from dpo.parallel import mesh
from dpo.parallel.mesh import CollectiveCounter
from dpo.settings.plan import resolve
from dpo.training.estimate import RATES, Estimator
from dpo.training.memory import decide_frozen_weights
from trainers import Trainer

H100_BYTES = RATES["h100"].memory_gb * 1e9
FSDP = "trainer=FSDPTrainer world_size=2"
HYBRID = "trainer=FSDPTrainer world_size=4 fsdp_shard_size=2 gradient_accumulation_steps=2"
CUT = "trainer=TensorParallelTrainer world_size=2 activation_checkpointing=true"
BOTH = "trainer=TensorParallelTrainer world_size=4 tensor_parallel_size=2 model.fsdp_policy_mp=bfloat16"
WAYS = [
    FSDP,
    slow(f"{FSDP} layout=padded fsdp_reduce_once=true fsdp_reshard_after_forward=false"),
    slow(HYBRID),
    slow(CUT),
    slow(BOTH),
    slow(f"{FSDP} lora=lora"),
    slow(f"{FSDP} lora=qlora"),
    slow(f"{FSDP} cache_reference_logps=all"),
    slow(f"{CUT} lora=lora lora.reference=model"),
    slow(f"{FSDP} loss=kto unpair=true"),
    slow(f"{CUT} loss=aot loss.beta=0.1"),
]


@pytest.fixture
def resolve_settings(rows, run_dir):
    """The config of a small run with these settings."""
    return lambda settings: compose(*small_run(rows, run_dir, "batch_size=8", "debug=true", *settings.split()))


def count_in_a_run(rank: int, world_size: int, config: Any, file: Path) -> None:
    plan = resolve(config, world_size=world_size)
    trainer = Trainer(plan, load_data(plan, silent=True), None, rank=rank)
    if plan.caches_all_reference_logps:
        trainer.objective.cache_reference(trainer.batches.train(), folder=str(file.parent))
    batch = next(trainer.batches.train())
    counter, flops = CollectiveCounter(trainer.mesh), FlopCounterMode(display=False)
    with counter, flops, sdpa_kernel(SDPBackend.MATH):
        trainer.train_step(batch)
    if rank == 0:
        file.write_text(json.dumps([counter.calls, counter.n_bytes, flops.get_total_flops()]))


def test_a_run_starts_without_private_names_of_torch_that_it_does_not_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    runpy.run_path(mesh.__file__)


@pytest.mark.parametrize("settings", WAYS)
def test_an_updates_collectives_and_operations_are_those_of_a_run(settings, resolve_settings, tmp_path):
    config = resolve_settings(settings)
    plan = resolve(config)
    launch(count_in_a_run, plan.dims.world_size, config, tmp_path / "counted", process_group=True)
    calls, n_bytes, flops = json.loads((tmp_path / "counted").read_text())
    data = load_data(plan, silent=True)
    estimator = Estimator(plan, data, RATES["h100"])
    estimator.batches = estimator.batches[:1]
    work = estimator.estimate_work(plan, decide_frozen_weights(plan, H100_BYTES))
    assert work.calls == calls
    assert work.n_bytes == n_bytes
    # In bfloat16 a CPU has its own attention, which computes parts twice.
    assert work.flops == pytest.approx(flops, rel=0.1 if "bfloat16" in settings else 1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        FSDP,
        slow(BOTH),
        slow(f"{FSDP} activation_checkpointing=true lora=lora"),
        slow(f"{FSDP} model.attn_implementation=varlen model.fsdp_policy_mp=bfloat16"),
    ],
)
def test_blocks_that_are_alike_cost_alike(settings, resolve_settings, tmp_path):
    transformers.AutoConfig.from_pretrained(TINY, num_hidden_layers=8).save_pretrained(tmp_path / "model")
    own = f"model.name_or_path={tmp_path}/model model.tokenizer_name_or_path={TINY} model.random_init=true"
    plan = resolve(resolve_settings(f"{settings} {own}"))
    data = load_data(plan, silent=True)
    found = Estimator(plan, data, RATES["h100"])
    assert found.block_counts == [2, 4]
    whole = Estimator(plan, data, RATES["h100"])
    whole.block_counts = [8]
    frozen = decide_frozen_weights(plan, H100_BYTES)
    assert found.estimate_work(plan, frozen) == whole.estimate_work(plan, frozen)
    memory, _ = found.estimate_memory(plan, frozen)
    assert memory == pytest.approx(whole.estimate_memory(plan, frozen)[0], rel=0.05)
