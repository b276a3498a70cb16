"""An engine that others run, over HTTP: both ends, and servers that lie, hang or die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.remote import KEY_VARIABLE, RemoteServer, server, wire
from forge_rl.engines.remote.engine import RemoteEngine, _mismatches
from forge_rl.errors import AttestationError, ConfigError, WeightsError
from forge_rl.token_arrays import CacheUse, Chunk, ScoredTokens
from forge_rl.types import Sampling
from forge_rl.weights import segment
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import LoadReport, Manifest, TensorEntry
from forge_rl.weights.slices import TensorSlice

KEY = "a-key-of-tests"
FACTS = {
    "dtype": "float32",
    "head_dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "max_model_len": 512,
}
SETTINGS = DecodeSettings(dtype="float32", max_model_len=256)


class Engine:
    """A DecodeEngine that counts up from the prompt's last token, and remembers what it was told."""

    def __init__(self) -> None:
        self.version = -1
        self.held = (False, False)
        self.loaded: dict[str, np.ndarray[Any, Any]] = {}
        self.open = 0
        self.stalls_at = -1
        """Number of the token at which it hangs."""
        self.error: Exception | None = None

    async def stream(self, prompt_ids: Any, sampling: Sampling, *, gather_s: float = 0) -> AsyncGenerator[Chunk, None]:
        if self.error is not None:
            raise self.error
        self.open += 1
        try:
            for count in range(sampling.max_tokens):
                if count == self.stalls_at:
                    await asyncio.Event().wait()
                yield Chunk(
                    token_ids=[prompt_ids[-1] + count + 1],
                    logprobs=[-0.1 - count / 3],
                    versions=[self.version],
                    text="é",
                    finish="length" if count == sampling.max_tokens - 1 else "",
                    top=(((7, -0.25), (8, -float("inf"))),),
                    cache=CacheUse(0.5, 1, 2, 3, 60, 40, 5, 6),
                    prompt=((), ((7, -0.5, 1), (8, -1.5, 2))),
                    drafted=7,
                    accepted=5,
                    verified=3,
                )
        finally:
            self.open -= 1

    async def score(self, prompt_ids: Any, token_ids: Any, *, temperature: float, top_k: int) -> ScoredTokens:
        shape = (len(token_ids), top_k)
        return ScoredTokens(
            logprobs=np.full(shape[0], -temperature), top_ids=np.zeros(shape), top_logprobs=np.full(shape, -2.5)
        )

    async def hold(self, *, paused: bool, asleep: bool) -> bool:
        self.held = paused, asleep
        return True

    async def serve_model(self) -> None:
        self.version = 0

    async def load(self, manifest: Manifest, buckets: AsyncIterator[Any], *, reader: str) -> LoadReport:
        fingerprints = {}
        async for bucket in buckets:
            with bucket.open() as tensors:
                for entry in bucket.entries:
                    self.loaded[entry.name] = tensors[entry.name].float().numpy().copy()
                    fingerprints[entry.name] = _fingerprint(tensors[entry.name])
        manifest.attest(fingerprints, reader)
        self.version = manifest.version
        return LoadReport(
            version=self.version,
            fingerprints=fingerprints,
            in_place=1,
            bytes_read=(3 << 31,),
            quantized_bytes=3 << 30,
            seconds={},
        )

    def close(self) -> None:
        pass


