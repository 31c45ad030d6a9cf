"""LoRA adapters (arXiv 2106.09685), put into a model in place by PEFT.

The model's class, blocks and names stay the same, but the weights of an adapted layer move under `base_layer`. A model
may hold two adapters: the trained `policy` and a frozen `reference` beside it.
"""

from __future__ import annotations

import copy
import json
import os
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
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import full_state, local_tensor
from dpo.settings.keys import read_rule
from dpo.system.host import silence_bitsandbytes
from dpo.system.plain_files import check_readable, read_json

if TYPE_CHECKING:
    from peft import LoraConfig

POLICY, REFERENCE = "policy", "reference"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
PREFIX = "base_model.model."  # begins every name in PEFT's files
SPECS = {"r": "int >= 1", "lora_alpha": "number > 0"}  # for the keys of PEFT's config that are used here
# Keys that do not change what a trained adapter computes. The keys that name the adapted layers are among them, because
# the file of weights names these layers too. An adapter with any other key set is refused.
HARMLESS = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "init_lora_weights"),
}
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that also modify the base
FACTOR_NAME = re.compile(r"(.+)\.lora_[AB]\.weight")


class ParameterCount(NamedTuple):
    trainable: int
    total: int  # with those of a reference's adapter


class StoredAdapter(NamedTuple):
    """An adapter read from a directory in PEFT's format."""

    directory: Path
    r: int
    alpha: float
    weights: dict[str, torch.Tensor]  # by the name in the model, without the adapter's name

    @property
    def layers(self) -> list[str]:
        """The names of the layers that it adapts."""
        return sorted({name.rpartition(".lora_")[0] for name in self.weights})


def _import_peft() -> Any:
    silence_bitsandbytes()
    import peft  # late: it takes a second, and most runs have no adapter

    return peft


def find_adapter(path: str | Path | None) -> Path | None:
    """A directory in PEFT's format: the path, its LATEST, or its parent."""
    if path is None:
        return None
    path = Path(os.path.expanduser(path))
    candidates = (path, path / "LATEST", *([path.parent] if path.name == "policy.pt" else []))
    return next((candidate for candidate in candidates if (candidate / CONFIG).is_file()), None)


def read_adapter(directory: Path) -> StoredAdapter:
    """Read an adapter in PEFT's format.

    Raises InputError if it is damaged, or of an unsupported kind.
    """
    config = directory / CONFIG
    with _explaining(directory):
        check_readable(directory / WEIGHTS)
        written = _read_config(directory)
        kind = written["peft_type"]
        weights = load_file(directory / WEIGHTS)
    if kind != "LORA":
        raise InputError(f"{directory} holds an adapter of type {kind}; only LORA is supported here")
    for key, rule in ((key, read_rule(spec)) for key, spec in SPECS.items()):
        if not rule.holds(written.get(key)):
            raise InputError(f"{config}: {key}={json.dumps(written.get(key))[:100]} must be {rule.wanted}")
    if unsupported := _find_unsupported(written, weights):
        raise InputError(
            f"{directory} holds an adapter with {', '.join(unsupported)}, which is not supported here: merge it into "
            f"its base with peft, and give that as model.name_or_path"
        )
    r, alpha = written["r"], written["lora_alpha"]
    for name, tensor in weights.items():  # a foreign rank would decide how much memory is taken
        rank = tensor.shape[0 if ".lora_A." in name else -1] if tensor.ndim == 2 else None
        if rank != r:
            raise InputError(f"{config}: r={r}, and {name} is {tuple(tensor.shape)}")
    return StoredAdapter(directory, r, alpha, {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()})


def _find_unsupported(written: Mapping[str, Any], weights: Iterable[str]) -> list[str]:
    """Parts of an adapter beyond plain LoRA on linear layers.

    These are settings in its config, and up to three names of weights.
    """
    defaults, initialisation = vars(_import_peft().LoraConfig()), str(written.get("init_lora_weights"))
    unsupported = [
        f"{key}={value}"
        for key, value in written.items()
        if value and key not in HARMLESS | SPECS.keys() and value != defaults.get(key)
    ]
    if initialisation.startswith(CHANGE_THE_BASE):
        unsupported.append(f"init_lora_weights={initialisation}")
    return unsupported + sorted(name for name in weights if not FACTOR_NAME.fullmatch(name))[:3]


