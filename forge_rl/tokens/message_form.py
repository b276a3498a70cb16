"""Finds the form of messages in which a chat template shows thoughts and the arguments of tool calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from forge_rl.errors import ModelError
from forge_rl.system.strict_json import check_levels
from forge_rl.types import Message

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thoughts in published templates."""
_ASKED: Message = {"role": "user", "content": "?"}


def decoded_arguments(text: str) -> object:
    """Return a call's arguments decoded from JSON. Return the text unchanged if it is not valid JSON, or if templates
    cannot render the decoded value: it holds half of a surrogate pair, or has too many levels."""
    try:
        value: object = json.loads(text)
        # Lone surrogates come from escapes, as texts that hold them are refused before.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        check_levels(value)
    except (ValueError, RecursionError):
        return text
    return value


class MessageForm:
    """Writes messages in the form that one chat template reads, which it finds by rendering probes.

        tokenizer.message_form.with_thoughts([{"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}])

    Args:
        render: returns the text that the chat template writes for messages.
        tags: tags around a thought in the model's text.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], tags: tuple[str, str]) -> None:
        self._render = render
        self._tags = tags
        opening, closing = map(re.escape, tags)
        self._thought = re.compile(rf"\s*(?:{opening})?(.*?){closing}(.*)", re.DOTALL)
        self._shown: dict[tuple[str, bool, bool], bool] = {}
        """Whether thoughts are shown, by their form, and whether there is an answer and a call."""

    def with_arguments(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose calls have arguments as the template reads them: an object, or JSON text."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        return [self._with_arguments(message) for message in messages]

    def with_thoughts(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose thoughts are where the template shows them after the last question: in fields of their
        own, or in tags before the answer. They stay where they are if the template shows them there, or nowhere."""
        return [self._with_thoughts(message) if message.get("role") == "assistant" else message for message in messages]

    def _with_thoughts(self, message: Message) -> Message:
        fields = [str(message[key]) for key in THOUGHT_KEYS if message.get(key)]
        content = message.get("content") or ""
        if not isinstance(content, str):
            return message
        inside = self._thought.fullmatch(content)
        thought, answer = (fields[0], content) if fields else inside.groups() if inside else ("", content)
        if not thought.strip():
            return message
        use = bool(answer.strip()), bool(message.get("tool_calls"))
        present, other = ("fields", "text") if fields else ("text", "fields")
        if self._shows(present, *use) or not self._shows(other, *use):
            # All keys are set, as templates read one or another of them.
            return {**message, **dict.fromkeys(THOUGHT_KEYS, thought)} if fields else message
        plain = {key: field for key, field in message.items() if key not in THOUGHT_KEYS}
        return {**plain, **self._written(other, thought, answer)}

    def _written(self, form: str, thought: str, answer: str) -> dict[str, object]:
        if form == "fields":
            return {"content": answer.lstrip(), **dict.fromkeys(THOUGHT_KEYS, thought.strip())}
        opening, closing = self._tags
        return {"content": f"{opening}\n{thought.strip()}\n{closing}\n\n{answer}"}

    def _shows(self, form: str, answers: bool, calls: bool) -> bool:
        """Return True if the template shows a thought in this form, once, with its answer and call."""
        if (form, answers, calls) not in self._shown:
            thought, answer = (f"{name}-{secrets.token_hex(8)}" for name in ("THOUGHT", "ANSWER"))
            message = {"role": "assistant", **self._written(form, thought, answer if answers else "")}
            text = self._text({**message, **({"tool_calls": [_call({"key": "value"})]} if calls else {})})
            # Exactly once: a template that copies a message's fields and its text would train the thought twice.
            self._shown[form, answers, calls] = text.count(thought) == 1 and (not answers or answer in text)
        return self._shown[form, answers, calls]

    def _with_arguments(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            return message
        return {**message, "tool_calls": [self._converted(call) for call in calls]}

    def _converted(self, call: Mapping[str, object]) -> Mapping[str, object]:
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or isinstance(arguments, str) == self._takes_text:
            return call
        if isinstance(arguments, str):
            arguments = decoded_arguments(arguments)
        elif isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        new_function = {**function, "arguments": arguments}
        return new_function if function is call else {**call, "function": new_function}

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments as they are, so that they must be JSON text."""
        value = secrets.token_hex(8)
        calls = [{"role": "assistant", "content": "", "tool_calls": [_call(form)]} for form in _forms(value)]
        as_object, as_text = map(self._text, calls)
        # A template that prints a Python dict, with single quotes, does not know objects.
        reads_objects = value in as_object and f"{{'key': '{value}'}}" not in as_object
        return not reads_objects and f'{{"key": "{value}"}}' in as_text

    def _text(self, message: Message) -> str:
        """Return what the template writes for an answer to a question; "" if it refuses it."""
        try:
            return self._render([_ASKED, message])
        except ModelError:
            return ""


def _forms(value: str) -> tuple[dict[str, str], str]:
    arguments = {"key": value}
    return arguments, json.dumps(arguments)


def _call(arguments: object) -> dict[str, object]:
    # Some templates take only ids of nine characters.
    return {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
