"""Input from outside is data: right, or refused in one sentence.

Nothing in it is executed, and no file is waited for.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.commands import RUNS, find_refusals
from support.pytests import refused, slow, succeeded
from support.runs import GOLDEN, PARTS, Bomb, change_manifest, train, write_rows, write_steps

from dpo.checkpoint.files import (
    MANIFEST,
    check_complete,
    prune,
    read_state,
    set_link,
    tidy,
)
from dpo.commands.export import main as export
from dpo.commands.verify import main as verify
from dpo.data.custom import DataOptions
from dpo.data.examples import iterate_examples, read_examples
from dpo.data.loading import load_splits
from dpo.data.report import SplitCounter
from dpo.data.table import PromptTable, number_prompts, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.models.layouts import Padded, SharedPrefix
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_config
from dpo.preference_datasets import find_examples, get_collate_fn, make_rows
from dpo.reporting.events import RunContext
from dpo.reporting.files import FileLogger
from dpo.settings.plan import resolve
from dpo.system.launching import get_open_port
from dpo.system.plain_files import check_readable, read_json
from dpo.system.run_directory import get_local_dir, read_run_facts
from dpo.training.objective import read_logps

FUZZ = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def checkpoint(copied) -> Path:
    """The checkpoint of a complete run in `run_dir`."""
    return copied("run", "n_examples=8") / "step-8"


def vouch_for_file(file: Path, content: bytes) -> None:
    """Write a checkpoint's file, with its checksums in the manifest."""
    file.write_bytes(content)
    files = read_json(file.parent / MANIFEST)["files"]
    facts = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    change_manifest(file.parent, files={**files, file.name: facts})


# --- code that nobody asked for ------------------------------------------------------------------------------------


def make_bomb(proof: Path) -> bytes:
    """A file of torch that leaves `proof` if its code runs."""
    content = io.BytesIO()
    torch.save({"step_idx": 8, "state": {"a": Bomb(proof)}, "metrics": None}, content)
    return content.getvalue()


@pytest.mark.parametrize("part", ["policy", *(slow(part) for part in PARTS if part != "policy")])
def test_code_in_a_checkpoint_is_refused_and_not_run_even_if_the_manifest_vouches_for_it(
    part, checkpoint, run, tmp_path
):
    vouch_for_file(checkpoint / f"{part}.pt", make_bomb(tmp_path / "proof"))
    with refused(rf"{part}\.pt"):
        run("run", "resume=auto")
    assert not (tmp_path / "proof").exists()


def test_code_in_a_cache_is_refused_and_not_run(run, tmp_path):
    """`test_weights.py` has the test for an archive."""
    run("b", "n_examples=4", "cache_reference_logps=all")
    [cache] = tmp_path.rglob("reference_logps/*.npz")
    cache.write_bytes(pickle.dumps(Bomb(tmp_path / "proof")))
    with refused("is not a file of reference log-probabilities"):
        run("c", "n_examples=4", "cache_reference_logps=all")
    assert not (tmp_path / "proof").exists()


def test_values_of_another_type_in_a_manifest_are_one_sentence_of_every_command(checkpoint, run, tmp_path, capsys):
    manifest = read_json(checkpoint / MANIFEST)
    wrong = {"files": None, "model": [], "config": [], "chat_template": {"chat_template": 1}, "updates": "x"}
    for name, value in wrong.items():
        change_manifest(checkpoint, **{**manifest, name: value})
        assert export([str(checkpoint), str(tmp_path / "out")]) == 2
        assert verify([str(checkpoint)]) == 1
        said = capsys.readouterr()
        sentence = f"{checkpoint / MANIFEST} has values of another type than a run writes: {name}\n"
        assert (said.err, said.out) == (f"error: {sentence}", f"damaged  {sentence}")
    with refused(r"finds no complete checkpoint.* has values of another type .*: updates"):
        run("run", "resume=auto")


def test_records_of_another_form_are_no_records(checkpoint, tmp_path):
    record = checkpoint.parent / "env.json"
    for changes in ({"started": "x"}, {"run": []}, {"seconds_before": "x"}):
        record.write_text(json.dumps({"packages": {}, "git_commit": None, "started": "2026-01-01", **changes}))
        assert read_run_facts(checkpoint.parent) == {}
    (checkpoint.parent / "preflight.json").write_text('{"train": [1]}')
    record.write_text("[]")
    assert export([str(checkpoint), str(tmp_path / "out")]) == 0


