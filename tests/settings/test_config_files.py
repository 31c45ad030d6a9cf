"""The files in `config/`: keys explained, specified and read; defaults; aliases; experiments, ours and a user's."""

import re
from dataclasses import replace

import pytest
import yaml
from omegaconf import OmegaConf
from support.commands import compose, find_refusals
from support.pytests import succeeded
from support.runs import GOLDEN, ROOT, run_script

from dpo.losses import LOSSES
from dpo.settings.keys import KEYS, REMOVED, compose_config, dotted
from dpo.settings.places import BUILT_IN
from dpo.settings.plan import ParallelDims, flatten, resolve
from dpo.settings.validation import find_plan_warnings, find_problems, read_plan
from dpo.system.plain_files import read_yaml

CONFIG = ROOT / "config"
GROUPS = ("loss", "lora", "online")
EXPERIMENTS = sorted(file.stem for file in CONFIG.glob("experiment/*.yaml"))
PAPER_SETTINGS = {"batch_size": 64, "eval_batch_size": 32, "trainer": "FSDPTrainer"}


def read(name: str) -> dict:
    return yaml.safe_load((CONFIG / name).read_text())


def test_every_key_is_declared_in_python_and_in_yaml():
    main = {key: value for key, value in read("config.yaml").items() if key not in ("defaults", "hydra")}
    model = {f"model.{key}" for key in read("model/blank_model.yaml")}
    options = set()
    for group in GROUPS:
        for file in CONFIG.glob(f"{group}/*.yaml"):
            options |= {key for key, _ in dotted({group: compose_config(**{group: file.stem})[group]})}
    assert {key for key, _ in dotted(main)} - {"dataset_sources"} | model | options == KEYS.keys()
    for file in CONFIG.glob("model/*.yaml"):
        assert {f"model.{key}" for key in read(f"model/{file.name}")} <= model | {"model.defaults"}


OPTION_FILES = [file for group in GROUPS for file in sorted(CONFIG.glob(f"{group}/**/*.yaml"))]


@pytest.mark.parametrize(
    "file", [CONFIG / "config.yaml", CONFIG / "model" / "blank_model.yaml", *OPTION_FILES], ids=str
)
def test_every_key_has_a_comment_above_it_or_on_its_line(file):
    lines = file.read_text().split("\ndefaults:")[0].splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\s*\w+:", line)]
    # A key that only opens a section leaves it to the keys in it.
    sections = {i for i in keys if re.fullmatch(r"\w+:", lines[i]) and re.match(r"  # |  \w", lines[i + 1])}
    bare = [
        lines[i]
        for i in keys
        if i not in sections and " # " not in lines[i] and not lines[i - 1].strip().startswith("#")
    ]
    assert keys
    assert bare == []


def test_defaults_are_the_references():
    values = flatten(compose("local_run_dir=/run"))
    expected = dict(dotted(read_yaml(GOLDEN / "reference_config.yaml")))
    # 150 and 20,000 are what a run of 1,500 updates and 160,000 examples has here
    expected |= {"warmup_steps": None, "eval_every": None}
    expected["dataset_sources"] = {name: None for name, hub_id in BUILT_IN.items() if hub_id}
    assert {key: values[key] for key in expected} == expected


def test_a_loss_repeats_no_option_of_the_files_that_its_file_names():
    for file in (CONFIG / "loss").glob("*.yaml"):
        own = yaml.safe_load(file.read_text())
        for entry in own.pop("defaults", []):
            named = {} if entry == "_self_" else read(f"loss/{entry.partition('@')[0]}.yaml")
            assert own.keys().isdisjoint(named), file.name


@pytest.mark.parametrize("group", ["model", *GROUPS])
def test_files_are_composed_as_hydra_composes_them(group):
    for name in [file.stem for file in CONFIG.glob(f"{group}/*.yaml")]:
        assert compose_config(**{group: name}) == OmegaConf.to_container(compose(f"{group}={name}")), name


