"""What users were promised; a cut that takes a row of it fails here."""

from __future__ import annotations

import pytest
import transformers
from support.models import GPT
from support.runs import GOLDEN, assert_alike, train_here

SIZES = {**GPT, "vocab_size": 1024}  # of the tokenizer
FAMILIES = {"gpt2": transformers.GPT2Config(**SIZES), "gptj": transformers.GPTJConfig(**SIZES, rotary_dim=4)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_of_gpt2_and_gptj_without_the_package(family, command, tmp_path):
    """A run on two processes that one process continues is the run of one process, in the model's own layout."""
    own = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    own.save_pretrained(tmp_path / "model")
    settings = (f"model.name_or_path={tmp_path / 'model'}", f"model.tokenizer_name_or_path={GOLDEN / 'tiny-llama'}")
    settings += ("optimizer=SGD", "lr=0.3", "warmup_steps=0", "batch_size=8", "gradient_accumulation_steps=2")
    train_here(command("one", *settings))
    cut = ("trainer=TensorParallelTrainer", "world_size=2", "n_examples=8", "export=true")
    train_here(command("two", *settings, *cut))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "LATEST" / "hf").state_dict()
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in own.state_dict().items()
    }
    train_here(command("two", *settings, "resume=auto"))
    assert_alike(tmp_path / "two", tmp_path / "one")
