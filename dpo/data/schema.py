"""The common form of all datasets, and checks of fields."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, NotRequired, TypedDict

from dpo.data.tokenization import TruncationMode
from dpo.errors import InputError

ASSISTANT = "\n\nAssistant:"  # begins an answer in a dialogue in HH's format
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair, which JSON may have and UTF-8 has not
MISSING = object()
Messages = list[dict[str, str]]  # of a chat, with role and content
LABEL_TYPES = (bool, int, float, str)
TYPE_NAMES: dict[Any, str] = {
    str: "text",
    list: "a list",
    (str, list): "text or a list of messages",
    (str, list, dict): "text or a list of messages",
    int: "a whole number",
    (int, float): "a number",
    LABEL_TYPES: "true or false",
}


class Entry(TypedDict):
    """The data of one prompt."""

    responses: list[str]
    pairs: list[tuple[int, int]]  # (better, worse), indices into responses
    sft_target: str
    labels: NotRequired[list[bool]]  # of labelled data: whether each response is desirable


class PreferenceData(dict[str, Entry]):
    """`{prompt: {responses, pairs, sft_target}}`, and how to tokenize its texts.

    It also has `notes` about the data, to be printed.
    """

    def __init__(self, *, truncation_mode: TruncationMode, rendered: bool = False) -> None:
        super().__init__()
        self.truncation_mode = truncation_mode
        self.rendered = rendered  # by a chat template: EOS in a prompt is the end of a turn
        self.messages: dict[str, Messages] = {}  # from which the chat template rendered each prompt
        self.notes: list[str] = []

    def add_prompt(self, prompt: str) -> Entry:
        """Return a prompt's data, which is empty for a new prompt."""
        return self.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})

    def add_pair(self, prompt: str, first: str, second: str, *, better: int = 0) -> None:
        """Add a pair of responses.

        `better` is the index of the preferred one, 0 or 1. The preferred response becomes the prompt's SFT target.
        """
        entry = self.add_prompt(prompt)
        n_before = len(entry["responses"])
        entry["responses"] += [first, second]
        entry["pairs"].append((n_before + better, n_before + 1 - better))
        entry["sft_target"] = (first, second)[better]

    def add_target(self, prompt: str, target: str) -> None:
        """Add an SFT target without a pair."""
        entry = self.add_prompt(prompt)
        entry["responses"].append(target)
        entry["sft_target"] = target

    def add_labelled(self, prompt: str, response: str, *, is_desirable: bool) -> None:
        """Add a response with its label."""
        entry = self.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
        entry["responses"].append(response)
        entry.setdefault("labels", []).append(is_desirable)

    def take(self, trains_on: str) -> Iterator[tuple[str, list[str], list[dict[str, int]]]]:
        """Remove the prompts one by one, and yield each with its examples.

        Yields (prompt, responses, examples). An example maps its roles to indices into the responses, and is of the
        kind `trains_on`, a key of `TRAINS_ON`. SFT trains on a prompt's target if the prompt has pairs, and on all of
        its responses if it has none. Under a loss of labels a pair is two examples. "prompts" yields pairs, or no
        examples.
        """
        for prompt in list(self):  # removed, as a second copy of all texts might not fit into memory
            entry = self.pop(prompt)
            responses = entry["responses"]
            if trains_on in ("pairs", "prompts"):
                yield prompt, responses, [{"chosen": better, "rejected": worse} for better, worse in entry["pairs"]]
            elif trains_on == "labels":
                roles = ("chosen" if is_desirable else "rejected" for is_desirable in entry.get("labels", []))
                labelled = [{role: index} for index, role in enumerate(roles)]
                for better, worse in entry["pairs"]:
                    labelled += {"chosen": better}, {"rejected": worse}
                if labelled:
                    yield prompt, responses, labelled
            else:
                targets = [entry["sft_target"]] if entry["pairs"] else responses
                yield prompt, targets, [{"chosen": index} for index in range(len(targets))]

    def select_split(self, split: str) -> PreferenceData:
        """Select the train or test split of data that has no splits.

        A random tenth of the prompts, at least one, is the test split.
        """
        prompts = list(self)
        random.Random(42).shuffle(prompts)
        n_test = max(1, len(prompts) // 10)
        selected = set(prompts[:n_test] if split == "test" else prompts[n_test:])
        part = PreferenceData(truncation_mode=self.truncation_mode, rendered=self.rendered)
        part.update((prompt, entry) for prompt, entry in self.items() if prompt in selected)
        part.notes = self.notes
        part.messages = {prompt: messages for prompt, messages in self.messages.items() if prompt in selected}
        return part


def is_message(value: Any) -> bool:
    """Return whether a value is a chat message, ours or ShareGPT's."""
    return isinstance(value, Mapping) and ("role" in value or is_sharegpt(value))


def is_sharegpt(message: Any) -> bool:
    """Return whether a chat message is `{from, value}`, as in ShareGPT's data."""
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys() and "role" not in message


def get_field(row: Mapping[str, Any], key: str, where: str, types: type | tuple[type, ...] = str) -> Any:
    """Return `row[key]`, checked.

    Raises InputError, which names the record (`where`), if the value is missing, null, of another type or not Unicode.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: {row!r:.80} stands where an object with the field {key!r} is expected")
    value = row.get(key, MISSING)
    if value is MISSING:
        raise InputError(
            f"{where}: {key} is missing, and must be {TYPE_NAMES[types]}; the record has "
            f"{', '.join(map(str, row)) or 'no fields'}: add {key}, or remove the record"
        )
    if value is None or value != value:  # NaN differs from itself
        null = "null" if value is None else "NaN, which is how pandas writes null"
        raise InputError(f"{where}: {key} is {null}: give it a value, or remove the record")
    # Python counts a bool as an int
    if not isinstance(value, types) or (isinstance(value, bool) and types is not LABEL_TYPES):
        raise InputError(
            f"{where}: {key} must be {TYPE_NAMES[types]}, and is {value!r:.80}: change it, or remove the record"
        )
    if isinstance(value, str) and SURROGATE.search(value):
        raise InputError(
            f"{where}: field {key!r} has an unpaired UTF-16 surrogate (invalid text): {value[:80]!r}: replace it, or "
            f"remove the record"
        )
    return value
