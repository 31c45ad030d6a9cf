"""The package tensor_parallel over CPUs gives the whole model's numbers and files."""

import copy
import sys

import pytest
import torch
import transformers
from support.models import COMMON, FAMILIES, GPT, GROUPED, ROUNDING, build, list_examples, plain_logps
from support.pytests import refused, slow

from dpo.checkpoint.files import write_checkpoint
from dpo.models.pretrained import load_archive
from dpo.parallel.sharding import full_state
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.system import host
from dpo.training.optimization import OPTIMIZERS

try:
    import tensor_parallel
except ImportError as error:
    tensor_parallel, reason = None, f"the package tensor_parallel cannot be imported: {error}"
else:
    reason = ""

needs_package = pytest.mark.skipif(bool(reason), reason=reason)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the package's autocast
CPUS = ("cpu", "cpu")
MODELS = ("gpt2, tied", "gpt-neox", "gpt-neox, sequential residual", "llama", "llama, tied")


def loss(model) -> torch.Tensor:
    chosen, rejected = plain_logps(model, list_examples(4))
    return (chosen - 0.5 * rejected).mean()


def update(model, optimizer, max_norm: float) -> torch.Tensor:
    """Evaluation, then one update from two microbatches; the norm before clipping."""
    with torch.no_grad():
        loss(model)
    for _ in range(2):
        (loss(model) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def assert_same(ours, theirs, tolerance: float) -> None:
    """The same keys, shapes and settings, and nearly the same values."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key], tolerance)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())
    else:
        assert ours == theirs


@needs_package
@pytest.mark.parametrize("family", MODELS)
def test_log_probabilities_gradients_and_weights_are_those_of_the_whole_model(family, tmp_path, caplog):
    whole = build(family)
    before = copy.deepcopy(whole.state_dict())
    for attention in ("eager", "sdpa"):
        whole.set_attn_implementation(attention)
        split = split_over_devices(whole, CPUS)
        assert_same(split.state_dict(), before, 0)
        for mode in (True, False):
            assert_same(loss(split.train(mode)), loss(whole.train(mode)), 1e-5)
        assert_same(whole.state_dict(), before, 0)  # the whole model is left as it was
    trained = [p for p in split.parameters() if p.requires_grad]  # every number once
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in whole.parameters())
    assert "unused" not in caplog.text  # rules, of which the package warns

    states = {"policy": full_state(split.state_dict())}
    write_checkpoint(tmp_path / "step-4", states.items(), step_idx=4, metrics=None, facts={})
    fresh = transformers.AutoModelForCausalLM.from_config(whole.config)
    load_archive(fresh, str(tmp_path / "step-4"))
    assert_same(fresh.state_dict(), split.state_dict(), 0)


@needs_package
@pytest.mark.parametrize(
    ("family", "optimizer", "devices"),
    [
        *((family, "RMSprop", 2) for family in MODELS),
        ("llama, tied", "Adagrad", 2),
        *(slow("llama, tied", name, 2) for name in OPTIMIZERS if name not in ("RMSprop", "Adagrad", "Adafactor")),
        ("gpt2, tied", "AdamW", 4),
    ],
)
def test_clipped_updates_are_those_of_the_whole_model_and_continue(family, optimizer, devices, nothing_in_float32):
    """The updates are in float64: see `ROUNDING`."""
    whole = build(family, dtype=torch.float64)
    split = split_over_devices(whole, ["cpu"] * devices)
    optimizers = [OPTIMIZERS[optimizer](model.parameters(), lr=1e-3) for model in (whole, split)]
    for _ in range(3):
        norms = [update(model, o, max_norm=1.0) for model, o in zip((whole, split), optimizers, strict=True)]
        assert norms[0] > 1  # or nothing would be clipped
        assert_same(norms[1], norms[0], ROUNDING)
        state = copy.deepcopy(optimizers[1].state_dict())  # continued, as by a resume, after each update
        optimizers[1] = OPTIMIZERS[optimizer](split.parameters(), lr=1e-3)
        optimizers[1].load_state_dict(state)
    assert_same(split.state_dict(), whole.state_dict(), ROUNDING)
    with pytest.raises(ValueError, match="doesn't match the size"):  # with other slices it cannot go on
        optimizers[0].load_state_dict(state)


@needs_package
def test_the_packages_own_sum_gives_the_same_numbers(monkeypatch):
    """On GPUs it adds up in a fixed order."""
    monkeypatch.setattr(host, "GPU", "cpu")
    whole = build("llama")
    split = split_over_devices(whole, CPUS)
    assert_same(loss(split), loss(whole), 1e-5)
    assert_same(split.state_dict(), whole.state_dict(), 0)


def test_a_package_that_does_not_import_is_named_with_the_command_that_helps(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensor_parallel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensor_parallel", None)
    with refused(r"pip install tensor_parallel==2\.0\.0 .*backend=dtensor"):
        split_over_devices(build("llama"), CPUS)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (FAMILIES["qwen2, tied, with biases"](), 2),
        (FAMILIES["llama"](), 1),
        (transformers.LlamaConfig(**COMMON, attention_bias=True), 2),
        (transformers.LlamaConfig(**GROUPED, head_dim=12), 2),  # its heads do not fill hidden_size
        ("recomputes", 2),
        (transformers.GPT2Config(**GPT), 3),
    ],
)
def test_what_the_package_cannot_cut_is_refused(config, devices):
    if config == "recomputes":
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    message = "does not divide num_attention_heads=4" if devices == 3 else "this .* is none: use .*=dtensor"
    with refused(message):
        split_over_devices(model, ["cpu"] * devices)
