"""The order, token ids and truncation of a run's examples."""

import hashlib
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, islice, zip_longest
from typing import NamedTuple

import numpy as np

from dpo.data.prompt_forms import is_prefilled
from dpo.data.schema import Prompt
from dpo.data.templates import TemplateRejects, apply_template, render_until_answer
from dpo.data.tokenization import TextEncoder, Tokens, refuse_eos
from dpo.errors import InputError
from dpo.losses import IGNORE_INDEX, TRAINS_ON
from dpo.redaction import shorten

ExampleId = tuple[int, int]  # (index of the prompt in its split, index of the example among its prompt's examples)
TextExample = tuple[Prompt, int]  # a prompt, and the index of one of its examples; of a prompt without any, 0


class Example(NamedTuple):
    """Token ids for the model: truncated, including EOS."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]  # the same number in all examples of a run, except for ranked lists
    id: ExampleId | None = None
    dataset: str = ""
    digest: str = ""  # from `text_digest`; identifies the example in every run
    prompt_is_truncated: bool = False
    response_is_truncated: bool = False
    roles: tuple[str, ...] = TRAINS_ON["pairs"]  # one for each response
    weight: float = 1.0  # in the mean of losses
    margin: float | None = None  # by which the chosen reward should exceed the rejected one; None: it has no effect
    # for each response, alternately the start and the end (exclusive) of a part that is not scored; empty if all
    # tokens of the example are scored
    cuts: tuple[tuple[int, ...], ...] = ()

    @property
    def truncated(self) -> bool:
        return self.prompt_is_truncated or self.response_is_truncated

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences. A sequence is the prompt and one response, so the prompt counts once for each."""
        return sum(len(self.prompt) + len(response) for response in self.responses)

    @property
    def n_scored(self) -> tuple[int, ...]:
        """Scored tokens of each response."""
        n_unpredicted = 0 if self.prompt else 1  # a first token has none before it from which it is predicted
        return tuple(
            len(response) - n_unpredicted - count_unscored(cuts) for response, cuts in self.responses_with_cuts
        )

    @property
    def responses_with_cuts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each response with its cuts, which are () if all of it is scored."""
        return list(zip_longest(self.responses, self.cuts, fillvalue=()))


def count_unscored(cuts: Sequence[int]) -> int:
    """Count the tokens that are not scored: the sum of end - start."""
    return sum(cuts[1::2]) - sum(cuts[::2])


def make_labels(response: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """Copy a response's token ids, with -100 in place of those that are not scored."""
    labels = [*response]
    for start, end in zip(cuts[::2], cuts[1::2], strict=True):
        labels[start:end] = [IGNORE_INDEX] * (end - start)
    return labels


