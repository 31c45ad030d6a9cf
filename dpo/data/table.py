"""Prompts with their responses, in Arrow files that all processes map.

So texts are in memory once per machine. A table is a directory `dpo-examples/KEY` in a directory of `local_dirs`. It
holds `train.arrow`, `test.arrow`, and `facts.json`, which has the counts taken while the table was built and the
checksums of all three files. A table is built under a temporary name, and renamed once it is complete. Its file `MARK`
says that it is ours: nothing without it is removed. Every run verifies the checksums before it uses a table. Tables may
be deleted at any time: the next run builds a new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.json

from dpo.data.schema import Messages, PreferenceData, TruncationMode
from dpo.data.tokenization import split_at_cuts, unescape
from dpo.errors import InputError, RunError, explaining_library, one_sentence
from dpo.losses import TRAINS_ON
from dpo.system.plain_files import check_readable, make_directory, read_json, remove

FOLDER = "dpo-examples"  # in a directory of `local_dirs`
MARK, TEMPORARY = ".dpo-table", ".dpo-table-"  # a file in each table, and what temporary names begin with
FACTS = "facts.json"
SPLITS = ("train", "test")
ABANDONED_SECS = 24 * 3600  # older directories with a temporary name were left by killed processes
ROWS_PER_BATCH = 1000  # of the Arrow file: so many prompts are in memory while they are written


def make_schema(trains_on: str) -> pa.Schema:
    """Make the schema of a table for a kind of examples."""
    roles = TRAINS_ON.get(trains_on, TRAINS_ON["pairs"])  # "prompts", not in TRAINS_ON, may have pairs
    return pa.schema(
        {
            "text": pa.large_string(),
            "responses": pa.list_(pa.large_string()),
            "examples": pa.list_(pa.struct({role: pa.int32() for role in roles})),
            "truncation_mode": pa.string(),
            "rendered": pa.bool_(),
            "apart": pa.bool_(),
            "dataset": pa.string(),
            "messages": pa.large_string(),  # as JSON
            "tools": pa.large_string(),  # as JSON
            "cuts": pa.list_(pa.list_(pa.int32())),
            "weights": pa.list_(pa.float64()),
            "margins": pa.list_(pa.float64()),
            "rows": pa.list_(pa.int64()),
        }
    )


class Prompt(NamedTuple):
    """A prompt with its responses, and the examples made of them."""

    text: str
    responses: list[str]
    examples: list[dict[str, int]]  # each maps a role to an index into `responses`
    truncation_mode: TruncationMode
    rendered: bool  # by a chat template, so special tokens in the text are intended
    index_in_split: int = 0
    dataset: str = ""
    messages: Messages | None = None  # from which the text was rendered
    weights: list[float] | None = None  # of the examples; None: 1
    margins: list[float] | None = None  # of the examples
    rows: list[int] | None = None  # numbers of the examples' records in their source
    tools: list[Any] | None = None  # that the messages may call
    # for each response, alternately where a part that is not scored begins and ends; None: all text is scored
    cuts: list[list[int]] | None = None
    apart: bool = True  # as the reference code tokenizes prompt and response; otherwise as one text

    def texts(self, example_index: int) -> dict[str, str]:
        """The responses of an example by role; empty for a prompt without examples."""
        roles = self.examples[example_index] if self.examples else {}
        return {role: self.responses[i] for role, i in roles.items()}

    def pieces(self, example_index: int) -> list[list[str]]:
        """The pieces of each response of an example (`split_at_cuts`)."""
        roles = self.examples[example_index] if self.examples else {}
        return [self._split(i) for i in roles.values()]

    def all_pieces(self) -> list[list[str]]:
        """The pieces of all responses."""
        return [self._split(i) for i in range(len(self.responses))]

    def _split(self, index: int) -> list[str]:
        return split_at_cuts(self.responses[index], self.cuts[index] if self.cuts else ())


def iterate_prompts(
    get_dataset: Callable[..., PreferenceData],
    names: Sequence[str],
    split: str,
    *,
    trains_on: str,
    unpair: bool = False,
    list_pairs: str = "all",
    with_margins: bool = False,
    notes: list[str] | None = None,
    left_out: list[tuple[str, int, str]] | None = None,
    held_out: dict[str, PreferenceData] | None = None,
    **dataset_options: Any,
) -> Iterator[Prompt]:
    """Yield the prompts of several datasets, one dataset after another.

    Examples are of the kind `trains_on` (see `PreferenceData.take`). The loaders' notes are added to `notes`, and the
    records that they left out to `left_out`. `held_out` keeps the test splits that come with train splits, for the next
    call. Raises InputError for pairs under a loss of labels, unless `unpair`, and for data that lacks margins, if
    `with_margins`.
    """
    indices, held_out = count(), {} if held_out is None else held_out
    for name in names:
        margin_option = {"with_margins": True} if with_margins else {}  # a loader of the user may not know this option
        if name in held_out:
            data = held_out.pop(name)
            if not dataset_options.get("silent"):
                print(*data.notes, sep="\n")
        else:
            data = get_dataset(name, split, trains_on=trains_on, **margin_option, **dataset_options)
        if data.held_out is not None:
            held_out[name] = data.held_out
        if notes is not None:
            notes += data.notes
        if left_out is not None:
            left_out += [(name, number, reason) for number, reason in data.bad_records]
        if trains_on == "labels" and not unpair and any(entry["pairs"] for entry in data.values()):
            raise InputError(
                f"dataset {name} has pairs, and this loss trains on single responses with labels: give unpair=true, "
                f"which makes each chosen response desirable and each rejected one undesirable"
            )
        if with_margins and not data.has_margins:
            raise InputError(
                f"loss.offset_by_margin=true needs the margin of each pair, and dataset {name} has none: give pairs "
                f"with a column margin, or name the column with dataset_sources.{name}.columns.margin=COLUMN"
            )
        for text, responses, examples, others in data.take(trains_on, list_pairs=list_pairs):
            yield Prompt(
                text,
                responses,
                examples,
                data.truncation_mode,
                data.rendered,
                index_in_split=next(indices),
                dataset=name,
                apart=data.apart,
                **others,
            )


def write_prompts(path: Path, prompts: Iterable[Prompt], *, trains_on: str = "pairs") -> None:
    """Write prompts to an Arrow file, a few at a time."""
    remaining, schema = iter(prompts), make_schema(trains_on)
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            lines = []
            for prompt in batch:
                chat = {"messages": prompt.messages, "tools": prompt.tools}
                as_json = {name: None if value is None else json.dumps(value) for name, value in chat.items()}
                lines.append(json.dumps(prompt._asdict() | as_json) + "\n")
            # `from_pylist` would import pandas (0.5 s, 60 MB); so would `to_numpy` in `PromptTable`
            writer.write_table(_parse_lines("".join(lines).encode(), schema))
    pa.default_memory_pool().release_unused()  # pyarrow would keep about as much memory as the texts took


def _parse_lines(lines: bytes, schema: pa.Schema) -> pa.Table:
    """Parse JSON lines with a schema's columns; other keys are ignored."""
    return pyarrow.json.read_json(
        pa.BufferReader(lines),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines)),  # a line must fit a block
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


