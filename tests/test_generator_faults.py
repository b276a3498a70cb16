"""A Generator whose engines die, hang, fail and lie: fake engines that do so on orders, on real processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.errors import ConfigError, ContextError, PoisonError, ReplicaError, ServiceError, WeightsError
from forge_rl.models.adapter_bytes import AdapterFiles
from forge_rl.services import engine_pool
from forge_rl.services.completion import ResumableCompletion
from forge_rl.services.generator_actor import GeneratorActor
from forge_rl.types import Sampling
from tests.fake_engine import GARBAGE, NON_FINITE, draw
from tests.staged_engines import PROMPT, read, right, stage, stream
from tests.tiny import bundled_tokenizer


async def test_a_completion_is_resumed_elsewhere_from_the_tokens_that_there_are(
    tmp_path: Path, nothing_left: None
) -> None:
    async with stage(tmp_path) as on:
        assert await on.load(1) == 1
        on.orders.tell(0, stream="hold", after=3)
        for ending, message in ((signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "was stopped")):
            before = len(on.orders.notes("stream"))
            sampling = Sampling(max_tokens=20, seed=7)
            async with contextlib.aclosing(stream(on.generator, PROMPT, sampling, engine=0)) as chunks:
                ids = await read(chunks, 3)
                os.kill(await on.pid(0), ending)
                rest = [chunk async for chunk in chunks]
            assert [*ids, *(token for chunk in rest for token in chunk.token_ids)] == list(draw(PROMPT, 20))
            assert [chunk.finish for chunk in rest] == [""] * 16 + ["length"]
            first, second = on.orders.notes("stream")[before:]
            assert (first["engine"], first["shown"], first["seed"]) == (0, len(PROMPT), 7)
            assert (second["engine"], second["shown"]) == (1, len(PROMPT) + 3)
            assert second["seed"] == 7, "which goes on at its position"
            assert message in on.faults.seen[-1].cause
            await on.until_serving(0, 1)
            assert on.faults.seen[-1].recovered_s is not None
            assert await on.state(0) == (1, [])

        completion = ResumableCompletion(PROMPT, sampling, on.generator._tokenizer)
        once = asyncio.create_task(on.generator.decode(completion, engine=0))
        await on.until(lambda: completion.tokens == 3)
        os.kill(await on.pid(0), signal.SIGKILL)
        with pytest.raises(ReplicaError, match="killed by SIGKILL"):
            await once
        assert completion.shown.tolist() == [*PROMPT, *draw(PROMPT, 3)]


async def test_an_external_engine_has_no_devices_and_may_refuse_requests(tmp_path: Path, nothing_left: None) -> None:
    waited: list[str] = []

    @contextlib.asynccontextmanager
    async def devices(index: int) -> AsyncIterator[None]:
        waited.append("devices")
        yield

    async with stage(tmp_path, 1, urls=("http://elsewhere:8000",), spares=1, replace=devices) as on:
        elsewhere, served_setup = sorted(on.orders.notes("setup"), key=lambda note: note["engine"])
        assert elsewhere["server"]["url"] == "http://elsewhere:8000"
        assert elsewhere["server"]["wait_s"] == 0, "a wrong address is told at once"
        assert served_setup["server"] is None
        assert await on.load(1) == 1
        await on.until(lambda: on.generator.spares == 1)
        on.only_once(0, stream="refuse", after=3)
        turn = await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0)
        assert right(turn)
        assert "it refuses: not this one" in on.faults.seen[-1].cause
        await on.until_serving(0, 1)
        later_setup = on.orders.notes("setup")[-1]
        assert (later_setup["engine"], later_setup["server"]["owner"]) == (0, elsewhere["server"]["owner"])
        assert later_setup["server"]["wait_s"] > 0, "it waits for a server that comes back"
        assert await on.state(0) == (1, [])
        assert on.generator.spares == 1
        assert not waited
        on.orders.tell(0, stream="refuse")
        with pytest.raises(ConfigError, match="not this one"):
            await on.generator.generate(PROMPT, Sampling(max_tokens=20, extra={"top_p": 0.5}), engine=0)
        assert set(on.generator.engines()) == {0, 1}, "the request may be at fault"


async def test_all_engines_may_be_of_others(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, 0, urls=("http://elsewhere:8000",)) as on:
        await on.load(1)
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20)))
        assert on.generator.engines().keys() == {0}
        os.kill(await on.pid(0), signal.SIGKILL)
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20)))


async def test_an_engine_that_fails_or_gives_garbage_is_replaced(tmp_path: Path, nothing_left: None) -> None:
    kinds = {kind: GARBAGE[kind][1] for kind in ("large id", "unpickable", "no chunk")}
    kinds |= {"raise": "it failed: RuntimeError: the engine has a bug", "end": "its stream ended without a finish"}

    async def check() -> None:
        async with stage(tmp_path) as on:
            await on.load(3)
            await on.load(1)
            for kind, message in kinds.items():
                on.orders.tell(0, stream=kind, after=3)
                turn = await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0)
                assert right(turn), kind
                assert set(turn.versions) == {1}
                assert pytest.approx(turn.logprobs) == [-1.5] * 20
                on.orders.tell(0)
                await on.until_serving(0, 1)
                assert re.search(message, on.faults.seen[-1].cause), (kind, on.faults.seen[-1].cause)
                assert not on.faults.seen[-1].fatal

            on.orders.tell(0, version=3)  # it was served once, but not since the request began
            assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))
            assert "version 3, where the engine serves 1" in on.faults.seen[-1].cause

    await check()


async def test_a_non_finite_logprob_is_masked_and_many_replace_the_engine(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, 1) as on:
        await on.load(1)
        for kind in NON_FINITE:
            on.orders.tell(0, stream=kind, after=3)
            turn = await on.generator.generate(PROMPT, Sampling(max_tokens=20))
            assert right(turn)
            assert [place for place, logprob in enumerate(turn.logprobs) if logprob != -1.5] == [3], kind
            assert np.isnan(turn.logprobs[3])
        assert on.generator.non_finite.drain() == 2
        assert on.generator.non_finite.drain() == 0

        on.orders.tell(0, stream="nan", lasts=True)
        with pytest.raises(ConfigError, match="not finite under the request's repetition_penalty"):
            await on.generator.generate(PROMPT, Sampling(max_tokens=20, extra={"repetition_penalty": 0.1}))
        assert not on.faults.seen, "settings of a request cost no engine"

        on.only_once(0, stream="nan", lasts=True)
        turn = await on.generator.generate(PROMPT, Sampling(max_tokens=60))
        assert right(turn, 60)
        assert np.isnan(turn.logprobs).sum() == 23, "two of the first 25 came before, and the last ended the engine"
        assert "26 of 64 tokens have logprobs that are not finite" in on.faults.seen[-1].cause
        await on.until_serving(0)


async def test_engines_answer_while_one_has_no_work_or_goes_on_with_it(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, 1) as on:
        await on.load(1)
        on.orders.tell(0, stream="hold", after=3)
        chunks = stream(on.generator, PROMPT, Sampling(max_tokens=20))
        await read(chunks, 3)
        assert on.generator.answers, "it gave tokens just now"
        monkeypatch.setattr(engine_pool, "_SILENT_S", 0.0)
        assert not on.generator.answers
        await on.generator.pause()
        assert on.generator.answers
        await on.generator.resume()
        await chunks.aclose()
        await on.until(lambda: on.generator.answers)
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: not on.generator.answers)


async def test_a_completion_that_kills_every_engine_is_given_up_before_they_are(
    tmp_path: Path, nothing_left: None
) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        for engine in (0, 1):
            on.orders.tell(engine, stream="raise", after=0)
        with pytest.raises(PoisonError, match="the engine has a bug"):
            await on.generator.generate(PROMPT)
        assert len(on.faults.seen) == 3
        for engine in (0, 1):
            on.orders.tell(engine)
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20)))


async def test_text_is_right_where_engines_took_turns(tmp_path: Path, nothing_left: None) -> None:
    text = "say 🦜 <|END|> and more"
    tokenizer = bundled_tokenizer()
    ids = tokenizer.encode(text)
    stream = tokenizer.text_stream(PROMPT)
    texts = [stream.add(token) for token in ids]
    parrot = next(place for place, piece in enumerate(texts) if not piece)  # its first byte
    ended = next(count for count in range(len(ids)) if "<|END|>" in tokenizer.decode(ids[:count]))

    async with stage(tmp_path) as on:
        await on.load(1)
        for engine, orders in ((0, {"stream": "raise", "after": parrot + 1}), (1, {})):
            texts_of_engine = texts if engine == 0 else ["garbled"] * len(ids)
            on.orders.tell(engine, say=ids, texts=texts_of_engine, prompt=len(PROMPT), **orders)
        sampling = Sampling(max_tokens=len(ids), stop=("<|END|>",))
        turn = await on.generator.generate(PROMPT, sampling, engine=0)
        assert turn.text == "say 🦜 "
        assert tuple(turn.token_ids) == ids[:ended]
        assert not turn.truncated


async def test_when_all_engines_die_their_completions_wait_for_new_ones(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        for engine in (0, 1):
            on.orders.tell(engine, stream="hold", after=3)
        prompts = [(*PROMPT, number) for number in range(4)]
        async with contextlib.AsyncExitStack() as stack:
            answers = [
                await stack.enter_async_context(
                    contextlib.aclosing(stream(on.generator, prompt, Sampling(max_tokens=20)))
                )
                for prompt in prompts
            ]
            begun = [await read(chunks, 3) for chunks in answers]
            pids = [await on.pid(engine) for engine in (0, 1)]
            for engine, pid in enumerate(pids):
                on.orders.tell(engine)
                os.kill(pid, signal.SIGKILL)
            ended = await asyncio.gather(*[read(chunks, 17) for chunks in answers])
        for prompt, first, rest in zip(prompts, begun, ended, strict=True):
            assert (*first, *rest) == draw(prompt, 20)
        await on.until_serving(0, 1)
        assert [await on.state(engine) for engine in (0, 1)] == [(1, []), (1, [])]
        assert len(on.orders.notes("stream")) == 8


async def test_engines_that_keep_dying_are_given_up_and_the_last_is_fatal(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, max_restarts=2) as on:
        await on.load(1)
        on.orders.tell(0, setup="die")
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: sum(fault.replica == 0 for fault in on.faults.seen) == 3)
        assert list(on.generator.engines()) == [1]
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))
        assert await on.load(2) == 2

        on.orders.tell(1, stream="hold", load="raise")
        waiting = asyncio.create_task(on.generator.generate(PROMPT, Sampling(max_tokens=20)))
        await on.until(lambda: on.generator._service.replicas[1].in_flight == 1)
        os.kill(await on.pid(1), signal.SIGKILL)
        async with asyncio.timeout(240):
            with pytest.raises(ServiceError, match=r"no replica is left; replica 0: .*; replica 1: .*load.*a bug"):
                await waiting
            fatal = await on.faults.wait()
        assert "no replica is left" in str(fatal)
        with pytest.raises(ServiceError, match="no replica is left"):
            await on.generator.generate(PROMPT)
        with pytest.raises(ServiceError, match="no replica is left"):
            await on.load(3)


async def test_a_completion_that_is_left_ends_in_the_engine(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        assert on.generator.engines() == {0: 64, 1: 64}
        on.orders.tell(1, stream="hold", after=3)
        async with contextlib.aclosing(stream(on.generator, PROMPT, engine=1)) as chunks:
            await read(chunks, 3)
        await on.until(lambda: len(on.orders.notes("closed")) == 1)
        request = asyncio.create_task(on.generator.generate(PROMPT, engine=1))
        await on.until(lambda: len(on.orders.notes("stream")) == 2)
        request.cancel()
        await on.until(lambda: len(on.orders.notes("closed")) == 2)
        assert {note["engine"] for note in on.orders.notes("closed")} == {1}
        assert not on.faults.seen


@pytest.mark.parametrize("misdeed", ["raise", "die", "garbage"])
async def test_scores_come_from_another_engine_if_one_fails(tmp_path: Path, misdeed: str) -> None:
    async with stage(tmp_path) as on:
        with pytest.raises(WeightsError, match="hold no weights"):
            await on.generator.score(PROMPT, (7, 8))
        await on.load(1)
        on.only_once(0, score=misdeed)
        scores = await on.generator.score(PROMPT, (7, 8), temperature=2.0, top_k=3)
        assert scores.logprobs.tolist() == [-2.0, -2.5]
        assert scores.top_ids.tolist() == [[4, 5, 6], [5, 6, 7]]
        assert [fault.replica for fault in on.faults.seen] == [0]
        await on.until_serving(0, 1)
        with pytest.raises(ContextError, match=r"4 \+ 252 tokens"):
            await on.generator.score(PROMPT, (7,) * 252)


async def test_an_engine_whose_cache_is_full_gets_fewer_requests_until_it_dies(
    tmp_path: Path, nothing_left: None
) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        assert on.generator.pop_metrics().keys() == {"load/calls_s"}
        engine_counts: list[dict[int, int]] = []
        on.generator.listeners.add(lambda: engine_counts.append(on.generator.engines()))
        on.orders.tell(0, cache=(0.97, 3, 5, 11))
        await on.generator.generate(PROMPT, Sampling(max_tokens=2), engine=0)
        assert engine_counts == [{0: 11, 1: 64}]
        assert {name.removeprefix("generator/"): value for name, value in on.generator.pop_metrics().items()} == {
            "kv_cache_usage": 0.97,
            "preemptions": 6,
            "waiting": 5,
            "request_limit": 11,
            "prefilled_again": 0,
        }
        on.orders.tell(0, cache=(float("nan"), 0, 0, 0))
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))
        assert "it sent garbage: a chunk has the cache use" in on.faults.seen[-1].cause
        on.orders.tell(0)
        await on.until_serving(0, 1)
        assert on.generator.engines() == {0: 64, 1: 64}


async def test_an_adapter_that_cannot_be_written_is_no_fault_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    load: Any = inspect.unwrap(GeneratorActor.load_adapter._method)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="'a' cannot be written for an engine: No such file") as raised:
        await load(None, "a", AdapterFiles(config=b"", weights=b""))
    assert "TMPDIR" in raised.value.hint
