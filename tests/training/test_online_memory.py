"""What drawing online pairs needs is predicted from shapes."""

from __future__ import annotations

import re

import pytest
import torch
from support import runs
from support.models import REWARD_MODELS, save_reward_model
from support.runs import small_run
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.models.answers import Sampling, answer
from dpo.models.layouts import Padded
from dpo.models.loading import find_policy_structure
from dpo.models.pretrained import load_model
from dpo.models.reward_model import find_reward_structure
from dpo.models.scoring import load_scorer
from dpo.settings.plan import resolve
from dpo.training import memory
from dpo.training.memory import _largest_microbatches, predict_phases
from dpo.training.memory_tracker import MemoryTracker, on_device
from dpo.training.online_memory import (
    LongestAnswers,
    Rounds,
    longest_prompt,
    longest_text,
    peak_of_sampling,
    peak_of_scoring,
)
from preference_datasets import load_data

ONLINE = ("online=online", "max_length=48", "max_prompt_length=8", "online.max_new_tokens=40")
KV = 2 * 3 * 64 * 4  # bytes of a token's keys and values: 3 layers of the tiny Llama
PARAMETERS = 282_048


@pytest.fixture
def compose(rows, tmp_path):
    def make(*overrides: str):
        chosen = [o for o in overrides if not o.startswith("online=")]
        settings = small_run(rows, tmp_path / "run", "online.scorer=shorter", *ONLINE[1:], *chosen)
        return runs.compose("online=online", *settings)

    return make


def phases_of(config, world_size: int | None = None):
    return predict_phases(resolve(config, world_size=world_size), load_data(resolve(config), silent=True))


def test_how_much_is_sampled_at_a_time(compose):
    config = compose("batch_size=10", "eval_batch_size=4", "online.n_samples=3", "trainer=FSDPTrainer")
    alone, both = (Rounds.of(resolve(config, world_size=n)) for n in (1, 2))
    assert alone == Rounds(answers=30, batches=3, rows=12, scored=4)
    assert both == Rounds(answers=30, batches=3, rows=6, scored=2)  # 5 prompts, 2 of them at a time
    assert alone.tell(config) == (
        "an update samples up to 1,200 tokens, of 30 answers, in 120 forwards of each process, of 12 rows"
    )
    few = compose("batch_size=10", "eval_batch_size=64", "online.mix_offline=0.5")
    assert Rounds.of(resolve(few)) == Rounds(answers=10, batches=1, rows=10, scored=10)


