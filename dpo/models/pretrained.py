"""Loading of pretrained models, independent of plans and process groups."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import transformers
from transformers.integrations import sdpa_attention

from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError
from dpo.models.adapters import CONFIG, count_expert_weights, count_parameters, list_dropouts
from dpo.models.logprobs import find_attention
from dpo.models.scalar_head import HEAD_WEIGHT, draw_head, install_scalar_head
from dpo.models.text_part import find_integer_weights, is_text_part, name_in_class
from dpo.models.weights import read_archive
from dpo.numbers import percent
from dpo.settings.choices import VARLEN
from dpo.settings.keys import Dtype

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}


class Source(NamedTuple):
    """A model of transformers, and how it is read."""

    name: str  # a directory or a Hub id
    cache_dir: str | None = None
    trust_remote_code: bool = False
    scalar_head: bool = False  # read as a reward model

    @property
    def options(self) -> dict[str, Any]:
        """Options of `from_pretrained` of configs, models and tokenizers."""
        return {"cache_dir": self.cache_dir, "trust_remote_code": self.trust_remote_code}

    @property
    def labels(self) -> dict[str, int]:
        """The entries that only a reward model's config has."""
        return {"num_labels": 1} if self.scalar_head else {}

    @property
    def auto_class(self) -> Any:
        return (
            transformers.AutoModelForSequenceClassification if self.scalar_head else transformers.AutoModelForCausalLM
        )


def load_config(source: Source) -> transformers.PretrainedConfig:
    """A model's config; InputError if there is none, for an adapter, and if transformers makes no such model of it."""
    name = source.name
    if (Path(name).expanduser() / CONFIG).is_file():
        raise InputError(
            f"model.name_or_path={name} is an adapter: give it as model.archive with lora=lora, and its base as "
            f"model.name_or_path; or merge both: python -m scripts.export {name} DIR --merge"
        )
    with explaining_load_errors("model", name):
        config = transformers.AutoConfig.from_pretrained(name, **source.options, **source.labels)
    auto_class = source.auto_class.__name__
    has_own_code = auto_class in (getattr(config, "auto_map", None) or {})
    has_own_code |= not type(config).__module__.startswith("transformers.")
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if source.scalar_head:
        mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    model_class, saved_classes = mapping.get(type(config), None), config.architectures or []
    # transformers would load the decoder of an encoder-decoder model alone
    is_part = config.is_encoder_decoder and saved_classes and getattr(model_class, "__name__", "") not in saved_classes
    if not has_own_code and (model_class is None or is_part):
        saved_class = ", ".join(saved_classes) or type(config).__name__
        raise InputError(
            f"model {name!r} is a {saved_class}, which {auto_class} of transformers does not load: give a model for "
            f"text alone"
        )
    return config


def choose_attention(config: transformers.PretrainedConfig, wanted: str) -> str | None:
    """The `attn_implementation` with which transformers makes a model.

    For `sdpa` it is None, transformers' default, which is eager for a model that lacks SDPA, such as Gemma 2. Raises
    InputError for FlashAttention or attention by segments where they are not available.
    """
    if wanted == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        raise InputError(
            "model.attn_implementation=flash_attention_2 needs a GPU and the package flash_attn, which are not "
            "available here: use sdpa"
        )
    if wanted == VARLEN:
        from dpo.models import varlen_attention  # its import takes 0.1 s

        varlen_attention.register()
        model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: its own code
        if model_class is not None and not model_class.is_backend_compatible():
            raise InputError(
                f"model.attn_implementation={wanted} does not support {model_class.__name__}, whose attention is code "
                f"of its own: use sdpa"
            )
    sdpa_attention.use_gqa_in_sdpa = _use_grouped_heads
    return None if wanted == "sdpa" else wanted


_use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa


def _use_grouped_heads(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """transformers' rule, but on GPUs keys and values are repeated in float32.

    Only torch's slowest kernel takes grouped heads in float32, and it keeps all scores in memory.
    """
    return not (key.is_cuda and key.dtype == torch.float32) and _use_gqa_in_sdpa(mask, key, value)


def load_structure(source: Source, *, dtype: torch.dtype, attn_implementation: str = "eager") -> Any:
    """The model of `load_model` without its weights, on the meta device."""
    config = load_config(source)
    attention = choose_attention(config, attn_implementation)
    with explaining_load_errors("model", source.name), torch.device("meta"):
        model = source.auto_class.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=source.trust_remote_code
        )
        return _complete(model, source, config)


