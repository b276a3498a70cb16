"""The run's side of live control: serves clients over a Unix socket in the run's folder, and over TCP to those who know
the key in the folder; see `forge_rl.run.live.control_client`.

A connection is one request and its reply, each one line of JSON: `{"do": "set", "with": {"knob": "schedule",
"values": {"max_lag": 2}}}`, then `{"result": ...}` or `{"error": "...", "hint": "..."}`,
with `"busy": true` if a retry may help.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.run.live.control_client import BUSY, ELSEWHERE, SOCKET
from forge_rl.run.live.settings import changes_by
from forge_rl.runtime.local_socket import listening, peer_is_own
from forge_rl.runtime.sealed import NONCE_BYTES, SealedChannel, nonce

MOST_BYTES = 1 << 18
"""Maximum size of a request in bytes."""
_MOST_CLIENTS = 16
"""Maximum number of concurrent connections from this machine."""
_MOST_OUTSIDE = 64
"""Maximum number of concurrent connections from others, some of which may be strangers'."""
_READ_S = _WRITE_S = 10.0
"""Timeout for a client to send its request, and to read its reply."""


@contextlib.asynccontextmanager
async def serving_control(
    folder: Path, control: object, warn: Callable[[str], None], tcp_socket: socket.socket | None = None
) -> AsyncIterator[None]:
    """Serve requests while the body runs; if the folder cannot hold a socket, it runs without.

    Args:
        control: its public async methods are the requests.
        warn: called with a line for the user.
        tcp_socket: also serve clients that reach this listening socket and know the key in the folder.
    """
    # A run must not fail because nobody can attach to it: a file system without sockets costs this service alone.
    server = _ControlServer(control, warn)
    async with contextlib.AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(listening(folder, SOCKET))
        except OSError as error:
            warn(f"nobody can attach to this run: no socket can be made in {folder}: {error.strerror or error}")
        else:
            listening_at = await asyncio.start_unix_server(server.handle, sock=listener, limit=MOST_BYTES)
            # In reverse at the end: no new client, and then the requests in progress are cancelled.
            stack.push_async_callback(server.close)
            stack.callback(listening_at.close)
        if tcp_socket is not None:
            await stack.enter_async_context(_serving_outside(folder, server, tcp_socket))
        yield


@contextlib.asynccontextmanager
async def _serving_outside(folder: Path, server: _ControlServer, tcp_socket: socket.socket) -> AsyncIterator[None]:
    """Serve clients of other machines, with a new key in the folder."""
    key, path = secrets.token_urlsafe(32), folder / ELSEWHERE
    host, port = tcp_socket.getsockname()[:2]
    listening_at = await asyncio.start_server(
        functools.partial(server.handle_outside, key.encode()), sock=tcp_socket, limit=MOST_BYTES
    )
    try:
        # A new file, never an existing one: it is readable by this user alone from its first byte.
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"host": host, "port": port, "key": key}, file)
        yield
    finally:
        listening_at.close()
        path.unlink(missing_ok=True)
        await server.close()