class PromptTable(Sequence[Prompt]):
    """The prompts of a split, in a memory-mapped Arrow file.

    Each access to an item decodes a `Prompt` anew. `counts` has the number of examples per prompt.
    """

    def __init__(self, path: Path) -> None:
        with explaining_table(path.parent):
            check_readable(path)
            self._table = pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()
        # the examples of all prompts are one Arrow list, and its offsets say where those of each prompt begin
        counts = [np.diff(np.from_dlpack(chunk.offsets)) for chunk in self._table["examples"].chunks]
        self.counts = np.concatenate([np.zeros(0, dtype=np.int32), *counts])  # a table may have no chunk
        # columns without any value, such as messages and weights in most data, need not be decoded
        self._columns = [name for name in self._table.column_names if self._table[name].null_count < len(self._table)]

    def __len__(self) -> int:
        return len(self.counts)

    def iterate_texts(self) -> Iterator[tuple[str, list[str]]]:
        """Yield what the user wrote of each prompt, and the responses; faster than decoding whole prompts."""
        for batch in self._table.select(["text", "messages", "responses"]).to_batches():
            for text, messages, responses in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield _find_written(text, messages), responses

    def find_text(self, index: int) -> str:
        """Find what the user wrote of a prompt."""
        return _find_written(*(self._table[name][index].as_py() for name in ("text", "messages")))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # handles negative indices, and raises IndexError
        row = {name: self._table[name][index].as_py() for name in self._columns}
        # Arrow gives a null for each role that an example does not have
        row["examples"] = [{role: i for role, i in example.items() if i is not None} for example in row["examples"]]
        row |= {name: json.loads(row[name]) for name in ("messages", "tools") if row.get(name) is not None}
        return Prompt(**row, index_in_split=index)


