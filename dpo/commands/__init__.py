"""The command `dpo`: each of its commands but `train` is a module of this package."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dpo import __version__
from dpo.errors import InputError, RunError, explaining_full_disk, suggest
from dpo.redaction import redact
from dpo.settings.keys import KEYS
from dpo.system import host
from dpo.system.signals import end_on_stop_signals

COMMANDS = {
    "train": "train; dpo train --help shows all keys",
    "estimate": "memory, time and communication of a run on other GPUs",
    "report": "curves and findings of runs, in one page",
    "sample": "ask a policy and its reference",
    "export": "write a policy as a model of transformers",
    "evaluate": "judge the answers of two models, or run lm-eval",
    "ledger": "the hardest pairs of a run, and likely wrong labels",
    "consolidate": "make a full checkpoint of a sharded one",
    "verify": "compare checkpoints with their checksums",
    "doctor": "check this machine, and recommend settings for it",
    "demo": "train a small model in .cache/demo, in 3 minutes",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    host.set_allocators(os.environ)  # before a command imports torch
    name, *rest = host.take_local_rank(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    host.harden_stdio()
    if name == "train":  # before the imports, which take a while: a signal may come during them
        end_on_stop_signals()
        from dpo.train import start

        start(rest)
        return 0
    if name in COMMANDS:
        return importlib.import_module(f"dpo.commands.{name}").main(rest)
    if name == "--version":
        print(f"dpo {__version__}")
        return 0
    lines = [f"  {command:<12}{meaning}" for command, meaning in COMMANDS.items()]
    usage = "\n".join(["usage: dpo COMMAND ..., dpo COMMAND --help, dpo --version", "", *lines])
    if name in ("-h", "--help"):
        print(usage)
        return 0
    hint = suggest(name, COMMANDS)
    if "=" in name:
        hint = ": settings go to dpo train"
    elif os.path.isdir(name):
        hint = f": a run goes to a command, such as dpo report {name}"
    print(f"dpo {name} is not a command{hint}\n{usage}", file=sys.stderr)
    return 2


def command(main: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    """Make a command's function return its exit status: 0, 1 for a RunError, 2 for an InputError, 130 for Ctrl-C.

    The message of such an error is printed; other errors are bugs, and keep their traceback.
    """

    def run(arguments: list[str]) -> int:
        try:
            with explaining_full_disk():
                main(arguments)
        except (InputError, RunError) as error:
            print(f"error: {redact(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, InputError) else 1
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130
        return 0

    return run


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make a command's parser, whose help begins with its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"dpo {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse_as(key: str) -> Callable[[str], Any]:
    """Make a `type` for argparse that accepts the numbers that a key of the config accepts."""

    def parse(text: str) -> Any:
        for kind in (int, float):
            with suppress(ValueError):
                if KEYS[key].accepts(value := kind(text)):
                    return value
        raise argparse.ArgumentTypeError(f"{text} must be {KEYS[key].wanted.removesuffix(', or null')}")

    return parse


parse_count = parse_as("batch_size")  # an integer from 1


def set_up_models() -> None:
    """Set up torch, and let transformers print nothing but errors."""
    import transformers

    from dpo.system.arithmetic import set_up_torch

    set_up_torch(deterministic=False, compiles=False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--temperature", type=parse_as("sample_temperature"), help="0: the most probable token")
    option("--top-p", type=parse_as("sample_top_p"), help="0.9: only the most probable 90 percent")
    option("--top-k", type=parse_as("sample_top_k"), help="tokens to draw from, 0: all")
    option("--seed", type=parse_as("seed"), default=0, help="default: 0")
    option("--max-new-tokens", type=parse_count, default=256, help="default: 256")


def add_model_options(parser: argparse.ArgumentParser, *template_names: str) -> None:
    """Add the options for a chat template and for a model's own code.

    The config of a run cannot set them, as it may be someone else's, and they read a file and run code.
    """
    parser.add_argument("--chat-template", *template_names, metavar="FILE", help="instead of the run's own template")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run a model's own Python code, which a run's config.yaml cannot allow",
    )
