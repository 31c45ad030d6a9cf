"""What the user's documents ask for, a test for each row: who takes a feature away changes this file.

The letters are those documents: E the reference's environment, T why TRL used one GPU, G a guide to distributed DPO,
O an online trainer that failed on a wrapped model, M a guide to several cards. Other files test the same more deeply;
`test_tensor_parallel_package.py` has tensor parallelism by the package alone.
"""

import contextlib
import copy
import gc
import json
import os
import re
import resource
import subprocess
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from support import trainers
from support.commands import RUNS, find_refusals
from support.models import GPT, make_weights
from support.pytests import refused, slow, succeeded
from support.records import evaluation, rewards, write_run
from support.runs import ROOT, TINY, assert_alike, find_differences, read_metrics, run_python, train_here

import train
import utils
from dpo.commands import COMMANDS, doctor, main, report
from dpo.data.examples import Example
from dpo.errors import RunError
from dpo.losses import LOSSES
from dpo.models.layouts import Padded
from dpo.parallel import sharding
from dpo.reporting.events import RunContext
from dpo.reporting.trackers import WandbLogger
from dpo.settings.keys import KEYS, OPEN_MAPPINGS
from dpo.settings.plan import make_plan
from dpo.system import launching
from dpo.system.arithmetic import without_tf32
from dpo.system.run_directory import RunLog, exiting_on_failure
from dpo.training import optimization
from dpo.training.optimization import Schedule, make_optimizer
from trainers import BasicTrainer, FSDPTrainer, TensorParallelTrainer

TRAINERS = (BasicTrainer, FSDPTrainer, TensorParallelTrainer)


# --- E ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
@pytest.mark.parametrize(("n_gpus", "backend"), [(1, "nccl"), (0, "gloo")])
def test_e_train_py_with_a_trainer_by_config_over_nccl_or_gloo(trainer, n_gpus, backend, monkeypatch):
    command = f"loss=dpo loss.beta=0.1 model=pythia28 datasets=[hh] exp_name=x trainer={trainer.name}"
    assert find_refusals(command) == []
    assert make_plan({"trainer": trainer.name}).trainer.name == trainer.name
    monkeypatch.setattr(launching, "count_gpus", lambda: n_gpus)
    assert launching.choose_backend() == backend


def test_e_tf32_products_in_every_trainer_and_deterministic_off(tmp_path):
    with without_tf32():
        trainers.make(trainers.compose(tmp_path, "run"))
        assert torch.backends.cuda.matmul.allow_tf32
    assert not make_plan({}).run.deterministic


def test_e_the_limit_of_open_files_is_raised_before_workers_start_and_said(capsys, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.delenv("RANK", raising=False)
    seen = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        launching.launch(lambda *_: seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)), 1, process_group=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == [(before[1], before[1])]
    assert f"raised from 300 to {before[1]:,}" in capsys.readouterr().out


