"""Products of a block on a GPU, whose backward passes add a weight's gradient up without a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from forge_rl.engines.titan.block_kernels import (
    NormWeights,
    heads_gradient,
    programs_of,
    rotated_heads,
    swiglu_gradient,
    swiglu_values,
)
from forge_rl.engines.titan.fused_products import gated_gradient, gated_values
from forge_rl.engines.titan.gradient_sums import SumPlace, room_for_parts, sum_place, summed_parts


class Heads(NamedTuple):
    """How to interpret the heads in a product's output."""

    queries: int
    """Number of the first heads, which are queries; half of the others are keys, and the last are values."""
    dim: int
    """Elements of a head."""
    eps: float
    """Epsilon of the norms, if there are any."""


def is_bare(layer: nn.Module) -> bool:
    """Return whether a linear layer is a matrix that is whole on this rank, without bias or adapter."""
    return type(layer) is Linear and layer.bias is None and not isinstance(layer.weight, DTensor)


def embed(embedding: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of token ids, [..., dim]."""
    # Without a place to add to, autograd takes the embedding's gradient.
    if (place := sum_place(embedding.weight)) is None:
        out: torch.Tensor = embedding(token_ids)
        return out
    embedded: torch.Tensor = _Embedding.apply(token_ids, embedding.weight, place)
    return embedded


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer to [..., inputs]."""
    if not is_bare(layer):
        out: torch.Tensor = layer(x)
        return out
    return joint_linear(x, layer.weight)[0]


def joint_linear(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return x W^T for each weight; the backward pass adds up x's gradient in its products."""
    outputs: tuple[torch.Tensor, ...] = _JointLinear.apply(x, *weights)
    return outputs


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return silu(x A^T) x B^T, [..., hidden], where the weight holds A and B one after the other."""
    out: torch.Tensor = _GatedProduct.apply(x, weight)
    return out


def gated_network(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return `gated_product` times down^T, [..., dim], with SwiGLU and its gradient inside of products."""
    out: torch.Tensor = _GatedNetwork.apply(x, weight, down)
    return out


def rotated_product(
    x: torch.Tensor, weight: torch.Tensor, norms: NormWeights, cache: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of x W^T, [1, L, heads, head_dim] each; the first two normalised, if there are
    norms, and rotated.

    Args:
        weight: the three weights, one after the other.
        norms: weights of the queries' norm and of the keys', [head_dim] each.
        cache: see `norm_rope`.
    """
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _RotatedProduct.apply(x, weight, *norms, cache, heads)
    return outputs


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: torch.Tensor, weight: torch.Tensor, place: SumPlace) -> torch.Tensor:
        ctx.save_for_backward(token_ids)
        ctx.place, ctx.length = place, len(weight)
        return nn.functional.embedding(token_ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (token_ids,) = ctx.saved_tensors
        ctx.place.add_rows(token_ids.flatten(), grad.flatten(0, -2), ctx.length)
        return None, None, None


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.places = [sum_place(weight) for weight in weights]
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return _gradients(ctx, x, weights, grads)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        joint = x @ weight.t()
        ctx.save_for_backward(x, weight, joint)
        ctx.places = [sum_place(weight)]
        out: torch.Tensor = swiglu_values(*joint.chunk(2, dim=-1))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, joint = ctx.saved_tensors
        return _gradients(ctx, x, [weight], [swiglu_gradient(*joint.chunk(2, dim=-1), grad.contiguous())])


class _GatedNetwork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        joint, hidden = gated_values(x, weight)
        ctx.save_for_backward(x, weight, down, joint, hidden)
        ctx.places, ctx.down_place = [sum_place(weight)], sum_place(down)
        return hidden @ down.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, joint, hidden = ctx.saved_tensors
        grad = grad.contiguous()
        down_grad = (
            _weight_gradient(grad.flatten(0, -2), hidden.flatten(0, -2), ctx.down_place)
            if (ctx.needs_input_grad[2])
            else None
        )
        return *_gradients(ctx, x, [weight], [gated_gradient(grad, down, joint)]), down_grad


class _RotatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        cache: torch.Tensor,
        heads: Heads,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        joint = (x @ weight.t()).unflatten(-1, (-1, heads.dim))
        keys = (joint.shape[-2] - heads.queries) // 2
        norms = query_norm, key_norm
        # The product itself is needed again only by norms. Without them, values are copied out of it, so that it can be
        # freed.
        copied = keys if query_norm is None else 0
        rotated = rotated_heads(
            joint if copied else joint[:, :, :-keys], norms, cache, heads.queries, heads.eps, copied
        )
        ctx.save_for_backward(x, weight, None if query_norm is None else joint, *norms, cache)
        ctx.places, ctx.norm_places, ctx.heads = [sum_place(weight)], [sum_place(norm) for norm in norms], heads
        values = (rotated if copied else joint)[:, :, -keys:]
        return rotated[:, :, : heads.queries], rotated[:, :, heads.queries : heads.queries + keys], values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, joint, *norms, cache = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        keys, parts = grads[1].shape[-2], None
        if joint is not None:
            # Values have no norm, so the norms' gradients read queries and keys only.
            joint = joint[:, :, :-keys]
            parts = room_for_parts(ctx.norm_places, norms, programs_of(joint.shape[1]))
        joint_grad = heads_gradient(joint, tuple(norms), cache, grads, parts, ctx.heads.eps)  # type: ignore[arg-type]
        norm_grads: Sequence[torch.Tensor | None] = (None, None)
        if parts is not None and any(ctx.needs_input_grad[2:4]):
            norm_grads = summed_parts(parts, ctx.norm_places, norms)
        return *_gradients(ctx, x, [weight], [joint_grad.flatten(-2)]), *norm_grads, None, None


def _gradients(
    ctx: Any, x: torch.Tensor, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x W^T by x and by the weights; None for a weight whose gradient is added in its place."""
    rows, flat = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = flat[0] @ weights[0]
        # The products add to each other in place, so no separate gradient of x is held for each weight.
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view_as(x)
    grad_weights = [
        _weight_gradient(grad, rows, place) if is_trained else None
        # needs_input_grad has further entries after the weights, such as those of norms.
        for grad, place, is_trained in zip(flat, ctx.places, ctx.needs_input_grad[1:], strict=False)
    ]
    return grad_x, *grad_weights


def _weight_gradient(grad: torch.Tensor, rows: torch.Tensor, place: SumPlace | None) -> torch.Tensor | None:
    """Return a weight's gradient, [outputs, inputs], or add it up in its place."""
    if place is None:
        return grad.t() @ rows
    place.add_product(grad.t(), rows)
    return None
