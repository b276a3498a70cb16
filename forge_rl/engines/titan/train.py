"""One rank of the trainer: forward, backward and optimizer steps over packed rows."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.memory import adds_up_once
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import own_device, release_memory, resolve_dtype
from forge_rl.engines.protocol import StepRequest, StepResult, TrainSettings
from forge_rl.engines.titan.building import LoadedModel, load_model, make_optimizer
from forge_rl.engines.titan.exchange import shards_of_own_host
from forge_rl.engines.titan.host_memory import OffloadedTensors
from forge_rl.engines.titan.kernel_checks import check_kernels
from forge_rl.engines.titan.least_loaded import rank_loads
from forge_rl.engines.titan.loading import load_training_state, load_weights
from forge_rl.engines.titan.lora import (
    init_adapters,
    merged_reports,
    published_shards,
    without_adapters,
)
from forge_rl.engines.titan.masks import compile_attention, compile_once
from forge_rl.engines.titan.measures import Measures, joined_rows, measure_tokens, measured_loss
from forge_rl.engines.titan.parallel import Parallelism, forget_whole_gradients
from forge_rl.engines.titan.quantized_base import base_bytes
from forge_rl.engines.titan.routing import rank_metrics, routing_counts, routing_metrics, steer
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.engines.titan.saving import CheckpointWriter
from forge_rl.engines.titan.scoring import RowScorer, few_threads, reshard
from forge_rl.engines.titan.shards import values_of
from forge_rl.engines.titan.update import RowResults, Update, minibatch_statistics
from forge_rl.errors import ConfigError, ForgeError, ModelError
from forge_rl.metrics import Max, Mean, Sum, Value
from forge_rl.packing.rows import Minibatch, Row
from forge_rl.runtime.far_files import Folder
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec
from forge_rl.weights.transports.protocol import LocalShard

_MEASURED_ROWS = 16
"""Rows that are measured together; until then their logprobs stay on the device."""


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
        # This must come before `RowScorer` is made: it asks once which kernels are on, and a failing one is turned off
        # here.
        if self.device.type == "cuda":
            compile_once()
            compile_attention()
            check_kernels(self.architecture, resolve_dtype(settings.dtype), self.device)
        self._folder = folder
        self._settings = settings
        self._values = values
        self._parallelism = Parallelism(settings, self.architecture)
        self._pipeline, self._stage = self._parallelism.pipeline, self._parallelism.stage
        self.model, self._specs, self.parameters = self._load()
        # With its adapters switched off, a LoRA model is its own reference, so no second copy is held.
        keeps_copy = reference and not settings.lora.rank
        self._reference = self._load(frozen=True).model if keeps_copy else None
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
        request: StepRequest,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        self._check_head("values" in request.loss.needs, "the loss is computed from")
        if request.lr is not None:
            self._settings = replace(self._settings, optimizer=replace(self._settings.optimizer, lr=request.lr))
        self.onload()
        with self.forgetting_failures():
            updates = self._updates(minibatches, request.loss, request.temperature)
            metrics, scores = list[dict[str, Value] | None](), list[torch.Tensor]()
            first_update, num_updates = self.updates, request.epochs * len(updates)
            # `progress` counts rows over the whole batch, not within one update.
            num_rows, row_counts = request.epochs * sum(len(update.minibatch.rows) for update in updates), count(1)

            def advance() -> None:
                if progress is not None:
                    progress(next(row_counts), num_rows)

            for index, update in enumerate(updates * request.epochs):
                # The schedule advances per planned update, so an empty or skipped update does not stretch the learning
                # rate's decay.
                lr = self._settings.optimizer.lr_at(self.planned, request.total_updates)
                self.planned += 1
                if not update.minibatch.rows:
                    metrics.append({})
                    continue
                # Within a batch the policy moves from one version towards the next. Skipped updates leave it where it
                # was.
                fraction = (self.updates - first_update) / num_updates
                update = replace(
                    update,
                    version=None if request.version is None else request.version + fraction,
                    keeps_scores=index < request.scored_minibatches,
                    on_row=advance,
                )
                results = self.forward_backward(update)
                metrics.append(self.optimizer_step(results, lr=lr))
                scores += results.scores
            # One copy to the host for all rows; a copy per row would synchronise the device each time.
            if scores:
                scores = list(torch.cat(scores).cpu().split([len(row_scores) for row_scores in scores]))
            return StepResult(metrics=metrics, scores=scores)

    def forward_backward(self, update: Update) -> RowResults:
        """Run both passes over an update's rows, and accumulate the gradients that `optimizer_step` applies.

        `train_batch` calls both, and cleans up after their errors.
        """
        rows = update.minibatch.rows
        # Computed on all stages: if it raised on the last one alone, the others would wait for its gradients.
        divisor = update.divisor
        results = RowResults(rows=len(rows))
        if self._stage.is_last:
            # The counts of one update add up to 1 over all rows and shares, so the merged mean is the sum over rows,
            # averaged over updates.
            share = 1 / (max(1, len(rows)) * self._parallelism.shares)
            for index, statistics in enumerate(self.row_statistics(update, results.errors)):
                recorded = self._recorded(update, index)
                # FSDP must know before the last row's backward pass that it is the last: that pass reduces the
                # gradients.
                self._set_last(index == len(rows) - 1)
                device_row, inputs = self._forward(update, index, statistics)
                loss = measured_loss(update.loss, inputs, results.measures, results.errors) / divisor
                self._measure(update, device_row, inputs, results, recorded or inputs)
                loss.backward()
                self._pipeline.give_back()
                results.measures.add("loss", Mean, loss.detach(), share)
                update.on_row()
        else:
            self._train_stage(update, results)
        self._pipeline.finish()
        # The optimizer steps on the float32 weights, which gathered shards or low-precision copies replace during the
        # passes.
        reshard(self.model)
        self._measure_rows(update, results)
        # The 1F1B bubble: with p stages and m rows, p - 1 of a stage's m + p - 1 slots are idle.
        if self._stage.count > 1 and self._stage.is_last:
            waits = self._stage.count - 1
            results.measures.add("pipeline/idle_share", Mean, float(waits), float(len(rows) + waits))
        # The model accumulates these two counters across passes; reset them so that each update reports its own.
        if (offloads := self.model.offloads) is not None:
            results.measures.add("activations/offloaded_bytes", Sum, float(offloads.bytes))
            offloads.bytes = 0
        if self.model.recomputed_tokens is not None:
            results.measures.add("states/recomputed_tokens", Sum, float(self.model.recomputed_tokens))
            self.model.recomputed_tokens = 0
        return results

    def optimizer_step(
        self, results: RowResults, *, lr: float, max_grad_norm: float | None = None
    ) -> dict[str, Value] | None:
        """Clip the gradients that `forward_backward` added up, and step; returns the update's metrics.

        Args:
            max_grad_norm: by default the setting's.

        Returns None, and changes no weight, if a gradient is not finite.

        Raises:
            LossError: a gradient is not finite because the loss failed, on this rank or another.
        """
        counts, routing = self._routing(results)
        # The norm covers all ranks, so either every rank skips the update or none does.
        norm = self._parallelism.clip(self.model, max_grad_norm or self._settings.optimizer.max_grad_norm)
        metrics, (grad_norm,) = results.measures.read(norm)
        if not math.isfinite(grad_norm):
            self.raise_if_failed(results.errors)
            self.optimizer.zero_grad()
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._parallelism.copy_tied(self.model)
        # The counts are summed over all ranks, so every copy of a bias moves by the same step.
        if self.model.steers and counts is not None:
            steer(self.model, counts[self._parallelism.mixtures])
        self.optimizer.zero_grad()
        self.updates += 1
        norms: dict[str, Value] = {"grad_norm": Mean(grad_norm, 1), "grad_norm/max": Max(grad_norm), "lr": Max(lr)}
        return metrics | routing | norms | self._base_metrics()

    def _base_metrics(self) -> dict[str, Value]:
        """Return metrics of a quantised base's bytes; none if the base is not quantised."""
        if self._settings.lora.base_format == "full":
            return {}
        held_bytes, full_bytes = base_bytes(self.model)
        return {"lora/base_bytes": Max(held_bytes), "lora/base_share": Mean(held_bytes, full_bytes)}

    @torch.no_grad()
    def evaluate(self, minibatches: Sequence[Minibatch], loss: Loss) -> dict[str, Value]:
        self._check_head("values" in loss.needs, "the loss is computed from")
        self.onload()
        with self.forgetting_failures():
            measures, errors = Measures(), list[ForgeError]()
            for update in self._updates(minibatches, loss, 1.0):
                divisor = update.divisor  # on all stages, as in `forward_backward`
                if not self._stage.is_last:
                    self._pass_on(update)
                    continue
                # As in `forward_backward`, the counts of one minibatch add up to 1 over its rows and shares.
                share = 1 / (max(1, len(update.minibatch.rows)) * self._parallelism.shares)
                for index, statistics in enumerate(self.row_statistics(update, errors)):
                    device_row, inputs = self._forward(update, index, statistics)
                    row_loss = measured_loss(loss, inputs, measures, errors) / divisor
                    measures.add("tokens/trained", Sum, device_row.tokens)
                    measures.add("loss", Mean, row_loss, share)  # the sum over rows, the mean over minibatches
            reshard(self.model)
            self._pipeline.finish()
            self.raise_if_failed(errors)
            return measures.read()[0]

    def _updates(self, minibatches: Sequence[Minibatch], loss: Loss, temperature: float) -> list[Update]:
        """Return an update for each minibatch, with the logprobs of other policies that the loss needs."""
        rows = [row for minibatch in minibatches for row in minibatch.rows]
        # Both are scored before the batch's first update, and serve all of its epochs.
        references, proximals = list[torch.Tensor](), list[torch.Tensor]()
        if "reference" in loss.needs:
            if self._reference is None and self.model.adapters is None:
                raise ConfigError(
                    "the loss needs a frozen reference, and the trainer has none",
                    hint="pass start() the loss to train with",
                )
            with without_adapters(self.model):
                references = self.scorer.logprobs(self._reference or self.model, rows, temperature)
        if "proximal" in loss.needs:
            proximals = self.scorer.logprobs(self.model, rows, temperature)
        ends = accumulate(len(minibatch.rows) for minibatch in minibatches)
        return [
            Update(
                minibatch=minibatch,
                loss=loss,
                temperature=temperature,
                references=references[end - len(minibatch.rows) : end],
                proximals=proximals[end - len(minibatch.rows) : end],
            )
            for minibatch, end in zip(minibatches, ends, strict=True)
        ]

    def _forward(
        self, update: Update, index: int, statistics: Mapping[str, torch.Tensor]
    ) -> tuple[DeviceRow, LossInputs]:
        """Run the forward pass of a row; returns it and the loss's inputs."""
        row = update.minibatch.rows[index]
        # The draw depends on the row and the update only, so a recomputed layer drops the same inputs again.
        if self.model.adapters is not None:
            self.model.adapters.draw(row, self.planned)
        device_row = self.scorer.on_device(row, observations="observations" in update.loss.needs)
        scores = self.scorer.score(self.model, device_row, update.scoring)
        return device_row, update.inputs(index, device_row.row, scores, statistics)

    @torch.no_grad()
    def row_statistics(self, update: Update, failed: list[ForgeError]) -> list[Mapping[str, torch.Tensor]]:
        """Compute the loss's statistics over all rows and ranks; {} for each row if the loss needs none across rows.

        If it raises and there are other ranks, append the error to `failed`, see `measured_loss`.
        """
        loss, minibatch = update.loss, update.minibatch
        if not update.needs_statistics:
            return [{}] * len(minibatch.rows)
        parts, places = list[LossInputs](), list[tuple[torch.Tensor, int]]()
        for index, row in enumerate(minibatch.rows):
            device_row = self.scorer.on_device(row)
            scores = self.scorer.score(self.model, device_row, update.scoring)
            if not self._stage.is_last:
                continue
            tokens = device_row.row.mask.nonzero()[:, 0]
            parts.append(update.inputs(index, device_row.row, scores, {}).at(tokens))
            places.append((tokens, len(row)))
        reshard(self.model)
        if not self._stage.is_last:
            return [{}] * len(minibatch.rows)
        try:
            return minibatch_statistics(
                loss, parts, places, peers=self._settings.peers, group=self._parallelism.last_stage
            )
        except ForgeError as error:
            if dist.get_world_size() == 1:
                raise
            # The stages before wait for the gradients of all rows.
            failed.append(error)
            return [{}] * len(minibatch.rows)

    def _pass_on(self, update: Update, on_row: Callable[[DeviceRow], None] = lambda _: None) -> None:
        """Run an update's forward passes on a stage without the head, calling `on_row` after each."""
        self.row_statistics(update, [])  # which fails on the last stage only
        for row in update.minibatch.rows:
            device_row = self.scorer.on_device(row)
            self.scorer.score(self.model, device_row, update.scoring)
            on_row(device_row)

    def _train_stage(self, update: Update, results: RowResults) -> None:
        """Run both passes on a stage without the head, in the order that `Pipeline` describes."""
        # Backward passes run in the order of the forward passes; `remaining` counts down to the update's last one.
        pending, remaining = deque[DeviceRow](), count(results.rows - 1, -1)

        def run_backward() -> None:
            self.scorer.prepare(self.model, pending.popleft())  # for what the backward pass computes again
            self._set_last(next(remaining) == 0)
            self._pipeline.backward()
            update.on_row()

        def on_row(device_row: DeviceRow) -> None:
            self._count_experts(results)
            pending.append(device_row)
            if len(pending) > self._pipeline.ahead:
                run_backward()

        self._pass_on(update, on_row)
        while pending:
            run_backward()

    def _set_last(self, last: bool) -> None:
        """Tell FSDP how to treat the next backward pass; `last` is True for the last one of an update."""
        if isinstance(self.model, FSDPModule):
            # If whole gradients fit in memory, they are reduced once per update instead of once per row.
            self.model.set_requires_gradient_sync(last or not self._adds_up_once)
            if self._parallelism.only_casts:  # the weights of an update's rows are the same
                self.model.set_reshard_after_backward(last or self._settings.enable_cpu_offload)
            if not self._stage.is_last:  # further rows are under way, whose weights FSDP can fetch ahead
                self.model.set_is_last_backward(last)

    @torch.no_grad()
    def _recorded(self, update: Update, index: int) -> LossInputs | None:
        """Score a row without dropout, for the record; None if nothing is recorded or training has no dropout."""
        if not update.keeps_scores or self.model.adapters is None or not self.model.adapters.lora.dropout:
            return None
        device_row = self.scorer.on_device(update.minibatch.rows[index])
        scores = self.scorer.score(self.model, device_row, update.scoring)
        reshard(self.model)
        return update.inputs(index, device_row.row, scores, {})

    def _measure(
        self, update: Update, device_row: DeviceRow, inputs: LossInputs, results: RowResults, recorded: LossInputs
    ) -> None:
        """Measure a row after its forward pass.

        Args:
            recorded: the row's scores to keep.
        """
        self._count_experts(results)
        if update.keeps_scores:
            assert recorded.entropy is not None, "each row is scored with it"
            results.scores.append(torch.stack([recorded.logprobs, recorded.entropy], dim=1).detach())
        results.unmeasured.append((inputs.at(slice(None)), device_row.tokens))
        # Measuring in batches keeps few rows' logprobs alive at a time.
        if len(results.unmeasured) == _MEASURED_ROWS:
            self._measure_rows(update, results)
        if (split := device_row.split) is not None:
            results.measures.add("attention/rank_max_over_mean", Mean, split.heaviest, split.mean)
            results.measures.add("attention/rank_max_over_mean/plain", Mean, split.plain, split.mean)

    def _measure_rows(self, update: Update, results: RowResults) -> None:
        """Measure the collected rows together, which costs a GPU as many operations as measuring one."""
        if results.unmeasured:
            rows, tokens = zip(*results.unmeasured, strict=True)
            measure_tokens(joined_rows(rows), sum(tokens), results.measures, update.version)
            results.unmeasured.clear()

    def _count_experts(self, results: RowResults) -> None:
        """Record which experts a row's tokens chose, and which ranks computed them."""
        if (row_counts := routing_counts(self.model)) is not None:
            results.expert_counts.append(row_counts)
        if (row_loads := rank_loads(self.model)) is not None:
            results.rank_loads.append(row_loads)

    def raise_if_failed(self, failed: Sequence[ForgeError]) -> None:
        """Raise the same error on all ranks if the loss failed on any; that rank's gradient is then not finite."""
        # The failing rank with the highest number broadcasts its error, as a broadcast has exactly one source.
        ranks = torch.tensor(self.rank + 1 if failed else 0, device=self.device)
        dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        if rank := int(ranks):
            error = [failed[0] if rank == self.rank + 1 else None]
            dist.broadcast_object_list(error, src=rank - 1, device=self.device)
            assert error[0] is not None
            raise error[0]

    @contextlib.contextmanager
    def forgetting_failures(self, *, keeps_gradients: bool = False) -> Iterator[None]:
        """Clean up if the body fails: drop its gradients (unless `keeps_gradients`), and put the optimizer's weights
        back into the model."""
        try:
            yield
        except BaseException:
            self._pipeline.forget()
            for model in (self.model, self._reference):
                if model is None:
                    continue
                reshard(model)
                if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root:  # else it never ran
                    model.reset_iter_state()
                forget_whole_gradients(model)
            if not keeps_gradients:
                self.optimizer.zero_grad()
            raise

    def _routing(self, results: RowResults) -> tuple[torch.Tensor | None, dict[str, Value]]:
        """Sum the routers' counts over rows and ranks; return them for all layers (None if the model has no experts),
        and the metrics of routing."""
        experts = self.architecture.experts
        if experts is None:
            return None, {}
        # A stage may have dense layers only.
        none = torch.zeros(0, experts.count + 3, dtype=torch.int64, device=self.device)
        row_counts, loads = results.expert_counts, results.rank_loads
        counts = self._parallelism.in_whole_model(torch.stack(row_counts).sum(dim=0) if row_counts else none, dim=0)
        dist.all_reduce(counts)
        metrics = routing_metrics(counts, replays=self._settings.router_replay)
        if self._settings.expert_balance == "least_loaded":
            stage_loads = torch.stack(loads) if loads else torch.zeros(results.rows, 0, 2, dtype=torch.float64)
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
        """Raise ConfigError unless the model has the outputs, values or logprobs, that are needed."""
        if values != self._values:
            required, available = ("values", "logprobs") if values else ("logprobs", "values")
            raise ConfigError(
                f"{verb} {required}, and the trainer's model has {available}",
                hint="train a value model with a loss that needs values, and a policy with any other",
            )

    def _scores(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """Return the model's logprobs, or values, of a share's rows in host memory."""
        self.onload()
        with self.forgetting_failures(), few_threads(sum(map(len, rows))):
            return [scores.cpu() for scores in self.scorer.logprobs(self.model, rows, temperature)]

    def layer_noise(self, rows: Sequence[Row], *, temperature: float, relative: float) -> list[tuple[float, int]]:
        self.onload()
        with self.forgetting_failures():
            exact = self.scorer.logprobs(self.model, rows, temperature)
            targets = sum(int(row.mask.sum()) for row in rows)
            noise = []
            for number in range(self.architecture.layers):
                with contextlib.ExitStack() as hooks:
                    if number in self._stage.layers:
                        layer = self.model.get_submodule(f"layers.{number}")
                        # Deterministic noise of at most `relative` per element: the cosine flips signs erratically, yet
                        # equally on every rank.
                        hook = layer.register_forward_hook(lambda _, __, out: out + relative * out * (1e4 * out).cos())
                        hooks.enter_context(hook)
                    noisy = self.scorer.logprobs(self.model, rows, temperature)
                noise.append((sum(float((a - b).abs().sum()) for a, b in zip(noisy, exact, strict=True)), targets))
            return noise

    def offload(self) -> int:
        if self._offloaded is not None:
            return 0
        # The state stays, but free memory that the allocator caches goes back to the device.
        if self._settings.stays_on_device:
            release_memory()
            return 0
        # Under CPU offload, FSDP's shards are in host memory already.
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
        return published_shards(self.model, self._stage.ranks)

    def merged_reports(self, drafted: Manifest) -> list[ShardReport]:
        return merged_reports(self.model, self._stage.ranks, drafted)

    def shards_of_host(self, drafted: Manifest, hosts: Sequence[str]) -> Iterable[LocalShard]:
        return shards_of_own_host(drafted, self.local_shards(), hosts, self.device)

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def save(self, folder: Folder, model: Path, *, version: int) -> Future[None]:
        self.onload()
        counts = {"updates": self.updates, "planned": self.planned, "version": version}
        dtype = torch.bfloat16 if resolve_dtype(self._settings.dtype) == torch.bfloat16 else torch.float32
        return self._saver.save(self.model, self.optimizer, counts, folder, source=model, dtype=dtype)

    def reset(self, optimizer: OptimizerConfig) -> None:
        self.onload()
        reshard(self.model)
        load_weights(self.model, self._folder, tied=self.model.enable_weight_tying)
        init_adapters(self.model)
        self._settings = replace(self._settings, optimizer=optimizer)
        self.optimizer = make_optimizer(self.model, self._settings)
        self.updates = self.planned = 0

    def load_training_state(self, folder: Folder) -> int:
        self.onload()
        counts = load_training_state(self.model, self.optimizer, ("updates", "planned", "version"), folder)
        self.updates, self.planned = counts["updates"], counts["planned"]
        return counts["version"]

    def _held(self) -> Iterator[torch.Tensor]:
        """Yield this rank's persistent tensors; gradients are not among them."""
        for model in (self.model, self._reference):
            if model is not None:
                # Otherwise gathered weights or copies would be moved, and the shards or masters left behind.
                reshard(model)
                yield from map(values_of, model.parameters())
                yield from map(values_of, model.buffers())
        for state in self.optimizer.state.values():
            # The scalar step counts stay in place: moving them would free nothing.
            yield from (values_of(value) for value in state.values() if value.dim())

    @property
    def shares(self) -> int:
        """Number of data-parallel shares of a batch."""
        return self._parallelism.shares

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a row on this rank, padding included."""
        return self._settings.seq_len

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Make an optimizer without state of the trained weights."""
        return make_optimizer(self.model, self._settings)

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
