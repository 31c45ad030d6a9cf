"""LoRA adapters (arXiv 2106.09685), put into a model in place by PEFT: class, blocks and names of the model stay as
they are, but that the weights of an adapted layer are under `base_layer`.

A model may hold two of them: the `policy` that is trained, and a frozen `reference` beside it.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dpo.errors import InputError
from dpo.models.adapter_dropout import Dropout
from dpo.parallel.state import local_tensor
from dpo.system.plain_files import check_readable

if TYPE_CHECKING:
    from peft import LoraConfig

POLICY, REFERENCE = "policy", "reference"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
PREFIX = "base_model.model."  # of every name in PEFT's files
# what an adapter made by another program may not have: what is trained here is lora_A and lora_B of linear layers
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")


class ParameterCount(NamedTuple):
    """How many parameters of a policy are trained, and how many it has, those of a reference adapter included."""

    trainable: int
    total: int


class StoredAdapter(NamedTuple):
    """An adapter read from a directory in PEFT's format."""

    directory: Path
    config: LoraConfig
    weights: dict[str, torch.Tensor]  # by the name in the model, without that of the adapter


def find_adapter(path: str | Path | None) -> Path | None:
    """The directory in PEFT's format that a path names: itself, its LATEST, or the parent of its `policy.pt`."""
    if path is None:
        return None
    path = Path(path).expanduser()
    candidates = (path, path / "LATEST", *([path.parent] if path.name == "policy.pt" else []))
    return next((candidate for candidate in candidates if (candidate / CONFIG).is_file()), None)


def read_adapter(directory: Path) -> StoredAdapter:
    """An adapter in PEFT's format. Raises InputError if it is damaged, or of a kind that is not trained here."""
    import peft  # which takes seconds, and most runs have no adapter

    try:
        check_readable(directory / CONFIG)
        check_readable(directory / WEIGHTS)
        config = peft.PeftConfig.from_pretrained(str(directory))
        weights = load_file(directory / WEIGHTS)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{directory} is not an adapter in PEFT's format: {reason}") from error
    if not isinstance(config, peft.LoraConfig):
        raise InputError(f"{directory} holds an adapter of type {config.peft_type}; only LORA can be trained here")
    found = [f"{key}={value}" for key in UNSUPPORTED if (value := getattr(config, key, None))]
    found += [f"bias={config.bias}"] * (config.bias != "none")
    if found:
        raise InputError(
            f"{directory} holds an adapter with {', '.join(found)}, which is not supported here: merge it into its "
            f"base with peft, and give that as model.name_or_path"
        )
    return StoredAdapter(directory, config, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})


def add_adapter(model: Any, config: LoraConfig, *, name: str = POLICY, dropout: float = 0.0, seed: int = 0) -> None:
    """Freeze a model and add an adapter to it in float32, trained unless it is the reference's; it becomes active.

    As PEFT draws it from the seed, it changes nothing: B is 0. On the meta device it takes no memory. Its
    dropout is off until `AdapterDropout` has it on. Raises InputError if the config names no layer of the model.
    """
    import peft

    config = copy.deepcopy(config)
    config.inference_mode, config.lora_dropout = name != POLICY, dropout
    on_meta = next(model.parameters()).is_meta
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second adapter is meant
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT corrects it for GPT-2
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=on_meta)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"lora.target_modules cannot be adapted in {type(model).__name__}: {reason}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in _adapted_layers(model):
        if name not in layer.lora_A:
            kind = type(layer.get_base_layer()).__name__
            raise InputError(f"lora.target_modules names a layer of class {kind}: only linear layers can be adapted")
        if dropout > 0:
            layer.lora_dropout[name] = Dropout(dropout, layer.in_features)
        for part in (layer.lora_A, layer.lora_B):
            part[name].float()
            if POLICY in part:
                part[POLICY].requires_grad_(True)
    activate(model, name)


