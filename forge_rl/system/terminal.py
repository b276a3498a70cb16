"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

import re

_ACTS = re.compile(
    # Control characters except newlines and tabs, direction marks and overrides, line separators, lone surrogates,
    # annotations and tags.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


TRACE_LETTERS = 50_000
"""Letters to which traces are shortened."""


def clipped(text: str, *, lines: int, width: int) -> str:
    """Return at most so many lines and columns of an untrusted text, made visible; `…` marks a cut."""
    raw_lines = text[: lines * width * 4].split("\n")
    cut_lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in map(visible, raw_lines[:lines])]
    if len(raw_lines) > lines or len(text) > lines * width * 4:
        cut_lines[-1] = f"{cut_lines[-1][: width - 1].removesuffix('…')}…"
    return "\n".join(cut_lines)


def shortened(text: str, max_chars: int = 10_000) -> str:
    """Return a text of at most about so many characters: its start, and its end, in which an error says most.

    Texts of exceptions may quote a page or an array; cut them before they are searched, shown or written.
    """
    if len(text) <= max_chars:
        return text
    end = max_chars // 4
    return f"{text[: max_chars - end]} … {len(text) - max_chars} characters … {text[-end:]}"


def visible(text: str) -> str:
    r"""Escape characters that a terminal would act on or hide, as Python does: ESC becomes `\x1b`; keeps \n and \t."""
    return _ACTS.sub(lambda match: ascii(match[0])[1:-1], text)
