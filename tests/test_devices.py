"""What a GPU would do otherwise than a CPU, taken on a CPU: every place that asks has a test of the GPU's branch."""

import ast
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support import runs
from support.commands import find_refusals
from support.pytests import refused
from support.runs import ROOT, TINY, assert_alike
from torch import Tensor

from dpo.data.preflight import load_data
from dpo.errors import RunError, explaining_library
from dpo.models import attention
from dpo.models.layouts import GPU_ALIGNMENT, SharedPrefix
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_model
from dpo.parallel import sharding
from dpo.parallel.mesh import Mesh, fake_processes
from dpo.settings.command_line import check_command_line
from dpo.settings.plan import ParallelDims, Plan, resolve
from dpo.system import host, launching
from dpo.system.host import find_device_memory
from dpo.training import memory, parts
from dpo.training.memory import explain_memory_error, predict

REFUSALS = "tests/settings/test_refusals.py"
PACKAGE = "tests/parallel/test_tensor_parallel_package.py"
RUNS = "tests/gpu/test_gpu_runs.py"
ON_A_GPU = {  # by a test that takes the branch of a GPU on a CPU, here or in another file: the functions that ask
    "test_a_run_as_on_a_gpu_has_the_numbers_of_a_cpu": (
        "models.attention:attend_in_bfloat16 models.layouts:layout_by_rules models.logprobs:_find_masks "
        "models.logprobs:_in_pieces models.logprobs:token_logps system.host:is_cpu "
        "training.batches:lay_out training.objective:cache_reference training.objective:_to_device"
    ),
    "test_grouped_heads_are_for_torchs_kernels_of_half_precision": "models.attention:_use_grouped_heads",
    "test_models_go_to_the_gpus_that_there_are": (
        "parallel.sharding:choose_device_map system.host:choose_device system.host:count_gpus "
        "system.launching:choose_backend"
    ),
    "test_memory_is_what_is_free_or_held_here": "system.host:find_device_memory system.host:list_own_gpus",
    "test_weights_are_gathered_for_sampling_if_every_gpu_has_twice_the_memory": "parallel.sharding:gathered_weights",
    "test_the_prediction_for_a_gpu_has_its_rows_temporaries_and_copies": (
        "training.memory:count_all training.memory:count_weight_memory training.memory:count_logits "
        "training.memory:find_peak"
    ),
    "tests/scripts/test_estimate_script.py::test_the_fastest_way_that_fits_comes_first_with_its_command": (
        "commands.estimate:main commands.estimate:list_ways commands.estimate:measure commands.estimate:parse_gpus "
        "commands.estimate:show "
        "training.estimate:estimate_seconds"
    ),
    "tests/scripts/test_estimate_script.py::test_a_run_is_compared_with_what_it_measured": (
        "commands.estimate:read_measured"
    ),
    "test_memory_that_runs_out_inside_a_library_gets_the_same_advice": "training.memory:explain_memory_error",
    "test_one_process_cuts_a_model_over_all_gpus": "training.parts:place",
    f"{PACKAGE}::test_the_packages_own_sum_gives_the_same_numbers": (
        "parallel.tensor_parallel_package:_make_rules parallel.tensor_parallel_package:state_dict"
    ),
    "tests/training/test_memory.py::test_frozen_weights_are_whole_on_gpus_of_which_half_stays_free": (
        "training.memory:decide_frozen_weights"
    ),
    "tests/training/test_memory.py::test_gpus_keep_no_attention_weights_even_if_values_are_narrower_than_queries": (
        "training.memory:_run_on_fakes"
    ),
    "tests/settings/test_plan.py::test_modern_computes_in_bfloat16_where_gpus_have_it_and_records_that": (
        "checkpoint.resume:decide_autocast"
    ),
    "tests/settings/test_plan.py::test_trainer_and_groups_of_processes": (
        "settings.plan:change settings.plan:make_plan settings.plan:resolve"
    ),
    "test_bad_input_is_refused_before_gpus_are_counted": "settings.command_line:check_line",
    f"{REFUSALS}::test_a_command_that_cannot_work_is_refused_with_one_sentence": (
        "settings.validation:_check_processes settings.validation:_check_training"
    ),
    f"{REFUSALS}::test_a_command_that_can_work_gets_a_warning_only_if_it_is_slow_or_has_little_effect": (
        "settings.validation:find_plan_warnings settings.validation:find_problems"
    ),
    "tests/system/test_arithmetic.py::test_no_attention_kernel_that_plans_for_every_shape_and_memory_that_grows_in_"
    "segments": "system.arithmetic:set_up_torch system.arithmetic:without_tf32",
    "tests/test_mission.py::test_g_the_doctor_finds_the_links_between_gpus": "commands.doctor:find_links",
    "tests/analysis/test_runs.py::test_time_and_hours_worked_by_hand": "analysis.page:list_results",
    # Only CUDA can do this, and no number depends on it.
    f"{RUNS}::test_fsdp_trains_evaluates_samples_saves_and_resumes_in_bfloat16": (
        "checkpoint.saver:gather checkpoint.saver:restore parallel.mesh:__init__ system.launching:init_distributed "
        "system.run_directory:write_run_facts trainers:peak_memory_gb training.start:record_setup"
    ),
    f"{RUNS}::test_features_train_as_on_a_cpu": "models.pretrained:load_model models.scoring:seeded_generators",
    f"{RUNS}::test_doctor_computes_on_every_gpu": (
        "commands.doctor:check_devices commands.doctor:_sum system.host:has_bfloat16 utils:print_gpu_memory"
    ),
}
ASKS = re.compile(r"cuda|nccl|nvml|(?<!synced_)gpu|capability|bf16_supported|has_bfloat16|is_cpu|\.type == 'cpu'")


