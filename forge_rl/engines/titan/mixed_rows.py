"""Passes of several adapters over shared rows: one pass over the base, and each adapter's own loss and gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from forge_rl.algorithms.logprobs import Scoring, TokenScores
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.engines.titan.adapter_switch import AdapterSwitch, RowPart
from forge_rl.engines.titan.lora import row_parts
from forge_rl.engines.titan.measures import Measures, measure_tokens, measured_loss
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.engines.titan.scoring import reshard
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.engines.titan.update import Update, minibatch_statistics
from forge_rl.errors import ForgeError, LossError
from forge_rl.metrics import Mean, Sum
from forge_rl.packing.rows import Row


@dataclass(eq=False)
class MixedPass:
    """One adapter's pass among several, and its result."""

    update: Update
    backward: bool
    switch: AdapterSwitch
    """The adapter's scale, seed and dropout."""
    planned: int
    """Number of the adapter's earlier passes."""
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """A and B of each adapted module, by name; leaves that accumulate the gradients."""
    statistics: Sequence[Mapping[str, torch.Tensor]] = ()
    """The loss's statistics of each row."""
    measures: Measures = field(default_factory=Measures)
    logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    """[L] of each row by its index, on the device."""
    finite: list[torch.Tensor] = field(default_factory=list)
    """For each row of a backward pass, whether its loss's gradient by the scores is finite; on the device, read once at
    the end."""
    error: ForgeError | None = None

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield A and B of each module in turn."""
        for pair in self.factors.values():
            yield from pair

    def check_gradient(self) -> None:
        """Set the error if a gradient is not finite."""
        sums = [leaf.grad.abs().sum().isfinite() for leaf in self.leaves() if leaf.grad is not None]
        if self.error is None and self.finite and not all(torch.stack([*self.finite, *sums]).tolist()):
            self.error = LossError(
                "the gradient of this pass is not finite, and is dropped",
                hint="look for NaN or infinite numbers in its rows, or lower the learning rate",
            )


@dataclass(frozen=True, eq=False)
class _PassRow:
    """One row of a pass."""

    mixed_pass: MixedPass
    index: int

    @property
    def row(self) -> Row:
        return self.mixed_pass.update.minibatch.rows[self.index]

    @property
    def kind(self) -> tuple[bool, Scoring, bool, int]:
        """What rows must have in common to be computed together."""
        update, top_ids = self.mixed_pass.update, self.row.columns.get("top_ids")
        observations = "observations" in update.loss.needs
        return self.mixed_pass.backward, update.scoring, observations, 0 if top_ids is None else top_ids.shape[1]

    def part(self, tokens: slice) -> RowPart:
        """Return this row as part of a longer one."""
        mixed_pass = self.mixed_pass
        switch = replace(mixed_pass.switch)
        switch.draw(self.row, mixed_pass.planned)
        return RowPart(tokens, switch, mixed_pass.factors)


def run_mixed(engine: TitanEngine, passes: Sequence[MixedPass], longest: int) -> None:
    """Run passes over rows of at most `longest` tokens, each shared by one or more adapters.

    Errors and gradients are left in the passes.

    Raises:
        Exception: a row could not be computed, such as for lack of memory; no pass counts then.
    """
    # Losses with statistics need all scores of their pass before the first gradient.
    _find_statistics(engine, passes, longest)
    for rows in _arranged(_rows_of(passes), longest):
        _run_row(engine, rows)
    reshard(engine.model)
    for mixed_pass in passes:
        mixed_pass.check_gradient()


def joined(rows: Sequence[Row]) -> Row:
    """Lay rows end to end, without any of them seeing another.

    They keep their padding. Where attention is computed in blocks, no block then holds tokens of two rows, where 0
    times one row's NaN would spread to the other.
    """
    starts = list(accumulate((len(row) for row in rows), initial=0))
    # Tree numbers are shifted so that rows stay in different trees; padding stays negative.
    trees = list(accumulate((int(row.trees.max()) + 1 for row in rows), initial=0))
    # Experts' choices are left out: models with experts are not mixed.
    tensors = {name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].tensors() if name != "routed"}
    tensors["until"] = torch.cat([row.until + start for row, start in zip(rows, starts, strict=False)])
    tensors["trees"] = torch.cat(
        [torch.where(row.trees < 0, row.trees, row.trees + first) for row, first in zip(rows, trees, strict=False)]
    )
    names = [name for name in rows[0].columns if name == "top_ids"]  # losses get the others from their own rows
    columns = {name: torch.cat([row.columns[name] for row in rows]) for name in names}
    return Row(**tensors, columns=columns)


def _rows_of(passes: Iterable[MixedPass]) -> Iterator[_PassRow]:
    for mixed_pass in passes:
        yield from (_PassRow(mixed_pass, index) for index in range(len(mixed_pass.update.minibatch.rows)))


def _arranged(rows: Iterable[_PassRow], longest: int) -> list[list[_PassRow]]:
    """Put each row into the first bin of its kind with room for it."""
    bins = list[tuple[object, list[_PassRow]]]()
    for pass_row in rows:
        for kind, bin_rows in bins:
            if kind == pass_row.kind and sum(len(other.row) for other in bin_rows) + len(pass_row.row) <= longest:
                bin_rows.append(pass_row)
                break
        else:
            bins.append((pass_row.kind, [pass_row]))
    return [bin_rows for _, bin_rows in bins]


def _slices(rows: Sequence[_PassRow]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate((len(row.row) for row in rows), initial=0))]


def _score(engine: TitanEngine, rows: Sequence[_PassRow]) -> TokenScores:
    """Compute the forward pass of rows laid end to end."""
    _, scoring, observations, _ = rows[0].kind
    device_row = engine.scorer.on_device(joined([row.row for row in rows]), observations=observations)
    return engine.scorer.score(engine.model, device_row, scoring)


def _part(scores: TokenScores, tokens: slice) -> TokenScores:
    """Cut out one row's scores, as leaves of its loss."""

    def leaf(values: torch.Tensor) -> torch.Tensor:
        return values.detach()[tokens].clone().requires_grad_(values.requires_grad)

    squares = None if scores.squares is None else scores.squares[tokens]
    return TokenScores(leaf(scores.logprobs), leaf(scores.entropy), squares)


