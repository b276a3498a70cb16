"""A decode engine that somebody else started, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from forge_rl.engines import SERVER_GONE
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.remote import KEY_VARIABLE, PREFIX, PROTOCOL, SESSION_HEADER, RemoteServer, wire
from forge_rl.engines.remote.server import LEASE_S
from forge_rl.errors import ConfigError
from forge_rl.system.variables import api_key
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import TensorBucket

if TYPE_CHECKING:
    import torch

_CONNECT_S = 5.0
_BEAT_S = 1.0
"""Seconds between heartbeats."""
_SILENT_S = LEASE_S - 5.0
"""Seconds without an answered heartbeat after which the server counts as gone; its session may end soon after."""
_MOST_FAILURES = 2
"""Failed heartbeats after which the server counts as gone; a single failure may be a connection that was just
closed."""
_CLAIM_S = 120.0
"""Seconds for a server to answer a claim; it prepares its workers for the first one."""
_PART_BYTES = 1 << 20


class RemoteEngine:
    """A `DecodeEngine` in vLLM's server at an address.

    engine = await RemoteEngine.connect(RemoteServer(url="http://10.0.0.7:8000", owner="..."), settings)

    Its process ends once the server is gone. Pausing frees no memory there: the server's devices are its own.
    """

    def __init__(self, client: httpx.AsyncClient, server: RemoteServer) -> None:
        self._client = client
        self._server = server
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, server: RemoteServer, settings: DecodeSettings) -> RemoteEngine:
        """Begin a session with a server.

        Raises:
            ConfigError: it cannot be reached, refuses the key, is used by another run, or its settings do not fit.
        """
        key = api_key("--generator.urls", KEY_VARIABLE, option="")
        # Before the first request, which would carry the key. Looking up a name may block for seconds.
        await asyncio.to_thread(_check_address, server.url)
        client = httpx.AsyncClient(
            base_url=server.url.rstrip("/") + PREFIX,
            # Uncompressed answers only: a few bytes could otherwise expand to any size.
            headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
            # One connection for each request in flight: a limit would make completions wait for one another.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            # A completion may take any time; heartbeats notice a server that is gone.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            # Neither a redirect nor a proxy from the environment may take the key elsewhere.
            follow_redirects=False,
            trust_env=False,
        )
        engine = cls(client, server)
        try:
            await engine._claim(settings)
        except BaseException:
            await client.aclose()
            raise
        engine._beating = asyncio.create_task(engine._beat())
        return engine

    async def _claim(self, settings: DecodeSettings) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self._server.wait_s
        while True:
            try:
                answer = await self._ask("claim", {"owner": self._server.owner}, deadline_s=_CLAIM_S)
                break
            # Only silence is worth waiting for; any answer but the right one ends the claim.
            except (_ConnectionLostError, TimeoutError) as error:
                if clock() >= end:
                    raise ConfigError(
                        f"the engine at {self._server.url} does not answer: {error or 'it is silent'}",
                        hint="start it there by: forge-rl serve-engine --model MODEL",
                    ) from error
                await asyncio.sleep(_BEAT_S)
            except _StatusError as error:
                hints = {401: f"set {KEY_VARIABLE} to the server's key", 404: "start it by: forge-rl serve-engine"}
                hints[423] = "wait until the other run has ended, or give this one another engine"
                raise ConfigError(
                    f"the engine at {self._server.url} refuses: {error}", hint=hints.get(error.status, "see its log")
                ) from error
            except wire.WireError as error:
                raise ConfigError(
                    f"{self._server.url} is not an engine that can join runs: {error}",
                    hint="start one there by: forge-rl serve-engine --model MODEL",
                ) from error
        session, facts = answer.get("session"), answer.get("facts")
        # The session becomes a header's value, so that its form is checked as well.
        if answer.get("protocol") != PROTOCOL or not isinstance(facts, dict) or not _is_plain(session):
            raise ConfigError(
                f"the engine at {self._server.url} speaks protocol {wire.shown(answer.get('protocol'))}, "
                f"not {PROTOCOL}",
                hint="install the same version of forge_rl on both machines",
            )
        self._client.headers[SESSION_HEADER] = str(session)
        if problems := _mismatches(facts, settings):
            raise ConfigError(
                f"the engine at {self._server.url} does not fit the run: {'; '.join(problems)}",
                hint="start it with the run's settings: forge-rl serve-engine --engine.dtype, --engine.max-model-len",
            )

    async def stream(
        self, prompt_ids: TokenIds, sampling: Sampling, *, gather_s: float = 0.0
    ) -> AsyncGenerator[Chunk, None]:
        body = {
            "prompt_ids": np.asarray(prompt_ids).tolist(),
            "sampling": wire.sampling_to_json(sampling),
            "gather_s": gather_s,
        }
        with self._blaming():
            async with contextlib.aclosing(self._lines("stream", json.dumps(body).encode())) as lines:
                async for line in lines:
                    chunk = wire.chunk_from_json(line)
                    yield chunk
                    if chunk.finish:
                        return

    async def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        adapter: str = "",
    ) -> ScoredTokens:
        if adapter:
            raise _adapters_refused(adapter)
        body = {
            "prompt_ids": np.asarray(prompt_ids).tolist(),
            "token_ids": np.asarray(token_ids).tolist(),
            "temperature": temperature,
            "top_k": top_k,
        }
        with self._blaming():
            return wire.scores_from_json(await self._ask("score", body), len(token_ids), top_k)

    async def hold(self, *, paused: bool, asleep: bool) -> bool:
        with self._blaming():
            # Its devices are its own, so there is no memory to free for a trainer: asleep is only paused.
            answer = await self._ask("hold", {"paused": paused or asleep, "asleep": False})
        return answer.get("whole") is True

    async def serve_model(self) -> None:
        with self._blaming():
            await self._ask("serve_model", {})

    async def load(self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str) -> LoadReport:
        problems: list[Exception] = []
        try:
            with self._blaming():
                lines = self._lines("load", _frames(manifest, buckets, reader, problems))
                async with contextlib.aclosing(lines):
                    report = wire.report_from_json(await anext(lines))
        except Exception:
            # A failure on this side breaks the upload, and the server's complaint about that would hide the cause.
            if problems:
                raise problems[0] from None
            raise
        # The server reports the fingerprints of what it holds, which are compared here as any engine's are.
        manifest.attest(report.fingerprints, reader, merged=True)
        return report

    async def load_adapter(self, name: str, folder: Path) -> None:
        raise _adapters_refused(name)

    async def drop_adapter(self, name: str) -> None:
        """Do nothing: no adapter is ever loaded."""

    def close(self) -> None:
        """Release the server; its process stays."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._client.base_url}release"
            httpx.post(url, headers=self._client.headers, json={}, timeout=2.0, trust_env=False)

    async def _beat(self) -> None:
        """End this process once the server is gone."""
        clock = asyncio.get_running_loop().time
        last_answer_s, cause, failures = clock(), "it does not answer", 0
        # A timeout may be a busy server: only silence for _SILENT_S counts as its end. A failure is retried at once.
        while clock() - last_answer_s < _SILENT_S and failures < _MOST_FAILURES:
            await asyncio.sleep(0 if failures else _BEAT_S)
            try:
                await self._ask("beat", {}, deadline_s=_CONNECT_S)
                last_answer_s, failures = clock(), 0
            except TimeoutError:
                continue
            except Exception as error:  # whatever it answers, a session is only kept by the right answer
                cause, failures = wire.shown(error), failures + 1
        print(f"forge_rl: the engine at {self._server.url} is gone: {cause}", file=sys.stderr, flush=True)
        os._exit(SERVER_GONE)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Raise RuntimeError, as a failed engine does, if the server is gone or its answer is malformed."""
        try:
            yield
        except (_ConnectionLostError, _StatusError, wire.WireError, StopAsyncIteration) as error:
            raise RuntimeError(f"{self._server.url}: {error or 'its answer ends too early'}") from error

    async def _ask(self, route: str, body: Mapping[str, Any], *, deadline_s: float | None = None) -> dict[str, Any]:
        """Send a request and return its one-line answer."""
        async with asyncio.timeout(deadline_s):
            async with contextlib.aclosing(self._lines(route, json.dumps(body).encode())) as lines:
                async for line in lines:
                    return line
        raise wire.WireError("an answer is empty")

    async def _lines(self, route: str, content: bytes | AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
        """Send a request and yield the lines of its answer.

        Raises:
            _ConnectionLostError: the server cannot be reached, or ends the connection.
            _StatusError: the answer's status is an error's.
            WireError: the answer is not of lines of JSON, or a line is too long.
            ForgeError, RuntimeError: the server's error.
        """
        try:
            async with self._client.stream("POST", route, content=content) as response:
                if "content-encoding" in response.headers:
                    raise wire.WireError("the answer is compressed")
                if response.status_code != 200:
                    raise _StatusError(response.status_code, await _start_of(response))
                async with contextlib.aclosing(_split(response)) as lines:
                    async for line in lines:
                        answer = wire.read_object(line)
                        if "error" in answer:
                            raise wire.error_from_json(answer)
                        yield answer
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise _ConnectionLostError(wire.shown(error) or type(error).__name__) from error


def _adapters_refused(name: str) -> ConfigError:
    return ConfigError(
        f"engines of --generator.urls serve no adapters, and {name!r:.80} is one",
        hint="use engines of the run, or merge the adapter by: forge_rl merge",
    )


class _ConnectionLostError(Exception):
    """The server cannot be reached, or closed the connection."""


class _StatusError(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status


async def _split(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they arrive."""
    rest = bytearray()
    async for part in response.aiter_raw():
        rest += part
        # Searched in the new part alone: a long line would otherwise be scanned again with each part.
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
        if len(rest) > wire.MOST_LINE:
            raise wire.WireError(f"a line has more than {wire.MOST_LINE} bytes")
    if rest:
        yield bytes(rest)


