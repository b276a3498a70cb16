"""How many replicas a service has, and which host each starts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from forge_rl.errors import ConfigError
from forge_rl.runtime.cluster import THIS_HOST, Cluster

_MOST = 1024
"""Most replicas of a service."""


@dataclass(frozen=True, kw_only=True)
class ServiceHosts:
    """Hosts that a service has, and its part of each."""

    names: tuple[str, ...] = (THIS_HOST,)
    """Names of the hosts, in the order in which replicas are spread."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs that the service may use on each host, as CUDA_VISIBLE_DEVICES names them there; none on CPU."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """CPU cores that the service may use on each host; all of this machine's if a host is missing."""

    def with_host(self, host: str, gpus: Sequence[str] = (), cores: int | None = None) -> ServiceHosts:
        """Return these hosts and another one."""
        return ServiceHosts(
            names=(*self.names, host),
            gpus={**self.gpus, host: tuple(gpus)} if gpus else self.gpus,
            cores=self.cores if cores is None else {**self.cores, host: cores},
        )


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A replica's place on a host."""

    host: str
    place: int
    """Number of the place on the host; replicas at places 0, 1 and so on use successive GPUs."""
    other_seats: tuple[Seat, ...] = ()
    """Its places on the other hosts, if a replica spans several."""

    @property
    def parts(self) -> tuple[Seat, ...]:
        """All places of the replica, this one first."""
        return self, *self.other_seats


@dataclass(frozen=True, kw_only=True)
class ReplicaSize:
    """Hosts and GPUs of one replica of a service."""

    hosts: int = 1
    gpus: int = 1
    """GPUs on each of its hosts, if the service has any."""


