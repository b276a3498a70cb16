"""Trainer service: one replica whose ranks shard, train, publish and checkpoint the policy."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.devices import device_type
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest
from forge_rl.errors import ForgeError, ReplicaError
from forge_rl.metrics import merge_all, reduce
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Minibatch, PackedBatch
from forge_rl.packing.unpacking import unpack, values_of_episodes
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.runtime.service import Service
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.trainer_adapters import TrainerAdapters
from forge_rl.services.trainer_calls import (
    EVALUATE,
    LAYER_NOISE,
    LOGPROBS,
    OFFLOAD,
    ONLOAD,
    PUBLISH,
    RESET,
    SAVE,
    STEP,
    VALUES,
    WAIT_IDLE,
    LoadedPolicy,
    R,
    RankCall,
)
from forge_rl.services.trainer_config import LEAST_ROW, PAD_MULTIPLE, TrainedModel, TrainerConfig, TrainingRun
from forge_rl.services.trainer_ranks import TrainerRanks
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.folders import write_whole
from forge_rl.types import Batch
from forge_rl.weights.effects import ProbedVersion
from forge_rl.weights.manifest import TensorSpec

if TYPE_CHECKING:
    import torch


class Trainer:
    """Typed handle of the Trainer service.

    stats = await run.trainer.step(packed, loss, temperature=1.0)
    version = await run.trainer.publish(run.weights, dtype="bfloat16")
    """

    Config: TypeAlias = TrainerConfig

    def __init__(self, ranks: TrainerRanks, run: TrainingRun) -> None:
        self._ranks = ranks
        self._seed = run.seed
        self._total_updates = run.total_steps * ranks.config.updates_per_batch
        self._skipped = run.skipped
        self._skipped_in_a_row = 0
        self._specs: tuple[TensorSpec, ...] | None = None
        self.adapters = TrainerAdapters(self._all, ranks)
        """Named adapters over the base, each trained apart; they need `--lora.rank`."""
        self.version = 0
        """Latest published version; before the first publish, the version that it will get."""
        self.failed_kernels: Mapping[str, str] = {}
        """Why GPU kernels are off, by kernel; see `system.kernels`."""
        self.updates = 0
        """Number of optimizer steps that the weights have taken."""
        self._published: int | None = None
        """Number of updates of the latest published version; None before the first publish, -1 if that version was
        published before a reset."""
        self.parameters = 0
        """Number of the policy's parameters."""
        self.skipped: tuple[str, ...] = ()
        """For each skipped update of the last step, how to load its rows, or why they were not saved."""
        self.busy_s = 0.0
        """Seconds of computation since the controller last reset this to 0."""
        self.spares_uniform = False
        """Whether the last step left out groups whose advantages are all 0."""
        self.keeps_logprobs = False
        """Whether each step also fetches the trained tokens' logprobs and entropies."""
        self.probe: Callable[[Layout], PackedBatch] | None = None
        """Packs texts that are scored at each publish; None scores none."""
        self.probed: ProbedVersion | None = None
        """Logprobs of these texts under the latest published version."""
        self.adapters_probed: dict[str, ProbedVersion] = {}
        """The same for each published adapter, by name; its versions are its numbers of updates."""
        self.probe_s = 0.0
        """Seconds spent scoring these texts since the controller last reset this to 0."""
        self.publish_s: dict[str, float] = {}
        """Seconds of each part of the last publish, on the slowest rank; empty once the controller has logged them.

        reserve: reserving memory. gather: shards from other hosts or devices. write: shards and their fingerprints.
        merge: fingerprints of weights with adapters added. calls: the rest of the calls to the ranks. commit, and
        probe.
        """
        self.loads = 0
        """Number of times that the ranks have loaded a policy: once, and at each restart."""
        self.scored: tuple[PackedBatch, list[npt.NDArray[np.uint16]]] | None = None
        """The last step's packed batch and, for each of its rows, what `rounded_scores` keeps of the targets' logprobs
        just before their first update, and of their entropies; None without `keeps_logprobs`."""

    @classmethod
    async def start(
        cls,
        config: TrainerConfig,
        start: ServiceStart,
        *,
        model: TrainedModel,
        run: TrainingRun,
        resume: Path | None = None,
        after: asyncio.Future[Any] | None = None,
    ) -> Trainer:
        """Spawn the ranks and load the policy.

        Args:
            start: where to start; the ranks are split evenly over its living hosts. Its name, "trainer" by default, is
                also the name of the recipe's settings.
            resume: training state to resume from instead of the model.
            after: the ranks import until it is done, successfully or not, and only then touch their devices.

        Raises:
            ConfigError: the hosts cannot hold the ranks, or could meet only over a public address.
        """
        ranks = TrainerRanks(
            config,
            Service(start.name or "trainer", start.cluster, start.faults),
            start.hosts or ServiceHosts(),
            model=model,
            start_deadline_s=start.deadline_s,
        )
        trainer = cls(ranks, run)
        ranks.allow_restarts()
        try:
            trainer._adopt(await ranks.start(resume, after))
        except BaseException:
            await ranks.stop()
            raise
        return trainer

    async def restart(self, resume: Path | None, *, cause: str = "it is restarted though it lives") -> None:
        """Replace all ranks by new processes and load the policy; see `TrainerRanks.restart`.

        The weight store is not rolled back: see `WeightStore.rollback`.
        """
        self._adopt(await self._ranks.restart(resume, cause))

    def forget_restarts(self) -> None:
        """Count restarts from 0 again, once the work that was lost has been repeated."""
        self._ranks.forget_restarts()

    def _adopt(self, policy: LoadedPolicy) -> None:
        self.version, self.updates, self.parameters = policy.version, policy.updates, policy.parameters
        self.failed_kernels = policy.failed_kernels
        self._published, self._skipped_in_a_row = None, 0
        # A restart may go back, and then version numbers are used again for other weights: probes of the old ones say
        # nothing.
        self.probed, self.adapters_probed, self.loads = None, {}, self.loads + 1

    def join(self, host: str, gpus: Sequence[str], cores: int) -> None:
        """Take in another host, for ranks that are started from now on."""
        self._ranks.join(host, gpus, cores)

    @property
    def name(self) -> str:
        """Name of the service."""
        return self._ranks.service.name

    @property
    def config(self) -> TrainerConfig:
        """Settings; `lr` and `reset` replace the optimizer's."""
        return self._ranks.config

    @property
    def lora(self) -> LoRAConfig:
        """Settings of the adapters that it trains; rank 0 if it trains weights."""
        return self.config.lora

    @property
    def alive(self) -> bool:
        """True while the ranks run and hold a policy."""
        return self._ranks.alive

    async def death(self) -> str:
        """Wait until one of the current ranks dies or hangs; returns the cause."""
        return await self._ranks.death()

    @property
    def lr(self) -> float:
        """Peak learning rate; can be set, and then applies from the next step on."""
        return self.config.optimizer.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._ranks.config = replace(self.config, optimizer=replace(self.config.optimizer, lr=lr))

    @property
    def progress(self) -> tuple[int, int] | None:
        """Number of microbatches that the first rank has done in the current step, and their total; None between steps,
        or if it runs on another machine."""
        return self._ranks.progress

    @property
    def restarts_left(self) -> int:
        """Number of restarts left; at 0 a rank's death ends the run."""
        return self._ranks.restarts_left

    @property
    def restarts(self) -> int:
        """Number of restarts after failures so far."""
        return self._ranks.restarts

    @property
    def layout(self) -> Layout:
        """Layout in which `pack` must pack batches for this trainer."""
        on_gpu = device_type() == "cuda"
        return Layout(
            shares=self.config.shares,
            seq_len=self.config.seq_len,
            context_parallel_degree=self.config.context_parallel_degree,
            pad_multiple=PAD_MULTIPLE if on_gpu else 1,
            least_tokens=LEAST_ROW if on_gpu else 1,
            tensor_parallel_degree=self.config.tensor_parallel_degree,
            minibatches=self.config.minibatches,
            epochs=self.config.epochs,
            seed=self._seed,
        )

    async def step(self, packed: PackedBatch, loss: Loss, *, temperature: float = 1.0) -> dict[str, float]:
        """Train on a batch packed with this trainer's layout; see `TrainEngine.train_batch`.

        Groups whose advantages are all 0 are left out if the loss allows it, see `Loss.keeps_uniform`. Each minibatch
        takes one update per epoch, or none if that leaves no rows. An update with a non-finite gradient is skipped, and
        its rows are saved in the folder `skipped`, if the disk has room.

        Returns:
            Metrics, merged over microbatches, ranks and updates: total `updates`, `updates/skipped` and
                `tokens/trained` of this batch, and the metrics of loss and optimizer if there was an update.

        Raises:
            LossError: the loss failed. Earlier updates of the batch stay and count.
            ForgeError: max_skipped_updates in a row were skipped.
        """
        self.spares_uniform = not loss.keeps_uniform
        # Spared rows have no gradient; the divisors still count their tokens.
        packed = packed.without_uniform if self.spares_uniform else packed
        config, minibatches = self.config, packed.minibatches
        # Later epochs have the same rows, scored in the first.
        num_scored = len(minibatches) // packed.epochs if self.keeps_logprobs else 0
        request = StepRequest(
            loss=loss,
            epochs=max(1, config.epochs // packed.epochs),
            temperature=temperature,
            total_updates=self._total_updates,
            version=self.version if self.updates == self._published else None,
            lr=config.optimizer.lr,
            scored_minibatches=num_scored,
        )
        self.scored = None
        replies = await self._all(
            STEP,
            request,
            # Share s gets rows[s::shares] of each minibatch, the order for which `pack` has balanced them.
            parcel=lambda rank: [
                replace(minibatch, rows=minibatch.rows[config.share(rank) :: config.shares])
                for minibatch in minibatches
            ],
            work=packed.packed_tokens * config.epochs,
        )
        number, self.updates = self.updates, replies[0].updates
        head_replies = [replies[rank] for rank in config.head_ranks]  # others of a share have the same metrics, or none
        self.busy_s += max(reply.seconds for reply in replies)
        if num_scored:
            shares = [iter(reply.scores) for reply in head_replies]
            # The inverse of the deal above: row i of a minibatch came back from share i % shares.
            rows = [
                next(shares[index % len(shares)])
                for minibatch in minibatches[:num_scored]
                for index in range(len(minibatch.rows))
            ]
            self.scored = packed, rows
        skipped = []
        for index, metrics in enumerate(head_replies[0].metrics):
            # {} stands for a minibatch without rows, which is no update, and None for one that was skipped.
            if metrics:
                number += 1
                self._skipped_in_a_row = 0
            elif metrics is None:
                self._skipped_in_a_row += 1
                minibatch = minibatches[index % len(minibatches)]
                skipped.append(await asyncio.to_thread(self._save_skipped, number + 1, minibatch, temperature))
        if self._skipped_in_a_row >= config.max_skipped_updates:
            raise ForgeError(
                f"{self._skipped_in_a_row} updates in a row had a gradient that is not finite",
                hint=f"inspect the rows of the last one: {skipped[-1]}; lower --{self.name}.optimizer.lr, or raise "
                f"--{self.name}.max-skipped-updates",
            )
        self.skipped = tuple(skipped)
        merged = reduce(
            merge_all(metrics for reply in head_replies for metrics in reply.metrics if metrics is not None)
        )
        counts = {"updates": float(self.updates), "updates/skipped": float(len(skipped))}
        return {"tokens/trained": 0.0} | merged | counts

    def _save_skipped(self, number: int, minibatch: Minibatch, temperature: float) -> str:
        """Save the rows of a skipped update as a dict for `torch.load`.

        Returns:
            How to load it, or why it could not be saved.
        """
        import torch

        path = self._skipped / f"update-{number:06d}-{self._skipped_in_a_row}.pt"
        rows = [vars(row) | {"columns": dict(row.columns)} for row in minibatch.rows]
        # Plain containers: torch.load reads them without classes of ours.
        state = vars(minibatch) | {"rows": rows, "scattered": sorted(minibatch.scattered), "temperature": temperature}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        try:
            self._skipped.mkdir(exist_ok=True)
            write_whole(path, buffer.getvalue())
        except OSError as error:  # such as a full disk: the run continues
            return f"it could not be saved in {path}: {error.strerror or error}"
        return f"torch.load('{path}')"

    async def evaluate(self, packed: PackedBatch, loss: Loss) -> dict[str, float]:
        """Compute a loss on a packed batch under the current weights, without an update; see `TrainEngine.evaluate`.

        Returns:
            `loss`, the loss's own metrics as `loss/NAME`, and `tokens/trained`.

        Raises:
            LossError: the loss failed.
        """
        config = self.config
        replies = await self._all(
            EVALUATE,
            loss,
            parcel=lambda rank: [
                replace(minibatch, rows=minibatch.rows[config.share(rank) :: config.shares])
                # One epoch: the others hold the same tokens.
                for minibatch in packed.minibatches[: len(packed.minibatches) // packed.epochs]
            ],
            work=packed.packed_tokens,
        )
        return reduce(merge_all(replies[rank] for rank in config.head_ranks))

    async def logprobs(self, packed: PackedBatch, *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Compute the logprob of every trained target under the current weights; see `TrainEngine.logprobs`.

        Returns:
            One tensor per row of `packed`, `[L] float32`; `unpack` regroups them by episode.
        """
        return await self._score(packed, LOGPROBS, temperature)

    async def values(self, packed: PackedBatch) -> list[torch.Tensor]:
        """Compute the value of the state before every trained target, of a critic; see `TrainEngine.values`.

        Returns:
            One tensor per row of `packed`, `[L] float32`; `values_of_episodes` regroups them by episode.
        """
        return await self._score(packed, VALUES)

    async def episode_values(self, batch: Batch) -> list[npt.NDArray[np.float32]]:
        """Compute the value of the state before each token that the model generated, of a critic.

            advantages, returns = gae(await run.critic.episode_values(batch), token_rewards(batch.episodes))

        Returns:
            [T] float32 for each episode; see `values_of_episodes`.
        """
        packed = await asyncio.to_thread(pack, batch, None, self.layout)
        return values_of_episodes(batch, packed, await self.values(packed))

    async def _score(
        self, packed: PackedBatch, call: RankCall[list[torch.Tensor]], *args: object
    ) -> list[torch.Tensor]:
        """Call a method that computes a tensor for each row, on the ranks that have them."""
        config, shares = self.config, self.config.shares
        replies = await self._all(
            call, *args, parcel=lambda rank: packed.rows[config.share(rank) :: shares], work=packed.packed_tokens
        )
        head_replies = [replies[rank] for rank in config.head_ranks]
        return [head_replies[index % shares][index // shares] for index in range(len(packed.rows))]

    async def layer_noise(self, packed: PackedBatch, *, temperature: float = 1.0, relative: float) -> list[float]:
        """Return, for each layer, the mean absolute change of a target's logprob if the layer's output is off by
        `relative`, a share of each element; see `TrainEngine.layer_noise`."""
        config = self.config
        replies = await self._all(
            LAYER_NOISE,
            temperature,
            relative,
            parcel=lambda rank: packed.rows[config.share(rank) :: config.shares],
            work=packed.packed_tokens * 30,
        )
        by_layer = zip(*(replies[rank] for rank in config.head_ranks), strict=True)
        return [sum(total for total, _ in sums) / max(1, sum(n for _, n in sums)) for sums in by_layer]

    async def publish(self, store: WeightStore, *, dtype: str) -> int:
        """Publish the current weights to the store as a new version.

        If a process of the store dies meanwhile, the version is published again once its successor serves.

        Args:
            dtype: the engines', "float32" or "bfloat16". Weights that train in bfloat16 are published in it even for
                engines in float32, which load them exactly: the passes see rounded copies, and most updates are smaller
                than a rounding, so that engines with the float32 weights would sample from another policy.

        Returns:
            The version, once it is committed and visible to readers.
        """
        while True:
            # Only an error that comes with a death of the store is worth another attempt.
            deaths = store.deaths
            try:
                version, parts = await self._publish(store, dtype)
                break
            except ForgeError:
                if not self.alive or store.deaths == deaths:
                    raise
            await store.returned()
        began = time.monotonic()
        self.probed = await self._probe(version, self.logprobs) or self.probed
        self.publish_s = parts | {"probe": time.monotonic() - began}
        return version

    async def probe_adapter(self, name: str, version: int) -> None:
        """Score the probes with an adapter by name, as `publish` does with the policy; see `adapters_probed`."""

        async def scored(packed: PackedBatch) -> list[torch.Tensor]:
            import torch  # loads slowly, which a process that only starts a trainer does without

            from forge_rl.algorithms.losses import ClippedSurrogate

            (minibatch,) = packed.minibatches
            result = await self.adapters.run(name, minibatch, ClippedSurrogate(), backward=False)
            return [torch.from_numpy(row) for row in result.logprobs]

        if (probed := await self._probe(version, scored)) is not None:
            self.adapters_probed[name] = probed

    async def _probe(
        self, version: int, score: Callable[[PackedBatch], Awaitable[list[torch.Tensor]]]
    ) -> ProbedVersion | None:
        if self.probe is None:
            return None
        began = time.monotonic()
        packed = await asyncio.to_thread(self.probe, replace(self.layout, minibatches=1, epochs=1))
        values = unpack(packed, await score(packed))
        logprobs = np.concatenate([tensor.double().cpu().numpy() for _, tensor in sorted(values.items())])
        self.probe_s += time.monotonic() - began
        return ProbedVersion(version=version, logprobs=logprobs)

    async def _publish(self, store: WeightStore, dtype: str) -> tuple[int, dict[str, float]]:
        """Publish once; return the version, and the seconds of each part."""
        import torch

        from forge_rl.engines.platform import resolve_dtype

        # Names, shapes and dtypes never change, so the ranks are asked once.
        if self._specs is None:
            self._specs = await self._ranks.replica.call("specs", deadline_s=self.config.deadline_s, rank=0)
        version = self.version if self._published is None else self.version + 1
        rank_hosts = self._ranks.replica.hosts
        hosts = tuple(dict.fromkeys(rank_hosts))
        published_dtype, trained_dtype = getattr(torch, dtype), resolve_dtype(self.config.dtype)
        # The passes round an adapter and not the sum, which engines compute in their dtype.
        if trained_dtype.itemsize < published_dtype.itemsize and not self.config.lora.rank:
            # Engines then sample with the rounded weights that the passes see; see `publish`.
            published_dtype = trained_dtype
        began = time.monotonic()
        async with store.publishing(version, self._specs, published_dtype, hosts=hosts) as publication:
            reserve_end = time.monotonic()
            transports = {host: store.transport(host) for host in hosts}
            replies = await self._all(PUBLISH, transports, rank_hosts, publication.draft)
            write_end = time.monotonic()
            # Ranks write at the same time, so the slowest one's parts explain the duration.
            parts = max((reply.seconds for reply in replies), key=lambda seconds: sum(seconds.values()))
            busy_s = sum(parts.values())
            self.busy_s += busy_s
            try:
                merged = [report for reply in replies for report in reply.merged]
                await publication.commit([reply.reports for reply in replies], merged)
            finally:  # it may have been committed before a cancellation
                if publication.committed:
                    self.version, self._published = version, self.updates
        seconds = {"reserve": reserve_end - began, "calls": write_end - reserve_end - busy_s}
        return version, seconds | dict(parts) | {"commit": time.monotonic() - write_end}

    async def offload(self) -> int:
        """Move the state of all ranks from their GPUs to host memory; see `TrainEngine.offload`.

        Does nothing on CPU, where it would free no memory.
        """
        return sum(await self._all(OFFLOAD))

    async def onload(self) -> int:
        """Bring back what `offload` moved; see `TrainEngine.onload`."""
        return sum(await self._all(ONLOAD))

    async def wait_idle(self) -> int:
        """Wait until the ranks are idle after an abandoned step, and adopt their number of updates."""
        # All ranks have taken the same updates.
        self.updates = (await self._all(WAIT_IDLE))[0]
        return self.updates

    async def reset(self, *, seed: int, optimizer: OptimizerConfig | None = None) -> None:
        """Return all ranks to the state before the first update, in place; see `TrainEngine.reset`.

        Versions continue to increase: the next publish makes a new one of the first weights.

        Args:
            seed: determines the split of groups into minibatches; see `Layout.seed`.
            optimizer: settings of the optimizer from now on; by default unchanged.
        """
        self._ranks.config = replace(self.config, optimizer=optimizer or self.config.optimizer)
        await self._all(RESET, self.config.optimizer)
        self._seed, self.updates, self._skipped_in_a_row, self.skipped = seed, 0, 0, ()
        if self._published is not None:
            self._published = -1  # weights of another course of updates

    async def save(self, folder: Path, *, model: Path) -> None:
        """Begin to write a checkpoint, to be awaited with `finish_save`; see `TrainEngine.save`.

        Its version is the published one or, if the weights were updated since, the next one.
        """
        updated = self._published not in (None, self.updates)
        replica = self._ranks.replica
        await self._ranks.open_files(replica, folder)
        # Hosts without the controller's disks have copies of the model elsewhere.
        models = {host: self._ranks.service.cluster.path_on(host, model) for host in replica.hosts}
        await self._all(SAVE, folder, models, replica.hosts, self.version + updated)

    async def finish_save(self) -> None:
        """Wait until the checkpoint begun by `save` is written; see `TrainerRanks.finish_save`."""
        await self._ranks.finish_save()

    async def stop(self) -> None:
        """Stop the ranks."""
        await self._ranks.stop()

    def __repr__(self) -> str:
        return (
            f"{self.name.title()}  version {self.version}  {self.updates} updates  "
            f"{self.parameters / 1e6:.0f} M parameters  {self.config.ranks} rank(s)  {self.config.dtype}"
        )

    async def _all(
        self, call: RankCall[R], *args: object, parcel: Callable[[int], object] | None = None, work: int = 1
    ) -> list[R]:
        """Call a method on all ranks; after an error, wait until they can be saved, or count them as dead.

        See `Watchdog.work` for `parcel` and `work`.
        """
        replica = self._ranks.replica
        try:
            return await self._ranks.work(replica, call, *args, parcel=parcel, work=work, progress=self.updates)
        except ReplicaError:
            raise
        except ForgeError as error:
            # Ranks that could not be settled count as dead; otherwise they are idle, and know how far they got.
            if (updates := await self._ranks.settle(replica, call.method, error)) is not None:
                self.updates = updates  # earlier ones stay and count
            raise
