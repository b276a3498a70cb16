"""This machine's device, number format and process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from forge_rl.engines.protocol import Dtype, TrainDtype
from forge_rl.errors import ConfigError

_SHORT = 0.25
"""Share of a machine's memory; while less than it is available, memory is short."""


def device_type() -> Literal["cuda", "cpu"]:
    """Return the kind of device that services run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """Count the GPUs of this machine."""
    return torch.cuda.device_count() if device_type() == "cuda" else 0


def local_device(rank: int) -> torch.device:
    """Return the device of a rank: on CUDA a GPU of its own."""
    return torch.device("cpu") if device_type() == "cpu" else torch.device("cuda", rank)


def device_threads(rank: int, name: str, most: int | None = None) -> ThreadPoolExecutor:
    """Make threads that work on a rank's device: by itself a new one makes its context on the first GPU.

    Args:
        name: prefix of their names.
        most: number of threads; as many as Python's own by default.
    """
    return ThreadPoolExecutor(most, name, _use_device, (local_device(rank),))


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_dtype(name: Dtype | TrainDtype) -> torch.dtype:
    """Resolve the number format to compute in; auto is bfloat16 on CUDA, float32 on CPU.

    The small models that a CPU trains lose most by rounding: SmolLM2-135M's logprobs differ by 0.03 on average between
    trainer and engine in bfloat16, by 1e-5 in float32. And a CPU without AVX-512 BF16 or AMX only emulates bfloat16.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device_type() == "cuda" else torch.float32


def slow_format(name: TrainDtype) -> str:
    """Return a warning if this CPU has no instructions for the trainer's format, else ""."""
    if device_type() == "cuda" or resolve_dtype(name) != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ""
    return (
        "this CPU has no instructions for bfloat16 (AVX-512 or AMX): training in it takes many times longer than in "
        "float32; drop --trainer.dtype bfloat16"
    )


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_bytes() -> int:
    """Return the memory of a GPU; 0 where there is none."""
    return int(torch.cuda.get_device_properties(0).total_memory) if device_type() == "cuda" else 0


def host_bytes() -> int:
    """Return the memory of this machine: its container's limit, if that is less."""
    limits = [limit for limit, _ in _container_memory()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_bytes() -> int:
    """Return the memory that processes of this machine, or its container, can still take."""
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _container_memory())])


def _container_memory() -> list[tuple[int, int]]:
    """Return limit and use of the container's memory, in bytes, by each version of control groups that sets one."""
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
    """Return memory that this process has freed but keeps, for other processes: on a CPU only where memory is short,
    since the next step has to ask for it again (0.3 s of SmolLM2-135M's 8)."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()
    elif available_bytes() < host_bytes() * _SHORT:
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)


def init_distributed(rank: int, world_size: int, address: str, port: int) -> None:
    """Join the trainer's process group: NCCL for CUDA, gloo for CPUs. A single rank needs no network.

    Rank 0 listens at the address alone, where torch by itself would on all of the machine's: who connects there is not
    asked for a name.

    Raises:
        ConfigError: the port cannot be bound or reached.
    """
    # gloo for what is in host memory: offloaded weights and gradients.
    backend = "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"
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