IN_A_USERS_APPLICATION = """
import sys
from concurrent.futures import ThreadPoolExecutor

import hydra
from hydra.core.global_hydra import GlobalHydra

from dpo.settings.plan import resolve


@hydra.main(version_base="1.3", config_path=sys.argv.pop(1), config_name="config")
def main(config):
    hydra_of_the_user = GlobalHydra.instance()
    losses = ["dpo", "ipo"] * 10
    with ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(lambda name: resolve({"loss": {"name": name, "beta": config.beta}}), losses))
    assert [plan.loss.name for plan in plans] == losses
    assert {plan.loss.options["beta"] for plan in plans} == {0.3}
    assert GlobalHydra.instance() is hydra_of_the_user and hydra_of_the_user.is_initialized()
    print("resolved")


main()
"""


def test_a_config_is_composed_inside_a_users_hydra_application_and_in_two_threads(tmp_path):
    (tmp_path / "config.yaml").write_text("beta: 0.1\nhydra: {run: {dir: .}, output_subdir: null}\n")
    (tmp_path / "app.py").write_text(IN_A_USERS_APPLICATION)
    result = run_script(str(tmp_path / "app.py"), str(tmp_path), "beta=0.3", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "resolved" in succeeded(result).stdout


def test_a_mix_has_a_weight_for_each_loss_that_can_be_in_it_and_all_options_of_these():
    mix = compose_config(loss="mix")["loss"]
    parts = [compose_config(loss=name)["loss"] for name, loss in LOSSES.items() if loss.can_be_mixed]
    assert mix.pop("weights") == {part.pop("name"): 0 for part in parts}
    # Without updates before, there is no running average; and not all parts take an offset.
    assert mix.keys() == set().union(*parts) - {"momentum", "offset_by_margin"} | {"name"}
    assert "weights" in compose_config(loss="mix")["loss"]  # what a caller changes is a copy


def test_the_run_directory_is_named_after_user_experiment_and_time_and_composing_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    (tmp_path / "second").mkdir()
    dirs = f"local_dirs=[{tmp_path / 'first'},{tmp_path / 'second'},{tmp_path / 'third'}]"

    path = compose(f"exp_name=x {dirs}").local_run_dir

    assert re.fullmatch(rf"{tmp_path}/second/somebody/x_\d{{4}}-\d\d-\d\d_[-\d_]+", path)
    assert [p.name for p in tmp_path.rglob("*")] == ["second"]


def test_a_removed_key_is_refused_with_what_to_use(monkeypatch, tmp_path):
    monkeypatch.setitem(REMOVED, ("old.rate", "*"), "0123abcd; use lr")
    sentence = "old.rate=1 was removed after 0123abcd; use lr"
    assert find_refusals("exp_name=x model.name_or_path=gpt2 old.rate=1") == [sentence]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nold: {rate: 1}\n")
    assert find_refusals(f"--config-dir={tmp_path} experiment=mine exp_name=x model.name_or_path=gpt2") == [sentence]


def test_what_was_removed_is_left_out_of_the_config_of_an_earlier_run(tmp_path, printed):
    (path := tmp_path / "config.yaml").write_text(
        "model: {name_or_path: gpt2, attn_implementation: flex_attention}\n"
        "dataset_sources: {mine: {path: /data, format: alpaca}}\n"
    )
    plan = read_plan(path, prefixes=("model.", "dataset"))
    assert (plan.model.attn_implementation, plan.data.dataset_sources["mine"]) == ("sdpa", {"path": "/data"})
    printed = re.findall(r"ignored, as (\S+) was removed after 9949121b; ", printed())
    assert printed == ["model.attn_implementation=flex_attention", "dataset_sources.mine.format=alpaca"]


def test_aliases_lead_to_keys_and_are_no_keys():
    for name, ours in read("aliases.yaml").items():
        assert name not in KEYS
        ours = re.split("[=,; ]", ours)[0]
        assert ours in {*KEYS, "loss", "lora", "online"} or ours.startswith("optimizer_args.")


# --- whole experiments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_complete(name, tmp_path):
    further = f"model=smollm2-135m exp_name={name}" if name.startswith("modern") else ""  # for any model and data
    config = compose(f"experiment={name} model.archive={tmp_path} {further}")  # the run of SFT
    processes = 8 if name.endswith("8gpu") else 4
    if config.trainer != "FSDPTrainer":
        processes = 1
    dims = ParallelDims(processes, shard_size=processes)
    plan = replace(resolve(config), dims=dims, gpus=dims.world_size)
    assert [*find_problems(plan), *find_plan_warnings(plan)] == []
    assert config.exp_name == name


@pytest.mark.parametrize("line", ["{} experiment=hh_pythia28_dpo", "+experiment=hh_pythia28_dpo {}"])
def test_every_override_counts_more_than_the_experiment_wherever_it_stands(line):
    others = "model=demo loss=ipo loss.beta=0.3 exp_name=mine lr=1e-3 datasets=[demo] n_epochs=3"
    changed = compose(line.format(others))
    assert (changed.loss.name, changed.loss.beta, changed.model.block_name) == ("ipo", 0.3, "LlamaDecoderLayer")
    assert (changed.exp_name, changed.lr, changed.datasets, changed.n_epochs) == ("mine", 1e-3, ["demo"], 3)
    assert changed.batch_size == PAPER_SETTINGS["batch_size"]


@pytest.mark.parametrize("data", ["hh", "shp", "se"])
@pytest.mark.parametrize(("loss", "beta"), [("sft", None), ("dpo", 0.1)])
def test_the_papers_runs_have_the_settings_of_the_published_command(data, loss, beta):
    config = compose(f"experiment={data}_pythia28_{loss}")
    published = PAPER_SETTINGS | {"lr": 5e-7, "optimizer": "RMSprop", "warmup_steps": 150, "max_length": 512}
    assert {key: config[key] for key in published} == published
    assert config.gradient_accumulation_steps == 1  # theirs has 2: the same gradients, communicated twice
    assert (config.datasets, config.loss.name, config.loss.get("beta")) == ([data], loss, beta)
    assert (config.model.name_or_path, config.model.fsdp_policy_mp) == ("EleutherAI/pythia-2.8b", "bfloat16")


def test_a_run_of_dpo_asks_for_the_run_of_sft_that_it_continues():
    [problem] = find_refusals("experiment=hh_pythia28_dpo")
    assert problem.startswith("model.archive=${RUN_OF_SFT}/LATEST cannot be resolved: set model.archive=")
    assert find_refusals("experiment=hh_pythia28_dpo model.archive=null") == []


def test_an_own_experiment_may_build_on_one_of_ours_but_not_have_its_name(tmp_path):
    (folder := tmp_path / "experiment").mkdir()
    defaults = "defaults:\n  - hh_pythia28_sft\n  - _self_\n  - override /model: demo\n"
    (folder / "mine.yaml").write_text(f"# @package _global_\n{defaults}lr: 1e-4\n")
    composed = compose(f"--config-dir={tmp_path} experiment=mine batch_size=16")
    found = (composed.lr, composed.batch_size, composed.eval_batch_size, composed.model.block_name)
    assert found == (1e-4, 16, 32, "LlamaDecoderLayer")
    for name in ("config.yaml", "experiment/hh_pythia28_dpo.yaml"):
        (tmp_path / name).write_text("lr: 1e-4\n")
        problems = find_refusals(f"--config-dir={tmp_path} exp_name=x")
        assert f"--config-dir: {name} has the name of one of ours: rename it" in problems
    (folder / "mine.yaml").write_text("seed: [\n")  # other problems are listed beside it
    problems = find_refusals(f"--config-dir={tmp_path} experiment=mine lr=-1 foo=1")
    assert {"lr=-1 must be a number above 0", "unknown key foo: dpo train --help shows all keys"} < {*problems}
