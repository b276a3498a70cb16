"""Finds the code that a model wrote in Markdown fences, in linear time."""

from __future__ import annotations

import io
from collections.abc import Collection

PYTHON = frozenset({"", "py", "python", "python3", "tool_code"})
SHELL = frozenset({"", "sh", "bash", "shell", "zsh", "console"})
"""Names that follow the opening fences of each language; "" for a fence without one."""
_CHARACTERS = "`~"
_LEAST = 3


def fenced_code(text: str, languages: Collection[str] = PYTHON) -> list[str]:
    """Return the code in a text's fenced blocks, in order; blocks of other languages than these are left out.

        fenced_code("Try this:\\n```python\\nprint(1)\\n```")  # ["print(1)"]

    A block whose closing fence is missing, as if a token limit cut it, ends with the text.
    """
    blocks: list[str] = []
    fence, language, lines = "", "", list[str]()
    for line in _lines(text):
        mark = _fence(line)
        if not fence:
            if mark:
                # Further words, such as a file's name, say something else.
                language = next(iter(line.strip()[len(mark) :].lower().split()), "")
                fence, lines = mark, []
        # Markdown's rule: at least as many marks as the opening fence, and nothing after them.
        elif mark.startswith(fence) and line.strip() == mark:
            if language in languages:
                blocks.append("\n".join(lines))
            fence = ""
        else:
            lines.append(line)
    if fence and language in languages:
        blocks.append("\n".join(lines))
    return blocks


def last_code(text: str, languages: Collection[str] = PYTHON) -> str | None:
    """Return the last fenced block in one of these languages; the whole text if it has no fence; None if all blocks are
    in other languages."""
    blocks = fenced_code(text, languages)
    if blocks:
        return blocks[-1]
    return None if any(map(_fence, _lines(text))) else text


def _lines(text: str) -> list[str]:
    """Split a text at ends of lines, and not as `splitlines` also at characters that a string of code may have."""
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def _fence(line: str) -> str:
    """Return the fence that a line begins with, or ""."""
    line = line.strip()
    character = line[:1]
    if not character or character not in _CHARACTERS:
        return ""
    mark = line[: len(line) - len(line.lstrip(character))]
    # Markdown's rule: ```a``` is code within a line.
    is_inline = character == "`" and character in line[len(mark) :]
    return mark if len(mark) >= _LEAST and not is_inline else ""
