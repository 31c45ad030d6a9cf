"""How a run is computed changes nothing that it trains.

One matrix. A feature is what a run trains: a loss, an adapter, online pairs. A way is how: layout, microbatches,
processes, stops. Metrics, ledger, samples and weights are compared with those of the plain run (one process, all else
at its default), to TOLERANCE, for another order of summation rounds differently; bit for bit if a run was stopped or
killed and resumed in the same way. The masks of lora.dropout alone depend on the way. `make test` runs the cells of
QUICK, `make test-all` the product.
"""

import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support.faults import kill_after_update, start_run
from support.formats import WITH_TOOLS
from support.models import save_reward_model
from support.runs import (
    assert_alike,
    find_differences,
    read_log,
    read_rows,
    train_here,
    write_chats,
    write_lists,
    write_prompts,
    write_weighted,
)

from dpo.analysis.ledger import PARQUET, read_ledger
from dpo.losses import LOSSES

TOLERANCE = 1e-5  # of metrics and weights; about 1e-6 is measured
OF_AN_EXAMPLE = 1e-4  # updates at a large rate magnify rounding: the loss of one example with dpop by 5e-5
# The run has two epochs of two updates, with evaluations at 0, 16 and 32 examples.
BASE = (
    "batch_size=8 eval_batch_size=8 n_eval_examples=8 n_eval_model_samples=8 n_examples=32 eval_every=16 ledger=true "
    "model.reference_dtype=null"
)
# SGD: others divide a gradient by its size, and so make much of the rounding of one that is nearly 0
ROUNDED = "optimizer=SGD lr=0.3 warmup_steps=0 max_grad_norm=1"
EXACT = "optimizer=AdamW lr=1e-3"  # which has a state

# --- what is trained -----------------------------------------------------------------------------------------------

MIX = "loss=mix loss.weights.dpo=0.8 loss.weights.bco=0.2 loss.weights.sft=0.1"
BY_LOSS = {name: f"loss={name}" for name in LOSSES} | {  # at a larger rate these magnify rounding
    "dpop": "loss=dpop lr=0.02",
    "ipo": "loss=ipo loss.beta=0.1 lr=0.01",
    "simpo": "loss=simpo lr=0.1",
    "mix": MIX,
}
BY_LOSS |= {name: f"loss={name} unpair=true" for name, loss in LOSSES.items() if loss.trains_on == "labels"}
BY_LOSS["plackett_luce"] = "loss=plackett_luce datasets=LISTS"
BY_OPTION = {
    "sft term": "loss.sft_weight=0.2",
    "wpo": "loss.wpo=true",
    "ld": "loss.ld_alpha=0.3",
    "forward kl": "loss.f_divergence=forward_kl lr=0.1",
    "all options": "loss.sft_weight=0.2 loss.wpo=true loss.ld_alpha=0.3 loss.f_divergence=alpha loss.f_alpha=0.2",
}
LORA = "lora=lora lora.r=4 lora.alpha=8"
QLORA = "lora=qlora lora.r=4 lora.alpha=8"
ONLINE = "online=online online.scorer=keyword online.keyword=e online.max_new_tokens=8"
ONLINE_BY_LOSS = {
    f"online {name}": f"{ONLINE} {BY_LOSS[name]} online.mix_offline=0.25 online.ties=skip"
    for name, loss in LOSSES.items()
    if loss.reference and loss.trains_on == "pairs"
}
CHATS = "datasets=CHATS model.tokenizer_name_or_path=CHAT_MODEL max_length=72 max_prompt_length=24"
FEATURES = {
    **BY_LOSS,
    **BY_OPTION,
    "sampling": "sample_during_eval=true do_first_sampling=true",
    "mixed datasets": "datasets=[hh,more]",
    "pairs of lists": "datasets=LISTS",
    "best and worst of lists": "datasets=LISTS list_pairs=best_worst",
    "weights": "datasets=WEIGHTED",
    "weights and margins": "datasets=WEIGHTED loss.offset_by_margin=true",
    "weights and labels": f"datasets=WEIGHTED {BY_LOSS['kto']}",
    "weights of a reward model": "datasets=WEIGHTED loss=bradley_terry loss.offset_by_margin=true",
    "tools": CHATS,
    "online tools": f"{ONLINE} {CHATS} online.scorer=reward_model online.reward_model=CHAT_MODEL",
    "lists for an adapter": f"{BY_LOSS['plackett_luce']} {LORA}",
    "lora": f"{LORA} lora.reference=base sample_during_eval=true",
    "lora from an adapter": f"{LORA} lora.reference=adapter model.archive=ADAPTER",
    "lora and a second model": f"{LORA} lora.reference=model model.archive=ADAPTER",
    "lora with sft": f"{LORA} loss=sft",
    "lora with bradley_terry": f"{LORA} loss=bradley_terry loss.centering=0.1",
    "lora with dropout": f"{LORA} lora.dropout=0.3 activation_checkpointing=true",
    "lora with dropout, aot": f"{LORA} lora.dropout=0.3 loss=aot",  # which scores a batch before its microbatches
    "qlora": f"{QLORA} sample_during_eval=true",
    "qlora and a second model": f"{QLORA} lora.reference=model",
    "online": ONLINE,
    "online lora": f"{ONLINE} {LORA} online.temperature=0.8 online.top_p=0.9",
    "online a following reference": f"{ONLINE} online.mix_offline=0.25 online.sync_reference_every=3",
    "online prompts alone": f"{ONLINE} datasets=PROMPTS online.labels=bradley_terry online.ties=keep",
    "online a reward model": f"{ONLINE} online.scorer=reward_model online.reward_model=REWARD_MODEL",
    **ONLINE_BY_LOSS,
}
# In these ways rounding is coarse, or only resuming matters.
RESUMED_ONLY = {
    "much at once": (
        "datasets=[hh,more] gradient_accumulation_steps=2 sample_during_eval=true model.autocast=bfloat16 "
        "cache_reference_logps=all schedule=cosine warmup_steps=1"
    ),
    "float16": "model.autocast=float16 gradient_accumulation_steps=2",
    "lora in half precision": f"{LORA} model.policy_dtype=bfloat16 lora.target_modules=[q_proj,v_proj]",
    "references first, lora": f"cache_reference_logps=all {LORA}",
    "online, padded, in parts": f"{ONLINE} layout=padded gradient_accumulation_steps=2",
    "random weights": "model.random_init=true seed=3 layout=padded",
}

