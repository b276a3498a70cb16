"""Routes through which a run uses a decode engine in another process: an ASGI app, added to vLLM's server.

One run at a time has the engine, in a session that ends once its client has been silent for LEASE_S seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forge_rl.engines.protocol import DecodeEngine
from forge_rl.engines.remote import PREFIX, PROTOCOL, SESSION_HEADER, wire
from forge_rl.errors import WeightsError
from forge_rl.weights import segment
from forge_rl.weights.manifest import Manifest

LEASE_S = 15.0
"""Seconds without a request after which a session ends, and another run may begin one."""
_MOST_HEADER = 64 << 20
"""Maximum size of a frame's header, in bytes."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Refusal(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Key:
    """A bearer token that requests must have."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def opens(self, scope: Scope) -> bool:
        """Return whether a request has the key."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        # Digests of equal length, compared in constant time: neither a key's length nor its start can be found by
        # timing.
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), self._digest)


class EngineServer:
    """Serves an engine to one run at a time.

        app = EngineServer(engine, key="...", facts={"max_model_len": 2048})
        await app(scope, receive, send)

    Args:
        engine: engine to serve.
        key: bearer token that each request must have.
        facts: settings of the engine, by their names in DecodeSettings, which a run compares with its own.
    """

    def __init__(self, engine: DecodeEngine, *, key: str, facts: Mapping[str, Any]) -> None:
        self._engine = engine
        self._key = Key(key)
        self._facts = facts
        self._owner = self._session = ""
        self._heard = 0.0
        """Time of the session's last request, on the loop's clock."""
        self._work: set[asyncio.Task[None]] = set()
        """Requests of the session in progress."""
        self._claiming = asyncio.Lock()
        self._loaded = False
        """True once the weights that the engine started with were replaced."""
        self._leasing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request below PREFIX."""
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if not self._key.opens(scope):
                raise Refusal(401, "the key is missing or wrong")
            name = scope["path"].rpartition(PREFIX)[2]
            if scope["method"] != "POST" or name not in ("claim", "beat", "release", *_ROUTES):
                raise Refusal(404, "no such route")
            if name == "claim":
                # The only route without a session.
                await _answer(send, await self._claim(await _whole(receive)))
                return
            # A client whose session was taken over must not load its weights into another run's engine.
            if not self._session or headers.get(SESSION_HEADER) != self._session:
                raise Refusal(409, "the session has ended")
            # Any request of the session shows that its client lives.
            self._heard = asyncio.get_running_loop().time()
            if name == "release":
                await self._end_session()
                await _answer(send, {})
            elif name == "beat":
                await _answer(send, {})
            else:
                await self._run(name, receive, send)
        except Refusal as error:
            await _answer(send, {"error": "failed", "message": str(error)}, status=error.status)
        except wire.WireError as error:
            await _answer(send, {"error": "failed", "message": str(error)}, status=400)

    async def _claim(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin a session. This ends an earlier session of the same run, or of a run that has gone silent."""
        owner, clock = body.get("owner"), asyncio.get_running_loop().time
        if not isinstance(owner, str) or not owner:
            raise Refusal(400, "a claim names no owner")
        async with self._claiming:
            # The same run may claim again at once: its client was restarted, and the old session is its own.
            if self._session and owner != self._owner and clock() - self._heard < LEASE_S:
                raise Refusal(423, "another run uses this engine")
            await self._end_session()
            self._owner, self._session, self._heard = owner, secrets.token_hex(16), clock()
            self._leasing = asyncio.create_task(self._lease(self._session))
        return {"protocol": PROTOCOL, "session": self._session, "facts": dict(self._facts)}

    async def _end_session(self) -> None:
        """Cancel the session's requests, and let the engine decode for others."""
        # First, so that no further request of this session begins while its requests end.
        self._session = ""
        if self._leasing is not None and self._leasing is not asyncio.current_task():
            self._leasing.cancel()
        self._leasing = None
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work)
        # The client may have left the engine paused, and the next one expects it to decode.
        await self._engine.hold(paused=False, asleep=False)

    async def _lease(self, session: str) -> None:
        """End a session once its client is silent."""
        clock = asyncio.get_running_loop().time
        while self._session == session:
            # Each request moves the deadline, so the wait is computed again.
            left = self._heard + LEASE_S - clock()
            if left <= 0:
                await self._end_session()
                return
            await asyncio.sleep(left)

    async def _run(self, name: str, receive: Receive, send: Send) -> None:
        """Run a request of the session until it ends, or its client is gone."""
        reply = _JSONLinesReply(send)
        task = asyncio.create_task(_ROUTES[name](self, receive, reply))
        self._work.add(task)
        try:
            # Waits without raising: the task's error becomes the answer's last line.
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._work.discard(task)
        # By `_end_session`, or because the client is gone.
        if task.cancelled():
            error: BaseException | None = RuntimeError("the session has ended")
        else:
            error = task.exception()
        # The answer may have begun, so that no status can be sent.
        if isinstance(error, Refusal | wire.WireError):
            error = RuntimeError(str(error))
        if isinstance(error, Exception):
            await reply.end(wire.error_to_json(error))

    async def _stream(self, receive: Receive, reply: _JSONLinesReply) -> None:
        body = await _whole(receive)
        prompt = np.array(wire.integers(body.get("prompt_ids"), "prompt ids"), np.int32)
        sampling, gather_s = wire.sampling_from_json(body.get("sampling")), float(body.get("gather_s", 0.0))
        # A client that leaves aborts its completion, which would otherwise decode to its end.
        async with _while_connected(receive):
            async with contextlib.aclosing(self._engine.stream(prompt, sampling, gather_s=gather_s)) as chunks:
                async for chunk in chunks:
                    await reply.line(wire.chunk_to_json(replace(chunk, routed=None)))
            await reply.end()

    async def _score(self, receive: Receive, reply: _JSONLinesReply) -> None:
        body = await _whole(receive)
        prompt, tokens = (wire.integers(body.get(name), name) for name in ("prompt_ids", "token_ids"))
        async with _while_connected(receive):
            scores = await self._engine.score(
                prompt, tokens, temperature=float(body["temperature"]), top_k=int(body["top_k"])
            )
            await reply.end(wire.scores_to_json(scores))

    async def _hold(self, receive: Receive, reply: _JSONLinesReply) -> None:
        body = await _whole(receive)
        has_weights = await self._engine.hold(paused=body.get("paused") is True, asleep=body.get("asleep") is True)
        await reply.end({"whole": has_weights})

    async def _serve_model(self, receive: Receive, reply: _JSONLinesReply) -> None:
        await _whole(receive)
        if self._loaded:
            raise WeightsError("a run has replaced the weights of the server's model", hint="start the server again")
        await self._engine.serve_model()
        await reply.end({})

    async def _load(self, receive: Receive, reply: _JSONLinesReply) -> None:
        body = _RequestBody(receive)
        header = await body.header()
        manifest = wire.manifest_from_json(header)
        # From the start of a load: even a failed one replaces the model's own weights.
        self._loaded = True
        try:
            async with contextlib.aclosing(_buckets(body, manifest)) as buckets:
                report = await self._engine.load(manifest, buckets, reader=wire.shown(header.get("reader")))
        except Refusal:
            raise
        except Exception:
            await body.drain()  # an answer before the end of a request may get lost
            raise
        await reply.end(wire.report_to_json(report))


