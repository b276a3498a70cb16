"""Forward passes of one rank's models over packed rows, and the scores they give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_rl.algorithms.logprobs import Scoring, TokenScores
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.fused_block import FusedAttention
from forge_rl.engines.titan.general_model import GeneralModel
from forge_rl.engines.titan.masks import attention_mask
from forge_rl.engines.titan.master_weights import MasterWeights
from forge_rl.engines.titan.model import PolicyModel
from forge_rl.engines.titan.parallel import Parallelism
from forge_rl.engines.titan.routing import routers, set_routing
from forge_rl.engines.titan.row_attention import takes_sequences
from forge_rl.engines.titan.rows import DeviceRow, on_device
from forge_rl.packing.rows import Row
from forge_rl.system.kernels import is_on

_NO_SCORES = TokenScores(torch.empty(0), torch.empty(0), None)
"""Scores of a row on a pipeline stage without the head."""

_FEW_TOKENS = 128
"""Tokens whose scores are computed by a quarter of the threads."""


class RowScorer:
    """Runs forward passes of the trained model, and of others of its architecture, over rows of one share.

    Args:
        trained: the trained model; only its passes follow recorded experts and score a row's "top_ids".
        window: the architecture's attention window in tokens, None for none.
    """

    def __init__(
        self,
        trained: PolicyModel | GeneralModel,
        settings: TrainSettings,
        parallelism: Parallelism,
        *,
        window: int | None,
        device: torch.device,
    ) -> None:
        self._trained = trained
        self._replays = settings.router_replay
        self._parallelism = parallelism
        self._window = window
        self._device = device
        # FlashAttention takes plain tensors in 16 bits and no mask but the causal one. If the layout or model rules it
        # out, no row uses it; otherwise `DeviceRow.sequences` decides row by row.
        self._takes_sequences = (
            isinstance(trained, PolicyModel)
            and settings.tensor_parallel_degree == 1
            and window is None
            and is_on("attention")
            and all(
                isinstance(attention, FusedAttention)
                and takes_sequences(resolve_dtype(settings.dtype), attention.head_dim)
                for attention in (layer.get_submodule("attention") for layer in trained.layers.values())
            )
        )

    def score(self, model: PolicyModel | GeneralModel, device_row: DeviceRow, scoring: Scoring) -> TokenScores:
        """Score a row's `scored_indices`, [L] with 0 elsewhere; with k "top_ids" in the row, logprobs are [L, 1 + k].

        A pipeline stage without the head has no scores: it passes the row on to the next one.
        """
        row, local_indices, scored_indices = device_row.row, device_row.local_indices, device_row.scored_indices
        token_ids, positions, targets = (device_row.part(x) for x in (row.token_ids, row.positions, row.targets))
        if "top_ids" in row.columns and self._is_policy(model):
            targets = torch.cat([targets[:, None], device_row.part(row.columns["top_ids"]).long()], dim=1)
        # A part without targets (or a row that pads a share) must still run every layer, for the collectives.
        nonempty_indices = scored_indices if len(scored_indices) else scored_indices.new_zeros(1)
        # A general model builds its masks from the row itself, one for each kind of layer.
        masks: Any = row
        if not isinstance(model, GeneralModel):
            plain = device_row.sequences if self._takes_sequences else None
            queries = None if device_row.split is None else local_indices
            masks = plain or attention_mask(row, queries, window=self._window)
        self.prepare(model, device_row)
        inputs = self._parallelism.pipeline.enter(token_ids[None], len(local_indices))
        outputs = model(
            inputs,
            positions[None],
            masks,
            scored_indices=nonempty_indices,
            targets=targets[nonempty_indices],
            scoring=scoring,
        )
        if not self._parallelism.stage.is_last:
            self._parallelism.pipeline.leave(outputs)
            return _NO_SCORES

        def everywhere(values: torch.Tensor) -> torch.Tensor:
            # Adding 0 times the sum connects a part without targets to the graph, so that its backward pass joins the
            # other ranks' collectives.
            scatter = values.new_zeros(len(targets), *values.shape[1:])
            row_values = (
                scatter.index_put((scored_indices,), values) if len(scored_indices) else scatter + 0.0 * values.sum()
            )
            return self._parallelism.gather(row_values, device_row)

        squares, values = (None if x is None else everywhere(x) for x in (outputs.squares, outputs.values))
        return TokenScores(everywhere(outputs.logprobs), everywhere(outputs.entropy), squares, values)

    def prepare(self, model: PolicyModel | GeneralModel, device_row: DeviceRow) -> None:
        """Set what a row's forward or backward pass reads from the model's modules."""
        row = device_row.row
        if routers(model):
            replayed = row.routed if self._replays and self._is_policy(model) else None
            # Padding, marked by a negative tree, is routed like any token but not counted.
            set_routing(model, device_row.part(row.trees) >= 0, None if replayed is None else device_row.part(replayed))
        self._parallelism.begin(device_row)

    def _is_policy(self, model: PolicyModel | GeneralModel) -> bool:
        """Return True for the trained model, unless its adapters are off: it then acts as the reference."""
        return model is self._trained and (model.adapters is None or model.adapters.on)

    def on_device(self, row: Row, *, observations: bool = False) -> DeviceRow:
        """Copy a row to the device, with this rank's part of it under context parallelism."""
        split, local_indices = self._parallelism.split(row)
        return on_device(row, local_indices, self._device, split=split, observations=observations)

    @torch.no_grad()
    def logprobs(
        self, model: PolicyModel | GeneralModel, rows: Sequence[Row], temperature: float
    ) -> list[torch.Tensor]:
        """Return the logprobs of the targets where the mask is True, or a value model's values: `[L]` for each row, on
        the device; empty on a pipeline stage without the head."""
        # A generator: each row is copied to the device only when its turn comes.
        row_scores = (self.score(model, self.on_device(row), Scoring(temperature=temperature)) for row in rows)
        outputs = [scores.first if scores.values is None else scores.values for scores in row_scores]
        reshard(model)
        self._parallelism.pipeline.finish()
        return outputs


@contextlib.contextmanager
def few_threads(tokens: int) -> Iterator[None]:
    """Compute on a quarter of the threads: more would only wait for memory and for one another on so few tokens.

    Scores of 16 tokens with SmolLM2-135M in float32 took 0.14 s of CPU time on one of two cores, and 0.36 s on both.
    """
    threads = torch.get_num_threads()
    if tokens > _FEW_TOKENS:
        yield
        return
    torch.set_num_threads(max(1, threads // 4))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reshard(model: nn.Module) -> None:
    """Free the weights that passes ran on: those that FSDP gathered and keeps after a forward pass without a backward
    one, or the copies of one rank's masters.

    Until then they replace the shards or masters in the model, in the dtype of the forward pass and unknown to the
    optimizer.
    """
    masters: MasterWeights | None = getattr(model, "masters", None)
    if masters is not None:
        masters.release()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