def test_e_the_doctor_looks_at_the_limit_of_open_files(capsys, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "at most 1,024 open files: raise the hard limit to 4,096" in said
    assert "at most 256, which a run raises to 1,024" in said


def test_e_master_addr_and_port_are_defaults(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for address, port in (("node7", 4321), ("other", 1)):
        utils.init_distributed(0, 2, address, port, "gloo")
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node7", "4321")


@pytest.mark.parametrize("by_user", [None, "WANDB_CACHE_DIR", "XDG_CACHE_HOME"])
def test_e_caches_are_in_the_local_directory_unless_the_user_set_them(by_user, tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, "mine")
        if name != by_user:
            monkeypatch.delenv(name)
    plan = make_plan({"local_dirs": [str(tmp_path)], "exp_name": "x"})
    monkeypatch.setattr(WandbLogger, "_start", lambda *_: fail(os.environ.get("WANDB_CACHE_DIR")))
    expected = {None: plan.run.local_dir, "WANDB_CACHE_DIR": "mine"}.get(by_user)
    with pytest.raises(RuntimeError, match=f"^{expected}$"):
        WandbLogger(RunContext(plan, tmp_path, 0, None, print, make_weights(1, 0))).on_start()
    assert plan.run.cache_dir == (None if by_user == "XDG_CACHE_HOME" else plan.run.local_dir)


def test_e_gpu_memory_is_printed_and_logged(finished, capsys, monkeypatch):
    assert all(line["memory/peak_gb"] > 0 for line in read_metrics(finished(), "train"))
    for name, value in (("device_count", 2), ("memory_allocated", 2**30), ("max_memory_allocated", 2**31)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    capsys.readouterr()
    utils.print_gpu_memory(1, "rank 1:")
    assert capsys.readouterr().out == "rank 1: GPU 1: 1.00 GiB allocated, 2.00 GiB at the peak\n"


def fail(message: str, *_: int) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("error", "answer"), [("shared memory: Too many open files (24)", "ulimit -Hn"), ("NCCL error", "NCCL_DEBUG=INFO")]
)
def test_e_errors_of_nccl_and_of_open_files_say_what_to_change(error, answer, capsys, monkeypatch):
    with pytest.raises(RuntimeError), exiting_on_failure(RunLog()):
        fail(error)
    assert answer in capsys.readouterr().err
    monkeypatch.setattr(launching, "init_distributed", lambda *_, **__: fail(error))
    place = launching.RankEnv(0, 1, 0, "127.0.0.1", utils.get_open_port())
    assert answer in launching._run_in_group(place, fail, (), 10, 10)[1]


def test_e_running_out_of_memory_says_what_to_change(run, monkeypatch):
    monkeypatch.setattr("dpo.trainers.Trainer.train", lambda self: fail("can't allocate memory"))
    with pytest.raises(RunError, match=r"out of memory: .* try a larger gradient_accumulation_steps"):
        run("run")


@pytest.mark.parametrize("trainer", ["trainer=BasicTrainer", "trainer=BasicTrainer compile=true"])
def test_e_an_unknown_class_of_blocks_is_refused_before_data_and_weights(trainer, run, monkeypatch):
    for name in ("dpo.data.preflight.load_data", "dpo.models.loading.load_model"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("was read"))
    with refused("block_name=LlamaLayer names no transformer blocks of .*: set it to their class: LlamaDecoderLayer$"):
        run("run", *trainer.split(), "model.block_name=LlamaLayer")


def test_e_layers_over_gpus_mixed_precision_and_activation_checkpointing(finished, run, tmp_path, monkeypatch):
    assert make_plan({"trainer": "FSDPTrainer", "model.fsdp_policy_mp": "bfloat16"}).compute_dtype == "bfloat16"
    run("run", "activation_checkpointing=true")
    expected, losses = (
        [line["loss/train"] for line in read_metrics(where, "train")] for where in (finished(), tmp_path / "run")
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(sharding, "count_gpus", lambda: 2)
    assert sharding.choose_device_map() == "balanced"


SIZES = {**GPT, "vocab_size": 1024}  # of the tokenizer
FAMILIES = {"gpt2": transformers.GPT2Config(**SIZES), "gptj": transformers.GPTJConfig(**SIZES, rotary_dim=4)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_e_tensor_parallelism_of_gpt2_and_gptj_without_the_package(family, command, tmp_path):
    """A run on two processes that one process continues is the run of one process, in the model's own layout."""
    own = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    own.save_pretrained(tmp_path / "model")
    settings = (f"model.name_or_path={tmp_path / 'model'}", f"model.tokenizer_name_or_path={TINY}")
    settings += ("optimizer=SGD", "lr=0.3", "warmup_steps=0")
    train_here(command("one", *settings))
    cut = ("trainer=TensorParallelTrainer", "world_size=2", "n_examples=8", "export=true")
    train_here(command("two", *settings, *cut))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "LATEST" / "hf")
    own.load_state_dict(exported.state_dict())  # in the same layout
    train_here(command("two", *settings, "resume=auto"))
    assert_alike(tmp_path / "two", tmp_path / "one")


def test_e_policy_optimizer_and_scheduler_are_saved_for_each_step(finished):
    for step in (8, 16, 24):
        for part in ("policy", "optimizer", "scheduler"):
            saved = torch.load(finished() / f"step-{step}" / f"{part}.pt", weights_only=True)
            assert (saved["step_idx"], saved.keys()) == (step, {"step_idx", "state", "metrics"})


# --- T ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "reference"),
    [("", "model"), ("lora=lora", "base"), ("lora=lora lora.reference=adapter", "adapter"), ("lora=qlora", "base")],
)
def test_t_policy_and_reference_are_two_models_or_adapters_of_one_also_quantized_on_several_gpus(overrides, reference):
    command = f"{RUNS} loss=dpo loss.beta=0.1 trainer=FSDPTrainer world_size=2 {overrides}"
    command += " model.archive=RUN" * (reference == "adapter")
    assert find_refusals(command) == []
    plan = train.resolve(trainers.runs.compose(*command.split()))
    assert (plan.reference, plan.quantized) == (reference, "qlora" in overrides)


def test_t_reference_scores_are_kept_texts_are_tokenized_once_and_memory_is_estimated(run, tmp_path, capsys):
    settings = ("cache_reference_logps=all", "n_examples=8")
    run("first", *settings, "dry_run=true")
    assert "GB" in capsys.readouterr().out
    tables, scored = [], []
    for name in ("first", "second"):
        run(name, *settings)
        scored.append(int(re.findall(r"(\d+) examples? scored by the reference", capsys.readouterr().out)[0]))
        tables.append({path: path.stat().st_mtime_ns for path in tmp_path.glob("*/dpo-examples/*")})
    assert tables[0] == tables[1] != {}
    assert scored[0] > scored[1] == 0


def test_t_memory_does_not_grow_with_updates(tmp_path):
    trainer = trainers.make(trainers.compose(tmp_path, "run", "n_examples=24"))
    n_tensors = []
    for _ in range(4):
        trainer.train_step(trainers.next_batch(trainer))
        gc.collect()
        n_tensors.append(sum(isinstance(held, torch.Tensor) for held in gc.get_objects()))
    assert n_tensors[1] == n_tensors[3]


# --- G ---------------------------------------------------------------------------------------------------------------

TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV12\tSYS\t0-23
GPU1\tNV12\t X \tSYS\t0-23
GPU2\tSYS\tSYS\t X \t24-47
"""


@pytest.mark.parametrize(
    ("gpus", "links", "settings", "said"),  # of each GPU whether it computes in bfloat16
    [
        ([], {}, "trainer=BasicTrainer", "1 process in float32"),
        ([True] * 8, {"NV12": 28}, "trainer=FSDPTrainer world_size=8 batch_size=64", "8 processes in bfloat16"),
        ([True, False], {"SYS": 1}, "model.fsdp_policy_mp=float16", "prefer lora=lora fsdp_frozen_weights=whole"),
        ([True] * 2, {}, "model.fsdp_policy_mp=bfloat16", "prefer lora=lora fsdp_frozen_weights=whole"),
    ],
)
def test_g_the_doctor_says_what_to_train_with(gpus, links, settings, said, monkeypatch):
    text = "\n".join(doctor.recommend(gpus, links))
    assert settings in text
    assert said in text
    assert ("NVLink" in text) == (len(gpus) > 1 and "NV12" not in links)
    command = re.findall("dpo train (.*) [.]{3}", text)[0]
    monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: len(gpus))
    assert find_refusals(f"{RUNS} loss=dpo loss.beta=0.1 {command}") == []


def test_g_the_doctor_finds_the_links_between_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat << 'END'\n{TOPOLOGY}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor.find_links(3) == {"NV12": 1, "SYS": 2}


@pytest.mark.slow
def test_g_mixed_precision_in_fp16_too(run, run_and_stop, finished, monkeypatch, tmp_path, capsys):
    """An overflow is an update without a step; norms are those of float32, and a resume is exact."""
    settings = ("lr=1e-6", "do_first_eval=false", "eval_every=24")
    in_float32 = read_metrics(finished(*settings), "train")
    monkeypatch.setattr(optimization, "INITIAL_SCALE", 2.0**19)
    monkeypatch.setattr(optimization, "GOOD_UPDATES", 2)
    settings += ("model.autocast=float16", "model.reference_dtype=null")
    run("whole", *settings)
    updates = read_metrics(tmp_path / "whole", "train")
    scale, n_good, n_applied = 2.0**19, 0, 0
    for ours, theirs in zip(updates, in_float32, strict=True):
        assert ours["loss_scale"] == scale
        assert ours["lr"] == pytest.approx(min(n_applied + 1, 5) / 5 * 1e-6)
        if ours["grad_norm"] is None:
            scale, n_good = scale / 2, 0
            continue
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
        n_good, n_applied = n_good + 1, n_applied + 1
        if n_good == 2:
            scale, n_good = scale * 2, 0
    assert 2 <= n_applied < len(updates)
    assert "update 1 was not applied: its gradient overflows float16" in capsys.readouterr().out
    run_and_stop("stopped", *settings, after=4)
    run("stopped", *settings, "resume=auto")
    assert find_differences(tmp_path / "whole", tmp_path / "stopped") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "trainer=FSDPTrainer world_size=2 lora=lora gradient_accumulation_steps=2",
        "trainer=FSDPTrainer world_size=2 online=online online.scorer=keyword online.keyword=e online.max_new_tokens=8",
        "trainer=TensorParallelTrainer world_size=4 tensor_parallel_size=2",
    ],
)
def test_g_mixed_precision_in_fp16_over_several_processes(way, command, tmp_path):
    """A steep loss overflows at first; the norms are those of one process in float32."""
    settings = ["lr=1e-9", "loss.sft_weight=30", "model.reference_dtype=null", "n_examples=64"]
    parts = way.split()
    train_here(command("ours", *settings, *parts, "model.fsdp_policy_mp=float16"))
    train_here(command("theirs", *settings, *(part for part in parts if "lora" in part or "online" in part)))
    ours, theirs = (read_metrics(tmp_path / name, "train") for name in ("ours", "theirs"))
    assert 2 < sum(update["grad_norm"] is None for update in ours) < 14
    for mine, its in zip(ours, theirs, strict=True):
        if mine["grad_norm"] is not None and "online" not in way:
            assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.launch", "torch.distributed.run"])
def test_g_the_launchers_of_torch_start_a_run(launcher, command, tmp_path):
    started = ("-m", launcher, "--nproc-per-node=2", f"--master-port={utils.get_open_port()}", "train.py")
    succeeded(run_python(*started, *command("run", "trainer=FSDPTrainer", "n_examples=8")))
    assert json.loads((tmp_path / "run" / "env.json").read_text())["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1}


@pytest.mark.parametrize("option", ["--local-rank=1", "--local_rank=1"])
def test_g_the_local_rank_that_torch_distributed_launch_passes_is_taken(option, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main([option, "--version"]) == 0
    assert os.environ["LOCAL_RANK"] == "1"


def test_g_run_distributed_passes_on_machines_addresses_and_ports(tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    given = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "77"}
    environment = {**given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = [ROOT / "scripts" / "run_distributed.sh", "4"]
    output = subprocess.check_output(script, env=environment, text=True)
    assert "--nproc-per-node=4 --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=77" in output
    elastic = {**environment, "NNODES": "2:4", "JOB": "mine"}
    output = subprocess.check_output(script, env=elastic, text=True)
    assert "--nproc-per-node=4 --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:77 --rdzv-id=mine" in output


def test_g_batches_are_divided_and_lr_is_scaled_by_processes(tiny_llama):
    plan = make_plan({"trainer": "FSDPTrainer", "lr": 1e-6, "lr_scaling": "linear", "warmup_steps": 0}, world_size=4)
    schedule = Schedule(plan.training, make_optimizer(plan.training, tiny_llama), updates=9, data_size=4)
    assert schedule.get_last_lr() == [pytest.approx(4e-6)]
    examples = [Example((1, 2), ((3,), (4,)))] * 8
    parts = Padded().split(examples, 2, rank=3, size=4)  # two microbatches of the last of four processes
    assert [len(part.indices) for part in parts] == [1, 1]


@pytest.mark.slow
def test_g_pictures_of_loss_and_rewards_texts_of_samples_and_the_model(run, tmp_path, capsys):
    run("run", "report=true", "sample_during_eval=true", "n_eval_model_samples=2", "export=true", "n_examples=8")
    files = [tmp_path / "run" / "report" / name for name in ("report.html", "loss.png", "rewards.png")]
    assert f"report: {files[0]}" in capsys.readouterr().out.splitlines()
    assert "complete, 2 of 2 updates" in files[0].read_text()
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[1:])
    assert "--- policy ---" in (tmp_path / "run" / "samples.txt").read_text()
    assert (tmp_path / "run" / "LATEST" / "hf" / "model.safetensors").exists()


def test_g_dpo_report_writes_the_pictures_and_says_what_to_install(tmp_path, capsys, monkeypatch):
    path = str(write_run(tmp_path / "run", [evaluation(1, 0.6, **rewards("eval", 0.2, -0.1))]))
    mine = tmp_path / "mine" / "loss.png"
    assert report.main([path]) == 0
    written = {file.name for file in (tmp_path / "run" / "report").iterdir()}
    assert written == {"report.html", "loss.png", "rewards.png"}
    mine.parent.mkdir()
    mine.write_text("mine")
    assert report.main([path, "--out", str(mine.parent)]) == 2
    assert [file.read_text() for file in mine.parent.iterdir()] == ["mine"]
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([path]) == 2
    assert capsys.readouterr().err.endswith("pip install matplotlib\n")


def test_g_workers_prepare_batches_in_pinned_memory(tmp_path, monkeypatch):
    pinned = []
    monkeypatch.setattr("dpo.training.batches.count_gpus", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(threading.get_ident()) or tensor)
    trainer = trainers.make(trainers.compose(tmp_path, "run", "num_workers=2"))
    next(trainer.train_iterator)
    assert {threading.get_ident()} < {*pinned, threading.get_ident()}


# --- O, M ------------------------------------------------------------------------------------------------------------

ONLINE = ("online=online", "online.scorer=shorter", "online.max_new_tokens=4", "n_examples=4", "do_first_eval=false")


@pytest.mark.parametrize("processes", [1, slow(2)], ids=["one process", "two processes"])
def test_o_online_dpo(processes, command, tmp_path):
    several = ("trainer=FSDPTrainer", f"world_size={processes}") if processes > 1 else ()
    train_here(command("run", *ONLINE, *several))
    assert read_metrics(tmp_path / "run", "train")[0]["online/length"] > 0


def wrap_for_processes(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model as torch does, which wants a process group for it."""
    return type("DistributedDataParallel", (torch.nn.DataParallel,), {})(model)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, wrap_for_processes, slow(torch.compile)])
