"""One rank of the trainer: forward, backward and optimizer steps over packed rows."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.memory import adds_up_once
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import own_device, release_memory, resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.building import LoadedModel, load_model, make_optimizer
from forge_rl.engines.titan.diagnostics import measure_tokens
from forge_rl.engines.titan.exchange import shards_of_own_host
from forge_rl.engines.titan.host_memory import OffloadedTensors
from forge_rl.engines.titan.inputs import RowInputs, minibatch_statistics
from forge_rl.engines.titan.least_loaded import rank_loads
from forge_rl.engines.titan.loading import load_training_state, load_weights
from forge_rl.engines.titan.masks import compile_attention, compile_once
from forge_rl.engines.titan.measures import Measures, measured_loss
from forge_rl.engines.titan.parallel import Parallelism, forget_whole_gradients
from forge_rl.engines.titan.routing import rank_metrics, routing_counts, routing_metrics, steer
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.engines.titan.saving import CheckpointWriter
from forge_rl.engines.titan.scoring import RowScorer, reshard
from forge_rl.engines.titan.shards import local_shards, values_of
from forge_rl.errors import ConfigError, ForgeError, ModelError
from forge_rl.metrics import Max, Mean, Sum, Value
from forge_rl.packing.rows import Minibatch, Row
from forge_rl.runtime.far_files import Folder
from forge_rl.weights.manifest import Manifest, TensorSpec
from forge_rl.weights.transports.protocol import LocalShard

_Compared: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""A row's logprobs under the reference and the proximal policy; None if the loss does not need them."""


