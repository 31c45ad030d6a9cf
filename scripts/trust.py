"""The only option by which a script runs a model's Python code."""

from __future__ import annotations

import argparse


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-remote-code`, which no config can set."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that comes with a model or tokenizer; a run's config.yaml cannot allow it",
    )
