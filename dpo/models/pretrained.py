"""Loading of pretrained models, independent of plans and process groups."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from transformers.integrations import sdpa_attention

from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError
from dpo.models.adapters import CONFIG, count_expert_weights, count_parameters, list_dropouts
from dpo.models.scalar_head import HEAD_WEIGHT, draw_head, install_scalar_head
from dpo.models.text_part import is_text_part, name_in_class
from dpo.models.weights import read_archive
from dpo.numbers import percent
from dpo.settings.choices import VARLEN
from dpo.settings.keys import Dtype

_use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}


def load_config(
    name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False, scalar_head: bool = False
) -> transformers.PretrainedConfig:
    """A model's config in transformers; with `scalar_head`, a reward model's.

    Raises InputError if the model has no config, or `name` is an adapter.
    """
    if (Path(name).expanduser() / CONFIG).is_file():
        raise InputError(
            f"model.name_or_path={name} is an adapter: give it as model.archive with lora=lora, and its base as "
            f"model.name_or_path; or merge both: python -m scripts.export {name} DIR --merge"
        )
    with explaining_load_errors("model", name):
        config = transformers.AutoConfig.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=trust_remote_code, **_config_changes(scalar_head)
        )
    _check_class(name, config, scalar_head)
    return config


def _check_class(name: str, config: Any, scalar_head: bool) -> None:
    """Raise InputError for a config of which transformers makes no such model."""
    auto_class, saved_classes = _find_auto_class(scalar_head), config.architectures or []
    model_class = auto_class._model_mapping.get(type(config), None)
    # transformers would load the decoder of an encoder-decoder model alone
    is_decoder = (
        not config.is_encoder_decoder or not saved_classes or getattr(model_class, "__name__", None) in saved_classes
    )
    has_own_code = auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    has_own_code |= not type(config).__module__.startswith("transformers.")
    if has_own_code or (model_class is not None and is_decoder):
        return
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        kind = "vision-language models whose text part transformers does not load alone"
    elif config.is_encoder_decoder:
        kind = "encoder-decoder models"
    elif hasattr(config, "audio_config"):
        kind = "models of audio"
    else:
        kind = f"classes that {auto_class.__name__} does not load"
    class_name = ", ".join(saved_classes or [type(config).__name__])
    raise InputError(f"model {name!r} is a {class_name}, and {kind} are not supported: give a model for text alone")


def _config_changes(scalar_head: bool) -> dict[str, int]:
    """The entries that only a reward model's config has."""
    return {"num_labels": 1} if scalar_head else {}


def _find_auto_class(scalar_head: bool) -> Any:
    return transformers.AutoModelForSequenceClassification if scalar_head else transformers.AutoModelForCausalLM