# --- how it is computed --------------------------------------------------------------------------------------------


class Way(NamedTuple):
    settings: str = ""
    first: str | None = None  # settings of a run of half as many examples that this one resumes
    killed: bool = False

    @property
    def is_exact(self) -> bool:
        return self.first == self.settings


SHARDED = "trainer=FSDPTrainer world_size=2"
CUT = "trainer=TensorParallelTrainer world_size=2"
BOTH = "trainer=TensorParallelTrainer world_size=4 tensor_parallel_size=2"
HYBRID = "trainer=FSDPTrainer world_size=4 fsdp_shard_size=2"
UNEVEN = "trainer=FSDPTrainer world_size=3"  # no divisor of the batch
IDLE = f"{UNEVEN} gradient_accumulation_steps=3 layout=padded eval_batch_size=4"  # the last process has no examples
UNEVEN_CUT = "trainer=TensorParallelTrainer world_size=6 tensor_parallel_size=2"
ONE_SHARD = "trainer=FSDPTrainer world_size=1"
PACKAGE = "trainer=TensorParallelTrainer tensor_parallel.backend=tensor_parallel tensor_parallel_size=2"
BY_ALL = "checkpoint_format=sharded"
IN_PARTS = "layout=padded gradient_accumulation_steps=4 eval_batch_size=4"
FROZEN_WHOLE = "fsdp_frozen_weights=whole fsdp_reshard_after_forward=false fsdp_reduce_once=true"
WAYS = {
    "padded, in parts": Way(IN_PARTS),
    "in parts": Way("gradient_accumulation_steps=2 eval_batch_size=2"),
    "recomputed": Way("activation_checkpointing=true"),
    "references first": Way("cache_reference_logps=all"),
    "eager": Way("model.attn_implementation=eager"),
    "one shard": Way(ONE_SHARD),
    "sharded": Way(SHARDED),
    "sharded, padded, in parts": Way(f"{SHARDED} {IN_PARTS} activation_checkpointing=true"),
    "frozen weights whole": Way(f"{SHARDED} fsdp_frozen_weights=whole"),
    "frozen weights whole, in parts": Way(f"{SHARDED} {FROZEN_WHOLE} {IN_PARTS}"),
    "cut": Way(CUT),
    "cut and sharded": Way(BOTH),
    "hybrid": Way(HYBRID),
    "uneven": Way(UNEVEN),
    "uneven, padded, one process idle": Way(IDLE),
    "uneven, cut and sharded": Way(UNEVEN_CUT),
    "uneven, resumed": Way(UNEVEN, first=SHARDED),
    "in the package's threads": Way(PACKAGE),
    "resumed": Way(first=""),
    "killed, resumed": Way(first="", killed=True),
    "sharded, resumed": Way(SHARDED, first=SHARDED),
    "frozen weights whole, resumed": Way(f"{SHARDED} {FROZEN_WHOLE}", first=f"{SHARDED} {FROZEN_WHOLE}"),
    "cut and sharded, resumed": Way(BOTH, first=BOTH),
    "hybrid, resumed": Way(HYBRID, first=HYBRID),
    "in the package's threads, resumed": Way(PACKAGE, first=PACKAGE),
    "resumed sharded": Way(SHARDED, first=""),
    "in sharded checkpoints, resumed": Way(f"{SHARDED} {BY_ALL}", first=f"{SHARDED} {BY_ALL}"),
    "in sharded checkpoints, cut and sharded, resumed": Way(f"{BOTH} {BY_ALL}", first=f"{BOTH} {BY_ALL}"),
    "in sharded checkpoints, resumed alone": Way(first=f"{BOTH} {BY_ALL}"),
    "in sharded checkpoints, resumed cut": Way(CUT, first=f"{HYBRID} {BY_ALL}"),
    "cut, resumed alone": Way(first=CUT),
}
QUICK = {
    "padded, in parts": "all options, lora with bradley_terry",
    "in parts": "sft",
    "resumed": "online a following reference",
    "killed, resumed": "online lora",
}
# A loss or an option by itself is not trained in every way, but those of each kind of loss are.
KINDS = (
    "dpo", "sft", "ipo", "aot", "beta_dpo", "bco", "simpo", "kto", "plackett_luce", "bradley_terry", "mix",
    "all options",
)  # fmt: skip
OF_DATA = (
    "pairs of lists", "best and worst of lists", "lists for an adapter", "weights", "weights and margins",
    "weights and labels", "weights of a reward model", "tools", "online tools",
)  # fmt: skip
IN_FEW_WAYS = {*BY_LOSS, *BY_OPTION, *ONLINE_BY_LOSS, *OF_DATA} - {*KINDS}
WITH_FROZEN_WEIGHTS = ("dpo", "aot", *(name for name in FEATURES if "lora" in name), "online a following reference")
FEW_WAYS = ("padded, in parts", "sharded, padded, in parts")
WAYS_OF_DATA = (*FEW_WAYS, "resumed", "references first", "cut")
# These ways combine others, so one feature of each kind is trained in them: of examples, of a batch, with a state.
COMBINED_WAYS = {
    name
    for name in WAYS
    if name.startswith(("one shard", "hybrid", "cut and sharded", "cut, resumed", "in sharded", "uneven"))
}
IN_COMBINED_WAYS = (
    "dpo", "beta_dpo", "kto", "mixed datasets", "sampling", "lora", "lora with dropout, aot",
    "online a following reference",
)  # fmt: skip


