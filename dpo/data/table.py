"""Prompts with their responses, in Arrow files that all processes map.

So texts are in memory once per machine. A table is a directory `dpo-examples/KEY-...` in a directory of `local_dirs`.
It holds `train.arrow`, `test.arrow`, and `facts.json`, which has the counts taken while the table was built and a
checksum of all three files, which every run verifies. A table is built under a temporary name, and renamed once it is
complete; it replaces nothing. Tables may be deleted at any time: the next run builds a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.json

from dpo.data.schema import Messages, PreferenceData, Record, TruncationMode
from dpo.data.tokenization import split_at_cuts, unescape
from dpo.errors import InputError, RunError
from dpo.losses import TRAINS_ON
from dpo.system.plain_files import check_readable, make_directory, read_json, remove

FOLDER = "dpo-examples"  # in a directory of `local_dirs`
TEMPORARY = ".dpo-table-"  # what temporary names begin with
FACTS = "facts.json"
SPLITS = ("train", "test")
Facts = Mapping[str, Any]  # counts taken while a table is built
ROWS_PER_BATCH = 1000  # of the Arrow file: so many prompts are in memory while they are written


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

    def pieces(self, indices: Iterable[int]) -> list[list[str]]:
        """The pieces of some responses (`split_at_cuts`)."""
        return [split_at_cuts(self.responses[i], self.cuts[i] if self.cuts else ()) for i in indices]


def iterate_prompts(
    datasets: Iterable[tuple[str, PreferenceData]], trains_on: str, *, list_pairs: str = "all"
) -> Iterator[Prompt]:
    """Take the prompts out of named datasets, one after another, with examples of a kind:

    - "pairs": the pairs, and those that `list_pairs` makes of lists; equal scores make none
    - "prompts": the same, but a prompt whose lists make no pair is kept
    - "lists": the lists, and each pair as a list of two
    - "labels": the labelled responses, and both responses of each pair
    - "targets": the prompt's target if there are pairs or lists, otherwise each of its responses
    """
    index = 0
    for name, data in datasets:
        for text in list(data):  # removed, as a second copy of all texts might not fit into memory
            entry = data.pop(text)
            records = entry.get("records") or [Record(text, entry["responses"], entry["pairs"])]
            has_lists = any(record.scores for record in records)
            if trains_on == "targets" and (has_lists or entry["pairs"]):  # the target comes from the last record
                last = records[-1]
                cuts = last.cuts[last.best : last.best + 1]
                records = [last._replace(responses=[entry["sft_target"]], scores=(), cuts=cuts, first=0)]
            made = [(record, each) for record in records for each in record.list_examples(trains_on, list_pairs)]
            if not made and (trains_on == "labels" or (has_lists and trains_on != "prompts")):
                continue
            cuts = [cut for record in records for cut in record.cuts or [[]] * len(record.responses)]
            weights, margins, rows = (
                [getattr(record, name) for record, _ in made] for name in ("weight", "margin", "row")
            )
            yield Prompt(
                text,
                [response for record in records for response in record.responses],
                [{role: record.first + i for role, i in example.items()} for record, example in made],
                data.truncation_mode,
                data.rendered,
                index_in_split=index,
                dataset=name,
                messages=records[-1].messages,
                weights=None if None in weights else weights or None,
                margins=None if None in margins else margins or None,
                rows=None if None in rows else rows or None,
                tools=[*records[-1].tools] or None,
                cuts=cuts if any(cuts) else None,
                apart=data.apart,
            )
            index += 1


def write_prompts(path: Path, prompts: Iterable[Prompt], *, trains_on: str = "pairs") -> None:
    """Write prompts with examples of a kind to an Arrow file, a few at a time."""
    roles = TRAINS_ON.get(trains_on, TRAINS_ON["pairs"])  # "prompts", not in TRAINS_ON, may have pairs
    schema = pa.schema(
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
    remaining = iter(prompts)
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            lines = []
            for prompt in batch:
                chat = {"messages": prompt.messages, "tools": prompt.tools}
                as_json = {name: None if value is None else json.dumps(value) for name, value in chat.items()}
                lines.append(json.dumps(prompt._asdict() | as_json) + "\n")
            text = "".join(lines).encode()
            # `from_pylist` would import pandas (0.5 s, 60 MB); so would `to_numpy` in `PromptTable`
            table = pyarrow.json.read_json(
                pa.BufferReader(text),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text)),  # a line must fit
                parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
            writer.write_table(table)
    pa.default_memory_pool().release_unused()  # pyarrow would keep about as much memory as the texts took


class PromptTable(Sequence[Prompt]):
    """The prompts of a split, in a memory-mapped Arrow file.

    Each access to an item decodes a `Prompt` anew. `counts` has the number of examples per prompt.
    """

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()
        # the examples of all prompts are one Arrow list, and its offsets say where those of each prompt begin
        counts = [np.diff(np.from_dlpack(chunk.offsets)) for chunk in self._table["examples"].chunks]
        self.counts = np.concatenate([np.zeros(0, dtype=np.int32), *counts])  # a table may have no chunk
        # columns without any value, such as messages and weights in most data, need not be decoded
        self.columns = [name for name in self._table.column_names if self._table[name].null_count < len(self._table)]

    def __len__(self) -> int:
        return len(self.counts)

    def iterate_texts(self) -> Iterator[tuple[str, list[str]]]:
        """Yield what the user wrote of each prompt, and the responses; faster than decoding whole prompts."""
        for batch in self._table.select(["text", "messages", "responses"]).to_batches():
            for text, messages, responses in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield find_written(text, None if messages is None else json.loads(messages)), responses

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # handles negative indices, and raises IndexError
        row = {name: self._table[name][index].as_py() for name in self.columns}
        # Arrow gives a null for each role that an example does not have
        row["examples"] = [{role: i for role, i in example.items() if i is not None} for example in row["examples"]]
        row |= {name: json.loads(row[name]) for name in ("messages", "tools") if row.get(name) is not None}
        return Prompt(**row, index_in_split=index)


def find_written(text: str, messages: Messages | None) -> str:
    """Find what the user wrote of a prompt: the contents of its messages, or the text."""
    if messages is None:
        return unescape(text)
    return "\n\n".join(message.get("content") or "" for message in messages)


def find_or_build(
    folder: Path, find_key: Callable[[], str | None], build: Callable[[Path], Facts], *, scratch: Path | None = None
) -> tuple[Path, Facts]:
    """Find the table of the data in `folder`, or build it in `scratch`, or else in `folder`; return it with its facts.

    `find_key` names the data, and returns None if that is not possible; `build` writes both splits into a directory. A
    table without a key, or whose data has changed meanwhile, is named after its content. Raises RunError if it cannot
    be written.
    """
    key, parent = find_key(), scratch or folder
    if key and (found := find_table(folder, key)):
        return found
    try:
        make_directory(parent)
        directory = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        try:
            facts = build(directory)
            digest = _make_digest(directory, facts)
            text = json.dumps({"facts": facts, "sha256": digest}, indent=1)
            (directory / FACTS).write_text(text + "\n", encoding="utf-8")
            name = key if key and key == find_key() else f"content-{digest[:32]}"
            if found := find_table(parent, name):  # another process was faster
                return found
            return directory.rename(parent / directory.name.replace(TEMPORARY, f"{name}-")), facts
        finally:
            remove(directory)  # does nothing if the directory was renamed
    except OSError as error:
        raise RunError(
            f"the texts of the data cannot be written to {parent} ({error}): free some space, or give a directory on "
            f"another disk as the first of local_dirs"
        ) from error


def find_table(folder: Path, name: str) -> tuple[Path, Facts] | None:
    """Find a table whose three files are as they were when it was built; return it with its facts."""
    for table in sorted(folder.glob(f"{name}*")):
        with suppress(InputError, OSError):
            content = read_json(table / FACTS)
            if isinstance(content, dict) and content.get("sha256") == _make_digest(table, content.get("facts")):
                return table, content["facts"]
    return None


def _make_digest(table: Path, facts: Any) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for split in SPLITS:
        path = table / f"{split}.arrow"
        check_readable(path)
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
