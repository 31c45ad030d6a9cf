"""LoRA adapters (arXiv 2106.09685), and their files in PEFT's format.

The adapter named `policy` is trained; the one named `reference`, if there is one, is frozen.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpo.checkpoint.saver import ModelPart
from dpo.errors import InputError, needing
from dpo.models.logprobs import HEAD, HEAD_WEIGHT, find_scalar_head
from dpo.models.paths import CONFIG, explaining_adapter
from dpo.models.published import Tensors, rename_layers
from dpo.models.quantization import Linear4bit, is_linear, list_linear
from dpo.parallel.sharding import full_state, release_gathered
from dpo.system.arithmetic import find_compute_dtype
from dpo.system.host import silence_bitsandbytes
from dpo.system.plain_files import check_readable, read_json

POLICY = "policy"
REFERENCE = "reference"
AUTO = (["auto"], ["all-linear"])  # targets: all linear layers but the head; the second name is PEFT's
WEIGHTS = "adapter_model.safetensors"  # PEFT's name
PREFIX = "base_model.model."  # begins every name in PEFT's files
# Keys of PEFT's config that `read_adapter` reads, that do not change what a trained adapter computes, or that name the
# adapted layers, which the file of weights names too. Any other key is refused, unless its value is empty or PEFT's
# default.
KNOWN_KEYS = (
    "r",
    "lora_alpha",
    "task_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
)
SAVED_HEADS = {HEAD, "classifier"}  # scalar heads in PEFT's `modules_to_save`: it lists both, although a model has one
FACTORS = (".lora_A.weight", ".lora_B.weight")  # the ends of weights' names


# --- files in PEFT's format ------------------------------------------------------------------------------------------


def read_adapter(directory: Path) -> tuple[dict, Tensors]:
    """Read an adapter's config, and its weights by their names in the model.

    Raises InputError if the adapter is damaged, or has more than LoRA and a scalar head.
    """
    unsupported = []
    with explaining_adapter(directory):
        check_readable(directory / WEIGHTS)
        config = read_json(directory / CONFIG)
        stored = load_file(directory / WEIGHTS)
        silence_bitsandbytes()  # imported by PEFT
        with needing("peft"):
            import peft  # not at the top, as importing it takes a second, and most runs read no adapter

        defaults = vars(peft.LoraConfig())
        r = config["r"]
        alpha = config["lora_alpha"]
        if not (type(r) is int and r > 0 and 0 < alpha < math.inf):
            raise ValueError(f"r={r} and lora_alpha={alpha} must be positive numbers")
        for key, value in sorted(config.items()):
            if not value or value == defaults.get(key) or key in KNOWN_KEYS:
                continue
            if key == "init_lora_weights" and value == "gaussian":  # other methods, such as "pissa", change the base
                continue
            if key == "modules_to_save" and SAVED_HEADS.issuperset(value):
                continue
            unsupported.append(f"{key}={value}")
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    unknown = [name for name in sorted(weights) if name != HEAD_WEIGHT and not name.endswith(FACTORS)]
    unsupported += unknown[:3]
    if unsupported:
        raise InputError(
            f"{directory} holds an adapter with {', '.join(unsupported)}, which is not supported here: merge it into "
            f"its base with peft, and use the result as model.name_or_path"
        )
    return config, weights


def _list_layers(names: Iterable[str]) -> list[str]:
    """List the names of the layers to which an adapter's weights belong."""
    return sorted({name.partition(".lora_")[0] for name in names if name.endswith(FACTORS)})


# --- layers ----------------------------------------------------------------------------------------------------------


class AdaptedLayer(nn.Module):
    """A linear layer with adapters, of which at most one is active: W x + alpha / r * B A dropout(x).

    It takes fewer operations than PEFT's layer, and makes no float32 copy of the input.
    """

    def __init__(self, base_layer: Any):
        super().__init__()
        self.base_layer = base_layer
        # Conv1D, which GPT-2 has, calls them nx and nf. Tensor parallelism reads out_features.
        self.in_features = getattr(base_layer, "in_features", None) or base_layer.nx
        self.out_features = getattr(base_layer, "out_features", None) or base_layer.nf
        self.lora_A: Any = nn.ModuleDict()  # modules by the adapter's name, as in the next two
        self.lora_B: Any = nn.ModuleDict()
        self.lora_dropout: Any = nn.ModuleDict()
        self.scaling: dict[str, float] = {}  # alpha / r by the adapter's name
        self.in_use: str | None = None  # the active adapter's name

    def add(self, name: str, r: int, alpha: float, *, dropout: float, generator: torch.Generator) -> None:
        """Add an adapter, not yet active; A is drawn as in PEFT, and B is 0, so it adds 0 to the output."""
        a = nn.utils.skip_init(FactorA, self.in_features, r, bias=False)
        b = nn.utils.skip_init(FactorB, r, self.out_features, bias=False)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(b.weight)
        self.lora_A[name] = a.to(self.weight.device)
        self.lora_B[name] = b.to(self.weight.device)
        self.lora_dropout[name] = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scaling[name] = alpha / r

    def forward(self, x: Tensor) -> Tensor:
        name = self.in_use
        if name not in self.lora_A:  # no adapter is active, or the active one adapts other layers
            return self.base_layer(x)
        x = x.to(find_compute_dtype(x.device.type, x.dtype))
        product = self.lora_A[name](self.lora_dropout[name](x))  # (..., r)
        return self.lora_B[name](product, self.base_layer(x), self.scaling[name])

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # some models read it


