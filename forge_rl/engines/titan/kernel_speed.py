"""Times fused products against torch's own at start, so that the faster ones run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from forge_rl.algorithms.logprobs import Scoring
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.titan.expert_products import expert_linear
from forge_rl.engines.titan.fused_head import score_in_products
from forge_rl.engines.titan.head import score_in_chunks
from forge_rl.engines.titan.products import gated_network, gated_product, joint_linear
from forge_rl.system.kernels import is_on, turn_off

_TOKENS = 4096
_OUTPUTS = 32768
"""Outputs of a timed head: a product's rate does not depend on more of them."""
_EXPERTS = 8
"""Experts that share the tokens evenly, which gives each as many as a long row does."""
_REPEATS = 5
Function = Callable[..., torch.Tensor]


def turn_off_slow_kernels(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    """Time each fused product and torch's in its place, forward and backward; turn off slower ones."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return
    generator = torch.Generator(device).manual_seed(0)
    for kernel, function, plain, shapes in _products(architecture, device):
        if not is_on(kernel):
            continue
        inputs = [
            torch.randn(shape, generator=generator, dtype=dtype, device=device) * shape[-1] ** -0.5 for shape in shapes
        ]
        seconds, plain_seconds = (shortest_time(candidate, inputs) for candidate in (function, plain))
        if seconds > plain_seconds:
            turn_off(kernel, "")
            print(
                f"forge_rl: the kernel {kernel!r} is off, as torch's products take {1e3 * plain_seconds:.2f} ms in "
                f"place of {1e3 * seconds:.2f} on this GPU",
                file=sys.stderr,
                flush=True,
            )


def shortest_time(function: Function, inputs: Sequence[torch.Tensor]) -> float:
    """Return the seconds that a function and its gradients take on a GPU, at best."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    times = list[float]()
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.enable_grad():
            result = function(*leaves)
        torch.autograd.grad(result, leaves, torch.ones_like(result))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    # The minimum leaves out the first run, which compiles.
    return min(times)


def _products(
    architecture: Architecture, device: torch.device
) -> Iterator[tuple[str, Function, Function, list[tuple[int, ...]]]]:
    """Yield kernels with two functions that do the same, ours first, and the shapes of their inputs."""
    dim, outputs = architecture.dim, min(_OUTPUTS, architecture.vocab)
    targets = torch.arange(_TOKENS, device=device) % outputs
    yield (
        "logits",
        lambda hidden, weight: score_in_products(hidden, weight, targets, Scoring()).logprobs,
        lambda hidden, weight: score_in_chunks(hidden, weight, targets, _TOKENS).logprobs,
        [(_TOKENS, dim), (outputs, dim)],
    )
    if not architecture.family.general and (experts := architecture.experts) is not None:
        count = min(experts.count, _EXPERTS)
        ends = (torch.arange(count, device=device) + 1) * (_TOKENS // count)
        ends = ends.to(torch.int32)
        yield (
            "expert_gradients",
            lambda x, weight: expert_linear(x, weight, ends),
            lambda x, weight: torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends),
            [(_TOKENS // count * count, dim), (count, experts.hidden_dim, dim)],
        )
    if not architecture.family.general:
        width = architecture.hidden_dim
        yield (
            "products",
            gated_network,
            lambda x, weight, down: joint_linear(gated_product(x, weight), down)[0],
            [(_TOKENS, dim), (2 * width, dim), (dim, width)],
        )
