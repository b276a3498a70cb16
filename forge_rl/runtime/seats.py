"""Which host each replica of a service starts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_rl.errors import ConfigError
from forge_rl.runtime.cluster import THIS_HOST, Cluster


@dataclass(frozen=True, kw_only=True)
class ServiceHosts:
    """Hosts that a service has, and its part of each."""

    names: tuple[str, ...] = (THIS_HOST,)
    """Names of the hosts, in the order in which replicas are spread."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs that the service may use on each host, as CUDA_VISIBLE_DEVICES names them there; none on CPU."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """CPU cores that the service may use on each host; all of this machine's if a host is missing."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A replica's place on a host."""

    host: str
    place: int
    """Number of the place on the host; replicas at places 0, 1 and so on use successive GPUs."""


class Seats:
    """Spreads the replicas of a service over its hosts, and moves them when a host is gone.

    If all are gone, and it needs no GPUs, they move to other hosts of the run.

        seats = Seats(cluster, ServiceHosts(names=("a", "b")))
        host = seats.take(0).host

    Args:
        cluster: knows which hosts are gone.
        hosts: the service's hosts.
        gpus_each: GPUs of a replica.
    """

    def __init__(self, cluster: Cluster, hosts: ServiceHosts, *, gpus_each: int = 1) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._gpus_each = gpus_each
        self._taken: dict[int, Seat] = {}

    def take(self, index: int) -> Seat:
        """Return the seat of the replica with an index: its own as long as the host lives, else a free one.

        Raises:
            ConfigError: no host is left, or none has enough free GPUs.
        """
        seat = self._taken.pop(index, None)
        if seat is None or seat.host in self._cluster.lost:
            seat = self._free()
        self._taken[index] = seat
        return seat

    def _free(self) -> Seat:
        """Return the first free seat on the living host with the fewest replicas."""
        living = _living(self._hosts, self._cluster)
        taken = {host: {seat.place for seat in self._taken.values() if seat.host == host} for host in living}
        for host in sorted(living, key=lambda each: len(taken[each])):
            place = next(number for number in range(len(self._taken) + 1) if number not in taken[host])
            gpus = self._hosts.gpus.get(host)
            if gpus is None or (place + 1) * self._gpus_each <= len(gpus):
                return Seat(host=host, place=place)
        gone = ", ".join(host for host in self._hosts.names if host in self._cluster.lost)
        raise ConfigError(
            f"no host has room for another replica{f'; gone are {gone}' if gone else ''}",
            hint="give the service more hosts in --placement, or fewer replicas",
        )


def ranks_by_host(ranks: int, hosts: ServiceHosts, cluster: Cluster) -> dict[str, int]:
    """Split the ranks of one replica evenly over as many of the living hosts as possible, in their order.

    Without GPUs, other hosts of the run stand in for those that are gone.

    Raises:
        ConfigError: they do not fit on the hosts that are left.
    """
    living = _living(hosts, cluster)
    for count in range(len(living), 0, -1):
        each = ranks // count
        room = [host for host in living if host not in hosts.gpus or each <= len(hosts.gpus[host])]
        if ranks % count == 0 and len(room) >= count:
            return dict.fromkeys(room[:count], each)
    gone = ", ".join(host for host in hosts.names if host in cluster.lost)
    raise ConfigError(
        f"{ranks} ranks do not fit on the hosts {', '.join(living) or 'that are left'}"
        + (f"; gone are {gone}" if gone else ""),
        hint="start the same command again with other hosts or fewer --trainer.ranks: it resumes from its checkpoint",
    )


def _living(hosts: ServiceHosts, cluster: Cluster) -> list[str]:
    """Return the hosts of a service that live or, if none does and it needs no GPUs, all others of the run."""
    living = [host for host in hosts.names if host not in cluster.lost]
    if living or hosts.gpus:
        return living
    return [host for host in cluster.hosts if host != THIS_HOST] or [THIS_HOST]
