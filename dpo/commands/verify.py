"""Verify checkpoints: compare every byte with the manifest's checksums.

    dpo verify RUN_OR_CHECKPOINT [...]

Exit status: 0 if all are intact, 1 if one is damaged or no checkpoint.
"""

from pathlib import Path

from dpo.checkpoint.files import DamagedCheckpoint, check_complete, find_checkpoints
from dpo.commands import make_parser
from dpo.redaction import redact
from dpo.system.plain_files import resolve_path


def main(arguments: list[str]) -> int:
    parser = make_parser("verify", __doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN_OR_CHECKPOINT")
    status = 0
    for path in map(resolve_path, parser.parse_args(arguments).paths):
        if not path.exists():
            status = 1
            print(f"missing  {redact(str(path))}")
            continue
        for checkpoint in find_checkpoints(path) or [path]:  # without any, the path should be a checkpoint itself
            try:
                n_bytes = sum(file["bytes"] for file in check_complete(checkpoint)["files"].values())
                print(f"whole    {checkpoint} ({n_bytes / 1e9:.3g} GB)", flush=True)
            except DamagedCheckpoint as error:
                status = 1
                print(f"damaged  {redact(str(error))}", flush=True)
    return status
