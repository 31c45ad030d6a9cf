"""LoRA adapters (arXiv 2106.09685), put into a model in place by PEFT.

The model's class, blocks and names stay the same, but the weights of an adapted layer move under `base_layer`. A model
may hold two adapters: `policy`, which is trained, and `reference`, which is frozen.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save
from transformers.pytorch_utils import Conv1D

from dpo.checkpoint.saver import ModelPart
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.quantization import Linear4bit
from dpo.models.scalar_head import HEAD, HEAD_WEIGHT, find_scalar_head
from dpo.models.text_part import rename_layers
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import full_state, local_tensor
from dpo.system.arithmetic import find_compute_dtype
from dpo.system.host import silence_bitsandbytes
from dpo.system.plain_files import check_readable, read_json

if TYPE_CHECKING:
    from peft import LoraConfig

POLICY, REFERENCE = "policy", "reference"
AUTO = "all-linear"  # PEFT's name for all linear layers but the head
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
PREFIX = "base_model.model."  # begins every name in PEFT's files
# Keys of PEFT's config that do not change what a trained adapter computes, or that name the adapted layers, which the
# file of weights names too. `read_adapter` reads some others, and refuses the rest.
HARMLESS_KEYS = (
    *("task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
)
SAVED_HEADS = {HEAD, "classifier"}  # names of scalar heads that PEFT saves with an adapter; a model has one of them
FACTOR_NAME = re.compile(r"(.+)\.lora_[AB]\.weight")
FACTOR_OF_ANY = re.compile(r"\.lora_[AB]\.")  # in the name of a weight, by which adapter it may be


class ParameterCount(NamedTuple):
    """Numbers of parameters of a policy."""

    trainable: int
    total: int  # including the adapter of a reference in the same model


class StoredAdapter(NamedTuple):
    """An adapter read from a directory in PEFT's format."""

    directory: Path
    r: int
    alpha: float
    weights: dict[str, torch.Tensor]  # by the name in the model, without the adapter's name

    @property
    def layers(self) -> list[str]:
        """The names of the layers that the adapter adapts."""
        return _list_layers(self.weights)


# --- files in PEFT's format ------------------------------------------------------------------------------------------


def find_adapter(path: str | Path | None) -> Path | None:
    """The directory in PEFT's format that a path names, if any: itself, a run's LATEST, or that of a `policy.pt`."""
    if path is None:
        return None
    path = Path(os.path.expanduser(path))
    candidates = [path, path / "LATEST"]
    if path.name == "policy.pt":
        candidates.append(path.parent)
    return next((candidate for candidate in candidates if (candidate / CONFIG).is_file()), None)


def read_base(directory: Path) -> str | None:
    """The base that an adapter names, a Hub id or path."""
    with _explaining_errors(directory):
        base = read_json(directory / CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str | None):
            raise TypeError(f"base_model_name_or_path in {CONFIG} must be a name, or null")
    return base or None


def read_adapter(directory: Path) -> StoredAdapter:
    """Read an adapter in PEFT's format; InputError if it is damaged, or more than LoRA and a scalar head."""
    with _explaining_errors(directory):
        check_readable(directory / WEIGHTS)
        config, weights = read_json(directory / CONFIG), load_file(directory / WEIGHTS)
        r, alpha, defaults = config.get("r"), config.get("lora_alpha"), vars(_import_peft().LoraConfig())
        is_supported = dict.fromkeys(HARMLESS_KEYS, True) | {
            "peft_type": config["peft_type"] == "LORA",
            "r": type(r) is int and r >= 1,
            "lora_alpha": type(alpha) in (int, float) and 0 < alpha < math.inf,
            # others, such as "pissa", also change the base
            "init_lora_weights": config.get("init_lora_weights") in (None, True, False, "gaussian"),
            "modules_to_save": SAVED_HEADS.issuperset(config.get("modules_to_save") or ()),
        }
        changed = {key for key, value in config.items() if value and value != defaults.get(key)}
        unsupported = [
            f"{key}={config.get(key)}" for key in sorted(changed | is_supported.keys()) if not is_supported.get(key)
        ]
    names = {name.removeprefix(PREFIX) for name in weights} - {HEAD_WEIGHT}
    unsupported += sorted(name for name in names if not FACTOR_NAME.fullmatch(name))[:3]
    if unsupported:
        raise InputError(
            f"{directory} holds an adapter with {', '.join(unsupported)}, which is not supported here: merge it into "
            f"its base with peft, and give the result as model.name_or_path"
        )
    return StoredAdapter(directory, r, alpha, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})


