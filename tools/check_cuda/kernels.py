"""Compiles vLLM's Triton sampling kernels for sm_90; compiler and assembler come with Triton.

python -m tools.check_cuda.kernels

CPU engines sample with other code: these kernels are from vLLM's Model Runner V2, with the arguments that our requests
lead to. The trainer's own kernels are compiled by tests/test_kernels_compile.py.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.check_cuda.libcuda import load_libcuda
from tools.check_cuda.report import report

_GUMBEL, _LOGPROB = "vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.sample.logprob"
KERNELS: Sequence[tuple[str, str, Mapping[str, str], Mapping[str, Any]]] = (
    (
        _GUMBEL,
        "_temperature_kernel",
        {
            "logits_ptr": "*fp32",
            "expanded_idx_mapping_ptr": "*i32",
            "temperature_ptr": "*fp32",
            "vocab_size": "i32",
        },
        {"BLOCK_SIZE": 8192},
    ),
    (
        _LOGPROB,
        "_topk_log_softmax_kernel",
        {"output_ptr": "*fp32", "logits_ptr": "*fp32", "topk_ids_ptr": "*i64", "topk": "i32", "vocab_size": "i32"},
        {"BLOCK_SIZE": 1024, "TOPK_BLOCK_SIZE": 1},
    ),
    (
        _GUMBEL,
        "_gumbel_sample_kernel",
        {
            "local_argmax_ptr": "*i64",
            "local_max_ptr": "*fp32",
            "logits_ptr": "*fp32",
            "expanded_idx_mapping_ptr": "*i32",
            "seeds_ptr": "*i64",
            "pos_ptr": "*i64",
            "temp_ptr": "*fp32",
            "vocab_size": "i32",
        },
        {
            "logits_cache_ptr": None,
            "logits_cache_col_ptr": None,
            "logits_cache_source_ptr": None,
            "BLOCK_SIZE": 1024,
            "IS_DRAFTING": False,
            "APPLY_TEMPERATURE": False,
            "USE_FP64": False,
            "PER_TOKEN_COL": False,
        },
    ),
)
"""Module and name of each kernel, types of its arguments, and values of its constants; any other argument is a stride,
an int64."""


def main() -> int:
    """Compile each kernel, and print the bytes of machine code."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    load_libcuda()
    sizes: dict[str, object] = {}
    failures = []
    for module, name, types, constants in KERNELS:
        try:
            sizes[name] = f"{compiled_bytes(module, name, types, constants)} bytes for sm_90"
        except Exception as error:  # the compiler may raise anything, and the other kernels are still worth checking
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return report(sizes, failures)


def compiled_bytes(module: str, name: str, types: Mapping[str, str], constants: Mapping[str, Any]) -> int:
    """Compile one of vLLM's kernels for an H100 or H200; return the size of its machine code in bytes.

    Raises:
        AssertionError: the kernel has other arguments, or the result is for another device.
    """
    import triton
    import vllm.triton_utils
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # vLLM defines its kernels by a stand-in where it finds no driver.
    vllm.triton_utils.triton, vllm.triton_utils.tl, vllm.triton_utils.HAS_TRITON = triton, triton.language, True
    kernel = getattr(importlib.import_module(module), name)
    argument_types = {**types, **dict.fromkeys(constants, "constexpr")}
    assert argument_types.keys() <= set(kernel.arg_names), (
        f"it has no {sorted(argument_types.keys() - set(kernel.arg_names))}"
    )
    signature = {argument: argument_types.get(argument, "i64") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".target sm_90" in compiled.asm["ptx"]
    return len(compiled.asm["cubin"])


if __name__ == "__main__":
    sys.exit(main())
