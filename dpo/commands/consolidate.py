"""Make a full checkpoint of a sharded one (checkpoint_format=sharded), with a tensor at a time in memory.

    dpo consolidate RUN_OR_CHECKPOINT OUT [--hf]

OUT gets policy.pt, optimizer.pt and scheduler.pt as the reference code writes them, and all that a run needs to resume
from it. With --hf it gets what dpo export writes, which has more options: a model for transformers, or an adapter.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from dpo.checkpoint.files import MANIFEST, check_complete, read_file, read_state, write_checkpoint
from dpo.checkpoint.shards import SHARDS, join_in_files
from dpo.commands import command, make_parser
from dpo.errors import InputError
from dpo.models.export import export
from dpo.settings.places import check_exists
from dpo.system.plain_files import resolve_path


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("consolidate", __doc__)
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--hf", action="store_true", help="make a model for transformers, or an adapter")
    options = parser.parse_args(arguments)
    if options.hf:
        export(options.path, options.out)
        return
    checkpoint = resolve_path(options.path)
    check_exists(checkpoint)
    if not (checkpoint / MANIFEST).exists():
        checkpoint = resolve_path(checkpoint / "LATEST")
    out = resolve_path(options.out)
    if out.exists():
        raise InputError(f"{out} exists: choose another name")
    manifest = check_complete(checkpoint)
    facts = {key: value for key, value in manifest.items() if key not in ("examples", "files", "sha256")}
    metrics = read_file(checkpoint / "scheduler.pt")["metrics"]
    states = read_states(checkpoint, manifest["files"], out.parent)
    write_checkpoint(out, states, step_idx=manifest["examples"], metrics=metrics, facts=facts)
    print(f"wrote {out}; a run resumes from it if its name is step-N")


def read_states(checkpoint: Path, files: Mapping, folder: Path) -> Iterator[tuple]:
    """Yield the names and states of a checkpoint's files, with whole tensors, for `write_checkpoint`.

    A file that is not a state is yielded as bytes. `folder` is where temporary files may be written.
    """
    for name in files:
        path = checkpoint / name
        if path.match(SHARDS):  # read below, with the state of which it has a part
            continue
        if path.suffix != ".pt":
            yield name, path.read_bytes()
            continue
        with tempfile.TemporaryDirectory(prefix=".dpo-", dir=folder) as scratch:
            # The caller writes a state before it asks for the next one, so the mapped files may then be deleted.
            yield path.stem, join_in_files(read_state(path), Path(scratch))
