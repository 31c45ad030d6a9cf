"""The site: pages that are generated, and links that lead out of `docs/` (`make docs`).

The support matrix is made of the checks that a command line gets: what it refuses is a number, with the sentence below.
"""

import re
from collections.abc import Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from dpo.data.columns import recognize
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.keys import MISSING, find_defaults
from dpo.settings.plan import make_plan
from dpo.settings.validation import find_problems

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NEEDED = {  # by a loss, to be complete
    **{"mix": {"loss.weights.dpo": 1}, "exo": {"loss.label_smoothing": 0.1}},
    **{name: {"unpair": True} for name, loss in LOSSES.items() if loss.trains_on == "labels"},
}
ROWS = {  # a row of each kind of data
    "pairs": {"prompt": "p", "chosen": "c", "rejected": "r"},
    "chats": {"chosen": [{"role": "user", "content": "p"}], "rejected": [{"role": "user", "content": "p"}]},
    "ranked lists": {"prompt": "p", "responses": ["a", "b"], "scores": [2, 1]},
    "labelled answers": {"prompt": "p", "completion": "c", "label": True},
    "completions": {"prompt": "p", "completion": "c"},
}
AXES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {  # by kind and name: the keys of each choice
    "loss": {
        " ".join([f"loss={name}", *(f"{key}={value}".lower() for key, value in NEEDED.get(name, {}).items())]): {
            "loss.name": name,
            **NEEDED.get(name, {}),
        }
        for name in LOSSES
    },
    "data": {name: {"data": name} for name in ROWS},
    "adapter": {f"lora={name}": {"lora.name": name} for name in ("none", "lora", "qlora")},
    "answers": {f"online={name}": {"online.name": name} for name in ("none", "online")},
    "layout": {f"layout={name}": {"layout": name} for name in ("shared_prefix", "padded")},
    "trainer": {
        "BasicTrainer": {"trainer": "BasicTrainer"},
        "FSDPTrainer": {"trainer": "FSDPTrainer", "world_size": 2},
        "TensorParallelTrainer": {"trainer": "TensorParallelTrainer", "world_size": 2},
        "its package backend": {
            "trainer": "TensorParallelTrainer",
            "tensor_parallel_size": 2,
            "tensor_parallel.backend": "tensor_parallel",
        },
    },
    "dtype": {
        "float32": {"model.policy_dtype": "float32"},
        "bfloat16": {"model.policy_dtype": "bfloat16"},
        "autocast=bfloat16": {"model.autocast": "bfloat16"},
    },
}
LOSS_OF = {"labelled answers": "kto", "completions": "sft"}  # kinds of data with which dpo cannot do
COMMON = {
    **{"exp_name": "x", "model.name_or_path": "x", "online.name": "none", "lora.name": "none"},
    **{
        "local_run_dir": "x",
        "sample_during_eval": False,
        "online.scorer": "shorter",
        "datasets": ["demo"],
        "data": "pairs",
    },
}


def find_refusal(*choices: Mapping[str, Any]) -> str:
    """The first sentence with which choices are refused together; "" if they are accepted."""
    keys: dict[str, Any] = {key: value for choice in choices for key, value in choice.items()}
    fitting = LOSS_OF.get(keys.get("data", "pairs"), "dpo") if keys.get("online.name") != "online" else "dpo"
    keys = {**COMMON, "loss.name": fitting, **keys}
    rows, defaults = [ROWS[keys.pop("data")]], find_defaults(keys)
    if defaults.get("loss.beta") == MISSING:
        keys["loss.beta"] = 0.1
    known = {key: value for key, value in keys.items() if key in defaults}  # those of online need online=online
    plan = make_plan(defaults | known)
    for problem in find_problems(plan):
        return problem.sentence
    trains_on = "prompts" if plan.online else plan.loss.trains_on
    try:
        recognize(rows, {}, name="mine", origin="the data", trains_on=trains_on)
    except InputError as error:
        return str(error)
    return ""


def draw_matrix() -> str:
    """Losses against all other choices, and these against each other."""
    sentences: dict[str, int] = {}
    others = {name: (axis, choice) for axis in AXES if axis != "loss" for name, choice in AXES[axis].items()}

    def cell(first: tuple[str, Any], second: tuple[str, Any]) -> str:
        if first[0] == second[0]:
            return ""
        sentence = find_refusal(first[1], second[1])
        return f"[{sentences.setdefault(sentence, len(sentences) + 1)}](#refusals)" if sentence else "yes"

    def table(rows: Mapping[str, tuple[str, Any]]) -> list[str]:
        cells = [" | ".join([name, *(cell(row, other) for other in others.values())]) for name, row in rows.items()]
        return [f"| | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|", *(f"| {line} |" for line in cells)]

    losses = table({name: ("loss", choice) for name, choice in AXES["loss"].items()})
    rest = table(others)
    refusals = [f"{number}. {escape(sentence)}" for sentence, number in sentences.items()]
    intro = (__doc__ or "").partition("\n\n")[2].replace("\n", " ")
    parts = [
        f"---\nhide: [navigation, toc]\n---\n\n# What goes with what\n\n{intro}\n",
        *losses,
        "",
        *rest,
        "",
        "## Refusals",
        "",
        *refusals,
    ]
    return "\n".join(parts)


# --- hooks of mkdocs --------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    File = import_module("mkdocs.structure.files").File  # not at the top, as tests read the matrix without mkdocs
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "support.md", content=draw_matrix()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them: a file that is no page becomes its name."""
    if page.file.src_uri in PAGES.values():
        markdown = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", markdown)

    def rewrite(found: re.Match) -> str:
        text, target, anchor = found.groups("")
        target = PAGES.get(target.removeprefix("../"), target)
        is_page = target.startswith("http") or (ROOT / "docs" / target).exists() or target in PAGES.values()
        return f"[{text}]({target}{anchor})" if is_page else text

    return re.sub(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)", rewrite, markdown)
