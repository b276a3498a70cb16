"""Turns rows into tasks: which columns form the prompt, and which the truth or the given answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from forge_rl.criteria import read_criteria
from forge_rl.data.sources.messages import check_text, has_fillers, is_chat, read_messages, read_tools
from forge_rl.data.sources.tables import FilledRow, RowError
from forge_rl.errors import TaskError
from forge_rl.types import Message, Task

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
_TEMPLATE = "--data.template"
_MESSAGES = "messages"
_CHATS = (_MESSAGES, "conversations", "prompt")
"""Default columns of chat messages, used if they hold a list."""
_QUESTIONS = ("question", "prompt")
"""Default columns of the question."""
_COMPLETIONS = ("completion", "answer")
"""Default columns of a conversation's answer, unless the messages have it."""
_TOOLS = ("tools", "functions")
"""Default columns of tool schemas; the second is OpenAI's former name."""
_SYSTEM = "system"
"""Column of the system message in ShareGPT's and LLaMA-Factory's rows."""
_MEDIA = ("images", "image", "videos", "audios")
_TEMPLATE_ARGS = "chat_template_kwargs"
_FOLDED = b"".join(b" " if chr(code).isspace() else bytes([code]).lower() for code in range(256))
"""Lower case of each ASCII character, and a space for each blank."""
_MOST_NAMES = 20
_NO_COLUMN = object()

