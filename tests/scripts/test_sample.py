"""`python -m scripts.sample` answers as the models do, with the loss's rewards."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from support.models import COMMON
from support.runs import GOLDEN, write_rows

from dpo.data.examples import Example
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.losses import preference_loss
from dpo.models.answers import Sampling
from dpo.models.export import export
from dpo.models.layouts import Padded
from dpo.models.pretrained import Source, load_model
from dpo.models.side_by_side import Panel, Side, load_panel
from scripts.sample import converse, main

LLAMA = str(GOLDEN / "tiny-llama")
ASKED = ["Where is the red umbrella?", "Hello!", "Who has seen the old map, and when?", "Is it still here?"]


def load(archive: Path | None = None):
    return load_model(
        Source(LLAMA), dtype=torch.float32, archive=archive and str(archive), attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run whose policy has moved away from its reference."""
    run = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    state = {key: tensor + 0.02 * torch.randn(tensor.shape) for key, tensor in load().state_dict().items()}
    (run / "step-8").mkdir(parents=True)
    torch.save({"step_idx": 8, "state": state, "metrics": None}, run / "step-8" / "policy.pt")
    (run / "LATEST").symlink_to("step-8")
    (run / "config.yaml").write_text(
        f"datasets: [hh]\nloss: {{name: dpo, beta: 0.3}}\nmodel: {{name_or_path: {LLAMA}, reference_dtype: float32}}\n"
    )
    return run


@pytest.fixture(scope="module")
def panel(run_dir):
    return load_panel(run_dir)


def answered(run_dir: Path, out: Path, *more: str) -> list[dict]:
    """Answer a file of prompts; return the answers."""
    file = write_rows(out.with_suffix(".prompts.jsonl"), [{"prompt": text} for text in ASKED])
    arguments = [str(run_dir), "--file", str(file), "--out", str(out), "--max-new-tokens", "12", *more]
    assert main(arguments) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_chat_is_asked_as_in_training(panel, tokenizer):
    """Control tokens in messages are text, and a prefilled answer goes on."""
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    begun = [{"role": "user", "content": "Write <|endoftext|>"}, {"role": "assistant", "content": "It is "}]
    ids = panel._replace(encoder=TextEncoder(chatty), form="chat").encode(begun, "here", Sampling(8))
    assert chatty.decode(ids) == "<user>Write <|endoftext|><|endoftext|><assistant>It is "
    assert ids.count(chatty.eos_token_id) == 1


def test_greedy_answers_are_those_of_generate(run_dir, tokenizer, tmp_path):
    records = answered(run_dir, tmp_path / "a.jsonl", "--temperature", "0")

    for name, model in (("policy", load(run_dir)), ("reference", load())):
        for text, record in zip(ASKED, records, strict=True):
            ids = tokenizer(f"\n\nHuman: {text}\n\nAssistant:", return_tensors="pt")["input_ids"]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert record[name] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert record["tokens"]["prompt"] == ids.shape[1]
            assert record["tokens"][name] == out.shape[1] - ids.shape[1]


def test_rewards_are_those_of_the_loss(run_dir, panel):
    prompts = [panel.encode(text, "here", Sampling(12)) for text in ASKED]
    answers = [panel.answer(side, prompts, range(4), Sampling(12)) for side in panel.sides]
    pairs = [
        Example(prompt, (ours.tokens, theirs.tokens)) for prompt, ours, theirs in zip(prompts, *answers, strict=True)
    ]
    [microbatch] = Padded().split(pairs, 1)
    with torch.no_grad():
        logps = [
            row for model in (load(run_dir), load()) for row in Padded().forward(model, microbatch.inputs).logps.sum(-1)
        ]
    _, chosen, rejected = preference_loss(*logps, beta=0.3)
    assert max(map(abs, chosen.tolist())) > 0.1
    for of_side, expected in zip(answers, (chosen, rejected), strict=True):
        assert panel.rewards(prompts, of_side) == pytest.approx(expected.tolist(), abs=1e-4)


