"""Counts launches, bytes, FLOPs and host waits of operations on meta tensors, which stand for a GPU's."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

_WAITS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default)
"""Operations whose result the host, or the next shape, depends on."""
_SPARSE = ("gather", "scatter", "index", "embedding", "_index_put", "index_put", "slice_scatter")
"""Starts of names of operations that touch no more than they name."""
_FREE = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("detach", "alias", "view", "_unsafe_view", "t", "lift_fresh"),
)
"""Operations without a kernel."""
EXPERT_GRADIENTS = ("expert_gradient", "expert_gradient_")
"""Our products for experts' gradients: the first overwrites its output, the second adds to it."""
FUSED_PRODUCTS = ("linear_sums", "linear_gradient", "gated_values", "gated_gradient", *EXPERT_GRADIENTS)
"""Our kernels that are products."""
_ONLY_WRITTEN = ("copy_", "_foreach_copy_", "fill_", "zero_")
"""Operations that change a tensor without reading it."""


@dataclass(kw_only=True)
class Cost:
    """Counts of a part of an update."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels by operation."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Bytes read and written, by operation."""
    flops: Counter[str] = field(default_factory=Counter)
    """Of products and attention, by operation."""
    waits: Counter[str] = field(default_factory=Counter)
    """What the host waits for, by the line of our code."""
    copies: int = 0
    """Copies from the host."""

    def add(self, name: str, *, launches: int, size: float, flops: float = 0.0) -> None:
        """Count kernels that are no operation of torch's."""
        self.launches[name] += launches
        self.sizes[name] += int(size)
        if flops:
            self.flops[name] += flops  # type: ignore[assignment]

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            launches=self.launches + other.launches,
            sizes=self.sizes + other.sizes,
            flops=self.flops + other.flops,
            waits=self.waits + other.waits,
            copies=self.copies + other.copies,
        )

    @property
    def other(self) -> int:
        """Bytes outside of products and attention."""
        return sum(size for name, size in self.sizes.items() if name not in self.flops)

    def seconds(self, rates: Mapping[str, float], *, products: float, bandwidth: float) -> float:
        """Return the time of all kernels one after the other, each at the rate that bounds it.

        Args:
            rates: FLOP/s of operations by name.
            products: FLOP/s of all others that have FLOPs.
            bandwidth: bytes/s of those without.
        """
        bound = sum(flops / rates.get(name, products) for name, flops in self.flops.items())
        return bound + self.other / bandwidth


class CountedOperations(TorchDispatchMode):
    """Counts what operations on meta tensors would cost a GPU, while it is entered; host tensors count nothing.

        with CountedOperations() as counted:
            weight @ weight
        assert counted.cost.launches["mm"] == 1

    Each operation that is not a view is one launch of its whole inputs and outputs; a fused operation is one, as its
    kernel is. An operation whose value the host needs is a wait, and gives a value that lets the program go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        is_device = (
            any(tensor.is_meta for tensor in inputs) or torch.device(kwargs.get("device") or "cpu").type == "meta"
        )
        if not is_device:
            return func(*args, **kwargs)
        if func in _WAITS or (
            func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
        ):
            return self._wait(func, args, kwargs)
        if func is aten._grouped_mm.default:
            return self._grouped(*args[:3])
        outputs = func(*args, **kwargs)
        if func is aten._to_copy.default and not inputs[0].is_meta:
            self.cost.copies += 1
            return outputs
        name = func.name().partition("::")[2].partition(".")[0]
        # An output in the memory of an input is a view, or is written in place.
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        mutated = [
            tensor
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        fresh = [tensor for tensor in _tensors(outputs) if tensor.untyped_storage()._cdata not in shared]
        if name in _FREE or not (mutated or fresh) or not any(tensor.numel() for tensor in [*inputs, *fresh]):
            return outputs
        reads_first = (name.endswith("_") and name not in _ONLY_WRITTEN) or len(list(_once(inputs))) < len(inputs)
        # Index, values that are read, and values that are written, each of the smallest tensor's size.
        if name.startswith(_SPARSE):
            size = 3 * min(map(_size, [*inputs, *fresh]))
        else:
            size = sum(map(_size, [*_once(inputs), *fresh, *(mutated if reads_first else ())]))
        launches = 1
        if name.startswith("_f"):  # torch's loops over many tensors: 320 blocks of 65,536 elements a launch
            elements = sum(tensor.numel() for tensor in mutated or inputs) // (4 if "adam" in name else 1)
            launches = -(-elements // (320 << 16)) if name.startswith(("_foreach", "_fused_adam")) else 1
        self.cost.add(name, launches=launches, size=size, flops=_product_flops(name, inputs, mutated))
        return outputs

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "forge_rl" in frame.filename or "torchtitan" in frame.filename
        ]
        place = frames[-1] if frames else traceback.extract_stack()[-3]
        self.cost.waits[f"{func} {place.filename.rpartition('/')[2]}:{place.lineno} {place.line}"] += 1
        values = args[0]
        if func is aten._to_copy.default:
            return torch.ones(values.shape, dtype=kwargs.get("dtype") or values.dtype)
        if func is aten.nonzero.default:
            return values.new_empty(values.numel(), values.ndim, dtype=torch.int64)
        return (
            True
            if values.dtype == torch.bool or func is not aten._local_scalar_dense.default
            else 1.0
            if values.is_floating_point()
            else 1
        )

    def _grouped(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Count a grouped product: [T, k] by [E, k, n], or [m, T] by [T, n]; torch's own meta version takes fewer
        shapes."""
        shape = (a.shape[-2], b.shape[-1])
        product = a.new_empty((len(offsets), *shape) if a.ndim == b.ndim == 2 else shape)
        self.cost.add(
            "_grouped_mm",
            launches=1,
            size=_size(a) + _size(b) + _size(product),
            flops=2.0 * shape[0] * shape[1] * a.shape[-1],
        )
        return product


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an operation's arguments with their schema."""
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)


def _once(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each memory once."""
    keys = set[tuple[object, ...]]()
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
        if key not in keys:
            keys.add(key)
            yield tensor


def _product_flops(name: str, inputs: Sequence[torch.Tensor], mutated: Sequence[torch.Tensor]) -> float:
    if name in ("mm", "addmm", "addmm_"):
        matrices = [tensor for tensor in inputs if tensor.ndim == 2 and not any(tensor is other for other in mutated)]
        left, right = matrices[-2:]
        return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    if name in ("bmm", "baddbmm"):
        left, right = inputs[-2:]
        return 2.0 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
    if name in EXPERT_GRADIENTS:
        grad, rows = inputs[-3:-1]
        return 2.0 * grad.numel() * rows.shape[1]
    if name in FUSED_PRODUCTS:
        rows, weight = inputs[:2]
        return 2.0 * (rows.numel() // rows.shape[-1]) * weight.numel()
    return 0.0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