def _explaining_errors(directory: Path) -> AbstractContextManager[None]:
    """Turn errors of reading an adapter into InputErrors inside."""
    return explaining_library(
        lambda error: InputError(f"{directory} is not an adapter in PEFT's format: {one_sentence(error)}")
    )


def _list_layers(names: Iterable[str]) -> list[str]:
    """The layers to which the weights of an adapter belong."""
    return sorted({match[1] for name in names if (match := FACTOR_NAME.fullmatch(name))})


# --- adapters in a model ---------------------------------------------------------------------------------------------


def make_adapter_config(r: int, alpha: float, target_modules: str | list[str]) -> LoraConfig:
    """PEFT's config of a new adapter."""
    names = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    targets = AUTO if names in (["auto"], [AUTO]) else names
    return _import_peft().LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def _import_peft() -> Any:
    silence_bitsandbytes()
    import peft  # not at the top, as importing it takes a second, and most runs have no adapter

    return peft


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

    The policy's adapter is trainable, and with it a reward model's scalar head. PEFT draws A from the seed and sets B
    to 0, so a new adapter changes nothing. Raises InputError, in which `targets` is the config key or the file that
    names the layers, if one of them is no linear layer of the model, or the head or tied to the embedding.
    """
    config = copy.deepcopy(config)  # PEFT keeps and changes it
    config.inference_mode, config.lora_dropout = name != POLICY, dropout
    scalar_head, embedding = find_scalar_head(model), model.get_input_embeddings()
    if scalar_head is not None:
        config.task_type = "SEQ_CLS"
        scalar_head.weight.data = scalar_head.weight.data.float()
    _inject(model, config, name, seed, targets)
    for layer in _adapted_layers(model):
        base = layer.get_base_layer()
        if not _is_linear(base) or base.weight is embedding.weight:  # a merge would change the embedding too
            raise InputError(
                f"{targets} names a layer of class {type(base).__name__} that is not linear, is the scalar head, or is "
                f"tied to the embedding: leave it out"
            )
        layer.cast_input_dtype_enabled = False  # PEFT's cast would keep a float32 copy of the input in each of q, k, v
        for matrices, factor in ((layer.lora_A, FactorA), (layer.lora_B, FactorB)):
            if name in matrices:
                matrices[name] = factor(matrices[name])
        layer.forward = MethodType(_compute_adapted_layer, layer)
    model.requires_grad_(False)  # PEFT has left the new factors trainable, also in a reference
    for weight in adapter_weights(model, POLICY).values():
        weight.requires_grad_(True)
    _activate(_adapted_layers(model), name)


def _inject(model: Any, config: LoraConfig, name: str, seed: int, targets: str) -> None:
    """Let PEFT add an adapter, whose weights it draws from the seed."""
    peft = _import_peft()
    model_class, on_meta = type(model).__name__, next(model.parameters()).is_meta
    if config.target_modules == AUTO:
        config.target_modules = {*_list_linear_layers(model)}
    # with a leading dot, so that the target `q_proj` does not match `my_q_proj`
    layers = [f".{layer.removesuffix('.base_layer')}" for layer, _ in model.named_modules()]
    # PEFT raises only if none of the targets is in the model
    missing = [t for t in sorted(config.target_modules) if not any(layer.endswith(f".{t}") for layer in layers)]
    if missing:
        raise InputError(f"{targets} names layers that are not in {model_class}: {', '.join(missing[:5])}")
    # PEFT translates names for models whose experts it knows from earlier versions of transformers, and then adapts
    # experts and routers, also if only a dense layer has such a name. It does not if the config is a dictionary.
    container: Any = torch.nn.Module()
    container.config, container.model = model.config.to_dict(), model
    if hasattr(model, "peft_config"):  # from an earlier adapter
        container.peft_config = model.peft_config
    with (
        explaining_library(
            lambda error: InputError(f"{targets} cannot be adapted in {model_class}: {one_sentence(error)}")
        ),
        torch.random.fork_rng(range(torch.cuda.device_count())),  # without the range it warns of several GPUs
        warnings.catch_warnings(),
        # by default PEFT makes the factors in memory first, even for a model on the meta device
        torch.device("meta") if on_meta else nullcontext(),
    ):
        # PEFT warns about a second adapter and about GPT-2's layers, which work here, and about a tied head, for which
        # `add_adapter` raises an error
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, container, name, low_cpu_mem_usage=on_meta)
    model.peft_config = container.peft_config


def _list_linear_layers(model: Any) -> list[str]:
    """The linear layers of a model, except its head."""
    names = []
    for name, layer in model.named_modules():
        path, _, last = name.removesuffix(".base_layer").rpartition(".")
        # Mamba multiplies by these weights itself, and would miss an adapter
        is_bypassed = last in ("out_proj", "x_proj", "dt_proj") and hasattr(model.get_submodule(path), "A_log")
        if _is_linear(layer) and layer is not model.get_output_embeddings() and not is_bypassed:
            names.append(name.removesuffix(".base_layer"))
    return names


def _is_linear(layer: Any) -> bool:
    """Return whether a layer computes what torch's does, unlike such subclasses as Llama 4's routers."""
    return isinstance(layer, (Conv1D, Linear4bit)) or getattr(type(layer), "forward", None) is torch.nn.Linear.forward


def _compute_adapted_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an adapted layer in fewer operations than PEFT."""
    name = layer.in_use
    if name not in layer.lora_A:  # no adapter is active, or the active one adapts other layers
        return layer.base_layer(x)
    x = x.to(find_compute_dtype(x.device.type, x.dtype))
    x, product = layer.lora_A[name](x, layer.scaling[name], layer.lora_dropout[name])
    return layer.lora_B[name](product, layer.base_layer(x))


