"""Predicts the seconds of publishing a version and loading it into engines, part by part, from measured costs.

A part's seconds are a fixed time, plus a time for each tensor, for each batch of equally shaped tensors that share a
device's launches, and for its bytes: call_s + tensors * tensor_s + batches * batch_s + bytes / rate. An engine's
loaders take the part of a stack of experts that lies in one bucket as one tensor. Bytes count as passes through memory
or a link at the device's rate, so that costs measured on one machine serve on another; calls and tensors cost time of
Python and of kernel launches, which differs less between machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from forge_rl.engines.device_types import DEVICE_TYPES, DeviceType
from forge_rl.forecast.roofline import GPU_EFFICIENCY, Efficiency, Times
from forge_rl.system.folders import write_whole
from forge_rl.weights.fingerprints import CHUNK_WORDS
from forge_rl.weights.manifest import BUCKET_BYTES

PUBLISH = ("reserve", "calls", "gather", "write", "merge", "commit", "probe")
"""Parts of a publish, as `Trainer.publish_s` has them."""
LOAD = ("calls", "wait", "pause", "load", "fingerprint", "finish")
"""Stages of a load, as `Generator.load_s` has them."""
PARTS = (*(f"publish_{name}" for name in PUBLISH), *(f"load_{name}" for name in LOAD))
_OF_RANK = ("publish_gather", "publish_write", "publish_merge")
"""Parts in which each rank of the trainer handles its own slices."""
_OF_ENGINE = ("load_load", "load_fingerprint")
"""Stages in which each device of an engine handles its own slices."""


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Cost of one part: `PartCost(call_s=0.01, tensor_s=1e-4).seconds(...)`."""

    call_s: float = 0.0
    """Seconds of a version without a tensor."""
    tensor_s: float = 0.0
    """Seconds of each tensor, independent of its size."""
    batch_s: float = 0.0
    """Seconds of each batch of tensors of one shape that share a device's launches."""
    memory: float = 0.0
    """Number of times that each byte passes through the device's memory."""
    host_link: float = 0.0
    """Number of times that each byte passes between the device and host memory."""
    peer_link: float = 0.0
    """Number of times that each byte passes between devices."""


@dataclass(frozen=True, kw_only=True)
class VersionCosts:
    """Costs of each of `PARTS` on one kind of device; a part that is missing costs nothing."""

    parts: Mapping[str, PartCost]
    source: str
    """Command, commit, date and machine of the measurement."""
    shared: bool = False
    """Whether all ranks and engines share one memory, a CPU's."""

    def write(self, path: Path) -> None:
        """Write a file for `read`."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> VersionCosts:
        """Read what `write` wrote."""
        values = json.loads(path.read_text())
        parts = {name: PartCost(**costs) for name, costs in values.pop("parts").items()}
        return cls(parts=parts, **values)


CPU_COSTS = VersionCosts.read(Path(__file__).with_name("version_costs.json"))
"""Fitted by benchmarks/weights_model.py, which writes the file."""
FINGERPRINT_PASSES = 47.0
"""Bytes that a fingerprint's operations on a GPU read and write, divided by the tensor's bytes."""
_BATCH_BYTES = 8 * CHUNK_WORDS
"""Size at which a batch is full."""
_LOADED_TENSORS, _LOADED_BYTES = 272, 269_030_016
"""Tensors and bytes of SmolLM2-135M in bfloat16, the version whose load was measured on a GPU, each tensor a batch of
its own."""
_LOAD_S, _FINGERPRINT_S = 0.1643, 0.0828
"""Seconds of the stages `load` and `fingerprint` of that load."""


def _gpu_costs() -> VersionCosts:
    """Return a GPU's costs: calls as on a CPU, tensors as measured on one H100, and bytes as passes over its links and
    memory."""
    # How often bytes pass through a CPU's memory says nothing about a GPU's: those passes are set below.
    parts = {name: replace(cost, memory=0.0) for name, cost in CPU_COSTS.parts.items()}
    device, use = DEVICE_TYPES["H100-80G"], GPU_EFFICIENCY
    copying_s = _LOADED_BYTES / (device.host_link * use.links)
    passes_s = FINGERPRINT_PASSES * _LOADED_BYTES / (device.bandwidth * use.memory)
    tensor_s = parts["load_fingerprint"].tensor_s
    # What is left of the measured seconds after bytes and Python's work per tensor is the cost of the launches.
    batch_s = (_FINGERPRINT_S - passes_s) / _LOADED_TENSORS - tensor_s
    fingerprint = PartCost(tensor_s=tensor_s, batch_s=batch_s, memory=FINGERPRINT_PASSES)
    parts["publish_write"] = replace(fingerprint, host_link=1.0, tensor_s=parts["publish_write"].tensor_s)
    parts["publish_probe"] = replace(parts["publish_probe"], memory=1.0, peer_link=1.0)
    parts["load_load"] = PartCost(tensor_s=(_LOAD_S - copying_s) / _LOADED_TENSORS, host_link=1.0)
    parts["load_fingerprint"] = fingerprint
    source = (
        "predicted: tensors of load and batches of write and fingerprint as on one H100 (python -m benchmarks.gpu, "
        f"commit 6b1d36b6, 2026-11-26), bytes at the data sheet's rates, the rest from {CPU_COSTS.source}"
    )
    return VersionCosts(parts=parts, source=source)


GPU_COSTS = _gpu_costs()
"""Costs on GPUs. Trainers and engines fingerprint by the same kernels, so a fingerprint costs both the same."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version, and how it is split over ranks and engines; where these share one memory, a share is their sum."""

    size: float
    """Bytes."""
    tensors: int
    stacked: int = 0
    """Tensors that the trainer's model keeps in stacks, such as experts', of which each rank has some."""
    stacks: int = 0
    """Number of stacks as which engines load these tensors."""
    shapes: int = 1
    """Number of distinct shapes of its tensors."""
    shards: int = 1
    """Ranks among which the model is split."""
    rank_share: float = 1.0
    """Share of the bytes that a rank writes."""
    engine_share: float = 1.0
    """Share of the bytes that a device of an engine reads."""
    hosts: int = 1
    per_host: int = 1
    """Devices of a host."""


