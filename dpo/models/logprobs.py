"""Log-probabilities and rewards of responses, from padded and from packed rows.

A reward model has a scalar head: a linear layer `score` without bias for the hidden state of a text's last token.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, masking_utils

from dpo.errors import InputError
from dpo.models.attention import attend_in_bfloat16
from dpo.models.packing import Packed, Windows, tree_mask
from dpo.system.arithmetic import find_compute_dtype
from dpo.system.host import is_cpu, is_gpu

HEAD, HEAD_WEIGHT = "score", "score.weight"  # transformers' names
LM_HEAD = ("lm_head.weight", "lm_head.bias")  # a language model's head, which a reward model lacks


class TokenLogps(NamedTuple):
    """Log-probabilities of scored tokens of responses, zero-padded to the longest, T; or their rewards (T = 1)."""

    logps: Tensor  # (sides, B, T)
    squares: Tensor | None = None  # log sum_v pi(v)^2 over the vocabulary at each scored token, detached


def padded_logps(
    model: nn.Module, padded: Packed, attention_mask: Tensor | None, *, with_squares: bool = False
) -> TokenLogps:
    """Compute log-probabilities of responses, (sides, B, T), from the logits that the model itself gives."""
    with _one_text_per_row():
        logits = model(padded.input_ids, attention_mask=attention_mask, use_cache=False).logits  # (R, L, V)
    logits = logits.flatten(0, 1).index_select(0, padded.scored.to(logits.device))  # (N, V)
    return _by_example(padded, TokenLogps(*_pick_logps(logits, padded.targets, with_squares=with_squares)))


@contextmanager
def _one_text_per_row() -> Iterator:
    """Keep transformers from checking whether rows hold several texts, for which the host would wait for the device."""
    find_packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed


def packed_logps(
    model: Any, packed: Packed, windows: Windows | None, attention_mask: Any = None, *, with_squares: bool = False
) -> TokenLogps:
    """Compute log-probabilities of responses, (sides, B, T), or their rewards, (sides, B, 1).

    Logits are computed in chunks. If `windows` is None the rows are padded, and the model gets `attention_mask`.
    """
    options = {}
    if windows is not None:
        options["position_ids"] = packed.position_ids
        masks = _find_masks(model, packed, windows)
        # A model whose layers are all of one kind takes a mask, other models take a dict.
        attention_mask = masks if len(masks) > 1 else next(iter(masks.values()))
    if packed.segments is not None:
        options["segments"] = packed.segments  # for `attend_by_segments`
    with _one_text_per_row():
        outputs = model.base_model(packed.input_ids, attention_mask=attention_mask, use_cache=False, **options)
    hidden = outputs.last_hidden_state.flatten(0, 1)  # (R * L, H)
    hidden = hidden[packed.scored.to(hidden.device)]  # (N, H)
    head = find_scalar_head(model)
    if head is not None:
        by_token = TokenLogps(head(hidden.to(head.weight.device)).squeeze(-1))  # the layers may be on several GPUs
    else:
        by_token = token_logps(model, hidden, packed.targets.to(hidden.device), with_squares=with_squares)
    return _by_example(packed, by_token)


def _by_example(packed: Packed, by_token: TokenLogps) -> TokenLogps:
    """Arrange values of scored tokens, (N,), as (sides, B, T); those of a response are followed by zeros."""
    index = packed.response_index

    def arrange(values: Tensor) -> Tensor:
        slots = packed.slots.to(values.device)
        by_response = values.new_zeros(math.prod(packed.shape)).index_put((slots,), values).view(packed.shape)
        return by_response.to(index.device)[index]

    return tree_map_only(Tensor, arrange, by_token)


def _find_masks(model: Any, packed: Packed, windows: Windows) -> dict[str, Tensor]:
    """Return a mask for each kind of attention layer; `packed` keeps the masks for the next model.

    Masks are additive, 0 or the dtype's minimum, which is faster than bool on CPUs.
    """
    device = packed.input_ids.device
    if packed.segments is not None:  # a dummy: given a tensor of four dims, transformers makes no mask itself
        return dict.fromkeys(windows, torch.zeros(1, 1, 1, 1, device=device))
    if is_cpu(device):
        AttentionInterface.register("sdpa", attend_in_bfloat16)  # for additive masks, which only packed rows have
    dtype = model.get_input_embeddings().weight.dtype
    if "sdpa" in model.config._attn_implementation:  # also under the name that predictions of memory use
        dtype = find_compute_dtype(device.type, dtype)  # so that no layer has to cast the mask
    if dtype not in packed.masks:
        masks = packed.masks[dtype] = {}
        for kind, window in windows.items():
            mask = tree_mask(packed, window=window)
            masks[kind] = torch.full_like(mask, torch.finfo(dtype).min, dtype=dtype).masked_fill_(mask, 0)
    return packed.masks[dtype]


class _PickedLogSoftmax(torch.autograd.Function):
    """`logits.log_softmax(-1)` at the targets, (N,) for (N, V).

    It keeps no result of (N, V) for the backward pass, which overwrites the logits with their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        pieces = _in_pieces(logits, targets[:, None])
        return torch.cat([_log_softmax(rows).gather(1, row_targets) for rows, row_targets in pieces]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        logits, targets = ctx.saved_tensors
        for rows, row_targets, row_grads in _in_pieces(logits, targets[:, None], grad[:, None]):
            # d log p(target) / d logit v = (v is target) - p(v)
            grad_logits = _log_softmax(rows).exp_().mul_(-row_grads).scatter_add_(1, row_targets, row_grads)
            rows.copy_(grad_logits)  # nothing else uses the logits, so no second tensor of (N, V) stays
        return logits, None


def _pick_logps(logits: Tensor, targets: Tensor, *, with_squares: bool) -> tuple[Tensor, ...]:
    """Compute the fields of `TokenLogps` for targets, (N,), from logits, (N, V), which the backward pass overwrites."""
    logps = _PickedLogSoftmax.apply(logits, targets.to(logits.device))
    if not with_squares:
        return (logps,)
    squares = [(2 * _log_softmax(rows)).logsumexp(-1) for (rows,) in _in_pieces(logits.detach())]
    return logps, torch.cat(squares)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _in_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all tensors alike by rows, into pieces whose logits fit into a CPU's cache; on a GPU into one piece."""
    n_rows = LOGITS_IN_CACHE // logits.shape[1] if is_cpu(logits.device) else len(logits)
    return zip(*(tensor.split(max(1, n_rows)) for tensor in (logits, *others)), strict=True)


# A chunk has this many logits, by the type of the device: 134 MB in float32 on a CPU. A GPU has fewer chunks, as each
# reads the head's weight and writes a gradient for it.
LOGITS_AT_ONCE = {"cpu": 2**25, "gpu": 2**27}
LOGITS_IN_CACHE = 2**20  # logits that fit into a CPU's cache


def token_logps(model: Any, hidden: Tensor, targets: Tensor, *, with_squares: bool) -> TokenLogps:
    """Compute log-probabilities of `targets`, (N,), from hidden states, (N, H).

    They are computed in chunks, which the backward pass recomputes, so that few logits are in memory at once.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()

    def compute_logps(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden)
        # Scale them as the model does.
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        elif (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        elif (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        return _pick_logps(logits, targets, with_squares=with_squares)

    n_logits = len(targets) * config.vocab_size
    n_chunks = max(1, math.ceil(n_logits / LOGITS_AT_ONCE["gpu" if is_gpu(hidden.device) else "cpu"]))
    *earlier_chunks, last_chunk = zip(hidden.tensor_split(n_chunks), targets.tensor_split(n_chunks), strict=True)
    has_dropout = any(isinstance(module, nn.Dropout) for module in head.modules())  # only an adapted head has any
    by_chunk = [
        checkpoint(compute_logps, *chunk, use_reentrant=False, preserve_rng_state=has_dropout)
        for chunk in earlier_chunks
    ]
    # The backward pass begins with the last chunk's logits, so recomputing them would save no memory.
    by_chunk.append(compute_logps(*last_chunk))
    return TokenLogps(*map(torch.cat, zip(*by_chunk, strict=True)))


# --- rewards ----------------------------------------------------------------------------------------------------------


class ScalarHead(nn.Linear):
    """A head that computes in float32 or higher: in half precision a reward has only three digits."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x.to(dtype) * self.weight.to(dtype)).sum(-1, keepdim=True)  # autocast would round a matrix product


def find_scalar_head(model: Any) -> ScalarHead | None:
    """Return a reward model's head; None for a language model."""
    head = getattr(model, HEAD, None)
    return head if isinstance(head, ScalarHead) else None


def install_scalar_head(model: Any) -> None:
    """Make a model's head a `ScalarHead`; InputError unless it classifies sequences with one output."""
    head = getattr(model, HEAD, None)
    if type(head) is nn.Linear and head.out_features == 1 and head.bias is None:
        model.score = ScalarHead(head.in_features, 1, bias=False, device="meta")
        model.score.weight = head.weight
    elif not isinstance(head, ScalarHead):
        raise InputError(
            f"{type(model).__name__} is not a sequence classification model with a linear head `{HEAD}`, one output "
            f"and no bias, which loss=bradley_terry needs"
        )


def draw_head(model: Any, seed: int) -> Tensor:
    """Draw a head's weight, (1, H) in float32, as transformers does."""
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(1, model.score.in_features, generator=generator)
