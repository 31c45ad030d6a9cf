"""What a GPU would do otherwise than a CPU, taken on a CPU: every place that asks has a test of the GPU's branch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import runs
from support.models import build
from support.runs import GOLDEN, ROOT, assert_alike
from torch import Tensor

import utils
from dpo.checkpoint.saver import RandomPart
from dpo.commands import doctor
from dpo.errors import InputError, RunError, explaining_library
from dpo.models import attention, layouts, loading, panel
from dpo.models.export import find_origin
from dpo.models.layouts import GPU_ALIGNMENT, SharedPrefix
from dpo.models.pretrained import Source, load_model
from dpo.models.scoring import seeded_generators
from dpo.parallel import mesh, sharding
from dpo.parallel.mesh import Mesh
from dpo.settings.command_line import check_command_line
from dpo.settings.plan import ParallelDims, Plan, resolve
from dpo.system import host, launching
from dpo.system.host import find_device_memory
from dpo.system.run_directory import write_record
from dpo.training import memory, parts
from dpo.training.memory import explain_out_of_memory, predict
from preference_datasets import load_data
from trainers import peak_memory_gb

REFUSALS = "tests/settings/test_refusals.py"
PACKAGE = "tests/parallel/test_tensor_parallel_package.py"
ON_A_GPU = {  # by a test that takes the branch of a GPU on a CPU, here or in another file: the functions that ask
    "test_a_run_as_on_a_gpu_has_the_numbers_of_a_cpu": (
        "models.attention:attend_in_bfloat16 models.layouts:layout_by_rules models.logprobs:_find_masks "
        "models.logprobs:_in_pieces models.logprobs:token_logps system.host:is_gpu system.host:is_cpu training.batches:Batches.split "
        "training.objective:Objective.cache_reference training.objective:Objective._to_device"
    ),
    "test_grouped_heads_are_for_torchs_kernels_of_half_precision": "models.attention:_use_grouped_heads",
    "test_models_go_to_the_gpus_that_there_are": (
        "models.loading:model_loaders models.loading:_prepare models.panel:_load parallel.sharding:choose_device_map "
        "system.host:choose_device system.host:count_gpus"
    ),
    "test_processes_of_gpus_meet_by_nccl_each_on_a_gpu_of_its_own": (
        "parallel.mesh:Mesh.__init__ system.launching:choose_backend system.launching:init_distributed"
    ),
    "test_memory_is_what_is_free_or_held_here": (
        "system.host:find_device_memory system.host:list_own_gpus trainers:peak_memory_gb utils:print_gpu_memory"
    ),
    "test_weights_are_gathered_for_sampling_if_every_gpu_has_twice_the_memory": "parallel.sharding:gathered_weights",
    "test_generators_of_gpus_are_saved_and_left_as_they_were": (
        "checkpoint.saver:RandomPart.gather checkpoint.saver:RandomPart.restore models.pretrained:load_model "
        "models.scoring:seeded_generators"
    ),
    "test_the_prediction_for_a_gpu_has_its_rows_temporaries_and_copies": (
        "training.memory:predict training.memory:count_held training.memory:count_logits"
    ),
    "test_memory_that_runs_out_inside_a_library_gets_the_same_advice": "training.memory:explain_out_of_memory",
    "test_the_doctor_computes_on_every_gpu": (
        "commands.doctor:check_devices commands.doctor:_sum system.host:has_bfloat16"
    ),
    "test_the_record_names_the_gpus": "system.run_directory:write_record",
    "test_one_process_cuts_a_model_over_all_gpus": "training.parts:place",
    f"{PACKAGE}::test_the_packages_own_sum_gives_the_same_numbers": (
        "parallel.tensor_parallel_package:_make_rules parallel.tensor_parallel_package:SplitModel.state_dict"
    ),
    "tests/training/test_memory.py::test_frozen_weights_are_whole_on_gpus_of_which_half_stays_free": (
        "training.memory:decide_frozen_weights"
    ),
    "tests/settings/test_plan.py::test_modern_computes_in_bfloat16_where_gpus_have_it_and_records_that": (
        "checkpoint.resume:decide_autocast"
    ),
    "tests/settings/test_plan.py::test_trainer_and_groups_of_processes": (
        "settings.plan:Plan.change settings.plan:make_plan settings.plan:_derive"
    ),
    f"{REFUSALS}::test_a_command_that_cannot_work_is_refused_with_one_sentence": "settings.validation:list_conflicts",
    f"{REFUSALS}::test_a_command_that_can_work_gets_a_warning_only_if_it_is_slow_or_has_little_effect": (
        "settings.validation:find_warnings settings.validation:_find_missing_packages"
    ),
    "tests/system/test_arithmetic.py::test_no_attention_kernel_that_plans_for_every_shape_and_memory_that_grows_in_"
    "segments": "system.arithmetic:set_up_torch system.arithmetic:without_tf32",
    "tests/analysis/test_runs.py::test_time_and_hours_worked_by_hand": "analysis.page:list_results",
}
ASKS = re.compile("cuda|nccl|nvml|gpu|capability|bf16_supported|has_bfloat16|is_cpu|choose_device_map", re.IGNORECASE)
DEVICES = re.compile(r"(cuda|nccl)(:.*)?")  # texts that name a device or a backend


# --- the places that ask ----------------------------------------------------------------------------------------------


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and DEVICES.fullmatch(node.value) is not None
    if isinstance(node, ast.Compare):  # device.type == "cpu"
        sides = (node.left, *node.comparators)
        types = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "type"]
        return bool(types) and any(isinstance(side, ast.Constant) and side.value == "cpu" for side in sides)
    return ASKS.search(getattr(node, "id", "") or getattr(node, "attr", "")) is not None


def find_functions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """The functions that ask; those of a module's own level have no name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from find_functions(node, f"{prefix}.{node.name}".lstrip("."))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and (not prefix or isinstance(tree, ast.ClassDef)):
            continue  # a constant, or the name of a field
        else:
            if asks(node):
                yield prefix
            yield from find_functions(node, prefix)