class Seats:
    """Decides how many replicas a service has, spreads them over its hosts, and moves them when a host is gone.

    If all its hosts are gone and it needs no GPUs, replicas move to other hosts of the run. Between `min_replicas` and
    `max_replicas`, their number follows the number of hosts.

        seats = Seats(cluster, ServiceHosts(names=("a", "b")), replicas=2, max_replicas=3)
        host = seats.take(0).host
        seats.add("c")
        seats.wanted  # 3

    Args:
        cluster: knows which hosts are gone, or about to go.
        hosts: the service's hosts.
        size: hosts and GPUs of a replica.
        replicas: number of replicas on these hosts.
        min_replicas: minimum number of replicas; 0 for `replicas`.
        max_replicas: maximum number of replicas; 0 for `replicas`.
        first: index of the first replica with a seat; replicas before it are elsewhere, and always wanted.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: ServiceHosts,
        size: ReplicaSize = ReplicaSize(),
        *,
        replicas: int = 1,
        min_replicas: int = 0,
        max_replicas: int = 0,
        first: int = 0,
    ) -> None:
        self.first = first
        self.hosts = hosts
        self._cluster = cluster
        self._size = size
        self._taken: dict[int, Seat] = {}
        self._replicas, self._room = replicas, self._room_now()
        """Number of replicas for a number of places; the same share of other places is wanted."""
        self._min_replicas, self._max_replicas = min_replicas or replicas, max_replicas or replicas

    @property
    def max_per_host(self) -> int:
        """Maximum number of replicas on one host, as planned at the start."""
        return max(1, -(-self._replicas * self._size.hosts // len(self.hosts.names)))

    @property
    def wanted(self) -> int:
        """Number of replicas with seats that the service should have on the hosts that it has now."""
        room = self._room_now()
        # The ratio of replicas to places stays as it was set, rounded up.
        num_replicas = -(-self._replicas * room // self._room) if self._room else self._replicas
        if self.hosts.gpus and self._min_replicas < self._max_replicas:
            num_replicas = min(num_replicas, room)
        return max(self._min_replicas, min(self._max_replicas, num_replicas))

    def add(self, host: str, gpus: Sequence[str] = (), cores: int | None = None) -> None:
        """Take in another host of the service."""
        self.hosts = self.hosts.with_host(host, gpus, cores)
        self._cluster.tell_change()

    def scale(self, replicas: int) -> None:
        """Change the number of replicas on the present hosts, and the bounds if they exclude it.

        Raises:
            ConfigError: the number is out of range, or there are too few GPUs.
        """
        room = self._room_now()
        if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= _MOST:
            raise ConfigError(f"the number of replicas is set to {replicas!r}", hint=f"choose one from 1 to {_MOST}")
        if self.hosts.gpus and replicas > room:
            raise ConfigError(f"the hosts have GPUs for {room} replicas, not for {replicas}", hint="add hosts first")
        # Fixed bounds follow the number; others are widened to include it.
        is_fixed = self._min_replicas == self._max_replicas
        self._replicas, self._room = replicas, room
        self._min_replicas = replicas if is_fixed else min(self._min_replicas, replicas)
        self._max_replicas = replicas if is_fixed else max(self._max_replicas, replicas)

    def free(self, index: int) -> None:
        """Free the seat of a replica that has stopped and is not replaced."""
        self._taken.pop(index, None)

    def _room_now(self) -> int:
        """Return how many replicas have room: as GPUs allow, or with one place on each host."""
        living_hosts = [host for host in self.hosts.names if _stays(host, self._cluster)]
        places = [
            len(self.hosts.gpus.get(host, ())) // self._size.gpus if self.hosts.gpus else 1 for host in living_hosts
        ]
        # As if any places could make up a replica; lowered below.
        room = sum(places) // self._size.hosts
        # A replica's hosts all differ, so a host counts at most once for each replica.
        while sum(min(room, num_places) for num_places in places) < room * self._size.hosts:
            room -= 1
        return room

    def take(self, index: int) -> Seat:
        """Return the seat of the replica with an index: its own as long as its hosts live, else a free one.

        Raises:
            ConfigError: no host is left, or none has enough free GPUs.
        """
        # Its own places count as free while another seat is sought.
        seat = self._taken.pop(index, None)
        if seat is None or not all(_stays(part.host, self._cluster) for part in seat.parts):
            seat = self._free()
        self._taken[index] = seat
        return seat

    def _free(self) -> Seat:
        """Return the first free places on the living hosts with the fewest replicas."""
        living_hosts = _living(self.hosts, self._cluster)
        parts = [part for seat in self._taken.values() for part in seat.parts]
        used_places = {host: {part.place for part in parts if part.host == host} for host in living_hosts}
        seats: list[Seat] = []
        for host in sorted(living_hosts, key=lambda host: len(used_places[host])):
            # One of these numbers is free, as there are fewer taken seats than numbers.
            place = next(number for number in range(len(self._taken) + 1) if number not in used_places[host])
            gpus = self.hosts.gpus.get(host)
            if gpus is None or (place + 1) * self._size.gpus <= len(gpus):
                seats.append(Seat(host=host, place=place))
            if len(seats) == self._size.hosts:
                return replace(seats[0], other_seats=tuple(seats[1:]))
        lost_hosts = ", ".join(host for host in self.hosts.names if not _stays(host, self._cluster))
        shortage = "no host has" if self._size.hosts == 1 else f"fewer than {self._size.hosts} hosts have"
        raise ConfigError(
            f"{shortage} room for another replica{f'; gone are {lost_hosts}' if lost_hosts else ''}",
            hint="give the service more hosts in --placement, or fewer replicas",
        )


class ReplicaBounds(Protocol):
    """Settings of a service whose number of replicas has bounds; 0 stands for `replicas`."""

    @property
    def replicas(self) -> int: ...
    @property
    def min_replicas(self) -> int: ...
    @property
    def max_replicas(self) -> int: ...


def check_bounds(config: ReplicaBounds, prefix: str) -> None:
    """Check that the number of replicas is within its bounds.

    Raises:
        ConfigError: it is not.
    """
    min_replicas, max_replicas = config.min_replicas or config.replicas, config.max_replicas or config.replicas
    if not min_replicas <= config.replicas <= max_replicas:
        raise ConfigError(
            f"{prefix}replicas is {config.replicas}, and not from {min_replicas} to {max_replicas}",
            hint=f"change {prefix}min-replicas or {prefix}max-replicas",
        )


def ranks_by_host(ranks: int, hosts: ServiceHosts, cluster: Cluster) -> dict[str, int]:
    """Split the ranks of one replica evenly over as many of the living hosts as possible, in their order.

    Without GPUs, other hosts of the run stand in for those that are gone.

    Raises:
        ConfigError: they do not fit on the hosts that are left.
    """
    living_hosts = _living(hosts, cluster)
    for count in range(len(living_hosts), 0, -1):
        ranks_per_host = ranks // count
        roomy_hosts = [
            host for host in living_hosts if host not in hosts.gpus or ranks_per_host <= len(hosts.gpus[host])
        ]
        if ranks % count == 0 and len(roomy_hosts) >= count:
            return dict.fromkeys(roomy_hosts[:count], ranks_per_host)
    lost_hosts = ", ".join(host for host in hosts.names if host in cluster.lost_hosts)
    raise ConfigError(
        f"{ranks} ranks do not fit on the hosts {', '.join(living_hosts) or 'that are left'}"
        + (f"; gone are {lost_hosts}" if lost_hosts else ""),
        hint="start the same command again with other hosts or fewer --trainer.ranks: it resumes from its checkpoint",
    )


def _living(hosts: ServiceHosts, cluster: Cluster) -> list[str]:
    """Return the hosts of a service that live or, if none does and it needs no GPUs, all others of the run."""
    living = [host for host in hosts.names if _stays(host, cluster)]
    if living or hosts.gpus:
        return living
    return [host for host in cluster.hosts if host != THIS_HOST and _stays(host, cluster)] or [THIS_HOST]


def _stays(host: str, cluster: Cluster) -> bool:
    return host not in cluster.lost_hosts and host not in cluster.leaving
