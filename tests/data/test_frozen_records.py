"""What records of all kinds become.

The table was made by the code of af2ec09b, which recognized formats by writing records: what reads them may change, and
what they become may not. Later came responses that repeat their prompt, and `function_call`.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from support import templates
from support.formats import CALL, LOOK, RESULT, TOOLS, WITH_TOOLS, assistant, gpt, human, system, user
from support.runs import read_json
from support.tokenizers import BEFORE_ANSWER, TOKENIZERS, make_template

from dpo.data.custom import get_custom
from dpo.data.examples import encode_examples, list_examples
from dpo.data.table import number_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.settings.places import FORMS

Q, YES, NO = "Which colour?", "Blue.", "Green."
TEXTS = {"chosen": YES, "rejected": NO}
ASK, BLUE, GREEN = [user(Q)], [assistant(YES)], [assistant(NO)]
ANSWERS = {"chosen": BLUE, "rejected": GREEN}
WHOLE = {"chosen": ASK + BLUE, "rejected": ASK + GREEN}
SAID = {"chosen": gpt(YES), "rejected": gpt(NO)}
TALK = [user("Hi!"), assistant("Yes?"), *ASK]
HH = "\n\nHuman: Hi!\n\nAssistant: Yes?\n\nHuman: Which colour?\n\nAssistant:"
DIALOGUES = {"chosen": f"{HH} Blue.", "rejected": f"{HH} Green."}
OBSERVED = [{"from": "function_call", "value": LOOK}, {"from": "observation", "value": "A clear day"}]
AGAIN = [user("Why?"), assistant("So.")]
KINDLY, RED = [system("Be kind."), *ASK], [assistant("Red.")]
OLDER_CALL = {"role": "assistant", "content": None, "function_call": json.loads(LOOK)}

ASKED, KIND, TALKED = f"<user>{Q};<assistant>", f"<system>Be kind.;<user>{Q};", f"<user>Hi!;<assistant>Yes?;<user>{Q};"
CALLED = f"(look)\n<user>{Q};<assistant>[look];<tool>A clear day;<assistant>"
LOOKED = "[look];<tool>A clear day;<assistant>Blue.;"  # the result and the header after it are not scored
COLOURS = ("Blue.;", "Green.;")
PAIR = [{"chosen": 0, "rejected": 1}]
KINDS = {  # what is trained on, and the examples that are made
    "pair": ("pairs", PAIR),
    "target": ("targets", [{"chosen": 0}]),
    "good": ("labels", [{"chosen": 0}]),
    "bad": ("labels", [{"rejected": 0}]),
    "prompt": ("prompts", []),
    "list": ("lists", [{"chosen": 1, "rank2": 0, "rejected": 2}]),
    "list of two": ("lists", PAIR),
    "list with a tie": ("pairs", [{"chosen": 0, "rejected": 2}, {"chosen": 1, "rejected": 2}]),
}


class Frozen(NamedTuple):
    """Rows, and what each of them becomes."""

    kind: str
    texts: tuple[str, ...]  # the prompt and its responses
    rows: list[dict]
    chat: str = "auto"
    others: Mapping = {}


TABLE = [
    Frozen(
        "pair",
        (ASKED, *COLOURS),
        [
            {"prompt": Q, **TEXTS},
            {"prompt": Q, "chosen": " Blue.", "rejected": " Green.", "id": 3},
            {"question": Q, "preferred": YES, "dispreferred": NO},
            {"instruction": Q, "input": "", **TEXTS},
            {"Instruction": Q, "chosen_response": YES, "rejected_response": NO},
            {"input": Q, "good_answer": YES, "bad_answer": NO},
            {"query": Q, "winner": YES, "loser": NO},
            {"question": Q, "response_a": NO, "response_b": YES, "winner": "b"},
            {"prompt": Q, **TEXTS, "system": "gpt-4"},
            {"prompt": ASK, **ANSWERS},
            {"prompt": ASK, **TEXTS},
            {"prompt": Q, **ANSWERS},
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": Q}]}], **ANSWERS},
            WHOLE,
            {"prompt": Q, "prompt_id": "f0", **WHOLE, "messages": ASK + BLUE, "score_chosen": 8.5},
            {"messages": ASK, "chosen": BLUE[0], "rejected": GREEN[0]},
            {"conversations": [human(Q)], **SAID},
            {"conversations": ASK, **SAID},
            # what responses repeat of the prompt
            {"prompt": ASK, **WHOLE},
            {"prompt": ASK, "chosen": ASK + BLUE, "rejected": GREEN},
            {"prompt": [{**ASK[0], "id": 3}], "chosen": BLUE, "rejected": [{**ASK[0], "id": 4}, *GREEN]},
            {"prompt": Q, "chosen": ASK + BLUE, "rejected": GREEN},
        ],
    ),
    Frozen(
        "pair",
        (f"{KIND}<assistant>", *COLOURS),
        [
            {"prompt": [system("Be kind."), *ASK], **ANSWERS},
            {"chosen": [system("Be kind."), *ASK, *BLUE], "rejected": [system("Be kind."), *ASK, *GREEN]},
            {"prompt": Q, **TEXTS, "system": "Be kind."},
            {"question": Q, **TEXTS, "system_prompt": "Be kind."},
            {"prompt": ASK, **ANSWERS, "system": "Be kind."},
            {"prompt": [system("Be kind."), *ASK], **ANSWERS, "system": "Be short."},
            {"prompt": Q, **WHOLE, "system": "Be kind."},
            {"conversations": [human(Q)], **SAID, "system": "Be kind."},
            {"conversations": [{"from": "system", "value": "Be kind."}, human(Q)], **SAID},
            {"prompt": ASK, "chosen": KINDLY + BLUE, "rejected": GREEN},
            {"prompt": KINDLY, **WHOLE},
            {"prompt": KINDLY[:1], **WHOLE},
            {"prompt": ASK, "chosen": KINDLY + BLUE, "rejected": KINDLY + GREEN, "system": "Be short."},
        ],
    ),
    Frozen(
        "pair",
        (f"{TALKED}<assistant>", *COLOURS),
        [
            {"prompt": TALK, **ANSWERS},
            {"chosen": TALK + BLUE, "rejected": TALK + GREEN},
            {"prompt": "Hi!", "chosen": TALK + BLUE, "rejected": TALK + GREEN},
            {"conversations": [human("Hi!"), gpt("Yes?"), human(Q)], **SAID},
            {"prompt": TALK[:2], "chosen": TALK + BLUE, "rejected": ASK + GREEN},  # the question belongs to the prompt
            {"prompt": TALK, **WHOLE},  # the last turn alone
            {"prompt": ASK, "chosen": TALK + BLUE, "rejected": TALK + GREEN},
        ],
    ),
    Frozen(
        "pair",
        (CALLED, *COLOURS),
        [
            {"prompt": [*ASK, CALL, RESULT], **ANSWERS, "tools": TOOLS},
            {"prompt": [*ASK, CALL, RESULT], **ANSWERS, "tools": json.dumps(TOOLS)},
            {"conversations": [human(Q), *OBSERVED], **SAID, "tools": [TOOLS[0]["function"]]},
        ],
    ),
    Frozen(
        "pair",
        (ASKED, LOOKED, "Green.;"),
        [
            {"prompt": ASK, "chosen": [CALL, RESULT, *BLUE], "rejected": GREEN},
            {"prompt": ASK, "chosen": [OLDER_CALL, {**RESULT, "role": "function"}, *BLUE], "rejected": GREEN},
            {"prompt": Q, "chosen": [*ASK, CALL, RESULT, *BLUE], "rejected": ASK + GREEN},
            {"conversations": [human(Q)], "chosen": [*OBSERVED, gpt(YES)], "rejected": [gpt(NO)]},
        ],
        others={"cuts": {LOOKED: [7, 36]}},
    ),
    Frozen(
        "pair",
        (ASKED, "Blue.;<user>Why?;<assistant>So.;", "Green.;"),
        [
            {"prompt": ASK, "chosen": BLUE + AGAIN, "rejected": GREEN, "weight": 0.5, "margin": 2},
            {"chosen": ASK + BLUE + AGAIN, "rejected": ASK + GREEN, "weight": "0.5", "margin": "2"},
        ],
        others={"cuts": {"Blue.;<user>Why?;<assistant>So.;": [6, 28]}, "weights": [0.5], "margins": [2.0]},
    ),
    Frozen(
        "pair",
        (f"{ASKED}It is", " blue.;", " green.;"),
        [
            {"prompt": [*ASK, assistant("It is")], "chosen": [assistant(" blue.")], "rejected": [assistant(" green.")]},
            {
                "prompt": [*ASK, assistant("It is")],
                "chosen": [assistant(" blue.")],
                "rejected": [*ASK, assistant("It is green.")],
            },
        ],
    ),
    Frozen(
        "pair",
        (HH, " Blue.", " Green."),
        [DIALOGUES, {**DIALOGUES, "id": "a7", "note": "It is so."}],
        others={"apart": True},
    ),
    Frozen("target", (HH, " Blue."), [DIALOGUES], others={"apart": True}),
    Frozen("pair", (f"{TALKED}<assistant>", *COLOURS), [{"prompt": HH, **TEXTS}], chat="always"),
    Frozen(
        "pair",
        (HH, " Blue.", " Green."),
        [
            {"good": DIALOGUES["chosen"], "bad": DIALOGUES["rejected"]},
            {"prompt": HH, "chosen": " Blue.", "rejected": " Green."},
        ],
    ),
    Frozen("pair", ("It is", " blue.", " green."), [{"chosen": "It is blue.", "rejected": "It is green."}]),
    Frozen("pair", (f"{Q}\nAnswer:", " A", " B"), [{"prompt": f"{Q}\nAnswer:", "chosen": " A", "rejected": " B"}]),
    Frozen(
        "pair",
        ("Be kind.\n\nSum up.\n\nA long text.", "Blue.", "Green."),
        [{"instruction": "Sum up.", "input": "A long text.", "system": "Be kind.", **TEXTS}],
        chat="never",
    ),
    Frozen(
        "good",
        (ASKED, "Blue.;"),
        [
            {"prompt": Q, "completion": YES, "label": True},
            {"Question": Q, "response": YES, "thumbs_up": "up"},
            {"instruction": Q, "input": "", "output": YES, "kto_tag": "true"},
            {"prompt": ASK, "completion": BLUE, "label": 1},
            {"messages": ASK + BLUE, "label": "good"},
            {"conversations": [human(Q), gpt(YES)], "kto_tag": True},
        ],
    ),
    Frozen(
        "bad",
        (Q, "Blue."),
        [{"prompt": Q, "completion": YES, "label": 0}, {"question": Q, "answer": YES, "desirable": "no"}],
        chat="never",
    ),
    Frozen(
        "target",
        (ASKED, "Blue.;"),
        [
            {"prompt": Q, "completion": YES},
            {"question": Q, "answer": YES, "label": "spam"},
            {"instruction": Q, "output": YES},
            {"prompt": ASK, "completion": YES},
            {"prompt": ASK, "completion": ASK + BLUE},
            {"messages": ASK + BLUE},
            {"conversation": [human(Q), gpt(YES)]},
            {"prompt": Q, **TEXTS},
            {"prompt": Q, "responses": [NO, YES], "scores": [0, 1]},
        ],
    ),
    Frozen("target", (CALLED, "Blue.;"), [{"messages": [*ASK, CALL, RESULT, *BLUE], "tools": TOOLS}]),
    Frozen("prompt", (ASKED,), [{"prompt": Q}, {"question": Q}, {"prompt": ASK}]),
    Frozen(
        "list",
        (ASKED, "Green.;", "Blue.;", "Red.;"),
        [
            {"prompt": Q, "responses": [NO, YES, "Red."], "scores": [1, 2, 0], "weight": 0.5},
            {"prompt": ASK, "responses": [GREEN, BLUE[0], [assistant("Red.")]], "scores": [1.5, 8, -1], "weight": 0.5},
            {"prompt": ASK, "responses": [ASK + GREEN, BLUE, ASK + RED], "scores": [1, 2, 0], "weight": 0.5},
        ],
        others={"weights": [0.5]},
    ),
    Frozen(
        "list of two",
        (Q, "Blue.", "Green."),
        [{"prompt": Q, "responses": [YES, NO]}, {"prompt": Q, **TEXTS}],
        chat="never",
    ),
    Frozen(
        "list with a tie",
        (Q, "Blue.", "Green.", "Red."),
        [{"prompt": Q, "responses": [YES, NO, "Red."], "scores": [1, 1, 0]}],
        chat="never",
    ),
]


def test_every_kind_of_data_has_a_row():
    assert FORMS.keys() - {KINDS[frozen.kind][0] for frozen in TABLE} == set(), "TABLE lacks these kinds of data"


@pytest.mark.parametrize("frozen", TABLE)
def test_a_record_becomes_the_prompt_and_responses_that_it_always_became(frozen, chat):
    template = chat(WITH_TOOLS.replace("{{ eos_token }}\n", ";"))
    trains_on, expected = KINDS[frozen.kind]
    for row in frozen.rows:
        data = get_custom([row], "mine", template, trains_on=trains_on, chat=frozen.chat, with_margins=True)
        [prompt] = number_prompts([("mine", data)], keep_all=True)
        kept = {"apart": True} if prompt.apart else {}
        assert ((prompt.text, *prompt.responses), prompt.examples) == (frozen.texts, expected), row
        if prompt.cuts:
            kept["cuts"] = {text: cuts for text, cuts in zip(prompt.responses, prompt.cuts, strict=True) if cuts}
        kept |= {name: values for name in ("weights", "margins") if (values := getattr(prompt, name))}
        assert kept == frozen.others, row


TEMPLATES = templates.ALL | {f"before answers a {name}": make_template(text) for name, text in BEFORE_ANSWER.items()}
TOKENS = Path(__file__).parent / "frozen_tokens.json"  # by tokenizer and template a digest for each of TABLE


def hash_tokens(frozen: Frozen, tokenizer) -> str:
    """A digest of token ids, scored positions, roles, weights and margins of what each row becomes."""
    trains_on, _ = KINDS[frozen.kind]
    found = {}
    for row in frozen.rows:
        try:
            data = get_custom([row], "mine", tokenizer, trains_on=trains_on, chat=frozen.chat, with_margins=True)
            prompts = number_prompts([("mine", data)], keep_all=True)
            texts = [each for prompt in prompts for each in list_examples(prompt) or [(prompt, 0)]]
            examples = encode_examples(texts, TextEncoder(tokenizer), max_length=512, max_prompt_length=128)
        except InputError:
            examples = []
        made = [(e.prompt, e.responses, e.cuts, e.roles, e.weight, e.margin) for e in examples]
        found[hashlib.sha256(json.dumps(made).encode()).hexdigest()[:10]] = made
    assert len(found) == 1, f"rows of one kind become different things: {found}"
    return min(found)


def make_digests(template: str, kind: str) -> list[str]:
    tokenizer = copy.deepcopy(TOKENIZERS[kind])
    tokenizer.chat_template = TEMPLATES[template]
    return [hash_tokens(frozen, tokenizer) for frozen in TABLE]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_have_the_token_ids_and_scored_positions_that_they_always_had(template, kind):
    assert make_digests(template, kind) == read_json(TOKENS)[f"{kind}, {template}"], "CONTRIBUTING: a form of record"


def add_digests() -> None:
    """Write the digests of entries that were put at the end of TABLE."""
    frozen = read_json(TOKENS)
    for kind, template in product(TOKENIZERS, TEMPLATES):
        earlier = frozen[f"{kind}, {template}"]
        digests = frozen[f"{kind}, {template}"] = make_digests(template, kind)
        assert digests[: len(earlier)] == earlier, f"with {kind}, {template} an earlier entry has other tokens"
    TOKENS.write_text(json.dumps(frozen, indent=1))


if __name__ == "__main__":
    add_digests()