Kind: TypeAlias = Literal["prompt", "conversation", "pair"]
"""What a row is: a prompt to answer, a conversation with its answers, or a prompt with two answers, one preferred."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Mapping of a row's columns to a task.

        task, _ = Columns(question="problem", answer="solution").read({"problem": "2+3?", "solution": "5"}, "sums")
        task.truth["answer"]  # "5"

    The prompt is the messages, the rendered template, or the question. All other columns are in the task's truth under
    their own names, and the answer also under "answer". A name such as `reward_model.ground_truth` refers to a field
    inside a column, also if the column holds JSON as text.

    A conversation's truth has its messages from the first answer on as "completion". They are the rest of the messages
    from the assistant's first on, if they end with the assistant's, or the column of the answer, as text or messages. A
    pair's truth has the messages after the prompt as "chosen" and "rejected". If these columns are whole conversations,
    the prompt is the messages that they have in common.

    Raises:
        TaskError: the template cannot be read.
    """

    question: str = ""
    """Column used as the user message; defaults to the column question or prompt."""
    answer: str = ""
    """Column stored in the truth as "answer", which must have a value; defaults to the column answer, if it exists.
    For a conversation, the column of what follows the prompt; defaults to the column completion or answer."""
    messages: str = ""
    """Column of chat messages; defaults to the column messages, conversations or prompt, if it holds a list. ShareGPT's
    {"from": "human", "value": "..."} becomes {"role": "user", "content": "..."}; others are used unchanged."""
    tools: str = ""
    """Column of tool schemas; defaults to the column tools or functions, if it exists."""
    rubric: str = ""
    """Column of the task's own rubric, see `criteria.read_criteria`, checked and stored in the truth as "rubric"."""
    id: str = ""
    """Column with a unique string or integer per task; defaults to a digest of the row."""
    problem: str = ""
    """Column that identifies the problem: rows with equal values are the same problem in other words and are held out
    together. Defaults to the prompt."""
    template: str = ""
    """Jinja template of the user message, or a file with one; the columns are its variables. If it has a block
    `messages`, the block renders a JSON list of chat messages instead."""
    instruction: str = ""
    """Text appended to the question, or to the last user message."""
    system: str = ""
    """System message for tasks that have none, neither in their messages nor as text in a column system."""
    chosen: str = ""
    """Column of a pair's preferred answer; defaults to the column chosen."""
    rejected: str = ""
    """Column of a pair's other answer; defaults to the column rejected."""
    kind: Kind = "prompt"
    """What a row is; set by the recipe."""

    def __post_init__(self) -> None:
        _ = self._template  # report a bad template early

    def read(self, row: Mapping[str, object], source: str, raw_bytes: bytes = b"") -> tuple[Task, int]:
        """Build the task of a row, and the 64-bit digest of its problem: equal for problems that differ only in case,
        blanks, the instruction or the system message.

        Args:
            raw_bytes: the row's bytes in its file, if it comes from one.

        Raises:
            RowError: a column is missing or has an invalid value.
        """
        _check_unread(row)
        prompt_column, messages, answers = self._example(row)
        # Before instruction and system message are added, so that neither changes which problems are held out.
        problem = prompt_key(messages)
        tools_column = self.tools or next((name for name in _TOOLS if _holds_tools(name, row.get(name))), "")
        tools = read_tools(tools_column, _get(row, tools_column), fillers=_fills(row)) if tools_column else ()
        # Whatever the prompt does not use is kept for rewards, under its own name.
        truth = {name: value for name, value in row.items() if name not in (prompt_column, tools_column)}
        system = self.system
        if not self.template and prompt_column != _SYSTEM and messages[0]["role"] != "system":
            system = _system(row) or system
        if self.answer:
            truth["answer"] = _get(row, self.answer)
        if self.answer or self.kind == "prompt":
            _check_answer(self.answer or "answer", truth.get("answer"), is_named=bool(self.answer))
        if self.rubric:
            truth["rubric"] = _rubric(self.rubric, _get(row, self.rubric))
        truth |= answers
        if self.problem:
            problem = problem_key(json.dumps(_get(row, self.problem), sort_keys=True, default=str))
        if self.instruction:
            messages = _instructed(messages, self.instruction)
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        if self.id:
            value = _get(row, self.id)
            if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
                raise RowError("is not an id, which must be a string or an integer", column=self.id, value=value)
            name = _printable(str(value))
        else:
            content = raw_bytes or json.dumps(row, sort_keys=True, default=str).encode()
            name = f"{_digest(content):016x}"
        is_text = isinstance(row.get(prompt_column), str) and not is_chat(row.get(prompt_column))
        task = Task(id=name, source=source, messages=tuple(messages), truth=truth, tools=tools, prompt_is_text=is_text)
        return task, problem

    def _example(self, row: Mapping[str, object]) -> tuple[str, list[Message], dict[str, list[Message]]]:
        """Return the column used, or "", the prompt, and the given answers by their name in the truth."""
        if self.kind == "pair":
            return self._pair(row)
        prompt_column, messages = self._messages(row)
        if self.kind == "prompt":
            _check_prompt(prompt_column, messages)
            return prompt_column, messages, {}
        if messages[-1]["role"] == "assistant" and not self.answer:
            first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
            if first == 0:
                raise RowError(
                    "begins with an assistant message, which nothing asks for", column=prompt_column or _TEMPLATE
                )
            return prompt_column, messages[:first], {"completion": messages[first:]}
        column = self.answer or next((name for name in _COMPLETIONS if row.get(name) is not None), "")
        if not column:
            raise RowError(
                f"has no answer: it ends with a message of the role {messages[-1]['role']!r}",
                column=prompt_column,
                hint="end the messages with the assistant's, or name the column of its answer: :answer=COLUMN",
            )
        _check_prompt(prompt_column, messages)
        return prompt_column, messages, {"completion": _continuation(column, _answer(column, row))}

    def _pair(self, row: Mapping[str, object]) -> tuple[str, list[Message], dict[str, list[Message]]]:
        names = self.chosen or "chosen", self.rejected or "rejected"
        sides = [_answer(name, row) for name in names]
        if sides[0] == sides[1]:
            raise RowError(f"is the same as {names[1]!r}", column=names[0], value=sides[0][-1].get("content"))
        # Answers alone need a column with their prompt; whole conversations share their beginning, which is the prompt.
        if any(side[0]["role"] == "assistant" for side in sides):
            prompt_column, prompt = self._messages(row)
            _check_prompt(prompt_column, prompt)
        else:
            if named := self.messages or self.question or (_TEMPLATE if self.template else ""):
                raise RowError(
                    f"is a whole conversation, so that the prompt of {named} would not be used",
                    column=names[0],
                    hint=f"leave out {named}, or give answers alone",
                )
            prompt_column, prompt = "", [message for message, _ in takewhile(_are_equal, zip(*sides, strict=False))]
            if not prompt:
                raise RowError(f"has no message in common with {names[1]!r}", column=names[0], value=sides[0][0])
            sides = [side[len(prompt) :] for side in sides]
        chosen_answer, rejected_answer = (_continuation(name, side) for name, side in zip(names, sides, strict=True))
        return prompt_column, prompt, {"chosen": chosen_answer, "rejected": rejected_answer}

    def _messages(self, row: Mapping[str, object]) -> tuple[str, list[Message]]:
        """Return the column used, or "", and the messages from it, without instruction and system message."""
        chat = self.messages
        if not (chat or self.question or self._template):
            chat = next((name for name in _CHATS if is_chat(row.get(name))), "")
        if chat:
            return chat, read_messages(chat, _get(row, chat), fillers=_fills(row))
        if self._template is not None:
            return "", self._rendered(row)
        column = self.question or next((name for name in _QUESTIONS if name in row), "")
        if not column:
            raise RowError(
                "has no column 'question'",
                value=sorted(map(str, row)),
                hint=f"name the column: :question={_printable(next(iter(row), 'COLUMN'))}, or :messages=COLUMN",
            )
        text = _get(row, column)
        if not isinstance(text, str) or not text.strip():
            bad_value = None if text == "" or text is None else text
            problem = "is null" if text is None else "is empty" if text == "" else "is not text"
            raise RowError(problem, column=column, value=bad_value)
        check_text(column, text)
        return column, [{"role": "user", "content": text}]

    def _rendered(self, row: Mapping[str, object]) -> list[Message]:
        assert self._template is not None
        name = _TEMPLATE
        try:
            if _MESSAGES in self._template.blocks:
                context = self._template.new_context({**row, "row": row})
                text = "".join(self._template.blocks[_MESSAGES](context))
            else:
                text = self._template.render({**row, "row": row})
        except Exception as error:  # a template can raise anything
            raise RowError(f"fails in the template: {error}", hint=f"fix {name}, or the row") from None
        if not text.strip():
            raise RowError("is rendered to empty text by the template")
        check_text(name, text)
        if _MESSAGES not in self._template.blocks:
            return [{"role": "user", "content": text.strip()}]
        try:
            return read_messages(name, json.loads(text))
        except (ValueError, RecursionError) as error:
            raise RowError(
                f"is not rendered to JSON by the template's block messages: {error}",
                value=text,
                hint="write {{ column | tojson }}",
            ) from None

    @cached_property
    def _template(self) -> Template | None:
        if not self.template:
            return None
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        text, path = self.template, Path(self.template).expanduser()
        try:
            if path.suffix in _TEMPLATE_SUFFIXES:
                text = path.read_text()
            elif "{" not in text:
                raise TaskError(
                    f"the template {text!r} uses no column",
                    hint=f"write {{{{ column }}}}, or give a file that ends in {_TEMPLATE_SUFFIXES[0]}",
                )
            # StrictUndefined: a misspelt column is an error instead of an empty prompt.
            environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
            return environment.from_string(text)
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"the template {path} cannot be read: {error}", hint="check --data.template") from error
        except jinja2.TemplateSyntaxError as error:
            raise TaskError(
                f"the template {self.template!r:.80}, line {error.lineno}: {error.message}", hint="fix --data.template"
            ) from error


