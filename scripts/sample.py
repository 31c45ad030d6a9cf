"""Ask policies and their reference, and show answers side by side.

    python -m scripts.sample CHECKPOINT_OR_DIR [...]
    python -m scripts.sample CHECKPOINT_OR_DIR [...] --file prompts.jsonl --out answers.jsonl

CHECKPOINT_OR_DIR is a run's directory (its LATEST), one of its step-N, LATEST or BEST, a policy.pt, a directory in
Hugging Face's format or PEFT's, or a Hub id. The reference is what the run started from, or `--reference`. The reward
of a policy's answer is beta * (log pi - log ref), with the run's beta or `--beta`; the reward of the reference's answer
takes pi from the first policy. An answer depends on `--seed` and the prompt's number, not on its batch.

A prompt that is a string is put into the form that the model was trained on: hh is "\\n\\nHuman: ...
\\n\\nAssistant:", chat the tokenizer's chat template, raw the string as it is. If the form is not known, it is chat, or
raw without a template. The script prints the form, and `--format` chooses another.
Records of the file have `prompt`: a string, or a list of chat messages. Exit status: 0, 1 if the answers cannot be
written, 2 bad input, 130 if Ctrl-C ended a file's answers early.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpo.data.asking import AUTO, FORMATS, MEANINGS, RAW
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.keys import read_rule
from scripts.trust import add_trust_option

if TYPE_CHECKING:
    from dpo.models.answers import Sampling, Tokens
    from dpo.models.side_by_side import Answers, Panel


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample",
        description=__doc__.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option, at_least_1 = parser.add_argument, _value(int, "int >= 1")
    temperature, share = _value(float, "number >= 0"), _value(float, "number (0, 1]")
    option("paths", nargs="+", metavar="CHECKPOINT_OR_DIR")
    option("--reference", metavar="DIR", help="reference, instead of the model that the run started from")
    option("--no-reference", action="store_true", help="ask the policies alone")
    option("--beta", type=_value(float, "number > 0"), help="beta of the rewards, instead of the run's loss.beta")
    option("--file", type=Path, help="prompts, one JSON object per line")
    option("--out", type=Path, help="where the answers go, one JSON object per line; written anew")
    option("--batch-size", "--batch_size", type=at_least_1, default=8, help="prompts of --file at a time (default: 8)")
    option("--temperature", type=temperature, default=1.0, help="0: the most probable token (default: 1)")
    option("--top-p", "--top_p", type=share, default=1.0, help="0.9: only the most probable 90 percent")
    option("--seed", type=_value(int, "int [0, 4294967295]"), default=0)
    option("--max-new-tokens", "--max_new_tokens", type=at_least_1, default=256, help="(default: 256)")
    option("--format", choices=FORMATS, default=AUTO, help="form of prompts; see above")
    option("--no-chat-template", dest="format", action="store_const", const=RAW, help="--format raw")
    option("--model", metavar="DIR_OR_HUB_ID", help="base model of a policy.pt without a config.yaml")
    add_trust_option(parser)
    asked = parser.parse_args(arguments)
    if (asked.file is None) != (asked.out is None):
        parser.error("--file and --out go together")
    if asked.no_reference and asked.reference:
        parser.error("--reference and --no-reference exclude each other")
    return asked


def _value(kind: type, spec: str) -> Callable[[str], Any]:
    """Parser of an option's value, by a spec like a config key's."""
    rule = read_rule(spec)

    def parse_value(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if rule.holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {rule.wanted}")

    return parse_value


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    try:
        sample(asked)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # InputError names unreadable files
        print(f"error: the answers cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def sample(asked: argparse.Namespace) -> None:
    records = [] if asked.file is None else read_prompts(asked.file, asked.out)  # before models are loaded

    import transformers

    from dpo.models.answers import Sampling
    from dpo.models.side_by_side import Choices, load_panel

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    choices = Choices(
        reference=asked.reference,
        with_reference=not asked.no_reference,
        beta=asked.beta,
        form=asked.format,
        model=asked.model,
        trust_remote_code=asked.trust_remote_code,
    )
    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, asked.seed)
    panel = load_panel(asked.paths, choices, log=lambda line: print(line, file=sys.stderr))
    form = f"prompts are asked in the form {panel.form}: {MEANINGS[panel.form]} (--format changes it)"
    if asked.file is None:
        converse(panel, sampling, form)
    else:
        prompts = [panel.encode(r, f"record {n} of {asked.file}", sampling) for n, r in enumerate(records, start=1)]
        print(form)
        answer_all(panel, sampling, records, prompts, asked)


# --- a file of prompts ---------------------------------------------------------------------------------------------


def read_prompts(file: Path, out: Path) -> list[Any]:
    """Read a file's prompts, and check that answers can be written."""
    from dpo.data.schema import get_field
    from dpo.data.sources import load_rows
    from dpo.settings.places import Source
    from dpo.system.plain_files import check_writable

    if not file.is_file():
        raise InputError(f"--file {file} is not a file")
    check_writable(out)
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no directory {out.parent}")
    if out.resolve() == file.resolve():
        raise InputError(f"--out {out} is the file of prompts itself: give another")
    rows = load_rows(Source(str(file)), "train")
    return [get_field(row, "prompt", f"record {n} of {file}", (str, list)) for n, row in enumerate(rows, start=1)]