# --- the places that ask ----------------------------------------------------------------------------------------------


def test_every_place_that_asks_for_a_gpu_has_a_test_of_the_gpus_branch():
    found = set()
    for path in (ROOT / "dpo").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "dpo").with_suffix("").parts).removesuffix(".__init__")
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                code = function.body[ast.get_docstring(function) is not None :]
                if any(ASKS.search(ast.unparse(statement)) for statement in code):
                    found.add(f"{module}:{function.name}")
    known = {place for places in ON_A_GPU.values() for place in places.split()}
    assert found - known == set(), "write a test that takes the GPU's branch on a CPU, and name it in ON_A_GPU"
    assert known - found == set(), "these no longer ask: remove them from ON_A_GPU"


@pytest.mark.parametrize("test", ON_A_GPU)
def test_the_tests_that_take_the_branches_are_there(test):
    file, _, name = test.rpartition("::")
    assert f"\ndef {name}(" in (ROOT / (file or "tests/test_devices.py")).read_text()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors of the CPU count as a GPU's."""
    monkeypatch.setattr(host, "GPU", "cpu")


def test_an_estimate_uses_no_gpu_of_this_machine(monkeypatch):
    monkeypatch.setattr("dpo.parallel.mesh.count_gpus", lambda: 8)
    with fake_processes(ParallelDims(8, shard_size=4, tensor_size=2)) as mesh:
        assert mesh.device.type == mesh.device_mesh.device_type == "cpu"


@pytest.mark.parametrize("settings", ["lr=1e-4", "model.autocast=bfloat16 cache_reference_logps=all"])
def test_a_run_as_on_a_gpu_has_the_numbers_of_a_cpu(settings, finished, run, run_dir, monkeypatch):
    """It has a GPU's rows, masks and kernels, and pinned copies."""
    overrides = ("n_examples=8", *settings.split())
    on_cpu = finished(*overrides)
    monkeypatch.setattr(host, "GPU", "cpu")
    monkeypatch.setattr("dpo.training.batches.count_gpus", lambda: 1)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(attention, "masked_attention", None)  # the kernel of a CPU
    run("run", *overrides)
    assert_alike(run_dir, on_cpu, tolerance=3e-2 if "bfloat16" in settings else 1e-4)


