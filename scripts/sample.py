"""Ask a policy and its reference, and show answers one after the other.

    python -m scripts.sample CHECKPOINT_OR_DIR
    python -m scripts.sample CHECKPOINT_OR_DIR --file prompts.jsonl --out answers.jsonl

CHECKPOINT_OR_DIR is a run's directory (which means its LATEST), one of its step-N, LATEST or BEST, a policy.pt, a
directory in Hugging Face's format or PEFT's, or a Hub id. Prompts are put into the form that the model was trained on,
which is printed. Typed prompts make a conversation with each model; /reset starts a new one. docs/export.md explains
the options. Exit status: 0, 2 bad input, 130 if Ctrl-C ended a file's answers early.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.data.asking import AUTO, CHAT, FORMATS, MEANINGS, RAW
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.validation import find_value_problem
from dpo.system.host import set_allocators
from scripts import add_trust_option

if TYPE_CHECKING:
    from dpo.models.answers import Sampling
    from dpo.models.side_by_side import Panel

RESET = "/reset"
SAMPLING = ("temperature", "top_p", "top_k")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, or exit with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("path", metavar="CHECKPOINT_OR_DIR")
    option("--reference", metavar="DIR", help="reference, instead of the model that the run started from")
    option("--no-reference", action="store_true", help="show no answers of a reference, and no rewards")
    option("--beta", type=float, help="beta of the rewards, instead of the run's loss.beta")
    option("--file", type=Path, help="prompts, one JSON object per line")
    option("--out", type=Path, help="new file for the answers, one JSON object per line")
    option("--batch-size", type=int, default=8, help="prompts of --file at a time")
    option("--temperature", type=float, help="0: the most probable token")
    option("--top-p", type=float, help="0.9: only the most probable 90 percent")
    option("--top-k", type=int, help="tokens to draw from, 0: all")
    option("--seed", type=int, default=0)
    option("--max-new-tokens", type=int, default=256)
    option("--format", choices=FORMATS, default=AUTO, help="form of prompts")
    option("--model", metavar="DIR_OR_HUB_ID", help="base model of a policy.pt without a config.yaml")
    add_trust_option(parser)
    options = parser.parse_args(arguments)
    if (options.file is None) != (options.out is None):
        parser.error("--file and --out go together")
    for name in SAMPLING:
        value = getattr(options, name)
        if value is not None and (problem := find_value_problem(f"sample_{name}", value)):
            parser.error(problem.removeprefix("sample_"))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        # a wrong file is refused before models are loaded
        asked = [] if options.file is None else read_prompts(options.file, options.out)
        panel, sampling = load(options)
        if options.file is None:
            converse(panel, sampling)
        else:
            answer_file(panel, sampling, asked, options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def load(options: argparse.Namespace) -> tuple[Panel, Sampling]:
    """Load the models, and say how they are asked."""
    import transformers

    from dpo.models.answers import choose_sampling
    from dpo.models.side_by_side import load_panel
    from dpo.system.arithmetic import set_up_torch

    set_up_torch(deterministic=False, compiles=False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    panel = load_panel(
        options.path,
        reference=options.reference,
        with_reference=not options.no_reference,
        beta=options.beta,
        form=options.format,
        model=options.model,
        trust_remote_code=options.trust_remote_code,
    )
    sampling = choose_sampling(
        panel.sides[0].model,
        panel.encoder.tokenizer,
        {name: getattr(options, name) for name in SAMPLING},
        chat=panel.form == CHAT,
        max_new_tokens=options.max_new_tokens,
        seed=(options.seed,),
    )
    print(f"prompts are asked in the form {panel.form}: {MEANINGS[panel.form]} (--format changes it)")
    print(f"answers are drawn with {sampling} (--temperature, --top-p, --top-k)")
    return panel, sampling


def read_prompts(file: Path, out: Path) -> list[tuple[Any, Any]]:
    """Read a file's prompts, and the tools of each, or None.

    Raises InputError, also if `out` exists.
    """
    from dpo.data.schema import get_field
    from dpo.data.sources import load_rows
    from dpo.settings.places import Source

    if not file.is_file():
        raise InputError(f"--file {file} is not a file")
    if os.path.lexists(out) or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} exists already, or its directory does not: give another file")
    rows = enumerate(load_rows(Source(str(file)), "train"), start=1)
    return [(get_field(row, "prompt", f"record {n} of {file}", (str, list)), row.get("tools")) for n, row in rows]


def answer_file(panel: Panel, sampling: Sampling, asked: list[tuple[Any, Any]], options: argparse.Namespace) -> None:
    """Write the answers to each prompt, with rewards and numbers of tokens."""
    from tqdm import tqdm

    encoded = [
        panel.encode(prompt, f"record {n} of {options.file}", sampling, tools)
        for n, (prompt, tools) in enumerate(asked, start=1)
    ]
    with options.out.open("x", encoding="utf-8") as file:
        for start in tqdm(range(0, len(encoded), options.batch_size), unit="batch", disable=None):
            prompts = encoded[start : start + options.batch_size]
            numbers = range(start, start + len(prompts))
            lines: list[dict[str, Any]] = [
                {"prompt": asked[n][0], "reference": None, "rewards": {}, "tokens": {"prompt": len(encoded[n])}}
                for n in numbers
            ]
            for side in panel.sides:
                answers = panel.answer(side, prompts, numbers, sampling)
                for line, answer, reward in zip(lines, answers, panel.rewards(prompts, answers), strict=True):
                    line[side.name] = answer.text
                    line["rewards"][side.name] = reward
                    line["tokens"][side.name] = len(answer.tokens)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
    print(f"{count(len(encoded), 'prompt')} answered in {options.out}")


def converse(panel: Panel, sampling: Sampling) -> None:
    """Hold a conversation with each side, over typed or piped lines; in the form raw each prompt is alone."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in input())
    print(f"Type a prompt of one line, then Enter; {RESET} starts a new conversation.")
    print("Ctrl-C ends an answer; Ctrl-D, or Ctrl-C at the prompt, ends the session.")
    histories: list[list[dict[str, str]]] = [[] for _ in panel.sides]
    for index in itertools.count():
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            break
        if line.strip() == RESET:
            histories = [[] for _ in panel.sides]
        if line.strip() in ("", RESET):
            continue
        asked = [[*history, {"role": "user", "content": line}] for history in histories]
        try:
            # before the first answer, as one that does not fit changes no history
            prompts = [
                panel.encode(line if panel.form == RAW else messages, f"this conversation ({RESET} ends it)", sampling)
                for messages in asked
            ]
            for side, prompt, messages in zip(panel.sides, prompts, asked, strict=True):
                print(f"--- {side.name} ---", flush=True)
                [answer] = panel.answer(side, [prompt], [index], sampling, show=True)
                [reward] = panel.rewards([prompt], [answer])
                length = count(len(answer.tokens), "token")
                print(f"({length if reward is None else f'reward {reward:+.4g}, {length}'})\n", flush=True)
                messages.append({"role": "assistant", "content": answer.text.strip()})
            histories = histories if panel.form == RAW else asked
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # the answer ends, not the session
            print("\nended")


if __name__ == "__main__":
    set_allocators(os.environ)
    sys.exit(main())
