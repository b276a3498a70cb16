"""JSON: bounds what is read, and writes it without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable


def holds_more_values(text: bytes, most: int) -> bool:
    """Return whether JSON holds more values and names than so many, without the memory that parsing would take."""
    if _separators(text) <= most:
        return False
    # Commas and brackets in strings count for nothing.
    pieces = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * most + 1)
    return len(pieces) > 2 * most + 1 or _separators(b"".join(pieces[::2])) > most


def encode(body: object) -> bytes:
    """Encode as compact JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


async def encode_beside(make: Callable[[], object]) -> bytes:
    """Make a long body and encode it in a thread, so that the loop has its turns: what is written in C has none."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return await asyncio.to_thread(lambda: "".join(encoder.iterencode(make())).encode(errors="replace"))


def to_event(body: object) -> bytes:
    """Encode as the data of a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _separators(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))
