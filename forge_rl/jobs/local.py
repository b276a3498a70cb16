"""`--job local`: the controller's host alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.runtime.job_protocol import JobListener

if TYPE_CHECKING:
    from monarch.actor import HostMesh


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """Only the controller's host."""

    def describe(self, command: Sequence[str]) -> str:
        """Return one line that says where the run's processes start."""
        return "all processes of the run start on this machine"

    @contextlib.asynccontextmanager
    async def open(self, listener: JobListener) -> AsyncIterator[Mapping[str, HostMesh]]:
        """Yield no hosts."""
        yield {}
