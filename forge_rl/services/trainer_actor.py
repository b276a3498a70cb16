"""One rank of the Trainer service, in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from monarch.actor import concurrent_endpoint

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterEngine, AdapterSettings, PassResult
from forge_rl.engines.cpu import chosen_interfaces, meet_over
from forge_rl.engines.devices import device_type
from forge_rl.engines.factory import import_train_engine, make_adapter_engine, make_train_engine
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import device_threads, init_distributed
from forge_rl.engines.protocol import StepRequest, TrainEngine, TrainSettings
from forge_rl.errors import ForgeError, LossError
from forge_rl.metrics import Value
from forge_rl.metrics.phases import PhaseClock
from forge_rl.packing.unpacking import rounded_scores
from forge_rl.runtime.addresses import HostNetwork, interface_towards
from forge_rl.runtime.far_files import process_desk
from forge_rl.runtime.progress import ProgressWriter
from forge_rl.runtime.service import ServiceActor
from forge_rl.runtime.signals import outlive_stop_signals
from forge_rl.services.trainer_calls import AdapterReply, LoadedPolicy, PublishReply, StepReply
from forge_rl.system.kernels import failures
from forge_rl.weights.fingerprints import warm_up
from forge_rl.weights.manifest import Manifest, TensorSpec
from forge_rl.weights.transports.protocol import Transport


class TrainerActor(ServiceActor):
    """Executes the Trainer's calls, one at a time; see `Trainer` and `TrainEngine`."""

    def __init__(self, settings: TrainSettings, reference: bool, ranks: int, values: bool = False) -> None:
        self._make_engine = functools.partial(make_train_engine, settings=settings, reference=reference, values=values)
        self._ranks = ranks
        self._heads = settings.heads(ranks)
        self._engine: TrainEngine | None = None
        self._folder: Path | None = None
        self._adapters: AdapterEngine | None = None
        # Endpoints are concurrent, so that `finish_save` does not hold up a step; the lock keeps the engine to one
        # call.
        self._lock = asyncio.Lock()
        self._saved: Future[None] | None = None
        self._progress = ProgressWriter(None)

    @concurrent_endpoint
    async def prepare(self) -> None:
        """Import what training needs, without touching a device."""
        await asyncio.to_thread(import_train_engine)

    @concurrent_endpoint
    async def network(self) -> HostNetwork:
        """Return how other hosts can reach this one."""
        return HostNetwork.of_this_host(chosen_interfaces())

    @concurrent_endpoint
    async def free_port(self, address: str) -> int:
        """Return a free port at an address of this host, where the ranks meet; called on rank 0."""
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            port: int = probe.getsockname()[1]
            return port

    @concurrent_endpoint
    async def setup(
        self, model: Path, rank: int, place: int, address: str, port: int, resume: Path | None, progress: Path
    ) -> LoadedPolicy:
        """Load the policy.

        Args:
            model: Hugging Face folder on this host.
            place: the rank's place among those on this host.
            address, port: where the ranks meet, on the host of rank 0.
            progress: file to which the first rank writes the progress of its steps, if it is there.
        """
        outlive_stop_signals(with_programs=True)  # a step to finish before the run saves may still be compiling
        async with self._lock:
            self._progress = ProgressWriter(None if rank else progress)
            if self._ranks > 1:
                meet_over(interface_towards(address), nccl=device_type() == "cuda")
            init_distributed(rank, self._ranks, address, port, place=place)
            # Threads of the default executor would create their CUDA context on the first GPU of the host, not on this
            # rank's.
            asyncio.get_running_loop().set_default_executor(device_threads("trainer"))
            self._engine, self._folder = self._make_engine(model), model
            # The loops that copy and fingerprint weights may have to be compiled, which the first publish should not
            # wait for.
            warm_up()
            version = 0
            if resume is not None:
                desk = process_desk()
                try:
                    version = self._engine.load_training_state(desk.place(resume))
                finally:
                    desk.close()
            return LoadedPolicy(
                version=version,
                updates=self._engine.updates,
                parameters=self._engine.parameters,
                failed_kernels=dict(failures()),
            )

    @concurrent_endpoint
    async def step(self, request: StepRequest) -> StepReply:
        """Train on the minibatches of a batch that were sent."""
        async with self._lock:
            start_time, minibatches = time.monotonic(), self.take_parcel()
            # Ranks that split a row have the same scores: one of them sends them.
            if self.engine.rank not in self._heads:
                request = replace(request, scored_minibatches=0)
            try:
                result = self.engine.train_batch(minibatches, request, progress=self._progress.write)
            except torch.OutOfMemoryError as error:
                raise ForgeError(
                    f"a step ran out of device memory: {str(error).splitlines()[0]}",
                    hint="set --trainer.activation-checkpointing full, or lower --trainer.seq-len or "
                    "--generator.gpu-memory-utilization",
                ) from error
            except LossError as error:
                # The user's traceback goes to the rank's log; the controller gets the line.
                print(error.trace or error, file=sys.stderr, flush=True)
                raise
            finally:
                # No progress outside of a step, nor after one that failed.
                self._progress.write(0, 0)
            rows = [row for minibatch in minibatches[: request.scored_minibatches] for row in minibatch.rows]
            scores = [rounded_scores(row, row_scores) for row, row_scores in zip(rows, result.scores, strict=True)]
            return StepReply(
                metrics=result.metrics,
                updates=self.engine.updates,
                seconds=time.monotonic() - start_time,
                scores=scores,
            )

    @concurrent_endpoint
    async def evaluate(self, loss: Loss) -> dict[str, Value]:
        """Compute the loss on the minibatches that were sent."""
        async with self._lock:
            return self.engine.evaluate(self.take_parcel(), loss)

    @concurrent_endpoint
    async def logprobs(self, temperature: float) -> list[torch.Tensor]:
        """Compute logprobs of the rows that were sent."""
        async with self._lock:
            return self.engine.logprobs(self.take_parcel(), temperature=temperature)

    @concurrent_endpoint
    async def values(self) -> list[torch.Tensor]:
        """Compute a value model's values of the rows that were sent."""
        async with self._lock:
            return self.engine.values(self.take_parcel())

    @concurrent_endpoint
    async def layer_noise(self, temperature: float, relative: float) -> list[tuple[float, int]]:
        """Measure the effect of noise in each layer on the rows that were sent."""
        async with self._lock:
            return self.engine.layer_noise(self.take_parcel(), temperature=temperature, relative=relative)

    @concurrent_endpoint
    async def specs(self) -> tuple[TensorSpec, ...]:
        return self.engine.specs()

    @concurrent_endpoint
    async def publish(
        self, transports: Mapping[str, Transport], hosts: Sequence[str], drafted: Manifest
    ) -> PublishReply:
        """Write this rank's shards or, with several hosts, the shards of tensors that its host has memory for.

        Args:
            transports: the transport on each host.
            hosts: host of each rank.
        """
        async with self._lock:
            clock, rank, has_several_hosts = PhaseClock(), self.engine.rank, len(transports) > 1
            # With several hosts, a host writes only the tensors of which it has memory, gathered from all ranks.
            with clock.phase("gather"):
                shards = self.engine.shards_of_host(drafted, hosts) if has_several_hosts else self.engine.local_shards()
            with clock.phase("write"):
                reports = await transports[hosts[rank]].write(drafted, shards, rank=rank)
            with clock.phase("merge"):
                merged = self.engine.merged_reports(drafted)
            return PublishReply(reports=reports, merged=merged, seconds=clock.seconds)

    @concurrent_endpoint
    async def offload(self) -> int:
        async with self._lock:
            return self.engine.offload() if device_type() == "cuda" else 0

    @concurrent_endpoint
    async def onload(self) -> int:
        async with self._lock:
            return self.engine.onload()

    @concurrent_endpoint
    async def wait_idle(self) -> int:
        """Return the number of updates once the running call has finished."""
        async with self._lock:
            return self.engine.updates

    @concurrent_endpoint
    async def reset(self, optimizer: OptimizerConfig) -> None:
        """Return to the state before the first update."""
        async with self._lock:
            self.engine.reset(optimizer)

    @concurrent_endpoint
    async def save(self, folder: Path, models: Mapping[str, Path], hosts: Sequence[str], version: int) -> None:
        """Begin to write a checkpoint; returns once the state is copied.

        Args:
            models: folder of the initial model on each host.
            hosts: host of each rank.
        """
        async with self._lock:
            desk, model = process_desk(), models[hosts[self.engine.rank]]
            self._saved = self.engine.save(desk.place(folder), model, version=version)
            self._saved.add_done_callback(lambda _: desk.close())

    @concurrent_endpoint
    async def finish_save(self) -> None:
        """Wait for the checkpoint begun by `save`; other calls run meanwhile."""
        assert self._saved is not None, "save comes first"
        await asyncio.wrap_future(self._saved)

    @concurrent_endpoint
    async def open_adapter(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter to the ones that are trained over the base."""
        async with self._lock:
            self.adapters.open(name, settings)

    @concurrent_endpoint
    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter."""
        async with self._lock:
            self.adapters.drop(name)

    @concurrent_endpoint
    async def run_adapter(self, name: str, loss: Loss, backward: bool) -> AdapterReply:
        """Run a pass of an adapter over the minibatch that was sent."""
        async with self._lock:
            start_time = time.monotonic()
            with _naming_full_memory():
                result = self.adapters.run(name, self.take_parcel(), loss, backward=backward)
            return self._reply(name, result, time.monotonic() - start_time)

    @concurrent_endpoint
    async def run_adapters(self) -> list[AdapterReply]:
        """Run the passes of several adapters that were sent, with rows in common."""
        async with self._lock:
            start_time, passes = time.monotonic(), self.take_parcel()
            with _naming_full_memory():
                results = self.adapters.run_many(passes)
            seconds = time.monotonic() - start_time
            return [
                # One adapter's error is its own; the others' passes have succeeded.
                AdapterReply(metrics={}, updates=0, seconds=seconds, error=result)
                if isinstance(result, ForgeError)
                else self._reply(adapter_pass.name, result, seconds)
                for adapter_pass, result in zip(passes, results, strict=True)
            ]

    @concurrent_endpoint
    async def step_adapter(self, name: str, adam: AdamStep) -> AdapterReply:
        """Take an optimizer step of an adapter."""
        async with self._lock:
            start_time = time.monotonic()
            metrics = self.adapters.step(name, adam)
            updates = self.adapters.updates(name)
            return AdapterReply(metrics=metrics, updates=updates, seconds=time.monotonic() - start_time)

    @concurrent_endpoint
    async def save_adapter(self, name: str, folder: Path) -> None:
        """Write an adapter into an existing folder of this machine."""
        async with self._lock:
            self.adapters.save(name, folder)

    @concurrent_endpoint
    async def load_adapter(self, name: str, folder: Path, optimizer: bool) -> int:
        """Load an adapter from a folder of this machine; returns its number of updates."""
        async with self._lock:
            return self.adapters.load(name, folder, optimizer=optimizer)

    def _reply(self, name: str, result: PassResult, seconds: float) -> AdapterReply:
        assert self._engine is not None, "setup comes first"
        logprobs = [row.float().numpy() for row in result.logprobs] if self._engine.rank in self._heads else []
        updates = self.adapters.updates(name)
        return AdapterReply(metrics=result.metrics, updates=updates, seconds=seconds, logprobs=logprobs)

    @property
    def adapters(self) -> AdapterEngine:
        """The adapters over this rank's engine, made on first use."""
        if self._adapters is None:
            assert self._folder is not None, "setup comes first"
            self._adapters = make_adapter_engine(self.engine, self._folder)
        return self._adapters

    @property
    def engine(self) -> TrainEngine:
        """This rank's engine, once setup has run, with its own parameters in the model, not a named adapter's."""
        assert self._engine is not None, "setup comes first"
        # The model may still hold the parameters of the adapter that ran last.
        if self._adapters is not None:
            self._adapters.rest()
        return self._engine


@contextlib.contextmanager
def _naming_full_memory() -> Iterator[None]:
    """Name the flags that help if a pass of the body runs out of device memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ForgeError(
            f"a pass ran out of device memory: {str(error).splitlines()[0]}",
            hint="lower --trainer.seq-len, or set --trainer.activation-checkpointing full",
        ) from error
