"""Turns a conversation into token ids: recorded turns of its session keep theirs, only what follows is tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.sessions import Session
from forge_rl.types import TokenArray, TokenIds

_MOST_LEVELS = 64
"""Levels of a call's arguments that are shown as JSON; templates fail at some depth."""

_TOOLS_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""System message by which Hermes and Qwen show tools."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call in a completion."""

    id: str
    name: str
    arguments: str
    """Text of the arguments as the model wrote them; JSON if it did well."""


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, the same whichever API it came by."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant's message."""
    call_id: str = ""
    """Id of the call that a tool's message answers."""
    name: str = ""

    def template(self) -> dict[str, object]:
        """Return the message as chat templates take it."""
        calls = self.template_calls()
        optional = {"tool_calls": calls, "tool_call_id": self.call_id, "name": self.name}
        return {"role": self.role, "content": self.content, **{key: value for key, value in optional.items() if value}}

    def template_calls(self) -> list[dict[str, object]]:
        """Return the calls as chat templates take them."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": parsed(call.arguments)}}
            for call in self.calls
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Token ids that the model is shown, with what a later request needs to go on from the completion."""

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)  # noqa: RUF009  a descriptor
    digest: bytes = b""
    """Digest of the tools and messages."""
    text: str | None = None
    """Raw prompt text; None for chat and for prompts of ids."""


def parsed(arguments: str) -> object:
    """Parse a call's arguments as JSON.

    Return their text if they are none, or hold what no template can show: a lone surrogate, or too many levels.
    """
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_LEVELS):
        inner = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for entries in inner for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return value
    return arguments


def extend_digest(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest with one more message; blanks in the JSON of arguments make no difference."""
    return hashlib.sha256(digest + _canonical(message.template())).digest()


class PromptBuilder:
    """Makes prompts out of conversations and texts.

    Args:
        tokenizer: the model's tokenizer.
        tool_parser: name of the parser that reads the completions.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str) -> None:
        self.tokenizer = tokenizer
        self._tool_parser = tool_parser

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]],
        session: Session | None,
    ) -> Prompt:
        """Make the prompt of a conversation, up to where the model is to answer.

        Raises:
            ModelError: the chat template refuses the messages.
            ApiError: the chat template cannot show tools.
        """
        if tools and not self.tokenizer.shows_tools and self._tool_parser != "hermes":
            raise ApiError(
                400,
                f"the model's chat template shows no tools, and how the tool parser {self._tool_parser!r} wants them "
                "shown is not known",
                param="tools",
            )
        # For each number of messages from 0 on, a digest of the tools and that many messages.
        known = list(accumulate(messages, extend_digest, initial=hashlib.sha256(_canonical(list(tools))).digest()))
        recorded = (
            (count, ids)
            for count in range(len(messages), 0, -1)
            if session
            and messages[count - 1].role == "assistant"
            and (ids := session.context(known[count])) is not None
        )
        count, context = next(recorded, (0, ()))
        rest = messages[count:]
        shown, shown_tools = self._shown(rest, tools, whole=count == 0)
        if count == 0:
            token_ids: TokenIds = self.tokenizer.render(shown, tools=shown_tools)
        else:
            calls = messages[count - 1].template_calls() if self.tokenizer.shows_tools else []
            token_ids = self.tokenizer.extend(context, shown, tools=shown_tools, calls=calls)
        return Prompt(token_ids=token_ids, digest=known[-1])

    def completion(self, prompt: str | Sequence[int], session: Session | None) -> Prompt:
        """Make the prompt of a completion. Its control tokens are parsed: the client writes the template's part too."""
        if not isinstance(prompt, str):
            # Ids that no array of ours holds are refused as all others that the model does not have.
            return Prompt(token_ids=[min(max(token, -1), 2**31 - 1) for token in prompt])
        known, context = session.longest_prefix(prompt) if session is not None else ("", ())
        rest = prompt[len(known) :]
        added = self.tokenizer.encode(rest, add_special=not known)
        return Prompt(token_ids=[*context, *added], text=prompt)

    def _shown(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, object]], *, whole: bool
    ) -> tuple[list[dict[str, object]], Sequence[Mapping[str, object]]]:
        """Return messages and tools as the template takes them: as Hermes' text, where it knows no tools.

        A tool's output can hold `</tool_response>`, but never as a token: tags around outputs and in them are text.
        """
        if self.tokenizer.shows_tools:
            return [message.template() for message in messages], tools
        texts: list[dict[str, object]] = []
        if tools and whole:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            introduction = _TOOLS_INTRODUCTION.format(tools=listed)
            if messages and messages[0].role == "system":
                introduction = f"{messages[0].content}\n\n{introduction}"
                messages = messages[1:]
            texts.append({"role": "system", "content": introduction})
        after_tool = False
        for message in messages:
            role, content = message.role, message.content
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
                if after_tool:
                    texts[-1]["content"] = f"{texts[-1]['content']}\n{content}"
                    continue
            elif message.calls:
                content = "\n".join([*filter(None, [content]), *map(_hermes_call, message.calls)])
            after_tool = message.role == "tool"
            texts.append({"role": role, "content": content})
        return texts, ()


def _hermes_call(call: ToolCall) -> str:
    written = json.dumps({"name": call.name, "arguments": parsed(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
