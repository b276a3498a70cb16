"""Predicted publishes and loads: units worked by hand, fits to staged sizes, and the version that a GPU loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.weights_model import MeasuredVersion, costs_of, fit_cost, predictions
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.device_types import DEVICE_TYPES
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.plan import MemoryTrace, plan_training
from forge_rl.forecast.roofline import CPU_EFFICIENCY, GPU_EFFICIENCY
from forge_rl.forecast.show import version_lines
from forge_rl.forecast.transfer import (
    CPU_COSTS,
    FINGERPRINT_PASSES,
    GPU_COSTS,
    PARTS,
    PartCost,
    Version,
    VersionCosts,
    version_times,
)
from forge_rl.weights.fingerprints import _by_torch, fingerprint
from forge_rl.weights.slices import TensorSlice
from tests.test_forecast import GPT_OSS_20B, QWEN3_8B, QWEN3_30B, written
from tools.figures import FOLDER

H100 = DEVICE_TYPES["H100-80G"]
SIZES = [(11, 39e6), (20, 25e6), (542, 72e6), (272, 538e6), (110, 742e6), (290, 2040e6)]
"""Tensors and bytes of staged versions."""


def test_seconds_are_of_calls_tensors_and_bytes_over_each_rate() -> None:
    parts = {
        "publish_write": PartCost(call_s=0.5, tensor_s=1e-3, batch_s=1e-2, host_link=1.0),
        "publish_probe": PartCost(tensor_s=1e-2, peer_link=2.0),
        "load_load": PartCost(call_s=0.25, tensor_s=2e-3, memory=3.0),
        "load_calls": PartCost(tensor_s=1e-4, memory=1.0),
    }
    version = Version(
        size=8e9, tensors=1000, stacked=800, stacks=5, shapes=7, shards=4, rank_share=0.25, engine_share=0.5
    )
    times = version_times(VersionCosts(parts=parts, source=""), version, H100, GPU_EFFICIENCY)
    host_link, link, memory = 64e9 * 0.7, 450e9 * 0.7, 3350e9 * 0.7
    assert times.parts == pytest.approx(
        {
            "publish_write": 0.5 + 1e-3 * (200 + 200) + 1e-2 * (7 + 59) + 2e9 / host_link,
            "publish_probe": 1e-2 * 200 + 2 * 8e9 / link,
            "load_load": 0.25 + 2e-3 * (200 + 5 + 119) + 3 * 4e9 / memory,
            "load_calls": 1e-4 * 1000 + 8e9 / memory,
        }
    )
    assert times.causes == pytest.approx(
        {
            "calls": 0.75,
            "tensors": 0.4 + 0.66 + 2 + 0.648 + 0.1,
            "bytes": 2e9 / host_link + 16e9 / link + 20e9 / memory,
        }
    )
    assert sum(times.causes.values()) == pytest.approx(times.seconds)
    assert list(times.phase_parts("publish")) == ["probe", "write"], "the longest first"
    far = version_times(
        VersionCosts(parts={}, source=""), Version(size=8e9, tensors=1, hosts=2, per_host=8), H100, GPU_EFFICIENCY
    )
    assert far.parts == {"load_network": pytest.approx(8e9 / (8 * 50e9 * 0.7))}
    alone = version_times(VersionCosts(parts=parts, source=""), Version(size=8e9, tensors=1), H100, GPU_EFFICIENCY)
    assert alone.parts["publish_probe"] == pytest.approx(1e-2), "one rank has no peers"


def test_a_fit_finds_the_costs_that_sizes_were_made_with() -> None:
    tensors, size = map(list, zip(*SIZES, strict=True))
    seconds = [0.02 + 4e-4 * count + total / 2e9 for count, total in SIZES]
    assert fit_cost(tensors, size, seconds) == pytest.approx((0.02, 4e-4, 0.5e-9), rel=1e-6)
    saving_s = [1.0 + 1e-3 * count - total / 1e10 for count, total in SIZES]
    call_s, tensor_s, byte_s = fit_cost(tensors, size, saving_s)
    assert byte_s == 0, "bytes save no time"
    assert call_s > 0
    assert tensor_s > 0
    assert fit_cost(tensors[:1], size[:1], [2.0]) != (0.0, 0.0, 0.0), "one size is met by any column"


def test_each_size_is_predicted_from_the_others() -> None:
    random, bandwidth = np.random.default_rng(0), 20e9
    part_costs = {part: PartCost(call_s=1e-3 * n, tensor_s=2e-5 * n, memory=0.5 * n) for n, part in enumerate(PARTS, 1)}
    sizes = [
        MeasuredVersion(
            size=size,
            tensors=tensors,
            parts={
                part: random.uniform(0.93, 1.07)
                * (cost.call_s + cost.tensor_s * tensors + cost.memory * size / bandwidth)
                for part, cost in part_costs.items()
            },
        )
        for tensors, size in SIZES
    ]
    for index, size in enumerate(sizes):
        other_sizes = sizes[:index] + sizes[index + 1 :]
        for phase, seconds in predictions(other_sizes, size, bandwidth).items():
            assert 0.75 <= seconds / size.seconds(phase) <= 1.25, (index, phase)
    fit = costs_of(sizes, bandwidth, "")
    assert fit.shared
    assert fit.parts["load_load"].memory == pytest.approx(part_costs["load_load"].memory, rel=0.25)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    CPU_COSTS.write(tmp_path / "costs.json")
    assert VersionCosts.read(tmp_path / "costs.json") == CPU_COSTS
    assert tuple(CPU_COSTS.parts) == PARTS == tuple(GPU_COSTS.parts)


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket is not torch.ops.aten.zeros:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, outputs)) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return outputs


def test_passes_of_a_fingerprint_on_a_gpu_are_counted() -> None:
    """The same operations run on any device but a CPU, which has loops of its own."""
    values = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    expected = fingerprint(values, values.shape)
    with _Traffic() as traffic:
        total = _by_torch([values], values.shape, TensorSlice.whole(values.shape))
    assert int(total) % (1 << 64) == expected
    assert traffic.bytes / values.nbytes == pytest.approx(FINGERPRINT_PASSES, rel=0.01)


def test_the_version_that_a_gpu_loaded_is_predicted() -> None:
    """SmolLM2-135M in bfloat16 was published from host memory and loaded in 0.3526 s, without a probe, with a batch of
    launches for each tensor."""
    version = Version(size=269_030_016, tensors=272, shapes=272)
    times = version_times(GPU_COSTS, version, H100, GPU_EFFICIENCY)
    figures = _part(json.loads((FOLDER / "gpu.json").read_text()), "serving_engine")
    assert times.parts["load_load"] == pytest.approx(figures["load_load_s"], rel=0.01)
    assert times.parts["load_fingerprint"] == pytest.approx(figures["load_fingerprint_s"], rel=0.01)
    predicted = times.seconds - times.parts["publish_probe"]
    assert predicted == pytest.approx(figures["publish_and_load_again_s"], rel=0.25)


def _part(report: Mapping[str, Any], name: str) -> dict[str, float]:
    (figures,) = (part["figures"] for part in report["parts"] if part["part"] == name)
    return dict(figures)


@pytest.mark.parametrize(
    ("shape", "tensors", "stacked", "stacks", "shapes"),
    [
        (QWEN3_8B | {"num_hidden_layers": 2}, 2 * 11 + 3, 0, 0, 7),
        (QWEN3_8B | {"num_hidden_layers": 2, "tie_word_embeddings": True}, 2 * 11 + 2, 0, 0, 7),
        (QWEN3_30B | {"num_hidden_layers": 2}, 2 * (9 + 3 * 128) + 3, 2 * 3 * 128, 2 * 3, 9),
        (GPT_OSS_20B | {"num_hidden_layers": 2}, 2 * (8 + 1 + 2 + 2 + 4) + 3, 0, 0, 13),
    ],
    ids=["dense", "tied", "experts", "experts in one tensor"],
)
def test_tensors_of_a_version_are_those_of_the_files(
    shape: dict[str, object], tensors: int, stacked: int, stacks: int, shapes: int, tmp_path: Path
) -> None:
    traces: dict[tuple[object, ...], MemoryTrace] = {}
    a = read_architecture(written(tmp_path, shape))
    plan_training(a, TrainSettings(dtype="bfloat16", seq_len=128), ranks=1, reference=False, traces=traces)
    (trace,) = traces.values()
    assert (trace.tensors, trace.stacked, trace.stacks, trace.shapes) == (tensors, stacked, stacks, shapes)


def test_a_plan_prints_both_phases_by_part_and_by_cause() -> None:
    version = Version(
        size=61e9, tensors=18867, stacked=18432, stacks=144, shards=8, rank_share=1 / 8, engine_share=1 / 8
    )
    publish, load, causes = version_lines(version_times(GPU_COSTS, version, H100, GPU_EFFICIENCY))
    assert publish.startswith("publish ")
    assert ": write " in publish
    assert load.startswith("load ")
    assert ": load " in load
    assert causes.index("calls") < causes.index("tensors") < causes.index("bytes")
    on_cpu = version_times(CPU_COSTS, Version(size=1e6, tensors=1), H100, CPU_EFFICIENCY)
    lines = list(version_lines(on_cpu))
    assert not any(" 0.000" in line for line in lines[:2]), "parts that round to 0 are left out"


def test_a_cpu_plan_predicts_from_the_figures_of_the_benchmark() -> None:
    report = json.loads((Path(__file__).parents[1] / "docs" / "figures" / "weights_model.json").read_text())
    results, version = report["results"], {"command": report["command"], "commit": report["commit"]}
    for name, cost in CPU_COSTS.parts.items():
        columns = results[f"{name}_call_ms"] / 1e3, results[f"{name}_tensor_us"] / 1e6, results[f"{name}_passes"]
        assert (cost.call_s, cost.tensor_s, cost.memory) == pytest.approx(columns)
    assert all(text in CPU_COSTS.source for text in version.values())
