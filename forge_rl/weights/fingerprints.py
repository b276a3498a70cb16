"""Fingerprints of tensors: exact over bytes, additive over any split of a tensor, and free while copying.

A tensor's fingerprint is the sum, modulo 2**64, over its words of (low + i a) * (high + i b + c), where low and high
are a word's 32-bit halves, i is its index in the whole tensor, and each factor is taken modulo 2**32. That is NH, the
sum of products behind UMAC and XXH3 (Black et al., "UMAC: Fast and Secure Message Authentication", 1999), with keys
that are multiples of the index. Parts can be fingerprinted where they lie, and add up to the whole. It notices
changed, swapped, shifted and missing values; it is no defence against somebody who wants a collision.

A word is 8 bytes where the last dim is a multiple of 64 bytes in a tensor of two dims or more, else it is one element,
sign-extended (zero-extended if it is one byte).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.slices import TensorSlice

KEY_LOW, KEY_HIGH, KEY_SHIFT = 0x9E3779B1, 0x85EBCA77, 0x27D4EB2F
"""a, b and c above."""
HASH, COPY, CAST, PLAIN = range(4)
"""What kernels.run_rows does: fingerprint the source; copy and fingerprint; cast float32 to bfloat16 and fingerprint
what was written; copy only."""

_MASK = 0xFFFFFFFF
_CHUNK_WORDS = 1 << 17  # of the torch loop: its temporaries stay in cache
_TASK_WORDS = 1 << 19  # of one thread's turn: 4 MiB
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Move(NamedTuple):
    """A block of a tensor to be copied and fingerprinted."""

    target: torch.Tensor | None
    """Where to, of the box's size, in the published dtype; None only fingerprints the source."""
    source: torch.Tensor
    """Of the box's size; of any dtype if there is a target."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: TensorSlice
    """Where in the whole tensor the block lies."""


def fingerprint(values: torch.Tensor, shape: Sequence[int], box: TensorSlice | None = None) -> int:
    """Fingerprint of a block of a tensor.

    Args:
        values: the block, any dtype and device.
        shape: of the whole tensor.
        box: where in it the block lies; by default it is all of it.

    Returns:
        An unsigned 64-bit integer; `combine` adds those of all blocks up to that of the whole.
    """
    return move([Move(None, values.detach(), tuple(shape), box or TensorSlice.whole(shape))])[0]


def combine(parts: Iterable[int]) -> int:
    """Fingerprint of a whole tensor from those of the blocks that make it up."""
    return sum(parts) % (1 << 64)


def move(moves: Sequence[Move], *, attest: bool = True) -> list[int]:
    """Copy blocks, casting on the way, and fingerprint what was written, in one pass on all threads that torch uses.

    Args:
        moves: what to copy; targets must not overlap.
        attest: False copies without fingerprints; they are then 0. For benchmarks.

    Returns:
        The fingerprint of each block.

    Raises:
        WeightsError: a block begins or ends within a word.
    """
    totals = [0] * len(moves)
    tasks: list[tuple[int, tuple[int, ...]]] = []
    keep: list[torch.Tensor] = []  # what the tasks' addresses point to
    for number, (target, source, shape, box) in enumerate(moves):
        if not box.numel:
            continue
        dtype = source.dtype if target is None else target.dtype
        devices = {each.device.type for each in (target, source) if each is not None}
        if devices != {"cpu"} or _word_bytes(shape, dtype) != 8:
            cast = source.to(dtype)
            if target is not None:
                target.copy_(cast)
            if attest:
                plain = devices == {"cpu"} and len(shape) == 1 and cast.is_contiguous()
                totals[number] = _by_element(cast, box) if plain else _by_torch(cast, shape, box)
            continue
        mode = PLAIN if not attest else HASH if target is None else COPY
        if source.dtype != dtype:
            if attest and (source.dtype, dtype) == (torch.float32, torch.bfloat16) and source.stride(-1) == 1:
                mode = CAST
            else:
                source = source.to(dtype)
        if source.stride(-1) != 1:
            source = source.contiguous()
        keep.append(source)
        tasks.extend((number, task) for task in _tasks(mode, target, source, shape, box, dtype))
    if not tasks:
        return totals
    # Late, since vLLM's worker does not start on CPU in a process that has loaded llvmlite: it inspects every module.
    from forge_rl.weights.kernels import run_rows

    if len(tasks) == 1 or _threads() == 1:
        sums: Iterable[int] = (run_rows(*task) for _, task in tasks)
    else:
        sums = _pool().map(lambda task: run_rows(*task[1]), tasks)
    for (number, _), part in zip(tasks, sums, strict=True):
        totals[number] = (totals[number] + int(part)) % (1 << 64)
    return totals


def _tasks(
    mode: int,
    target: torch.Tensor | None,
    source: torch.Tensor,
    shape: Sequence[int],
    box: TensorSlice,
    dtype: torch.dtype,
) -> Iterable[tuple[int, ...]]:
    """Arguments of run_rows that together do one block, each about _TASK_WORDS."""
    size = dtype.itemsize
    if box.start[-1] * size % 8 or box.size[-1] * size % 8:
        raise WeightsError(
            f"a block of a tensor of shape {tuple(shape)} begins or ends within 8 bytes: {box}",
            hint="choose a tensor-parallel size that divides the model's dimensions by a multiple of 4",
        )
    to = source if target is None else target
    assert to.stride(-1) == 1, "targets are contiguous in their last dim"
    # Leading dims that are whole in the tensor, the source and the target melt into rows of one long row.
    sizes, steps = list(box.size), [_strides(shape), to.stride(), source.stride()]
    whole = [list(step) for step in steps]
    while len(sizes) > 1 and all(step[-2] == step[-1] * sizes[-1] for step in whole):
        last = sizes.pop()
        sizes[-1] *= last
        for step in whole:
            step[-2] = step[-1]
            step.pop()
    first = sum(start * step for start, step in zip(box.start, steps[0], strict=True)) * size // 8
    row_words = sizes.pop() * size // 8
    rows = sizes.pop() if sizes else 1
    step = [(s[-2] if len(s) > 1 else 0) for s in whole]
    for index in range(math.prod(sizes)):
        offsets = [0, 0, 0]
        rest = index
        for dim in reversed(range(len(sizes))):
            rest, at = divmod(rest, sizes[dim])
            offsets = [o + at * s[dim] for o, s in zip(offsets, whole, strict=True)]
        base = first + offsets[0] * size // 8
        to_at = to.data_ptr() + offsets[1] * size
        from_at = source.data_ptr() + offsets[2] * source.element_size()
        if row_words >= _TASK_WORDS // 2:
            for row in range(rows):
                for word in range(0, row_words, _TASK_WORDS):
                    yield (
                        mode,
                        to_at + row * step[1] * size + word * 8,
                        from_at + row * step[2] * source.element_size() + word * 8 * source.element_size() // size,
                        0,
                        0,
                        1,
                        min(_TASK_WORDS, row_words - word),
                        base + row * step[0] * size // 8 + word,
                        0,
                    )
        else:
            chunk = max(1, _TASK_WORDS // max(1, row_words))
            for row in range(0, rows, chunk):
                yield (
                    mode,
                    to_at + row * step[1] * size,
                    from_at + row * step[2] * source.element_size(),
                    step[1] * size,
                    step[2] * source.element_size(),
                    min(chunk, rows - row),
                    row_words,
                    base + row * step[0] * size // 8,
                    step[0] * size // 8,
                )


def _by_element(values: torch.Tensor, box: TensorSlice) -> int:
    """Of a contiguous one-dimensional tensor on CPU: biases and norms are many and small."""
    from forge_rl.weights.kernels import hash_elements

    return int(hash_elements(values.element_size(), values.data_ptr(), values.numel(), box.start[0]))


def _by_torch(values: torch.Tensor, shape: Sequence[int], box: TensorSlice) -> int:
    """The same by torch's operations, on any device, also for words of one element."""
    word = _word_bytes(shape, values.dtype)
    per_word = word // values.dtype.itemsize
    if box.start[-1:] and (box.start[-1] % per_word or box.size[-1] % per_word):
        raise WeightsError(f"a block of a tensor of shape {tuple(shape)} begins or ends within {word} bytes: {box}")
    words = values.contiguous().view(-1).view(_BITS[word]).view(-1)
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, (start, count, step) in enumerate(zip(box.start, box.size, _strides(shape), strict=True)):
        last = dim == len(shape) - 1
        start, count, step = (start // per_word, count // per_word, 1) if last else (start, count, step // per_word)
        index = index.unsqueeze(-1) + torch.arange(start, start + count, device=values.device) * step
    flat = index.reshape(-1)
    total = 0
    for offset in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[offset : offset + _CHUNK_WORDS].to(torch.int64)
        at = flat[offset : offset + _CHUNK_WORDS]
        low = (chunk + at * KEY_LOW) & _MASK
        high = ((chunk >> 32) + at * KEY_HIGH + KEY_SHIFT) & _MASK
        total += int((low * high).sum())
    return total % (1 << 64)


def _word_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return 8 if len(shape) > 1 and shape[-1] * dtype.itemsize % 64 == 0 else dtype.itemsize


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _threads() -> int:
    return torch.get_num_threads()


@cache
def _pool_of(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weights")


def _pool() -> ThreadPoolExecutor:
    return _pool_of(os.getpid(), _threads())