def test_o_a_wrapped_model_that_a_caller_hands_over_is_unwrapped(wrap, tiny_llama, tmp_path):
    config = trainers.compose(tmp_path, "run", "n_examples=4", "do_first_eval=false")
    wrapped, reference = wrap(tiny_llama), wrap(copy.deepcopy(tiny_llama))
    assert BasicTrainer(wrapped, config, 0, config.local_run_dir, reference).policy is tiny_llama
    train.worker_main(0, 1, {**config, "local_run_dir": str(tmp_path / "worker")}, wrapped, reference)
    assert (tmp_path / "worker" / "LATEST").exists()


def test_o_what_is_no_model_of_transformers_is_refused_in_a_sentence(tiny_llama, tmp_path):
    config = trainers.compose(tmp_path, "run")
    adapted = peft.get_peft_model(tiny_llama, peft.LoraConfig(target_modules=["q_proj"]))
    sentence = "the model given is a PeftModel: pass a model of transformers"
    with refused(sentence):
        BasicTrainer(adapted, config, 0, config.local_run_dir, tiny_llama)
    with refused(sentence):
        train.worker_main(0, 1, config, adapted)


def test_m_the_log_and_env_json_say_what_trains_over_what_on_which_devices(finished, command, tmp_path):
    log = (finished() / "log.txt").read_text()
    assert re.search("BasicTrainer: 1 process on 1 x CPU of .+; layout=shared_prefix; attention: policy sdpa, ref", log)
    facts = json.loads((finished() / "env.json").read_text())
    assert (facts["layout"], facts["backend"], len(facts["devices"])) == ("shared_prefix", None, 1)
    assert facts["attention"] == {"policy": "sdpa", "reference": "sdpa"}


