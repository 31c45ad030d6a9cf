"""The option by which alone a script runs the Python code that a model brings."""

from __future__ import annotations

import argparse


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-remote-code`: the config of a run, which may come from anywhere, cannot give it."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that a model or tokenizer brings; a run's config.yaml does not count",
    )
