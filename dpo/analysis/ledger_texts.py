"""Texts of a ledger's pairs, looked up by id in the datasets that the run's config names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from dpo.analysis.ledger_view import Texts
from dpo.analysis.runs import Run
from dpo.data.examples import text_digest
from dpo.data.schema import PreferenceData
from dpo.data.table import iterate_prompts
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import InputError
from dpo.settings.recorded import plan_recorded

if TYPE_CHECKING:
    from dpo.analysis.ledger import Pair

SPLITS = {"train": "train", "eval": "test"}  # in a ledger, in a dataset
OF_TOKENIZER = ("model.name_or_path", "model.tokenizer_name_or_path")


def find_texts(
    run: Run,
    pairs: Iterable[Pair],
    *,
    get_dataset: Callable[..., PreferenceData],
    built_in: Collection[str],
    trust_remote_code: bool = False,
) -> Texts:
    """Find the texts of pairs in the datasets that `get_dataset` loads.

    Own data, which is not `built_in`, also needs a tokenizer; its code runs only with `trust_remote_code`, whatever the
    run's config says. Raises InputError if the run's config is unusable, or the data cannot be loaded.
    """
    wanted: dict[tuple[str, str], set[str]] = {}
    for pair in pairs:
        wanted.setdefault((SPLITS[pair.split], pair.dataset), set()).add(pair.example)
    has_own = any(name not in built_in for _, name in wanted)
    keys = ("local_dirs", "dataset_sources", *(OF_TOKENIZER if has_own else ()))
    if not run.config:
        raise InputError(next((p for p in run.problems if p.startswith("config.yaml")), "config.yaml is empty"))
    plan = plan_recorded({"local_run_dir": str(run.path), **run.config}, where="config.yaml", keys=keys)
    cache_dir, sources = plan.run.cache_dir, plan.data.dataset_sources
    options: dict[str, Any] = {"silent": True, "cache_dir": cache_dir, "dataset_sources": sources}
    if has_own:  # it may hold chats, which a tokenizer renders
        name = plan.model.tokenizer
        options["tokenizer"] = load_tokenizer(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    texts = {}
    for (split, name), digests in wanted.items():
        for prompt in iterate_prompts(get_dataset, [name], split, sft_mode=False, **options):
            for index in range(len(prompt.examples)):
                responses = prompt.texts(index)
                digest = text_digest(prompt.text, responses.values())
                if digest in digests:
                    texts[digest] = {"prompt": prompt.text, **responses}
    return texts
