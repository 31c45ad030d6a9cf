"""Messages, calls and templates, of which tests make records."""

import re
from typing import Any

from dpo.data.examples import Example, encode_examples, list_examples, make_labels
from dpo.data.table import number_prompts
from dpo.data.tokenization import TextEncoder

LOOK = '{"name": "look", "arguments": {"at": "sky"}}'


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {**assistant(""), "tool_calls": [{"type": "function", "function": function}]}


def human(value: str) -> dict[str, str]:
    return {"from": "human", "value": value}


def gpt(value: str) -> dict[str, str]:
    return {"from": "gpt", "value": value}


# This is like ChatML with tools, in fewer letters.
TURN = "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
END = "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WITH_TOOLS = "{% for tool in tools or [] %}({{ tool.function.name }})\n{% endfor %}{% for m in messages %}" + TURN + END
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look up.", "parameters": {}}}]
CALL = call({"at": "sky"})
RESULT = tool("A clear day")
ASK, SKY = [user("Which colour?")], [assistant("Blue.")]


def encode(data: Any, tokenizer: Any, **limits: int) -> list[Example]:
    """The examples of custom data of pairs as token ids."""
    texts = [example for prompt in number_prompts([("mine", data)], keep_all=True) for example in list_examples(prompt)]
    return encode_examples(texts, TextEncoder(tokenizer), **{"max_length": 512, "max_prompt_length": 128, **limits})


def show_scored(example: Example, tokenizer: Any) -> str:
    """The scored tokens of the chosen response as text, with | for what is left out."""
    labels = make_labels(*example.responses_with_cuts[0])
    return re.sub(r"\|+", "|", "".join("|" if label < 0 else tokenizer.decode([label]) for label in labels))