_ROUTES: Mapping[str, Callable[[EngineServer, Receive, Any], Any]] = {
    "stream": EngineServer._stream,
    "score": EngineServer._score,
    "hold": EngineServer._hold,
    "serve_model": EngineServer._serve_model,
    "load": EngineServer._load,
}


async def _buckets(body: _RequestBody, manifest: Manifest) -> AsyncGenerator[segment.SegmentBucket, None]:
    """Yield the buckets in a request, each in shared memory of its own until the next one is requested."""
    entries = {entry.name: entry for entry in manifest.tensors}
    # An empty list ends the version; True stands for `failed`.
    while names := (header := await body.header()).get("tensors") or header.get("failed"):
        if names is True:
            raise WeightsError("the version did not arrive whole", hint="load it again")
        if not isinstance(names, list) or not all(isinstance(name, str) and name in entries for name in names):
            raise wire.WireError("a bucket has tensors that the version has not")
        bucket_entries = [entries[name] for name in names]
        offsets, size = wire.places(bucket_entries)
        try:
            ref, fd = segment.create_anonymous(size)
        except OSError as error:
            raise WeightsError(f"the server has no memory for a bucket of {size} bytes: {error.strerror}") from error
        try:
            # In shared memory, since the engine's workers are other processes.
            memory = segment.writable(ref).numpy()
            position = 0
            async for part in body.parts(size):
                memory[position : position + len(part)] = np.frombuffer(part, np.uint8)
                position += len(part)
            del memory
            # The bytes came in the wire's layout, not at the offsets of the publisher's buckets.
            placed_entries = tuple(
                replace(entry, offset=offset) for entry, offset in zip(bucket_entries, offsets, strict=True)
            )
            yield segment.SegmentBucket(segment=ref, entries=placed_entries)
        finally:
            segment.release(ref)
            os.close(fd)


