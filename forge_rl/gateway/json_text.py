"""JSON: bounds on requests, and encoding that does not block the event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterable, Iterator


def holds_more(text: bytes, values: int, containers: int) -> bool:
    """Return whether JSON exceeds a number of values, or of objects and arrays, without the memory of parsing it."""
    if _within(text, values, containers):
        return False
    # Commas and brackets in strings do not count. A value has at most two strings: its key and itself.
    most_quotes = 4 * (values + containers)
    pieces = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most_quotes + 1)
    return len(pieces) > most_quotes + 1 or not _within(b"".join(pieces[::2]), values, containers)


class LazyList(list[object]):
    """A JSON list whose elements are created when `encode_beside` writes them; it must not be empty.

    Args:
        elements: the elements, iterated once.
    """

    def __init__(self, elements: Iterable[object]) -> None:
        super().__init__((None,))  # makes the list truthy
        self._elements = elements

    def __iter__(self) -> Iterator[object]:
        return iter(self._elements)


def encode(body: object) -> bytes:
    """Encode as compact JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


async def encode_beside(make: Callable[[], object]) -> bytes:
    """Build and encode a long body in a thread, piece by piece: the C encoder would hold the GIL throughout."""

    def write() -> bytes:
        text = io.StringIO()
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode(make()):
            text.write(piece)
        return text.getvalue().encode(errors="replace")

    return await asyncio.to_thread(write)


def to_event(body: object) -> bytes:
    """Encode as a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _within(text: bytes, values: int, containers: int) -> bool:
    return text.count(b",") < values and text.count(b"[") + text.count(b"{") <= containers
