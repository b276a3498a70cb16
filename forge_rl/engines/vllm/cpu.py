"""Patches for vLLM's CPU backend: heads, experts, RoPE, norms, SwiGLU and LoRA, and memory that it does not free.

Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from forge_rl.engines.vllm import internals

_WHOLE_VECTORS = 64
"""A multiple of every vector length of vLLM's norm kernels, which refuse other widths."""

_MOST_SHAPES = 32
"""Maximum number of input shapes for which oneDNN keeps a product's kernel, as in vLLM."""


def patch(model: nn.Module) -> None:
    """Patch this worker and its model; idempotent."""
    layer: Any
    for layer in model.modules():
        # vLLM caches RoPE modules, so a second model, such as a draft model, may share one that is wrapped already.
        if isinstance(layer, RotaryEmbedding) and not hasattr(layer._forward_method, "__wrapped__"):
            layer._forward_method = _on_rows(layer._forward_method)
        elif type(layer) is RMSNorm:
            layer._forward_method = functools.partial(_normalize, layer)
        elif type(layer) is SiluAndMul:
            layer._forward_method = _silu_and_mul
        elif isinstance(router := getattr(layer, "router", None), CPURouter):
            _heed_biases(router)
        elif isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            _pack_when_used(layer)
    # The rest patches classes, once a process: `__wrapped__` marks functions that are patched already.
    embedding: Any = UnquantizedEmbeddingMethod
    embedding.process_weights_after_loading = staticmethod(_pack_when_used)
    processor: Any = LogitsProcessor
    internals.check_names(processor, ("_apply_head",))
    if not hasattr(processor._apply_head, "__wrapped__"):
        processor._apply_head = _with_packed_head(processor._apply_head)
    experts: Any = CPUUnquantizedExperts
    if not hasattr(experts.apply, "__wrapped__"):
        experts.apply = _with_expert_map(experts.apply)
    method: Any = UnquantizedFusedMoEMethod
    if not hasattr(method._setup_kernel, "__wrapped__"):
        method._setup_kernel = _with_repacking(method._setup_kernel)
    wrapper: Any = PunicaWrapperCPU
    internals.check_names(wrapper, ("add_lora_linear", "prefill_metadata"))
    wrapper.add_lora_linear = _add_lora
    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def _heed_biases(router: Any) -> None:
    """Have a router choose experts by its biases, which vLLM 0.32 heeds on CPU only where experts are in groups.

    A single group is equivalent to no groups. Without the patch, ERNIE 4.5 would route tokens to other experts, and
    MiniMax M2 would not run.
    """
    plain = not router.use_grouped_topk and router.custom_routing_function is None
    if plain and router.e_score_correction_bias is not None and router.scoring_func in ("softmax", "sigmoid"):
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def _pack_when_used(layer: Any) -> None:
    """Make an embedding pack its weights only when it first computes a product as a head, in the dtype of its input.

    vLLM packs every embedding at each load, although most of them never compute a product.
    """
    linears: dict[torch.dtype, Callable[..., torch.Tensor]] = {}

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype not in linears:
            current = layer.cpu_linear  # by its own name, this function would outlive its replacement by the next load
            linears[x.dtype] = _packed_product(layer, weight, x.dtype)
            layer.cpu_linear = current
        return linears[x.dtype](x, weight, bias)

    layer.cpu_linear = linear


