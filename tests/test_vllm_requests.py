"""The parent's side of a vLLM engine, with vLLM's answers played here: requests that vLLM gives up, adapters."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError
from tests.fakes import full_disk

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some


async def test_a_prompt_that_vllm_gives_up_has_no_scores():
    """As many positions as were asked for may be scored by then, though not the last ones."""
    from vllm.logprobs import FlatLogprobs, Logprob

    from forge_rl.engines.vllm.adapters import EngineAdapters
    from forge_rl.engines.vllm.engine import VLLMEngine

    positions = FlatLogprobs()
    for token in (1, 2):
        positions.append({token: Logprob(-0.5)})

    async def generate(*_: object, **__: object) -> AsyncGenerator[Any, None]:
        completion = SimpleNamespace(finish_reason="abort")
        yield SimpleNamespace(outputs=[completion], prompt_logprobs=positions)

    engine: Any = SimpleNamespace(
        _failure="",
        _requests=0,
        _adapters=EngineAdapters(Path(), DecodeSettings(), call=cast(Any, None)),
        _cache=SimpleNamespace(request_id=lambda: "1"),
        _llm=SimpleNamespace(generate=generate),
    )
    with pytest.raises(RuntimeError, match="vLLM ended a request with 'abort'"):
        await VLLMEngine.score(engine, [1, 2, 3], [4, 5])
    assert engine._requests == 0


async def test_a_full_disk_is_not_blamed_on_an_adapters_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from forge_rl.engines.vllm.adapters import EngineAdapters

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(bytes(5000))
    adapters = EngineAdapters(Path(), DecodeSettings(max_loras=2), call=cast(Any, None))
    with (
        full_disk(),
        pytest.raises(ConfigError, match=rf"'a' cannot be copied to {tmp_path}/adapters-.*: File too large"),
    ):
        await adapters.load("a", tmp_path, awake=True)
    with pytest.raises(ConfigError, match=rf"'a' cannot be read from {tmp_path}/gone: No such file"):
        await adapters.load("a", tmp_path / "gone", awake=True)
    adapters.close()


async def test_no_request_begins_with_a_version_that_is_being_forgotten():
    from forge_rl.engines.vllm.adapters import EngineAdapters, _LoadedAdapter

    begun = []

    async def call(method: str, number: int) -> list[Any]:
        with adapters.using("") as (request, version):
            begun.append((request, version))
        return []

    adapters = EngineAdapters(Path(), DecodeSettings(adapters="served", max_loras=2), call=call)
    for version in (1, 2):
        request: Any = SimpleNamespace(lora_int_id=version)
        adapters._versions.append(_LoadedAdapter(request, Path("/nonexistent"), version=version))
    await adapters.forget_versions()
    assert begun == [(None, None)] * 2
