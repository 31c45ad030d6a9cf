"""Tensor parallelism with the package `tensor_parallel` 2.0.0, which runs a thread for each device of one process.

Its rules for GPT-2, GPT-NeoX and Llama are corrected for transformers 5 and for training. No other file uses the
package.
"""

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from dpo.errors import InputError, explaining
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.system.host import is_gpu

FAMILIES = ("gpt2", "gpt_neox", "llama")


def split_over_devices(model: Any, devices: Sequence[str | torch.device]) -> "SplitModel":
    """Shard a copy of a model, which should be on the CPU; raise InputError if the package cannot do it correctly."""
    config = model.config
    fits = config.model_type in FAMILIES and config._attn_implementation in ("eager", "sdpa") and len(devices) > 1
    if config.model_type == "llama":
        fits = fits and config.head_dim * config.num_attention_heads == config.hidden_size
        fits = fits and not (config.attention_bias or config.mlp_bias)
    # With checkpointing, backward would recompute one device's part, and wait forever for those of the other devices.
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if not fits or recomputes:
        raise InputError(
            f"tensor_parallel.backend=tensor_parallel shards models of {', '.join(FAMILIES)} over two or more "
            "devices, with eager or sdpa attention, no activation checkpointing, and a Llama without biases "
            f"whose heads fill hidden_size; this {config.model_type} is none: use tensor_parallel.backend=dtensor"
        )
    check_tensor_parallel(config, len(devices))
    return SplitModel(model, [torch.device(device) for device in devices])


class SplitModel(torch.nn.Module):
    """A model sliced over devices; `state_dict()` is the whole model's, and `parameters()` hold each weight once.

    An optimizer's state belongs to the slices, so a run continues only with the same number of devices.
    """

    def __init__(self, model: Any, devices: Sequence[torch.device]):
        super().__init__()
        with explaining(  # often it needs pkg_resources, which setuptools 82 removed
            ImportError,
            lambda why: InputError(
                f"the package tensor_parallel cannot be imported ({why}); pip install tensor_parallel==2.0.0 "
                f"'setuptools>=77,<82', or use tensor_parallel.backend=dtensor"
            ),
        ):
            from tensor_parallel import TensorParallel
        self.config = model.config
        names = {tensor: name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        # A tied weight has two keys in a state dict, and one name here.
        self.name_of_key = {key: names[tensor] for key, tensor in model.state_dict(keep_vars=True).items()}
        package_config, first_device_rule = _make_rules(model, devices)
        # By name: the rule of the first pattern that matches it, or None for a tensor that is whole on every device.
        self.rules = {}
        for name in self.name_of_key.values():
            matching = (rule for pattern, rule in package_config.state_rules.items() if pattern.search(name))
            self.rules[name] = next(matching, None)
        self.sliced = TensorParallel(model, devices, tensor_parallel_config=package_config, distributed=False)
        for name, rule in self.rules.items():
            if rule is first_device_rule:
                for shard in self.sliced.module_shards[1:]:
                    attrgetter(name)(shard).requires_grad_(False)  # zeros, which must stay zeros
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Make the package gather norm layers' weights anew, as no gradient flows through those of an evaluation.
        self.sliced.sharding_manager._last_versions = None
        return self.sliced(*args, **kwargs)

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state dict; slices are joined on the CPU."""
        self.sliced.sharding_manager._last_versions = None  # as in `forward`
        self.sliced.sharding_manager.synchronize_weights(self.sliced.all_cuda)
        joined = {}
        for name, rule in self.rules.items():
            slices = [attrgetter(name)(shard) for shard in self.sliced.module_shards]
            joined[name] = (rule.undo(slices) if rule else slices[0]).detach()
        return {key: joined[name] for key, name in self.name_of_key.items()}


def _make_rules(model: Any, devices: Sequence[torch.device]) -> tuple:
    """Return the package's config for a model, with corrected rules, and the rule for biases of summed outputs.

    By the latter the first device has the whole bias, and the others have zeros.
    """
    from tensor_parallel.communications import CollectiveOperation
    from tensor_parallel.slicing_configs import PREDEFINED_CONFIGS
    from tensor_parallel.state_actions import LegacyStateAction, Scale, Split

    n = len(devices)
    head = r".*lm_head"
    package_config = PREDEFINED_CONFIGS[model.config.model_type](model.config, devices)
    # Where outputs are summed, the package gives each device 1/n of the bias. Each part gets the whole gradient, so the
    # gradient norm counts a bias n times, and an update of Adam or RMSprop is n times too long. Here the first device
    # keeps the whole bias, and the other devices zeros.
    first_device_rule = LegacyStateAction(lambda bias, rank: bias * (rank == 0), lambda parts: parts[0])
    state_rules = dict(package_config.state_rules)
    # The head is sliced as the embeddings are, with which it may be tied.
    state_rules[re.compile(rf"{head}\.weight$")] = Split(n, dim=1)
    names = [name for name, _ in model.named_parameters()]
    package_config.state_rules = {}
    for pattern, rule in state_rules.items():
        if any(map(pattern.search, names)):  # the package warns about patterns that match no name
            package_config.state_rules[pattern] = first_device_rule if isinstance(rule, Scale) else rule
    # On CPUs the package's sum is in the order in which threads arrive, so results would differ between runs.
    sum_rule = "sum" if is_gpu(devices[0]) else CollectiveOperation(n, lambda *parts: [sum(parts)] * n)
    output_rules = {**package_config.output_rules, re.compile(f"{head}$"): {0: "sum"}}
    package_config.output_rules = {}
    for pattern, rule in output_rules.items():
        # Keep only the rule of output 0. The package's rule for output 1 is for a cache, but now output 1 is the
        # attention weights, which are not needed.
        package_config.output_rules[pattern] = {0: sum_rule if rule[0] == "sum" else rule[0]}
    package_config.input_rules = {re.compile(f"{head}$"): {0: "split -1"}}
    if model.config.model_type != "gpt2":  # the other families take their sizes from the weights
        package_config.attr_rules = {}
    return package_config, first_device_rule
