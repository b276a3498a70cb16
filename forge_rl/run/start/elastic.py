"""Hosts that join a live run and leave it, with their engines and environments."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.run.run_config import RunConfig
from forge_rl.run.service_set import Services, nothing_generated
from forge_rl.run.start.hosts import RunHosts, ask_hosts, sound_hosts, write_hosts
from forge_rl.run.start.preparation import PreparedRun
from forge_rl.runtime.cluster import THIS_HOST
from forge_rl.runtime.joining import attach_host, controller_address

JOINED = ("generator", "environment")
"""Services that hosts can join."""
REPLACED = (*JOINED, "trainer")
"""Services for which hosts that die are replaced."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_LEAVE_S = 120.0
"""Time in which the processes on a host that leaves end; after that they count as lost."""


class ElasticHosts:
    """Adds hosts to a live run and removes them.

    Args:
        hosts: hosts of the run.
        model: folder of the model, which each host must see.
        services: services that hosts join.
        reserved_gpus: number of GPUs of each host that the engines may not use, at the start.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        hosts: RunHosts,
        model: Path,
        services: Services,
        reserved_gpus: Mapping[str, int],
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._hosts = hosts
        self._model = model
        self._rollout = services.rollout
        self._trainers = services.trainers
        self._reserved_gpus = reserved_gpus
        self._infos = dict(hosts.placed.infos)
        self._services = {name: list(names) for name, names in hosts.placed.hosts.items()}
        self._joining = asyncio.Lock()

    def replace(self) -> None:
        """Replace hosts of the job that die, from now on."""
        needed = {host for service in REPLACED for host in self._hosts.placed.hosts[service]} - {THIS_HOST}
        self._hosts.replacements.begin(needed)

    def states(self) -> dict[str, str]:
        """Return the state of each host: "was asked for", "serves", "leaves", or why it is gone."""
        cluster = self._hosts.cluster
        states = dict.fromkeys(self._hosts.replacements.waiting, "was asked for")
        states |= {host: "leaves" if host in cluster.leaving else "serves" for host in self._infos}
        return states | cluster.lost_hosts

    def meeting_point(self) -> dict[str, str]:
        """Return what a joining host needs: the controller's IP address, or "" if only its own machine reaches it."""
        return {"controller": controller_address()}

    async def join(self, name: str, address: str, services: Sequence[str] = ()) -> str:
        """Add a host on which a Monarch worker serves; returns a line that names its services.

        Args:
            name: name of the host, new to the run.
            address: address of the worker; see `attach_host`.
            services: services that it joins; by default the engines, or the environments if it lacks the GPUs for
                those.

        Raises:
            ForgeError: the host is refused; says why.
        """
        lost_host = self._hosts.replacements.place_of(name) if isinstance(name, str) else ""
        # A run without rollouts has nothing to join, except for ranks in the place of a lost host's.
        if self._rollout is None and not lost_host:
            raise nothing_generated()
        if self._config.isolation.private_network:
            raise ConfigError(
                "the run is in a private network, and cannot be reached from outside",
                hint="leave out --private-network",
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"a host is called {name!r:.80}", hint="use letters, digits, hyphens and dots")
        if unknown := [service for service in services if service not in JOINED]:
            raise ConfigError(f"no host can join {unknown[0]!r:.80}", hint=f"name some of {', '.join(JOINED)}")
        cluster, log = self._hosts.cluster, self._prepared.monitor.log
        # One at a time: names, cores and hosts.json are of all hosts so far.
        async with self._joining:
            if name in cluster.hosts or name in cluster.lost_hosts:
                raise ConfigError(f"the run has, or had, a host {name!r}", hint="give the new host another name")
            cluster.add(name, attach_host(name, address, may_be_public=cluster.may_be_public))
            try:
                answers, without_model = await ask_hosts(cluster, self._prepared, self._model, [name])
                if without_model:
                    raise ConfigError(
                        f"host {name} does not see the run's folder {self._prepared.folder}, or the model's "
                        f"{self._model}",
                        hint="let hosts join that see both at these paths",
                    )
                info = sound_hosts(self._config, cluster, answers, log.warn)[name]
                joined_services = (
                    self._choose_for(name, info, lost_host) if lost_host else self._choose(name, info, services)
                )
                # A replacement takes over the lost host's ranks too: its engines leave as many GPUs to them.
                await self._start(name, info, joined_services, self._reserved_gpus.get(lost_host, 0))
            # Also on cancellation: the cluster knows the host already, and must not keep one that joined only in part.
            except BaseException as error:
                cause = error.message if isinstance(error, ForgeError) else type(error).__name__
                cluster.lose(name, f"it could not join: {cause}")
                raise
            self._infos[name] = info
            for service in joined_services:
                self._services[service].append(name)
            write_hosts(self._prepared.folder, self._infos, self._services)
        # Only now is the lost host no longer awaited: ranks and replicas that wait for a place find this one.
        self._hosts.replacements.joined(name)
        text = f"host {name} has joined: {', '.join(joined_services)} ({info.describe()})"
        log.event(text)
        return text

    async def leave(self, name: str) -> None:
        """Let a host go: its work finishes or continues on other hosts.

        Raises:
            ConfigError: the run has no other host of this name.
        """
        cluster = self._hosts.cluster
        if name == THIS_HOST or name not in self._infos or name in cluster.lost_hosts:
            worker_hosts = [host for host in cluster.hosts if host != THIS_HOST]
            raise ConfigError(
                f"no host {name!r:.80} can leave", hint=f"name one of {', '.join(worker_hosts) or 'none'}"
            )
        if name in cluster.leaving:
            raise ConfigError(f"host {name} is leaving already", hint="wait until it has left")
        # Nothing new is placed there from now on.
        cluster.leaving.add(name)
        self._prepared.monitor.log.event(f"host {name} is leaving")
        departures = [] if self._rollout is None else [self._rollout.generator.leave(name)]
        if self._rollout is not None and self._rollout.environment is not None:
            departures.append(self._rollout.environment.leave(name))
        tasks = [asyncio.ensure_future(departure) for departure in departures]
        # Bounded: a request or an environment that does not end would otherwise keep the host in the run.
        try:
            if tasks:  # asyncio.wait refuses none
                await asyncio.wait(tasks, timeout=_LEAVE_S)
        finally:
            for task in tasks:
                task.cancel()
            cluster.lose(name, "it has left")
        self._prepared.monitor.log.event(f"host {name} has left")

    def _choose(self, name: str, info: HostInfo, services: Sequence[str]) -> tuple[str, ...]:
        """Return the services that a host joins.

        Raises:
            ConfigError: it cannot join one of them.
        """
        kind = self._hosts.placed.devices.kind
        assert self._rollout is not None
        joined_services = tuple(dict.fromkeys(services)) or (("generator",) if info.kind == kind else ("environment",))
        if "generator" in joined_services and info.kind != kind:
            raise ConfigError(
                f"host {name} has {info.describe()}, and the engines run on {kind}",
                hint="let it join the environments: --services environment",
            )
        if "environment" in joined_services and (
            self._rollout.environment is None or not self._rollout.environment.replicas
        ):
            raise ConfigError(
                "the run has no processes of environments that a host could take",
                hint="an agent plays the episodes, or environments run in the controller's process",
            )
        return joined_services

    def _choose_for(self, name: str, info: HostInfo, lost_host: str) -> tuple[str, ...]:
        """Return the services of a host that replaces a lost one: the lost host's.

        Raises:
            ConfigError: it has other devices.
        """
        service_hosts = self._hosts.placed.hosts
        joined_services = tuple(service for service in REPLACED if lost_host in service_hosts[service])
        if (kind := self._hosts.placed.devices.kind) != info.kind and joined_services != ("environment",):
            raise ConfigError(f"host {name} has {info.describe()}, and the run runs on {kind}", hint="see --job")
        return joined_services

    async def _start(self, name: str, info: HostInfo, joined_services: Sequence[str], reserved_gpus: int) -> None:
        rollout = self._rollout
        # Hosts that are processes of one machine share its cores; those that are gone use none.
        live_hosts = self._infos.keys() - self._hosts.cluster.lost_hosts.keys()
        num_sharing = sum(self._infos[host].space == info.space for host in live_hosts)
        cores = max(1, info.cores // max(1, num_sharing))
        if rollout is not None and {"generator", "trainer"}.intersection(joined_services):
            # Before the engines: each loads the latest version from the store of its own host.
            await rollout.weights.add(name)
        if rollout is not None and "generator" in joined_services:
            rollout.generator.join(name, info.gpus[reserved_gpus:], cores)
        if rollout is not None and "environment" in joined_services and rollout.environment is not None:
            rollout.environment.join(name, cores)
        if "trainer" in joined_services:
            for trainer in self._trainers:
                trainer.join(name, info.gpus, cores)