class FactorA(nn.Linear):
    """An adapter's matrix A, stored in float32, and cast to the input's dtype for each product."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class FactorB(nn.Linear):
    """An adapter's matrix B; `forward` returns base + scale * x @ B.T, where `base` is the base layer's output."""

    def forward(self, x: Tensor, base: Tensor, scale: float) -> Tensor:
        weight = self.weight.to(x.dtype)
        out = torch.addmm(base.flatten(0, -2), x.flatten(0, -2), weight.T, alpha=scale)
        return out.view_as(base)


# --- adapters in a model ---------------------------------------------------------------------------------------------


def add_adapter(
    model: Any,
    r: int,
    alpha: float,
    targets: str | list[str],
    *,
    name: str = POLICY,
    dropout: float = 0.0,
    seed: int = 0,
    source: str = "lora.target_modules",
) -> None:
    """Freeze a model and add an active adapter in float32, which does not change the output yet.

    `targets` are names of layers, or ends of such names, or "auto". Only the parameters of the adapter `policy`, and a
    reward model's scalar head with them, are trainable. Raises InputError if a layer cannot be adapted; the message
    begins with `source`, the key or directory that names the layers.
    """
    if isinstance(targets, str):
        targets = [targets]
    layers = _find_targets(model, targets, source)
    generator = torch.Generator().manual_seed(seed)
    for layer_name in layers:
        layer = model.get_submodule(layer_name)
        if not isinstance(layer, AdaptedLayer):
            layer = AdaptedLayer(layer)
            model.set_submodule(layer_name, layer)
        layer.add(name, r, alpha, dropout=dropout, generator=generator)
    scalar_head = find_scalar_head(model)
    if scalar_head is not None:
        scalar_head.weight.data = scalar_head.weight.data.float()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if scalar_head is None else "SEQ_CLS",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": layers if targets in AUTO else targets,
    }
    model.adapter_configs = {**getattr(model, "adapter_configs", {}), name: config}  # by name, in PEFT's format
    model.requires_grad_(False)
    for weight in adapter_weights(model, POLICY).values():
        weight.requires_grad_(True)
    for layer in _adapted_layers(model):
        layer.in_use = name


def _find_targets(model: Any, targets: list[str], source: str) -> list[str]:
    """List the full names of the layers that `targets` name; InputError if one is missing or cannot be adapted."""
    if targets in AUTO:
        names = [name.removesuffix(".base_layer") for name in list_linear(model)]
        if not names:
            raise InputError(f"{source}=auto finds no linear layers in {type(model).__name__}: use lora=none")
        return names
    # The name of an adapted layer is mapped to its base layer, which `named_modules` lists after it.
    layers = {name.removesuffix(".base_layer"): layer for name, layer in model.named_modules()}
    # The dot before the name keeps the target `q_proj` from matching `my_q_proj`.
    ends = tuple(f".{target}" for target in targets)
    missing = [end[1:] for end in ends if not any(f".{name}".endswith(end) for name in layers)]
    if missing or not targets:
        raise InputError(f"{source} names layers that are not in {type(model).__name__}: {', '.join(missing[:5])}")
    names = [name for name in layers if f".{name}".endswith(ends)]
    for name in names:
        layer = layers[name]
        # A merge into a layer that is tied to the embedding would change the embedding too.
        if not is_linear(layer) or layer.weight is model.get_input_embeddings().weight:
            raise InputError(
                f"{source} names a layer of class {type(layer).__name__} that is not linear, is the scalar head, or is "
                f"tied to the embedding: leave it out"
            )
    return names


def load_adapter(model: Any, directory: Path, name: str = POLICY) -> None:
    """Load stored weights into the adapter `name`, which is added if the model lacks it.

    Raises InputError if the weights do not fit the model.
    """
    config, stored = read_adapter(directory)
    size = (config["r"], config["lora_alpha"])
    weights = rename_layers(model, stored, to_checkpoint_class=False)
    own_config = getattr(model, "adapter_configs", {}).get(name)
    if own_config is None:
        add_adapter(model, *size, _list_layers(weights), name=name, source=str(directory))
    elif size != (own_config["r"], own_config["lora_alpha"]):
        raise InputError(f"{directory} is an adapter of another size: set lora.r={size[0]} lora.alpha={size[1]}")
    parameters = adapter_weights(model, name)
    if HEAD_WEIGHT not in weights:  # a language model's adapter: a scalar head keeps the weight that was drawn
        parameters.pop(HEAD_WEIGHT, None)
    differing = parameters.keys() ^ weights.keys()
    for key in parameters.keys() & weights.keys():
        if parameters[key].shape != weights[key].shape:
            differing.add(key)
    if differing:
        raise InputError(
            f"{directory} does not fit the adapter of this model ({type(model).__name__}), which differs in "
            f"{', '.join(sorted(differing)[:3])}: set lora.target_modules as in its {CONFIG}, and its base"
        )
    for key, parameter in parameters.items():
        parameter.data.copy_(weights[key])


def adapter_weights(model: Any, name: str) -> Tensors:
    """Return an adapter's parameters by name; empty if the model lacks the adapter.

    The adapter's own name is left out, as in `q_proj.lora_A.weight`. A scalar head belongs to the policy's adapter.
    """
    weights = {}
    for key, parameter in model.named_parameters():
        if ".lora_" in key and key.endswith(f".{name}.weight"):
            weights[key.replace(f".{name}.", ".")] = parameter
    head = find_scalar_head(model)
    if weights and name == POLICY and head is not None:
        weights[HEAD_WEIGHT] = head.weight
    return weights


def base_weights(model: Any) -> Tensors:
    """Return the base's parameters and buffers, by the names that they had before layers were adapted."""
    weights = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" not in key:
            weights[key.replace(".base_layer.", ".")] = tensor
    return weights


