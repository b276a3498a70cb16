"""Measures this machine's rates in a few seconds, for predictions of a run's time on it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import torch

from forge_rl.engines.device_types import DEVICE_TYPES, DeviceType
from forge_rl.engines.devices import device_type
from forge_rl.engines.factory import thread_environment
from forge_rl.errors import ConfigError
from forge_rl.system.cpus import cpu_cores
from forge_rl.system.memory import host_bytes
from forge_rl.system.variables import handed_on

_ROWS = 1024
"""Tokens of the measured matrix multiplications, a typical row."""
_COPIED = 1 << 28
"""Bytes of the measured copy, larger than caches."""
_WHILE_S = 2.0
_DEADLINE_S = 120.0


def this_device(dim: int, hidden: int, dtype: torch.dtype) -> DeviceType:
    """Return this machine's device type; a CPU is measured, by a process with a trainer's threads.

    Args:
        dim: width of the model.
        hidden: hidden dimension of its feed-forward networks.
        dtype: dtype of the trainer's passes.

    Raises:
        ConfigError: its GPUs are not in `DEVICE_TYPES`, or the CPU cannot be measured.
    """
    if device_type() == "cuda":
        return _known_gpu()
    command = [sys.executable, "-m", __name__, str(dim), str(hidden), str(dtype).removeprefix("torch.")]
    # In a process of its own: the number of threads is read from the environment when torch is imported.
    env = handed_on(thread_environment(1))
    try:
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
        flops, bandwidth = map(float, process.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"this machine could not be measured: {error}", hint="plan with another --on") from error
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


def _measure(dim: int, hidden: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of a feed-forward network's matrices, and the bytes per second of a copy in memory."""
    with torch.inference_mode():
        wide, narrow = torch.randn(hidden, dim, dtype=dtype), torch.randn(dim, hidden, dtype=dtype)
        inputs = torch.randn(_ROWS, dim, dtype=dtype)
        source = torch.ones(_COPIED // 4)
        target = torch.empty_like(source)

        def network() -> None:
            torch.nn.functional.linear(torch.nn.functional.linear(inputs, wide), narrow)

        # Two products of 2 * rows * dim * hidden operations each; a copy reads and writes each byte.
        flops = 4.0 * _ROWS * dim * hidden / _mean_s(network)
        return flops, 2.0 * _COPIED / _mean_s(lambda: target.copy_(source))


def _mean_s(work: Callable[[], object]) -> float:
    """Return the mean seconds of a call over `_WHILE_S`, which averages out other load on the machine."""
    work()
    calls, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < _WHILE_S:
        work()
        calls += 1
    return elapsed_s / calls


def _known_gpu() -> DeviceType:
    properties = torch.cuda.get_device_properties(0)
    words = properties.name.upper().replace(" ", "")
    matches = [device for device in DEVICE_TYPES.values() if device.name.split("-")[0] in words]
    if not matches:
        raise ConfigError(
            f"the speed of {properties.name!r:.80} is not known",
            hint=f"name the most similar type with --on: {', '.join(DEVICE_TYPES)}",
        )
    # Types of one name come with several sizes of memory.
    return min(matches, key=lambda device: abs(device.memory - properties.total_memory))


if __name__ == "__main__":
    width, inner, name = sys.argv[1:]
    print(*_measure(int(width), int(inner), getattr(torch, name)))
