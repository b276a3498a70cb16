"""Adapters' factors in a model: the parameters that hold them, and the weights that their product is added to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forge_rl.engines.titan.shards import ADAPTERS, names_of
from forge_rl.models.adapter_products import AdapterProduct
from forge_rl.weights.names import Part, SameNames


@dataclass(frozen=True, kw_only=True, eq=False)
class FactorPair:
    """A and B of one adapter: [rank, inputs] and [outputs, rank] for a linear layer, or stacks of both, with a leading
    dim for experts."""

    module: Any
    """Module that holds them and the weights."""
    path: str
    """The model's name of the module."""
    prefix: str
    """Start of the factors' names in the module; empty in a linear layer."""
    name: str
    """Hugging Face's name of the adapted weight; for experts, transformers' name of the stack."""
    weights: Mapping[str, slice]
    """Rows of B that belong to each weight, by the model's name of the weight."""
    transposed: bool
    """True if the weights are [inputs, outputs]."""

    @property
    def parameter_names(self) -> tuple[str, str]:
        """Names of A and B in the module."""
        a_name, b_name = ADAPTERS
        return f"{self.prefix}{a_name}", f"{self.prefix}{b_name}"

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B; this rank's shards in a distributed model."""
        a_name, b_name = self.parameter_names
        return getattr(self.module, a_name), getattr(self.module, b_name)

    @property
    def scale(self) -> float:
        """Factor on B A."""
        scale: float = self.module.adapters.lora.scale_of(self.parameters[0].shape[-2])
        return scale

    def published(
        self, model: nn.Module, factors: tuple[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the name of each published tensor with views of A and B whose product B A has its shape. If files hold
        experts apart, each expert's matrix has a pair."""
        for weight, rows in self.weights.items():
            shape = getattr(self.module, weight.rpartition(".")[2]).shape
            for part in names_of(model).parts(weight, shape):
                yield part.name, *self._cut(part, factors[0], factors[1][..., rows, :])

    def products(
        self, model: nn.Module, factors: tuple[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[str, slice, AdapterProduct]]:
        """Yield products of whole factors: the model's name of a weight, rows of it (of each expert's), and the product
        that is added to these. Rows that are published as one tensor have a product of their own."""
        for weight, rows in self.weights.items():
            a, b = factors[0], factors[1][..., rows, :]
            # The stored weight is (B A)^T = A^T B^T.
            if self.transposed:
                a, b = b.mT, a.mT
            shape = getattr(self.module, weight.rpartition(".")[2]).shape
            # Experts repeat the same rows, so one entry for each range is enough.
            tensors = {part.rows.start: part.rows for part in names_of(model).parts(weight, shape) if part.rows}
            for part_rows in tensors.values() or [slice(None)]:
                yield weight, part_rows, AdapterProduct(a, b[..., part_rows, :], self.scale)

    def _cut(self, part: Part, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if part.index is not None:
            a, b = a[part.index], b[part.index]
        if part.rows is not None:
            b = b[..., part.rows, :]
        # Files may hold the weight the other way round than the model does.
        return (b.mT, a.mT) if part.transposed != self.transposed else (a, b)


def factor_pairs(model: nn.Module) -> Iterator[FactorPair]:
    """Yield a model's adapters, in the order of its modules."""
    names = names_of(model)
    for path, module in model.named_modules():
        stem = path.replace("_checkpoint_wrapped_module.", "")
        layouts: Mapping[str, Mapping[str, slice]] = getattr(module, "adapted_weights", {})
        for prefix, rows in layouts.items():
            weights = {f"{stem}.{weight}": weight_rows for weight, weight_rows in rows.items()}
            first, is_stack = next(iter(weights)), bool(prefix)
            # A linear layer has a name in the files; a stack is named like transformers' own, even if files hold
            # experts apart.
            if not is_stack:
                name = names.to_hf(first)
            elif isinstance(names, SameNames):
                name = first
            else:
                file_name = next(names.parts(first, getattr(module, first.rpartition(".")[2]).shape)).name
                name = f"{file_name.partition('.experts.')[0]}.experts.{prefix}proj"
            transposed = bool(getattr(module, "is_transposed", False))
            yield FactorPair(module=module, path=stem, prefix=prefix, name=name, weights=weights, transposed=transposed)