@torch.no_grad()
def merge_adapter(model: Any, directory: Path, dtype: torch.dtype | None) -> Tensors:
    """Merge a stored adapter into a model in place, and return all its weights by name.

    Each merged weight is rounded only once: here, if `dtype` is None or the base's own dtype. Otherwise it stays in
    float32, and the caller rounds it to `dtype`.
    """
    load_adapter(model, directory)
    for layer in _adapted_layers(model):
        added = layer.scaling[POLICY] * (layer.lora_B[POLICY].weight @ layer.lora_A[POLICY].weight)
        if isinstance(layer.base_layer, Conv1D):  # whose weight is (in_features, out_features)
            added = added.T
        base_dtype = layer.weight.dtype
        sum_dtype = base_dtype if dtype in (None, base_dtype) else torch.float32
        layer.weight.data = (layer.weight + added).to(sum_dtype)
    return base_weights(model)


def _adapted_layers(model: Any) -> list[AdaptedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, AdaptedLayer)]


def seed_dropout(*numbers: int) -> None:
    """Seed torch by these numbers, so that an update draws the same dropout masks in a resumed run."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def list_dropouts(model: Any) -> list[nn.Dropout]:
    """List the dropout modules of adapted layers; none if `lora.dropout` is 0."""
    return [
        module for name, module in model.named_modules() if ".lora_dropout." in name and isinstance(module, nn.Dropout)
    ]


def make_adapter_context(model: Any, name: str | None) -> Callable[[], AbstractContextManager]:
    """Return a function that makes a context in which the adapter `name` is active; None: the base model alone.

    When the context ends, the policy's adapter is active again.
    """
    layers = _adapted_layers(model)  # found once, as an update opens a context for every microbatch

    @contextmanager
    def adapter_context() -> Iterator:
        for layer in layers:
            layer.in_use = name
        try:
            yield
        finally:
            for layer in layers:
                layer.in_use = POLICY

    return adapter_context


# --- what is trained, and saved --------------------------------------------------------------------------------------


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Count the `trainable` parameters and the `total`; a sharded parameter counts as a whole.

    The total includes 4-bit weights and a reference's adapter.
    """
    n_total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, Linear4bit):  # its weight is a packed buffer
            n_total += module.in_features * module.out_features
    return {"trainable": sum(parameter.numel() for parameter in trained_parameters(model)), "total": n_total}


def policy_part(model: nn.Module) -> ModelPart:
    """Return the part of a checkpoint with a policy's adapter, or with all weights of a policy without one."""
    part = AdapterPart if adapter_weights(model, POLICY) else ModelPart
    return part("policy", model)


class AdapterPart(ModelPart):
    """The part of a checkpoint with a policy's adapter, for which PEFT's files are written too."""

    is_always_whole = True

    def gather(self) -> Tensors:
        release_gathered(self.source)  # as FSDP's gathered weights have another dtype than the trained parameters
        return full_state({PREFIX + key: weight for key, weight in adapter_weights(self.source, POLICY).items()})

    def convert(self, state: Tensors) -> dict[str, bytes]:
        """Return the contents of PEFT's files, by name; layers are named as in the class of the base's checkpoint."""
        config = dict(self.source.adapter_configs[POLICY])
        if PREFIX + HEAD_WEIGHT in state:
            config["modules_to_save"] = [HEAD]
        named = {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}
        renamed = rename_layers(self.source, named, to_checkpoint_class=True)
        if renamed.keys() != named.keys():
            config["target_modules"] = _list_layers(renamed)
        tensors = {PREFIX + key: tensor.contiguous() for key, tensor in renamed.items()}
        return {
            CONFIG: json.dumps(config, indent=2, sort_keys=True).encode(),
            WEIGHTS: save(tensors, metadata={"format": "pt"}),
        }
