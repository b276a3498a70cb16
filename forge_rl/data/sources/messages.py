"""Converts the chat messages of data sets to the form that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from forge_rl.data.sources.tables import RowError
from forge_rl.types import Message

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool", "function": "tool"}
"""Roles in the words of ShareGPT and of OpenAI's former functions; the others, such as system, have their own names."""
_CALLED = ("function_call", "tool_call")
"""Roles of ShareGPT's messages whose text is a tool call."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text of each type of part that is text."""
_THOUGHT_PARTS = {
    "thinking": "thinking",
    "reasoning": "text",
    "reasoning.text": "text",
    "reasoning.summary": "summary",
}
"""Key of the text of each type of part that is a thought."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thoughts; the first is what a message has once it is read."""
_THOUGHT_LIST = "reasoning_details"
"""Key of the parts of thoughts that OpenRouter writes, next to their text or in its place."""
_TRAINED = ("weight", "train", "training", "loss")
"""Keys that say whether a message is trained: 0 or 1 in OpenAI's format, false or true in others."""
_JSON_CHAT = re.compile(r"\s*\[\s*\{")
"""Beginning of a list of objects, which JSON may write with blanks and line breaks."""
_MAX_TEXT_LENGTH = 1 << 23
"""Largest text of a prompt or an answer, in characters: about two million tokens, whose encoding takes 1.2 GB."""


def is_chat(value: object) -> bool:
    """Return True if a cell holds a list, also as JSON text."""
    return isinstance(value, list) or (isinstance(value, str) and _JSON_CHAT.match(value) is not None)


def read_messages(column: str, value: object, *, fillers: bool = False) -> list[Message]:
    """Return the messages in a cell, in the one form that the rest of the program reads.

        read_messages("messages", [{"from": "gpt", "value": "5"}])  # [{"role": "assistant", "content": "5"}]

    Parts of text become text, a line apart. Arguments of tool calls become objects. Thoughts that are not in the text
    are in "reasoning_content". A message that is not trained has "weight" 0. All other keys stay.

    Args:
        column: column named in errors.
        fillers: nulls stand for fields that a message does not have, as in columnar files.

    Raises:
        RowError: a message has no role or no text, a part that is not text, or arguments that are not an object.
    """
    entries = listed(column, value, "messages")
    if not entries:
        raise RowError("has no messages", column=column)
    fillers = fillers and not isinstance(value, str)  # nulls in JSON were written
    return [_message(column, number, entry, fillers=fillers) for number, entry in enumerate(entries, 1)]


def read_tools(column: str, value: object, *, fillers: bool = False) -> tuple[Mapping[str, object], ...]:
    """Return the tool schemas in a cell, each as {"type": "function", "function": {...}}, which OpenAI's Responses and
    ShareGPT write without the inner level; arguments and errors as for `read_messages`."""
    if value is None:
        return ()
    schemas: list[Mapping[str, object]] = []
    for number, schema in enumerate(listed(column, value, "tool schemas"), 1):
        if not isinstance(schema, Mapping):
            raise RowError(f"has a tool {number} that is not a JSON schema", column=column, value=schema)
        clean_schema = without_nulls(schema) if fillers and not isinstance(value, str) else dict(schema)
        assert isinstance(clean_schema, dict)
        if isinstance(clean_schema.get("name"), str) and clean_schema.get("type", "function") == "function":
            function = {name: field for name, field in clean_schema.items() if name != "type"}
            clean_schema = {"type": "function", "function": function}
        schemas.append(clean_schema)
    return tuple(schemas)


