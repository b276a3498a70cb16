"""Linear layers that hold their frozen matrix quantised, and dequantise it in each pass: the base of QLoRA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.param_init import skip_param_init

from forge_rl.models.base_formats import BaseFormat, dequantize, quantize, stored_columns

CODES, SCALES = "base_codes", "base_scales"
"""Names of a quantised layer's parameters: codes, [outputs, columns] uint8, and scales, float32 held as int32 bits, as
FSDP would cast float32 to the dtype of the passes. FSDP shards both by rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """The frozen matrix of a quantised layer, [outputs, inputs], which stands for the layer's weight."""

    codes: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size
    base_format: BaseFormat
    dtype: torch.dtype
    """Dtype of the passes."""
    requires_grad = False

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def bytes(self) -> int:
        """Bytes of this rank's rows."""
        return sum(_local(part).nbytes for part in (self.codes, self.scales))

    def values(self) -> torch.Tensor:
        """Dequantise this rank's rows: [rows, inputs] in the dtype of the passes."""
        return _dequantized(_local(self.codes), _local(self.scales), self)

    def fill(self, values: torch.Tensor) -> bool:
        """Quantise this rank's rows, [rows, inputs]; returns False if a value is not finite."""
        codes, scales = quantize(values, self.base_format)
        _local(self.codes).copy_(codes)
        # The bits of float32, not its value: see SCALES.
        _local(self.scales).copy_(scales.view(torch.int32))
        # A block's scale is not finite if one of its values is not.
        return bool(scales.isfinite().all())


def quantize_base(module: Any, base_format: BaseFormat, dtype: torch.dtype) -> None:
    """Turn a linear layer into one with a quantised matrix, in place, before its weights are loaded.

    Args:
        dtype: dtype of the passes.
    """
    options: dict[str, Any] = {"device": module.weight.device}
    for name, columns, stored_dtype in zip(
        (CODES, SCALES), stored_columns(base_format, module.in_features), (torch.uint8, torch.int32), strict=True
    ):
        values = torch.empty(module.out_features, columns, dtype=stored_dtype, **options)
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
    # The derived class has a property of this name in its place.
    del module.weight
    if isinstance(module, Linear):
        module._param_init = dict(module._param_init or {}) | dict.fromkeys((CODES, SCALES), skip_param_init)
    module.base_format, module.pass_dtype = base_format, dtype
    layer_class: Any = type(module)
    module.__class__ = _quantized_class(layer_class)


def quantized_weights(model: nn.Module) -> Iterator[QuantizedWeight]:
    """Yield the quantised matrices of a model."""
    for module in model.modules():
        if CODES in module._parameters:
            yield module.weight  # type: ignore[misc]


def parameter_count(model: nn.Module) -> int:
    """Count a model's parameters; a quantised matrix counts by its shape, as if it were held in full."""
    floats = sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point())
    return floats + sum(weight.shape.numel() for weight in quantized_weights(model))


def base_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of this rank's frozen weights, and of the same in the dtype of the passes."""
    frozen = [_local(p) for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    held_bytes = full_bytes = sum(values.nbytes for values in frozen)
    for weight in quantized_weights(model):
        held_bytes += weight.bytes
        full_bytes += len(_local(weight.codes)) * weight.shape[1] * weight.dtype.itemsize
    return held_bytes, full_bytes


@functools.cache
def _quantized_class(kind: Any) -> Any:
    """Derive a class of linear layers whose instances hold their matrix quantised."""

    class QuantizedLinear(kind):
        base_format: BaseFormat
        pass_dtype: torch.dtype

        @property
        def weight(self) -> QuantizedWeight:
            """The matrix."""
            return QuantizedWeight(
                codes=self.base_codes,
                scales=self.base_scales,
                shape=torch.Size((self.out_features, self.in_features)),
                base_format=self.base_format,
                dtype=self.pass_dtype,
            )

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """Project [..., inputs] to [..., outputs]."""
            out: torch.Tensor = _QuantizedProduct.apply(input, self.base_codes, self.base_scales, self.weight)
            return out if self.bias is None else out + self.bias

    QuantizedLinear.__name__ = QuantizedLinear.__qualname__ = f"Quantized{kind.__name__}"
    return QuantizedLinear


class _QuantizedProduct(torch.autograd.Function):
    """Product with a quantised matrix, which is dequantised for the forward and again for the backward pass: in between
    neither its values nor the inputs are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, weight: QuantizedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)  # FSDP frees their memory meanwhile, and gathers them again
        ctx.weight = weight
        return nn.functional.linear(x, _dequantized(codes, scales, weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        return grad @ _dequantized(codes, scales, ctx.weight), None, None, None


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    scales = scales.detach().view(torch.float32)
    return dequantize(codes.detach(), scales, weight.shape[1], weight.base_format, weight.dtype)


def _local(values: torch.Tensor) -> torch.Tensor:
    return (values.to_local() if isinstance(values, DTensor) else values).detach()
