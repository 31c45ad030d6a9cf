"""Layouts of examples in a forward pass.

In shapes, B is the number of examples, and "sides" the largest number of responses of an example: 2 for pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpo.data.examples import Example
from dpo.errors import InputError, is_memory_error, one_sentence
from dpo.losses import RESPONSE_ROLES
from dpo.models.logprobs import TokenLogps, find_scalar_head, packed_logps, padded_logps
from dpo.models.packing import NONE, Packed, Windows, by_side, pack, pad, split_evenly
from dpo.parallel.sharding import find_class_before_fsdp, run_as_forward
from dpo.settings.keys import VARLEN
from dpo.system.arithmetic import without_compilation, without_tf32
from dpo.system.host import is_gpu


class Microbatch(NamedTuple):
    """The examples of one forward pass, and its input.

    A rank without examples (B = 0) runs a dummy example, so that collectives match.
    """

    indices: Tensor  # (B,) int64: indices of the examples in the global batch
    lengths: Tensor  # (sides, B) int64: scored tokens per response
    roles: Tensor  # (sides, B) int64: each response's role, as an index into RESPONSE_ROLES; NONE without a response
    inputs: Packed
    offsets: Tensor | None = None  # (B,): `Scores.offset`; None without margins

    @classmethod
    def of(cls, examples: Sequence[Example], indices: Sequence[int], lay_out: Callable) -> Microbatch:
        """Make a microbatch of the examples at `indices`; `lay_out` makes `inputs` of a list of examples."""
        n = len(indices)
        fed = [examples[i] for i in indices] or examples[:1]  # one dummy if there are none
        lengths = by_side([example.n_scored for example in fed], fill=0)
        roles = by_side([list(map(RESPONSE_ROLES.index, example.roles)) for example in fed], fill=NONE)
        offsets = None
        if examples[0].margin is not None:
            offsets = torch.tensor([example.margin for example in fed[:n]], dtype=torch.float32)
        return cls(torch.tensor(indices, dtype=torch.int64), lengths[:, :n], roles[:, :n], lay_out(fed), offsets)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the rows, including padding."""
        return self.inputs.input_ids.numel()

    def to(self, device: torch.device | str) -> Microbatch:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), self)

    def pin_memory(self) -> Microbatch:
        return tree_map_only(Tensor, Tensor.pin_memory, self)

    def by_role(self, values: Tensor, roles: Sequence[str]) -> dict[str, Tensor]:
        """Arrange values of responses, (sides, B), as (B,) for each role, with 0 where one is missing."""
        # An example has at most one response of a role, so the sum over sides picks its value.
        return {role: values.where(self.roles == RESPONSE_ROLES.index(role), 0).sum(0) for role in roles}


@dataclass
class Padded:
    """Each response in a row of its own, after its prompt, padded on the right to the global batch's longest row.

    Causal attention does not look at padding on the right, so only other models need the mask that `masked` adds. With
    a mask, transformers uses slower kernels, and makes the host wait for the device.
    """

    masked: bool = True
    gives_rewards: bool = False  # the model is a reward model

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """Split a global batch into `parts` microbatches for each of `size` processes; return those of `rank`."""
        length = max(len(e.prompt) + len(response) for e in examples for response in e.responses)
        indices_of_all = np.array_split(np.arange(len(examples)), parts * size)  # the last arrays may be empty
        lay_out = partial(pad, length=length, for_rewards=self.gives_rewards)
        return [Microbatch.of(examples, indices.tolist(), lay_out) for indices in indices_of_all[rank::size]]

    def forward(
        self, model: nn.Module, inputs: Packed, *, with_squares: bool = False, in_chunks: bool = False
    ) -> TokenLogps:
        """Compute log-probabilities of responses by scored token, (sides, B, T), or their rewards, (sides, B, 1).

        Those of a response begin in column 0 and are followed by zeros. A missing response gets the values of another
        one. `with_squares` also computes `TokenLogps.squares`. With `in_chunks`, logits are never all in memory.
        """
        attention_mask = inputs.padding_mask if self.masked else None
        if self.gives_rewards or in_chunks:
            # This calls only the model's base and head, for which FSDP would gather no weights by itself.
            return run_as_forward(model, packed_logps, inputs, None, attention_mask)
        return padded_logps(model, inputs, attention_mask, with_squares=with_squares)