def test_batches_change_nothing_and_seeds_do(run_dir, tmp_path):
    options = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "5")
    one, all_at_once = (answered(run_dir, tmp_path / f"{n}.jsonl", *options, "--batch-size", n) for n in ("1", "4"))
    for a, b in zip(one, all_at_once, strict=True):
        assert {**a, "rewards": None} == {**b, "rewards": None}
        assert a["rewards"] == pytest.approx(b["rewards"], abs=1e-4)
    another = answered(run_dir, tmp_path / "6.jsonl", *options[:-1], "6")
    assert [r["policy"] for r in another] != [r["policy"] for r in one]


def test_a_plain_directory_has_no_reference_unless_one_is_given(run_dir, tmp_path, capsys):
    [first, *_] = answered(GOLDEN / "tiny-llama", tmp_path / "a.jsonl", "--format", "hh")
    assert "no reference is known" in capsys.readouterr().out
    assert (first["reference"], first["rewards"]) == (None, {"policy": None})

    [first, *_] = answered(run_dir, tmp_path / "b.jsonl", "--no-reference")
    assert (first["reference"], first["rewards"]) == (None, {"policy": None})

    given = ("--reference", LLAMA, "--beta", "0.3")
    assert answered(run_dir, tmp_path / "c.jsonl", *given) == answered(run_dir, tmp_path / "d.jsonl")
    [first, *_] = answered(GOLDEN / "tiny-llama", tmp_path / "e.jsonl", "--reference", str(run_dir), "--beta", "2")
    assert first["rewards"]["policy"] is not None


