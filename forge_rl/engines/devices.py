"""The kind and number of devices of this machine, found without loading torch on a machine without a GPU's driver."""

from __future__ import annotations

import ctypes
import functools
from typing import Literal


def device_type() -> Literal["cuda", "cpu"]:
    """Return the kind of device that services run on."""
    if not _has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> int:
    """Count the GPUs of this machine."""
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
