"""Layouts of engines over devices: those that cannot work are refused, with what works."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from forge_rl.engines import decode_layout
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError
from forge_rl.services import generator_config

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
MOE = {**SMALL, "num_experts": 6, "moe_intermediate_size": 36}
DENSE_FIRST = {**MOE, "intermediate_size": 36, "moe_intermediate_size": 64, "first_k_dense_replace": 1}


def check(folder: Path, config: dict[str, Any], *, engines: int = 1, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    check_decode_layout(folder, DecodeSettings(**settings), engines=engines)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (SMOLLM2, {}),
        (SMOLLM2, {"tensor_parallel_size": 3, "data_parallel_size": 2}),
        ({**DENSE_FIRST, "first_k_dense_replace": 0, "mlp_only_layers": []}, {"tensor_parallel_size": 2}),
        (SMALL, {"tensor_parallel_size": 4}),  # pairs of workers hold the same key head
        (MOE, {"tensor_parallel_size": 2, "data_parallel_size": 3, "enable_expert_parallel": True}),
    ],
)
def test_layouts_that_work(config: dict[str, int], settings: dict[str, int], tmp_path: Path) -> None:
    check(tmp_path, config, **settings)


@pytest.mark.parametrize(
    ("config", "settings", "message", "hint"),
    [
        (SMOLLM2, {"tensor_parallel_size": 2}, "2 devices .* 9 heads, 3 key heads", "one of 1, 3$"),
        (SMALL, {"tensor_parallel_size": 8}, "8 devices", "one of 1, 2, 4$"),
        (MOE, {"tensor_parallel_size": 2}, "of width 64 and 36", "one of 1$"),
        (DENSE_FIRST, {"tensor_parallel_size": 2}, "of width 64 and 64 and 36", "one of 1$"),
        (
            {**MOE, "intermediate_size": 36, "mlp_only_layers": [0]},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "of width 64 and 36",
            "one of 1$",
        ),
        (SMALL, {"routed_experts": True}, "no experts to be returned", "--generator.routed-experts"),
        (
            SMALL,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "has no experts",
            "--generator.enable-expert-parallel",
        ),
        (MOE, {"enable_expert_parallel": True}, "a single device cannot be", "raise --generator.tensor-parallel-size"),
        (
            MOE,
            {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True},
            "8 devices .* 6 experts",
            "lower",
        ),
    ],
)
def test_layouts_that_do_not(
    config: dict[str, int], settings: dict[str, int], message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(tmp_path, config, **settings)
    assert re.search(hint, caught.value.hint)


def test_engines_have_no_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layout, "device_type", lambda: "cuda")
    monkeypatch.setattr(decode_layout, "gpus", lambda: 4)
    with pytest.raises(ConfigError, match="2 x 3 devices needs 6 GPUs, and there are 4"):
        check(tmp_path, SMALL, tensor_parallel_size=2, data_parallel_size=3)
    check(tmp_path, SMALL, engines=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="3 x an engine of 2 x 1 devices needs 6 GPUs, and there are 4") as caught:
        check(tmp_path, SMALL, engines=3, tensor_parallel_size=2)
    assert "--generator.replicas" in caught.value.hint


@pytest.mark.parametrize(("device", "requests"), [("cuda", 256), ("cpu", 64)])
def test_an_engine_decodes_more_requests_at_a_time_on_a_gpu(
    device: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_config, "device_type", lambda: device)
    assert generator_config.GeneratorConfig().max_num_seqs == requests


@pytest.mark.parametrize(
    ("device", "config", "settings", "message"),
    [
        ("cpu", SMALL, {"batch_invariant": True}, "--generator.batch-invariant needs GPUs"),
        ("cpu", SMALL, {"quantization": "fp8"}, ""),
        ("cpu", MOE, {"quantization": "fp8"}, "--generator.quantization fp8 of experts needs GPUs"),
        ("cpu", MOE, {"quantization": "int8"}, "--generator.quantization int8 of experts needs GPUs"),
        ("cuda", SMALL, {"quantization": "int8"}, "int8 is of experts, and the model has none"),
        ("cuda", SMALL, {"quantization": "fp8", "dtype": "float32"}, "computes in bfloat16, not in float32"),
        ("cuda", SMALL, {"quantization": "fp8", "batch_invariant": True}, ""),
        ("cuda", MOE, {"quantization": "int8"}, ""),
        ("cuda", {**SMALL, "model_type": "stablelm"}, {"max_loras": 1}, "vLLM serves no adapters of a 'stablelm'"),
        ("cuda", {**MOE, "model_type": "qwen3_moe"}, {"max_loras": 1}, ""),
    ],
)
def test_kernels_that_vllm_lacks_are_refused(
    device: str,
    config: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_layout, "device_type", lambda: device)
    monkeypatch.setattr(decode_layout, "gpus", lambda: 1)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check(tmp_path, config, **settings)