@dataclass(frozen=True, kw_only=True)
class VersionTimes(Times):
    """Predicted seconds of a publish and a load by part, as in `PARTS`, and again by cause."""

    causes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of calls, of tensors and of bytes."""

    def phase_parts(self, prefix: str) -> dict[str, float]:
        """Return the parts of a phase, "publish" or "load", the longest first."""
        parts = {name.removeprefix(f"{prefix}_"): s for name, s in self.parts.items() if name.startswith(f"{prefix}_")}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))


def version_times(costs: VersionCosts, version: Version, device: DeviceType, use: Efficiency) -> VersionTimes:
    """Predict the seconds of publishing a version from the trainer's ranks and loading it into all engines."""
    parts: dict[str, float] = {}
    causes = {"calls": 0.0, "tensors": 0.0, "bytes": 0.0}
    for name, cost in costs.parts.items():
        share, tensors, plain = 1.0, version.tensors, version.tensors - version.stacked
        if name == "load_load":
            # A stack that crosses the end of a bucket is loaded in parts, so each bucket may add one.
            tensors = min(tensors, plain + version.stacks + math.floor(version.size / BUCKET_BYTES))
        if name in _OF_RANK:
            share, tensors = version.rank_share, plain + math.ceil(version.stacked / version.shards)
        elif name == "publish_probe":
            tensors = plain  # a forward pass, in which a stack is one tensor
        elif name in _OF_ENGINE:
            share = version.engine_share
        # At least one batch for each shape, and one more whenever one is full; never more than there are tensors.
        batches = min(tensors, version.shapes + math.floor(share * version.size / _BATCH_BYTES))
        byte_s = cost.memory / (device.bandwidth * use.memory) + cost.host_link / (device.host_link * use.links)
        if version.shards > 1:
            byte_s += cost.peer_link / (device.link * use.links)
        seconds = {
            "calls": cost.call_s,
            "tensors": cost.tensor_s * tensors + cost.batch_s * batches,
            "bytes": share * version.size * byte_s,
        }
        parts[name] = sum(seconds.values())
        causes = {cause: causes[cause] + seconds[cause] for cause in causes}
    if version.hosts > 1:
        # Each host pulls a version once, over the links of all its devices.
        parts["load_network"] = version.size / (device.network * use.links * version.per_host)
        causes["bytes"] += parts["load_network"]
    return VersionTimes(parts=parts, causes=causes)
