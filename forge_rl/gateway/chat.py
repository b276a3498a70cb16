"""Turns a conversation into token ids: recorded turns of its session keep theirs, only what follows is tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.sessions import Session
from forge_rl.types import TokenArray, TokenIds, ToolCall

_MOST_LEVELS = 64
"""Levels of a call's arguments that are shown as JSON; templates fail at some depth."""

_TEXT_PARTS = ("text", "refusal", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of content that are text."""


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

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> ChatMessage:
        """Read a message of OpenAI's form, which those of all APIs are brought to; `where` is its place in the request.

        Raises:
            ApiError: it holds what is not supported, or lacks what it needs.
        """
        role = "system" if raw.get("role") == "developer" else str(raw.get("role"))
        calls, content = raw.get("tool_calls") or (), raw.get("content")
        if calls and role != "assistant":
            raise ApiError(400, "only an assistant's message has tool calls", param=f"{where}.tool_calls")
        if role == "tool" and not raw.get("tool_call_id"):
            raise ApiError(400, "a tool's message names its call", param=f"{where}.tool_call_id")
        if content is None and not calls and role != "assistant":
            raise ApiError(400, "the message has no content", param=f"{where}.content")
        return cls(
            role=role,
            content=_join_text(content, f"{where}.content"),
            calls=tuple(
                ToolCall(id=call.get("id") or "", name=call["function"]["name"], arguments=_arguments(call))
                for call in calls
            ),
            call_id=raw.get("tool_call_id") or "",
            name=raw.get("name") or "",
        )

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
    reads: Callable[[str, Sequence[int]], tuple[str, Sequence[ToolCall]]] | None = None
    """Finds content and tool calls in a completion's text and ids; None where the text is all of it."""
    asked_temperature: float | None = None
    """Temperature that the request names."""


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
    """Return the digest with one more message.

    Of an assistant's, blanks around its text and in the JSON of arguments make no difference, nor do the ids of its
    calls: clients and parsers write them as they please.
    """
    shown = message.template()
    if message.role == "assistant":
        calls = [[call.name, parsed(call.arguments)] for call in message.calls]
        shown = {**shown, "content": message.content.strip(), "tool_calls": calls}
    return hashlib.sha256(digest + _canonical(shown)).digest()


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
        settings: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Make the prompt of a conversation, up to where the model is to answer.

        Args:
            messages: the conversation.
            tools: the tools' schemas.
            session: whose recorded turns keep their ids.
            settings: other variables of the chat template.

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
        first = _canonical([list(tools), settings or {}])
        # For each number of messages from 0 on, a digest of the tools and that many messages.
        known = list(accumulate(messages, extend_digest, initial=hashlib.sha256(first).digest()))
        recorded = (
            (count, ids)
            for count in range(len(messages), 0, -1)
            if session
            and messages[count - 1].role == "assistant"
            and (ids := session.context(known[count])) is not None
        )
        count, context = next(recorded, (0, ()))
        rest = messages[count:]
        shown = [message.template() for message in rest]
        if count == 0:
            token_ids: TokenIds = self.tokenizer.render(shown, tools=tools, settings=settings)
        else:
            calls = messages[count - 1].template_calls()
            token_ids = self.tokenizer.extend(context, shown, tools=tools, calls=calls, settings=settings)
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


def _join_text(content: object, where: str) -> str:
    """Return the text of a message's content; `where` is its place in the request.

    Raises:
        ApiError: it holds something else than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content if isinstance(content, Iterable) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise ApiError(400, f"content of type {kind!r} is not supported: send text", param=f"{where}.{place}")
        texts.append(text)
    return "\n".join(texts)


def _arguments(call: Mapping[str, Any]) -> str:
    written = call["function"].get("arguments") or ""
    return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
