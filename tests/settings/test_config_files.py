"""The files in `config/`: keys explained, specified and read; defaults; aliases."""

from __future__ import annotations

import copy
import re

import pytest
import yaml
from omegaconf import OmegaConf
from support.commands import compose
from support.runs import ROOT

from dpo.losses import LOSSES
from dpo.settings.files import flatten, load_aliases, load_defaults
from dpo.settings.keys import KEYS

CONFIG = ROOT / "config"


def keys_of(node: dict, prefix: str = "") -> set[str]:
    names = set()
    for key, value in node.items():
        names |= keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return names


def read(name: str) -> dict:
    return yaml.safe_load((CONFIG / name).read_text(encoding="utf-8"))


def test_every_key_has_a_spec_and_every_spec_a_key():
    main = {k: v for k, v in read("config.yaml").items() if k not in ("defaults", "hydra", "dataset_sources")}
    losses = set().union(*(keys_of(load_defaults(loss)["loss"], "loss.") for loss in LOSSES))
    adapters = set().union(*(keys_of(load_defaults(lora=f.stem)["lora"], "lora.") for f in CONFIG.glob("lora/*.yaml")))
    models = {
        f.stem: keys_of(read(f"model/{f.name}"), "model.") - {"model.defaults"} for f in CONFIG.glob("model/*.yaml")
    }

    assert all(keys <= models["blank_model"] for keys in models.values())
    online = set().union(
        *(keys_of(load_defaults(online=f.stem)["online"], "online.") for f in CONFIG.glob("online/*.yaml"))
    )
    of_losses = {key for key in KEYS if key.startswith("loss.")}
    assert of_losses <= losses  # an option without bounds needs no spec
    assert (
        keys_of(main) | {"optimizer_args", "chat_template_args"} | adapters | online | models["blank_model"]
        == KEYS.keys() - of_losses
    )


OPTION_FILES = [
    str(f.relative_to(CONFIG))
    for group in ("loss", "lora", "online")
    for f in sorted(CONFIG.glob(f"{group}/**/*.yaml"))
]
EXPLAINED = ["config.yaml", "model/blank_model.yaml", *OPTION_FILES]


@pytest.mark.parametrize("file", EXPLAINED)
def test_every_key_has_a_comment_above_it_or_on_its_line(file):
    lines = (CONFIG / file).read_text(encoding="utf-8").split("\ndefaults:")[0].splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\s*\w+:", line)]

    # a key that only opens a section leaves it to the keys in it
    sections = {i for i in keys if re.fullmatch(r"\w+:", lines[i]) and re.match(r"  # |  \w", lines[i + 1])}
    bare = [
        lines[i]
        for i in keys
        if i not in sections and " # " not in lines[i] and not lines[i - 1].strip().startswith("#")
    ]
    assert keys
    assert bare == []


def test_defaults_are_the_references():
    values = flatten(compose("exp_name=x local_run_dir=/run"))
    reference = {
        "seed": 0,
        "exp_name": "x",
        "batch_size": 4,
        "eval_batch_size": 16,
        "debug": False,
        "fsdp_port": None,
        "datasets": ["hh"],
        "dataset_sources": {"hh": None, "shp": None, "se": None},
        "wandb.enabled": True,
        "wandb.entity": None,
        "wandb.project": "direct-preference-optimization",
        "local_dirs": ["/scr-ssd", "/scr", ".cache"],
        "local_run_dir": "/run",
        "sample_during_eval": True,
        "n_eval_model_samples": 16,
        "do_first_eval": True,
        "lr": 5e-7,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 10.0,
        "max_length": 512,
        "max_prompt_length": 256,
        "n_epochs": 1,
        "n_examples": None,
        "n_eval_examples": 256,
        "trainer": "BasicTrainer",
        "optimizer": "RMSprop",
        "warmup_steps": None,  # 150 in the reference, and here in a run of 1,500 updates
        "activation_checkpointing": False,
        "eval_every": None,  # 20,000 in the reference, and here in a run of 160,000 examples
        "minimum_log_interval_secs": 1.0,
        "model.name_or_path": "???",
        "model.tokenizer_name_or_path": None,
        "model.archive": None,
        "model.block_name": None,
        "model.policy_dtype": "float32",
        "model.fsdp_policy_mp": None,
        "model.reference_dtype": "float16",
        "loss.name": "sft",
    }
    assert {key: values[key] for key in reference} == reference


