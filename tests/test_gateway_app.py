"""The gateway's program on a real engine: what is recorded is what the engine drew, and signals end it cleanly."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from apps.gateway import Config, main, serving
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ConfigError
from forge_rl.services.generator import Generator
from forge_rl.types import Episode, Sampling, Task
from tests.conftest import ROOT

ENGINE = Generator.Config(dtype="float32", max_model_tokens=256, kv_cache_gib=0.25)
HI: Any = {"role": "user", "content": "Hi"}


def test_sessions_record_what_a_real_engine_draws(tiny_model: Path, tmp_path: Path, nothing_left: None) -> None:
    async def check() -> None:
        config = Config(model=str(tiny_model), port=0, generator=ENGINE, out=tmp_path)
        async with serving(config) as (gateway, generator, _):
            session = gateway.open(sampling=Sampling(max_tokens=12, seed=5))
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
                first = await client.chat.completions.create(model="tiny", messages=[HI], logprobs=True, top_logprobs=2)
                entries = first.choices[0].logprobs
                assert entries is not None
                assert entries.content is not None
                messages: list[Any] = [HI, first.choices[0].message, {"role": "user", "content": "And now?"}]
                text = ""
                async for chunk in await client.chat.completions.create(model="tiny", messages=messages, stream=True):
                    text += chunk.choices[0].delta.content or ""
                several = await client.chat.completions.create(model="tiny", messages=[HI], n=3)
            turns = session.close()
            # A client that goes away frees its place on the engine.
            session = gateway.open(sampling=Sampling(max_tokens=200))
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
                stream = await client.chat.completions.create(model="tiny", messages=[HI], stream=True)
                await anext(stream)
                await stream.close()
            async with asyncio.timeout(60):
                while "in flight by replica: 0: 0" not in repr(generator):  # noqa: ASYNC110  nobody tells
                    await asyncio.sleep(0.01)
            assert session.close() == ()

        tokenizer = Tokenizer(tiny_model)
        assert tuple(turns[0].prompt_ids) == tokenizer.render([HI])
        assert [token.logprob for token in entries.content] == list(turns[0].logprobs)
        assert all(-30 < logprob < 0 for turn in turns for logprob in turn.logprobs)
        assert tuple(turns[1].prompt_ids) == tuple(tokenizer.extend(tuple(turns[0].context), [messages[2]]))
        assert turns[1].text == text
        assert [turn.text for turn in turns[2:]] == [choice.message.content for choice in several.choices]
        assert (
            len({tuple(turn.token_ids) for turn in turns if tuple(turn.prompt_ids) == tuple(turns[0].prompt_ids)}) == 4
        )
        assert {version for turn in turns for version in turn.versions} == {0}
        task = Task(id="1", source="s", messages=(HI,))
        segments = Episode(task=task, turns=turns[:2], reward=0.0).segments
        assert len(segments) == 1
        assert math.isfinite(sum(segments[0].logprobs))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],  # a run's Ctrl-C: test_run.py
)
def test_a_signal_ends_the_server_with_a_request_in_flight(
    sent: signal.Signals, status: int, tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    command = [sys.executable, "-m", "apps.gateway", "--model", str(tiny_model), "--port", "0", "--out", str(tmp_path)]
    flags = ["--generator.max-model-tokens", "256", "--generator.kv-cache-gib", "0.25"]
    environment = {**os.environ, "FORGE_RL_API_KEY": "secret"}
    server = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("serving tiny at "))
        printed = ""
        while "Ctrl-C" not in printed:
            printed += server.stdout.readline()
        assert f"curl {url}/chat/completions -H 'authorization: Bearer KEY'" in printed
        assert "secret" not in printed
        assert httpx.get(f"{url}/models").status_code == 401
        with OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=[HI], stream=True, max_tokens=200)
            next(stream)
            server.send_signal(sent)
            assert server.wait(60) == status
    finally:
        server.kill()
        server.wait()


def test_a_port_in_use_is_told_before_engines_start(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            asyncio.run(main(Config(model=str(tiny_model), port=port, generator=ENGINE, out=tmp_path)))
        assert not (tmp_path / "logs").exists()
