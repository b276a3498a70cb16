"""Writes tools as text, in the format of Hermes and Qwen, for chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from forge_rl.tokens.message_form import THOUGHT_KEYS, decoded_arguments

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_Messages = Sequence[Mapping[str, object]]


def has_tools(messages: _Messages, tools: _Messages) -> bool:
    """Return True if a conversation has anything that a template without tools would not show."""
    return bool(tools) or any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def as_text(messages: _Messages, tools: _Messages, *, in_question: bool = False) -> list[dict[str, object]]:
    """Return messages with tools in a system message, calls in <tool_call> tags, and outputs in user messages.

    A tool's output may contain `</tool_response>`, but never as a token: the tags are text, around and in outputs.

    Args:
        in_question: put that system message before the text of a first question, for chat templates without any.
    """
    texts: list[dict[str, object]] = []
    if tools:
        introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        # One system message: templates take it only at the beginning.
        if messages and messages[0]["role"] == "system":
            introduction = f"{messages[0]['content']}\n\n{introduction}"
            messages = messages[1:]
        if in_question and messages and messages[0]["role"] == "user":
            messages = [{**messages[0], "content": f"{introduction}\n\n{messages[0]['content']}"}, *messages[1:]]
        else:
            texts.append({"role": "system", "content": introduction})
    after_tool = False
    for message in messages:
        role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or ()
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            # Outputs of several calls go into one user message, as many templates require roles to alternate.
            if after_tool:
                texts[-1]["content"] = f"{texts[-1]['content']}\n{content}"
                continue
            role = "user"
        elif calls:
            assert isinstance(calls, Sequence)
            content = "\n".join([*filter(None, [str(content)]), *map(_call, calls)])
        after_tool = message["role"] == "tool"
        thoughts = {key: message[key] for key in THOUGHT_KEYS if key in message}
        texts.append({"role": role, "content": content, **thoughts})
    return texts


def _call(call: Mapping[str, Mapping[str, object]]) -> str:
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = decoded_arguments(arguments)
    call_json = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call_json}\n</tool_call>"
