"""Shared-prefix layout: a prompt and its distinct responses as a tree.

    prompt | chosen | rejected     positions restart after the prompt; responses do not see each other

Prompt and responses are fed once each. A response's last token predicts nothing, so it is not fed. Pure index
arithmetic, without models or processes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dpo.data.examples import Example

ATTENTION_LENGTH = 2048  # row length at which attention costs as much as matrix products; measured on a small model
NONE = -1  # tree index of padding, branch index of a prompt


class Segments(NamedTuple):
    """A row's prompts and responses, with the columns that each sees.

    A prompt sees itself, a response its prompt and itself, padding padding; each token no later one. There are S
    segments, with K keys in all.
    """

    queries: torch.Tensor  # (S + 1,) int32: the column where each begins, and the row's length
    keys: torch.Tensor  # (S + 1,) int32: where its keys begin in `columns`, and K
    columns: torch.Tensor  # (K,) int64: the columns of the keys
    longest: tuple[int, int]  # the largest numbers of queries and of keys

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Segments:
        return Segments(change(self.queries), change(self.keys), change(self.columns), self.longest)


@dataclass
class Packed:
    """R packed rows of L tokens, and the positions of scored tokens.

    A row has several trees. All tensors are int64. N is the number of scored tokens, U the number of distinct
    responses, T the largest number of tokens in one response, B the number of examples.
    """

    input_ids: torch.Tensor  # (R, L)
    position_ids: torch.Tensor  # (R, L)
    tree: torch.Tensor  # (R, L): which tree a token belongs to, NONE for padding
    branch: torch.Tensor  # (R, L): which response a token belongs to, NONE for the prompt
    scored: torch.Tensor  # (N,): row * L + column of the token that predicts a response token
    targets: torch.Tensor  # (N,): the token to predict
    slots: torch.Tensor  # (N,): response * T + index in the response
    response_index: torch.Tensor  # (sides, B): which of the U responses an example has on each side
    shape: tuple[int, int]  # (U, T)
    segments: Segments | None = None  # of the only row, for attention that takes no mask
    _cached_masks: tuple[str, dict[str, Any]] | None = None  # the form of the last masks, and these

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """Apply `change` to every tensor, to move or pin it."""
        tensors = (getattr(self, field.name) for field in fields(self)[:-3])
        segments = self.segments and self.segments.map(change)
        return Packed(*map(change, tensors), shape=self.shape, segments=segments)

    def cache_masks(self, form: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the last masks if they have this form, else `make()`.

        Policy and reference often need the same masks, one after the other.
        """
        if self._cached_masks is None or self._cached_masks[0] != form:
            self._cached_masks = (form, make())
        return self._cached_masks[1]


def count_tokens(example: Example) -> int:
    """The number of tokens fed for a single example."""
    return len(example.prompt) + sum(len(r) - 1 for r in set(example.responses))


def split_evenly(examples: Sequence[Example], parts: int) -> list[list[int]]:
    """Split examples into `parts` lists with about equally many fed tokens.

    Returns their indices. Long examples come first; the last lists are empty if there are fewer examples than lists.
    Examples of a prompt stay together, so that few prompts are fed in two lists.
    """
    longest: dict[tuple, tuple[int, int]] = {}  # by prompt, with an index that tells equally long prompts apart
    for i, example in enumerate(examples):
        length, number = longest.get(example.prompt, (0, i))
        longest[example.prompt] = max(length, count_tokens(example)), number
    order = sorted(range(len(examples)), key=lambda i: longest[examples[i].prompt], reverse=True)
    seen: set[tuple] = set()
    costs = []  # of each example, without what earlier examples already feed
    for i in order:
        prompt, responses = examples[i][:2]
        new = [r for r in dict.fromkeys(responses) if (prompt, r) not in seen]
        costs.append(sum(len(r) - 1 for r in new) + (0 if prompt in seen else len(prompt)))
        seen |= {prompt, *((prompt, r) for r in new)}
    # cut the line of all costs into equal parts; an example belongs to the part in which its middle lies
    sums = list(accumulate(costs))
    middles = [total - cost / 2 for total, cost in zip(sums, costs, strict=True)]
    bounds, n_empty = [0], max(0, parts - len(order))
    parts -= n_empty
    for k in range(1, parts):
        nearest = bisect_left(middles, sums[-1] * k / parts)
        bounds.append(min(max(nearest, bounds[-1] + 1), len(order) - (parts - k)))  # at least one example per part
    full = [sorted(order[start:end]) for start, end in zip(bounds, [*bounds[1:], len(order)], strict=True)]
    return full + [[]] * n_empty