def test_m_a_layout_other_than_the_one_asked_for_has_its_reason(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpo.models.layouts.find_windows", lambda *_: "takes no positions")
    run("run", "n_examples=4", "do_first_eval=false")
    reason = "layout=padded: LlamaForCausalLM takes no positions"
    assert f"; {reason}; attention" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "env.json").read_text())["layout_note"] == reason


def test_m_device_warm_up_accumulation_and_the_speed_of_each_update(finished):
    lines = read_metrics(finished(), "train")
    assert [line["lr"] for line in lines[:4]] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4])
    assert all(line["examples_per_second"] > 0 and line["tokens_per_second"] > 0 for line in lines)
    assert find_refusals(f"{RUNS} batch_size=8 gradient_accumulation_steps=4") == []


# --- the card and the reference --------------------------------------------------------------------------------------


def test_card_the_packages_the_files_at_the_top_and_the_config():
    needed = {re.split("[^a-z-]", line)[0] for line in metadata.requires("dpo-train")}
    assert {"torch", "transformers", "datasets", "numpy", "hydra-core", "omegaconf", "wandb"} <= needed
    for name in ("train", "trainers", "preference_datasets", "utils"):
        assert (ROOT / f"{name}.py").exists()
    for file in ("config", "loss/sft", "loss/dpo", "loss/ipo", "model/pythia28", "model/gptj", "model/llama7b"):
        assert (ROOT / "config" / f"{file}.yaml").exists()