class _ControlServer:
    def __init__(self, control: object, warn: Callable[[str], None]) -> None:
        self._control = control
        self._warn = warn
        self._clients: set[asyncio.Task[None]] = set()
        self._outside: set[asyncio.Task[None]] = set()
        self._closing = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of this machine; nothing that its client does can stop the run."""

        async def read() -> bytes:
            if not peer_is_own(writer.get_extra_info("socket")):
                raise PermissionError
            return await reader.readline()

        await self._serve(self._clients, _MOST_CLIENTS, writer, read, lambda reply: reply)

    async def handle_outside(self, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection over TCP; without the key, it gets nothing but a nonce, or that the run is busy."""
        if len(self._outside) >= _MOST_OUTSIDE:
            # In place of the nonce, as no reply can be sealed before the client has sent its own.
            writer.write(BUSY)
            writer.close()
            return
        run_nonce, sealed = nonce(), list[SealedChannel]()

        async def read() -> bytes:
            writer.write(run_nonce + b"\n")
            client_nonce = await reader.readexactly(NONCE_BYTES)
            sealed.append(SealedChannel(key, run_nonce, client_nonce))
            try:
                line = await reader.readline()
            except ValueError:
                raise PermissionError("too long") from None
            return sealed[0].open("request", line)

        def seal(reply: bytes) -> bytes:
            return sealed[0].seal("reply", reply) if sealed else b""

        await self._serve(self._outside, _MOST_OUTSIDE, writer, read, seal)

    async def _serve(
        self,
        clients: set[asyncio.Task[None]],
        max_clients: int,
        writer: asyncio.StreamWriter,
        read: Callable[[], Awaitable[bytes]],
        sealed: Callable[[bytes], bytes],
    ) -> None:
        client = asyncio.current_task()
        assert client is not None
        try:
            if len(clients) >= max_clients:
                reply: dict[str, object] = {"error": f"{max_clients} clients are attached", "busy": True}
            else:
                clients.add(client)
                reply = await self._reply(read)
            async with asyncio.timeout(_WRITE_S):
                # By default drain() returns while 64 KiB are unsent, which the abort below would drop.
                writer.transport.set_write_buffer_limits(0)
                writer.write(sealed(_encoded(reply)))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, does not read, or is not allowed to ask
        except asyncio.CancelledError:
            # The end of the run cancels this task; asyncio's streams would log that as an error.
            if not self._closing:
                raise
        finally:
            clients.discard(client)
            # close() would wait without an end to send the rest to a client that does not read.
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def close(self) -> None:
        """Cancel the requests in progress."""
        self._closing = True
        clients = [*self._clients, *self._outside]
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _reply(self, read: Callable[[], Awaitable[bytes]]) -> dict[str, object]:
        try:
            async with asyncio.timeout(_READ_S):
                line = await read()
        except TimeoutError:
            return {"error": f"no request came within {_READ_S:g} s"}
        except ValueError:
            return {"error": f"the request is longer than {MOST_BYTES} bytes"}
        # No time limit from here: a checkpoint, for example, waits for the end of the step first.
        try:
            work = self._find(line)
            with changes_by("attached"):
                return {"result": await work()}
        except ForgeError as error:
            return {"error": error.message, "hint": error.hint}
        except Exception as error:
            self._warn(f"a request from an attached client failed: {type(error).__name__}: {error}")
            return {"error": f"{type(error).__name__}: {error}"}

    def _find(self, line: bytes) -> Callable[[], Awaitable[object]]:
        """Find the method that a request names.

        Raises:
            ConfigError: it is not a valid request.
        """
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError("the request is not JSON") from None
        match request:
            case {"do": str(name), "with": dict(arguments)} if not name.startswith("_"):
                # Looked up on the class: what an instance holds, such as the run, is no request.
                method = getattr(type(self._control), name, None)
                if inspect.iscoroutinefunction(method):
                    bound = getattr(self._control, name)
                    try:
                        inspect.signature(bound).bind(**arguments)
                    except TypeError as error:
                        raise ConfigError(f"the request {name!r}: {error}") from None
                    _check_types(name, method, arguments)
                    return lambda: bound(**arguments)
        raise ConfigError("unknown request", hint="attach with the run's version of forge_rl")


def _check_types(name: str, method: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Check the arguments of a request against the annotations of its method.

    Raises:
        ConfigError: one has another type.
    """
    kinds = get_type_hints(method)
    for argument, value in arguments.items():
        kind = kinds.get(argument, Any)
        if not _fits(value, kind):
            type_name = kind.__name__ if isinstance(kind, type) and not get_origin(kind) else str(kind)
            raise ConfigError(
                f"the request {name!r}: {argument} is {value!r:.60}", hint=f"make it {type_name.replace('typing.', '')}"
            )


def _fits(value: object, kind: Any) -> bool:
    """Return whether a JSON value has a type. Whole numbers count as floats, and booleans as no numbers."""
    if kind is Any:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(kind))
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
    return isinstance(value, get_origin(kind) or kind)


def _encoded(reply: Mapping[str, object]) -> bytes:
    # ASCII escapes lone surrogates, which a model can produce and UTF-8 cannot encode.
    return (json.dumps(reply, default=str) + "\n").encode("ascii")