def _inputs(device_row: DeviceRow, pass_row: _PassRow, scores: TokenScores) -> LossInputs:
    mixed_pass, index = pass_row.mixed_pass, pass_row.index
    statistics = mixed_pass.statistics[index] if mixed_pass.statistics else {}
    return mixed_pass.update.inputs(index, device_row.row, scores, statistics)


@torch.no_grad()
def _find_statistics(engine: TitanEngine, passes: Sequence[MixedPass], longest: int) -> None:
    """Compute the statistics of each loss that needs them, over the rows of its own pass."""
    needing = [mixed_pass for mixed_pass in passes if mixed_pass.update.needs_statistics]
    inputs = {id(mixed_pass): dict[int, tuple[LossInputs, torch.Tensor]]() for mixed_pass in needing}
    for rows in _arranged(_rows_of(needing), longest):
        slices = _slices(rows)
        with row_parts(engine.model, [row.part(tokens) for row, tokens in zip(rows, slices, strict=True)]):
            scores = _score(engine, rows)
        for row, tokens in zip(rows, slices, strict=True):
            device_row = engine.scorer.on_device(row.row)
            places = device_row.row.mask.nonzero()[:, 0]
            # Statistics belong to one pass each, however its rows were arranged.
            row_inputs = _inputs(device_row, row, _part(scores, tokens))
            inputs[id(row.mixed_pass)][row.index] = row_inputs.at(places), places
    reshard(engine.model)
    for mixed_pass in needing:
        # Back into the order of the pass's own rows.
        parts = [part for _, part in sorted(inputs[id(mixed_pass)].items())]
        lengths = [len(row) for row in mixed_pass.update.minibatch.rows]
        row_places = [(indices, length) for (_, indices), length in zip(parts, lengths, strict=True)]
        try:
            mixed_pass.statistics = minibatch_statistics(
                mixed_pass.update.loss, [tokens for tokens, _ in parts], row_places, peers=1
            )
        except ForgeError as error:
            mixed_pass.error = error


def _run_row(engine: TitanEngine, rows: Sequence[_PassRow]) -> None:
    """Run the passes of rows laid end to end."""
    slices = _slices(rows)
    backward = rows[0].mixed_pass.backward
    with row_parts(engine.model, [row.part(tokens) for row, tokens in zip(rows, slices, strict=True)]):
        recorded = None
        if backward and any(row.mixed_pass.switch.lora.dropout for row in rows):
            with torch.no_grad():  # without dropout
                recorded = _score(engine, rows)
            reshard(engine.model)
        # The kind includes `backward`, so the rows agree on it.
        with torch.set_grad_enabled(backward):
            scores = _score(engine, rows)
        # Each loss is cut off from the shared pass, so that its gradient can be checked before it flows into shared
        # layers.
        grads = [_gradients(engine, row, _part(scores, tokens)) for row, tokens in zip(rows, slices, strict=True)]
        for row, tokens in zip(rows, slices, strict=True):
            row.mixed_pass.logprobs[row.index] = (recorded or scores).first[tokens].detach()
        if backward:
            outputs = [output for output in (scores.logprobs, scores.entropy) if output.requires_grad]
            # One backward pass serves all adapters.
            torch.autograd.backward(outputs, [torch.cat(parts) for parts in zip(*grads, strict=True)])


def _gradients(engine: TitanEngine, pass_row: _PassRow, scores: TokenScores) -> list[torch.Tensor]:
    """Compute a row's loss, measure it, and return the loss's gradient by each score that has one.

    A gradient that is not finite fails the pass and is replaced by zeros: the base's layers compute all rows together.
    """
    mixed_pass, update = pass_row.mixed_pass, pass_row.mixed_pass.update
    leaves = [output for output in (scores.logprobs, scores.entropy) if output.requires_grad]
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    # Its rows still run with the others', but contribute no gradient.
    if mixed_pass.error is not None:
        return zeros
    device_row = engine.scorer.on_device(pass_row.row, observations="observations" in update.loss.needs)
    inputs = _inputs(device_row, pass_row, scores)
    try:
        loss = measured_loss(update.loss, inputs, mixed_pass.measures, []) / update.divisor
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    except ForgeError as error:
        mixed_pass.error = error
        return zeros
    mixed_pass.measures.add("loss", Mean, loss.detach(), 1 / len(update.minibatch.rows))
    if not mixed_pass.backward:
        mixed_pass.measures.add("tokens/trained", Sum, device_row.tokens)
        return zeros
    measure_tokens(inputs, device_row.tokens, mixed_pass.measures, update.version)
    row_grads = [zero if grad is None else grad for zero, grad in zip(zeros, grads, strict=True)]
    is_finite = torch.stack([grad.isfinite().all() for grad in row_grads]).all()
    mixed_pass.finite.append(is_finite)
    # On the device: no sync per row, see `check_gradient`.
    return [torch.where(is_finite, grad, 0.0) for grad in row_grads]