def test_auto_asks_as_the_run_was_trained_and_so_does_its_export(run_dir, tmp_path):
    home, run = shutil.copytree(LLAMA, tmp_path / "base"), tmp_path / "run"
    settings = json.loads((home / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (home / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (run / "step-8").mkdir(parents=True)
    os.link(run_dir / "step-8" / "policy.pt", run / "step-8" / "policy.pt")
    (run / "config.yaml").write_text(
        f"datasets: [mine]\nloss: {{name: dpo, beta: 0.3}}\nmodel: {{name_or_path: {home}}}\n"
    )
    panels = {}
    for form in ("chat", "hh", "raw", None):
        record = {} if form is None else {"prompt_formats": {"mine": form}}
        (run / "preflight.json").write_text(json.dumps({"train": {"examples": 8, "prompts": 8, **record}}))
        out = export(run / "step-8", tmp_path / f"out-{form}")
        panels[form] = [load_panel(path).form for path in (run / "step-8", out)]
    assert panels == {"chat": ["chat"] * 2, "hh": ["hh"] * 2, "raw": ["raw"] * 2, None: ["chat"] * 2}
    assert r"Form of a prompt: `\n\nHuman: ...\n\nAssistant:`." in (tmp_path / "out-hh" / "README.md").read_text()
    for odd_card in (b"---\n- mit\n---\n", b"---\nlicense: [\n---\n", b"---\nlicense: mit\n---\n\xff\xfe"):
        (tmp_path / "out-hh" / "README.md").write_bytes(odd_card)
        assert load_panel(tmp_path / "out-hh").form == "chat"


def test_a_reference_with_another_tokenizer_is_refused(run_dir, tmp_path, tokenizer):
    other = shutil.copytree(LLAMA, tmp_path / "other")
    renamed = copy.deepcopy(tokenizer)
    renamed.add_tokens(["<new>"])
    renamed.save_pretrained(other)
    with pytest.raises(InputError, match="other has another tokenizer than the policy"):
        load_panel(run_dir, reference=str(other))


def test_a_prompt_with_a_mark_for_an_image_is_refused(tokenizer, panel):
    seeing = copy.deepcopy(tokenizer)
    seeing.media_tokens = ["<image>"]
    with pytest.raises(InputError, match=r"^here: the prompt has <image>, which stands for an image"):
        panel._replace(encoder=TextEncoder(seeing)).encode("What is in <image>?", "here", Sampling(8))


@pytest.mark.parametrize(
    "rope",
    [None, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}],  # a long row changes its batch
)
def test_a_prompt_must_fit_the_models_positions(rope, tokenizer):
    own = transformers.GPT2Config(vocab_size=1024, n_embd=8, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    if rope:
        sizes = COMMON | {"vocab_size": 1024}
        own = transformers.LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(own)
    panel = Panel([Side("policy", model)], TextEncoder(tokenizer), "raw")
    with pytest.raises(InputError, match=r"^here: .* are more than the 16 positions of the policy"):
        panel.encode(" Where is the map?", "here", Sampling(12))


def test_bad_input_is_a_sentence_and_status_2(run_dir, tmp_path, capsys):
    run, file = str(run_dir), str(write_rows(tmp_path / "p.jsonl", [{"prompt": "Hello"}, {"prompt": 3}]))
    roles = str(write_rows(tmp_path / "roles.jsonl", [{"prompt": [{"role": "system", "content": "Be kind."}]}]))
    out = ["--out", str(tmp_path / "out.jsonl")]
    for arguments, said in (
        ([f"{run}-nowhere"], "does not exist"),
        ([f"{run}/step-8/policy.pt", "--model", "nowhere/at/all"], "does not exist: give --model"),
        ([run, "--file", f"{file}l", *out], "is not a file"),
        ([run, "--file", file, *out], "record 2 of .*prompt is 3, and must be text or a list of messages"),
        ([run, "--file", roles, *out], "record 1 of .*has no role system"),
        ([run, "--format", "chat"], "has no chat template"),
        ([run, "--file", file, "--out", roles], "exists already, or its directory does not"),
        ([run, "--reference", f"{run}-nowhere"], "does not exist"),
    ):
        assert main(arguments) == 2, said
        [error] = capsys.readouterr().err.splitlines()
        assert re.match(f"error: .*{said}", error)


@pytest.mark.parametrize("form", ["hh", "chat", "raw"])
def test_each_side_continues_its_own_conversation_until_it_is_reset(form, panel, tokenizer, monkeypatch, capsys):
    tokenizer = copy.deepcopy(tokenizer)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    asked: dict[str, list] = {"policy": [], "reference": []}
    draw = Panel.answer

    def listen(self, side, prompts, *rest, **options):
        [answer] = draw(self, side, prompts, *rest, **options)
        asked[side.name].append((tokenizer.decode(prompts[0]), answer.text.strip()))
        return [answer]

    monkeypatch.setattr(Panel, "answer", listen)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\n\nTwo?\n/reset\nOne?\n"))
    converse(panel._replace(encoder=TextEncoder(tokenizer), form=form), Sampling(6))

    said = {"hh": "\n\nHuman: {}\n\nAssistant:", "chat": "<user>{}<assistant>", "raw": "{}"}[form]
    for turns in asked.values():
        (first, answer), (second, _), (after_reset, _) = turns
        assert first == after_reset == said.format("One?")
        gap = " " if form == "hh" else ""
        history = "" if form == "raw" else f"{first}{gap}{answer}"
        assert second == history + said.format("Two?")
    shown = capsys.readouterr().out
    assert shown.count("(reward ") == 6
    for turns in asked.values():  # answers are printed while they are drawn, without what steers a terminal
        assert all(re.sub(r"[^\n\t -~\xa0-\U0010ffff]", "\ufffd", text) in shown for _, text in turns)


def test_ctrl_c_ends_an_answer_and_not_the_session(panel, monkeypatch, capsys):
    draw = Panel.answer

    def interrupted(self, side, prompts, numbers, *rest, **options):
        if numbers == [0]:
            raise KeyboardInterrupt
        return draw(self, side, prompts, numbers, *rest, **options)

    monkeypatch.setattr(Panel, "answer", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    converse(panel, Sampling(4))
    shown = capsys.readouterr().out
    assert "\nended\n" in shown
    assert shown.count("(reward ") == 2  # of the second prompt
