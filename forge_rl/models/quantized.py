"""Readable formats of quantised weights: which tensors make up a weight, and how to compute its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Parts = Mapping[str, "torch.Tensor"]
"""Tensors of one weight, by suffix."""


@dataclass(frozen=True, kw_only=True)
class QuantizationFormat:
    """A way to store a weight as several tensors, distinguished by the suffixes of their names."""

    main: str
    """Suffix of the tensor that holds the quantised values, such as ".qweight"."""
    needed: str
    """Suffix of a tensor whose presence marks a weight as quantised."""
    other_suffixes: tuple[str, ...]
    """Suffixes of a weight's other tensors."""
    weight: str
    """Suffix of the weight's name."""
    read: Callable[[Parts, Mapping[str, Any]], torch.Tensor]
    """Computes the weight, in float32 or bfloat16, from the tensors and quantization_config. Raises ValueError and
    others for tensors that do not fit each other."""
    packed: int = 1
    """Weights per byte of the main tensor."""

    def stem(self, name: str, names: Iterable[str]) -> str | None:
        """Return the name of a main tensor's weight without the suffix; None for other tensors."""
        stem = name.removesuffix(self.main)
        return stem if stem != name and stem + self.needed in names else None


def refusal(config: object, model_type: str) -> str:
    """Return why weights with this quantization_config cannot be read; "" if they can."""
    if not config:
        return ""
    method = config.get("quant_method") if isinstance(config, dict) else config
    # MXFP4 is read for gpt-oss only, whose experts it packs, and gpt-oss comes in no other format.
    if not isinstance(config, dict) or method not in _METHODS or (method == "mxfp4") != (model_type == "gpt_oss"):
        return f"quant_method {method!r:.80}"
    bits = config.get("bits", 4)
    wrong = {
        f"{bits!r:.20} bits": method in ("gptq", "awq") and bits not in ((4, 8) if method == "gptq" else (4,)),
        f"AWQ's {config.get('version')!r:.20} packing": method == "awq"
        and str(config.get("version", "gemm")).lower() != "gemm",
        "fp8 without weight_block_size": method == "fp8" and not _blocks(config),
    }
    return ", ".join(name for name, applies in wrong.items() if applies)


def formats(config: Mapping[str, Any]) -> tuple[QuantizationFormat, ...]:
    """Return the formats that a model's files hold, by its quantization_config, which `refusal` accepts."""
    return _METHODS[config["quant_method"]](config)


def _blocks(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(side) is not int or side < 1 for side in size):
        return None
    return size[0], size[1]


