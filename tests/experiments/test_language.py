"""`experiments.hh` and `experiments.sentiment` as they are run, with models made on the spot."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from support.runs import GOLDEN, write_rows

from experiments.hh import __main__ as hh
from experiments.hh.sweep import COURSE
from experiments.sentiment import __main__ as sentiment
from experiments.sentiment import data, sweep

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PNG = b"\x89PNG"


@pytest.fixture
def _settings(monkeypatch):
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, {"CUDA_VISIBLE_DEVICES": ""}.get(name, "1"))  # which the commands set


@pytest.fixture
def letters(tmp_path):
    """A model of random weights with a token per letter, so that texts are tokenized as they were sampled."""
    directory = tmp_path / "letters"
    vocabulary = {token: i for i, token in enumerate((*LETTERS, "<eos>"))}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    splitter.decoder = tokenizers.decoders.Fuse()
    eos = {"eos_token": "<eos>", "pad_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, **eos).save_pretrained(directory)
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": len(LETTERS), "pad_token_id": len(LETTERS)}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **sizes, **ids)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_settings")
def test_quick_sentiment(letters, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "OPENINGS", tuple(LETTERS[i : i + 2] for i in range(0, len(LETTERS), 2)))
    monkeypatch.setattr(data, "load_lexicon", lambda: lambda text: text.count("a") - text.count("b"))
    command = ["--model", str(letters), "--quick", "--out", str(tmp_path / "out")]
    assert sentiment.main([*command, "--methods", "online_dpo"]) == 0
    rows = json.loads((tmp_path / "out" / "sentiment.json").read_text())
    assert [row["method"] for row in rows] == ["reference", "best_of_n", "best_of_n", "online_dpo"]
    assert sentiment.main(command) == 0
    printed = capsys.readouterr().out
    assert "sentiment: 1 of 4 runs were done before" in printed
    assert "| online_dpo - best_of_n |" in printed

    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "sentiment.json").read_text())}
    assert rows.keys() == {"reference", "best_of_n", *sweep.METHODS}
    assert all(
        (tmp_path / "out" / name).read_bytes().startswith(PNG) for name in ("sentiment.png", "sentiment-dark.png")
    )
    for method in sweep.METHODS:
        assert rows[method]["kl"] > 0
        assert len(rows[method]["rewards"]) == sentiment.QUICK.held_out
        assert np.mean(rows[method]["rewards"]) == pytest.approx(rows[method]["reward"], abs=1e-3)
    assert sentiment.main([*command, "lr=1e-3"]) == 2
    assert "has runs with other settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_settings")
def test_quick_hh(tmp_path, capsys):
    rng, records = np.random.default_rng(0), []
    for n in range(60):
        prompt = f"\n\nHuman: Question {n % 31}\n\nAssistant: Yes?\n\nHuman: {n}\n\nAssistant:"
        chosen, rejected = (" word" * rng.integers(1, 20) for _ in range(2))
        records.append({"chosen": f"{prompt} good{chosen}", "rejected": f"{prompt} bad{rejected}"})
    file = write_rows(tmp_path / "pairs.jsonl", records)
    model, out = GOLDEN / "tiny-llama", tmp_path / "out"
    command = ["--model", str(model), "--pairs", str(file), "--quick", "--out", str(out)]
    overrides = ["max_length=128", "max_prompt_length=64", "model.autocast=null", "n_eval_examples=1000"]
    assert hh.main([*command, "--methods", "dpo-0.1,kto-0.1", *overrides]) == 0
    rows = sorted(json.loads((out / "hh.json").read_text()), key=lambda row: row["method"])  # written as runs end
    assert [row["method"] for row in rows] == ["dpo-0.1"] * COURSE + ["kto-0.1"] * COURSE + ["reference"]
    reference, last = rows[-1], [row for row in rows if row.get("share") == 1.0]
    for row in last:  # the trainer evaluated the same pairs
        assert len(row["kl"]) == hh.QUICK.kl_prompts
        lines = (out / "hh-runs" / "runs" / f"{row['method']}-fold-0" / "metrics.jsonl").read_text().splitlines()
        evaluation = json.loads(lines[-1])
        for role in ("chosen", "rejected"):
            assert evaluation[f"rewards_eval/{role}"] == pytest.approx(0.1 * np.mean(row[role]), abs=1e-5)
            assert np.abs(row[role]).max() > 1e-3
        assert row["pairs"] == reference["pairs"]
    assert max(reference["chosen"]) < 0
    assert "| KTO, beta 0.1 |" in capsys.readouterr().out
    assert all((out / name).read_bytes().startswith(PNG) for name in ("hh.png", "hh-dark.png"))


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (sentiment.main, ["los=dpo"], "los"),
        (sentiment.main, ["--methods", "dpo,rlhf"], "unknown rlhf"),
        (hh.main, ["--pairs", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(main, arguments, said, tmp_path, capsys):
    try:
        status = main([*arguments, "--model", "DIR", "--out", str(tmp_path / "out")])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err
