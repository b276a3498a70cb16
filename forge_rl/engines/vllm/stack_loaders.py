"""Loads stacks of experts into vLLM's parameters, with one copy per stack instead of one per expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from forge_rl.engines.vllm import internals
from forge_rl.weights.stacks import Stack


class StackLoaders:
    """Makes the loaders of vLLM's experts take whole stacks, and feeds them.

        loaders = StackLoaders(model)
        model.load_weights(loaders.tensors(stacks))

    vLLM's `load_weights` gets the first tensor of a stack. If it passes this tensor, or a view of it, to the loader of
    an expert, that loader takes the same view of the whole stack. Otherwise the stack is loaded tensor by tensor.

    Args:
        model: vLLM's model, once a reload has begun.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._stack: Stack | None = None
        """Stack whose first tensor vLLM is loading."""
        self._is_taken = False
        for layer in model.modules():
            internals.accept_stacks(layer, self._expand)

    def tensors(self, stacks: Sequence[Stack]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values for `load_weights`: a stack's first tensor, and the rest unless a loader took all."""
        for stack in stacks:
            self._stack, self._is_taken = stack, False
            try:
                # While the consumer holds this tensor, loaders recognise it by its address and may take the whole
                # stack.
                yield stack.entries[0].name, stack.values[0]
            finally:
                self._stack = None
            if not self._is_taken:
                for entry, values in zip(stack.entries[1:], stack.values[1:], strict=True):
                    yield entry.name, values

    def _expand(self, values: torch.Tensor, expert: int) -> torch.Tensor | None:
        """Return the view of the whole stack that corresponds to `values`, a view of its first tensor; None for any
        other tensor."""
        stack = self._stack
        if stack is None or len(stack.entries) == 1 or expert != stack.expert:
            return None
        first = stack.values[0]
        begin = first.data_ptr()
        # Anything else than a view of the stack's first tensor, such as a converted copy, is loaded alone.
        if not begin <= values.data_ptr() < begin + first.nbytes or values.dtype != first.dtype:
            return None
        self._is_taken = True
        return values.as_strided((len(stack.entries), *values.shape), (stack.values.stride(0), *values.stride()))
