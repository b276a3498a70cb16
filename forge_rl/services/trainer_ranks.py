"""Starts a trainer's ranks on the hosts there are, calls them together, and restarts them after a death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge_rl.engines.factory import train_environment
from forge_rl.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    ForgeError,
    LossError,
    ReplicaError,
    ServiceError,
)
from forge_rl.runtime.addresses import meeting_address
from forge_rl.runtime.far_files import FolderServer
from forge_rl.runtime.processes import is_by_signal
from forge_rl.runtime.progress import create_progress, read_progress
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.seats import ServiceHosts, ranks_by_host
from forge_rl.runtime.service import Service
from forge_rl.runtime.watchdog import NOTICE_S, Watchdog
from forge_rl.services.far_hosts import open_files
from forge_rl.services.trainer_actor import TrainerActor
from forge_rl.services.trainer_calls import LoadedPolicy, R, RankCall
from forge_rl.services.trainer_config import TrainedModel, TrainerConfig


class TrainerRanks:
    """One replica of a service, whose ranks are called together and restarted together.

    Args:
        config: settings of ranks that are started from now on; can be replaced.
        hosts: hosts of the ranks, split evenly over those that live.
        model: model that they load.
        start_deadline_s: timeout of a whole start.
    """

    def __init__(
        self,
        config: TrainerConfig,
        service: Service,
        hosts: ServiceHosts,
        *,
        model: TrainedModel,
        start_deadline_s: float,
    ) -> None:
        self.config = config
        self.service = service
        self.restarts = 0
        """Number of restarts after failures so far."""
        self._hosts = hosts
        self._model = model
        self._start_deadline_s = start_deadline_s
        self._watchdog = Watchdog(service, config.deadline_s, f"--{service.name}.deadline-s")
        self._unavailable = "it has not started"
        """Reason why the ranks hold no policy; "" while they do."""

    @property
    def replica(self) -> Replica:
        """The replica that holds the policy.

        Raises:
            ServiceError: it holds none.
        """
        if self._unavailable:
            raise ServiceError(self._unavailable, service=self.service.name, hint="restart it, or start the run again")
        return self.service.replicas[0]

    @property
    def alive(self) -> bool:
        """True while the ranks run and hold a policy."""
        return not self._unavailable and self.service.replicas[0].alive

    async def death(self) -> str:
        """Wait until one of the current ranks dies or hangs; returns the cause."""
        return await asyncio.shield(self.service.replicas[0].death)

    @property
    def restarts_left(self) -> int:
        """Number of restarts left; at 0 a rank's death ends the run."""
        return self.config.max_restarts - self.restarts

    @property
    def progress(self) -> tuple[int, int] | None:
        """Number of microbatches that the first rank has done in the current step, and their total; None between steps,
        or if it runs on another machine."""
        return read_progress(_progress_of(self.service.replicas[0])) if self.service.replicas else None

    async def start(self, resume: Path | None, after: asyncio.Future[Any] | None = None) -> LoadedPolicy:
        """Spawn the ranks and load the policy, once more if a signal ends one meanwhile; see `open`."""
        try:
            return await self.open(resume, after)
        except ReplicaError as error:
            if not (is_by_signal(error.message) and self.restarts_left):
                raise
            if after is not None:
                await asyncio.wait((after,))
            return await self.restart(resume, error.message)

    async def open(self, resume: Path | None, after: asyncio.Future[Any] | None = None) -> LoadedPolicy:
        """Spawn the ranks and load the policy.

        Args:
            resume: training state to resume from instead of the model.
            after: the ranks import until it is done, successfully or not, and only then touch their devices.
        """
        deadline_s, replica, cluster = self._start_deadline_s, self._spawn(), self.service.cluster
        # Nobody may be calling the ranks when the last one dies, and the run must end all the same.
        if not self.restarts_left:
            replica.death.add_done_callback(self._on_last_death)
        await self.service.watch(replica, deadline_s=deadline_s)
        # Imports take seconds and overlap with whatever holds the devices until then.
        if after is not None:
            await replica.call_ranks("prepare", lambda _: (), deadline_s=deadline_s)
            await asyncio.wait((after,))
        networks = await replica.call_ranks("network", lambda _: (), deadline_s=deadline_s)
        address = meeting_address(networks, may_be_public=cluster.may_be_public)
        port = self.config.port or await replica.call("free_port", address, deadline_s=deadline_s, rank=0)
        # A rank's place on its host chooses its GPU.
        places = [replica.hosts[:rank].count(host) for rank, host in enumerate(replica.hosts)]
        progress = _progress_of(replica).absolute()
        create_progress(progress)
        models = [cluster.path_on(host, self._model.folder) for host in replica.hosts]
        if resume is not None:
            await self.open_files(replica, resume)
        started = await self._watchdog.call(
            replica,
            "setup",
            lambda rank: (models[rank], rank, places[rank], address, port, resume, progress),
            deadline_s,
        )
        self._unavailable = ""
        first_rank: LoadedPolicy = started[0]
        return first_rank

    def allow_restarts(self) -> None:
        """Let deaths from now on wait for a restart, if there may be one, instead of ending the run."""
        self.service.recoverable = self.config.max_restarts > 0

    async def restart(self, resume: Path | None, cause: str) -> LoadedPolicy:
        """Replace all ranks by new processes, regardless of the old ones' state, and load the policy.

        Calls in flight fail immediately, as do new calls until this has finished. If a rank dies meanwhile, this can be
        called again. Restarts of healthy ranks, such as the policy's after a critic's death, do not count as
        failures.

        Args:
            resume: training state to resume from, including version and updates; None restarts from the model, at
                version 0.
            cause: reason that calls in flight report if no rank has died.

        Raises:
            ReplicaError: a rank died again.
            ConfigError: the ranks do not fit on the hosts that are left, and no other one joined in time.
            ServiceError: it was already restarted `max_restarts` times, or did not start in time.
            CheckpointError: the training state cannot be read.
        """
        replica = self.service.replicas[0]
        if self.alive:
            # Retired in good health: this is no last death.
            replica.death.remove_done_callback(self._on_last_death)
            self.service.retire(replica, cause)
        else:
            if replica.alive:  # its last restart failed
                self.service.mark_failed(replica, cause)
            if not self.restarts_left:
                raise ServiceError(
                    self._spent(replica.death.result()),
                    service=self.service.name,
                    replica=replica.index,
                    hint=f"see {replica.log}; the same command resumes from the last checkpoint",
                )
            self.restarts += 1
        self._unavailable = "it is being restarted"
        try:
            # The new ranks use the same devices, so the old processes must be gone first.
            await self.service.processes.clean_up(replica)
            await self.wait_for_room()
            started = await self.open(resume)
        except BaseException as error:
            self._unavailable = (
                f"its restart failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            raise
        self.service.faults.recovered(self.service.name, replica.index)
        return started

    def forget_restarts(self) -> None:
        """Count restarts from 0 again."""
        self.restarts = 0
        if self.restarts_left:
            self.service.replicas[0].death.remove_done_callback(self._on_last_death)

    def join(self, host: str, gpus: Sequence[str], cores: int) -> None:
        """Take in another host, for ranks that are started from now on."""
        self._hosts = self._hosts.with_host(host, gpus, cores)
        self.service.cluster.tell_change()

    async def wait_for_room(self) -> None:
        """Wait until the ranks fit on the hosts, as long as another host is awaited.

        Raises:
            ConfigError: no host joined in time.
        """
        timeout_s = self.config.wait_for_host_s
        try:
            async with asyncio.timeout(timeout_s):
                with self.service.faults.calling(self.service.name, None, "wait for a host"):
                    while self.service.cluster.awaited and not self._has_room():
                        await self.service.cluster.change()
        except TimeoutError:
            if not self._has_room():
                raise ConfigError(
                    f"the {self.service.name}'s {self.config.ranks} ranks do not fit on the hosts that are left, and "
                    f"none has joined within {timeout_s:g} s",
                    hint=f"raise --{self.service.name}.wait-for-host-s; the same command resumes from the checkpoint",
                ) from None

    async def work(
        self,
        replica: Replica,
        call: RankCall[R],
        *args: object,
        parcel: Callable[[int], object] | None = None,
        work: int = 1,
        progress: object = None,
    ) -> list[R]:
        """Call a method on all ranks; see `Watchdog.work`."""
        replies: list[R] = await self._watchdog.work(
            replica, call.method, *args, parcel=parcel, work=work, progress=progress
        )
        return replies

    async def settle(self, replica: Replica, method: str, error: ForgeError) -> int | None:
        """After an error of a call, wait until the ranks can be saved, or count them as dead.

        Returns:
            The number of updates that their weights have taken; None if they count as dead.
        """
        # All ranks raise an error of the loss; after other errors some may hang in a collective.
        all_raised = replica.ranks == 1 or isinstance(error, LossError)
        deadline_s = self.config.deadline_s if all_raised else NOTICE_S
        try:
            updates = await replica.call_ranks("wait_idle", lambda _: (), deadline_s=deadline_s)
        except ServiceError:
            self.service.mark_failed(replica, f"call {method} failed: {error.message}")
            return None
        return int(updates[0])

    async def open_files(self, replica: Replica, folder: Path) -> None:
        """Give ranks on hosts that do not see this machine's disks access to a folder, for the next load or save."""
        far_meshes = [mesh for mesh in replica.meshes if not self.service.cluster.shares_files(mesh.host)]
        await open_files(self.service, replica, far_meshes, FolderServer(folder))

    async def finish_save(self) -> None:
        """Wait until the checkpoint begun by `save` is written; meanwhile the ranks keep training.

        Raises:
            CheckpointError: a rank could not write.
            DeadlineError: it took twice the deadline of a call.
        """
        try:
            await self._watchdog.call(self.replica, "finish_save", lambda _: (), 2 * self.config.deadline_s)
        except (ReplicaError, DeadlineError):
            raise
        except ServiceError as error:
            raise CheckpointError(f"a rank could not write: {error.message}", hint=error.hint) from error

    async def stop(self) -> None:
        """Stop the ranks."""
        self._unavailable = "it has been stopped"
        self.service.recoverable = False
        for replica in self.service.replicas:
            _progress_of(replica).unlink(missing_ok=True)
        await self.service.stop()

    def _spawn(self) -> Replica:
        args = self.config, self._model.reference, self.config.ranks, self._model.values
        ranks = ranks_by_host(self.config.ranks, self._hosts, self.service.cluster)
        # All ranks start with the same environment, so the host with the fewest cores sets their threads.
        cores = min(map(self._hosts.cores.get, ranks), key=lambda n: n or 0)
        env = train_environment(max(ranks.values()), cores)
        return self.service.spawn(TrainerActor, *args, ranks=ranks, env=env, index=0)

    def _has_room(self) -> bool:
        try:
            ranks_by_host(self.config.ranks, self._hosts, self.service.cluster)
        except ConfigError:
            return False
        return True

    def _on_last_death(self, death: asyncio.Future[str]) -> None:
        """End the run, even if no call is in flight."""
        # Not so during `stop`, whose deaths are wanted, nor without restarts, where the service itself ends the run.
        if self.service.recoverable:
            self.service.abandon(self.service.replicas[0])
            self.service.faults.record(self.service.name, None, self._spent(death.result()))

    def _spent(self, cause: str) -> str:
        return f"{cause}; it has been restarted {self.restarts} times, of at most {self.config.max_restarts}"


def _progress_of(replica: Replica) -> Path:
    """Return the file in which the first rank records the progress of a step."""
    return replica.log.with_suffix(".progress")
