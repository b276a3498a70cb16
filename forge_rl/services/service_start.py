"""Where a service starts, and within what time."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.seats import ServiceHosts


@dataclass(frozen=True, kw_only=True)
class ServiceStart:
    """Where a service starts, and within what time.

    start = ServiceStart(cluster=cluster, faults=faults, deadline_s=300)
    """

    cluster: Cluster
    faults: Faults
    """Records the service's calls and failures."""
    deadline_s: float
    """Timeout of the start, also of processes that replace dead ones."""
    hosts: ServiceHosts | None = None
    """Hosts of the processes; this one by default."""
    name: str = ""
    """Name of the service; "" for the usual one."""
