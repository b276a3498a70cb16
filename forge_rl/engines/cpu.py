"""Support for ranks on CPUs: a heap that keeps its blocks, and a process group without a race."""

from __future__ import annotations

import contextlib
import ctypes
import os
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from forge_rl.system.allocator import allocator_environment

_SHORT = 0.25
"""Memory is short while less than this share is available."""

MAPPED_BYTES = 16 << 20
"""Size from which a trainer's tensors on CPU are mapped outside of the heap; see `HEAP_ENVIRONMENT`."""

HEAP_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MAPPED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(64 << 20),
} | allocator_environment()
"""Environment variables of a trainer's heap on CPU: tcmalloc where the machine has it, and glibc's, which keeps freed
blocks of less than `MAPPED_BYTES`.

Every step frees and allocates blocks of the same sizes. By default glibc returns most blocks to the kernel and gets
them back zeroed, page by page; these variables keep them until `release_heap`. An update of SmolLM2-135M on a row of
1,024 tokens in float32 takes a sixth less time, and its peak is 0.2 GiB higher, which the plan counts
(`TrainMemory.heap`). Larger blocks are mapped one by one, because gaps between them would be large: with all blocks in
the heap, the peak of a row of 8,192 tokens was 5.0 GiB instead of 3.8, and its time 3% less.

glibc 2.36 reuses a freed aligned block, as torch's are, only for a smaller one. With tcmalloc, four updates of
adapters took 1.20 GiB in place of 1.83, an update on a row of 4,096 tokens 3.32 GiB in place of 3.83, and updates of
`benchmarks.grpo_step` 5.9 s in place of 6.8 (float32) and 3.6 in place of 4.7 (bfloat16).
"""


def release_heap(available: float) -> None:
    """Return freed memory to the system if memory is short. The next step must then allocate it again, which takes 0.3
    of 8 s for SmolLM2-135M.

    Args:
        available: share of memory that is available.
    """
    if available < _SHORT:
        trim_heap()


def trim_heap() -> None:
    """Return freed heap blocks to the system, including blocks below others that are in use."""
    libraries = ctypes.CDLL(None)
    if hasattr(libraries, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc's
        libraries.MallocExtension_ReleaseFreeMemory()
    with contextlib.suppress(AttributeError):  # a C library without it
        libraries.malloc_trim(0)


def meet_over(interface: str, *, nccl: bool) -> None:
    """Make gloo and, with `nccl`, NCCL use one network interface; call before the process group is created."""
    OneThreadGloo.interface = interface
    if nccl and os.environ.get("NCCL_SOCKET_IFNAME") != interface:  # only if it changes: other threads read it
        os.environ["NCCL_SOCKET_IFNAME"] = interface


def chosen_interfaces() -> str:
    """Return the interfaces that this host's environment names for gloo or NCCL, other than loopback."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", ""), os.environ.get("NCCL_SOCKET_IFNAME", "")
    return next((interface for interface in interfaces if interface not in ("", "lo")), "")


class OneThreadGloo(dist.ProcessGroupGloo):
    """A gloo group with one thread.

    torch 2.13 starts two threads, and both assign `ProcessGroupStatus::lastStartedWorkName`, a string, without a lock
    (`ProcessGroupGloo::runLoop`). The double free shows in AddressSanitizer, and crashed one of some 50 runs of two
    ranks. `torch.distributed` passes on no options for gloo, hence a class.
    """

    interface: ClassVar[str] = ""
    """Network interface to talk over; by default those in GLOO_SOCKET_IFNAME."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = self._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._threads = 1
        options._timeout = timeout
        names = self.interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
        # As torch reads the variable: several interfaces, separated by commas.
        options._devices = [self.create_device(interface=name) for name in names.split(",") if name] or [
            self.create_default_device()
        ]
        super().__init__(store, rank, size, options)
