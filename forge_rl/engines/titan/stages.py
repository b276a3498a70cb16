"""Pipeline parallelism: the stages of a model, and the passage of rows from one to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from forge_rl.engines.titan.model import PolicyModel
from forge_rl.engines.titan.shards import local, named_weights
from forge_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the parts that pipeline parallelism splits a model into; the whole model without it."""

    index: int
    count: int
    """Number of stages."""
    layers: range
    """Indices of its layers in the model."""
    ranks: range
    """Ranks that hold it."""

    @property
    def is_first(self) -> bool:
        """True if it has the input embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it has the output head, and thus computes the loss."""
        return self.index == self.count - 1

    def cut(self, model: PolicyModel) -> None:
        """Remove from a model what other stages hold. A tied weight is on the first and on the last stage."""
        if self.count == 1:
            return
        # Layers keep their numbers in the whole model, and so their names in checkpoints and published versions.
        for number in list(model.layers):
            if int(number) not in self.layers:
                del model.layers[number]
        # Here the tie spans two ranks: gradients are summed by `Parallelism.clip`, not by a shared parameter.
        model.spans_tie, model.enable_weight_tying = model.enable_weight_tying, False
        if not self.is_first:
            model.tok_embeddings = None
        if not self.is_last:
            model.norm = model.lm_head = None


def check_trained(model: nn.Module, stages: Sequence[range]) -> None:
    """Check that each stage of a whole model has weights to train.

    Raises:
        ConfigError: all weights of a stage are frozen.
    """
    trained_names = [name for name, weight in named_weights(model) if weight.requires_grad]
    for index, layers in enumerate(stages):
        prefixes = [f"layers.{number}." for number in layers]
        prefixes += ["tok_embeddings."] if index == 0 else []
        # A tied embedding serves as the head, and is trained on the last stage too.
        prefixes += ["norm.", "lm_head.", "tok_embeddings."] if index == len(stages) - 1 else []
        if not any(name.startswith(tuple(prefixes)) for name in trained_names):
            raise ConfigError(
                f"all weights of pipeline stage {index}, with layers {layers.start} to {layers.stop - 1}, are frozen",
                hint="lower --trainer.pipeline-parallel-degree, or give --trainer.frozen fewer patterns",
            )


class Pipeline:
    """Passes rows' hidden states from each stage to the next one, and their gradients back (1F1B).

        out = model(pipeline.enter(token_ids, tokens), ...)
        pipeline.leave(out)  # on all stages but the last
        ...
        pipeline.backward()  # of the first row whose backward pass is left

    A stage starts `ahead` rows before the first one returns, and then alternates between the forward pass of one row
    and the backward pass of another, as in "PipeDream", arXiv:1806.03377, but within one update. So it holds the
    activations of at most `ahead + 1` rows. Rows may differ in length. Messages of the two directions are in process
    groups of their own: on CUDA, a group's messages between two ranks wait for each other.

    Args:
        split: mesh of the ranks that split a row's hidden states, if tensor parallelism does.
        dim: elements of a hidden state.
        dtype: dtype of hidden states.
    """

    def __init__(
        self, stage: Stage, *, split: DeviceMesh | None, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ahead = stage.count - 1 - stage.index
        self._stage, self._split, self._dim, self._dtype, self._device = stage, split, dim, dtype, device
        if stage.count > 1:
            self._before, self._after = dist.get_rank() - len(stage.ranks), dist.get_rank() + len(stage.ranks)
            self._onward, self._back = dist.new_group(), dist.new_group()
        self._sent = deque[tuple[dist.Work, torch.Tensor]]()
        self._entered: torch.Tensor | None = None
        self._begun = deque[tuple[torch.Tensor | None, torch.Tensor]]()

    def enter(self, token_ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the input of this stage's next row: its token ids, or the hidden states from the stage before.

        Args:
            tokens: number of tokens of the row, or of this rank's part of it.
        """
        if self._stage.is_first:
            return token_ids
        parts = 1 if self._split is None else self._split.size()
        # Tensor-parallel ranks split hidden states by tokens; each receives its part from its counterpart.
        hidden = self._received((1, tokens // parts, self._dim), self._before, self._onward)
        # Received states are a leaf: its gradient is what goes back to the previous stage.
        self._entered = hidden.requires_grad_(torch.is_grad_enabled())
        return hidden if self._split is None else DTensor.from_local(hidden, self._split, [Shard(1)], run_check=False)

    def leave(self, hidden: torch.Tensor) -> None:
        """Send a row's hidden states to the next stage."""
        out = local(hidden)
        self._send(out, self._after, self._onward)
        if torch.is_grad_enabled():
            self._begun.append((self._entered, out))

    def backward(self) -> None:
        """Run this stage's backward pass for the oldest row whose gradient has not come back yet."""
        # `give_back` must send the gradient of this row, not of the one that entered last.
        self._entered, out = self._begun.popleft()
        out.backward(self._received(out.shape, self._after, self._back))
        self.give_back()

    def give_back(self) -> None:
        """Send the gradient from the last backward pass to the stage before."""
        if not self._stage.is_first:
            assert self._entered is not None
            assert self._entered.grad is not None, "the row has had its backward pass"
            self._send(self._entered.grad, self._before, self._back)
            self._entered = None

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def forget(self) -> None:
        """Drop the rows that have not returned, after an error."""
        self._begun.clear()
        self._sent.clear()
        self._entered = None

    def _send(self, values: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
        while len(self._sent) > 2 * self._stage.count:  # bounds the memory of stages that are faster than the next one
            self._sent.popleft()[0].wait()
        assert values.dtype == self._dtype, f"hidden states are {values.dtype}"
        message = values.detach().contiguous()
        # isend reads the message asynchronously, so `_sent` keeps it alive.
        work = dist.isend(message, rank, group=group)
        assert work is not None, "this rank is in the group"
        self._sent.append((work, message))

    def _received(self, shape: Sequence[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        values = torch.empty(*shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(values, rank, group=group)
        assert work is not None, "this rank is in the group"
        work.wait()
        return values
