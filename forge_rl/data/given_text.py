"""Checks that a chat template keeps the text of given messages in the tokens that it makes of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.errors import TaskError
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.message_form import THOUGHT_KEYS
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Message, Task

_TAGS = ("<think>", "</think>")
_HINTS = {
    "thoughts": "change the model's chat_template.jinja so that it keeps them, or remove them from the row",
    "text beside its tool call": "move it to a message of its own, or change the model's chat_template.jinja",
}
_ANSWER_FIELDS = ("tool_plan", "refusal")
"""Further fields of an answer that the model writes, where the chat template shows them."""
_READ = ("role", "content", "tool_calls", "tool_call_id", "id", "weight", *THOUGHT_KEYS)
_ANSWERS = ("completion", "chosen", "rejected")
_LOOKED_AT = 2000
"""Characters of a column that are searched for in the trained and the shown text."""
_HINT = "change the message, or the model's chat_template.jinja"


@dataclass(frozen=True)
class GivenText:
    """Text of a message, or of a part of one."""

    part: str
    """The part of the message, in words."""
    text: str


def check_answer(message: Message, number: int, token_ids: TokenIds, tokenizer: Tokenizer) -> None:
    """Refuse an answer if the chat template leaves out some of its text.

    Args:
        number: the message's number in its conversation, from 1.
        token_ids: the tokens that the template makes of the answer.

    Raises:
        TaskError: names the message, the part and the text.
    """
    _check_shown([(number, passage) for passage in _of_answer(message, tokenizer)], token_ids, tokenizer, "trained")


def check_context(
    messages: Sequence[Message], token_ids: TokenIds, tokenizer: Tokenizer, *, first: int, use: str = "shown"
) -> None:
    """Refuse messages whose text the model is not shown. Thoughts and calls of earlier answers may be left out.

    Args:
        token_ids: the tokens that the template makes of the conversation.
        first: number of the first message in its conversation, from 1.

    Raises:
        TaskError: names the message and the text.
    """
    passages = [
        (number, passage)
        for number, message in enumerate(messages, first)
        for passage in _of_content(message, tokenizer)
        # Templates leave out the thoughts of earlier answers on purpose.
        if passage.part != "thoughts"
    ]
    _check_shown(passages, token_ids, tokenizer, use)


def _check_shown(
    passages: Iterable[tuple[int, GivenText]], token_ids: TokenIds, tokenizer: Tokenizer, use: str
) -> None:
    """Raise TaskError for a passage, given with the number of its message, that is not in the rendered text."""
    rendered = _joined(tokenizer.decode(token_ids, skip_special=False))
    # The longest first, each at a place of its own: a thought "5" is not the 5 of "15".
    for number, passage in sorted(passages, key=lambda numbered: -len(_joined(numbered[1].text))):
        form = _form_in(rendered, passage.text, tokenizer)
        if form is None:
            raise _left_out(number, passage, use)
        rendered = rendered.replace(form, "\0", 1)


def unread_names(task: Task, token_ids: Iterable[TokenIds], tokenizer: Tokenizer) -> set[str]:
    """Return the names of columns of a task, and of fields of its messages, whose text is not in any of its examples.

        unread_names(task, [episode.segments[0].token_ids], tokenizer)  # {"label", "messages' name"}

    Args:
        token_ids: all token sequences that are made of the task.
    """
    # Joined by NUL, so that no passage of ordinary text is found across two sequences.
    rendered = "\0".join(_joined(tokenizer.decode(ids, skip_special=False)) for ids in token_ids)

    def is_read(value: object) -> bool:
        texts = list(_texts(value))
        return bool(texts) and all(_form_in(rendered, text[:_LOOKED_AT], tokenizer) is not None for text in texts)

    names = {
        name
        for name, value in task.truth.items()
        if name not in _ANSWERS and not _is_empty(value) and not is_read(value)
    }
    answers = (task.truth.get(name) for name in _ANSWERS)
    messages = itertools.chain(task.messages, *(answer for answer in answers if isinstance(answer, list)))
    for message in messages:
        names |= {
            f"messages' {name}"
            for name, value in message.items()
            if name not in _READ and isinstance(value, str) and value.strip() and not is_read(value)
        }
    return names


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a column's value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for field in value.values():
            yield from _texts(field)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _of_answer(message: Message, tokenizer: Tokenizer) -> Iterator[GivenText]:
    thoughts = next((str(message[key]) for key in THOUGHT_KEYS if message.get(key)), "")
    if thoughts.strip():
        yield GivenText("thoughts", thoughts)
    for field in _ANSWER_FIELDS:
        if isinstance(text := message.get(field), str) and text.strip():
            yield GivenText(field, text)
    yield from _of_content(message, tokenizer)
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, Sequence)
    for call in calls:
        function = call.get("function", call)
        yield GivenText("tool call", str(function["name"]))
        for value in _values(function.get("arguments")):
            yield GivenText(f"argument of its call of {function['name']!r}", value)


def _of_content(message: Message, tokenizer: Tokenizer) -> Iterator[GivenText]:
    """Yield the text of a message. An answer's text is split at tags: text before a closing tag is a thought."""
    content = message.get("content") or ""
    assert isinstance(content, str), content
    default_part = "text beside its tool call" if message.get("tool_calls") else "text"
    if message.get("role") == "assistant":
        tags = {*_TAGS, *tokenizer.thoughts.tags}
        # With a capturing group, split keeps the tags: texts at even places, tags at odd ones.
        pieces = re.split("(" + "|".join(map(re.escape, sorted(tags))) + ")", content)
        closing = {_TAGS[1], tokenizer.thoughts.tags[1]}
        for place in range(0, len(pieces), 2):
            is_thought = place + 1 < len(pieces) and pieces[place + 1] in closing
            if pieces[place].strip():
                yield GivenText("thoughts" if is_thought else default_part, pieces[place])
    elif content.strip():
        yield GivenText(default_part, content)


def _values(arguments: object) -> Iterator[str]:
    """Yield names and texts in arguments, and numbers; other values have many forms in templates."""
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            yield str(name)
            yield from _values(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from _values(value)
    elif isinstance(arguments, int) and not isinstance(arguments, bool):
        yield str(arguments)
    elif isinstance(arguments, str) and arguments.strip():
        yield arguments


def _form_in(rendered: str, text: str, tokenizer: Tokenizer) -> str | None:
    """Return the form in which a rendered text has a text: unchanged, as JSON, or as the vocabulary can write it."""
    # Templates write arguments of calls as JSON, with or without escapes for letters beyond ASCII.
    for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
        if (joined := _joined(form)) in rendered:
            return joined
    # A vocabulary may be unable to write a text exactly, for example where its normalizer changes letters.
    joined = _joined(tokenizer.decode(tokenizer.encode(text), skip_special=False))
    return joined if joined in rendered else None


def _joined(text: str) -> str:
    """Return a text without blanks, which templates trim."""
    return "".join(text.split())


def _left_out(number: int, passage: GivenText, use: str) -> TaskError:
    text = " ".join(passage.text[:200].split())
    excerpt = ascii(text if len(text) <= 60 else f"{text[:60]} ...")
    return TaskError(
        f"message {number}'s {passage.part} would not be {use}: the chat template leaves out {excerpt}",
        hint=_HINTS.get(passage.part, _HINT),
    )
