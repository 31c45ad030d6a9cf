"""How examples are laid out for the model: `padded`, the reference's plain path, and `shared_prefix`, which gives the
same numbers from a fraction of the tokens (see `dpo/models/packing.py`). Which of them a model can take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dpo.data.examples import find_examples
from dpo.data.tokenization import Batch, collate, concatenated_inputs
from dpo.losses import IGNORE_INDEX
from dpo.models.logprobs import chosen_logps, concatenated_forward, packed_logps, token_logps
from dpo.models.packing import Packed, cut_evenly, pack
from dpo.parallel.sharding import run_as_forward
from dpo.system.arithmetic import without_tf32

FED = ("_input_ids", "_attention_mask", "_labels")
Logps = tuple[torch.Tensor, ...]  # (chosen, rejected), or under SFT (chosen,): each (B,)


class Microbatch(NamedTuple):
    """What one forward takes."""

    rows: torch.Tensor  # (n,) int64: which examples of the global batch
    inputs: Batch | Packed

    def to(self, device: torch.device | str) -> Microbatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def n_tokens(self) -> int:
        """Tokens that a forward pushes, padding too."""
        if isinstance(self.inputs, Packed):
            return self.inputs.input_ids.numel()
        sides = [self.inputs[key] for key in ("chosen_input_ids", "rejected_input_ids") if key in self.inputs]
        return sum(len(side) for side in sides) * max(side.shape[1] for side in sides)

    def pin_memory(self) -> Microbatch:
        return self.map(torch.Tensor.pin_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
        """Every tensor changed: moved, pinned, ..."""
        if isinstance(self.inputs, Packed):
            return Microbatch(change(self.rows), self.inputs.map(change))
        return Microbatch(change(self.rows), {key: change(value) for key, value in self.inputs.items()})


class Padded:
    """Every response in a row of its own after its prompt, padded to the longest of the global batch."""

    def split(self, batch: Batch, parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        """The global batch in `parts * size` microbatches; of these number `rank`, `rank + size`, ..."""
        tensors = {key: value for key, value in batch.items() if key.endswith(FED) and not key.startswith("prompt")}
        cuts = torch.arange(len(batch["chosen_input_ids"])).tensor_split(parts * size)[rank::size]
        return [Microbatch(rows, {k: v[rows] for k, v in tensors.items()}) for rows in cuts]

    def forward(self, model: torch.nn.Module, inputs: Batch) -> Logps:
        """Log-probabilities of each example's responses, on the device of the inputs."""
        paired = "rejected_input_ids" in inputs
        logps = concatenated_forward(model, inputs) if paired else (chosen_logps(model, inputs),)
        return tuple(values.to(inputs["chosen_input_ids"].device) for values in logps)


class SharedPrefix:
    """Each prompt once and each of its distinct responses once, in full rows; about equally many tokens in each
    microbatch. `windows` maps the kinds of the model's attention layers to how far back they look, None for all; the
    length of a row is a multiple of `alignment`."""

    def __init__(self, windows: Mapping[str, int | None], *, max_length: int, alignment: int = 1) -> None:
        self.windows, self.row_tokens = windows, row_tokens(max_length)
        self.alignment = alignment

    def split(self, batch: Batch, parts: int, *, rank: int = 0, size: int = 1) -> list[Microbatch]:
        examples = find_examples(batch)
        cuts = cut_evenly(examples, parts * size)[rank::size]  # neighbours, equally long, run at the same time
        return [
            Microbatch(
                torch.tensor(rows),
                pack([examples[i] for i in rows], row_tokens=self.row_tokens, alignment=self.alignment),
            )
            for rows in cuts
        ]

    def forward(self, model: torch.nn.Module, inputs: Packed) -> Logps:
        """Log-probabilities of each example's responses, on the device of the inputs."""
        logps = run_as_forward(model, packed_logps, inputs, self.windows)  # (U,)
        return tuple(logps.to(inputs.response_index.device)[inputs.response_index])


def row_tokens(max_length: int) -> int:
    """Tokens of a prompt's tree at most: it and two responses always fit. Rows are twice as long at most (`pack`)."""
    return 2 * max_length


GPU_ALIGNMENT = 64  # tokens: CUDA's fused attention copies a mask whose rows are not aligned, in every layer
Layout = Padded | SharedPrefix
LAYOUTS = {"padded": Padded, "shared_prefix": SharedPrefix}


class Longest(NamedTuple):
    """The most tokens that a run has: in a prompt with one response, and in a row of the shared-prefix layout."""

    example: int
    row: int

    @classmethod
    def of(cls, example: int, n_examples: int, max_length: int) -> Longest:
        """Of microbatches of up to `n_examples` whose longest has `example` tokens."""
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
    """The layout of that name; or `Padded`, and a line that says why this model cannot take it.

    Runs two pairs through the model both ways, short and as long as the `longest` of the run (None: as `max_length`
    allows). `vetoed` is whether any process that shares the model says so.
    """
    layout, reason = layout_by_rules(name, model, max_length=max_length)
    if isinstance(layout, SharedPrefix):
        longest = longest or Longest(max_length, 2 * row_tokens(max_length))
        reason = _find_difference(model, layout, longest, TOLERANCES.get(compute_dtype, HALF_PRECISION))
        if vetoed(reason is not None):
            layout, reason = Padded(), reason or "differs on another process"
    return layout, reason and f"layout=padded: {type(model).__name__} {reason}"


