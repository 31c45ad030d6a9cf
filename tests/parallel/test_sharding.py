"""Several processes, through gloo, give the results of one.

The golden runs are in test_golden.py, failing processes in test_launching.py.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.models import FAMILIES, ROUNDING, build, keep_float64, list_examples, plain_logps, publish
from support.pytests import slow
from support.runs import ROOT, TINY, assert_alike, make_environment, read_json, run_here
from support.trainers import compose
from support.warm import launch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import trainers
from dpo.data.examples import Example
from dpo.models.adapters import POLICY, REFERENCE, adapter_weights, add_adapter, seed_dropout
from dpo.models.layouts import Padded, SharedPrefix
from dpo.models.loading import model_loaders
from dpo.models.paths import ModelPath
from dpo.models.pretrained import checkpoint_activations, load_model, load_structure
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import (
    clip_gradient,
    distribute,
    find_blocks,
    full_state,
    full_tensor,
    gather_part_like,
    local_parameters,
    local_tensor,
    optimizer_state,
    release_gathered,
    step_optimizer,
)
from dpo.settings.keys import NEED_WHOLE_TENSORS
from dpo.settings.plan import ParallelDims, resolve
from dpo.system.launching import get_open_port
from dpo.training.objective import Reference, ReferenceLogps
from dpo.training.optimization import OPTIMIZERS

SHARDED, CUT = ParallelDims(2, shard_size=2), ParallelDims(2, tensor_size=2)
GRIDS = {  # and what the command line says
    "sharded": (SHARDED, ("trainer=FSDPTrainer",)),
    "cut": (CUT, ("trainer=TensorParallelTrainer",)),
    "cut and sharded": (ParallelDims(4, 2, 2), ("trainer=TensorParallelTrainer", "tensor_parallel_size=2")),
    "hybrid": (ParallelDims(4, shard_size=2), ("trainer=FSDPTrainer", "fsdp_shard_size=2")),
}
SLOW = pytest.mark.slow
ALIKE = {  # families that FSDP shards as it shards another: only their tensor parallel plans differ
    "llama, tied",
    "mistral",
    "gemma2",
    "qwen3, norms per head",
    "phi3, fused projections",
    "olmo2, norms over all heads",
    "gpt-neox, sequential residual",
}


# --- the numbers of one process ------------------------------------------------------------------------------------


def adapted(family: str, *, on_meta: bool = False, dropout: float = 0.0):
    """A model with adapters of policy and reference, neither of them zero."""
    model = build(family, on_meta=on_meta)
    generator = torch.Generator().manual_seed(1)
    for name in (REFERENCE, POLICY):
        add_adapter(model, 3, 6, "auto", name=name, dropout=dropout if name == POLICY else 0.0)
        for key, weight in adapter_weights(model, name).items():
            if ".lora_B." in key and not on_meta:
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def compare_with_one_process(
    family: str,
    mesh: Mesh,
    make: Callable = build,
    *,
    recomputes: bool = False,
    frozen_whole: bool = False,
    layouts: tuple = (Padded(), SharedPrefix({"full_attention": None}, max_length=32)),
) -> None:
    examples, whole = list_examples(rows=4), make(family)
    [microbatch] = Padded().split(examples, 1)
    seed_dropout(0)
    chosen, rejected = Padded().forward(whole, microbatch.inputs).logps.sum(-1)
    expected = (chosen - 0.5 * rejected).mean()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters() if p.requires_grad}
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)

    # Only rank 0 has weights, and rotary frequencies that are not persistent.
    model = make(family, on_meta=mesh.rank != 0)
    if recomputes:
        checkpoint_activations(model)
    model = distribute(model, mesh, block_name=None, compute_dtype=torch.float32, frozen_whole=frozen_whole)
    for layout in layouts:
        [microbatch] = layout.split(examples, 1, rank=mesh.data_rank, size=mesh.data_size)
        model.zero_grad()
        seed_dropout(0)
        chosen, rejected = layout.forward(model, microbatch.inputs).logps.sum(-1)
        loss = (chosen - 0.5 * rejected).sum() / len(examples)
        (loss * mesh.data_size).backward()

        assert model.training
        assert torch.allclose(mesh.add(loss.detach()[None] * mesh.counts)[0], expected, rtol=1e-6), family
        for name, parameter in model.named_parameters():
            is_cut = not frozen_whole or mesh.tensor_size > 1 or name in gradients
            assert isinstance(parameter, DTensor) == is_cut, name
            assert torch.equal(full_tensor(parameter.detach()), whole.get_parameter(name)), f"{family} {name}"
            if name not in gradients:
                assert parameter.grad is None, f"{family}: {name} is frozen, and has a gradient"
                continue
            off = (full_tensor(parameter.grad) - gradients[name]).norm() / gradients[name].norm()
            assert off < 1e-5, f"{family}, {type(layout).__name__}: gradient of {name} is off by {off:.1g}"
    assert torch.allclose(clip_gradient(model.parameters(), 1.0), norm, rtol=1e-5), family
    for name in gradients:
        ours, clipped = full_tensor(model.get_parameter(name).grad), whole.get_parameter(name).grad
        assert (ours - clipped).norm() < 1e-5 * clipped.norm(), f"{family} {name}"
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == (whole.get_output_embeddings().weight is whole.get_input_embeddings().weight)
    saved = full_state(model.state_dict())
    if mesh.rank == 0:
        assert all(torch.equal(saved[name], whole.get_parameter(name)) for name, _ in whole.named_parameters()), family


def compare_families(rank: int, world_size: int, dims: ParallelDims, families: list[str]) -> None:
    mesh = Mesh(rank, dims)
    for family in families:
        compare_with_one_process(family, mesh)
    compare_with_one_process("llama", mesh, recomputes=True)


@pytest.mark.parametrize(
    ("mesh", "families"),
    [
        ("cut", ["phi3, fused projections", "gpt2, tied"]),
        slow("sharded", [family for family in FAMILIES if family not in ALIKE]),
        *(slow(mesh, [*FAMILIES]) for mesh in GRIDS if mesh != "sharded"),
    ],
)
def test_loss_and_gradients_are_those_of_one_process_to_1e5(mesh, families):
    dims, _ = GRIDS[mesh]
    launch(compare_families, dims.world_size, dims, families, process_group=True)


def compare_adapted(rank: int, world_size: int, dims: ParallelDims, families: list[str], frozen_whole: bool) -> None:
    mesh = Mesh(rank, dims)
    for family in families:
        compare_with_one_process(family, mesh, adapted, frozen_whole=frozen_whole, recomputes=family == families[0])
        if mesh.data_size == 1:  # other processes' examples have other masks, and other layouts too
            dropping = partial(adapted, dropout=0.25)
            compare_with_one_process(family, mesh, dropping, frozen_whole=frozen_whole, layouts=(Padded(),))


@pytest.mark.parametrize(
    ("mesh", "frozen_whole", "families"),
    [
        ("cut", False, ["llama", "gpt2, tied"]),
        *(slow(mesh, whole, [*FAMILIES]) for mesh in GRIDS for whole in (False, True)),
    ],
)
def test_gradients_of_adapters_are_those_of_one_process_to_1e5(mesh, frozen_whole, families):
    dims, _ = GRIDS[mesh]
    launch(compare_adapted, dims.world_size, dims, families, frozen_whole, process_group=True)


def loss_of(model: torch.nn.Module, examples: list[Example]) -> torch.Tensor:
    chosen, rejected = plain_logps(model, examples)
    return (chosen - 0.5 * rejected).mean()


def update_with_every_optimizer(rank: int, world_size: int, dims: ParallelDims) -> None:
    mesh, examples = Mesh(rank, dims), list_examples(rows=4)
    rows = slice(mesh.data_rank * 4 // mesh.data_size, (mesh.data_rank + 1) * 4 // mesh.data_size)
    for name in sorted(OPTIMIZERS.keys() - set(NEED_WHOLE_TENSORS)):
        whole = build("llama", dtype=torch.float64)
        model = build("llama", dtype=torch.float64, on_meta=rank != 0)
        model = distribute(model, mesh, block_name=None, compute_dtype=torch.float64)
        for part, of_part in ((whole, examples), (model, examples[rows])):
            optimizer = OPTIMIZERS[name](local_parameters(part.parameters()), lr=1e-3)
            with pytest.MonkeyPatch.context() as patch:
                keep_float64(patch)
                for _ in range(2):  # the first makes the optimizer's states
                    loss_of(part, of_part).backward()
                    clip_gradient(part.parameters(), 1.0)
                    step_optimizer(optimizer)
                    part.zero_grad()
        parameters = list(model.parameters())
        for i, moments in optimizer_state(optimizer)["state"].items():
            parameter = parameters[i]
            for value in moments.values():
                assert isinstance(value, DTensor) == (torch.is_tensor(value) and value.shape == parameter.shape), name
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            off = (full_tensor(ours.detach()) - theirs.detach()).abs().max()
            lacking = f"NEED_WHOLE_TENSORS in dpo/settings/keys.py lacks {name}, which is off by {off:.1g}"
            assert off < ROUNDING, lacking


@SLOW
@pytest.mark.parametrize("dims", [SHARDED, CUT])
def test_every_optimizer_that_the_config_allows_updates_shards(dims):
    launch(update_with_every_optimizer, 2, dims, process_group=True)


def hold_the_reference_whole(rank: int, world_size: int, dims: ParallelDims, families: list[str]) -> None:
    mesh, examples = Mesh(rank, dims), list_examples(rows=4)
    for family in families:
        policy, whole, sharded = (
            distribute(
                build(family, on_meta=rank != 0).requires_grad_(trains),
                mesh,
                block_name=None,
                compute_dtype=torch.float32 if trains else torch.bfloat16,
                frozen_whole=frozen_whole,
            )
            for trains, frozen_whole in ((True, False), (False, True), (False, False))
        )
        assert not any(isinstance(module, FSDPModule) for module in whole.modules())
        assert {p.dtype for p in whole.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in whole.buffers()} == {b.dtype for b in build(family).buffers()}
        with torch.no_grad():
            assert torch.equal(plain_logps(whole, examples), plain_logps(sharded, examples)), family
        release_gathered(sharded)
        with torch.no_grad():
            for parameter in policy.parameters():
                getattr(parameter, "_local_tensor", parameter).mul_(2)
        Reference(whole, None, ReferenceLogps(0, 1)).follow(policy)
        for weight, other in zip(policy.parameters(), whole.parameters(), strict=True):
            assert torch.equal(gather_part_like(weight, other).bfloat16(), local_tensor(other)), family


@SLOW
@pytest.mark.parametrize("mesh", GRIDS)
def test_a_whole_reference_gives_the_numbers_of_a_sharded_one_and_follows_the_policy(mesh):
    dims, _ = GRIDS[mesh]
    casts_inputs = "olmo2, norms over all heads"  # its blocks are given rotary tables in float32
    families = [family for family in FAMILIES if family not in ALIKE or family == casts_inputs]
    families = families if mesh == "sharded" else [*FAMILIES]
    launch(hold_the_reference_whole, dims.world_size, dims, families, process_group=True)


def hold_shards_alone(rank: int, world_size: int, dims: ParallelDims) -> None:
    mesh = Mesh(rank, dims, timeout_secs=77)
    groups = [dist.group.WORLD, *mesh.device_mesh.get_all_groups()]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    assert timeouts == {77}  # of collectives in any group

    model = distribute(build("llama", on_meta=rank != 0), mesh, block_name=None, compute_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        held, whole = local.untyped_storage().nbytes(), parameter.numel() * 4
        assert held <= whole * 0.6 or local.ndim == 1, f"{name} holds {held} of {whole} bytes"
    # Float32 weights are gathered in bfloat16; slices of 101 rows are not equal.
    gathered = sum((p.to_local() if dims == CUT else p).numel() for p in model.parameters())
    assert model.gathered_bytes == pytest.approx(2 * gathered, rel=0.03)


@pytest.mark.parametrize("dims", [SHARDED, CUT])
def test_a_process_keeps_its_shards_alone_and_counts_what_sampling_gathers(dims):
    launch(hold_shards_alone, 2, dims, process_group=True, timeout_secs=77)


def private_memory() -> int:
    """Bytes of this process's own memory; pages that are mapped from files do not count."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def load_a_larger_model(rank: int, world_size: int, folder: Path) -> None:
    source = ModelPath(str(folder))
    peak = before = private_memory()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, private_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    load = load_structure if rank else partial(load_model, stays_in_files=True)
    model = load(source, dtype=torch.float32, attn_implementation="sdpa")
    block = sum(parameter.numel() * 4 for parameter in find_blocks(model, None)[0].parameters())
    distribute(model, Mesh(rank, SHARDED), block_name=None, compute_dtype=torch.float32)
    is_over.set()
    watcher.join()
    shards = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    taken = peak - before
    # A weight that is read has a copy for a moment. A whole model would take as much as the shards and four blocks.
    assert taken < shards + 2 * block, f"rank {rank} took {taken:,} bytes: its shards {shards:,}, a block {block:,}"


