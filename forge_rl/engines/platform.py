"""This machine's devices, dtypes, memory and process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forge_rl.engines.devices import device_type
from forge_rl.engines.protocol import Dtype, TrainDtype
from forge_rl.errors import ConfigError

_SHORT = 0.25
"""Memory is short while less than this share of it is available."""


def local_device(rank: int) -> torch.device:
    """Return the device of a rank: on CUDA a GPU of its own."""
    return torch.device("cpu") if device_type() == "cpu" else torch.device("cuda", rank)


def device_threads(rank: int, name: str, most: int | None = None) -> ThreadPoolExecutor:
    """Create a thread pool on a rank's device; by default a new thread creates its CUDA context on the first GPU.

    Args:
        rank: rank on this machine.
        name: prefix of the threads' names.
        most: maximum number of threads; Python's default if None.
    """
    return ThreadPoolExecutor(most, name, _use_device, (local_device(rank),))


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_dtype(name: Dtype | TrainDtype) -> torch.dtype:
    """Resolve the dtype to compute in; auto is bfloat16 on CUDA, float32 on CPU.

    Small models, the ones trained on CPUs, suffer most from rounding: logprobs of SmolLM2-135M differ between trainer
    and engine by 0.03 on average in bfloat16, by 1e-5 in float32. CPUs without AVX-512 BF16 or AMX emulate bfloat16.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device_type() == "cuda" else torch.float32


def slow_format(name: TrainDtype) -> str:
    """Return a warning if this CPU has no instructions for the trainer's dtype, else ""."""
    if device_type() == "cuda" or resolve_dtype(name) != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ""
    return (
        "this CPU has no instructions for bfloat16 (AVX-512 or AMX): training in it is many times slower than in "
        "float32; drop --trainer.dtype bfloat16"
    )


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_bytes() -> int:
    """Return the memory of the first GPU in bytes; 0 without a GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory) if device_type() == "cuda" else 0


def host_bytes() -> int:
    """Return this machine's memory in bytes, or its container's limit if lower."""
    limits = [limit for limit, _ in _container_memory()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_bytes() -> int:
    """Return the bytes of memory still available on this machine or in its container."""
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _container_memory())])


def _container_memory() -> list[tuple[int, int]]:
    """Return limit and use of the container's memory, in bytes, for each cgroup version that sets a limit."""
    found = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            folder = Path("/sys/fs/cgroup")
            found.append((int((folder / limit).read_text()), int((folder / used).read_text())))
    return found


def release_memory() -> None:
    """Return freed memory to the device or, on CPU, to the system: there only if memory is short, as the next step must
    allocate it again (0.3 of 8 s for SmolLM2-135M)."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()
    elif available_bytes() < host_bytes() * _SHORT:
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)


class _OneThreadGloo(dist.ProcessGroupGloo):
    """A gloo group with one thread.

    torch 2.13 starts two, and both assign `ProcessGroupStatus::lastStartedWorkName`, a string, without a lock
    (`ProcessGroupGloo::runLoop`): a double free, which AddressSanitizer reports and which crashed one of some 50 runs
    of two ranks. `torch.distributed` passes on no options for gloo, hence a class.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = self._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._threads = 1
        options._timeout = timeout
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = [self.create_device(interface=name) for name in names.split(",") if name] or [
            self.create_default_device()
        ]
        super().__init__(store, rank, size, options)


def init_distributed(rank: int, world_size: int, address: str, port: int) -> None:
    """Join the trainer's process group: NCCL for CUDA, gloo for CPUs. A single rank needs no network.

    Rank 0 listens on this address only: torch would listen on all interfaces, without authentication.

    Raises:
        ConfigError: the port cannot be bound or reached.
    """
    # gloo for offloaded weights and gradients, which are in host memory.
    backend = "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"
    distributed_c10d.ProcessGroupGloo = _OneThreadGloo  # type: ignore[misc]
    if device_type() == "cuda":
        torch.cuda.set_device(local_device(rank))
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        fd = socket.create_server((address, port)).detach() if rank == 0 else None
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, master_listen_fd=fd)
    except (OSError, RuntimeError, dist.DistError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"the trainer's ranks cannot meet at {address}:{port}: {cause}",
            hint="choose a free port with --trainer.port, or 0 to have one found",
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