def _packed_product(layer: Any, weight: torch.Tensor, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a product with a layer's weights packed for it: `(x, weight, bias) -> y`, with `x` and `y` in `dtype`."""
    if dtype == weight.dtype:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        linear: Callable[..., torch.Tensor] = layer.cpu_linear
        return linear
    # Another dtype needs a copy in any case; packed once, it serves until the next load.
    converted = weight.to(dtype)
    if not _custom_ops._supports_onednn:
        return lambda x, _, bias: nn.functional.linear(x, converted, bias)
    handler = _custom_ops.create_onednn_mm(converted.t(), _MOST_SHAPES)
    return lambda x, _, bias: _custom_ops.onednn_mm(handler, x, bias)


def _with_packed_head(original: Any) -> Any:
    """Make a head whose dtype differs from the model's pack its weights in that dtype once per load.

    vLLM converts and packs them at each step, which takes a quarter of the time of a small bfloat16 model with a
    float32 head.
    """

    @functools.wraps(original)
    def apply_head(self: Any, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> Any:
        is_converted = self.head_dtype not in (None, hidden_states.dtype)
        if not is_converted or not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod):
            return original(self, lm_head, hidden_states, embedding_bias)
        # The embedding's own method has packed the weights in this dtype; see `_pack_when_used`.
        bias = None if embedding_bias is None else embedding_bias.to(self.head_dtype)
        return lm_head.quant_method.apply(lm_head, hidden_states.to(self.head_dtype), bias=bias)

    return apply_head


def unlink_shared_memory(worker: int) -> None:
    """Unlink the shared memory of a CPU worker's all-reduce once all workers have mapped it; a killed vLLM would leave
    it behind."""
    for line in Path(f"/proc/{worker}/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("vllm_dist_") and path.parent == Path("/dev/shm"):
            path.unlink(missing_ok=True)


def release_kv_cache(worker: Any) -> None:
    """Free the KV cache's pages on CPU, which vLLM's sleep cannot do. The cache then reads as zeros, as after a fresh
    start."""
    internals.check_names(worker, ("model_runner.kv_caches",))
    release(worker.model_runner.kv_caches)


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages are allocated when written, for keys and values.

    Attention multiplies masked values by 0, and a NaN left over in reused memory would survive that.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Free the pages wholly within contiguous tensors; they read as zeros and are allocated again when written."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Layers may share one storage, of which each needs to be released only once.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for address, storage in storages.items():
        # Whole pages only: the ones at both ends may hold other tensors' bytes.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(mmap.MADV_DONTNEED)
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {end - first} bytes of the KV cache cannot be freed")


def _normalize(
    norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm with vLLM's compiled kernel, which its CPU backend has but does not call: one pass over memory
    instead of six. Shapes as for `RMSNorm`; with a residual, both arguments are overwritten, as vLLM allows."""
    tensors = [x] if residual is None else [x, residual]
    weight, epsilon = norm.weight.data, norm.variance_epsilon
    # The kernel takes a weight of the input's dtype, over the full width, and contiguous rows.
    plain = norm.has_weight and norm.variance_size_override is None and weight.dtype == x.dtype
    plain = plain and x.shape[-1] % _WHOLE_VECTORS == 0
    if not plain or not all(tensor.is_contiguous() for tensor in tensors):
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = norm.forward_native(x, residual)
        return result
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [N, d] from [N, 2 d], with a single temporary."""
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate).mul_(up)


def _add_lora(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    a: tuple[torch.Tensor, ...],
    b: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add each row's adapter product to `y`: two matrix products for each run of rows with the same adapter.

    vLLM's version copies A and B for each row, and applies the last slot's adapter to rows without one.

    Args:
        wrapper: knows the slot of each run of rows; -1 stands for none.
        y: [rows, outputs of all slices], changed in place.
        x: [rows, inputs].
        a: for each slice [slots, 1, rank, inputs].
        b: for each slice [slots, 1, outputs, rank].
        scale: factor, besides the adapters' own, which B includes.
        output_slices: outputs of each slice.
    """
    starts, lengths, slots, *_rest = wrapper.prefill_metadata
    for start, length, slot in zip(starts.tolist(), lengths.tolist(), slots.tolist(), strict=True):
        if slot < 0:
            continue
        rows, first = x[start : start + length], 0
        for a_slice, b_slice, size in zip(a, b, output_slices, strict=True):
            product = nn.functional.linear(nn.functional.linear(rows, a_slice[slot, 0]), b_slice[slot, 0])
            y[start : start + length, first : first + size] += scale * product
            first += size


def _on_rows(original: Any) -> Any:
    """Make RoPE flatten its inputs to [tokens, heads * dim], as its kernel expects.

    Latent attention passes parts of queries as [tokens, heads, dim], where the kernel would rotate the wrong elements.
    """

    @functools.wraps(original)
    def forward(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        inputs = [query] if key is None else [query, key]
        rotated = original(positions, *(x.flatten(1) if x.ndim > 2 else x for x in inputs))
        return tuple(
            None if output is None else output.view_as(source)
            for output, source in zip(rotated, (query, key), strict=True)
        )

    return forward


def _with_repacking(original: Any) -> Any:
    """Make a reload pack experts for the kernel again. vLLM packs them only at the first load, and would then compute
    with weights in the wrong order."""

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _with_expert_map(original: Any) -> Any:
    """Make experts apply the expert map of a worker that holds only some of them.

    vLLM uses global expert ids as local ones, and reads past the end of the weights. Here, another worker's expert maps
    to a local one with a gate weight of 0; the workers' results are summed later.
    """

    @functools.wraps(original)
    def apply(
        self: Any, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None, **rest: Any
    ) -> Any:
        if expert_map is not None:
            # -1 for experts of other workers.
            local_ids = expert_map[topk_ids.long()]
            # 0 times the local expert's output adds nothing.
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0)
            topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
        return original(self, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **rest)

    return apply


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Gather `sizes[rank]` rows from each rank, padded to the largest in transit."""
    if isinstance(input_, list):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    assert dim == 0, "vLLM gathers tokens"
    if sizes is None:
        return self.all_gather(input_, 0)
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    rows = self.all_gather(padded, 0).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(rows, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum rows over all ranks; each rank gets its own `sizes[rank]` of them."""
    assert dim == 0, "vLLM scatters tokens"
    if sizes is None:
        sizes = [len(input_) // self.world_size] * self.world_size
    begin, end = list(itertools.accumulate(sizes, initial=0))[self.rank_in_group :][:2]
    summed: torch.Tensor = self.all_reduce(input_.contiguous().clone())
    return summed[begin:end].contiguous()
