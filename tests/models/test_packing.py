"""The shared-prefix layout worked by hand, and cut and packed for random batches without losing or adding a token."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import list_examples

from dpo.data.examples import Example
from dpo.models.packing import count_tokens, pack, split_evenly, tree_mask

PAIR = Example(prompt=(1, 2, 3), responses=((10, 11, 9), (20, 9)))


def test_a_pair_is_one_row_whose_responses_restart_after_the_prompt():
    packed = pack([PAIR], max_tree_tokens=100)
    assert packed.input_ids.tolist() == [[1, 2, 3, 10, 11, 20]]  # what ends a response predicts nothing
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert packed.scored.tolist() == [2, 3, 4, 2, 5]  # the prompt's last token predicts the first of both
    assert packed.targets.tolist() == [10, 11, 9, 20, 9]
    assert packed.slots.tolist() == [0, 1, 2, 3, 4]
    assert packed.response_index.tolist() == [[0], [1]]
    assert packed.shape == (2, 3)


def test_a_window_counts_positions_not_columns():
    whole, windowed = (tree_mask(pack([PAIR], max_tree_tokens=100), window=window)[0, 0].int() for window in (None, 2))
    assert whole[4:].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]
    # The last has position 3, and sees position 2, three columns before it.
    assert windowed[4:].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("window", [None, 3])
def test_segments_see_what_the_dense_mask_says(alignment, window):
    examples = [*list_examples(rows=8, shared=True), Example((), ((5, 6, 9), (9,))), Example((1,), ((9,), (9,)))]
    packed = pack(examples, max_tree_tokens=None, alignment=alignment)
    [dense] = tree_mask(packed, window=window)[:, 0]
    seen = torch.zeros_like(dense)
    queries, keys, columns, _ = packed.segments
    for (start, end), (first, last) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        for i in range(start, end):
            until = last - (end - 1 - i)  # behind its own column
            seen[i, columns[max(first, until - (window or last)) : until]] = True
    text = packed.tree[0] >= 0
    assert torch.equal(seen[text], dense[text])
    assert not seen[~text][:, text].any()


@pytest.mark.parametrize(
    ("example", "fed", "targets"),
    [
        (Example((1,), ((9,),)), [1], [9]),
        (Example((), ((10, 11, 9),)), [10, 11], [11, 9]),  # nothing predicts the first token
        (Example((), ((9,),)), [0], []),  # one column, for a model wants one
    ],
)
def test_the_first_token_of_a_row_is_never_scored_and_a_row_has_a_column(example, fed, targets):
    packed = pack([example], max_tree_tokens=100)
    assert packed.input_ids.tolist() == [fed]
    assert packed.targets.tolist() == targets


tokens = st.integers(0, 8)
response = st.builds(lambda ids: (*ids, 9), st.lists(tokens, max_size=6).map(tuple))
prompt = st.lists(tokens, min_size=1, max_size=5).map(tuple)
batches = st.lists(st.builds(lambda p, a, b: Example(p, (a, b)), prompt, response, response), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(batches, st.data())
def test_parts_hold_every_example_once_and_about_equally_many_tokens(examples, data):
    parts = data.draw(st.integers(1, len(examples) + 3))
    cuts = split_evenly(examples, parts)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(examples)))
    assert (len(cuts), sum(map(bool, cuts))) == (parts, min(parts, len(examples)))
    costs = [len(pack([examples[i] for i in cut], max_tree_tokens=10**6).targets) for cut in cuts if cut]
    if len({e.prompt for e in examples}) == len(examples) > 3 * parts:
        assert max(costs) <= sum(costs) / parts + 2 * max(map(count_tokens, examples))


@settings(max_examples=40, deadline=None)
@given(batches, st.integers(4, 30))
def test_a_pack_scores_every_distinct_response_of_every_prompt_once(examples, max_tree_tokens):
    packed = pack(examples, max_tree_tokens=max_tree_tokens)
    ids, length = packed.input_ids.flatten(), packed.input_ids.shape[1]
    mask = tree_mask(packed)[:, 0]
    n_responses, longest = packed.shape
    assert n_responses == len({(e.prompt, r) for e in examples for r in e.responses})

    sequences: dict[int, list[int]] = {}
    for at, target, slot in zip(packed.scored.tolist(), packed.targets.tolist(), packed.slots.tolist(), strict=True):
        number, place = divmod(slot, longest)
        row, column = divmod(at, length)
        seen = ids[row * length : (row + 1) * length][mask[row, column]].tolist()  # what this token is predicted from
        assert packed.position_ids[row, mask[row, column]].tolist() == list(range(len(seen)))
        sequences.setdefault(number, []).append((place, seen, target))
    for i, example in enumerate(examples):
        for side, ids_of in enumerate(example.responses):
            scored = sequences[packed.response_index[side, i].item()]
            expected = [(k, [*example.prompt, *ids_of[:k]], token) for k, token in enumerate(ids_of)]
            assert scored == expected
    assert Counter(packed.slots.tolist()).most_common(1)[0][1] == 1
    assert packed.input_ids.dtype == torch.int64
