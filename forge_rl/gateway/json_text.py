"""JSON: bounds what is read, and writes it without holding up the event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterable, Iterator


def holds_more(text: bytes, values: int, containers: int) -> bool:
    """Return whether JSON holds more values, or more objects and arrays, without the memory that parsing would take."""
    if _within(text, values, containers):
        return False
    # Commas and brackets in strings count for nothing. A value has at most two strings: its name and itself.
    most_quotes = 4 * (values + containers)
    pieces = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most_quotes + 1)
    return len(pieces) > most_quotes + 1 or not _within(b"".join(pieces[::2]), values, containers)


class LazyList(list[object]):
    """A list of JSON whose elements are made when they are written, for `encode_beside`; there must be some.

    Args:
        elements: all of them.
    """

    def __init__(self, elements: Iterable[object]) -> None:
        super().__init__((None,))  # which shows that it is not empty
        self._elements = elements

    def __iter__(self) -> Iterator[object]:
        return iter(self._elements)


def encode(body: object) -> bytes:
    """Encode as compact JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


async def encode_beside(make: Callable[[], object]) -> bytes:
    """Make a long body and encode it in a thread, so that the loop has its turns: what is written in C has none."""

    def write() -> bytes:
        text = io.StringIO()
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode(make()):
            text.write(piece)
        return text.getvalue().encode(errors="replace")

    return await asyncio.to_thread(write)


def to_event(body: object) -> bytes:
    """Encode as the data of a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _within(text: bytes, values: int, containers: int) -> bool:
    return text.count(b",") < values and text.count(b"[") + text.count(b"{") <= containers