class _Tree(NamedTuple):
    prompt: tuple[int, ...]
    branches: list[tuple[int, tuple[int, ...]]]  # (index, token ids) of responses
    length: int  # tokens fed


def pack(
    examples: Sequence[Example], *, row_tokens: int | None, alignment: int = 1, length: int | None = None
) -> Packed:
    """Pack the trees of the examples into rows.

    The row length is `length` or, if None, the cheapest one up to twice `row_tokens`, rounded up to a multiple of
    `alignment`. A prompt is repeated if its responses do not all fit into `row_tokens` with it. With `row_tokens` None
    all trees are in one row, which has `segments`.
    """
    indices: dict[tuple, dict[tuple, int]] = {}  # prompt -> distinct response -> index
    n_responses = 0
    for prompt, responses, *_ in examples:
        for response in responses:
            of_prompt = indices.setdefault(prompt, {})
            if response not in of_prompt:
                of_prompt[response] = n_responses
                n_responses += 1
    response_index = [[indices[prompt][response] for response in responses] for prompt, responses, *_ in examples]
    most = math.inf if row_tokens is None else row_tokens
    trees = [tree for prompt, responses in indices.items() for tree in _trees(prompt, responses, most)]
    trees.sort(key=lambda tree: tree.length, reverse=True)  # first-fit-decreasing wastes little space
    if row_tokens is None:
        lengths = [_round_up(max(length or 1, sum(tree.length for tree in trees)), alignment)]
    else:
        # longer rows waste less space but cost more attention, so try several lengths
        lengths = _row_lengths(trees, alignment) if length is None else [_round_up(length, alignment)]
    rows, length = min((_fill_rows(trees, length) for length in lengths), key=_cost)
    longest = max(len(response) for responses in indices.values() for response in responses)
    packed = _write(rows, length, np.asarray(response_index).T, (n_responses, longest))
    if row_tokens is None:
        packed.segments = _find_segments(trees, length)
    return packed