class TitanEngine:
    """A `TrainEngine` on torchtitan: one rank's part of the policy and its optimizer, in any layout."""

    def __init__(self, folder: Path, settings: TrainSettings, *, reference: bool = False, values: bool = False) -> None:
        self.rank = dist.get_rank()
        self.updates = self.planned = 0
        self.architecture = read_architecture(folder, settings.modelling)
        if self.architecture.quantized:
            raise ModelError(
                f"{folder} holds quantised weights, which cannot be trained as they are",
                hint="train the copy that forge_rl.models.dequantized makes",
            )
        self.device = own_device()
        if self.device.type == "cuda":
            compile_once()
            compile_attention()
        self._folder = folder
        self._settings = settings
        self._values = values
        self._parallelism = Parallelism(settings, self.architecture)
        self._pipeline, self._stage = self._parallelism.pipeline, self._parallelism.stage
        self.model, self._specs, self.parameters = self._load()
        self._reference = self._load(frozen=True).model if reference else None
        self.scorer = RowScorer(
            self.model, settings, self._parallelism, window=self.architecture.window, device=self.device
        )
        self.optimizer = make_optimizer(self.model, settings)
        self._adds_up_once = adds_up_once(self.architecture.weights, settings, ranks=dist.get_world_size())
        self._offloaded: OffloadedTensors | None = None
        self._saver = CheckpointWriter()

    def train_batch(
        self,
        minibatches: Sequence[Minibatch],
        loss: Loss,
        *,
        epochs: int,
        temperature: float,
        total_updates: int,
        version: int | None,
        scored: list[torch.Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[dict[str, Value] | None]:
        self._check_head("values" in loss.needs, "the loss is computed from")
        self.onload()
        try:
            comparisons = self._compared(minibatches, loss, temperature)
            batch_metrics: list[dict[str, Value] | None] = []
            first_update = self.updates
            row_scores = list[torch.Tensor]()
            rows = epochs * sum(len(minibatch.rows) for minibatch in minibatches)
            counts = itertools.count(1)

            def advance() -> None:
                if progress is not None:
                    progress(next(counts), rows)

            for epoch in range(epochs):
                for minibatch, minibatch_comparisons in zip(minibatches, comparisons, strict=True):
                    fraction = (self.updates - first_update) / (epochs * len(minibatches))
                    update_version = None if version is None else version + fraction
                    batch_metrics.append(
                        self._train_minibatch(
                            minibatch,
                            minibatch_comparisons,
                            loss,
                            temperature,
                            total_updates,
                            update_version,
                            None if scored is None or epoch else row_scores,
                            advance,
                        )
                    )
            if scored is not None and row_scores:
                scored += torch.cat(row_scores).cpu().split([len(scores) for scores in row_scores])
            return batch_metrics
        except BaseException:
            self._forget_step()
            raise

    @torch.no_grad()
    def evaluate(self, minibatches: Sequence[Minibatch], loss: Loss) -> dict[str, Value]:
        self._check_head("values" in loss.needs, "the loss is computed from")
        self.onload()
        try:
            measures, failed = Measures(), list[ForgeError]()
            for minibatch, minibatch_comparisons in zip(
                minibatches, self._compared(minibatches, loss, 1.0), strict=True
            ):
                if not self._stage.is_last:
                    self._pass_on(minibatch, minibatch_comparisons, loss, 1.0)
                    continue
                share = 1 / (max(1, len(minibatch.rows)) * self._parallelism.shares)
                for device_row, _, row_loss in self._row_losses(
                    minibatch, minibatch_comparisons, loss, 1.0, None, measures, failed
                ):
                    measures.add("tokens/trained", Sum, device_row.tokens)
                    measures.add("loss", Mean, row_loss, share)  # the sum over rows, the mean over minibatches
            reshard(self.model)
            self._pipeline.finish()
            self._raise_if_failed(failed)
            return measures.read()[0]
        except BaseException:
            self._forget_step()
            raise

    def _compared(self, minibatches: Sequence[Minibatch], loss: Loss, temperature: float) -> list[list[_Compared]]:
        """Return each row's logprobs under the reference and the proximal policy, if the loss needs them."""
        rows = [row for minibatch in minibatches for row in minibatch.rows]
        references: Sequence[torch.Tensor | None] = [None] * len(rows)
        proximals = references
        if "reference" in loss.needs:
            if self._reference is None:
                raise ConfigError(
                    "the loss needs a frozen reference, and the trainer has none",
                    hint="pass start() the loss to train with",
                )
            references = self.scorer.logprobs(self._reference, rows, temperature)
        if "proximal" in loss.needs:
            proximals = self.scorer.logprobs(self.model, rows, temperature)
        pairs = iter(zip(references, proximals, strict=True))
        return [list(itertools.islice(pairs, len(minibatch.rows))) for minibatch in minibatches]

    def _row_losses(
        self,
        minibatch: Minibatch,
        comparisons: Sequence[_Compared],
        loss: Loss,
        temperature: float,
        version: float | None,
        measures: Measures,
        failed: list[ForgeError],
    ) -> Iterator[tuple[DeviceRow, LossInputs, torch.Tensor]]:
        """Yield each row, its inputs, and its part of the minibatch's loss; add what the loss reports to `measures`.

        Errors of the loss go to `failed` if there are other ranks, see `measured_loss`.
        """
        inputs_of = RowInputs(minibatch, loss, version)
        statistics = self._first_pass(inputs_of, minibatch, comparisons, temperature)
        divisor = loss.divisor(inputs_of.counts)
        for index, (row, comparison) in enumerate(zip(minibatch.rows, comparisons, strict=True)):
            self._set_last(index == len(minibatch.rows) - 1)
            device_row = self.scorer.on_device(row, observations="observations" in loss.needs)
            scores = self.scorer.score(self.model, device_row, inputs_of.scoring(temperature))
            inputs = inputs_of.of(device_row.row, scores, *comparison, statistics[index])
            yield device_row, inputs, measured_loss(loss, inputs, measures, failed) / divisor

    def _pass_on(
        self,
        minibatch: Minibatch,
        comparisons: Sequence[_Compared],
        loss: Loss,
        temperature: float,
        after: Callable[[DeviceRow], None] = lambda _: None,
    ) -> None:
        """Run the forward passes of `_row_losses` on a stage without the head; `after` is called after each row's."""
        inputs_of = RowInputs(minibatch, loss)
        self._first_pass(inputs_of, minibatch, comparisons, temperature)
        for row in minibatch.rows:
            device_row = self.scorer.on_device(row)
            self.scorer.score(self.model, device_row, inputs_of.scoring(temperature))
            after(device_row)

    def _train_stage(
        self,
        minibatch: Minibatch,
        comparisons: Sequence[_Compared],
        loss: Loss,
        temperature: float,
        count: Callable[[], None],
        advance: Callable[[], None],
    ) -> None:
        """Add up the gradients of a minibatch on a stage without the head, in the order that `Pipeline` describes;
        `count` is called after each row's forward pass, `advance` after its backward pass."""
        pending, remaining = deque[DeviceRow](), itertools.count(len(minibatch.rows) - 1, -1)

        def run_backward() -> None:
            self.scorer.prepare(self.model, pending.popleft())  # for what the backward pass computes again
            self._set_last(next(remaining) == 0)
            self._pipeline.backward()
            advance()

        def on_row(device_row: DeviceRow) -> None:
            count()
            pending.append(device_row)
            if len(pending) > self._pipeline.ahead:
                run_backward()

        self._pass_on(minibatch, comparisons, loss, temperature, on_row)
        while pending:
            run_backward()

    def _set_last(self, last: bool) -> None:
        """Tell FSDP whether the next backward pass is the last one of an update."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or not self._adds_up_once)
            if not self._stage.is_last:  # further rows are under way, whose weights FSDP can fetch ahead
                self.model.set_is_last_backward(last)

    def _train_minibatch(
        self,
        minibatch: Minibatch,
        comparisons: Sequence[_Compared],
        loss: Loss,
        temperature: float,
        total_updates: int,
        version: float | None,
        row_scores: list[torch.Tensor] | None,
        advance: Callable[[], None],
    ) -> dict[str, Value] | None:
        """Take one update; returns {} if there is nothing to train on, None if the gradient is not finite.

        `comparisons` has each row's logprobs under the reference and proximal policy, if the loss needs them.
        `row_scores` gets this policy's logprobs and entropies. `advance` is called after each row; for `version` see
        `LossInputs`.
        """
        lr = self._settings.optimizer.lr_at(self.planned, total_updates)
        self.planned += 1
        if not minibatch.rows:
            return {}
        measures, routed, loads, failed = Measures(), list[torch.Tensor](), list[torch.Tensor](), list[ForgeError]()
        # A sum over the rows of all shares: the mean is over updates.
        share = 1 / (len(minibatch.rows) * self._parallelism.shares)

        def count() -> None:
            if (row_counts := routing_counts(self.model)) is not None:
                routed.append(row_counts)
            if (row_loads := rank_loads(self.model)) is not None:
                loads.append(row_loads)

        losses: Iterator[tuple[DeviceRow, LossInputs, torch.Tensor]] = iter(())
        if self._stage.is_last:
            losses = self._row_losses(minibatch, comparisons, loss, temperature, version, measures, failed)
        else:
            self._train_stage(minibatch, comparisons, loss, temperature, count, advance)
        for device_row, inputs, row_loss in losses:
            count()
            if row_scores is not None:
                assert inputs.entropy is not None, "each row is scored with it"
                row_scores.append(torch.stack([inputs.logprobs, inputs.entropy], dim=1).detach())
            measure_tokens(inputs, device_row.tokens, measures, version)
            if device_row.split is not None:
                measures.add("attention/rank_max_over_mean", Mean, device_row.split.heaviest, device_row.split.mean)
                measures.add("attention/rank_max_over_mean/plain", Mean, device_row.split.plain, device_row.split.mean)
            row_loss.backward()
            self._pipeline.give_back()
            measures.add("loss", Mean, row_loss.detach(), share)
            advance()
        self._pipeline.finish()
        if self._stage.count > 1 and self._stage.is_last:
            waits = self._stage.count - 1
            measures.add("pipeline/idle_share", Mean, float(waits), float(len(minibatch.rows) + waits))
        if (offloads := self.model.offloads) is not None:
            measures.add("activations/offloaded_bytes", Sum, float(offloads.bytes))
            offloads.bytes = 0
        counts, routing = self._routing(len(minibatch.rows), routed, loads)
        norm = self._parallelism.clip(self.model, self._settings.optimizer.max_grad_norm)
        metrics, (grad_norm,) = measures.read(norm)
        if not math.isfinite(grad_norm):
            self._raise_if_failed(failed)
            self.optimizer.zero_grad()
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._parallelism.copy_tied(self.model)
        if self.model.steers and counts is not None:
            steer(self.model, counts[self._parallelism.mixtures])
        self.optimizer.zero_grad()
        self.updates += 1
        norms: dict[str, Value] = {"grad_norm": Mean(grad_norm, 1), "grad_norm/max": Max(grad_norm), "lr": Max(lr)}
        return metrics | routing | norms

    def _raise_if_failed(self, failed: Sequence[ForgeError]) -> None:
        """Raise the same error on all ranks if the loss failed on one, which then had a non-finite gradient."""
        ranks = torch.tensor(self.rank + 1 if failed else 0, device=self.device)
        dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        if rank := int(ranks):
            error = [failed[0] if rank == self.rank + 1 else None]
            dist.broadcast_object_list(error, src=rank - 1, device=self.device)
            assert error[0] is not None
            raise error[0]

    def _forget_step(self) -> None:
        """Clean up after a failed step: drop gradients, and restore the optimizer's weights to the model."""
        self._pipeline.forget()
        models: list[torch.nn.Module] = [self.model, *([self._reference] if self._reference is not None else [])]
        for model in models:
            if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root:  # else it never ran
                model.reset_iter_state()
            forget_whole_gradients(model)
        self.optimizer.zero_grad()

    def _routing(
        self, count: int, rows: list[torch.Tensor], loads: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, dict[str, Value]]:
        """Sum the routers' counts of this rank's `count` rows over rows and ranks; returns them for all layers, None if
        the model has no experts, and the metrics of routing."""
        experts = self.architecture.experts
        if experts is None:
            return None, {}
        # A stage may have dense layers only.
        none = torch.zeros(0, experts.count + 3, dtype=torch.int64, device=self.device)
        counts = self._parallelism.in_whole_model(torch.stack(rows).sum(dim=0) if rows else none, dim=0)
        dist.all_reduce(counts)
        metrics = routing_metrics(counts, replays=self._settings.router_replay)
        if self._settings.expert_balance == "least_loaded":
            stage_loads = torch.stack(loads) if loads else torch.zeros(count, 0, 2, dtype=torch.float64)
            layer_loads = self._parallelism.in_whole_model(stage_loads.to(self.device), dim=1)
            if self._parallelism.stages is not None:
                dist.all_reduce(layer_loads, group=self._parallelism.stages)
            metrics |= rank_metrics(layer_loads)
        return counts, metrics

    def logprobs(self, rows: Sequence[Row], *, temperature: float) -> list[torch.Tensor]:
        self._check_head(False, "asked for")
        return self._scores(rows, temperature)

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        self._check_head(True, "asked for")
        return self._scores(rows, 1.0)

    def _check_head(self, values: bool, verb: str) -> None:
        """Raise ConfigError unless the model's outputs are those that are needed."""
        if values != self._values:
            required, available = ("values", "logprobs") if values else ("logprobs", "values")
            raise ConfigError(
                f"{verb} {required}, and the trainer's model has {available}",
                hint="train a value model with a loss that needs values, and a policy with any other",
            )

    def _scores(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """Return the model's logprobs, or values, of a share's rows in host memory."""
        self.onload()
        try:
            return [scores.cpu() for scores in self.scorer.logprobs(self.model, rows, temperature)]
        except BaseException:
            self._forget_step()
            raise

    def layer_noise(self, rows: Sequence[Row], *, temperature: float, relative: float) -> list[tuple[float, int]]:
        self.onload()
        try:
            exact = self.scorer.logprobs(self.model, rows, temperature)
            targets = sum(int(row.mask.sum()) for row in rows)
            noise = []
            for number in range(self.architecture.layers):
                with contextlib.ExitStack() as hooks:
                    if number in self._stage.layers:
                        layer = self.model.get_submodule(f"layers.{number}")
                        hook = layer.register_forward_hook(lambda _, __, out: out + relative * out * (1e4 * out).cos())
                        hooks.enter_context(hook)
                    noisy = self.scorer.logprobs(self.model, rows, temperature)
                noise.append((sum(float((a - b).abs().sum()) for a, b in zip(noisy, exact, strict=True)), targets))
            return noise
        except BaseException:
            self._forget_step()
            raise

    def offload(self) -> int:
        if self._offloaded is not None:
            return 0
        if self._settings.stays_on_device:
            release_memory()
            return 0
        on_device = (tensor for tensor in self._held() if tensor.device.type == self.device.type)
        self._offloaded = OffloadedTensors(on_device)
        return self._offloaded.bytes

    def onload(self) -> int:
        if self._offloaded is None:
            return 0
        self._offloaded.bring_back()
        moved_bytes, self._offloaded = self._offloaded.bytes, None
        return moved_bytes

    def local_shards(self) -> Iterator[LocalShard]:
        self.onload()
        release_memory()  # engines are about to need the memory of the step's peak
        return local_shards(self.model, self._stage.ranks)

    def shards_of_host(self, drafted: Manifest, hosts: Sequence[str]) -> Iterable[LocalShard]:
        return shards_of_own_host(drafted, self.local_shards(), hosts, self.device)

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def save(self, folder: Folder, model: Path, *, version: int) -> Future[None]:
        self.onload()
        counts = {"updates": self.updates, "planned": self.planned, "version": version}
        dtype = torch.bfloat16 if resolve_dtype(self._settings.dtype) == torch.bfloat16 else torch.float32
        return self._saver.save(self.model, self.optimizer, counts, folder, source=model, dtype=dtype)

    def set_lr(self, lr: float) -> None:
        self._settings = replace(self._settings, optimizer=replace(self._settings.optimizer, lr=lr))

    def reset(self, optimizer: OptimizerConfig) -> None:
        self.onload()
        reshard(self.model)
        load_weights(self.model, self._folder, tied=self.model.enable_weight_tying)
        self._settings = replace(self._settings, optimizer=optimizer)
        self.optimizer = make_optimizer(self.model, self._settings)
        self.updates = self.planned = 0

    def load_training_state(self, folder: Folder) -> int:
        self.onload()
        counts = load_training_state(self.model, self.optimizer, ("updates", "planned", "version"), folder)
        self.updates, self.planned = counts["updates"], counts["planned"]
        return counts["version"]

    def _held(self) -> Iterator[torch.Tensor]:
        """Yield this rank's persistent tensors, which exclude gradients."""
        for model in (self.model, self._reference):
            if model is not None:
                reshard(model)
                yield from map(values_of, model.parameters())
                yield from map(values_of, model.buffers())
        for state in self.optimizer.state.values():
            yield from (values_of(value) for value in state.values() if value.dim())

    @torch.no_grad()
    def _first_pass(
        self,
        inputs_of: RowInputs,
        minibatch: Minibatch,
        comparisons: Sequence[_Compared],
        temperature: float,
    ) -> list[Mapping[str, torch.Tensor]]:
        """Compute the loss's statistics over all rows and ranks; {} for each row if it needs none of other rows."""
        loss = inputs_of.loss
        if not loss.scope or not (loss.scope == "minibatch" or loss.scope in minibatch.scattered):
            return [{}] * len(minibatch.rows)
        parts, places = list[LossInputs](), list[tuple[torch.Tensor, int]]()
        for row, comparison in zip(minibatch.rows, comparisons, strict=True):
            device_row = self.scorer.on_device(row)
            scores = self.scorer.score(self.model, device_row, inputs_of.scoring(temperature))
            if not self._stage.is_last:
                continue
            tokens = device_row.row.mask.nonzero()[:, 0]
            parts.append(inputs_of.of(device_row.row, scores, *comparison, {}).at(tokens))
            places.append((tokens, len(row)))
        reshard(self.model)
        if not self._stage.is_last:
            return [{}] * len(minibatch.rows)
        return minibatch_statistics(loss, parts, places, peers=self._settings.peers, group=self._parallelism.last_stage)

    def _load(self, *, frozen: bool = False) -> LoadedModel:
        """Build a model in this rank's layout and load its weights."""
        return load_model(
            self._folder,
            self.architecture,
            self._settings,
            self._parallelism,
            self.device,
            values=self._values,
            frozen=frozen,
        )
