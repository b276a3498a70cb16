"""Measures this machine's rates in about a second, for predictions of a run's time on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from forge_rl.engines.device_types import DEVICE_TYPES, DeviceType
from forge_rl.engines.devices import device_type
from forge_rl.engines.platform import cpu_cores
from forge_rl.errors import ConfigError
from forge_rl.system.memory import host_bytes

_ROWS = 1024
"""Tokens of the measured matrix multiplications, a typical row."""
_COPIED = 1 << 28
"""Bytes of the measured copy, larger than caches."""
_REPEATS = 7


def this_device(dim: int, hidden: int, dtype: torch.dtype) -> DeviceType:
    """Return this machine's device type, which is measured on a CPU.

    Args:
        dim: width of the model.
        hidden: hidden dimension of its feed-forward networks.
        dtype: dtype of the trainer's passes.

    Raises:
        ConfigError: its GPUs are not in `DEVICE_TYPES`.
    """
    if device_type() == "cuda":
        return _known_gpu()
    with torch.inference_mode():
        wide, narrow = torch.randn(hidden, dim, dtype=dtype), torch.randn(dim, hidden, dtype=dtype)
        inputs = torch.randn(_ROWS, dim, dtype=dtype)

        def network() -> None:
            torch.nn.functional.linear(torch.nn.functional.linear(inputs, wide), narrow)

        source = torch.ones(_COPIED // 4)
        target = torch.empty_like(source)
        flops = 4.0 * _ROWS * dim * hidden / _median_s(network)
        bandwidth = 2.0 * _COPIED / _median_s(lambda: target.copy_(source))
    return DeviceType(
        name=f"this CPU, {cpu_cores()} cores",
        memory=host_bytes(),
        flops=flops,
        bandwidth=bandwidth,
        link=bandwidth,
        network=bandwidth,
        host_link=bandwidth,
        host_memory=host_bytes(),
        source="measured now",
    )


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _known_gpu() -> DeviceType:
    properties = torch.cuda.get_device_properties(0)
    words = properties.name.upper().replace(" ", "")
    fitting = [each for each in DEVICE_TYPES.values() if each.name.split("-")[0] in words]
    if not fitting:
        raise ConfigError(
            f"the speed of {properties.name!r:.80} is not known",
            hint=f"name the most similar type with --on: {', '.join(DEVICE_TYPES)}",
        )
    return min(fitting, key=lambda each: abs(each.memory - properties.total_memory))
