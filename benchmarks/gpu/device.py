"""Device benchmarks: copies, matmuls, and attention over rows of many lengths."""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

_MIB = 256


def median_s(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the median seconds of work on the device, after two warm-up calls."""
    seconds = []
    for repeat in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat > 1:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def copies() -> dict[str, float]:
    """Measure copies of 256 MiB between host and device in GB/s, by kind of host memory."""
    size = _MIB << 20
    device_tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
    rates = {}

    def both(name: str, host_tensor: torch.Tensor, *, writable: bool = True) -> None:
        rates[f"{name}_to_device_gb_s"] = (
            size / 1e9 / median_s(lambda: device_tensor.copy_(host_tensor, non_blocking=True))
        )
        if writable:
            rates[f"{name}_to_host_gb_s"] = (
                size / 1e9 / median_s(lambda: host_tensor.copy_(device_tensor, non_blocking=True))
            )

    both("pageable", torch.zeros(size, dtype=torch.uint8))
    both("pinned", torch.zeros(size, dtype=torch.uint8).pin_memory())
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        runtime = torch.cuda.cudart()
        for name, flags, protection in (
            ("registered", 0, mmap.PROT_READ | mmap.PROT_WRITE),
            ("registered_read_only", 8, mmap.PROT_READ),
        ):
            pages = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
            mapped = torch.frombuffer(pages, dtype=torch.uint8)
            status = int(runtime.cudaHostRegister(mapped.data_ptr(), size, flags))
            rates[f"{name}_status"] = status  # 0 if the driver accepted it
            if status == 0:
                both(name, mapped, writable=not flags)
                runtime.cudaHostUnregister(mapped.data_ptr())
    return rates


def products() -> dict[str, float]:
    """Measure a bfloat16 matmul of 8,192 x 8,192 matrices, and describe the device."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    memory = torch.cuda.get_device_properties(0).total_memory
    return {"bfloat16_tflop_s": 2 * side**3 / 1e12 / median_s(lambda: a @ b), "memory_gib": memory / 2**30}


def attention() -> dict[str, float]:
    """Count the graphs compiled for rows of 12 sizes, and time FlexAttention with our masks."""
    from torch._dynamo.utils import counters
    from torchtitan.models.common.attention import FlexAttention

    from benchmarks.long_row import row_of
    from forge_rl.engines.titan.masks import attention_mask, compile_attention, compile_once
    from forge_rl.packing.rows import Row

    compile_once()
    compile_attention()
    flex, counts, seconds = FlexAttention(FlexAttention.Config()), [], []
    # Lengths in no order; after the first six, a kernel for any length should exist.
    for blocks in (3, 8, 5, 12, 20, 30, 40, 11, 25, 60, 4, 33):
        row = row_of(128 * blocks, 43)
        columns: dict[str, Any] = {name: value.cuda() for name, value in row.tensors().items()}
        device_row = Row(**columns)
        q, k, v = (
            torch.randn(1, len(row), heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (16, 8, 8)
        )
        torch.cuda.synchronize()
        began = time.perf_counter()
        flex(q, k, v, attention_masks=attention_mask(device_row), enable_gqa=True).sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        counts.append(counters["stats"].get("unique_graphs", 0))
    return {"graphs": counts[-1], "graphs_of_the_last_six": counts[-1] - counts[-7], "first_s": seconds[0]} | {
        "last_six_s": statistics.median(seconds[-6:])
    }