def _find_written(text: str, messages: str | None) -> str:
    """Find what the user wrote: the contents of messages, or the text."""
    if messages is None:
        return unescape(text)
    return "\n\n".join(message.get("content") or "" for message in json.loads(messages))


def find_or_build(
    folder: Path,
    key: str | None,
    build: Callable[[Path], tuple[Mapping[str, Any], bool]],
    *,
    scratch: Path | None = None,
) -> tuple[Path, bool]:
    """Find the table named `key` in `folder`, or build it.

    A new table is put into `scratch` if that is given, and into `folder` otherwise. `build` writes both splits into a
    directory. It returns the table's facts, and whether `key` still names the data that `build` read, as the data may
    have changed meanwhile. A table without a valid key is named after its content.

    Returns the table's directory, and whether it was built now. Raises RunError if the table cannot be written.
    """
    if key is not None and is_whole(folder / key):
        return folder / key, False
    parent = scratch or folder
    try:
        make_directory(parent)
        remove_leftovers(parent)
        directory = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        try:
            (directory / MARK).touch()
            facts, key_is_valid = build(directory)
            files = {f"{split}.arrow": _hash(directory / f"{split}.arrow") for split in SPLITS}
            content = {"facts": facts, "files": files}
            text = json.dumps(content | {"sha256": _hash_facts(content)}, indent=1)
            (directory / FACTS).write_text(text + "\n", encoding="utf-8")
            name = key if key is not None and key_is_valid else f"content-{_hash_facts(content)[:32]}"
            return _publish(directory, parent / name), True
        finally:
            remove(directory)  # does nothing if the directory was renamed
    except OSError as error:
        raise RunError(
            f"the texts of the data cannot be written to {parent} ({error}): free some space, or give a directory on "
            f"another disk as the first of local_dirs"
        ) from error


def _publish(directory: Path, destination: Path) -> Path:
    """Rename a built table to its final name; return that path.

    A complete table that another process has put there is used instead. A damaged one is removed, and the renaming
    tried again. Raises RunError for anything else.
    """
    while True:
        try:
            return directory.rename(destination)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # the name is not taken
                raise
        if is_whole(destination):
            return destination
        if os.path.lexists(destination) and not _is_ours(destination):
            raise RunError(f"{destination} is not a table of texts that an earlier run left: move it away")
        with suppress(FileNotFoundError):  # another process has moved the damaged table away
            # renamed first, so that two processes never remove the same directory
            remove(destination.rename(directory.with_name(f"{directory.name}.damaged")))


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished tables that killed processes left behind.

    A directory younger than `ABANDONED_SECS` stays, as a process may still be building it.
    """
    for directory in folder.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process has removed it
            if _is_ours(directory) and time.time() - directory.stat().st_mtime > ABANDONED_SECS:
                remove(directory)


def _is_ours(table: Path) -> bool:
    return not table.is_symlink() and (table / MARK).is_file()


def read_facts(table: Path) -> dict[str, Any]:
    """Read `facts.json` of a table.

    Returns `facts`, the counts from when the table was built, and `files`, the checksums of both splits. Raises
    InputError or OSError if the file cannot be read or was changed.
    """
    content = read_json(table / FACTS)
    if not isinstance(content, dict) or content.pop("sha256", None) != _hash_facts(content):
        raise InputError(f"{table / FACTS} is damaged: its checksum is wrong")
    return content


def is_whole(table: Path) -> bool:
    """Return whether there is a table whose checksums are right."""
    try:
        files = read_facts(table)["files"]
        return all(_hash(table / name) == digest for name, digest in files.items())
    except (InputError, OSError):
        return False


def explaining_table(table: Path) -> AbstractContextManager[None]:
    """Turn errors of reading a table that was whole into InputErrors inside."""
    return explaining_library(
        lambda error: InputError(
            f"{table}, which has the texts, was removed or damaged while the run started ({one_sentence(error)}): "
            f"repeat the command, and it is built again"
        )
    )


def _hash(path: Path) -> str:
    check_readable(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_facts(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
