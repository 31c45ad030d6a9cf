"""What is different on a GPU, as far as a CPU can show it: products in TF32, compiled code, determinism."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from conftest import GOLDEN
from test_trainers import DPO, data, make_trainer  # noqa: F401  (fixtures)
from tiny_models import COMMON, build
from torch.utils._python_dispatch import TorchDispatchMode

from arithmetic import set_up_torch
from layouts import Padded, SharedPrefix, choose_layout
from models import load_model
from sampling import sample

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


@pytest.fixture(autouse=True)
def restored():
    """Settings of the process as they were."""
    allowed, deterministic = torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.use_deterministic_algorithms(deterministic)


# --- TF32 ----------------------------------------------------------------------------------------------------------


class EmulatedTF32(TorchDispatchMode):
    """Where `allow_tf32` is set, or `always`, inputs of products are off at random, for what rounds one way in one
    layout rounds the other way in the other: by more than TF32's 10 bits of mantissa, as it adds up in a deep model.
    """

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS and (self.always or torch.backends.cuda.matmul.allow_tf32):
            args = tuple(a + a * (torch.rand_like(a) - 0.5) * 2**-4 if isinstance(a, torch.Tensor) else a for a in args)
        return function(*args, **(kwargs or {}))


def test_rounding_of_tf32_does_not_cost_the_layout_and_stays_on_for_training():
    model = build("llama")
    torch.backends.cuda.matmul.allow_tf32 = True
    chosen = {}
    for always in (False, True):
        with EmulatedTF32(always=always):
            chosen[always] = choose_layout("shared_prefix", model, max_length=64, compute_dtype=torch.float32)
    assert isinstance(chosen[False][0], SharedPrefix), chosen[False]
    assert isinstance(chosen[True][0], Padded)  # the rounding would have cost it
    assert torch.backends.cuda.matmul.allow_tf32


# --- torch.compile -------------------------------------------------------------------------------------------------


class CountedBackend:
    """A backend of torch.compile that runs what was traced as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, traced: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return traced.forward(*arguments)

        return run


@pytest.fixture
def backend(monkeypatch):
    counted, compile = CountedBackend(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **options: compile(block, backend=counted, **options))
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def test_compiled_blocks_are_trained_compiled_also_after_sampling(make_trainer, backend):  # noqa: F811
    set_up_torch(deterministic=False, compiles=True)
    trainer = make_trainer(*DPO, "compile=true", "sample_during_eval=true", "n_eval_model_samples=4")
    trainer.self_test()
    after_checks = backend.calls
    trainer.samples()
    assert backend.calls == after_checks  # generation runs as written
    trainer.evaluate()
    graphs = []
    for batch in trainer.train_iterator:  # of other shapes
        before = backend.calls
        trainer.train_step(batch)
        blocks = len(trainer.policy.model.layers)
        assert backend.calls - before >= 2 * blocks * len(batch.microbatches)  # policy and reference
        graphs.append(backend.graphs)
    assert len(graphs) == 4
    assert graphs[-1] == graphs[1]  # nothing is traced anew
    assert backend.graphs <= 12


# --- generation ----------------------------------------------------------------------------------------------------


class Stub:
    """A model that generates its prompts, by an operation that has no deterministic algorithm."""

    config = transformers.LlamaConfig(**COMMON)

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        flat = torch.zeros(ids.numel(), dtype=ids.dtype)
        return flat.put_(torch.arange(ids.numel()), ids.flatten(), accumulate=False).view(ids.shape)


def test_a_deterministic_run_samples_by_what_has_no_deterministic_algorithm_with_a_warning(tokenizer):
    prompts = {"prompt_input_ids": torch.tensor([[5, 6]]), "prompt_attention_mask": torch.ones(1, 2)}
    set_up_torch(deterministic=True, compiles=False)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        Stub().generate(prompts["prompt_input_ids"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert sample(Stub(), prompts, tokenizer, max_length=4, seed=0) == [""]
    assert any("deterministic" in str(warning.message) for warning in warned)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_flex_attention_gives_way_to_sdpa_for_generation_alone(tokenizer, monkeypatch):
    model = load_model(str(GOLDEN / "tiny-llama"), dtype=torch.float32, attn_implementation="flex_attention")
    attention, generate = [], model.generate

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:
        attention.extend({layer.self_attn.config._attn_implementation for layer in model.model.layers})
        return generate(*arguments, **options)

    monkeypatch.setattr(model, "generate", noting)
    prompts = {"prompt_input_ids": torch.tensor([[5, 6]]), "prompt_attention_mask": torch.ones(1, 2)}
    sample(model, prompts, tokenizer, max_length=6, seed=0)
    assert attention == ["sdpa"]
    assert model.config._attn_implementation == "flex_attention"
