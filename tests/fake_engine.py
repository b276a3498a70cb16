"""An engine that decodes without vLLM, on orders: a real actor with GeneratorActor's interface.

Its next token depends on all tokens before it, so a completion is the same whichever engine resumes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from monarch.actor import concurrent_endpoint

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.remote import RemoteServer
from forge_rl.errors import ConfigError, WeightsError
from forge_rl.models.adapter_bytes import AdapterFiles
from forge_rl.runtime.service import ServiceActor
from forge_rl.token_arrays import CacheUse, Chunk, ScoredTokens
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest, TensorEntry

FOLDER = "FORGE_RL_FAKE_ENGINES"
"""Name in the process environment of the folder with the engines' orders, a file each, and their notes."""


def next_token(ids: Sequence[int]) -> int:
    """Return the next token of a fake engine; never a special one."""
    return 100 + zlib.crc32(repr(tuple(ids)).encode()) % 8000


def draw(prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the completion of fake engines, whichever of them resumes it."""
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(next_token(ids))
    return tuple(ids[len(prompt_ids) :])


class Orders:
    """Gives orders to fake engines, also to those that are yet to be spawned, and reads their notes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, engine: int, **orders: object) -> None:
        """Give the engine of this index its orders from now on; without any it does nothing special.

        Args:
            engine: index.
            orders: `stream` after `after` tokens: "hold", "raise", "refuse", "end", or a key of GARBAGE or NON_FINITE,
                and with `lasts` at each token from there on;
                `setup`, `prepare` or `load`: "die", "raise", "hold" or "refuse"; `say`: tokens to answer `prompt`
                tokens with,
                and `texts`, as vLLM's detokenizer would give them; `reads`: version that a load says it read;
                `cache`: reports of its KV cache, with each token;
                `version`: that its tokens are said to be of; `forgets`: its weights are gone once it sleeps;
                `imports`: as a spare it only imports.
        """
        part = self._folder / f"{engine}.new"
        part.write_text(json.dumps(orders))
        part.rename(self._folder / f"{engine}.json")

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Return the engines' notes of one kind ("stream", "load", "closed"), in order."""
        path = self._folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if note["what"] == what]


@dataclass(frozen=True)
class FakeTransport:
    """Carries nothing."""


class FakeStore:
    """A WeightStore, as far as Generator.load uses it, whose versions hold nothing."""

    def __init__(self) -> None:
        self.latest = 0
        self.leased: list[int] = []
        self.prefetched: list[tuple[int, set[str]]] = []
        """Versions that were brought to hosts ahead of a load."""
        self.gate = asyncio.Event()
        """Event that is set while leases are given."""
        self.gate.set()

    def transport(self, host: str = "") -> FakeTransport:
        return FakeTransport()

    async def prefetch(self, manifest: Manifest, hosts: set[str]) -> None:
        self.prefetched.append((manifest.version, hosts))

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        await self.gate.wait()
        read = self.latest if version is None else version
        self.leased.append(read)
        entry = TensorEntry(name="w", shape=(1,), dtype="float32", bucket="", offset=0)
        yield Manifest(version=read, tensors=(entry,), buckets=())


