"""Loading of pretrained models, independent of plans and process groups; their archived weights, and their digests.

An archive is a file with a model's weights, of this project or the reference code. It is read without running code.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dpo.checkpoint.files import read_state
from dpo.checkpoint.shards import SplitTensor
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, WarningLine
from dpo.models.adapters import POLICY, adapter_weights, base_weights, count_parameters, list_dropouts
from dpo.models.attention import choose_attention
from dpo.models.logprobs import HEAD_WEIGHT, LM_HEAD, draw_head, install_scalar_head
from dpo.models.paths import CONFIG, ModelPath, find_archive
from dpo.models.published import Tensors, map_weights, replace_by_stubs, set_names_in_class
from dpo.numbers import percent
from dpo.parallel.sharding import read_weight
from dpo.settings.keys import Dtype
from dpo.system.host import count_gpus

DTYPES = {name: getattr(torch, name) for name in get_args(Dtype)}
WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")  # around a model; the last by torch.compile
# Transformers stored these buffers in 2023, and computes them today.
OBSOLETE_BUFFER = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|embed_positions)$|\.rotary_emb\.\w+$")


def unwrap(model: Any) -> Any:
    """Take a model out of torch's wrappers, which have neither its config nor its methods."""
    while type(model).__name__ in WRAPPERS:
        [model] = model.children()
    return model


def take_model(passed: Any) -> Any:
    """Return the model that a caller of the API passes, without torch's wrappers.

    Raises InputError if it is not a model of transformers, or if FSDP has sharded it.
    """
    model = unwrap(passed)
    if not isinstance(model, transformers.PreTrainedModel) or isinstance(model, FSDPModule):
        raise InputError(
            f"the model given is a {type(model).__name__}: pass a model of transformers, which trainer=FSDPTrainer "
            f"shards, and lora=lora adapts"
        )
    return model


def load_config(source: ModelPath) -> transformers.PretrainedConfig:
    """Load a model's config; InputError if there is none, or for a model that cannot be trained here."""
    name = source.name
    auto_class = source.auto_class.__name__
    if Path(name, CONFIG).is_file():
        raise InputError(
            f"model.name_or_path={name} is an adapter: set model.archive to it, with lora=lora, and "
            f"model.name_or_path to its base; or merge both: dpo export {name} DIR --merge"
        )
    with explaining_load_errors("model", name):
        config = transformers.AutoConfig.from_pretrained(name, **source.options)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if source.scalar_head:
        config.num_labels = 1
        mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"model {name!r} is quantized: use the model that it was made from")
    has_own_code = auto_class in (getattr(config, "auto_map", None) or {})
    # Transformers would load only the decoder of an encoder-decoder model.
    if not has_own_code and (type(config) not in mapping or config.is_encoder_decoder):
        saved_class = ", ".join(config.architectures or [type(config).__name__])
        raise InputError(
            f"model {name!r} is a {saved_class}, which {auto_class} of transformers does not load: use a model for "
            f"text alone"
        )
    return config


def load_structure(
    source: ModelPath,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "eager",
    n_blocks: int | None = None,
    device: str = "meta",
) -> Any:
    """Make the model that `load_model` would load, with random weights unless it is on the meta device.

    With `n_blocks`, it has only its first blocks.
    """
    config = load_config(source)
    if n_blocks:
        text_config = config.get_text_config()
        text_config.num_hidden_layers = n_blocks
        if kinds := getattr(text_config, "layer_types", None):
            text_config.layer_types = kinds[:n_blocks]
    with explaining_load_errors("model", source.name), torch.device(device):
        model = source.auto_class.from_config(
            config,
            dtype=dtype,
            attn_implementation=choose_attention(attn_implementation),
            trust_remote_code=source.trust_remote_code,
        )
        return _adjust(model, source, config)