def load_model(
    source: Source,
    *,
    dtype: torch.dtype,
    archive: str | Path | None = None,
    attn_implementation: str = "eager",
    random_init: bool = False,
    seed: int = 0,
    device_map: str | dict | None = None,
) -> Any:
    """Load a model in `dtype`, with dropout off.

    The weights are those of the `archive` (a `policy.pt`) if given, else drawn from the seed with `random_init`, else
    the model's own. A scalar head that the weights lack is drawn from the seed.
    Raises InputError if the model cannot be loaded, lacks weights, or does not fit the archive.
    """
    config = load_config(source)
    options = {"dtype": dtype, "attn_implementation": choose_attention(config, attn_implementation)}
    with explaining_load_errors("model", source.name):
        if archive is not None:
            structure = load_structure(source, dtype=dtype)
            weights = read_archive(archive, structure)  # checked before memory is taken for the model
            if source.scalar_head and HEAD_WEIGHT not in weights:
                weights[HEAD_WEIGHT] = draw_head(structure, seed)
            model = _load_state(source, config, structure, weights, {**options, "device_map": device_map})
            if not random_init and not source.scalar_head:  # only a trained policy has settings for sampling
                model.generation_config = load_generation_config(source)
        elif random_init:
            # drawn on the CPU in float32, so models of the same seed are equal up to rounding, whatever their dtype
            options_on_cpu = {**options, "dtype": torch.float32, "trust_remote_code": source.trust_remote_code}
            with torch.random.fork_rng(range(torch.cuda.device_count())):  # without the range it warns of several GPUs
                torch.manual_seed(seed)
                drawn = source.auto_class.from_config(config, **options_on_cpu)
            model = _load_state(source, config, drawn, drawn.state_dict(), {**options, "device_map": device_map})
        else:
            model = _load_published(source, config, seed, {**options, "device_map": device_map})
        return _complete(model, source, config)


def _load_published(source: Source, config: Any, seed: int, options: Mapping[str, Any]) -> Any:
    """The model with its own weights; InputError if some are missing, or integers without scales."""
    with silenced_reports() if source.scalar_head else contextlib.nullcontext():
        model, loading = source.auto_class.from_pretrained(
            source.name, **source.options, **source.labels, **options, output_loading_info=True
        )
    if source.scalar_head and HEAD_WEIGHT in loading["missing_keys"]:  # the weights are a language model's
        loading["missing_keys"].remove(HEAD_WEIGHT)
        with torch.no_grad():
            model.score.weight.copy_(draw_head(model, seed))
    refuse_gaps(loading, f"model {source.name!r}", "were they saved with another class?")
    is_quantized = getattr(config, "quantization_config", None) is not None
    if not is_quantized and (integers := find_integer_weights(source.name, source.cache_dir)):
        raise InputError(
            f"model {source.name!r} has integers for {', '.join(integers[:3])}, as if it were quantized, and its "
            f"config.json has no quantization_config: give the model that it was made from"
        )
    return model


def _load_state(
    source: Source, config: Any, structure: Any, state: dict[str, torch.Tensor], options: Mapping[str, Any]
) -> Any:
    """A model of the structure's class with these weights.

    transformers casts and places the weights one by one, so that there is no second copy.
    """
    model, loading = type(structure).from_pretrained(
        None,
        config=config.get_text_config() if is_text_part(config) else config,
        state_dict=state,
        **options,
        output_loading_info=True,
    )
    refuse_gaps(loading, f"model {source.name!r}", "were they saved with another class?")
    model.name_or_path = model.config.name_or_path = source.name
    # copy the tensors that were neither cast nor moved: they may be mapped from a file, which may be deleted
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() in storages:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model


def _complete(model: Any, source: Source, config: Any) -> Any:
    """Turn off dropout and router logits, install a scalar head, and note names of weights in a larger checkpoint."""
    disable_dropout(model)
    text_config = model.config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        # they are for a balancing loss, which is not used, and `generate` fails
        text_config.output_router_logits = False
    if source.scalar_head:
        install_scalar_head(model)
    name_in_class(model, config)
    return model


def load_generation_config(source: Source) -> transformers.GenerationConfig:
    """How a model draws answers, by its generation config or else its config."""
    load = transformers.GenerationConfig.from_pretrained
    try:
        return load(source.name, cache_dir=source.cache_dir)
    except OSError:  # there is no such file
        return load(source.name, "config.json", cache_dir=source.cache_dir, _from_model_config=True)


