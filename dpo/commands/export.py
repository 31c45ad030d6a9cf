"""Export a checkpoint as a model of transformers, with a model card.

    dpo export CHECKPOINT OUT [--merge] [--dtype bfloat16]

Without `--merge` an adapter is exported in PEFT's format, with it CHECKPOINT may be such an adapter. Exit status: 0
written, 1 could not be written, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import transformers

from dpo.commands import add_trust_option
from dpo.errors import InputError, RunError
from dpo.models.export import export
from dpo.models.pretrained import DTYPES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dpo export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, step-N, LATEST, BEST, or a policy.pt")
    parser.add_argument("out", metavar="OUT", help="the directory to make")
    parser.add_argument("--merge", action="store_true", help="write an adapter and its base as one model")
    parser.add_argument("--dtype", choices=[*DTYPES], help="dtype of the exported weights (default: unchanged)")
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="the base model, instead of the run's own")
    add_trust_option(parser)
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        print(f"exported {export(**vars(options))}")
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
