"""Fingerprints of tensors: over every byte, additive over any split of a tensor, and free while copying.

A tensor's fingerprint is the sum, modulo 2**64, over its words of (low + i a) * (high + i b + c), where low and high
are a word's 32-bit halves, i is its index in the whole tensor, and each factor is taken modulo 2**32. That is NH, the
sum of products behind UMAC and XXH3 (Black et al., "UMAC: Fast and Secure Message Authentication", 1999), with keys
that are multiples of the index. Parts can be fingerprinted in place and add up to the whole. It detects changed,
swapped, shifted and missing values, but is not collision-resistant against an attacker.

A word is 8 bytes if the tensor has at least two dims and the last is a multiple of 64 bytes; else it is one element,
sign-extended (zero-extended if it is one byte).
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, NamedTuple, SupportsInt

import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.slices import TensorSlice

_MASK = 0xFFFFFFFF
CHUNK_WORDS = 1 << 22
"""Words that the torch loop processes at a time, from one block or several; bounds its temporaries, a few of 32 MiB."""
_TASK_WORDS = 1 << 19  # of one thread's turn: 4 MiB
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Move(NamedTuple):
    """A block of a tensor to copy and fingerprint."""

    target: torch.Tensor | None
    """Destination, of the slice's size and the published dtype; None only fingerprints the source."""
    source: torch.Tensor
    """Values, of the slice's size; of any dtype if there is a target."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor_slice: TensorSlice
    """Place of the block in the whole tensor."""


def fingerprint(values: torch.Tensor, shape: Sequence[int], tensor_slice: TensorSlice | None = None) -> int:
    """Fingerprint of a block of a tensor.

    Args:
        values: the block, any dtype and device.
        shape: shape of the whole tensor.
        tensor_slice: the block's slice of it; all of it by default.

    Returns:
        An unsigned 64-bit integer; `combine` adds all blocks' fingerprints up to the whole tensor's:

            combine([fingerprint(top, shape, top_slice), fingerprint(rest, shape, rest_slice)])
    """
    return move([Move(None, values.detach(), tuple(shape), tensor_slice or TensorSlice.whole(shape))])[0]


def combine(parts: Iterable[int]) -> int:
    """Combine the fingerprints of all blocks into the whole tensor's."""
    return sum(parts) % (1 << 64)


def move(moves: Sequence[Move]) -> list[int]:
    """Copy and cast blocks, and fingerprint the result, in one pass on all of torch's threads.

    Args:
        moves: blocks to copy; targets must not overlap.

    Returns:
        The fingerprint of each block.

    Raises:
        WeightsError: a block begins or ends within a word.
    """
    totals = [0] * len(moves)
    cpu_numbers: list[int] = []
    batches: dict[tuple[object, ...], _BlockBatch] = {}
    results: list[tuple[list[int], torch.Tensor]] = []
    for number, (target, source, shape, tensor_slice) in enumerate(moves):
        dtype = source.dtype if target is None else target.dtype
        if not tensor_slice.numel:
            continue
        _check_words(shape, tensor_slice, dtype)
        if source.device.type == "cpu" and (target is None or target.device.type == "cpu"):
            cpu_numbers.append(number)
        else:
            values = source.to(dtype)
            if target is not None:
                target.copy_(values, non_blocking=values.is_cuda)
            key = (shape, tensor_slice, dtype, values.device)
            # A mixture has thousands of experts of one shape: one set of kernel launches for many instead of a dozen
            # for each.
            batch = batches.setdefault(key, _BlockBatch(shape, tensor_slice, [], []))
            batch.numbers.append(number)
            batch.blocks.append(values)
            # A full batch is computed at once: its blocks may be cast copies, which would pile up on the device.
            if len(batch.blocks) * values.nbytes >= CHUNK_WORDS * _word_bytes(shape, dtype):
                results.append(batches.pop(key).fingerprints())
    results += [batch.fingerprints() for batch in batches.values()]
    # The CPU's blocks are done while the device still computes.
    for number, part in _run((index, task) for index in cpu_numbers for task in _tasks(*moves[index])):
        totals[number] = (totals[number] + part) % (1 << 64)
    if results:  # the only device sync, which also waits for the copies
        device = results[0][1].device
        numbers = [number for batch_numbers, _ in results for number in batch_numbers]
        for number, total in zip(
            numbers, torch.cat([values.to(device) for _, values in results]).tolist(), strict=True
        ):
            totals[number] = total % (1 << 64)
    return totals


