"""The site (`make docs`): pages that are generated, and links that lead out of `docs/`.

The support matrix comes from the checks of a command line. A number stands for a refusal, whose sentence is below.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from dpo.data.columns import recognize
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.keys import GROUPS, MISSING, find_defaults
from dpo.settings.plan import make_plan
from dpo.settings.validation import find_problems

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NEEDED = {  # overrides that a loss cannot do without
    "mix": "loss.weights.dpo=1",
    "exo": "loss.label_smoothing=0.1",
    **{name: "unpair=true" for name, loss in LOSSES.items() if loss.trains_on == "labels"},
}
ROWS = {  # a row of each kind of data
    "pairs": {"prompt": "p", "chosen": "c", "rejected": "r"},
    "chats": {"chosen": [{"role": "user", "content": "p"}], "rejected": [{"role": "user", "content": "p"}]},
    "ranked lists": {"prompt": "p", "responses": ["a", "b"], "scores": [2, 1]},
    "labelled answers": {"prompt": "p", "completion": "c", "label": True},
    "completions": {"prompt": "p", "completion": "c"},
}
AXES = {  # the choices of each kind, by what is typed for them
    "loss": [f"loss={name} {NEEDED.get(name, '')}".strip() for name in LOSSES],
    "data": list(ROWS),
    "adapter": ["lora=none", "lora=lora", "lora=qlora"],
    "answers": ["online=none", "online=online"],
    "layout": ["layout=shared_prefix", "layout=padded"],
    "trainer": [
        "trainer=BasicTrainer",
        "trainer=FSDPTrainer world_size=2",
        "trainer=TensorParallelTrainer world_size=2",
        "trainer=TensorParallelTrainer tensor_parallel_size=2 tensor_parallel.backend=tensor_parallel",
    ],
    "dtype": ["model.policy_dtype=float32", "model.policy_dtype=bfloat16", "model.autocast=bfloat16"],
}
COMMON = (
    "loss=dpo online=none lora=none exp_name=x model.name_or_path=x local_run_dir=x datasets=[demo] "
    "sample_during_eval=false online.scorer=shorter"
)
LOSS_OF = {"labelled answers": "loss=kto", "completions": "loss=sft"}  # data that loss=dpo cannot train on


def find_refusal(*choices: str) -> str:
    """Return the first sentence with which these choices of AXES are refused together; "" if they are accepted."""
    kind = next((choice for choice in choices if choice in ROWS), "pairs")
    typed = [choice for choice in choices if choice not in ROWS]
    if "online=online" not in typed:  # an online run trains on the prompts of any data
        typed.insert(0, LOSS_OF.get(kind, ""))  # first, so that a loss among the choices overrides it
    keys = {}
    for override in " ".join([COMMON, *typed]).split():  # no value has spaces
        key, _, value = override.partition("=")
        keys[f"{key}.name" if key in GROUPS else key] = yaml.safe_load(value)
    defaults = find_defaults(keys)
    if defaults.get("loss.beta") == MISSING:
        keys["loss.beta"] = 0.1
    # The keys of online=online exist only with it.
    known = {key: value for key, value in keys.items() if key in defaults}
    plan = make_plan(defaults | known)
    for problem in find_problems(plan):
        return problem.sentence
    trains_on = "prompts" if plan.online else plan.loss.trains_on
    try:
        recognize([ROWS[kind]], {}, name="mine", origin="the data", trains_on=trains_on)
    except InputError as error:
        return str(error)
    return ""


def draw_matrix() -> str:
    """Return a page with tables of losses against all other choices, and of these against each other.

    Below the tables are the refusals, whose numbers are in the cells.
    """
    sentences: dict[str, int] = {}  # the number of each refusal, in the order in which they are found
    axes = {choice: axis for axis, choices in AXES.items() for choice in choices}
    others = [choice for choice in axes if axes[choice] != "loss"]

    def draw_table(rows: Sequence[str]) -> list[str]:
        lines = [f"| | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|"]
        for row in rows:
            cells = [row]
            for other in others:
                cell = ""
                if axes[row] != axes[other]:
                    cell = "yes"
                    if sentence := find_refusal(row, other):
                        cell = f"[{sentences.setdefault(sentence, len(sentences) + 1)}](#refusals)"
                cells.append(cell)
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    losses = draw_table(AXES["loss"])
    rest = draw_table(others)
    refusals = [f"{number}. {escape(sentence)}" for sentence, number in sentences.items()]
    intro = (__doc__ or "").partition("\n\n")[2].replace("\n", " ")
    head = f"---\nhide: [navigation, toc]\n---\n\n# What goes with what\n\n{intro}\n"
    return "\n".join([head, *losses, "", *rest, "", "## Refusals", "", *refusals])


# --- hooks of mkdocs --------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in `docs/`."""
    # not at the top, as tests read the matrix without mkdocs
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "support.md", content=draw_matrix()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site: a link to a page gets the page's name, a link to another file becomes plain text."""
    if page.file.src_uri in PAGES.values():  # a file from outside docs/, whose links lead into it
        markdown = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", markdown)

    def rewrite(link: re.Match) -> str:
        text, target, anchor = link.groups("")
        target = PAGES.get(target.removeprefix("../"), target)
        is_page = target.startswith("http") or (ROOT / "docs" / target).exists() or target in PAGES.values()
        return f"[{text}]({target}{anchor})" if is_page else text

    return re.sub(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)", rewrite, markdown)
