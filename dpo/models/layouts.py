"""Layouts of examples for the model, and which of them it supports.

`padded` is the reference implementation's; `shared_prefix` gives the same numbers from a fraction of the tokens (see
`dpo/models/packing.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.data.examples import Example
from dpo.errors import one_sentence
from dpo.losses import IGNORE_INDEX, ROLES
from dpo.models.logprobs import TokenLogps, packed_logps, sequence_logps, token_logps
from dpo.models.packing import Packed, pack, split_evenly
from dpo.parallel.sharding import run_as_forward
from dpo.system.arithmetic import without_tf32


@dataclass
class PaddedRows:
    """Each response in its own row after its prompt.

    First all chosen responses (under SFT the targets), then all rejected ones.
    """

    input_ids: torch.Tensor  # (sides * B, T), int64 like the others
    attention_mask: torch.Tensor
    labels: torch.Tensor  # IGNORE_INDEX where nothing is scored
    sides: int

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PaddedRows:
        """Apply `change` to every tensor, to move or pin it."""
        return PaddedRows(change(self.input_ids), change(self.attention_mask), change(self.labels), self.sides)


class Microbatch(NamedTuple):
    """The inputs of one forward pass.

    All processes take part in every forward, so a process without examples (B = 0) feeds the first of the batch and
    discards the result.
    """

    indices: torch.Tensor  # (B,) int64, of the examples in the global batch
    lengths: torch.Tensor  # (sides, B) int64: scored tokens per response
    roles: torch.Tensor  # (sides, B) int64: each response's role, as an index into ROLES
    inputs: PaddedRows | Packed

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        indices: Sequence[int],
        lay_out: Callable[[Sequence[Example]], PaddedRows | Packed],
    ) -> Microbatch:
        fed = [examples[i] for i in indices] or examples[:1]
        lengths = torch.tensor([example.n_scored for example in fed]).T[:, : len(indices)]
        roles = torch.tensor([[*map(ROLES.index, example.roles)] for example in fed]).T[:, : len(indices)]
        return cls(torch.tensor(indices, dtype=torch.int64), lengths, roles, lay_out(fed))

    def to(self, device: torch.device | str) -> Microbatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def n_tokens(self) -> int:
        """The number of tokens in a forward, padding included."""
        return self.inputs.input_ids.numel()

    def pin_memory(self) -> Microbatch:
        return self.map(torch.Tensor.pin_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
        return Microbatch(change(self.indices), change(self.lengths), change(self.roles), self.inputs.map(change))

    def by_role(self, values: torch.Tensor, roles: Sequence[str]) -> dict[str, torch.Tensor]:
        """Split values of responses, (sides, B), by role into (B,).

        0 where an example has no response of that role.
        """
        return {role: values.where(self.roles == ROLES.index(role), 0).sum(0) for role in roles}


class Padded:
    """Each response in its own row, padded to the global batch's longest.

    Padding is on the right, where causal attention does not look: unless `masked`, the model gets no mask. transformers
    would read a mask's values in every forward, for which the host waits, and attend with slower kernels.
    """

    def __init__(self, *, masked: bool = True) -> None:
        self.masked = masked

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """Split a global batch into `parts` microbatches per process.

        Returns the microbatches of process `rank` among `size`: numbers `rank`, `rank + size`, ...
        """
        length = max(len(e.prompt) + len(response) for e in examples for response in e.responses)
        shares = np.array_split(np.arange(len(examples)), parts * size)[rank::size]  # the last may be empty
        return [Microbatch.of(examples, share.tolist(), partial(pad, length=length)) for share in shares]

    def forward(self, model: torch.nn.Module, inputs: PaddedRows, *, with_squares: bool = False) -> TokenLogps:
        """Score each example's responses, (sides, B, T)."""
        rows = inputs.input_ids, inputs.attention_mask if self.masked else None, inputs.labels
        by_row = sequence_logps(model, *rows, with_squares=with_squares)
        return by_row.map(lambda values: values.to(inputs.input_ids.device).unflatten(0, (inputs.sides, -1)))


def pad(examples: Sequence[Example], length: int) -> PaddedRows:
    """Lay out rows of `length` tokens, padded on the right.

    The padding is token 0, which the mask hides.
    """
    sides = len(examples[0].responses)
    input_ids, attention_mask = np.zeros((2, sides * len(examples), length), dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    rows = [(example.prompt, example.responses[side]) for side in range(sides) for example in examples]
    for i, (prompt, response) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response)
        input_ids[i, :end] = (*prompt, *response)
        attention_mask[i, :end] = 1
        labels[i, start:end] = response
    return PaddedRows(*map(torch.from_numpy, (input_ids, attention_mask, labels)), sides=sides)


