"""Tells the kind and number of devices that services run on, without loading torch on hosts without a GPU driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of the hosts of a run."""

    kind: Literal["cuda", "cpu"]
    gpus: int
    """Number of GPUs of all hosts."""
    gpu_bytes: int
    """Memory of the smallest GPU; 0 without any."""


_OF_HOSTS: list[Devices] = []
"""Devices of other hosts while they stand for this machine's, innermost last."""


@contextlib.contextmanager
def standing_for(devices: Devices) -> Iterator[None]:
    """Make this module's functions and `platform.gpu_bytes` answer for the hosts of a run while the body runs.

    A controller configures its services by these answers, and may have no GPU itself. The services' processes ask their
    own machine.
    """
    _OF_HOSTS.append(devices)
    try:
        yield
    finally:
        _OF_HOSTS.remove(devices)


def assumed_gpus(count: int, each_bytes: int) -> AbstractContextManager[None]:
    """Plan inside the context as if this machine had these GPUs; nothing may be started there.

    with assumed_gpus(8, 80 << 30):
        assert device_type() == "cuda"
    """
    return standing_for(Devices(kind="cuda", gpus=count, gpu_bytes=each_bytes))


def hosts_devices() -> Devices | None:
    """Return the devices that stand for this machine's, if any."""
    return _OF_HOSTS[-1] if _OF_HOSTS else None


def device_type() -> Literal["cuda", "cpu"]:
    """Return the kind of device that services run on."""
    if (devices := hosts_devices()) is not None:
        return devices.kind
    # Without a driver there is no need to load torch, which takes seconds.
    if not _has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """Count the GPUs that services run on: of this machine, or of the run's hosts."""
    if (devices := hosts_devices()) is not None:
        return devices.gpus
    if device_type() == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


@functools.cache
def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
