"""One rank of the trainer: forward, backward and optimizer steps over packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.utils import set_default_dtype

from forge_rl.algorithms import Loss, LossInputs, logprob_gap
from forge_rl.data.packing import Minibatch, Row
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.platform import local_device, release_memory, resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.checkpointing import checkpointing_of
from forge_rl.engines.titan.model import attention_mask, build_model
from forge_rl.engines.titan.offload import OffloadedState
from forge_rl.engines.titan.parallel import Parallelism, whole_hidden
from forge_rl.engines.titan.routing import routing_counts, routing_metrics, set_routing
from forge_rl.engines.titan.saving import StateSaver
from forge_rl.engines.titan.shards import freeze, local_shards, specs, values_of
from forge_rl.engines.titan.state import load_training_state, load_weights
from forge_rl.errors import ConfigError
from forge_rl.metrics import Max, Mean, Sum, Value, merge_all
from forge_rl.weights.manifest import TensorSpec
from forge_rl.weights.transports.protocol import LocalShard


class TitanEngine:
    """A `TrainEngine` on torchtitan: one rank's part of the policy and its optimizer, in any layout."""

    def __init__(self, folder: Path, settings: TrainSettings, *, reference: bool = False) -> None:
        self.rank = dist.get_rank()
        self.updates = 0
        self.architecture = read_architecture(folder)
        self.device = local_device(self.rank)
        self._folder = folder
        self._settings = settings
        self._parallelism = Parallelism(settings)
        self.model = self._build()
        freeze(self.model, settings.frozen)
        self._reference = self._build().requires_grad_(False) if reference else None
        optimizer = settings.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in _by_mesh(self.model)],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._offloaded: OffloadedState | None = None
        self._saver = StateSaver()

    def train_batch(
        self,
        minibatches: Sequence[Minibatch],
        loss: Loss,
        *,
        epochs: int,
        temperature: float,
        total_updates: int,
        version: int | None,
    ) -> list[dict[str, Value] | None]:
        self.onload()
        rows = [row for minibatch in minibatches for row in minibatch.rows]
        nothing: list[torch.Tensor | None] = [None] * len(rows)
        references = self._logprobs(self._reference, rows, temperature) if loss.needs_reference else nothing
        proximals = self._logprobs(self.model, rows, temperature) if loss.needs_proximal else nothing
        found: list[dict[str, Value] | None] = []
        before = self.updates
        for _ in range(epochs):
            scored = zip(references, proximals, strict=True)
            for minibatch in minibatches:
                parts, counts = [], list[torch.Tensor]()
                for row in minibatch.rows:
                    row_loss, metrics = self._forward(
                        self._to_device(row),
                        loss,
                        *next(scored),
                        temperature=temperature,
                        version=version if self.updates == before else None,
                    )
                    if (counted := routing_counts(self.model)) is not None:
                        counts.append(counted)
                    row_loss = row_loss / loss.aggregation.divisor(
                        tokens=minibatch.tokens, sequences=minibatch.sequences
                    )
                    row_loss.backward()
                    # A sum over the rows of all shares: the mean is over updates.
                    share = 1 / (len(minibatch.rows) * self._parallelism.shares)
                    parts.append(metrics | {"loss": Mean(float(row_loss.detach()), share)})
                if counts:
                    parts.append(self._routing(counts))
                updated = self._update(total_updates)
                found.append(None if updated is None else merge_all([*parts, updated]))
        return found

    def _routing(self, rows: list[torch.Tensor]) -> dict[str, Value]:
        """Return metrics of all ranks' routing, from this rank's counts of each row."""
        counts = torch.stack(rows).sum(dim=0)
        dist.all_reduce(counts)
        return routing_metrics(counts, replays=self._settings.router_replay)

    def _update(self, total_updates: int) -> dict[str, Value] | None:
        """Take an optimizer step on the gradient; None if it is not finite, and then nothing has changed."""
        norm = clip_grad_norm_(
            self.model.parameters(),
            self._settings.optimizer.max_grad_norm,
            ep_enabled=self._settings.expert_parallel > 1,
        )
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            return None
        lr = self._settings.optimizer.lr_at(self.updates, total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return {"grad_norm": Max(float(norm)), "lr": Max(lr)}

    def logprobs(self, rows: Sequence[Row], *, temperature: float) -> list[torch.Tensor]:
        self.onload()
        return [found.cpu() for found in self._logprobs(self.model, rows, temperature)]

    @torch.no_grad()
    def _logprobs(self, model: Decoder | None, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """Score every masked target; a tensor for each row, `[L]`, on the device."""
        if model is None:
            raise ConfigError(
                "the loss needs a frozen reference, and the trainer has none",
                hint="give start the loss that is trained with",
            )
        found = [self._score(model, self._to_device(row), temperature)[0] for row in rows]
        _reshard(model)
        return found

    def offload(self) -> int:
        if self._offloaded is not None:
            return 0
        on_device = (tensor for tensor in self._held() if tensor.device.type == self.device.type)
        self._offloaded = OffloadedState(on_device)
        return self._offloaded.bytes

    def onload(self) -> int:
        if self._offloaded is None:
            return 0
        self._offloaded.bring_back()
        moved, self._offloaded = self._offloaded.bytes, None
        return moved

    def local_shards(self) -> Iterator[LocalShard]:
        self.onload()
        release_memory()  # engines are about to take back what a step needed at its peak
        return local_shards(self.model)

    def specs(self) -> tuple[TensorSpec, ...]:
        return specs(self.model)

    def save(self, folder: Path, model: Path, *, version: int) -> Future[None]:
        self.onload()
        counts, dtype = {"updates": self.updates, "version": version}, self.architecture.dtype
        return self._saver.save(self.model, self.optimizer, counts, folder, source=model, dtype=dtype)

    def load_training_state(self, folder: Path) -> int:
        self.onload()
        counts = load_training_state(self.model, self.optimizer, ("updates", "version"), folder)
        self.updates = counts["updates"]
        return counts["version"]

    def _held(self) -> Iterator[torch.Tensor]:
        """Yield all that lasts from step to step, as this rank has it; gradients do not."""
        for model in (self.model, self._reference):
            if model is not None:
                _reshard(model)
                yield from map(values_of, model.parameters())
                yield from map(values_of, model.buffers())
        for state in self.optimizer.state.values():
            yield from (values_of(value) for value in state.values() if value.dim())

    def _forward(
        self,
        row: Row,
        loss: Loss,
        reference: torch.Tensor | None,
        proximal: torch.Tensor | None,
        *,
        temperature: float,
        version: int | None,
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """Return the loss of a row, and metrics of its tokens; `version` is that of the weights, if they have one."""
        logprobs, entropy = self._score(self.model, row, temperature)
        loss_sum, sums = loss(
            LossInputs(
                logprobs=logprobs,
                behaviour=row.behaviour.to(logprobs.dtype),
                advantages=row.advantages.to(logprobs.dtype),
                weights=loss.aggregation.weights(row.lengths.to(logprobs.dtype)),
                mask=row.mask,
                versions=row.versions,
                episodes=row.episodes,
                turns=row.turns,
                segments=row.segments,
                reference=reference,
                proximal=proximal,
            )
        )
        tokens = float(row.mask.sum())
        metrics: dict[str, Value] = {
            "entropy": Mean(float(entropy[row.mask].sum()), tokens),
            "tokens/trained": Sum(tokens),
        }
        # The gap tells whether trainer and engine agree, on tokens that these weights produced; on others it is drift.
        fresh = torch.zeros_like(row.mask) if version is None else row.mask & (row.versions == version)
        for name, compared in (("logprob_gap", fresh), ("logprob_drift", row.mask & ~fresh)):
            gap = logprob_gap(logprobs.detach(), row.behaviour, compared)
            if gap["count"] > 0:
                metrics |= {
                    name: Mean(float(gap["abs_sum"]), float(gap["count"])),
                    f"{name}/max": Max(float(gap["max"])),
                }
        metrics |= {f"loss/{name}": Mean(float(value), tokens) for name, value in sums.items()}
        return loss_sum, metrics

    def _score(self, model: Decoder, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprob and entropy of each masked target, [L] with 0 elsewhere.

        The output projection, a fifth of a small model's work, runs on masked positions only.
        """
        own = self._parallelism.chunk(len(row))
        token_ids, positions, targets = (values[own] for values in (row.token_ids, row.positions, row.targets))
        wanted = row.mask[own].nonzero().squeeze(1)
        # A chunk without targets (or a row that pads a share) must still run every layer, for the collectives.
        chosen = wanted if len(wanted) else wanted.new_zeros(1)
        replayed = row.routed if self._settings.router_replay and model is self.model else None
        set_routing(model, row.trees[own] >= 0, None if replayed is None else replayed[own])
        handle = model.lm_head.register_forward_pre_hook(
            lambda _, inputs: (whole_hidden(inputs[0])[0, chosen], targets[chosen], temperature)
        )
        try:
            masks = attention_mask(row, own, window=self.architecture.window)
            picked, entropy = model(token_ids[None], positions=positions[None], attention_masks=masks)
        finally:
            handle.remove()
        scatter = picked.new_zeros(len(targets))
        if len(wanted):
            found = scatter.index_put((wanted,), picked), scatter.index_put((wanted,), entropy)
        else:
            found = scatter + 0.0 * picked.sum(), scatter
        return self._parallelism.gather(found[0]), self._parallelism.gather(found[1])

    def _to_device(self, row: Row) -> Row:
        return replace(
            row, **{name: value.to(self.device) for name, value in vars(row).items() if torch.is_tensor(value)}
        )

    @property
    def parameters(self) -> int:
        """Number of the policy's parameters, over all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _build(self) -> Decoder:
        world = dist.get_world_size()
        dtype = resolve_dtype(self._settings.dtype)
        kept = torch.promote_types(dtype, torch.float32)
        shard = world > 1 or dtype != kept or self._settings.cpu_offload
        home = torch.device("cpu") if self._settings.cpu_offload else self.device
        with torch.device("meta" if shard else self.device), set_default_dtype(kept):
            model = build_model(
                self.architecture,
                max_positions=self._settings.longest_row,
                sequence_parallel=self._settings.tensor_parallel > 1,
                expert_parallel=self._settings.expert_parallel > 1,
            )
        if shard:
            self._parallelism.apply(model, dtype=dtype)
            model.to_empty(device=home)
        elif (checkpointing := checkpointing_of(self._settings)) is not None:
            checkpointing.build(dump_folder="").apply(model)
        with torch.no_grad():
            model.init_states()
        load_weights(model, self._folder, tied=self.architecture.tied)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        return model


def _by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Group the parameters that are trained by their meshes: AdamW works on one at a time, and experts have another."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _reshard(model: nn.Module) -> None:
    """Give up whole weights that FSDP keeps after a forward pass without a backward one.

    While it keeps them, they stand in the model in place of the shards, in the format of the forward pass and unknown
    to the optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