@dataclass
class SharedPrefix:
    """Each prompt and each of its distinct responses once, packed into rows."""

    windows: Windows
    max_length: int  # the most tokens of a prompt and a response; unless `by_segments`, a row has up to 4 times as many
    alignment: int = 1  # the length of a row is a multiple of it
    by_segments: bool = False  # one row, for `attend_by_segments`
    gives_rewards: bool = False  # the model is a reward model

    def split(self, examples: Sequence[Example], parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """Split as `Padded.split` does, but into microbatches with about equally many tokens."""
        # Neighbours in this list have examples of about equal length. The processes compute `size` neighbours at the
        # same time, one each, so none waits long for another.
        indices_of_all = split_evenly(examples, parts * size)
        lay_out = partial(
            pack,
            max_tree_tokens=None if self.by_segments else 2 * self.max_length,
            alignment=self.alignment,
            for_rewards=self.gives_rewards,
        )
        return [Microbatch.of(examples, indices, lay_out) for indices in indices_of_all[rank::size]]

    def forward(self, model: nn.Module, inputs: Packed, *, with_squares: bool = False) -> TokenLogps:
        """Compute the same as `Padded.forward`."""
        return run_as_forward(model, partial(packed_logps, with_squares=with_squares), inputs, self.windows)


GPU_ALIGNMENT = 64  # tokens; with other row lengths, CUDA's fused attention copies the mask in every layer
Layout = Padded | SharedPrefix


def choose_layout(
    name: str,
    model: Any,
    *,
    max_length: int,
    compute_dtype: torch.dtype,
    reference: Any = None,
    longest: int | None = None,
    n_responses: int = 4,
    on_any_process: Callable = bool,
) -> tuple[Layout, str | None]:
    """Return the layout `name` and None, or `Padded` and the reason if the model does not support that layout.

    Where the rules allow shared prefixes, the model is run on pairs in both layouts, and must give the same numbers.
    Some pairs are as long as the run's: `longest` tokens (None: `max_length`), `n_responses` in a microbatch.
    `on_any_process(here)` returns whether `here` is true on any process. A `reference` of another class is a reason
    too, as it may not support shared prefixes. If the model attends by segments, the reason is raised as InputError.
    """
    layout, reason = layout_by_rules(name, model, max_length=max_length)
    model_class = find_class_before_fsdp(model)
    if isinstance(layout, SharedPrefix):
        if reference is not None and find_class_before_fsdp(reference) is not model_class:
            reason = f"has a reference of another class, {find_class_before_fsdp(reference).__name__}"
        else:
            reason = _find_difference(model, layout, longest or max_length, n_responses, compute_dtype)
            # Processes that share the model must agree on the layout, as the order of their collectives follows from
            # it.
            if on_any_process(reason is not None):
                reason = reason or "does not support shared prefixes on another process"
        if reason is not None:
            layout = Padded(gives_rewards=layout.gives_rewards)
    if reason is None:
        return layout, None
    reason = f"{model_class.__name__} {reason}"
    if model.config._attn_implementation == VARLEN:
        raise InputError(f"model.attn_implementation={VARLEN}: {reason}: use sdpa")
    return layout, f"layout=padded: {reason}"


def layout_by_rules(name: str, model: Any, *, max_length: int) -> tuple[Layout, str | None]:
    """Choose as `choose_layout` does, but by the model's class and config alone, without running it."""
    attention = model.config._attn_implementation
    windows = find_windows(model, max_length)
    gives_rewards = find_scalar_head(model) is not None
    if isinstance(windows, str):  # the reason why prefixes cannot be shared
        # A model that the rules do not support may look at padding, so it gets a mask. With flash_attention_2 the rules
        # support no model at all, which says nothing about this one.
        layout = Padded(masked=attention != "flash_attention_2", gives_rewards=gives_rewards)
        return layout, None if name == "padded" else windows
    if name == "padded":
        return Padded(masked=False, gives_rewards=gives_rewards), None
    return SharedPrefix(
        windows,
        max_length=max_length,
        alignment=GPU_ALIGNMENT if is_gpu(model.get_input_embeddings().weight.device) else 1,
        by_segments=attention == VARLEN,
        gives_rewards=gives_rewards,
    ), None


# Config keys that limit attention to a number of columns, whatever the positions and the mask say. `_find_difference`
# could miss such a limit: short rows do not reach it, and in long rows the rounding of half precision may hide it.
COLUMN_LIMIT_KEYS = ("window_size", "attention_window_size", "attention_chunk_size", "keep_window_size")


def find_windows(model: Any, max_length: int) -> Windows | str:
    """Map each kind of attention layer in the model to its window; return the reason if prefixes cannot be shared.

    The reason is a phrase that continues the model's name.
    """
    config = model.config.get_text_config()
    attention = config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ())
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "takes no positions"
    if attention not in ("eager", "sdpa", VARLEN):
        return f"takes no mask of its own with {attention}"
    if not kinds <= {"full_attention", "sliding_attention"}:
        return "has layers that are recurrent, or of another kind"
    for key in COLUMN_LIMIT_KEYS:
        limit = getattr(config, key, None)
        if isinstance(limit, int) and 0 < limit < 4 * max_length:  # the longest row
            return f"attends locally ({key}={limit})"
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_length:
        return {"full_attention": None}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds or {"sliding_attention"}}


