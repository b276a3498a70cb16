"""Builds one rank's part of a model and loads its weights, and makes the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torchtitan.tools.utils import set_default_dtype

from forge_rl.engines.families.family import Architecture
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.general_model import GeneralModel, build_general
from forge_rl.engines.titan.loading import load_weights
from forge_rl.engines.titan.lora import init_adapters, published_specs
from forge_rl.engines.titan.master_weights import MasterWeights
from forge_rl.engines.titan.model import PolicyModel, build_model, recompute_activations
from forge_rl.engines.titan.parallel import Parallelism
from forge_rl.engines.titan.quantized_base import parameter_count
from forge_rl.engines.titan.shards import freeze
from forge_rl.engines.titan.small_adamw import SmallAdamW
from forge_rl.weights.manifest import TensorSpec


class LoadedModel(NamedTuple):
    """One rank's part of a model."""

    model: PolicyModel | GeneralModel
    specs: tuple[TensorSpec, ...]
    """Specs of all tensors that the whole model publishes, whichever stage this rank holds."""
    parameters: int
    """Number of the whole model's parameters, over all ranks and stages."""


def load_model(
    folder: Path,
    architecture: Architecture,
    settings: TrainSettings,
    parallelism: Parallelism,
    device: torch.device,
    *,
    values: bool,
    frozen: bool = False,
) -> LoadedModel:
    """Build a model and load its weights; a frozen one holds them in the dtype of the forward pass."""
    dtype = resolve_dtype(settings.dtype)
    state_dtype = torch.promote_types(dtype, torch.float32)
    # A single rank casts float32 masters itself, see `MasterWeights`, which is cheaper than FSDP's casts. CPU offload
    # is part of FSDP, so it needs FSDP even on one rank.
    is_alone = dist.get_world_size() == 1 and not settings.enable_cpu_offload
    is_sharded, is_cast = not is_alone, is_alone and dtype != state_dtype
    state_device = torch.device("cpu") if settings.enable_cpu_offload else device
    model: PolicyModel | GeneralModel
    if architecture.family.general:
        # `build_general` puts the weights on the meta device itself; buffers that transformers computes need real
        # memory.
        with set_default_dtype(state_dtype):
            model = build_general(architecture, settings, values=values)
    else:
        with torch.device("meta" if is_sharded or is_cast else device), set_default_dtype(state_dtype):
            model = build_model(architecture, settings, values=values)
    # Only trained weights need float32; frozen ones are held in the dtype of the passes.
    if frozen or model.adapters is not None:
        for parameter in model.parameters():
            if (frozen or not parameter.requires_grad) and parameter.is_floating_point():
                parameter.data = parameter.to(dtype)  # not buffers, such as RoPE's
    if not frozen:
        model.steers = settings.expert_balance == "bias"
        if model.adapters is None:
            freeze(model, settings.frozen)
    # Taken before `apply` cuts out this rank's stage: one rank's specs describe the versions of all stages.
    published, parameters = published_specs(model), parameter_count(model)
    if is_sharded:
        parallelism.apply(model, dtype=dtype)
    else:
        recompute_activations(model, settings.activation_checkpointing, offload=settings.enable_activation_offload)
    if is_sharded or is_cast or isinstance(model, GeneralModel):
        model.to_empty(device=state_device)
    # Buffers first: loading fills some of them, such as the biases that choose experts.
    with torch.no_grad():
        model.init_states()
    load_weights(model, folder, tied=model.enable_weight_tying)
    init_adapters(model)
    # Under CPU offload, only weights stay in host memory; the passes read buffers on the device.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if frozen:
        model.requires_grad_(False)
    elif is_cast:
        model.masters = MasterWeights(model, dtype)
    return LoadedModel(model, published, parameters)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Make an optimizer for a model's trained weights; it creates its state at the first step."""
    optimizer, kind = settings.optimizer, settings.optimizer_state
    betas, decay = (optimizer.beta1, optimizer.beta2), optimizer.weight_decay
    groups = [
        {"params": parameters} if decays else {"params": parameters, "weight_decay": 0.0}
        for (_, decays), parameters in _grouped(model, decay).items()
    ]
    if kind == "float32":
        adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, weight_decay=decay, fused=True)
        # Torch counts all writes to a weight but those of its fused kernels, and `MasterWeights` relies on the counts.
        # Before the step, so that one that fails half-way counts, too.
        weights = [weight for group in adamw.param_groups for weight in group["params"]]
        adamw.register_step_pre_hook(lambda *_: increment_version(weights))
        return adamw
    return SmallAdamW(groups, kind=kind, lr=optimizer.lr, betas=betas, weight_decay=decay)


def _grouped(model: nn.Module, decay: float) -> dict[tuple[object, bool], list[nn.Parameter]]:
    """Group trained parameters by mesh, as AdamW handles one mesh at a time and experts have their own, and by whether
    they decay: vectors such as norms do not, nor do biases, which are matrices in experts."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            is_matrix = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
            groups.setdefault((mesh, is_matrix or not decay), []).append(parameter)
    return groups
