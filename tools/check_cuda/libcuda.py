"""A CUDA driver that finds no device, for libraries that link to one, such as vLLM's kernels."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
_FUNCTIONS = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain"),
    *("cuDriverGetVersion", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2", "cuInit"),
    *("cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap"),
    *("cuMemRelease", "cuMemSetAccess", "cuMemUnmap", "cuPointerGetAttribute", "cuTensorMapEncodeTiled"),
)


def load_libcuda() -> None:
    """Compile a libcuda.so.1 whose functions all report a missing device, and load it into this process.

    Libraries loaded later that need libcuda.so.1 get this one, even if the machine has a real one.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "libcuda.c", Path(folder) / "libcuda.so.1"
        source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in _FUNCTIONS))
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