def config_of(r: int, alpha: float, target_modules: str | list[str]) -> LoraConfig:
    """PEFT's config of a new adapter; `target_modules` `auto`: every linear layer but the head."""
    import peft

    targets = "all-linear" if target_modules == "auto" else list(target_modules)
    return peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def load_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Copy a stored adapter's weights into the model's adapter of that name. Raises InputError if they do not fit."""
    into = adapter_weights(model, name)
    odd = sorted(into.keys() ^ stored.weights.keys())
    odd += sorted(key for key in into.keys() & stored.weights.keys() if into[key].shape != stored.weights[key].shape)
    if odd:
        targets = stored.config.target_modules
        shown = targets if isinstance(targets, str) else f"[{','.join(sorted(targets or ()))}]"
        raise InputError(
            f"{stored.directory} does not fit the adapter of this model ({type(model).__name__}), which differs in "
            f"{', '.join(odd[:3])}: give lora.target_modules={shown}, or the model that it was trained on"
        )
    with torch.no_grad():
        for key, parameter in into.items():
            parameter.copy_(stored.weights[key])


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The parameters of an adapter by their names without the adapter's; empty if the model has none of that name."""
    return {
        key.replace(f".{name}.", "."): parameter
        for key, parameter in model.named_parameters()
        if key.endswith((f".lora_A.{name}.weight", f".lora_B.{name}.weight"))
    }


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a model without its adapters, under the names that it has without them."""
    return {
        key.replace(".base_layer.", "."): tensor
        for key, tensor in model.state_dict().items()
        if not _is_of_adapter(key)
    }


def weights_in_use(model: Any) -> list[torch.Tensor]:
    """The weights that a model computes with: its base's, and those of its active adapter unless that adds nothing."""
    [name] = {name for layer in _adapted_layers(model) for name in layer.active_adapters} or {None}
    adapter = {} if name is None else adapter_weights(model, name)
    adds = any(local_tensor(weight).any() for key, weight in adapter.items() if ".lora_B." in key)
    base = [parameter for key, parameter in model.named_parameters() if not _is_of_adapter(key)]
    return [*base, *(adapter.values() if adds else ())]


def _is_of_adapter(key: str) -> bool:
    return ".lora_A." in key or ".lora_B." in key


def _adapted_layers(model: Any) -> list[Any]:
    if not hasattr(model, "peft_config"):  # which PEFT gives the model
        return []
    from peft.tuners.lora import LoraLayer

    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]


def activate(model: Any, name: str | None) -> None:
    """Let the model compute with this adapter alone, None: with its base alone."""
    for layer in _adapted_layers(model):
        # PEFT's set_adapter would also change requires_grad, on which optimizer and FSDP rely
        layer._active_adapter = [] if name is None else [name]


@contextmanager
def using(model: Any, name: str | None) -> Iterator[None]:
    """Inside, a policy computes with this adapter instead of its own, None: with its base alone."""
    activate(model, name)
    try:
        yield
    finally:
        activate(model, POLICY)


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """All of a model, or, with an adapter, those of the adapter."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Over all processes, however the model is sharded. Weights that are packed into a buffer count one by one."""
    trainable, total = (sum(p.numel() for p in chosen) for chosen in (trained_parameters(model), model.parameters()))
    linear = (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    packed = (layer for layer in linear if not isinstance(layer.weight, torch.nn.Parameter))
    return ParameterCount(trainable, total + sum(layer.in_features * layer.out_features for layer in packed))


def what_to_save(model: torch.nn.Module) -> Any:
    """The part of a checkpoint that has a policy's trained weights."""
    return AdapterState(model) if _adapted_layers(model) else model


class AdapterState:
    """What a checkpoint has of a policy with an adapter: the adapter, in PEFT's format too."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {PREFIX + key: parameter for key, parameter in adapter_weights(self.model, POLICY).items()}

    def files(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """PEFT's files, by name, of a gathered state."""
        config = self.model.peft_config[POLICY].to_dict() | {"inference_mode": True}
        as_lists = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        tensors = {key: tensor.contiguous() for key, tensor in state.items()}
        return {
            CONFIG: json.dumps(as_lists, indent=2, sort_keys=True).encode(),
            WEIGHTS: save(tensors, metadata={"format": "pt"}),
        }
