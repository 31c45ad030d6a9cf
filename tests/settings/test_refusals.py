"""Commands that are refused or warned about, and commands that run."""

import re

import pytest
from support.commands import RUNS, compose, find_refusals
from support.pytests import sampled

from dpo.losses import LOSSES
from dpo.settings.places import BUILT_IN
from dpo.settings.plan import resolve
from dpo.settings.validation import find_plan_warnings, find_problems

NAMES = ", ".join(BUILT_IN)

DPO = "loss=dpo loss.beta=0.1"
FSDP = "trainer=FSDPTrainer batch_size=8"
COMPUTED = "model.fsdp_policy_mp=bfloat16"
CUT = "trainer=TensorParallelTrainer batch_size=8"
PACKAGE = "trainer=TensorParallelTrainer tensor_parallel.backend=tensor_parallel"
DRAWN = f"{DPO} online=online online.scorer=shorter"
LORA = "lora=lora lr=1e-4 model.archive=null"

# An environment of GPUS=2, RANK=0 and the like may come first, as in a shell; without it there is no GPU. All commands
# have RUNS first. A sentence is given by its beginning.
REFUSED = [
    # --- overrides
    ("lr", "lr is not an override: write"),
    (
        "'datasets=/data/my rows (1).csv'",
        "datasets=/data/my rows (1).csv cannot be read: write 'datasets=\"/data/my rows (1).csv\"'",
    ),
    (
        "'optimizer_args={betas: (0.9,0.95)}'",
        "optimizer_args={betas: (0.9,0.95)} cannot be read: quote the parts with other characters than letters",
    ),
    ("exp_name=2024", "exp_name=2024 must be a text: write 'exp_name=\"2024\"'"),
    ("loss=dpo loss.beta=0.1,0.5", "loss.beta=0.1,0.5 has several values: write loss.beta=ONE"),
    ("-m model=glob(*)", "model=glob(*) has several values"),
    # --- keys and options
    ("Lr=1", "unknown key Lr: did you mean lr?"),
    ("los=dpo", "unknown key los: did you mean loss?"),
    ("--cfg job loss.betta=1", "unknown key loss.betta: did you mean loss.beta?"),
    ("+max_steps=1", "unknown key max_steps: here it is n_examples"),
    ("sft_loss=mean", "sft_loss=mean was removed after 6151c369; use loss=sft loss.average=mean, or leave it out"),
    ("loss=sft loss.average=true", "loss.average=true must be one of sum, mean"),
    ("loss=ipo loss.beta=1 loss.average=mean", "loss.average=mean must be true or false"),
    ("experiment=modern loss=kto loss.average=mean", "loss.average does not exist with loss=kto"),
    ("lora=x", "lora=x is unknown (there are lora, none, qlora)"),
    ("lora=adapter", "lora=adapter is unknown"),
    (
        f"{DPO} compile=true model.cache_implementation=static",
        "model.cache_implementation=static needs a single device",
    ),
    ("loss=sigmoid", "loss=sigmoid: here it is loss=dpo"),
    # It is not known whether there is a beta.
    (
        "loss=dppo loss.beta=0.1",
        f"loss=dppo is unknown: did you mean dpop or dpo? (there are {', '.join(sorted(LOSSES))}",
    ),
    (
        "model=pythia2",
        "model=pythia2 is unknown: did you mean pythia28?",
    ),
    *[(spaced, "lr = 2e-5 has spaces around =: write lr=2e-5") for spaced in ("lr = 2e-5", "lr= 2e-5", "lr =2e-5")],
    ("--learning-rate 2e-5", "--learning-rate is not an option here: write lr=2e-5"),
    ("--x=1", "--x is not an option here: settings are NAME=VALUE"),
    ("--beta=1", "--beta is not an option here: write loss.beta=1"),
    ("--epochs=3", "--epochs is not an option here: write n_epochs=3"),
    ("loss=dpo loss.beta=0,1", "loss.beta=0,1 has several values: write loss.beta=0.1, [A,B]"),
    (
        "experiment=modern lora=lora",
        "experiment=modern has a learning rate",
    ),
    ("holdout=2.5", "holdout=2.5 must be a share"),
    ("loss=sft loss.beta=1", "loss.beta does not exist with loss=sft"),
    # --- values
    # and nothing of local_run_dir, which is made from it
    ("exp_name=???", "exp_name is not set: set exp_name=VALUE"),
    ("model.name_or_path=???", "model.name_or_path is not set: set model=DIR_OR_HUB_ID"),
    ("loss=dpo", "loss.beta is not set: set loss.beta=VALUE"),
    ("exp_name='${NAME}'", "exp_name=${NAME} cannot be resolved"),
    ("lr='${lr}'", "lr=${lr} cannot be resolved"),
    ("lr='${seed}' seed='${lr}'", "seed=${lr} cannot be resolved"),
    ("optimizer_args='{eps: ${NAME}}'", "optimizer_args={'eps': '${NAME}'} cannot be resolved"),
    ("debug=maybe", "debug=maybe must be true or false"),
    (f"{DPO} loss.label_smoothing=0.5", "loss.label_smoothing=0.5 must be a number in [0, 0.5)"),
    ("lr=nan", "lr=nan must be a number above 0"),
    ("lr={}", "lr={} must be a number above 0"),
    ("schedule=cos", "schedule=cos: did you mean cosine?"),
    ("optimizer_args=0.1", "optimizer_args=0.1 must be a mapping"),
    # --- datasets
    ("datasets=3", "datasets=3 must be a text"),
    ("datasets=[no/such/pairs]", "no/such/pairs does not exist in"),
    ("datasets=[me/a,you/a]", f"datasets names you/a, which is neither one of {NAMES} nor"),
    ("dataset_sources=/data", "dataset_sources=/data must map names to paths or Hub ids"),
    ("dataset_sources.hh=''", "dataset_sources.hh='' must be a directory"),
    ("dataset_sources.hh={revision:main}", "dataset_sources.hh={'revision': 'main'} must be a directory, file"),
    ("dataset_sources.hh={path:a,columns:{chosen:b}}", "dataset_sources.hh.columns={'chosen': 'b'} must map some of"),
    ("dataset_sources.a={path:a,columns:{best:chosen}}", "dataset_sources.a.columns={'best': 'chosen'} must map som"),
    ("dataset_sources.a={path:a,format:alpaca}", "dataset_sources.a has the unknown key format: it may have path"),
    # --- keys that contradict each other
    ("max_length=256", "max_prompt_length=256 must be below max_length=256"),
    ("n_epochs=null", "n_epochs and n_examples are both null"),
    ("save_every=6", "save_every=6 (examples) must be a multiple of batch_size=4"),
    ("min_lr_ratio=0.1", "min_lr_ratio=0.1 needs schedule=linear"),
    ("resume=auto", "resume=auto looks for checkpoints"),
    # --- processes
    ("world_size=2", "trainer=BasicTrainer is one process"),
    (f"RANK=0 WORLD_SIZE=2 {FSDP} world_size=4", "world_size=4, but 2 processes were launched"),
    (f"{FSDP} optimizer=Adafactor", "optimizer=Adafactor cannot update shards"),
    ("fsdp_shard_size=2", "fsdp_shard_size=2 needs several processes"),
    (COMPUTED, f"{COMPUTED} needs several processes"),
    (f"{CUT} world_size=4 tensor_parallel_size=2 fsdp_shard_size=4", "fsdp_shard_size=4 times tensor_parallel_size=2"),
    (f"{CUT} world_size=2 tensor_parallel_size=4", "fsdp_shard_size=None times tensor_parallel_size=4"),
    (f"{FSDP} world_size=2 tensor_parallel_size=2", "tensor_parallel_size=2 needs trainer=TensorParallelTrainer"),
    ("tensor_parallel.backend=tensor_parallel", "tensor_parallel.backend=tensor_parallel needs trainer=Tens"),
    (PACKAGE, "tensor_parallel.backend=tensor_parallel takes no sample_during_eval"),
    (f"{FSDP} {DPO} {LORA} lora.reference=model {COMPUTED} fsdp_frozen_weights=whole", "fsdp_frozen_weights=whole ro"),
    # --- losses
    ("loss=bradley_terry", "loss=bradley_terry trains a reward model"),
    (f"{DPO} unpair=true", "unpair=true needs a loss of labels"),
    (f"{DRAWN} loss.offset_by_margin=true", "loss.offset_by_margin=true needs margins"),
    ("loss=exo loss.label_smoothing=0", "loss=exo divides by loss.label_smoothing=0"),
    (f"{DPO} loss.f_divergence=js loss.reference_free=true", "loss.f_divergence=js is a divergence"),
    ("loss=sppo loss.f_divergence=js", "loss.f_divergence=js needs a loss of"),
    ("loss=mix loss.weights.sft=1", "loss=mix adds up no loss of pairs"),
    ("loss=mix loss.weights.orpo=1 loss.ld_alpha=0", "loss.ld_alpha=0 needs a loss"),
    # --- adapters
    (f"{LORA} {DPO} lora.reference=adapter", "lora.reference=adapter needs an adapter: set"),
    (
        f"lora=qlora lr=1e-4 {CUT} world_size=2",
        "lora=qlora does not work with trainer",
    ),
    # --- online pairs
    (f"{DRAWN} online.scorer=reward_model", "online.scorer=reward_model needs online.reward_model"),
    ("loss=kto online=online online.scorer=shorter", "online=online draws pairs"),
    (f"{DRAWN} cache_reference_logps=all", "cache_reference_logps=all needs pairs"),
    (f"{DRAWN} online.max_new_tokens=400", "max_prompt_length=256 and online.max_new_tokens=400"),
    (f"{DRAWN} online.mix_offline=0.1", "online.mix_offline=0.1 of batch_size=4"),
    (f"{DRAWN} {LORA} online.sync_reference_every=5", "online.sync_reference_every=5 needs lora=none"),
    ("model.name_or_path=/no/such", "model.name_or_path: /no/such does not exist"),
    ("model.archive=/no/such/policy.pt", "model.archive: /no/such/policy.pt does not exist"),
    ("model.policy_dtype=float16", "optimizer=RMSprop divides by its eps, which float16 rounds to 0"),
    (f"GPUS=2 {FSDP} world_size=4", "4 processes cannot share 2 GPUs: set world_size=2"),
    (f"RANK=0 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GPUS=1 {FSDP}", "4 processes cannot share 1 GPU: set world_size=1"),
]