async def _start_of(response: httpx.Response) -> str:
    """Return the message in an error response, or the start of the response."""
    data = b""
    async for part in response.aiter_raw():
        data = (data + part)[:4096]
        if len(data) == 4096:
            break
    with contextlib.suppress(wire.WireError):
        return wire.shown(wire.read_object(data).get("message", ""))
    return wire.shown(data[:200].decode(errors="replace"))


async def _frames(
    manifest: Manifest, buckets: AsyncIterator[TensorBucket], reader: str, problems: list[Exception]
) -> AsyncIterator[bytes]:
    """Yield a version as frames: each a header, then the bytes of a bucket's tensors.

    Errors on this side are added to `problems`. The server learns of them, and has given up the load by the time it
    answers.
    """
    yield _header({**wire.manifest_to_json(manifest), "reader": reader})
    while True:
        try:
            bucket = await anext(buckets, None)
        except Exception as error:
            problems.append(error)
            yield _header({"failed": True})
            return
        # An empty list ends the version.
        if bucket is None:
            yield _header({"tensors": []})
            return
        yield _header({"tensors": [entry.name for entry in bucket.entries]})
        try:
            with bucket.open() as tensors:
                for entry in bucket.entries:
                    data = memoryview(_bytes(tensors[entry.name]))
                    for start in range(0, len(data), _PART_BYTES):
                        yield bytes(data[start : start + _PART_BYTES])
                    # The server puts the bytes into memory as they come, where each tensor must be aligned.
                    if padding := -len(data) % wire.ALIGN:
                        yield bytes(padding)
        except Exception as error:  # the connection ends in the middle of a bucket, which the server takes for the end
            problems.append(error)
            raise


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _header(payload: Mapping[str, Any]) -> bytes:
    data = json.dumps(payload).encode()
    return len(data).to_bytes(4, "big") + data


