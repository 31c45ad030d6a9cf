"""Loading tokenizer and models, log-probabilities of a batch, sampling. Knows no config and no process group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint

import cpu_attention
from archive import load_archive, read_archive
from losses import _get_batch_logps
from packing import Packed, tree_block_mask, tree_mask
from tokenization import Batch, concatenated_inputs
from utils import InputError, disable_dropout

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextlib.contextmanager
def _explaining(what: str, name: str):
    """Turn the many ways in which a hub or a directory lacks something into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, (InputError, torch.cuda.OutOfMemoryError)):
            raise
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{what} {name!r} brings Python code of its own, which is not run: read it, and then set "
                f"model.trust_remote_code=true"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{what} {name!r} cannot be loaded; give a local directory or a Hub id: {reason}") from error


def load_tokenizer(name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer; its pad token is EOS if it has none. Raises InputError if it has no EOS."""
    with _explaining("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=trust_remote_code
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {name!r} has no EOS token, which ends every response; set one in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def load_config(
    name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False
) -> transformers.PretrainedConfig:
    """A model's config. Raises InputError if it is not there."""
    with _explaining("model", name):
        return transformers.AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)


def choose_attention(config: transformers.PretrainedConfig, wanted: str) -> str:
    """What is wanted; eager attention for a model that has no SDPA (GPT-J, Gemma 2) if that is wanted.

    Raises InputError for FlashAttention that is not there.
    """
    if wanted == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        raise InputError(
            "model.attn_implementation=flash_attention_2 needs a GPU and the package flash_attn, which do not work "
            "here: use sdpa"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: the model brings its code
    lacks_sdpa = model_class is not None and not model_class._supports_sdpa
    return "eager" if wanted == "sdpa" and lacks_sdpa else wanted


def load_structure(
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "eager",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    device: str = "meta",
) -> transformers.PreTrainedModel:
    """The model of `load_model` without its weights, on the meta device: no memory, to be filled by another process."""
    config = load_config(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    attention = choose_attention(config, attn_implementation)
    with _explaining("model", name), torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    disable_dropout(model)
    return model


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    archive: str | None = None,
    attn_implementation: str = "eager",
    random_init: bool = False,
    seed: int = 0,
    device_map: str | dict | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> transformers.PreTrainedModel:
    """A causal language model in `dtype` with dropout off, its weights from `archive` (a `policy.pt`) if given.

    `random_init` builds the architecture from its config alone, the same weights for the same seed.
    Raises InputError for a model that is not there, lacks weights, or does not fit the archive.
    """
    found = {"cache_dir": cache_dir, "trust_remote_code": trust_remote_code}
    config = load_config(name, **found)
    made = {"dtype": dtype, "attn_implementation": choose_attention(config, attn_implementation)}
    with _explaining("model", name):
        if random_init:
            model = _random_model(config, **made, seed=seed, trust_remote_code=trust_remote_code)
            model.to(device_map[""] if isinstance(device_map, dict) else "cuda" if device_map else "cpu")
            if archive is not None:
                load_archive(model, archive)
        elif archive is not None:
            model = _model_of_archive(name, archive, found, **made, device_map=device_map)
        else:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                name, **found, **made, device_map=device_map, output_loading_info=True
            )
            _refuse_gaps(name, loading)
    disable_dropout(model)
    return model


def _random_model(config: Any, *, dtype: torch.dtype, seed: int, **made: Any) -> transformers.PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **made).to(dtype)


def _model_of_archive(
    name: str, archive: str, found: Mapping[str, Any], *, device_map: str | dict | None, **made: Any
) -> transformers.PreTrainedModel:
    """The model that `from_pretrained` gives, had its directory the archive's weights; its own are not read.

    Transformers places and casts them one by one, so that there is no second copy of them.
    """
    structure = load_structure(name, **found, **made)
    weights = read_archive(archive, structure)
    in_file = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    model, loading = type(structure).from_pretrained(
        None,
        config=load_config(name, **found),
        state_dict=weights,
        **made,
        device_map=device_map,
        output_loading_info=True,
    )
    del weights
    _refuse_gaps(name, loading)
    for tensor in (*model.parameters(), *model.buffers()):  # what was neither cast nor moved still is the file's pages
        if tensor.untyped_storage().data_ptr() in in_file:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    model.name_or_path = model.config.name_or_path = name
    model.adjust_generation_fn(  # as from_pretrained does at its end
        None, False, False, name, force_download=False, proxies=None, local_files_only=False, token=None, revision=None,
        subfolder="", **found,
    )  # fmt: skip
    return model


def _refuse_gaps(name: str, loading: Mapping[str, Any]) -> None:
    if loading["missing_keys"]:  # transformers would leave these random and go on
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise InputError(f"model {name!r} has no weights for {missing}; were they saved with another class?")