class Factor(torch.nn.Linear):
    """A float32 matrix of an adapter, cast to the input's dtype."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = torch.nn.Parameter(layer.weight.detach().float(), requires_grad=layer.weight.requires_grad)


class FactorA(Factor):
    def forward(self, x: torch.Tensor, scale: float, dropout: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x` for the base layer, and scale * dropout(x) @ A.T, (tokens, r)."""
        weight = self.weight.to(x.dtype)
        if isinstance(dropout, torch.nn.Dropout) and dropout.training:
            return x, _multiply(dropout(x).flatten(0, -2), weight.T, scale)
        return _MultiplyA.apply(x, weight, scale)


class FactorB(Factor):
    def forward(self, product: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return base + product @ B.T."""
        return torch.addmm(base.flatten(0, -2), product, self.weight.to(product.dtype).T).view_as(base)


class _MultiplyA(torch.autograd.Function):
    """`FactorA.forward` without dropout, in which one matrix product also adds up the two gradients of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: float) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        passed = x.view_as(x)
        if not ctx.needs_input_grad[0]:  # the base layer does not need the gradient of x either
            ctx.mark_non_differentiable(passed)
        return passed, _multiply(x.flatten(0, -2), weight.T, scale)

    @staticmethod
    def backward(ctx: Any, grad_passed: torch.Tensor, grad: torch.Tensor) -> Any:
        (x, weight), scale = ctx.saved_tensors, ctx.scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _multiply(grad.T, x.flatten(0, -2), scale)
        if ctx.needs_input_grad[0]:
            grad_x = torch.addmm(grad_passed.flatten(0, -2), grad, weight, alpha=scale).view_as(x)
        return grad_x, grad_weight, None