class _BlockBatch(NamedTuple):
    """Blocks at the same place in tensors of one shape, such as a layer's experts, which share kernel launches on a
    device."""

    shape: tuple[int, ...]
    tensor_slice: TensorSlice
    numbers: list[int]
    """Number of each block's move."""
    blocks: list[torch.Tensor]

    def fingerprints(self) -> tuple[list[int], torch.Tensor]:
        """Return the moves' numbers and, `[blocks] int64`, their fingerprints, computed asynchronously."""
        return self.numbers, _by_torch(self.blocks, self.shape, self.tensor_slice)


def warm_up() -> None:
    """Load the compiled loops before the first version needs them; compiles them in a new checkout."""
    for source in (torch.zeros(8, 64), torch.zeros(7)):
        shape_and_slice = tuple(source.shape), TensorSlice.whole(source.shape)
        for dtype in (torch.float32, torch.bfloat16):
            move(
                [
                    Move(torch.empty_like(source, dtype=dtype), source, *shape_and_slice),
                    Move(None, source.to(dtype), *shape_and_slice),
                ]
            )


def _tasks(
    target: torch.Tensor | None, source: torch.Tensor, shape: Sequence[int], tensor_slice: TensorSlice
) -> Iterator[Callable[[], SupportsInt]]:
    """Kernel calls that together process one block on CPU, each of about _TASK_WORDS."""
    # Imported late: vLLM's CPU worker, which inspects every module, does not start once llvmlite is loaded.
    from forge_rl.weights import kernels

    dtype = source.dtype if target is None else target.dtype
    word = _BITS[_word_bytes(shape, dtype)]
    # The compiled cast reads four float32 and writes one word of four bfloat16; all other casts are torch's.
    casts = (source.dtype, dtype, word) == (torch.float32, torch.bfloat16, torch.int64) and source.stride(-1) == 1
    source_words = _words(source, torch.int32 if casts else word) if casts or source.dtype == dtype else None
    target_words = source_words if target is None else _words(target, word)
    # Memory that cannot be seen as words (strided in the last dim, or misaligned), or a cast without a loop: torch
    # makes a contiguous copy, and the loops read that.
    if source_words is None or target_words is None:
        source, casts = source.to(dtype, memory_format=torch.contiguous_format, copy=True), False
        source_words = source.view(word)
        if target_words is None and target is not None:
            target.copy_(source)
            target = None
        if target is None:
            target_words = source_words
    assert target_words is not None
    items = 4 if casts else 1  # of the source in a word
    per_word = word.itemsize // dtype.itemsize
    # From elements to words: only the last dim is packed, and the strides of all others are whole words.
    steps = [max(1, step // per_word) for step in _strides(shape)]
    first = sum(start * step for start, step in zip(tensor_slice.start[:-1], steps[:-1], strict=True))
    first += sum(tensor_slice.start[-1:]) // per_word
    step = steps[-2] if len(shape) > 1 else 0
    # Whole rows on both sides are one run of words, whatever the number of dims: one long row instead of many short
    # ones.
    if tensor_slice.size[1:] == shape[1:] and source_words.is_contiguous() and target_words.is_contiguous():
        (rows, words), source_step, target_step = (1, target_words.numel()), 0, 0
        blocks = [(first, target_words.numpy().reshape(-1), source_words.numpy().reshape(-1))]
    else:
        (rows, words), source_step, target_step = (
            target_words.shape[-2:],
            source_words.stride(-2),
            target_words.stride(-2),
        )
        blocks = [
            (first + sum(map(operator.mul, index, steps)), _flat(target_words[index]), _flat(source_words[index]))
            for index in itertools.product(*map(range, target_words.shape[:-2]))
        ]
    # Cut into tasks of about equal size: long rows by columns, short rows several at a time.
    columns = min(words, _TASK_WORDS)
    lines = _TASK_WORDS // columns
    for base, target_items, source_items in blocks:
        for row, column in itertools.product(range(0, rows, lines), range(0, words, columns)):
            extent = (min(lines, rows - row), min(columns, words - column), base + row * step + column, step)
            block = source_items[row * source_step + column * items :]
            if target is None:
                yield partial(kernels.fingerprint_rows, block, source_step, *extent)
            else:
                run = kernels.cast_rows if casts else kernels.copy_rows
                yield partial(run, target_items[row * target_step + column :], target_step, block, source_step, *extent)


def _run(tasks: Iterator[tuple[int, Callable[[], SupportsInt]]]) -> list[tuple[int, int]]:
    """Return the tasks' results with their numbers.

    Each thread makes its own next task while other threads copy: making tasks is Python code, which for a model's
    hundreds of tensors takes a tenth as long as copying them.
    """
    lock, results = threading.Lock(), list[tuple[int, int]]()
    # Both modes are per thread, and vLLM's parameters can be viewed and written in inference mode only.
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def work() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            while True:
                with lock:
                    number, task = next(tasks, (0, None))
                if task is None:
                    return
                results.append((number, int(task())))

    first_tasks = list(itertools.islice(tasks, 2))
    tasks = itertools.chain(first_tasks, tasks)
    helpers = torch.get_num_threads() - 1 if len(first_tasks) > 1 else 0
    futures = [_pool(os.getpid(), helpers).submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        wait(futures)  # an error must leave no thread that writes
    for future in futures:
        future.result()
    return results


def _by_torch(blocks: Sequence[torch.Tensor], shape: Sequence[int], tensor_slice: TensorSlice) -> torch.Tensor:
    """Fingerprint blocks of one slice with torch operations on any device, asynchronously; `[blocks] int64`."""
    from forge_rl.weights.line_loops import KEY_HIGH, KEY_LOW, KEY_SHIFT

    low_key, high_key, shift = int(KEY_LOW), int(KEY_HIGH), int(KEY_SHIFT)
    word = _word_bytes(shape, blocks[0].dtype)
    per_word = word // blocks[0].dtype.itemsize
    values = torch.stack(list(blocks)) if len(blocks) > 1 else blocks[0].contiguous()
    words = values.view(-1).view(_BITS[word]).view(len(blocks), -1)
    sizes = (*tensor_slice.size[:-1], *(count // per_word for count in tensor_slice.size[-1:]))
    starts = (*tensor_slice.start[:-1], *(start // per_word for start in tensor_slice.start[-1:]))
    steps = (*(step // per_word for step in _strides(shape)[:-1]), 1)
    total = torch.zeros(len(blocks), dtype=torch.int64, device=values.device)
    for offset in range(0, words.shape[1], CHUNK_WORDS):
        chunk = words[:, offset : offset + CHUNK_WORDS].to(torch.int64)
        rest = torch.arange(offset, offset + chunk.shape[1], device=values.device)
        index = torch.zeros_like(rest)
        # Unravel the position within the block, last dim first, and move it to its index in the whole tensor.
        for start, size, step in reversed(list(zip(starts, sizes, steps, strict=False))):
            index += (rest % size + start) * step
            rest = rest // size
        # int64 wraps as uint64 does, and the masks undo the sign extension of `>>`, so the sum has the compiled loops'
        # bits.
        low = (chunk + index * low_key) & _MASK
        high = ((chunk >> 32) + index * high_key + shift) & _MASK
        total += (low * high).sum(1)
    return total


def _check_words(shape: Sequence[int], tensor_slice: TensorSlice, dtype: torch.dtype) -> None:
    word = _word_bytes(shape, dtype)
    if any(bound * dtype.itemsize % word for bound in (*tensor_slice.start[-1:], *tensor_slice.size[-1:])):
        raise WeightsError(
            f"a block of a tensor of shape {tuple(shape)} begins or ends within {word} bytes: {tensor_slice}",
            hint="choose a tensor-parallel size that divides the model's dimensions by a multiple of 4",
        )


def _words(values: torch.Tensor, word: torch.dtype) -> torch.Tensor | None:
    """A tensor's memory viewed as words of another dtype; None if that is impossible."""
    if values.dim() and values.stride(-1) != 1:
        return None
    try:
        return values.view(word)
    except RuntimeError:
        return None


def _flat(block: torch.Tensor) -> Any:
    """A one-dimensional array over the memory from the first item of a `[rows, columns]` view to its last."""
    rows, columns = block.shape
    return block.as_strided(((rows - 1) * block.stride(0) + columns,), (1,)).numpy()


def _word_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return 8 if len(shape) > 1 and shape[-1] * dtype.itemsize % 64 == 0 else dtype.itemsize


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return this process's threads; keyed by process, since a fork inherits the cache but no threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="weights")
