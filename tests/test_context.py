"""Contexts of engines: those that exceed the model or find no room are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.engines import context
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import check_context, sequence_bytes
from forge_rl.engines.families.family import Architecture, LatentAttention
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError
from tests.fakes import make_model


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(folder)
    architecture = read_architecture(folder)
    return replace(architecture, layers=4, kv_heads=2, head_dim=16, max_positions=4096)


def test_a_context_beyond_the_positions_is_refused(architecture: Architecture) -> None:
    check_context(architecture, DecodeSettings(max_model_len=4096))
    with pytest.raises(ConfigError, match="4097, and the model has 4096 positions") as caught:
        check_context(architecture, DecodeSettings(max_model_len=4097))
    assert "--generator.max-model-len to 4096" in caught.value.hint
    yarn = {**architecture.rope, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    check_context(replace(architecture, rope=yarn), DecodeSettings(max_model_len=16384))


def test_a_sequence_without_room_is_refused(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "device_type", lambda: "cpu")
    settings = DecodeSettings(dtype="float32", max_model_len=4096)
    needed = 4 * 4096 * 2 * 2 * 16 * 4  # layers, tokens, k and v, heads, elements, bytes
    assert sequence_bytes(architecture, settings) == needed
    check_context(architecture, replace(settings, kv_cache_gib=needed / 2**30))
    with pytest.raises(ConfigError, match="keys and values of one sequence of 4096 tokens") as caught:
        check_context(architecture, replace(settings, kv_cache_gib=needed / 2**30 - 1e-6))
    assert "--generator.kv-cache-gib" in caught.value.hint


def test_windows_and_latents_take_less(architecture: Architecture) -> None:
    settings = DecodeSettings(dtype="bfloat16", max_model_len=1024)
    windowed = replace(architecture, window=128, window_layers=(0, 2))
    assert sequence_bytes(windowed, settings) == (2 * 1024 + 2 * 128) * 2 * 2 * 16 * 2
    latent = LatentAttention(q_rank=0, kv_rank=24, nope_dim=8, rope_dim=8, value_dim=8, interleaved=True)
    assert sequence_bytes(replace(architecture, latent=latent), settings) == 4 * 1024 * 32 * 2


def test_on_a_gpu_the_weights_come_first(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "device_type", lambda: "cuda")
    monkeypatch.setattr(context, "gpu_bytes", lambda: 2 * architecture.weights * 2)
    with pytest.raises(ConfigError, match="0 GiB for them") as caught:
        check_context(architecture, DecodeSettings(dtype="bfloat16", gpu_memory_utilization=0.5))
    assert "--generator.gpu-memory-utilization" in caught.value.hint


def test_each_device_of_an_engine_holds_its_share(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DecodeSettings(dtype="float32", max_model_len=4096, tensor_parallel_size=2)
    total_bytes = 4 * 4096 * 2 * 2 * 16 * 4
    assert sequence_bytes(architecture, settings) == total_bytes // 2
    assert sequence_bytes(architecture, replace(settings, tensor_parallel_size=4)) == total_bytes // 2, (
        "no device has less than one head"
    )
    monkeypatch.setattr(context, "device_type", lambda: "cpu")
    check_context(architecture, replace(settings, kv_cache_gib=total_bytes / 2**30))
    with pytest.raises(ConfigError, match="keys and values"):
        check_context(architecture, replace(settings, kv_cache_gib=total_bytes / 2**30 - 1e-6))
    monkeypatch.setattr(context, "device_type", lambda: "cuda")
    monkeypatch.setattr(context, "gpu_bytes", lambda: architecture.weights * 4 // 2 + total_bytes // 2)
    check_context(architecture, replace(settings, gpu_memory_utilization=1.0))