@pytest.mark.parametrize(
    ("model", "name", "block"),
    [
        ("blank_model", "???", None),
        ("gpt2-large", "gpt2-large", "GPT2Block"),
        ("gpt2-xl", "gpt2-xl", "GPT2Block"),
        ("gptj", "EleutherAI/gpt-j-6b", "GPTJBlock"),
        ("llama7b", "huggyllama/llama-7b", "LlamaDecoderLayer"),
        ("pythia28", "EleutherAI/pythia-2.8b", "GPTNeoXLayer"),
        ("pythia69", "EleutherAI/pythia-6.9b", "GPTNeoXLayer"),
    ],
)
def test_models_differ_from_the_blank_one_in_name_and_block_alone(model, name, block):
    composed = OmegaConf.to_container(compose(f"model={model}").model)
    assert composed == read("model/blank_model.yaml") | {"name_or_path": name, "block_name": block}


@pytest.mark.parametrize(
    "option", [f"{f.parent.name}={f.stem}" for f in sorted(CONFIG.glob("l*/*.yaml"))] + ["online=online"]
)
def test_files_are_read_as_hydra_reads_them(option):
    group, name = option.split("=")
    assert OmegaConf.to_container(compose(option)[group]) == load_defaults(**{group: name})[group]


def test_a_mix_has_a_weight_for_each_loss_that_can_be_in_it_and_all_options_of_these():
    mix = copy.deepcopy(load_defaults("mix")["loss"])
    parts = [copy.deepcopy(load_defaults(name)["loss"]) for name, loss in LOSSES.items() if loss.can_be_mixed]
    assert mix.pop("weights") == {part.pop("name"): 0 for part in parts}
    # without updates before, there is no running average; and not all parts take an offset
    assert mix.keys() == set().union(*parts) - {"momentum", "offset_by_margin"} | {"name"}


def test_the_run_directory_is_named_after_user_experiment_and_time_and_composing_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    (tmp_path / "second").mkdir()
    dirs = f"local_dirs=[{tmp_path / 'first'},{tmp_path / 'second'},{tmp_path / 'third'}]"

    path = compose(f"exp_name=x {dirs}").local_run_dir

    assert re.fullmatch(rf"{tmp_path}/second/somebody/x_\d{{4}}-\d\d-\d\d_[-\d_]+", path)
    assert [p.name for p in tmp_path.rglob("*")] == ["second"]


def test_every_key_is_read_by_the_code():
    files = [*ROOT.glob("*.py"), *(ROOT / "dpo").rglob("*.py")]
    sources = "".join(f.read_text() for f in files if f.stem not in ("keys", "validation", "resume"))
    options = "".join(f.read_text() for f in files if f.parent.name == "losses")
    names = {*re.findall(r"\.(\w+)\b", sources), *re.findall(r"\b(\w+): (?:float|bool|str)", options)}
    named = set(re.findall(r"[\"']([\w.]+)[\"']", sources))
    # the fields of `plan.fsdp` lack the prefix of their keys
    unread = [
        key for key in KEYS if not {key.rpartition(".")[2], key.removeprefix("fsdp_")} & names and key not in named
    ]
    assert [key for key in unread if not key.startswith("loss.weights.")] == []  # read as a mapping


def test_aliases_lead_to_keys_and_are_no_keys():
    for name, ours in load_aliases().items():
        assert name not in KEYS
        ours = re.split("[=,]", ours)[0]
        assert ours in {*KEYS, "loss", "lora", "online"} or ours.startswith("optimizer_args.")


def test_keys_of_an_adapter_are_there_with_it_alone():
    assert flatten(compose("loss=sft lora=none"))["lora.name"] == "none"
    assert {key for key in flatten(compose("loss=sft")) if key.startswith("lora.")} == {"lora.name"}
