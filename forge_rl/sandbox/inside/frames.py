"""Messages between a session and its owner: bounded JSON with optional bytes. Imports nothing of this library.

A frame is the size of its JSON, the size of its bytes (both 4 bytes, big-endian), the JSON object, the bytes.
"""

from __future__ import annotations

import json
import socket
import struct

HEAD = struct.Struct(">II")
_MOST_DESCRIPTORS = 8
MOST_ADDRESS = 512
"""Bytes of a network address that a session asks for, and of the answer."""


class FrameError(Exception):
    """A frame that is too large or not a JSON object."""


def encode(message: dict[str, object], data: bytes = b"") -> bytes:
    """Return a message as a frame."""
    # Escapes of ensure_ascii would take 6 to 12 bytes for a character. Lone surrogates become question marks.
    text = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    return HEAD.pack(len(text), len(data)) + text + data


def sizes(head: bytes, *, most_text: int, most_data: int) -> tuple[int, int]:
    """Return the sizes of a frame's JSON and bytes.

    Raises:
        FrameError: they exceed a limit.
    """
    text, data = HEAD.unpack(head)
    if text > most_text or data > most_data:
        raise FrameError(f"a frame of {text} + {data} bytes; the limits are {most_text} + {most_data}")
    return text, data


def decode(text: bytes) -> dict[str, object]:
    """Return the JSON object of a frame.

    Raises:
        FrameError: it is not one.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


def receive(channel: socket.socket) -> tuple[dict[str, object], bytes, list[int]]:
    """Wait for a frame from a trusted sender; return its message, bytes and descriptors.

    Raises:
        EOFError: the other side has closed.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, HEAD.size, _MOST_DESCRIPTORS)
    if len(head) < HEAD.size:
        head += _exactly(channel, HEAD.size - len(head))
    text, data = HEAD.unpack(head)
    message = decode(_exactly(channel, text))
    return message, _exactly(channel, data), descriptors


def birth_channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel by which a new process reports that it exists.

    The kernel attaches the sender's credentials to what arrives at the first end.
    """
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anything is sent
    return ours, theirs


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
