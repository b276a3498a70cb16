"""Tenants of the server: their keys, requests in flight, and tokens used."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from starlette.datastructures import Headers

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.gateway.errors import ApiError
from forge_rl.system.folders import write_whole

KEY_PREFIX = "tml-"
"""Start of every key: the client sends no other."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_LEAST_KEY = 20
_BYTES_OF_TOKEN = 64
_PASSES = ".passes"
"""Key of the file of usage, and no tenant's name, for the last pass of each training that was counted."""
_MOST_REQUESTS = 1 << 14
"""Maximum requests of a tenant that wait or run: each takes memory and a task, however few its tokens."""


class Tenants:
    """Maps keys to tenants, and counts what each of them uses.

        tenants = Tenants({"ann": "tml-..."}, folder / "usage.json", most_in_flight=1 << 20)
        with tenants.in_flight("ann", tokens=400): ...
        tenants.count("ann", trained_tokens=400)

    Args:
        keys: key of each tenant by name.
        usage: file of the tokens used, which survives a restart.
        most_in_flight: maximum tokens of a tenant's requests that wait or run.
    """

    def __init__(self, keys: Mapping[str, str], usage: Path, *, most_in_flight: int) -> None:
        self._names = {_digest(key): name for name, key in keys.items()}
        self._tenants = frozenset(keys)
        self._usage_file = usage
        self._most_in_flight = most_in_flight
        self._in_flight: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._usage: dict[str, Counter[str]] = _read_usage(usage)
        self._changed, self._written = asyncio.Event(), asyncio.Event()
        self._written.set()
        self._write_error: OSError | None = None
        self._is_closed = False

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tenants

    def caller(self, headers: Headers) -> str:
        """Return the tenant whose key a request carries.

        Raises:
            ApiError: the key is missing or wrong.
        """
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if kind.lower() == "bearer" else "")
        name = self._names.get(_digest(key))  # by digest, so that lookup times reveal nothing about keys
        if name is None:
            raise ApiError(401, "wrong API key" if key else "no API key: send x-api-key", code="invalid_api_key")
        return name

    @contextlib.contextmanager
    def in_flight(self, tenant: str, *, tokens: int, body_bytes: int = 0) -> Iterator[None]:
        """Count tokens of a request as in flight inside the context.

        Args:
            body_bytes: size of its body, which stays in memory meanwhile. It counts as at least one token per 64 bytes,
                three times the size of a token in a pass.

        Raises:
            ApiError: the tenant would exceed its limit.
        """
        # A long body with few tokens takes memory all the same.
        tokens = max(tokens, body_bytes // _BYTES_OF_TOKEN)
        current = self._in_flight[tenant]
        # Trying again would not help, as it does after a 429.
        if tokens > self._most_in_flight:
            raise ApiError(
                400,
                f"a request of {tokens} tokens; a key may have {self._most_in_flight} in flight: send less at a time, "
                "or set max_tokens of samples",
            )
        problem = ""
        if current + tokens > self._most_in_flight:
            problem = f"{current} of at most {self._most_in_flight} tokens"
        elif self._requests[tenant] >= _MOST_REQUESTS:
            problem = f"{_MOST_REQUESTS} requests, the most there may be,"
        if problem:
            raise ApiError(
                429,
                f"{problem} of this key are in flight; try again",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self._in_flight[tenant] += tokens
        self._requests[tenant] += 1
        try:
            yield
        finally:
            self._in_flight[tenant] -= tokens
            self._requests[tenant] -= 1

    def reading(self, tenant: str, body: bytes) -> contextlib.AbstractContextManager[None]:
        """Count a body as in flight while a thread reads it, as messages take many times the memory of their bytes."""
        return self.in_flight(tenant, tokens=0, body_bytes=len(body))

    def count(self, tenant: str, **counts: int) -> None:
        """Add to a tenant's usage."""
        self._usage.setdefault(tenant, Counter()).update(counts)
        self._written.clear()
        self._changed.set()

    def count_pass(self, tenant: str, model_id: str, seq: int, **counts: int) -> None:
        """Add a training's pass to its tenant's usage once, however often a failure has it computed again.

        Args:
            seq: sequence number of the pass, which grows from pass to pass.
        """
        passes = self._usage.setdefault(_PASSES, Counter())
        # Written with the counts: after a kill, either both are on disk or neither is.
        if seq > passes.get(model_id, -1):
            passes[model_id] = seq
            self.count(tenant, **counts)

    def forget_passes(self, model_id: str) -> None:
        """Forget which passes of a training were counted, once it has ended."""
        self._usage.get(_PASSES, Counter()).pop(model_id, None)

    async def keep_written(self) -> None:
        """Write the usage to disk whenever it has changed, until `close`.

        A disk may take long, and the event loop has other clients: changes meanwhile are written together.
        """
        is_last = False
        while not is_last:
            await self._changed.wait()
            self._changed.clear()
            is_last, text = self._is_closed, json.dumps(self._usage, indent=1)
            try:
                await asyncio.to_thread(write_whole, self._usage_file, text)
                self._write_error = None
            except OSError as error:  # a full disk: counts stay in memory, and are written with the next ones
                self._write_error = error
            if not self._changed.is_set():
                self._written.set()

    async def until_written(self) -> None:
        """Wait until `keep_written` has written all counts.

        Raises:
            OSError: it cannot.
        """
        await self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def close(self) -> None:
        """Let `keep_written` end after a last write."""
        self._is_closed = True
        self._changed.set()

    def usage(self, tenant: str) -> dict[str, int]:
        """Return a tenant's usage by name of the count."""
        return dict(self._usage.get(tenant, {}))


def read_keys(file: Path, text: str) -> dict[str, str]:
    """Read tenants and their keys: a line NAME KEY for each; # starts a comment.

    Args:
        file: where the text is from, for errors.

    Raises:
        ConfigError: a line is malformed, or a name or key occurs twice.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not words[1].startswith(KEY_PREFIX):
            raise ConfigError(
                f"line {number} of {file} is not a name and a key", hint=f"write lines such as: ann {KEY_PREFIX}SECRET"
            )
        name, key = words
        if len(key) < _LEAST_KEY:
            raise ConfigError(f"the key of {name} in {file} is too short", hint=f"use {_LEAST_KEY} letters or more")
        if name in keys or key in keys.values():
            raise ConfigError(f"line {number} of {file} has a name or key again", hint="give each tenant its own")
        keys[name] = key
    if not keys:
        raise ConfigError(f"{file} holds no key", hint=f"write a line for each tenant: NAME {KEY_PREFIX}SECRET")
    return keys


def _read_usage(file: Path) -> dict[str, Counter[str]]:
    if not file.exists():
        return {}
    try:
        usage = json.loads(file.read_text())
        return {str(name): Counter({str(k): int(n) for k, n in counts.items()}) for name, counts in usage.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint="move it away to count from 0") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