DISCOURAGED = [
    (
        f"{DPO} model.name_or_path=/tmp",
        "model.reference_dtype=float16 is slow",
    ),
    ("lr_scaling=sqrt", "lr_scaling=sqrt needs several processes"),
    (f"{DPO} loss.f_alpha=0.9", "loss.f_alpha=0.9 needs loss.f_divergence=alpha"),
    ("list_pairs=best_worst", "list_pairs=best_worst needs"),
    ("cache_reference_logps=all", "cache_reference_logps=all needs a loss with a reference"),
    (f"{DRAWN} online.keyword=yes", "online.keyword=yes needs online.scorer=keyword"),
    ("dataset_sources.hh=/x datasets=[shp] dataset_sources.shp=/y", "dataset_sources has hh, which datasets=['shp']"),
    (
        "model.policy_dtype=bfloat16 optimizer=AdamW lr=1e-3",
        "bfloat16 rounds weight decay away: lr * weight_decay is 1e-05",
    ),
    (
        f"{FSDP} model.policy_dtype=float16 optimizer=SGD lr=2e-4 optimizer_args.weight_decay=1",
        "float16 rounds weight decay away: lr * weight_decay is 0.0002",
    ),
    (f"{LORA} lr=5e-7", "lr=5e-07 is a learning rate"),
    (
        f"GPUS=2 {FSDP} {COMPUTED} model.autocast=bfloat16",
        "model.autocast=bfloat16 over several processes keeps",
    ),
    (f"GPUS=2 {FSDP}", "the policy computes in float32: model.autocast=auto is faster"),
    ("GPUS=8 model.autocast=bfloat16", "trainer=BasicTrainer spreads the layers"),
]

