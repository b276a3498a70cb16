"""A router's choice of experts and their weights in one kernel forward and one backward, where torch takes eighteen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from forge_rl.engines.titan.block_kernels import power_of_two, warps


class ChoiceRule(NamedTuple):
    """How scores become weights of the chosen experts."""

    top_k: int
    """Experts of a token."""
    is_sigmoid: bool
    """Whether an expert's score is the sigmoid of its logit; else the softmax over all experts."""
    normalises: bool
    """Whether a token's weights are its experts' scores over their sum."""
    scale: float
    """Factor of the weights."""


def chosen_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, [T, K] float32, and ids, [T, K] int64, of each token's experts, highest score first.

    NaN ranks above all numbers. Among equal scores, the expert with the smaller id comes first.

    Args:
        logits: [T, E] float32.
        bias: added to the scores in the choice, not in the weights; [E] or [T, E] float32.
    """
    weights, expert_ids = _ChosenExperts.apply(logits, bias, rule)
    return weights, expert_ids


class _ChosenExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        weights, expert_ids = _choose(logits, None if bias is None else bias.contiguous(), *rule)
        # The scores are recomputed from the logits: one less [T, E] tensor is kept.
        ctx.save_for_backward(logits, expert_ids)
        ctx.rule = rule
        ctx.mark_non_differentiable(expert_ids)
        return weights, expert_ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _choice_gradient(*ctx.saved_tensors, grad.contiguous(), *ctx.rule[1:]), None, None


@torch.library.custom_op("forge_rl::choose_experts", mutates_args=())
def _choose(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, is_sigmoid: bool, normalises: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from forge_rl.engines.titan.triton_experts import choice_kernel

    weights, expert_ids = _choices(logits, bias, top_k, is_sigmoid, normalises, scale)
    tokens, experts = logits.shape
    block = power_of_two(experts)
    choice_kernel[(tokens,)](
        *(logits, bias, weights, expert_ids, experts, top_k, scale),
        # Stride 0 lets all tokens read the same bias.
        bias_stride=experts if bias is not None and bias.ndim == 2 else 0,
        BIASED=bias is not None,
        SIGMOID=is_sigmoid,
        NORMALISES=normalises,
        BLOCK=block,
        num_warps=warps(block),
    )
    return weights, expert_ids


@_choose.register_fake
def _choices(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, is_sigmoid: bool, normalises: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("forge_rl::choose_experts_gradient", mutates_args=())
def _choice_gradient(
    logits: torch.Tensor, expert_ids: torch.Tensor, grad: torch.Tensor, is_sigmoid: bool, normalises: bool, scale: float
) -> torch.Tensor:
    from forge_rl.engines.titan.triton_experts import choice_gradient_kernel

    grad_logits = torch.empty_like(logits)
    (tokens, experts), block = logits.shape, power_of_two(logits.shape[1])
    choice_gradient_kernel[(tokens,)](
        *(logits, expert_ids, grad, grad_logits, experts, expert_ids.shape[1], scale),
        SIGMOID=is_sigmoid,
        NORMALISES=normalises,
        BLOCK=block,
        num_warps=warps(block),
    )
    return grad_logits


@_choice_gradient.register_fake
def _(
    logits: torch.Tensor, expert_ids: torch.Tensor, grad: torch.Tensor, is_sigmoid: bool, normalises: bool, scale: float
) -> torch.Tensor:
    return torch.empty_like(logits)
