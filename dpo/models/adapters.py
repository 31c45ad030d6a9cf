"""LoRA adapters (arXiv 2106.09685), put into a model in place by PEFT.

The model's class, blocks and names stay the same, but the weights of an adapted layer move under `base_layer`. A model
may hold two adapters: the trained `policy` and a frozen `reference` beside it.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dpo.checkpoint.parts import ModelPart
from dpo.errors import InputError, explaining
from dpo.models.adapter_dropout import Dropout
from dpo.parallel.state import full_state, local_tensor
from dpo.settings.keys import Rule, is_int, read_rule
from dpo.system.host import silence_bitsandbytes
from dpo.system.plain_files import check_readable, read_json

if TYPE_CHECKING:
    from peft import LoraConfig

POLICY, REFERENCE = "policy", "reference"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
PREFIX = "base_model.model."  # begins every name in PEFT's files
# the keys of PEFT's config that are honoured; an adapter with any other key set is refused
KNOWN = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "init_lora_weights"),
}


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except (re.error, OverflowError, RecursionError):
        return False


TARGETS = Rule(
    lambda v: v is None or _is_pattern(v) or (isinstance(v, list) and all(isinstance(n, str) for n in v)),
    "a list of names, or a regular expression that compiles",
)
PATTERNS = Rule(
    lambda v: v is None or _is_pattern(v) or (isinstance(v, list) and all(map(_is_pattern, v))),
    "a regular expression that compiles, or a list of them",
)
RULES = {  # for the values that are used here
    "r": read_rule("int >= 1"),
    "lora_alpha": read_rule("number > 0"),
    "lora_dropout": read_rule("number [0, 1)"),
    "base_model_name_or_path": Rule(lambda v: v is None or isinstance(v, str), "a string, or null"),
    **dict.fromkeys(("target_modules", "exclude_modules"), TARGETS),
    "layers_pattern": PATTERNS,
    "layers_to_transform": Rule(
        lambda v: v is None or is_int(v) or (isinstance(v, list) and all(map(is_int, v))),
        "an integer, a list of integers, or null",
    ),
    "init_lora_weights": Rule(lambda v: isinstance(v, bool | str), "true, false or a name"),
    "fan_in_fan_out": read_rule("flag"),
}
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that also modify the base
FACTOR_NAME = re.compile(r"(.+)\.lora_[AB]\.weight")


class ParameterCount(NamedTuple):
    """The numbers of trained parameters and of all parameters of a policy, a reference adapter's included."""

    trainable: int
    total: int


class StoredAdapter(NamedTuple):
    """An adapter read from a directory in PEFT's format."""

    directory: Path
    config: LoraConfig
    weights: dict[str, torch.Tensor]  # by the name in the model, without the adapter's name


def _import_peft() -> Any:
    """Import PEFT late: it takes a second, and most runs have no adapter."""
    silence_bitsandbytes()
    import peft

    return peft


def find_adapter(path: str | Path | None) -> Path | None:
    """The directory in PEFT's format for a path: the path itself, its LATEST, or the parent of a `policy.pt`."""
    if path is None:
        return None
    path = Path(path).expanduser()
    candidates = (path, path / "LATEST", *([path.parent] if path.name == "policy.pt" else []))
    return next((candidate for candidate in candidates if (candidate / CONFIG).is_file()), None)


def read_adapter(directory: Path) -> StoredAdapter:
    """Read an adapter in PEFT's format. Raises InputError if it is damaged, or of an unsupported kind."""
    peft = _import_peft()

    with _explaining(directory):
        check_readable(directory / WEIGHTS)
        written = _read_config(directory)
        # keys that are not honoured must be off, and PEFT trips over some spellings of off
        config = peft.PeftConfig.from_peft_type(**{k: v for k, v in written.items() if v or k in KNOWN})
        weights = load_file(directory / WEIGHTS)
    if not isinstance(config, peft.LoraConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise InputError(f"{directory} holds an adapter of type {kind}; only LORA is supported here")
    plain = vars(peft.LoraConfig())
    found = [
        f"{key}={value}" for key, value in vars(config).items() if value and key not in KNOWN and value != plain[key]
    ]
    found += [f"init_lora_weights={how}" for how in [config.init_lora_weights] if str(how).startswith(CHANGE_THE_BASE)]
    found += sorted(name for name in weights if not FACTOR_NAME.fullmatch(name))[:3]
    if found:
        raise InputError(
            f"{directory} holds an adapter with {', '.join(found)}, which is not supported here: merge it into its "
            f"base with peft, and give that as model.name_or_path"
        )
    for name, tensor in weights.items():  # a foreign rank would decide how much memory is taken
        rank = tensor.shape[0 if ".lora_A." in name else -1] if tensor.ndim == 2 else None
        if rank != config.r:
            raise InputError(f"{directory / CONFIG}: r={config.r}, and {name} is {tuple(tensor.shape)}")
    return StoredAdapter(directory, config, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})