class FakeEngine(ServiceActor):
    """An engine that follows its orders."""

    def __init__(
        self, model: Path, settings: DecodeSettings, seed: int, name: str, server: RemoteServer | None = None
    ) -> None:
        assert type(settings) is DecodeSettings, "a generator's own config would bring torch and the controller's code"
        self._index = int(name.rpartition(" ")[2])
        self._folder = Path(os.environ[FOLDER])
        self._server = server
        self._version = -1
        self._dropped = False
        self._held: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()

    @concurrent_endpoint
    async def setup(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._note("setup", environment=dict(environment), server=self._server and asdict(self._server))
        await self._obey("setup")

    @concurrent_endpoint
    async def prepare(self) -> bool:
        await self._obey("prepare")
        if started := "imports" not in self._orders():
            self._held = {"asleep"}
            self._going.clear()
        return started

    async def stand_by(self) -> None:
        """Answer."""

    @concurrent_endpoint
    async def close(self) -> None:
        pass

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: FakeTransport) -> LoadReport:
        self._note("load", version=manifest.version, held=sorted(self._held))
        await self._obey("load")
        self._version, self._dropped = manifest.version, False
        orders = self._orders()
        read, quantized = orders.get("reads", manifest.version), orders.get("quantized_bytes", 0)
        return LoadReport(version=read, fingerprints={}, in_place=0, quantized_bytes=quantized, seconds={})

    @concurrent_endpoint
    async def serve_model(self) -> None:
        self._version = 0

    @concurrent_endpoint
    async def load_adapter(self, name: str, files: AdapterFiles) -> None:
        await self._obey("load_adapter")
        self._note("load_adapter", name=name, bytes=len(files.weights))

    @concurrent_endpoint
    async def drop_adapter(self, name: str) -> None:
        self._note("drop_adapter", name=name)

    @concurrent_endpoint
    async def hold(self, paused: bool, asleep: bool) -> bool:
        self._dropped = self._dropped or (asleep and "forgets" in self._orders())
        self._held = {why for why, is_set in {"paused": paused, "asleep": asleep}.items() if is_set}
        if self._held:
            self._going.clear()
        else:
            self._going.set()
        return not self._dropped

    async def state(self) -> tuple[int, list[str]]:
        """Return the version that it serves, and the reasons why it does not decode."""
        return self._version, sorted(self._held)

    async def stream(self, prompt_ids: Sequence[int], sampling: Sampling, gather_s: float) -> AsyncGenerator[Any, None]:
        self._note("stream", shown=len(prompt_ids), seed=sampling.seed, stop=sampling.stop, adapter=sampling.adapter)
        ids, orders = [int(token) for token in prompt_ids], self._orders()
        try:
            for count in range(sampling.max_tokens):
                await self._going.wait()
                first = orders.get("after", 0)
                misdeed = orders.get("stream") if count == first or (count > first and orders.get("lasts")) else None
                if misdeed == "hold":
                    await asyncio.Event().wait()
                if misdeed == "raise":
                    raise RuntimeError("the engine has a bug")
                if misdeed == "refuse":
                    raise ConfigError("not this one")
                if misdeed == "end":
                    return
                token, text = self._next(ids, orders)
                ids.append(token)
                chunk = Chunk(
                    token_ids=(token,),
                    logprobs=(-1.5,),
                    versions=(orders.get("version", self._version),),
                    text=text,
                    finish="length" if count == sampling.max_tokens - 1 else "",
                    cache=CacheUse(*orders["cache"]) if "cache" in orders else None,
                )
                yield _garbage(misdeed, chunk) if misdeed else chunk
                await asyncio.sleep(0)
        finally:
            self._note("closed", tokens=len(ids) - len(prompt_ids))

    async def score(
        self, prompt_ids: Any, token_ids: Any, temperature: float, top_k: int, adapter: str = ""
    ) -> ScoredTokens:
        """Score by the number of tokens before each; orders: `score`: "raise", "die" or "garbage"."""
        order = self._orders().get("score")
        if order == "raise":
            raise RuntimeError("the engine has a bug")
        if order == "die":
            os._exit(1)
        places = len(prompt_ids) + np.arange(len(token_ids))
        top = np.arange(top_k)[None, :]
        return ScoredTokens(
            logprobs=-places / temperature,
            top_ids=places[:, None] + top + (10**6 if order == "garbage" else 0),
            top_logprobs=-places[:, None] - top,
        )

    def _next(self, ids: list[int], orders: dict[str, Any]) -> tuple[int, str]:
        if "say" not in orders:
            return (token := next_token(ids)), f" {token}"
        place = len(ids) - orders["prompt"]
        return orders["say"][place], orders["texts"][place]

    async def _obey(self, call: str) -> None:
        order = self._orders().get(call)
        if order == "die":
            os._exit(1)
        if order == "raise":
            raise RuntimeError("the engine has a bug")
        if order == "refuse":
            raise ConfigError("not this adapter") if call == "load_adapter" else WeightsError("a bucket did not come")
        while self._orders().get(call) == "hold":  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _orders(self) -> dict[str, Any]:
        path = self._folder / f"{self._index}.json"
        orders: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return orders

    def _note(self, what: str, **values: object) -> None:
        with (self._folder / "notes").open("a") as notes:
            notes.write(json.dumps({"what": what, "engine": self._index, **values}) + "\n")


class Unpickable:
    """Breaks whoever unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


GARBAGE: dict[str, tuple[Any, str]] = {
    "no chunk": ({"token_ids": [1]}, "a chunk is of type dict"),
    "unpickable": (Unpickable(), "the result cannot be unpickled"),
    "negative id": ({"token_ids": (-1,)}, "token -1 is not one of 49152"),
    "large id": ({"token_ids": (49152,)}, "token 49152 is not one of 49152"),
    "positive": ({"logprobs": (0.01,)}, r"a logprob is 0\.01"),
    "more logprobs": ({"logprobs": (-1.0, -1.0)}, "1 tokens have 2 logprobs and 1 versions"),
    "fewer versions": ({"versions": ()}, "1 tokens have 1 logprobs and 0 versions"),
    "unknown version": ({"versions": (99,)}, "a token is of version 99"),
    "too many tokens": (
        {"token_ids": (5,) * 99, "logprobs": (-1.0,) * 99, "versions": (1,) * 99},
        "tokens came, and",
    ),
    "wrong end": ({"finish": "abort"}, "a chunk has the finish 'abort'"),
    "no text": ({"text": None}, "and the text None"),
}
"""Kinds of garbage by name: the fields that make a chunk invalid, or a value in its place; and the error for it."""


NON_FINITE = {"nan": float("nan"), "infinite": -float("inf")}
"""Logprobs by name that mask a token."""


def _garbage(kind: str, chunk: Chunk) -> object:
    if kind in NON_FINITE:
        return replace(chunk, logprobs=(NON_FINITE[kind],))
    fields, _ = GARBAGE[kind]
    return replace(chunk, **fields) if isinstance(fields, dict) and kind != "no chunk" else fields