def problem_key(text: str) -> int:
    """Return a 64-bit hash that ignores case, blanks and Unicode compatibility forms (NFKC)."""
    if not text.isascii():
        words = unicodedata.normalize("NFKC", text).split()
        return _digest(" ".join(words).casefold().encode(errors="surrogatepass"))
    folded_text = text.encode().translate(_FOLDED).strip()  # the same, five times faster
    while b"  " in folded_text:
        folded_text = folded_text.replace(b"  ", b" ")
    return _digest(folded_text)


def prompt_key(messages: Sequence[Message]) -> int:
    """Return the problem key of a prompt, without its system message."""
    return problem_key(
        "\n".join(str(message.get("content", "")) for message in messages if message["role"] != "system")
    )


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _get(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, or of a field inside one."""
    value = row.get(column, _NO_COLUMN)
    # A column whose own name has a dot comes first.
    if value is _NO_COLUMN and "." in column:
        value = row
        for part in column.split("."):
            value = _parsed(value)
            value = value.get(part, _NO_COLUMN) if isinstance(value, Mapping) else _NO_COLUMN
    if value is _NO_COLUMN:
        import difflib

        close = difflib.get_close_matches(column, map(str, row), n=1)
        suggestion = f"did you mean {_printable(close[0])}? " if close else ""
        raise RowError("is missing", column=column, hint=f"{suggestion}the row has: {_names(row)}")
    return value


def _parsed(value: object) -> object:
    """Return the object in a cell that holds one as JSON text, as CSV's do; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _names(row: Mapping[str, object]) -> str:
    """List the columns of a row, for an error message."""
    names = [_printable(str(name)) for name in row]
    return ", ".join(names[:_MOST_NAMES] + ["..."] * (len(names) > _MOST_NAMES)) or "none"


def _printable(text: str) -> str:
    """Escape text from a file for printing, so that it cannot control a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _fills(row: Mapping[str, object]) -> bool:
    """Return True if nulls in a row's messages stand for fields that they do not have: a columnar format added them."""
    return isinstance(row, FilledRow) or has_fillers(row)


def _check_unread(row: Mapping[str, object]) -> None:
    """Refuse columns that change what a model is shown in ways that training does not follow."""
    for name in _MEDIA:
        media = row.get(name)
        is_media = isinstance(media, list | bytes) or (isinstance(media, Mapping) and "bytes" in media)
        if media and is_media:
            raise RowError(
                "holds something other than text, which the model would not see",
                column=name,
                hint="models are trained on text: remove the row, or the column if the text does without it",
            )
    if template_args := _parsed(row.get(_TEMPLATE_ARGS)):
        raise RowError(
            "has variables of the chat template for one row, which are not supported",
            column=_TEMPLATE_ARGS,
            value=template_args,
            hint="set them for all rows with --template-args, and remove the column",
        )


def _holds_tools(name: str, value: object) -> bool:
    """Return whether a column holds tool schemas. One named functions may also hold code, or names of functions."""
    if name == "functions" and isinstance(value, str):
        return value.lstrip().startswith(("[", "{"))
    if name == "functions" and isinstance(value, list):
        return all(isinstance(item, Mapping) for item in value)
    return value is not None


def _system(row: Mapping[str, object]) -> str:
    """Return a row's own system message; "" if there is none."""
    system = row.get(_SYSTEM)
    if not isinstance(system, str) or not system.strip():
        return ""
    check_text(_SYSTEM, system)
    return system


def _check_prompt(prompt_column: str, messages: Sequence[Message]) -> None:
    if messages[-1]["role"] == "assistant":
        raise RowError(
            "ends with an assistant message, so the prompt would contain the answer",
            column=prompt_column or _TEMPLATE,
            value=messages[-1].get("content"),
            hint="remove that message, and name the column of the true answer with :answer=COLUMN; to train on the "
            "answers of conversations, use recipes.sft",
        )


def _check_answer(column: str, value: object, *, is_named: bool) -> None:
    """Refuse a true answer that is empty; the default column may also be null, as other rewards need none."""
    if value is None:
        if is_named:
            raise RowError("is null", column=column)
        return
    if (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value):
        raise RowError("is empty", column=column, hint="give each row its true answer, or leave the row out")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError("is not a finite number", column=column, value=value)


def _answer(column: str, row: Mapping[str, object]) -> list[Message]:
    """Return the messages of a given answer: a text, or messages that end with the assistant's."""
    value = _get(row, column)
    if value is None or value == "":
        raise RowError("is null" if value is None else "is empty", column=column)
    if isinstance(value, str) and not (is_chat(value) and '"role"' in value):
        check_text(column, value)
        return [{"role": "assistant", "content": value}]
    value = [value] if isinstance(value, Mapping) else value
    messages = read_messages(column, value, fillers=_fills(row))
    if messages[-1]["role"] != "assistant":
        raise RowError("does not end with an assistant message", column=column, value=messages[-1])
    return messages


def _continuation(column: str, messages: list[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "assistant":
        raise RowError(
            "does not continue the prompt with an assistant message",
            column=column,
            value=messages[0] if messages else None,
            hint="give what follows the prompt, or a pair of whole conversations with the same prompt",
        )
    return messages


def _are_equal(pair: tuple[object, object]) -> bool:
    return pair[0] == pair[1]


def _rubric(column: str, value: object) -> list[dict[str, object]]:
    try:
        return [{"criterion": criterion.text, "weight": criterion.weight} for criterion in read_criteria(value)]
    except ValueError as error:
        hint = 'write a list such as [{"criterion": "Names the capital.", "weight": 1}]'
        raise RowError(str(error), column=column, value=value, hint=hint) from None


def _instructed(messages: list[Message], instruction: str) -> list[Message]:
    """Append a text to the last user message."""
    for index in range(len(messages) - 1, -1, -1):
        content = messages[index].get("content")
        if messages[index]["role"] == "user" and isinstance(content, str):
            new_message = {**messages[index], "content": content + instruction}
            return [*messages[:index], new_message, *messages[index + 1 :]]
    return messages
