"""Layers over packed rows whose code counts tokens from the row's first one: a state (linear attention, state spaces,
short convolutions) and scores scaled by place restart in each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import nn

from forge_rl.packing.rows import Row

ROW = "forge_rl_row"
"""Attribute of a model's config that holds the `RowContext` of the forward pass that is under way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowContext:
    """The row of a forward pass, and what layers derive from it."""

    row: Row

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Each token's position in its episode less its index in the row, [L] int64."""
        positions = self.row.positions
        return positions - torch.arange(len(positions), device=positions.device)

    @cached_property
    def paths(self) -> list[tuple[torch.Tensor, int]]:
        """Each path from a tree's root to a leaf, in the row's order: indices of its tokens, [n] int64, and how many of
        the last ones no earlier path has. Padding, at the end of a row, is in none."""
        return list(_paths(self.row))


def _paths(row: Row) -> Iterator[tuple[torch.Tensor, int]]:
    positions, trees, until = (values.tolist() for values in (row.positions, row.trees, row.until))
    first = 0
    for token, tree in enumerate(trees):
        if tree < 0:
            break
        following = token + 1
        is_continued = (
            following < len(trees)
            and trees[following] == tree
            and until[token] > following
            and positions[following] == positions[token] + 1
        )
        if not is_continued:
            yield (row.until[:following] > token).nonzero()[:, 0], following - first
            first = following


def restart_states(mixers: list[nn.Module], config: Any) -> None:
    """Have the layers' mixers see one episode at a time, from its first token on.

    The mixer alone computes a shared prefix again for each of its branches, as its state is not passed on.

    Args:
        mixers: modules that take hidden states, [1, L, dim], and return as many.
        config: the model's, which has the row.
    """
    for mixer in mixers:
        mixer.forward = _by_path(mixer.forward, config)


def _by_path(forward: Callable[..., Any], config: Any) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        context: RowContext = getattr(config, ROW)
        outputs = [forward(hidden_states[:, indices])[:, -count:] for indices, count in context.paths]
        padding = hidden_states.shape[1] - sum(output.shape[1] for output in outputs)
        outputs.append(torch.zeros_like(hidden_states[:, :padding]))
        return torch.cat(outputs, dim=1)

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
