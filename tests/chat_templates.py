"""Parts of short chat templates, and what is to be known of a format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a model writes a conversation."""

    template: str
    """Chat template; "" if the published folder has none."""
    special: tuple[str, ...]
    """Special tokens, which decoded text leaves out."""
    tags: tuple[str, ...] = ()
    """Other tokens, which it shows."""
    stops: tuple[str, ...]
    """Tokens that the settings name as ends of a completion; the tokenizer's own is the last."""
    end: str
    """Token that the template ends a turn with, which a model learns to stop at."""
    tool_parser: str = "hermes"
    """vLLM's; "hermes" also for templates that write no calls, as these are then text in Hermes' format; "" if none
    reads the calls."""
    reasoning_parser: str = ""
    opens: bool = False
    """Whether the prompt opens a thought."""
    drops_text: bool = False
    """Whether the parser drops text beside calls."""


def conversation(
    *,
    user: str,
    assistant: str,
    prompt: str,
    begin: str = "",
    tools: str = "",
    system: str | None = None,
    output: str = "",
) -> str:
    """Return a template from its parts: of messages `m`, `tools`, and the opening of an answer, `prompt`.

    Parts also see `is_new`, whether no question follows; `is_last`, whether nothing does; and of outputs of tools in a
    row, `is_first` and `is_final`.
    """
    roles = {"user": user, "assistant": assistant, "system": user if system is None else system, "tool": output}
    branches = "".join(f"{{% elif m.role == '{role}' %}}{part}" for role, part in roles.items())
    text = (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        f"{begin}{{% if tools %}}{tools}{{% endif %}}"
        "{% for m in messages %}{% set is_new = loop.index0 > ns.last %}{% set is_last = loop.last %}"
        "{% set is_first = not loop.previtem or loop.previtem.role != 'tool' %}"
        "{% set is_final = loop.last or loop.nextitem.role != 'tool' %}"
        f"{{% if false %}}{branches}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )
    return text.replace("%}\n", "%}{{ '\\n' }}")  # transformers drops a line break after a tag


def calls(call: str, *, before: str = "", between: str = "", after: str = "") -> str:
    """Return the part of a template that writes calls `c`."""
    item = f"{{% for t in m.tool_calls %}}{{% set c = t.function %}}{call}{{{{ {between!r} if not loop.last }}}}"
    return f"{{% if m.tool_calls %}}{before}{item}{{% endfor %}}{after}{{% endif %}}"


TOOLS = "{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
OBJECT = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
PARAMETERS = '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
ARGUMENTS = "{% for p, v in c.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
HERMES_CALLS = calls(
    f"{{{{ '\\n' if m.content or not loop.first }}}}<tool_call>\n{OBJECT}\n</tool_call>",
)
XML_CALL = (
    f"<tool_call>\n<function={{{{ c.name }}}}>\n{ARGUMENTS}<parameter={{{{ p }}}}>\n{VALUE}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
