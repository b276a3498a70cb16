"""The client's side of live control: sends requests to a run, by the socket or the address in its folder.

The other side is `forge_rl.run.live.control_server`. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError
from forge_rl.runtime.local_socket import connect
from forge_rl.runtime.sealed import NONCE_BYTES, SealedChannel, nonce
from forge_rl.system.terminal import clipped

SOCKET = "control.sock"
"""Name of the socket in a run folder."""
ELSEWHERE = "attach.json"
"""File in a run folder with the address and the key for clients on other machines, if the run serves them."""
BUSY = b"busy\n"
"""What a run sends to a client on another machine, in place of a nonce, if it serves as many as it can."""
_CONNECT_S = 20.0
_TAIL_BYTES = 1 << 18
_KEPT_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds without a word before a connection is tried, seconds between tries, and tries until it counts as lost."""


def exchange(folder: Path, request: Mapping[str, object]) -> dict[str, Any]:
    """Send a request to the run in a folder, and wait for its reply, which may take as long as a step.

    Raises:
        ConfigError: the request cannot be sent, or the run is another user's, has ended, or did not answer.
    """
    line = json.dumps(request, default=_plain).encode() + b"\n"
    try:
        connection = connect(folder, SOCKET, timeout_s=_CONNECT_S)
    except PermissionError as error:
        raise ConfigError(f"the run in {folder} is another user's: {error}") from None
    # Nobody listens in the folder: the run has ended, or is on another machine that shares the folder.
    except OSError:
        connection = None
    try:
        answer = _exchange_over_tcp(folder, line) if connection is None else _exchange_locally(connection, line)
        if not answer:
            raise OSError("the run ended, or refused this user")
        reply = json.loads(answer)
        if not isinstance(reply, dict):
            raise ValueError("its reply is not an object")
    except FileNotFoundError:
        raise ConfigError(how_it_ended(folder), hint="run the same command again to resume it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the run in {folder} did not answer {request['do']!r}: {error}") from None
    return reply


def _exchange_locally(connection: socket.socket, line: bytes) -> bytes:
    """Send a request over a run's socket; returns its reply, empty if there is none."""
    with connection, connection.makefile("rb") as replies:
        with contextlib.suppress(BrokenPipeError):  # it replied early: busy, or the request is too long
            connection.sendall(line)
        # A reply may take as long as a step; if the run dies, the kernel closes the connection.
        connection.settimeout(None)
        return _whole(replies.readline())


def _exchange_over_tcp(folder: Path, line: bytes) -> bytes:
    """Send a request to a run on another machine; returns its reply, empty if there is none.

    Raises:
        FileNotFoundError: the run does not serve clients on other machines, or has ended.
        OSError: it cannot be reached, or is not the run that wrote the folder's file.
    """
    path = folder / ELSEWHERE
    place = json.loads(path.read_text())
    try:
        connection = socket.create_connection((str(place["host"]), int(place["port"])), timeout=_CONNECT_S)
    except ConnectionRefusedError:
        raise FileNotFoundError(path) from None
    with connection, connection.makefile("rb") as replies:
        # A machine that lost its power closes nothing, and a reply may take as long as a step.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEPT_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # Both nonces enter the key, so that neither side takes what was recorded of another connection.
        client_nonce = nonce()
        first_line = replies.readline(NONCE_BYTES + 1)
        if first_line == BUSY:  # not sealed: a forged one costs no more than a retry
            return b'{"error": "the run serves too many other clients", "busy": true}'
        sealed = SealedChannel(str(place["key"]).encode(), first_line.strip(), client_nonce)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(client_nonce + sealed.seal("request", line))
        connection.settimeout(None)
        reply = _whole(replies.readline())
        return sealed.open("reply", reply) if reply else b""


def _plain(value: object) -> int | float:
    """Convert a number that JSON does not know, such as NumPy's."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(f"{value!r:.60} cannot be sent to a run", hint="send texts, numbers, lists and dicts")


def _whole(reply: bytes) -> bytes:
    """Return a reply, which may be empty.

    Raises:
        ConnectionError: the connection was closed in the middle of it.
    """
    if reply and not reply.endswith(b"\n"):
        raise ConnectionError(f"the connection was closed after {len(reply)} bytes of its reply")
    return reply


def how_it_ended(folder: Path) -> str:
    """Return the message that a folder has no live run, and how the last one ended."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        if summary.get("outcome", "finished") != "finished":
            cause = f": {clipped(summary['cause'], lines=1, width=300)}" if "cause" in summary else ""
            ending = f"{summary['outcome']} after {summary['steps']} steps{cause}"
            return f"the run in {folder} is not running: its last process ended, {ending}"
        scores = summary["score_before"], summary["score_after"]
        score = "" if None in scores else f", with a held-out score of {scores[1]:.3f} after {scores[0]:.3f}"
        return f"the run in {folder} is not running: it finished after {summary['steps']} steps{score}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    event = next(iter(last_events(folder, 1)), None)
    detail = f"; its last event: {event['text']}" if event else ""
    return f"the run in {folder} is not running: it was stopped, or has not started yet{detail}"


def last_events(folder: Path, last: int) -> list[dict[str, Any]]:
    """Return the last events in a run folder, with time in seconds, level and text; [] if there are none."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            # The log of a long run is large, and its last events are near the end.
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # truncated at its start, or half-written
            event = json.loads(line)
            if isinstance(event, dict) and {"time", "level", "text"} <= event.keys():
                events.append(event)
    return events[-last:] if last > 0 else []