def load_onto(device_map: str | dict | None, load: Callable, **options: Any) -> tuple[Any, dict]:
    """Load a model by `load`, a `from_pretrained`; return it with transformers' loading info, such as missing keys.

    Without accelerate, weights go to a device by way of the CPU. Raises InputError if the model does not fit on the
    devices.
    """
    if transformers.utils.is_accelerate_available():
        options["device_map"] = device_map
    model, loading = load(**options, output_loading_info=True)
    if not isinstance(device_map, dict) or "" not in device_map:  # "" stands for the whole model, on one device
        refuse_offloading(model)
    else:
        model = model.to(device_map[""])  # where it is already, with accelerate
    return model, loading


def refuse_offloading(model: Any) -> None:
    """Raise InputError for layers that accelerate has put elsewhere than on GPUs: they would not be trained."""
    if {"cpu", "disk"}.intersection(map(str, getattr(model, "hf_device_map", {}).values())):
        raise InputError(
            "the model does not fit into the free memory of the GPUs: use more GPUs, trainer=FSDPTrainer, "
            "model.policy_dtype=bfloat16 or a smaller model"
        )


def load_model(
    source: ModelPath,
    *,
    dtype: torch.dtype | None,
    attn_implementation: str = "eager",
    device_map: str | dict | None = None,
    stays_in_files: bool = False,
) -> Any:
    """Load a model without its adapter in `dtype`, by default its config's, with dropout off.

    Its weights are those of `source.archive`; without an archive, random ones if `source.random_init`, else the model's
    own. If they lack a scalar head, it is drawn; InputError if they lack anything else, or do not have the recorded
    digest. With `stays_in_files`, a parameter is a stub that takes no memory, and `read_weight` reads its value from
    the file. This has no effect on random weights, nor if `map_weights` cannot map the model's own weights to its
    files.
    """
    config = load_config(source)
    dtype = dtype or config.dtype or torch.float32
    structure = None
    state = {}  # if it stays empty, transformers loads the model's own weights
    stored = {}  # by name, the tensor in a file that a stub in `state` stands for
    with explaining_load_errors("model", source.name):
        if source.random_init and not source.archive:
            # Weights are drawn on the CPU in float32, so models of the same seed are equal up to rounding in any dtype.
            with torch.random.fork_rng(range(count_gpus())):  # without the range, torch warns of several GPUs
                torch.manual_seed(source.seed)
                structure = load_structure(source, dtype=torch.float32, device="cpu")
            state = structure.state_dict()
        elif source.archive or stays_in_files:
            structure = load_structure(source, dtype=dtype)
            if source.archive:
                # checked before memory is taken for the model
                state = read_archive(source.archive, structure, stays_in_files=stays_in_files)
            else:
                state = map_weights(structure, source)
            if stays_in_files:
                state, stored = replace_by_stubs(structure, state)
            if not state:
                print(f"{source.name} is loaded as a whole, as its weights cannot be mapped to its files")
        if state:
            # None: the weights are those of `state`, and no file of the model is read
            load = partial(type(structure).from_pretrained, None, config=structure.config, state_dict=state)
        else:
            load = partial(source.auto_class.from_pretrained, source.name, config=config, **source.options)
        # Transformers casts and places the weights one by one, so that there is no second copy.
        attention = choose_attention(attn_implementation)
        model, loading = load_onto(device_map, load, dtype=dtype, attn_implementation=attention)
        if source.scalar_head and HEAD_WEIGHT in loading["missing_keys"]:  # the weights are a language model's
            loading["missing_keys"].remove(HEAD_WEIGHT)
            model.score.weight.data.copy_(draw_head(model, source.seed))
        refuse_missing_weights(loading, f"model {source.name!r}", "were they saved with another class?")
        if state:
            model.name_or_path = model.config.name_or_path = source.name
            if not source.random_init and not source.scalar_head:  # only a trained policy has settings for sampling
                model.generation_config = load_generation_config(source)
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if name in stored:
                    parameter.stored = stored[name]
            for tensor in (*model.parameters(), *model.buffers()):
                if not hasattr(tensor, "stored"):  # copied, as it may be mapped from a file that is replaced later
                    tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        _adjust(model, source, config)
    if source.base_digest is not None and hash_weights(base_weights(model)) != source.base_digest:
        raise InputError(
            f"the base {source.name} has other weights than those that the adapter was trained on: restore them, or "
            f"add --model DIR"
        )
    return model


