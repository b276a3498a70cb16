"""AdamW with moments of 2 bytes, or about 1, instead of 4, rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from forge_rl.engines.optimizer import LEAST_INT8, SCALED_TOGETHER
from forge_rl.engines.titan.shards import local
from forge_rl.system.seeds import derive_seed

ROOT = "exp_avg_root"
"""Name of the root of the second moment, which AdamW calls exp_avg_sq."""
_AT_ONCE = SCALED_TOGETHER << 14
"""Elements that are updated at a time, which bounds the float32 temporaries."""
_LEAST_SCALE = 1e-30
"""Blocks of smaller values are stored as 0: code times scale would fall below float32's normal numbers."""


@dataclass(frozen=True)
class Moment:
    """A stored moment of this rank's n elements of a weight.

    uint8 are codes of blockwise dynamic quantization (Dettmers et al., https://arxiv.org/abs/2110.02861, section 2),
    in blocks of consecutive elements. A block's scale is its element of the largest magnitude, with its sign, so that
    this element is code 1.0 exactly, and quantizing the values read changes nothing.
    """

    values: torch.Tensor
    """[n] bfloat16, uint8 codes, or float32."""
    scales: torch.Tensor | None
    """[blocks] float32, of codes."""
    signed: bool

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values read."""
        return torch.float32

    def read(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Return the elements from `first`, the start of a block, to `end`, float32 in new memory."""
        values = self.values[first:end]
        if self.scales is None:
            return values.to(torch.float32, copy=True)
        block = first // SCALED_TOGETHER
        scales = self.scales[block : block - (-len(values) // SCALED_TOGETHER)].repeat_interleave(SCALED_TOGETHER)
        return _codes(self.signed).to(values.device)[values.int()] * scales[: len(values)]

    def write(self, values: torch.Tensor, first: int = 0, noise: torch.Generator | None = None) -> None:
        """Store float32 elements from `first` on, the start of a block: rounded stochastically with noise, else to the
        nearest."""
        end = first + len(values)
        if self.scales is None:
            rounded = values if noise is None or self.values.dtype != torch.bfloat16 else _rounded(values, noise)
            self.values[first:end].copy_(rounded)
            return
        padded = nn.functional.pad(values, (0, -len(values) % SCALED_TOGETHER)).view(-1, SCALED_TOGETHER)
        # The scale keeps its sign, so the largest element is exactly 1 in relative terms, and a saved block reloads
        # unchanged.
        scales = padded.gather(1, padded.abs().argmax(dim=1, keepdim=True))
        scales = torch.where(scales.abs() < _LEAST_SCALE, 0.0, scales)
        self.scales[first // SCALED_TOGETHER :][: len(scales)].copy_(scales[:, 0])
        relative = (padded / torch.where(scales == 0, torch.inf, scales)).view(-1)[: len(values)]
        codes = _codes(self.signed).to(values.device)
        if noise is None:
            # Nearest: boundaries half way between neighbouring codes.
            indices = torch.bucketize(relative, (codes[1:] + codes[:-1]) / 2, out_int32=True)
        else:
            # Stochastic: up with probability (x - lower) / (upper - lower), so the expected value is x.
            lower = (torch.bucketize(relative, codes, right=True, out_int32=True) - 1).clamp_(0, len(codes) - 2)
            probability = (relative - codes[lower]) / (codes[lower + 1] - codes[lower])
            indices = lower + (torch.rand(len(values), generator=noise, device=values.device) < probability)
        # A second moment's root must not vanish: dividing by eps alone would make the next update explode.
        if not self.signed:
            indices = torch.where(relative > 0, indices.clamp(min=1), indices)
        self.values[first:end].copy_(indices)

    def write_all(self, values: torch.Tensor) -> None:
        """Store all elements, `[n] float32` on any device, rounded to the nearest."""
        for first in range(0, len(values), _AT_ONCE):
            self.write(values[first : first + _AT_ONCE].to(self.values.device), first)


class SmallAdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101, algorithm 2) that computes in float32 and stores small moments.

        groups = [{"params": model.parameters()}]
        optimizer = SmallAdamW(groups, kind="int8", lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)

    Rounding to the nearest would lose what an update changes by less than half of a step between neighbours, as most
    do: a second moment would hardly ever fall. So moments are rounded to one of the two neighbours with probabilities
    that keep their mean (Gupta et al., https://arxiv.org/abs/1502.02551, section 3), which takes no memory, unlike
    compensation. The noise follows from the step and the weight's index: ranks with the same shard stay equal, and a
    run that resumes draws the same.

    The second moment is stored as its root, which is never rounded to 0 from above, as dividing by 0 + eps would
    give a huge update (the zero-point problem of https://arxiv.org/abs/2309.01507, section 3.2).

    Args:
        kind: dtype of the moments. With int8, weights of fewer than 4,096 elements keep float32 moments.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        kind: Literal["bfloat16", "int8"],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self._kind = kind

    def moments(self, parameter: torch.Tensor) -> dict[str, Moment]:
        """Return the moments of a weight by name; creates its state."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            size, device = local(parameter).numel(), local(parameter).device
            small = self._kind == "int8" and parameter.numel() >= LEAST_INT8
            dtype = torch.uint8 if small else torch.bfloat16 if self._kind == "bfloat16" else torch.float32
            for name in ("exp_avg", ROOT):
                # Code 0 is not the value 0: moments start at the code that stands for it.
                zero = int((_codes(name == "exp_avg") == 0).nonzero()) if small else 0
                state[name] = torch.full((size,), zero, dtype=dtype, device=device)
                if small:
                    state[f"{name}_scales"] = torch.zeros(-(-size // SCALED_TOGETHER), device=device)
        return {
            name: Moment(state[name], state.get(f"{name}_scales"), signed=name == "exp_avg")
            for name in ("exp_avg", ROOT)
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], index: int) -> None:
        first_moment, root = self.moments(parameter).values()
        state = self.state[parameter]
        state["step"] += 1
        step = int(state["step"])
        weights, grads = local(parameter).detach().view(-1), local(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        # Step and index identify the draw: equal shards round alike, and a resumed run repeats it.
        noise = torch.Generator(weights.device).manual_seed(derive_seed(step, "rounding", index))
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for first in range(0, len(weights), _AT_ONCE):
            weight, grad = weights[first : first + _AT_ONCE], grads[first : first + _AT_ONCE].float()
            # AdamW in float32, a slice at a time: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2, stored as its root;
            # w = (1 - lr decay) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
            mean = first_moment.read(first, first + _AT_ONCE).lerp_(grad, 1 - beta1)
            size = root.read(first, first + _AT_ONCE).square_().mul_(beta2)
            size.addcmul_(grad, grad, value=1 - beta2).sqrt_()
            weight.mul_(1 - lr * group["weight_decay"])
            weight.addcdiv_(mean, size / (1 - beta2**step) ** 0.5 + group["eps"], value=-lr / (1 - beta1**step))
            first_moment.write(mean, first, noise)
            root.write(size, first, noise)


def _rounded(values: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Round float32 to one of the two bfloat16 around it; its mean is the value. Infinities and NaN stay so."""
    # bfloat16 is the upper half of a float32: adding random lower bits and cutting them off rounds up in proportion.
    low = torch.randint(0, 1 << 16, values.shape, generator=noise, device=values.device, dtype=torch.int32)
    bits = (values.contiguous().view(torch.int32) + low) & -(1 << 16)
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


@cache
def _codes(signed: bool) -> torch.Tensor:
    """Return the 256 values of dynamic quantization, ascending: 0, 1, and in each of 7 decades the centres of equal
    parts of it, twice as many as in the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        centres = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(values), dtype=torch.float64).float()