# Relative differences of summed log-probabilities, by dtype; other dtypes are bfloat16 and float16.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_PRECISION_TOLERANCE = 0.02


@torch.no_grad()
def _find_difference(
    model: Any, layout: SharedPrefix, longest: int, n_responses: int, compute_dtype: torch.dtype
) -> str | None:
    """Run the model on pairs in `layout` and in `Padded`; return None if the results agree, else the reason.

    The reason is a phrase that continues the model's name. As in the run, the longest pair has `longest` tokens in its
    prompt and one response, and a packed row is as long as those of `n_responses` may be. The summed log-probabilities
    of a response may differ by the tolerance for `compute_dtype`, relative to their size; rewards by more.
    """
    tolerance = TOLERANCES.get(compute_dtype, HALF_PRECISION_TOLERANCE)
    longest_row = min(n_responses * longest, 4 * layout.max_length)
    window = max(window or 0 for window in layout.windows.values())
    n_longest = max(longest, 12)  # the lengths below must be positive
    # The second pair has shorter responses, but not very short ones: in bfloat16 a sum over 3 tokens once differed by
    # 0.049 of its value, probably by rounding. A measurement of other responses gave at most 0.0010 for 40 tokens, and
    # 0.0006 for 100 (docs/LOG.md at commit b9dda52f).
    n_short = min(n_longest - 3, 60)
    # The numbers of tokens in (prompt, chosen, rejected) of two pairs, the alignment of packed rows, and whether all
    # logits of the rows might not fit into memory.
    cases = (
        # Prompts are longer than any window, so a response does not attend to all of its prompt in a windowed layer.
        ([(window + 5, 4, 6), (window + 2, 7, 3)], layout.alignment, False),
        # A pair and a row are as long as the run's longest, as a model may compute differently in long rows. The
        # row, of one unit of this alignment, has room for the prompt and both responses of the longest pair.
        ([(5, n_longest - 5, n_longest - 6), (2, n_short + 1, n_short)], max(longest_row, 2 * n_longest), True),
    )
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw_tokens(n: int) -> tuple:
        return tuple(torch.randint(vocab_size, (n,), generator=generator).tolist())

    device = next(model.parameters()).device
    plain = Padded(gives_rewards=layout.gives_rewards)
    model.eval()
    try:
        with without_tf32(), without_compilation():
            for lengths, alignment, in_chunks in cases:
                pairs = [
                    Example(draw_tokens(prompt), (draw_tokens(chosen), draw_tokens(rejected)))
                    for prompt, chosen, rejected in lengths
                ]
                padded = plain.split(pairs, 1)[0].to(device).inputs
                packed = replace(layout, alignment=alignment).split(pairs, 1)[0].to(device).inputs
                expected = plain.forward(model, padded, in_chunks=in_chunks).logps.sum(-1)  # (sides, B)
                difference = (layout.forward(model, packed).logps.sum(-1) - expected).abs()
                scale = expected.abs()
                if layout.gives_rewards:
                    # A reward may be near 0, so its difference is relative to the largest reward. A reward is not a
                    # sum, in which rounding errors would cancel, so it may differ by 5 times as much.
                    scale = 5 * scale.max()
                if not (difference <= tolerance * scale).all():  # also if a difference is NaN
                    return f"gives other numbers with shared prefixes, off by {(difference / scale).max().item():.2g}"
    except Exception as error:  # an unsuitable model may raise anything
        if isinstance(error, InputError) or is_memory_error(error):  # not the layout's fault
            raise
        return f"refuses shared prefixes: {one_sentence(error)}"
    return None
