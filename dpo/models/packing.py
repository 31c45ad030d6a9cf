"""Rows of tokens. With shared prefixes a prompt and its distinct responses are a tree, each fed once.

    prompt | chosen | rejected     positions restart after the prompt; responses do not attend to each other

In padded rows a tree has one response. A response's last token predicts nothing, so it is not fed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpo.data.examples import Example, make_labels
from dpo.losses import IGNORE_INDEX

ATTENTION_LENGTH = 2048  # row length at which attention costs as much as the linear layers; measured on a small model
Windows = Mapping[str, int | None]  # how many tokens each kind of attention layer looks back, None for all
NONE = -1  # the tree index of padding, the branch index of a prompt, and the role of a response that is not there


class Segments(NamedTuple):
    """The S segments of a row: each prompt attends to itself, each response to its prompt and itself.

    There are K keys over all segments. A prompt is a key of several segments, so K may exceed the row's length L.
    """

    queries: Tensor  # (S + 1,) int32: the first column of each segment, then L; `cu_seq_q` of `varlen_attn`
    keys: Tensor  # (S + 1,) int32: where the keys of each segment begin in `columns`, then K; `cu_seq_k`
    columns: Tensor  # (K,) int64: the columns of the keys, segment by segment
    longest: tuple[int, int]  # the largest number of queries in a segment, and of keys


class Packed(NamedTuple):
    """R rows of L tokens, each with several trees or, if rows are padded, with one; tensors are int64.

    N counts scored tokens, U the responses that are fed, T the tokens of the longest response (1 for rewards), B
    examples, and "sides" the most responses of an example.
    """

    input_ids: Tensor  # (R, L)
    position_ids: Tensor  # (R, L)
    tree: Tensor  # (R, L): which of the row's trees a token belongs to, NONE for padding
    branch: Tensor  # (R, L): which of the U responses a token belongs to, NONE for the prompt
    scored: Tensor  # (N,): row * L + column of the fed token that predicts a scored token
    targets: Tensor  # (N,): the scored token
    slots: Tensor  # (N,): indices into a flattened (U, T): response * T + the number of its scored tokens before
    response_index: Tensor  # (sides, B): which of the U responses an example has on each side
    shape: tuple[int, int]  # (U, T)
    # By dtype, the masks of each kind of attention layer. They are kept, as the reference often needs the same ones
    # right after the policy.
    masks: dict
    segments: Segments | None = None  # only if there is one row, for attention that takes no mask
    padding_mask: Tensor | None = None  # only if rows are padded, (R, L): 1 for tokens, 0 for padding


def count_tokens(example: Example) -> int:
    """Count the tokens that one example would feed in a row of its own."""
    return len(example.prompt) + sum(len(response) - 1 for response in set(example.responses))


def split_evenly(examples: Sequence[Example], parts: int) -> list[list[int]]:
    """Divide the indices of examples into `parts` with about equally many fed tokens, long ones first.

    If there are fewer examples than parts, the last parts are empty. Examples of a prompt are neighbours, so that few
    prompts are fed twice.
    """
    sort_keys = {}  # prompt -> (tokens of its longest example, index of its first)
    for i, example in enumerate(examples):
        n_longest, first = sort_keys.get(example.prompt, (0, i))
        sort_keys[example.prompt] = (max(n_longest, count_tokens(example)), first)
    order = sorted(range(len(examples)), key=lambda i: sort_keys[examples[i].prompt], reverse=True)
    costs = []  # for each example in `order`, the number of its tokens that no earlier one feeds
    fed = set()  # (prompt, response), or (prompt, None) for the prompt alone
    for i in order:
        prompt = examples[i].prompt
        new = {(prompt, response) for response in (None, *examples[i].responses)} - fed
        costs.append(sum(len(prompt if response is None else response[:-1]) for _, response in new))
        fed |= new
    # Lay the costs end to end on a line, and cut the line into equal parts. An example belongs to the part in which the
    # middle of its cost lies, but every part gets at least one example.
    ends = np.cumsum(costs)
    middles = ends - np.array(costs) / 2
    n_filled = min(parts, len(order))
    starts = [0]  # index in `order` of each part's first example
    for part in range(1, n_filled):
        nearest = int(np.searchsorted(middles, ends[-1] * part / n_filled))
        latest = len(order) - (n_filled - part)  # leaves one example for this part and for each later one
        starts.append(min(max(nearest, starts[-1] + 1), latest))
    filled = [sorted(order[start:stop]) for start, stop in pairwise([*starts, len(order)])]
    return filled + [[]] * (parts - n_filled)


@dataclass
class _Tree:
    """A prompt with responses to it, all in one row."""

    prompt: tuple
    branches: list[tuple]  # (index among the U responses, token ids, cuts)
    n_fed: int = 0  # tokens in the row, including the prompt's; only `pack` counts them


def pack(
    examples: Sequence[Example], *, max_tree_tokens: int | None, alignment: int = 1, for_rewards: bool = False
) -> Packed:
    """Pack examples into rows of the length that costs least, a multiple of `alignment`.

    A tree with more than `max_tree_tokens` is divided, and each part gets the prompt. If `max_tree_tokens` is None, all
    trees are in one row, and the result has `segments`. With `for_rewards`, responses are fed with their last tokens,
    and `scored` has only each response's last scored token itself, which gets the reward.
    """
    indices = {}  # (prompt, (response, cuts)) -> index among the distinct responses
    indices_of_examples = [
        [indices.setdefault((example.prompt, response), len(indices)) for response in example.responses_with_cuts]
        for example in examples
    ]
    trees = []
    latest = {}  # prompt -> the last tree with it
    for (prompt, (response, cuts)), index in indices.items():
        tree = latest.get(prompt)
        fed = response if for_rewards else response[:-1]
        if tree is None or (max_tree_tokens is not None and tree.n_fed + len(fed) > max_tree_tokens):
            tree = _Tree(prompt, [], len(prompt))
            latest[prompt] = tree
            trees.append(tree)
        tree.branches.append((index, response, cuts))
        tree.n_fed += len(fed)
    trees.sort(key=lambda tree: tree.n_fed, reverse=True)  # first-fit-decreasing wastes little space
    n_tokens = sum(tree.n_fed for tree in trees)
    if max_tree_tokens is None:
        candidates = [max(1, n_tokens)]
    else:  # 17 lengths, from the longest tree's to twice that or all tokens: trying every length would take long
        shortest = max(1, trees[0].n_fed)
        longest_row = max(shortest, min(2 * shortest, n_tokens))
        candidates = [shortest + (longest_row - shortest) * i // 16 for i in range(17)]
    lengths = sorted({math.ceil(candidate / alignment) * alignment for candidate in candidates})
    rows_by_length = {n: _fill_rows(trees, n) for n in lengths}
    # Longer rows waste less space, but cost more attention: a token costs 1 for the linear layers, and
    # n / ATTENTION_LENGTH for attention.
    cheapest = min(lengths, key=lambda n: len(rows_by_length[n]) * n * (1 + n / ATTENTION_LENGTH))
    packed = _write(rows_by_length[cheapest], cheapest, examples, indices_of_examples, for_rewards)
    if max_tree_tokens is None:
        packed = packed._replace(segments=_find_segments(packed.tree[0].numpy(), packed.branch[0].numpy()))
    return packed


def pad(examples: Sequence[Example], length: int, *, for_rewards: bool = False) -> Packed:
    """Lay out each response in a row of its own of `length`, after its prompt; `for_rewards` is that of `pack`."""
    rows = []
    indices_of_examples = []
    for example in examples:
        indices_of_examples.append(range(len(rows), len(rows) + len(example.responses)))
        for response, cuts in example.responses_with_cuts:
            rows.append([_Tree(example.prompt, [(len(rows), response, cuts)])])
    padded = _write(rows, length, examples, indices_of_examples, for_rewards)
    return padded._replace(padding_mask=(padded.tree != NONE).long())


def by_side(lists: Sequence[Sequence[int]], *, fill: int) -> Tensor:
    """Transpose B lists, one per example, to (sides, B) int64, with `fill` after shorter ones."""
    return torch.tensor([*zip_longest(*lists, fillvalue=fill)], dtype=torch.int64)


def _fill_rows(trees: list[_Tree], length: int) -> list[list[_Tree]]:
    """Put each tree into the first row with enough space."""
    rows = []  # the trees in each row
    n_free = []  # the tokens left in each row
    for tree in trees:
        row = next((i for i, n in enumerate(n_free) if n >= tree.n_fed), len(rows))
        if row == len(rows):
            rows.append([])
            n_free.append(length)
        rows[row].append(tree)
        n_free[row] -= tree.n_fed
    return rows


def _write(
    rows: list[list[_Tree]],
    length: int,
    examples: Sequence[Example],
    indices_of_examples: Sequence[Sequence[int]],
    for_rewards: bool,
) -> Packed:
    """Write the trees of each row into tensors; `indices_of_examples` become `response_index`."""
    longest = 1  # each response has one reward
    if not for_rewards:
        longest = max(len(response) for example in examples for response in example.responses)
    input_ids, position_ids = np.zeros((2, len(rows), length), dtype=np.int64)
    tree_of, branch_of = np.full((2, len(rows), length), NONE, dtype=np.int64)
    scored = []
    targets = []
    slots = []
    for row, trees in enumerate(rows):
        end = 0
        for tree_index, tree in enumerate(trees):
            begin = end
            n_prompt = len(tree.prompt)
            end_of_prompt = end = begin + n_prompt
            input_ids[row, begin:end] = tree.prompt
            position_ids[row, begin:end] = range(n_prompt)
            for index, token_ids, cuts in tree.branches:
                fed = token_ids if for_rewards else token_ids[:-1]
                start = end
                end += len(fed)
                input_ids[row, start:end] = fed
                position_ids[row, start:end] = range(n_prompt, n_prompt + len(fed))
                branch_of[row, start:end] = index
                # Indices of the scored tokens in the response, and for each token the column that predicts it. The
                # prompt's last token predicts the first one; without a prompt, nothing does.
                scored_indices = [i for i, label in enumerate(make_labels(token_ids, cuts)) if label != IGNORE_INDEX]
                columns = [end_of_prompt - 1, *range(start, end)]
                if for_rewards:  # the last scored token, at its own column
                    scored_indices = scored_indices[-1:]
                    columns = columns[1:]
                elif not n_prompt and scored_indices[:1] == [0]:
                    scored_indices = scored_indices[1:]
                scored += [row * length + columns[i] for i in scored_indices]
                targets += [token_ids[i] for i in scored_indices]
                slots += range(index * longest, index * longest + len(scored_indices))
            tree_of[row, begin:end] = tree_index
    return Packed(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        tree=torch.from_numpy(tree_of),
        branch=torch.from_numpy(branch_of),
        scored=torch.tensor(scored, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        response_index=by_side(indices_of_examples, fill=0),  # a missing response may have any index
        shape=(1 + max(map(max, indices_of_examples)), longest),
        masks={},
    )


def _find_segments(tree: np.ndarray, branch: np.ndarray) -> Segments:
    """Find the segments of a row, whose `tree` and `branch` are (L,)."""
    starts = np.flatnonzero(np.diff([tree, branch]).any(0)) + 1  # columns at which the tree or the branch changes
    queries = np.split(np.arange(len(tree)), starts)
    keys = [np.flatnonzero((tree == tree[i]) & np.isin(branch, (NONE, branch[i]))) for i, *_ in queries]
    return Segments(
        queries=_find_starts(queries),
        keys=_find_starts(keys),
        columns=torch.from_numpy(np.concatenate(keys)),
        longest=(max(map(len, queries)), max(map(len, keys))),
    )


def _find_starts(parts: list[np.ndarray]) -> Tensor:
    """Find where each part would begin if all were joined, and where the last would end."""
    return torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32)


def tree_mask(packed: Packed, *, window: int | None = None) -> Tensor:
    """Make the mask of attention, true where a query attends to a key, (R, 1, queries, keys) bool.

    A token attends to its prompt and its own response, but not to later tokens, nor to those `window` or more positions
    back. Padding attends to padding, so that every query has a key.
    """
    tree = packed.tree
    branch = packed.branch
    position = packed.position_ids
    # This works in place, without memory for a second (R, L, L) mask.
    mask = (tree[:, :, None] == tree[:, None, :]).tril_()  # (R, queries, keys)
    mask &= (branch[:, None, :] == NONE) | (branch[:, :, None] == branch[:, None, :])
    if window is not None:
        mask &= position[:, :, None] - position[:, None, :] < window
    return mask[:, None]