ACCEPTED = [
    "",
    # The adapter is float32; this decay is not rounded away.
    f"model.policy_dtype=float16 {LORA} lr=1e-4 model.autocast=float16",
    "model.policy_dtype=bfloat16 optimizer=SGD lr=0.02 optimizer_args.weight_decay=0.1",
    f"{DPO} loss.label_smoothing=0.499 loss.reference_free=true",
    f"{DPO} loss.sft_weight=0.2 loss.wpo=true loss.ld_alpha=0 loss.f_divergence=alpha loss.f_alpha=0.9",
    "loss=mix loss.weights.dpo=0.8 loss.weights.sft=1",
    "loss=kto unpair=true loss.desirable_weight=0",
    "loss=bradley_terry loss.centering=0.01 sample_during_eval=false",
    "n_epochs=null n_examples=1 warmup_steps=0 minimum_log_interval_secs=0 seed=4294967295",
    "wandb.tags='[a,b c]' wandb.notes='first try' wandb.group=g exp_name=group/run..1",
    "datasets=[hh,mine] dataset_sources.mine=/data dataset_sources.mine.columns={chosen:best}",
    "datasets=[me/data] dataset_sources.data={columns:{chosen:best}}",
    f"{FSDP} world_size=4 gradient_accumulation_steps=2 fsdp_shard_size=2 eval_batch_size=6",
    f"{CUT} world_size=8 tensor_parallel_size=2 gradient_accumulation_steps=2",
    f"{PACKAGE} tensor_parallel_size=2 sample_during_eval=false",
    f"RANK=0 WORLD_SIZE=4 GPUS=2 {FSDP} {COMPUTED} world_size=4",  # two machines of two GPUs
    f"GPUS=1 {FSDP} {COMPUTED} world_size=8 dry_run=true",  # of another machine
    f"SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_JOB_ID=1 GPUS=1 {FSDP} {COMPUTED}",  # one for each
    f"GPUS=2 lora=qlora lr=1e-4 {FSDP} {COMPUTED}",
    f"GPUS=1 {FSDP} model.autocast=bfloat16 world_size=1",  # nothing is gathered
    f"{LORA} lr=1e-5 model.policy_dtype=bfloat16",
    "model.policy_dtype=bfloat16 lr=5e-7 optimizer=SGD",
]  # fmt: skip


@pytest.fixture
def typed(monkeypatch):
    """Set the environment that a command begins with; return the rest."""

    def set_environment(command: str) -> str:
        environ = dict(re.findall(r"\b([A-Z_]+)=(\d+) ", command))
        gpus = int(environ.pop("GPUS", 0))
        monkeypatch.setattr("dpo.settings.plan.count_gpus", lambda: gpus)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return f"{RUNS} {re.sub(r'^([A-Z_]+=[0-9]+ )+', '', command)}"

    return set_environment


@pytest.mark.parametrize(("command", "sentence"), sampled(REFUSED, 3))
def test_a_command_that_cannot_work_is_refused_with_one_sentence(command, sentence, typed):
    [problem] = find_refusals(typed(command))
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("command", "sentence"), [*sampled(DISCOURAGED, 3), *sampled([(command, None) for command in ACCEPTED], 3)]
)
def test_a_command_that_can_work_gets_a_warning_only_if_it_is_slow_or_has_little_effect(command, sentence, typed):
    plan = resolve(compose(typed(command)))
    assert find_problems(plan) == []
    warnings = list(find_plan_warnings(plan))
    assert [warning.startswith(sentence) for warning in warnings] == [True] if sentence else warnings == []
