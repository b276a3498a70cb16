"""Gives a CPU tensor's memory back to the machine while the tensor lives."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the pages that lie wholly within contiguous tensors: they read as zeros and come back when written.

    Raises:
        OSError: the kernel refuses, such as for locked memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for address, storage in storages.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(mmap.MADV_DONTNEED)
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {end - first} bytes of the KV cache cannot be given back")
