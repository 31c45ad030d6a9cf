import argparse


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add the only option by which a script runs a model's code; no config can set it."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that comes with a model or tokenizer; a run's config.yaml cannot allow it",
    )
