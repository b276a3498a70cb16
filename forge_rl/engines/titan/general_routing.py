"""Routers of transformers' models: replay the engine's choices of experts, and count the tokens of each expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from forge_rl.engines.families.tensor_plan import expert_routers
from forge_rl.engines.titan.routing import choice_counts


class GeneralRouter:
    """A router of transformers' code, with what `routing.ReplayRouter` has for a model's replay and metrics.

    transformers' routers differ in how they score experts and weigh the chosen ones, but all choose by `topk` of scores
    for each token. Replay replaces what that call chooses; everything before and after it is the model's own code.

    Args:
        module: the router, whose forward pass is wrapped.
        layer: index of its layer in the model, including dense layers.
    """

    def __init__(self, module: Any, layer: int) -> None:
        self.layer = layer
        self.top_k: int = module.top_k
        self.experts: int = module.num_experts
        self.real: torch.Tensor | None = None
        """[1, L] bool, False in padding; None to count nothing."""
        self.replayed: torch.Tensor | None = None
        """Experts to use, [1, L, top_k] int64, -1 where unknown; None to choose all of them."""
        self.counts: torch.Tensor | None = None
        """Counts of the last forward pass, see `ReplayRouter.counts`."""
        module.forward = self._choosing(module.forward)

    def choose(self, scores: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return each token's experts, [L, top_k] int64.

        Args:
            scores: [L, experts], by which the router chooses.
            expert_ids: its own choice, [L, top_k].
        """
        router_ids, is_replayed = expert_ids, None
        if self.replayed is not None:
            is_replayed = (self.replayed[0] >= 0).all(-1)
            expert_ids = self.replayed[0].to(expert_ids).where(is_replayed[:, None], expert_ids)
        if self.real is not None:
            self.counts = choice_counts(expert_ids, router_ids, self.real[0], is_replayed, self.experts)
        return expert_ids

    def _choosing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _RoutedTopk(self):
                return forward(*args, **kwargs)

        return run


class _RoutedTopk(TorchFunctionMode):
    """Hands the scores by which a router chooses experts to a `GeneralRouter`.

    The values of `topk` become a tensor of their own, which routers may change in place: selective activation
    checkpointing keeps what `topk` returned.
    """

    def __init__(self, router: GeneralRouter) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return outputs
        scores, expert_ids = args[0], outputs[1]
        if expert_ids.shape != (len(scores), self._router.top_k) or scores.shape[-1] != self._router.experts:
            return outputs  # it ranks groups of experts
        expert_ids = self._router.choose(scores, expert_ids)
        # The router weighs replayed experts by its own scores, so the weights keep their gradient.
        return torch.return_types.topk((scores.gather(-1, expert_ids), expert_ids))


def general_routers(causal: Any) -> list[GeneralRouter]:
    """Wrap the routers of a model on transformers' code, from the first layer to the last; empty if it is dense, or if
    its routers are not understood."""
    return [GeneralRouter(router, layer) for layer, router in expert_routers(causal).items()]
