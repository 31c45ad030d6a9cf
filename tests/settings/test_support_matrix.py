"""The support matrix of the site says what a command line gets, and what it calls possible trains."""

from collections.abc import Iterator
from itertools import combinations

import pytest
from support.commands import find_refusals
from support.formats import assistant, user
from support.pytests import succeeded
from support.runs import ask, run_python, small_run, train, write_splits
from support.templates import PLAIN

from dpo.settings.keys import MISSING, compose_config
from dpo.system.host import is_installed
from scripts.site import AXES, LOSSES, draw_matrix, find_refusal

PARTS = 6
MAKE = {  # a row of each kind of data
    "pairs": lambda prompt, i: {"prompt": prompt, "chosen": f" Near {i}.", "rejected": f" Who knows {i}?"},
    "chats": lambda prompt, i: {
        "prompt": [user(f"Where is {i}?")],
        "chosen": [assistant("It is near.")],
        "rejected": [assistant(f"Who knows {i}?")],
    },
    "ranked lists": lambda prompt, i: {
        "prompt": prompt,
        "responses": [" Near.", f" {i}?", " No."],
        "scores": [3, 2, -1 - i],
    },
    "labelled answers": lambda prompt, i: {"prompt": prompt, "completion": f" Near {i}.", "label": i % 2 == 0},
    "completions": lambda prompt, i: {"prompt": prompt, "completion": f" Near {i}."},
}


def list_possible() -> Iterator[frozenset]:
    """Pairs of choices of different kinds that are accepted together."""
    choices = [(axis, name) for axis in AXES for name in AXES[axis]]
    for (axis, name), (other_axis, other) in combinations(choices, 2):
        if axis != other_axis and not find_refusal(name, other):
            yield frozenset([(axis, name), (other_axis, other)])


def cover(pairs: set[frozenset]) -> Iterator[dict[str, str]]:
    """Commands, each a choice of every kind, that have all pairs between them; greedily as few as possible."""
    uncovered = set(pairs)
    while uncovered:
        command = dict(min(uncovered, key=sorted))
        for axis in AXES:
            if axis not in command:
                new = {
                    name: sum(frozenset([(axis, name), other]) in uncovered for other in command.items())
                    for name in AXES[axis]
                    if not find_refusal(*command.values(), name)
                }
                command[axis] = max(new, key=new.get)
        uncovered -= {frozenset(pair) for pair in combinations(command.items(), 2)}
        yield command


def test_the_matrix_has_every_loss_and_the_sentences_that_a_user_gets():
    matrix = draw_matrix()
    assert all(f"| loss={name} " in matrix for name in LOSSES)
    assert "| loss=dpo | yes | yes | yes | [" in matrix
    command = (
        "loss=kto online=online online.scorer=shorter model=demo datasets=[demo] exp_name=x sample_during_eval=false"
    )
    [sentence] = find_refusals(command)
    assert sentence in matrix


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    if not is_installed("mkdocs"):
        pytest.skip("the site needs mkdocs: pip install 'dpo-train[docs]'")
    succeeded(run_python("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)))
    assert "loss=plackett_luce" in (tmp_path / "support" / "index.html").read_text()
    assert "add_callback" in (tmp_path / "api" / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_possible_in_pairs_trains_two_updates(part, rows, tmp_path):
    for kind, make in MAKE.items():
        write_splits(tmp_path / kind.replace(" ", "_"), lambda split, i, make=make: make(ask(split, i), i))
    (tmp_path / "template.jinja").write_text(PLAIN)
    failed = []
    for number, command in enumerate(list(cover(set(list_possible())))[part::PARTS]):
        data = command.pop("data").replace(" ", "_")
        given = dict(override.split("=") for choice in command.values() for override in choice.split())
        given["dataset_sources.mine"] = tmp_path / data
        if compose_config(loss=given["loss"])["loss"].get("beta") == MISSING:
            given["loss.beta"] = 0.1
        if given["online"] == "online":
            given |= {"online.scorer": "shorter", "online.max_new_tokens": 8, "online.n_samples": 2}
        if data == "chats":
            given["chat_template"] = tmp_path / "template.jinja"
        extra = ["datasets=[mine]", "n_examples=8", "batch_size=4", "do_first_eval=false", "model.reference_dtype=null"]
        overrides = small_run(rows, tmp_path / str(number), *(f"{k}={v}" for k, v in given.items()), *extra)
        result = train(*overrides)
        if result.returncode:
            failed.append((data, command, result.stderr[-300:]))
    assert failed == []