def check_positions(model: Any, max_length: int) -> None:
    """Raises InputError if the model has learned positions (GPT-2) and too few of them: it would end in an IndexError.

    Rotary positions have no end, and pass.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not model.get_input_embeddings())
    if limit is not None and max_length > limit and any(table.num_embeddings == limit for table in tables):
        raise InputError(f"max_length={max_length} is more than the {limit} positions that {type(model).__name__} has")


def remarks(model: Any, *, attention: str, max_length: int) -> list[str]:
    """What is worth saying of a model that was to have this attention and take rows of this length."""
    name, used = type(model).__name__, model.config._attn_implementation
    limit = getattr(model.config, "max_position_embeddings", None)
    found = [] if used == attention else [f"{name} does not support {attention}; using {used} attention"]
    if limit is not None and max_length > limit:
        found.append(f"warning: max_length={max_length:,} is more than the {limit:,} tokens that {name} was made for")
    return found


def sequence_logps(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Summed log-probabilities of the labelled tokens, (B,), softmax in float32 at least, for (B, T) inputs."""
    logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits  # (B, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _get_batch_logps(logits, labels.to(logits.device))


def chosen_logps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probabilities of the chosen responses (SFT: of the targets), (B,)."""
    return sequence_logps(model, batch["chosen_input_ids"], batch["chosen_attention_mask"], batch["chosen_labels"])


def concatenated_forward(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, rejected) log-probabilities, each (B,), from one forward over both: FSDP gathers weights once."""
    rows = concatenated_inputs(batch)
    logps = sequence_logps(
        model, rows["concatenated_input_ids"], rows["concatenated_attention_mask"], rows["concatenated_labels"]
    )
    chosen, rejected = logps.chunk(2)
    return chosen, rejected


def packed_logps(model: Any, packed: Packed, windows: Mapping[str, int | None]) -> torch.Tensor:
    """Summed log-probabilities of the U responses of `packed`, (U,): what `sequence_logps` gives for each alone."""
    if model.config._attn_implementation == "flex_attention":
        masks = {kind: tree_block_mask(packed, window=window) for kind, window in windows.items()}
    else:
        if packed.input_ids.device.type == "cpu":
            cpu_attention.register()
        dtype = model.get_input_embeddings().weight.dtype
        device = packed.input_ids.device.type
        if model.config._attn_implementation == "sdpa" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)  # in which it computes: else the mask is cast in every layer
        masks = {kind: _additive(tree_mask(packed, window=window), dtype) for kind, window in windows.items()}
    hidden = model.base_model(
        packed.input_ids,
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        position_ids=packed.position_ids,
        use_cache=False,
    ).last_hidden_state
    rows = hidden.flatten(0, 1)[packed.scored.to(hidden.device)]  # (N, H)
    logps = token_logps(model, rows, packed.targets.to(hidden.device))
    n_responses, longest = packed.shape
    table = logps.new_zeros(n_responses * longest).index_put((packed.slots.to(logps.device),), logps)
    return table.view(n_responses, longest).sum(-1)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask allows, the lowest number elsewhere: quicker than bool in the CPU's attention."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class _PickedLogSoftmax(torch.autograd.Function):
    """`logits.log_softmax(-1)` at the targets, in float32 at least, (N,) for (N, V).

    Made a few rows at a time and again in the backward pass, so that there is no second tensor of that size.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        pieces = _in_pieces(logits, targets[:, None])
        return torch.cat([_log_softmax(rows).gather(1, target) for rows, target in pieces]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets = ctx.saved_tensors
        for rows, target, grad_row in _in_pieces(logits, targets[:, None], grad[:, None]):
            grad_rows = _log_softmax(rows).exp_().mul_(-grad_row).scatter_add_(1, target, grad_row)
            rows.copy_(grad_rows)  # in place: nobody else has the logits
        return logits, None


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _in_pieces(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """On a CPU as many rows of all tensors at a time as its cache holds, elsewhere all."""
    n_rows = max(1, IN_CACHE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return zip(*(tensor.split(n_rows) for tensor in (logits, *others)), strict=True)


LOGITS_AT_ONCE = 2**25  # numbers, 134 MB in float32
IN_CACHE = 2**20  # of them


def token_logps(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `targets` (N,) from hidden states (N, H), by chunks of rows.

    The backward pass computes the logits of a chunk anew, but for the last, which it needs at once.
    """
    head, scale = model.get_output_embeddings(), logit_scale(model.config)

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = scale(head(hidden))
        return _PickedLogSoftmax.apply(logits, targets.to(logits.device))

    n_chunks = max(1, math.ceil(len(targets) * model.config.get_text_config().vocab_size / LOGITS_AT_ONCE))
    chunks = zip(hidden.tensor_split(n_chunks), targets.tensor_split(n_chunks), strict=True)
    *earlier, last = chunks
    logps = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in earlier]
    return torch.cat([*logps, score(*last)])


def logit_scale(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What models do to the logits after their head."""
    config = config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return lambda logits: logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return lambda logits: logits / divisor
    return lambda logits: logits
