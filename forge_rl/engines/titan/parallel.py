"""Meshes of trainer ranks: applies FSDP, HSDP, tensor, context and expert parallelism to a model and its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend

from forge_rl.engines.architecture import Architecture
from forge_rl.engines.devices import device_type
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.balance import Split, split_row
from forge_rl.engines.titan.least_loaded import LeastLoadedExperts
from forge_rl.engines.titan.model import PolicyModel, recompute_activations
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.packing.rows import Row

BACKEND = "partial_dtensor"
"""torchtitan's tensor annotation mode: its default needs DTensors on the mesh of all axes."""


class Parallelism:
    """This rank's place in the parallel layout.

        parallelism = Parallelism(settings)  # once the process group is initialised
        parallelism.apply(model, dtype=torch.float32)  # a model on the meta device

    Ranks are numbered as in torchtitan, from the outermost axis: replicas (HSDP), shards (FSDP), parts of a row
    (context parallel), parts of a matrix (tensor parallel). So each data-parallel share, which trains its own rows, is
    a run of `peers` consecutive ranks.
    """

    def __init__(self, settings: TrainSettings) -> None:
        set_spmd_backend(BACKEND)
        self._settings = settings
        world = dist.get_world_size()
        self.shares = world // settings.peers
        """Number of data-parallel shares."""
        self._dims = ParallelDims(
            dp_replicate=settings.data_parallel_replicate_degree,
            dp_shard=-1,
            cp=settings.context_parallel_degree,
            tp=settings.tensor_parallel_degree,
            pp=1,
            ep=settings.expert_parallel_degree,
            world_size=world,
            spmd_backend=BACKEND,
        )
        self._cp = self._dims.get_optional_mesh("cp") if world > 1 else None
        self._order: torch.Tensor | None = None
        """Order of the keys of the next forward and backward pass, see `DeviceRow.order`."""

    def apply(self, model: PolicyModel, *, dtype: torch.dtype) -> None:
        """Shard a model in place, in the order of torchtitan's own `parallelize_*` functions."""
        dims = self._dims
        if self._cp is not None:
            layers: list[Any] = list(model.layers.values())
            attentions = [layer.attention.inner_attention for layer in layers]
            for attention in attentions:
                attention.forward = self._with_keys_of_row(attention.forward)
            apply_cp_to_forward(attentions, self._cp)
        if dims.tp_enabled or dims.ep_enabled:
            model.parallelize(dims)
            if model.enable_weight_tying:
                # Each of the two modules has created its own parameter, and FSDP must find a single one.
                model.tok_embeddings.weight = model.lm_head.weight
            for module in model.modules():
                if isinstance(module, LeastLoadedExperts):
                    module.register_forward_pre_hook(_wait)
                    module.lends = self._settings.expert_balance == "least_loaded"
        recompute_activations(
            model, self._settings.activation_checkpointing, offload=self._settings.enable_activation_offload
        )
        copies = ["dp_replicate"] if dims.dp_replicate_enabled else []
        # A single rank gathers nothing: it only casts, once for forward and backward.
        gathers = dims.fsdp_enabled or dims.ep_enabled
        apply_fsdp_to_decoder(
            model,
            dims.get_mesh([*copies, "fsdp"]),
            param_dtype=dtype,
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            pp_enabled=False,
            cpu_offload=self._settings.enable_cpu_offload,
            reshard_after_forward_policy="default" if gathers else "never",
            ep_degree=dims.ep,
            edp_mesh=dims.get_mesh([*copies, "efsdp"]) if dims.ep_enabled else None,
        )
        # The loss is normalised by a global token count, so gradients are summed over ranks: torchtitan has disabled
        # averaging.
        if device_type() == "cpu":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    def split(self, row: Row, architecture: Architecture) -> tuple[Split | None, torch.Tensor]:
        """Return how ranks split a row, None without context parallelism, and the positions of this rank's tokens."""
        if self._cp is None:
            return None, torch.arange(len(row))
        split = split_row(row, self._cp.size(), self._settings.context_parallel_load_balancer, architecture)
        return split, split.tokens[self._cp.get_local_rank()]

    def begin(self, given: DeviceRow) -> None:
        """Prepare the next forward and backward pass, which are of this row."""
        self._order = given.order

    def gather(self, part: torch.Tensor, given: DeviceRow) -> torch.Tensor:
        """Gather a row, `[L]` or `[L, k]`, from its peers' parts, with gradient.

        Every peer computes the same loss over the whole row and backpropagates only through its own part, so that
        FSDP's sum over peers is the gradient of one loss.
        """
        if self._cp is None:
            return part
        row: torch.Tensor = _Gather.apply(part, self._cp, given.own, given.order)
        return row

    def _with_keys_of_row(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap attention over a whole row's keys and values, `[1, L, heads, width]`, which come rank after rank."""

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if self._order is not None:
                k, v = (_InRowOrder.apply(each, self._order) for each in (k, v))
            return attend(q, k, v, **kwargs)

        return forward


def forget_whole_gradients(model: nn.Module) -> None:
    """Drop gradients that FSDP holds until it reduces them over ranks; torch 2.13's own reset keeps them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    held.unsharded_accumulated_grad = None
                    if hasattr(held, "_unsharded_param"):
                        held._unsharded_param.grad = None


def _wait(module: nn.Module, inputs: tuple[object, ...]) -> None:
    """Wait for inputs that are still being gathered; torch 2.13's local_map would too, but lose their gradient."""
    for value in inputs:
        if isinstance(value, DTensor) and isinstance(value._local_tensor, AsyncCollectiveTensor):
            value._local_tensor = value._local_tensor.wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, mesh: DeviceMesh, own: torch.Tensor, order: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        row = part.new_empty(mesh.size() * len(part), *part.shape[1:])
        dist.all_gather_single(row, part.contiguous(), group=mesh.get_group())
        return row if order is None else torch.empty_like(row).index_copy_(0, order, row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(0, own), None, None, None


class _InRowOrder(torch.autograd.Function):
    """Moves entries of dim 1 to the positions in `order`; index_copy's own gradient would keep more tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(x).index_copy_(1, order, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(1, order), None
