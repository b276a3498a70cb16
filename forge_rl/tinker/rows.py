"""Data of a request as packed rows, and rows' logprobs as the data's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forge_rl.gateway.errors import ApiError
from forge_rl.packing.rows import Layout, Minibatch, Row
from forge_rl.tinker.losses import INPUTS, WEIGHTS
from forge_rl.tinker.wire import Datum, PassRequest

if TYPE_CHECKING:
    import torch

TARGETS = "target_tokens"


def check_data(request: PassRequest, *, vocab_size: int, most_tokens: int) -> None:
    """Check that data fit their loss and the model.

    Raises:
        ApiError: names the first value that does not.
    """
    names = {TARGETS, *INPUTS[request.loss_fn]}
    for index, datum in enumerate(request.data):
        where, length = f"data.{index}", len(datum.tokens)
        if not 0 < length <= most_tokens:
            raise ApiError(400, f"{length} tokens; a datum has 1 to {most_tokens}", param=f"{where}.model_input")
        if names != datum.inputs.keys():
            raise ApiError(
                400,
                f"{request.loss_fn} takes {', '.join(sorted(names))}, and the datum has "
                f"{', '.join(sorted(datum.inputs))[:200]}",
                param=f"{where}.loss_fn_inputs",
            )
        for name, values in datum.inputs.items():
            param = f"{where}.loss_fn_inputs.{name}"
            if len(values) != length:
                raise ApiError(400, f"{name} has {len(values)} values for {length} tokens", param=param)
            if name != TARGETS and not np.isfinite(values).all():
                raise ApiError(400, f"{name} has a value that is not finite", param=param)
        for name, ids in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
            if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocab_size:
                raise ApiError(400, f"{name} has a token that is not from 0 to {vocab_size - 1}", param=where)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedData:
    """Data of one request packed into rows, unsplit and in order, so that the result depends only on the request."""

    minibatch: Minibatch
    places: Sequence[tuple[int, slice]]
    """Row index and positions of each datum."""

    @staticmethod
    def pack(data: Sequence[Datum], layout: Layout) -> PackedData:
        """Lay data out in rows of at most the layout's length."""
        rows: list[list[Datum]] = [[]]
        places: list[tuple[int, slice]] = []
        used = 0
        for datum in data:
            length = len(datum.tokens)
            # Never split: a datum that does not fit begins the next row.
            if rows[-1] and used + length > layout.longest:
                rows.append([])
                used = 0
            rows[-1].append(datum)
            places.append((len(rows) - 1, slice(used, used + length)))
            used += length
        # Each data-parallel share takes the same number of rows; empty ones fill up.
        rows += [[] for _ in range(-len(rows) % layout.shares)]
        first = 0
        packed_rows = []
        for examples in rows:
            packed_rows.append(_row(examples, first, layout))
            first += len(examples)
        tokens = sum(len(datum.tokens) for datum in data)
        return PackedData(
            minibatch=Minibatch(rows=tuple(packed_rows), tokens=tokens, sequences=len(data)), places=places
        )

    def of_data(self, logprobs: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        """Return the logprobs of each datum's targets, [T], out of the rows' logprobs."""
        return [logprobs[row][place] for row, place in self.places]


def _row(data: Sequence[Datum], first: int, layout: Layout) -> Row:
    """Lay out one row; `first` is the index of its first datum in the request."""
    import torch

    lengths = [len(datum.tokens) for datum in data]
    parts = layout.context_parallel_degree
    multiple = layout.pad_multiple * layout.tensor_parallel_degree
    # A row is cut into equal parts, one for each context-parallel device, all of them padded alike.
    part = max(layout.least_tokens, -(-sum(lengths) // parts), 1)
    size = parts * (-(-part // multiple) * multiple)

    def laid(values: Sequence[npt.NDArray[Any]], dtype: type[np.generic], padding: float = 0) -> torch.Tensor:
        row = np.full(size, padding, dtype)
        if values:
            row[: sum(lengths)] = np.concatenate(values)
        return torch.from_numpy(row)

    def each(numbers: Sequence[int]) -> list[npt.NDArray[Any]]:
        return [np.full(length, number) for length, number in zip(lengths, numbers, strict=True)]

    def given(name: str) -> torch.Tensor:
        return laid([datum.inputs.get(name, np.zeros(len(datum.tokens))) for datum in data], np.float32)

    ends = np.cumsum(lengths).tolist()
    return Row(
        token_ids=laid([datum.tokens for datum in data], np.int64),
        positions=laid([np.arange(length) for length in lengths], np.int64),
        # Each datum is a tree of its own, which attention does not leave; padding is in none.
        trees=laid(each(range(len(data))), np.int32, -1),
        # A key is seen by queries up to the end of its datum; see `packing.rows.attends`.
        until=laid(each(ends), np.int32, size),
        # Clients give targets explicitly, instead of the next tokens of the row.
        targets=laid([datum.inputs[TARGETS] for datum in data], np.int64),
        mask=laid(each([1] * len(data)), np.bool_),
        behaviour=given("logprobs"),
        advantages=given("advantages"),
        versions=laid(each([-1] * len(data)), np.int32, -1),
        episodes=laid(each(range(first, first + len(data))), np.int32, -1),
        segments=laid(each([0] * len(data)), np.int32, -1),
        turns=laid(each([0] * len(data)), np.int32, -1),
        lengths=laid(each(lengths), np.int32, 1),
        observed=laid([], np.bool_),
        columns={WEIGHTS: given("weights")},
    )