class Base(NamedTuple):
    """The base that an adapter names; neither a name nor an archive if its run drew the base from a seed."""

    name: str | None = None  # a Hub id or a directory
    archive: Path | None = None  # a `policy.pt`, which our adapters may name


def find_base(directory: Path) -> Base:
    """The base that an adapter in PEFT's format names; it may be gone."""
    with _explaining(directory):
        named = _read_config(directory).get("base_model_name_or_path") or None
    if named is not None and (named.endswith(".pt") or Path(named).is_file()):
        return Base(archive=Path(named))
    return Base(name=named)


def _explaining(directory: Path) -> AbstractContextManager[None]:
    errors = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError)
    return explaining(errors, lambda why: InputError(f"{directory} is not an adapter in PEFT's format: {why}"))


def _read_config(directory: Path) -> dict[str, Any]:
    """Read PEFT's config of an adapter from its file. Raises InputError for an invalid value."""
    path = directory / CONFIG
    written = read_json(path)
    if not isinstance(written, dict):
        raise InputError(f"{path} holds no mapping, as PEFT writes it")
    for key, rule in RULES.items():
        if key in written and not rule.holds(written[key]):
            raise InputError(f"{path}: {key}={json.dumps(written[key])[:100]} must be {rule.wanted}")
    return {key: value for key, value in written.items() if key != "auto_mapping"}  # it names modules to import


def add_adapter(
    model: Any,
    config: LoraConfig,
    *,
    name: str = POLICY,
    dropout: float = 0.0,
    seed: int = 0,
    targets: str = "lora.target_modules",
) -> None:
    """Freeze a model, add an adapter to it in float32, and activate it; all but the reference's is trained.

    As drawn from the seed by PEFT, it changes nothing: B is 0. On the meta device it takes no memory. Its dropout is
    off until `AdapterDropout` turns it on. Raises InputError if the config names no layer of the model, or one that
    cannot be adapted; `targets` says where the layers are named.
    """
    config = copy.deepcopy(config)
    config.inference_mode, config.lora_dropout = name != POLICY, dropout
    _inject(model, config, name, seed, targets)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if hasattr(head, "base_layer") and head.weight is embedding.weight:  # merging would change the embedding
        raise InputError(
            f"{targets} names the head of {type(model).__name__}, which is its embedding too: leave it out"
        )
    for layer in _adapted_layers(model):
        _prepare(layer, name, dropout, targets)
    model.requires_grad_(False)
    for weight in adapter_weights(model, POLICY).values():
        weight.requires_grad_(True)
    _activate(_adapted_layers(model), name)


def _inject(model: Any, config: LoraConfig, name: str, seed: int, targets: str) -> None:
    """Have PEFT put an adapter into a model, drawn from the seed alone."""
    peft = _import_peft()

    on_meta = next(model.parameters()).is_meta
    device = torch.device("meta") if on_meta else nullcontext()  # or PEFT makes the factors in memory first
    # None would warn about several GPUs
    with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings(), device:
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second adapter is intended
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT corrects it for GPT-2
        torch.manual_seed(seed)
        kind = type(model).__name__
        with explaining(ValueError, lambda why: InputError(f"{targets} cannot be adapted in {kind}: {why}")):
            peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=on_meta)
    if isinstance(config.target_modules, set):  # PEFT accepts a single match
        names = [key.removesuffix(".base_layer") for key, _ in model.named_modules()]
        if absent := sorted(t for t in config.target_modules if not any(f".{n}".endswith(f".{t}") for n in names)):
            raise InputError(f"{targets} names layers that {type(model).__name__} has not: {', '.join(absent)}")


def _prepare(layer: Any, name: str, dropout: float, targets: str) -> None:
    """Replace the dropout and factors of a layer adapted by PEFT. Raises InputError if it is not linear."""
    if name in layer.lora_embedding_A:
        kind = type(layer.get_base_layer()).__name__
        raise InputError(f"{targets} names a layer of class {kind}: only linear layers can be adapted")
    layer.cast_input_dtype_enabled = False  # else q, k and v would each keep a float32 copy of their input
    if dropout > 0:
        layer.lora_dropout[name] = Dropout(dropout, layer.in_features)
    for part in (layer.lora_A, layer.lora_B):
        if name in part:
            part[name] = Factor(part[name])