def _mxfp4(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read MXFP4 (OCP Microscaling Formats 1.0, section 5.3): blocks of 32 E2M1 values that share a power of 2."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.shape != (*scales.shape, 16) or scales.ndim != 3:
        raise ValueError("the scales do not match its blocks")
    values: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return values


def _fp8(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read [N, K] float8 with a scale for each block, [ceil(N / b0), ceil(K / b1)] (DeepSeek-V3, section 3.3.2)."""
    values, scales, size = parts[".weight"].float(), parts[".weight_scale_inv"].float(), _blocks(config)
    assert size is not None, "refusal() asks for it"
    if values.ndim != 2 or tuple(scales.shape) != tuple(-(-n // b) for n, b in zip(values.shape, size, strict=True)):
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not match {tuple(values.shape)}")
    for dim, side in enumerate(size):
        scales = scales.repeat_interleave(side, dim)
    return values * scales[: values.shape[0], : values.shape[1]]


def _gptq(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read GPTQ: (q - z) s, with z and s of each input's group; q [K / f, N] packs f inputs in an int32, the lowest
    bits first.

    Files of the first format hold z - 1.
    """
    import torch

    bits = int(config.get("bits", 4))
    q = _unpack(parts[".qweight"].t(), bits).t()  # [K, N]
    zeros, scales = _unpack(parts[".qzeros"], bits), parts[".scales"].float()  # [groups, N]
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        # Stored modulo 2**bits: a zero of 0 is written as the largest code.
        zeros = (zeros + 1) & (2**bits - 1)
    groups = parts.get(".g_idx")
    # Without g_idx, groups are runs of consecutive inputs.
    if groups is None:
        groups = torch.arange(len(q)) // -(-len(q) // len(scales))
    groups = groups.long()
    if zeros.shape != scales.shape or len(groups) != len(q) or int(groups.min()) < 0:
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not match {tuple(q.shape)}")
    values: torch.Tensor = (q - zeros[groups]) * scales[groups]
    return values.t()


def _awq(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read AWQ: (q - z) s; q [K, N / 8] packs 8 outputs in an int32, in the order 0 2 4 6 1 3 5 7."""
    # The inverse of the packing order.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    q, zeros = (
        _unpack(parts[name], 4).unflatten(1, (-1, 8))[..., order].flatten(1) for name in (".qweight", ".qzeros")
    )
    scales = parts[".scales"].float()
    if zeros.shape != scales.shape or q.shape[1:] != scales.shape[1:] or len(q) % len(scales):
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not match {tuple(q.shape)}")
    group_size = len(q) // len(scales)
    values: torch.Tensor = (q - zeros.repeat_interleave(group_size, 0)) * scales.repeat_interleave(group_size, 0)
    return values.t()


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [R, C] int32 to [R, C * 32 / bits], the lowest bits first."""
    import torch

    if packed.dtype != torch.int32 or packed.ndim != 2:
        raise ValueError(f"packed values are {packed.dtype}, not int32")
    # `>>` of a negative int32 fills in ones, which the mask removes.
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values: torch.Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return values.flatten(1)


def _bits4(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read bitsandbytes' NF4 and FP4: codes for 16 values, high nibble first, times each block's maximum.

    With double quantisation the maxima are codes as well, for 256 values, times a maximum of their own, plus an offset
    (QLoRA, arXiv:2305.14314, section 3).
    """
    import torch

    # Shape and block sizes, as JSON in a tensor of bytes.
    (state,) = (values for suffix, values in parts.items() if ".quant_state." in suffix)
    meta = json.loads(bytes(state.tolist()).decode())
    shape = torch.Size(meta["shape"])
    codes = parts[".weight"].flatten()
    # Two codes in a byte, the first in the high half; an odd last one is padding.
    codes = torch.stack([codes >> 4, codes & 15], 1).flatten().long()[: shape.numel()]
    largest = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        scale = _expanded(parts[".weight.nested_absmax"], int(meta["nested_blocksize"]), largest.numel())
        # Double quantisation: the maxima are looked up in a map, scaled by blocks, and shifted by their mean.
        largest = parts[".weight.nested_quant_map"][largest.long()] * scale + float(meta["nested_offset"])
    return (parts[".weight.quant_map"][codes] * _expanded(largest, int(meta["blocksize"]), len(codes))).view(shape)


def _expanded(scales: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Repeat each block's scale for its values, `count` in total; the last block may be shorter."""
    import torch

    if size < 1 or -(-count // size) != scales.numel():
        raise ValueError(f"{scales.numel()} scales of blocks of {size} do not match {count} values")
    return scales.float()[torch.arange(count) // size]


def _bits8(parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Read bitsandbytes' int8, [N, K], with each row's maximum at 127 (LLM.int8(), arXiv:2208.07339, section 2.1)."""
    values, largest = parts[".weight"].float(), parts[".SCB"].float()
    if largest.shape != values.shape[:1]:
        raise ValueError(f"maxima of shape {tuple(largest.shape)} do not match {tuple(values.shape)}")
    return values * (largest / 127)[:, None]


_MXFP4 = QuantizationFormat(
    main="_blocks", needed="_scales", other_suffixes=("_scales",), weight="", read=_mxfp4, packed=2
)
_FP8 = QuantizationFormat(
    main=".weight", needed=".weight_scale_inv", other_suffixes=(".weight_scale_inv",), weight=".weight", read=_fp8
)
_GPTQ = QuantizationFormat(
    main=".qweight", needed=".qzeros", other_suffixes=(".qzeros", ".scales", ".g_idx"), weight=".weight", read=_gptq
)
_AWQ = QuantizationFormat(
    main=".qweight", needed=".qzeros", other_suffixes=(".qzeros", ".scales"), weight=".weight", read=_awq, packed=2
)
_NESTED = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
_BITS4 = QuantizationFormat(
    main=".weight",
    needed=".weight.absmax",
    other_suffixes=(*_NESTED, ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
    weight=".weight",
    read=_bits4,
    packed=2,
)
_BITS8 = QuantizationFormat(
    main=".weight", needed=".SCB", other_suffixes=(".SCB", ".weight_format"), weight=".weight", read=_bits8
)
_METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[QuantizationFormat, ...]]] = {
    "mxfp4": lambda config: (_MXFP4,),
    "fp8": lambda config: (_FP8,),
    "gptq": lambda config: (replace(_GPTQ, packed=8 // int(config.get("bits", 4))),),
    "awq": lambda config: (_AWQ,),
    "bitsandbytes": lambda config: (_BITS4, _BITS8),
}
"""Formats by the quant_method of quantization_config."""
