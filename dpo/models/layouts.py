"""Layouts of examples in a forward pass, and checks of models' support.

`padded` is the layout of the reference implementation. `shared_prefix` gives the same log-probabilities from fewer
tokens (see `dpo/models/packing.py`).

In shapes, B is the number of examples, and "sides" the largest number of responses of an example: 2 for pairs, 1 for
SFT. Ranked lists may have different numbers of responses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.data.examples import Example, make_labels
from dpo.errors import InputError, one_sentence
from dpo.losses import IGNORE_INDEX, ROLES
from dpo.models.logprobs import (
    TokenLogps,
    packed_logps,
    packed_rewards,
    sequence_logps,
    sequence_rewards,
    token_logps,
)
from dpo.models.packing import NONE, Packed, by_side, pack, split_evenly
from dpo.models.scalar_head import find_scalar_head
from dpo.parallel.sharding import run_as_forward
from dpo.settings.choices import VARLEN
from dpo.system.arithmetic import without_tf32


@dataclass
class PaddedRows:
    """Each response in its own row, after its prompt.

    The rows of all first responses (in pairs, the chosen ones) come before those of all second responses.
    """

    input_ids: torch.Tensor  # (rows, T) int64
    attention_mask: torch.Tensor  # (rows, T) int64: 1 for tokens, 0 for padding
    labels: torch.Tensor  # (rows, T) int64: token ids of responses, IGNORE_INDEX for prompts and padding
    sides: int  # responses per example
    # (sides, B) int64: the row of each response, or any row for a missing one; None if no response is missing
    row_index: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PaddedRows:
        """Apply `change`, which moves or pins a tensor, to every tensor."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)

    def by_side(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange values (rows, ...) as (sides, B, ...)."""
        if self.row_index is None:
            return values.unflatten(0, (self.sides, -1))
        return values[self.row_index]


class Microbatch(NamedTuple):
    """The inputs of one forward pass.

    All processes take part in every forward pass, so a process without examples (B = 0) feeds the first example of the
    global batch, and discards the result.
    """

    indices: torch.Tensor  # (B,) int64: indices of the examples in the global batch
    lengths: torch.Tensor  # (sides, B) int64: scored tokens per response
    roles: torch.Tensor  # (sides, B) int64: each response's role, as an index into ROLES; NONE without a response
    inputs: PaddedRows | Packed
    offsets: torch.Tensor | None = None  # (B,): `Scores.offset`; None without margins

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        indices: Sequence[int],
        lay_out: Callable[[Sequence[Example]], PaddedRows | Packed],
    ) -> Microbatch:
        """Make a microbatch of the examples at `indices` of a global batch."""
        fed_examples = [examples[i] for i in indices] or examples[:1]
        lengths = torch.from_numpy(by_side([example.n_scored for example in fed_examples], fill=0))
        role_indices = [[ROLES.index(role) for role in example.roles] for example in fed_examples]
        roles = torch.from_numpy(by_side(role_indices, fill=NONE))
        n_examples = len(indices)  # 0 if the fed example is only a stand-in
        offsets = None
        if examples[0].margin is not None:
            margins = [example.margin for example in fed_examples[:n_examples]]
            offsets = torch.tensor(margins, dtype=torch.float32)
        return cls(
            torch.tensor(indices, dtype=torch.int64),
            lengths[:, :n_examples],
            roles[:, :n_examples],
            lay_out(fed_examples),
            offsets,
        )

    def to(self, device: torch.device | str) -> Microbatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the forward pass, including padding."""
        return self.inputs.input_ids.numel()

    def pin_memory(self) -> Microbatch:
        return self.map(torch.Tensor.pin_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
        offsets = None if self.offsets is None else change(self.offsets)
        return Microbatch(
            change(self.indices), change(self.lengths), change(self.roles), self.inputs.map(change), offsets
        )

    def by_role(self, values: torch.Tensor, roles: Sequence[str]) -> dict[str, torch.Tensor]:
        """Split one value per response, (sides, B), into (B,) for each role.

        The value is 0 where an example has no response of the role.
        """
        # an example has at most one response of a role, so the sum over sides picks its value
        return {role: values.where(self.roles == ROLES.index(role), 0).sum(0) for role in roles}


class Padded:
    """Each response in its own row, padded to the global batch's longest.

    Padding is on the right, where causal attention does not look: unless `masked`, the model gets no mask. With a mask,
    transformers uses slower kernels, and makes the host wait in every forward to read the mask's values.
    """

    def __init__(self, *, masked: bool = True) -> None:
        self.masked = masked

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """Split a global batch into `parts` microbatches per process.

        Returns the microbatches of process `rank` of `size` processes. Processes take microbatches in turn.
        """
        length = max(len(e.prompt) + len(response) for e in examples for response in e.responses)
        indices_of_all = np.array_split(np.arange(len(examples)), parts * size)  # the last arrays may be empty
        lay_out = partial(pad, length=length)
        return [Microbatch.of(examples, indices.tolist(), lay_out) for indices in indices_of_all[rank::size]]

    def forward(self, model: torch.nn.Module, inputs: PaddedRows, *, with_squares: bool = False) -> TokenLogps:
        """Log-probabilities of each example's responses by token, (sides, B, T).

        A reward model gives the responses' rewards instead, (sides, B, 1).
        """
        input_ids, labels = inputs.input_ids, inputs.labels
        attention_mask = inputs.attention_mask if self.masked else None
        if find_scalar_head(model) is not None:
            rewards = run_as_forward(model, sequence_rewards, input_ids, attention_mask, labels)  # (rows,)
            by_row = TokenLogps(rewards[:, None])
        else:
            by_row = sequence_logps(model, input_ids, attention_mask, labels, with_squares=with_squares)  # (rows, T)
        return by_row.map(lambda values: inputs.by_side(values.to(input_ids.device)))


def pad(examples: Sequence[Example], length: int) -> PaddedRows:
    """Lay out examples in rows of `length` tokens, padded on the right.

    The padding is token 0, which the attention mask hides.
    """
    sides = max(len(example.responses) for example in examples)
    rows = []  # (prompt, response, cuts)
    row_index = np.zeros((sides, len(examples)), dtype=np.int64)
    for side in range(sides):
        for i, example in enumerate(examples):
            if side < len(example.responses):
                row_index[side, i] = len(rows)
                rows.append((example.prompt, *example.cut_responses[side]))
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for row, (prompt, response, cuts) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response)
        input_ids[row, :end] = (*prompt, *response)
        attention_mask[row, :end] = 1
        labels[row, start:end] = make_labels(response, cuts)
    has_all_responses = len(rows) == row_index.size
    return PaddedRows(
        torch.from_numpy(input_ids),
        torch.from_numpy(attention_mask),
        torch.from_numpy(labels),
        sides,
        None if has_all_responses else torch.from_numpy(row_index),
    )


class SharedPrefix:
    """Each prompt and each of its distinct responses once, packed into rows.

    `windows` maps each kind of attention layer to the number of tokens that its queries look back, None for all.
    The length of a row is a multiple of `alignment`. With `by_segments` there is one row, for `varlen_attention`. With
    `gives_rewards` the model is a reward model.
    """

    def __init__(
        self,
        windows: Mapping[str, int | None],
        *,
        max_length: int,
        alignment: int = 1,
        by_segments: bool = False,
        gives_rewards: bool = False,
    ) -> None:
        self.windows, self.alignment, self.gives_rewards = windows, alignment, gives_rewards
        self.max_tree_tokens = None if by_segments else max_tree_tokens(max_length)

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """Split as `Padded.split`, into microbatches with about equally many tokens."""
        # Consecutive parts have examples of about equal length. All processes compute `size` consecutive parts at the
        # same time, so none waits long for another.
        indices_of_all = split_evenly(examples, parts * size)
        return [Microbatch.of(examples, indices, self.pack) for indices in indices_of_all[rank::size]]

    def pack(self, examples: Sequence[Example], *, length: int | None = None) -> Packed:
        """Pack examples into rows of `length`; None: the cheapest length."""
        options = {"max_tree_tokens": self.max_tree_tokens, "alignment": self.alignment, "length": length}
        if not self.gives_rewards:
            return pack(examples, **options)
        # A reward is read at the last scored token itself, but `pack` lists the tokens before scored tokens, and leaves
        # out a response's last token. So append a token, and move the cuts by one: each scored token is then listed.
        longer = [
            e._replace(
                responses=tuple((*response, 0) for response in e.responses),
                cuts=tuple(tuple(cut + 1 for cut in cuts) for cuts in e.cuts),
            )
            for e in examples
        ]
        return pack(longer, **options).keep_last_scored()

    def forward(self, model: torch.nn.Module, inputs: Packed, *, with_squares: bool = False) -> TokenLogps:
        """Log-probabilities of each example's responses by token, (sides, B, T).

        A reward model gives the responses' rewards instead, (sides, B, 1).
        """
        if self.gives_rewards:
            rewards = run_as_forward(model, packed_rewards, inputs, self.windows)  # (U,)
            by_response = TokenLogps(rewards[:, None])
        else:
            score = partial(packed_logps, with_squares=with_squares)
            by_response = run_as_forward(model, score, inputs, self.windows)  # (U, T)
        return by_response.map(lambda values: values.to(inputs.response_index.device)[inputs.response_index])


def max_tree_tokens(max_length: int) -> int:
    """The largest number of tokens in a prompt's tree.

    A prompt with two responses always fits. Rows are at most twice as long (`pack`).
    """
    return 2 * max_length


GPU_ALIGNMENT = 64  # tokens; with other row lengths, CUDA's fused attention copies the mask in every layer
Layout = Padded | SharedPrefix


class Longest(NamedTuple):
    """The largest numbers of tokens in a run."""

    example: int  # in a prompt with one response
    row: int  # in a shared-prefix row

    @classmethod
    def of(cls, example: int, n_examples: int, max_length: int, *, n_responses: int = 2) -> Longest:
        """Bounds for microbatches of up to `n_examples` examples.

        `example` is the number of tokens in the longest prompt with one response. An example has up to
        `n_responses` responses.
        """
        n_unshared = max(2, n_responses) * n_examples * example  # tokens if each response had its own prompt
        return cls(example, min(n_unshared, 2 * max_tree_tokens(max_length)))


def choose_layout(
    name: str,
    model: Any,
    *,
    max_length: int,
    compute_dtype: torch.dtype,
    longest: Longest | None = None,
    on_any_process: Callable[[bool], bool] = bool,
) -> tuple[Layout, str | None]:
    """Choose the layout `name`, or `Padded` with a message that says why.

    Compares `shared_prefix` with `padded` by running the model on short pairs, and on pairs as long as the `longest` of
    the run (None: as `max_length` allows). `on_any_process(here)` returns whether `here` is true on any process that
    shares the model.
    """
    layout, reason = layout_by_rules(name, model, max_length=max_length)
    if isinstance(layout, SharedPrefix):
        longest = longest or Longest(max_length, 2 * max_tree_tokens(max_length))
        tolerance = TOLERANCES.get(compute_dtype, HALF_PRECISION_TOLERANCE)
        reason = _find_difference(model, layout, longest, tolerance)
        # processes that share the model must agree, as the order of their collectives follows from the layout
        if on_any_process(reason is not None):
            reason = reason or "does not support shared prefixes on another process"
            layout, reason = _fall_back(model, reason, Padded())
    message = None if reason is None else f"layout=padded: {type(model).__name__} {reason}"
    return layout, message


def layout_by_rules(name: str, model: Any, *, max_length: int) -> tuple[Layout, str | None]:
    """Choose a layout by the model's class and config, without running it.

    Returns `Padded` and the reason if the model does not support the layout called `name`.
    """
    try:
        windows_or_reason = find_windows(model, max_length)
    except Exception as error:  # a foreign config may hold anything
        windows_or_reason = f"has a config unlike those of transformers: {one_sentence(error)}"
    # A model that the rules do not support may look at padding, so it gets a mask. Under flash_attention_2 the rules
    # support no model, so they do not show that this model looks at padding.
    is_unsupported = isinstance(windows_or_reason, str)
    needs_mask = is_unsupported and model.config._attn_implementation != "flash_attention_2"
    if name == "padded":
        return Padded(masked=needs_mask), None
    if isinstance(windows_or_reason, str):
        return _fall_back(model, windows_or_reason, Padded(masked=needs_mask))
    on_gpu = model.get_input_embeddings().weight.device.type == "cuda"
    by_segments = model.config._attn_implementation == VARLEN
    alignment = GPU_ALIGNMENT if on_gpu else 1
    options = {"by_segments": by_segments, "gives_rewards": find_scalar_head(model) is not None}
    return SharedPrefix(windows_or_reason, max_length=max_length, alignment=alignment, **options), None


def _fall_back(model: Any, reason: str, padded: Padded) -> tuple[Layout, str]:
    """Choose padded rows; InputError for attention that cannot use them."""
    if model.config._attn_implementation == VARLEN:
        raise InputError(f"model.attn_implementation={VARLEN}: {type(model).__name__} {reason}: use sdpa")
    return padded, reason


def find_windows(model: Any, max_length: int) -> dict[str, int | None] | str:
    """The window of each kind of attention layer, in tokens.

    None stands for all tokens. Returns the reason, as a str, if the model does not support the shared-prefix layout.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "takes no positions"
    config = model.config.get_text_config()
    if config._attn_implementation not in ("eager", "sdpa", "flex_attention", VARLEN):
        return f"takes no mask of its own with {config._attn_implementation}"
    if getattr(config, "alibi", False):
        return "counts columns for positions (ALiBi)"
    if getattr(model, "_is_stateful", False):
        return "is recurrent"
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"has layers of another kind ({', '.join(sorted(unknown))})"
    # a packed row is longer than any example, so a limit in columns would hide tokens that an example alone sees
    max_row_length = 2 * max_tree_tokens(max_length)
    for key in COLUMN_LIMIT_KEYS:
        limit = getattr(config, key, None)
        if isinstance(limit, int) and 0 < limit < max_row_length:
            return f"attends locally ({key}={limit})"
    if any(_is_mask(buffer) and buffer.shape[-1] < max_row_length for buffer in model.buffers()):
        return "has masks of its own, which are smaller than the longest row"
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_length or kinds == {"full_attention"}:
        return {"full_attention": None}
    if len(kinds) == 2:
        return {"full_attention": None, "sliding_attention": window}
    return {"sliding_attention": window}


# Config keys that limit attention to a number of columns, whatever the positions and the mask say. If a model has such
# a key that is not in this list, `_find_difference` finds the difference on rows as long as the longest of the run.
COLUMN_LIMIT_KEYS = ("window_size", "attention_window_size", "attention_chunk_size", "keep_window_size")


def _is_mask(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a square mask, like GPT-Neo's causal mask."""
    return buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and buffer.numel() == buffer.shape[-1] ** 2


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative difference of summed log-probabilities
HALF_PRECISION_TOLERANCE = 0.02  # the same for bfloat16 and float16


@torch.no_grad()
def _find_difference(model: Any, layout: SharedPrefix, longest: Longest, tolerance: float) -> str | None:
    """Describe how log-probabilities, or rewards, differ between the layouts, if they do.

    Compares two short pairs, then two pairs as long as the longest of the run.
    """
    vocab_size = model.config.get_text_config().vocab_size
    largest_window = max((window or 0 for window in layout.windows.values()), default=0)
    # numbers of tokens in (prompt, chosen, rejected); prompts of short pairs are longer than every window
    short_pairs = _make_pairs(vocab_size, [(largest_window + 5, 4, 6), (largest_window + 2, 7, 3)])
    n = max(longest.example, 12)
    # in half precision rounding may change a sum over 3 tokens by more than the tolerance, but not a longer sum
    n_second = min(n - 3, 60)
    long_pairs = _make_pairs(vocab_size, [(5, n - 5, n - 6), (2, n_second + 1, n_second)])
    cases = (  # pairs, how to sum their log-probabilities in the padded layout, length of the packed rows
        (short_pairs, _sum_logps, None),
        # logits of the long pairs might not fit into memory; a reward model has none
        (long_pairs, _sum_logps if layout.gives_rewards else _sum_logps_in_chunks, max(longest.row, 2 * n)),
    )
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with without_tf32():
            for pairs, sum_padded, row_length in cases:
                [padded] = Padded().split(pairs, 1)
                packed = layout.pack(pairs, length=row_length).map(lambda tensor: tensor.to(device))
                try:
                    expected = sum_padded(model, padded.to(device).inputs)
                    actual = layout.forward(model, packed).logps.sum(-1)
                except (torch.OutOfMemoryError, InputError):  # not the layout's fault
                    raise
                except Exception as error:  # an unsuitable model may raise anything
                    return f"refuses shared prefixes: {one_sentence(error)}"
                error, size = (actual - expected).abs(), expected.abs()
                if layout.gives_rewards:  # a reward may be near 0, and is not a sum, whose rounding errors would cancel
                    size = 5 * size.max()
                if not (error <= tolerance * size).all():  # also if an error is NaN
                    what = "rewards" if layout.gives_rewards else "log-probabilities"
                    return f"gives {what} with shared prefixes that are off by {(error / size).max().item():.2g}"
    finally:
        model.train(was_training)
    return None


def _sum_logps(model: Any, rows: PaddedRows) -> torch.Tensor:
    """Summed log-probabilities of responses, (sides, B)."""
    return Padded().forward(model, rows).logps.sum(-1)


def _sum_logps_in_chunks(model: Any, rows: PaddedRows) -> torch.Tensor:
    """The sums of `_sum_logps`, from the logits of few tokens at once.

    The logits of rows as long as the longest of the run might not fit into memory.
    """
    return rows.by_side(run_as_forward(model, _sum_rows_in_chunks, rows))


def _sum_rows_in_chunks(model: Any, rows: PaddedRows) -> torch.Tensor:
    """Summed log-probabilities of each row's labels, (rows,)."""
    labels = rows.labels
    hidden = model.base_model(rows.input_ids, attention_mask=rows.attention_mask, use_cache=False).last_hidden_state
    row, column = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)  # of the tokens that predict a label
    targets = labels[row, column + 1]
    logps, _ = token_logps(model, hidden[row.to(hidden.device), column.to(hidden.device)], targets)
    return logps.new_zeros(len(labels)).index_add_(0, row.to(logps.device), logps).to(labels.device)


def _make_pairs(vocab_size: int, lengths: Sequence[tuple[int, int, int]]) -> list[Example]:
    """Pairs of random tokens.

    `lengths` has for each pair the number of tokens in prompt, chosen and rejected response.
    """
    generator = torch.Generator().manual_seed(0)

    def draw_tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (n,), generator=generator).tolist())

    return [
        Example(draw_tokens(n_prompt), (draw_tokens(n_chosen), draw_tokens(n_rejected)))
        for n_prompt, n_chosen, n_rejected in lengths
    ]
