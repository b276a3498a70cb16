"""This machine's device, number format and process group."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from forge_rl.engines.protocol import Dtype, TrainDtype
from forge_rl.errors import ConfigError


def device_type() -> Literal["cuda", "cpu"]:
    """Return the kind of device that services run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """Count the GPUs of this machine."""
    return torch.cuda.device_count() if device_type() == "cuda" else 0


def local_device(rank: int) -> torch.device:
    """Return the device of a rank: on CUDA a GPU of its own."""
    return torch.device("cpu") if device_type() == "cpu" else torch.device("cuda", rank)


def resolve_dtype(name: Dtype | TrainDtype) -> torch.dtype:
    """Resolve the number format to compute in; auto is bfloat16 on CUDA, float32 on CPU.

    The small models that a CPU trains lose most by rounding: SmolLM2-135M's logprobs differ by 0.03 on average between
    trainer and engine in bfloat16, by 1e-5 in float32. And a CPU without AVX-512 BF16 or AMX only emulates bfloat16.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device_type() == "cuda" else torch.float32


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Return the memory of a GPU, or of this machine: its container's limit, if that is less."""
    if device_type() == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)


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
