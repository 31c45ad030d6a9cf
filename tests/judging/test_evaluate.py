"""`dpo evaluate`: answers, judges and files, from one command to the next."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.formats import ASK, SKY, WITH_TOOLS, assistant, encode
from support.models import save_reward_model
from support.pytests import refused
from support.runs import TINY, change_json, make_environment, read_rows, write_rows
from support.templates import BEGIN, make
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dpo.commands.evaluate import main
from dpo.commands.sample import main as sample
from dpo.data.custom import get_custom
from dpo.data.schema import Prompt
from dpo.data.table import number_prompts
from dpo.judging.answers import ANSWER_FORM, ANSWER_MARK, encode_for, list_labelled
from dpo.judging.page import check_files
from dpo.models.generation import LoadedModel
from dpo.models.scoring import POLICY_FORMAT, RewardModel
from dpo.system.host import is_installed
from dpo.system.plain_files import JsonLinesStore, read_json

SHORT = ("--max-new-tokens", "6", "--out", "out")


@pytest.fixture
def run_dir(copied, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(prompts, answers):\n    return [len(answer) for answer in answers]\n")
    return copied("run", "lr=1e-2")


def evaluate(*arguments: object) -> int:
    """Return the status of `dpo evaluate`, with short answers, into `out`."""
    return main([*(str(argument) for argument in arguments), *SHORT])


def read_result(kind: str = "function") -> dict:
    return read_json(Path("out", f"evaluation-{kind}.json"))


def test_a_run_is_judged_by_a_function_on_its_held_out_prompts_beside_its_start(run_dir, printed):
    assert evaluate(run_dir, "--judge", "function:mine.py:score") == 0
    result, page = read_result(), Path("out/evaluation-function.html").read_text()
    answers = read_rows(Path("out/answers.jsonl"))
    lengths = {name: [len(a["answer"]) for a in answers if a["model"] == name] for name in ("run/step-24", "its start")}
    wins = sum(a > b for a, b in zip(*lengths.values(), strict=True))
    assert (result["n"], result["wins"]) == (len(answers) // 2, wins)
    assert result["sentences"][0] in printed()
    assert page.count('class="card"') == len(answers) // 2 + len(result["rates"])

    assert evaluate(run_dir, run_dir, "--judge", "function:mine.py:score") == 0
    [file] = Path("out").glob("evaluation-function-*.json")  # the other result is kept
    assert read_json(file)["ties"] == result["n"]  # the run beside itself: equal answers, the first of which are kept
    assert len(Path("out/answers.jsonl").read_text().splitlines()) == len(answers)


@pytest.mark.parametrize(
    ("judge", "name"), [("human", "pairs.jsonl"), ("function:mine.py:score", "answers.jsonl")], ids=lambda value: value
)
def test_a_file_of_the_user_is_neither_replaced_nor_cut(judge, name, run_dir, capsys):
    theirs = write_rows(Path("out", name), [{"prompt": "Hi", "chosen": "Hello.", "rejected": "What?"}])
    theirs.write_text(content := theirs.read_text().rstrip())  # without a newline at its end
    assert evaluate(run_dir, "--judge", judge) == 2
    assert f"error: {theirs} is none of the files that this command writes" in capsys.readouterr().err
    assert theirs.read_text() == content
    assert [path.name for path in theirs.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["evaluation-server.html", "evaluation-server.json", "judged-server.jsonl"])
def test_files_of_an_evaluation_are_known_by_their_beginning(name, tmp_path):
    for content in ('{"prompt": "Hi", "chosen": "Hello."}\n', "<!doctype html><title>Mine</title>"):
        (tmp_path / name).write_text(content)
        with refused("move it away, or choose another directory"):
            check_files(tmp_path, "server")
    (tmp_path / name).write_text("")  # nothing would be lost
    check_files(tmp_path, "server")


def test_people_judge_on_a_page_that_does_not_say_whose_answer_is_where(run_dir, printed):
    assert evaluate(run_dir, "--judge", "human") == 0
    assert "then repeat this command with --judge verdicts:" in printed()
    page = Path("out/judge.html").read_text()
    pairs, drawn = (json.loads(re.search(rf"const {name} = (.*);", page)[1]) for name in ("pairs", "drawn"))
    assert len(pairs) > 3
    assert "its start" not in page
    verdicts = [{"pair": pair["pair"], "better": "left", "drawn": drawn} for pair in pairs[1:]]
    write_rows(Path("verdicts.jsonl"), verdicts)
    assert read_rows(Path("out/pairs.jsonl")) == pairs
    assert main([str(run_dir), "--judge", "verdicts:verdicts.jsonl", "--out", "out"]) == 0
    result = read_result("verdicts")
    assert result["n"] + 1 == len(pairs) == result["n"] + result["invalid"]


def test_prompts_of_a_file_are_asked_of_any_two_models_that_have_room_for_them(run_dir, tokenizer, capsys):
    for name in ("first", "second"):
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40}
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(name)
        tokenizer.save_pretrained(name)
    rows = [{"prompt": f"Where is {i}?", "chosen": "Here.", "rejected": "Nowhere at all."} for i in range(5)]
    write_rows(Path("asked.jsonl"), [*rows, {"prompt": "Where? " * 40, "chosen": "Here.", "rejected": "There."}])
    arguments = ["--judge", "function:mine.py:score", "--prompts", "asked.jsonl", *SHORT]
    assert main(["first", "second", *arguments]) == 0
    result = read_result("function-second")
    assert (result["n"], result["agreement"][0]) == (5, 0)  # the judge likes the longer answer, which is rejected
    assert "1 prompt left out, too long" in capsys.readouterr().out
    assert main(["first", "second", *arguments, "--max-new-tokens", "40"]) == 2
    assert "no prompt is left" in capsys.readouterr().err


def test_a_prompt_with_a_control_token_is_refused_and_named(chat):
    model = LoadedModel("first", None, chat(WITH_TOOLS), "chat")
    with refused(r"the prompt 'Say <.*>': content of a message .* has the control token '<\|endoftext"):
        encode_for(model, Prompt("Say <|endoftext|>", [], []), None, n_new=8)


def test_labelled_responses_are_judged_as_answers_are_and_rewarded_as_in_training(chat, tiny_llama):
    tokenizer = chat(make(BEGIN + "{{ m.content }}<end>\n"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.end_tokens = ["<end>"]
    row = {"prompt": ASK, "chosen": SKY, "rejected": [assistant("Red.")]}
    read = partial(get_custom, [row], "mine", tokenizer)
    [pair] = list_labelled(list(number_prompts([("mine", read())])), tokenizer)
    assert (pair.first.text, pair.second.text) == ("Blue.", "Red.")  # what is drawn has no special tokens
    reward_model = RewardModel(tiny_llama, tokenizer, rows=1, form=POLICY_FORMAT)
    [example] = encode(read(), tokenizer)
    assert reward_model.encode(pair.prompt, pair.first)["input_ids"] == [*example.prompt, *example.responses[0]]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--judge", "gpt-4"], "--judge gpt-4 is not known: choose human"),
        (["--judge", "verdicts:none.jsonl"], "none.jsonl cannot be read"),
        (["--judge", "function:mine.py:other"], "has no function other"),
        (["--judge", "function:mine.py"], "mine.py has no function mine.py"),
        (["--judge", "human", "--prompts", "none.jsonl"], "none.jsonl does not exist"),
        (
            ["--judge", "http://127.0.0.1:1", "--judge-model", "m", "--template", "paper"],
            "--template paper is neither a file nor",
        ),
        (["--judge", "http://127.0.0.1:1"], "needs --judge-model NAME"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(run_dir, arguments, reason, capsys):
    assert evaluate(run_dir, *arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_model_without_a_run_says_what_is_missing(run_dir, capsys):
    assert evaluate(TINY, "--judge", "human") == 2
    assert "does not say what it was trained from: add OTHER" in capsys.readouterr().err
    assert evaluate(TINY, run_dir, "--judge", "human") == 2
    assert "held out no prompts: pass --prompts FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_model_judges(run_dir, tokenizer, tmp_path):
    model = save_reward_model(tmp_path / "reward", "llama", tokenizer)
    assert evaluate(run_dir, "--judge", f"reward_model:{model}") == 0
    result = read_result("reward_model")
    assert sum(result[name] for name in ("wins", "ties", "losses")) == result["n"]


# --- what is not ours -------------------------------------------------------------------------------------------------


def save_model_that_says_a(folder: Path) -> Path:
    """A language model that answers A to everything: the embedding of each token but A leads to A, and A's to EOS."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    [token] = tokenizer("A", add_special_tokens=False)["input_ids"][-1:]
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size, max_position_embeddings=4096))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = model.lm_head.weight[token, 0] = 1
        model.model.embed_tokens.weight[token] = torch.eye(8)[1]
        model.lm_head.weight[tokenizer.eos_token_id, 1] = 1
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_real_server_judges(run_dir, tmp_path):
    if not is_installed("fastapi"):
        pytest.skip("transformers serve needs fastapi: pip install 'dpo-train[eval]'")
    model = save_model_that_says_a(tmp_path / "judge")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [shutil.which("transformers", path=str(Path(sys.executable).parent)), "serve", str(model)]
    server = subprocess.Popen([*command, "--port", str(port)], env=make_environment(), stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        url = f"http://127.0.0.1:{port}/v1"
        arguments = ["--judge", url, "--judge-model", str(model), "--template", "paper_dialogue", "--limit", "5"]
        assert evaluate(run_dir, *arguments) == 0
    finally:
        server.terminate()
        server.wait()
    result = read_result("server")
    assert (result["ties"], result["flipped"], result["invalid"]) == (result["n"], result["n"], 0)
    assert result["sentences"][1] == "In 100 % of the pairs the order of the answers decided, which counts as a tie."


TASK = """\
task: where
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_lm_eval_runs_a_task_of_ones_own_on_the_exported_model(copied, tmp_path):
    if not is_installed("lm_eval"):
        pytest.skip("lm-eval is not installed: pip install 'dpo-train[eval]'")
    run_dir = copied("run", "export=true")
    write_rows(tmp_path / "where.jsonl", [{"question": "Where?", "choices": ["Here", "There"], "answer": 0}] * 4)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "where.yaml").write_text(TASK.format(file=tmp_path / "where.jsonl"))
    assert main([str(run_dir), "--lm-eval", "where", "--include-path", str(tmp_path / "tasks")]) == 0
    [file] = (run_dir / "evaluation" / "lm-eval").rglob("results_*.json")
    assert read_json(file)["results"]["where"]["acc,none"] in (0, 1)


def test_lm_eval_gets_an_adapter_with_the_base_that_it_was_trained_on(copied, run, tmp_path, monkeypatch):
    base = copied("sft", "loss=sft", "export=true") / "step-24" / "hf"
    run("lora", "lora=lora", f"model.archive={tmp_path}/sft/LATEST", "n_examples=4", "export=true")
    given = []
    monkeypatch.setattr(subprocess, "run", lambda args, **_: given.append(args) or SimpleNamespace(returncode=0))
    monkeypatch.setattr("dpo.commands.evaluate.is_installed", lambda package: True)
    assert main([str(tmp_path / "lora"), "--lm-eval", "where", "--trust-remote-code"]) == 0
    adapter = tmp_path / "lora" / "step-4" / "hf"
    assert f"pretrained={base},peft={adapter},trust_remote_code=True" in given[0]
    change_json(adapter / "adapter_config.json", base_model_name_or_path="first,second")
    assert main([str(tmp_path / "lora"), "--lm-eval", "where"]) == 2  # lm-eval would split the name


@pytest.mark.parametrize("option", ["--seed -1", "--top-k -3", "--max-new-tokens 0", "--temperature nan", "--top-p 2"])
def test_options_of_answers_are_checked_as_the_keys_of_a_run(option, capsys):
    for command in (main, sample):
        with pytest.raises(SystemExit):
            command(["run", *(["--judge", "human"] if command is main else []), *option.split()])
        assert re.search(r"must be (an integer|a number)", capsys.readouterr().err)


@pytest.mark.parametrize("line", ['{"key": 3}', "[" * 50_000, "no JSON"])
def test_a_file_of_answers_that_is_damaged_is_named_with_the_line(line, tmp_path):
    path = tmp_path / "answers.jsonl"
    begins = '{"key": "0123456789abcdef", "model": "m", "answer": "a", "tokens": [1], "ended": true}'
    path.write_text(f"{begins}\n{line}\n")
    with refused("line 2 of .*answers.jsonl cannot be read: move the file away"):
        JsonLinesStore(path, ANSWER_MARK, ANSWER_FORM)


def test_two_models_of_one_name_are_called_by_their_paths(run_dir, tmp_path, printed):
    asked = write_rows(tmp_path / "three.jsonl", [{"prompt": f"Where is {i}?"} for i in range(3)])
    for name in ("a", "b"):
        shutil.copytree(TINY, tmp_path / name / "hf")
    assert evaluate("a/hf", "b/hf", "--judge", "function:mine.py:score", "--prompts", asked) == 0
    assert "a/hf wins 0, ties 3 and loses 0 of 3 prompts against b/hf" in printed()
