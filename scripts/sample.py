"""Ask policies and their reference, and show answers one after the other.

    python -m scripts.sample CHECKPOINT_OR_DIR [...]
    python -m scripts.sample CHECKPOINT_OR_DIR [...] --file prompts.jsonl --out answers.jsonl

CHECKPOINT_OR_DIR is a run's directory (which means its LATEST), one of its step-N, LATEST or BEST, a policy.pt, a
directory in Hugging Face's format or PEFT's, or a Hub id. The reference is the model that the run started from, or
`--reference`. The reward of a policy's answer is beta * (log pi - log ref), with the run's beta or `--beta`; for the
reference's answer, pi is the first policy. An answer depends on `--seed` and the prompt's number, not on the batch.

A prompt that is a string is put into the form that the model was trained on: hh is "\\n\\nHuman: ...
\\n\\nAssistant:", chat the tokenizer's chat template, raw the string as it is. If that form is not known, chat is used
if the tokenizer has a template, else raw. The script prints the form, and `--format` chooses another.

Temperature, top-p and top-k are those of the model's generation config. What that lacks is 0.7, 0.9 and 50 in the form
chat, else 1, 1 and 50. Without `--file`, typed prompts make a conversation with each model; /reset starts a new one.

Each record of `--file` has `prompt`: a string, or a list of chat messages; it may have `tools`, which the chat template
gets. Exit status: 0, 1 if the answers cannot be written, 2 bad input, 130 if Ctrl-C ended a file's answers early.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from dpo.data.asking import AUTO, CHAT, FORMATS, MEANINGS, RAW
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.keys import read_key
from dpo.system.host import set_allocators
from scripts import add_trust_option

if TYPE_CHECKING:
    from dpo.models.answers import Sampling
    from dpo.models.side_by_side import Panel

RESET = "/reset"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, or exit with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample",
        description=__doc__.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    at_least_1, at_least_0 = _make_parser(int, ">= 1"), _make_parser(float, ">= 0")
    above_0, share = _make_parser(float, "> 0"), _make_parser(float, "(0, 1]")
    option("paths", nargs="+", metavar="CHECKPOINT_OR_DIR")
    option("--reference", metavar="DIR", help="reference, instead of the model that the run started from")
    option("--no-reference", action="store_true", help="show no answers of a reference, and no rewards")
    option("--beta", type=above_0, help="beta of the rewards, instead of the run's loss.beta")
    option("--file", type=Path, help="prompts, one JSON object per line")
    option("--out", type=Path, help="new file for the answers, one JSON object per line")
    option("--batch-size", "--batch_size", type=at_least_1, default=8, help="prompts of --file at a time (default: 8)")
    option("--temperature", type=at_least_0, help="0: the most probable token; see above")
    option("--top-p", "--top_p", type=share, help="0.9: only the most probable 90 percent; see above")
    option("--top-k", "--top_k", type=_make_parser(int, ">= 0"), help="tokens to draw from, 0: all; see above")
    option("--seed", type=_make_parser(int, "[0, 4294967295]"), default=0)
    option("--max-new-tokens", "--max_new_tokens", type=at_least_1, default=256, help="(default: 256)")
    option("--format", choices=FORMATS, default=AUTO, help="form of prompts; see above")
    option("--no-chat-template", dest="format", action="store_const", const=RAW, help="--format raw")
    option("--model", metavar="DIR_OR_HUB_ID", help="base model of a policy.pt without a config.yaml")
    add_trust_option(parser)
    options = parser.parse_args(arguments)
    if (options.file is None) != (options.out is None):
        parser.error("--file and --out go together")
    if options.no_reference and options.reference:
        parser.error("--reference and --no-reference exclude each other")
    return options


def _make_parser(kind: type, bounds: str) -> Callable[[str], Any]:
    """Make the parser of an option whose value has bounds, as those of the config."""
    rule = read_key(Annotated[kind, bounds]).rule

    def parse_value(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if rule.holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {rule.wanted}")

    return parse_value


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        sample(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a file that cannot be read raises InputError, so writing failed
        print(f"error: the answers cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def sample(options: argparse.Namespace) -> None:
    """Load models, and answer prompts of a file or typed ones."""
    # a wrong file is refused before models are loaded
    asked = [] if options.file is None else read_prompts(options.file, options.out)

    import transformers

    from dpo.models.answers import choose_sampling
    from dpo.models.side_by_side import load_panel
    from dpo.system.arithmetic import set_up_torch

    set_up_torch(deterministic=False, compiles=False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    panel = load_panel(
        options.paths,
        reference=options.reference,
        with_reference=not options.no_reference,
        beta=options.beta,
        form=options.format,
        model=options.model,
        trust_remote_code=options.trust_remote_code,
        log=lambda line: print(line, file=sys.stderr),
    )
    wanted = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    sampling = choose_sampling(
        panel.sides[0].model,
        panel.tokenizer,
        wanted,
        chat=panel.form == CHAT,
        max_new_tokens=options.max_new_tokens,
        seed=(options.seed,),
    )
    print(f"prompts are asked in the form {panel.form}: {MEANINGS[panel.form]} (--format changes it)")
    print(f"answers are drawn with {sampling} (--temperature, --top-p, --top-k)")
    if options.file is None:
        converse(panel, sampling)
    else:
        answer_file(panel, sampling, asked, options)


# --- a file of prompts ---------------------------------------------------------------------------------------------


def read_prompts(file: Path, out: Path) -> list[tuple[Any, Any]]:
    """Read a file's prompts, and the tools of each, or None.

    Raises InputError, also if the answers cannot be written to `out`.
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
    finite: dict[str, list[float]] = {side.name: [] for side in panel.sides}  # rewards
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
                for line, answer, reward in zip(lines, answers, panel.rewards(side, prompts, answers), strict=True):
                    is_finite = reward is not None and math.isfinite(reward)
                    finite[side.name] += [reward] if is_finite else []
                    line[side.name] = answer.text
                    line["rewards"][side.name] = reward if is_finite else None  # null for NaN and infinity too
                    line["tokens"][side.name] = len(answer.tokens)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
    means = [
        f"; mean reward of the {name} {fmean(rewards):.4g} over {count(len(rewards), 'answer')}"
        for name, rewards in finite.items()
        if rewards
    ]
    print(f"{count(len(encoded), 'prompt')} answered in {options.out}{''.join(means)}")


