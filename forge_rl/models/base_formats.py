"""Formats of a frozen base's matrices: FP8 with a scale per output, NF4 with a scale per 64 inputs.

Results have the same bits on any device and for any slice of rows, so a trainer's ranks, versions and merged folders
share one base. Formats are computed in float32 and rounded once to the requested dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from forge_rl.errors import ModelError

if TYPE_CHECKING:
    import torch

BaseFormat = Literal["fp8", "nf4"]
"""fp8: float8_e4m3fn. nf4: 4-bit NormalFloat (Dettmers et al., arXiv:2305.14314), two values per byte, the first in the
high half, as in bitsandbytes."""
BASE_FORMATS: tuple[BaseFormat, ...] = get_args(BaseFormat)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the codes of nf4, from appendix E of the paper."""
BLOCK = 64
"""Inputs that share a scale in nf4; a row's last block may have fewer."""
_FP8_LARGEST = 448.0
_CHUNK_ELEMENTS = 1 << 20
"""Elements of a matrix that are computed at a time; bounds the temporary float32 values."""
_TRACED_CHUNKS = 8
"""Maximum number of chunks on the meta device, where a plan traces each chunk."""


@dataclass(frozen=True, kw_only=True)
class BaseQuantization:
    """Weights of a model that training held quantised."""

    base_format: BaseFormat
    weights: tuple[str, ...]
    """Their names in the model's files."""

    @staticmethod
    def read(record: object, path: Path) -> BaseQuantization | None:
        """Read the result of `asdict` back; None stands for itself.

        Args:
            path: file that holds the record, for an error.

        Raises:
            ModelError: the record is malformed.
        """
        if record is None:
            return None
        values = record if isinstance(record, dict) else {}
        base_format = next((name for name in BASE_FORMATS if name == values.get("base_format")), None)
        weights = values.get("weights")
        if base_format is None or not isinstance(weights, list) or not all(isinstance(name, str) for name in weights):
            raise ModelError(f"{path} says {record!r:.80} of how the base was held", hint="write the adapter again")
        return BaseQuantization(base_format=base_format, weights=tuple(weights))

    def round_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight, [outputs, inputs], with the values that training used, in its own dtype.

        Raises:
            ModelError: the weight has another number of dims, or values that are not finite.
        """
        hint = "name the model that the adapter was trained on by: forge-rl merge ADAPTER OUT --base FOLDER"
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ModelError(
                f"{name!r:.120} is {weight.dtype} of shape {tuple(weight.shape)}, not a float matrix", hint=hint
            )
        codes, scales = quantize(weight, self.base_format)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{name!r:.120} has values that are not finite", hint=hint)
        return dequantize(codes, scales, weight.shape[1], self.base_format, weight.dtype)


def stored_columns(base_format: BaseFormat, inputs: int) -> tuple[int, int]:
    """Return the bytes of codes and the number of scales, 4 bytes each, that a row of a matrix takes."""
    if base_format == "fp8":
        return inputs, 1
    blocks = math.ceil(inputs / BLOCK)
    return blocks * BLOCK // 2, blocks


def stored_bytes(base_format: BaseFormat, outputs: int, inputs: int) -> int:
    """Return the bytes of a matrix, [outputs, inputs]."""
    codes, scales = stored_columns(base_format, inputs)
    return outputs * (codes + 4 * scales)


def quantize(values: torch.Tensor, base_format: BaseFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix's codes, [outputs, columns] uint8, and scales, [outputs, columns] float32; see `stored_columns`.

    A scale is not finite if one of its values is not.

    Args:
        values: [outputs, inputs], of any float dtype.
    """
    import torch

    encode = _to_fp8 if base_format == "fp8" else _to_nf4
    codes, scales = zip(*(encode(values[rows].float()) for rows in _row_chunks(values)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, inputs: int, base_format: BaseFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Return a matrix, [outputs, inputs], from the result of `quantize`.

    Args:
        dtype: dtype of the result, to which float32 values are rounded or widened.
    """
    import torch

    decode = _from_fp8 if base_format == "fp8" else _from_nf4
    values = torch.empty(len(codes), inputs, dtype=dtype, device=codes.device)
    for rows in _row_chunks(values):
        values[rows] = decode(codes[rows], scales[rows])[:, :inputs]
    return values


def _row_chunks(values: torch.Tensor) -> Iterator[slice]:
    rows, columns = values.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    # Each chunk is traced on its own, so that small ones would make the plan of a large model slow.
    if values.is_meta:
        step = max(step, math.ceil(rows / _TRACED_CHUNKS))
    for start in range(0, max(1, rows), step):
        yield slice(start, start + step)


def _to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    largest = torch.full((), _FP8_LARGEST, device=values.device)  # by a number, CUDA multiplies with its reciprocal
    scales = _scales(values.abs().amax(dim=1, keepdim=True) / largest)
    codes = (values / scales).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def _from_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    import torch

    values: torch.Tensor = codes.view(torch.float8_e4m3fn).to(torch.float32).mul_(scales)
    return values


def _to_nf4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    blocks = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = _scales(blocks.abs().amax(dim=2))
    borders = torch.tensor(NF4, dtype=torch.float64).unfold(0, 2, 1).mean(dim=1).to(values)
    codes = torch.bucketize(blocks / scales[..., None], borders, out_int32=True).to(torch.uint8).flatten(1)
    pairs: torch.Tensor = codes[:, ::2] << 4 | codes[:, 1::2]
    return pairs, scales


def _from_nf4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    import torch

    pairs = torch.nn.functional.embedding(codes.to(torch.int32), _nf4_pairs(codes.device))
    values: torch.Tensor = pairs.flatten(1).unflatten(1, (-1, BLOCK)).mul_(scales[..., None]).flatten(1)
    return values


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the largest values as divisors above 0, so that rows of zeros stay zeros."""
    import torch

    return largest.clamp_(min=torch.finfo(torch.float32).tiny)


@functools.cache
def _nf4_pairs(device: torch.device) -> torch.Tensor:
    """Return both values of each code byte: [256, 2] float32."""
    import torch

    values = torch.tensor(NF4, dtype=torch.float32, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