@pytest.mark.parametrize("make", [transformers.LlamaConfig, slow(transformers.MixtralConfig)])
def test_no_process_holds_more_than_its_shards_and_a_block_while_a_model_is_loaded(make, tmp_path):
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 2000}
    publish(tmp_path, build(lambda: make(**sizes, num_local_experts=2)))
    launch(load_a_larger_model, 2, tmp_path, process_group=True)


def test_the_norm_of_a_large_gradient_is_exact():
    parameter = torch.nn.Parameter(torch.empty(4096, 4096))
    parameter.grad = torch.full_like(parameter, 0.1)
    assert clip_gradient([parameter], 1.0).item() == pytest.approx(409.6, rel=1e-5)


class CallCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_the_norm_takes_one_operation_for_each_parameter():
    """On a GPU every operation is a kernel to launch; `promote_types` is none."""

    def count_calls(n: int) -> Counter:
        parameters = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(n)]
        for parameter in parameters:
            parameter.grad = torch.ones(4, 4)
        with CallCounter() as counter:
            clip_gradient(parameters, 1.0)
        return counter.calls

    more = count_calls(10) - count_calls(4)
    assert more == {"aten::linalg_vector_norm": 6, "aten::promote_types": 6}


# --- trainers ------------------------------------------------------------------------------------------------------