def test_a_cache_and_a_reward_model_are_counted(compose, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", "llama", tokenizer)
    plain = phases_of(compose())
    scored = phases_of(compose("online.scorer=reward_model", f"online.reward_model={folder}"))

    rows = 4 * 2
    assert plain["sampling"].kv_cache == rows * (8 + 40 - 1) * KV
    assert plain["sampling"].logits >= 2 * rows * 1024 * 4
    assert (plain["sampling"].gradients, plain["training"].kv_cache) == (0, 0)
    assert "scoring" not in plain
    weights = sum(p.nbytes for p in find_reward_structure(resolve(compose_of(compose, folder))).model.parameters())
    assert all(need.scorer == pytest.approx(weights, rel=1e-2) for need in scored.values())
    assert scored["scoring"].activations > 0


def compose_of(compose, folder: str):
    return compose("online.scorer=reward_model", f"online.reward_model={folder}")


def test_processes_share_rows_and_gather_all_weights(compose):
    config = compose("trainer=FSDPTrainer", "eval_batch_size=8", "batch_size=8")
    alone, shared = (phases_of(config, n)["sampling"] for n in (1, 2))
    assert shared.kv_cache == alone.kv_cache / 2
    assert (alone.gathered, shared.gathered) == (0, 4 * PARAMETERS)
    cut = compose("trainer=TensorParallelTrainer", "eval_batch_size=8", "batch_size=8")
    assert phases_of(cut, 2)["sampling"].kv_cache == alone.kv_cache / 2


@pytest.mark.parametrize("settings", [(), ("online.temperature=0.5",), ("online.top_p=0.9", "model.autocast=bfloat16")])
def test_every_way_to_draw_can_be_predicted(settings, compose):
    assert phases_of(compose(*settings))["sampling"].kv_cache > 0


def test_the_peak_of_sampling_is_that_of_real_tensors(compose, tokenizer):
    config, rows = compose("batch_size=8", "eval_batch_size=8", "online.n_samples=8"), 64
    plan, attention = resolve(config), config.model.attn_implementation
    model = load_model(config.model.name_or_path, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    prompts = [tuple(range(5, 13))] * rows
    with MemoryTracker.of(model) as tracker:
        answers = answer(model, tokenizer, prompts, range(rows), Sampling(40))
    assert max(len(one.tokens) for one in answers) == 40
    fake, structure = FakeTensorMode(), find_policy_structure(plan, "float32")
    with fake:
        structure = on_device(structure, "cpu", None)
    options = {"rows": Rounds.of(plan).rows, "n_prompt": 8, "autocast": None}
    found = peak_of_sampling(structure, Sampling(config.online.max_new_tokens), fake, **options)
    assert found.total() == pytest.approx(tracker.peak.total(), rel=0.1)


@pytest.mark.parametrize("family", REWARD_MODELS)
def test_the_peak_of_scoring_is_that_of_real_tensors(family, compose, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", family, tokenizer, template=None, max_position_embeddings=64)
    config = compose_of(compose, folder)
    rounds = Rounds.of(resolve(config))
    real = load_scorer(resolve(config), torch.device("cpu"), rows=4).score
    with MemoryTracker((*real.model.parameters(), *real.model.buffers())) as tracker:
        real.forward([[5] * 48] * 4)
    found = peak_of_scoring(find_reward_structure(resolve(config)), rounds, FakeTensorMode(), "cpu", length=48)
    assert found.total() == pytest.approx(tracker.peak.total(), rel=0.15)


def test_a_reward_model_sees_whole_prompts_up_to_its_positions(compose, tokenizer, tmp_path):
    config = compose("online.max_new_tokens=40", "max_prompt_length=8")
    data = load_data(resolve(config), silent=True)
    lengths = []
    for positions in (512, 50):
        folder = tmp_path / str(positions)
        save_reward_model(folder, "gpt2", tokenizer, template=None, max_position_embeddings=positions)
        reward = find_reward_structure(resolve(compose_of(compose, str(folder))))
        lengths.append(longest_text(reward, resolve(config), data))
    assert lengths == [40 + max(len(tokenizer(prompt.text)["input_ids"]) for prompt in data.train), 50]
    assert longest_prompt(resolve(config), data) == 8


def test_microbatches_are_of_prompts_with_the_longest_answers(compose):
    config = compose("online.max_new_tokens=36", "max_prompt_length=12")  # what is more than 48 is cut to that
    data = load_data(resolve(config), silent=True)
    trained, *_ = _largest_microbatches(resolve(config), data, Padded())
    assert trained.n_tokens == 8 * (12 + 36)
    half = compose("online.max_new_tokens=2", "max_prompt_length=8", "online.mix_offline=0.5", "max_length=24")
    batch = next(LongestAnswers(resolve(half), load_data(resolve(half), silent=True), Padded(), seed=0).train())
    lengths = [len(response) for example in batch.examples for response in example.responses]
    assert sorted(lengths)[:4] == [2] * 4
    assert sorted(lengths)[4:] != [2] * 4


def test_a_dry_run_says_what_drawing_needs(run, capsys, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path / "reward", "gpt2", tokenizer, template=None, max_position_embeddings=44)
    scored = ("online.scorer=reward_model", f"online.reward_model={folder}")
    run("run", "dry_run=true", *ONLINE, *scored)

    said = capsys.readouterr().out
    for line in ("scorer", "training", "sampling", "scoring"):
        assert re.search(rf"^ *{line} +[\d.]+ GB", said, re.MULTILINE), line
    assert "an update samples up to 320 tokens, of 8 answers, in 40 forwards of each process, of 8 rows" in said
    assert "the reward model sees the last 44 tokens of a prompt with its answer, which may have max_length=48" in said


def test_smaller_batches_and_shorter_answers_are_offered(compose, monkeypatch):
    online = [row for row in memory.HELP if row[0] in ("eval_batch_size", "online.max_new_tokens")]
    monkeypatch.setattr(memory, "HELP", online)
    monkeypatch.setattr(memory, "resident_memory", lambda: 0)
    many = ("online.n_samples=64", "gradient_accumulation_steps=4")
    config = compose(*many)
    offered = [text.split(" (")[0] for text in memory.suggest(resolve(config), load_data(resolve(config), silent=True))]
    assert sorted(offered) == ["eval_batch_size=2", "online.max_new_tokens=20"]