def _fingerprint(tensor: Any) -> int:
    import torch

    target = torch.empty_like(tensor)
    (fingerprint,) = move([Move(target, tensor, tuple(tensor.shape), TensorSlice.whole(tuple(tensor.shape)))])
    return fingerprint


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The address of an ASGI app."""
    place = socket.create_server(("127.0.0.1", 0))
    served = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(served.serve([place]))
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        served.should_exit = served.force_exit = True
        await serving
        place.close()


@contextlib.asynccontextmanager
async def connected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, Any] = FACTS
) -> AsyncIterator[RemoteEngine]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with listening(server.EngineServer(engine, key=KEY, facts=facts)) as url:
        remote = await RemoteEngine.connect(RemoteServer(url=url, owner="a", wait_s=30), SETTINGS)
        try:
            yield remote
        finally:
            await _disconnect(remote)


async def _disconnect(remote: RemoteEngine) -> None:
    assert remote._beating is not None
    remote._beating.cancel()
    await remote._client.aclose()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def version(number: int) -> tuple[Manifest, dict[str, Any]]:
    import torch

    torch.manual_seed(number)
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(400_000)}
    entries = tuple(
        TensorEntry(
            name=name,
            shape=tuple(weight.shape),
            dtype=str(weight.dtype).removeprefix("torch."),
            bucket=f"{number}/0",
            offset=0,
            fingerprint=_fingerprint(weight),
        )
        for name, weight in weights.items()
    )
    return Manifest(version=number, tensors=entries, buckets=()), weights


async def buckets(manifest: Manifest, weights: Mapping[str, Any], *, fail: bool = False) -> AsyncIterator[Any]:
    class Bucket:
        def __init__(self, entries: tuple[TensorEntry, ...]) -> None:
            self.entries = entries

        @contextlib.contextmanager
        def open(self) -> Any:
            yield weights

    yield Bucket(manifest.tensors[:2])
    if fail:
        raise WeightsError("bucket 1 is gone")
    yield Bucket(manifest.tensors[2:])


def test_what_an_engine_decodes_arrives_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engine = Engine()
        async with connected(engine, monkeypatch) as remote:
            await remote.serve_model()
            chunks = [chunk async for chunk in remote.stream([5, 6], Sampling(max_tokens=3, stop=("x",)))]
            direct = [chunk async for chunk in engine.stream([5, 6], Sampling(max_tokens=3))]
            assert chunks == direct
            default = Chunk(token_ids=[], logprobs=[], versions=[], text="")
            names = [field.name for field in dataclasses.fields(Chunk)]
            missing = {name for name in names if np.array_equal(getattr(default, name), getattr(chunks[2], name))}
            assert missing == {"routed"}, "every other field is sent"
            assert [chunk.versions.tolist() for chunk in chunks] == [[0]] * 3
            scores = await remote.score([5], [6, 7], temperature=0.7, top_k=3)
            assert scores == await engine.score([5], [6, 7], temperature=0.7, top_k=3)
            assert await remote.hold(paused=False, asleep=True)
            assert engine.held == (True, False), "a server's devices are its own"

    run(work)


def test_only_weights_that_arrive_whole_and_attested_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        engine = Engine()
        async with connected(engine, monkeypatch) as remote:
            manifest, weights = version(3)
            report = await remote.load(manifest, buckets(manifest, weights), reader="engine 7")
            assert (report.version, report.in_place, report.bytes_read) == (3, 1, (3 << 31,))
            assert report.quantized_bytes == 3 << 30
            assert all((engine.loaded[name] == weight.float().numpy()).all() for name, weight in weights.items())
            following, following_weights = version(4)
            with pytest.raises(WeightsError, match="bucket 1 is gone"):
                await remote.load(following, buckets(following, following_weights, fail=True), reader="engine 7")
            assert engine.version == 3
            with pytest.raises(AttestationError, match="engine 7 holds other weights than version 4: 3 of 3"):
                await remote.load(following, buckets(following, weights), reader="engine 7")
            assert engine.version == 3
            report = await remote.load(following, buckets(following, following_weights), reader="engine 7")
            assert report.version == engine.version == 4
            with pytest.raises(WeightsError, match="a run has replaced the weights"):
                await remote.serve_model()

    run(work)


def test_a_server_that_only_claims_to_load_fails_its_attestation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        engine = Engine()

        async def pretend(manifest: Manifest, found: AsyncIterator[Any], *, reader: str) -> LoadReport:
            async for _ in found:
                pass
            return LoadReport(version=manifest.version, fingerprints={"a": 1, "b": 2, "c": 3}, in_place=3)

        monkeypatch.setattr(engine, "load", pretend)
        async with connected(engine, monkeypatch) as remote:
            manifest, weights = version(3)
            with pytest.raises(AttestationError, match="engine 7 holds other weights than version 3"):
                await remote.load(manifest, buckets(manifest, weights), reader="engine 7")

    run(work)


def test_closing_a_stream_and_losing_its_client_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engine = Engine()
        async with connected(engine, monkeypatch) as remote:
            engine.stalls_at = 1
            async with contextlib.aclosing(remote.stream([5], Sampling(max_tokens=9))) as chunks:
                await anext(chunks)
                assert engine.open == 1
            while engine.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(work)


def test_errors_keep_their_kind_and_show_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engine = Engine()
        async with connected(engine, monkeypatch) as remote:
            for raised, kind in (
                (ConfigError("no \x1b[2J", hint="that"), ConfigError),
                (WeightsError("none", hint="that"), WeightsError),
                (ValueError("a bug \x1b[2J"), RuntimeError),
            ):
                engine.error = raised
                with pytest.raises(kind) as caught:
                    await anext(remote.stream([5], Sampling(max_tokens=2)))
                assert "\x1b" not in str(caught.value)
                assert str(raised).split("\\")[0].split("\x1b")[0] in str(caught.value)

    run(work)


def test_one_run_at_a_time_has_an_engine_until_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(server, "LEASE_S", 0.5)
        engine = Engine()
        async with connected(engine, monkeypatch) as remote:
            url = remote._server.url
            with pytest.raises(ConfigError, match="another run uses this engine"):
                await RemoteEngine.connect(RemoteServer(url=url, owner="b"), SETTINGS)
            await remote.hold(paused=True, asleep=False)
            engine.stalls_at = 1
            stream = remote.stream([5], Sampling(max_tokens=9))
            await anext(stream)
            assert remote._beating is not None
            remote._beating.cancel()
            while engine.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert engine.held == (False, False), "the server's other users can go on"
            with pytest.raises(RuntimeError, match="the session has ended"):
                async for _ in stream:
                    pass
            with pytest.raises(RuntimeError, match="status 409"):
                await remote.hold(paused=True, asleep=False)
            following = await RemoteEngine.connect(RemoteServer(url=url, owner="b"), SETTINGS)
            with pytest.raises(RuntimeError, match="status 409"):
                await remote.serve_model()
            assert engine.version == -1
            await _disconnect(following)

    run(work)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, and float32 is needed"),
        ({"logprobs_mode": "raw_logprobs"}, "its logprobs_mode is raw_logprobs"),
        ({"max_model_len": 128}, "its max_model_len is 128, and 256 is needed"),
        ({"max_model_len": "\x1b[2J"}, r"its max_model_len is \\x1b\[2J"),
        ({"quantization": "fp8"}, "its quantization is fp8, the run's none"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with connected(Engine(), monkeypatch, {**FACTS, **changes}):
            pass

    with pytest.raises(ConfigError, match=message):
        run(work)


@pytest.mark.parametrize(
    ("quantization", "format_name", "fits"),
    [
        ("int8", "int8_per_channel_weight_only", True),
        ("int8", "experts_int8", True),
        ("fp8", "fp8_per_channel", True),
        ("int8", "fp8_per_channel", False),
        ("fp8", None, False),
    ],
)
def test_a_server_rounds_weights_to_the_runs_format(quantization: Any, format_name: str | None, fits: bool) -> None:
    settings = dataclasses.replace(SETTINGS, quantization=quantization)
    assert (not _mismatches({**FACTS, "quantization": format_name}, settings)) == fits


def test_a_wrong_key_is_refused_and_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with listening(server.EngineServer(Engine(), key="another", facts=FACTS)) as url:
            for key, message in ((KEY, "the key is missing or wrong"), ("", f"{KEY_VARIABLE} is not set")):
                monkeypatch.setenv(KEY_VARIABLE, key)
                with pytest.raises(ConfigError, match=message) as caught:
                    await RemoteEngine.connect(RemoteServer(url=url, owner="a"), SETTINGS)
                assert KEY not in str(caught.value)

    run(work)


def test_memory_of_buckets_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    real = segment.create_anonymous

    def noted(size: int) -> Any:
        created.append(real(size))
        return created[-1]

    monkeypatch.setattr(segment, "create_anonymous", noted)

    async def work() -> None:
        async with connected(Engine(), monkeypatch) as remote:
            manifest, weights = version(1)
            await remote.load(manifest, buckets(manifest, weights), reader="engine 7")

    run(work)
    assert len(created) == 2
    assert all(not Path(ref.path).exists() for ref, _ in created)


def test_every_field_of_sampling_survives() -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.3,
        seed=2**40,
        stop=("a", "b"),
        top_logprobs=2,
        extra={"top_p": 0.5, "x": {"y": [1]}},
    )
    read = wire.sampling_from_json(json.loads(json.dumps(wire.sampling_to_json(sampling))))
    assert read == sampling
    assert set(wire.sampling_to_json(sampling)) == {field.name for field in dataclasses.fields(Sampling)}
    with pytest.raises(ConfigError, match="cannot be sent"):
        wire.sampling_to_json(Sampling(max_tokens=5, extra={"x": object()}))
    with pytest.raises(wire.WireError):
        wire.sampling_from_json({"max_tokens": 5, "unknown": 1})
