"""The config: its defaults, and what is said about a value that cannot work, all of it at once."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import yaml
from omegaconf import OmegaConf
from support.runs import ROOT, compose

import train  # noqa: F401  (registers the config's resolvers)
from dpo.losses import LOSSES, find_loss
from dpo.settings import choices
from dpo.settings.files import flatten, load_defaults
from dpo.settings.keys import ALIASES, KEYS
from dpo.settings.plan import ParallelDims, Plan, resolve
from dpo.settings.validation import find_config_problems, find_unused

CONFIG = ROOT / "config"
COMPLETE = ("exp_name=x", "model.name_or_path=gpt2", "loss=dpo", "loss.beta=0.1")


ONE = Plan(
    trainer=choices.BASIC,
    dims=ParallelDims(),
    compute_dtype="float32",
    reference_dtype="float16",
    autocast=None,
    loss=LOSSES["dpo"],
    reference="model",
    quantized=False,
    launched=False,
    gpus=0,
)
CUT_BY_PACKAGE = replace(ONE, trainer=choices.PACKAGE)


def several(world_size: int, tensor_size: int = 1, *, launched: bool = False, gpus: int = 0) -> Plan:
    trainer = choices.TENSOR_PARALLEL if tensor_size > 1 else choices.FSDP
    dims = ParallelDims.of(world_size, tensor_size=tensor_size)
    return replace(ONE, trainer=trainer, dims=dims, launched=launched, gpus=gpus)


def problems(*overrides: str, complete: tuple[str, ...] = COMPLETE, plan: Plan = ONE) -> list[str]:
    return find_config_problems(compose(*complete, *overrides), plan)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("loss=ipo", "loss.beta=1"),
        ("loss.label_smoothing=0.499", "loss.reference_free=true"),
        ("loss.sft_weight=0.2", "loss.wpo=true", "loss.ld_alpha=0", "loss.f_divergence=alpha", "loss.f_alpha=0.9"),
        ("loss=mix", "loss.weights.dpo=0.8", "loss.weights.sft=1"),
        ("batch_size=64", "gradient_accumulation_steps=16", "eval_every=64"),
        ("max_length=2", "max_prompt_length=1"),
        ("n_epochs=null", "n_examples=1"),
        ("n_epochs=1", "n_examples=1"),
        ("warmup_steps=0", "minimum_log_interval_secs=0", "seed=4294967295"),
        ("schedule=cosine", "min_lr_ratio=1"),
        ("schedule=linear", "min_lr_ratio=0"),
        ("wandb.tags=[a,b c]", "wandb.notes=first try", "wandb.group=g"),
        ("exp_name=group/run..1",),
        ("datasets=[hh,mine]", "+dataset_sources.mine=/data"),
        ("datasets=shp",),
        ("datasets=me/data",),
        ("datasets=[me/data]", "+dataset_sources.data={columns: {chosen: best}}"),
        ("datasets=[mine]", "+dataset_sources.mine={path: me/data, revision: main}"),
        ("datasets=[mine]", "+dataset_sources.mine={path: me/data, columns: {chosen: best}}"),
    ],
)
def test_what_can_run_has_no_problems(overrides):
    assert problems(*overrides) == []


def test_sft_needs_a_name_and_a_model_alone():
    assert problems("exp_name=x", "model.name_or_path=gpt2", complete=()) == []


def test_all_problems_are_told_at_once_with_value_and_fix():
    assert problems(
        "batch_size=6",
        "gradient_accumulation_steps=4",
        "eval_every=5",
        "debug=maybe",
        "datasets=[hh,mine]",
        "lr=-1",
        "max_length=256",
        "n_epochs=null",
        "trainer=BasicTrainr",
        "loss=dpo",
        "loss.label_smoothing=0.5",
        complete=(),
    ) == [
        "exp_name is not set: exp_name=NAME names the run",
        "debug=maybe must be true or false",
        "lr=-1 must be a number above 0",
        "trainer=BasicTrainr is not one of BasicTrainer, FSDPTrainer, TensorParallelTrainer: "
        "did you mean BasicTrainer or FSDPTrainer?",
        "model.name_or_path is not set: choose model=pythia28 or another of config/model, "
        "or give model.name_or_path=DIR_OR_HUB_ID",
        "loss.beta is not set: loss.beta=0.1 is the DPO paper's choice",
        "loss.label_smoothing=0.5 must be a number in [0, 0.5): the fraction of flipped pairs",
        "batch_size=6 must be divisible by gradient_accumulation_steps * processes = 4 * 1 = 4: try batch_size=8, "
        "or gradient_accumulation_steps=1, 2, 3 or 6",
        "max_prompt_length=256 must be below max_length=256, or no token is left for a response",
        "n_epochs and n_examples are both null, so training would never end: give one of them",
        "eval_every=5 (examples) must be at least batch_size=6",
        "datasets names 'mine', which is none of hh, shp, se, demo, and no file or directory: "
        "give its path or Hub id, or say where it is with dataset_sources.mine=DIR_FILE_OR_HUB_ID",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+lrr=1", "unknown key lrr: did you mean lr?"),
        ("+model.name_or_pth=gpt2", "unknown key model.name_or_pth: did you mean model.name_or_path?"),
        ("+zzz=1", "unknown key zzz; `python train.py --cfg job` shows all keys"),
        ("exp_name=???", "exp_name is not set: exp_name=NAME"),
        ("loss.beta=???", "loss.beta is not set: loss.beta=0.1"),
        ("model.name_or_path=???", "model.name_or_path is not set: choose model=pythia28"),
        ("datasets=[hhh]", "datasets names 'hhh', which is none of hh, shp, se"),
        ("trainer=Trainer", "trainer=Trainer is not one of BasicTrainer"),
        ("optimizer=AdmW", "optimizer=AdmW is not one of ASGD, Adadelta, Adafactor, Adagrad, Adam, AdamW"),
        (
            "optimizer=rmsprop",
            "optimizer=rmsprop is not one of ASGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, "
            "RMSprop, Rprop, SGD: did you mean RMSprop?",
        ),
        ("+learning_rate=1", "unknown key learning_rate: here it is lr"),
        ("+model.torch_dtype=float32", "unknown key model.torch_dtype: here it is model.policy_dtype"),
        ("+lr_scheduler_type=cosine", "unknown key lr_scheduler_type: here it is schedule"),
        ("+max_steps=1", "unknown key max_steps: here it is n_examples, which is updates * batch_size"),
        ("model.name_or_path=/no/such", "model.name_or_path=/no/such is not there: no such directory"),
        (
            "model.tokenizer_name_or_path='~/no'",
            "model.tokenizer_name_or_path=~/no is not there: no such directory (~ ",
        ),
        ("loss.name=dpoo", "loss.name=dpoo is not there: did you mean dpo"),
        ("model.policy_dtype=fp32", "model.policy_dtype=fp32 is not one of bfloat16, float16, float32"),
        ("model.reference_dtype=half", "model.reference_dtype=half is not one of bfloat16, float16, float32"),
        (
            "model.attn_implementation=fast",
            "model.attn_implementation=fast is not one of eager, flash_attention_2, flex_attention, sdpa",
        ),
        ("gradient_accumulation_steps=3", "batch_size=4 must be divisible by gradient_accumulation_steps"),
        ("max_prompt_length=513", "max_prompt_length=513 must be below max_length=512"),
        ("loss.label_smoothing=-0.1", "loss.label_smoothing=-0.1 must be a number in [0, 0.5)"),
        ("n_epochs=null", "n_epochs and n_examples are both null"),
        ("eval_every=3", "eval_every=3 (examples) must be at least batch_size=4"),
        ("batch_size=four", "batch_size=four must be an integer >= 1"),
        ("batch_size=4.0", "batch_size=4.0 must be an integer >= 1"),
        ("batch_size=true", "batch_size=true must be an integer >= 1"),  # a bool is an int in Python
        ("batch_size=null", "batch_size=null must be an integer >= 1"),
        ("warmup_steps=-1", "warmup_steps=-1 must be an integer >= 0"),
        ("seed=4294967296", "seed=4294967296 must be an integer from 0 to 2**32 - 1"),
        ("lr=nan", "lr=nan must be a number above 0"),
        ("lr=inf", "lr=inf must be a number above 0"),
        ("collective_timeout_secs=1e30", "collective_timeout_secs=1e+30 must be seconds above 0, ten million at most"),
        ("schedule=cos", "schedule=cos is not one of constant, cosine, linear: did you mean cosine?"),
        ("schedule=null", "schedule=null must be a name"),
        ("min_lr_ratio=1.5", "min_lr_ratio=1.5 must be a number from 0 to 1"),
        ("min_lr_ratio=0.1", "min_lr_ratio=0.1 needs schedule=linear or schedule=cosine"),
        ("lr_scaling=root", "lr_scaling=root is not one of linear, none, sqrt"),
        ("wandb.tags=dpo", "wandb.tags=dpo must be a list of different texts of at most 64 characters"),
        (f"wandb.tags=[{'x' * 65}]", f"wandb.tags=['{'x' * 65}'] must be a list of different texts of at most 64"),
        (f"wandb.group={'x' * 129}", f"wandb.group={'x' * 129} must be a text of at most 128 characters, as W&B "),
        ("wandb.project=a/b", "wandb.project=a/b must be a name of at most 128 characters without / "),
        ("loss.beta=0", "loss.beta=0 must be a number above 0"),
        ("sample_during_eval=1", "sample_during_eval=1 must be true or false"),
        ("datasets=3", "datasets=3 must be a name, a path or a Hub id, or a list of different ones"),
        ("datasets=[]", "datasets=[] must be a name, a path or a Hub id, or a list of different ones"),
        ("datasets=[hh,hh]", "datasets=['hh', 'hh'] must be a name, a path or a Hub id, or a list of different ones"),
        ("datasets=mine", "datasets names 'mine', which is none of hh, shp, se, demo, and no file or directory"),
        ("datasets=[no/such/pairs]", f"datasets names no/such/pairs, and there is no such file or directory in {ROOT}"),
        ("datasets=/no/such.csv", "datasets names /no/such.csv, and there is no such file or directory"),
        ("datasets=me/hh", "datasets names me/hh, but the name hh is taken: give datasets=[OTHER] dataset_sources."),
        ("datasets=[me/a,you/a]", "datasets names you/a, but the name a is taken: give datasets=[me/a,OTHER] da"),
        ("local_dirs=.cache", "local_dirs=.cache must be a list of paths"),
        ("fsdp_port=65536", "fsdp_port=65536 must be a port from 1 to 65535, or null"),
        ("model.archive=''", "model.archive= must be a path, or null"),
        ("exp_name=''", "exp_name= must be a name for the run"),
        ("exp_name=../../x", "exp_name=../../x must be a name for the run, relative and without '..'"),
        ("exp_name=/x", "exp_name=/x must be a name for the run, relative and without '..'"),
        ("dataset_sources=/data", "dataset_sources=/data must map names to places"),
        ("dataset_sources.hh=[a]", "dataset_sources.hh=['a'] must be a directory, file or Hub id, or {path"),
        ("dataset_sources.hh=''", "dataset_sources.hh= must be a directory, file or Hub id, or {path"),
        ("dataset_sources.hh={revision: main}", "dataset_sources.hh={'revision': 'main'} must be a directory, file"),
        (
            "+dataset_sources.mine={path: a, columns: {best: chosen}}",
            "dataset_sources.mine.columns={'best': 'chosen'} must map some of prompt, chosen, rejected, completion, ",
        ),
        (
            "+dataset_sources.mine={path: a, columns: {chosen: 3}}",
            "dataset_sources.mine.columns={'chosen': 3} must map",
        ),
        ("+dataset_sources.mine={path: a, columns: best}", "dataset_sources.mine.columns=best must map"),
        ("dataset_sources.hh={path: a, columns: {chosen: b}}", "dataset_sources.hh.columns={'chosen': 'b'}: hh has"),
        (
            "+dataset_sources.mine={columns: {chosen: b}}",
            "dataset_sources.mine={'columns': {'chosen': 'b'}} must be a dir",
        ),
        ("dataset_sources.hh={path: a, split: b}", "dataset_sources.hh={'path': 'a', 'split': 'b'} must be"),
    ],
)
def test_each_problem_is_told_alone_and_starts_with_its_key(override, message):
    (problem,) = problems(override)
    assert problem.startswith(message)


def test_batches_must_divide_by_the_processes_that_see_different_rows():
    batches = ("batch_size=8", "gradient_accumulation_steps=2", "eval_batch_size=6")  # of evaluations any number
    assert problems(*batches, plan=several(4)) == []
    assert problems(*batches, "tensor_parallel_size=2", plan=several(8, tensor_size=2)) == []
    assert problems("batch_size=8", "gradient_accumulation_steps=4", plan=several(4)) == [
        "batch_size=8 must be divisible by gradient_accumulation_steps * processes = 4 * 4 = 16: "
        "try batch_size=16, or gradient_accumulation_steps=1 or 2",
    ]
    (problem,) = problems("batch_size=6", "gradient_accumulation_steps=1", plan=several(4))
    assert problem.endswith("= 1 * 4 = 4: try batch_size=8, or 1, 2, 3 or 6 processes")


@pytest.mark.parametrize(
    ("override", "plan", "message"),
    [
        ("world_size=2", ONE, "world_size=2 needs a trainer of several processes: trainer=FSDPTrainer"),
        (
            "lr=1",
            replace(ONE, dims=ParallelDims.of(2), launched=True),
            "trainer=BasicTrainer is one process, and 2 were launched",
        ),
        ("world_size=4", several(2, launched=True), "world_size=4, but 2 processes were launched: leave it out"),
        ("world_size=4", several(4, gpus=2), "world_size=4 is more than the 2 GPUs of this machine"),
        ("tensor_parallel_size=2", several(2), "tensor_parallel_size=2 needs trainer=TensorParallelTrainer"),
        ("tensor_parallel_size=2", ONE, "tensor_parallel_size=2 needs trainer=TensorParallelTrainer"),
        ("tensor_parallel.backend=tensor_parallel", ONE, "tensor_parallel.backend=tensor_parallel needs trainer=Tens"),
        (
            "tensor_parallel.backend=tensor_parallel",
            CUT_BY_PACKAGE,
            "sample_during_eval=true does not work with tensor_par",
        ),
        ("tensor_parallel_size=3", several(4, 3), "tensor_parallel_size=3 does not divide the 4 processes: try 1, 2"),
        ("optimizer=Adafactor", several(2), "optimizer=Adafactor cannot update shards: use another with trainer="),
        ("fsdp_shard_size=3", several(4), "fsdp_shard_size=3 does not divide the 4 processes: try 1, 2 or 4"),
        ("fsdp_shard_size=4", several(4, 2), "fsdp_shard_size=4 does not divide the 2 processes: try 1 or 2"),
        ("fsdp_shard_size=1", ONE, "fsdp_shard_size=1 needs a trainer of several processes: trainer=FSDPTrainer"),
    ],
)
def test_what_does_not_fit_the_processes_is_told(override, plan, message):
    (problem,) = problems(override, "batch_size=8", plan=plan)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        (("world_size=1",), ONE),
        (
            ("tensor_parallel.backend=tensor_parallel", "tensor_parallel_size=2", "sample_during_eval=false"),
            CUT_BY_PACKAGE,
        ),
        (("world_size=4", "fsdp_shard_size=2"), several(4)),
        (("world_size=4", "tensor_parallel_size=2", "fsdp_shard_size=1"), several(4, 2)),
        (("world_size=4",), several(4, launched=True, gpus=2)),  # two machines of two GPUs
    ],
)
def test_what_fits_the_processes_has_no_problems(overrides, plan):
    assert problems(*overrides, plan=plan) == []


def test_a_value_that_cannot_be_resolved_is_a_problem_unless_it_waits_for_a_missing_key():
    (problem,) = problems("exp_name=${NAME}")
    assert problem.startswith("exp_name=${NAME}")
    # local_run_dir is made from exp_name: one message, not two
    assert problems("exp_name=???") == ["exp_name is not set: exp_name=NAME names the run"]


def test_a_key_that_was_removed_is_a_problem():
    (problem,) = problems("~lr")
    assert problem.startswith("lr ")


# --- the YAML files ------------------------------------------------------------------------------------------------


def keys_of(node: dict, prefix: str = "") -> set[str]:
    names = set()
    for key, value in node.items():
        names |= keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return names


def read(name: str) -> dict:
    return yaml.safe_load((CONFIG / name).read_text(encoding="utf-8"))


def test_every_key_has_a_rule_and_every_rule_a_key():
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
    assert keys_of(main) | losses | adapters | online | models["blank_model"] == KEYS.keys()


OF_GROUPS = [
    str(f.relative_to(CONFIG))
    for group in ("loss", "lora", "online")
    for f in sorted(CONFIG.glob(f"{group}/**/*.yaml"))
]
EXPLAINED = ["config.yaml", "model/blank_model.yaml", *OF_GROUPS]


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
    values = flatten(compose("exp_name=x", "local_run_dir=/run"))
    ours = {
        "n_eval_tokens": 128,
        "do_first_sampling": None,
        "self_test": True,
        "resume": None,
        "save_every": None,
        "keep_checkpoints": None,
        "nan_policy": "raise",
        "deterministic": False,
        "dry_run": False,
        "world_size": None,
        "fsdp_shard_size": None,
        "tensor_parallel_size": None,
        "tensor_parallel.backend": "dtensor",
        "collective_timeout_secs": 1800,
        "layout": "shared_prefix",
        "cache_reference_logps": "as_needed",
        "num_workers": 1,
        "compile": False,
        "export": True,
        "ledger": False,
        "report": False,
        "lora.name": "none",
        "online.name": "none",
        "lr_scaling": "none",
        "schedule": "constant",
        "min_lr_ratio": 0.0,
        "wandb.group": None,
        "wandb.tags": [],
        "wandb.notes": None,
        "wandb.artifacts": True,
        "tensorboard.enabled": False,
        "model.autocast": None,
        "model.attn_implementation": "sdpa",
        "model.random_init": False,
        "model.trust_remote_code": False,
    }

    assert {k: v for k, v in values.items() if k not in ours} == {
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
        "warmup_steps": 150,
        "activation_checkpointing": False,
        "eval_every": 20_000,
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
    assert {k: v for k, v in values.items() if k in ours} == {k: v for k, v in ours.items() if k in values}


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


def test_losses_have_the_papers_options_and_those_with_a_reference_have_its_options():
    shared = {"sft_weight": 0, "wpo": False, "ld_alpha": 1, "f_divergence": "reverse_kl", "f_alpha": 0.5}
    dpo = {"name": "dpo", "beta": "???", "label_smoothing": 0, "reference_free": False}
    assert compose("loss=sft").loss == {"name": "sft"}
    assert list(compose("loss=dpo").loss) == [*dpo, *shared]
    for loss, own in (("dpo", dpo), ("ipo", {"name": "ipo", "beta": "???", "average": False})):
        assert OmegaConf.to_container(compose(f"loss={loss}").loss) == own | shared


@pytest.mark.parametrize("loss", LOSSES)
def test_the_files_of_losses_are_read_as_hydra_reads_them(loss):
    assert OmegaConf.to_container(compose(f"loss={loss}").loss) == load_defaults(loss)["loss"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ("loss=sft", "+loss.sft_weight=0.1"),
            "loss.sft_weight=0.1 needs a loss of pairs: any but sft",
        ),
        (("loss=dpo", "loss.beta=1", "loss.sft_weight=inf"), "loss.sft_weight=inf must be a number from 0 to 1e30"),
        (
            ("loss=mix",),
            "loss=mix adds up no loss of pairs: give loss.weights.dpo=1 or another, or train with loss=sft",
        ),
        (("loss=mix", "loss.weights.sft=1"), "loss=mix adds up no loss of pairs"),
        (("loss=mix", "loss.weights.dpo=1", "loss.weights.ipo=-1"), "loss.weights.ipo=-1 must be a number from 0 "),
        (
            ("loss=mix", "loss.weights.dpo=1", "loss.weights.apo_zero=1", "loss.f_divergence=js"),
            "loss.f_divergence=js n",
        ),
        (("loss=mix", "loss.weights.dpo=1", "loss.weights.ipo=inf"), "loss.weights.ipo=inf must be a number from 0 "),
        (("loss=mix", "~loss.weights"), "loss=mix adds up no loss of pairs"),
        (
            ("loss=mix", "loss.weights.dpo=1", "+loss.weights.aot=1"),
            "loss.weights.aot: aot compares the examples of a batch with each other, so it is trained alone",
        ),
        (("loss=mix", "+loss.weights.cpo=1"), "loss.weights.cpo: no loss is called cpo; a mix adds up sft, dpo, "),
        (("loss=mix", "loss.weights.dpo=1e39"), "loss.weights.dpo=1e+39 must be a number from 0 to 1e30"),
        (("lora=lora", "lora.r=65537"), "lora.r=65537 must be an integer from 1 to 65536"),
        (("loss=mix", "loss.weights.dpo=-1"), "loss.weights.dpo=-1 must be a number from 0 to 1e30"),
        (("loss=mix", "loss.weights.orpo=1", "loss.ld_alpha=0"), "loss.ld_alpha=0 needs a loss with a reference"),
        (("loss=mix", "loss.weights.exo=1"), "loss.label_smoothing=0 makes the loss infinite: set it above 0"),
        (("loss=exo", "loss.label_smoothing=0"), "loss.label_smoothing=0 makes the loss infinite: set it above 0"),
        (("loss=exo", "loss.ld_alpha=1.5"), "loss.ld_alpha=1.5 must be a number from 0 to 1"),
        (
            ("loss=dpo", "loss.beta=1", "loss.f_divergence=kl"),
            "loss.f_divergence=kl is not one of alpha, forward_kl, js",
        ),
        (
            ("loss=dpo", "loss.beta=1", "loss.f_divergence=js", "loss.reference_free=true"),
            "loss.f_divergence=js is a divergence from the reference: set loss.reference_free=false",
        ),
        (("loss=sppo", "loss.f_divergence=js"), "loss.f_divergence=js needs a loss whose log-ratios enter by their d"),
    ],
)
def test_options_of_losses_that_cannot_be_together_are_refused(overrides, problem):
    [found] = find_config_problems(compose(*COMPLETE[:2], *overrides))
    assert found.startswith(problem)


def test_a_mix_has_a_weight_for_each_loss_that_can_be_in_it_and_all_options_of_these():
    mix = copy.deepcopy(load_defaults("mix")["loss"])
    parts = [copy.deepcopy(load_defaults(name)["loss"]) for name, loss in LOSSES.items() if loss.can_be_mixed]
    assert mix.pop("weights") == {part.pop("name"): 0 for part in parts}
    assert mix.keys() == set().union(*parts) - {"momentum"} | {"name"}  # without updates before, no running average


def test_the_run_directory_is_named_after_user_experiment_and_time_and_composing_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    (tmp_path / "second").mkdir()
    dirs = f"local_dirs=[{tmp_path / 'first'},{tmp_path / 'second'},{tmp_path / 'third'}]"

    path = compose("exp_name=x", dirs).local_run_dir

    assert re.fullmatch(rf"{tmp_path}/second/somebody/x_\d{{4}}-\d\d-\d\d_[-\d_]+", path)
    assert [p.name for p in tmp_path.rglob("*")] == ["second"]


# --- what has no effect --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith("loss.weights.")])  # read as a mapping
def test_every_key_is_read_by_the_code(key):
    leaf = key.split(".")[-1]
    files = [*ROOT.glob("*.py"), *(ROOT / "dpo").rglob("*.py")]
    sources = "".join(f.read_text() for f in files if f.stem not in ("keys", "validation", "resume"))
    section = key.split(".")[0] if "." in key else "config"
    read = rf"(config|model|settings|wandb|{section})\.{leaf}\b|[\"']{key}[\"']|\b{leaf}: (float|bool|str)"
    assert re.search(read, sources)


WITHOUT = {  # settings under which a key has no effect
    "fsdp_port=5000": (),
    "fsdp_shard_size=2": (),
    "tensor_parallel_size=2": (),
    "tensor_parallel.backend=tensor_parallel": (),
    "collective_timeout_secs=60": (),
    "wandb.entity=me": ("wandb.enabled=false",),
    "wandb.project=mine": ("debug=true",),
    "wandb.group=mine": ("debug=true",),
    "wandb.tags=[mine]": ("wandb.enabled=false",),
    "wandb.notes=mine": ("wandb.enabled=false",),
    "wandb.artifacts=false": ("wandb.enabled=false",),
    "tensorboard.enabled=true": ("debug=true",),
    "n_eval_model_samples=5": ("sample_during_eval=false",),
    "n_eval_tokens=5": ("sample_during_eval=false",),
    "do_first_sampling=true": ("do_first_eval=false",),
    "lr_scaling=linear": (),
    "min_lr_ratio=0.1": (),
    "cache_reference_logps=all": ("loss=sft",),
    "save_every=8": ("debug=true",),
    "keep_checkpoints=2": ("debug=true",),
    "export=false": ("debug=true",),
    "model.fsdp_policy_mp=bfloat16": (),
    "model.reference_dtype=float32": ("loss=sft",),
    "+loss.sft_weight=1": ("loss=sft",),
    "loss.wpo=true": ("loss=mix", "loss.weights.orpo=1"),
    "loss.ld_alpha=0.5": ("loss=mix", "loss.weights.simpo=1"),
    "loss.f_divergence=js": ("loss=nca",),
    "loss.f_alpha=0.1": ("loss.f_divergence=js",),
    "lora.reference=model": ("loss=sft", "lora=lora", "lr=1e-4"),
    "online.reward_model=rm": ("online=online", "online.scorer=shorter"),
    "online.function=a.py:f": ("online=online", "online.scorer=shorter"),
    "online.keyword=a": ("online=online", "online.scorer=shorter"),
    "online.sync_reference_every=5": ("online=online", "online.scorer=shorter", "loss=simpo", "loss.beta=2"),
}


def test_every_key_that_needs_something_is_tried():
    assert [override.split("=")[0].lstrip("+") for override in WITHOUT] == [key for key in KEYS if KEYS[key].needs]


@pytest.mark.parametrize("override", WITHOUT)
def test_a_key_without_effect_is_refused_or_gets_a_line(override):
    key = override.split("=")[0].lstrip("+")
    loss = () if any(o.startswith("loss=") for o in WITHOUT[override]) else ("loss=dpo", "loss.beta=0.1")
    complete = (*COMPLETE[:2], *loss, *WITHOUT[override])
    loss = find_loss(compose(*complete).loss)
    plan = replace(ONE, loss=loss, reference="model" if loss.reference else None)
    refused = problems(override, complete=complete, plan=plan)
    noted = find_unused(compose(*complete, override), plan)
    assert [line.split("=")[0] for line in refused + noted] == [key]
    assert bool(refused) == KEYS[key].needs.refused
    assert find_unused(compose(*complete), plan) == []  # unless it is set


def test_a_value_is_told_as_it_is_typed():
    config = compose(*COMPLETE, "do_first_sampling=true", "do_first_eval=false")
    assert [line.split(":")[0] for line in find_unused(config, ONE)] == ["do_first_sampling=true has no effect"]


def test_a_source_that_no_dataset_names_gets_a_line():
    config = compose(*COMPLETE, "datasets=[shp]", "dataset_sources.hh=/x", "dataset_sources.shp=/y")
    assert find_unused(config, ONE) == [
        "dataset_sources.hh has no effect: datasets=shp does not name it; datasets=[hh] does"
    ]


def test_a_rate_that_bfloat16_weights_round_away_gets_a_line():
    def noted(*overrides):
        return find_unused(compose(*COMPLETE, "model.policy_dtype=bfloat16", *overrides), ONE)

    [line] = noted("lr=5e-7")
    assert line.startswith("lr=5e-07 has little effect with model.policy_dtype=bfloat16")
    for enough in ("lr=1e-5", "optimizer=SGD", "optimizer=Adafactor", "model.policy_dtype=float32"):
        assert noted("lr=5e-7", enough) == []


def test_names_of_other_trainers_lead_to_keys_and_are_none_of_ours():
    for name, ours in ALIASES.items():
        assert name not in KEYS
        assert re.split("[=,]", ours)[0] in {*KEYS, "loss", "lora", "online"}


# --- adapters --------------------------------------------------------------------------------------------------------


def test_keys_of_an_adapter_are_there_with_it_alone():
    assert flatten(compose("loss=sft", "lora=none"))["lora.name"] == "none"
    assert {key for key in flatten(compose("loss=sft")) if key.startswith("lora.")} == {"lora.name"}
    [problem] = problems("lora.name=lora")
    assert problem.startswith("lora.name=lora lacks lora.r, ")
    assert problem.endswith(": choose lora=lora")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("lora.r=0", "lora.r=0 must be an integer from 1 to 65536"),
        ("lora.alpha=0", "lora.alpha=0 must be a number above 0"),
        ("lora.dropout=1", "lora.dropout=1 must be a number in [0, 1)"),
        ("lora.target_modules=all", "lora.target_modules=all must be auto, or a list of different names of layers"),
        ("lora.target_modules=[]", "lora.target_modules=[] must be auto, or a list of different names of layers"),
        ("lora.reference=none", "lora.reference=none is not one of adapter, base, model"),
        ("lora.reference=adapter", "lora.reference=adapter needs an adapter: give model.archive=RUN/LATEST"),
    ],
)
def test_an_adapters_values_are_checked(override, problem):
    [found] = problems("lora=lora", "model.archive=null", override)
    assert found.startswith(problem)


def test_adapters_do_not_go_with_the_package_that_splits_layers():
    by_package = (
        "trainer=TensorParallelTrainer",
        "tensor_parallel.backend=tensor_parallel",
        "sample_during_eval=false",
    )
    [problem] = problems("lora=lora", *by_package, plan=CUT_BY_PACKAGE)
    assert problem.startswith("lora=lora does not work with tensor_parallel.backend=tensor_parallel")


def test_a_reference_in_the_policy_computes_as_the_policy_does():
    plan = resolve(compose(*COMPLETE, "lora=lora", "model.reference_dtype=bfloat16"))
    assert (plan.reference, plan.reference_dtype) == ("base", plan.compute_dtype)
    [line] = find_unused(compose(*COMPLETE, "lora=lora", "lr=1e-4", "model.reference_dtype=bfloat16"), plan)
    assert line.startswith("model.reference_dtype=bfloat16 has no effect")
    assert resolve(compose(*COMPLETE)).reference == "model"
    assert resolve(compose("loss=sft")).reference is None


def test_a_rate_for_all_weights_gets_a_line_with_an_adapter():
    [line] = find_unused(compose(*COMPLETE, "lora=lora", "lr=5e-7"), resolve(compose(*COMPLETE, "lora=lora")))
    assert line.startswith("lr=5e-07 is a rate for all weights")
    assert find_unused(compose(*COMPLETE, "lora=lora", "lr=1e-5", "model.policy_dtype=bfloat16"), ONE) == []


def test_answers_that_no_memory_could_hold_are_refused_with_the_bound():
    [found] = find_config_problems(
        compose(
            *COMPLETE[:2],
            "loss=dpo",
            "loss.beta=0.1",
            "online=online",
            "online.scorer=shorter",
            "online.n_samples=1000000000",
        )
    )
    assert found.startswith(
        "online.n_samples=1000000000 must be an integer from 2, a best and a worst, to 1024: all ans"
    )