def _round_up(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def _trees(prompt: tuple, responses: dict[tuple, int], row_tokens: float) -> list[_Tree]:
    """Make the trees of a prompt, each of at most `row_tokens`.

    A tree with a single response may be longer.
    """
    trees: list[_Tree] = []
    for response, number in responses.items():
        fed = len(response) - 1
        if not trees or trees[-1].length + fed > row_tokens:
            trees.append(_Tree(prompt, [], len(prompt)))
        trees[-1].branches.append((number, response))
        trees[-1] = trees[-1]._replace(length=trees[-1].length + fed)
    return trees


def _row_lengths(trees: list[_Tree], alignment: int) -> list[int]:
    """Row lengths to try, from the longest tree's to twice that.

    None is longer than all trees in one row. Lengths are rounded up to multiples of `alignment`.
    """
    longest = max(1, trees[0].length)
    most = max(longest, min(2 * longest, sum(tree.length for tree in trees)))
    lengths = (longest + (most - longest) * i // 16 for i in range(17))  # trying every length would take long
    return sorted({_round_up(length, alignment) for length in lengths})


def _fill_rows(trees: list[_Tree], length: int) -> tuple[list[list[_Tree]], int]:
    """Put each tree, the longest first, into the first row with space."""
    rows: list[list[_Tree]] = []
    free: list[int] = []  # tokens of each row
    for tree in trees:
        row = next((i for i, n_free in enumerate(free) if n_free >= tree.length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(tree)
        free[row] -= tree.length
    return rows, length


def _cost(filling: tuple[list[list[_Tree]], int]) -> float:
    """Relative cost of rows, as of their number and length.

    A token costs 1 for the matrix products, and length / ATTENTION_LENGTH for attention.
    """
    rows, length = filling
    return len(rows) * length * (1 + length / ATTENTION_LENGTH)


def _write(rows: list[list[_Tree]], length: int, response_index: np.ndarray, shape: tuple[int, int]) -> Packed:
    """Write the trees of each row one after another."""
    input_ids, position_ids = np.zeros((2, len(rows), length), dtype=np.int64)
    tree_of, branch_of = np.full((2, len(rows), length), NONE, dtype=np.int64)
    scored: list[int] = []
    targets: list[int] = []
    slots: list[int] = []
    for i, trees in enumerate(rows):
        at = 0
        for number, tree in enumerate(trees):
            n = len(tree.prompt)
            tree_of[i, at : at + tree.length] = number
            input_ids[i, at : at + n] = tree.prompt
            position_ids[i, at : at + n] = range(n)
            last, at = at + n - 1, at + n  # the prompt's last token predicts the first token of every response
            for response, ids in tree.branches:
                end = at + len(ids) - 1
                input_ids[i, at:end] = ids[:-1]
                position_ids[i, at:end] = range(n, n + end - at)
                branch_of[i, at:end] = response
                first = 0 if n else 1  # without a prompt, nothing predicts the first token
                columns = [last, *range(at, end)][first:]
                scored += [i * length + column for column in columns]
                targets += ids[first:]
                slots += range(response * shape[1] + first, response * shape[1] + len(ids))
                at = end
    # in the order of Packed's fields
    tensors = (input_ids, position_ids, tree_of, branch_of, *map(_int64, (scored, targets, slots)), response_index)
    return Packed(*(torch.from_numpy(np.ascontiguousarray(t)) for t in tensors), shape=shape)


def _find_segments(trees: list[_Tree], length: int) -> Segments:
    """The segments of the row that `_write` makes of trees."""
    spans: list[tuple[range, range]] = []  # columns that a segment sees before its own, and its own
    at = 0
    for tree in trees:
        prompt = range(at, at + len(tree.prompt))
        spans.append((range(0), prompt))
        at = prompt.stop
        for _, ids in tree.branches:
            spans.append((prompt, range(at, at + len(ids) - 1)))
            at += len(ids) - 1
    spans.append((range(0), range(at, length)))  # padding
    spans = [(before, own) for before, own in spans if own]  # kernels need not take segments without queries
    n_queries, n_keys = ([len(own) for _, own in spans], [len(before) + len(own) for before, own in spans])
    queries, keys = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (n_queries, n_keys))
    columns = np.concatenate([np.arange(part.start, part.stop) for span in spans for part in span])
    return Segments(queries, keys, torch.from_numpy(columns), (max(n_queries), max(n_keys)))


def _int64(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def tree_mask(packed: Packed, *, window: int | None = None) -> torch.Tensor:
    """Return whether a token sees another, (R, 1, L, L) bool.

    The second to last dim has the token that sees. It sees the tokens of its prompt and of its own response that are
    not later and, with a sliding window, are fewer than `window` positions back. Padding sees padding.
    """
    tree, branch, position = packed.tree, packed.branch, packed.position_ids
    seen = tree[:, :, None] == tree[:, None, :]
    # in place, as masks are (R, L, L)
    seen &= (branch[:, None, :] == NONE) | (branch[:, :, None] == branch[:, None, :])
    seen &= torch.ones(tree.shape[1], tree.shape[1], dtype=torch.bool, device=tree.device).tril()
    if window is not None:
        seen &= position[:, :, None] - position[:, None, :] < window
    return seen[:, None]


def tree_block_mask(packed: Packed, *, window: int | None = None) -> BlockMask:
    """`tree_mask` for FlexAttention, which skips fully masked blocks."""
    tree, branch, position = packed.tree, packed.branch, packed.position_ids

    def sees(row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        on_path = (branch[row, k] == NONE) | (branch[row, q] == branch[row, k])
        seen = (tree[row, q] == tree[row, k]) & on_path & (q >= k)
        return seen if window is None else seen & (position[row, q] - position[row, k] < window)

    rows, length = tree.shape
    return create_block_mask(sees, rows, None, length, length, device=tree.device)