class SharedPrefix:
    """Each prompt and each of its distinct responses once, packed into rows.

    Microbatches have about equally many tokens. `windows` maps the kinds of the model's attention layers to the number
    of tokens they look back, None for all; a row's length is a multiple of `alignment`.
    """

    def __init__(self, windows: Mapping[str, int | None], *, max_length: int, alignment: int = 1) -> None:
        self.windows, self.row_tokens = windows, row_tokens(max_length)
        self.alignment = alignment

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        # neighbours are about equally long and run at the same time, so that no process waits for another
        shares = split_evenly(examples, parts * size)[rank::size]
        return [Microbatch.of(examples, share, self.pack) for share in shares]

    def pack(self, examples: Sequence[Example]) -> Packed:
        return pack(examples, row_tokens=self.row_tokens, alignment=self.alignment)

    def forward(self, model: torch.nn.Module, inputs: Packed, *, with_squares: bool = False) -> TokenLogps:
        """Score each example's responses, (sides, B, T)."""
        by_response = run_as_forward(model, partial(packed_logps, with_squares=with_squares), inputs, self.windows)
        return by_response.map(lambda values: values.to(inputs.response_index.device)[inputs.response_index])


def row_tokens(max_length: int) -> int:
    """The largest number of tokens in a prompt's tree.

    A prompt with two responses always fits. Rows are at most twice as long (`pack`).
    """
    return 2 * max_length


GPU_ALIGNMENT = 64  # tokens; CUDA's fused attention copies a mask with unaligned rows in every layer
Layout = Padded | SharedPrefix


class Longest(NamedTuple):
    """The largest numbers of tokens in a run."""

    example: int  # in a prompt with one response
    row: int  # in a shared-prefix row

    @classmethod
    def of(cls, example: int, n_examples: int, max_length: int) -> Longest:
        """Bounds for microbatches of up to `n_examples` examples.

        The longest example has `example` tokens.
        """
        return cls(example, min(2 * n_examples * example, 2 * row_tokens(max_length)))


def choose_layout(
    name: str,
    model: Any,
    *,
    max_length: int,
    compute_dtype: torch.dtype,
    longest: Longest | None = None,
    vetoed: Callable[[bool], bool] = bool,
) -> tuple[Layout, str | None]:
    """Choose the layout called `name`, or `Padded` and a message why.

    Runs two pairs through the model in both layouts, short and as long as the `longest` of the run (None: as
    `max_length` allows). `vetoed(here)` returns whether `here` is true on any process that shares the model.
    """
    layout, reason = layout_by_rules(name, model, max_length=max_length)
    if isinstance(layout, SharedPrefix):
        longest = longest or Longest(max_length, 2 * row_tokens(max_length))
        reason = _find_difference(model, layout, longest, TOLERANCES.get(compute_dtype, HALF_PRECISION))
        if vetoed(reason is not None):  # processes that share the model must agree: their collectives follow the layout
            layout, reason = Padded(), reason or "differs on another process"
    return layout, reason and f"layout=padded: {type(model).__name__} {reason}"


def layout_by_rules(name: str, model: Any, *, max_length: int) -> tuple[Layout, str | None]:
    """Choose a layout by the model's class and config alone.

    Returns `Padded` and the reason if the model rules the layout out. Runs nothing.
    """
    windows = find_windows(model, max_length)
    is_unknown = isinstance(windows, str) and model.config._attn_implementation != "flash_attention_2"
    if name == "padded":
        return Padded(masked=is_unknown), None
    if isinstance(windows, str):
        return Padded(masked=is_unknown), windows
    on_gpu = model.get_input_embeddings().weight.device.type == "cuda"
    return SharedPrefix(windows, max_length=max_length, alignment=GPU_ALIGNMENT if on_gpu else 1), None


