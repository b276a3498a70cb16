"""Tensor and expert parallelism of transformers' models: ranks share matrices as `families.tensor_plan` says, and sum
or gather what each computes; or each computes some of the experts, for the tokens of all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_rl.engines.families.tensor_plan import COLUMNS, EXPERTS, ROWS, SUMMED
from forge_rl.engines.titan.shards import local

TensorMap: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorPeers:
    """The ranks that share a model's matrices. All of them hold the same hidden states."""

    size: int
    mesh: DeviceMesh | None = None
    """Their one-dimensional mesh. None for a plan, whose model is the first rank's part on the meta device."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' values, without gradient."""
        if self.mesh is None:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.mesh.get_group())
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return all ranks' values, equally many, along the last dim, without gradient."""
        if self.mesh is None:
            return torch.cat([values] * self.size, dim=-1)
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.mesh.get_group())
        return torch.cat(parts, dim=-1)

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dim."""
        return values.chunk(self.size, dim=-1)[self.rank]


def split_module(module: Any, style: str, peers: TensorPeers) -> None:
    """Leave a rank its part of a module's weights, and have the module return what the whole one would, or, if its
    outputs are split, this rank's part of them."""
    if style in COLUMNS:
        # A column-parallel matrix splits its outputs: of the adapter, B is split with them, and A is whole on each
        # rank.
        for name in [name for name in module._parameters if name != "lora_A"]:
            _shard(module, name, 0, peers)
        module.forward = _columns(module, module.forward, peers, gathers=style != "colwise")
    elif style in ROWS:
        # A row-parallel matrix splits its inputs: of the adapter, A is split with them, and B is whole. So is the bias.
        for name in [name for name in ("weight", "lora_A") if name in module._parameters]:
            _shard(module, name, 1, peers)
        module.forward = _rows(module, module.forward, peers, splits=style != "rowwise")
    elif style == EXPERTS:
        for name in list(module._parameters):
            _shard(module, name, 0, peers)
        module.forward = _experts(module, module.forward, peers)
        module.num_experts //= peers.size
        module._is_expert_parallel = True
    else:
        assert style == SUMMED, f"module_styles refuses {style}"
        module.forward = _summed(module, module.forward, peers)


def spread_experts(module: Any, mesh: DeviceMesh) -> None:
    """Leave a rank its part of a module's experts, and have it compute them for the tokens of all ranks.

    Args:
        mesh: one-dimensional mesh of the ranks that share the experts. Each has its own tokens.
    """
    for name in list(module._parameters):
        _shard(module, name, 0, TensorPeers(size=mesh.size(), mesh=mesh))
    module.num_experts //= mesh.size()
    module.forward = _dispatching(module, module.forward, mesh)