def answer_all(
    panel: Panel, sampling: Sampling, records: list[Any], prompts: list[Tokens], asked: argparse.Namespace
) -> None:
    """Write each record's answers, with rewards and numbers of tokens."""
    from tqdm import tqdm

    finite: dict[str, list[float]] = {}  # finite rewards, by the name of the side
    with asked.out.open("w", encoding="utf-8") as out:
        for start in tqdm(range(0, len(prompts), asked.batch_size), unit="batch", disable=None):
            batch = prompts[start : start + asked.batch_size]
            answers = panel.answer(batch, range(start, start + len(batch)), sampling)
            rewards = panel.rewards(batch, answers)
            for record, prompt, by_side, reward in zip(records[start:], batch, answers, rewards, strict=False):
                kept = {name: value for name, value in reward.items() if value is not None and math.isfinite(value)}
                for name, value in kept.items():
                    finite.setdefault(name, []).append(value)
                texts: dict[str, str | None] = {name: answer.text for name, answer in by_side.items()}
                texts.setdefault("reference", None)
                tokens = {"prompt": len(prompt), **{name: len(answer.tokens) for name, answer in by_side.items()}}
                nullable = {name: kept.get(name) for name in reward}  # JSON has no NaN and no infinity
                line = {"prompt": record, **texts, "rewards": nullable, "tokens": tokens}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
    means = ""
    for name, values in finite.items():
        means += f"; mean reward of the {name} {fmean(values):.4g}"
        if len(values) < len(prompts):
            means += f" over {len(values)}"
    print(f"{count(len(prompts), 'prompt')} answered in {asked.out}{means}")


# --- prompts that are typed ----------------------------------------------------------------------------------------


def converse(panel: Panel, sampling: Sampling, form: str) -> None:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys in input())
        print("Type a prompt and Enter; one of several lines comes from --file.")
        print("Ctrl-C ends an answer; Ctrl-D, or Ctrl-C at the prompt, ends the session.")
    print(form)
    show = show_columns if on_terminal else show_lines
    for number, line in enumerate(iterate_typed(on_terminal)):
        try:
            show(panel, panel.encode(line, "this prompt", sampling), number, sampling)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print("ended")


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


def show_columns(panel: Panel, prompt: Tokens, number: int, sampling: Sampling) -> None:
    """Show answers side by side while they are sampled."""
    from dpo.reporting.columns import Columns

    columns = Columns([side.name for side in panel.sides])
    answers = panel.stream(prompt, number, sampling, lambda name, text: columns.show(name, text.strip()))
    for name, answer in answers.items():
        columns.show(name, answer.text.strip())
    columns.close([*describe(panel, prompt, answers).values()])


def show_lines(panel: Panel, prompt: Tokens, number: int, sampling: Sampling) -> None:
    """Show answers one below the other, for programs."""
    [answers] = panel.answer([prompt], [number], sampling)
    for name, text in describe(panel, prompt, answers).items():
        print(f"--- {name}: {text} ---\n{answers[name].text.strip()}")
    print(flush=True)


def describe(panel: Panel, prompt: Tokens, answers: Answers) -> dict[str, str]:
    """Reward and length of each answer, by the name of its side."""
    [rewards] = panel.rewards([prompt], [answers])
    texts = {name: count(len(answer.tokens), "token") for name, answer in answers.items()}
    return {
        name: text if rewards[name] is None else f"reward {rewards[name]:+.4g}, {text}" for name, text in texts.items()
    }


if __name__ == "__main__":
    sys.exit(main())