def listed(column: str, value: object, item_kind: str) -> list[object]:
    """Return a list, parsing it from JSON if it is a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"is not a list of {item_kind} and not JSON: {error}", column=column, value=value) from None
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise RowError(f"is not a list of {item_kind}", column=column, value=value)
    return list(value)


def without_nulls(value: object) -> object:
    """Drop null fields, at any depth: Arrow and Parquet give every message the union of all fields."""
    if isinstance(value, Mapping):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def has_fillers(row: Mapping[str, object]) -> bool:
    """Return True if a row has a list of objects with the same fields, null in some: it was exported from a columnar
    format. People write only the fields that a message has."""
    lists = [value for value in row.values() if isinstance(value, list) and len(value) > 1]
    return any(
        all(isinstance(entry, Mapping) and entry.keys() == entries[0].keys() for entry in entries)
        and any(field is None for entry in entries for field in entry.values())
        for entries in lists
    )


def check_text(column: str, text: str) -> None:
    """Refuse text that is too long to encode, or that stands for no characters.

    Raises:
        RowError: says which.
    """
    if len(text) > _MAX_TEXT_LENGTH:
        raise RowError(
            f"has {len(text):,} characters, more than {_MAX_TEXT_LENGTH:,}",
            column=column,
            value=text[:20],
            hint="cut the text: no model's context is this long",
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"has a lone surrogate, U+{ord(text[error.start]):04X}, which stands for no character",
            column=column,
            value=text[max(0, error.start - 20) : error.start + 20],
            hint="decode the text with errors='replace' when writing the file",
        ) from None


def _message(column: str, number: int, entry: object, *, fillers: bool) -> Message:
    entry = _renamed(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise RowError(
            f"has a message {number} without a role",
            column=column,
            value=entry,
            hint='messages are {"role": "user", "content": "..."}',
        )
    location = f"has a message {number}"
    # A null field of a message is one that it does not have; those inside arguments and schemas are values.
    message = {name: field for name, field in entry.items() if field is not None}
    if fillers:
        message = {name: without_nulls(field) for name, field in message.items()}
    if message["role"] in _CALLED:
        # ShareGPT writes a call as the text of a message of its own role.
        calls = _calls(column, location, message.pop("content", None))
        message |= {"role": "assistant", "tool_calls": calls}
    else:
        calls = _calls(column, location, message.pop("tool_calls", None) or _former_call(message))
        message |= {"tool_calls": calls} if calls else {}
    # A refusal in OpenAI's format stands in place of the content, and is what the model said.
    if message.get("content") is None and isinstance(message.get("refusal"), str):
        message["content"] = message.pop("refusal")
    content, thoughts = _content(column, location, message.get("content"))
    if _THOUGHT_LIST in message:
        thought_parts = message.pop(_THOUGHT_LIST)
        # The parts repeat the text of thoughts where both are there.
        if not thoughts and not any(message.get(key) for key in _THOUGHTS):
            thoughts = _content(column, location, _readable(thought_parts))[1]
    for key in _THOUGHTS:
        if key in message:
            thoughts = [_text(column, location, key, message.pop(key)), *thoughts]
    if not (isinstance(content, str) or (content is None and (calls or any(thoughts)))):
        raise RowError(f"{location} without content", column=column, value=entry)
    message |= {} if content is None else {"content": content}
    # The same thoughts under two keys count once; dict.fromkeys keeps their order.
    if thoughts := [thought for thought in dict.fromkeys(thoughts) if thought]:
        message[_THOUGHTS[0]] = "\n".join(thoughts)
    for key in _TRAINED:
        # Only "weight" is surely about training; "loss" and the like are left alone unless they are booleans.
        if key in message and (key == _TRAINED[0] or isinstance(message[key], bool)):
            weight = message.pop(key)
            if weight not in (0, 1):
                raise RowError(
                    f"{location} with the {key} {weight!r}",
                    column=column,
                    hint="give 1 to train the message and 0 not to: other weights of messages are not supported",
                )
            message |= {} if weight else {_TRAINED[0]: 0}
    for text in (content, message.get(_THOUGHTS[0])):
        if isinstance(text, str):
            check_text(column, text)
    return message


def _renamed(entry: object) -> object:
    """Rename keys and roles of ShareGPT, and former ones of OpenAI, as chat templates call them."""
    if not isinstance(entry, Mapping):
        return entry
    role = entry.get("role")
    if role is None and isinstance(entry.get("from"), str):
        role = entry["from"]
        entry = {
            **{name: field for name, field in entry.items() if name not in ("from", "value", "role")},
            "content": entry.get("value"),
        }
    return {**entry, "role": _ROLES.get(role, role)} if isinstance(role, str) else entry


def _readable(thought_parts: object) -> object:
    """Leave out thoughts that a provider encrypted, or for which it gave only a signature."""
    if not isinstance(thought_parts, list):
        return thought_parts
    return [
        part
        for part in thought_parts
        if not isinstance(part, Mapping)
        or (part.get("type") != "reasoning.encrypted" and (part.get("type") != "reasoning.text" or part.get("text")))
    ]


def _content(column: str, location: str, content: object) -> tuple[object, list[str]]:
    """Return the text of a content, and the thoughts in its parts; a content without parts is returned unchanged."""
    if not isinstance(content, list | tuple):
        return content, []
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
        for keys, parts in ((_TEXT_PARTS, texts), (_THOUGHT_PARTS, thoughts)):
            if isinstance(part, Mapping) and isinstance(kind, str) and kind in keys:
                parts.append(_text(column, location, f"{kind} part", part.get(keys[kind])))
                break
        else:
            part_text = f"a part of the type {kind!r}" if isinstance(kind, str) else "a part without a type"
            raise RowError(
                f"{location} with {part_text}, which is not text",
                column=column,
                value=part,
                hint="models are trained on text: remove the part, or describe it in words",
            )
    return "\n".join(texts), thoughts


def _text(column: str, location: str, name: str, value: object) -> str:
    """Return a text, which may be in parts of its own."""
    text = _content(column, location, value)[0]
    if not isinstance(text, str):
        raise RowError(f"{location} whose {name} is not text", column=column, value=value)
    return text


def _former_call(message: dict[str, object]) -> object:
    """Remove and return the call of OpenAI's former format."""
    call = message.pop("function_call", None)
    return [{"type": "function", "function": call}] if call else None


def _calls(column: str, location: str, value: object) -> list[dict[str, object]]:
    """Return tool calls with their arguments as objects."""
    if isinstance(value, str):
        value = _parsed(column, f"{location} whose tool calls are", value)
    if isinstance(value, Mapping):
        value = [value]
    return [_call(column, location, call) for call in listed(column, value, "tool calls")] if value is not None else []


def _call(column: str, location: str, call: object) -> dict[str, object]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(
            f"{location} with a tool call without a name",
            column=column,
            value=call,
            hint='calls are {"function": {"name": "add", "arguments": {"a": 2}}}',
        )
    arguments = function.get("arguments")
    subject = f"{location} whose call of {function['name']!r} has arguments that are"
    if isinstance(arguments, str):
        arguments = _parsed(column, subject, arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise RowError(f"{subject} not an object", column=column, value=arguments)
    # Without the inner level: the call is the function itself.
    if function is call:
        call, function = {"type": "function", "id": call.get("id")}, {"name": function["name"]}
    call_fields, function_fields = (
        {name: field for name, field in level.items() if field is not None} for level in (call, function)
    )
    return {**call_fields, "function": {**function_fields, "arguments": dict(arguments or {})}}


def _parsed(column: str, subject: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{subject} not JSON: {error}",
            column=column,
            value=text,
            hint='write a call as {"name": "add", "arguments": {"a": 2}}',
        ) from None