def find_windows(model: Any, max_length: int) -> dict[str, int | None] | str:
    """The window of each kind of attention layer, in tokens.

    None stands for all tokens. Returns a reason instead if the model rules the layout out.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "takes no positions"
    config = model.config.get_text_config()
    if config._attn_implementation not in ("eager", "sdpa", "flex_attention"):
        return f"takes no mask of its own with {config._attn_implementation}"
    if getattr(config, "alibi", False):
        return "counts columns for positions (ALiBi)"
    if getattr(model, "_is_stateful", False):
        return "is recurrent"
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"has layers of another kind ({', '.join(sorted(unknown))})"
    if kind := _find_length_dependent_rope(config, max_length):
        return f"has rotary frequencies that depend on a batch's longest row ({kind})"
    # a packed row is longer than any example: masks over columns would hide what an example alone sees
    row = 2 * row_tokens(max_length)
    for key in COUNTS_COLUMNS:
        if isinstance(size := getattr(config, key, None), int) and 0 < size < row:
            return f"attends locally ({key}={size})"
    if any(_is_mask(buffer) and buffer.shape[-1] < row for buffer in model.buffers()):
        return "has masks of its own, which are smaller than the longest row"
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_length or kinds == {"full_attention"}:
        return {"full_attention": None}
    if len(kinds) == 2:
        return {"full_attention": None, "sliding_attention": window}
    return {"sliding_attention": window}


# config keys for attention over a fixed number of columns, whatever positions and masks say; for a key that is not in
# this list, log-probabilities differ on rows as long as the run's, and `_find_difference` sees it
COUNTS_COLUMNS = ("window_size", "attention_window_size", "attention_chunk_size", "keep_window_size")


def _is_mask(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a square mask, like GPT-Neo's causal mask."""
    return buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and buffer.numel() == buffer.shape[-1] ** 2


def _find_length_dependent_rope(config: Any, max_length: int) -> str | None:
    """Name the kind of rotary positions whose frequencies depend on length.

    They change once a row exceeds the length of pretraining. None for other kinds.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [nested for nested in parameters.values() if isinstance(nested, dict)]
    limits = [getattr(config, f"{key}max_position_embeddings", None) for key in ("original_", "")]
    for rope in (parameters, *by_layer_type):
        original = next((n for n in (rope.get("original_max_position_embeddings"), *limits) if n), max_length)
        if rope.get("rope_type") in ("dynamic", "longrope") and max_length > original:
            return rope["rope_type"]
    return None


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative difference of summed log-probabilities
HALF_PRECISION = 0.02  # the same for other dtypes


@torch.no_grad()
def _find_difference(model: Any, layout: SharedPrefix, longest: Longest, tolerance: float) -> str | None:
    """Compare log-probabilities of both layouts; return the difference, or None.

    The pairs are short, and then as long as the run's longest.
    """
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    window = max((size or 0 for size in layout.windows.values()), default=0)
    short = _two_pairs(vocabulary, (window + 5, 4, 6), (window + 2, 7, 3))  # prompts longer than every window
    n = max(longest.example, 12)  # at least the tokens of the second pair
    long = _two_pairs(vocabulary, (5, n - 5, n - 6), (2, 7, 3))
    # pairs, the function that sums their log-probabilities in the plain layout, the length of a packed row
    cases = ((short, _sum_padded, None), (long, _sum_scored, max(longest.row, 2 * n)))
    training = model.training
    model.eval()
    try:
        with without_tf32():
            for pairs, sum_plain, row_length in cases:
                [padded] = Padded().split(pairs, 1)
                packed = pack(pairs, row_tokens=2 * n, alignment=layout.alignment, length=row_length)
                expected = sum_plain(model, padded.to(device).inputs)
                sums = layout.forward(model, packed.map(lambda x: x.to(device))).logps.sum(-1)
                difference = (sums - expected).abs()
                if not (difference <= tolerance * expected.abs()).all():  # true for NaN too
                    off = (difference / expected.abs()).max().item()
                    return f"gives log-probabilities with shared prefixes that are off by {off:.2g}"
    except torch.OutOfMemoryError:  # a RuntimeError, but no fault of the layout
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:  # from unsuitable models
        return f"refuses shared prefixes: {one_sentence(error)}"
    finally:
        model.train(training)
    return None


def _sum_padded(model: Any, rows: PaddedRows) -> torch.Tensor:
    return Padded().forward(model, rows).logps.sum(-1)


def _sum_scored(model: Any, rows: PaddedRows) -> torch.Tensor:
    """Sum as `_sum_padded` does, from logits of scored tokens alone.

    All logits of a row as long as the run's longest might not fit into memory.
    """
    return run_as_forward(model, _scored_logps, rows).unflatten(0, (rows.sides, -1))


def _scored_logps(model: Any, rows: PaddedRows) -> torch.Tensor:
    labels = rows.labels
    hidden = model.base_model(rows.input_ids, attention_mask=rows.attention_mask, use_cache=False).last_hidden_state
    row, column = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    logps, _ = token_logps(model, hidden[row.to(hidden.device), column.to(hidden.device)], labels[row, column + 1])
    return logps.new_zeros(len(labels)).index_add_(0, row.to(logps.device), logps).to(labels.device)


def _two_pairs(vocabulary: int, *lengths: tuple[int, int, int]) -> list[Example]:
    """Make pairs of random tokens.

    `lengths` has the tokens of prompt, chosen and rejected response for each.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (n,), generator=generator).tolist())

    return [Example(draw(prompt), (draw(chosen), draw(rejected))) for prompt, chosen, rejected in lengths]
