"""Meshes of trainer ranks: applies FSDP, HSDP, tensor, context, expert and pipeline parallelism to a model and its
rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

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
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend

from forge_rl.engines.architecture import Architecture
from forge_rl.engines.devices import device_type
from forge_rl.engines.platform import own_device, resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.stage_plan import stage_layers
from forge_rl.engines.titan.balance import Split, split_row
from forge_rl.engines.titan.general_model import GeneralModel
from forge_rl.engines.titan.general_parallel import TensorPeers
from forge_rl.engines.titan.least_loaded import LeastLoadedExperts
from forge_rl.engines.titan.model import PolicyModel, recompute_activations
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.engines.titan.shards import local
from forge_rl.engines.titan.stages import Pipeline, Stage, check_trained
from forge_rl.packing.rows import Row

BACKEND = "partial_dtensor"
"""torchtitan's tensor annotation mode: its default needs DTensors on the mesh of all axes."""


class Parallelism:
    """This rank's place in the parallel layout.

        parallelism = Parallelism(settings, architecture)  # once the process group is initialised
        parallelism.apply(model, dtype=torch.float32)  # a model on the meta device

    Ranks are numbered as in torchtitan, from the outermost axis: stages (pipeline parallel), replicas (HSDP), shards
    (FSDP), parts of a row (context parallel), parts of a matrix (tensor parallel). So each data-parallel share, which
    trains its own rows, is a run of `peers` consecutive ranks of each stage.
    """

    def __init__(self, settings: TrainSettings, architecture: Architecture) -> None:
        set_spmd_backend(BACKEND)
        self._settings, self._architecture = settings, architecture
        world, stages = dist.get_world_size(), settings.pipeline_parallel_degree
        stage_ranks = world // stages
        self.shares = stage_ranks // settings.peers
        """Number of data-parallel shares."""
        index = dist.get_rank() // stage_ranks
        self._layers = stage_layers(architecture, stages)
        self.stage = Stage(
            index=index,
            count=stages,
            layers=self._layers[index],
            ranks=range(index * stage_ranks, (index + 1) * stage_ranks),
        )
        """This rank's part of the model."""
        self._dims = ParallelDims(
            dp_replicate=settings.data_parallel_replicate_degree,
            dp_shard=-1,
            cp=settings.context_parallel_degree,
            tp=settings.tensor_parallel_degree,
            pp=stages,
            ep=settings.expert_parallel_degree,
            world_size=world,
            spmd_backend=BACKEND,
        )
        self._cp = self._dims.get_optional_mesh("cp") if world > 1 else None
        self._order: torch.Tensor | None = None
        """Order of the keys of the next forward and backward pass, see `DeviceRow.order`."""
        self.pipeline = Pipeline(
            self.stage,
            split=self._dims.get_mesh("tp") if self._dims.tp_enabled else None,
            dim=architecture.dim,
            dtype=resolve_dtype(settings.dtype),
            device=own_device(),
        )
        self.stages = self._dims.get_mesh("pp").get_group() if stages > 1 else None
        """The ranks with this rank's place in each stage; None if there is one stage."""
        self.last_stage = dist.new_group(range(world - stage_ranks, world)) if stages > 1 else None
        """Group of the ranks that compute losses; None if all do."""
        self._ends = self._end_groups(stage_ranks) if architecture.tied and stages > 1 else None

    def apply(self, model: PolicyModel | GeneralModel, *, dtype: torch.dtype) -> None:
        """Cut this rank's stage out of a model, and shard it in place, in the order of torchtitan's own `parallelize_*`
        functions.

        Raises:
            ConfigError: all weights of a stage are frozen.
        """
        dims = self._dims
        if isinstance(model, GeneralModel):
            self._shard_general(model, dtype)
            return
        # Checked on the whole model, before the cut, so that every rank raises the same error.
        if self.stage.count > 1:
            check_trained(model, self._layers)
        self.stage.cut(model)
        if self._cp is not None:
            # torchtitan's wrapper is the outer one: it has gathered all ranks' keys and values before
            # `_with_keys_of_row` orders them.
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
        gathers = not self.only_casts
        apply_fsdp_to_decoder(
            model,
            dims.get_mesh([*copies, "fsdp"]),
            param_dtype=dtype,
            # Gradients are summed over ranks in at least float32, whatever the passes' dtype.
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            pp_enabled=False,
            cpu_offload=self._settings.enable_cpu_offload,
            # Where FSDP only casts, there is no memory to save, and resharding would cast the weights again for each
            # row.
            reshard_after_forward_policy="default" if gathers else "never",
            ep_degree=dims.ep,
            edp_mesh=dims.get_mesh([*copies, "efsdp"]) if dims.ep_enabled else None,
        )
        _sum_over_ranks(model)

    @property
    def only_casts(self) -> bool:
        """True if no ranks share weights: FSDP then gathers nothing, and only casts, once for forward and backward."""
        return not (self._dims.fsdp_enabled or self._dims.ep_enabled)

    def _shard_general(self, model: GeneralModel, dtype: torch.dtype) -> None:
        """Shard a model on transformers' code, with tensor or expert parallelism, FSDP and HSDP."""
        settings, dims = self._settings, self._dims
        copies = ["dp_replicate"] if dims.dp_replicate_enabled else []
        if dims.tp_enabled:
            mesh = dims.get_mesh("tp")
            model.split(TensorPeers(size=mesh.size(), mesh=mesh))
        if dims.ep_enabled:
            model.spread_experts(dims.get_mesh("ep"))
        recompute_activations(model, settings.activation_checkpointing, offload=settings.enable_activation_offload)
        model.shard(
            dims.get_mesh([*copies, "fsdp"]),
            dtype=dtype,
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            cpu_offload=settings.enable_cpu_offload,
            gathers=dims.fsdp_enabled,
            expert_mesh=dims.get_mesh([*copies, "efsdp"]) if dims.ep_enabled else None,
        )
        _sum_over_ranks(model)

    def split(self, row: Row) -> tuple[Split | None, torch.Tensor]:
        """Return how ranks split a row, None without context parallelism, and the positions of this rank's tokens."""
        if self._cp is None:
            return None, torch.arange(len(row))
        split = split_row(row, self._cp.size(), self._settings.context_parallel_load_balancer, self._architecture)
        return split, split.tokens[self._cp.get_local_rank()]

    def begin(self, device_row: DeviceRow) -> None:
        """Prepare the forward and backward pass of a row."""
        self._order = device_row.order

    def gather(self, part: torch.Tensor, device_row: DeviceRow) -> torch.Tensor:
        """Gather a row, `[L]` or `[L, k]`, from its peers' parts, with gradient.

        Every peer computes the same loss over the whole row and backpropagates only through its own part, so that
        FSDP's sum over peers is the gradient of one loss.
        """
        if self._cp is None:
            return part
        row: torch.Tensor = _Gather.apply(part, self._cp, device_row.local_indices, device_row.order)
        return row

    def clip(self, model: PolicyModel | GeneralModel, max_norm: float) -> torch.Tensor:
        """Sum the gradients of a weight that two stages hold, then clip all gradients to a global norm. Returns the
        norm before clipping, over all ranks, in which that weight counts once."""
        # Each end holds its own part of the tied weight's gradient: the embedding's on the first stage, the head's on
        # the last.
        tied = self._tied(model)
        if tied is not None and tied.grad is not None:
            dist.all_reduce(local(tied.grad), group=self._ends)
        copy = tied if tied is not None and model.copies_embedding else None
        if isinstance(model, GeneralModel) and (self._dims.tp_enabled or self._dims.ep_enabled):
            return _clip_over_meshes(list(model.parameters()), max_norm)
        norm: torch.Tensor = clip_grad_norm_(
            [weight for weight in model.parameters() if weight is not copy],
            max_norm,
            pp_mesh=None if self.stages is None else self._dims.get_mesh("pp"),
            ep_enabled=self._settings.expert_parallel_degree > 1,
        )
        # Left out of the norm, the copy is scaled by the same factor as the original, so both stay equal.
        if copy is not None:
            nn.utils.clip_grads_with_norm_([copy], max_norm, norm)
        return norm

    def copy_tied(self, model: PolicyModel | GeneralModel) -> None:
        """Copy a weight that the first and last stages share from the first to the last one, after an update: with
        stochastically rounded moments the two would drift apart."""
        if (tied := self._tied(model)) is not None:
            # The sender is the rank with this rank's place in the first stage.
            dist.broadcast(local(tied.detach()), src=dist.get_rank() % len(self.stage.ranks), group=self._ends)

    def _tied(self, model: PolicyModel | GeneralModel) -> nn.Parameter | None:
        """Return this stage's copy of the weight that the first and last stages share; None without one."""
        if not model.spans_tie or not (self.stage.is_first or self.stage.is_last):
            return None
        assert isinstance(model, PolicyModel), "others have one stage"
        weight: nn.Parameter = model.tok_embeddings.weight if self.stage.is_first else model.lm_head.weight
        return weight

    @property
    def mixtures(self) -> slice:
        """This stage's layers with experts, as a slice of the model's expert layers."""
        experts = self._architecture.experts
        indices = [index for index, layer in enumerate(experts.layers if experts else ()) if layer in self.stage.layers]
        return slice(indices[0], indices[-1] + 1) if indices else slice(0, 0)

    def in_whole_model(self, values: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Place values of this stage's expert layers, along a dim, among all expert layers of the model; the rest is
        0."""
        if self.stages is None:
            return values
        experts = self._architecture.experts
        assert experts is not None, "the model has layers with experts"
        shape = list(values.shape)
        shape[dim] = len(experts.layers)
        model_values = values.new_zeros(shape)
        model_values.movedim(dim, 0)[self.mixtures] = values.movedim(dim, 0)
        return model_values

    def _end_groups(self, stage_ranks: int) -> dist.ProcessGroup | None:
        """Pair each rank of the first stage with its counterpart in the last one; return this rank's group, if any."""
        end_group = None
        for place in range(stage_ranks):
            pair = [place, dist.get_world_size() - stage_ranks + place]
            # Every rank must create every group, in the same order, even those that it does not join.
            group = dist.new_group(pair)
            end_group = group if dist.get_rank() in pair else end_group
        return end_group

    def _with_keys_of_row(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap attention over a whole row's keys and values, `[1, L, heads, width]`, to put them in the row's order
        first: they arrive rank after rank."""

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if self._order is not None:
                k, v = (_RowPlacement.apply(x, self._order) for x in (k, v))
            return attend(q, k, v, **kwargs)

        return forward


def _clip_over_meshes(weights: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradients of weights on several meshes, such as sharded and replicated ones under tensor parallelism, to
    a global norm; returns the norm before clipping, over all ranks."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for weight in weights:
        if weight.grad is not None:
            groups.setdefault(cast(DTensor, weight).device_mesh, []).append(weight)
    norms = [
        nn.utils.get_total_norm([cast(torch.Tensor, weight.grad) for weight in group]) for group in groups.values()
    ]
    # Each mesh's norm is first completed over its own ranks; norms over disjoint weights then combine as a norm.
    norm: torch.Tensor = torch.stack([cast(DTensor, group_norm).full_tensor() for group_norm in norms]).norm()
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _sum_over_ranks(model: nn.Module) -> None:
    """Make FSDP reduce gradients by plain sums on gloo, which lacks PREMUL_SUM.

    The loss is normalised by a global token count, so gradients are summed: torchtitan has disabled averaging.
    """
    if device_type() == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def forget_whole_gradients(model: nn.Module) -> None:
    """Drop gradients that FSDP holds until it reduces them over ranks; torch 2.13's own reset keeps them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for fsdp_param in group.fsdp_params:
                    fsdp_param.unsharded_accumulated_grad = None
                    if hasattr(fsdp_param, "_unsharded_param"):
                        fsdp_param._unsharded_param.grad = None


def _wait(module: nn.Module, inputs: tuple[object, ...]) -> None:
    """Wait for inputs that are still being gathered; torch 2.13's local_map would too, but lose their gradient."""
    for value in inputs:
        if isinstance(value, DTensor) and isinstance(value._local_tensor, AsyncCollectiveTensor):
            value._local_tensor = value._local_tensor.wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, mesh: DeviceMesh, local_indices: torch.Tensor, order: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(local_indices)
        row = part.new_empty(mesh.size() * len(part), *part.shape[1:])
        dist.all_gather_single(row, part.contiguous(), group=mesh.get_group())
        return row if order is None else torch.empty_like(row).index_copy_(0, order, row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (local_indices,) = ctx.saved_tensors
        # No reduction over peers: each backpropagates through its own part of the same loss, and FSDP sums the results.
        return grad.index_select(0, local_indices), None, None, None


class _RowPlacement(torch.autograd.Function):
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