@contextlib.contextmanager
def silenced_reports() -> Iterator[None]:
    """Silence transformers' reports on loading inside; `refuse_gaps` raises errors instead."""
    logs = transformers.utils.logging
    verbosity = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)


def refuse_gaps(loading: Mapping[str, Any], what: str, advice: str) -> None:
    """Raise InputError for missing weights, by `from_pretrained`'s loading info: they would be drawn at random."""
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise InputError(f"{what} has no weights for {missing}: {advice}")


def check_positions(model: Any, max_length: int) -> None:
    """Raise InputError if a model has fewer positions, or changes them in a batch with a row of `max_length`."""
    name, n_positions = type(model).__name__, count_positions(model)
    if max_length > n_positions:
        raise InputError(
            f"max_length={max_length} is more than the {n_positions} positions that {name} has: set "
            f"max_length={n_positions} or less"
        )
    for kind, length in find_changing_ropes(model.config.get_text_config()):
        if max_length > length:
            raise InputError(
                f"max_length={max_length} is more than {length} tokens, and with a longer row {name} changes the "
                f"rotary frequencies of its whole batch (rope_type={kind}), so that log-probabilities depend on other "
                f"rows: set max_length={length} or less"
            )


def count_positions(model: Any) -> float:
    """The number of positions in a model's table of them; infinity without such a table."""
    n_positions = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    for table in model.modules():
        is_table = isinstance(table, torch.nn.Embedding) and table is not model.get_input_embeddings()
        if is_table and table.num_embeddings - getattr(table, "offset", 0) == n_positions:  # OPT's has 2 rows more
            return n_positions - (0 if table.padding_idx is None else table.padding_idx + 1)  # RoBERTa's: after padding
    computed = [len(table) for name, table in model.named_buffers() if name.endswith("embed_positions")]  # GPT-J's
    return n_positions if n_positions in computed else math.inf


def find_changing_ropes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each `rope_type` whose frequencies change with a row of more tokens than the number beside it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [nested for nested in parameters.values() if isinstance(nested, dict)]
    for rope in (parameters, *by_layer_type):
        if rope.get("rope_type") == "dynamic":
            yield "dynamic", config.max_position_embeddings
        elif rope.get("rope_type") == "longrope":
            length = rope.get("original_max_position_embeddings")
            length = length or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            yield "longrope", length


def remarks(model: Any, *, attention: str, max_length: int) -> list[str]:
    """Notes on a model, given the requested attention and `max_length`."""
    name, used_attention = type(model).__name__, find_attention(model.config)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or -1  # XLNet has -1: no limit
    notes = []
    if hasattr(model, "checkpoint_class"):
        notes.append(
            f"only the text part of this {model.checkpoint_class} is trained ({name}); its other parts, such as "
            f"vision, are carried along unchanged into exports"
        )
    if used_attention != attention:
        notes.append(f"{name} does not support {attention}; using {used_attention} attention")
    if 0 < limit < max_length:
        notes.append(f"warning: max_length={max_length:,} is more than the {limit:,} tokens that {name} was made for")
    n_trainable, n_total = count_parameters(model)
    if n_trainable < n_total:
        share = n_trainable / n_total
        notes.append(f"trainable parameters: {n_trainable:,} of {n_total:,} ({share:.2%}), those of the adapter")
        if n_experts := count_expert_weights(model):
            notes.append(
                f"warning: the experts, {percent(n_experts / (n_total - n_trainable))} of the weights, get no adapter"
            )
    return notes


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass."""
    draws = bool(list_dropouts(model))  # blocks draw random numbers for an adapter's dropout alone
    with warnings.catch_warnings():  # the method has a newer name, which early versions 5 lack
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": draws})


def disable_dropout(model: torch.nn.Module) -> None:
    """Turn dropout off permanently, also in train mode.

    Many models apply dropout functionally, from a float attribute of the module or of its config.
    """
    modules: list[Any] = list(model.modules())
    # many modules share a config, and the config of a multimodal model contains others: zero each config once
    configs = {id(m.config): m.config for m in modules if getattr(m, "config", None) is not None}
    for config in list(configs.values()):
        configs.update({id(inner): inner for inner in vars(config).values() if hasattr(inner, "to_dict")})
    for owner in [*modules, *configs.values()]:
        if isinstance(owner, (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d)):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            is_number = type(value) in (int, float)  # not bool
            if is_number and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(owner, name, type(value)(0))  # keeps the type, as some configs accept only an int
