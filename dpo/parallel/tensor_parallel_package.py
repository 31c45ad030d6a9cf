"""Tensor parallelism with the package `tensor_parallel` 2.0.0.

One process has several devices, and a thread for each. The package's rules for sharding GPT-2, GPT-NeoX and Llama are
corrected here for transformers 5 and for training. It supports neither sampling nor activation checkpointing. No other
module of ours uses the package.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from dpo.errors import InputError
from dpo.parallel.tensor_parallel import check_tensor_parallel

FAMILIES = ("gpt2", "gpt_neox", "llama")
ATTENTION = ("eager", "sdpa")


def split_over_devices(model: Any, devices: Sequence[str | torch.device]) -> SplitModel:
    """Shard a copy of a model over devices of this process.

    The model itself is best on the CPU. Raises InputError if the package cannot be imported, and for a model that it
    cannot shard.
    """
    _check(model, len(devices))
    check_tensor_parallel(model.config, len(devices))
    try:
        importlib.import_module("tensor_parallel")
    except ImportError as error:  # often for pkg_resources, which setuptools 82 removed
        raise _refusal(
            f"needs the package tensor_parallel, which cannot be imported ({error})",
            "pip install tensor_parallel==2.0.0 'setuptools>=77,<82'",
        ) from error
    return SplitModel(model, [torch.device(device) for device in devices])


def _refusal(problem: str, fix: str) -> InputError:
    backend = "tensor_parallel.backend"
    return InputError(f"{backend}=tensor_parallel {problem}; {fix}, or use {backend}=dtensor")


def _check(model: Any, n_devices: int) -> None:
    config, family, attention = model.config, model.config.model_type, model.config._attn_implementation
    if n_devices < 2:
        raise _refusal(f"needs two or more devices, and {n_devices} is available", "set tensor_parallel_size=2")
    if family not in FAMILIES:
        raise _refusal(f"cannot shard {family}", f"use a model of {', '.join(FAMILIES)}")
    if attention not in ATTENTION:
        raise _refusal(f"cannot shard {attention} attention", f"set model.attn_implementation={' or '.join(ATTENTION)}")
    if family == "llama" and (config.attention_bias or config.mlp_bias):
        raise _refusal("cannot shard a Llama with biases", "use another model")
    if family == "llama" and config.head_dim * config.num_attention_heads != config.hidden_size:
        problem = f"cannot shard a Llama whose head_dim={config.head_dim} times its heads is not hidden_size"
        raise _refusal(problem, "use another model")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # backward would recompute one device's part, and wait forever for the parts of the other devices
        raise _refusal("cannot recompute activations", "set activation_checkpointing=false")


class SplitModel(torch.nn.Module):
    """A model sliced over several devices, with the whole model's `state_dict()`.

    `parameters()` hold each weight once, so that norm, clipping and elementwise updates are those of the whole model.
    """

    def __init__(self, model: Any, devices: Sequence[torch.device]) -> None:
        from tensor_parallel import TensorParallel

        super().__init__()
        self.config = model.config
        names = {tensor: name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        # a tied weight has two aliases
        self.names = {alias: names[tensor] for alias, tensor in model.state_dict(keep_vars=True).items()}
        self.parameter_names = [name for name, _ in model.named_parameters()]
        package_config, on_first_device = _make_rules(model, devices)

        def find_rule(name: str) -> Any:
            return next((rule for pattern, rule in package_config.state_rules.items() if pattern.search(name)), None)

        self.rules = {name: find_rule(name) for name in self.names.values()}
        self.cut = TensorParallel(model, devices, tensor_parallel_config=package_config, distributed=False)
        for name in (name for name, rule in self.rules.items() if rule is on_first_device):
            for part in self._parts(name)[1:]:  # zeros, which must stay zeros
                part.requires_grad_(False)
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forget_gathered()
        return self.cut(*args, **kwargs)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict, with matrices joined, on the CPU."""
        whole = self._whole({})
        return {alias: whole[name] for alias, name in self.names.items()}

    def keep_whole_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's state dicts those of the whole model.

        Raises InputError for Adafactor, whose updates depend on whole rows and columns, not on single elements.
        """
        if isinstance(optimizer, torch.optim.Adafactor):
            raise _refusal("does not support Adafactor, which needs whole matrices", "use another optimizer")
        optimizer.register_state_dict_post_hook(self._whole_optimizer_state)
        optimizer.register_load_state_dict_pre_hook(self._cut_optimizer_state)

    def _whole_optimizer_state(self, optimizer: torch.optim.Optimizer, cut: dict[str, Any]) -> dict[str, Any]:
        whole: dict[int, dict] = {i: {} for i, _ in enumerate(self.parameter_names) if optimizer.state}
        for key, first in next(iter(optimizer.state.values()), {}).items():
            values = self._whole({p: state[key] for p, state in optimizer.state.items()}) if first.ndim else {}
            for i, state in whole.items():
                state[key] = values.get(self.parameter_names[i], first)  # a scalar like `step` is the same for all
        groups = [group | {"params": list(range(len(self.parameter_names)))} for group in cut["param_groups"]]
        return cut | {"state": whole, "param_groups": groups}

    def _cut_optimizer_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """The whole state, cut into the parts of each device's parameters."""
        states = {name: whole["state"].get(i, {}) for i, name in enumerate(self.parameter_names)}
        cut: dict[torch.Tensor, dict[str, Any]] = {}
        for name, state in states.items():
            for rank, part in enumerate(self._parts(name)):
                rule = self.rules[name]
                cut[part] = {
                    key: (rule(value, rank=rank) if rule and value.ndim else value).clone()  # `step` changes in place
                    for key, value in state.items()
                }
        flat = self.cut.sharding_manager
        for rank, part in enumerate(flat.flat_shards):
            sharded = [states[name] for name in flat.sharded_param_names]
            cut[part] = {
                key: _flatten([state[key] for state in sharded], rank, len(flat.flat_shards), part)
                for key in sharded[0]
            }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {number: cut[parameter] for number, parameter in enumerate(parameters) if cut.get(parameter)}
        groups = [group | {"params": list(range(len(parameters)))} for group in whole["param_groups"]]
        return whole | {"state": state, "param_groups": groups}

    @torch.no_grad()
    def _whole(self, replaced: Mapping[torch.nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors by name, with the values of some parameters replaced.

        So tensors of an optimizer's state are joined as their parameters are.
        """
        own = {parameter: parameter.data for parameter in replaced}
        try:
            for parameter, values in replaced.items():
                parameter.data = values
            self._forget_gathered()
            self.cut.sharding_manager.synchronize_weights(self.cut.all_cuda)
            parts = {name: self._parts(name) for name in self.rules}
            # without a rule every device holds the whole tensor
            joined = {name: rule.undo(parts[name]) if rule else parts[name][0] for name, rule in self.rules.items()}
            return {name: tensor.detach() for name, tensor in joined.items()}
        finally:
            for parameter, values in own.items():
                parameter.data = values

    def _parts(self, name: str) -> list[torch.Tensor]:
        return [attrgetter(name)(shard) for shard in self.cut.module_shards]

    def _forget_gathered(self) -> None:
        """Make the package gather norms anew.

        It shards norms and gathers them in forward, but would train with those gathered in the last evaluation, through
        which no gradient flows.
        """
        self.cut.sharding_manager._last_versions = None


def _flatten(values: Sequence[torch.Tensor], rank: int, n_devices: int, like: torch.Tensor) -> torch.Tensor:
    """Device `rank`'s pieces, concatenated and padded as the package does."""
    if not values[0].ndim:
        return values[0].clone()
    flat = torch.zeros_like(like, requires_grad=False)
    pieces = torch.cat([value.flatten().tensor_split(n_devices)[rank] for value in values])
    flat[: len(pieces)] = pieces
    return flat


def _make_rules(model: Any, devices: Sequence[torch.device]) -> tuple[Any, Any]:
    """The package's corrected rules, and the rule for biases of summed outputs."""
    from tensor_parallel.communications import CollectiveOperation
    from tensor_parallel.slicing_configs import PREDEFINED_CONFIGS
    from tensor_parallel.state_actions import LegacyStateAction, Scale, Split

    n, head = len(devices), r".*lm_head"
    rules = PREDEFINED_CONFIGS[model.config.model_type](model.config, devices)
    # Where outputs are summed, the package gives each device 1/n of the bias. Each part gets the whole gradient, so the
    # norm counts it n times, and an update of Adam or RMSprop is n times too long. Here the first device keeps the
    # whole bias, and the others zeros.
    first_only = LegacyStateAction(lambda bias, rank: bias * (rank == 0), lambda parts: parts[0])
    states = {pattern: first_only if isinstance(rule, Scale) else rule for pattern, rule in rules.state_rules.items()}
    states[re.compile(rf"{head}\.weight$")] = Split(n, dim=1)  # like the embeddings, with which it may be tied
    names = [name for name, _ in model.named_parameters()]
    # the package warns of patterns that no name matches
    rules.state_rules = {pattern: rule for pattern, rule in states.items() if any(map(pattern.search, names))}
    # On CPUs the package sums in the order in which threads arrive, so results differ from run to run.
    added = "sum" if devices[0].type == "cuda" else CollectiveOperation(n, lambda *parts: [sum(parts)] * n)
    outputs = rules.output_rules | {re.compile(f"{head}$"): {0: "sum"}}
    # the second output used to be a cache; now it is attention weights, which are not needed
    rules.output_rules = {p: {0: added if rule[0] == "sum" else rule[0]} for p, rule in outputs.items()}
    rules.input_rules = {re.compile(f"{head}$"): {0: "split -1"}}
    if model.config.model_type != "gpt2":  # the other families take their sizes from the weights
        rules.attr_rules = {}
    return rules, first_only
