"""Every loss on every kind of data: it trains, or it is refused before the first update."""

from pathlib import Path

import pytest
from support.runs import ask, compose, small_run, write_lists, write_prompts, write_splits, write_weighted

import train as entry
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.validation import find_problems

PAIRS = ("pairs", "lists", "targets")  # all that pairs can be made into, without unpair=true
ONLINE = ("online=online", "online.scorer=keyword", "online.keyword=e", "online.max_new_tokens=8")
# Each case has the data, settings, and what a loss must train on there.
KINDS = {
    "pairs": ("pairs", (), PAIRS),
    "pairs, unpaired": ("pairs", ("unpair=true",), ("labels",)),
    "pairs with weights": ("weighted", (), PAIRS),
    "pairs with margins": ("weighted", ("loss.offset_by_margin=true",), ("pairs",)),
    "pairs for an adapter": ("pairs", ("lora=lora", "cache_reference_logps=all"), PAIRS),
    "labels": ("labels", (), ("labels", "targets")),
    "labels that are all true": ("thumbs_up", (), ("labels", "targets")),
    "targets": ("targets", (), ("targets",)),
    "lists": ("lists", (), PAIRS),
    "lists of equal scores": ("equal", (), ("targets",)),
    "prompts": ("prompts", (), ()),
    "prompts, online": ("prompts", ONLINE, ("pairs",)),
    "pairs, online": ("pairs", ONLINE, ("pairs",)),
}
SETTINGS = {"ipo": ("loss.beta=0.1",), "mix": ("loss.weights.dpo=1",)}
CELLS = [
    (kind, name)
    for kind, (_, settings, _) in KINDS.items()
    for name, loss in LOSSES.items()
    if loss.takes_offset or "loss.offset_by_margin=true" not in settings  # other losses lack the key
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_a_loss_trains_or_is_refused(kind, name, data, run_dir):
    folder, settings, kinds_of_loss = KINDS[kind]
    own = (*settings, *SETTINGS.get(name, ()))
    overrides = small_run(data, run_dir, f"loss={name}", "datasets=[x]", f"dataset_sources.x={data / folder}")
    overrides = (o for o in overrides if not o.startswith(("dataset_sources.hh", "dataset_sources.more")))
    plan = entry.resolve(compose(*overrides, *own))

    problems = [problem.sentence for problem in find_problems(plan)]
    try:
        if not problems:
            entry.run(plan)
    except InputError as error:
        problems = [str(error)]

    loss = LOSSES[name]
    refused = loss.trains_on not in kinds_of_loss
    refused |= folder == "weighted" and not loss.takes_weights
    refused |= settings == ONLINE and loss.scalar_head  # a reward model gives no answers
    assert bool(problems) == refused, problems
    assert refused or (run_dir / "LATEST" / "policy.pt").exists()


def answer(i: int) -> dict[str, str]:
    return {"completion": f" It is {'very ' * (i % 4)}near."}


MAKE = {  # rows of each kind of data
    "pairs": lambda split, i: {"prompt": ask(split, i), "chosen": " Near.", "rejected": f" Who knows {i}?"},
    "labels": lambda split, i: {"prompt": ask(split, i), **answer(i), "label": not i % 3},
    "thumbs_up": lambda split, i: {"prompt": ask(split, i), **answer(i), "label": True},
    "targets": lambda split, i: {"prompt": ask(split, i), **answer(i)},
    "equal": lambda split, i: {"prompt": ask(split, i), "responses": [" Near.", f" {i}?"], "scores": [1, 1]},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_lists(folder / "lists")
    write_prompts(folder / "prompts")
    write_weighted(folder / "weighted")
    for kind, make in MAKE.items():
        write_splits(folder / kind, make)
    return folder