def test_every_place_that_asks_for_a_gpu_has_a_test_of_the_gpus_branch():
    found = set()
    for path in (ROOT / "dpo").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "dpo").with_suffix("").parts).removesuffix(".__init__")
        found |= {f"{module}:{name}" for name in find_functions(ast.parse(path.read_text(encoding="utf-8")))}
    known = [place for places in ON_A_GPU.values() for place in places.split()]
    assert len(set(known)) == len(known)
    assert found - set(known) == set(), "write a test that takes the GPU's branch on a CPU, and name it in ON_A_GPU"
    assert set(known) - found == set(), "these no longer ask: remove them from ON_A_GPU"


def test_pytest_collects_the_tests_that_take_the_branches(monkeypatch):
    here, collected = str(Path(__file__).relative_to(ROOT)), set()

    def note(session: pytest.Session) -> None:
        collected.update(item.nodeid.partition("[")[0] for item in session.items)

    ids = {name if "::" in name else f"{here}::{name}" for name in ON_A_GPU}
    monkeypatch.chdir(ROOT)
    files = {name.partition("::")[0] for name in ids}
    options = ["--collect-only", "-p", "no:cacheprovider", "-p", "no:terminal"]
    pytest.main([*options, *files], plugins=[SimpleNamespace(pytest_collection_finish=note)])
    assert ids - collected == set()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors of the CPU count as a GPU's."""
    monkeypatch.setattr(host, "GPU", "cpu")


@pytest.mark.parametrize("settings", ["lr=1e-4", "model.autocast=bfloat16 cache_reference_logps=all"])
def test_a_run_as_on_a_gpu_has_the_numbers_of_a_cpu(settings, finished, run, tmp_path, monkeypatch, request):
    """It has a GPU's rows, masks and kernels, and pinned copies."""
    overrides = ("n_examples=8", *settings.split())
    on_cpu, made, pinned = finished(*overrides), [], []
    request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr("dpo.training.batches.count_gpus", lambda: 1)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    make = layouts.layout_by_rules
    monkeypatch.setattr(layouts, "layout_by_rules", lambda *a, **options: made.append(make(*a, **options)) or made[-1])
    monkeypatch.setattr(attention, "masked_attention", None)  # the kernel of a CPU
    run("run", *overrides)
    assert made[0][0].alignment == GPU_ALIGNMENT
    assert pinned
    assert_alike(tmp_path / "run", on_cpu, tolerance=3e-2 if "bfloat16" in settings else 1e-4)


