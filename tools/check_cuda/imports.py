"""Imports all of forge_rl, recipes and apps, and their GPU dependencies, on a machine without a GPU.

python -m tools.check_cuda.imports
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from tools.check_cuda.libcuda import load_libcuda
from tools.check_cuda.report import report

ROOT = Path(__file__).parent.parent.parent
STACK = (
    *("triton", "triton.language", "flashinfer", "monarch.actor", "monarch.rdma", "torchstore", "torchtitan"),
    *("vllm", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"),
    *("vllm.vllm_flash_attn", "vllm.device_allocator.cumem", "vllm.v1.engine.async_llm"),
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"),
)
"""Modules that run on a GPU or link to such code: vLLM's kernels, its sleep allocator, its worker and runner."""


def main() -> int:
    """Import everything, and count the modules."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    load_libcuda()
    import torch

    failures = [] if torch.version.cuda else [f"torch {torch.__version__} is not built for CUDA"]
    ours = list(modules())
    for name in (*STACK, *ours):
        try:
            importlib.import_module(name)
        except BaseException as error:  # SystemExit too: importing a module must not exit
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return report({"torch": torch.__version__, "stack": len(STACK), "ours": len(ours)}, failures)


def modules() -> Iterator[str]:
    """Yield the names of all our modules except programs."""
    for top in ("forge_rl", "recipes", "apps"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not {"peers", "agents"} & set(parts[:-1]) and parts[-1] != "__main__":
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main())
