"""Chat templates with the habits of published ones."""

from support.formats import END, WITH_TOOLS

BEGIN, CLOSE = "<{{ m.role }}>", "{{ eos_token }}\n"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"


def make(turn: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + OPEN


PLAIN = make(BEGIN + "{{ m.content }}" + CLOSE)
# This is like Zephyr's, which knows three roles.
BY_ROLE = make("{% if m.role in ('user', 'assistant', 'system') %}" + BEGIN + "{{ m.content }}" + CLOSE + "{% endif %}")
FIRST_SYSTEM = make(
    "{% if m.role != 'system' or loop.first %}" + BEGIN + "{{ m.content }}" + CLOSE + "{% endif %}",
)
TRIMMED = make(BEGIN + "{{ m.content | trim }}" + CLOSE)
WITHOUT_THOUGHTS = make(BEGIN + "{{ m.content.split('</think>')[-1] }}" + CLOSE)
SYSTEM_IN_QUESTION = (  # as Mistral's, which writes it before the last question
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>"
    "{% if loop.index0 == messages | length - 1 or m.role == 'user' and loop.index0 == 2 %}{{ messages[0].content }}"
    "{% endif %}{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}" + OPEN
)
THINKING = (  # as Qwen3's: thoughts stay behind the last question alone
    "{% set seen = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set parts = m.content.split('</think>') %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > seen.last %}<think>{{ m.reasoning_content or parts[0][7:] }}</think>"
    "{% endif %}{{ parts[-1] }}{{ eos_token }}\n{% endfor %}" + OPEN
)
CALLS = (  # JSON, JSON in JSON, and tags
    "{{ (m.tool_calls or []) | tojson }}",
    "{{ (m.tool_calls or []) | tojson(indent=4) }}",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ (c.function.arguments | tojson) | tojson }}{% endfor %}",
    "{% for c in m.tool_calls or [] %}<f={{ c.function.name }}>{% for k, v in c.function.arguments | items %}"
    "<p={{ k }}>\n{{ v }}\n</p>{% endfor %}{% endfor %}",
)
# This is like Qwen3's: thinking stays only after the last question, and the last turn begins with it.
THINKING_WITH_TOOLS = (
    "{% set seen = namespace(question=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 < seen.question %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think></think>{{ m.content }}"
    "{% else %}{{ m.reasoning_content }}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}" + END
)
TRIMMED_WITH_TOOLS = WITH_TOOLS.replace("{{ m.content }}", "{{ m.content | trim }}")

ALL = {
    "plain": PLAIN,
    "by role": BY_ROLE,
    "first system": FIRST_SYSTEM,
    "trimmed": TRIMMED,
    "without thoughts": WITHOUT_THOUGHTS,
    "system in question": SYSTEM_IN_QUESTION,
    "thinking": THINKING,
    **{f"calls {i}": make(BEGIN + "{{ m.content }}" + calls + CLOSE) for i, calls in enumerate(CALLS)},
    "with tools": WITH_TOOLS,
    "thinking with tools": THINKING_WITH_TOOLS,
    "trimmed with tools": TRIMMED_WITH_TOOLS,
}