def read_archive(archive: str | Path, model: torch.nn.Module, *, stays_in_files: bool = False) -> Tensors:
    """Read the weights in a `policy.pt`, by today's names; InputError if they do not fit `model`.

    The weights of a language model, without a scalar head, fit a reward model, too. With `stays_in_files`, tensors of a
    sharded checkpoint are joined only when something is computed with them.
    """
    path = find_archive(archive)
    state = read_state(path)
    if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
        raise InputError(f"{path} is not a policy.pt: its 'state' does not map names to tensors")
    expected = model.state_dict(keep_vars=True)
    named = {}
    for name, tensor in state.items():
        if name == "embed_out.weight" and name not in expected:  # GPT-NeoX's head, by its name in 2023
            name = "lm_head.weight"
        if name in expected or not OBSOLETE_BUFFER.search(str(name)):
            named[name] = tensor
    if HEAD_WEIGHT in expected and HEAD_WEIGHT not in named:  # the weights of a language model
        for name in LM_HEAD:
            named.pop(name, None)
        del expected[HEAD_WEIGHT]
    # Tied weights are one object with several names in the model, and a file may have any of these names.
    in_file = {expected.get(name) for name in named}  # the model's weights for which the file has a value
    problems = []
    for name, tensor in named.items():
        if name not in expected:
            problems.append(f"{name} is not in the model")
        elif tensor.shape != expected[name].shape:
            problems.append(f"{name} has another shape")
    problems += [f"it lacks {name}" for name, weight in expected.items() if weight not in in_file]
    if problems:
        raise InputError(f"{path} does not fit the model ({type(model).__name__}): {'; '.join(problems[:5])}")
    if stays_in_files:
        return named
    return {name: tensor.join() if isinstance(tensor, SplitTensor) else tensor for name, tensor in named.items()}


def load_archive(model: torch.nn.Module, archive: str | Path) -> None:
    """Copy the weights in a `policy.pt` into a model; InputError if they do not fit."""
    model.load_state_dict(read_archive(archive, model), strict=False)  # a file may lack names of tied weights


def _adjust(model: Any, source: ModelPath, config: Any) -> Any:
    """Prepare a new model in place for training and exports, and return it; `config` is the whole checkpoint's."""
    disable_dropout(model)
    text_config = model.config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        # Router logits are for a balancing loss, which is not used, and `generate` fails with them.
        text_config.output_router_logits = False
    if source.scalar_head:
        install_scalar_head(model)
    set_names_in_class(model, config)
    return model


def load_generation_config(source: ModelPath) -> transformers.GenerationConfig:
    """Load a model's own settings for sampling, which older models have in their config."""
    load = transformers.GenerationConfig.from_pretrained
    try:
        return load(source.name, cache_dir=source.cache_dir)
    except OSError:  # there is no generation_config.json
        return load(source.name, "config.json", cache_dir=source.cache_dir, _from_model_config=True)


def refuse_missing_weights(loading: Mapping, what: str, advice: str) -> None:
    """Raise InputError if files lack weights of the model, which `from_pretrained` then draws at random.

    `loading` is the loading info from `load_onto`, `what` names the model, and `advice` ends the message.
    """
    if loading["missing_keys"]:
        raise InputError(f"{what} has no weights for {', '.join(sorted(loading['missing_keys'])[:5])}: {advice}")


def check_positions(model: Any, max_length: int) -> None:
    """Raise InputError if rows of `max_length` exceed a model's positions, or change its results for other rows."""
    limit, why = min(list_limits(model))
    if max_length > limit:
        raise InputError(f"max_length={max_length} is too long for {type(model).__name__}: set {limit} or less, {why}")