class _RequestBody:
    """A request's body, read as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._rest = b""
        self._ended = False

    async def parts(self, size: int) -> AsyncIterator[bytes]:
        """Yield the next `size` bytes in parts.

        Raises:
            Refusal: the client is gone, or its request ends before that.
        """
        while size:
            if not self._rest:
                await self._more()
            part, self._rest = self._rest[:size], self._rest[size:]
            size -= len(part)
            if part:
                yield part

    async def header(self) -> dict[str, Any]:
        """Return the next frame's header: the length of its JSON in 4 bytes, then the JSON."""
        size = int.from_bytes(b"".join([part async for part in self.parts(4)]), "big")
        if size > _MOST_HEADER:
            raise wire.WireError(f"a header has {size} bytes")
        return wire.read_object(b"".join([part async for part in self.parts(size)]), max_bytes=_MOST_HEADER)

    async def drain(self) -> None:
        """Read the rest and discard it."""
        self._rest = b""
        while not self._ended:
            await self._more()
            self._rest = b""

    async def _more(self) -> None:
        if self._ended:
            raise Refusal(400, "a request ends too early")
        message = await self._receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the client is gone")
        self._rest, self._ended = message.get("body", b""), not message.get("more_body", False)


class _JSONLinesReply:
    """An answer in lines of JSON, the last of which may hold an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._ended = False

    async def line(self, payload: Mapping[str, Any]) -> None:
        """Send a line."""
        await self._write(json.dumps(payload, separators=(",", ":")).encode() + b"\n", more=True)

    async def end(self, payload: Mapping[str, Any] | None = None) -> None:
        """Send the last line, if any, and end the answer."""
        if not self._ended:
            self._ended = True
            last = b"" if payload is None else json.dumps(payload, separators=(",", ":")).encode() + b"\n"
            await self._write(last, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await self._send(_start(200))
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body once the client is gone."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _whole(receive: Receive) -> dict[str, Any]:
    """Return the JSON object that is a request's body."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the client is gone")
        parts.append(message.get("body", b""))
        # Checked with each part, before a request can fill the memory.
        if sum(map(len, parts)) > wire.MOST_LINE:
            raise Refusal(413, "the request is too large")
        if not message.get("more_body", False):
            return wire.read_object(b"".join(parts))


async def _answer(send: Send, payload: Mapping[str, Any], *, status: int = 200) -> None:
    await send(_start(status))
    await send({"type": "http.response.body", "body": json.dumps(payload).encode() + b"\n"})


def _start(status: int) -> dict[str, Any]:
    headers: Sequence[tuple[bytes, bytes]] = [(b"content-type", b"application/x-ndjson")]
    return {"type": "http.response.start", "status": status, "headers": headers}
