"""Answers of a real vLLM engine as they are decoded, and what stops them at a token boundary."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_rl.data.bundled import bundled_model, default_cache
from forge_rl.errors import ConfigError, WeightsError
from forge_rl.services.generator import Generator
from forge_rl.types import Chunk, Sampling, Turn
from tests.test_engine_load import PROMPT, Shelf, a_generator, change, gaps
from tests.tiny import make_tiny_model
from tests.watched_engine import WatchedActor

DEADLINE_S = 120.0
TOKENS = 200


def long(seed: int) -> Sampling:
    return Sampling(max_tokens=TOKENS, seed=seed)


async def told(generator: Generator, method: str, *args: object) -> object:
    (replica,) = generator._service.replicas
    return await replica.call(method, *args, deadline_s=DEADLINE_S)


async def chunks_of(generator: Generator, sampling: Sampling) -> list[Chunk]:
    return await told(generator, "follow", PROMPT, sampling)


def joined(chunks: Sequence[Chunk]) -> Turn:
    return Turn(
        prompt_ids=PROMPT,
        token_ids=sum((chunk.token_ids for chunk in chunks), ()),
        logprobs=sum((chunk.logprobs for chunk in chunks), ()),
        versions=sum((chunk.versions for chunk in chunks), ()),
        text="".join(chunk.text for chunk in chunks),
        truncated=chunks[-1].finish == "length",
    )


async def start(generator: Generator, seeds: Sequence[int]) -> list[asyncio.Task[list[Chunk]]]:
    """Streams that have some of their tokens, and not all."""
    tasks = [asyncio.create_task(chunks_of(generator, long(seed))) for seed in seeds]
    await generator.generate(PROMPT, Sampling(max_tokens=8, seed=99))  # those before it have got as far
    return tasks


async def counts_standing_still(generator: Generator, seeds: Sequence[int]) -> list[int]:
    """Tokens that the streams have; fails if more come."""
    await asyncio.sleep(0.2)  # what was decoded before may be on its way
    before = await told(generator, "counts")
    await asyncio.sleep(0.5)
    assert await told(generator, "counts") == before, "an engine that stands still decodes"
    counts = [before[seed] for seed in seeds]
    assert all(0 < count < TOKENS for count in counts)
    return counts


def test_an_engine_streams_and_pauses(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", bundled_model(default_cache()), tied=False)
    asyncio.run(_check(folder, tmp_path))


async def _check(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shelf = Shelf(tmp_path / "weights")
    async with a_generator(folder, tmp_path, actor=WatchedActor) as generator:
        model = change(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        shelf.put(model, 1, bucket_bytes=1 << 20)
        await generator.load(shelf)
        undisturbed = await _chunks_join_to_the_answer(generator)
        await _stop_texts_end_an_answer(generator, undisturbed)
        await _the_likeliest_tokens_are_those_of_transformers(generator, model)
        await _what_vllm_does_not_take_is_a_config_error(generator)
        assert await told(generator, "left_after_closing", PROMPT, long(7)) == 0
        await _paused_requests_go_on_as_if_nothing_had_been(generator)
        other = await _a_load_while_paused_leaves_it_paused(generator, shelf, model)
        third = await _resume_waits_for_a_load_that_is_under_way(generator, shelf, other)
        fourth = await _resume_does_not_serve_half_of_a_version(generator, shelf, third)
        await _asleep_requests_go_on_under_what_was_loaded_meanwhile(generator, shelf, fourth)


async def _chunks_join_to_the_answer(generator: Generator) -> Turn:
    chunks = await chunks_of(generator, long(0))
    turn = await generator.generate(PROMPT, long(0))
    assert len(chunks) > TOKENS / 4, "an answer comes in pieces"
    assert [chunk.finish for chunk in chunks] == [""] * (len(chunks) - 1) + ["length"]
    assert all(chunk.top == () for chunk in chunks)
    stream = joined(chunks)
    assert stream.token_ids == turn.token_ids
    assert stream.text == turn.text
    assert stream.logprobs == pytest.approx(turn.logprobs, abs=1e-4)
    assert stream.versions == turn.versions == (1,) * TOKENS
    assert stream.truncated
    assert turn.truncated
    return turn


async def _stop_texts_end_an_answer(generator: Generator, whole: Turn) -> None:
    stop = whole.text[40:44]
    chunks = await chunks_of(generator, Sampling(max_tokens=TOKENS, seed=0, stop=("no such text", stop)))
    turn = joined(chunks)
    assert chunks[-1].finish == "stop"
    assert not turn.truncated
    assert turn.text == whole.text[: whole.text.index(stop)]
    assert turn.token_ids == whole.token_ids[: len(turn.token_ids)]
    assert stop in generator._tokenizer.decode(turn.token_ids)
    assert stop not in generator._tokenizer.decode(turn.token_ids[:-1])


async def _the_likeliest_tokens_are_those_of_transformers(generator: Generator, model: torch.nn.Module) -> None:
    for temperature in (1.0, 0.0):
        turn = joined(
            chunks := await chunks_of(
                generator, Sampling(max_tokens=20, temperature=temperature, seed=1, top_logprobs=3)
            )
        )
        with torch.no_grad():
            logits = model(torch.tensor([turn.prompt_ids + turn.token_ids])).logits[0].float()
        expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1).topk(3)
        top = [pairs for chunk in chunks for pairs in chunk.top]
        assert [[token for token, _ in pairs] for pairs in top] == expected.indices.tolist()
        found = torch.tensor([[logprob for _, logprob in pairs] for pairs in top])
        assert (found - expected.values).abs().max() < 1e-4
        if temperature == 0:
            assert [pairs[0][0] for pairs in top] == list(turn.token_ids)
            assert all(math.isnan(logprob) for logprob in turn.logprobs)
        else:
            assert gaps(model, turn).max() < 1e-4


async def _what_vllm_does_not_take_is_a_config_error(generator: Generator) -> None:
    with pytest.raises(ConfigError, match=r"vLLM does not take the request: .*logprobs"):
        await generator.generate(PROMPT, Sampling(max_tokens=8, top_logprobs=50))


async def _paused_requests_go_on_as_if_nothing_had_been(generator: Generator) -> None:
    seeds = range(4)
    undisturbed = [joined(chunks) for chunks in await asyncio.gather(*await start(generator, seeds))]
    await generator.resume()  # nothing was paused: nothing happens
    streams = await start(generator, seeds)
    await generator.pause()
    await generator.pause()
    late = asyncio.create_task(generator.generate(PROMPT, long(5)))
    await counts_standing_still(generator, seeds)
    assert not late.done()
    await generator.resume()
    await generator.resume()
    for chunks, expected in zip(await asyncio.gather(*streams), undisturbed, strict=True):
        turn = joined(chunks)
        assert turn.token_ids == expected.token_ids
        assert turn.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len((await late).token_ids) == TOKENS


async def _a_load_while_paused_leaves_it_paused(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> torch.nn.Module:
    other = change(model)
    shelf.put(other, 2, bucket_bytes=1 << 20)
    seeds = range(10, 14)
    streams = await start(generator, seeds)
    await generator.pause()
    assert await generator.load(shelf) == 2
    counts = await counts_standing_still(generator, seeds)
    await generator.resume()
    for chunks, count in zip(await asyncio.gather(*streams), counts, strict=True):
        turn = joined(chunks)
        assert turn.versions == (1,) * count + (2,) * (TOKENS - count)
        assert gaps(model, turn)[:count].max() < 1e-4
        assert gaps(other, turn)[count:].max() < 1e-4
    return other


async def _resume_waits_for_a_load_that_is_under_way(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> torch.nn.Module:
    other = change(model)
    shelf.put(other, 3, bucket_bytes=20 << 10)  # many, so that there is time
    streams = await start(generator, range(20, 24))
    await generator.pause()
    load = asyncio.create_task(generator.load(shelf))
    while not load.done():
        await generator.resume()
    await load
    for chunks in await asyncio.gather(*streams):
        turn = joined(chunks)
        versions = torch.tensor(turn.versions)
        assert set(turn.versions) == {2, 3}
        assert gaps(model, turn)[versions == 2].max() < 1e-4
        assert gaps(other, turn)[versions == 3].max() < 1e-4
    return other


async def _resume_does_not_serve_half_of_a_version(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> torch.nn.Module:
    other = change(model)
    shelf.put(other, 4, bucket_bytes=64 << 10)
    seeds = range(30, 34)
    streams = await start(generator, seeds)
    await generator.pause()
    shelf.fail_at = 3
    with pytest.raises(WeightsError, match="bucket 4/3 did not come"):
        await generator.load(shelf)
    await generator.resume()
    counts = await counts_standing_still(generator, seeds)
    shelf.fail_at = -1
    await generator.load(shelf)
    for chunks, count in zip(await asyncio.gather(*streams), counts, strict=True):
        assert joined(chunks).versions == (3,) * count + (4,) * (TOKENS - count)
    return other


async def _asleep_requests_go_on_under_what_was_loaded_meanwhile(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> None:
    other = change(model)
    shelf.put(other, 5, bucket_bytes=1 << 20)
    seeds = range(40, 44)
    streams = await start(generator, seeds)
    await generator.sleep()
    await generator.sleep()
    before = await counts_standing_still(generator, seeds)
    await generator.pause()
    await generator.wake()  # it is also paused
    assert await counts_standing_still(generator, seeds) == before
    await generator.resume()
    await generator.sleep()
    await generator.load(shelf)
    counts = await counts_standing_still(generator, seeds)
    await generator.wake()
    for chunks, count in zip(await asyncio.gather(*streams), counts, strict=True):
        turn = joined(chunks)
        assert turn.versions == (4,) * count + (5,) * (TOKENS - count)
        assert gaps(model, turn)[:count].max() < 1e-4, "what the cache held was computed again"
        assert gaps(other, turn)[count:].max() < 1e-4