def _use_grouped_heads(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """transformers' rule, but on GPUs keys and values are repeated in float32.

    Only torch's slowest kernel takes grouped heads in float32, and it keeps all scores in memory.
    """
    return not (key.is_cuda and key.dtype == torch.float32) and _use_gqa_in_sdpa(mask, key, value)


def choose_attention(config: transformers.PretrainedConfig, wanted: str) -> str:
    """The wanted attention implementation, or eager if SDPA is not supported.

    GPT-J, for instance, does not support SDPA. Raises InputError if FlashAttention is wanted and not available, or if
    attention by segments is wanted and the model does not support it.
    """
    if wanted == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        raise InputError(
            "model.attn_implementation=flash_attention_2 needs a GPU and the package flash_attn, which are not "
            "available here: use sdpa"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None for a model with its own code
    if wanted == VARLEN:
        from dpo.models import varlen_attention  # its import takes 0.1 s

        varlen_attention.register()
        if model_class is not None and not model_class._supports_attention_backend:
            raise InputError(
                f"model.attn_implementation={wanted} does not support {model_class.__name__}, whose attention is code "
                f"of its own: use sdpa"
            )
    sdpa_attention.use_gqa_in_sdpa = _use_grouped_heads
    lacks_sdpa = model_class is not None and not model_class._supports_sdpa
    return "eager" if wanted == "sdpa" and lacks_sdpa else wanted


def load_structure(
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "eager",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    scalar_head: bool = False,
) -> transformers.PreTrainedModel:
    """The model of `load_model` without its weights, on the meta device."""
    config = load_config(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code, scalar_head=scalar_head)
    attention = choose_attention(config, attn_implementation)
    with explaining_load_errors("model", name), torch.device("meta"):
        model = _find_auto_class(scalar_head).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
        name_in_class(model, config)
    return _complete(model, scalar_head)


def _complete(model: Any, scalar_head: bool) -> transformers.PreTrainedModel:
    """Turn off dropout and router logits, and install a scalar head."""
    disable_dropout(model)
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # they are for a balancing loss, which is not used, and `generate` fails
    if scalar_head:
        install_scalar_head(model)
    return model


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    archive: str | Path | None = None,
    attn_implementation: str = "eager",
    random_init: bool = False,
    seed: int = 0,
    device_map: str | dict | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    scalar_head: bool = False,
) -> transformers.PreTrainedModel:
    """Load a causal language model in `dtype`, with dropout off.

    The weights are from `archive` (a `policy.pt`) if given, else from the model `name`. With `random_init`, `name`
    gives only the architecture, and weights are drawn from the seed. With `scalar_head` a reward model is loaded, and
    its head is drawn from the seed if the weights lack it.
    Raises InputError if the model cannot be loaded, lacks weights, or does not fit the archive.
    """
    source = {"cache_dir": cache_dir, "trust_remote_code": trust_remote_code}
    config_source = {**source, "scalar_head": scalar_head}  # for `load_config`
    config = load_config(name, **config_source)
    options = {"dtype": dtype, "attn_implementation": choose_attention(config, attn_implementation)}
    placed_options = {**options, "device_map": device_map}
    model: Any
    with explaining_load_errors("model", name):
        if archive is not None:
            model = _load_from_archive(name, archive, config_source, placed_options, seed)
            if not random_init and not scalar_head:  # only a trained policy has settings for sampling
                # from_pretrained would load these settings, but has not been given the model's name
                model.adjust_generation_fn(
                    None, False, False, name, force_download=False, proxies=None, local_files_only=False, token=None,
                    revision=None, subfolder="", **source,
                )  # fmt: skip
        elif random_init:
            drawn = _draw_weights(_find_auto_class(scalar_head), config, options, seed, trust_remote_code)
            model = _load_weights(name, drawn, drawn.state_dict(), config_source, placed_options)
        else:
            with silenced_reports() if scalar_head else contextlib.nullcontext():
                loaded: Any = _find_auto_class(scalar_head).from_pretrained(
                    name, **source, **placed_options, **_config_changes(scalar_head), output_loading_info=True
                )
            model, loading = loaded
            if scalar_head and HEAD_WEIGHT in loading["missing_keys"]:  # the weights are a language model's
                loading["missing_keys"].remove(HEAD_WEIGHT)
                with torch.no_grad():
                    model.score.weight.copy_(draw_head(model, seed))
            refuse_gaps(loading, f"model {name!r}", "were they saved with another class?")
        name_in_class(model, config)
    return _complete(model, scalar_head)


def _draw_weights(auto_class: Any, config: Any, options: Mapping[str, Any], seed: int, trust_remote_code: bool) -> Any:
    """A model on the CPU, drawn from the seed in float32.

    Models of the same seed are therefore equal up to rounding, whatever their dtype.
    """
    float32_options = {**options, "dtype": torch.float32}
    gpus = range(torch.cuda.device_count())  # without this argument, fork_rng warns of several GPUs
    with torch.random.fork_rng(gpus):
        torch.manual_seed(seed)
        return auto_class.from_config(config, **float32_options, trust_remote_code=trust_remote_code)


def _load_from_archive(
    name: str, archive: str | Path, source: Mapping[str, Any], options: Mapping[str, Any], seed: int
) -> transformers.PreTrainedModel:
    """Load a model with an archive's weights in place of its own.

    A scalar head that the archive lacks is drawn from the seed.
    """
    structure = load_structure(name, dtype=options["dtype"], **source)
    weights = read_archive(archive, structure)  # checked before memory is taken for the model
    if source["scalar_head"] and HEAD_WEIGHT not in weights:
        weights[HEAD_WEIGHT] = draw_head(structure, seed)
    mapped_storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    model = _load_weights(name, structure, weights, source, options)
    del weights  # frees what the model does not use
    # copy the tensors that were neither cast nor moved: they are still mapped from the file, which may be deleted
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() in mapped_storages:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model


def _load_weights(
    name: str, structure: Any, weights: dict[str, torch.Tensor], source: Mapping[str, Any], options: Mapping[str, Any]
) -> transformers.PreTrainedModel:
    """Load a model of the structure's class with these weights.

    transformers casts and places the weights one by one, so that there is no second copy.
    """
    model_class: Any = type(structure)
    config = load_config(name, **source)
    model, loading = model_class.from_pretrained(
        None,
        config=config.get_text_config() if is_text_part(config) else config,
        state_dict=weights,
        **options,
        output_loading_info=True,
    )
    refuse_gaps(loading, f"model {name!r}", "were they saved with another class?")
    model.name_or_path = model.config.name_or_path = name
    return model


@contextlib.contextmanager
def silenced_reports() -> Iterator[None]:
    """Silence transformers' reports on loading inside; `refuse_gaps` raises errors instead."""
    logs = transformers.utils.logging
    verbosity, had_bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if had_bar:
            logs.enable_progress_bar()


def refuse_gaps(loading: Mapping[str, Any], what: str, advice: str) -> None:
    """Raise InputError for missing weights, which transformers would draw at random.

    `loading` is the loading info of `from_pretrained`, `what` names the model, and `advice` says what to do.
    """
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise InputError(f"{what} has no weights for {missing}: {advice}")


SINUSOIDS = ("embed_positions", "pos_encoding")  # names of tables of fixed size in GPT-J, CodeGen and CTRL


def check_positions(model: Any, max_length: int) -> None:
    """Raise InputError if `max_length` is too long for a model.

    It is if the model has fewer positions, or computes them differently in a batch with such a long row.
    """
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
    """The number of positions in a model's table of them.

    Infinity for a model without such a table, such as one with rotary positions.
    """
    n_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    token_table = model.get_input_embeddings()
    for table in model.modules():
        if not isinstance(table, torch.nn.Embedding) or table is token_table:
            continue
        if table.num_embeddings == n_positions + getattr(table, "offset", 0):  # OPT's and BART's have 2 rows more
            n_unused = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa's begin after padding
            return n_positions - n_unused
    sinusoids = [table for name, table in model.named_buffers() if name.rpartition(".")[2] in SINUSOIDS]
    return min((len(table) for table in sinusoids), default=math.inf)


def find_changing_ropes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each `rope_type` whose frequencies depend on the length of rows.

    Each comes with the number of tokens after which they change.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [nested for nested in parameters.values() if isinstance(nested, dict)]
    for rope in (parameters, *by_layer_type):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            length = config.max_position_embeddings
            if rope["rope_type"] == "longrope":
                length = rope.get("original_max_position_embeddings") or getattr(
                    config, "original_max_position_embeddings", length
                )
            yield rope["rope_type"], length


def remarks(model: Any, *, attention: str, max_length: int) -> list[str]:
    """Notes on a model, given the requested attention and `max_length`."""
    name, used_attention = type(model).__name__, model.config._attn_implementation
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
    with warnings.catch_warnings():  # the method has a newer name, which early versions 5 lack
        warnings.simplefilter("ignore", FutureWarning)
        # blocks draw random numbers for an adapter's dropout alone
        draws = bool(list_dropouts(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": draws})


def disable_dropout(model: torch.nn.Module) -> None:
    """Turn dropout off permanently, also in train mode.

    Many transformers models apply dropout functionally, from a float attribute of the module or of its config
    (`attention_dropout`, `resid_pdrop`, `layerdrop`, ...), so zeroing the `nn.Dropout` modules alone is not enough.
    """
    modules: list[Any] = list(model.modules())
    # many modules share a config, and the config of a multimodal model contains others: zero each config once
    configs = {id(m.config): m.config for m in modules if getattr(m, "config", None) is not None}
    for config in list(configs.values()):
        configs.update({id(inner): inner for inner in vars(config).values() if hasattr(inner, "to_dict")})
    for owner in [*modules, *configs.values()]:
        if isinstance(owner, torch.nn.modules.dropout._DropoutNd):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            is_number = type(value) in (int, float)  # not bool
            if is_number and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(owner, name, type(value)(0))  # keeps the type, as some configs accept only an int
