"""Whole runs by the command line, under launchers and signals."""

import json
import re
import shutil
from typing import Any

import pytest
from support.gpu import COMMON, GPU, TINY, WITHOUT_TF32, WORDS, Run, few_words, limit, needs_gpu, pick
from support.runs import BAND, GOLDEN, change_json, distance, find_differences, golden_command, run_python

import utils

FSDP = ("trainer=FSDPTrainer", "world_size=1")
KINDS = ("logps", "loss", "grad_norm", "rewards")


def find_distances(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """The largest distance of each kind of metric over two runs."""
    assert [update["examples"] for update in ours] == [update["examples"] for update in theirs]
    assert ours
    far = dict.fromkeys(KINDS, 0.0)
    for one, two in zip(ours, theirs, strict=True):
        for key, value in two.items():
            kind = next((kind for kind in KINDS if key.startswith(kind)), None)
            if kind and not key.endswith("accuracies"):
                far[kind] = max(far[kind], distance(one[key], value, key))
    return far


# --- the golden runs of the published reference --------------------------------------------------------

UNCLEAN = re.compile(r"Traceback|terminate called|leaked|Segmentation|CUDA error|core dumped")


@pytest.mark.gpu
@pytest.mark.slow
@limit(60)
@pytest.mark.parametrize("name", ["words-dpo", *pick(("words-sft", "words-ipo"), (), ())])
def test_golden_runs_without_tf32(name, tmp_path, record):
    """With the tolerances of tests/runs/test_golden.py, which were set on a CPU."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    own = golden_command(golden, str(WORDS), str(tmp_path / name))
    run = Run(tmp_path, name, *own, **WITHOUT_TF32).done()
    far = [
        (distance(ours[key], value, key), f"{key} of update {number}", number)
        for number, (ours, theirs) in enumerate(zip(run.records(split="train"), golden["updates"], strict=True), 1)
        for key, value in theirs.items()
    ]
    first, (worst, where, _) = max(entry[0] for entry in far if entry[2] == 1), max(far)
    allowed = 1e-3 if "ipo" in name else 5e-4
    record(f"off by {first:.1e} at the first update (of 3e-05), {worst:.1e} at most (of {allowed:g}, {where})")
    assert first <= 3e-5
    assert worst <= allowed
    assert not UNCLEAN.search(run.text)


# --- FSDP with one process, resumed, in bfloat16 ---------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@limit(75)
def test_fsdp_trains_evaluates_samples_saves_and_resumes_in_bfloat16(tmp_path, record):
    """Over NCCL on a GPU, against BasicTrainer in float32."""
    own = (*COMMON, f"dataset_sources.hh={WORDS}", "eval_every=48", "lr=1e-5", "optimizer=RMSprop")
    fsdp = (*own, *FSDP, "model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16", "resume=auto",
            "sample_during_eval=true", "n_eval_model_samples=2")  # fmt: skip
    plain = Run(tmp_path, "plain", *own, "n_examples=80")
    first = Run(tmp_path, "fsdp", *fsdp, "n_examples=48", NCCL_DEBUG="VERSION").done()
    assert (first.directory / "step-48").exists()
    second = Run(tmp_path, "fsdp", *fsdp, "n_examples=80").done()
    updates = second.records(split="train")
    far = find_distances(updates, plain.done().records(split="train"))
    nccl = re.search(r"NCCL version \S+", first.text)
    record(f"{nccl[0] if nccl else 'gloo'}; against float32 " + ", ".join(f"{k} {d:.1e}" for k, d in far.items()))
    assert [update["examples"] for update in updates] == [*range(4, 81, 4)]
    assert second.records("samples.jsonl")
    assert all(d <= BAND[kind] for kind, d in far.items()), far


# --- features, against the same runs on the CPU ----------------------------------------------------------------------

LORA = ("lora=lora", "lora.r=4", "lora.alpha=8")
ONLINE = ("online=online", "online.scorer=keyword", "online.keyword=e", "online.max_new_tokens=8")
FEATURES = {
    "lora": (*LORA, "sample_during_eval=true", "do_first_sampling=true"),
    "qlora": ("lora=qlora", "lora.r=4", "lora.alpha=8"),
    "online lora": (*ONLINE, *LORA, "online.top_p=0.9"),
    "padded": ("layout=padded",),
    "static cache": ("model.cache_implementation=static", "sample_during_eval=true", "do_first_sampling=true"),
    "activation checkpointing": ("activation_checkpointing=true",),
    "autocast with a float16 reference": ("model.autocast=bfloat16", "model.reference_dtype=float16"),
    "a loss of the whole batch": ("loss=aot",),
    "Adafactor": ("optimizer=Adafactor", "lr=1e-5"),
}
FEATURE_TOLERANCE = 1e-3  # of float32 metrics, relative, rewards absolute below 1


@pytest.mark.gpu
@pytest.mark.slow
@limit(60)
@pytest.mark.parametrize("name", FEATURES)
def test_features_train_as_on_a_cpu(name, tmp_path, record):
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    own = (*COMMON, "gradient_accumulation_steps=2", *FEATURES[name], "n_examples=16", "eval_every=8",
           f"dataset_sources.hh={few_words(tmp_path, 16)}")  # fmt: skip
    runs = [Run(tmp_path, "device", *own, **WITHOUT_TF32)]
    if GPU:  # otherwise the two would be the same
        runs.append(Run(tmp_path, "cpu", *own, CUDA_VISIBLE_DEVICES=""))
    device, *cpu = [run.done().records(split="train") for run in runs]
    assert [update["examples"] for update in device] == [4, 8, 12, 16]
    if cpu:
        far = find_distances(device, cpu[0])
        record(f"{name} off by " + ", ".join(f"{kind} {d:.1e}" for kind, d in far.items()))
        most = BAND if "autocast" in name else dict.fromkeys(KINDS, FEATURE_TOLERANCE)
        assert all(d <= most[kind] for kind, d in far.items()), far


# --- runs that repeat bit for bit ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@limit(75)
def test_repeats_bit_for_bit_with_deterministic_stopped_and_resumed_too(tmp_path):
    """With `top_p` in the generation config."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    change_json(model / "generation_config.json", do_sample=True, top_p=0.9, temperature=1.0)
    own = ("batch_size=8", "eval_batch_size=2", "n_eval_examples=2", "n_eval_model_samples=2", "max_length=80",
           "eval_every=24", "lr=1e-4", "deterministic=true", "sample_during_eval=true", "do_first_eval=true",
           "do_first_sampling=true", f"dataset_sources.hh={few_words(tmp_path, 40)}")  # fmt: skip
    common = (*COMMON, *own, f"model.name_or_path={model}")
    runs = [Run(tmp_path, name, *common, "n_examples=48") for name in ("first", "again")]
    Run(tmp_path, "continued", *common, "n_examples=24").done()
    runs.append(Run(tmp_path, "continued", *common, "n_examples=48", "resume=auto"))
    first, *others = [run.done() for run in runs]
    assert len(first.records()) == 6 + 3  # updates, evaluations
    assert first.records("samples.jsonl")
    assert [find_differences(first.directory, other.directory) for other in others] == [[], []]


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@limit(60)
def test_doctor_computes_on_every_gpu(tmp_path, printed):
    assert run_python("-m", "scripts.doctor").returncode == 0
    utils.print_gpu_memory()
    assert "GiB at the peak" in printed()
