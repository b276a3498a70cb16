"""One replica of a service, as the controller knows it."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.runtime.cluster import THIS_HOST
from forge_rl.runtime.link import Link

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


class State(enum.Enum):
    """Where a replica stands; only one that serves is routed to."""

    STARTING = "starting"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    """It died, and will be replaced."""
    GIVEN_UP = "given up"
    """It died, and will not be replaced."""


@dataclass(kw_only=True)
class Replica:
    """What is routed to, restarted and replaced as one; the one that replaces it is another Replica."""

    index: int
    incarnation: int
    """How many replicas of this index came before."""
    ranks: int
    mesh_name: str
    mesh: ProcMesh
    actor: Any  # Monarch's actor mesh has no useful type; typed handles stand before it
    link: Link
    log: Path
    host: str = THIS_HOST
    state: State = State.STARTING
    serving_since: float = 0.0
    in_flight: int = 0
    held: int = 0
    """What else it works for or keeps, such as worlds between two steps; counts for routing as a request does."""
    busy_s: float = 0.0
    busy_since: float = 0.0
    began: float = 0.0
    """When it last began to be busy."""
    death: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with the cause, as soon as one of its processes has ended or hangs."""
    watched: list[int] = field(default_factory=list)
    """File descriptors of its processes that run."""
    roots: dict[int, int] = field(default_factory=dict)
    """Its processes on this machine: by number, with the start of each."""
    family: dict[int, int] = field(default_factory=dict)
    """Those and their descendants, when they were last looked at."""
    stopped_polls: int = 0

    @property
    def alive(self) -> bool:
        """Whether all its processes run, as far as is known."""
        return not self.death.done()

    @property
    def serving(self) -> bool:
        """Whether it is routed to."""
        return self.state is State.SERVING

    @property
    def load(self) -> int:
        """What routing looks at."""
        return self.in_flight + self.held