def read_base(directory: Path) -> str | None:
    """The base that an adapter names, a Hub id or a path."""
    with _explaining(directory):
        base = _read_config(directory).get("base_model_name_or_path")
    if not isinstance(base, str | None):
        given = json.dumps(base)[:100]
        raise InputError(f"{directory / CONFIG}: base_model_name_or_path={given} must be a name, or null")
    return base or None


def _explaining(directory: Path) -> AbstractContextManager[None]:
    errors = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError)
    return explaining(errors, lambda why: InputError(f"{directory} is not an adapter in PEFT's format: {why}"))


def _read_config(directory: Path) -> dict[str, Any]:
    written = read_json(directory / CONFIG)
    if not isinstance(written, dict):
        raise InputError(f"{directory / CONFIG} holds no mapping, as PEFT writes it")
    return written


def add_adapter(
    model: Any,
    config: LoraConfig,
    *,
    name: str = POLICY,
    dropout: float = 0.0,
    seed: int = 0,
    targets: str = "lora.target_modules",
) -> None:
    """Freeze a model and add an adapter in float32, which becomes active.

    The policy's is trained, any other is not. As PEFT draws it from the seed it changes nothing: B is 0. On the meta
    device it takes no memory. Its dropout is off until `AdapterDropout` turns it on.
    Raises InputError if the config names no layer of the model, or one that cannot be adapted; `targets` says where the
    layers are named.
    """
    config = copy.deepcopy(config)  # PEFT keeps and changes it
    config.inference_mode, config.lora_dropout = name != POLICY, dropout
    _inject(model, config, name, seed, targets)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if hasattr(head, "base_layer") and head.weight is embedding.weight:  # merging would change the embedding
        raise InputError(
            f"{targets} names the head of {type(model).__name__}, which is its embedding too: leave it out"
        )
    for layer in _adapted_layers(model):
        _prepare(layer, name, dropout, targets)
    model.requires_grad_(False)  # PEFT has left the new factors trainable, a reference's too
    for weight in adapter_weights(model, POLICY).values():
        weight.requires_grad_(True)
    _activate(_adapted_layers(model), name)


def _inject(model: Any, config: LoraConfig, name: str, seed: int, targets: str) -> None:
    """Let PEFT put an adapter into a model, drawn from the seed."""
    peft = _import_peft()
    on_meta = next(model.parameters()).is_meta
    device = torch.device("meta") if on_meta else nullcontext()  # or PEFT makes the factors in memory first
    # None would warn about several GPUs
    with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings(), device:
        warnings.simplefilter("ignore")  # about a second adapter, GPT-2's layers, and a tied head, which is refused
        torch.manual_seed(seed)
        kind = type(model).__name__
        with explaining(ValueError, lambda why: InputError(f"{targets} cannot be adapted in {kind}: {why}")):
            peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=on_meta)
    if isinstance(config.target_modules, set):  # PEFT accepts a single match
        names = ["." + key.removesuffix(".base_layer") for key, _ in model.named_modules()]
        if absent := sorted(t for t in config.target_modules if not any(n.endswith(f".{t}") for n in names)):
            raise InputError(f"{targets} names layers that {type(model).__name__} has not: {', '.join(absent[:5])}")


def _prepare(layer: Any, name: str, dropout: float, targets: str) -> None:
    """Replace PEFT's dropout and factors in an adapted layer."""
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
    """A matrix of an adapter, in float32, multiplied in its input's dtype."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = torch.nn.Parameter(layer.weight.detach().float(), requires_grad=layer.weight.requires_grad)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight.to(input.dtype))  # a small copy


def make_adapter_config(r: int, alpha: float, target_modules: str | list[str]) -> LoraConfig:
    """PEFT's config of a new adapter."""
    targets = "all-linear" if target_modules == "auto" else list(target_modules)  # all but the head
    return _import_peft().LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def add_stored_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Put a stored adapter into a model.

    Raises InputError if it does not fit.
    """
    config = make_adapter_config(stored.r, stored.alpha, stored.layers)
    add_adapter(model, config, name=name, targets=str(stored.directory))
    load_adapter(model, stored, name)


def load_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Copy a stored adapter's weights into the adapter of that name.

    Raises InputError if they do not fit.
    """
    parameters = adapter_weights(model, name)
    shared = parameters.keys() & stored.weights.keys()
    differing = sorted(parameters.keys() ^ stored.weights.keys())
    differing += sorted(key for key in shared if parameters[key].shape != stored.weights[key].shape)
    if differing:
        advice = "the model that it was trained on"
        if names := _names_to_give(model, parameters, stored):
            advice = f"lora.target_modules=[{','.join(names)}], or {advice}"
        raise InputError(
            f"{stored.directory} does not fit the adapter of this model ({type(model).__name__}), which differs in "
            f"{', '.join(differing[:3])}: give {advice}"
        )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(stored.weights[key])