class Factor(torch.nn.Linear):
    """A matrix of an adapter: in float32, multiplied in the dtype of its input; the converted copy is small."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = torch.nn.Parameter(layer.weight.detach().float(), requires_grad=layer.weight.requires_grad)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight.to(input.dtype))


def make_adapter_config(r: int, alpha: float, target_modules: str | list[str]) -> LoraConfig:
    """PEFT's config of a new adapter; `target_modules` `auto`: every linear layer but the head."""
    peft = _import_peft()

    targets = "all-linear" if target_modules == "auto" else list(target_modules)
    return peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def load_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Copy a stored adapter's weights into the model's adapter of that name. Raises InputError if they do not fit."""
    into = adapter_weights(model, name)
    odd = sorted(into.keys() ^ stored.weights.keys())
    odd += sorted(key for key in into.keys() & stored.weights.keys() if into[key].shape != stored.weights[key].shape)
    if odd:
        advice = "the model that it was trained on"
        if names := _names_to_give(model, into, stored.weights):
            advice = f"lora.target_modules=[{','.join(names)}], or {advice}"
        raise InputError(
            f"{stored.directory} does not fit the adapter of this model ({type(model).__name__}), which differs in "
            f"{', '.join(odd[:3])}: give {advice}"
        )
    with torch.no_grad():
        for key, parameter in into.items():
            parameter.copy_(stored.weights[key])


def _names_to_give(model: Any, into: Iterable[str], stored: Iterable[str]) -> list[str]:
    """The `lora.target_modules` of a stored adapter, if it adapts other layers than the model's; else none.

    These are the last parts of the layers' names, or whole names if not all layers with such a last part are adapted.
    """
    has, given = ({key.rpartition(".lora_")[0] for key in keys} for keys in (into, stored))
    if has == given:
        return []
    names = {layer.rpartition(".")[2] for layer in given}
    of_these_names = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in names}
    return sorted(given if given < of_these_names else names)


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The parameters of an adapter, by name without the adapter's own; empty if the model has no such adapter."""
    return {
        key.replace(f".{name}.", "."): parameter
        for key, parameter in model.named_parameters()
        if key.endswith((f".lora_A.{name}.weight", f".lora_B.{name}.weight"))
    }


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a model without its adapters, under the names of the plain model."""
    return {
        key.replace(".base_layer.", "."): tensor
        for key, tensor in model.state_dict().items()
        if not _is_adapter_weight(key)
    }


def weights_in_use(model: Any) -> list[torch.Tensor]:
    """The weights that a model computes with: its base's, and its active adapter's unless that adds nothing."""
    [name] = {name for layer in _adapted_layers(model) for name in layer.active_adapters} or {None}
    adapter = {} if name is None else adapter_weights(model, name)
    adds = any(local_tensor(weight).any() for key, weight in adapter.items() if ".lora_B." in key)
    base = [parameter for key, parameter in model.named_parameters() if not _is_adapter_weight(key)]
    return [*base, *(adapter.values() if adds else ())]


def _is_adapter_weight(key: str) -> bool:
    return ".lora_A." in key or ".lora_B." in key


def _adapted_layers(model: Any) -> list[Any]:
    if not hasattr(model, "peft_config"):  # set by PEFT
        return []
    from peft.tuners.lora import LoraLayer

    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]


def _activate(layers: Iterable[Any], name: str | None) -> None:
    for layer in layers:
        # PEFT's set_adapter would also change requires_grad, on which optimizer and FSDP rely
        layer._active_adapter = [] if name is None else [name]


def switch(model: Any, name: str | None) -> Callable[[], AbstractContextManager[None]]:
    """Make a context in which a policy computes with the adapter `name` instead of its own; None: with its base.

    The layers are found once, as an update enters the context for every microbatch.
    """
    layers = _adapted_layers(model)

    @contextmanager
    def switched() -> Iterator[None]:
        _activate(layers, name)
        try:
            yield
        finally:
            _activate(layers, POLICY)

    return switched


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters: all of a model's, or its adapter's if it has one."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Count parameters over all processes, however the model is sharded; packed weights count one by one."""
    trainable, total = (sum(p.numel() for p in chosen) for chosen in (trained_parameters(model), model.parameters()))
    linear = (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    packed = (layer for layer in linear if not isinstance(layer.weight, torch.nn.Parameter))
    return ParameterCount(trainable, total + sum(layer.in_features * layer.out_features for layer in packed))


def policy_part(model: torch.nn.Module) -> ModelPart:
    """The part of a checkpoint with a policy's trained weights."""
    return (AdapterPart if adapter_weights(model, POLICY) else ModelPart)("policy", model)


class AdapterPart(ModelPart):
    """The part of a checkpoint for a policy with an adapter: the adapter alone, also in PEFT's format."""

    @property
    def n_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in adapter_weights(self.source, POLICY).values())

    def gather(self, *, copy: bool) -> dict[str, torch.Tensor]:
        return full_state({PREFIX + key: p for key, p in adapter_weights(self.source, POLICY).items()}, copy=copy)

    def convert(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """PEFT's files."""
        config = self.source.peft_config[POLICY].to_dict() | {"inference_mode": True}
        as_lists = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        tensors = {key: tensor.contiguous() for key, tensor in state.items()}
        return {
            CONFIG: json.dumps(as_lists, indent=2, sort_keys=True).encode(),
            WEIGHTS: save(tensors, metadata={"format": "pt"}),
        }