def test_reference_logps_that_cannot_be_written_cost_a_warning(run, run_dir, tmp_path, printed):
    folder = Path(get_local_dir([str(tmp_path)]))
    folder.mkdir()
    (folder / "reference_logps").touch()  # where a directory is wanted
    run("run", "n_examples=4", "cache_reference_logps=all", "do_first_eval=false")
    assert "so another run scores the reference's examples again: " in printed()
    assert (run_dir / "LATEST").exists()


def test_code_of_a_model_is_not_run_whatever_somebody_at_a_terminal_would_answer(tmp_path, monkeypatch):
    """That it runs if it was asked for is in `test_trust.py`."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'proof')!r}).touch()\n")
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    with refused(r"Python code.*model\.trust_remote_code=true"):
        load_config(ModelPath(str(tmp_path)))
    assert not (tmp_path / "proof").exists()


def test_no_override_names_code_to_run(tmp_path):
    overrides = f"+hydra.callbacks.c._target_=os.mkdir +hydra.callbacks.c.path={tmp_path}/proof"
    said = " ".join(find_refusals(f"{RUNS} loss=dpo loss.beta=0.1 {overrides}"))
    assert "hydra.callbacks.c._target_ may not be set: of Hydra's own keys" in said
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/../../escaped"])
def test_names_of_datasets_cannot_escape(name, tmp_path):
    folder = shutil.copytree(GOLDEN / "words", tmp_path / "data")
    before = set(os.listdir(tmp_path))
    assert load_splits(name, None, {name: str(folder)}, silent=True, cache_dir=str(tmp_path / "cache"))
    assert set(os.listdir(tmp_path)) - before <= {"cache"}


# --- secrets --------------------------------------------------------------------------------------------------------


def test_secrets_reach_no_file_and_no_log(command, run_dir):
    secrets = {"WANDB_API_KEY": "wandb-0123456789", "HF_TOKEN": "hf_0123456789", "MY_SECRET": "s3cr3t-0123456789"}
    overrides = ("wandb.enabled=true", "wandb.project=${oc.env:MY_SECRET}", "exp_name=x-${oc.env:HF_TOKEN}")
    result = succeeded(train(*command("run", *overrides, "n_examples=4"), **secrets, WANDB_MODE="offline"))

    texts = {"stdout": result.stdout, "stderr": result.stderr}
    texts |= {str(f): f.read_bytes().decode(errors="replace") for f in run_dir.rglob("*") if f.is_file()}
    assert {name for name, text in texts.items() if any(secret in text for secret in secrets.values())} == set()
    assert "project: REDACTED" in (run_dir / "config.yaml").read_text()
    wrong = train(*command("wrong", "exp_name=/${oc.env:HF_TOKEN}"), **secrets)
    rank_env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(get_open_port())}
    archive = ("trainer=FSDPTrainer", "model.archive=/nowhere/${oc.env:HF_TOKEN}")
    launched = train(*command("launched", *archive), **secrets, **rank_env)
    swept = train("-m", *command("swept", f"exp_name={secrets['HF_TOKEN']}"), **secrets)
    assert [result.returncode for result in (wrong, launched, swept)] == [2, 2, 2]
    assert secrets["HF_TOKEN"] not in wrong.stdout + wrong.stderr
    assert "/nowhere/REDACTED does not exist" in launched.stderr
    assert "exp_name holds a secret, and a sweep writes" in swept.stderr


# --- files that are no files ---------------------------------------------------------------------------------------


def make(kind: str, path: Path) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to({"device": "/dev/zero", "symbolic link": path.parent / "elsewhere", "loop": path}[kind])


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "device"])
def test_what_is_no_file_is_not_read(kind, tmp_path):
    odd, whole = tmp_path / "shard-a-1.safetensors", tmp_path / "a.pt"
    make(kind, odd)
    torch.save({"state": 0}, whole)
    for read in (check_readable, partial(read_logps, shape=(1, 2)), read_state, lambda _: read_state(whole)):
        with refused("1.safetensors is not a regular file"):
            read(odd)


@pytest.mark.parametrize("kind", ["directory", "symbolic link", "FIFO", "loop"])
def test_temporary_files_and_links_are_removed_and_what_links_point_to_stays(kind, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    write_steps(tmp_path, 8)
    for name in (".step-8.dpo-tmp", ".step-8.dpo-former", ".step-16.dpo-tmp"):
        make(kind, tmp_path / name)
    [saved, *_] = write_steps(tmp_path, 8, 16, 24, 32)
    set_link(tmp_path / "LATEST", saved)
    prune(tmp_path, 2, None)
    check_complete(saved)
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "elsewhere", "step-24", "step-32", "step-8"]
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_checkpoint_cuts_off_no_files_but_its_logs(run_dir, tmp_path):
    victims, lines = [tmp_path / "a", tmp_path / "b"], '{"a": 1}\n{"a": 2}\n'
    run_dir.mkdir()
    for victim in (*victims, run_dir / "metrics.jsonl"):
        victim.write_text(lines)
    logger = FileLogger(RunContext(resolve(OmegaConf.create()), run_dir, 0, None, print))
    logger.load_state_dict({"log_bytes": {str(victims[0]): 0, "../b": 0, "metrics.jsonl": 9}})
    logger.on_start()
    assert [victim.read_text() for victim in victims] == [lines] * 2
    assert (run_dir / "metrics.jsonl").read_text() == '{"a": 1}\n'


# --- fuzzing -------------------------------------------------------------------------------------------------------

ODD_TEXTS = st.one_of(
    st.text(alphabet=st.characters(), max_size=40),  # lone surrogates and NUL among them
    st.sampled_from(["", " ", "\u202e\u2028", "</s>", "\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b"]),
    st.integers(1, 20_000).map("x".__mul__),
)
ODD_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ODD_TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ODD_TEXTS})
FIELDS = st.one_of(ODD_TEXTS, st.lists(MESSAGE, max_size=3), ODD_VALUES)
DIALOGUE = ODD_TEXTS.map("\n\nHuman: Why?\n\nAssistant:{}".format)
WELL_FORMED = st.one_of(
    st.fixed_dictionaries({"prompt": ODD_TEXTS.map("Q".__add__), "chosen": ODD_TEXTS, "rejected": ODD_TEXTS}),
    st.fixed_dictionaries({"chosen": DIALOGUE, "rejected": DIALOGUE}),
)
ILL_FORMED = st.one_of(
    st.fixed_dictionaries({"chosen": FIELDS, "rejected": FIELDS}, optional={"prompt": FIELDS}),
    st.dictionaries(st.text(max_size=8), ODD_VALUES, max_size=3),
    ODD_VALUES,
)
ROWS = st.lists(WELL_FORMED, min_size=1, max_size=4) | st.lists(WELL_FORMED | ILL_FORMED, min_size=1, max_size=4)


@FUZZ
@given(rows=ROWS, trains_on=st.sampled_from(["pairs", "targets"]), name=st.sampled_from(["own", "hh"]))
def test_any_rows_are_refused_in_words_or_make_right_batches(rows, trains_on, name, tokenizer, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    lengths = {"max_length": 24, "max_prompt_length": 12}
    encode = TextEncoder(tokenizer)
    try:
        counter = SplitCounter(encode, DataOptions(**lengths))
        train, _ = load_splits(name, tokenizer, {name: str(file)}, trains_on=trains_on, silent=True)
        write_prompts(tmp_path / "prompts.jsonl", counter.count_texts(number_prompts([(name, train)])))
        prompts = PromptTable(tmp_path / "prompts.jsonl")
        counter.count_tokens(prompts)
    except InputError:
        return
    order = {"batch_size": 1, "shuffle": True, "n_epochs": 1, "n_examples": None, "seed": 0}
    for places in iterate_examples(prompts.counts.tolist(), **order):
        batch = get_collate_fn(tokenizer)(make_rows(read_examples(prompts, places), encode, **lengths))
        for side in ("chosen",) if trains_on == "targets" else ("chosen", "rejected"):
            assert batch[f"{side}_input_ids"].shape[1] <= lengths["max_length"]
            assert (batch[f"{side}_labels"] != -100).any()
        for layout in (Padded(), SharedPrefix({"full_attention": None}, max_length=lengths["max_length"])):
            assert len(layout.split(find_examples(batch), 1)) == 1
