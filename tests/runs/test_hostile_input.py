"""Input from outside is data: a run is right or ends in one clear sentence, and nothing in it is ever executed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from support.runs import PARTS, ROOT, compose, train
from transformers import dynamic_module_utils

import train as main
from dpo.checkpoint.files import MANIFEST, hash_manifest
from dpo.data.collation import find_examples, padded_batch
from dpo.data.counts import SplitCounter
from dpo.data.examples import iterate_examples, read_examples
from dpo.data.table import PromptTable, iterate_prompts, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.models.layouts import Padded, SharedPrefix
from dpo.models.pretrained import load_config
from dpo.reporting.events import RunContext
from dpo.reporting.files import FileLogger
from dpo.settings.command_line import refuse_hydras_own
from dpo.settings.keys import KEYS
from dpo.settings.plan import resolve
from dpo.system.launching import get_open_port
from dpo.system.redaction import redact
from preference_datasets import get_dataset

FUZZ = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def plant(file: Path, proof: Path) -> None:
    torch.save({"step_idx": 8, "state": {"a": Bomb(proof)}, "metrics": None}, file)


def vouch(file: Path, manifest: dict) -> None:
    """Write a manifest whose own checksum is right."""
    file.write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}))


@pytest.mark.parametrize("part", PARTS)
def test_code_in_a_checkpoint_is_refused_and_not_run_even_if_the_manifest_vouches_for_it(part, run, tmp_path):
    run("run", "n_examples=8")
    file = tmp_path / "run" / "step-8" / f"{part}.pt"
    plant(file, tmp_path / "proof")
    manifest = json.loads((file.parent / MANIFEST).read_text())
    content = file.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    manifest["files"][file.name] = {"sha256": sha256, "bytes": len(content)}
    manifest["blocks"][file.name] = [sha256]  # less than a block
    vouch(file.parent / MANIFEST, manifest)

    with pytest.raises(InputError, match=rf"{part}\.pt"):
        run("run", "resume=auto")
    assert not (tmp_path / "proof").exists()


def test_a_manifest_cannot_point_elsewhere(run, tmp_path):
    run("run", "n_examples=8")
    file = tmp_path / "run" / "step-8" / MANIFEST
    manifest = json.loads(file.read_text())
    manifest["files"]["../../secret"] = manifest["files"].pop("policy.pt")
    vouch(file, manifest)

    with pytest.raises(InputError, match=r"manifest\.json lists files elsewhere: \.\./\.\./secret"):
        run("run", "resume=auto")


def test_code_in_an_archive_or_a_cache_is_refused_and_not_run(run, tmp_path):
    plant(tmp_path / "policy.pt", tmp_path / "proof")
    with pytest.raises(InputError, match=r"is not a policy\.pt \(which is data, never code\)"):
        run("a", f"model.archive={tmp_path}/policy.pt")

    run("b", "n_examples=4", "cache_reference_logps=all")
    [cache] = tmp_path.rglob("reference_logps/*.npz")
    cache.write_bytes(pickle.dumps(Bomb(tmp_path / "proof")))
    with pytest.raises(InputError, match="is not a file of reference log-probabilities"):
        run("c", "n_examples=4", "cache_reference_logps=all")
    assert not (tmp_path / "proof").exists()


def test_secrets_reach_no_file_and_no_log(command, tmp_path):
    secrets = {"WANDB_API_KEY": "wandb-0123456789", "HF_TOKEN": "hf_0123456789", "MY_SECRET": "s3cr3t-0123456789"}
    overrides = (
        "n_examples=4",
        "wandb.enabled=true",
        "wandb.project=${oc.env:MY_SECRET}",
        "exp_name=x-${oc.env:HF_TOKEN}",
    )
    result = train(*command("run", *overrides), **secrets, WANDB_MODE="offline")

    assert result.returncode == 0, result.stderr
    texts = {"stdout": result.stdout, "stderr": result.stderr}
    texts |= {str(f): f.read_bytes().decode(errors="replace") for f in (tmp_path / "run").rglob("*") if f.is_file()}
    assert {name for name, text in texts.items() if any(secret in text for secret in secrets.values())} == set()
    assert "project: REDACTED" in (tmp_path / "run" / "config.yaml").read_text()
    source = "dataset_sources.hh=https://bob:hunter2secret@host/x"
    wrong = train(*command("wrong", source, "exp_name=/${oc.env:HF_TOKEN}"), **secrets)
    assert wrong.returncode == 2
    assert "hunter2secret" not in wrong.stdout + wrong.stderr
    assert secrets["HF_TOKEN"] not in wrong.stdout + wrong.stderr
    rank_env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(get_open_port())}
    archive = ("trainer=FSDPTrainer", "model.archive=/nowhere/${oc.env:HF_TOKEN}")
    launched = train(*command("launched", *archive), **secrets, **rank_env)
    assert launched.returncode == 2
    assert "model.archive=/nowhere/REDACTED does not exist" in launched.stderr
    swept = train("-m", *command("swept", f"exp_name={secrets['HF_TOKEN']}"), **secrets)
    assert swept.returncode == 2
    assert "exp_name holds a secret, and a sweep writes its command line down" in swept.stderr


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://bob:p@ss0rd@host/x", "https://REDACTED@host/x"),
        ("https://bob:pa/ss0rd@host", "https://REDACTED@host"),
        ("https://host/x?token=abc&split=train", "https://host/x?token=REDACTED&split=train"),
        ("https://host/x?X-Amz-Signature=abc", "https://host/x?X-Amz-Signature=REDACTED"),
        ("of pg-0123456789 and pat-0123456789", "of REDACTED and REDACTED"),
        ("https://example.org/me@home", "https://example.org/me@home"),
        (
            "api_key=abc, aws_access_key_id='a b' and +x.authToken=[a]",
            "api_key=REDACTED, aws_access_key_id=REDACTED and +x.authToken=REDACTED]",
        ),
        ("changed: eos_token_id=2 (was 0), pad_token=<pad>", "changed: eos_token_id=2 (was 0), pad_token=<pad>"),
        ("give wandb.key=VALUE instead", "give wandb.key=VALUE instead"),
        ("api_key=value-0123 token=VALUE0x", "api_key=REDACTED token=REDACTED"),
    ],
)
def test_what_is_redacted(text, redacted, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "pg-0123456789")
    monkeypatch.setenv("GITHUB_PAT", "pat-0123456789")
    assert redact(text) == redacted


@pytest.mark.parametrize("override", ["lora.dropout=0,1", "wandb.tags=a,b", "exp_name=a,b"])
def test_hydras_hints_on_a_sweep_without_m_are_not_redacted(override, command):
    key, value = override.split("=")
    given = {o.split("=")[0]: o for o in (*command("run", "lora=lora"), override)}
    result = train(*given.values())
    assert result.returncode == 2
    assert f"Ambiguous value for argument '{key}={value}'" in result.stderr
    assert "To use it as a list, use key=[value1,value2]" in result.stderr
    assert "REDACTED" not in result.stderr


def test_no_override_names_code_to_run(command, tmp_path):
    overrides = ("+hydra.callbacks.c._target_=os.mkdir", f"+hydra.callbacks.c.path={tmp_path}/proof")
    result = train(*command("run", "n_examples=4"), *overrides)
    assert result.returncode == 2
    assert "hydra.callbacks.c._target_ may not be set: Hydra's own keys can name code to run" in result.stderr
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("override", "harmless"),
    [
        ("hydra.job_logging.handlers.evil.class=evil.Handler", False),
        ("hydra.job.env_set.PATH=/evil", False),
        ("hydra/job_logging=evil", False),
        ("hydra={callbacks:{c:{_target_:evil}}}", False),
        ("hydra.launcher._target_=evil.Launcher", False),
        ("hydra.sweep.dir=/sweeps", True),
        ("hydra/launcher=submitit_slurm", True),
        ("hydra.launcher.timeout_min=60", True),
        ("exp_name=a_target_of_hydra.job", True),
    ],
)
def test_of_hydras_own_keys_only_harmless_ones_may_be_set(override, harmless):
    assert (refuse_hydras_own(override) is None) == harmless


def test_a_checkpoint_cuts_off_no_files_but_its_logs(tmp_path):
    victims = [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "run").mkdir()
    for victim in (*victims, tmp_path / "run" / "metrics.jsonl"):
        victim.write_text('{"a": 1}\n{"a": 2}\n')
    logger = FileLogger(RunContext(resolve(OmegaConf.create()), tmp_path / "run", 0, None, print))
    logger.load_state_dict({"log_bytes": {str(victims[0]): 0, "../b": 0, "metrics.jsonl": 9}})
    logger.on_start()
    assert [victim.read_text() for victim in victims] == ['{"a": 1}\n{"a": 2}\n'] * 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("asked_for", [False, True])
def test_code_of_a_model_runs_only_if_it_was_asked_for(asked_for, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda question: "y")  # what somebody at a terminal may answer
    (tmp_path / "evil.py").write_text(
        f"import pathlib, transformers\npathlib.Path({str(tmp_path / 'proof')!r}).touch()\n"
        "class Evil(transformers.PretrainedConfig):\n    model_type = 'evil'\n"
    )
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    if asked_for:
        load_config(str(tmp_path), trust_remote_code=True)
    else:
        with pytest.raises(InputError, match=r"contains Python code.*model\.trust_remote_code=true"):
            load_config(str(tmp_path))
    assert (tmp_path / "proof").exists() == asked_for


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/../../escaped"])
def test_names_cannot_escape(name, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "golden" / "words" / "train.jsonl", folder)
    shutil.copy(ROOT / "tests" / "golden" / "words" / "test.jsonl", folder)
    config = compose(f"exp_name={name}", "model.name_or_path=x", f"local_dirs=[{tmp_path}]")
    assert any(problem.startswith("exp_name=") for problem in main.find_config_problems(config))
    before = set(os.listdir(tmp_path))
    prompts = iterate_prompts(
        get_dataset,
        [name],
        trains_on="pairs",
        split="train",
        silent=True,
        cache_dir=str(tmp_path / "cache"),
        dataset_sources={name: str(folder)},
        tokenizer=None,
    )
    assert list(prompts)
    assert set(os.listdir(tmp_path)) - before <= {"cache"}


def test_config_values_reach_no_shell_and_no_import(tmp_path):
    proof = tmp_path / "proof"
    for override in (
        f"trainer=os.system('touch {proof}')",
        f"optimizer=__import__('os').system('touch {proof}')",
        f"model.name_or_path=$(touch {proof})",
        f"dataset_sources.hh=;touch {proof}",
        f"loss.name=`touch {proof}`",
    ):
        config = compose("exp_name=x", "model.name_or_path=x")
        key, value = override.split("=", 1)
        target = config
        *path, last = key.split(".")
        for part in path:
            target = target[part]
        target[last] = value
        main.find_config_problems(config)
    assert not proof.exists()


# --- fuzzing -------------------------------------------------------------------------------------------------------

ODD_TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(), max_size=10),  # lone surrogates and NUL among them
    st.sampled_from(
        ["", " ", "\0", "\ud800", "\u202e\u2028", "</s>", "\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b"]
    ),
    st.integers(1, 20_000).map("x".__mul__),
)
ODD_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ODD_TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ODD_TEXTS}), max_size=3
)
FIELDS = st.one_of(ODD_TEXTS, ODD_TEXTS, MESSAGES, ODD_VALUES)
NON_EMPTY = ODD_TEXTS.map("Q".__add__)
WELL_FORMED = st.one_of(
    st.fixed_dictionaries({"prompt": NON_EMPTY, "chosen": ODD_TEXTS, "rejected": ODD_TEXTS}),
    st.tuples(ODD_TEXTS, ODD_TEXTS, ODD_TEXTS).map(
        lambda texts: {
            "chosen": f"\n\nHuman: {texts[0]}\n\nAssistant:{texts[1]}",
            "rejected": f"\n\nHuman: {texts[0]}\n\nAssistant:{texts[2]}",
        }
    ),
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
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lengths = {"max_length": 24, "max_prompt_length": 12}
    encode = TextEncoder(tokenizer)
    try:
        options = {"trains_on": trains_on, "silent": True, "dataset_sources": {name: str(file)}, "tokenizer": tokenizer}
        counter = SplitCounter(encode)
        write_prompts(tmp_path / "rows.arrow", counter.watch(iterate_prompts(get_dataset, [name], "train", **options)))
        prompts = PromptTable(tmp_path / "rows.arrow")
        counter.count_tokens(prompts, **lengths)
    except InputError:
        return
    order = {"batch_size": 1, "shuffle": True, "n_epochs": 1, "n_examples": None, "seed": 0}
    for places in iterate_examples(prompts.counts.tolist(), **order):
        batch = padded_batch(read_examples(prompts, places), encode, **lengths)
        for side in ("chosen",) if trains_on == "targets" else ("chosen", "rejected"):
            assert batch[f"{side}_input_ids"].shape[1] <= lengths["max_length"]
            assert (batch[f"{side}_labels"] != -100).any()
        for layout in (Padded(), SharedPrefix({"full_attention": None}, max_length=lengths["max_length"])):
            assert len(layout.split(find_examples(batch), 1)) == 1


ODD_SETTINGS = st.one_of(
    ODD_VALUES,
    st.sampled_from(
        ["${seed}", "${nowhere}", "${oc.env:HOME}", "???", "1e-3", "null", "[]", "{}", "../x", float("nan")]
    ),
)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose("exp_name=x", "model.name_or_path=x")


@pytest.mark.slow
@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from([k for k in KEYS if not k.startswith("loss.")]), ODD_SETTINGS, max_size=5)
)
def test_any_config_is_sound_or_gets_sentences(composed, changes):
    config = copy.deepcopy(composed)
    for key, value in changes.items():
        try:
            OmegaConf.update(config, key, value)
        except (OmegaConfBaseException, ValueError):  # Hydra would have refused it
            continue
    problems = main.find_config_problems(config)
    assert all(isinstance(problem, str) and problem for problem in problems)