def layout_by_rules(name: str, model: Any, *, max_length: int) -> tuple[Layout, str | None]:
    """The layout of that name, or `Padded` and what in the model's class and config rules it out. Runs nothing."""
    if name == "padded":
        return Padded(), None
    windows = find_windows(model, max_length)
    if isinstance(windows, str):
        return Padded(), windows
    on_gpu = model.get_input_embeddings().weight.device.type == "cuda"
    return SharedPrefix(windows, max_length=max_length, alignment=GPU_ALIGNMENT if on_gpu else 1), None


def find_windows(model: Any, max_length: int) -> dict[str, int | None] | str:
    """How far back each kind of attention layer looks, None for all; or what in the model rules the layout out."""
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
    if kind := _rope_of_length(config, max_length):
        return f"has rotary frequencies that depend on a batch's longest row ({kind})"
    row = 2 * row_tokens(max_length)
    for key in COUNTS_COLUMNS:
        if isinstance(size := getattr(config, key, None), int) and 0 < size < row:
            return f"attends locally ({key}={size})"
    if any(n < row for n in (b.shape[-1] for b in model.buffers() if _is_mask(b))):
        return "has masks of its own, which are smaller than the longest row"
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_length or kinds == {"full_attention"}:
        return {"full_attention": None}
    if len(kinds) == 2:
        return {"full_attention": None, "sliding_attention": window}
    return {"sliding_attention": window}


# keys of configs: attention that looks at so many columns of a row, whatever positions and masks say; what is not in
# this list differs on rows as long as the run's
COUNTS_COLUMNS = ("window_size", "attention_window_size", "attention_chunk_size", "keep_window_size")


def _is_mask(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a square with a place for each pair of columns, as GPT-Neo's causal mask."""
    return buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and buffer.numel() == buffer.shape[-1] ** 2


def _rope_of_length(config: Any, max_length: int) -> str | None:
    """The kind of rotary positions whose frequencies change once a batch exceeds the length of pretraining."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [nested for nested in parameters.values() if isinstance(nested, dict)]
    limits = [getattr(config, f"{key}max_position_embeddings", None) for key in ("original_", "")]
    for rope in (parameters, *by_layer_type):
        original = next((n for n in (rope.get("original_max_position_embeddings"), *limits) if n), max_length)
        if rope.get("rope_type") in ("dynamic", "longrope") and max_length > original:
            return rope["rope_type"]
    return None


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative
HALF_PRECISION = 0.02


@torch.no_grad()
def _find_difference(model: Any, layout: SharedPrefix, longest: Longest, tolerance: float) -> str | None:
    """How the log-probabilities of pairs, short or as long as the run's, differ between the layouts; None if they do
    not."""
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    beyond = max((window or 0 for window in layout.windows.values()), default=0)
    short = _two_pairs(vocabulary, (beyond + 5, 4, 6), (beyond + 2, 7, 3))
    n = max(longest.example, 12)
    long = _two_pairs(vocabulary, (5, n - 5, n - 6), (2, 7, 3))
    ways = ((short, Padded().forward, None), (long, _plain_logps, max(longest.row, 2 * n)))
    training = model.training
    model.eval()
    try:
        with without_tf32():
            for batch, plain, row in ways:
                inputs = Microbatch(torch.arange(2), batch).to(device).inputs
                packed = pack(find_examples(batch), row_tokens=2 * n, alignment=layout.alignment, length=row)
                expected = torch.stack(plain(model, inputs))
                difference = (torch.stack(layout.forward(model, packed.map(lambda x: x.to(device)))) - expected).abs()
                if not (difference <= tolerance * expected.abs()).all():
                    off = (difference / expected.abs()).max().item()
                    return f"gives log-probabilities with shared prefixes that are off by {off:.2g}"
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:  # how a model says it cannot
        return f"refuses shared prefixes: {' '.join(str(error).split())[:200]}"
    finally:
        model.train(training)
    return None


def _plain_logps(model: Any, batch: Batch) -> Logps:
    """What `Padded` gives, with logits only where a token is scored: all of long rows take much memory."""
    return run_as_forward(model, _scored_logps, concatenated_inputs(batch)).chunk(2)


def _scored_logps(model: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    ids, mask, labels = (rows[f"concatenated_{key}"] for key in ("input_ids", "attention_mask", "labels"))
    hidden = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state  # (R, L, H)
    row, column = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    logps = token_logps(model, hidden[row.to(hidden.device), column.to(hidden.device)], labels[row, column + 1])
    return logps.new_zeros(len(labels)).index_add_(0, row.to(logps.device), logps).to(labels.device)


def _two_pairs(vocabulary: int, *lengths: tuple[int, int, int]) -> Batch:
    """Random tokens; a prompt, a chosen and a rejected response of these lengths each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n, *of_responses in lengths:
        prompt, *responses = (torch.randint(vocabulary, (k,), generator=generator).tolist() for k in (n, *of_responses))
        row = {}
        for side, response in zip(("chosen", "rejected"), responses, strict=True):
            row[f"{side}_input_ids"] = prompt + response
            row[f"{side}_attention_mask"] = [1] * len(prompt + response)
            row[f"{side}_labels"] = [IGNORE_INDEX] * n + response
        rows.append(row)
    return collate(rows, pad_token_id=0)