def test_card_metrics_have_the_references_names(finished):
    names = {name for split in ("train", "eval") for line in read_metrics(finished(), split) for name in line}
    for split in ("train", "eval"):
        expected = {f"rewards_{split}/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
        assert expected | {f"logps_{split}/chosen", f"logps_{split}/rejected", f"loss/{split}"} <= names
    assert {"grad_norm", "examples_per_second"} <= names


def test_reference_write_state_dict(tmp_path, copied):
    trainer = trainers.make(trainers.compose(tmp_path, "run"))
    trainer.write_state_dict(8, trainer.policy.state_dict(), {"loss/eval": 0.5}, "policy.pt")
    trainer.write_state_dict(8, {"lr": 1}, None, "scheduler.pt", tmp_path / "there")
    saved = torch.load(tmp_path / "run" / "LATEST" / "policy.pt", weights_only=True)
    assert saved == {"step_idx": 8, "state": saved["state"], "metrics": {"loss/eval": 0.5}}
    assert saved["state"].keys() == trainer.policy.state_dict().keys()
    assert torch.load(tmp_path / "there" / "scheduler.pt") == {"step_idx": 8, "state": {"lr": 1}, "metrics": {}}
    trainer.run_dir = copied("other")
    with refused("LATEST has the checksums of the run's own checkpoint"):
        trainer.write_state_dict(8, {}, {}, "policy.pt")


# --- nothing is lost from the documents ------------------------------------------------------------------------------


def test_every_key_loss_command_and_option_is_named_by_a_document(capsys):
    chosen = ("loss.weights.", "loss.name", "lora.name", "online.name")  # named as losses, `lora=` and `online=`
    names = {*OPEN_MAPPINGS, *LOSSES, "lora", "online", *(key for key in KEYS if not key.startswith(chosen))}
    for command in {*COMMANDS} - {"train"}:
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
    names |= {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out), *(f"dpo {name}" for name in COMMANDS)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    parts = re.findall(r"`[^`\n]+`|^```\w*$.+?^```$|^\| \w+ \|", text, re.MULTILINE | re.DOTALL)  # code, and losses
    code = " ".join(parts)
    named = {"--help", *re.findall(r"dpo \w+|--[a-z-]+", code), *re.findall(r"\w[\w.]*\w", code)}
    assert {name for name in names if name.removeprefix("loss.") not in named and name not in named} == set()