# --- prompts that are typed ----------------------------------------------------------------------------------------


def converse(panel: Panel, sampling: Sampling) -> None:
    """Hold a conversation with each side, over typed or piped lines."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys in input())
        print("Type a prompt of one line, then Enter; --file takes prompts of several lines.")
        print("Ctrl-C ends an answer; Ctrl-D, or Ctrl-C at the prompt, ends the session.")
    if panel.form != RAW:
        print(f"each model continues its own conversation; {RESET} starts anew")
    histories: dict[str, list[Any]] = {side.name: [] for side in panel.sides}
    for number, line in enumerate(iterate_typed(on_terminal)):
        if line.strip() == RESET:
            histories = {name: [] for name in histories}
            print("a new conversation")
            continue
        try:
            histories = answer_all(panel, sampling, histories, line, number)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print("\nended")  # the answer, not the session


def answer_all(
    panel: Panel, sampling: Sampling, histories: dict[str, list[Any]], line: str, number: int
) -> dict[str, list[Any]]:
    """Show the answers, one after the other, and return the longer histories.

    In the form raw a prompt is a text without a history.
    """
    asked = {name: [*history, {"role": "user", "content": line}] for name, history in histories.items()}
    where = f"this conversation ({RESET} starts anew)" if any(histories.values()) else "this prompt"
    # before the first answer, as one that does not fit changes no history
    prompts = {
        name: panel.encode(messages if histories[name] else line, where, sampling) for name, messages in asked.items()
    }
    for side in panel.sides:
        prompt = prompts[side.name]
        print(f"--- {side.name} ---", flush=True)
        [answer] = panel.answer(side, [prompt], [number], sampling, show=True)
        [reward] = panel.rewards(side, [prompt], [answer])
        length = count(len(answer.tokens), "token")
        print(f"({length if reward is None else f'reward {reward:+.4g}, {length}'})\n", flush=True)
        asked[side.name].append({"role": "assistant", "content": answer.text.strip()})
    return histories if panel.form == RAW else asked


def iterate_typed(on_terminal: bool) -> Iterator[str]:
    """Yield the typed lines that are not empty, until Ctrl-D or Ctrl-C."""
    while True:
        try:
            line = input("> " if on_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if on_terminal:
                print()
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    set_allocators(os.environ)
    sys.exit(main())
