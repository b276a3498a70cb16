"""The kind and number of devices of this machine, found without loading torch on a machine without a GPU's driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("_ASSUMED", default=None)
"""Number of GPUs, and bytes of each, in the body of `assumed_gpus`."""


@contextlib.contextmanager
def assumed_gpus(count: int, each_bytes: int) -> Iterator[None]:
    """Plan inside the context as if this machine had these GPUs; nothing may be started there.

    with assumed_gpus(8, 80 << 30):
        assert device_type() == "cuda"
    """
    token = _ASSUMED.set((count, each_bytes))
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def assumed_bytes() -> int | None:
    """Return the bytes of each GPU that `assumed_gpus` assumes; None outside of it."""
    assumed = _ASSUMED.get()
    return assumed[1] if assumed else None


def device_type() -> Literal["cuda", "cpu"]:
    """Return the kind of device that services run on."""
    if _ASSUMED.get():
        return "cuda"
    if not _has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """Count the GPUs of this machine."""
    if assumed := _ASSUMED.get():
        return assumed[0]
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
