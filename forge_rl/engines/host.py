"""Devices and memory of a host, which a run must know before it places services there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge_rl.engines.devices import device_type, gpus
from forge_rl.engines.platform import gpu_bytes
from forge_rl.runtime.children import visible_gpu
from forge_rl.runtime.processes import process_space
from forge_rl.system.cpus import cpu_cores
from forge_rl.system.memory import host_bytes


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """Devices and memory of a host."""

    kind: Literal["cuda", "cpu"]
    """Kind of device that services run on there."""
    gpus: tuple[str, ...]
    """Its GPUs, by their names for CUDA_VISIBLE_DEVICES there."""
    gpu_bytes: int
    """Memory of its first GPU; 0 without any."""
    cores: int
    """CPU cores that a run may use."""
    memory_bytes: int
    space: str
    """Identifies the machine's boot and PID namespace: simulated hosts that are processes of one machine share it."""

    @staticmethod
    def of_this_host() -> HostInfo:
        """Measure this host; with GPUs, this loads torch."""
        return HostInfo(
            kind=device_type(),
            gpus=tuple(visible_gpu(index) for index in range(gpus())),
            gpu_bytes=gpu_bytes(),
            cores=cpu_cores(),
            memory_bytes=host_bytes(),
            space=process_space(),
        )

    def describe(self) -> str:
        """Describe the host in a few words."""
        devices = f"{len(self.gpus)} GPUs of {self.gpu_bytes / 2**30:.0f} GiB, " if self.gpus else ""
        return f"{devices}{self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB"