def text_digest(prompt: str, responses: Mapping[str, str]) -> str:
    """Return a digest of a prompt, and of responses with their roles."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (prompt, *chain.from_iterable(responses.items())):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)  # with lengths, so that ("ab", "c") is not ("a", "bc")
    return digest.hexdigest()


def list_examples(prompt: Prompt) -> list[TextExample]:
    return [(prompt, index) for index in range(len(prompt.examples))]


def read_examples(prompts: Sequence[Prompt], ids: Sequence[ExampleId]) -> list[TextExample]:
    """Read examples of a table."""
    return [(prompts[prompt_index], index) for prompt_index, index in ids]


def mismatch_examples(prompts: Sequence[Prompt], examples: Sequence[TextExample], *, seed: int) -> list[TextExample]:
    """Replace the responses of each prompt by those of another prompt of the split.

    The distance between the two prompts depends on the seed alone, so an example is mismatched alike in every epoch.
    """
    distance = random.Random(seed).randrange(1, len(prompts))
    mismatched = []
    for prompt, index in examples:
        other = prompts[(prompt.index_in_split + distance) % len(prompts)]
        mixed = prompt._replace(
            responses=other.responses,
            cuts=other.cuts,
            # at least as many examples as before, as `index` is one of them; the other prompt may have fewer
            examples=other.examples * len(prompt.examples),
            # if a template has rendered either, EOS may be inside the texts
            rendered=prompt.rendered or other.rendered,
            apart=prompt.apart and other.apart,
        )
        mismatched.append((mixed, index))
    return mismatched


def iterate_examples(
    counts: Sequence[int], *, batch_size: int, shuffle: bool, n_epochs: int | None, n_examples: int | None, seed: int
) -> Iterator[list[ExampleId]]:
    """Yield each batch's example ids in the reference code's order; `counts` has the number of examples per prompt.

    Each epoch shuffles the prompts again, from the previous order, and drops its partial batch, which does not count
    towards `n_examples`. Callers make sure that there is a limit and that the data fills a batch.
    """
    prompt_order = array("I", range(len(counts)))  # takes 4 bytes per prompt, and shuffles like a list
    epoch_seeds = np.random.RandomState(seed)
    epoch = n_yielded = 0
    while n_epochs is None or epoch < n_epochs:
        if shuffle:
            # as the reference code, draw a new seed for the shuffle of each epoch
            random.Random(int(epoch_seeds.randint(0, 2**32, dtype=np.int64))).shuffle(prompt_order)
        batch = []
        for prompt_index in prompt_order:
            for example_index in range(counts[prompt_index]):
                batch.append((prompt_index, example_index))
                if len(batch) == batch_size:
                    yield batch
                    batch = []
                    n_yielded += batch_size
                    if n_examples is not None and n_yielded >= n_examples:
                        return
        epoch += 1


def iterate_once(counts: Sequence[int], *, batch_size: int, n_examples: int, seed: int) -> Iterator[list[ExampleId]]:
    """Yield the ids of the first epoch, in its order, in batches. The last batch may be partial."""
    single_ids = iterate_examples(counts, batch_size=1, shuffle=True, n_epochs=1, n_examples=n_examples, seed=seed)
    ids = chain.from_iterable(single_ids)
    while batch := list(islice(ids, batch_size)):
        yield batch


# --- token ids -----------------------------------------------------------------------------------------------------


def encode_examples(
    examples: Sequence[TextExample], encode: TextEncoder, *, max_length: int, max_prompt_length: int
) -> list[Example]:
    """Tokenize and truncate examples; responses end with EOS, or with the end token that the template wrote.

    Raises InputError for a text that contains EOS, and for a response that is left without a scored token.
    """
    if encode.eos is None:
        raise InputError("the tokenizer has no EOS token, which must end every response: set tokenizer.eos_token")
    apart = []  # texts that are tokenized by themselves
    for prompt, index in examples:
        if prompt.apart:
            apart += [prompt.text, *prompt.texts(index).values()]
    ids = encode(apart)
    # with all responses of a prompt, so that all its examples have the same prompt tokens
    whole = encode.encode_conversations((prompt.text, prompt.pieces) for prompt, _ in examples if not prompt.apart)
    conversations = iter(whole)
    encoded = []
    for prompt, index in examples:
        if prompt.apart:
            responses = [[ids[text]] for text in prompt.texts(index).values()]
            tokens = Tokens(ids[prompt.text], responses)
        else:
            tokens = next(conversations)
            tokens = tokens._replace(responses=[tokens.responses[i] for i in prompt.roles(index).values()])
        encoded.append(_make_example(prompt, index, tokens, encode, max_length, max_prompt_length))
    return encoded


def _make_example(
    prompt: Prompt, index: int, tokens: Tokens, encode: TextEncoder, max_length: int, max_prompt_length: int
) -> Example:
    """Make an Example from its token ids: end the responses with EOS, and truncate prompt and responses."""
    texts = prompt.texts(index)
    refuse_eos(prompt, encode.tokenizer)
    whole = []  # each response, not yet truncated
    for text, pieces in zip(texts.values(), tokens.responses, strict=True):
        response = tuple(chain(*pieces))
        # the template may have written another end token than EOS
        if not (prompt.rendered and text.endswith(encode.ends)):
            response += (encode.eos,)
        whole.append(response)
    longest = max(map(len, whole), default=0)
    kept_prompt = tokens.prompt
    if len(kept_prompt) + longest > max_length:
        kept_prompt = truncate_prompt(prompt, kept_prompt, encode, max_prompt_length)
    room = max_length - len(kept_prompt)
    if prompt.apart and longest > room:
        # by the reference code's rule a response may not use the room that a short prompt leaves
        room = max_length - max_prompt_length
    responses = [response[:room] for response in whole]
    all_cuts = []
    for text, pieces, response in zip(texts.values(), tokens.responses, responses, strict=True):
        # scored and unscored pieces alternate, so the ends of all but the last are the cuts
        *ends, _ = accumulate(map(len, pieces))
        cuts = tuple(min(end, len(response)) for end in ends)
        if count_unscored(cuts) == len(response):  # raised before a run, as `SplitCounter` encodes each such example
            raise InputError(
                f"the response {shorten(text)} is cut off before the assistant's first word: raise "
                f"max_length, or remove the record"
            )
        all_cuts.append(cuts)
    return Example(
        prompt=tuple(kept_prompt),
        responses=tuple(responses),
        id=(prompt.index_in_split, index),
        dataset=prompt.dataset,
        digest=text_digest(prompt.text, texts),
        prompt_is_truncated=kept_prompt != tokens.prompt,
        response_is_truncated=longest > room,
        roles=tuple(texts),
        weight=prompt.weights[index] if prompt.weights else 1.0,
        margin=prompt.margins[index] if prompt.margins else None,
        cuts=tuple(all_cuts) if any(all_cuts) else (),
    )


def truncate_prompt(prompt: Prompt, ids: list[int], encode: TextEncoder, limit: int) -> list[int]:
    """Cut a prompt's token ids to `limit`; a chat in the mode keep_turns loses its oldest turns.

    Its system turn stays, and the first turn after it is the user's. If the chat from the user's last turn on does not
    fit, this turn loses its beginning. If even that does not fit, or if the template rejects a chat, the ids are cut.
    """
    if prompt.truncation_mode != "keep_turns" or len(ids) <= limit:
        return ids[:limit] if prompt.truncation_mode == "keep_start" else ids[-limit:]
    messages = prompt.messages or []
    system = messages[:1] if messages[0]["role"] in ("system", "developer") else []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    # where the kept text may begin: a turn, and how many of its characters are left out
    turns = [(start, 0) for start in users]
    characters = [(start, n) for start in users[-1:] for n in range(len(messages[start]["content"]))]
    apply = partial(apply_template, encode.tokenizer, tools=prompt.tools)
    render = partial(render_until_answer, apply, continued=is_prefilled(messages))

    def encode_from(start: int, n_left_out: int) -> list[int]:
        """Tokenize the system turn, and the turns from `start` on without the first `n_left_out` characters."""
        first = {**messages[start], "content": messages[start]["content"][n_left_out:]}
        text = render([*system, first, *messages[start + 1 :]])
        kept = text[: len(text) - n_cut_off]
        return encode([kept])[kept]

    with suppress(TemplateRejects):
        whole = render(messages)
        if not whole.startswith(prompt.text):  # the template writes the time
            return ids[-limit:]
        # `ChatTemplate` has cut off the end of the generation prompt if finished turns lack it, as does `encode_from`
        n_cut_off = len(whole) - len(prompt.text)
        for begins in (turns, characters):
            # the later the text begins, the fewer tokens it has: a binary search finds the first beginning that fits
            index = bisect_left(begins, True, key=lambda begin: len(encode_from(*begin)) <= limit)
            if index < len(begins):
                return encode_from(*begins[index])
    return ids[-limit:]