def _multiply(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * a @ b, from one operation."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def add_stored_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Put a stored adapter into a model; InputError if it does not fit."""
    layers = _list_layers(rename_layers(model, stored.weights, to_class=False))
    config = make_adapter_config(stored.r, stored.alpha, layers)
    add_adapter(model, config, name=name, targets=str(stored.directory))
    load_adapter(model, stored, name)


def load_adapter(model: Any, stored: StoredAdapter, name: str = POLICY) -> None:
    """Copy a stored adapter's weights into the adapter of that name; InputError if they do not fit."""
    parameters, weights = adapter_weights(model, name), rename_layers(model, stored.weights, to_class=False)
    if HEAD_WEIGHT not in weights:  # a language model's adapter: a scalar head keeps the weight that was drawn
        parameters.pop(HEAD_WEIGHT, None)
    shapes, stored_shapes = ({key: tuple(w.shape) for key, w in each.items()} for each in (parameters, weights))
    if shapes != stored_shapes:
        differing = sorted({key for key, _ in shapes.items() ^ stored_shapes.items()})
        raise InputError(
            f"{stored.directory} does not fit the adapter of this model ({type(model).__name__}), which differs in "
            f"{', '.join(differing[:3])}: give lora.target_modules as in its {CONFIG}, and the model that it was "
            f"trained on"
        )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(weights[key])


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The parameters of the adapter `name`, by their names without `name`; the policy's has a scalar head, too."""
    weights = {
        key.replace(f".{name}.", "."): parameter
        for key, parameter in model.named_parameters()
        if key.endswith((f".lora_A.{name}.weight", f".lora_B.{name}.weight"))
    }
    head = find_scalar_head(model)
    if weights and name == POLICY and head is not None:
        weights[HEAD_WEIGHT] = head.weight
    return weights


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a model's base, with its original names."""
    return {
        key.replace(".base_layer.", "."): tensor
        for key, tensor in model.state_dict().items()
        if not FACTOR_OF_ANY.search(key)
    }


@torch.no_grad()
def merge_adapter(model: Any, stored: StoredAdapter, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Merge a stored adapter into a model; return all weights by name.

    Each sum is in float32 and rounded once, to `dtype` or the dtype of the base's weight.
    """
    add_stored_adapter(model, stored)
    for layer in _adapted_layers(model):
        weight = layer.get_base_layer().weight
        weight.data = (weight + layer.get_delta_weight(POLICY)).to(dtype or weight.dtype)
    return base_weights(model)


def weights_in_use(model: Any) -> list[torch.Tensor]:
    """The base's weights, and the active adapter's unless it adds nothing."""
    # without the buffers of a 4-bit base, which never change
    weights = [parameter for key, parameter in model.named_parameters() if not FACTOR_OF_ANY.search(key)]
    if layers := _adapted_layers(model):  # all have the same adapter in use
        adapter = adapter_weights(model, layers[0].in_use)
        b_matrices = [local_tensor(weight) for key, weight in adapter.items() if ".lora_B." in key]
        if any(matrix.any() for matrix in b_matrices):  # if B is 0, the adapter adds nothing
            weights += adapter.values()
    return weights


def _adapted_layers(model: Any) -> list[Any]:
    if not hasattr(model, "peft_config"):  # set by PEFT
        return []
    from peft.tuners.lora import LoraLayer

    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]


def seed_dropout(*numbers: int) -> None:
    """Seed torch's global generator, so that an update draws the same masks in a resumed run."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def list_dropouts(model: Any) -> list[torch.nn.Dropout]:
    """The dropout of each adapted layer, if `lora.dropout` is above 0."""
    dropouts = [dropout for layer in _adapted_layers(model) for dropout in layer.lora_dropout.values()]
    return [dropout for dropout in dropouts if isinstance(dropout, torch.nn.Dropout)]


def _activate(layers: Iterable[Any], name: str | None) -> None:
    for layer in layers:
        layer.in_use = name  # for `_compute_adapted_layer`: PEFT's set_adapter would also change requires_grad


def switch(model: Any, name: str | None) -> Callable[[], AbstractContextManager[None]]:
    """Make a function that opens contexts with the adapter `name` active, or none, and then the policy's again."""
    layers = _adapted_layers(model)  # found once, as an update opens a context for every microbatch

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
    """Count trainable and all parameters, over all shards, 4-bit weights included."""
    n_trainable = sum(parameter.numel() for parameter in trained_parameters(model))
    n_total = sum(parameter.numel() for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and not isinstance(layer.weight, torch.nn.Parameter):
            n_total += layer.in_features * layer.out_features  # a 4-bit weight, which is a packed buffer
    return ParameterCount(n_trainable, n_total)


def policy_part(model: torch.nn.Module) -> ModelPart:
    """The checkpoint's part with the policy: its adapter, or all weights."""
    return AdapterPart("policy", model) if adapter_weights(model, POLICY) else ModelPart("policy", model)


class AdapterPart(ModelPart):
    """The checkpoint's part with a policy's adapter, also in PEFT's format."""

    @property
    def n_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in adapter_weights(self.source, POLICY).values())

    def gather(self, *, copy: bool) -> dict[str, torch.Tensor]:
        release_gathered(self.source)  # as FSDP's gathered weights have another dtype than the trained parameters
        return full_state({PREFIX + key: p for key, p in adapter_weights(self.source, POLICY).items()}, copy=copy)

    def convert(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        config = self.source.peft_config[POLICY].to_dict() | {"inference_mode": True}
        config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        if PREFIX + HEAD_WEIGHT in state:
            config["modules_to_save"] = [HEAD]
        named = {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}
        if (renamed := rename_layers(self.source, named, to_class=True)).keys() != named.keys():
            named, config["target_modules"] = renamed, _list_layers(renamed)
        tensors = {PREFIX + key: tensor.contiguous() for key, tensor in named.items()}
        return {
            CONFIG: json.dumps(config, indent=2, sort_keys=True).encode(),
            WEIGHTS: save(tensors, metadata={"format": "pt"}),
        }