def is_trained(feature: str, settings: str, name: str) -> bool:
    """Return whether a feature is trained in a way.

    Not if it is refused, has no effect, or another of its kind stands for it.
    """
    if feature in RESUMED_ONLY:
        return name == "resumed"
    if "lora.dropout" in settings:  # other layouts, microbatches and processes draw other masks
        return WAYS[name].is_exact and "package" not in name
    if feature in IN_FEW_WAYS and name not in (WAYS_OF_DATA if feature in (*OF_DATA, "bco_unpaired") else FEW_WAYS):
        return False
    if name in COMBINED_WAYS:
        return feature in IN_COMBINED_WAYS
    if "frozen weights" in name:
        return feature in WITH_FROZEN_WEIGHTS
    if name == "references first":
        without_reference = ("loss=sft", "loss=simpo", "loss=bradley_terry")
        return not any(part in settings for part in ("online", *without_reference))
    if "package" in name:
        return not any(part in settings for part in ("online", "lora", "sample_during_eval", "bradley_terry"))
    if "cut" in name:
        return "qlora" not in settings
    return True


def list_cells() -> Iterator[Any]:
    for feature, settings in {**FEATURES, **RESUMED_ONLY}.items():
        for name, way in WAYS.items():
            if is_trained(feature, settings, name):
                quick = feature in QUICK.get(name, "").split(", ")
                yield pytest.param(feature, way, id=f"{feature}: {name}", marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("feature", "way"), list_cells())
