"""Counts the cost of a model's tokens: operations, and weights read. Pure arithmetic."""

from __future__ import annotations

from forge_rl.engines.families.family import Architecture


def layer_weights(architecture: Architecture, tokens: int = 1) -> float:
    """Return the average number of layer weights that a pass over `tokens` tokens reads.

    In a mixture of experts, one token uses `top_k` experts of a layer. Several tokens that choose independently and
    evenly use `count * (1 - (1 - top_k / count) ** tokens)`.
    """
    a, experts = architecture, architecture.experts
    # Without embedding and head: a token looks up one row of the first, and the second is counted apart.
    total = a.weights - a.vocab * a.dim * (1 if a.tied else 2)
    if experts is None:
        return float(total)
    used_experts = experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)
    return total - len(experts.layers) * (experts.count - used_experts) * 3 * a.dim * experts.hidden_dim


def head_weights(architecture: Architecture) -> int:
    """Return the number of weights in the output head, which only tokens with a scored or sampled successor use."""
    return architecture.vocab * architecture.dim


def attention_flops(architecture: Architecture, context: float) -> float:
    """Return the operations of one token's attention over `context` earlier tokens in all layers: products of q with k
    and of attention weights with v, each two operations per element of a head.

    Layers with a sliding window attend to at most the window.
    """
    a = architecture
    value_dim = a.latent.value_dim if a.latent else a.head_dim
    num_window_layers = len(a.window_layers) if a.window else 0
    attended_tokens = (a.layers - num_window_layers) * context + num_window_layers * min(context, a.window or context)
    return 2.0 * a.heads * (a.head_dim + value_dim) * attended_tokens


def forward_flops(architecture: Architecture, context: float, *, has_head: bool) -> float:
    """Return the operations of one token's forward pass: two for each weight that it uses, and its attention.

    Args:
        context: earlier tokens that it attends to, on average.
        has_head: whether its logits are computed.
    """
    weights = layer_weights(architecture) + has_head * head_weights(architecture)
    return 2.0 * weights + attention_flops(architecture, context)
