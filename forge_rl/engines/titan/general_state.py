"""Layers over packed rows whose code counts tokens from the row's first one: a state (linear attention, state spaces,
short convolutions) and scores scaled by place restart in each episode."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import nn

from forge_rl.engines.families.general import ROW_MIXERS, takes
from forge_rl.engines.titan.row_states import Call, RowStates
from forge_rl.packing.rows import Row

_DELTA_CHUNK = 64
"""transformers' `torch_chunk_gated_delta_rule` pads sequences to a multiple of this many tokens."""
ROW = "forge_rl_row"
"""Attribute of a model's config that holds the `RowContext` of the forward pass that is under way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowContext:
    """The row of a forward pass, and what layers derive from it."""

    row: Row
    shares_states: bool = True
    """See `RowStates.shared`."""

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Each token's position in its episode less its index in the row, [L] int64."""
        positions = self.row.positions
        return positions - torch.arange(len(positions), device=positions.device)

    @cached_property
    def states(self) -> RowStates:
        """Where layers with a state start, continue and branch."""
        return RowStates(row=self.row, shared=self.shares_states)


def restart_states(mixers: list[nn.Module], config: Any) -> None:
    """Have the layers' mixers see each episode from its first token on.

    Mixers in ROW_MIXERS run once for the whole row, with convolutions and recurrences that know where episodes start;
    others run over one episode at a time, and compute a shared prefix again for each of its branches.

    Args:
        mixers: modules that take hidden states, [1, L, dim], and return as many.
        config: the model's, which has the row.
    """
    for mixer in mixers:
        if type(mixer).__name__ in ROW_MIXERS:
            mixer.forward = _over_row(mixer, config)
        else:
            mixer.forward = _by_episode(mixer.forward, config)


def _by_episode(forward: Callable[..., Any], config: Any) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        context: RowContext = getattr(config, ROW)
        return context.states.scan(
            lambda inputs, _, __: (forward(inputs[0]), None), [hidden_states], chunk=1, shared=False
        )

    return run


def _over_row(mixer: Any, config: Any) -> Callable[..., torch.Tensor]:
    """Return a mixer's forward pass with its convolution and recurrence replaced by those over packed rows."""
    # Decorators would hide the function whose globals are replaced.
    function: Any = inspect.unwrap(type(mixer).forward)
    makers = {
        "causal_conv1d_fn": _convolution,
        "torch_chunk_gated_delta_rule": _delta_rule,
        "mamba2_chunk_scan": _chunk_scan,
    }
    names = {**function.__globals__}
    # The forward code looks these functions up as globals, so replacing them there is enough.
    names |= {name: make(names[name], config) for name, make in makers.items() if name in names}
    # A copy of the function: transformers' module stays as it is for other models of this process.
    forward = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        output: torch.Tensor = forward(mixer, hidden_states)
        return output

    return run


def _states(config: Any) -> RowStates:
    context: RowContext = getattr(config, ROW)
    return context.states


def _convolution(convolution: Callable[..., torch.Tensor], config: Any) -> Callable[..., torch.Tensor]:
    def run(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        def convolve(values: torch.Tensor) -> torch.Tensor:
            return convolution(values.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

        return _states(config).convolve(convolve, hidden_states.transpose(1, 2), weight.shape[-1]).transpose(1, 2)

    return run


def _delta_rule(rule: Callable[..., Any], config: Any) -> Callable[..., tuple[torch.Tensor, None]]:
    takes_offsets = takes(rule, "cu_seqlens")

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        def kernel(
            inputs: Sequence[torch.Tensor], states: torch.Tensor | None, call: Call
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            q, k, v, decay, rate = inputs
            # fla keeps what it derives from a tensor of offsets: the pass that activation checkpointing repeats must
            # derive it as well.
            offsets = {}
            if call.offsets is not None:
                offsets = {"cu_seqlens": call.offsets.clone(), "cu_seqlens_cpu": call.host_offsets}
            outputs: tuple[torch.Tensor, torch.Tensor | None] = rule(
                q,
                k,
                v,
                g=decay,
                beta=rate,
                initial_state=states,
                output_final_state=call.has_children,
                use_qk_l2norm_in_kernel=True,
                **offsets,
            )
            return outputs

        chunk = None if takes_offsets else _DELTA_CHUNK
        return _states(config).scan(kernel, [query, key, value, g, beta], chunk=chunk), None

    return run


def _chunk_scan(scan: Callable[..., Any], config: Any) -> Callable[..., torch.Tensor]:
    takes_segments = takes(scan, "seq_idx")

    def run(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        def kernel(
            inputs: Sequence[torch.Tensor], states: torch.Tensor | None, call: Call
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            x, steps, keys, queries = inputs
            changed = {"initial_states": states, "return_final_states": call.has_children}
            if call.offsets is not None:
                changed["seq_idx"] = call.segment_ids
            outputs = scan(x, steps, A, keys, queries, **(options | changed))
            return outputs if call.has_children else (outputs, None)

        # Zeros would step the state by softplus(dt_bias), so that a batch has segments of one length only. mamba_ssm
        # takes one first state for a whole sequence, and so no states of branches.
        return _states(config).scan(
            kernel, [hidden_states, dt, B, C], chunk=None if takes_segments else 1, shared=not takes_segments
        )

    return run


class _PlacesInEpisodes:
    """Takes the place of a cache of keys in a layer that asks one for the number of tokens before the row's first."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._offsets = offsets

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        """Return what a layer adds to a token's index, to have its position."""
        return self._offsets

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's keys and values: no earlier ones are kept."""
        return keys, values


def restart_places(causal: Any) -> None:
    """Have attention that scales scores by a token's place in the row (Llama 4) use its place in the episode.

    Args:
        causal: transformers' model.
    """

    def with_places(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context: RowContext = getattr(causal.config, ROW)
        return args, {**kwargs, "past_key_values": _PlacesInEpisodes(context.offsets)}

    for module in causal.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.register_forward_pre_hook(with_places, with_kwargs=True)