def test_how_a_run_is_computed_changes_nothing(feature, way, settings_of, whole, command, run_and_stop, tmp_path):
    if "qlora" in feature:
        pytest.importorskip("bitsandbytes", reason="QLoRA is optional: pip install bitsandbytes")
    settings = f"{EXACT if way.is_exact else ROUNDED} {settings_of(feature)}"
    expected, found = whole(f"{settings} {way.settings}" if way.is_exact else settings), tmp_path / "run"

    overrides = [*BASE.split(), *settings.split()]
    if way.killed:  # in its last update, with the checkpoint of the second
        dying = start_run(command("run", *overrides), partial(kill_after_update, 3))
        assert dying.wait() == -signal.SIGKILL, dying.text
    elif way.first == "":  # by a signal in its third update, in the middle of an epoch
        run_and_stop("run", *overrides)
    elif way.first is not None:
        train_here(command("run", *overrides, *way.first.split(), "n_examples=16"))
    train_here(command("run", *overrides, *way.settings.split(), "resume=auto"))

    if way.is_exact:
        assert_identical(expected, found)
    else:
        assert_same(expected, found)


@pytest.fixture(scope="module")
def whole(finished) -> Callable[[str], Path]:
    """The directory of an uninterrupted run with these settings."""
    return lambda settings: finished(*BASE.split(), *settings.split())


@pytest.fixture(scope="module")
def settings_of(whole, tokenizer, tmp_path_factory) -> Callable[[str], str]:
    """A feature's settings, with paths for the words in capitals."""
    folder = tmp_path_factory.mktemp("inputs")
    makers = {
        "=ADAPTER": lambda: whole(f"{ROUNDED} {FEATURES['lora with sft']}"),
        "=PROMPTS": lambda: write_prompts(folder / "prompts"),
        "=LISTS": lambda: write_lists(folder / "lists"),
        "=WEIGHTED": lambda: write_weighted(folder / "weighted"),
        "=CHATS": lambda: write_chats(folder / "chats"),
        "=CHAT_MODEL": lambda: save_reward_model(folder / "chat", "llama", tokenizer, template=WITH_TOOLS),
        "=REWARD_MODEL": lambda: save_reward_model(folder / "reward", "llama", tokenizer),
    }

    @cache
    def find(feature: str) -> str:
        settings = {**FEATURES, **RESUMED_ONLY}[feature]
        for what, make in makers.items():
            settings = settings.replace(what, f"={make()}") if what in settings else settings
        return settings

    return find


def assert_identical(expected: Path, found: Path) -> None:
    assert find_differences(expected, found) == []
    for name in (PARQUET, "LATEST/adapter_model.safetensors"):
        ours, theirs = (
            path.read_bytes() if (path := run_dir / name).exists() else None for run_dir in (found, expected)
        )
        assert ours == theirs, name


def assert_same(expected: Path, found: Path) -> None:
    lines = read_log(expected)
    trained = next(name for name in ("logps_eval/chosen", "rewards_eval/chosen", "online_eval/kl") if name in lines[0])
    assert lines[0][trained] != pytest.approx(lines[-1][trained], rel=1e-5)  # it trains
    assert_alike(found, expected, TOLERANCE)

    ledger, other = read_ledger(found), read_ledger(expected)
    assert ledger.schema == other.schema
    for name, values in zip(ledger.column_names, ledger.columns, strict=True):
        if pa.types.is_floating(values.type):
            values, others = (column.fill_null(1e9).to_pylist() for column in (values, other[name]))
            assert values == pytest.approx(others, rel=OF_AN_EXAMPLE, abs=OF_AN_EXAMPLE), name
        else:
            assert values.to_pylist() == other[name].to_pylist(), name

    prompts, others = (list_prompts(run_dir) for run_dir in (found, expected))
    assert prompts == others  # an answer in an evaluation depends on those beside it in a batch


def list_prompts(run_dir: Path) -> list[str]:
    """The prompts of the samples in a run's directory."""
    file = run_dir / "samples.jsonl"
    return [row["prompt"] for row in read_rows(file)] if file.exists() else []