def split_vocabulary(embedding: nn.Embedding, head: nn.Module, peers: TensorPeers, *, tied: bool) -> None:
    """Leave a rank its part of the vocabulary, in embedding and head."""
    vocab = embedding.num_embeddings
    length = -(-vocab // peers.size)
    first = min(vocab, length * peers.rank)
    last = min(vocab, first + length)
    _shard(embedding, "weight", 0, peers)
    if tied:
        head.weight = embedding.weight
    else:
        _shard(head, "weight", 0, peers)
    padding = embedding.padding_idx
    embedding.padding_idx = padding - first if padding is not None and first <= padding < last else None
    embed = embedding.forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        # Tokens of other ranks look up row 0, and are zeroed before the sum.
        is_local = (tokens >= first) & (tokens < last)
        with _local_weights(embedding):
            rows = embed(torch.where(is_local, tokens - first, 0))
        return sum_outputs(rows.where(is_local[..., None], 0.0), peers)

    embedding.forward = forward  # type: ignore[assignment, method-assign]


def sum_gradients(values: torch.Tensor, peers: TensorPeers) -> torch.Tensor:
    """Return values that all ranks hold, for computations that differ by rank: their gradient is the sum of all."""
    return _exchange(values, _identity, peers.sum)


def sum_outputs(values: torch.Tensor, peers: TensorPeers) -> torch.Tensor:
    """Return the sum of all ranks' values, for computations that all ranks repeat."""
    return _exchange(values, peers.sum, _identity)


def _columns(module: Any, compute: Callable[..., Any], peers: TensorPeers, *, gathers: bool) -> Callable[..., Any]:
    @functools.wraps(compute)
    def forward(values: torch.Tensor) -> torch.Tensor:
        with _local_weights(module, **_summed_factor(module, "lora_A", peers)):
            outputs: torch.Tensor = compute(sum_gradients(values, peers))
        return _exchange(outputs, peers.gather, peers.part) if gathers else outputs

    return forward


def _rows(module: Any, compute: Callable[..., Any], peers: TensorPeers, *, splits: bool) -> Callable[..., Any]:
    @functools.wraps(compute)
    def forward(values: torch.Tensor) -> torch.Tensor:
        with _local_weights(module, bias=None, **_summed_factor(module, "lora_B", peers)):
            if splits:
                values = _exchange(values, lambda inputs: peers.part(inputs).clone(), peers.gather)
            outputs = sum_outputs(compute(values), peers)
        # The bias is added after the sum, so it counts once.
        bias = module._parameters.get("bias")
        return outputs if bias is None else outputs + bias

    return forward


def _summed_factor(module: Any, name: str, peers: TensorPeers) -> dict[str, torch.Tensor]:
    """Return the factor of a module's adapter that each rank holds whole and multiplies with a part; none without."""
    factor = module._parameters.get(name)
    return {} if factor is None else {name: sum_gradients(factor, peers)}


def _summed(module: Any, compute: Callable[..., Any], peers: TensorPeers) -> Callable[..., Any]:
    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {
            name: sum_gradients(weight, peers) for name, weight in module._parameters.items() if weight is not None
        }
        with _local_weights(module, **weights):
            return compute(*args, **kwargs)

    return forward


def _experts(module: Any, compute: Callable[..., Any], peers: TensorPeers) -> Callable[..., Any]:
    count = module.num_experts // peers.size
    first = count * peers.rank

    @functools.wraps(compute)
    def forward(hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        hidden, weights = (sum_gradients(values, peers) for values in (hidden, weights))
        is_local = (expert_ids >= first) & (expert_ids < first + count)
        with _local_weights(module):
            # Experts of other ranks get an id past the last local one, and weight 0.
            outputs = compute(
                hidden, torch.where(is_local, expert_ids - first, count), weights.where(is_local, 0.0), *args
            )
            # Also a rank none of whose experts was chosen must take part in the sums of the backward pass.
            parts = (hidden, weights, *(weight for weight in module._parameters.values() if weight is not None))
            outputs = outputs + sum(part[:0].sum() for part in parts)
        return sum_outputs(outputs, peers)

    return forward


def _dispatching(module: Any, compute: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    ranks, count = mesh.size(), module.num_experts

    @functools.wraps(compute)
    def forward(hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        owners, order = (expert_ids // count).flatten().sort(stable=True)
        # Rows are sorted by the rank that owns their expert; `tokens` leads their results back.
        tokens = order // expert_ids.shape[1]
        send_counts = owners.bincount(minlength=ranks)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=mesh.get_group())
        counts = send_counts.tolist(), receive_counts.tolist()
        send = functools.partial(_exchange_rows, counts=counts, mesh=mesh)
        send_back = functools.partial(_exchange_rows, counts=counts[::-1], mesh=mesh)
        inputs = _exchange(hidden[tokens], send, send_back)
        local_ids = send((expert_ids.flatten() % count)[order])
        # A last row of zeros, so that a rank that no token came to takes part in the backward pass.
        inputs = torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])])
        local_ids = torch.cat([local_ids, local_ids.new_zeros(1)])
        with _local_weights(module):
            # Weights of 1: the sender applies the real ones to what comes back, and so has their gradient.
            outputs = compute(inputs, local_ids[:, None], weights.new_ones(len(local_ids), 1), *args)[:-1]
        outputs = _exchange(outputs, send_back, send)
        scaled = outputs * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, tokens, scaled.to(hidden.dtype))

    return forward


def _shard(module: nn.Module, name: str, dim: int, peers: TensorPeers) -> None:
    """Replace a module's weight, on the meta device, by this rank's part of it along a dim."""
    weight = module._parameters[name]
    if weight is None:
        return
    part = (
        weight.detach().chunk(peers.size, dim)[0].clone()
        if peers.mesh is None
        else distribute_tensor(weight.detach(), peers.mesh, [Shard(dim)], src_data_rank=None)
    )
    module._parameters[name] = nn.Parameter(part, requires_grad=weight.requires_grad)


@contextlib.contextmanager
def _local_weights(module: nn.Module, **weights: torch.Tensor | None) -> Iterator[None]:
    """Have a module compute with this rank's parts of its weights, or with others that replace them by name."""
    originals = dict(module._parameters)
    parts: dict[str, Any] = {name: None if weight is None else local(weight) for name, weight in originals.items()}
    module._parameters.update(parts | {name: weight for name, weight in weights.items() if name in originals})
    try:
        yield
    finally:
        module._parameters.update(originals)


class _Exchange(torch.autograd.Function):
    """Applies one function to values in the forward pass, and another one to their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: TensorMap, backward: TensorMap) -> torch.Tensor:
        ctx.backward_map = backward
        outputs = forward(values)
        return values.view_as(values) if outputs is values else outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_map(grad), None, None


def _exchange(values: torch.Tensor, forward: TensorMap, backward: TensorMap) -> torch.Tensor:
    return cast(torch.Tensor, _Exchange.apply(values, forward, backward))


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _exchange_rows(rows: torch.Tensor, counts: tuple[list[int], list[int]], mesh: DeviceMesh) -> torch.Tensor:
    """Send rows to the ranks of a mesh, and return those received; `counts` has the numbers to and from each."""
    send_counts, receive_counts = counts
    output = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), receive_counts, send_counts, group=mesh.get_group())
    return output
