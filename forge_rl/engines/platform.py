"""This machine's devices, dtypes, memory and process group."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forge_rl.engines.cpu import OneThreadGloo, release_heap
from forge_rl.engines.devices import device_type, hosts_devices
from forge_rl.engines.protocol import Dtype, TrainDtype
from forge_rl.errors import ConfigError
from forge_rl.system.memory import available_bytes, host_bytes


def local_device(place: int) -> torch.device:
    """Return the device of a rank by its place among those on this machine: on CUDA a GPU of its own."""
    return torch.device("cpu") if device_type() == "cpu" else torch.device("cuda", place)


def own_device() -> torch.device:
    """Return the device that `init_distributed` chose for this process, in the thread that called it."""
    return local_device(0 if device_type() == "cpu" else torch.cuda.current_device())


def device_threads(name: str, max_workers: int | None = None) -> ThreadPoolExecutor:
    """Create a thread pool on this process's device; a new thread would otherwise create its CUDA context on the first
    GPU.

    Args:
        name: prefix of the threads' names.
        max_workers: maximum number of threads; Python's default if None.
    """
    return ThreadPoolExecutor(max_workers, name, _use_device, (own_device(),))


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


def gpu_bytes() -> int:
    """Return the memory of the first GPU, or of the smallest one of the run's hosts, in bytes; 0 without a GPU."""
    if (devices := hosts_devices()) is not None:
        return devices.gpu_bytes
    return int(torch.cuda.get_device_properties(0).total_memory) if device_type() == "cuda" else 0


def release_memory() -> None:
    """Return freed memory to the device or, on a CPU short of memory, to the system."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()
    else:
        release_heap(available_bytes() / host_bytes())


def init_distributed(rank: int, world_size: int, address: str, port: int, *, place: int | None = None) -> None:
    """Join the trainer's process group: NCCL for CUDA, gloo for CPUs. A single rank needs no network.

    Rank 0 listens on this address only: torch would listen on all interfaces, without authentication.

    Args:
        place: the rank's place among those on its host; by default all are on one.

    Raises:
        ConfigError: the port cannot be bound or reached.
    """
    # gloo for offloaded weights and gradients, which are in host memory.
    backend = "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"
    # torch looks the class up by this name when it makes a group.
    distributed_c10d.ProcessGroupGloo = OneThreadGloo  # type: ignore[misc]
    if device_type() == "cuda":
        torch.cuda.set_device(local_device(rank if place is None else place))
    # In memory: no port is opened that others could reach.
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        # TCPStore takes over the socket, so Python must not close it.
        fd = _listen(address, port).detach() if rank == 0 else None
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, master_listen_fd=fd)
    except (OSError, RuntimeError, dist.DistError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"the trainer's ranks cannot meet at {address}:{port}: {cause}",
            hint="choose a free port with --trainer.port, or 0 to have one found",
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def open_store(address: str) -> tuple[dist.TCPStore, int]:
    """Serve a store at an address of this host only; return it with its port. Its clients set
    TORCHELASTIC_USE_AGENT_STORE to keep torch from opening another one."""
    server = _listen(address, 0)
    port: int = server.getsockname()[1]
    fd = server.detach()
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def _listen(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