def _names_to_give(model: Any, parameters: Iterable[str], stored: StoredAdapter) -> list[str]:
    """The `lora.target_modules` of a stored adapter that adapts other layers.

    These are the last parts of the layers' names, or whole names if not all layers with such a last part are adapted.
    """
    layers = set(stored.layers)
    if layers == {key.rpartition(".lora_")[0] for key in parameters}:
        return []
    last_parts = {layer.rpartition(".")[2] for layer in layers}
    named_alike = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(layers if layers < named_alike else last_parts)


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The parameters of an adapter, by name without the adapter's own."""
    return {
        key.replace(f".{name}.", "."): parameter
        for key, parameter in model.named_parameters()
        if key.endswith((f".lora_A.{name}.weight", f".lora_B.{name}.weight"))
    }


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a model's base, with the plain model's names."""
    return {
        key.replace(".base_layer.", "."): tensor
        for key, tensor in model.state_dict().items()
        if not _is_adapter_weight(key)
    }


@torch.no_grad()
def merge_adapter(model: Any, stored: StoredAdapter, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Merge a stored adapter into a model; returns its weights by name.

    Each sum is taken in float32 and rounded once, to `dtype` or its weight's. Raises InputError if it does not fit.
    """
    add_stored_adapter(model, stored)
    for layer in _adapted_layers(model):
        weight = layer.get_base_layer().weight
        weight.data = (weight + layer.get_delta_weight(POLICY)).to(dtype or weight.dtype)
    return base_weights(model)


def weights_in_use(model: Any) -> list[torch.Tensor]:
    """The base's weights, and the active adapter's unless it adds nothing."""
    names = {name for layer in _adapted_layers(model) for name in layer.active_adapters}
    assert len(names) <= 1, "all layers compute with the same adapter"
    adapter = adapter_weights(model, names.pop()) if names else {}
    adds = any(local_tensor(weight).any() for key, weight in adapter.items() if ".lora_B." in key)
    # parameters alone: a 4-bit base is in buffers, and never changes
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
    """Make a context in which a policy has another adapter, or none.

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
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Count the parameters of all processes; 4-bit weights count one by one."""
    trainable, total = (sum(p.numel() for p in chosen) for chosen in (trained_parameters(model), model.parameters()))
    linear = (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    packed = (layer for layer in linear if not isinstance(layer.weight, torch.nn.Parameter))
    return ParameterCount(trainable, total + sum(layer.in_features * layer.out_features for layer in packed))


def policy_part(model: torch.nn.Module) -> ModelPart:
    return (AdapterPart if adapter_weights(model, POLICY) else ModelPart)("policy", model)


class AdapterPart(ModelPart):
    """A policy's adapter in a checkpoint, also in PEFT's format."""

    @property
    def n_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in adapter_weights(self.source, POLICY).values())

    def gather(self, *, copy: bool) -> dict[str, torch.Tensor]:
        release_gathered(self.source)  # gathered weights have another dtype; a state dict would not have them
        return full_state({PREFIX + key: p for key, p in adapter_weights(self.source, POLICY).items()}, copy=copy)

    def convert(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        config = self.source.peft_config[POLICY].to_dict() | {"inference_mode": True}
        as_lists = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        tensors = {key: tensor.contiguous() for key, tensor in state.items()}
        return {
            CONFIG: json.dumps(as_lists, indent=2, sort_keys=True).encode(),
            WEIGHTS: save(tensors, metadata={"format": "pt"}),
        }
