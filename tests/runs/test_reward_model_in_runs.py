"""A reward model in runs: equal scores on any number of processes, and the end of a run that it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.models import save_reward_model
from support.runs import train

ONLINE = (
    "online=online", "online.scorer=reward_model", "online.max_new_tokens=12", "max_length=44", "n_examples=12",
    "batch_size=4",
)  # fmt: skip


@pytest.fixture
def reward_model(tokenizer, tmp_path) -> str:
    return save_reward_model(tmp_path / "reward", "llama", tokenizer)


def test_a_reward_model_that_fails_ends_the_run_with_one_sentence(reward_model, command, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    model.score.weight.data.fill_(torch.nan)
    model.save_pretrained(reward_model)

    result = train(*command("run", *ONLINE, f"online.reward_model={reward_model}"))
    assert result.returncode != 0
    assert f"online.reward_model={reward_model} gave the score nan to the answer" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_continued_run_needs_the_same_reward_model(reward_model, command, tmp_path):
    settings = (*ONLINE, f"online.reward_model={reward_model}", "n_examples=4")
    assert train(*command("run", *settings)).returncode == 0
    file = Path(reward_model, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    Path(reward_model, "chat_template.jinja").unlink(missing_ok=True)

    again = train(*command("run", *ONLINE, f"online.reward_model={reward_model}"), "resume=auto")
    assert again.returncode == 2
    assert f"online.reward_model={reward_model} has changed since the checkpoint: restore it" in again.stderr


def test_a_template_that_rejects_a_prompt_of_the_data_ends_the_run_before_it_trains(tokenizer, command, tmp_path):
    """As Gemma's rejects system messages. The prompt is the last of them."""
    template = "{% for m in messages %}{% if 'number 10' in m['content'] %}{{ raise_exception('not ten') }}{% endif %}"
    model = save_reward_model(tmp_path / "reward", "llama", tokenizer, template=template + "{% endfor %}ok")
    result = train(*command("run", *ONLINE, f"online.reward_model={model}"))
    assert result.returncode == 2
    assert "its tokenizer's chat template rejects the prompt" in result.stderr
    assert "not ten" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
