"""Rows as the documentation of other tools shows them, by format."""

from __future__ import annotations

import json
from typing import Any

LOOK = '{"name": "look", "arguments": {"at": "sky"}}'
PAIR = {"chosen": "A is right.", "rejected": "B is right."}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def human(value: str) -> dict[str, str]:
    return {"from": "human", "value": value}


def gpt(value: str) -> dict[str, str]:
    return {"from": "gpt", "value": value}


# like ChatML with tools, in fewer letters
TURN = "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
END = "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WITH_TOOLS = "{% for tool in tools or [] %}({{ tool.function.name }})\n{% endfor %}{% for m in messages %}" + TURN + END
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look up.", "parameters": {}}}]
CALL = {
    **{"role": "assistant", "content": ""},
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}],
}
RESULT = {"role": "tool", "content": "A clear day"}
ASK, SKY = [user("Which colour?")], [assistant("Blue.")]
TURNS = [system("Be kind."), user("Hi!"), assistant("Yes?"), user("Who is right?")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "hh": [{"chosen": "\n\nHuman: Hi!\n\nAssistant: Yes?", "rejected": "\n\nHuman: Hi!\n\nAssistant: No."}],
    "trl_standard": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is", "completion": " blue."},
    ],
    "trl_conversational": [
        {"prompt": ASK, "chosen": SKY, "rejected": [assistant("Green.")]},
        {"prompt": TURNS, "chosen": SKY, "rejected": [assistant("Green.")]},
        {"prompt": ASK, "completion": SKY, "label": False},
        {"prompt": ASK, "completion": SKY},
        {"prompt": [*ASK, CALL, RESULT], "chosen": SKY, "rejected": [assistant("Green.")], "tools": TOOLS},
        {"prompt": ASK, "chosen": [CALL, RESULT, *SKY], "rejected": [assistant("Green.")], "tools": json.dumps(TOOLS)},
    ],
    "trl_implicit": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": ASK + SKY, "rejected": [*ASK, assistant("Green.")]},
        {"messages": [*TURNS, assistant("A.")]},
    ],
    "ultrafeedback": [
        {
            "prompt": "Which colour?",
            "prompt_id": "f0e37e9f",
            "chosen": ASK + SKY,
            "rejected": [*ASK, assistant("Green.")],
            "messages": ASK + SKY,
            "score_chosen": 8.5,
            "score_rejected": 3.0,
        }
    ],
    "alpaca": [
        {"instruction": "Sum it up.", "input": "A long text.", **PAIR},
        {"instruction": "Who is right?", "input": "", **PAIR},
        {"instruction": "Sum it up.", "input": "A long text.", "output": "Short.", "kto_tag": True},
        {"instruction": "Sum it up.", "input": "A long text.", "output": "Short.", "system": "Be kind."},
        {"instruction": "And who?", "history": [["Hi!", "Yes?"], ["Who is right?", "Nobody."]], **PAIR},
    ],
    "sharegpt": [
        {"conversations": [human("Hi!"), gpt("Yes?"), human("Who?")], "chosen": gpt("A."), "rejected": gpt("B.")},
        {"conversations": [human("Hi!")], "chosen": gpt("A."), "rejected": gpt("B."), "system": "Be kind."},
        {"conversations": [human("Hi!"), gpt("Yes?")], "kto_tag": False},
        {"conversations": [{"from": "system", "value": "Be kind."}, human("Hi!"), gpt("Yes?")]},
        {
            "conversations": [
                human("Hi!"),
                {"from": "function_call", "value": LOOK},
                {"from": "observation", "value": "3"},
            ],
            **{"chosen": gpt("A."), "rejected": {"from": "function_call", "value": LOOK}, "tools": json.dumps(TOOLS)},
        },
    ],
    "axolotl_chat_template": [{"messages": TURNS, "chosen": assistant("A."), "rejected": assistant("B.")}],
    "axolotl_prompt_pairs": [{"system": "Be kind.", "prompt": "Who is right?", **PAIR}],
    "axolotl_intel": [
        {"system": "Be kind.", "question": "Who is right?", **PAIR},
        {"question": "Who is right?", "completion": "A is.", "label": True},
    ],
    "axolotl_argilla": [
        {"system": "Be kind.", "instruction": "Who?", "chosen_response": "A is.", "rejected_response": "B is."},
        {"instruction": "Who?", "completion": "A is.", "label": True},
    ],
    "axolotl_icr": [{"system": "Be kind.", "input": "Who is right?", **PAIR}],
    "ms_swift": [
        {"messages": [*TURNS, assistant("A.")], "rejected_response": "B."},
        {"messages": [*ASK, *SKY], "label": True},
        {
            "messages": [
                *ASK,
                {"role": "tool_call", "content": LOOK},
                {"role": "tool_response", "content": "A clear day"},
                *SKY,
            ],
            "rejected_response": "B.",
            "tools": json.dumps(TOOLS),
        },
    ],
    "ranked": [
        {"prompt": "Who is right?", "responses": [" A.", " B.", " C."], "scores": [3, 1, 2]},
        {"prompt": ASK, "responses": [SKY, [assistant("Green.")]], "weight": 0.5},
    ],
    "ms_swift_messages": [{"messages": [*TURNS, assistant("A.")], "rejected_messages": [*TURNS, assistant("B.")]}],
}
