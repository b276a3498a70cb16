"""Engines that round each version's weights: what vLLM is asked for, and what of a version is then attested."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.protocol import DecodeSettings, Quantization
from forge_rl.run.start.checks import rounded_rollouts
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import TensorEntry
from tests.fakes import make_model
from tests.staged_engines import stage

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some


def vllm_config(folder: Path, quantization: Quantization) -> Any:
    from forge_rl.engines.vllm import register
    from forge_rl.engines.vllm.arguments import engine_arguments

    register()
    make_model(folder, "qwen3_moe")
    settings = DecodeSettings(dtype="bfloat16", max_model_len=64, quantization=quantization)
    arguments = engine_arguments(folder, settings, 0)
    arguments.skip_tokenizer_init = True
    return arguments.create_engine_config()


@pytest.mark.parametrize(
    ("quantization", "linear", "experts"),
    [("fp8", "fp8_per_channel_static", "fp8_per_channel_static"), ("int8", "None", "int8_per_channel_static")],
)
def test_vllm_is_asked_to_round_linear_layers_and_experts(
    quantization: Quantization, linear: str, experts: str, tmp_path: Path
):
    config = vllm_config(tmp_path, quantization)
    assert (str(config.quant_config.args.linear), str(config.quant_config.args.moe)) == (linear, experts)
    assert vllm_config(tmp_path, "none").quant_config is None


@dataclass(frozen=True)
class Given:
    """A bucket of one tensor, as a transport yields it."""

    values: torch.Tensor

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        shape = tuple(self.values.shape)
        return (TensorEntry(name="proj.weight", shape=shape, dtype="bfloat16", bucket="1/0", offset=0),)

    @contextlib.contextmanager
    def open(self) -> Iterator[dict[str, torch.Tensor]]:
        yield {"proj.weight": self.values}


def test_each_version_is_rounded_again_and_attested_as_it_was_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from forge_rl.engines.vllm import cpu
    from forge_rl.engines.vllm.transfer import BucketTransferEngine, BucketUpdateInfo

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = ReplicatedLinear(
                32,
                48,
                bias=False,
                params_dtype=torch.bfloat16,
                quant_config=config.quant_config,
                prefix="proj",
                disable_tp=True,
            )

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            for _, values in weights:
                self.proj.weight.weight_loader(self.proj.weight, values)
            return {"proj.weight"}

    config = vllm_config(tmp_path, "fp8")
    config.quant_config.packed_modules_mapping = {}
    monkeypatch.setattr(cpu, "patch", lambda model: None)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    torch.manual_seed(0)
    with set_current_vllm_config(config):
        model = Model()
        record_metadata_for_reloading(model)
        model.load_weights(iter([("proj.weight", torch.randn(48, 32).bfloat16())]))
        engine = BucketTransferEngine(SimpleNamespace(), config, torch.device("cpu"), model)
        for version in (1, 2):
            values = torch.randn(48, 32).bfloat16()
            engine.start_weight_update()
            engine.receive_weights(BucketUpdateInfo(version=version, bucket=pickle.dumps(Given(values))))
            engine.finish_weight_update()
            report = engine.report()
            scale = values.double().abs().amax(1, keepdim=True) / 448  # the largest E4M3
            live = model.proj.weight.t()
            assert live.dtype == torch.float8_e4m3fn
            error = (live.double() * scale - values.double()).abs()
            assert 0 < error.max() <= values.double().abs().max() * 2**-4, "E4M3 has three bits of mantissa"
            assert torch.allclose(model.proj.weight_scale.double(), scale)
            inputs = torch.randn(5, 32).bfloat16()
            input_scale = inputs.double().abs().amax(1, keepdim=True) / 448
            rounded = (inputs / input_scale).to(torch.float8_e4m3fn).double() * input_scale
            product = rounded @ (live.double() * scale).t()
            torch.testing.assert_close(model.proj(inputs)[0].double(), product, rtol=2**-7, atol=2**-7)
            (shard,) = report.shards
            assert (report.version, report.repacked, report.bytes) == (version, ["proj.weight"], values.nbytes)
            assert report.quantized_bytes == values.numel()
            assert shard.fingerprint == fingerprint(values, tuple(values.shape), shard.tensor_slice)


@pytest.mark.parametrize(("quantization", "expected"), [("fp8", {"generator/quantized_bytes": 4096.0}), ("none", {})])
async def test_bytes_of_8_bit_weights_are_summed_over_engines(
    quantization: Quantization, expected: dict[str, float], tmp_path: Path, nothing_left: None
):
    async with stage(tmp_path, quantization=quantization) as on:
        assert on.generator.pop_metrics() == {}, "nothing is loaded"
        on.orders.tell(1, quantized_bytes=4096)
        await on.load(1)
        metrics = on.generator.pop_metrics()
        assert metrics == expected | {"load/calls_s": metrics["load/calls_s"]}


@pytest.mark.parametrize(
    ("quantization", "preset", "warns"), [("none", "", False), ("fp8", "", True), ("fp8", "tis", False)]
)
def test_a_loss_that_does_not_correct_for_rounded_weights_is_told(quantization: str, preset: str, warns: bool):
    from forge_rl.algorithms.correction import Correction

    loss = ClippedSurrogate(correction=Correction.presets[preset]) if preset else ClippedSurrogate()
    assert ("correction=tis" in rounded_rollouts(quantization, loss)) == warns
