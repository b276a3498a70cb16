"""The processes of engines and of their spares: where each starts, with which environment and arguments."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from forge_rl.engines.factory import decode_environment, spare_environment, thread_environment
from forge_rl.engines.parts import EnginePart
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.remote import RemoteServer
from forge_rl.engines.speculation import read_speculation
from forge_rl.runtime.addresses import meeting_address
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.fork_client import FORK_MODULES
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.replica_processes import ProcessSettings
from forge_rl.runtime.seats import ReplicaSize, Seat, Seats, ServiceHosts
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.services.engine_spares import EngineSpares
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.system.seeds import derive_seed


def seats_of(config: GeneratorConfig, cluster: Cluster, hosts: ServiceHosts) -> Seats:
    """Return the replicas' seats; their indices start after the remote engines' and the guests'."""
    return Seats(
        cluster,
        hosts,
        ReplicaSize(hosts=config.hosts_per_replica, gpus=config.devices // config.hosts_per_replica),
        replicas=config.replicas,
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        first=len(config.urls) + config.guests,
    )


@dataclass(frozen=True, kw_only=True)
class EngineProcesses:
    """Spawns the processes of engines and spares."""

    service: Service
    config: GeneratorConfig
    actor: type[ServiceActor]
    model: Path
    seed: int
    seats: Seats
    guests: Seats
    """Seats of the engines on the trainer's devices."""
    patience_s: float
    """Time for a remote server to come back after it went away."""
    owner: str = field(default_factory=lambda: secrets.token_hex(16))
    """Name of this generator, by which remote servers know it."""

    def environment(self, index: int) -> dict[str, str]:
        """Return the environment variables of the engine with this index, on the first of its hosts."""
        return self._environment(self.seats.take(index), self.seats)

    def _environment(self, seat: Seat, seats: Seats) -> dict[str, str]:
        forked = {FORK_MODULES: ",".join(self.actor.MODULES)} if self.actor.MODULES else {}
        return forked | decode_environment(
            seat.place,
            replicas=seats.max_per_host,
            devices=self.config.devices // self.config.hosts_per_replica,
            gpus=seats.hosts.gpus.get(seat.host, ()),
            cores=seats.hosts.cores.get(seat.host),
            batch_invariant=self.config.batch_invariant,
        )

    async def import_first(self, deadline_s: float) -> None:
        """Wait until the first engine of this machine can be forked, if it has one."""
        index = self.seats.first
        if self.config.replicas and self.seats.take(index).host == THIS_HOST:
            await self.service.cluster.import_first(self.environment(index), deadline_s=deadline_s)

    def host_of(self, index: int) -> str | None:
        """Return the host that has the GPUs of the engine with an index; None if it may be on any."""
        return self.seats.take(index).host if self.seats.hosts.gpus else None

    def spawn(self, index: int) -> Replica:
        """Spawn the engine with an index, or the process that uses it in a remote server."""
        if index < len(self.config.urls):
            # At the first start, an address without a server is a mistake to report at once; later, the server may come
            # back.
            is_restart = index < len(self.service.replicas)
            server = RemoteServer(
                url=self.config.urls[index], owner=self.owner, wait_s=self.patience_s if is_restart else 0.0
            )
            args, env = self._args(index, "replica", THIS_HOST), thread_environment(sharers=1, cores=1)
            return self.service.spawn(self.actor, *args, server, env=env, index=index, secrets=True)
        seats = self.guests if index in self.config.guest_indices else self.seats
        seat = seats.take(index)
        args, env = self._args(index, "replica", seat.host), self._environment(seat, seats)
        if not seat.other_seats:
            return self.service.spawn(self.actor, *args, env=env, host=seat.host, index=index)
        # Ranks of one mesh start with the same variables; `set_up` sets each host's own.
        hosts = {part.host: 1 for part in seat.parts}
        return self.service.spawn(self.actor, *args, env=spare_environment(env), ranks=hosts, index=index)

    def spares(self, start_deadline_s: float) -> EngineSpares:
        """Return the keeper of the spares, numbered from the first number that no engine can have."""
        # Also above the indices that engines get when hosts join.
        first_number = max(self.config.engines, self.seats.first + self.config.max_replicas)
        return EngineSpares(
            self.service,
            self.spawn_spare,
            self.environment,
            numbers=range(first_number, first_number + self.config.spares),
            start_deadline_s=start_deadline_s,
            restart=self.config.restart,
            host_of=self.host_of,
        )

    async def set_up(self, replica: Replica, deadline_s: float) -> None:
        """Start the engine in its processes, one on each of its hosts.

        Raises:
            ConfigError: its hosts could meet only over a public address.
            ForgeError: it does not start.
        """
        if replica.ranks == 1:
            await replica.call("setup", deadline_s=deadline_s)
            return
        may_be_public = self.service.cluster.may_be_public
        networks = await replica.call_ranks("network", lambda _: (), deadline_s=deadline_s)
        address = meeting_address(networks, may_be_public=may_be_public)
        port = await replica.call("open_store", address, deadline_s=deadline_s)
        parts = [
            EnginePart(
                number=number,
                count=replica.ranks,
                address=address,
                port=port,
                folder=self.service.cluster.path_on(host, self.model),
                may_be_public=may_be_public,
            )
            for number, host in enumerate(replica.hosts)
        ]
        # One process on each host: the first runs the engine, the others only the workers on their hosts.
        environments = [self._environment(seat, self.seats) for seat in self.seats.take(replica.index).parts]
        await replica.call_ranks("setup", lambda rank: (environments[rank], parts[rank]), deadline_s=deadline_s)

    def spawn_spare(self, number: int) -> Replica:
        """Spawn the spare with this number on the host of an engine, without devices."""
        indices = [
            replica.index for replica in self.service.replicas if replica.serving and replica.index >= self.seats.first
        ]
        # Spares are spread over the serving engines' hosts.
        engine_index = indices[number % len(indices)] if indices else self.seats.first
        host = self.seats.take(engine_index).host
        args, env = self._args(number, "spare", host), spare_environment(self.environment(engine_index))
        return self.service.spawn_spare(number, self.actor, *args, settings=ProcessSettings(host=host, env=env))

    def _args(self, number: int, kind: str, host: str) -> tuple[object, ...]:
        # With the config's own class, engine processes would import its module and everything that a controller needs.
        settings = DecodeSettings(
            **{setting.name: getattr(self.config, setting.name) for setting in fields(DecodeSettings)}
        )
        # The draft model's folder has another path on a host with a copy of it.
        if (drafting := read_speculation(settings.speculation)) is not None and drafting.model:
            local_path = str(self.service.cluster.path_on(host, Path(drafting.model)))
            settings = replace(settings, speculation=settings.speculation.replace(drafting.model, local_path))
        return (
            self.service.cluster.path_on(host, self.model),
            settings,
            derive_seed(self.seed, "engine", kind, number) % 2**32,  # vLLM also seeds NumPy, which takes 32 bits
            f"{self.service.name} {kind} {number}",
        )
