"""The trainer's updates in plain PyTorch: transformers' model in float64, one segment at a time, unfused AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.titan.general_model import GeneralModel
from forge_rl.packing.rows import Minibatch
from forge_rl.token_arrays import Segment
from forge_rl.types import Batch

FURTHEST_PENALTY = 3.0
"""Log ratio up to which a k3 penalty is taken as it is."""


class InFloat64(TorchFunctionMode):
    """Leaves out the casts of float64 to float32 that transformers' models make in norms, softmax and routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def share_angles(model: Any, titan: torch.nn.Module) -> None:
    """Have transformers' RoPE turn by the engine's cosines and sines, which are seen to be its own but for rounding.

    Both compute them in float32, which is what the model was trained with, by functions that round differently.
    """
    rope: Any = next(module for module in titan.modules() if hasattr(module, "cache"))
    cache = rope.cache
    if cache.is_complex():
        tables = cache.real, cache.imag
    else:
        half = cache.shape[1] // 4
        tables = cache[:, :half], cache[:, 2 * half : 3 * half]
    rotary = model.model.rotary_emb
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for table, theirs in zip(tables, original(x, position_ids), strict=True):
            ours = table[position_ids].double() * (rotary.attention_scaling / getattr(rope.config, "amplitude", 1))
            ours = ours.repeat(1, 1, theirs.shape[-1] // ours.shape[-1])
            assert (ours - theirs).abs().max() < 1e-4, "the angles are others"
            results.append(ours)
        return tuple(results)

    rotary.forward = forward


def in_float64(model: torch.nn.Module, titan: torch.nn.Module) -> Any:
    """Copy transformers' model, as `fakes.make_model` returned it, to compare with the engine's; see share_angles."""
    copied: Any = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.double()
    if hasattr(copied.config, "num_experts_per_tok"):
        copied.set_experts_implementation("eager")  # torch's product of groups has no float64
    if not isinstance(titan, GeneralModel):
        copied.double()  # buffers too
        share_angles(copied, titan)
    return copied


def logits_of(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits of a sequence, [T, V], all in float64; `model` is made by in_float64."""
    with InFloat64():
        logits: torch.Tensor = model(token_ids[None]).logits[0]
    assert logits.dtype == torch.float64
    return logits


class PlainTrainer:
    """Trains on a batch as a TitanEngine of these settings does.

    Args:
        model: as `fakes.make_model` returned it.
        titan: the engine's model, for the angles of RoPE.
        frozen: beginning of the names of weights that are not trained.
    """

    def __init__(
        self, model: torch.nn.Module, titan: torch.nn.Module, optimizer: OptimizerConfig, *, frozen: str | None = None
    ) -> None:
        self.model, self._reference = (in_float64(model, titan) for _ in range(2))
        self._reference.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
        self._config = optimizer
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        named = [pair for pair in self.model.named_parameters() if pair[1].requires_grad]
        decays = [parameter.ndim > 1 and "bias" not in name.split(".")[-1] for name, parameter in named]
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [
                        parameter for (_, parameter), decay in zip(named, decays, strict=True) if decay == decayed
                    ],
                    "weight_decay": optimizer.weight_decay if decayed else 0.0,
                }
                for decayed in (True, False)
            ],
            betas=(optimizer.beta1, optimizer.beta2),
            foreach=False,
            fused=False,
        )
        self._updates = 0

    def logprobs(self, segment_ids: Any, temperature: float, *, reference: bool = False) -> torch.Tensor:
        """Score all tokens but the first, [T - 1]."""
        ids = torch.tensor(np.asarray(segment_ids), dtype=torch.int64)
        logits = logits_of(self._reference if reference else self.model, ids)[:-1]
        return (logits / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]

    def train_batch(
        self,
        batch: Batch,
        advantages: list[list[np.ndarray]],
        minibatches: Sequence[Minibatch],
        loss: ClippedSurrogate,
        *,
        epochs: int,
        temperature: float,
        total_updates: int,
    ) -> list[tuple[float, float, float]]:
        """Return loss, gradient norm and learning rate of each update.

        Args:
            advantages: of each token of each turn, by episode.
            minibatches: say which groups are trained together, and how many tokens and episodes were left out.
        """
        with torch.no_grad():
            old = {
                (e, s): self.logprobs(segment.token_ids, temperature)
                for e, episode in enumerate(batch.episodes)
                for s, segment in enumerate(episode.segments)
            }
        group_size = len(batch.groups[0].episodes)
        results = []
        for _ in range(epochs):
            for minibatch in minibatches:
                groups = sorted({int(e) // group_size for row in minibatch.rows for e in row.episodes[row.mask]})
                episodes = [g * group_size + k for g in groups for k in range(group_size)]
                self._optimizer.zero_grad()
                total = torch.zeros((), dtype=torch.float64)
                for e in episodes:
                    segments = batch.episodes[e].segments
                    tokens = sum(int(_trained(segment).sum()) for segment in segments)
                    for s, segment in enumerate(segments):
                        losses = self._losses(segment, advantages[e], old[e, s], loss, temperature)
                        total = total + losses.sum() / (
                            max(1, tokens) if loss.aggregation.kind == "sequence_mean" else 1
                        )
                divisor = {
                    "token_mean": minibatch.tokens,
                    "sequence_mean": minibatch.sequences,
                    "constant": minibatch.sequences * loss.aggregation.tokens,
                }[loss.aggregation.kind]
                total = total / divisor
                total.backward()
                results.append((float(total.detach()), *self._update(total_updates)))
        return results

    def _losses(
        self,
        segment: Segment,
        advantages: list[np.ndarray],
        old: torch.Tensor,
        loss: ClippedSurrogate,
        temperature: float,
    ) -> torch.Tensor:
        """Losses of a segment's trained tokens."""
        mask = torch.tensor(_trained(segment))[1:]
        if not mask.any():
            return torch.zeros(0, dtype=torch.float64)
        logprobs = self.logprobs(segment.token_ids, temperature)[mask]
        behaviour = torch.tensor(np.asarray(segment.logprobs), dtype=torch.float64)[1:][mask]
        a = torch.from_numpy(_of_tokens(segment, advantages)).double()[1:][mask]
        weight = torch.ones_like(behaviour)
        compared = behaviour
        if loss.correction.proximal == "recompute":
            compared = old[mask]
            weight = (compared - behaviour).exp()
            weight = torch.where(weight > loss.correction.high, 0.0, weight)
        ratio = (logprobs - compared).exp()
        gain = torch.min(ratio * a, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a)
        if loss.dual_clip < math.inf:
            gain = torch.where(a < 0, torch.max(gain, loss.dual_clip * a), gain)
        losses = -weight * gain
        if loss.kl_coef:
            with torch.no_grad():
                reference = self.logprobs(segment.token_ids, temperature, reference=True)[mask]
            far = logprobs - reference
            losses = losses + loss.kl_coef * (
                far**2 / 2
                if loss.kl_kind == "k2"
                else (logprobs - behaviour).clamp(max=FURTHEST_PENALTY).exp() * k3(far)
            )
        return losses

    def _update(self, total_updates: int) -> tuple[float, float]:
        """Clip, step and return the gradient's norm before that and the learning rate."""
        config = self._config
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, config.max_grad_norm))
        done = (self._updates - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
        if self._updates < config.warmup_updates:
            share = (self._updates + 1) / config.warmup_updates
        else:
            share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * share
        self._optimizer.step()
        self._updates += 1
        return norm, config.lr * share

    def weights(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Whole weights by the names of files, which transformers stacks in memory."""
        self.model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")


def k3(far: torch.Tensor) -> torch.Tensor:
    """k3 of a difference of logprobs, continued by its tangents beyond FURTHEST_PENALTY."""
    edge = far.detach().clamp(-FURTHEST_PENALTY, FURTHEST_PENALTY)
    tangent = (-edge).exp() + edge - 1 + (1 - (-edge).exp()) * (far - edge)
    return torch.where(far.abs() > FURTHEST_PENALTY, tangent, (-far).exp() + far - 1)


def _trained(segment: Segment) -> np.ndarray:
    return np.asarray(segment.trained & np.isfinite(segment.logprobs))


def _of_tokens(segment: Segment, advantages: list[np.ndarray]) -> np.ndarray:
    """Advantages of a segment's tokens; each turn's lie one after the other."""
    column = np.zeros(len(segment.token_ids), np.float32)
    turns = np.where(segment.trained, segment.turns, -1)
    for turn, values in enumerate(advantages):
        column[turns == turn] = values if (turns == turn).any() else 0
    return column
