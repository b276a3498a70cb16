"""Places the services of a run on its hosts: what the user chose, and a default for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_rl.engines.devices import Devices
from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError
from forge_rl.run.placement_flag import SERVICES, read_placement
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.cluster import THIS_HOST
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.generator_config import GeneratorConfig


@dataclass(frozen=True, kw_only=True)
class PlacedServices:
    """Hosts of each service, by the service's name, and the devices of each host."""

    hosts: Mapping[str, tuple[str, ...]]
    infos: Mapping[str, HostInfo]

    def of(self, service: str, reserved_gpus: Mapping[str, int] | None = None) -> ServiceHosts:
        """Return a service's hosts, with the GPUs and cores that it may use there.

        Args:
            reserved_gpus: number of GPUs that other services take, by host.
        """
        names = self.hosts[service]
        spaces = [self.infos[name].space for name in names]
        return ServiceHosts(
            names=names,
            gpus={
                name: self.infos[name].gpus[(reserved_gpus or {}).get(name, 0) :]
                for name in names
                if self.infos[name].gpus
            },
            # Hosts that are processes of one machine share its cores.
            cores={
                name: max(1, self.infos[name].cores // spaces.count(space))
                for name, space in zip(names, spaces, strict=True)
            },
        )

    @property
    def with_weights(self) -> tuple[str, ...]:
        """Hosts of the weight store: the controller's first, which holds the index, then all with ranks or engines."""
        # Ranks write versions into the memory of their own host, and engines read from their own.
        host_lists = (self.hosts[service] for service in ("trainer", "generator"))
        return tuple(dict.fromkeys([THIS_HOST, *(host for names in host_lists for host in names)]))

    @property
    def devices(self) -> Devices:
        """Devices of the hosts with ranks or engines.

        Raises:
            ConfigError: some of them have GPUs and others none.
        """
        infos = {host: self.infos[host] for host in (*self.hosts["trainer"], *self.hosts["generator"])}
        if len(kinds := {info.kind for info in infos.values()}) > 1:
            cpu_hosts = ", ".join(host for host, info in infos.items() if info.kind == "cpu")
            raise ConfigError(
                f"the trainer and the engines have hosts with GPUs, and without: {cpu_hosts}",
                hint="name hosts with GPUs for both in --placement",
            )
        [kind] = kinds
        return Devices(
            kind=kind,
            gpus=sum(len(info.gpus) for info in infos.values()),
            # Plans are for equal devices, so the smallest counts.
            gpu_bytes=min(info.gpu_bytes for info in infos.values()),
        )

    def ranks_on(self, ranks: int) -> dict[str, int]:
        """Return the number of the trainer's ranks on each of its hosts."""
        return dict.fromkeys(self.hosts["trainer"], ranks // len(self.hosts["trainer"]))

    def engines_on(self, generator: GeneratorConfig) -> dict[str, int]:
        """Return the maximum number of devices that engines take on each of their hosts."""
        hosts, parts = self.hosts["generator"], generator.replicas * generator.hosts_per_replica
        return dict.fromkeys(hosts, -(-parts // len(hosts)) * (generator.devices // generator.hosts_per_replica))

    @property
    def meet(self) -> bool:
        """Whether a host has both ranks and engines."""
        return not {*self.hosts["trainer"]}.isdisjoint(self.hosts["generator"])

    def lines(self) -> list[str]:
        """Describe the placement, a line for each host with services."""
        return [
            f"host {name}: {', '.join(services)} ({self.infos[name].describe()})"
            for name in self.infos
            if (services := [service for service, hosts in self.hosts.items() if name in hosts])
        ]


def place(config: RunConfig, infos: Mapping[str, HostInfo]) -> PlacedServices:
    """Choose the hosts of each service.

    Without a choice, trainer and engines are on all hosts of the job, or all with GPUs if there are any; rewards and
    environments on hosts without GPUs if others have some, else on the controller's.

    Args:
        infos: all hosts by name, the controller's first.

    Raises:
        ConfigError: --placement names a host that does not exist, the trainer's ranks cannot be split evenly, or an
            engine does not fit on its hosts.
    """
    chosen_hosts = read_placement(config.placement).hosts
    for service, names in chosen_hosts.items():
        if unknown := [name for name in names if name not in infos]:
            raise ConfigError(
                f"--placement gives {service} the host {unknown[0]!r}, which the job has not",
                hint=f"its hosts are {', '.join(infos)}",
            )
    job_hosts = [name for name in infos if name != THIS_HOST]
    with_gpus = [name for name in job_hosts if infos[name].gpus]
    workers = tuple(with_gpus or job_hosts or [THIS_HOST])
    # Hosts without GPUs have nothing to train or decode on, so rewards and environments get their cores.
    idle = tuple(name for name in job_hosts if name not in with_gpus) if with_gpus else ()
    trainer = chosen_hosts.get("trainer") or _trainer_hosts(config.trainer.ranks, workers, infos)
    if config.trainer.ranks % len(trainer):
        raise ConfigError(
            f"{config.trainer.ranks} trainer ranks cannot be split evenly over the hosts {', '.join(trainer)}",
            hint=f"set --trainer.ranks to a multiple of {len(trainer)}, or change --placement",
        )
    # Engines without a choice go first to hosts that have no ranks.
    engine_hosts = tuple(sorted(workers, key=lambda name: name in trainer))
    defaults = {"trainer": trainer, "generator": engine_hosts, "teachers": chosen_hosts.get("generator", engine_hosts)}
    defaults |= dict.fromkeys(("reward", "environment"), idle or (THIS_HOST,))
    has_teachers = getattr(config, "teachers", None) is not None
    services = [name for name in SERVICES if name != "teachers" or has_teachers]
    placed = PlacedServices(hosts={name: chosen_hosts.get(name, defaults[name]) for name in services}, infos=infos)
    if config.starts_engines and config.generator.replicas:
        _check_engines(config.generator, [infos[name] for name in placed.hosts["generator"]])
    return placed


def _check_engines(generator: GeneratorConfig, hosts: Sequence[HostInfo]) -> None:
    hosts_per_engine, workers_per_host = generator.hosts_per_replica, generator.devices // generator.hosts_per_replica
    if hosts_per_engine > len(hosts):
        raise ConfigError(
            f"an engine takes {hosts_per_engine} hosts, and engines have {len(hosts)}",
            hint="lower --generator.hosts-per-replica, or give generator more hosts in --placement",
        )
    if (max_gpus := max(len(info.gpus) for info in hosts)) and workers_per_host > max_gpus:
        raise ConfigError(
            f"{workers_per_host} devices of an engine do not fit on a host, as none has more than {max_gpus} GPUs",
            hint="raise --generator.hosts-per-replica, or lower --generator.tensor-parallel-size",
        )
    if hosts_per_engine > 1 and workers_per_host > 1 and not max_gpus:
        raise ConfigError(
            f"an engine of {hosts_per_engine} hosts would have {workers_per_host} workers on each, and without GPUs "
            "it can have one",
            hint=f"set --generator.tensor-parallel-size {hosts_per_engine}",
        )


def _trainer_hosts(ranks: int, workers: Sequence[str], infos: Mapping[str, HostInfo]) -> tuple[str, ...]:
    """Return the ranks' hosts: with GPUs, as few as hold the ranks; otherwise, as many as split them evenly."""
    gpus = [len(infos[name].gpus) for name in workers]
    counts = [count for count in range(1, len(workers) + 1) if ranks % count == 0]
    if any(gpus):
        fitting = [count for count in counts if ranks // count <= min(gpus[:count])]
        return tuple(workers[: min(fitting, default=1)])
    return tuple(workers[: max(counts)])
