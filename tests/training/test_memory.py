"""Memory is predicted from shapes, and running out of it is answered with what would help."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from omegaconf import OmegaConf
from support import runs
from support.faults import Run, run_out_of_memory_at
from support.runs import GOLDEN, small_run, train
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models.adapters import adapter_weights
from dpo.models.layouts import SharedPrefix
from dpo.models.loading import find_policy_structure, load_policy, model_loaders
from dpo.settings.plan import resolve
from dpo.training.memory import _held_while_training, _run, predict, predict_phases, suggest
from dpo.training.memory_tracker import MemoryTracker, on_device
from preference_datasets import load_data

PARAMETERS = 282_048  # of the tiny Llama
# of its adapter of rank 4: 3 layers, each with 4 matrices of 64 x 64 and 3 of 64 x 176
ADAPTER = 4 * 3 * (4 * (64 + 64) + 3 * (64 + 176))


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


@pytest.fixture
def compose(rows, tmp_path):
    return lambda *overrides: runs.compose(*small_run(rows, tmp_path / "run", *overrides))


@pytest.mark.parametrize(
    ("overrides", "policy", "optimizer", "reference"),
    [
        ((), 4, 4, 4),  # RMSprop has one number per parameter
        (("optimizer=AdamW", "model.reference_dtype=float16"), 4, 8, 2),
        (("optimizer=SGD", "cache_reference_logps=all"), 4, 0, 0),
        (("loss=sft", "model.policy_dtype=bfloat16"), 2, 2, 0),
    ],
)
def test_weights_gradients_and_optimizer_are_bytes_per_parameter(overrides, policy, optimizer, reference, compose):
    config = compose(*overrides)
    need = predict(resolve(config), load_data(resolve(config), silent=True))

    expected = [PARAMETERS * n for n in (policy, policy, optimizer, reference)]
    assert [need.policy, need.gradients, need.optimizer, need.reference] == pytest.approx(expected, rel=1e-3)
    assert need.gathered == 0


@pytest.mark.parametrize(("optimizer", "at_once"), [("RMSprop", True), ("Adafactor", False)])
def test_temporaries_of_an_update_on_a_gpu_are_those_of_all_parameters_unless_it_is_one_by_one(
    optimizer, at_once, compose
):
    config = compose(f"optimizer={optimizer}")
    plan = resolve(config)
    policy = find_policy_structure(plan, plan.compute_dtype)
    assert (_held_while_training(plan, policy, on_gpu=True).update > 0) is at_once


def test_a_reference_that_scores_all_pairs_first_counts_while_it_does(compose, monkeypatch):
    monkeypatch.setattr("dpo.training.memory.resident_memory", lambda: 0)  # which grows while this test runs
    small = ("optimizer=SGD", "model.policy_dtype=bfloat16", "eval_batch_size=8", "n_eval_examples=8")
    needs = {}
    for caching in ("as_needed", "all"):
        config = compose(f"cache_reference_logps={caching}", *small)
        needs[caching] = predict(resolve(config), load_data(resolve(config), silent=True))
    assert needs["all"].reference == pytest.approx(
        4 * PARAMETERS, rel=1e-3
    )  # more than gradients and optimizer, which come after it
    assert needs["all"].gradients == 0
    assert needs["all"].total < needs["as_needed"].total


def test_gradients_are_reduced_in_float32_whatever_is_computed_in(compose):
    config = compose("trainer=FSDPTrainer", "eval_batch_size=8", "model.fsdp_policy_mp=bfloat16")
    plan = resolve(config, world_size=2)
    assert plan.compute_dtype == "bfloat16"
    embeddings_and_head = 2 * 1024 * 64 + 64  # the largest unit, with the last norm
    assert predict(plan, load_data(resolve(config), silent=True)).reduced == 4 * embeddings_and_head


def test_processes_share_what_they_can(compose):
    config = compose("trainer=FSDPTrainer", "eval_batch_size=8")
    data = load_data(resolve(config), silent=True)
    alone, shared = (predict(resolve(config, world_size=n), data) for n in (1, 2))

    for name in ("policy", "gradients", "optimizer", "reference"):
        assert getattr(shared, name) == pytest.approx(getattr(alone, name) / 2, rel=1e-3)
    assert 0 < shared.gathered < alone.policy
    assert shared.activations < alone.activations


@pytest.mark.parametrize(
    ("overrides", "policy", "reference"),
    [
        ((), 4 * PARAMETERS + 4 * ADAPTER, 0),
        (("lora.reference=model",), 4 * PARAMETERS + 4 * ADAPTER, 4 * PARAMETERS),
        (("lora.reference=adapter",), 4 * PARAMETERS + 4 * ADAPTER, 4 * ADAPTER),
        (("lora.reference=model", "archive"), 4 * PARAMETERS + 4 * ADAPTER, 4 * PARAMETERS + 4 * ADAPTER),
        (("model.policy_dtype=bfloat16",), 2 * PARAMETERS + 4 * ADAPTER, 0),
        (("cache_reference_logps=all",), 4 * PARAMETERS + 4 * ADAPTER, 0),
    ],
)
def test_an_adapter_has_gradients_and_optimizer_state_beside_a_frozen_base(
    overrides, policy, reference, compose, tmp_path
):
    (tmp_path / "adapter_config.json").write_text("{}")
    has_archive = "archive" in overrides or "lora.reference=adapter" in overrides
    settings = [o for o in overrides if o != "archive"] + [f"model.archive={tmp_path}"] * has_archive
    config = compose("lora=lora", "lora.r=4", *settings)
    need = predict(resolve(config), load_data(resolve(config), silent=True))

    expected = (policy, 4 * ADAPTER, 4 * ADAPTER, reference)
    assert (need.policy, need.gradients, need.optimizer, need.reference) == pytest.approx(expected, rel=1e-3)


def test_what_an_adapter_saves_for_the_backward_pass_is_predicted(compose):
    """The same peak as of real tensors, and below that of a policy whose weights are all trained."""
    peaks, layout = {}, SharedPrefix({"full_attention": None}, max_length=128)
    [microbatch] = layout.split([Example(tuple(range(60)), (tuple(range(30)), tuple(range(40))))] * 2, 1)
    for name in ("none", "lora"):
        config = compose(f"lora={name}")
        plan = resolve(config)
        real, _ = load_policy(model_loaders(plan)[0], plan, rank=0, resume_from=None)
        fake = FakeTensorMode()
        structure = find_policy_structure(plan, "float32")
        with fake:
            inputs = microbatch.map(fake.from_tensor).inputs
            peaks["fake", name] = _run(on_device(structure, "cpu", None).train(), layout.forward, inputs, None, 1)
        peaks["real", name] = _run(real.train(), layout.forward, microbatch.inputs, None, 1)
        trained = sum(weight.nbytes for weight in adapter_weights(real, "policy").values()) or 4 * PARAMETERS
        assert {tracker.live["gradients"] for key, tracker in peaks.items() if key[1] == name} == {trained}
        ours, theirs = (peaks[kind, name].peak.total() for kind in ("fake", "real"))
        assert ours == pytest.approx(theirs, rel=0.05)  # a gradient is copied once more
    without, with_adapter = (peaks["fake", name].peak["activations"] for name in ("none", "lora"))
    assert with_adapter < without


@pytest.mark.parametrize("settings", [(), ("model.policy_dtype=bfloat16",), ("model.autocast=bfloat16",)])
def test_a_frozen_base_saves_less_in_every_dtype(settings, compose):
    """Adapters are float32, what they are multiplied with is not."""
    of = {}
    for name, rank in (("none", ()), ("lora", ("lora.r=4",))):
        config = compose(f"lora={name}", *rank, *settings)
        of[name] = predict(resolve(config), load_data(resolve(config), silent=True)).activations
    assert of["lora"] < of["none"]


@pytest.mark.parametrize("loss", ["sft", "dpo", "simpo"])  # targets, pairs, pairs without a reference
@pytest.mark.parametrize(
    "settings", [(), ("layout=padded",), ("model.attn_implementation=sdpa", "model.autocast=bfloat16")]
)
def test_every_kind_of_loss_layout_and_attention_can_be_predicted(settings, loss, compose):
    config = compose(f"loss={loss}", *(() if loss == "sft" else ("loss.beta=0.1",)), *settings)
    assert predict(resolve(config), load_data(resolve(config), silent=True)).activations > 0


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_what_wpo_holds_beside_is_counted(layout, compose):
    def need(*options: str):
        config = compose("loss=dpo", "loss.beta=0.1", f"layout={layout}", *options)
        found = predict(resolve(config), load_data(resolve(config), silent=True))
        return found.activations + found.logits

    assert need("loss.wpo=true") > need()


def test_samples_take_at_most_the_rows_of_the_test_split(compose):
    most = compose("sample_during_eval=true", "eval_batch_size=1000000000", "n_eval_examples=1000000000")
    data = load_data(resolve(most), silent=True)
    n = data.report.test.examples
    whole = compose("sample_during_eval=true", f"eval_batch_size={n}", f"n_eval_examples={n}")
    caches = [predict_phases(resolve(config), data)["samples"].kv_cache for config in (most, whole)]
    assert caches[0] == caches[1] > 0


@pytest.mark.slow
def test_the_settings_that_help_most_come_first_with_what_they_leave(compose):
    config = compose(
        "batch_size=16", "n_examples=16", "eval_every=16", "model.name_or_path=" + str(GOLDEN / "tiny-llama")
    )
    found = suggest(resolve(config), load_data(resolve(config), silent=True))

    assert 1 <= len(found) <= 3
    sizes = [float(re.search(r"\(([\d.]+) GB\)", text)[1]) for text in found]
    assert sizes == sorted(sizes)
    tried = compose("batch_size=16", "n_examples=16", "eval_every=16", "gradient_accumulation_steps=16")
    assert all(
        "gradient_accumulation_steps" not in text
        for text in suggest(resolve(tried), load_data(resolve(tried), silent=True))
    )


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        (("loss=sft",), "lora=lora"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (("lora=lora", "lora.reference=model"), "lora.reference=base"),
                (("lora=lora", "lora.reference=model", "model.archive={adapter}"), "lora.reference=adapter"),
                (("lora=lora",), "lora=qlora"),
            )
        ),
    ],
)
def test_adapters_are_offered_where_they_help_as_the_command_line_takes_them(
    overrides, offered, compose, tmp_path, monkeypatch
):
    if offered == "lora=qlora":
        pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    monkeypatch.setattr("dpo.training.memory.resident_memory", lambda: 0)  # peft is larger than this model
    (tmp_path / "adapter_config.json").write_text("{}")
    settings = [override.format(adapter=tmp_path) for override in overrides]
    config = compose("optimizer=AdamW", "max_length=16", "max_prompt_length=8", "batch_size=1", *settings)
    before = OmegaConf.to_container(config.lora)
    found = suggest(resolve(config), load_data(resolve(config), silent=True))

    assert offered in [text.split(" (")[0] for text in found]
    assert config.lora == before
    resolved = resolve(compose(*settings, offered))
    expected = offered.partition("=")[2] if offered.startswith("lora.reference") else "base"
    assert resolved.reference == (None if "loss=sft" in settings else expected)


def test_processes_share_a_frozen_base_and_reduce_the_adapters_gradients_alone(compose):
    config = compose("lora=lora", "lora.r=4", "trainer=FSDPTrainer", "eval_batch_size=8")
    data = load_data(resolve(config), silent=True)
    alone, shared = (predict(resolve(config, world_size=n), data) for n in (1, 2))

    for name in ("policy", "gradients", "optimizer"):
        assert getattr(shared, name) == pytest.approx(getattr(alone, name) / 2, rel=1e-3)
    embeddings_and_head = 2 * 1024 * 64 + 64
    block = (PARAMETERS - embeddings_and_head + ADAPTER) // 3
    assert shared.gathered == 4 * (embeddings_and_head + 2 * block)
    assert shared.reduced == 4 * ADAPTER // 3  # of a block


def test_every_process_holds_a_4_bit_base_and_shares_the_rest(compose):
    pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    config = compose("lora=qlora", "lora.r=4", "trainer=FSDPTrainer", "eval_batch_size=8")
    data = load_data(resolve(config), silent=True)
    alone, shared = (predict(resolve(config, world_size=n), data) for n in (1, 2))

    others = 2 * 1024 * 64 + (2 * 3 + 1) * 64  # embeddings, head and norms
    floats = 4 * (others + ADAPTER)
    packed = alone.policy - floats
    assert 0.51 < packed / (PARAMETERS - others) < 0.7  # codes of 1 KB weigh in layers as small as these
    assert shared.policy == pytest.approx(packed + floats / 2, rel=1e-3)
    assert shared.gradients == pytest.approx(4 * ADAPTER / 2, rel=1e-3)


def test_a_dry_run_says_what_would_run_without_weights_and_writes_nothing(command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny-llama", model)
    for weights in (*model.glob("*.safetensors"), *model.glob("*.bin")):
        weights.unlink()
    before = sorted(os.listdir(tmp_path))

    result = train(*command("run", f"model.name_or_path={model}", "dry_run=true"))

    assert result.returncode == 0, result.stderr
    assert "6 updates of 4 examples will run" in result.stdout
    for line in ("policy", "gradients", "optimizer", "reference", "activations", "total"):
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
    run = Run(command("run", "batch_size=8"), tmp_path / "log", run_out_of_memory_at, 2)

    assert run.wait() == 1
    said = run.log.read_text().splitlines()[-1]
    assert re.search(r"out of memory: a process needs about [\d.]+ GB, and its device has [\d.]+ GB; try \w", said)
    assert "can't allocate memory: you tried to allocate 40000000000000 bytes" in said
    assert (tmp_path / "run" / "step-8" / "manifest.json").exists()


def test_a_dry_run_refuses_parts_of_a_model_as_the_run_would(run, tmp_path):
    torch.save({"state": {"transformer.wte.weight": torch.zeros(2, 2)}}, tmp_path / "policy.pt")
    for override, message in (
        ("model.block_name=Nope", "model.block_name=Nope is not a module class of LlamaForCausalLM"),
        (f"model.archive={tmp_path}/policy.pt", "policy.pt.*transformer.wte.weight"),
    ):
        with pytest.raises(InputError, match=message):
            run("run", "dry_run=true", override)


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
