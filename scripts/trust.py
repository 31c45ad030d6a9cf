"""The only option by which a script runs Python code of a model."""

from __future__ import annotations

import argparse


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-remote-code`, which a run's config cannot set, as it may come from anywhere."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that a model or tokenizer brings; a run's config.yaml does not count",
    )
