"""Weights of a model that one rank holds whole: float32 masters, and copies in the dtype of the passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from forge_rl.engines.titan.gradient_sums import GradientSum, SumPlace, joint_dim

_LARGE = 320 << 16
"""Number of elements up to which torch copies many tensors in one operation; a larger tensor takes one of its own."""


class MasterWeights:
    """Runs a model's passes on copies of its weights in a narrower dtype, and adds up their gradients in float32.

        model.masters = MasterWeights(model, torch.bfloat16)
        model(tokens, positions, masks).sum().backward()  # the forward pass makes the copies, for all further passes
        model.masters.release()  # the model has its float32 weights again, and these have the gradients

    FSDP on one rank would cast each weight in two operations, and copy each gradient three times.

    On a CPU, where a cast is a large part of a short pass, copies that served passes without gradients stay after
    `release`, and serve the next passes unless a master has changed since. A write must therefore increment the
    master's `_version`; torch's operations do, its fused optimizers do not (see `make_optimizer`). After passes with
    gradients the copies are freed, because the update that follows changes the masters and needs the memory.

    Modules may name weights that one product reads, in `joint_weights`: their copies lie one after the other,
    as one weight that `joint_weight` returns.

    Args:
        dtype: dtype of the copies. Frozen weights that have it already are used as they are.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if (
                    weight is not None
                    and weight.is_floating_point()
                    and (weight.dtype != dtype or weight.requires_grad)
                ):
                    places.setdefault(weight, []).append((module, name))
        self._places = places
        self._units = [_Unit(masters) for masters in _grouped(model, places)]
        self._is_cast = self._stays = False
        self._sources: list[torch.Tensor] = []
        self._versions: list[tuple[int, int, bool]] = []
        # Made at the first forward pass, copies serve all rows until `release`.
        model.register_forward_pre_hook(lambda *_: self.cast(stays=not torch.is_grad_enabled()))

    @torch.no_grad()
    def cast(self, *, stays: bool = False) -> None:
        """Put copies of the masters in their places, unless they are there.

        Args:
            stays: whether `release` leaves the copies to later passes, if all calls since the last one agree.
        """
        if self._is_cast:
            self._stays &= stays
            return
        if not self._sources or self._versions != self._current_versions():
            self.free()
            self._copy()
        for unit in self._units:
            for master, weight in zip(unit.masters, unit.copies, strict=True):
                self._put(master, weight)
        self._is_cast, self._stays = True, stays and all(master.is_cpu for master in self._places)

    def _current_versions(self) -> list[tuple[int, int, bool]]:
        """Return each master's address, which changes when it gets other memory, its count of writes, and whether it is
        trained."""
        return [(master.data_ptr(), master._version, master.requires_grad) for master in self._places]

    def _copy(self) -> None:
        """Make copies of the masters."""
        copies, masters = list[torch.Tensor](), list[torch.Tensor]()
        for unit in self._units:
            # The copies' memory is filled below, in as few operations as torch allows.
            copies += [weight.data for weight in unit.cast(self._dtype)]
            masters += unit.masters
        sizes = [values.numel() for values in copies]
        for values, large_master, size in zip(copies, masters, sizes, strict=True):
            if size >= _LARGE:
                values.copy_(large_master)
        if small := [index for index, size in enumerate(sizes) if size < _LARGE]:
            torch._foreach_copy_([copies[index] for index in small], [masters[index] for index in small])
        self._versions = self._current_versions()
        # Held, so that other values cannot take the same address while the copies stay.
        self._sources = [master.detach() for master in masters]

    def release(self) -> None:
        """Put the masters back, and free the copies unless they stay."""
        if not self._is_cast:
            return
        for master in self._places:
            self._put(master, master)
        self._is_cast = False
        if not self._stays:
            self.free()

    def free(self) -> None:
        """Free the copies, which must not be in use."""
        assert not self._is_cast, "release comes first"
        self._sources = []
        for unit in self._units:
            unit.release()

    def _put(self, master: nn.Parameter, weight: nn.Parameter) -> None:
        for module, name in self._places[master]:
            module._parameters[name] = weight


def joint_weight(*weights: torch.Tensor) -> torch.Tensor | None:
    """Return copies of masters as one weight, see `joint_dim`; None unless they lie one after the other."""
    unit: _Unit | None = getattr(weights[0], "unit", None)
    return unit.whole if unit is not None and unit.holds(weights) else None


class _Unit:
    """Masters whose copies, and gradients' sums, lie one after the other."""

    def __init__(self, masters: Sequence[nn.Parameter]) -> None:
        self.masters = masters
        self.whole: nn.Parameter | None = None
        """All copies as one weight, while there are any."""
        self.copies: list[nn.Parameter] = []
        """Copies of the masters, in order; empty while there are none."""
        self._sum = GradientSum(masters)

    def cast(self, dtype: torch.dtype) -> list[nn.Parameter]:
        """Allocate the copies; the caller fills in their values."""
        is_trained, dim, shape = self.masters[0].requires_grad, joint_dim(self.masters), [*self.masters[0].shape]
        lengths = [master.shape[dim] for master in self.masters]
        shape[dim] = sum(lengths)
        values = self.masters[0].new_empty(shape, dtype=dtype)
        self.whole = nn.Parameter(values, requires_grad=is_trained)
        self.copies = [nn.Parameter(part, requires_grad=is_trained) for part in values.split(lengths, dim)]
        if is_trained:
            # The joint copy and its parts add to the same sum, whichever a product reads.
            self._add_up(self.whole, None)
            for member, copy in enumerate(self.copies):
                self._add_up(copy, member)
        for copy in self.copies:
            copy.unit = self  # type: ignore[attr-defined]
        return self.copies

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether the weights are exactly the copies, in order."""
        return len(weights) == len(self.copies) and all(
            weight is copy for weight, copy in zip(weights, self.copies, strict=True)
        )

    def release(self) -> None:
        """Free the copies."""
        self._sum.settle()
        self.whole = None
        for copy in self.copies:
            del copy.unit  # type: ignore[attr-defined]
        self.copies = []

    def _add_up(self, copy: nn.Parameter, member: int | None) -> None:
        """Route a copy's gradients to its master: by functions that know the place, or by a hook on autograd's own."""
        place = SumPlace(self._sum, member)
        copy.sum_place = place  # type: ignore[attr-defined]

        def take(weight: torch.Tensor) -> None:
            grad, weight.grad = weight.grad, None
            if grad is not None:  # else the function that used the weight has added it
                place.add(grad)

        copy.register_post_accumulate_grad_hook(take)


def _grouped(model: nn.Module, masters: Any) -> Iterator[list[nn.Parameter]]:
    """Group the masters into units, each at the place of its first master."""
    joint_masters: dict[nn.Parameter, list[nn.Parameter]] = {}
    for module in model.modules():
        for weights in getattr(module, "joint_weights", ()):
            # Joint copies share one buffer, so members may differ only in the dimension along which they are joined.
            is_alike = len({(weight.requires_grad, weight.shape[1:]) for weight in weights}) == 1
            if is_alike and len(set(weights)) == len(weights) and all(weight in masters for weight in weights):
                joint_masters |= dict.fromkeys(weights, weights)
    yielded = set[nn.Parameter]()
    for master in masters:
        if master not in yielded:
            group = joint_masters.get(master, [master])
            yielded |= set(group)
            yield group