def make_trainer(rank: int, world_size: int, run_dir: Path, overrides: tuple[str, ...]) -> trainers.BasicTrainer:
    """The trainer that a command line gives, in this process."""
    settings = ("batch_size=8", "gradient_accumulation_steps=2", "eval_batch_size=8")
    settings += ("n_eval_examples=8", "n_eval_model_samples=8", "optimizer=AdamW", "lr=1e-3")
    config = compose(run_dir.parent, run_dir.name, *settings, *overrides)
    run_dir.mkdir(exist_ok=True)
    policy, reference = model_loaders(resolve(config, world_size=world_size))
    return getattr(trainers, config.trainer)(policy, config, config.seed, run_dir, reference, rank, world_size)


def sample(rank: int, world_size: int, run_dir: Path, overrides: tuple[str, ...]) -> None:
    trainer = make_trainer(rank, world_size, run_dir, overrides)
    result = {"samples": trainer.evaluator.samples(n_examples=0), "answers": trainer.evaluator.answers()}
    trainer.train_step(next(trainer.train_iterator))  # on shards again
    if rank == 0:
        (run_dir / "result.json").write_text(json.dumps(result))


@SLOW
@pytest.mark.parametrize("mesh", GRIDS)
def test_greedy_samples_are_those_of_one_process(mesh, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    ends = {"top_k": 1, "eos_token_id": list(range(0, 1024, 16))}  # greedy, and texts of different lengths
    (model / "generation_config.json").write_text(json.dumps(ends))
    dims, overrides = GRIDS[mesh]
    sample(0, 1, tmp_path / "one", (f"model.name_or_path={model}",))
    launch(sample, dims.world_size, tmp_path / "many", (*overrides, f"model.name_or_path={model}"), process_group=True)
    ours, theirs = (read_json(tmp_path / name / "result.json") for name in ("many", "one"))
    assert ours == theirs  # token for token, in the order of the prompts
    assert len({len(policy) for _, policy, *_ in ours["samples"]}) > 2


# --- several machines ----------------------------------------------------------------------------------------------


def start_node(rank: int, port: int, *overrides: str) -> subprocess.Popen[str]:
    """`scripts/run_distributed.sh` as on one of two machines with one process each."""
    place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "run_distributed.sh"), "1", *overrides],
        env=make_environment(PATH=path, **place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@SLOW
def test_two_nodes_are_one_run(command, tmp_path):
    port, sharded = get_open_port(), ("trainer=FSDPTrainer", "n_examples=16")
    nodes = [start_node(rank, port, *command(f"node{rank}", *sharded)) for rank in (0, 1)]
    output = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    run_here(command("alone", "n_examples=16"))

    assert not (tmp_path / "node1").exists()  # only rank 0 writes
    assert "run directory" in output[0]
    assert "run directory" not in output[1]
    assert_alike(tmp_path / "node0", tmp_path / "alone", tolerance=2e-3)