def list_limits(model: Any) -> list[tuple[float, str]]:
    """List limits on the tokens of a row, each with its reason; infinity where there is no limit."""
    config = model.config.get_text_config()
    limits = [(math.inf, "")]
    n_positions = getattr(config, "max_position_embeddings", 0)
    is_limited = any(name.endswith("embed_positions") for name, _ in model.named_buffers())  # GPT-J's table
    for table in model.modules():
        is_table = isinstance(table, nn.Embedding) and table is not model.get_input_embeddings()
        # OPT's table has `offset` more rows than positions.
        if is_table and table.num_embeddings - getattr(table, "offset", 0) == n_positions:
            is_limited = True
            if table.padding_idx is not None:  # RoBERTa's positions begin after the padding's index
                n_positions -= table.padding_idx + 1
    if is_limited:
        limits.append((n_positions, "the number of its positions"))
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # a kind of layers may have parameters of its own
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind in ("dynamic", "longrope"):  # their frequencies change with a longer row
            length = config.max_position_embeddings
            if kind == "longrope":
                length = rope["original_max_position_embeddings"]
            limits.append((length, f"beyond which rope_type={kind} makes log-probabilities depend on other rows"))
    return limits


def describe_model(model: Any, *, max_length: int) -> list[str]:
    """List lines for the log with what may surprise a model's user."""
    name = type(model).__name__
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or -1  # XLNet has -1: no limit
    notes = []
    if hasattr(model, "names_in_class"):
        notes.append("only the text part of the checkpoint is trained; exports hold its other parts as well")
    if 0 < limit < max_length:
        notes.append(WarningLine(f"max_length={max_length:,} is more than the {limit:,} tokens {name} was made for"))
    n_trainable, n_total = count_parameters(model).values()
    if n_trainable < n_total:
        share = n_trainable / n_total
        notes.append(f"trainable parameters: {n_trainable:,} of {n_total:,} ({share:.2%})")
        # A layer's experts are one tensor of three dims, as is a depthwise convolution's kernel, whose second dim is 1.
        n_experts = sum(weight.numel() for weight in model.parameters() if weight.ndim == 3 and weight.shape[1] > 1)
        if n_experts:
            share = n_experts / (n_total - n_trainable)
            notes.append(WarningLine(f"the experts, {percent(share)} of the weights, get no adapter"))
    return notes


def checkpoint_activations(model: Any) -> None:
    """Make the backward pass recompute the activations of each block, so that they need not be kept."""
    has_dropout = bool(list_dropouts(model))  # in blocks, only an adapter's dropout draws random numbers
    # Transformers before 5.23 has the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": has_dropout})


def disable_dropout(model: nn.Module) -> None:
    """Turn dropout off permanently, also where a number in a module or its config sets it."""
    # Modules share configs, and the config of a multimodal model contains others.
    configs = [module.config for module in model.modules() if getattr(module, "config", None) is not None]
    configs += [inner for config in configs for inner in vars(config).values() if hasattr(inner, "to_dict")]
    for owner in (*model.modules(), *configs):
        if isinstance(owner, (nn.Dropout, nn.Dropout1d, nn.Dropout2d)):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if "drop" in name and type(value) in (int, float):  # not bool
                setattr(owner, name, type(value)(0))  # keeps the type, as some configs accept only an int


# --- digests ----------------------------------------------------------------------------------------------------------


def model_digest(model: Any, dtype: str, adapter: str | None = None, *, with_config: bool = True) -> str:
    """Hash what determines log-probabilities: weights, config, compute `dtype`, the `adapter` in use.

    Without the config, whose keys differ between versions of transformers, `check_inputs` has to compare it.
    """
    config = model.config.to_dict() if with_config else {}
    for key in ("_name_or_path", "transformers_version"):  # differ between copies of a model
        config.pop(key, None)
    facts = json.dumps([dtype, config], sort_keys=True, default=str)
    weights = base_weights(model)
    # A scalar head that is trained with the policy's adapter is not part of the base.
    if HEAD_WEIGHT in adapter_weights(model, POLICY):
        del weights[HEAD_WEIGHT]
    if adapter:
        weights |= adapter_weights(model, adapter)
        adapter_config = model.adapter_configs[adapter]
        facts += f"scaled by {adapter_config['lora_alpha'] / adapter_config['r']}"
    return hash_weights(weights, facts)


def hash_weights(weights: Tensors, facts: str = "") -> str:
    """Hash weights and `facts`; the config is left out, as its keys differ between versions of transformers."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(read_weight(tensor).cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