def test_grouped_heads_are_for_torchs_kernels_of_half_precision(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(attention, "_use_gqa_in_sdpa", lambda *tensors: True)
    keys = [torch.zeros(1, 2, 3, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert [attention._use_grouped_heads(None, key, key) for key in keys] == [False, True]


# --- a machine with GPUs ----------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch) -> list:
    """The facts of two GPUs, of which this process uses the second; what is done to them is noted."""
    noted = []
    answers = {
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_name": lambda gpu: f"GPU {gpu} of a test",
        "is_bf16_supported": lambda including_emulation: True,
        "mem_get_info": lambda gpu: ((gpu + 1) * 10**10, 8 * 10**10),
        "memory_reserved": lambda gpu: 3 * 10**9,
        "memory_allocated": lambda gpu: 10**9,
        "max_memory_allocated": lambda gpu: (gpu + 1) * 2 * 10**9,
        "get_rng_state": lambda gpu: torch.tensor(gpu),
        "get_rng_state_all": lambda: [torch.tensor(gpu) for gpu in range(2)],
        "set_device": noted.append,
        "set_rng_state": lambda state, gpu: noted.append((int(state), gpu)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return noted


def test_a_process_that_starts_others_never_initializes_cuda(run, command, monkeypatch):
    """A context there would take memory of a GPU for as long as the run lasts."""
    overrides = ("model.autocast=auto", "trainer=FSDPTrainer", "model.attn_implementation=varlen")
    asked, started = [], []
    for name in ("_lazy_init", "current_device", "is_bf16_supported", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, **__: asked.append(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # torch asks the driver's library, and makes no context
    monkeypatch.setattr(launching, "_spawn", lambda function, world_size, *_, **__: started.append(world_size))
    _, plan = check_command_line(command("run", *overrides))
    assert plan.dims.world_size == 2
    run("run", *overrides)
    assert (started, asked) == ([2], [])


def test_models_go_to_the_gpus_that_there_are(command, monkeypatch):
    placed, model = [], build("llama")
    for module in (loading, panel):
        monkeypatch.setattr(module, "load_base", lambda *_, device_map, **__: placed.append(device_map) or model)
        monkeypatch.setattr(module, "quantize", lambda model, device: placed.append(device))
    on_two = ["balanced", "balanced", "cuda", None, "cuda"]  # None: quantized before it is placed
    for n_gpus, expected in ((0, [None] * 5), (1, [{"": 0}] * 2 + on_two[2:]), (2, on_two)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=n_gpus: n)
        placed.clear()
        load, _ = loading.model_loaders(resolve(runs.compose(*command("run"))))
        load()
        origin = find_origin(GOLDEN / "tiny-llama")
        panel._load("policy", origin, {})
        quantized = resolve(runs.compose(*command("run", "lora=qlora")))
        loading._prepare(model, quantized, {})
        panel._load("policy", origin._replace(plan=quantized), {})
        assert placed == expected
        assert host.choose_device() == ("cuda" if n_gpus else "cpu")


def test_layers_on_the_cpu_or_the_disk_are_refused(tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{i}": "disk" if i == 2 else "cpu" for i in range(3)}
    with pytest.raises(InputError, match="some of its layers would be on the CPU or the disk: take more GPUs"):
        load_model(Source(str(GOLDEN / "tiny-llama")), dtype=torch.float32, device_map=places)


def test_one_process_cuts_a_model_over_all_gpus(command, two_gpus, monkeypatch):
    cut = []
    monkeypatch.setattr(parts, "split_over_devices", lambda model, devices: cut.append(devices))
    package = ("trainer=TensorParallelTrainer", "tensor_parallel.backend=tensor_parallel", "tensor_parallel_size=2")
    plan = resolve(runs.compose(*command("run", *package)))
    for each in (plan, replace(plan, gpus=0)):
        parts.place(each, None, Mesh(), False, "float32")
    assert cut == [["cuda:0", "cuda:1"], ["cpu", "cpu"]]
    loaded = SimpleNamespace(hf_device_map={"model": 0, "lm_head": "cpu"})  # by a caller
    with pytest.raises(InputError, match="some of its layers would be on the CPU"):
        parts.place(resolve(runs.compose(*command("run"))), loaded, Mesh(), False, "float32")


def test_processes_of_gpus_meet_by_nccl_each_on_a_gpu_of_its_own(two_gpus, monkeypatch):
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **o: met.append((backend, o["device_id"])))
    launching.init_distributed(3, 4, backend=launching.choose_backend(), store=object(), local_rank=1)
    assert met == [("nccl", torch.device("cuda:1"))]
    assert two_gpus == [torch.device("cuda:1")]

    def make_device_mesh(device: str, *_: Any, **__: Any) -> SimpleNamespace:
        assert device == "cuda"
        return SimpleNamespace(get_all_groups=list)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(mesh, "init_device_mesh", make_device_mesh)
    assert Mesh(0, ParallelDims(2, 2)).device == torch.device("cuda:1")


def test_memory_is_what_is_free_or_held_here(two_gpus, monkeypatch, capsys):
    assert find_device_memory(2, multi_process=True) == 20e9 + 3e9  # of the second, whose other 60 GB are in use
    assert find_device_memory(1, multi_process=False) == 10e9 + 20e9 + 2 * 3e9
    assert peak_memory_gb() == 2 + 4
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert peak_memory_gb() == 4
    utils.print_gpu_memory(message="now:")
    assert "now: GPU 1: 0.93 GiB allocated, 3.73 GiB at the peak" in capsys.readouterr().out


@pytest.mark.parametrize(("n_bytes", "gathers"), [(1.1e10, True), (1.2e10, False)])  # 20 GB free, 2 GB held for reuse
def test_weights_are_gathered_for_sampling_if_every_gpu_has_twice_the_memory(
    n_bytes, gathers, two_gpus, as_on_a_gpu, monkeypatch
):
    model, calls = torch.nn.Linear(1, 1), []
    model.gathered_bytes, model.reshards_after_forward = n_bytes, True
    unit = SimpleNamespace(
        set_reshard_after_forward=lambda *_, **__: None,
        unshard=lambda: calls.append("gathered"),
        reshard=lambda: calls.append("sharded"),
    )
    monkeypatch.setattr(sharding, "_list_units", lambda model: [unit])
    monkeypatch.setattr(dist, "all_reduce", lambda values, op: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**10, 8 * 10**10))
    with sharding.gathered_weights(model):
        calls.append("sampling")
    assert calls == (["gathered", "sampling", "sharded"] if gathers else ["sampling"])


def test_generators_of_gpus_are_saved_and_left_as_they_were(two_gpus, monkeypatch):
    part = RandomPart(Mesh())
    saved = part.gather()
    assert saved["states"][0]["cuda"] == [0, 1]
    monkeypatch.setattr("dpo.checkpoint.saver.read_state", lambda file: saved)
    part.restore(Path("random.pt"))
    with seeded_generators(1):
        pass
    load_model(Source(str(GOLDEN / "tiny-llama")), dtype=torch.float32, random_init=True)
    assert two_gpus == [(0, 0), (1, 1)] * 3


def test_the_prediction_for_a_gpu_has_its_rows_temporaries_and_copies(command, monkeypatch):
    plan = resolve(runs.compose(*command("run", "gradient_accumulation_steps=2")))
    on_gpu, data, layouts_used = replace(plan, gpus=1), load_data(plan, silent=True), []
    search = memory.find_largest_microbatch

    def note(plan: Plan, data: Any, layout: SharedPrefix) -> Any:
        layouts_used.append(layout)
        return search(plan, data, layout)

    monkeypatch.setattr(memory, "find_largest_microbatch", note)
    cpu, gpu = (predict(each, data)[0] for each in (plan, on_gpu))
    assert [layout.alignment for layout in layouts_used] == [1, GPU_ALIGNMENT]
    assert set(cpu) - set(gpu) == {"kept", "process"}
    policy = memory.find_policy_structure(plan, "float32")
    cpu, gpu = (memory.count_logits(each, policy, search(plan, data, layouts_used[0])) for each in (plan, on_gpu))
    assert gpu == 2 * cpu  # a GPU computes the log-probabilities of a chunk at once
    cpu, gpu = (memory.count_held(each, policy, None) for each in (plan, on_gpu))
    assert gpu - cpu == {"update": cpu["gradients"]}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_runs_out_inside_a_library_gets_the_same_advice(error, monkeypatch):
    monkeypatch.setattr(memory, "predict", lambda plan, data: (memory.Bytes(policy=2 * 10**9), []))
    monkeypatch.setattr(memory, "_find_available", lambda plan: 1e9)
    advice = pytest.raises(RunError, match=r"of memory: a process needs about 2\.00 GB, and its device has 1\.00 GB; try")
    with advice, explain_out_of_memory(None, None), explaining_library(ValueError):
        raise error


def test_the_doctor_computes_on_every_gpu(two_gpus, monkeypatch, capsys):
    ones, full, used = torch.ones, torch.full, []
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: used.append(device) or ones(*sizes))
    monkeypatch.setattr(torch, "full", lambda *sizes, device: used.append(str(device)) or full(*sizes))
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda function, args, nprocs: function(0, args[0], 1, args[2]))
    for name in ("init_process_group", "all_reduce", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    doctor.check_devices()
    assert "GPU 1: GPU 1 of a test, 20.0 of 80.0 GB free, bfloat16" in capsys.readouterr().out
    assert used == ["cuda:0", "cuda:1", "cuda:0"]


def test_the_record_names_the_gpus(two_gpus, tmp_path):
    write_record(tmp_path, {"exp_name": "x"})
    assert json.loads((tmp_path / "env.json").read_text())["gpus"] == ["GPU 0 of a test", "GPU 1 of a test"]