def test_grouped_heads_are_for_torchs_kernels_of_half_precision(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(attention, "_use_gqa_in_sdpa", lambda *tensors: True)
    keys = [torch.zeros(1, 2, 3, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert [attention._use_grouped_heads(None, key, key) for key in keys] == [False, True]


# --- a machine with GPUs ----------------------------------------------------------------------------------------------


def test_a_process_that_starts_others_never_initializes_cuda(run, command, monkeypatch):
    """A context there would take memory of a GPU for as long as the run lasts."""
    overrides = ("model.autocast=auto", "trainer=FSDPTrainer", "model.attn_implementation=varlen")
    started = []
    # Torch asks the driver's library for it, and makes no context; any other call fails.
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(launching, "_spawn", lambda function, world_size, *_, **__: started.append(world_size))
    _, plan = check_command_line(command("run", *overrides))
    assert plan.dims.world_size == 2
    run("run", *overrides)
    assert started == [2]


def test_bad_input_is_refused_before_gpus_are_counted(monkeypatch):
    counted = []
    monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: counted.append(1) or 3)
    data = "exp_name=x model.name_or_path=gpt2 datasets=[demo] trainer=FSDPTrainer"
    for bad in ("lr=-1", "max_length=8", "loss=dpo", "datasets=[nowhere/at/all]", "optimizer=Adafactor"):
        assert find_refusals(f"{data} {bad}")
        assert counted == []
    assert find_refusals(f"{data} fsdp_shard_size=2 batch_size=3") == [
        "fsdp_shard_size=2 times tensor_parallel_size=None does not divide the 3 processes"
    ]
    assert counted == [1]


@pytest.mark.parametrize(
    ("n_gpus", "device_map", "device", "backend"),
    [(0, None, "cpu", "gloo"), (1, {"": 0}, "cuda", "nccl"), (2, "balanced", "cuda", "nccl")],
)
def test_models_go_to_the_gpus_that_there_are(n_gpus, device_map, device, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert sharding.choose_device_map() == device_map
    assert host.choose_device() == device
    assert launching.choose_backend() == backend


def test_layers_on_the_cpu_or_the_disk_are_refused(tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{i}": "disk" if i == 2 else "cpu" for i in range(3)}
    with refused("does not fit into the free memory of the GPUs: use more"):
        load_model(ModelPath(str(TINY)), dtype=torch.float32, device_map=places)


def test_one_process_cuts_a_model_over_all_gpus(command, monkeypatch):
    cut = []
    monkeypatch.setattr(parts, "split_over_devices", lambda model, devices: cut.append(devices))
    package = ("trainer=TensorParallelTrainer", "tensor_parallel.backend=tensor_parallel", "tensor_parallel_size=2")
    plan = resolve(runs.compose(*command("run", *package)))
    place = partial(parts.place, mesh=Mesh(), frozen_whole=False, compute_dtype="float32")
    for gpus in (2, 0):
        place(replace(plan, gpus=gpus), None)
    assert cut == [["cuda:0", "cuda:1"], ["cpu", "cpu"]]
    loaded = SimpleNamespace(hf_device_map={"model": 0, "lm_head": "cpu"})  # by a caller
    with refused("does not fit into the free memory of the GPUs"):
        place(resolve(runs.compose(*command("run"))), loaded)


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, of which this process uses the second; others use them too."""
    facts = {
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "mem_get_info": lambda gpu: (20e9, 80e9),  # free and total
        "memory_reserved": lambda gpu: 3e9,
        "memory_allocated": lambda gpu: 1e9,
    }
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**facts))


def test_memory_is_what_is_free_or_held_here(two_gpus):
    assert find_device_memory(2, multi_process=True) == 23e9
    assert find_device_memory(1, multi_process=False) == 2 * 23e9


@pytest.mark.parametrize(("n_bytes", "gathers"), [(11e9, True), (11.1e9, False)])  # 2 GB are held for reuse
def test_weights_are_gathered_for_sampling_if_every_gpu_has_twice_the_memory(
    n_bytes, gathers, two_gpus, as_on_a_gpu, monkeypatch
):
    model, unit = Mock(gathered_bytes=n_bytes, parameters=lambda: iter([torch.zeros(1)])), Mock()
    monkeypatch.setattr(sharding, "_list_units", lambda model: [unit])
    monkeypatch.setattr(dist, "all_reduce", Mock())
    with sharding.gathered_weights(model):
        assert unit.unshard.called == gathers
    assert unit.reshard.called == gathers


def test_the_prediction_for_a_gpu_has_its_rows_temporaries_and_copies(command, monkeypatch):
    plan = resolve(runs.compose(*command("run", "gradient_accumulation_steps=2")))
    data, policy = load_data(plan, silent=True), memory.make_policy_structure(plan)
    search, found = memory.find_largest_microbatch, []

    def note(plan: Plan, data, batches, layout: SharedPrefix):
        found.append((layout.alignment, search(plan, data, batches, layout)))
        return found[-1][1]

    monkeypatch.setattr(memory, "find_largest_microbatch", note)
    on_gpu = replace(plan, gpus=1)
    assert {*predict(plan, data)[0]} - {*predict(on_gpu, data)[0]} == {"fragmentation", "python"}
    assert [alignment for alignment, _ in found] == [1, GPU_ALIGNMENT]
    cpu, gpu = (memory.count_logits(each, policy, found[0][1]) for each in (plan, on_gpu))
    assert gpu == 2 * cpu  # a GPU computes the log-probabilities of a chunk at once
    assert memory.count_weight_memory(on_gpu, policy, None)["optimizer_step"] > 0
    assert memory.count_weight_memory(plan, policy, None)["optimizer_step"] == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_runs_out_inside_a_library_gets_the_same_advice(error, monkeypatch):
    monkeypatch.setattr(memory, "predict", lambda plan, data: (memory.Bytes(policy=2 * 10**9), []))
    monkeypatch.setattr(memory, "_find_available", lambda plan: 1e9)
    advice = pytest.raises(
        RunError, match=r"^out of memory: a process needs about 2\.00 GB, and its .* GB; try a larger"
    )
    with advice, explain_memory_error(None, None), explaining_library(ValueError):
        raise error

    def run_out_again(plan: None, data: None) -> None:
        raise MemoryError

    monkeypatch.setattr(memory, "predict", run_out_again)
    with pytest.raises(RunError, match=r"^out of memory: try a larger"), explain_memory_error(None, None):
        raise error