def _is_plain(text: object) -> bool:
    """Return whether a text can be a header value."""
    return isinstance(text, str) and 0 < len(text) <= 100 and text.isascii() and text.isalnum()


def _mismatches(facts: Mapping[str, Any], settings: DecodeSettings) -> list[str]:
    """Compare a server's settings with the run's."""
    # Other settings of the server's would make its logprobs differ from the trainer's.
    required = {
        "dtype": str(resolve_dtype(settings.dtype)).removeprefix("torch."),
        "head_dtype": "float32",
        "logprobs_mode": "processed_logprobs",
    }
    problems = [
        f"its {name} is {wire.shown(facts.get(name))}, and {value} is needed"
        for name, value in required.items()
        if facts.get(name) != value
    ]
    # vLLM's names contain the format. How a server divides a weight into scaled blocks is left to it.
    if settings.quantization not in str(facts.get("quantization") or "none"):
        problems.append(
            f"its quantization is {wire.shown(facts.get('quantization'))}, the run's {settings.quantization}"
        )
    # A longer context than the run's does no harm.
    max_model_len = facts.get("max_model_len")
    if type(max_model_len) is not int or max_model_len < settings.max_model_len:
        problems.append(f"its max_model_len is {wire.shown(max_model_len)}, and {settings.max_model_len} is needed")
    return problems


def _check_address(url: str) -> None:
    """Refuse to send the key without encryption to a public address.

    Raises:
        ConfigError: the address is public, or its name is unknown.
    """
    parts = urlsplit(url)
    # TLS protects key and weights wherever the server is.
    if parts.scheme == "https":
        return
    try:
        addresses = {address[0] for *_, address in socket.getaddrinfo(parts.hostname, parts.port or 80)}
    except OSError as error:
        raise ConfigError(f"the host of {url} is unknown: {error.strerror}", hint="correct --generator.urls") from error
    if public_addresses := [
        address for address in addresses if ipaddress.ip_address(str(address).partition("%")[0]).is_global
    ]:
        raise ConfigError(
            f"{url} is at the public address {public_addresses[0]}, and the key and the weights would travel "
            "unencrypted",
            hint="use https://, or a tunnel to a private address",
        )
